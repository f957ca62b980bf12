"""What can be known of a device without one: every line of `test_gpu.py` runs, and copies from it are waited for."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlkit.packing import pack
from rlkit.parallel.attention import plan, segments
from rlkit.parallel.context import plan_layout
from rlkit.settings import Parallel
from rlkit.types import Trajectory


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_line_runs_without_a_device() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_gpu.py"]
    env = os.environ | {"RLKIT_GPU_TESTS_ON": "cpu", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or "[100%]" in done.stdout
    assert "skipped" not in done.stdout


class Copies(TorchFunctionMode):
    """Notes for every `Tensor.to` whether the host goes on before the copy has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead: set[bool] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.to:
            self.ahead.add((kwargs or {}).get("non_blocking", False))
            args = (args[0], "cpu", *args[2:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "ahead"), [("cpu", False), ("cuda:1", True)])
def test_a_batch_that_returns_is_waited_for(device: str, ahead: bool) -> None:
    """torch copies to pinned host memory when asked not to block: what is read there at once may be old."""
    batch = pack([[Trajectory([1, 2], [3], [True], [0.0], [0])]])
    with Copies() as copies:
        batch.to(device)
        plan(segments(batch)).to(device)
        for ulysses in (False, True):
            sizes = Parallel(cp=2, ulysses=ulysses)
            plan_layout(batch, SimpleNamespace(sizes=sizes, cp_rank=1, group=str), device=torch.device(device))
    assert copies.ahead == {ahead}
