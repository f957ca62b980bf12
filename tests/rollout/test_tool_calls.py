"""Valid and malformed tool calls in the formats of models."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlkit.rollout.envs.calls import (
    FORMATS,
    BadCall,
    Call,
    answer_of,
    before_calls,
    hermes_calls,
    json_calls,
    message_of,
    pythonic_calls,
    wrong_arguments,
)

words = st.text(max_size=5).filter(lambda t: "think>" not in t)
value = st.none() | st.booleans() | st.integers() | words
values = value | st.lists(value, max_size=2) | st.dictionaries(words, value, max_size=2)
arguments = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), values, max_size=3)
name = st.from_regex(r"[a-z]\w{0,8}", fullmatch=True).filter(str.isascii)


@given(st.lists(st.tuples(name, arguments), max_size=3), st.text(st.characters(exclude_characters="<"), max_size=5))
def test_calls_are_found_between_words(calls, words):
    text = words + "".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>{words}" for n, a in calls
    )
    assert hermes_calls(text) == [Call(n, a) for n, a in calls if "</tool_call>" not in json.dumps(a)]


@given(st.lists(st.tuples(name, arguments), min_size=1, max_size=3), st.sampled_from(["", "<|python_tag|>"]))
def test_a_turn_that_is_json(calls, mark):
    body = [json.dumps({"name": n, "parameters": a}) for n, a in calls]
    expected = [Call(n, a) for n, a in calls]
    assert json_calls(mark + "; ".join(body)) == expected
    assert json_calls(f"[TOOL_CALLS] [{', '.join(body)}]") == expected


@given(st.lists(st.tuples(name, arguments), min_size=1, max_size=3))
def test_a_turn_that_is_python(calls):
    calls = [(n + "_", {k + "_": v for k, v in a.items()}) for n, a in calls]  # no keywords of the language
    text = ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    assert pythonic_calls(f"[{text}]") == [Call(n, a) for n, a in calls]


def test_forms_that_libraries_use():
    wanted = [Call("f", {"x": 1})]
    assert hermes_calls('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>') == wanted
    assert json_calls('{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}') == wanted
    assert json_calls('{"function": "f", "parameters": {"x": 1}}') == wanted
    assert json_calls('{"type": "function", "name": "f", "parameters": {"x": 1}}') == wanted
    assert hermes_calls('<tool_call>{"name": "f"}</tool_call>') == [Call("f", {})]
    assert pythonic_calls("[a.f(x=1)]") == [Call("a.f", {"x": 1})]


@pytest.mark.parametrize("parse", [hermes_calls, json_calls, pythonic_calls])
@pytest.mark.parametrize("text", ["", "42", "[1, 2]", '{"answer": 42}', "f(x=1)", "<think> I could call f", "[f]", "{"])
def test_plain_text_is_not_a_call(parse, text):
    assert parse(text) == []


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [
        (hermes_calls, '<tool_call>{"name": "f"}', "<tool_call> is not closed"),
        (hermes_calls, "<tool_call></tool_call>", "not valid JSON: Expecting value"),
        (hermes_calls, '<tool_call>{"name": "f", }</tool_call>', "not valid JSON"),
        (hermes_calls, f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON"),
        (hermes_calls, '<tool_call>["f"]</tool_call>', "a call must be like"),
        (hermes_calls, '<tool_call>{"name": 3}</tool_call>', "a call must be like"),
        (hermes_calls, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
        (hermes_calls, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "arguments are not valid JSON"),
        (json_calls, '{"name": "f", "parameters": {', "not valid JSON"),
        (json_calls, "<|python_tag|>print(1)", "not valid JSON"),
        (json_calls, "<|python_tag|>", "no call after"),
        (json_calls, '{"name": "f"} and so on', "not valid JSON"),
        (pythonic_calls, "[f(x=1", "not valid Python"),
        (pythonic_calls, "[f(1)]", "every argument by its name"),
        (pythonic_calls, "[f(**x)]", "every argument by its name"),
        (pythonic_calls, "[f(x=y)]", "must be literals"),
        (pythonic_calls, "[f(x=__import__('os').system('true'))]", "must be literals"),
    ],
)
def test_a_malformed_call_gets_an_explanation(parse, text, error):
    (bad,) = parse(text)
    assert isinstance(bad, BadCall)
    assert error in bad.error
    assert len(bad.error) < 300


PIECES = [
    *'<tool_call>/{}[]"name:f,=(1) \n', "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>commentary", " to=functions.f",
    "<|message|>", '<invoke name="f">', '<parameter name="a">', "</invoke>", "<|tool_call_start|>", "<|tool_call>",
    "call:f{", '<|"|>', "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "...", '"\\ud83d"', '{"name": "f", "arguments": ', "[f(a=", "f", "b", " to=f",
    '<|open|>call tool="f"<|sep|>', '<|open|>argument key="a"<|sep|>', "<|close|>", "argument<|sep|>", "call<|sep|>",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
@example("<tool_call>{}</tool_call><tool_call>")
@example("<function=f><parameter=a>\n...\n</parameter></function>")
@example("<tool_call>f<arg_key>a</arg_key><arg_value>{1, b'2'}</arg_value></tool_call>")
@example("[f(a={'b'}), f(a=...), f(a=(1, 2))]")
@example('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>')
@example('[TOOL_CALLS]f[ARGS]{"\\udc00": ["\\ud83d"]}')
@example('<|channel|>commentary to=functions.f <|message|>{"a": "\\ud83d"}')
@example('<function=f><parameter=a>["\\ud83d"]</parameter></function>')
def test_nothing_that_a_model_writes_raises(text):
    for parse in FORMATS.values():
        for call in parse(text):
            assert isinstance(call, Call | BadCall)
            json.dumps(call, ensure_ascii=False).encode()  # as a server and a tokenizer write it
    for calls in (True, False):
        assert isinstance(message_of(text, calls=calls)["content"], str)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_that_repeats_itself_is_read_in_linear_time(name):
    start = time.process_time()
    for piece in PIECES:
        for text in (piece * 20_000, f"<function=f>{piece * 20_000}</function>", f"x,{{{piece * 20_000}"):
            FORMATS[name](text)
            message_of(text, calls=True)
    assert time.process_time() - start < 60  # a quadratic one takes hours


def test_calls_inside_reasoning_are_ignored():
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert hermes_calls(f"<think>maybe {call}</think>no") == []
    assert hermes_calls(f"<think>maybe {call}") == []
    assert hermes_calls(f"<think>hm</think>{call}") == [Call("f", {})]
    assert answer_of("a</think>b") == "b"
    assert before_calls(f"<think>hm</think>so: {call}") == "<think>hm</think>so: "
    assert before_calls('<think>hm</think>{"name": "f"}') == "<think>hm</think>"


SCHEMA = {
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number", "nullable": True},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "any": {},
        "either": {"type": ["integer", "string"]},
    },
    "required": ["n"],
}


@pytest.mark.parametrize(
    ("given_", "error"),
    [
        ({"n": 1}, None),
        ({"n": 1, "x": 2, "unit": "C", "any": [1], "either": "s"}, None),
        ({"n": 1, "x": None}, None),
        ({}, "missing arguments ['n']; the arguments are ['n', 'x', 'unit', 'any', 'either']"),
        ({"n": 1, "m": 2}, "there is no argument 'm'"),
        ({"n": "1"}, "argument 'n' must be integer, got \"1\""),
        ({"n": True}, "argument 'n' must be integer, got true"),
        ({"n": None}, "argument 'n' must be integer, got null"),
        ({"n": 1, "unit": "K"}, "argument 'unit' must be one of ['C', 'F'], got \"K\""),
        ({"n": 1, "either": 1.5}, "argument 'either' must be integer or string, got 1.5"),
    ],
)
def test_arguments_are_checked(given_, error):
    found = wrong_arguments(SCHEMA, given_)
    assert found == error if error is None else found.startswith(error)
