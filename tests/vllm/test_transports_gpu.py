"""Weights through CUDA IPC and NCCL: an unrelated process takes them as vLLM 0.32 does. Needs GPUs, and no vLLM."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from rlkit.rollout.engines.servers.api import Facts
from rlkit.rollout.engines.vllm.api import VLLMApi
from rlkit.rollout.engines.vllm.weights import FromGroup, _handles

pytestmark = pytest.mark.gpu

# as IPCWeightTransferEngine.receive_weights without packing
OPENS = """
import base64, pickle, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
torch.cuda.init()
uuid = str(torch.cuda.get_device_properties(0).uuid)
for handle in pickle.loads(base64.b64decode(sys.stdin.read())):
    args = list(handle[uuid])
    args[6] = 0
    tensor = rebuild_cuda_tensor(*args)
    print(tuple(tensor.shape), tensor.double().sum().item())
"""
# as PyNcclCommunicator.from_unique_id_bytes and NCCLWeightTransferEngine, on the second GPU
JOINS = """
import base64, json, sys, torch
torch.cuda.set_device(1)
uid, shapes = base64.b64decode(sys.argv[1]), json.loads(sys.argv[2])
comm = torch.cuda.nccl.init_rank(2, uid, 1)
torch.cuda.nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[comm])
for shape in shapes:
    tensor = torch.empty(shape, device="cuda")
    torch.cuda.nccl.broadcast([tensor], 0, comms=[comm])
    torch.cuda.synchronize()
    print(tuple(shape), tensor.double().sum().item())
"""


def told(named: list[tuple[str, torch.Tensor]]) -> list[str]:
    return [f"{tuple(x.shape)} {x.double().sum().item()}" for _, x in named]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_opens_the_handles() -> None:
    named = [("a", torch.randn(300, 7, device="cuda")), ("b", torch.randn(5, device="cuda"))]
    command = [sys.executable, "-c", OPENS]
    done = subprocess.run(command, input=_handles(named), text=True, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == told(named)


class Receiver:
    """A server of one rank: it joins when it is told the id."""

    url, life, facts, api = "http://receiver", 0, Facts(), VLLMApi()

    def __init__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self._shapes = json.dumps([[*x.shape] for _, x in named])
        self.process: Any = None

    async def post(self, path: str, body: Any) -> None:
        if path == "/init_weight_transfer_engine":
            uid = body["init_info"]["nccl_unique_id_b64"]
            command = [sys.executable, "-c", JOINS, uid, self._shapes]
            self.process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
async def test_another_process_joins_the_group() -> None:
    named = [("a", torch.randn(300, 7, device="cuda")), ("b", torch.randn(5, device="cuda"))]
    receiver: Any = Receiver(named)
    transport = FromGroup()
    await transport.send([receiver], named, version=1)
    out, _ = await asyncio.wait_for(receiver.process.communicate(), 120)
    await transport.close()
    assert out.decode().splitlines() == told(named)
