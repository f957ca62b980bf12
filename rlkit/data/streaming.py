"""Rows that stay on the disk: each is read, rendered and tokenized when a step takes it.

    rows = DiskRows(["a.jsonl", "b.parquet"])
    make = lambda i: sft_examples(rows.row(i), tokenizer=tokenizer, max_example_tokens=2048)[0]
    sft(model, tokenizer, Streamed(rows, make), schedule, optim)

Memory holds 12 bytes a line of JSONL (its place in the file), and nothing of a Parquet table, which `datasets` maps
from an Arrow file in its cache. Any row can be read at any time, so a run that streams visits the same rows in the
same order as one that holds them, shuffled over the whole data (`rlkit.data.order`), and resumes without a state.

Differs: `datasets.IterableDataset` shuffles within a buffer, and saves a state to resume.
"""

from __future__ import annotations

import logging
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, overload

from rlkit._util import untrusted
from rlkit._util.text import Explained
from rlkit.data.drop import NothingLeft
from rlkit.data.files import check_parquet, format_of, parquet_table, parsed_line
from rlkit.data.load import Rows, checked_row, sources_of

X = TypeVar("X")
_log, _progress = logging.getLogger("rlkit.data"), logging.getLogger("rlkit.data.progress")
_LINES = (".jsonl", ".ndjson", ".jsonlines")
_PROGRESS = 100_000  # lines between two log lines


class _File(NamedTuple):
    """A file, its number of rows, and a function that reads one of them with its place."""

    name: str
    size: int
    read: Callable[[int], tuple[str, Any]]


class BadRow(Explained):
    """A row that cannot be read, which a run meets at some step."""


class DiskRows:
    """The rows of JSONL and Parquet files on the disk, in the order of the files. `sizes`: how many each part has.

    `rename` is that of `load_rows`; a row without the column is unchanged.
    Errors: ValueError, with the file and the line, for other files, and for a malformed row when it is read.
    """

    def __init__(self, *parts: Sequence[str | Path], rename: Mapping[str, str] = MappingProxyType({})) -> None:
        opened = [[_opened(source.name) for source in sources_of(files)] for files in parts]
        self.sizes = [sum(file.size for file in part) for part in opened]
        self._files = [file for part in opened for file in part]
        self._ends = [*accumulate(file.size for file in self._files)]
        self._rename = rename

    def __len__(self) -> int:
        return self._ends[-1]

    def file_of(self, index: int) -> range:
        """The rows of the file that has this one."""
        k = bisect_right(self._ends, index)
        return range(self._ends[k] - self._files[k].size, self._ends[k])

    def row(self, index: int) -> Rows:
        """One row, with its place."""
        file = self._files[bisect_right(self._ends, index)]
        place, row = file.read(index - self.file_of(index).start)
        here = {old: new for old, new in self._rename.items() if isinstance(row, dict) and old in row}
        return Rows([checked_row(f"{file.name}, {place}", row, here)], source=file.name, places=[place])


class Streamed(Sequence[X]):
    """The examples of rows on the disk: `make(i)` of row i, when it is asked for.

    `of_row(i)` are the examples of row i. A row without any (too long, say) is replaced by the next one of its file.
    `head` are examples of the first rows, for checks that look at all examples where these are in memory (None: those
    of row 0). What `make` reports of single rows (`rlkit.data`) is not shown.
    """

    def __init__(self, rows: DiskRows, make: Callable[[int], Sequence[X]], *, head: Sequence[X] | None = None) -> None:
        self._rows, self._make = rows, make
        self.head = self.of_row(0) if head is None else head

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> X: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[X]: ...
    def __getitem__(self, index: int | slice) -> X | Sequence[X]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self.of_row(range(len(self))[index])[0]

    def of_row(self, index: int) -> Sequence[X]:
        """The examples of a row. Errors: BadRow for a malformed one; ValueError for a file that has none at all."""
        there = self._rows.file_of(index)
        for i in chain(range(index, there.stop), range(there.start, index)):
            try:
                with _quiet():
                    return self._make(i)
            except NothingLeft as error:
                nothing = error
            except ValueError as error:
                raise BadRow(str(error)) from None
        raise nothing


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside the block nothing is reported of the data."""
    _log.addFilter(_none)
    try:
        yield
    finally:
        _log.removeFilter(_none)


def _none(_record: logging.LogRecord) -> bool:
    return False


def _opened(name: str) -> _File:
    path, kind = Path(name).expanduser(), format_of(Path(name))
    if not path.is_file() or kind not in (*_LINES, ".parquet") or kind != path.suffix.lower():
        fix = "write it as .jsonl or .parquet, or drop `stream`"
        raise ValueError(f"{name}: only files of JSONL and Parquet that are not compressed stream: {fix}")
    untrusted.check_file(path)
    if kind == ".parquet":
        check_parquet(path)
        table = parquet_table(path, streaming=False)
        return _File(name, len(table), lambda i: (f"row {i + 1}", table[i]))
    starts, numbers, at = array("Q"), array("I"), 0
    file = path.open("rb")  # open as long as its rows are read
    before = os.fstat(file.fileno())
    for number, line in enumerate(untrusted.lines(file, path), start=1):
        if line.strip():
            starts.append(at)
            numbers.append(number)
        at += len(line)
        if number % _PROGRESS == 0:
            _progress.info("finding the lines of %s: %d", name, number)

    def read(i: int) -> tuple[str, Any]:
        now, place = os.fstat(file.fileno()), f"line {numbers[i]}"
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            fix = "start again, and write a changed file under another name"
            raise ValueError(f"{name}, {place}: the file has changed since the run began to read it: {fix}")
        file.seek(starts[i])
        return place, parsed_line(f"{name}, {place}", file.readline())

    return _File(name, len(starts), read)
