from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from rlkit.data import Prompt
from rlkit.data.tiny import tiny_tokenizer
from rlkit.packing import pack
from rlkit.rewards import RewardError, env_rewards, scorer
from rlkit.rollout.envs.gym import Step, Turns, gym_env
from rlkit.rollout.groups import sample_group
from rlkit.types import Completion, Trajectory

TOKENIZER = tiny_tokenizer()
END = 258


def trajectory(ids, mask=None, **fields):
    mask = [True] * len(ids) if mask is None else mask
    return Trajectory([1, 2], ids, mask, [0.0] * len(ids), [0] * len(ids), **fields)


async def test_scorer_fills_rewards_scores_and_metrics_in():
    def judge(completion, row, truncated, prompt_ids, completion_ids, finish_reason):
        correct = completion == row["answer"]
        return {"reward": correct - truncated, "score": correct, "num": len(prompt_ids) * len(completion_ids)}

    prompt = Prompt([1, 2], {"answer": "ab"}, 7)
    group = [
        trajectory([*b"ab", END], info={"finish_reason": "stop"}),
        trajectory([*b"ab"], truncated=True, info={"finish_reason": "length"}),
        trajectory([*b"ba", END], reward=5.0, info={"finish_reason": "stop"}),
    ]
    out = await scorer(judge, tokenizer=TOKENIZER, timeout_s=5)(prompt, group)
    assert [(t.reward, t.score) for t in out] == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    assert out[0].info == {"finish_reason": "stop", "metrics": {"num": 6.0}}
    assert group[0].info == {"finish_reason": "stop"}
    assert [t.ids for t in out] == [t.ids for t in group]


async def test_the_completion_of_several_turns_is_the_last_sampled_one():
    seen = []

    def judge(completions, rows):
        seen.extend(completions)
        return [0.0] * len(rows)

    ids = [*b"ab", END, *b"tool", *b"cd", END]
    mask = [True] * 3 + [False] * 4 + [True] * 3
    group = [
        trajectory(ids, mask),
        trajectory([*ids, *b"x"], [*mask, False]),
        trajectory([9, 9], [False, False]),
        trajectory([]),
    ]
    await scorer(judge, tokenizer=TOKENIZER, timeout_s=5)(Prompt([1], {}, 0), group)
    assert seen == ["cd", "cd", "", ""]


async def test_texts_of_the_function_go_to_the_notes():
    def judge(completion, row):
        return {"reward": 0.0, "reason": f"{completion} is late"}

    (out,) = await scorer(judge, tokenizer=TOKENIZER, timeout_s=60)(Prompt([1], {}, 0), [trajectory([*b"ab", END])])
    assert out.info == {"notes": {"reason": "ab is late"}}


async def test_a_sample_that_failed_neither_trains_nor_moves_the_baseline():
    async def judge(completion, row):
        return {"reward": {"a": 1.0, "b": 4.0}[completion], "n": 2}

    group = [trajectory([*text.encode(), END], info={"kept": 1}) for text in ("a", "c", "b")]
    out = await scorer(judge, tokenizer=TOKENIZER, timeout_s=60, max_failed=0.34)(Prompt([1, 2], {}, 0), group)
    assert [t.reward for t in out] == [1.0, 2.5, 4.0]
    assert [t.info["metrics"] for t in out] == [{"n": 2.0, "failed": 0.0}, {"failed": 1.0}, {"n": 2.0, "failed": 0.0}]
    assert out[1].info["error"].startswith("KeyError: 'c'")
    assert [t.info["kept"] for t in out] == [1, 1, 1]
    batch = pack([out])
    per_seq = [batch.mask[a:b].sum().item() for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:])]
    assert per_seq == [2, 0, 2]
    assert torch.equal(batch.rewards - batch.rewards.mean(), torch.tensor([-1.5, 0.0, 1.5]))
    for limit in (0.0, 0.005):
        with pytest.raises(RewardError, match="KeyError: 'c'"):
            await scorer(judge, tokenizer=TOKENIZER, timeout_s=60, max_failed=limit)(Prompt([1, 2], {}, 0), group)
    with pytest.raises(ValueError, match="max_failed"):
        scorer(judge, tokenizer=TOKENIZER, timeout_s=60, max_failed=1.0)


