"""Rows from files and the hub, as plain dicts.

JSON, JSONL and CSV are read with the standard library alone. Parquet, Arrow and hub data sets need `datasets`, which is
imported only when one of them is asked for. Errors name the file, the line and the fix.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit._extras import optional

Row = dict[str, Any]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
_BOM = b"\xef\xbb\xbf"


class Rows(list[Row]):
    """Rows and where each came from: the file (`source`) and e.g. "line 3" (`places`). See `place_of`."""

    def __init__(self, rows: Iterable[Row], *, source: str, places: Sequence[str]) -> None:
        super().__init__(rows)
        self.source, self.places = source, places


def place_of(rows: Sequence[Any], index: int, *, with_source: bool = True) -> str:
    """Where `rows[index]` came from, for messages: "train.jsonl, line 3", or "row 3" of rows that no file gave."""
    if not isinstance(rows, Rows):
        return f"row {index + 1}"
    return f"{rows.source}, {rows.places[index]}" if with_source else rows.places[index]


def load_rows(
    path_or_id: str | Path,
    *,
    split: str = "train",
    name: str | None = None,
    columns: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> Rows:
    """The rows of a file, of a `save_to_disk` folder or of a hub data set, as a list of dicts.

        rows = load_rows("train.jsonl", columns=["messages", "answer"])
        rows = load_rows("openai/gsm8k", name="main", split="test", rename={"question": "prompt"}, limit=100)
        rows = load_rows("openai/gsm8k:main:test")                       # the same part, for a command line

    The suffix of an existing file selects the format: `.json` (a list of objects, or one object per line), `.jsonl`,
    `.csv`, `.parquet`, `.arrow`. A folder must have been written by `save_to_disk` of a `Dataset` or `DatasetDict`.
    Anything else is a hub id, optionally with configuration and split.

    CSV has no types: every cell is text, also "07" and "NA", because rewards compare answers as text.

    split:   which part of a hub data set or of a saved `DatasetDict`; a single file has no parts and ignores it.
    name:    the configuration of a hub data set that has several.
    columns: names every row must have, after renaming.
    rename:  from the column names of the data to the names that rlkit reads.
    limit:   keep the first `limit` rows.

    A column of ShareGPT turns (`from`, `value`) becomes a column of messages (`role`, `content`). The readers of rows
    find it under the name "conversations".

    Raises FileNotFoundError (nothing there; what was tried), ImportError (`datasets` is needed and missing), ValueError
    (an empty file, a malformed line, a row that is not an object, a missing column, a column of several types; all
    numbers are one type, and null is compatible with every type). Lines and rows are counted from 1; the readers of
    rows name them too (`place_of`).

    Differs from `datasets.load_dataset`: files are not cached; JSON and CSV do not import `datasets`; rows stay dicts
    with exactly their own keys, not Arrow columns; no CSV cell is converted to a number or null; all rows are held in
    memory.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 or None (all rows), got {limit}")
    source, path = str(path_or_id), Path(path_or_id).expanduser()
    if path.is_dir():
        read = _numbered(_saved(path, split))
    elif path.is_file():
        read = _from_file(path)
    elif path.suffix.lower() in _READERS or path.is_absolute():
        raise FileNotFoundError(_missing(path))
    else:
        read = _numbered(_from_hub(source, name, split, path))
    found = list(itertools.islice(read, limit))
    if not found:
        raise ValueError(f"{source}: no rows")
    seen: dict[str, tuple[str, str]] = {}
    rows = [_checked(source, place, row, columns, rename or {}, seen) for place, row in found]
    return Rows(rows, source=source, places=[place for place, _ in found])


def column_error(where: str, problem: str, row: Row, fix: str = "") -> ValueError:
    """The error for a row with wrong columns: `where` it is, what is wrong, and the columns that it has."""
    return ValueError(f"{where}: {problem}; columns found: {sorted(getattr(row, 'own', row))}{fix}")


