"""Which engines the loops that sample take."""

from __future__ import annotations

import asyncio

import pytest
import torch
from small import async_grpo, call, small_model

from rlkit.loops.grpo import grpo
from rlkit.loops.ppo import ppo
from rlkit.loops.rl import Task, rl
from rlkit.model.forward import Policy
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.vllm import VLLM
from rlkit.rollout.shared import SharedEngine
from rlkit.settings import Rollouts, Schedule


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loop", [grpo, async_grpo, ppo])
def test_an_engine_that_cannot_be_trained_with_is_refused_before_anything_runs(loop, shared, tmp_path):
    vllm = VLLM("http://127.0.0.1:9", model="m")
    model = small_model()
    models = [model] * (2 if loop is ppo else 1)
    engine = SharedEngine(vllm) if shared else vllm
    training = call(loop, *models, None, engine, prompts=[], score=None, output=tmp_path / "run", steps=1)
    with pytest.raises(TypeError, match="the engine VLLM has no abort and no update_weights: it can generate"):
        asyncio.run(training)
    assert not (tmp_path / "run").exists()


def test_overlap_is_refused_for_an_engine_that_reads_the_weights_that_train(tmp_path):
    model = small_model()
    options = {"prompts": [], "score": None, "output": tmp_path / "run", "steps": 1}
    training = call(async_grpo, model, None, LocalEngine(model), **options)
    with pytest.raises(ValueError, match="overlap needs an engine with weights of its own, and LocalEngine reads"):
        asyncio.run(training)
    assert not (tmp_path / "run").exists()


def test_a_state_that_no_checkpoint_holds_is_refused(tmp_path):
    model = small_model()
    policy, schedule = Policy(model), Schedule(tmp_path / "run", steps=1)
    state = {"model": model, "optimizer": None, "baseline": torch.zeros(1)}
    task, nothing = Task([], None), lambda *_: None
    training = rl(
        policy, None, LocalEngine(model), task, Rollouts(), schedule, prepare=nothing, update=nothing, state=state
    )
    with pytest.raises(
        ValueError, match=r"state holds model, optimizer and reference, got baseline: .* a buffer of a module"
    ):
        asyncio.run(training)
    assert not (tmp_path / "run").exists()
