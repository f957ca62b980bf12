from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.data.load import load_rows, mixed_types, name_splits

CELL = st.characters(exclude_categories=["Cs"])

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "é漢", "answer": "x\ny"}, {"prompt": "", "answer": None}]


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def test_json_jsonl_and_lines_in_a_json_file_give_the_same_rows(tmp_path):
    lines = "\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS)
    listed = write(tmp_path / "a.json", json.dumps(ROWS, indent=2))
    by_line = write(tmp_path / "b.jsonl", "\ufeff" + lines.replace("\n", "\r\n\r\n") + "\n\n")
    mislabelled = write(tmp_path / "c.json", lines)
    assert load_rows(listed) == load_rows(str(by_line)) == load_rows(mislabelled) == ROWS
    assert load_rows(listed, limit=2) == load_rows(by_line, limit=2) == ROWS[:2]


def test_columns_are_renamed(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"question": "1", "answer": 2, "prompt_id": 3}\n{"question": "4", "answer": 5}')
    rows = load_rows(path, rename={"question": "prompt", "answer": "question"}, columns=["prompt"])
    assert rows == [{"prompt": "1", "question": 2, "prompt_id": 3}, {"prompt": "4", "question": 5}]
    with pytest.raises(ValueError, match=r"line 1: no column 'q' to rename; columns found: \['answer'"):
        load_rows(path, rename={"q": "prompt"})
    with pytest.raises(ValueError, match="column 'answer' is there already"):
        load_rows(path, rename={"question": "answer"})
    with pytest.raises(ValueError, match=r"line 1: two columns are renamed to 'prompt'"):
        load_rows(path, rename={"question": "prompt", "answer": "prompt"})


