"""Rewards for trajectories: the `score` argument of `rlkit.rollout.rollout`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rlkit._util.numbers import show
from rlkit.data.load import place_of_prompt
from rlkit.data.markup import markup_of, opened_by
from rlkit.rewards.call import Reward, RewardError, Sample, check_ours, run_reward, run_reward_each
from rlkit.rewards.failures import name_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlkit.rollout.groups import Prompt
    from rlkit.types import Trajectory

_log = logging.getLogger("rlkit.rewards")
_RECENT = 100  # samples that `max_failed` is a share of


def scorer(
    function: Callable[..., Any], *, tokenizer: PreTrainedTokenizerBase, timeout_s: float, max_failed: float = 0.0
) -> Callable[[Prompt, list[Trajectory]], Awaitable[list[Trajectory]]]:
    """Rewards of a function, as the `score` argument of `rlkit.rollout.rollout`: decode a group, run the function.

    `completion` is the text of the last sampled turn: without the token that ended it, other special tokens included,
    and after what the prompt has begun of it (the beginning of the answer, as in TRL, or `<think>` of the generation
    prompt; `completion_ids` have neither). The function may also ask for
    `prompt_ids`, `completion_ids`, `truncated` and for what the environment left in `Trajectory.info`, such as
    `messages`. A reward that the environment set is overwritten. Further numbers that the function returns go to
    `info["metrics"]`, texts (`reason`) to `info["notes"]`. `rlkit.compat.rewards.adapted` makes such a function of one
    that was written for TRL, verl, OpenRLHF, slime or RL2.

    A failed sample raises its `RewardError`, unless at most the share `max_failed` of the last 100 samples failed (a
    judge behind HTTP). Then the trajectory does not train (its mask is False throughout) and gets the mean reward and
    score of the rest of its group, of its role (0 if all failed), which leaves `group_centered` and `max_rl` unchanged
    (of m judged samples of n, `group_zscore` is sqrt((n-1)/(m-1)) times theirs, `leave_one_out` n(m-1)/(m(n-1)) times);
    the cause is in `info["error"]` and in the log, and the metric `failed` counts it. An episode without a reward and
    with `info["error"]` (see `agent_env`) has failed already: the function does not see it.
    """
    if not callable(function):
        fault = f"function must be a reward function of (completion, row), got {show(function)}"
        raise TypeError(f"{fault}; rlkit.rewards.load.load_function reads one from FILE.py:FUNCTION")
    if not callable(getattr(tokenizer, "decode", None)):
        fix = "AutoTokenizer.from_pretrained(PATH) of transformers loads one"
        raise TypeError(f"tokenizer must be the model's tokenizer, got {show(tokenizer)}: {fix}")
    settle, replaced, padded = _settler(max_failed), False, False
    check_ours(function)  # before anything is sampled

    async def score_group(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        nonlocal replaced, padded
        padded = padded or _name_padding(prompt, tokenizer)
        if not replaced and any(trajectory.reward for trajectory in group):
            replaced = True
            _log.warning("rewards of the environment are replaced by those of %s", name_of(function))
        failed = {i: _failed(trajectory, prompt) for i, trajectory in enumerate(group) if _has_failed(trajectory)}
        samples = [_sample(tokenizer, prompt, trajectory) for i, trajectory in enumerate(group) if i not in failed]
        run = run_reward_each if max_failed else run_reward
        with _placed(prompt):
            rewards = iter(await run(function, samples, timeout_s=timeout_s))
            return settle(group, [failed.get(i) or next(rewards) for i in range(len(group))])

    return score_group


def _name_padding(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a prompt begins with a special token twice, as padding and a second bos do; it is named then."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    first = prompt.ids[:2]
    padded = first in [[getattr(tokenizer, name, None)] * 2 for name in names]
    if padded:
        fact = "begins with a token more than once, %r, which the model reads: padding, or a second bos? drop it"
        _log.warning("the prompt of row %d " + fact, prompt.index + 1, tokenizer.decode(first[:1]))
    return padded


def env_rewards(*, max_failed: float = 0.0) -> Callable[[Prompt, list[Trajectory]], Awaitable[list[Trajectory]]]:
    """Keep the rewards that the environment set. One that is not a finite number is a failed sample, see `scorer`."""
    settle = _settler(max_failed)

    async def score_group(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        with _placed(prompt):
            return settle(group, [_env_reward(trajectory, prompt) for trajectory in group])

    return score_group


@contextmanager
def _placed(prompt: Prompt) -> Iterator[None]:
    """Add to an error that names the row by its number where it is: its file and line."""
    try:
        yield
    except RewardError as error:
        if error.index == prompt.index and (place := place_of_prompt(prompt)) not in str(error):
            error.add_note(f"row {prompt.index + 1} is {place}")
        raise


def _env_reward(trajectory: Trajectory, prompt: Prompt) -> Reward | RewardError:
    """The reward that the environment set, or an error if it is not a finite number."""
    from rlkit.rollout.groups import wrong_reward  # imports torch, which the workers of `math` do not need

    if _has_failed(trajectory):
        return _failed(trajectory, prompt)
    if fault := wrong_reward(trajectory):
        cause = f"the environment's {fault}"
        fix = "fix: give a finite number, and decide in the environment what such an episode is worth"
        return RewardError(f"{cause} on row {prompt.index + 1}\n  {fix}", index=prompt.index, cause=cause)
    logged = {name: trajectory.info.get(name, {}) for name in ("metrics", "notes")}
    return Reward(trajectory.reward, trajectory.score, **logged)


def _has_failed(trajectory: Trajectory) -> bool:
    return trajectory.reward is None and bool(trajectory.info.get("error"))


def _failed(trajectory: Trajectory, prompt: Prompt) -> RewardError:
    """The error of an episode that failed before there was anything to reward (see `agent_env`)."""
    cause = trajectory.info["error"]
    return RewardError(f"row {prompt.index + 1}: {cause}", index=prompt.index, cause=cause)


def _settler(max_failed: float) -> Callable[[list[Trajectory], Sequence[Reward | RewardError]], list[Trajectory]]:
    """A function that fills in the results of a group and masks failed samples, at most the share `max_failed`."""
    if not 0 <= max_failed < 1:
        raise ValueError(f"max_failed must be in [0, 1), got {max_failed}")
    recent: deque[bool] = deque(maxlen=_RECENT)
    not_failed = {"failed": 0.0} if max_failed else {}

    def settle(group: list[Trajectory], results: Sequence[Reward | RewardError]) -> list[Trajectory]:
        errors = [r for r in results if isinstance(r, RewardError)]
        recent.extend(isinstance(r, RewardError) for r in results)
        if errors and sum(recent) > max_failed * _RECENT:
            if max_failed:
                counts = f"{sum(recent)} of the last {len(recent)} samples failed"
                errors[0].add_note(f"{counts}; {max_failed=} of {_RECENT} may")
            raise errors[0]
        judged = [(t.role, r) for t, r in zip(group, results, strict=True) if isinstance(r, Reward)]

        def mean(role: str) -> Reward:
            rewards = [r for of, r in judged if of == role]
            scores = [r.score for r in rewards if r.score is not None]
            reward, score = fmean(r.reward for r in rewards) if rewards else 0.0, fmean(scores) if scores else None
            return Reward(reward, score, {"failed": 1.0})

        return [
            _rewarded(_masked(trajectory, result), mean(trajectory.role))
            if isinstance(result, RewardError)
            else _rewarded(trajectory, replace(result, metrics={**result.metrics, **not_failed}))
            for trajectory, result in zip(group, results, strict=True)
        ]

    return settle


def _rewarded(trajectory: Trajectory, reward: Reward) -> Trajectory:
    fields = (("metrics", reward.metrics), ("notes", reward.notes))
    logged = {name: {**trajectory.info.get(name, {}), **value} for name, value in fields if value}
    return replace(trajectory, reward=reward.reward, score=reward.score, info={**trajectory.info, **logged})


def _masked(trajectory: Trajectory, error: RewardError) -> Trajectory:
    """The trajectory without anything that trains."""
    _log.warning("a sample does not train: %s", error)
    num = len(trajectory.ids)
    info = {**trajectory.info, "error": error.cause}
    return replace(trajectory, mask=[False] * num, logp=[0.0] * num, versions=[-1] * num, token_rewards=None, info=info)


def completion_of(tokenizer: Any, trajectory: Trajectory) -> str:
    """The text of the last sampled turn, see `rlkit.data.markup`."""
    mask = [*map(bool, trajectory.mask)]
    end = len(mask) - mask[::-1].index(True) if True in mask else 0  # of the last run of sampled tokens
    start = end - mask[:end][::-1].index(False) if False in mask[:end] else 0
    context = [*trajectory.prompt_ids, *trajectory.ids[:start]]
    return markup_of(tokenizer).text_of(trajectory.ids[start:end], context)


def _sample(tokenizer: Any, prompt: Prompt, trajectory: Trajectory) -> Sample:
    text = completion_of(tokenizer, trajectory)
    if (begun := getattr(prompt, "begun", "")) and all(trajectory.mask):  # one turn: it goes on after the beginning
        text = begun.removesuffix(opened_by(begun)) + text
    tokens = {"prompt_ids": trajectory.prompt_ids, "completion_ids": trajectory.ids, "truncated": trajectory.truncated}
    return Sample(text, prompt.row, prompt.index, {**trajectory.info, **tokens})
