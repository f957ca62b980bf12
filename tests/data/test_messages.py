"""Messages in the encodings that files have them in: JSON text, and objects that a table fills with nulls."""

from __future__ import annotations

import json
import re

import pytest
from chat_rows import (
    CALLS,
    CITY,
    HI_YO,
    NUMBER,
    PAIR_OF,
    SUM,
    TEXT,
    WEATHER,
    WEATHER_PARTS,
    WEATHER_TEXT,
    answer,
    call,
    gpt,
    human,
    read,
    said,
    tokenizer_of,
    tool,
    user,
    write,
)

from rlkit.data.messages import decoded


@pytest.mark.parametrize(
    ("script", "row", "expected"),
    [
        ("grpo", {"prompt": json.dumps([said("system", "be"), user("hi")]), "answer": "007"},
         "<system>be;<user>hi;<assistant>"),
        ("sft", {"messages": json.dumps([user("hi"), answer("yo")])}, HI_YO),
        ("sft", {"conversations": json.dumps([human("hi"), gpt("yo")])}, HI_YO),
        ("dpo", {"prompt": "hi", "chosen": json.dumps([answer("yo")]), "rejected": json.dumps([answer("no")])},
         PAIR_OF),
        ("kto", {"prompt": "hi", "completion": "yo", "label": "1.0"}, ("<user>hi;<assistant>", "yo;", True)),
        ("sft", {"instruction": "hi", "output": "yo", "history": json.dumps([["a", "b"]])},
         ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["b;", "yo;"])),
        ("sft", {"prompt": "hi", "response": '[{"role of": "x"}]'},
         ('<user>hi;<assistant>[{"role of": "x"}];', ['[{"role of": "x"}];'])),
    ],
)  # fmt: skip
def test_a_csv_file_holds_messages_as_json_text(tmp_path, script, row, expected):
    assert read(write(tmp_path / "rows.csv", [row]), script, tokenizer_of()) == [expected]


@pytest.mark.parametrize(
    ("script", "row", "text"),
    [
        ("sft", {"conversations": "[{'from': 'human', 'value': 'hi'}]"}, "[{'from': 'human', 'value': 'hi'}]"),
        ("dpo", {"prompt": "hi", "chosen": "[{'role': 'user'}]", "rejected": "no"}, "[{'role': 'user'}]"),
    ],
)
def test_python_text_in_a_csv_file_is_refused_with_its_line(tmp_path, script, row, text):
    path = write(tmp_path / "rows.csv", [row])
    message = f'{path}, line 2: cannot be read: messages must be JSON text, got Python\'s "{text}": write them with'
    with pytest.raises(ValueError, match=f"^{re.escape(message)} json.dumps; columns found: "):
        read(path, script, tokenizer_of())


def test_nulls_that_parquet_adds_are_in_no_text(tmp_path):
    """Two tools and two calls of different arguments, in one file of two rows."""
    other = [user("2+3?"), answer("", tool_calls=[call("add", {"x": 2})]), said("tool", "5"), answer("5")]
    rows = [
        {"messages": [user("?"), answer("", tool_calls=[call("weather", {"city": "Rome"})]), answer("20")],
         "tools": [tool("weather", city=TEXT)], "system": None},
        {"messages": other, "tools": [tool("add", x=NUMBER)], "system": "be"},
    ]  # fmt: skip
    files = [write(tmp_path / f"rows{suffix}", rows) for suffix in (".jsonl", ".parquet")]
    expected = [
        (f'<system>[{CITY}];<user>?;<assistant><call>weather {{"city": "Rome"}}</call>;<assistant>20;',
         ['<call>weather {"city": "Rome"}</call>;', "20;"]),
        (f'<system>[{SUM}];<system>be;<user>2+3?;<assistant><call>add {{"x": 2}}</call>;<tool>5;<assistant>5;',
         ['<call>add {"x": 2}</call>;', "5;"]),
    ]  # fmt: skip
    assert [read(path, "sft", tokenizer_of()) for path in files] == [expected, expected]


def test_a_template_that_joins_arguments_to_text_gets_their_json_text(tmp_path):
    """Of DeepSeek's form: `'...' + call['function']['arguments'] + '...'`; and one that writes them with `{{ }}`."""
    path = write(tmp_path / "rows.jsonl", [{"messages": WEATHER}])
    for template in (
        CALLS.replace("{{ c.function.name }} {{ c.function.arguments | tojson }}",
                      "{{ c['function']['name'] + ' ' + c['function']['arguments'] }}"),
        CALLS.replace("c.function.arguments | tojson", "c.function.arguments"),
    ):  # fmt: skip
        assert read(path, "sft", tokenizer_of(template)) == [(WEATHER_TEXT, WEATHER_PARTS)]


def test_one_turn_of_from_and_value_is_a_message():
    assert decoded({"chosen": {"from": "gpt", "value": "yo"}, "rejected": {"role": "assistant", "content": "no"}}) == {
        "chosen": [{"role": "assistant", "content": "yo"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