async def test_a_failed_sample_of_a_role_has_the_rewards_of_that_role():
    async def judge(completion, row):
        return {"a": 1.0, "b": -1.0}[completion]

    made = [(trajectory([*text.encode(), END]), role) for text, role in ("aA", "cA", "bB", "bB", "cC")]
    group = [replace(t, role=role) for t, role in made]
    out = await scorer(judge, tokenizer=TOKENIZER, timeout_s=60, max_failed=0.34)(Prompt([1, 2], {}, 0), group)
    assert [t.reward for t in out] == [1.0, 1.0, -1.0, -1.0, 0.0]


async def test_failures_are_counted_over_the_last_hundred_samples():
    """A group of one, as evaluation has, may fail as a whole; a judge that stays away ends the run."""

    async def judge(completion, row):
        if row["fails"]:
            raise OSError("no answer")
        return {"reward": 3.0, "score": 1.0}

    judged = scorer(judge, tokenizer=TOKENIZER, timeout_s=60, max_failed=0.03)

    async def one(fails):
        ((out,),) = [await judged(Prompt([1, 2], {"fails": fails}, 0), [trajectory([*b"ab", END])])]
        return out

    lost = await one(True)
    assert (lost.reward, lost.score, lost.mask, lost.info["error"][:7]) == (0.0, None, [False] * 3, "OSError")
    assert [(await one(True)).reward for _ in range(2)] == [0.0, 0.0]
    with pytest.raises(RewardError, match=r"no answer(.|\n)*--reward-max-failed") as caught:
        await one(True)
    assert caught.value.__notes__ == ["4 of the last 4 samples failed; max_failed=0.03 of 100 may"]
    assert {(await one(False)).reward for _ in range(99)} == {3.0}
    assert (await one(True)).reward == 0.0, "one of the first failures is still among the last hundred"


async def test_a_score_of_its_own_is_that_of_the_others_too():
    async def judge(completion, row):
        return {"reward": {"a": 1.0, "b": 4.0}[completion], "score": float(completion == "a")}

    group = [trajectory([*text.encode(), END]) for text in ("a", "c", "b")]
    out = await scorer(judge, tokenizer=TOKENIZER, timeout_s=60, max_failed=0.1)(Prompt([1, 2], {}, 0), group)
    assert [t.score for t in out] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("huge", [10**400, Fraction(10**400), 10**5000, 1e39], ids=["int", "fraction", "long", "f32"])
async def test_a_reward_beyond_float32_fails_and_is_counted(huge):
    def judge(completion, row):
        return huge if completion == "b" else 1.0

    group = [trajectory([*b"a", END]), trajectory([*b"b", END])]
    with pytest.raises(RewardError, match=r"test_scoring.py:.*judge failed on row 8: returned (int|Fraction|1e\+39)"):
        await scorer(judge, tokenizer=TOKENIZER, timeout_s=5)(Prompt([1], {}, 7), group)
    good, bad = await scorer(judge, tokenizer=TOKENIZER, timeout_s=5, max_failed=0.5)(Prompt([1], {}, 7), group)
    assert (good.reward, any(good.mask)) == (1.0, True)
    assert (bad.reward, any(bad.mask), bad.info["metrics"]) == (1.0, False, {"failed": 1.0})


async def answer(ids, *, max_new_tokens=None):
    return Completion([*b"x", END], [0.0, 0.0], [0, 0], "stop")


def turn_env(reward, turn_rewards=None, score=None):
    async def env(prompt, sample):
        turns = Turns(prompt.ids, sample)
        await turns.sample()
        return turns.pieces(reward=reward, turn_rewards=turn_rewards, score=score)

    return env


