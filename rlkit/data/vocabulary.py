"""Tokens that the model's embedding lacks (added, before it was resized), and texts that the tokenizer lacks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from rlkit.data.load import place_of
from rlkit.data.markup import markup_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("rlkit.data")
_TRAINED = ("chosen", "rejected", "response")  # of pairs and labelled responses
_IDS = ("ids", "prompt", *_TRAINED)  # of prompts and examples, too


def check_vocabulary(
    items: Sequence[Any], *, tokenizer: PreTrainedTokenizerBase, num_rows: int, rows: Sequence[Any] = ()
) -> None:
    """ValueError, with the token and the first of the `rows` that has its text, where an id of the tokenized `items`
    has no row in an embedding of `num_rows`. Logged: how many of those that are trained, or asked, are unknown;
    an embedding that is far larger."""
    _name_unknown(items, tokenizer)
    size, told = len(tokenizer), markup_of(tokenizer).told
    if num_rows - size > max(size // 2, 256) and "rows" not in told:  # padding is far less
        told.add("rows")
        _log.warning(
            "the model's embedding has %d rows for %d tokens: is the tokenizer that of the model?", num_rows, size
        )
    largest = max((max(ids, default=0) for item in items for ids in _ids_of(item)), default=0)
    if largest < num_rows:
        return
    token = str(tokenizer.convert_ids_to_tokens(largest))
    has_it = (i for i, row in enumerate(rows) if token in json.dumps(row, ensure_ascii=False, default=str))
    place = next((place_of(rows, i) for i in has_it), "the chat template")
    more = vocabulary_size(tokenizer) - num_rows
    fix = f"--resize-embeddings adds rows for the {more} tokens that were added to its tokenizer"
    raise ValueError(f"{place}: token {token!r} has id {largest}, and the model's embedding has {num_rows} rows: {fix}")


def _name_unknown(items: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Log how many of the trained tokens (of prompts, of all) are the tokenizer's unknown one, if that is no other."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or unknown in markup_of(tokenizer).ends | {tokenizer.bos_token_id}:
        return
    asked = any(hasattr(item, "ids") and not hasattr(item, "mask") for item in items)
    nums = [(of.count(unknown), len(of)) for item in items for of in _trained(item)]
    if num := sum(count for count, _ in nums):
        kind = "tokens of the prompts" if asked else "trained tokens"
        why = "the tokenizer lacks the characters there, or the texts hold it"
        _log.warning("%d of %d %s are %s: %s", num, sum(n for _, n in nums), kind, tokenizer.unk_token, why)


def _trained(item: Any) -> Iterator[list[int]]:
    """The trained ids of an example, of a pair or of a labelled response; those of a prompt."""
    if (ids := getattr(item, "ids", None)) is not None:
        mask = getattr(item, "mask", None)
        yield [*ids] if mask is None else [*compress(ids, mask)]
    for name in _TRAINED:
        if (ids := getattr(item, name, None)) is not None:
            yield [*ids]


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The rows of an embedding for all tokens of a tokenizer."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _ids_of(item: Any) -> Iterator[Sequence[int]]:
    for name in _IDS:
        if isinstance(ids := getattr(item, name, None), list):
            yield ids
