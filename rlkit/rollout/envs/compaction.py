"""Context compaction: where an episode outgrows its context, the policy writes a summary and goes on from it.

    env = limited(compacted(guess, at=4096, max_new_tokens=512), max_turns=64)

A summary is a turn of the policy like any other: it is sampled, is part of the episode, and trains with its reward.
The episode is then several pieces (see `rlkit.segments`), one more than it has summaries:

    piece 1     opening, turn, answer, turn, answer, ..., turn k, ask          | summary
    piece 2     opening with the summary, turn k, answer to turn k             | turn k + 1, ...

What stands left of `|` in piece 2 is context there, and not trained again. Each token is trained after the tokens that
the policy has read before it, so the log-probs of all pieces sum up to that of the episode:

    log p(episode) = sum_pieces sum_{t sampled} log pi(token_t | context_t)

and A * grad of it is the policy gradient, where A is the episode's advantage (the same for each piece,
`episode_advantages`). Aggregation: `per_token`, `per_episode` and `per_length` of the loops do not depend on the number
of pieces; `seq_mean` and `constant_length` of `rlkit.losses` count each piece.

Reference: CompactionRL, https://arxiv.org/abs/2607.05378; SUPO, https://arxiv.org/abs/2510.06727
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rlkit.rollout.calling import report_once
from rlkit.rollout.groups import Env, Prompt, Sampler, pieces_of
from rlkit.rollout.limits import limited
from rlkit.types import Trajectory

__all__ = ["compacted"]

ASK = (
    "The conversation is about to be cleared, because it no longer fits. Write a summary of all that is needed to go "
    "on: what has been done, what has been found out, and what is left to do. Answer with the summary alone."
)
CARRY = "Summary of the conversation so far, which has been cleared:\n"


@dataclass
class Compaction:
    """How the conversations of one episode are compacted; `used`: whether a `Chat` has asked for it."""

    at: int
    max_new_tokens: int
    ask: str
    carry: str
    used: bool = False

    def opening(self, messages: Sequence[Mapping[str, Any]], summary: str) -> list[dict[str, Any]]:
        """The opening with the summary: at the end of its last message if that is the user's, else after it."""
        carried, opening = self.carry + summary, [*map(dict, messages)]
        if opening and opening[-1].get("role") == "user":
            return [*opening[:-1], {**opening[-1], "content": f"{opening[-1]['content']}\n\n{carried}"}]
        return [*opening, {"role": "user", "content": carried}]


_current: ContextVar[Compaction | None] = ContextVar("compaction", default=None)


def current_compaction() -> Compaction | None:
    """The compaction of the episode that this task plays; None outside of `compacted`."""
    if (compaction := _current.get()) is not None:
        compaction.used = True
    return compaction


def compacted(env: Env, *, at: int, max_new_tokens: int, ask: str = ASK, carry: str = CARRY) -> Env:
    """`env`, in which no context of a `Chat`, with the tokens that are sampled after it, has more than `at` tokens.

    Before a turn, where the context with the new messages, the user's message `ask` and two times `max_new_tokens` (the
    turn, and a summary after it) would exceed `at`, `ask` follows the last turn in place of the new messages, and the
    policy's answer is the summary. The conversation goes on from its opening (the messages before the first turn) with
    `carry` and the summary, then the last turn and the new messages. A later summary takes the place of an earlier one,
    which was in its context. What follows the reasoning of the summary's turn is carried on. There is no summary where
    nothing would be cleared: after the first turn.

    `max_new_tokens` bounds each turn and each summary; give that of `SamplingParams`. A summary that is cut by a limit
    ends the episode as truncated, and so do an opening or new messages that leave no room for a turn. A summary counts
    as a turn of `limited(max_turns=...)`, not in `num_turns` and `turn_rewards`.

    `info` gets `summaries`, the texts, and the metric `compactions`, their number; `messages` are those of the last
    context. Rewards of turns need an estimator that joins the pieces (`turn_returns`, `gigpo`): `returns` and GAE end
    at the end of a piece, so that a summary would not get the rewards of later turns. This is reported.

    Errors: ValueError for an environment without a `Chat` (agents over HTTP compact their conversations themselves).
    Differs: the harnesses of verifiers drop the opening as well, and its task must be in the summary; here new messages
    are read as they are, never through a summary.
    """
    if max_new_tokens < 1 or at <= 2 * max_new_tokens:
        raise ValueError(f"at must be above 2 * max_new_tokens, a turn and a summary, got {at} and {max_new_tokens}")

    async def compacting(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        compaction = Compaction(at, max_new_tokens, ask, carry)
        token = _current.set(compaction)
        try:
            pieces = pieces_of(await env(prompt, sample))
        finally:
            _current.reset(token)
        if not compaction.used:
            raise ValueError("the environment has no `Chat`, whose conversation could be compacted: drop compaction")
        if any(t.continues and t.token_rewards is not None for t in pieces):
            report_once("the environment", "gives rewards of turns", _JOINED)
        return pieces

    return limited(compacting, max_total_tokens=at)


_JOINED = ": with turn_returns and gigpo a summary gets those of later turns, with returns and GAE it does not"
