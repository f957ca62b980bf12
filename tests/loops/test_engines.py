"""Which engines the loops that sample take."""

from __future__ import annotations

import asyncio

import pytest
from small import async_grpo

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.loops.ppo import ppo
from rlkit.model.forward import prepare
from rlkit.rollout.engines.local import LocalEngine
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


def test_overlap_is_refused_for_an_engine_that_reads_the_weights_that_train(tmp_path):
    model = prepare(
        tiny_model(tiny_tokenizer(), hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32)
    )
    training = async_grpo(
        model, None, LocalEngine(model), [], score=None, folder=tmp_path / "run", steps=1, params=SamplingParams(),
        lr_at=lambda step: 1e-3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="overlap needs an engine with weights of its own, and LocalEngine reads"):
        asyncio.run(training)
    assert not (tmp_path / "run").exists()
