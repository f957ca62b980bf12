"""Which engines the loops that sample take."""

from __future__ import annotations

import asyncio

import pytest

from rlkit.loops.async_grpo import async_grpo
from rlkit.loops.grpo import grpo
from rlkit.loops.ppo import ppo
from rlkit.rollout.engines.vllm import VLLM
from rlkit.rollout.shared import SharedEngine
from rlkit.types import SamplingParams


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loop", [grpo, async_grpo, ppo])
def test_an_engine_that_cannot_be_trained_with_is_refused_before_anything_runs(loop, shared, tmp_path):
    vllm = VLLM("http://127.0.0.1:9", model="m")
    options = {"critic_lr_at": lambda step: 1e-3} if loop is ppo else {}
    models = [None] * (3 if loop is ppo else 2)  # policy, critic, tokenizer: they are not looked at
    training = loop(
        *models, SharedEngine(vllm) if shared else vllm, [], score=None, folder=tmp_path / "run", steps=1,
        params=SamplingParams(), lr_at=lambda step: 1e-3, **options,
    )  # fmt: skip
    with pytest.raises(TypeError, match="the engine VLLM has no abort and no update_weights: it can generate"):
        asyncio.run(training)
    assert not (tmp_path / "run").exists()
