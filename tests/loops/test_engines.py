"""Which engines the loops that sample take."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace

import pytest
import torch
from small import async_grpo, call, small_model, tokenizer, unchanged

from rlkit.data.prompts import Prompt
from rlkit.loops.grpo import grpo
from rlkit.loops.ppo import ppo
from rlkit.loops.rl import Task, rl
from rlkit.model.forward import Policy
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.shared import SharedEngine
from rlkit.settings import Rollouts, Schedule
from rlkit.testing import FakeEngine


class Generates:
    """A judge's engine: it takes no weights."""

    generate = FakeEngine().generate


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loop", [grpo, async_grpo, ppo])
def test_an_engine_that_cannot_be_trained_with_is_refused_before_anything_runs(loop, shared, tmp_path):
    only = Generates()
    model = small_model()
    models = [model] * (2 if loop is ppo else 1)
    engine = SharedEngine(only) if shared else only
    training = call(loop, *models, None, engine, prompts=[], score=unchanged, output=tmp_path / "run", steps=1)
    with pytest.raises(TypeError, match="the engine Generates has no abort and no update_weights: it can generate"):
        asyncio.run(training)
    assert not (tmp_path / "run").exists()


def test_overlap_is_refused_for_an_engine_that_reads_the_weights_that_train(tmp_path):
    model = small_model()
    options = {"prompts": [], "score": unchanged, "output": tmp_path / "run", "steps": 1}
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


async def odd_answers(_prompt, trajectories):
    return [replace(t, reward=float(t.ids[0] % 2)) for t in trajectories]


def run_on(make_engine, loop, output):
    """The trained model, the engine, and the metrics of each of three steps at a high learning rate."""
    model = small_model()
    engine = make_engine(model)
    options = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 4, "lr": 1e-2, "steps": 3, "output": output}
    prompts = [Prompt(ids=[1, 2, 3 + i], row={}, index=i) for i in range(4)]
    asyncio.run(call(loop, model, tokenizer(), engine, prompts=prompts, score=odd_answers, **options))
    return model, engine, [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_local_engine_on_a_copy_samples_from_the_weights_that_train(tmp_path):
    truth, _, in_place = run_on(LocalEngine, grpo, tmp_path / "shared")
    assert not any("sync/bytes" in line for line in in_place), "nothing is sent"
    model, engine, lines = run_on(lambda m: LocalEngine(copy.deepcopy(m)), grpo, tmp_path / "copy")
    assert max(line["mismatch/abs_max"] for line in lines) < 1e-4
    assert [line["sync/bytes"] for line in lines] == [sum(x.nbytes for x in model.parameters())] * 3
    for x, y, z in zip(model.parameters(), engine.model.parameters(), truth.parameters(), strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, z)


def test_a_local_engine_on_a_copy_samples_while_a_step_trains(tmp_path):
    model, engine, lines = run_on(lambda m: LocalEngine(copy.deepcopy(m)), async_grpo, tmp_path / "run")
    assert lines[0]["staleness/max"] == 0
    for x, y in zip(model.parameters(), engine.model.parameters(), strict=True):
        assert torch.equal(x, y)


def test_a_local_engine_refuses_the_weights_of_another_model_and_keeps_its_own():
    engine, other = LocalEngine(small_model()), small_model(hidden=16)
    before = [p.clone() for p in engine.model.parameters()]
    for weights, message in (
        (stream_weights(other), "unknown weight names: .*embed_tokens"),
        (list(stream_weights(other))[1:], "the new weights lack .*embed_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.update_weights(weights, version=1))
    assert engine.version == 0
    assert all(map(torch.equal, before, engine.model.parameters()))


def test_a_local_engine_leaves_the_weights_of_its_own_model_unread():
    model = small_model()
    weights = stream_weights(model, dtype=torch.bfloat16)  # copied into the model, they would round it
    before = [p.clone() for p in model.parameters()]
    asyncio.run(LocalEngine(model).update_weights(weights, version=1))
    assert all(map(torch.equal, before, model.parameters()))
    assert len(list(weights)) == len(before)
