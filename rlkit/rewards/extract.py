"""Find the answer in a completion. Every function gives the text it looks for, or None where there is none.

All take time linear in the length of the text, whatever a model repeats: they run where many samples wait.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?boxed\s*")
_UNBRACED = re.compile(r"\\[A-Za-z]+|[^\s{}\\$]")
_FENCE = re.compile(r"^[ \t]*(`{3,}(?=[^`\n]*$)|~{3,})([^\n]*)$", re.MULTILINE)  # one of Markdown, and its info


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`; braces may nest, `\{` and `\}` do not count.

    `\boxed 5` (without braces, as TeX allows) gives the one character or command that follows. A box that is not closed
    is no box: the last one before it counts.

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
        elif found := _UNBRACED.match(text, start):
            if match.group().endswith(("d", "x")) and found.group()[0].isalpha():
                continue  # \boxedx is another command
            return found.group()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace that is closed is closed."""
    opened: list[int] = []
    closing = {}
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if found.group() == "{":
            opened.append(found.start())
        elif found.group() == "}" and opened:
            closing[opened.pop()] = found.start()
    return closing


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
    fences = [(fence.group(1), fence.group(2).strip(), fence) for fence in _FENCE.finditer(text)]
    found, position, unclosed = None, 0, set()
    while position < len(fences):
        mark, info, opening = fences[position]
        position += 1
        later = range(position, len(fences)) if mark not in unclosed else ()
        end = next((i for i in later if fences[i][0].startswith(mark) and not fences[i][1]), None)
        if end is None:
            unclosed.add(mark)
            continue
        if (info.split() or [""])[0].lower() in languages:
            found = text[opening.end() + 1 : fences[end][2].start()]
        position = end + 1
    return found
