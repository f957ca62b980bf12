"""Columns and keys that no form reads are named once."""

from __future__ import annotations

import pytest
from chat_rows import HI_YO, answer, read, tokenizer_of, user, write

from rlkit.data.examples import labelled_examples, sft_examples
from rlkit.data.load import load_rows
from rlkit.data.prompts import rl_prompts


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
        ([{"meta": {"note": "Answer as one would in a letter."}}], "meta.note"),
        ([{"meta": '{"note": "Answer as one would in a letter."}'}], "meta.note"),
        ([{"meta": '{"source": "x", "url": "u", "lang": "en", "id": 3}'}], None),
        ([{"source": "Hello!"}, {"source": "Yes."}, {"source": "No?"}], "source"),
        ([{"extra_info": {"question": "hi", "answer": "It is a long answer of many words."}}], None),
        ([{"source": ["The river rose by two metres on Tuesday."]}], "source"),
        ([{"source": "Hund"}, {"source": "Katze"}], "source"),
        ([{"source": "a1.txt"}, {"source": "b2.txt"}], None),
        ([{"source": "accepted"}, {"source": "accepted"}], None),
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
        ("source", ["accepted", "rejected", "accepted"], "source is accepted in 2 and rejected in 1 rows"),
        ("status", ["passed", "failed", "failed"], "status is failed in 2 and passed in 1 rows"),
        ("review", ["approved", "disapproved", "approved"], "review is approved in 2 and disapproved in 1 rows"),
        ("is_correct", [True, True, True], ""),
        ("status", ["accepted", "accepted", "accepted"], ""),
        ("status", ["draft", "final", "final"], ""),
        ("label", [f"topic {x}" for x in "abcdefgh"], ""),
    ],
)
def test_a_column_of_verdicts_that_differ_says_that_all_rows_train(name, values, said, caplog):
    rows = [{"prompt": f"q{i}", "response": f"a{i}", name: value} for i, value in enumerate(values)]
    sft_examples(rows, tokenizer=tokenizer_of(), max_example_tokens=99)
    rest = f"; {said}, and all of them train" * bool(said)
    assert caplog.messages == [f"column {name} is not part of the prompt or the response{rest}"]


def asked_of(prompts, answers, name, values):
    """Rows of these prompts, in turn, with a column beside them."""
    num = len(prompts)
    items = enumerate(zip(answers, values, strict=True))
    return [{"prompt": prompts[i % num], "response": answer, name: value} for i, (answer, value) in items]


WAYS, NAMES = ["Name it.", "What is it?", "Which?"], [f"acid {i}" for i in range(12)]
MOLECULES, STAMPS = [f"C(=O){'C' * i}" for i in range(12)], [1700000000 + 86400 * i for i in range(12)]
PAGES, SUMS = [f"https://x.org/{i}" for i in range(12)], [f"What is {i}+{i}?" for i in range(12)]
LONG = [f"We add the two numbers, and get {2 * i} as the result." for i in range(12)]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (asked_of(WAYS, NAMES, "source", MOLECULES), "source"),
        (asked_of(WAYS, NAMES, "timestamp", STAMPS), "timestamp"),
        (asked_of(WAYS, ["phishing", "safe"] * 6, "url", PAGES), "url"),
        (asked_of(["Crack the hash.", "Crack this hash."], ["god", "123456"], "hash", ["5f4dcc", "e10adc"]), "hash"),
        (asked_of(["Summarize this page."] * 2, LONG[:2], "url", PAGES[:2]), "url"),
        (asked_of(["Sum up."], LONG * 2, "url", [*PAGES, *(f"{page}/b" for page in PAGES)]), "url"),
        # where the rows are from: each with a prompt of its own, a value for many, or several samples of one prompt
        (asked_of(SUMS, NAMES, "source", MOLECULES), None),
        (asked_of(SUMS, NAMES, "url", PAGES), None),
        (asked_of(SUMS, NAMES, "timestamp", STAMPS), None),
        (asked_of(SUMS, NAMES, "hash", MOLECULES), None),
        (asked_of(SUMS, NAMES, "index", [*range(12)]), None),
        (asked_of(SUMS, NAMES, "created_at", STAMPS), None),
        (asked_of(WAYS, NAMES, "source", ["gsm8k", "aqua_rat"] * 6), None),
        (asked_of(WAYS, NAMES, "id", [*range(12)]), None),
        (asked_of(WAYS, NAMES, "uuid", MOLECULES), None),
        (asked_of(SUMS[:3], LONG, "timestamp", STAMPS), None),
        (asked_of(SUMS[:3], ["4"] * 12, "index", [*range(12)]), None),
        (asked_of([f"Summarize {page}, this page." for page in PAGES], LONG, "url", PAGES), None),
        (asked_of([f"Summarize this article. {x * 9}" for x in LONG], NAMES, "url", PAGES), None),
    ],
)  # fmt: skip
def test_a_column_that_the_tasks_are_about_is_named_though_its_name_says_where_a_row_is_from(rows, named, caplog):
    sft_examples(rows, tokenizer=tokenizer_of(), max_example_tokens=999)
    assert [text for text in caplog.messages if text.startswith("column")] == (
        [f"column {named} is not part of the prompt or the response"] if named else []
    )


