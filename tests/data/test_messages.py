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
    ROME,
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


def called(**function):
    """An assistant's message with one call in OpenAI's form, of these keys beside the name."""
    return answer("", tool_calls=[{"id": "c1", "type": "function", "function": {"name": "weather", **function}}])


def flat(**keys):
    """The same as an object without `function` around it."""
    return answer("", tool_calls=[{"name": "weather", **keys}])


def turn_of(value, role="function_call"):
    return said(role, value if isinstance(value, str) else json.dumps(value))


OBJECT = {"city": "Rome"}
CALLED = {
    "OpenAI": called(arguments=ROME),
    "an object": called(arguments=OBJECT),
    "LangChain": flat(args=OBJECT, id="c1", type="tool_call"),
    "Anthropic": flat(input=OBJECT, id="c1", type="tool_use"),
    "parameters": called(parameters=OBJECT),
    "parameters as text": called(parameters=ROME),
    "beside the function": answer("", tool_calls=[{"function": {"name": "weather"}, "args": OBJECT}]),
    "the same twice": called(arguments=ROME, parameters=OBJECT, args=None),
    "encoded twice": called(arguments=json.dumps(ROME)),
    "older files": answer("", function_call={"name": "weather", "parameters": OBJECT}),
    "a turn of Llama 3": turn_of({"name": "weather", "parameters": OBJECT}),
    "a turn with args": turn_of([{"name": "weather", "args": ROME}], "tool_call"),
    "calls as text": answer("", tool_calls=json.dumps([{"name": "weather", "input": OBJECT}])),
}
ROADS = {  # the row that holds some messages, and what stands there of them
    "sft": lambda made: {"messages": [user("?"), *made, said("tool", "20"), answer("20")]},
    "grpo": lambda made: {"prompt": [user("?"), *made, said("tool", "20")]},
    "dpo": lambda made: {"prompt": [user("?"), *made, said("tool", "20")], "chosen": "20", "rejected": "30"},
}


def trained(path, road, made):
    """The text of the calls `made` in a row of the road."""
    (found,) = read(write(path, [ROADS[road](made)]), road, tokenizer_of())
    text = found if isinstance(found, str) else found[0]
    start, end = "<user>?;<assistant>", ";<tool>20;<assistant>"
    assert text.startswith(start)
    assert end in text
    return text[len(start) : text.index(end)]


@pytest.mark.parametrize("form", CALLED)
def test_the_arguments_of_a_call_are_read_under_every_name(tmp_path, caplog, form):
    for road in ROADS:
        assert trained(tmp_path / "rows.jsonl", road, [CALLED[form]]) == f"<call>weather {ROME}</call>"
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        (called(), "{}"), (called(arguments=""), "{}"), (called(arguments=None), "{}"), (flat(args="null"), "{}"),
        (called(arguments='{"x": 1, "alarm": null}'), '{"x": 1, "alarm": null}'),
        (called(arguments={"x": 1, "alarm": None}), '{"x": 1}'),  # as a table fills it
        (turn_of({"name": "weather", "arguments": {"x": 1, "alarm": None}}), '{"x": 1, "alarm": null}'),
        (answer("", tool_calls='[{"id": null, "name": "weather", "args": {"x": null}}]'), '{"x": null}'),
    ],
)  # fmt: skip
def test_empty_arguments_are_none_and_nulls_of_json_text_stay(tmp_path, made, arguments):
    for road in ROADS:
        assert trained(tmp_path / "rows.jsonl", road, [made]) == f"<call>weather {arguments}</call>"