def test_sharegpt_turns_become_messages(tmp_path):
    turns = [{"from": who, "value": who.upper()} for who in ("system", "human", "gpt", "observation")]
    rows = [{"conversations": turns, "tags": [{"from": "x"}]}, {"conversations": turns[1:3], "tags": []}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = load_rows(path, rename={"conversations": "messages"}, columns=["messages"])
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"] == [{"role": "user", "content": "HUMAN"}, {"role": "assistant", "content": "GPT"}]
    assert first["tags"] == [{"from": "x"}]


def test_a_hub_id_may_carry_name_and_split(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or [{"a": 1}])
    for spec, options in [
        ("a/b", {}),
        ("a/b:main", {}),
        ("a/b:main:test", {}),
        ("a/b::test", {}),
        ("a/b", {"name": "x"}),
    ]:
        assert load_rows(spec, **options) == [{"a": 1}]
    assert [(*args, kwargs["split"]) for args, kwargs in asked] == [
        ("a/b", None, "train"), ("a/b", "main", "train"), ("a/b", "main", "test"), ("a/b", None, "test"),
        ("a/b", "x", "train"),
    ]  # fmt: skip


def test_limit_stops_before_a_later_bad_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\nnonsense')
    assert load_rows(path, limit=2) == [{"a": 1}, {"a": 2}]


def test_json_needs_neither_datasets_nor_torch(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}')
    code = (
        f"import sys; from rlkit.data import load_rows; assert load_rows({str(path)!r}) == [{{'a': 1}}]; "
        "assert not {'datasets', 'transformers', 'torch', 'jinja2'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"a": 1}\n\n{"a": 2,}\n',
            r"a\.jsonl, line 3: malformed JSON at column \d+ .*\"a\": 2,.*one complete",
        ),
        ("a.jsonl", '{"a": 1}\n[1, 2]\n', r"a\.jsonl, line 2: a row must be a JSON object .* got list: \[1, 2\]"),
        ("a.json", '[{"a": 1}, null]', r"a\.json, row 2: a row must be a JSON object .* got null"),
        ("a.json", '[{"a": 1},\n {"a" 2}]', r"a\.json, row 2: malformed JSON at line 2, column 7"),
        ("a.json", '[{"a": 1} {"a": 2}]', r"a\.json, row 1: malformed JSON at column 11 .*after a row"),
        ("a.json", '[{"a": 1}] {}', r"a\.json: malformed JSON at column 12 \(Extra data after the list\)"),
        ("a.json", '[{"a": 1},', r"a\.json, row 2: malformed JSON at column 11"),
        ("a.jsonl", '{"a": 1} {"a": 2}', r"a\.jsonl, line 1: malformed JSON at column 10 \(Extra data\)"),
        ("a.jsonl", '{"a": 1}\n{"b": [{"c": 1, "d": 2, "c": 3}]}', r"a\.jsonl, line 2: the key 'c' is there twice"),
        ("a.json", '[{"a": 1},\n{"a": 1, "a": 2}]', r"a\.json, row 2: the key 'a' is there twice in one object"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl, line 1: objects or lists are nested too deeply"),
        ("a.jsonl", '{"a": ' + "1" * 5000 + "}", r"a\.jsonl, line 1: Exceeds the limit"),
        ("a.jsonl", "", r"a\.jsonl: the file is empty \(0 bytes\)"),
        ("a.jsonl", "\n  \n", r"a\.jsonl: no rows"),
        ("a.json", "[]", r"a\.json: no rows"),
        ("a.txt", "x", r"a\.txt: cannot tell the format from the suffix '\.txt'; known are \.json, \.jsonl"),
    ],
)
def test_a_bad_file_is_named_with_place_and_fix(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        load_rows(write(tmp_path / name, text))


def test_bad_bytes_are_named_with_their_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": 1}\n{"a": "é"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"line 2: not UTF-8 \(byte 0xe9 at offset 7\)"):
        load_rows(path)


def test_each_row_keeps_its_own_values(tmp_path):
    rows = [{"a": 1}, {"a": "x"}, {"a": {"b": [1]}}, {"a": [{"b": "y"}, 2, None]}, {"a": None}, {"c": True}]
    for name, text in (("a.jsonl", "\n".join(map(json.dumps, rows))), ("a.json", json.dumps(rows))):
        assert load_rows(write(tmp_path / name, text)) == rows


def test_columns_of_several_types_are_named_once_each(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1, "b": true}\n{"a": 2.5, "b": 1}\n{"a": null, "b": "x"}\n{"a": "1"}')
    assert [*mixed_types(load_rows(path))] == [
        f"column 'b' mixes types: boolean in {path}, line 1, number in line 2 (1)",
        f"column 'a' mixes types: number in {path}, line 1, string in line 4 ('1')",
    ]


def test_a_missing_column_is_named_with_those_found(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "x", "answer": 1}\n{"prompt": "y", "anwser": 2}')
    assert len(load_rows(path, columns=["prompt"])) == 2
    with pytest.raises(ValueError, match=r"line 2: no column 'answer'; columns found: \['anwser', 'prompt'\]"):
        load_rows(path, columns=["prompt", "answer"])


def test_a_missing_file_lists_what_is_there(tmp_path):
    write(tmp_path / "train.jsonl", "{}")
    with pytest.raises(
        FileNotFoundError, match=r"no such file.*data files in that folder: \['train.jsonl'\].*owner/name"
    ):
        load_rows(tmp_path / "trian.jsonl")
    with pytest.raises(FileNotFoundError, match="does not exist either"):
        load_rows(tmp_path / "nowhere" / "a.jsonl")


def test_the_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", "a\n1\n")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"a\.parquet .* needs datasets: pip install 'datasets>=4'"):
        load_rows(path)


def test_a_hub_id_that_fails_reports_what_was_tried(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def fail(path, name, split):
        raise RuntimeError(f"{path} {name} {split} offline")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        FileNotFoundError, match=r"no/such: no such file or folder \(.*RuntimeError: no/such main test offl"
    ):
        load_rows("no/such", name="main", split="test")


def test_tables_and_saved_folders_read_as_the_same_rows(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": "1+1", "answer": 2}, {"prompt": "a,b", "answer": 3}, {"prompt": "c", "answer": 4}]
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([2])}).save_to_disk(tmp_path / "two")
    arrow = next((tmp_path / "one").glob("*.arrow"))
    for path in (tmp_path / "a.parquet", arrow, tmp_path / "one", tmp_path / "two"):
        assert load_rows(path) == rows, path
        assert load_rows(path, limit=2) == rows[:2], path
    assert load_rows(tmp_path / "two", split="test") == rows[2:]
    with pytest.raises(ValueError, match=r"no split 'dev'; it has \['test', 'train'\]"):
        load_rows(tmp_path / "two", split="dev")
    data.select([]).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"none\.parquet: no rows"):
        load_rows(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet: cannot be read as parquet: "):
        load_rows(write(tmp_path / "bad.parquet", "not a table"))


@given(st.lists(st.tuples(st.text(CELL), st.text(CELL)), min_size=1, max_size=5))
def test_csv_cells_are_the_written_texts(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("prompt", "answer"), *rows])
    assert load_rows(path) == [{"prompt": a, "answer": b} for a, b in rows]


