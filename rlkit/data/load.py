"""Rows from files, folders and the hub, as plain dicts.

JSON, JSONL and CSV are read with the standard library alone. Parquet, Arrow and hub data sets need `datasets`, which is
imported only when one of them is asked for. Errors name the file, the line and the fix.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit._util.untrusted import check_depth, loads
from rlkit.data.files import Row, format_of
from rlkit.data.schema import ANSWERS
from rlkit.data.sources import HELD_OUT, Source, expand, find

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
ROLES = {*_SHAREGPT_ROLES, *_SHAREGPT_ROLES.values(), "system", "developer", "function", "function_call", "tool_call"}
_JSON_TURNS = re.compile(r"\s*(\[\s*)?\{")
_PYTHON_TURNS = re.compile(r"\s*(\[\s*)?\{\s*'(role|content|from|value)'\s*:")
_NAMED = 4  # values in a line
_OF_SPLITS = ("split", "partition", "fold", "subset")
_PROGRESS = 1000  # rows between two log lines
_log = logging.getLogger("rlkit.data")
_progress = logging.getLogger("rlkit.data.progress")


class FromText(dict[str, Any]):
    """An object of JSON text: a table has not filled it with nulls."""


class PythonText(ValueError):
    """A cell holds messages as Python writes them, and not as JSON."""


class Rows(list[Row]):
    """Rows and where each came from: the file (`source`) and e.g. "line 3" (`places`). See `place_of`.

    Of several files `source` is "" and the places name them: "b.jsonl, line 3". `sources` has the names of all.
    """

    def __init__(self, rows: Iterable[Row], *, source: str, places: Sequence[str], sources: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.source, self.places, self.sources = source, places, tuple(sources) or (source,)


def place_of(rows: Sequence[Any], index: int, *, with_source: bool = True) -> str:
    """Where `rows[index]` came from, for messages: "train.jsonl, line 3", or "row 3" of rows that no file gave."""
    if not isinstance(rows, Rows):
        return f"row {index + 1}"
    return f"{rows.source}, {rows.places[index]}" if with_source and rows.source else rows.places[index]


def place_of_prompt(prompt: Any) -> str:
    """The same of the row of a `Prompt`; one of another type has its `index`."""
    return getattr(prompt, "place", "") or f"row {prompt.index + 1}"


def some_rows(rows: Sequence[Row], indices: Sequence[int]) -> Rows:
    """The rows of these indices, with their places."""
    places = [place_of(rows, i, with_source=False) for i in indices]
    return Rows((rows[i] for i in indices), source=getattr(rows, "source", ""), places=places)


def placed(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """The place and the row of each."""
    return ((place_of(rows, index), row) for index, row in enumerate(rows))


def load_rows(
    path_or_id: str | Path | Sequence[str | Path | Source],
    *,
    split: str | None = None,
    name: str | None = None,
    columns: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    limit: int | None = None,
    limit_each: int | None = None,
    held_out: bool = False,
    unused: set[str] | None = None,
) -> Rows:
    """The rows of files, folders or hub data sets, as a list of dicts.

        rows = load_rows("train.jsonl", columns=["messages", "answer"])
        rows = load_rows(["a.jsonl.gz", "b.parquet"])                    # one after the other; "part-*.jsonl" too
        rows = load_rows("snapshot", split="test")                       # a folder; the same as "snapshot:test"
        rows = load_rows("openai/gsm8k", name="main", split="test", rename={"question": "prompt"}, limit=100)
        rows = load_rows("openai/gsm8k:main:test")                       # the same part, for a command line

    The suffix of an existing file selects the format: `.json` (a list of objects, or one object per line), `.jsonl`
    (also `.ndjson`, `.jsonlines`), `.csv` (also with semicolons), `.tsv`, `.parquet`, `.arrow`, `.feather`. JSON and
    CSV may be compressed: `.gz`, `.bz2`, `.xz`, `.zst`. A glob stands for the files that it matches, in sorted order.

    A folder was written by `save_to_disk` of a `Dataset` or `DatasetDict`, or holds data files of one format, such as
    the shards of a hub snapshot. There, file names (train-00000-of-00002.parquet, dev.jsonl) or the names of their
    folders tell the split; files without it are one split. FOLDER:SPLIT and FOLDER:SUBFOLDER:SPLIT name a part.
    PACKAGE:TASK(arguments) is a task of a package that makes data (`rlkit.data.packages`), "reasoning_gym:chain_sum".
    Anything else is a hub id, optionally with configuration and split.

    CSV has no types: every cell is text, also "07" and "NA", because rewards compare answers as text. Each row keeps
    its own columns and values, and the rows of several files may have different columns.

    split:    which part of a folder or hub data set; a single file has no parts and ignores it. None: the only split,
              or train (of a hub data set always train).
    name:     the configuration of a hub data set that has several.
    columns:  names every row must have, after renaming.
    rename:   from the column names of the data to the names that rlkit reads. A file without the column is unchanged,
              if another one has it.
    unused:   takes the names of `rename` that no file has, in place of an error.
    limit:    keep the first `limit` rows, and with `limit_each` the first rows of each file.
    held_out: without a `split`, take the only test or validation split in place of train.

    A column of ShareGPT turns (`from`, `value`) becomes a column of messages (`role`, `content`, and the turn's other
    keys). The readers of rows find it under the name "conversations".

    Raises FileNotFoundError (nothing there; what was tried), ImportError (`datasets` is needed and missing), ValueError
    (an empty file, a malformed line, a row that is not an object, a key or column that is there twice, a missing
    column, a folder or split that is not clear). Lines and rows are counted from 1 in their own file; the readers of
    rows name them too (`place_of`).

    Differs from `datasets.load_dataset`: files are not cached; JSON and CSV do not import `datasets`; rows stay dicts
    with exactly their own keys, not Arrow columns; no CSV cell is converted to a number or null; all rows are held in
    memory.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 or None (all rows), got {limit}")
    sources = sources_of(path_or_id, name=name, split=split, held_out=held_out)
    files: list[tuple[str, list[tuple[str, Any]]]] = []
    num_rows = 0
    for number, source in enumerate(sources, start=1):
        read: list[tuple[str, Any]] = []
        left = [n for n in (limit_each, None if limit is None else limit - num_rows) if n is not None]
        for item in itertools.islice(source.rows(), min(left, default=None)):
            read.append(item)
            if len(read) % _PROGRESS == 0:
                of = f" (file {number} of {len(sources)})" if len(sources) > 1 else ""
                _progress.info("reading %s%s: %d rows", source.name, of, len(read))
        if not read:
            raise ValueError(f"{source.name}: no rows")
        files.append((source.name, read))
        num_rows += len(read)
        if num_rows == limit:
            break
    return _joined(files, columns, rename or {}, unused)


