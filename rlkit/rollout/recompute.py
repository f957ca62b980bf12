"""The decoder of last resort: any causal LM, by its own forward over the whole sequence for every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit.parallel.attention import as_inference


class Recompute:
    """Same calls as `rlkit.rollout.decode.Decoder`, without keys and values: slots hold token ids. O(length)
    forwards' work per token, and correct for whatever the model is, since only `model(input_ids, attention_mask)` is
    asked of it."""

    def __init__(self, model: Any, *, max_batch: int, max_len: int) -> None:
        self._model, self._max_len = model, max_len
        self.sizes = list(range(1, max_batch + 1))
        self._ids = torch.zeros(0, 0, dtype=torch.long, device=model.device)

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def release(self) -> None:
        """Nothing worth freeing."""

    def reserve(self, rows: int, length: int, *, keep: int) -> None:
        """Make room for `length` tokens in slots 0..rows-1; slots below `keep` keep theirs."""
        old = self._ids
        if rows > old.shape[0] or length > old.shape[1]:
            self._ids = old.new_zeros(max(rows, old.shape[0]), max(length, min(self._max_len, 2 * old.shape[1])))
            self._ids[:keep, : old.shape[1]] = old[:keep]

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Note each prompt in its slot."""
        for prompt, slot in zip(prompts, slots, strict=True):
            self._ids[slot, : len(prompt)] = torch.tensor(prompt, device=self._ids.device)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """The first `length` tokens of each source slot, into its target slot."""
        self._ids[torch.tensor(targets), :length] = self._ids[torch.tensor(sources), :length]

    @torch.no_grad()
    def decode(self, tokens: Int[Tensor, "B"], positions: Int[Tensor, "B"], longest: int) -> Float[Tensor, "B V"]:
        """Logits after reading `tokens[i]` at `positions[i]` of slot i."""
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        self._ids[rows, positions] = tokens
        ids = self._ids[: tokens.shape[0], :longest]
        mask = torch.arange(longest, device=tokens.device) <= positions[:, None]
        with as_inference(self._model):
            logits = self._model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return logits[rows, positions].float()
