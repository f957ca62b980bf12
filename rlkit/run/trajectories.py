"""Read the trajectories of a run folder for its report: whole groups, sampled down where there are many."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rlkit._util import untrusted

MAX_SAMPLES = 10_000  # of all runs of a report together
MAX_BYTES = 32 << 20  # of the rows that are taken
MAX_READ = 256 << 20  # of the files that are opened
MAX_CHARACTERS = 100_000  # of one text

_NAME = re.compile(r"(train|dropped|eval_(?:sampled|greedy)(?:_[^\W\d]\w*?)?)_(\d+)\.jsonl")
_GROUP = re.compile(rb'\{"step": \d+, "group": (-?\d+)')  # how `rlkit.run.samples` begins a row
_TOKENS = b'"tokens": {'  # inside a string its quotes are escaped


class Group(NamedTuple):
    """The samples of one prompt, `row` its place in the data, in one step. `kind` begins the file's name."""

    kind: str
    step: int
    row: int
    rows: list[dict[str, Any]]

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The last piece of each episode."""
        return [row for row, then in zip(self.rows, [*self.rows[1:], {}]) if not then.get("continues")]


class Trajectories(NamedTuple):
    """The groups that were taken, and the size of all files in bytes; `whole`: these are all groups."""

    groups: list[Group]
    num_bytes: int
    whole: bool


def read_trajectories(folder: Path, *, parts: int = 1) -> Trajectories:
    """The groups of a run, in the order of its steps, within a `parts`-th of the limits above.

    Above `MAX_READ` whole steps are left out, evenly; above the other limits a prompt is taken or left out by its
    index, the same ones in every step, so that its answers can be compared. The first group of a file and groups with
    `tokens` are always taken. A half-written last line is skipped.

    Errors: ValueError for another line that is not JSON.
    """
    by_step = [(int(match[2]), path) for path in (folder / "trajectories").glob("*.jsonl")
             if (match := _NAME.fullmatch(path.name))]  # fmt: skip
    by_step.sort(key=lambda x: (x[0], x[1].name))
    sizes = {path: untrusted.check_file(path) for _, path in by_step}
    total = sum(sizes.values())
    steps = sorted({step for step, _ in by_step})
    every = -(-total * parts // MAX_READ) or 1
    chosen = {*steps[::every], *steps[-1:]}
    files = [(step, path) for step, path in by_step if step in chosen]
    limit = MAX_READ // parts // max(1, len(files)) if every > 1 else None  # one step may be above it alone
    read = sum(min(sizes[path], limit or total) for _, path in files)
    num_lines = sum(_count_lines(path, limit) for _, path in files)
    share = min(1.0, MAX_BYTES / parts / max(1, read), MAX_SAMPLES / parts / max(1, num_lines))
    groups = [group for step, path in files for group in _read(path, step, share=share, limit=limit)]
    return Trajectories(groups, total, whole=share == 1.0 and every == 1)


def read_file(path: Path, step: int, limit: int) -> list[Group]:
    """All groups of one file, within the first `limit` bytes of it. Errors: see `read_trajectories`."""
    return list(_read(path, step, share=1.0, limit=limit))


def _count_lines(path: Path, limit: int | None) -> int:
    with path.open("rb") as file:
        left, count = limit or path.stat().st_size, 0
        while left > 0 and (data := file.read(min(left, 1 << 22))):
            count += data.count(b"\n")
            left -= len(data)
        return count


def _read(path: Path, step: int, *, share: float, limit: int | None) -> Iterator[Group]:
    kind = path.name.rpartition("_")[0]
    for place, (index, numbered) in enumerate(groupby(_lines(path, limit), key=lambda x: _index(path, *x))):
        lines = [*numbered]
        chosen = place == 0 or _fraction(index) < share or any(_TOKENS in line for _, line in lines)
        if chosen and (rows := [_parsed(path, *x) for x in lines]):
            yield Group(kind, step, index, [_cut(row) for row in rows])


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    """The complete lines, numbered from 1."""
    untrusted.check_file(path)
    used = 0
    with path.open("rb") as file:
        for number, line in enumerate(untrusted.lines(file, path), 1):
            used += len(line)
            if not line.endswith(b"\n") or (limit is not None and used > limit and number > 1):
                return
            yield number, line


def _index(path: Path, number: int, line: bytes) -> int:
    match = _GROUP.match(line)
    group = int(match[1]) if match else _parsed(path, number, line).get("group") or 0
    if type(group) is not int:
        raise _no_sample(path, number, line)
    return group


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if isinstance(row, dict):
            return row
    except (ValueError, RecursionError):
        pass
    raise _no_sample(path, number, line)


def _no_sample(path: Path, number: int, line: bytes) -> ValueError:
    return ValueError(f"{path}, line {number} is not a sample: {line[:60]!r}; delete that line")


def _fraction(index: int) -> float:
    """A number in [0, 1) that looks random, and is the same for the same index."""
    return (index * 2654435761 & 0xFFFFFFFF) / 2**32


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a very long text cut, which says so; its tokens are then left out, as those of another form are."""
    tokens = row.get("tokens")
    texts = tokens.get("text") if isinstance(tokens, dict) else None
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        row.pop("tokens", None)
    for name in ("prompt", "completion"):
        text = row.get(name)
        if isinstance(text, str) and len(text) > MAX_CHARACTERS:
            row[name] = f"{text[:MAX_CHARACTERS]}\n[{len(text) - MAX_CHARACTERS:,} more characters are in the file]"
            row.pop("tokens", None)
    return row