def sources_of(
    path_or_id: str | Path | Sequence[str | Path | Source],
    *,
    name: str | None = None,
    split: str | None = None,
    held_out: bool = False,
) -> list[Source]:
    """The files, saved splits and hub data sets that `load_rows` reads."""
    specs = [path_or_id] if isinstance(path_or_id, str | Path) else list(path_or_id)
    if others := [x for x in specs if not isinstance(x, str | Path | Source)]:
        raise TypeError(
            f"path_or_id must be a path or hub id, or a list of them, got a list of {type(others[0]).__name__}"
        )
    if not specs:
        raise ValueError("no file is given: path_or_id is an empty list")
    sources = [
        source for spec in specs for path in ([spec] if isinstance(spec, Source) else expand(spec))
        for source in ([path] if isinstance(path, Source) else find(path, name=name, split=split, held_out=held_out))
    ]  # fmt: skip
    seen = Counter(Path(source.name).expanduser().resolve() for source in sources)
    for path, num in seen.items():
        if num > 1:
            _log.warning("%s is given %d times, and each of its rows is used as often", path.name, num)
    return sources


def _joined(
    files: Sequence[tuple[str, list[tuple[str, Any]]]],
    columns: Sequence[str],
    rename: Mapping[str, str],
    unused: set[str] | None,
) -> Rows:
    """The rows of (name, placed rows) under their new names."""
    rows, places, used = [], [], set()
    for source, read in files:
        for place, row in read:
            _check_object(f"{source}, {place}", row)
        here = {old: new for old, new in rename.items() if any(old in row for _, row in read)}
        used |= {*here}
        cells = format_of(Path(source)) in (".csv", ".tsv")
        rows += [checked_row(f"{source}, {place}", row, here, columns, cells=cells) for place, row in read]
        places += [place if len(files) == 1 else f"{source}, {place}" for place, _ in read]
    for old in rename:
        if old not in used and unused is not None:
            unused.add(old)
        elif old not in used:
            source, ((place, row), *_) = files[0]
            raise column_error(f"{source}, {place}", f"no column {old!r} to rename", row)
    names = [source for source, _ in files]
    return Rows(rows, source=names[0] if len(names) == 1 else "", places=places, sources=names)


