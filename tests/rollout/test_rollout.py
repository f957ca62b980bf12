"""Groups: the noise of each sample, rewards of episodes in pieces, clean-up after an error."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Script, check_exact, prompt_of, tokenizer_with
from ticking import Ticking, prompt_at, small_model

from rlkit.data.prompts import Prompt
from rlkit.packing import pack
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.envs.chat import Chat
from rlkit.rollout.groups import last_pieces, pieces_of, rollout, sample_group, single_turn
from rlkit.rollout.limits import limited, mask_off_policy, mask_truncated, success, success_between
from rlkit.types import Completion, SamplingParams, Trajectory

PARAMS = SamplingParams(max_new_tokens=8)


def piece(reward=0.0, continues=False, *, n=2, **changes):
    t = Trajectory(prompt_ids=[1], ids=[3] * n, mask=[True] * n, logp=[-1.0] * n, versions=[0] * n, reward=reward)
    return replace(t, continues=continues, **changes)


async def no_engine(prompt_ids, *, params, rid=None):
    raise AssertionError("not needed")


def test_same_seeds_same_trajectories_whatever_else_runs():
    async def sample(places, seed):
        async with LocalEngine(small_model(), max_batch=5) as engine:
            return await rollout(
                [prompt_at(p) for p in places], generate=engine.generate, params=PARAMS, group_size=3, seed=seed
            )

    first, again = (asyncio.run(sample(range(4), 7)) for _ in range(2))
    assert first == again
    fewer = asyncio.run(sample(range(2), 7))
    assert [t.ids for g in fewer for t in g] == [t.ids for g in first[:2] for t in g]
    other = asyncio.run(sample(range(4), 8))
    assert [t.ids for g in other for t in g] != [t.ids for g in first for t in g]
    assert len({tuple(t.ids) for t in first[0]}) > 1, "samples of a group have noise of their own"


def test_every_turn_has_its_own_seed():
    async def two_turns(prompt, sample):
        await sample(prompt.ids)
        await sample(prompt.ids, max_new_tokens=3)
        return piece()

    engine = Ticking()
    two = [prompt_at(0), prompt_at(0)]
    asyncio.run(rollout(two, generate=engine.generate, params=PARAMS, group_size=4, seed=0, env=two_turns))
    assert len({seed for _, seed, _ in engine.calls}) == 16
    assert sorted(limit for *_, limit in engine.calls) == [3] * 8 + [8] * 8


def test_score_sees_the_last_piece_and_its_reward_goes_to_all():
    async def env(prompt, sample):
        return [piece(n=1), piece(n=2), piece(n=3)] if await sample(None) else piece(n=4)

    async def score(prompt, group):
        assert [len(t.ids) for t in group] == [3, 4, 3]
        return [replace(t, reward=float(i + 1), score=0.5) for i, t in enumerate(group)]

    async def many(_):
        return True

    async def one(_):
        return False

    group = asyncio.run(sample_group(prompt_at(0), [many, one, many], env=env, score=score))
    assert [t.reward for t in group] == [1, 1, 1, 2, 3, 3, 3]
    assert [t.continues for t in group] == [False, True, True, False, False, True, True]
    assert [t.score for t in group] == [None, None, 0.5, 0.5, None, None, 0.5]
    assert [len(t.ids) for t in last_pieces(group)] == [3, 4, 3]
    assert pack([group]).episode_ids.tolist() == [0, 0, 0, 1, 2, 2, 2]


def test_masking_the_last_piece_masks_the_episode():
    async def env(prompt, sample):
        return [piece(n=1), piece(n=2), piece(n=3)]

    async def score(prompt, group):
        return [group[0], replace(group[1], mask=[False] * 3)]

    group = asyncio.run(sample_group(prompt_at(0), [None, None], env=env, score=score))
    assert [any(t.mask) for t in group] == [True] * 3 + [False] * 3
    assert [len(t.mask) for t in group] == [len(t.ids) for t in group]


def test_without_score_the_reward_is_the_environments():
    async def env(prompt, sample):
        return [piece(9.0), piece(0.25)]

    group = asyncio.run(sample_group(prompt_at(0), [None], env=env))
    assert [t.reward for t in group] == [0.25, 0.25]


def test_errors_of_environments_and_scores_name_the_prompt():
    async def nothing(prompt, sample):
        return []

    async def one_too_few(prompt, group):
        return group[1:]

    async def fine(prompt, sample):
        return piece()

    with pytest.raises(ValueError, match="row 4: the environment returned no trajectory"):
        asyncio.run(sample_group(prompt_at(3), [None], env=nothing))
    for returned in (1.0, True, np.float32(0)):
        with pytest.raises(
            ValueError, match=r"the environment returned .*; return the episode with it, as in chat\.end"
        ):
            pieces_of(returned)
    with pytest.raises(ValueError, match="returned 1 trajectories for 2"):
        asyncio.run(sample_group(prompt_at(3), [None, None], env=fine, score=one_too_few))
    with pytest.raises(ValueError, match="group_size must be at least 1"):
        asyncio.run(rollout([prompt_at(0)], generate=no_engine, params=PARAMS, group_size=0, seed=0))


def test_an_error_cancels_the_rest_and_leaves_no_task():
    async def env(prompt, sample):
        if prompt.index == 2:
            raise ZeroDivisionError("no luck")
        return await single_turn(prompt, sample)

    async def main():
        engine = Ticking(delay=lambda prompt: 10_000)
        with pytest.raises(ZeroDivisionError) as caught:
            await rollout(
                [prompt_at(i) for i in range(4)], generate=engine.generate, params=PARAMS, group_size=2, seed=0, env=env
            )
        assert caught.value.__notes__ == ["in an episode of row 3"]
        assert engine.running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


# --- limits ---

EPISODES = st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=4)


@given(EPISODES)
def test_truncated_episodes_are_masked_and_keep_their_reward(episodes):
    """An episode is truncated if its last piece is; truncated earlier pieces do not matter."""
    group = [piece(1.0, continues=i > 0, truncated=cut) for cuts in episodes for i, cut in enumerate(cuts)]
    (masked,) = mask_truncated([group])
    expected = [not cuts[-1] for cuts in episodes for _ in cuts]
    assert [all(t.mask) for t in masked] == expected
    assert [any(t.mask) for t in masked] == expected
    assert [replace(t, mask=[True, True]) for t in masked] == group


def test_tokens_of_older_weights_stay_as_context():
    t = piece(n=4, versions=[3, 4, -1, 4], mask=[True, True, False, True], token_rewards=[1.0, 2.0, 0.0, 3.0])
    (((kept,)),) = mask_off_policy([[t]], version=4)
    assert (kept.mask, kept.token_rewards) == ([False, True, False, True], [0.0, 2.0, 0.0, 3.0])
    assert (kept.ids, kept.logp, kept.versions) == (t.ids, t.logp, t.versions)
    pack([[kept]])
    assert mask_off_policy([[kept]], version=4) == [[kept]]


def test_success_is_of_episodes_and_of_the_score_where_there_is_one():
    group = [piece(5.0), piece(5.0, True, score=1.0), piece(0.25), piece(0.0, score=0.5)]
    assert success(group) == pytest.approx((1.0 + 0.25 + 0.5) / 3)
    keep = success_between(0.01, 0.99)
    rewards = {(0.0, 0.0): False, (1.0, 1.0): False, (0.0, 1.0): True, (0.99, 0.99): True, (0.01, 0.0): False}
    assert {r: keep([piece(x) for x in r]) for r in rewards} == rewards
    with pytest.raises(ValueError, match=r"low=0\.9, high=0\.1"):
        success_between(0.9, 0.1)


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 9), st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_limits_bound_turns_and_context(max_turns, max_total, max_new, tool_lens):
    """Whatever the environment does, no turn starts after `max_turns`, and no context grows past `max_total`."""
    contexts = []

    async def generate(prompt_ids, *, params, rid=None):
        n = params.max_new_tokens
        contexts.append(len(prompt_ids) + n)
        return Completion([7] * n, [0.0] * n, [0] * n, "length")

    async def greedy_env(prompt, sample):
        context, told = list(prompt.ids), []
        for length in tool_lens:
            out = await sample(context)
            told.append((len(out.ids), out.finish_reason))
            context += [*out.ids, *[9] * length]
        return piece(info={"told": told})

    env = limited(greedy_env, max_turns=max_turns, max_total_tokens=max_total)
    params = SamplingParams(max_new_tokens=max_new)
    ((t,),) = asyncio.run(
        rollout([Prompt([1, 2], {}, 0)], generate=generate, params=params, group_size=1, seed=0, env=env)
    )
    expected, context = [], 2
    for turn, length in enumerate(tool_lens):
        n = min(max_new, max_total - context) if turn < max_turns and context < max_total else 0
        expected.append((n, "length"))
        context += n + length
    assert t.info["told"] == expected
    assert all(c <= max_total for c in contexts)
    assert len(contexts) <= max_turns


@given(st.integers(1, 40), st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6), st.booleans())
def test_a_budget_of_sampled_tokens_is_never_exceeded_and_loses_nothing(budget, max_new, lengths, at_once):
    """The policy would end its turns after `lengths` tokens; the episode is a prefix of those turns."""
    seen = []

    async def generate(prompt_ids, *, params, rid=None):
        wanted = lengths[prompt_ids[-1]]  # the environment's last token is the turn's number
        await asyncio.sleep(0)
        n = min(wanted, params.max_new_tokens)
        seen.append(n)
        return Completion([*range(n)], [-1.0] * n, [3] * n, "stop" if n == wanted else "length")

    async def talk(prompt, sample):
        contexts = [[*prompt.ids, *[9] * 50, turn] for turn in range(len(lengths))]  # what is read costs nothing
        if at_once:
            outs = await asyncio.gather(*map(sample, contexts))
        else:
            outs = [await sample(context) for context in contexts]
        return piece(info={"outs": outs})

    env = limited(talk, max_sampled_tokens=budget)
    params = SamplingParams(max_new_tokens=max_new)
    ((t,),) = asyncio.run(
        rollout([Prompt([1, 2], {}, 0)], generate=generate, params=params, group_size=1, seed=0, env=env)
    )
    left, expected = budget, []
    for wanted in lengths:
        n = min(wanted, max_new, left)
        expected.append((n, "stop" if n == wanted else "length"))
        left -= n
    outs = t.info["outs"]
    assert [(len(o.ids), o.finish_reason) for o in outs] == expected
    assert all(o.ids == [*range(len(o.ids))] and len(o.logp) == len(o.versions) == len(o.ids) for o in outs)
    assert sum(seen) == sum(n for n, _ in expected) <= budget
    assert 0 not in seen, "no request without room for a token"


async def test_an_episode_that_used_up_its_budget_ends_as_truncated_with_every_token_it_sampled():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, "one two", "three four")

    async def cutting(prompt_ids, *, max_new_tokens=None):
        out = await script(prompt_ids)
        if max_new_tokens is None or len(out.ids) <= max_new_tokens:
            return out
        n = max_new_tokens
        out = Completion(out.ids[:n], out.logp[:n], out.versions[:n], "length")
        script.calls[-1] = (script.calls[-1][0], out)
        return out

    async def env(prompt, sample):
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        async for _ in chat:
            chat.add("go on")
        return chat.end(reward=0.5)

    first = len(tokenizer.encode("one two<|im_end|>"))
    pieces = await limited(env, max_sampled_tokens=first + 3)(prompt_of(tokenizer), cutting)
    check_exact(pieces, script.calls)
    assert sum(sum(p.mask) for p in pieces) == first + 3
    assert pieces[-1].truncated
    assert pieces[-1].info["finish_reason"] == "length"
    assert pieces[-1].info["num_turns"] == 2


@pytest.mark.parametrize("name", ["max_turns", "max_total_tokens", "max_sampled_tokens"])
def test_a_limit_that_leaves_no_room_for_anything_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        limited(single_turn, **{name: 0})


async def test_an_environment_that_asks_for_nothing_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr("rlkit.rollout.groups.IDLE_S", 0.05)

    async def env(prompt, sample):
        await asyncio.gather(sample(prompt.ids), sample(prompt.ids))
        await asyncio.sleep(0.2)
        return await single_turn(prompt, sample)

    async def generate(ids, *, params, seed=None):
        await asyncio.sleep(0.2)
        return Completion(ids=[1], logp=[0.0], versions=[0], finish_reason="stop")

    prompts = [Prompt([1], {}, index) for index in (4, 4)]
    await rollout(prompts, generate=generate, params=SamplingParams(max_new_tokens=1), group_size=2, env=env, seed=0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the environment has asked for nothing for 0.05 s, in an episode of row 5; the run waits for it"


async def test_a_column_that_an_environment_asks_for_in_vain_is_named(caplog):
    async def env(prompt, sample):
        assert prompt.row.get("answr_of_the_test") is None
        return await single_turn(prompt, sample)

    async def generate(ids, *, params, seed=None):
        return Completion(ids=[1], logp=[0.0], versions=[0], finish_reason="stop")

    prompts = [Prompt([1], {"answer": 2}, 0)]
    await rollout(prompts, generate=generate, params=SamplingParams(max_new_tokens=1), group_size=2, env=env, seed=0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the environment reads 'answr_of_the_test', of which the data has no column; found: answer"


@pytest.mark.parametrize("wrapped", [False, True])
def test_temperature_0_is_warned_of_at_the_line_of_the_user(wrapped):
    """Also where asyncio's event loop calls the coroutine, and no line of the user's awaits it."""

    async def generate(prompt_ids, *, params):
        raise AssertionError

    call = rollout([], generate=generate, params=SamplingParams(temperature=0), group_size=2, seed=0)

    async def outer():
        return await call

    with pytest.warns(UserWarning, match="temperature 0") as found:
        asyncio.run(outer() if wrapped else call)
    assert found[0].filename == __file__
