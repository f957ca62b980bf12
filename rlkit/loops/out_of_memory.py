"""Smaller micro-batches where memory runs out in the gradients of an optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from rlkit._util.ranks import world_size
from rlkit.packing.balancing import largest_piece
from rlkit.types import Batch

X = TypeVar("X")
_log = logging.getLogger("rlkit.loops")
_lowered: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # model -> tokens per micro-batch


def retry_smaller(
    gradients: Callable[[int], X], batch: Batch, *, model: Any, max_tokens: int, whole_groups: bool = False
) -> X:
    """`gradients(max_tokens)`, called again with half as many tokens per micro-batch where memory runs out.

    `gradients` runs all micro-batches of one optimizer step on `batch`, and leaves their gradients on the parameters of
    `model`. A failed attempt is undone as a whole, because a backward that fails has added only a part of its
    gradients. So the result has the bits of a run whose micro-batches were smaller from the start. Later steps of the
    same model use the smaller ones too, except where a longer sequence (with `whole_groups`, a larger group) needs
    more; a line in the log names the number and the flag.

    Errors: torch.OutOfMemoryError, with a note, where a smaller micro-batch is impossible: it is one sequence or group
    already; the parameters held gradients before; there are several ranks, of which the others wait in the collectives
    of a micro-batch that one cannot finish.
    """
    empty, tokens = all(p.grad is None for p in model.parameters()), max_tokens
    while True:
        if model in _lowered:
            tokens = min(max_tokens, max(_lowered[model], largest_piece(batch, whole_groups=whole_groups)))
        try:
            return gradients(tokens)
        except torch.OutOfMemoryError as error:
            least = largest_piece(batch, whole_groups=whole_groups)
            tokens = min(tokens, batch.num_tokens + batch.prefix_tokens.numel())
            if reason := _refusal(tokens, least, empty=empty, whole_groups=whole_groups):
                error.add_note(reason)
                raise
        model.zero_grad(set_to_none=True)  # here the failed attempt's tensors are gone, with its traceback
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _lowered[model] = max(least, tokens // 2)
        _log.warning(
            "out of memory at %d tokens per micro-batch: this step is repeated, and training goes on, with at most %d "
            "(--max-tokens %d, in Python Optim(max_tokens=%d), begins with it)", tokens, *[_lowered[model]] * 3,
        )  # fmt: skip


def _refusal(tokens: int, least: int, *, empty: bool, whole_groups: bool) -> str:
    """Why a micro-batch of so many tokens cannot be repeated in smaller ones; "" if it can."""
    if world_size() > 1:
        fault = "micro-batches are not made smaller on several ranks, which wait for each other within each of them"
        return f"{fault}: lower --max-tokens"
    if not empty:
        return "micro-batches were not made smaller: the parameters had gradients before, which an attempt adds to"
    one = "group" if whole_groups else "sequence"
    return f"the micro-batch was one {one} of {tokens} tokens: no --max-tokens makes it smaller" * (tokens <= least)
