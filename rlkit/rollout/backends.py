"""Which decoder serves a model: the fast one where it is provably the same function, else the model's own forward."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit.parallel.attention import as_inference
from rlkit.rollout.decode import Decoder, why_unsupported
from rlkit.rollout.recompute import Recompute

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What the engine asks of a decoder. Slots are 0..max_batch-1; `decode` serves slots 0..B-1, B in `sizes`."""

    sizes: list[int]

    def reserve(self, rows: int, length: int, *, keep: int) -> None:
        """Make room for `length` positions in slots 0..rows-1; slots below `keep` keep what they hold."""

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Read each prompt into its slot."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """The first `length` positions of each source slot, into its target slot."""

    def decode(self, tokens: Int[Tensor, "B"], positions: Int[Tensor, "B"], longest: int) -> Float[Tensor, "B V"]:
        """Read `tokens[i]` at `positions[i] < longest` of slot i; the logits of what follows."""

    def refresh(self) -> None:
        """The model's parameters may be other tensors now."""

    def release(self) -> None:
        """Free what is cached: nothing runs."""


def pick_decoder(model: Any, *, max_batch: int, max_len: int, compile: bool) -> Backend:
    """The fast decoder if it supports the model and its logits equal those of the model on a probe; else the slow one.

    The probe prefills two short prompts of different lengths and decodes four tokens of each. The reason for the
    slow one is logged in one line.
    """
    reason = why_unsupported(model, max_len)
    if reason is None:
        decoder = Decoder(model, max_batch=max_batch, max_len=max_len, compile=compile)
        reason = disagreement(decoder, model, max_len=max_len)
        if reason is None:
            return decoder
    logger.warning("LocalEngine decodes %s through the model's own forward: %s", type(model).__name__, reason)
    return Recompute(model, max_batch=max_batch, max_len=max_len)


@torch.no_grad()
def disagreement(decoder: Backend, model: Any, *, max_len: int) -> str | None:
    """How the decoder's logits differ from the model's on a probe, in words; None if they are equal up to rounding."""
    vocab = model.get_input_embeddings().weight.shape[0]
    lens = [min(n, max_len - 4) for n in (9, 6)]
    if min(lens) < 1:
        return f"max_len {max_len} is too short to check it"
    ids = (torch.arange(2 * (max(lens) + 4), device=model.device) * 7919 % vocab).view(2, -1)
    with as_inference(model):
        truth = model(input_ids=ids, use_cache=False).logits.float()
    rows = torch.arange(decoder.sizes[bisect_left(decoder.sizes, 2)], device=model.device)
    decoder.reserve(len(rows), max(lens) + 4, keep=0)
    decoder.prefill([row[: n - 1] for row, n in zip(ids.tolist(), lens, strict=True) if n > 1], [0, 1])
    worst = torch.zeros((), device=model.device)
    for step in range(4):
        positions = torch.zeros_like(rows)
        positions[:2] = torch.tensor([n - 1 + step for n in lens])
        tokens = ids[rows % 2, positions]
        logits = decoder.decode(tokens, positions, int(positions.max()) + 1)
        worst = torch.maximum(worst, (logits[:2] - truth[rows[:2], positions[:2]]).abs().max())
    decoder.release()
    tolerance = max(1e-4, 8 * torch.finfo(model.dtype).eps) * max(1.0, float(truth.abs().max()))
    return None if float(worst) <= tolerance else f"its logits differ by {float(worst):.1e} on a probe"
