"""Read files that the user did not write (models, data, images, YAML, run folders) within limits.

Each function refuses what is no regular file, what is larger than its limit and what is nested deeper, with a
ValueError of one line that names the file and the limit. `RLKIT_LIMITS` raises limits, for this process and those that
it starts:

    RLKIT_LIMITS="row_mib=512 image_mpixels=200" rlkit sft ...

The names are those of `LIMITS`. Layer: only the standard library, no torch.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import IO, Any, TypeVar

X = TypeVar("X", str, bytes)

LIMITS = {
    "json_mib": 64.0,  # a config, an index, the arguments of a run
    "tokenizer_mib": 512.0,
    "tokens": 500_000.0,  # added tokens of a tokenizer: it reads a thousand a second
    "depth": 100.0,  # lists and objects within each other
    "template_mib": 4.0,
    "template_s": 3.0,  # of a processor, for the first texts of a chat template
    "template_memory_mib": 1024.0,
    "yaml_mib": 0.25,  # a file of all flags has 20 kB
    "yaml_keys": 2000.0,
    "list_mib": 2048.0,  # a JSON file of one list, which is read at once
    "row_mib": 64.0,  # a line of a data file
    "cell_mib": 16.0,  # of CSV
    "row_values": 4e6,
    "expansion": 200.0,  # bytes that a byte of a compressed data file may become, above the first 256 MiB
    "image_mib": 64.0,
    "image_mpixels": 50.0,  # a photo of a telephone has 48
    "metrics_mib": 1024.0,
}
_PIECE = 1 << 22  # bytes
_CHEAP = 1 << 23  # bytes of a row whose values are not counted
_FREE_ROWS = 1_000_000  # that any file may hold
_FREE = 1 << 28  # bytes that any compressed file may become
_NESTED = (list, dict, tuple)  # not a union, which is four times slower to ask


class BadFile(ValueError):
    """A file that is damaged, no regular file, or beyond a limit; its text says all."""


def limit(name: str) -> float:
    """The limit of this name: that of `RLKIT_LIMITS`, else of `LIMITS`. ValueError for a setting that is not right."""
    return _limits(os.environ.get("RLKIT_LIMITS", ""))[name]


@lru_cache(maxsize=4)
def _limits(text: str) -> dict[str, float]:
    limits = dict(LIMITS)
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in LIMITS or not number > 0:
            raise ValueError(f"RLKIT_LIMITS: {word!r} is no NAME=NUMBER with a name of {', '.join(LIMITS)}")
        limits[name] = number
    return limits


def too_much(place: object, fault: str, name: str, *, fix: str = "") -> BadFile:
    """The error of a limit: `fault` is wrong at `place`, and how to raise the limit."""
    return BadFile(f"{place}: {fault}{fix} (RLKIT_LIMITS={name}=NUMBER raises the limit, {limit(name):g})")


def check_file(path: str | os.PathLike[str], name: str = "") -> int:
    """The size of a regular file; ValueError for a pipe, a device or a socket, and above the limit `name` (of MiB)."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise BadFile(f"{path}: it is {kind}, and no regular file: give a file")
    if name:
        check_length(path, status.st_size, name)
    return status.st_size


def check_length(place: object, size: int, name: str) -> None:
    """ValueError for more bytes than the limit `name` (of MiB)."""
    if size > limit(name) * 2**20:
        raise too_much(place, f"more than {limit(name):g} MiB", name)


def read(path: str | os.PathLike[str], name: str) -> bytes:
    """The bytes of a file; see `check_file`."""
    check_file(path, name)
    with Path(path).open("rb") as file:
        data = whole(file, int(limit(name) * 2**20))  # it may grow, and those of /proc have no size
    check_length(path, len(data), name)
    return data


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds. ValueError, with the file, for one that is damaged or beyond the limits."""
    return parsed(path, read(path, "json_mib"))


def parsed(place: object, data: bytes) -> Any:
    """What JSON holds. ValueError, with the `place`, for what is no JSON, and for what is nested too deeply."""
    try:
        return loads(data, place)
    except BadFile:
        raise
    except ValueError as error:
        raise BadFile(f"{place} is damaged, it is not JSON ({error}): copy or download it again") from None


def loads(text: str | bytes, place: object = "the JSON", **options: Any) -> Any:
    """`json.loads` for a file, a cell, a flag or a reply: what is nested too deeply is a ValueError, too."""
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise deep(place) from None
    check_depth(place, value)
    return value


def deep(place: object) -> BadFile:
    """The error of lists and objects that are nested too deeply."""
    return too_much(place, "lists or objects are nested too deeply", "depth")


def check_depth(place: object, value: Any) -> None:
    """ValueError for lists and objects that are nested too deeply: what walks or writes them calls itself."""
    if not depth_is_fine(value, int(limit("depth"))):
        raise deep(place)


def depth_is_fine(value: Any, most: int) -> bool:
    """Whether lists and objects are nested at most `most` deep."""
    level = [value]
    for _ in range(most + 1):
        inside = [x for x in level if isinstance(x, _NESTED)]
        level = [x for part in inside for x in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return True
    return False


def lines(file: IO[X], path: object) -> Iterator[X]:
    """The lines of a data file; ValueError for one that is longer than a row may be."""
    most = int(limit("row_mib") * 2**20)
    for number in count(1):
        line = file.readline(most + 1)
        if len(line) > most:
            raise too_much(f"{path}, line {number}", "the line is too long", "row_mib")
        if not line:
            return
        check_row(f"{path}, line {number}", line)
        if number % (_FREE_ROWS + 1) == 0:  # blank lines are no rows, which `_counted` would count
            check_expanded(Path(str(path)), number)
        yield line


def whole(file: IO[bytes], most: int) -> bytes:
    """The bytes of an opened file, at most `most` + 1, read in pieces: `file.read(most)` may reserve them at once."""
    parts, left = [], most + 1
    while left and (part := file.read(min(left, _PIECE))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def check_row(place: object, text: str | bytes) -> None:
    """ValueError for the JSON of a row with more values than a row may have."""
    marks: Any = (",", "{", "[") if isinstance(text, str) else (b",", b"{", b"[")
    if len(text) > _CHEAP and sum(map(text.count, marks)) > limit("row_values"):
        raise too_much(place, "the row has too many values", "row_values")


def check_expanded(path: Path, num_rows: int) -> None:
    """ValueError for a file that has become more rows than it has bytes, above a million: no data is like that."""
    if num_rows > _FREE_ROWS and num_rows > path.stat().st_size:
        raise BadFile(f"{path}: {path.stat().st_size:,} bytes hold {num_rows:,} rows or more: that is no data")


def expanded_bytes(path: Path) -> int:
    """How many bytes a compressed data file may become."""
    return int(max(_FREE, path.stat().st_size * limit("expansion")))


class Expanded(io.RawIOBase):
    """The bytes of an opened compressed file; ValueError once they are more than such a file becomes."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self._left = expanded_bytes(path)

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer."""
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._left -= len(data)
        if self._left < 0:
            fault = f"{self._path.stat().st_size:,} bytes become more than {expanded_bytes(self._path):,}"
            raise too_much(self._path, fault, "expansion", fix=": if the file is yours, decompress it")
        return len(data)
