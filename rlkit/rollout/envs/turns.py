"""Episodes of several turns in tokens: which tokens were read, which were sampled, and in which context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlkit._util.numbers import as_number
from rlkit.rollout.groups import Sampler, joined_experts, joined_support
from rlkit.types import Completion, FinishReason, Picture, Support, Trajectory


class Turns:
    """One episode in tokens: alternate `sample()` with `append(ids)` or `restart(prompt_ids)`, then call `pieces()`.

    `append` adds tokens of the environment. `restart` starts a new piece with the context `prompt_ids`, for
    environments that do not continue the sampled text (a summary of history, a template that rewrites it).

    `images` are the pictures of the placeholders in these tokens, in their order. Without any, the contexts show the
    images of the rollout's prompt; an environment that adds others names those of the prompt too.
    """

    def __init__(self, prompt_ids: Sequence[int], sample: Sampler, images: Sequence[Picture] | None = None) -> None:
        self._sample = sample
        self._done: list[Trajectory] = []
        self._now = _empty(prompt_ids, images or ())
        self._names_images = images is not None
        self._appended: list[int] = []  # tokens of the environment since the last turn; dropped if no turn follows
        self._shown: list[Picture] = []  # images of these tokens
        self._ends: list[tuple[int, int]] = []  # (piece, position) of the last token of each turn
        self._reason: FinishReason | None = None

    @property
    def context(self) -> list[int]:
        """The prompt of the next turn."""
        return [*self._now.prompt_ids, *self._now.ids, *self._appended]

    @property
    def images(self) -> list[Picture]:
        """The images of `context`."""
        return [*self._now.images, *self._now.later_images, *self._shown]

    @property
    def num_turns(self) -> int:
        """Turns sampled so far."""
        return len(self._ends)

    @property
    def truncated(self) -> bool:
        """Whether the last turn was cut, so that no turn should follow."""
        return self._reason not in (None, "stop")

    async def sample(self, *, max_new_tokens: int | None = None, counted: bool = True) -> Completion:
        """Sample the next turn. If a limit leaves no room it has no tokens and is not recorded.

        One that is not `counted` (a summary) trains as well; `num_turns` and `turn_rewards` leave it out.
        """
        options: dict[str, Any] = {"images": self.images} if self._names_images else {}
        out = await self._sample(self.context, max_new_tokens=max_new_tokens, **options)
        self.take(out, counted=counted)
        return out

    def take(self, out: Completion, *, counted: bool = True) -> None:
        """Record a turn that was sampled after `context` elsewhere."""
        self._reason = out.finish_reason
        if out.ids:
            num_appended = len(self._appended)
            experts = joined_experts(self._now.experts, out.experts) if self._now.ids else out.experts
            images = (*self._now.later_images, *self._shown)
            between = Support(np.zeros((num_appended, 0), np.int32), np.ones(num_appended, np.float32))
            parts = (self._now.support, between, out.support) if self._now.ids else (between, out.support)
            self._now = replace(self._now, experts=experts, later_images=images, support=joined_support(*parts))
            self._now.ids.extend([*self._appended, *out.ids])
            self._now.mask.extend([*[False] * num_appended, *[True] * len(out.ids)])
            self._now.logp.extend([*[0.0] * num_appended, *out.logp])
            self._now.versions.extend([*[-1] * num_appended, *out.versions])
            self._appended, self._shown = [], []
            self._ends += [(len(self._done), len(self._now.ids) - 1)] * counted

    def append(self, ids: Sequence[int], images: Sequence[Picture] = ()) -> None:
        """Add tokens of the environment, which the policy reads next."""
        self._appended += ids
        self._shown += images
        self._names_images = self._names_images or bool(images)

    def restart(self, prompt_ids: Sequence[int], images: Sequence[Picture] = ()) -> None:
        """Continue from another context; the tokens so far stay as a piece of the episode."""
        if self._now.ids:
            self._done.append(self._now)
        self._now, self._appended, self._shown = _empty(prompt_ids, images), [], []
        self._names_images = self._names_images or bool(images)

    def pieces(
        self,
        *,
        reward: float | None = None,
        turn_rewards: Sequence[float] | None = None,
        score: float | None = None,
        truncated: bool | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> list[Trajectory]:
        """The episode as trajectories; they end with the last sampled token.

        Every piece has `reward` and `truncated` (by default: whether the last turn was cut); the last one has `score`
        and `info` with `num_turns` and `finish_reason`. `turn_rewards` become `token_rewards` at the end of each turn.
        Without `reward` and `turn_rewards`, the reward is None: an error unless a reward function scores the episode.
        """
        if self._reason is None:
            raise ValueError("the episode ends before its first turn was sampled")
        pieces = [*self._done, self._now] if self._now.ids or not self._done else self._done
        if turn_rewards is not None:
            pieces = self._with_rewards(pieces, turn_rewards)
            reward = 0.0 if reward is None else reward
        cut = self.truncated if truncated is None else truncated
        pieces = [
            replace(t, reward=as_number(reward), truncated=cut or not t.ids, continues=i > 0)
            for i, t in enumerate(pieces)
        ]
        about = {"finish_reason": self._reason, "num_turns": self.num_turns, **(info or {})}
        return [*pieces[:-1], replace(pieces[-1], score=score, info=about)]

    def _with_rewards(self, pieces: list[Trajectory], turn_rewards: Sequence[float]) -> list[Trajectory]:
        if len(turn_rewards) != self.num_turns:
            raise ValueError(f"turn_rewards must have one entry per turn, {self.num_turns}, got {len(turn_rewards)}")
        rewards = [[0.0] * len(t.ids) for t in pieces]
        for (piece, position), reward in zip(self._ends, turn_rewards, strict=True):
            rewards[piece][position] = as_number(reward)
        return [replace(t, token_rewards=r) for t, r in zip(pieces, rewards, strict=True)]


def _empty(prompt_ids: Sequence[int], images: Sequence[Picture]) -> Trajectory:
    return Trajectory(list(prompt_ids), [], [], [], [], images=tuple(images))
