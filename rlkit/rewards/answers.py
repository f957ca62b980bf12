"""Texts to try a reward function with: gold answers as a policy may write them, and wrong answers near them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from rlkit.data.messages import json_of
from rlkit.rewards.source import texts_in
from rlkit.rewards.text import final_answer, last_boxed, last_tag

_SHORT = 30  # characters: of a longer text another digit may count for little
LONGEST = 1000  # characters of an answer that is tried in other forms
FORMS = (  # in which rewards look for an answer
    "{}", r"\boxed{{{}}}", "<answer>{}</answer>", "<think>\n1\n</think>\n<answer>{}</answer>", "#### {}",
    "The answer is {}.", "The answer is {}", "Answer: {}", "**{}**", "({})", '{{"answer": "{}"}}', "```python\n{}\n```",
    "```python\nprint('{}')\n```", "<think>\n1\n</think>\n\\boxed{{{}}}",
    "<think>\n1\n</think>\n<answer>\\boxed{{{}}}</answer>",
)  # fmt: skip
DECIMAL_COMMA = re.compile(r"-?[\d.]+,\d{1,2}")
_MARK = re.compile(r"<\w+>|.{1,30}[:#>=]\s*")  # a constant after which a function may look for an answer
_SAID = re.compile(r"\b(?:answer|result)(?: is|:)\s+(.+?)[.\s]*\Z", re.IGNORECASE)
_LIST = re.compile(r"""\[\s*["'](.+?)["']\s*,\s*["'].*["']\s*\]""", re.DOTALL)  # the text of one, of several texts
_CHOICE = re.compile(r"\(?([A-J])[.):]\s+\S")
_WITH_UNIT = re.compile(r"([$€£]?-?\d[\d.,/]*)\s+[^\W\d]+\.?")
_CAPTURES = re.compile(r"\((?:\?P<\w+>)?[.\\\[-]")  # a text that is a regular expression
_TAGGED = re.compile(r"<\w+>(?:\\[sn][*+]?)?(?:\.|\[\\s\\S\])[*+]")  # one that captures nothing, of a form
_TOKEN = re.compile(  # of a regular expression: what it captures, what may be missing, any text, blanks, a character
    r"(?P<group>\((?:\?P<\w+>)?(?!\?)(?:\\.|\[(?:\\.|[^]])*\]|[^()\\])*\)[?*+]*)|(?P<none>\(\?[a-z]+\)|\(\?:[^()]*\)[?*]|"
    r"\\[AZb]|[\^$?])|(?P<any>(?:\.|\[\\s\\S\]|\[\^[^]]*\])[*+]\??)|(?P<blank>\\s[*+]?\??)|\\(?P<char>.)"
)


def forms_of(function: Callable[..., Any]) -> list[str]:
    """`FORMS`, and those of the tags, marks, regular expressions and keys that the function's source holds."""
    texts = texts_in(function)
    forms, keys = [*FORMS], [text for text in texts if isinstance(text, str) and text.isidentifier()]
    for text in texts:
        pattern = text if isinstance(text, re.Pattern) else None
        if pattern or _CAPTURES.search(text) or _TAGGED.search(text):
            forms += _of_pattern(pattern or text)
        elif _MARK.fullmatch(text) and not text.startswith("</"):
            mark, close = _escaped(text.rstrip()), _escaped(f"</{text[1:]}")
            forms += [f"{mark}{{0}}{close}", f"{mark}1{close}{{0}}"] if mark.startswith("<") else [f"{mark} {{0}}"]
    forms += [_escaped(json.dumps(dict.fromkeys(keys, "\0")).replace("\\u0000", "\0"))] * bool(keys)
    return [*{form.format("7"): form for form in forms}.values()]


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}").replace("\0", "{0}")


def _of_pattern(pattern: str | re.Pattern[str]) -> list[str]:
    """The text in which a regular expression captures an answer, or has it last, if one can be made of it."""
    written = {"group": "\0", "none": "", "any": "\1", "blank": " "}

    def text_of(token: re.Match[str]) -> str:
        return written.get(kind := token.lastgroup or "", "\n" if token[kind] == "n" else token[kind])

    try:
        compiled = re.compile(pattern, 0 if isinstance(pattern, re.Pattern) else re.DOTALL)
        before, last, after = _TOKEN.sub(text_of, compiled.pattern).rpartition("\1")
        text = f"{before}{last if compiled.groups else last and chr(0)}{after}".replace("\1", "1")
        found = compiled.search(text.replace("\0", "7"))
    except (re.error, TypeError, OverflowError):
        return []
    return [_escaped(text)] if found and "7" in (found.groups() or text.replace("\0", "7")) else []


