"""Columns and keys that no form reads are named once."""

from __future__ import annotations

import pytest
from chat_rows import HI_YO, answer, read, tokenizer_of, user, write

from rlkit.data.examples import sft_examples
from rlkit.data.load import load_rows


def test_the_index_of_pandas_is_not_named(tmp_path, caplog):
    row = {"": "0", "__index_level_0__": "3", "Unnamed: 0": "1", "prompt": "hi", "response": "yo"}
    assert read(write(tmp_path / "rows.csv", [row]), "sft", tokenizer_of()) == [HI_YO]
    assert caplog.records == []


def test_message_keys_are_named_in_the_order_of_the_file(tmp_path, caplog):
    more = dict.fromkeys(("zeta", "alpha", "mid", "beta", "omega"), "x")
    path = write(tmp_path / "rows.jsonl", [{"messages": [user("hi", **more), answer("yo")]}])
    assert read(path, "sft", tokenizer_of()) == [HI_YO]
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: message keys zeta, alpha, mid, beta, omega are not written by the chat template"
    ]


def test_columns_that_no_one_reads_may_hold_several_types(tmp_path, caplog):
    rows = [{"prompt": "hi", "response": "yo", "seed": 1, "info": {"a": 1}},
            {"prompt": "hi", "response": "yo", "seed": "x", "info": [1]}]  # fmt: skip
    path = write(tmp_path / "rows.jsonl", rows)
    assert read(path, "sft", tokenizer_of()) == [HI_YO] * 2
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: columns seed, info are not part of the prompt or the response"
    ]
    caplog.clear()
    assert read(path, "grpo", tokenizer_of()) == ["<user>hi;<assistant>"] * 2


def test_a_column_beside_a_text_is_not_called_part_of_a_prompt(tmp_path, caplog):
    path = write(tmp_path / "rows.jsonl", [{"text": "hi", "mood": "good"}])
    read(path, "sft", tokenizer_of())
    assert [r.getMessage() for r in caplog.records] == [f"{path}: column mood is not part of the text"]


def test_unused_columns_are_one_line_and_where_a_row_is_from_is_none(tmp_path, caplog):
    known = {
        "id": 1,
        "source": "x",
        "data_source": "y",
        "extra_info": {"a": 1},
        "index": 3,
        "prompt_id": "z",
        "url": "u",
    }
    more = dict.fromkeys("abcdefgh", 1)
    empty = {"images": [], "note": "", "video": None, "copy": "hi, my friend"}
    path = write(tmp_path / "rows.jsonl", [{"prompt": "hi, my friend", "response": "yo", **known, **more, **empty}])
    assert read(path, "sft", tokenizer_of()) == [("<user>hi, my friend;<assistant>yo;", ["yo;"])]
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: columns a, b, c, d, e, f and 2 more are not part of the prompt or the response"
    ]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"source": "The river rose by two metres on Tuesday."}], "source"),
        ([{"source": "Der Hund"}, {"source": "Die Katze"}], "source"),
        ([{"source": "Common Crawl"}, {"source": "Stack Exchange"}, {"source": "Common Crawl"}] * 3, None),
        ([{"source": "aqua_rat"}, {"source": "gsm8k"}], None),
        ([{"language": "Rust"}, {"language": "Python"}], "language"),
        ([{"picture_url": "https://x.org/a"}], "picture_url"),
        ([{"url": "https://x.org/a.jpg"}], "url"),
        ([{"url": "https://x.org/a", "source_url": "https://x.org/", "id": "a b", "row_hash": "f0"}], None),
        ([{"meta": {"note": "Answer as one would in a letter."}}], "meta"),
        ([{"extra_info": {"question": "hi", "answer": "It is a long answer of many words."}}], None),
        ([{"source": ["The river rose by two metres on Tuesday."]}], "source"),
        ([{"source": "Hund"}, {"source": "Katze"}], "source"),
        ([{"source": "a1.txt"}, {"source": "b2.txt"}], None),
        ([{"meta": "Answer as one would in a letter."}], "meta"),
        ([{"correct": 1}], "correct"),
        ([{"correct": "yo"}], "correct"),
        ([{"problem": "hi"}], None),
    ],
)
def test_columns_that_say_where_a_row_is_from_are_named_if_they_hold_a_text(tmp_path, caplog, rows, named):
    path = write(tmp_path / "rows.jsonl", [{"messages": [user("hi"), answer("yo")], **row} for row in rows])
    assert read(path, "sft", tokenizer_of()) == [HI_YO] * len(rows)
    line = f"{path}: column {named} is not part of the prompt or the response"
    assert [text for text in caplog.messages if "rows are all the same text" not in text] == ([line] if named else [])


def test_the_line_of_unused_columns_names_its_files(tmp_path, caplog):
    row = {"prompt": "hi", "response": "yo"}
    more = {"a.jsonl": {"mood": True}, "b.jsonl": {}, "c.parquet": {"mood": False}, "d.csv": {"hint": "x"}}
    paths = [write(tmp_path / name, [{**row, "prompt": name, **columns}]) for name, columns in more.items()]
    sft_examples(load_rows(paths), tokenizer=tokenizer_of(), max_example_tokens=99)
    assert [r.getMessage() for r in caplog.records] == [
        f"{paths[0]}, {paths[2]}: column mood is not part of the prompt or the response; mood is true in 1 and "
        "false in 1 rows, and all of them train",
        f"{paths[3]}: column hint is not part of the prompt or the response",
    ]


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("is_correct", [True, False, True], "is_correct is true in 2 and false in 1 rows"),
        ("is_test", [False, False, True], "is_test is false in 2 and true in 1 rows"),
        ("label", ["good", "bad", "bad"], "label is bad in 2 and good in 1 rows"),
        ("is_correct", [True, True, True], ""),
        ("label", [f"topic {x}" for x in "abcdefgh"], ""),
    ],
)
def test_a_column_of_verdicts_that_differ_says_that_all_rows_train(name, values, said, caplog):
    rows = [{"prompt": f"q{i}", "response": f"a{i}", name: value} for i, value in enumerate(values)]
    sft_examples(rows, tokenizer=tokenizer_of(), max_example_tokens=99)
    rest = f"; {said}, and all of them train" * bool(said)
    assert caplog.messages == [f"column {name} is not part of the prompt or the response{rest}"]
