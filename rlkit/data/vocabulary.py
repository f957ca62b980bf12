"""Tokens that a tokenizer has and the model's embedding lacks: added tokens, before the embedding was resized."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlkit.data.load import place_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_IDS = ("ids", "prompt", "chosen", "rejected", "response")  # of prompts, examples, pairs and labelled responses


def check_vocabulary(
    items: Iterable[Any], *, tokenizer: PreTrainedTokenizerBase, num_rows: int, rows: Sequence[Any] = ()
) -> None:
    """ValueError, with the token and the first of the `rows` that has its text, where an id of the tokenized `items`
    has no row in an embedding of `num_rows`."""
    largest = max((max(ids, default=0) for item in items for ids in _ids_of(item)), default=0)
    if largest < num_rows:
        return
    token = str(tokenizer.convert_ids_to_tokens(largest))
    has_it = (i for i, row in enumerate(rows) if token in json.dumps(row, ensure_ascii=False, default=str))
    place = next((place_of(rows, i) for i in has_it), "the chat template")
    more = vocabulary_size(tokenizer) - num_rows
    fix = f"--resize-embeddings adds rows for the {more} tokens that were added to its tokenizer"
    raise ValueError(f"{place}: token {token!r} has id {largest}, and the model's embedding has {num_rows} rows: {fix}")


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The rows of an embedding for all tokens of a tokenizer."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _ids_of(item: Any) -> Iterator[Sequence[int]]:
    for name in _IDS:
        if isinstance(ids := getattr(item, name, None), list):
            yield ids
