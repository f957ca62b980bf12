"""The same texts in another tokenizer, and which positions of both are at the same character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from rlkit.packing import pack
from rlkit.segments import seq_lens
from rlkit.types import Batch, Trajectory


def aligned(batch: Batch, ours: Any, theirs: Any) -> tuple[Batch, Int[Tensor, "T"]]:
    """The batch's texts in the tokens of `theirs`, and for each token of `batch` (in those of `ours`) the row of that
    batch which predicts from the same text; -1 where theirs has a token over that place.

    The text is that of prompt and answer as they stand, with special tokens; a special token at the end is left out, so
    that both models predict their own end there.
    """
    samples, rows = [], torch.full((batch.num_tokens,), -1)
    prefixes = batch.prefix_tokens.split(seq_lens(batch.prefix_cu).tolist())
    places: list[list[tuple[int, int]]] = []
    for i, (begin, end) in enumerate(zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist())):
        prompt = [*prefixes[int(batch.prefix_ids[i])].tolist(), *batch.tokens[begin : begin + 1].tolist()]
        ids = batch.targets[begin : end - int(batch.truncated[i])].tolist()
        if special := ids[-1:] and ids[-1] in ours.all_special_ids:
            ids = ids[:-1]
        text = ours.decode(ids)
        other = theirs.encode(text, add_special_tokens=False)
        head = _begun(theirs, ours.decode(prompt)) or [theirs.eos_token_id]
        num = len(other)
        samples.append(Trajectory(head, other, [True] * num, [0.0] * num, [0] * num, truncated=True))
        row_at = {place: row for row, place in enumerate([*_starts(theirs, other), len(text)]) if place >= 0}
        our_starts = [*_starts(ours, ids), *([len(text)] if special else [])]
        places.append([(begin + t, row_at[place]) for t, place in enumerate(our_starts) if place in row_at])
    packed = pack([[sample] for sample in samples])
    for start, pairs in zip(packed.cu_seqlens.tolist(), places):
        for t, row in pairs:
            rows[t] = start + row
    return packed, rows


def _begun(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text with the tokenizer's bos before them, once: the text may begin with it."""
    bare, whole = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(text)
    num = next((k for k in range(len(whole)) if whole[k : k + len(bare)] == bare), 0)
    return [*(bare if bare[:num] == whole[:num] else whole[:num] + bare)]


def _starts(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Where in the text of `ids` each token begins; -1 inside a character."""
    places, length, first, before, inside = [], 0, 0, "", False
    for i in range(len(ids)):
        places.append(-1 if inside else length)
        text = tokenizer.decode(ids[first : i + 1])
        inside = text.endswith("\ufffd")  # the bytes so far end in the middle of a character
        if not inside:
            length += len(text) - len(before)
            first, before = i, tokenizer.decode(ids[i : i + 1])  # some tokenizers drop the blank of the first token
    return places
