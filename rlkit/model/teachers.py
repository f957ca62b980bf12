"""A teacher in this process, and the student's forward with a divergence from its teacher at each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit.losses.distillation import CHUNK_SIZE, MIN_LOGP, by_rows, check_support, topk_rows
from rlkit.model.alignment import aligned
from rlkit.model.forward import (
    DTYPES,
    Policy,
    compute_log_probs,
    compute_tokens,
    log_probs_head,
    logits_of,
    token_outputs,
)
from rlkit.model.routing import own_routing
from rlkit.packing import select
from rlkit.segments import broadcast_to_tokens, cumulative
from rlkit.types import Batch, LogProbs

Divergence = Callable[[Tensor, Tensor], Tensor]  # log-probs of student and teacher [.., V] -> a loss per row [..]


@dataclass(frozen=True)
class LocalTeacher:
    """A frozen model as a `Teacher`. It also has all of its distribution, for a divergence over the whole vocabulary.

    Args:
        policy: the model, at the temperature of the rollouts.
        max_tokens: packed tokens per micro-batch of `logp` and `top_logp`.
        tokenizers: those of the student and of this teacher, where they differ: for `uld`, on rows that begin at the
            same character of an answer's text.
    """

    policy: Policy
    max_tokens: int = 16384
    tokenizers: tuple[Any, Any] | None = None

    def logp(self, batch: Batch) -> Float[Tensor, "T"]:  # noqa: D102
        return compute_log_probs(self.policy, own_routing(batch), max_tokens=self.max_tokens, mesh=self.policy.mesh)

    def top_logp(self, batch: Batch, k: int) -> tuple[Int[Tensor, "T K"], Float[Tensor, "T K"]]:  # noqa: D102
        model, mesh = self.policy.model, self.policy.mesh

        def top(micro: Batch) -> Tensor:
            def head(hidden: Tensor, _spread: Any) -> tuple[Tensor, ...]:
                logits = _logits_of(self.policy)
                tops = [logits(rows).log_softmax(-1).topk(k) for rows in hidden.split(CHUNK_SIZE)]
                both = torch.cat([torch.cat([x.indices.float(), x.values], 1) for x in tops])  # ids below 2^24
                return both.unbind(1)

            return torch.stack(token_outputs(model, micro, head, outputs=2 * k, dtype=DTYPES[self.policy.dtype]), 1)

        ids, logp = compute_tokens(top, own_routing(batch), max_tokens=self.max_tokens, mesh=mesh).split(k, 1)
        return ids.long(), logp

    @torch.no_grad()
    def hidden(self, batch: Batch) -> tuple[Float[Tensor, "T D"], Bool[Tensor, "T"]]:
        """Its last hidden states at each token of a micro-batch, and at which tokens it has one."""
        batch = own_routing(batch)
        its_batch, rows = (batch, None) if self.tokenizers is None else aligned(batch, *self.tokenizers)
        states = token_outputs(self.policy.model, its_batch, lambda x, _: (x,), dtype=DTYPES[self.policy.dtype])[0]
        if rows is None:
            return states, torch.ones_like(batch.mask)
        return states[rows.clamp(min=0).to(states.device)], rows >= 0


def sequences_of(index: int, batch: Batch) -> tuple[Batch, Tensor]:
    """The sequences of a teacher as it reads them, and which tokens `[T]` of the batch are theirs."""
    mine = batch.teachers == index
    own = as_teachers_read(batch if bool(mine.all()) else select(batch, mine.nonzero().flatten()))
    return own, broadcast_to_tokens(mine, cu_seqlens=batch.cu_seqlens)


def as_teachers_read(batch: Batch) -> Batch:
    """The batch with `teacher_prompts` as its prompts, which must be shared prefixes; its rows `[T]` keep their places.

    A sequence `[last prompt token, s_1 .. s_{n-1}]` changes in its first token only, so what a teacher says of this
    batch is about the same targets.
    """
    if batch.teacher_prompts is None:
        return batch
    prompts, prefix_ids = batch.teacher_prompts.unique(dim=0, return_inverse=True)
    lens = (prompts >= 0).sum(1)
    in_prefix = torch.arange(prompts.shape[1], device=prompts.device) < lens[:, None] - 1
    last = prompts.gather(1, lens[:, None] - 1)[prefix_ids, 0]
    return replace(
        own_routing(batch), tokens=batch.tokens.index_copy(0, batch.cu_seqlens[:-1].long(), last), images=None,
        prefix_tokens=prompts[in_prefix], prefix_cu=cumulative(lens - 1), prefix_ids=prefix_ids, teacher_prompts=None,
    )  # fmt: skip


def _logits_of(policy: Policy) -> Callable[[Tensor], Tensor]:
    return logits_of(policy.model, temperature=policy.temperature, dtype=DTYPES[policy.dtype])


def with_divergence(
    policy: Policy, batch: Batch, *, divergence: Divergence, teachers: Sequence[LocalTeacher]
) -> tuple[LogProbs, Float[Tensor, "T"]]:
    """`policy(batch)`, and the divergence of the student's distribution from its teacher's at each token, from one
    forward; 0 where the mask is False.

    The teacher's distribution is `batch.teacher_logp` of `batch.teacher_ids` and one token for the tail; without them
    it is that of `teachers[batch.teachers]`, over the whole vocabulary. Logits are computed `CHUNK_SIZE` rows at a
    time, and again in the backward.
    """
    local: Sequence[LocalTeacher] = teachers if batch.teacher_logp is None else ()
    if batch.teacher_logp is not None:
        check_support(batch.teacher_ids, batch.teacher_logp, mask=batch.mask)
    of_teachers = [_rows_of(i, teacher, batch) for i, teacher in enumerate(local)]

    def head(hidden: Tensor, spread: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        dtype = DTYPES[policy.dtype]
        out = log_probs_head(
            hidden, spread, model=policy.model, batch=batch, temperature=policy.temperature, dtype=dtype
        )
        logits = _logits_of(policy)
        if batch.teacher_logp is not None:

            def topk(x: Tensor, ids: Tensor, logp: Tensor) -> Tensor:
                return topk_rows(partial(_per_row, divergence), logits(x), ids, logp)

            streams = hidden, spread(batch.teacher_ids), spread(batch.teacher_logp)
            return (*out, by_rows(topk, *streams, chunk_size=CHUNK_SIZE, mask=spread(batch.mask)))
        total = torch.zeros_like(out.logp)
        for teacher, states, has in of_teachers:
            theirs, same = _logits_of(teacher.policy), teacher.tokenizers is None

            def whole(x: Tensor, t: Tensor, theirs: Any = theirs, same: bool = same) -> Tensor:
                both = [logits(x), theirs(t).detach()]  # the head may be the student's own
                if same:  # a matrix may have rows for tokens that the tokenizer lacks
                    both = [z[:, : min(z.shape[1] for z in both)] for z in both]
                return _per_row(divergence, *(z.log_softmax(-1).clamp(min=MIN_LOGP) for z in both))

            total = total + by_rows(whole, hidden, spread(states), chunk_size=CHUNK_SIZE, mask=spread(has))
        return (*out, total)

    logp, entropy, loss = token_outputs(policy.model, batch, head, outputs=3, dtype=DTYPES[policy.dtype])
    return LogProbs(logp, entropy), loss


def _per_row(divergence: Divergence, log_q: Tensor, log_p: Tensor) -> Tensor:
    """The divergence, which may be the user's; ValueError for another shape than a number per row."""
    loss = divergence(log_q, log_p)
    if loss.shape != log_q.shape[:-1]:
        raise ValueError(f"the divergence must return a loss per row, {[*log_q.shape[:-1]]}, got {[*loss.shape]}")
    return loss


def _rows_of(index: int, teacher: LocalTeacher, batch: Batch) -> tuple[LocalTeacher, Tensor, Tensor]:
    """The teacher, its hidden states `[T, D]` at the tokens of its own sequences, and which those are.

    On many ranks each runs every teacher, also on none of its sequences.
    """
    own, tokens = sequences_of(index, batch)
    states, has = teacher.hidden(own)
    whole = states.new_zeros(batch.num_tokens, *states.shape[1:])  # of another pipeline stage: no second axis
    whole[tokens.to(states.device)] = states
    there = torch.zeros_like(batch.mask)
    there[tokens] = has
    return teacher, whole, there & batch.mask
