"""Between reward functions and the rest: trajectories in, rewards out; and functions written for another library."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlkit.data.prompts import prompt_messages
from rlkit.rewards.call import Sample, score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlkit.rollout.rollout import Prompt
    from rlkit.types import Trajectory


def scorer(
    function: Callable[..., Any], *, tokenizer: PreTrainedTokenizerBase, timeout_s: float
) -> Callable[[Prompt, list[Trajectory]], Awaitable[list[Trajectory]]]:
    """The `score` argument of `rlkit.rollout.rollout`: decode a group's trajectories, judge them, fill in the rewards.

    `completion` is the text, without special tokens, of what was sampled last: of everything in a single turn, of the
    final turn in several. The function may also ask for `prompt_ids`, `completion_ids`, `truncated` and for whatever
    the environment left in `Trajectory.info`, such as `messages`. A reward that the environment set is overwritten. The
    function's further numbers go to `info["metrics"]`.
    """

    async def score_group(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        samples = [_sample(tokenizer, prompt, trajectory) for trajectory in group]
        rewards = await score(function, samples, timeout_s=timeout_s)
        return [
            replace(t, reward=r.reward, score=r.score, info={**t.info, "metrics": r.metrics} if r.metrics else t.info)
            for t, r in zip(group, rewards, strict=True)
        ]

    return score_group


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
