"""Rows of one file: JSON, JSON Lines, CSV and tables, plain or compressed.

JSON and CSV are read with the standard library alone. Parquet, Arrow and Feather need `datasets`, which is imported
only when one of them is read.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rlkit._util import untrusted
from rlkit._util.extras import lacks, optional
from rlkit.data import schema

Row = dict[str, Any]
Placed = Iterator[tuple[str, Any]]  # rows with the place of each, e.g. "line 3"

_BOM = b"\xef\xbb\xbf"
_POINTER = b"version https://git-lfs"
_MAGIC = {
    b"\x1f\x8b": ".gz", b"BZh91AY": ".bz2", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1\x15": ".parquet",
    b"ARROW1\0": ".arrow",
}  # fmt: skip
_MAX_OBJECT = 1 << 28  # bytes of a file that is looked at as one object
_SPACE = re.compile(r"[ \t\n\r]*")


def read_file(path: Path) -> Placed:
    """The rows of a file with the place of each in it, "line 3" or "row 3", counted from 1.

    Errors: ValueError for a suffix that is not known, an empty file, malformed content, and a key or column that is
    there twice; ImportError for a table without `datasets`. They name the file, the place and the fix.
    """
    kind = format_of(path)
    if kind not in READERS:
        name = "".join(path.suffixes[-2:]) if path.suffix.lower() in PACKED else path.suffix
        raise ValueError(f"{path}: cannot tell the format from the suffix {name!r}; known are {', '.join(READERS)}")
    if untrusted.check_file(path) == 0:
        raise ValueError(f"{path}: the file is empty (0 bytes)")
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER:
        raise ValueError(f"{path}: a pointer of Git LFS, not the data: run `git lfs pull`")
    packed = next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), "")
    is_plain = READERS[kind] is not _table and path.suffix.lower() not in PACKED
    if packed and is_plain:
        raise ValueError(f"{path}: holds {packed} data, which its name does not tell: rename it to end with {packed}")
    rows = READERS[kind](path)
    return rows if is_plain else _counted(path, rows)


def _counted(path: Path, rows: Placed) -> Placed:
    """The rows of a compressed file or a table, while they are not more than it can hold."""
    for number, row in enumerate(rows, start=1):
        untrusted.check_expanded(path, number)
        yield row


def format_of(path: Path) -> str:
    """The suffix that tells the format: ".jsonl" of both train.jsonl and train.jsonl.gz; "" if there is none."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    kind = Path(name.removesuffix(packed)).suffix
    return "" if packed and READERS.get(kind) is _table else kind


def numbered(rows: Any) -> Placed:
    """Rows with their places."""
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def need_datasets(files: object) -> Any:
    """The package `datasets`; ImportError, with the extra to install, where it is missing."""
    return optional("datasets", "data", f"reading {files} (JSON and CSV need nothing) needs")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed."""
    try:
        if path.suffix.lower() not in PACKED:
            with path.open("rb") as file:
                yield file
            return
        with PACKED[path.suffix.lower()](path, "rb") as file, untrusted.Expanded(file, path) as bounded:
            yield io.BufferedReader(bounded, 1 << 20)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        damaged = "the file is damaged or incomplete"
        with path.open("rb") as file:
            if file.read(1) in (b"{", b"["):
                damaged = f"it is not compressed: rename it, without {path.suffix}"
        raise ValueError(f"{path}: cannot be decompressed: {error}; {damaged}") from None


def _zstd(path: Path, mode: str) -> IO[bytes]:
    """The decompressed bytes, at once: neither reader tells a damaged file by an exception of the standard library."""
    try:
        opened: Any = importlib.import_module("compression.zstd").open(path, mode)
    except ModuleNotFoundError:  # before Python 3.14
        try:
            pyarrow = importlib.import_module("pyarrow")
        except ModuleNotFoundError:
            fix = f"; or decompress it: zstd -d {path}"
            raise ImportError(lacks("pyarrow", "data", f"reading {path} before Python 3.14 needs") + fix) from None
        opened = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    try:
        with opened:
            return io.BytesIO(untrusted.whole(opened, untrusted.expanded_bytes(path)))
    except Exception as error:
        raise EOFError(str(error)) from None


def _json(path: Path) -> Placed:
    with _opened(path) as file:
        is_list = file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
    if is_list:
        return _json_list(path)
    _refuse_one_object(path)
    return _json_lines(path)


def _refuse_one_object(path: Path) -> None:
    """ValueError for a file of one object with lists of rows in it, such as {"version": ..., "data": [...]}."""
    with _opened(path) as file:
        data = untrusted.whole(file, _MAX_OBJECT)
    if len(data) > _MAX_OBJECT:
        return
    try:
        whole = json.loads(data.removeprefix(_BOM))
    except (ValueError, RecursionError):
        return
    if not isinstance(whole, dict) or {*schema.columns_of("prompt", "question", "text", "response", "pair")} & {*whole}:
        return
    lists = [name for name, value in whole.items() if _is_rows(value)]
    if lists:
        keys, names = ", ".join(map(repr, whole)), " and ".join(map(repr, lists))
        fix = "write that list" if len(lists) == 1 else "write each list to a file of its own"
        raise ValueError(f"{path}: one object with the keys {keys[:200]}; the rows are under {names}: {fix}")


def _is_rows(value: Any) -> bool:
    """Whether a value is a list of objects that are no messages or tools of one row."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) and item for item in value):
        return False
    return not any({"role", "from", "function", "input_schema"} & {*item} for item in value)


