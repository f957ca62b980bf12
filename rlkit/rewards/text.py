"""Rewards for texts: equality and overlap with a reference, and repetition."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_normalize(text: str) -> str:
    """Lower case; without ASCII punctuation, the articles a, an, the, and blanks beyond one between words.

    The order is that of SQuAD's evaluation script.

    >>> squad_normalize("The  U.S.A., an answer!")
    'usa answer'

    Reference: https://arxiv.org/abs/1606.05250, https://rajpurkar.github.io/SQuAD-explorer (evaluate-v2.0.py)
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(completion: str, row: dict[str, Any], *, column: str = "answer") -> float:
    """1 if the completion is one of the references `row[column]` (a text or a list of texts) after `squad_normalize`.

    Differs: verl's `search_r1_like_qa_em` first takes the last `<answer>` tag; use `extract.last_tag` for that.
    Reference: SQuAD's exact match.
    """
    return max(float(squad_normalize(completion) == squad_normalize(text)) for text in _references(row, column))


def f1(completion: str, row: dict[str, Any], *, column: str = "answer") -> float:
    """Overlap of words with the nearest reference, after `squad_normalize`; the words are counted as multisets.

        P = |c & r| / |c|     R = |c & r| / |r|     F1 = 2 P R / (P + R)

    Limits:    equal bags of words 1, no common word 0; two empty texts 1, one empty text 0.
    Reference: SQuAD's F1.
    """
    return max(_f1(completion, text) for text in _references(row, column))


def _f1(completion: str, reference: str) -> float:
    words, wanted = squad_normalize(completion).split(), squad_normalize(reference).split()
    if not words or not wanted:
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))


def contains(completion: str, row: dict[str, Any], *, column: str = "answer") -> float:
    """1 if a reference's normalised words stand next to each other in the completion's, else 0 (Search-R1's subEM)."""
    text = f" {squad_normalize(completion)} "
    return max(float(f" {squad_normalize(reference)} " in text) for reference in _references(row, column))


def repetition(completion: str, _row: dict[str, Any], *, n: int = 3, max_penalty: float = -1.0) -> float:
    """A penalty for repeated n-grams of words, between 0 and `max_penalty`.

        r = max_penalty (1 - |distinct n-grams| / |n-grams|)          words: lower case, split at blanks

    Limits:    no n-gram twice gives 0; one word repeated m times gives max_penalty (1 - 1 / (m - n + 1)); fewer than n
               words give 0. Chinese and Japanese have no blanks: give the tokens to `repeated_share` there.
    Differs:   from open-r1's `get_repetition_penalty_reward`: nothing. The paper spreads it over the repeated tokens.
    Reference: https://arxiv.org/abs/2502.03373, appendix C.2
    """
    return _penalty(completion.lower().split(), n, max_penalty)


def repetition_of_tokens(
    _completion: str, _row: dict[str, Any], completion_ids: Sequence[int], *, n: int = 20, max_penalty: float = -1.0
) -> float:
    """`repetition` of tokens instead of words: for any language, and for loops in code or digits."""
    return _penalty(completion_ids, n, max_penalty)


def _penalty(items: Sequence[Hashable], n: int, max_penalty: float) -> float:
    if max_penalty > 0:
        raise ValueError(f"max_penalty must not be positive, got {max_penalty}")
    return max_penalty * repeated_share(items, n=n)


def repeated_share(items: Sequence[Hashable], *, n: int) -> float:
    """The share of n-grams that stood earlier in the sequence, `1 - |distinct| / |all|`; 0 if there are none."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    num = len(items) - n + 1
    if num < 1:
        return 0.0
    return 1.0 - len({tuple(items[i : i + n]) for i in range(num)}) / num


def language_share(completion: str, _row: dict[str, Any], *, scripts: Iterable[str] = ("LATIN",)) -> float:
    """The share of letters that belong to the scripts named, as in "CYRILLIC", "CJK", "HIRAGANA"; 1 without letters.

    A stand-in for DeepSeek-R1's language consistency reward (the share of words in the target language): a script is
    exact and needs no language model, but does not tell English from French.

    Reference: https://arxiv.org/abs/2501.12948, section 2.3.2
    """
    wanted = tuple(scripts)
    letters = [unicodedata.name(char, "") for char in completion if char.isalpha()]
    return sum(name.startswith(wanted) for name in letters) / len(letters) if letters else 1.0


def _references(row: dict[str, Any], column: str) -> list[str]:
    value = row.get(column)
    references = [value] if isinstance(value, str) else list(value or [])
    if not references or not all(isinstance(text, str) for text in references):
        raise ValueError(f"row[{column!r}] must be a text or a list of texts, got {repr(value)[:80]}")
    return references