def answers(gold: str) -> list[str]:
    """What a policy may write for a gold answer: itself first, and what it says at its end."""
    marked = gold.rpartition("####")[2].strip()
    short = [marked, marked.replace(",", ""), marked.removesuffix(".0"), final_answer(gold) or gold]
    return [*dict.fromkeys([gold, *short, gold.strip().lower()])]


def lowered(gold: str) -> str:
    """A gold answer in lower case, where it is written otherwise; else empty."""
    lower = gold.strip().lower()
    return lower if lower != gold.strip() else ""


def short(gold: str, *, mathematics: bool = False) -> str:
    """The answer that a gold answer ends with, where it is a longer text, or the first of a list's text; else empty.

    With `mathematics` also the letter of a choice, and the number before a unit.
    """
    marked = gold.rpartition("####")[2] if "####" in gold else last_boxed(gold) or last_tag(gold)
    forms = (_CHOICE.match(gold), _WITH_UNIT.fullmatch(gold.strip())) if mathematics else ()
    found = next(filter(None, (_LIST.fullmatch(gold.strip()), _SAID.search(gold), *forms)), None)
    answer = (marked or (found[1] if found else "")).strip()
    return answer if answer != gold.strip() else ""


def near(gold: str, *, decimal_comma: bool = False) -> Sequence[str]:
    """Wrong answers that share the characters of a gold answer.

    Of a whole number: its digits, it backwards, without its sign, within a longer number, between its commas, and what
    is over a tenth from it. Of any number: "nan". Of one with a point: it without the point, and what is far from it of
    the number at either side, without its sign, or with another digit before it. Of numbers in a list: the first. Of an
    object in JSON: an empty one, and one without its last key. Of a short text that begins with a digit: another one.
    Of words: a part, each backwards, also after the first letters, an article. For a choice A: words with the letter,
    or that begin with it. With `decimal_comma`: its two sides in turn.
    """
    sign, digits = gold[: gold.startswith("-")], gold.replace(",", "").removeprefix("-")
    if decimal_comma:
        return [",".join(gold.split(",")[::-1])]
    if digits.isdecimal():
        groups = gold.split(",") if re.fullmatch(r"-?\d{1,3}(,\d{3})+", gold) else []
        step = 1 + int(digits) // 10  # beyond any tolerance
        parts = [digits[0], digits[-1], sign + digits[::-1], digits, *groups]
        parts += [str(int(sign + digits) + x) for x in (step, -step)]
        within = f"{gold}9" if sign else f"9{gold}9"
        return [*dict.fromkeys(x for x in parts if int(x) != int(sign + digits)), "nan", within]
    if re.fullmatch(r"\d+\.\d+", digits):
        whole, _, rest = digits.partition(".")
        parts = [sign + whole, rest, digits, f"{sign}1{digits}"]
        far = [x for x in parts if abs(float(x) - float(sign + digits)) > 0.1 * float(digits)]  # of any tolerance
        return [*dict.fromkeys([sign + digits.replace(".", ""), "nan", *far])]
    if re.fullmatch(r"-?\d[\d.]*(, ?-?\d[\d.]*){2,}", gold):
        return [gold.partition(",")[0]]
    if gold[:1] == "{" and isinstance(value := json_of(gold), dict) and value:
        return ["{}", json.dumps(dict([*value.items()][:-1]))]
    if gold == "A":
        return ["It is a word.", "xAx", "All"]
    if _CHOICE.match(gold) or re.search(r"[\\{}=+*/^<>_$]", gold):
        return []
    if re.search(r"[\d-]", gold):
        other = re.sub(r"\d", lambda digit: str(int(digit[0]) % 9 + 1), gold, count=1)
        return [other] * (gold[0] in "0123456789" and len(gold) <= _SHORT)
    backwards = re.sub(r"[Nn]o\b|[^\W\d]{3,}", lambda word: word[0][::-1], gold)
    words = [gold[1:3], gold[: (len(gold) + 1) // 2] + backwards] if gold.isalpha() and len(gold) > 4 else []
    words += [word for word in gold.lower().split() if word in ("the", "of") and " " in gold.strip()][:1]
    return words + [backwards] * (backwards != gold)
