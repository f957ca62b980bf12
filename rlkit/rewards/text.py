"""Rewards for texts: answer extraction, format, length, equality and overlap with a reference, repetition.

`last_...` functions extract an answer from a completion, or return None. They take time linear in the length of the
text, whatever a model repeats.

Rewards for the format of a completion are 1 if it has the format, else 0, and ignore the answer. Options are keywords:
`functools.partial(matches, pattern=r"...")` is a reward function. Lengths are numbers of `completion_ids`.

The system prompts at the end ask for these formats. They are data: `--system-prompt`, or `rl_prompts`.
`BOXED` is for `math.boxed` and `math.anywhere`, `THINK_ANSWER` for `math.answer_tag` and `think_answer_tags`, `CODE`
for `code.stdin_tests`, `FUNCTION` for `code.assert_tests`, and `JSON` for `valid_json`.
"""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from typing import Any

from rlkit.data.columns import is_empty
from rlkit.data.schema import GOLD
from rlkit.rewards.call import needing

_BOX = re.compile(r"\\(?:f?boxed|fbox)\s*")
_UNBRACED = re.compile(r"\\[A-Za-z]+|[^\s{}\\$]")
_FENCE = re.compile(r"^[ \t]*(`{3,}(?=[^`\n]*$)|~{3,})([^\n]*)$", re.MULTILINE)  # one of Markdown, and its info


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, also `\fbox`, `\fboxed`; braces may nest, but `\{`, `\}`.

    `\boxed 5` (without braces, as TeX allows) gives the one character or command that follows. A box that is not closed
    is ignored.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'

    Differs: verl `last_boxed_only_string` counts escaped braces, so `\boxed{\{1, 2\}}` works there only
    because they balance; an unclosed last box gives None there.
    """
    closing = _closing_braces(text)
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if text[start : start + 1] == "{":
            if start in closing:
                return text[start + 1 : closing[start]].strip()
        elif bare := _UNBRACED.match(text, start):
            if match.group().endswith(("d", "x")) and bare.group()[0].isalpha():
                continue  # \boxedx is another command
            return bare.group()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """The position of the closing brace, by the position of the opening one."""
    opened: list[int] = []
    closing = {}
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def last_tag(text: str, *, tag: str = "answer") -> str | None:
    """The text between the last `<tag>` and the `</tag>` after it.

    >>> last_tag("<answer>1</answer> wait <answer> 2 </answer>")
    '2'
    """
    contents = re.findall(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", text, re.DOTALL)
    return contents[-1].strip() if contents else None


def last_number(text: str) -> str | None:
    """The last decimal number, without thousands separators: GSM8K's way of reading an answer.

    >>> last_number("so it is $1,234.50.")
    '1234.50'
    """
    numbers = re.findall(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else None


def final_answer(text: str) -> str | None:
    """The answer of a text, to compare it with others: its last box, else `<answer>` tag, else number, else last line.

    >>> final_answer("It is 4.") == final_answer("<answer>4</answer>")
    True
    """
    answer = last_boxed(text) or last_tag(text) or last_number(text) or text.strip().rpartition("\n")[2]
    return "".join(answer.split()) or None


def last_code_block(text: str, *, languages: tuple[str, ...] = ("python", "py", "python3")) -> str | None:
    """The content of the last closed Markdown code block in one of the languages.

    A fence is three or more backticks or tildes; a block ends at a fence that is at least as long.
    """
    fences = [(fence.group(1), fence.group(2).strip(), fence) for fence in _FENCE.finditer(text)]
    block, position, unclosed = None, 0, set()
    while position < len(fences):
        mark, info, opening = fences[position]
        position += 1
        later = range(position, len(fences)) if mark not in unclosed else ()
        if (end := next((i for i in later if fences[i][0].startswith(mark) and not fences[i][1]), None)) is None:
            unclosed.add(mark)
            continue
        if (info.split() or [""])[0].lower() in languages:
            block = text[opening.end() + 1 : fences[end][2].start()]
        position = end + 1
    return block


_TAGS = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_THINK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def think_answer_tags(completion: str, _row: dict[str, Any]) -> float:
    """1 for `<think>...</think><answer>...</answer>`, each tag once, in this order, nothing but blanks around; else 0.

    A `<think>` that the prompt ends with is the beginning of the completion (see `rlkit.rewards.scoring.scorer`).

    Differs: DeepSeek-R1's format reward is the pattern alone, which further tags inside also match.
    Reference: https://arxiv.org/abs/2501.12948, table 1
    """
    return float(tag_count(completion, {}) == 1 and _TAGS.fullmatch(completion) is not None)  # linear in this order


def think_tags(completion: str, _row: dict[str, Any]) -> float:
    """1 for `<think>...</think>` once, at the beginning, with an answer after it; else 0.

    A `<think>` that the prompt ends with is the beginning of the completion (see `rlkit.rewards.scoring.scorer`).

    Differs: TRL's `think_format_reward` also accepts a completion that ends with `</think>`.
    """
    match = _THINK.fullmatch(completion)
    once = completion.count("<think>") == 1 and completion.count("</think>") == 1
    return float(match is not None and once and bool(match.group(2).strip()))


def tag_count(completion: str, _row: dict[str, Any], *, tags: tuple[str, ...] = ("think", "answer")) -> float:
    """The share of the opening and closing tags that are there exactly once: a denser `think_answer_tags`.

        1 / (2 K) sum_k [count(<t_k>) = 1] + [count(</t_k>) = 1]

    Differs: open-r1's `tag_count_reward` also wants the line breaks around each tag.
    """
    counts = [completion.count(f"<{slash}{tag}>") == 1 for tag in tags for slash in ("", "/")]
    return sum(counts) / len(counts)


def matches(completion: str, _row: dict[str, Any], *, pattern: str, flags: int = re.DOTALL) -> float:
    """1 if the whole completion matches a regular expression, else 0. Write `.*` around it to search.

    Python's engine backtracks: a pattern such as `(a+)+b` can take exponential time (until the reward's timeout).
    """
    return float(re.fullmatch(pattern, completion, flags) is not None)


def valid_json(
    completion: str, _row: dict[str, Any], *, types: Mapping[str, type | tuple[type, ...]] | None = None
) -> dict[str, Any]:
    """1 if the completion, or the one fenced block that it consists of, is a JSON value by RFC 8259, else 0.

    `types` requires an object with (at least) these keys, of these Python types; a bool is not an int or float.
    NaN, Infinity and duplicate keys are rejected.
    """
    text = completion.strip()
    if fenced := re.fullmatch(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", text, re.DOTALL):
        text = fenced.group(1)
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
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


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("an object has a duplicate key")
    return dict(pairs)


def soft_overlong(
    _completion: str, _row: dict[str, Any], completion_ids: Sequence[int], *, max_tokens: int, cache_tokens: int
) -> float:
    """DAPO's soft penalty for over-long answers, to be added to the reward; `max_tokens` is the generation limit.

        r(n) = 0                                  n <= L - c          L = max_tokens, c = cache_tokens
               (L - c - n) / c              L - c < n <= L
               -1                               L < n

    Limits:    continuous; c -> 0 is a step at L. The paper: L = 20480, c = 4096.
    Differs:   verl (`overlong_buffer`): the same times `penalty_factor` (put a weight on it), without the floor of -1
               beyond L, which a completion cannot reach. ColossalAI: c = min(1024, L / 4).
    Reference: https://arxiv.org/abs/2503.14476, eq. 13
    """
    _positive(max_tokens=max_tokens, cache_tokens=cache_tokens)
    if cache_tokens > max_tokens:
        raise ValueError(f"cache_tokens must be at most max_tokens, got {cache_tokens} > {max_tokens}")
    return max(-1.0, min(0.0, (max_tokens - cache_tokens - len(completion_ids)) / cache_tokens))


def length_target(
    _completion: str, _row: dict[str, Any], completion_ids: Sequence[int], *, target: int, scale: float
) -> float:
    """A penalty for missing a length, to be added to the reward (L1's exact form).

        r(n) = -scale |target - n|

    Reference: https://arxiv.org/abs/2503.04697, eq. 1 (scale 0.0003)
    """
    _positive(target=target, scale=scale)
    return -scale * abs(target - len(completion_ids))


def short_relative(
    completions: list[str],  # noqa: ARG001 - its name asks for a whole group
    _rows: list[dict[str, Any]],
    completion_ids: list[Sequence[int]],
    correct: list[bool],
) -> list[float]:
    """Kimi k1.5's length reward: the shortest of a group's answers gains, the longest loses; wrong ones never gain.

        lambda_i = 1/2 - (n_i - min n) / (max n - min n)      r_i = lambda_i if correct, else min(0, lambda_i)

    `correct` must be known before this is called (an environment puts it in `Trajectory.info`). All samples of a call
    are one group, as in `scorer`. Equal lengths give 0.

    Reference: https://arxiv.org/abs/2501.12599, section 2.3.3
    """
    lengths = [len(ids) for ids in completion_ids]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    gains = [0.5 - (n - shortest) / (longest - shortest) for n in lengths]
    return [gain if good else min(0.0, gain) for gain, good in zip(gains, correct, strict=True)]


def cosine(
    num_tokens: int,
    *,
    correct: bool,
    max_tokens: int,
    correct_range: tuple[float, float],
    wrong_range: tuple[float, float],
    exceeded: float,
) -> float:
    """The cosine reward: a correct answer is worth more when short, a wrong one costs less when long.

        r(n) = b + (a - b) (1 + cos(pi n / L)) / 2        (a, b) = the range: the values at n = 0 and n = L
        r(n) = exceeded                                   n >= L = max_tokens

    Not a reward function by itself: call it in yours, which knows whether the answer is correct.

    Differs:   open-r1's `get_cosine_scaled_reward` has the ranges as four values, and no `exceeded`.
    Reference: https://arxiv.org/abs/2502.03373, section 4
    """
    _positive(max_tokens=max_tokens)
    if num_tokens >= max_tokens:
        return exceeded
    start, end = correct_range if correct else wrong_range
    return end + (start - end) * (1.0 + math.cos(math.pi * num_tokens / max_tokens)) / 2.0


def no_truncation(_completion: str, _row: dict[str, Any], truncated: bool) -> float:
    """-1 for a completion that was truncated by the length limit, else 0: a penalty to be added."""
    return -float(truncated)


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"[-+\u2212]?[$€£]?(\d+ )?(\d[\d,]*(\.\d*)?|\.\d+)(e[-+]?\d+|/\d+)?\s*%?", re.IGNORECASE)
_MEANT = re.compile(r"(?<![\w)])-(?=[$€£]?\.?\d)|(?<=\d[eE])-(?=\d)|(?<![^\W\d])[.](?=\d)|(?<=\d)/(?=\d)")
_KEPT = str.maketrans("-./", "\u2212\u00b7\u2215")  # minus, middle dot, division slash: no ASCII punctuation
_WIDE = str.maketrans("\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19", "0123456789")


def gold_answer(row: Mapping[str, Any]) -> Any | None:
    """The gold answer of a row as it is written there, or None: the first of these columns that is there and not empty.

        answer, ground_truth, solution, expected_answer, final_answer, correct_answer, reference_answer, label,
        gt_answer, reward_model.ground_truth (verl's Parquet files)

    >>> gold_answer({"answer": None, "reward_model": {"ground_truth": "72"}})
    '72'
    """
    return next((value for value in _values(row, GOLD) if not is_blank(value)), None)


def first_value(row: Mapping[str, Any], *names: str) -> Any | None:
    """The first value of these columns that is not null; that of `reward_model` is its `ground_truth`."""
    return next((value for value in _values(row, names) if value is not None), None)


def is_blank(value: Any) -> bool:
    """Whether a value is no gold answer: white space, or empty (`rlkit.data.columns.is_empty`).

    >>> is_blank(" "), is_blank(["", None]), is_blank(0)
    (True, True, False)
    """
    return is_empty(value.strip() if isinstance(value, str) else value)


def _values(row: Mapping[str, Any], names: Sequence[str]) -> Iterator[Any]:
    return (_ground_truth(row.get(name)) if name == "reward_model" else row.get(name) for name in names)


def no_gold_answer(row: Mapping[str, Any], column: str | None = None) -> ValueError:
    """The error for a row without a value in `column`, or without a gold answer."""
    missing = repr(column) if column else f"gold answer ({', '.join(GOLD)}.ground_truth)"
    return ValueError(f"the row has no {missing}; columns found: {sorted(row)}")


def _ground_truth(reward_model: Any) -> Any | None:
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def squad_normalize(text: str) -> str:
    """Lower case, in NFC; without ASCII punctuation, the articles a, an, the, and blanks beyond one between words.

    The order is that of SQuAD's evaluation script, which takes NFD for another text.

    >>> squad_normalize("The  U.S.A., an answer!")
    'usa answer'

    Reference: https://arxiv.org/abs/1606.05250, https://rajpurkar.github.io/SQuAD-explorer (evaluate-v2.0.py)
    """
    return " ".join(_ARTICLES.sub(" ", _lower(text).translate(_PUNCTUATION)).split())


def _lower(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower()


def _normalizer(reference: str) -> Callable[[str], str]:
    """`squad_normalize`, or what keeps more where that would take the meaning of a reference.

    Of a number (`-3`, `2.5`, `1/2`) the sign, point and slash stay, and full-width digits are the others. Where nothing
    is left of a text (`A`, `+`), articles stay, else punctuation, too.
    """
    if _NUMBER.fullmatch(reference.strip()):
        kept = lambda text: _MEANT.sub(lambda match: match.group().translate(_KEPT), text)  # noqa: E731
        return lambda text: squad_normalize(kept(text.translate(_WIDE)))

    words = lambda text: " ".join(_lower(text).translate(_PUNCTUATION).split())  # noqa: E731
    literal = lambda text: " ".join(_lower(text).split())  # noqa: E731
    return next((form for form in (squad_normalize, words, literal) if form(reference)), squad_normalize)


@needing(lambda column: (column,))
def exact_match(completion: str, row: dict[str, Any], *, column: str = "answer") -> float:
    """1 if the completion is one of the references `row[column]` (a text, a list of texts, or SQuAD's object with such
    a list in `text`) after `squad_normalize`.

    Limits:  texts, not values: `2.50` is not `2.5` (`rlkit.rewards.math.boxed`). `C++` is `C`.
    Differs: SQuAD takes `-3` for `3`, `2.5` for `25`, and `A` or `+` for an empty text (`_normalizer`).
             verl's `search_r1_like_qa_em` first takes the last `<answer>` tag; use `last_tag` for that.
    Reference: SQuAD's exact match.
    """
    forms = [(_normalizer(text), text) for text in _references(row, column)]
    return max(float(form(completion) == form(text)) for form, text in forms)


@needing(lambda column: (column,))
def f1(completion: str, row: dict[str, Any], *, column: str = "answer") -> float:
    """Overlap of words with the nearest reference, after `squad_normalize`; the words are counted as multisets.

        P = |c & r| / |c|     R = |c & r| / |r|     F1 = 2 P R / (P + R)

    Limits:    equal bags of words 1, no common word 0; two empty texts 1, one empty text 0.
    Differs:   as `exact_match` from SQuAD, for numbers and texts of articles or punctuation alone.
    Reference: SQuAD's F1.
    """
    return max(_f1(completion, text) for text in _references(row, column))


def _f1(completion: str, reference: str) -> float:
    form = _normalizer(reference)
    words, wanted = form(completion).split(), form(reference).split()
    if not words or not wanted:
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))


@needing(lambda column: (column,))
def contains(completion: str, row: dict[str, Any], *, column: str = "answer") -> float:
    """1 if a reference's normalised words occur consecutively in the completion, else 0 (Search-R1's subEM).

    Words are normalised as by `exact_match`.
    """
    forms = [(_normalizer(text), text) for text in _references(row, column)]
    return max(float(f" {form(text)} " in f" {form(completion)} ") for form, text in forms)


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
    """The share of n-grams that occur earlier in the sequence, `1 - |distinct| / |all|`; 0 without n-grams."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    num = len(items) - n + 1
    if num < 1:
        return 0.0
    return 1.0 - len({tuple(items[i : i + n]) for i in range(num)}) / num


def language_share(completion: str, _row: dict[str, Any], *, scripts: Iterable[str] = ("LATIN",)) -> float:
    """The share of letters that belong to the scripts named, as in "CYRILLIC", "CJK", "HIRAGANA"; 1 without letters.

    A script is what Unicode's names of its letters begin with, in upper or lower case. Another name is a ValueError.

    A stand-in for DeepSeek-R1's language consistency reward (the share of words in the target language): a script is
    exact and needs no language model, but does not tell English from French.

    Reference: https://arxiv.org/abs/2501.12948, section 2.3.2
    """
    wanted = tuple(map(_script, (scripts,) if isinstance(scripts, str) else scripts))
    letters = [unicodedata.name(char, "") for char in completion if char.isalpha()]
    return sum(name.startswith(wanted) for name in letters) / len(letters) if letters else 1.0


@cache
def _script(name: str) -> str:
    wanted = name.upper()
    letters = [unicodedata.name(char, "") for char in map(chr, range(0x20000)) if char.isalpha()]
    if not any(letter.startswith(f"{wanted} ") for letter in letters):
        near = get_close_matches(wanted, sorted({letter.partition(" ")[0] for letter in letters}), cutoff=0.75)
        hint = f"did you mean {' or '.join(near)}?" if near else "e.g. LATIN, CYRILLIC, GREEK, ARABIC, CJK, HIRAGANA"
        raise ValueError(f"scripts: no letter in Unicode has a name that begins with {name!r} ({hint})")
    return wanted


def _references(row: dict[str, Any], column: str) -> list[str]:
    given = row.get(column)
    value = given.get("text") if isinstance(given, Mapping) else given  # of SQuAD, beside answer_start
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = format(Decimal(str(value)), "f").removesuffix(".0")  # 4.0 of a column with gaps is written 4
    references = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not references or not all(isinstance(text, str) for text in references):
        got, fix = repr(value)[:80], ""
        if isinstance(given, Mapping) and value is None:
            got, fix = f"an object with the keys {', '.join(map(str, given))}", ": write a list of its texts there"
        raise ValueError(f"row[{column!r}] must be a text or a list of texts, got {got}{fix}")
    return references


BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
THINK_ANSWER = (
    "Think about the question before you answer it. Write your reasoning between <think> and </think>, then only the "
    "final answer between <answer> and </answer>: <think>reasoning</think><answer>answer</answer>"
)
CODE = (
    "Solve the problem with one complete Python program. It reads from standard input and writes only what is asked "
    "for to standard output. Think first, then give the program in one block that starts with ```python and ends with "
    "```."
)
FUNCTION = (
    "Write the Python function that is asked for, with the name and the arguments given. Think first, then give the "
    "whole function, with its imports, in one block that starts with ```python and ends with ```."
)
JSON = "Answer with one JSON value and nothing else: no explanation, no Markdown."