def game_env(reward, token_rewards=False):
    class Game:
        def reset(self):
            return [1]

        def step(self, turn):
            return Step([2], reward, done=True)

    return gym_env(lambda prompt: Game(), tokenizer=TOKENIZER, token_rewards=token_rewards)


OWN = {
    "an int": (turn_env(10**400), "reward is int 1000"),
    "a fraction": (turn_env(Fraction(10**400)), "reward is Fraction"),
    "nan": (turn_env(math.nan), "reward is float nan"),
    "a tensor": (turn_env(torch.ones(2)), "reward is Tensor"),
    "none": (turn_env(None), "reward is missing"),
    "a score alone": (turn_env(None, score=1.0), "reward is missing .end.reward=....* a score is only logged"),
    "of a turn": (turn_env(0.0, [10**400]), "token_rewards is int 1000"),
    "of a game": (game_env(10**400), "reward is int 1000"),
    "of a game's token": (game_env(math.nan, token_rewards=True), "score is float nan"),
}


def rewards_of(group):
    return [x for t in group for x in (t.reward, *(t.token_rewards or ()), t.score or 0.0)]


@pytest.mark.parametrize("name", OWN)
async def test_an_environments_own_reward_must_be_a_finite_number(name):
    env, said = OWN[name]
    prompt = Prompt([1], {}, 7)
    if "float nan" in said:  # the loops stop there and name stream and prompt
        assert not all(map(math.isfinite, rewards_of(await sample_group(prompt, [answer], env=env))))
    else:
        with pytest.raises(ValueError, match=f"row 8: {said}"):
            await sample_group(prompt, [answer], env=env)
    with pytest.raises(RewardError, match=f"the environment's {said}.* on row 8"):
        await sample_group(prompt, [answer], env=env, score=env_rewards())
    (bad,) = await sample_group(prompt, [answer], env=env, score=env_rewards(max_failed=0.5))
    assert (bad.reward, any(bad.mask), bad.info["metrics"]) == (0.0, False, {"failed": 1.0})
    assert bad.token_rewards is None
    pack([[bad]])


async def test_an_environments_finite_reward_and_metrics_stay():
    async def env(prompt, sample):
        turns = Turns(prompt.ids, sample)
        await turns.sample()
        return turns.pieces(reward=torch.tensor(0.5), info={"metrics": {"moves": 3.0}})

    (good,) = await sample_group(Prompt([1], {}, 0), [answer], env=env, score=env_rewards(max_failed=0.5))
    assert (good.reward, good.mask, good.info["metrics"]) == (0.5, [True, True], {"moves": 3.0, "failed": 0.0})


async def test_no_segment_of_a_failed_episode_trains():
    async def env(prompt, sample):
        turns = Turns(prompt.ids, sample)
        await turns.sample()
        turns.restart([5])
        await turns.sample()
        return turns.pieces(turn_rewards=[1.0, math.nan])

    group = await sample_group(Prompt([1], {}, 0), [answer], env=env, score=env_rewards(max_failed=0.5))
    assert [t.token_rewards for t in group] == [None, None]
    assert not pack([group]).mask.any()


@pytest.mark.parametrize("name", ["pad_token", "bos_token", "eos_token"])
async def test_prompts_that_begin_with_padding_are_named_once(name, caplog):
    tokenizer = tiny_tokenizer()
    setattr(tokenizer, name, "<|im_start|>")
    twice = tokenizer.convert_tokens_to_ids("<|im_start|>")
    score = scorer(lambda completion, row: 1.0, tokenizer=tokenizer, timeout_s=60)
    for start in ([twice], [twice, 65, twice, twice], [65, 65]):
        await score(Prompt([*start, 65], {}, 0), [Trajectory([*start, 65], [65], [True], [0.0], [0])])
    assert not caplog.messages
    for index in (1, 2):
        await score(Prompt([twice] * 6 + [65], {}, index), [Trajectory([twice] * 6 + [65], [65], [True], [0.0], [0])])
    (line,) = caplog.messages
    assert line.startswith(
        "the prompt of row 2 begins with a token more than once, '<|im_start|>', which the model reads"
    )