def test_nulls_of_messages_and_tools_that_are_json_text_stay(tmp_path):
    nothing = {"type": ["string", "null"], "default": None}
    row = ROADS["sft"]([called(arguments={"city": None})])
    row = {"messages": json.dumps([{**m, "name": None} for m in row["messages"]])}
    expected = '<user>?;<assistant><call>weather {"city": null}</call>;<tool>20;<assistant>20;'
    for tools in (json.dumps([tool("weather", city=nothing)]), json.dumps([json.dumps(tool("weather", city=nothing))])):
        path = write(tmp_path / "rows.csv", [{**row, "tools": tools}])
        ((text, _),) = read(path, "sft", tokenizer_of())
        assert text == f"<system>[{json.dumps(tool('weather', city=nothing))}];{expected}"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (called(arguments="{x: 1"), "the 'arguments' of a call of 'weather' must be a JSON object like "
         "{'city': 'Rome'}, got '{x: 1': write them with json.dumps, or drop the row"),
        (called(arguments="[1, 2]"), "got '[1, 2]': write"),
        (called(arguments=[1, 2]), "got [1, 2]: write"),
        (called(arguments="Rome"), "got 'Rome': write"),
        (called(arguments="{'city': 'Rome'}"), 'got "{\'city\': \'Rome\'}": write'),
        (flat(args=7), "the 'args' of a call of 'weather' must be a JSON object"),
        (turn_of({"name": "weather", "parameters": "Rome"}), "the 'parameters' of a call of 'weather' must be"),
        (called(arguments="[" * 100_000), "the arguments of a call are nested too deep"),
        (called(arguments=ROME, args={"city": "Oslo"}),
         "a call of 'weather' has other 'args' than 'arguments': drop one of them"),
        (flat(arguments={}, input=OBJECT), "a call of 'weather' has other 'input' than 'arguments'"),
    ],
)  # fmt: skip
def test_arguments_that_are_no_object_are_refused_with_their_row(tmp_path, made, message):
    for road in ROADS:
        path = write(tmp_path / f"{road}.jsonl", [ROADS[road]([CALLED["OpenAI"]]), ROADS[road]([made])])
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 2: .*{re.escape(message)}"):
            read(path, road, tokenizer_of())


def test_other_keys_of_a_call_are_named_where_the_template_does_not_write_them(tmp_path, caplog):
    made = flat(args=OBJECT, id="c1", index=0, result="20 C", note=None)
    made["tool_calls"][0]["function"] = {"name": "weather", "mood": "sad", "arguments": OBJECT}
    path = write(tmp_path / "rows.jsonl", [ROADS["sft"]([made])] * 2)
    read(path, "sft", tokenizer_of())
    names = "tool_calls.result, tool_calls.mood"
    assert caplog.messages == [f"{path}: message keys {names} are not written by the chat template"]
    caplog.clear()
    read(path, "sft", tokenizer_of(CALLS.replace("<call>", "<call>{{ c.result }}{{ c.function.mood }} ")))
    assert caplog.messages == []


def results(*ids):
    return [said("tool", f"of {i}", tool_call_id=i) for i in ids]


def two(first="weather", second="weather", last="c2", **more):
    calls = [{**call(name, OBJECT), "id": i} for name, i in ((first, "c1"), (second, last))]
    return answer("", tool_calls=calls, **more)


NO_TOOL = "1 of the rows hold 'add' as the tool of a call, and not among the tools that the model is given: line 2"
NO_RESULT = (
    "1 of the rows hold 'weather' as the tool of a call that no result answers before the assistant goes on: line 2"
)
NO_ORDER = (
    "1 of the rows hold 'c1' as a result in another order than the calls, and the chat template does not write which "
    "call a result is of: line 2"
)
WEATHER_TOOL = tool("weather", city=TEXT)
OPEN = {**tool("add"), "function": {"name": "add", "parameters": {"additionalProperties": {}, "properties": {}}}}