def test_what_the_prompts_of_rl_are_about_is_told_by_their_gold_answers(caplog):
    rows = asked_of(WAYS, NAMES, "source", MOLECULES)
    rows = [{"answer" if name == "response" else name: value for name, value in row.items()} for row in rows]
    rl_prompts(rows, tokenizer=tokenizer_of(), max_prompt_tokens=99)
    line = "column source is not part of the prompt (rewards see all columns)"
    assert [text for text in caplog.messages if text.startswith("column")] == [line]
    caplog.clear()
    rl_prompts([{**row, "answer": "4"} for row in rows], tokenizer=tokenizer_of(), max_prompt_tokens=99)
    assert [text for text in caplog.messages if text.startswith("column")] == []


def test_samples_of_one_prompt_that_are_labelled_may_be_from_several_models(caplog):
    rows = [{**row, "label": i < 3} for i, row in enumerate(asked_of(["q?"], NAMES, "source", MOLECULES))]
    labelled_examples(rows, tokenizer=tokenizer_of(), max_example_tokens=99)
    assert [text for text in caplog.messages if text.startswith("column")] == []


VERL = {
    "split": "train", "index": 7, "answer": "So it is 4, as one sees.", "question": "2+2?", "need_tools_kwargs": True,
    "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}}},
    "interaction_kwargs": {"name": "gsm8k", "query": "2+2?", "ground_truth": "4"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values", "named", "counts"),
    [
        ("metadata", [{"accepted": True}, {"accepted": False}], ["accepted"],
         "accepted is true in 1 and false in 1 rows"),
        ("metadata", ['{"ok": true}', '{"ok": false}'], ["ok"], "ok is true in 1 and false in 1 rows"),
        ("metadata", [{"quality": "good"}, {"quality": "rejected"}], ["quality"],
         "quality is good in 1 and rejected in 1 rows"),
        ("metadata", [{"accepted": False}] * 2, ["accepted"], ""),
        ("metadata", [{"result": "correct"}, {"result": "incorrect"}], ["result"],
         "result is correct in 1 and incorrect in 1 rows"),
        ("metadata", [{"mark": "pass"}, {"mark": "fail"}], ["mark"], "mark is pass in 1 and fail in 1 rows"),
        ("metadata", [{"stars": 5}, {"stars": 1}], ["stars"], ""),
        ("metadata", [{"train": False, "weight": 0}, {}], ["train", "weight"], ""),
        ("metadata", [{"score": 0.1}, {"score": 0.9}], ["score"], ""),
        ("metadata", [{"context": "Bob is tall"}, {"context": "Ann is tall"}], ["context"], ""),
        ("extra_info", [{"passage": "Bob is tall."}], ["passage"], ""),
        ("metadata", [{"system": "Be terse.", "lang": "de"}], ["system"], ""),
        ("meta", [{"facts": {"first": "Bob is tall"}}, {"facts": {"first": "Ann is tall"}}], ["facts.first"], ""),
        ("extra_info", [VERL, VERL], [], ""),
        ("metadata", [{"redacted": False, "toxic": False}] * 2, [], ""),
        ("metadata", [{"difficulty": i, "lang": x, "model": "gpt 4"} for i, x in enumerate(("de", "en"))], [], ""),
        ("metadata", [{"title": "The Art of War"}, {"title": "The Old Man"}], [], ""),
        ("metadata", [{"source": "Old Chinese Books"}, {"source": "New Books of Italy"}], [], ""),
        ("metadata", [{"date": f"Mon Nov {i} 05:22:08 UTC", "topic": "Algebra of Rings"} for i in (1, 2)], [], ""),
        ("metadata", [{"context": "web"}, {"context": "chat"}], [], ""),
    ],
)  # fmt: skip
def test_what_matters_in_an_object_that_says_where_a_row_is_from_is_named(name, values, named, counts, caplog):
    rows = [{"prompt": "2+2?", "response": f"{i}", name: value} for i, value in enumerate(values)]
    sft_examples(rows, tokenizer=tokenizer_of(), max_example_tokens=99)
    paths = [f"{name}.{key}" for key in named]
    some = f"column{'s' * (len(paths) > 1)} {', '.join(paths)} {'are' if len(paths) > 1 else 'is'}"
    rest = f"; {name}.{counts}, and all of them train" * bool(counts)
    lines = [f"{some} not part of the prompt or the response{rest}"] * bool(paths)
    assert [text for text in caplog.messages if text.startswith("column")] == lines


@pytest.mark.parametrize(
    ("asks", "answers", "named"),
    [
        ({}, {"metadata": {"weight": 0, "train": False}}, "message keys metadata.weight, metadata.train are"),
        ({}, {"metadata": {"accepted": False, "model": "m"}}, "message key metadata.accepted is"),
        ({"metadata": {"context": "Bob is tall."}}, {}, "message key metadata.context is"),
        ({"url": "https://x.org/a"}, {}, "message key url is"),
        ({"id": "m1", "timestamp": 1700000000, "metadata": {"lang": "de"}}, {"url": "https://x.org/a"}, ""),
        ({"metadata": {"train": True}}, {"metadata": {"weight": 1, "accepted": True}}, ""),
    ],
)  # fmt: skip
def test_what_matters_in_an_object_of_a_message_is_named(asks, answers, named, caplog):
    messages = [user("Summarize this page.", **asks), answer("yo", **answers)]
    sft_examples([{"messages": messages}], tokenizer=tokenizer_of(), max_example_tokens=99)
    assert caplog.messages == [f"{named} not written by the chat template"] * bool(named)
    caplog.clear()
    messages = [user("hi", url="https://x.org/a"), answer("yo")]
    sft_examples([{"messages": messages}], tokenizer=tokenizer_of(), max_example_tokens=99)
    assert caplog.messages == []
