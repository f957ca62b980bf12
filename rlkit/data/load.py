"""Rows from files and the hub, as plain dicts.

JSON, JSONL and CSV are read with the standard library alone. Parquet, Arrow and hub data sets need `datasets`, which is
imported only when one of them is asked for. What is wrong with a file is said with its name, its line and the fix.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit._extras import optional

if TYPE_CHECKING:
    from types import ModuleType

Row = dict[str, Any]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


class Rows(list[Row]):
    """Rows with the place that each came from: `source`, and e.g. "line 3" in `places`. See `place_of`."""

    def __init__(self, rows: Iterable[Row], *, source: str, places: Sequence[str]) -> None:
        super().__init__(rows)
        self.source, self.places = source, places

    @classmethod
    def like(cls, given: Sequence[Any], rows: Sequence[Row]) -> Sequence[Row]:
        """`rows` under the places of `given`, row by row, if those are known."""
        return cls(rows, source=given.source, places=given.places) if isinstance(given, cls) else rows


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

    A path that exists is read by its suffix: `.json` (a list of objects, or one object per line), `.jsonl`, `.csv`,
    `.parquet`, `.arrow`, or a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`. Anything else is
    taken for a hub id, which may carry its name and split.

    CSV has no types: every cell is the text that stands there, "07" and "NA" too, as an answer is that a model writes.

    split:   which part of a hub data set or of a saved `DatasetDict`; a single file has no parts and ignores it.
    name:    the configuration of a hub data set that has several.
    columns: names every row must have, after renaming.
    rename:  from the names in the data to the names that are wanted.
    limit:   keep the first `limit` rows.

    A column of ShareGPT turns (`from`, `value`) becomes one of messages (`role`, `content`); it is often called
    "conversations": rename={"conversations": "messages"}.

    Raises FileNotFoundError (nothing there; what was tried), ImportError (`datasets` is needed and missing), ValueError
    (an empty file, a malformed line, a row that is no object, a missing column, a column of several types; numbers are
    one type and null goes with any). Lines and rows are counted from 1; the readers of rows name them too (`place_of`).

    Differs from `datasets.load_dataset`: no cache, and no import of `datasets` for JSON and CSV; lists, not Arrow
    columns, so that rows of different shape keep exactly the keys they have; no CSV cell becomes a number or null for
    what it looks like; all rows are held in memory.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 or None (all rows), got {limit}")
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        rows = _take(_from_folder(path, split), limit)
    elif path.is_file():
        rows = _from_file(path, limit)
    elif path.suffix.lower() in _SUFFIXES or path.is_absolute():
        raise FileNotFoundError(_missing(path))
    else:
        dataset_id, _, part = str(path_or_id).partition(":")
        own_name, _, own_split = part.partition(":")
        rows = _take(_from_hub(dataset_id, own_name or name, own_split or split, path), limit)
    if not rows:
        raise ValueError(f"{path_or_id}: no rows")
    if rename:
        rows = [(place, _renamed(str(path_or_id), place, row, rename)) for place, row in rows]
    _check_columns(str(path_or_id), rows, columns)
    messages = ({column: _as_messages(value) for column, value in row.items()} for _, row in rows)
    return Rows(messages, source=str(path_or_id), places=[place for place, _ in rows])


def _from_file(path: Path, limit: int | None) -> list[tuple[str, Row]]:
    """Rows with the place each came from, for error messages."""
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"{path}: cannot tell the format from the suffix {suffix!r}; known are {', '.join(_SUFFIXES)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty (0 bytes)")
    if suffix == ".jsonl" or (suffix == ".json" and not _starts_with_bracket(path)):
        return list(_json_lines(path, limit))
    if suffix == ".json":
        return _take(_json_list(path), limit)
    if suffix == ".csv":
        return list(itertools.islice(_csv_rows(path), limit))
    datasets = _datasets(str(path))
    try:
        if suffix == ".arrow":
            return _take(datasets.Dataset.from_file(str(path)), limit)
        if not _holds_rows(path):  # `datasets` fails with "BatchSize must be greater than 0"
            return []
        return _take(datasets.load_dataset("parquet", data_files=str(path), split="train"), limit)
    except Exception as error:
        cause = error.__cause__ or error
        raise ValueError(f"{path}: cannot be read as {suffix[1:]}: {type(cause).__name__}: {cause}") from error


def _holds_rows(path: Path) -> bool:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path).metadata.num_rows > 0


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _json_lines(path: Path, limit: int | None) -> Iterator[tuple[str, Row]]:
    count = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not line:
                continue
            yield f"line {number}", _object(f"{path}, line {number}", _parse(f"{path}, line {number}", line))
            count += 1
            if count == limit:
                return


def _json_list(path: Path) -> Iterator[Row]:
    for number, value in enumerate(_parse(str(path), path.read_bytes().removeprefix(b"\xef\xbb\xbf")), start=1):
        yield _object(f"{path}, row {number}", value)


def _csv_rows(path: Path) -> Iterator[tuple[str, Row]]:
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


def _parse(place: str, data: bytes) -> Any:
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


def _object(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a row must be a JSON object like {{...}}, got {_kind(value)}: {repr(value)[:80]}")
    return value


def _from_folder(path: Path, split: str) -> Iterable[Row]:
    if not any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        files = sorted(p.name for p in path.iterdir())[:8]
        raise ValueError(
            f"{path}: a folder, but not one written by save_to_disk (no state.json or dataset_dict.json); it holds "
            f"{files}: give the path of one file"
        )
    datasets = _datasets(str(path))
    data = datasets.load_from_disk(str(path))
    if not isinstance(data, datasets.DatasetDict):
        return data
    if split not in data:
        raise ValueError(f"{path}: no split {split!r}; it has {sorted(data)}")
    return data[split]


def _from_hub(dataset_id: str, name: str | None, split: str, path: Path) -> Iterable[Row]:
    datasets = _datasets(dataset_id)
    try:
        return datasets.load_dataset(dataset_id, name, split=split)
    except Exception as error:
        raise FileNotFoundError(
            f"{dataset_id}: no such file or folder ({path.absolute()}), and as a hub data set (name={name!r}, "
            f"split={split!r}) it fails with {type(error).__name__}: {error}"
        ) from error


def _take(rows: Iterable[Row], limit: int | None) -> list[tuple[str, Row]]:
    kept: list[tuple[str, Row]] = []
    for number, row in enumerate(rows, start=1):
        kept.append((f"row {number}", row))
        if number == limit:
            break
    return kept


def _datasets(what: str) -> ModuleType:
    found: ModuleType = optional("datasets", "data", f"reading {what} (JSON and CSV need nothing) needs")
    return found


def _missing(path: Path) -> str:
    message = f"{path}: no such file (looked for {path.absolute()})"
    if path.parent.is_dir():
        near = sorted(p.name for p in path.parent.iterdir() if p.suffix.lower() in _SUFFIXES)[:8]
        message += f"; data files in that folder: {near}"
    else:
        message += f"; the folder {path.parent} does not exist either"
    return message + ". A hub data set is given as owner/name, without a suffix"


def _renamed(source: str, place: str, row: Row, names: Mapping[str, str]) -> Row:
    """The row with its columns under their new names, in the order they had."""
    for old, new in names.items():
        if old not in row or (new in row and new not in names):
            problem = f"no column {old!r} to rename" if old not in row else f"column {new!r} is there already"
            raise ValueError(f"{source}, {place}: {problem}; columns found: {sorted(row)}")
    return {names.get(column, column): value for column, value in row.items()}


def _as_messages(value: Any) -> Any:
    """A conversation of {"from": "human", "value": ...} as messages; anything else as it is."""
    turns = (
        isinstance(value, list) and value and all(isinstance(t, dict) and {"from", "value"} <= t.keys() for t in value)
    )
    if not turns:
        return value
    return [{"role": _SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in value]


def _check_columns(source: str, rows: list[tuple[str, Row]], required: Sequence[str]) -> None:
    """Every required column is in every row, and a column holds values of one type."""
    first: dict[str, tuple[str, str]] = {}
    for place, row in rows:
        for column in required:
            if column not in row:
                raise ValueError(f"{source}, {place}: no column {column!r}; columns found: {sorted(row)}")
        for column, value in row.items():
            if value is None:
                continue
            kind = _kind(value)
            seen, where = first.setdefault(column, (kind, place))
            if kind != seen:
                raise ValueError(
                    f"{source}: column {column!r} mixes types: {seen} in {where}, {kind} in {place} "
                    f"({repr(value)[:60]}); write it as one type in all rows, e.g. all as strings"
                )


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if value is None:
        return "null"
    name = type(value).__name__
    return {"str": "string", "dict": "object"}.get(name, name)
