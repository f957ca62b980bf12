"""The stream of groups: none lost, none too old, no task left behind, for any timing."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from dataclasses import replace
from functools import cache, partial

import nightly
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ticking import Ticking, prompt_at, small_model

from rlkit.rewards.episodes import named
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.groups import rollout, single_turn
from rlkit.rollout.limits import success_between
from rlkit.rollout.stream import GroupStream, continue_aborted
from rlkit.types import SamplingParams

PARAMS = SamplingParams(max_new_tokens=30)
DELAYS = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def stream_of(engine, prompts, **changes):
    options = {
        "generate": engine.generate, "abort": engine.abort, "params": PARAMS, "group_size": 2, "groups_per_step": 3,
        "seed": 0, "continued": partial(continue_aborted, positional_noise=True),
    }  # fmt: skip
    return GroupStream(prompts, **options | changes)


def place(group):
    return group[0].prompt_ids[0]


async def judged_by_place(prompt, group):
    """All samples are right at multiples of 3 (all but the first at multiples of 6), else none."""
    right = [prompt.index % 3 == 0] * len(group)
    if prompt.index % 6 == 0:
        right[0] = False
    return [replace(t, reward=float(r)) for t, r in zip(group, right, strict=True)]


@given(delays=DELAYS, need=st.integers(1, 4), steps=st.integers(1, 3))
def test_kept_groups_are_the_first_that_pass_and_no_extra_prompt_is_sampled(delays, need, steps):
    """Sampled = kept + dropped, each written once, whatever order they complete in; and twice the same."""

    async def run(delay):
        engine, written = Ticking(delay=delay), []
        stream = stream_of(
            engine, prompt_at, groups_per_step=need, score=judged_by_place, keep=success_between(0.01, 0.99),
            on_group=lambda p, g, *, step, kept: written.append((p.index, step, kept)),
        )  # fmt: skip
        taken, dropped = [], []
        async with stream:
            for step in range(steps):
                stream.advance(version=step)
                taken.append([place(g) for g in await stream.take()])
                dropped.append(stream.num_dropped)
        return engine, written, taken, dropped

    engine, written, taken, dropped = asyncio.run(run(lambda prompt: delays[prompt[0] % len(delays)]))
    good = [p for p in range(200) if p % 6 == 0]
    assert taken == [good[i * need : (i + 1) * need] for i in range(steps)]
    last = taken[-1][-1]
    assert sorted(p for p, *_ in written) == list(range(last + 1)), "all that was sampled is written, once"
    assert {p for p, _, kept in written if kept} == {p for places in taken for p in places}
    assert {c[0][0] for c in engine.calls} == set(range(last + 1)), "and not a prompt more was sampled"
    assert [sum(s == i + 1 and not kept for _, s, kept in written) for i in range(steps)] == dropped
    assert asyncio.run(run(lambda prompt: 0))[2] == taken


@given(delays=DELAYS, need=st.integers(1, 4))
def test_prompts_that_rest_are_passed_over_and_each_outcome_is_told(delays, need):
    async def run():
        engine, outcomes = Ticking(delay=lambda prompt: delays[prompt[0] % len(delays)]), []
        stream = stream_of(
            engine, prompt_at, groups_per_step=need, score=judged_by_place, keep=lambda group: place(group) % 4 != 1,
            skip=lambda index: index % 5 == 0, index_of=lambda j: j + 1,
        )  # fmt: skip
        async with stream:
            for step in range(3):
                stream.advance(version=step)
                await stream.take()
                outcomes += stream.outcomes
        return engine, outcomes

    engine, outcomes = asyncio.run(run())
    awake = [i for i in range(1, 60) if i % 5]
    last = [i for i in awake if i % 4 != 1][3 * need - 1]
    assert sorted(i for i, _ in outcomes) == sorted({c[0][0] for c in engine.calls}) == [i for i in awake if i <= last]
    assert all(varied == (i % 6 == 0) for i, varied in outcomes)


@pytest.mark.slow
@given(
    delays=DELAYS, staleness=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0]), need=st.integers(1, 4), data=st.data()
)
def test_staleness_never_exceeds_its_budget_and_nothing_is_lost(delays, staleness, need, data):
    """Concurrent training and sampling at random speeds: token ages, backpressure and counts."""
    train = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=6))
    kept_from = data.draw(st.sampled_from([0, 2]))  # drop every second group, or none

    async def run():
        engine, dropped = Ticking(delay=lambda prompt: delays[prompt[0] % len(delays)]), []
        stream = stream_of(
            engine, prompt_at, groups_per_step=need, staleness=staleness,
            keep=lambda group: not kept_from or place(group) % kept_from == 0,
            on_group=lambda p, g, *, step, kept: None if kept else dropped.append(p.index),
        )  # fmt: skip
        ages, taken = [], []
        async with stream:
            for step in range(8):
                stream.advance(version=step)
                groups = await stream.take()
                assert len(groups) == need
                taken += [place(g) for g in groups]
                ages += [step - v for g in groups for t in g for v in t.versions]
                for _ in range(train[step % len(train)]):
                    await asyncio.sleep(0)
                assert stream.progress.running + stream.progress.ready <= math.floor(staleness * need + 1e-9)
                engine.version = step + 1
            state = stream.state
        return engine, state, ages, taken, dropped

    engine, state, ages, taken, dropped = asyncio.run(run())
    assert max(ages) <= math.ceil(staleness)
    assert min(ages) >= 0
    accounted = sorted([*taken, *dropped, *(p for p, *_ in state["waiting"])])
    assert accounted == list(range(state["next"])), "every group is taken, dropped or waiting, and exactly one of them"
    assert engine.most <= 2 * need * (1 + staleness), "backpressure"
    if staleness == 0:
        assert taken == sorted(taken)
        assert set(ages) == {0}


def test_slow_groups_are_delayed_at_most_by_the_staleness_bound():
    """With a budget of 2 steps the slowest group of the first step is trained on at step 2, not earlier, not later."""

    async def run():
        engine = Ticking(delay=lambda prompt: 10**9 if prompt[0] == 1 and engine.version < 2 else 0)
        stream = stream_of(engine, prompt_at, groups_per_step=2, staleness=2.0)
        seen = []
        async with stream:
            for step in range(4):
                stream.advance(version=step)
                seen.append([place(g) for g in await stream.take()])
                await stream.pause()
                engine.version = step + 1
        return seen

    seen = asyncio.run(asyncio.wait_for(run(), 240))
    assert [1 in places for places in seen] == [False, False, True, False]


async def unequal(prompt, sample):
    """Answers of 4, 13 or 22 tokens, by the prompt."""
    return await single_turn(prompt, lambda ids: sample(ids, max_new_tokens=4 + 9 * (prompt.index % 3)))


@pytest.mark.parametrize("staleness", nightly.only([0.5, 1.0], 0.5))
def test_partial_rollout_equals_sampling_in_one_go(staleness):
    """Greedy, under the same weights: interrupted at every step, the tokens are those of an uninterrupted rollout."""

    async def run():
        greedy = replace(PARAMS, temperature=0.0)
        async with LocalEngine(small_model(), max_batch=64, eos_token_ids=()) as engine:
            whole = await rollout(
                [prompt_at(p) for p in range(12)], generate=engine.generate, params=greedy, group_size=1, seed=0,
                env=unequal,
            )  # fmt: skip
            got, interrupted = {}, 0
            stream = stream_of(engine, prompt_at, params=greedy, group_size=1, staleness=staleness, env=unequal)
            async with stream:
                for step in range(4):
                    stream.advance(version=step)
                    for group in await stream.take():
                        got[place(group)] = group
                    await stream.pause()
                    assert engine.progress[:2] == (0, 0)
                    interrupted += stream.progress.running
                    await engine.update_weights(version=step + 1)
        return whole, got, interrupted

    whole, got, interrupted = asyncio.run(run())
    assert interrupted >= 3
    assert len(got) == 12
    spanning = 0
    for p, (t,) in got.items():
        if p < 12:
            (expected,) = whole[p]
            assert list(t.ids) == expected.ids
            assert list(t.logp) == pytest.approx(expected.logp, abs=1e-4)
            spanning += len(set(t.versions)) > 1
    assert spanning >= 1, "some went on in a later step"


@pytest.mark.slow
def test_log_probs_are_those_of_the_version_that_made_each_token():
    model = copy.deepcopy(small_model())
    weights = []

    async def run():
        groups = []
        async with LocalEngine(model, max_batch=64, eos_token_ids=()) as engine:
            stream = stream_of(engine, prompt_at, staleness=1.0, env=unequal)
            async with stream:
                for step in range(4):
                    weights.append(copy.deepcopy(model.state_dict()))
                    stream.advance(version=step)
                    groups += await stream.take()
                    await stream.pause()
                    with torch.no_grad():
                        for p in model.parameters():
                            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(step)))
                    await engine.update_weights(version=step + 1)
        return groups

    groups = asyncio.run(run())
    truth = copy.deepcopy(small_model())
    spanning = 0
    for t in (t for group in groups for t in group):
        spanning += len(set(t.versions)) > 1
        assert list(t.versions) == sorted(t.versions)
        for version in set(t.versions):
            truth.load_state_dict(weights[version])
            with torch.no_grad():
                logits = truth(input_ids=torch.tensor([[*t.prompt_ids, *t.ids]])).logits[0, 1:-1]
            logp = logits.log_softmax(-1).gather(1, torch.tensor(t.ids)[:, None])[:, 0].tolist()
            made = [i for i, v in enumerate(t.versions) if v == version]
            assert [t.logp[i] for i in made] == pytest.approx([logp[i] for i in made], abs=1e-4)
    assert spanning >= 2


@cache
def shared_engine():
    return LocalEngine(small_model(), max_batch=4)


def journal_tokens(folder):
    return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]


@pytest.mark.slow
@given(ticks=st.integers(0, 60), staleness=st.sampled_from([0.0, 1.0]))
def test_cancelled_at_any_await_leaves_no_task_and_nothing_unwritten(tmp_path_factory, ticks, staleness):
    folder, engine = tmp_path_factory.mktemp("journal"), shared_engine()

    async def score(prompt, group):
        await asyncio.sleep(0)
        return [replace(t, reward=float(len(t.ids))) for t in group]

    async def train(engine, stream):
        async with stream:
            for step in range(50):
                stream.advance(version=step)
                await stream.take()
                await stream.pause()
                await engine.update_weights(version=step + 1)

    async def run():
        await engine.update_weights(version=0)
        before = engine.progress.num_tokens
        stream = stream_of(engine, prompt_at, score=score, staleness=staleness, journal=folder)
        task = asyncio.create_task(train(engine, stream))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert asyncio.all_tasks() <= {asyncio.current_task(), engine._driver}
        assert engine.progress[:2] == (0, 0)
        written = journal_tokens(folder)
        assert sum(len(row["ids"]) for row in written) == engine.progress.num_tokens - before

    asyncio.run(run())


def test_an_error_in_an_environment_reaches_take_and_ends_the_rest():
    async def train(stream):
        async with stream:
            for step in range(3):
                stream.advance(version=step)
                await stream.take()

    async def env(prompt, sample):
        if prompt.index == 4:
            raise ZeroDivisionError("no luck")
        return await single_turn(prompt, sample)

    async def run():
        engine = Ticking(length=lambda prompt, seed: 25)
        with pytest.raises(ZeroDivisionError):
            await train(stream_of(engine, prompt_at, env=env, staleness=1.0))
        assert engine.running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@pytest.mark.parametrize("part", ["env", "named", "score"])
def test_a_cancellation_that_leaks_from_the_users_code_ends_the_run(part):
    """`take` waited for the group for ever: its task had ended as cancelled, which is no Exception."""

    async def leaks(prompt):
        if prompt.index == 4:
            task = asyncio.create_task(asyncio.sleep(60))
            await asyncio.sleep(0)
            task.cancel()
            await task

    async def env(prompt, sample):
        await leaks(prompt)
        return await single_turn(prompt, sample)

    async def score(prompt, group):
        await leaks(prompt)
        return group

    async def run():
        engine = Ticking(length=lambda prompt, seed: 25)
        options = {"score": score} if part == "score" else {"env": named(env, env) if part == "named" else env}
        async with asyncio.timeout(60):
            async with stream_of(engine, prompt_at, staleness=1.0, **options) as stream:
                for step in range(3):
                    stream.advance(version=step)
                    await stream.take()

    cause = "a task that was cancelled"
    if part == "named":
        cause = rf"test_stream\.py:.*env failed on row 5: RuntimeError: .*{cause}.*\(test_stream\.py, line"
    with pytest.raises(RuntimeError, match=cause):
        asyncio.run(run())


def test_too_many_dropped_groups_are_an_error_with_the_success_rates():
    async def run():
        stream = stream_of(
            Ticking(),
            prompt_at,
            score=judged_by_place,
            keep=success_between(0.3, 0.4),
            max_dropped=9,
            groups_per_step=1,
        )
        async with stream:
            stream.advance(version=0)
            await stream.take()

    with pytest.raises(RuntimeError, match=r"10 groups were dropped .* between 0 and 1, 0\.\d+ on average"):
        asyncio.run(run())


def test_taking_twice_without_advance_raises():
    async def run():
        async with stream_of(Ticking(), prompt_at) as stream:
            stream.advance(version=0)
            await stream.take()
            await stream.take()

    with pytest.raises(RuntimeError, match="call advance"):
        asyncio.run(asyncio.wait_for(run(), 240))


def test_a_dead_engine_does_not_block_exit():
    async def generate(prompt_ids, *, params, rid=None):
        raise ConnectionError("refused")

    async def abort(rid=None):
        raise ConnectionError("refused")

    async def run():
        async with GroupStream(
            prompt_at, generate=generate, abort=abort, params=PARAMS, group_size=2, groups_per_step=2, seed=0
        ) as stream:
            stream.advance(version=0)
            await stream.take()

    with pytest.raises(ConnectionError, match="refused"):
        asyncio.run(asyncio.wait_for(run(), 240))


@given(delays=DELAYS, stop_at=st.integers(1, 5), staleness=st.sampled_from([0.0, 0.5, 2.0]))
def test_a_stream_resumes_from_its_state(tmp_path_factory, delays, stop_at, staleness):
    """A checkpoint after every step, then killed: all groups are trained on once, and none is sampled twice."""
    folder, made = tmp_path_factory.mktemp("journal"), {}

    def note():
        made.update({tuple(row["key"]): row["ids"] for row in journal_tokens(folder)})

    async def run(engine, first, last, state):
        written, taken = [], []
        stream = stream_of(
            engine, prompt_at, staleness=staleness, journal=folder, version=first, state=state,
            on_group=lambda p, g, *, step, kept: written.append(p.index),
        )  # fmt: skip
        async with stream:
            for step in range(first, last):
                stream.advance(version=step)
                groups = await stream.take()
                assert [prompt.ids for prompt in stream.prompts] == [list(group[0].prompt_ids) for group in groups]
                taken += [(place(g), g) for g in groups]
                await stream.pause()
                engine.version = step + 1
            state = json.loads(json.dumps(stream.state))
            note()
            stream.saved(state)
        note()  # also what was in flight at the end
        return written, taken, state

    delay = lambda prompt: delays[prompt[0] % len(delays)]
    length = lambda prompt, seed: 5 + prompt[0] % 7
    engine = Ticking(delay=delay, length=length)
    wrote, taken, state = asyncio.run(run(engine, 0, stop_at, None))
    wrote_more, taken_more, _ = asyncio.run(run(engine, stop_at, 8, state))
    places = [p for p, _ in taken + taken_more]
    assert len(set(places)) == len(places) == 24
    assert all(len(set(w)) == len(w) for w in (wrote, wrote_more)), "no group completes twice"
    assert engine.num_tokens == sum(map(len, made.values())), "and no token is sampled twice"
    for _, group in taken + taken_more:
        for t in group:
            assert len(t.ids) == 5 + t.prompt_ids[0] % 7 - 2
