"""What the chat template does not write of a row is refused, or named."""

from __future__ import annotations

import re

import pytest
from chat_rows import CALLS, HI_YO, NUMBER, answer, call, read, said, tokenizer_of, tool, user, write

from rlkit.data.examples import preference_pairs, sft_examples
from rlkit.data.load import load_rows


def test_a_template_that_drops_a_role_or_the_tools_is_refused(tmp_path):
    template = CALLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    path = write(tmp_path / "rows.jsonl", [{"system": "be", "prompt": "hi", "response": "yo"}])
    with pytest.raises(
        ValueError, match=r"line 1: the chat template does not write the content of the message {'role': 'system'"
    ):
        read(path, "sft", tokenizer_of(template))
    path = write(tmp_path / "tools.jsonl", [{"prompt": "hi", "tools": [tool("add", x=NUMBER)]}])
    with pytest.raises(ValueError, match=r"line 1: the chat template does not write the tools of the row; use a model"):
        read(path, "grpo", tokenizer_of(CALLS.replace("if tools", "if false")))


def test_markup_of_the_template_inside_a_text_is_named(tmp_path, caplog):
    """What begins a text is refused; a response may end with the end of its turn, which is not written twice."""
    rows = [{"prompt": "hi", "response": "yo<|im_end|>"}, {"prompt": "hi", "response": "yo<|im_end|>\n"}]
    path = write(tmp_path / "rows.jsonl", [*rows, {"prompt": "What is <|im_start|>?", "response": "a token"}])
    texts = read(path, "sft", tokenizer_of())
    assert texts[:2] == [HI_YO] * 2
    written = "in their text, which the chat template writes itself (ready-made prompts and responses are read with"
    plain = "in messages that are not the assistant's it is read as text, no token"
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: 1 of the rows hold '<|im_start|>' {written} --no-chat-template); {plain}: line 3",
    ]
    assert texts[2][0] == "<user>What is <\u200b|im_start|>?;<assistant>a token;"


FIRST = (  # writes a system message at the start only, and the first of several calls
    "{% for m in messages if m.role in ['user', 'assistant'] or loop.first %}<|im_start|>{{ m.role }}\n"
    "{{ '<call>' ~ m.tool_calls[0].function.name if m.tool_calls else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("or loop.first", "or m == messages[0]")
DROPPED = (
    "the chat template does not write the content of the message {{'role': '{}', 'content': '{}'}}; move it into a "
    "message that is written"
)


@pytest.mark.parametrize(
    ("script", "row", "message"),
    [
        ("sft", {"messages": [user("a"), answer("b"), said("system", "a"), user("hi"), answer("yo")]},
         DROPPED.format("system", "a")),
        ("grpo", {"messages": [user("a"), answer("b"), said("tool", "b"), user("hi")]}, DROPPED.format("tool", "b")),
        ("dpo", {"prompt": [user("a"), answer("b"), said("developer", "b"), user("hi")], "chosen": "yo",
                 "rejected": "no"}, DROPPED.format("developer", "b")),
        ("sft", {"messages": [user("hi"), answer("Let us see", tool_calls=[call("f", {})]), user("a"), answer("b")]},
         "the chat template does not write the content of the message {'role': 'assistant', 'content': 'Let us see', "),
        ("sft", {"messages": [user("hi"), answer("", tool_calls=[call("f", {}), call("g", {})])]},
         "the chat template does not write 'tool_calls' of the message {'role': 'assistant', 'content': '', "
         "'tool_calls': [{'id': 'c1', 'type': 'functi...; write it into 'content'"),
    ],
)  # fmt: skip
def test_each_message_of_each_row_must_be_written(tmp_path, script, row, message):
    """The first row is written: what holds of it says nothing of the second."""
    answers = {"chosen": "yo", "rejected": "no"} if script == "dpo" else {}
    first = {next(iter(row)): [said("system", "be"), user("hi"), *([answer("yo")] if script == "sft" else [])]}
    path = write(tmp_path / "rows.jsonl", [{**first, **answers}, row])
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 2: {re.escape(message)}"):
        read(path, script, tokenizer_of(FIRST))


@pytest.mark.parametrize(
    ("first", "line"),
    [({"prompt": [said("system", "be"), user("hi")]}, 2), ({"prompt": "call add: hi"}, 1)],
)
def test_the_tools_of_each_row_must_be_written(tmp_path, first, line):
    """By a template that writes them after a system message; the name of a tool in a prompt says nothing."""
    template = CALLS.replace("if tools", "if tools and messages[0].role == 'system'")
    tools = {"tools": [tool("add", x=NUMBER)]}
    path = write(tmp_path / "rows.jsonl", [{**first, **tools}, {"prompt": "call add: hi", **tools}])
    message = f"^{re.escape(str(path))}, line {line}: the chat template does not write the tools of the row"
    with pytest.raises(ValueError, match=message):
        read(path, "grpo", tokenizer_of(template))


def test_tools_that_are_given_must_be_written_too():
    rows = [{"prompt": "call add: hi", "response": "yo"}]
    with pytest.raises(ValueError, match=r"^row 1: the chat template does not write the tools of the row"):
        sft_examples(
            rows,
            tokenizer=tokenizer_of(CALLS.replace("if tools", "if false")),
            max_example_tokens=99,
            tools=[tool("add")],
        )


def test_a_key_is_written_if_the_text_changes_with_it(tmp_path, caplog):
    """`name` and `tools` stand in the source of the template, which writes `name` of users only."""
    template = CALLS.replace("{{ m.role }}", "{{ m.role }}{{ ' ' ~ m.name if m.name and m.role == 'user' }}")
    system = said("system", "be", tools="x")
    rows = [{"messages": [system, user("hi", name="Bob"), answer("yo")]}]
    path = write(tmp_path / "rows.jsonl", rows)
    sft_examples(load_rows(path), tokenizer=tokenizer_of(template), max_example_tokens=99)
    path = write(tmp_path / "more.jsonl", [{"messages": [user("hi"), answer("yo", name="Al")]}])
    sft_examples(load_rows(path), tokenizer=tokenizer_of(template), max_example_tokens=99)
    pair = {"prompt": "hi", "chosen": [answer("yo", name="Al")], "rejected": [answer("no")]}
    pairs = write(tmp_path / "pairs.jsonl", [pair])
    preference_pairs(load_rows(pairs), tokenizer=tokenizer_of(template), max_example_tokens=99)
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path / 'rows.jsonl'}: message key tools is not written by the chat template",
        f"{path}: message key name is not written by the chat template",
        f"{pairs}: message key name is not written by the chat template",
    ]


