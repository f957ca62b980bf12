"""Every kind of file gives the rows that were written, and an error names the file and the row."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import socket
import subprocess
import sys

import pytest

from rlkit.data.files import parquet_table
from rlkit.data.load import load_rows, place_of

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "é漢", "answer": "x\ny"}, {"prompt": "c", "answer": ""}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
CSV = 'prompt,answer\n1+1,2\né漢,"x\ny"\nc,\n'.encode()
PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def name_of(value):
    """Without the bytes: gzip writes the time into them, and all test processes need the same names."""
    return "bytes" if isinstance(value, bytes) else None


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *[(f"a.jsonl{suffix}", pack(LINES)) for suffix, pack in PACK.items()],
        ("a.json.gz", gzip.compress(json.dumps(ROWS, indent=1).encode())),
        ("a.csv.gz", gzip.compress(CSV)),
        ("a.JSONL.GZ", gzip.compress(LINES)),
        ("a.ndjson", LINES),
        ("a.jsonlines", LINES),
        ("a.tsv", CSV.replace(b",", b"\t")),
        ("a.csv", CSV.replace(b",", b";")),
        ("b.csv", CSV.replace(b",", b"\t")),
        ("c.csv", CSV.replace(b",", b"|")),
        ("b.tsv", CSV),
        ("c.tsv", CSV.replace(b",", b";")),
    ],
    ids=name_of,
)
def test_rows_are_those_written(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    rows = load_rows(tmp_path / name)
    assert rows == ROWS
    assert load_rows(tmp_path / name, limit=2) == ROWS[:2]
    last = "row 3" if ".json." in name else "line 5" if "sv" in name else "line 3"
    assert place_of(rows, 2) == f"{tmp_path / name}, {last}"


def test_tabs_and_no_mark_in_the_header_of_a_tsv_file_leave_commas_alone(tmp_path):
    (tmp_path / "a.tsv").write_text("a,b,c\td\n1,2\t3\n")
    assert load_rows(tmp_path / "a.tsv") == [{"a,b,c": "1,2", "d": "3"}]
    (tmp_path / "b.tsv").write_text("text\nOne, two; three | four\n")
    assert load_rows(tmp_path / "b.tsv") == [{"text": "One, two; three | four"}]


def test_commas_in_the_header_of_a_csv_file_win_over_as_many_semicolons(tmp_path):
    (tmp_path / "a.csv").write_text("a;b,c\n1;2,3\n")
    assert load_rows(tmp_path / "a.csv") == [{"a;b": "1;2", "c": "3"}]


def test_zstandard_is_read_where_a_library_reads_it(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.jsonl.zst"
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(LINES)
    assert load_rows(path) == ROWS
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst: cannot be decompressed: .*; the file is damaged or incompl"):
        load_rows(path)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install 'datasets>=4'; or decompress it: zstd -d"):
        load_rows(path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:-20], r"a\.jsonl\.gz: cannot be decompressed: .*damaged or incomplete"),
        ("a.csv.gz", gzip.compress(CSV)[:-20], r"a\.csv\.gz: cannot be decompressed: .*damaged or incomplete"),
        ("a.jsonl.gz", LINES, r"a\.jsonl\.gz: cannot be decompressed: Not a gzipped file"),
        ("a.jsonl.bz2", LINES, r"a\.jsonl\.bz2: cannot be decompressed: "),
        ("a.jsonl.xz", LINES, r"a\.jsonl\.xz: cannot be decompressed: "),
        ("a.jsonl.gz", gzip.compress(LINES + b"{]"), r"a\.jsonl\.gz, line 4: malformed JSON at column 2"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1, "a": 1}'), r"a\.jsonl\.gz, line 1: the key 'a' is there twice"),
        ("a.csv.bz2", bz2.compress(b"a,b\n1\n"), r"a\.csv\.bz2, line 2: not 2 cells"),
        ("a.gz", gzip.compress(LINES), r"a\.gz: cannot tell the format from the suffix '\.gz'; known are"),
        ("a.tar.gz", b"x", r"cannot tell the format from the suffix '\.tar\.gz'"),
        ("a.parquet.gz", b"x", r"cannot tell the format from the suffix '\.parquet\.gz'"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid", r"a\.parquet: a pointer of Git LFS, not the"),
        ("a.tsv", b"a\ta\n1\t2\n", "two columns have the same name"),
        (
            "a.jsonl",
            gzip.compress(LINES),
            r"a\.jsonl: holds \.gz data, which its name does not tell: rename it to",
        ),
        ("a.csv", bz2.compress(CSV), r"a\.csv: holds \.bz2 data, which its name does not tell"),
        ("a.csv", b"a, b\n1, 2\n", r"a\.csv: blanks around ' b' in the header \['a', ' b'\]: write none around commas"),
        ("a.csv", b"a,b\n1,2\na,b\n", r"a\.csv, line 3: the header again, as a row: delete that line"),
        (
            "a.csv",
            b"a,b\n1,2\nM\xfcnchen,3\n",
            r"a\.csv, line 3: not UTF-8 \(byte 0xfc at offset 1\); .*iconv -f",
        ),
        (
            "a.json",
            b'{"a": {"0": "x", "1": "y"}, "b": {"0": "z", "1": "w"}}',
            r"a\.json: a table by columns, as pandas writes it, .* to_json\(path, orient=\"records\", lines=True\)",
        ),
        ("a.json", b'{"columns": ["a"], "index": [0], "data": [["x"]]}', r"a\.json: a table by columns"),
        (
            "a.csv",
            b"a;b;;\n1;2;;\n",
            r"line 1: column 3 of 4 has no name in the header .*: delete such columns",
        ),
        (
            "a.csv",
            b'a,b\n1,"2\n',
            r"line 2: malformed CSV: .*; a cell that begins with a quote ends with one",
        ),
        ("a.tsv", b'a\tb\n1\t"to be\n2\tx\n3\ty"\n', "line 2: a quote that opens there closes in a later row, so"),
        ("a.jsonl.gz", LINES, r"cannot be decompressed: .*; it is not compressed: rename it, without \.gz"),
    ],
    ids=name_of,
)
def test_a_bad_file_is_named_with_its_place(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name)


def test_arrow_files_of_pyarrow_in_all_its_formats(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather

    table = pa.Table.from_pylist(ROWS)
    named = table.append_column("kind", pa.array(["a", "b", "a"]).dictionary_encode())  # as pandas writes categories
    want = [{**row, "kind": kind} for row, kind in zip(ROWS, "aba", strict=True)]
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, named.schema) as writer:
        writer.write_table(named, max_chunksize=2)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, named.schema) as writer:
        writer.write_table(named, max_chunksize=2)
    feather.write_feather(named, tmp_path / "a.feather")
    for name in ("file.arrow", "stream.arrow", "a.feather"):
        assert load_rows(tmp_path / name) == want, name
    both = pa.table([[1], [2]], names=["a", "a"])
    with pa.OSFile(str(tmp_path / "twice.arrow"), "wb") as sink, pa.ipc.new_file(sink, both.schema) as writer:
        writer.write_table(both)
    with pytest.raises(ValueError, match=r"twice\.arrow: cannot be read as arrow: .*two columns have the same name"):
        load_rows(tmp_path / "twice.arrow")


def test_a_parquet_file_is_read_without_the_network(tmp_path, monkeypatch):
    """`load_dataset` asks a server to count the download, and waits for it where there is none."""
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *place, **_: asked.append(place))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert load_rows(tmp_path / "a.parquet") == ROWS
    assert len(parquet_table(tmp_path / "a.parquet", streaming=False)) == len(ROWS)
    assert asked == []


def test_a_parquet_file_may_have_the_characters_of_a_glob_in_its_name(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a[1].parquet")
    assert load_rows(tmp_path / "a[1].parquet") == ROWS


def test_compressed_json_needs_neither_datasets_nor_pyarrow(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    code = (
        "import sys; sys.modules.update(datasets=None, pyarrow=None); from rlkit.data import load_rows; "
        f"assert len(load_rows([{str(tmp_path)!r}, {str(tmp_path / '*.gz')!r}])) == 6"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"version": "1", "data": ROWS}, "'version', 'data'; the rows are under 'data': write that list"),
        ({"train": ROWS, "test": ROWS},
         "'train', 'test'; the rows are under 'train' and 'test': write each list to a file of its own"),
    ],
)  # fmt: skip
def test_one_object_with_the_rows_in_it_is_refused(tmp_path, content, message, indent):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content, indent=indent))
    with pytest.raises(ValueError, match=f"^{path}: one object with the keys {message}$"):
        load_rows(path)


@pytest.mark.parametrize(
    "row",
    [
        {"conversation": [{"input": "hi", "output": "yo"}]},
        {"prompt": "hi", "citations": [{"title": "a"}]},
        {"dialog": [{"role": "user", "content": "hi"}]},
    ],
)
def test_one_object_that_is_a_row_is_read(tmp_path, row):
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert load_rows(tmp_path / "a.json") == [row]
