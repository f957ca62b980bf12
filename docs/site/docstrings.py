"""Docstrings of rlkit as Markdown: equations stay preformatted, labels ("Limits:") start lines, names become links."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

LABELS = (
    *("Args", "Attributes", "Coefficient", "Cost", "Differs", "Errors", "Example", "Gradient", "Limits", "Logged"),
    *("Memory", "Precision", "Raises", "Reference", "Requires", "Without"),
)
_LABEL = re.compile(rf"({'|'.join(LABELS)}):(?: +|$)")
_CODE = re.compile(r"(``.+?``|`[^`]+`)")
_ADDRESS = re.compile(r"https?://[^\s,;)]*[^\s,;).:]|arXiv:\d{4}\.\d{4,5}")


def markdown(text: str, homes: Mapping[str, str] | None = None) -> str:
    """The docstring as Markdown. `homes` gives the dotted path of each name that becomes a link."""
    blocks: list[list[str]] = []
    for block in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")):
        lines = block.split("\n")
        if blocks and _indented(lines) and _indented(blocks[-1]):
            blocks[-1] += ["", *lines]  # an equation, a blank line and the next one are one block
        else:
            blocks.append(lines)
    return "\n\n".join(part for block in blocks for part in _rendered(block, homes or {}))


def _indented(lines: list[str]) -> bool:
    return all(line.startswith("    ") or not line for line in lines)


def _rendered(lines: list[str], homes: Mapping[str, str]) -> Iterator[str]:
    """One block between blank lines."""
    first = lines[0]
    if _indented(lines):
        yield _fenced([line[4:] for line in lines])
    elif first.startswith(">>>"):
        yield _fenced(lines, "pycon")
    elif first.startswith("|"):
        yield "\n".join(lines)
    elif any(_LABEL.match(line) for line in lines):
        for item in _items(lines):
            yield _labelled(item, homes)
    elif re.match(r"- |\d+\. ", first):
        yield "\n".join(_prose(line, homes) for line in lines)
    elif any(line.startswith(" ") for line in lines[1:]):
        yield _fenced(lines)  # columns that are aligned, or code
    else:
        yield _prose("\n".join(lines), homes)


def _items(lines: list[str]) -> Iterator[list[str]]:
    """The lines of each label, and those before the first one."""
    item: list[str] = []
    for line in lines:
        if _LABEL.match(line) and item:
            yield item
            item = []
        item.append(line)
    yield item


def _labelled(lines: list[str], homes: Mapping[str, str]) -> str:
    found = _LABEL.match(lines[0])
    if not found:
        return _prose("\n".join(lines), homes)
    rest = lines[0][found.end() :]
    if rest:
        return f"**{found[1]}:** " + _prose("\n".join([rest, *(line.strip() for line in lines[1:])]), homes)
    entries: list[str] = []
    for line in lines[1:]:
        if re.match(r" {4}\S", line):
            name, colon, meaning = line.strip().partition(": ")
            entries.append(f"- `{name}`: {_prose(meaning, homes)}" if colon else "- " + _prose(line.strip(), homes))
        else:
            entries.append("  " + _prose(line.strip(), homes))
    return f"**{found[1]}:**\n\n" + "\n".join(entries)


def _fenced(lines: list[str], kind: str = "text") -> str:
    return "\n".join([f"```{kind}", *lines, "```"])


def _prose(text: str, homes: Mapping[str, str]) -> str:
    """Text in which only back-ticks mean something: what else Markdown reads is escaped, addresses are links."""
    parts = _CODE.split(text)
    return "".join(_code(part, homes) if i % 2 else _plain(part) for i, part in enumerate(parts))


def _plain(text: str) -> str:
    out, end = "", 0
    for found in _ADDRESS.finditer(text):
        name = found[0]
        target = f"https://arxiv.org/abs/{name[6:]}" if name.startswith("arXiv:") else name
        out += _escaped(text[end : found.start()]) + f"[{_escaped(name)}]({target})"
        end = found.end()
    return out + _escaped(text[end:])


def _escaped(text: str) -> str:
    """`*word*` stays emphasis, and a dash that opens a list's item stays one."""
    text = re.sub(r"(?<![\w*])(\*{1,2})(\w(?:[\w .-]*[\w.])?)\1(?![\w*])|([\\*_\[\]#])", _kept, text)
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _kept(found: re.Match[str]) -> str:
    return found[0] if found[1] else f"\\{found[3]}"


def _code(ticked: str, homes: Mapping[str, str]) -> str:
    home = homes.get(ticked.strip("`").removesuffix("()").removeprefix("rlkit."))
    return f"[{ticked}][{home}]" if home else ticked