def test_a_csv_cell_is_text_whatever_it_looks_like(tmp_path):
    long = "x" * 200_000
    path = write(tmp_path / "a.csv", f"\ufeffprompt,answer\n0066,007\n\n12,NA\n{long},\n")
    rows = [("0066", "007"), ("12", "NA"), (long, "")]
    assert load_rows(path) == [{"prompt": a, "answer": b} for a, b in rows]
    assert load_rows(path, limit=1, rename={"answer": "label"}) == [{"prompt": "0066", "label": "007"}]


def test_the_place_of_a_csv_row_is_the_line_where_it_begins(tmp_path):
    path = write(tmp_path / "a.csv", 'a,b\r\n"1\r\n2","3\r\n4"\r\n\r\n5,6\r\n"7\r\n8",9\r\n')
    rows = load_rows(path)
    assert rows == [{"a": "1\r\n2", "b": "3\r\n4"}, {"a": "5", "b": "6"}, {"a": "7\r\n8", "b": "9"}]
    assert rows.places == ["line 2", "line 6", "line 7"]


@pytest.mark.parametrize("first", ["sep=;", "SEP=;\r", '\ufeff"sep=;"'])
def test_the_line_of_excel_that_names_the_delimiter_is_read(tmp_path, first):
    path = write(tmp_path / "a.csv", f"{first}\na,b;c\n1;2\n")
    assert load_rows(path) == [{"a,b": "1", "c": "2"}]
    assert load_rows(path).places == ["line 3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", r"bad\.csv, line 3: not 2 cells, as the header \['a', 'b'\] has"),
        ("a,b\n1,2,3\n", r"bad\.csv, line 2: not 2 cells"),
        ('a\n"1\n2\n', r"bad\.csv, line 2: malformed CSV: unexpected end of data"),
        ('a,b\n1,2\n"3\n4",5,6\n7,8\n', r"bad\.csv, line 3: not 2 cells"),
        ('sep=;\na;b\n"1\n2";3\n4\n', r"bad\.csv, line 5: not 2 cells, as the header \['a', 'b'\] has"),
        ("\na;b\n1;2\n", r"bad\.csv, line 1: blank, and the header belongs there: delete that line"),
        ("a,a\n1,2\n", "two columns have the same name"),
        ("a,b\n", "no rows"),
    ],
)
def test_a_bad_csv_file_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_rows(write(tmp_path / "bad.csv", text))


def test_a_limit_of_zero_rows_is_refused():
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_rows("x.jsonl", limit=0)


def test_a_column_to_rename_may_be_in_another_part_of_the_data(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    unused = set()
    rows = load_rows(tmp_path / "a.jsonl", rename={"label": "answer", "prompt": "question"}, unused=unused)
    assert (list(rows), unused) == ([{"question": "a"}], {"label"})


def test_a_column_of_splits_of_which_all_rows_are_used_is_named(tmp_path, caplog):
    def lines(name, *values):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"prompt": "a", name: value}) + "\n" for value in values))
        caplog.clear()
        name_splits(load_rows(path))
        return [line.removeprefix(f"{path}: ") for line in caplog.messages]

    assert lines("split", "train", "test", "train") == ["column 'split' holds train, test: all rows are used"]
    assert lines("partition", "Validation", None) == ["column 'partition' holds Validation: all rows are used"]
    assert lines("fold", *range(6)) == ["column 'fold' holds 0, 1, 2, 3 and 2 more: all rows are used"]
    assert lines("subset", "math", "dev") == ["column 'subset' holds math, dev: all rows are used"]
    inner = [{"split": "train"}, {"split": "test"}, {"split": "test", "index": 1}, None]
    assert lines("extra_info", *inner) == ["column 'extra_info.split' holds train, test: all rows are used"]
    for name, *values in (
        ("extra_info", *inner[:1] * 2, {"source": "test"}),
        ("split", "train", None),
        ("subset", "math", "code"),
        ("source", "test"),
        ("split", [1]),
    ):
        assert lines(name, *values) == []
