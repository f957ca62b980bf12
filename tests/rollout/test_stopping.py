from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.data.tiny import tiny_tokenizer
from rlkit.rollout.engines.local.rows import StopStrings


class Pieces:
    """A tokenizer with the given strings as tokens; records the longest decode."""

    def __init__(self, *pieces: str) -> None:
        self.pieces, self.longest = pieces, 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        self.longest = max(self.longest, len(ids))
        return "".join(self.pieces[i] for i in ids)


def first_stop(stop: StopStrings, ids: list[int]) -> int | None:
    return next((i for i, token in enumerate(ids) if stop.push(token)), None)


@given(
    st.lists(st.integers(0, 5), max_size=60), st.lists(st.text("ab<>", min_size=1, max_size=5), min_size=1, max_size=3)
)
def test_stops_at_the_first_token_that_completes_a_stop_string(ids, stop):
    tokenizer = Pieces("a", "b", "<", ">", "ab<", ">>a")
    text, truth = "", None
    for i, token in enumerate(ids):
        text += tokenizer.pieces[token]
        if truth is None and any(s in text for s in stop):
            truth = i
    assert first_stop(StopStrings(tokenizer, stop), ids) == truth


def test_a_long_completion_costs_no_more_per_token_than_a_short_one():
    tokenizer = Pieces("a", "b")
    stop = StopStrings(tokenizer, ["bab"])
    assert first_stop(stop, [0, 0, 1] * 400 + [0, 1]) == 1201
    assert tokenizer.longest < 50


def test_text_that_is_spread_over_bytes_and_special_tokens():
    tokenizer = tiny_tokenizer()
    ids = [*"naïve €5 →".encode(), tokenizer.convert_tokens_to_ids("<|im_end|>"), *b"\n"]
    for text, last in (("ï", b"na\xc3\xaf"), ("€5", "naïve €5".encode()), ("→", "naïve €5 →".encode())):
        assert first_stop(StopStrings(tokenizer, [text]), ids) == len(last) - 1
    assert first_stop(StopStrings(tokenizer, ["→<|im_end|>"]), ids) == len(ids) - 2
    assert first_stop(StopStrings(tokenizer, ["5<|im_end|>"]), ids) is None


def test_bytes_that_never_become_text_do_not_hide_what_follows():
    stop = StopStrings(tiny_tokenizer(), ["stop"])
    assert first_stop(stop, [0xFF, 0xC3] * 200 + list(b"sstop")) == 404


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop must not hold an empty string"):
        StopStrings(Pieces("a"), ["a", ""])
