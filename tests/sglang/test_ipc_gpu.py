"""Weights through CUDA IPC: what SGLang unpickles, opened by an unrelated process as SGLang opens it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rlkit.rollout.engines.servers.tensors import flatten
from rlkit.rollout.engines.sglang.weights import _handle

pytestmark = pytest.mark.gpu

# SGLang replaces torch's rebuild_cuda_tensor by one that finds the device by its UUID (srt/utils/patch_torch.py), and
# unpickles from an allow list that has this function by its name in torch.
RECEIVER = """
import base64, pickle, sys
import torch
from torch.multiprocessing import reductions
original = reductions.rebuild_cuda_tensor
def by_uuid(*args):
    assert isinstance(args[6], str), args[6]
    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    return original(*args[:6], devices[args[6]], *args[7:])
reductions.rebuild_cuda_tensor = by_uuid
torch.cuda.init()
bucket = pickle.loads(base64.b64decode(sys.stdin.read()))
flat = bucket["flattened_tensor"]
assert flat.is_cuda
for place in bucket["metadata"]:
    tensor = flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
    print(place.name, tuple(place.shape), tensor.double().sum().item())
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_reads_the_bucket() -> None:
    named = [("a", torch.randn(300, 7, device="cuda")), ("b", torch.randn(5, device="cuda"))]
    bucket = flatten(named, None)
    command = [sys.executable, "-c", RECEIVER]
    done = subprocess.run(command, input=_handle(bucket), text=True, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in lines] == ["a (300, 7)", "b (5,)"]
    for (_, total), (_, tensor) in zip(lines, named, strict=True):
        assert float(total) == pytest.approx(tensor.double().sum().item(), abs=1e-12)