def _json_lines(path: Path) -> Placed:
    with _opened(path) as file:
        for number, line in enumerate(untrusted.lines(file, path), start=1):
            if line.removeprefix(_BOM).strip():
                row = parsed_line(f"{path}, line {number}", line)
                if number == 1 and _is_by_columns(row):
                    raise ValueError(
                        f"{path}: a table by columns, as pandas writes it, and not rows: write it with "
                        'to_json(path, orient="records", lines=True)'
                    )
                yield f"line {number}", row


def parsed_line(place: str, line: bytes) -> Any:
    """What a line of a JSONL file holds. Errors: ValueError with the place for anything but one value in UTF-8."""
    text = _text(place, line).strip()
    with _parsing(place):
        row, end = _DECODER.raw_decode(text)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, _SPACE.match(text, end).end())  # type: ignore[union-attr]
    return row


def _is_by_columns(row: Any) -> bool:
    """Whether an object is a whole table of pandas: `{"column": {"0": ..., "1": ...}}`, or of orient "split"."""
    columns = [*row.values()] if isinstance(row, dict) else []
    split = bool(columns) and {"columns", "data"} <= {*row} <= {"columns", "index", "data"}
    keys = [[*column] if isinstance(column, dict) else [] for column in columns]
    return split or (bool(keys) and keys[0][:1] == ["0"] and all(names == keys[0] for names in keys))


def _json_list(path: Path) -> Placed:
    most = int(untrusted.limit("list_mib") * 2**20)
    with _opened(path) as file:
        data = untrusted.whole(file, most)
    if len(data) > most:
        fix = ": write one object per line, as .jsonl"
        raise untrusted.too_much(path, "the list is too large", "list_mib", fix=fix)
    text = _text(str(path), data)
    del data

    def skip(end: int) -> int:
        return _SPACE.match(text, end).end()  # type: ignore[union-attr]

    end, number = skip(skip(0) + 1), 0
    while number or text[end : end + 1] != "]":
        number += 1
        place = f"{path}, row {number}"
        with _parsing(place):
            row, end = _DECODER.raw_decode(text, end)
            end = skip(end)
            if (mark := text[end : end + 1]) not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']' after a row", text, end)
        yield f"row {number}", row
        if mark == "]":
            break
        end = skip(end + 1)
    with _parsing(str(path)):
        if (end := skip(end + 1)) < len(text):
            raise json.JSONDecodeError("Extra data after the list", text, end)


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice in one object; keep one of them")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _text(place: str, data: bytes) -> str:
    try:
        return data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        at = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        other = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "cp1252"
        fix = f"save it as UTF-8, e.g. with iconv -f {other} -t utf-8 FILE"
        raise ValueError(f"{place}: not UTF-8 ({at}); {fix}") from None


