"""Several files, globs, folders of shards and saved folders: which rows are read, and which place an error names."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from rlkit.data.examples import sft_examples
from rlkit.data.load import load_rows, place_of
from rlkit.data.sources import identity
from rlkit.data.tiny import tiny_tokenizer


def put(folder, **files):
    """Files of rows {"a": number}, by their path with __ for /, and _of_ for -of-."""
    for name, numbers in files.items():
        path = folder / (name.replace("__", "/").replace("_of_", "-of-") + ".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"a": n}) + "\n" for n in numbers))
    return folder


def numbers(*given, **options):
    return [row["a"] for row in load_rows(*given, **options)]


def test_several_files_are_read_one_after_the_other(tmp_path):
    put(tmp_path, b=[1, 2], a=[3], c=[4])
    (tmp_path / "z.csv").write_text("a,more\n5,x\n")
    files = [tmp_path / "b.jsonl", str(tmp_path / "a.jsonl"), tmp_path / "z.csv"]
    rows = load_rows(files)
    assert rows == [{"a": 1}, {"a": 2}, {"a": 3}, {"a": "5", "more": "x"}]
    assert [place_of(rows, i) for i in (1, 2, 3)] == [
        f"{files[0]}, line 2", f"{files[1]}, line 1", f"{files[2]}, line 2"
    ]  # fmt: skip
    assert numbers(files, limit=2) == [1, 2]
    assert numbers(files, limit=3) == [1, 2, 3]
    assert numbers(str(tmp_path / "*.jsonl")) == [3, 1, 2, 4]
    assert numbers([str(tmp_path / "[bc].jsonl"), files[1]]) == [1, 2, 4, 3]
    with pytest.raises(FileNotFoundError, match=r"x\*\.jsonl: no file matches"):
        load_rows(str(tmp_path / "x*.jsonl"))
    with pytest.raises(ValueError, match="no file is given"):
        load_rows([])


def test_an_error_in_a_later_file_names_that_file_and_its_own_row(tmp_path, caplog):
    good, long = ({"prompt": "a", "response": text} for text in ("b", "b" * 50))
    (tmp_path / "a.jsonl").write_text((json.dumps(good) + "\n") * 3)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, [good, long, long])).encode()))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    options = {"tokenizer": tiny_tokenizer(), "max_example_tokens": 30}
    assert len(sft_examples(load_rows(files), **options)[0]) == 4
    dropped = ", ".join(f"{files[1]}, line {n} (60 tokens)" for n in (2, 3))
    assert f"dropped 2 of 6 examples that are longer than `max_example_tokens` 30: {dropped}" in caplog.text
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(f"{json.dumps(good)}\n\n{{}}".encode()))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(files[1]))}, line 3: .*columns found: \[\]"):
        sft_examples(load_rows(files), **options)


def test_a_rename_is_for_the_files_that_have_the_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "x"}\n{"question": "y"}')
    (tmp_path / "b.jsonl").write_text('{"prompt": "z", "extra": 1}')
    files = [tmp_path / "b.jsonl", tmp_path / "a.jsonl"]
    assert load_rows(files, rename={"question": "prompt"}) == [
        {"prompt": "z", "extra": 1}, {"prompt": "x"}, {"prompt": "y"}
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: no column 'asked' to rename"):
        load_rows(files, rename={"asked": "prompt"})
    (tmp_path / "a.jsonl").write_text('{"question": "x"}\n{"asked": "y"}')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: no column 'question' to rename"):
        load_rows(files, rename={"question": "prompt"})


SHARDS = {"data__train-00000_of_00002": [1, 2], "data__train-00001_of_00002": [3], "data__test-00000_of_00001": [4]}
IN_FOLDERS = {"train__data-00000_of_00002": [1], "train__data-00001_of_00002": [2], "test__data-00000_of_00001": [3]}
NAMED = [
    (SHARDS, "", [1, 2, 3], [4]),
    (SHARDS, ":test", [4], [4]),
    (IN_FOLDERS, "", [1, 2], [3]),
    (IN_FOLDERS, ":test", [3], [3]),
    (SHARDS, ":train", [1, 2, 3], [1, 2, 3]),
    ({"train": [1], "dev": [2]}, "", [1], [2]),
    ({"train": [1], "dev": [2]}, ":dev", [2], [2]),
    ({"train": [1], "dev": [2]}, ":validation", [2], [2]),
    ({"train__x": [1], "valid__x": [2], "train__y": [3]}, "", [1, 3], [2]),
    ({"my_train_set": [1], "my_eval_set": [2]}, "", [1], [2]),
    ({"part-2": [2], "part-1": [1]}, "", [1, 2], [1, 2]),
    ({"main__train-00000_of_00001": [1], "other__train-00000_of_00001": [2]}, ":main", None, None),
    ({"main__train": [1], "other__train": [2], "main__test": [3]}, ":main:train", [1], [1]),
    ({"main__train": [1], "other__train": [2], "main__test": [3]}, ":other:train", [2], [2]),
    ({"test": [1]}, "", [1], [1]),
]


@pytest.mark.parametrize(("files", "split", "train", "held_out"), NAMED)
def test_the_files_of_a_folder_are_those_of_one_split(tmp_path, files, split, train, held_out):
    put(tmp_path, **files)
    for name in ("README.md", "dataset_infos.json", ".gitattributes", "_SUCCESS"):
        (tmp_path / name).write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "old.jsonl").write_text('{"a": 9}')
    if train is None:
        with pytest.raises(ValueError, match="no split 'main'; it has"):
            load_rows(f"{tmp_path}{split}")
        return
    assert numbers(f"{tmp_path}{split}") == train
    assert numbers(f"{tmp_path}{split}", held_out=True) == held_out


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, caplog):
    put(tmp_path, one__a=[1], one__b=[2], two__train_qa=[1], two__unit_test_writing=[2], three__test=[1])
    assert numbers(tmp_path / "one") == [1, 2]
    assert caplog.messages == [f"{tmp_path}/one: reads 2 files: a.jsonl, b.jsonl"]
    caplog.clear()
    assert numbers(tmp_path / "two") == [1]
    assert numbers(tmp_path / "three") == [1]
    assert numbers(tmp_path / "three", held_out=True) == [1]
    assert numbers(f"{tmp_path}/two:test") == [2]
    assert caplog.messages == [
        f"{tmp_path}/two: reads the split train: train_qa.jsonl, and not unit_test_writing.jsonl",
        f"{tmp_path}/three: reads the split test: test.jsonl",
    ]


UNCLEAR = [
    ({"train": [1], "test": [2], "validation": [3]}, True, r"the splits \['test', 'train', 'validation'\], and not"),
    ({"a-00000_of_00001": [1], "b-00000_of_00001": [2]}, False, r"the splits \['a', 'b'\], and not 'train': name one"),
    ({"a-00000_of_00001": [1], "train-00000_of_00001": [2]}, True, r"and not one test or validation split: name one"),
    ({"train-00000_of_00003": [1], "train-00002_of_00003": [2]}, False,
     r"1 of 3 shards of train are missing, such as train-00001-of-00003"),
    ({"train__x-00000_of_00002": [1], "test__x-00001_of_00002": [2]}, False, "1 of 2 shards of train are missing"),
    ({"train": [1], "more": [2]}, False, r"named by their split \('train'\) and others are not, such as more\.jsonl"),
    ({"main__train": [1], "other__train": [2]}, False, r"train is in the folders main, other: give one, .*:main:train"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "held_out", "message"), UNCLEAR)
def test_a_folder_that_is_not_clear_is_refused(tmp_path, files, held_out, message):
    with pytest.raises(ValueError, match=message):
        load_rows(put(tmp_path, **files), held_out=held_out)


def test_a_folder_of_two_formats_or_without_data_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"a folder without data files .* it holds \['notes\.txt'\]"):
        load_rows(tmp_path)
    put(tmp_path, train=[1])
    (tmp_path / "train.csv").write_text("a\n1\n")
    with pytest.raises(ValueError, match=r"train is there as \.csv and as \.jsonl: give a glob"):
        load_rows(tmp_path)
    with pytest.raises(ValueError, match=r"train\.jsonl:test: a file has no splits; give .*train\.jsonl alone"):
        load_rows(f"{tmp_path}/train.jsonl:test")


def test_the_contents_of_a_split_of_a_folder_tell_whether_it_has_changed(tmp_path):
    put(tmp_path, train=[1, 2], test=[3])
    specs = [[f"{tmp_path}:train"], [str(tmp_path)], [str(tmp_path / "train.jsonl")]]
    before = [identity(spec) for spec in specs]
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.jsonl").write_text("{}")
    assert [identity(spec) for spec in specs] == before
    put(tmp_path, train=[1, 2, 4])
    assert not {*before} & {identity(spec) for spec in specs}
    assert identity(["owner/name:main:train"]) == identity(["owner/name:main:train"])


def test_shards_of_parquet_are_one_data_set(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    for i in range(3):
        pq.write_table(pa.table({"a": [2 * i, 2 * i + 1]}), tmp_path / f"train-{i:05d}-of-00003.parquet")
    pq.write_table(pa.table({"a": [9], "b": ["x"]}), tmp_path / "test-00000-of-00001.parquet")
    rows = load_rows(tmp_path)
    assert [row["a"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert place_of(rows, 3) == f"{tmp_path / 'train-00001-of-00003.parquet'}, row 2"
    assert load_rows(f"{tmp_path}:test") == [{"a": 9, "b": "x"}]


def test_the_splits_of_a_saved_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    one, two, three = (datasets.Dataset.from_dict({"a": [n]}) for n in (1, 2, 3))
    datasets.DatasetDict(train=one, test=two).save_to_disk(tmp_path / "two")
    datasets.DatasetDict(train=one, test=two, validation=three).save_to_disk(tmp_path / "three")
    one.save_to_disk(tmp_path / "one")
    assert numbers(tmp_path / "two") == numbers(f"{tmp_path}/two:train") == [1]
    assert numbers(f"{tmp_path}/two:test") == numbers(tmp_path / "two", held_out=True) == [2]
    assert numbers(f"{tmp_path}/three:validation") == [3]
    rows = load_rows([f"{tmp_path}/two:test", tmp_path / "one"])
    assert [place_of(rows, i) for i in (0, 1)] == [f"{tmp_path}/two:test, row 1", f"{tmp_path}/one, row 1"]
    with pytest.raises(ValueError, match=r"three: it has the splits \['test', 'train', 'validation'\], and not one"):
        load_rows(tmp_path / "three", held_out=True)
    with pytest.raises(ValueError, match=r"one: no split 'train': it is one data set without splits"):
        load_rows(f"{tmp_path}/one:train")


def test_an_address_is_refused_with_the_way_out():
    for spec, fix in (
        ("https://example.com/a.jsonl", "download it, and give the file"),
        ("s3://bucket/a.parquet", "download it, and give the file"),
        ("https://huggingface.co/datasets/openai/gsm8k/tree/main", "for the hub data set give openai/gsm8k"),
        ("hf://datasets/openai/gsm8k/main/train.parquet", "for the hub data set give openai/gsm8k"),
    ):
        with pytest.raises(ValueError, match=rf"addresses are not read: {fix}$"):
            load_rows(spec)


def test_held_out_rows_of_the_hub_are_not_its_training_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: asked.append(split) or [{"a": 1}])
    load_rows("a/b:main", held_out=True)
    load_rows("a/b:main:train", held_out=True)
    load_rows("a/b:main")
    assert asked == ["test", "train", "train"]


@pytest.mark.parametrize("given", ["{0}/a.jsonl,{0}/b.jsonl", "['{0}/a.jsonl', '{0}/b.jsonl']"])
def test_a_list_of_files_in_one_argument_is_told_apart(tmp_path, given):
    put(tmp_path, a=[1], b=[2])
    with pytest.raises(FileNotFoundError, match=f"several files are separated by blanks: {tmp_path}/a.jsonl"):
        load_rows(given.format(tmp_path))


def test_a_file_that_is_given_twice_is_named(tmp_path, caplog, monkeypatch):
    put(tmp_path, a=[1], b=[2])
    monkeypatch.chdir(tmp_path)
    assert numbers(["a.jsonl", "b.jsonl"]) == [1, 2]
    assert caplog.messages == []
    assert numbers(["*.jsonl", tmp_path / "b.jsonl"]) == [1, 2, 2]
    assert caplog.messages == ["b.jsonl is given 2 times, and each of its rows is used as often"]
