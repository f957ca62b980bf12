"""Find the answer in a completion. Every function gives the text it looks for, or None where there is none."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?boxed\s*")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`; braces may nest, `\{` and `\}` do not count.

    `\boxed 5` (without braces, as TeX allows) gives the one character or command that follows. A box that is not closed
    is no box: the last one before it counts.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'

    Differs: verl's and TRL's `last_boxed_only_string` count escaped braces, so `\boxed{\{1, 2\}}` works there only
    because they balance; an unclosed last box gives None there.
    """
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if text[start : start + 1] == "{":
            end = _closing(text, start)
            if end is not None:
                return text[start + 1 : end].strip()
        elif found := re.match(r"\\[A-Za-z]+|[^\s{}\\$]", text[start:]):
            if match.group().endswith(("d", "x")) and found.group()[0].isalpha():
                continue  # \boxedx is another command
            return found.group()
    return None


def _closing(text: str, start: int) -> int | None:
    depth, position = 0, start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def last_tag(text: str, *, tag: str = "answer") -> str | None:
    """What stands between the last `<tag>` and the `</tag>` after it.

    >>> last_tag("<answer>1</answer> wait <answer> 2 </answer>")
    '2'
    """
    found = re.findall(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def last_number(text: str) -> str | None:
    """The last decimal number, without thousands separators: GSM8K's way of reading an answer.

    >>> last_number("so it is $1,234.50.")
    '1234.50'
    """
    found = re.findall(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "") if found else None


def last_code_block(text: str, *, languages: tuple[str, ...] = ("python", "py", "python3")) -> str | None:
    """The content of the last closed Markdown code block in one of the languages.

    Fences of three or more backticks or tildes are known, and a block ends only at a fence as long as its own.
    """
    found = None
    for match in re.finditer(r"^[ \t]*(`{3,}|~{3,})[ \t]*(\S*)[^\n]*\n(.*?)^[ \t]*\1[`~]*[ \t]*$", text, re.M | re.S):
        if match.group(2).lower() in languages:
            found = match.group(3)
    return found