@pytest.mark.parametrize(
    ("made", "tools", "line"),
    [
        ([two(), *results("c1", "c2")], [WEATHER_TOOL], None),
        ([two(), said("tool", "both")], [WEATHER_TOOL], None),
        ([two(), *results("other")], [WEATHER_TOOL],
         "kept 1 of 2 rows that have the result of a tool under a tool_call_id that no call has: line 2"),
        ([two(last="c1"), *results("c1", "c1")], [WEATHER_TOOL],
         "kept 1 of 2 rows that have two calls of one message under one id, to which both results belong: line 2"),
        ([two(), user("20, 20")], [WEATHER_TOOL], None),
        ([two(), *results("c1", "c2"), two(), *results("c1", "c2")], [], None),
        ([two("weather", "add"), *results("c1", "c2")], [], None),
        ([two("weather", "add"), *results("c1", "c2")], [WEATHER_TOOL, OPEN], None),
        ([two("weather", "add"), *results("c1", "c2")], [WEATHER_TOOL, {"name": "add", "parameters": {}}], None),
        ([two("weather", "add"), *results("c1", "c2")], [WEATHER_TOOL], NO_TOOL),
        ([two("weather", "add"), *results("c1", "c2")], [WEATHER_TOOL, tool("add", x=NUMBER)],
         "1 of the rows hold 'add(city)' in a call, an argument that the schema of the tool does not have: line 2"),
        ([two(), *results("c2", "c1")], [], NO_ORDER),
        ([two()], [], NO_RESULT),
        ([two(), *results("c1")], [], NO_RESULT),
        ([two(), *results("c1"), CALLED["LangChain"], *results("c1"), user("And?")], [], NO_RESULT),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit_tools_or_results_are_named_once(tmp_path, caplog, made, tools, line):
    rows = {
        "sft": {"messages": [user("?"), *made, answer("20")]},
        "grpo": {"prompt": [user("?"), *made, answer("20"), user("And?")]},
        "dpo": {"prompt": [user("?"), *made, answer("20"), user("And?")], "chosen": "20", "rejected": "30"},
    }
    for road, row in rows.items():
        first = ROADS[road]([CALLED["OpenAI"]])
        path = write(tmp_path / f"{road}.jsonl", [first, {**row, **({"tools": tools} if tools else {})}])
        read(path, road, tokenizer_of())
        assert caplog.messages == ([f"{path}: {line}"] if line else [])
        caplog.clear()


SCHEMA = {
    "type": "object", "required": ["city"],
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
        "at": {"type": ["number", "null"]}, "odd": {"type": "int, optional"}, "more": {"type": "array"},
    },
}  # fmt: skip
HAS_NOT, OTHER = (
    "in a call, an argument that the schema of the tool does not have",
    "in a call, an argument of another type",
)


@pytest.mark.parametrize(
    ("schema", "arguments", "named", "fault"),
    [
        (SCHEMA, {"city": "Rome", "days": 2.0, "unit": "C", "at": 1, "odd": "x", "more": []}, "", ""),
        (SCHEMA, {"city": "Rome", "days": 2, "at": None, "unit": None}, "", ""),
        (SCHEMA, {"days": 1}, "city", "in a call, which lacks this argument that the schema of the tool requires"),
        (SCHEMA, {"city": 5}, "city", OTHER), (SCHEMA, {"city": "Rome", "days": "2"}, "days", OTHER),
        (SCHEMA, {"city": "Rome", "days": True}, "days", OTHER), (SCHEMA, {"city": "Rome", "at": "8"}, "at", OTHER),
        (SCHEMA, {"city": "Rome", "unit": "K"}, "unit", "in a call, an argument that is none of the choices"),
        ({"type": "object"}, {"city": "Rome"}, "city", HAS_NOT), 
        ({"city": "string"}, {"city": "Rome"}, "city", HAS_NOT),
        ({"city": {"type": "str", "description": "x"}}, {"city": "Rome"}, "", ""),  # Salesforce's xLAM
        ({}, {"city": "Rome"}, "", ""), ({"type": "object", "properties": {}}, {}, "", ""),
        ({"type": "object", "additionalProperties": True}, {"city": "Rome"}, "", ""),
    ],
)  # fmt: skip
def test_arguments_of_calls_fit_the_schema_of_the_tool_or_are_named(tmp_path, caplog, schema, arguments, named, fault):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    for text in (arguments, json.dumps(arguments)):
        made = [user("?"), answer("", tool_calls=[call("weather", text)]), said("tool", "20"), answer("20")]
        path = write(tmp_path / "rows.jsonl", [{"messages": made, "tools": tools}])
        read(path, "sft", tokenizer_of())
        lines = [x for x in caplog.messages if "that are null" not in x]
        assert len(lines) == bool(named)
        assert all(x.startswith(f"{path}: 1 of the rows hold 'weather({named})' {fault}") for x in lines)
        caplog.clear()


@pytest.mark.parametrize("column", ["tools", "functions"])
def test_calls_beside_an_empty_list_of_tools_are_named(tmp_path, caplog, column):
    made = [user("?"), answer("", tool_calls=[call("weather", {})]), said("tool", "20"), answer("20")]
    for tools in ([], "[]"):
        path = write(tmp_path / "rows.jsonl", [{"messages": made, column: tools}])
        read(path, "sft", tokenizer_of())
        line = "1 of the rows hold 'weather' as the tool of a call beside an empty list of tools, so that the model is"
        assert caplog.messages == [f"{path}: {line} given none: line 1"]
        caplog.clear()
        listed = [said("system", "Tools: weather(city)"), *made]
        for fine in (
            {"messages": listed, column: tools},
            {"messages": made},
            {"messages": made[:1] + made[3:], column: tools},
        ):
            read(write(path, [fine]), "sft", tokenizer_of())
            assert caplog.messages == []


def test_results_in_another_order_are_fine_where_the_template_writes_their_calls(tmp_path, caplog):
    path = write(tmp_path / "rows.jsonl", [{"messages": [user("?"), two(), *results("c2", "c1"), answer("20")]}])
    read(path, "sft", tokenizer_of(CALLS.replace("{{ m.role }}\n", "{{ m.role }}{{ m.tool_call_id }}\n")))
    assert caplog.messages == []


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("key", ["input_schema", "inputSchema"])
def test_tools_of_anthropic_and_mcp_have_their_schema_as_parameters(tmp_path, caplog, key, text):
    schema = {"type": "object", "properties": {"city": TEXT}}
    tools = [{"type": "custom", "name": "weather", key: schema}]
    row = {"messages": WEATHER, "tools": json.dumps(tools) if text else tools}
    path = write(tmp_path / "rows.jsonl", [row])
    assert read(path, "sft", tokenizer_of()) == [(f"<system>[{CITY}];{WEATHER_TEXT}", WEATHER_PARTS)]
    assert caplog.messages == []


FILLED = '{"city": "Rome", "unit": null}'
MAY_BE_NULL = {"type": ["string", "null"]}


@pytest.mark.parametrize(
    ("arguments", "tools", "named"),  # in messages that are objects, and in their JSON text
    [
        (FILLED, [], (True, True)), (FILLED, [tool("weather", city=TEXT, unit=TEXT)], (True, True)),
        (FILLED, [tool("weather", city=TEXT, unit=MAY_BE_NULL)], (False, False)), (ROME, [], (False, False)),
        ({"city": "Rome", "unit": None}, [], (False, True)), ('{"city": [null]}', [], (False, False)),
    ],
)  # fmt: skip
def test_nulls_that_a_table_left_in_the_json_text_of_calls_are_named(tmp_path, caplog, arguments, tools, named):
    for road, make in ROADS.items():
        row = make([called(arguments=arguments)])
        texts = {name: json.dumps(x) if isinstance(x, list) else x for name, x in row.items()}
        for given, is_named in zip((row, texts), named, strict=True):
            path = write(tmp_path / f"{road}.jsonl", [{**given, **({"tools": tools} if tools else {})}] * 2)
            read(path, road, tokenizer_of())
            found = [x for x in caplog.messages if "that are null, as a table fills them" in x]
            assert len(found) == is_named
            assert all(x.endswith(": line 1 (weather(unit)), line 2 (weather(unit))") for x in found)
            caplog.clear()


def test_tools_whose_json_text_a_table_has_filled_lose_its_nulls(tmp_path):
    tools = [tool("weather", city=TEXT, x=None), {**tool("add", city=None, x=NUMBER), "strict": None}]
    row = {**ROADS["sft"]([called(arguments=ROME)]), "tools": json.dumps(tools)}
    ((text, _),) = read(write(tmp_path / "rows.jsonl", [row]), "sft", tokenizer_of())
    assert text.startswith(f"<system>[{CITY}, {SUM}];")
