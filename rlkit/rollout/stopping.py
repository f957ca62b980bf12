"""Stop strings over a stream of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Says after each new token whether the text of the completion so far contains one of `stop`.

    A stop string may begin and end inside tokens; special tokens are part of the text; the prompt is not searched.
    Only a window of the last tokens is decoded, long enough for the longest stop string, an unfinished character
    before it and the leading space that some tokenizers drop, so that a token costs the same however long the
    completion is. `tokenizer` needs `decode(ids, skip_special_tokens=False)`: a transformers or a tokenizers one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        if "" in stop:
            raise ValueError("stop must not hold an empty string: it would end every completion at its first token")
        self._decode = tokenizer.decode
        self._stop = tuple(stop)
        self._needed = max(map(len, stop)) + 4
        self._window: list[int] = []

    def push(self, token: int) -> bool:
        """Add one token; True if a stop string is now in the text."""
        self._window.append(token)
        text = self._decode(self._window, skip_special_tokens=False)
        if any(s in text for s in self._stop):
            return True
        if len(text) > 3 * self._needed:
            newer = self._window[len(self._window) // 2 :]
            if len(self._decode(newer, skip_special_tokens=False)) >= self._needed:
                self._window = newer
        return False
