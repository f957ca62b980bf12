"""Rewards for the form of a completion: 1 if it has the form, else 0. They say nothing about the answer.

Options are keywords: `functools.partial(matches, pattern=r"...")` is a reward function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_TAGS = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_THINK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def think_answer_tags(completion: str, _row: dict[str, Any], *, opened: bool = False) -> float:
    """1 for `<think>...</think><answer>...</answer>`, each tag once, in this order, nothing but blanks around; else 0.

    `opened`: the prompt ends with `<think>`, so the completion begins inside it.

    Differs: DeepSeek-R1's format reward is the pattern alone, which further tags inside also match.
    Reference: https://arxiv.org/abs/2501.12948, table 1
    """
    text = f"<think>{completion}" if opened else completion
    found = _TAGS.fullmatch(text)
    return float(found is not None and all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>")))


def think_tags(completion: str, _row: dict[str, Any], *, opened: bool = False) -> float:
    """1 for `<think>...</think>` once, at the beginning, with an answer after it; else 0.

    `opened`: the prompt ends with `<think>`, so the completion begins inside it.

    Differs: TRL's `think_format_reward` also accepts a completion that ends with `</think>`.
    """
    text = f"<think>{completion}" if opened else completion
    found = _THINK.fullmatch(text)
    once = text.count("<think>") == 1 and text.count("</think>") == 1
    return float(found is not None and once and bool(found.group(2).strip()))


def tag_count(completion: str, _row: dict[str, Any], *, tags: tuple[str, ...] = ("think", "answer")) -> float:
    """The share of the opening and closing tags that are there exactly once: a denser `think_answer_tags`.

        1 / (2 K) sum_k [count(<t_k>) = 1] + [count(</t_k>) = 1]

    Differs: open-r1's `tag_count_reward` also wants the line breaks around each tag.
    """
    counts = [completion.count(f"<{slash}{tag}>") == 1 for tag in tags for slash in ("", "/")]
    return sum(counts) / len(counts)


def matches(completion: str, _row: dict[str, Any], *, pattern: str, flags: int = re.DOTALL) -> float:
    """1 if the whole completion matches a regular expression, else 0. Write `.*` around it to search.

    Python's engine backtracks: a pattern such as `(a+)+b` can take for ever (the reward's timeout then says so).
    """
    return float(re.fullmatch(pattern, completion, flags) is not None)


def valid_json(
    completion: str, _row: dict[str, Any], *, types: Mapping[str, type | tuple[type, ...]] | None = None
) -> dict[str, Any]:
    """1 if the completion, or the one fenced block it consists of, is one JSON value as RFC 8259 has it, else 0.

    `types` wants an object with (at least) these keys, of these Python types; bool is not taken for int or float.
    NaN, Infinity and a key given twice are not JSON here.
    """
    text = completion.strip()
    if fenced := re.fullmatch(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", text, re.DOTALL):
        text = fenced.group(1)
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        return {"reward": 0.0, "reason": str(error)[:200]}
    if types is not None:
        if not isinstance(value, dict):
            return {"reward": 0.0, "reason": "not an object"}
        for key, wanted in types.items():
            if key not in value or not _is(value[key], wanted):
                return {"reward": 0.0, "reason": f"key {key!r} is missing or of another type"}
    return {"reward": 1.0}


def _is(value: Any, wanted: type | tuple[type, ...]) -> bool:
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds or object in kinds)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return dict(pairs)
