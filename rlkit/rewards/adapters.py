"""Between reward functions and the rest: trajectories in, rewards out; and functions written for another library."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlkit.data.prompts import prompt_messages
from rlkit.rewards.call import Reward, RewardError, Sample, score, score_each

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
    if not 0 <= max_failed < 1:
        raise ValueError(f"max_failed must be in [0, 1), got {max_failed}")
    recent: deque[bool] = deque(maxlen=_RECENT)

    async def score_group(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        samples = [_sample(tokenizer, prompt, trajectory) for trajectory in group]
        if max_failed == 0:
            rewards = await score(function, samples, timeout_s=timeout_s)
            return [_rewarded(t, r, r.metrics) for t, r in zip(group, rewards, strict=True)]
        results = await score_each(function, samples, timeout_s=timeout_s)
        errors = [r for r in results if isinstance(r, RewardError)]
        recent.extend(isinstance(r, RewardError) for r in results)
        if errors and sum(recent) > max_failed * _RECENT:
            errors[0].add_note(
                f"{sum(recent)} of the last {len(recent)} samples failed; {max_failed=} of {_RECENT} may"
            )
            raise errors[0]
        given = [r for r in results if isinstance(r, Reward)]
        reward, mean_score = _mean([r.reward for r in given]), _mean([r.score for r in given if r.score is not None])
        return [
            _set_aside(t, r, reward or 0.0, mean_score)
            if isinstance(r, RewardError)
            else _rewarded(t, r, {**r.metrics, "failed": 0.0})
            for t, r in zip(group, results, strict=True)
        ]

    return score_group


def _rewarded(trajectory: Trajectory, reward: Reward, metrics: dict[str, float]) -> Trajectory:
    told = {"metrics": metrics, "notes": reward.notes}
    info = {**trajectory.info, **{name: what for name, what in told.items() if what}}
    return replace(trajectory, reward=reward.reward, score=reward.score, info=info)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _set_aside(trajectory: Trajectory, error: RewardError, reward: float, score: float | None) -> Trajectory:
    _log.warning("a sample does not train: %s", error)
    num = len(trajectory.ids)
    info = {**trajectory.info, "error": error.cause, "metrics": {"failed": 1.0}}
    return replace(
        trajectory, reward=reward, mask=[False] * num, logp=[0.0] * num, versions=[-1] * num, score=score, info=info
    )


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
