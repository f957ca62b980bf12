"""Between reward functions and the rest: trajectories in, rewards out; and functions written for another library."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rlkit.data.prompts import prompt_messages
from rlkit.rewards.call import Reward, RewardError, Sample, leading_parameters, score, score_each

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlkit.rollout.rollout import Prompt
    from rlkit.types import Trajectory

_log = logging.getLogger("rlkit.rewards")
_RECENT = 100  # samples that `max_failed` is a share of


def scorer(
    function: Callable[..., Any], *, tokenizer: PreTrainedTokenizerBase, timeout_s: float, max_failed: float = 0.0
) -> Callable[[Prompt, list[Trajectory]], Awaitable[list[Trajectory]]]:
    """The `score` argument of `rlkit.rollout.rollout`: decode a group's trajectories, judge them, fill in the rewards.

    `completion` is the text, without special tokens, of what was sampled last: of everything in a single turn, of the
    final turn in several. The function may also ask for `prompt_ids`, `completion_ids`, `truncated` and for whatever
    the environment left in `Trajectory.info`, such as `messages`. A reward that the environment set is overwritten. The
    function's further numbers go to `info["metrics"]`, its texts (`reason`) to `info["notes"]`.

    A sample that the function could not judge raises its `RewardError`, unless at most the share `max_failed` of the
    last 100 samples failed (a judge behind HTTP). Then such a trajectory does not train (its mask is False throughout),
    it gets the mean reward and score of its group's others (0 where there are none), so that a group baseline stays
    where it was, the cause is in `info["error"]` and in the log, and the metric `failed` counts it.
    """
    settle = _settler(max_failed)
    leading_parameters(function)  # one that cannot be called is refused before anything is sampled

    async def score_group(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        samples = [_sample(tokenizer, prompt, trajectory) for trajectory in group]
        return settle(group, await (score_each if max_failed else score)(function, samples, timeout_s=timeout_s))

    return score_group


def own_scorer(*, max_failed: float = 0.0) -> Callable[[Prompt, list[Trajectory]], Awaitable[list[Trajectory]]]:
    """`scorer` for environments that set the reward themselves: it stays, and one that is not a finite number fails.

    A failed sample counts as in `scorer`: its `RewardError` is raised, unless at most the share `max_failed` of the
    last 100 samples failed.
    """
    settle = _settler(max_failed)

    async def score_group(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        return settle(group, [_own(trajectory, prompt) for trajectory in group])

    return score_group


def _own(trajectory: Trajectory, prompt: Prompt) -> Reward | RewardError:
    """The environment's reward, or what is wrong with it."""
    from rlkit.rollout.rollout import wrong_reward  # imports torch, which the workers of `math` do not need

    if wrong := wrong_reward(trajectory):
        what = f"the environment's {wrong}"
        fix = "fix: give a finite number, and decide in the environment what such an episode is worth"
        return RewardError(f"{what} on row {prompt.index + 1}\n  {fix}", index=prompt.index, cause=what)
    known = {name: trajectory.info.get(name, {}) for name in ("metrics", "notes")}
    return Reward(trajectory.reward, trajectory.score, **known)


def _settler(max_failed: float) -> Callable[[list[Trajectory], Sequence[Reward | RewardError]], list[Trajectory]]:
    """Fill in results of a group, and set failed samples aside while they are at most the share `max_failed`."""
    if not 0 <= max_failed < 1:
        raise ValueError(f"max_failed must be in [0, 1), got {max_failed}")
    recent: deque[bool] = deque(maxlen=_RECENT)
    not_failed = {"failed": 0.0} if max_failed else {}

    def settle(group: list[Trajectory], results: Sequence[Reward | RewardError]) -> list[Trajectory]:
        errors = [r for r in results if isinstance(r, RewardError)]
        recent.extend(isinstance(r, RewardError) for r in results)
        if errors and sum(recent) > max_failed * _RECENT:
            if max_failed:
                errors[0].add_note(
                    f"{sum(recent)} of the last {len(recent)} samples failed; {max_failed=} of {_RECENT} may"
                )
            raise errors[0]
        mean = _mean([r for r in results if isinstance(r, Reward)])
        return [
            _set_aside(trajectory, mean, result)
            if isinstance(result, RewardError)
            else _rewarded(trajectory, replace(result, metrics={**result.metrics, **not_failed}))
            for trajectory, result in zip(group, results, strict=True)
        ]

    return settle


def _rewarded(trajectory: Trajectory, reward: Reward) -> Trajectory:
    told = {name: what for name, what in (("metrics", reward.metrics), ("notes", reward.notes)) if what}
    return replace(trajectory, reward=reward.reward, score=reward.score, info={**trajectory.info, **told})


def _mean(rewards: list[Reward]) -> Reward:
    """What stands in for a sample that could not be judged."""
    scores = [r.score for r in rewards if r.score is not None]
    reward = fmean(r.reward for r in rewards) if rewards else 0.0
    return Reward(reward, fmean(scores) if scores else None, {"failed": 1.0})


def _set_aside(trajectory: Trajectory, mean: Reward, error: RewardError) -> Trajectory:
    _log.warning("a sample does not train: %s", error)
    num = len(trajectory.ids)
    told = {**trajectory.info, "error": error.cause}
    untrained = replace(
        trajectory, mask=[False] * num, logp=[0.0] * num, versions=[-1] * num, token_rewards=None, info=told
    )
    return _rewarded(untrained, mean)


def with_messages(reward_fn: Callable[[list[dict[str, Any]], Any], Any]) -> Callable[..., Any]:
    """A sync `reward_fn(messages, answer)`, as RL2 has it, as a function for `score`.

    `messages` are the environment's, or else the row's conversation and the completion; `answer` is the row's column.
    """

    def score(completion: str, row: dict[str, Any], messages: list[dict[str, Any]] | None = None) -> Any:
        conversation = messages or [*prompt_messages(row), {"role": "assistant", "content": completion}]
        return reward_fn(conversation, row["answer"])

    return score


def _sample(tokenizer: Any, prompt: Prompt, trajectory: Trajectory) -> Sample:
    known = {
        "prompt_ids": trajectory.prompt_ids,
        "completion_ids": trajectory.ids,
        "truncated": trajectory.truncated,
    }
    text = tokenizer.decode(_last_turn(trajectory), skip_special_tokens=True)
    return Sample(text, prompt.row, prompt.index, {**trajectory.info, **known})


def _last_turn(trajectory: Trajectory) -> list[int]:
    """The last run of sampled tokens."""
    mask = trajectory.mask
    end = len(mask) - mask[::-1].index(True) if True in mask else 0
    start = end - mask[:end][::-1].index(False) if False in mask[:end] else 0
    return trajectory.ids[start:end]