def _checked(
    source: str,
    place: str,
    row: Any,
    columns: Sequence[str],
    rename: Mapping[str, str],
    seen: dict[str, tuple[str, str]],
) -> Row:
    """The row under its new names, ShareGPT turns as messages. `seen`: each column's type and its first place."""
    where = f"{source}, {place}"
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be a JSON object like {{...}}, got {_kind(row)}: {repr(row)[:80]}")
    for old, new in rename.items():
        if old not in row:
            raise column_error(where, f"no column {old!r} to rename", row)
        if new in row and new not in rename:
            raise column_error(where, f"column {new!r} is there already", row)
    row = {rename.get(column, column): as_messages(value) for column, value in row.items()}
    for column in columns:
        if column not in row:
            raise column_error(where, f"no column {column!r}", row)
    for column, value in row.items():
        kind = _kind(value)
        before, first = (kind, place) if value is None else seen.setdefault(column, (kind, place))
        if kind != before:
            raise ValueError(
                f"{source}: column {column!r} mixes types: {before} in {first}, {kind} in {place} "
                f"({repr(value)[:60]}); write it as one type in all rows, e.g. all as strings"
            )
    return row


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _from_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows with the place of each."""
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise ValueError(f"{path}: cannot tell the format from the suffix {suffix!r}; known are {', '.join(_READERS)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty (0 bytes)")
    return _READERS[suffix](path)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        is_list = file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
    return _numbered(_parse(str(path), path.read_bytes())) if is_list else _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.removeprefix(_BOM).strip():
                yield f"line {number}", _parse(f"{path}, line {number}", line.strip())


def _csv(path: Path) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # its own limit is 128 KiB a cell
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = list(reader.fieldnames or ())
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: two columns have the same name: {names}")
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(
                        f"{path}, line {reader.line_num}: not {len(names)} cells, as the header {names} has"
                    )
                yield f"line {reader.line_num}", row
        except csv.Error as error:
            raise ValueError(f"{path}, in the row after line {reader.line_num}: malformed CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error}); save it as UTF-8") from None


def _table(path: Path) -> Iterator[tuple[str, Any]]:
    datasets, suffix = _datasets(path), path.suffix.lower()
    try:
        if suffix == ".arrow":
            rows = datasets.Dataset.from_file(str(path))
        else:  # streaming: without a copy in the cache
            rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from _numbered(rows)
    except Exception as error:
        cause = error.__cause__ or error
        raise ValueError(f"{path}: cannot be read as {suffix[1:]}: {type(cause).__name__}: {cause}") from error


_READERS = {".json": _json, ".jsonl": _json_lines, ".csv": _csv, ".parquet": _table, ".arrow": _table}


def _parse(place: str, data: bytes) -> Any:
    data = data.removeprefix(_BOM)
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not UTF-8 (byte {data[error.start]:#04x} at offset {error.start}); save it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if b"\n" in data else f"column {error.colno}"
        found = error.doc[max(0, error.pos - 40) : error.pos + 40]
        raise ValueError(
            f"{place}: malformed JSON at {at} ({error.msg}): ...{found!r}...; "
            "a .jsonl file holds one complete object per line, a .json file one list of objects"
        ) from None


def _saved(path: Path, split: str) -> Iterable[Row]:
    """A folder written by `save_to_disk`."""
    if not any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        raise ValueError(
            f"{path}: a folder, but not one written by save_to_disk (no state.json or dataset_dict.json); it holds "
            f"{sorted(p.name for p in path.iterdir())[:8]}: give the path of one file"
        )
    datasets = _datasets(path)
    data: Any = datasets.load_from_disk(str(path))
    if not isinstance(data, datasets.DatasetDict):
        return data
    if split not in data:
        raise ValueError(f"{path}: no split {split!r}; it has {sorted(data)}")
    return data[split]


def _from_hub(spec: str, name: str | None, split: str, path: Path) -> Iterable[Row]:
    """`spec`: owner/name, owner/name:configuration or owner/name:configuration:split."""
    dataset_id, own_name, own_split = (*spec.split(":", 2), "", "")[:3]
    name, split = own_name or name, own_split or split
    datasets = _datasets(dataset_id)
    try:
        return datasets.load_dataset(dataset_id, name, split=split)
    except Exception as error:
        raise FileNotFoundError(
            f"{dataset_id}: no such file or folder ({path.absolute()}), and as a hub data set (name={name!r}, "
            f"split={split!r}) it fails with {type(error).__name__}: {error}"
        ) from error


def _datasets(what: object) -> Any:
    return optional("datasets", "data", f"reading {what} (JSON and CSV need nothing) needs")


def _missing(path: Path) -> str:
    message = f"{path}: no such file (looked for {path.absolute()}); the folder {path.parent} does not exist either"
    if path.parent.is_dir():
        near = sorted(p.name for p in path.parent.iterdir() if p.suffix.lower() in _READERS)[:8]
        message = f"{path}: no such file (looked for {path.absolute()}); data files in that folder: {near}"
    return f"{message}. A hub data set is given as owner/name, without a suffix"


def as_messages(value: Any) -> Any:
    """A conversation of {"from": "human", "value": ...} as messages; anything else as it is."""
    turns = value if isinstance(value, list | tuple) else []
    if not turns or not all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in turns):
        return value
    return [{"role": _SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]


def _kind(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    name = type(value).__name__
    return {"str": "string", "dict": "object", "bool": "boolean", "NoneType": "null"}.get(name, name)