def test_an_argument_is_read_if_the_text_changes_with_it(tmp_path, caplog):
    """`thinking` stands in the template as a key of messages; `enable_thinking` is read where it is false."""
    template = CALLS.replace(
        "<|im_start|>assistant\n", "<|im_start|>assistant\n{% if enable_thinking is false %}.{% endif %}"
    )
    template = template.replace("{% if m.reasoning", "{{ m.thinking }}{% if m.reasoning")
    args = {"enable_thinking": True, "thinking": True}
    path = write(tmp_path / "rows.jsonl", [{"prompt": "hi", "chat_template_kwargs": args}])
    assert read(path, "grpo", tokenizer_of(template)) == ["<user>hi;<assistant>"]
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: template argument thinking is not read by the chat template"
    ]


def test_message_keys_and_template_arguments_that_the_template_does_not_read_are_named(tmp_path, caplog):
    row = {"messages": [user("hi", mood="sad", id=3, note=None), answer("yo", train=True)], "enable_thinking": False}
    row["messages"][0]["train"] = True
    path = write(tmp_path / "rows.jsonl", [row])
    assert read(path, "sft", tokenizer_of()) == [HI_YO]
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: message key mood is not written by the chat template",
        f"{path}: template argument enable_thinking is not read by the chat template",
        f"{path}: role user ('train': true) is not trained: assistant turns are",
    ]


def test_an_argument_of_a_call_that_the_template_drops_is_refused(tmp_path):
    made = [user("hi"), answer("", tool_calls=[call("f", {}), call("weather", {"city": "Rome", "unit": "C"})])]
    path = write(tmp_path / "rows.jsonl", [{"messages": made}])
    (text, _) = read(path, "sft", tokenizer_of())[0]
    assert '<call>weather {"city": "Rome", "unit": "C"}</call>' in text
    one = tokenizer_of(CALLS.replace("c.function.arguments |", "(c.function.arguments.city or '') |"))
    message = r"line 1: the chat template does not write the argument weather\(unit\) of a call; write the call into"
    with pytest.raises(ValueError, match=message):
        read(path, "sft", one)
    for arguments in ({"city": "Rome"}, {"city": "Rome", "unit": ""}):  # an empty one changes nothing
        row = {"messages": [user("hi"), answer("", tool_calls=[call("weather", arguments)])]}
        assert "<call>weather" in read(write(tmp_path / "right.jsonl", [row]), "sft", one)[0][0]
