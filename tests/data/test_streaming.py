"""Rows that stay on the disk: the examples of those in memory, in any order, with the same errors."""

from __future__ import annotations

import json
import logging

import datasets
import pytest

from rlkit.data.examples import sft_examples
from rlkit.data.load import load_rows
from rlkit.data.streaming import BadRow, DiskRows, Streamed
from rlkit.data.tiny import tiny_tokenizer

LIMIT = 40


def row(i):
    return {"question": f"{i} + é", "response": "abc" * (20 if i % 5 == 4 else 1) + str(i)}  # every fifth is too long


def write(path, rows, *, blank=()):
    lines = [json.dumps(x, ensure_ascii=False) + "\n" + "\n" * (i in blank) for i, x in enumerate(rows)]
    path.write_text("".join(lines).removesuffix("\n"), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path):
    first = write(tmp_path / "a.jsonl", map(row, range(7)), blank=(0, 3, 6))
    datasets.Dataset.from_list([*map(row, range(7, 11))]).to_parquet(str(tmp_path / "b.parquet"))
    return [str(first), str(tmp_path / "b.parquet")]


def streamed(rows):
    make = lambda i: sft_examples(rows.row(i), tokenizer=tiny_tokenizer(), max_example_tokens=LIMIT)[0]
    return Streamed(rows, make)


RENAME = {"question": "prompt"}


def test_rows_on_the_disk_are_those_of_the_files_with_their_places(files):
    held, disk = load_rows(files, rename=RENAME), DiskRows(files[:1], files[1:], rename=RENAME)
    assert (len(disk), disk.sizes) == (len(held), [7, 4])
    for i in (10, 0, 6, 3, 7):
        one = disk.row(i)
        assert [*one] == [held[i]]
        assert f"{one.source}, {one.places[0]}" == held.places[i]
    assert [disk.file_of(i) for i in (0, 6, 7, 10)] == [range(7), range(7), range(7, 11), range(7, 11)]
    assert disk.row(4).places == ["line 7"], "after two blank lines"


def test_examples_are_those_in_memory_and_one_that_is_dropped_is_the_next_of_its_file(files, caplog):
    held = load_rows(files, rename=RENAME)
    with caplog.at_level(logging.WARNING, logger="rlkit.data"):
        examples = streamed(DiskRows(files, rename=RENAME))
        assert len(examples) == 11
        for i in range(11):
            kept = {4: 5, 9: 10}.get(i, i)
            assert examples[i] == sft_examples([held[kept]], tokenizer=tiny_tokenizer(), max_example_tokens=LIMIT)[0][0]
        assert not caplog.records, "what is dropped is not reported row by row"
        assert examples[-1] == examples[10]
        assert examples[2:4] == [examples[2], examples[3]]
        assert examples.head == [examples[0]]
        sft_examples(held, tokenizer=tiny_tokenizer(), max_example_tokens=LIMIT)
        assert caplog.records, "and reports go on elsewhere"


def test_a_row_after_which_its_file_ends_is_replaced_by_the_first_of_that_file(tmp_path):
    parts = [[write(tmp_path / f"{k}.jsonl", map(row, numbers))] for k, numbers in enumerate(([0, 1, 4], [2, 3]))]
    examples = streamed(DiskRows(*parts, rename=RENAME))
    assert examples[2] == examples[0] != examples[3]
    write(tmp_path / "long.jsonl", map(row, [4, 9]))
    with pytest.raises(ValueError, match=r"long.jsonl: all 1 examples are longer than `max_example_tokens` 40"):
        streamed(DiskRows([tmp_path / "long.jsonl"], rename=RENAME))


def test_what_is_wrong_with_a_row_is_said_with_its_place_when_it_is_read(tmp_path):
    good = json.dumps({"prompt": "a", "response": "b"})
    wrong = tmp_path / "a.jsonl"
    wrong.write_bytes(f'{good}\n\n{{"prompt": 1}} x\n[1]\n{good}\n'.encode() + b"\xff\n" + b'{"prompt": "a"}')
    examples = streamed(DiskRows([wrong]))
    for i, message in (
        (1, r"a.jsonl, line 3: malformed JSON at column 15 \(Extra data\)"),
        (2, r"a.jsonl, line 4: a row must be a JSON object like {...}, got list: \[1\]"),
        (4, r"a.jsonl, line 6: not UTF-8 \(byte 0xff at offset 0\)"),
        (5, "a.jsonl, line 7: no response to train on"),
    ):
        with pytest.raises(BadRow, match=message):
            examples[i]
    assert examples[3] == examples[0]
    with pytest.raises(IndexError):
        examples[6]


def test_files_that_do_not_stream_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,response\na,b\n")
    (tmp_path / "a.jsonl.gz").write_bytes(b"x")
    for name in ("a.csv", "a.jsonl.gz"):
        with pytest.raises(ValueError, match=f"{name}: only files of JSONL and Parquet that are not compressed stream"):
            DiskRows([tmp_path / name])
    with pytest.raises(FileNotFoundError, match="no such file"):
        DiskRows([tmp_path / "none.jsonl"])
