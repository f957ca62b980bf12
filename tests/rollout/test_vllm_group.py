"""vLLM's process group joins on the trainer's GPU, of CUDA as far as it can be known without one: a thread's device."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkit.rollout.engines.servers.api import Facts
from rlkit.rollout.engines.vllm import weights


class Devices(threading.local):
    """The current device, which in CUDA is one of each thread, 0 in a new one."""

    now = 0

    def set(self, device: int) -> None:
        self.now = device


async def nothing(*_: Any) -> None:
    return None


async def test_the_group_is_joined_and_used_on_the_gpu_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, seen = Devices(), []
    note = lambda name: lambda *_, **__: seen.append((name, threading.current_thread().name, devices.now))
    nccl = SimpleNamespace(
        unique_id=lambda: b"id", init_rank=note("join"), all_reduce=note("sum"), broadcast=note("broadcast")
    )
    cuda = SimpleNamespace(nccl=nccl, synchronize=lambda: None)
    monkeypatch.setattr(weights, "torch", SimpleNamespace(cuda=cuda, zeros=lambda *_, **__: None))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices.now)
    monkeypatch.setattr(torch.cuda, "set_device", devices.set)
    devices.set(1)  # --device cuda:1
    server: Any = SimpleNamespace(url="", life=0, facts=Facts(), post=nothing, api=SimpleNamespace(stamp=nothing))
    tensor: Any = SimpleNamespace(dtype=torch.float32, shape=(2,), nbytes=8, to=lambda _: torch.zeros(2))
    tensor.detach = lambda: tensor
    await weights.FromGroup().send([server], [("w", tensor)], version=1)
    assert seen == [(name, "rlkit-call", 1) for name in ("join", "sum", "broadcast")]