def mixed_types(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each column whose values are of several types. Numbers are one type, and null goes with each."""
    seen: dict[str, tuple[str, int]] = {}
    told = set()
    for index, row in enumerate(rows):
        for column, value in row.items():
            if value is None or column in told:
                continue
            kind = _kind(value)
            before, first = seen.setdefault(column, (kind, index))
            if kind != before:
                told.add(column)
                there, here = place_of(rows, first), place_of(rows, index, with_source=False)
                yield f"column {column!r} mixes types: {before} in {there}, {kind} in {here} ({repr(value)[:60]})"


def name_splits(rows: Sequence[Row]) -> None:
    """Log each column, or key of one, that says which split a row is of, where it names several, or a held-out one."""
    source = f"{rows.source}: " if isinstance(rows, Rows) and rows.source else ""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        inner = {
            f"{of}.{key}": x for of, value in row.items() if isinstance(value, Mapping) for key, x in value.items()
        }
        for name, value in {**row, **inner}.items():
            if name.rpartition(".")[2] in _OF_SPLITS and value not in (None, ""):
                found.setdefault(name, {})[str(value)] = None
    for name, held in found.items():
        if HELD_OUT & {*map(str.lower, held)} or (len(held) > 1 and name.endswith(("split", "fold"))):
            more = f" and {len(held) - _NAMED} more" if len(held) > _NAMED else ""
            names = ", ".join([*held][:_NAMED])
            _log.warning("%scolumn %r holds %s%s: all rows are used", source, name, names, more)


def column_error(where: str, problem: str, row: Row, fix: str = "") -> ValueError:
    """The error for a row with wrong columns: `where` it is, what is wrong, and the columns that it has."""
    return ValueError(f"{where}: {problem}; columns found: {sorted(getattr(row, 'own', row))}{fix}")


def _check_object(where: str, row: Any) -> None:
    if not isinstance(row, dict):
        kind = f"{_kind(row)}: {repr(row)[:80]}"
        raise ValueError(f"{where}: a row must be a JSON object like {{...}}, got {kind}")


def checked_row(
    where: str, row: Row, rename: Mapping[str, str], columns: Sequence[str] = (), *, cells: bool = False
) -> Row:
    """The row under its new names, ShareGPT turns as messages, and answers in `cells` of text as what their JSON is."""
    _check_object(where, row)
    check_depth(where, row)
    for old, new in rename.items():
        if old not in row:
            raise column_error(where, f"no column {old!r} to rename", row)
        if new in row and new not in rename:
            raise column_error(where, f"column {new!r} is there already", row)
    if len({rename.get(column, column) for column in row}) < len(row):
        twice = next(new for new in rename.values() if sum(rename.get(x, x) == new for x in row) > 1)
        raise column_error(where, f"two columns are renamed to {twice!r}", row)
    row = {rename.get(column, column): as_messages(value) for column, value in row.items()}
    if cells:
        try:
            row |= {name: turns_of_text(row[name]) for name in ANSWERS if name in row}
        except ValueError as error:
            raise column_error(where, f"cannot be read: {error}", row) from None
    for column in columns:
        if column not in row:
            raise column_error(where, f"no column {column!r}", row)
    return row


def as_messages(value: Any) -> Any:
    """A conversation of {"from": "human", "value" or "content": ...} as messages; anything else as it is.

    An object of lists, which is what `datasets` makes of a list of objects, is read as the list. A turn keeps its
    other keys.
    """
    if isinstance(value, dict) and ({"role", "content"} <= {*value} or {"from", "value"} <= {*value}):
        lists = [*value.values()]
        if all(isinstance(items, list) for items in lists) and len({*map(len, lists)}) == 1:
            value = [dict(zip(value, turn, strict=True)) for turn in zip(*lists, strict=True)]
    turns = value if isinstance(value, list | tuple) else []
    return [_message(turn) for turn in turns] if turns and all(map(_is_turn, turns)) else value


def turns_of_text(value: Any, *, any_role: bool = False) -> Any:
    """Messages from their JSON text, with roles that are known unless `any_role`; else the value.

    The text of one message is a list of it, if it has content.
    """
    if not isinstance(value, str) or not _JSON_TURNS.match(value):
        return value
    if _PYTHON_TURNS.match(value):
        raise PythonText(f"messages must be JSON text, got Python's {value[:60]!r}: write them with json.dumps")
    try:
        read = loads(value, object_hook=FromText)
    except ValueError:
        return value
    if isinstance(read, dict):
        read = [read] if {"content", "value"} & {*read} else []
    roles = [turn.get("role", turn.get("from")) if isinstance(turn, dict) else None for turn in read]
    all_roles = bool(read) and all(isinstance(role, str) and (any_role or role in ROLES) for role in roles)
    return as_messages(read) if all_roles else value


def _is_turn(value: Any) -> bool:
    turn = isinstance(value, dict) and isinstance(value.get("from"), str)
    return turn and ("value" in value or "content" in value)


def _message(turn: Row) -> Row:
    has_content = turn.get("content") or (turn.get("value") is None and "content" in turn)
    content = turn["content"] if has_content else turn.get("value")
    read = ("from", "role", "content", *(() if turn.get("content") else ("value",)))  # two texts: refused with the row
    more = {key: value for key, value in turn.items() if key not in read}
    return {"role": _SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": content, **more}


def _kind(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    name = type(value).__name__
    return {"str": "string", "dict": "object", "bool": "boolean", "NoneType": "null"}.get(name, name)