@contextmanager
def _parsing(place: str) -> Iterator[None]:
    """Errors of the JSON parser, with the place."""
    try:
        yield
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if "\n" in error.doc else f"column {error.colno}"
        excerpt = error.doc[max(0, error.pos - 40) : error.pos + 40]
        fix = "a .jsonl file holds one complete object per line, a .json file one list of objects"
        raise ValueError(f"{place}: malformed JSON at {at} ({error.msg}): ...{excerpt!r}...; {fix}") from None
    except RecursionError:
        raise ValueError(f"{place}: objects or lists are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


_QUOTED = 'a cell that begins with a quote ends with one, and quotes in it are doubled ("")'
_NAMELESS = "delete such columns, or the lines before the header"
_LONG = "; RLKIT_LIMITS=cell_mib=NUMBER raises the limit"
_QUOTES_OF_ANOTHER_ROW = f"in a later row, so that both are one: {_QUOTED}"


def _csv(path: Path) -> Placed:
    """The rows with the line where each begins: a cell may hold line breaks."""
    csv.field_size_limit(min(int(untrusted.limit("cell_mib") * 2**20), 2**31 - 1))  # its own limit is 128 KiB
    start = 1
    try:
        with _opened(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            first = next(rest := untrusted.lines(file, path), "")
            if mark := re.fullmatch(r'"?sep=(.)"?\s*', first, re.IGNORECASE):  # of Excel, before the header
                first = next(rest, "")
            before, delimiter = (1, mark[1]) if mark else (0, _delimiter(first, path))
            reader = csv.reader(chain([first], rest), strict=True, delimiter=delimiter)
            names = next(reader, [])
            if first and not names:
                raise ValueError(f"{path}, line {before + 1}: blank, and the header belongs there: delete that line")
            if names.count("") > 1:
                which = f"column {names.index('') + 1} of {len(names)} has no name in the header {names}"
                raise ValueError(f"{path}, line {before + 1}: {which}: {_NAMELESS}")
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: two columns have the same name: {names}")
            if blank := [name for name in names if name != name.strip()]:
                fix = "write none around commas, where they are part of the cells"
                raise ValueError(f"{path}: blanks around {blank[0]!r} in the header {names}: {fix}")
            start = before + reader.line_num + 1
            for cells in reader:
                place, start = f"line {start}", before + reader.line_num + 1
                if cells == names and len(names) > 1:
                    raise ValueError(f"{path}, {place}: the header again, as a row: delete that line")
                if len(cells) not in (0, len(names)):
                    raise ValueError(f"{path}, {place}: not {len(names)} cells, as the header {names} has")
                if delimiter == "\t" and any("\t" in cell and "\n" in cell for cell in cells):
                    raise ValueError(f"{path}, {place}: a quote that opens there closes {_QUOTES_OF_ANOTHER_ROW}")
                if cells:
                    yield place, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        more = _LONG * ("field limit" in str(error))
        raise ValueError(f"{path}, line {start}: malformed CSV: {error}; {_QUOTED}{more}") from None
    except UnicodeDecodeError:
        with _opened(path) as raw:
            for number, line in enumerate(raw, start=1):
                _text(f"{path}, line {number}", line)
        raise


def _delimiter(header: str, path: Path) -> str:
    """The comma, or the semicolon, tab or bar if that splits the header into more columns (spreadsheets write them).

    Of `.tsv` the tab, and another only if the header has none.
    """
    choices = ",;\t|" if format_of(path) != ".tsv" else "\t" if "\t" in header else "\t,;|"
    return max(choices, key=lambda mark: len(next(csv.reader([header], delimiter=mark), ())))


def _table(path: Path) -> Placed:
    datasets, kind = need_datasets(path), format_of(path)
    with reading(path, kind[1:]):
        if kind == ".parquet":
            if check_parquet(path):
                yield from numbered(parquet_table(path, streaming=True))  # without a copy in the cache
        else:
            yield from numbered(_arrow(path, datasets))


def parquet_table(path: Path, *, streaming: bool) -> Any:
    """The rows of a Parquet file by `datasets`: its `load_dataset` asks the network to count this, of any file."""
    need_datasets(path)
    from datasets.io.parquet import ParquetDatasetReader

    return ParquetDatasetReader(escape(str(path)), streaming=streaming).read()


@contextmanager
def reading(path: Path | str, kind: str) -> Iterator[None]:
    """One line with the path for any error of pyarrow and `datasets`, of a file that is damaged."""
    try:
        yield
    except untrusted.BadFile:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        raise ValueError(f"{path}: cannot be read as {kind}: {type(cause).__name__}: {cause}") from error


def check_parquet(path: Path) -> int:
    """The number of rows of a Parquet file; ValueError for more than it can hold."""
    from pyarrow import parquet

    num_rows = parquet.read_metadata(path).num_rows
    untrusted.check_expanded(path, num_rows)
    return int(num_rows)


def _arrow(path: Path, datasets: Any) -> Iterator[Row]:
    """Rows of Arrow's two formats, a file (also Feather) and a stream, which is what `datasets` writes."""
    import pyarrow
    from pyarrow import feather

    with path.open("rb") as file:
        start = file.read(6)
    with pyarrow.memory_map(str(path)) as source:
        if start[:4] == b"FEA1":
            batches = feather.read_table(source).to_batches()
        elif start == b"ARROW1":  # batch by batch: a table would be whole in memory where the file is compressed
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(source)
            if b"huggingface" in (batches.schema.metadata or {}):  # its column types are read by `datasets` alone
                yield from datasets.Dataset.from_file(str(path))
                return
        for batch in batches:
            names = batch.schema.names
            if len(set(names)) < len(names):
                raise ValueError(f"two columns have the same name: {names}")
            yield from batch.to_pylist()


READERS: dict[str, Callable[[Path], Placed]] = {
    ".json": _json,
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), _json_lines),
    **dict.fromkeys((".csv", ".tsv"), _csv),
    **dict.fromkeys((".parquet", ".arrow", ".feather"), _table),
}
PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
