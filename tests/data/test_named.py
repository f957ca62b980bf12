"""What of rows is named once on the screen, and errors of messages in another form, which name the fix."""

from __future__ import annotations

import pytest

from rlkit.compat.rows import read
from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.prompts import rl_prompts
from rlkit.data.rows import CONVERSATION
from rlkit.data.template import role_fix
from rlkit.data.tiny import tiny_tokenizer

ASKED, ANSWERED = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}


def examples(*messages):
    rows = [{"messages": [*messages]}]
    return sft_examples(rows, tokenizer=tiny_tokenizer(), max_example_tokens=99)[0]


@pytest.mark.parametrize("last", [ASKED, {"role": "tool", "content": "x"}, {"role": "system", "content": "x"}])
def test_what_follows_the_last_answer_is_named(caplog, last):
    plain = examples(ASKED, ANSWERED)
    assert "go on after" not in caplog.text
    (example,) = examples(ASKED, ANSWERED, last)
    assert example.ids == plain[0].ids
    assert "kept 1 of 1 rows that go on after the last assistant turn: what follows it is left out" in caplog.text


def prompts(*texts):
    return rl_prompts([{"prompt": text} for text in texts], tokenizer=tiny_tokenizer(), max_prompt_tokens=99)[0]


def test_prompts_that_repeat_are_named(caplog):
    prompts("a")
    prompts("a", "b")
    prompts("a", "a", "b")
    assert caplog.text == ""
    prompts("a", "a", "a")
    assert "the 3 prompts are all the same text" in caplog.text
    prompts("a", "a", "b", "b")
    assert "the 4 prompts are 2 different texts" in caplog.text


@pytest.mark.parametrize("key", ["text", "message"])
def test_a_message_without_content_has_its_keys_named(key):
    message = {"role": "user", key: "hi"}
    fix = rf"content must be a string, got None; its keys are role, {key}: the text is to be under 'content'"
    with pytest.raises(ValueError, match=fix):
        rl_prompts([{"messages": [message]}], tokenizer=tiny_tokenizer(), max_prompt_tokens=99)
    with pytest.raises(ValueError, match=fix):
        examples(message, ANSWERED)
    with pytest.raises(ValueError, match=r"must be a string, got 5$"):
        examples({"role": "user", "content": 5}, ANSWERED)


@pytest.mark.parametrize(("role", "ours"), [("human", "user"), ("bot", "assistant"), ("Bot", "assistant")])
def test_roles_of_other_systems_have_a_fix(role, ours):
    assert role_fix(["user", role]) == f"; write the role '{ours}' for '{role}'"
    with pytest.raises(ValueError, match=rf"unknown role '{role}'.*; write the role '{ours}' for '{role}'"):
        rl_prompts([{"messages": [{"role": role, "content": "x"}]}], tokenizer=tiny_tokenizer(), max_prompt_tokens=99)
    with pytest.raises(ValueError, match=rf"'{ours}' for '{role}'"):
        examples({"role": role, "content": "x"}, *([] if ours == "assistant" else [ANSWERED]))


def test_another_role_has_none():
    assert role_fix(["user", "critic", None, 3]) == ""


ROW = {"prompt": "x", "response": "y"}


class DataFrame:
    """As far as rows are asked."""

    columns, dtypes = ("prompt",), ()

    def __len__(self):
        return 1

    def __getitem__(self, _):
        return self.columns


WRONG = {
    "`tokenizer` must be a tokenizer, got 'model': rlkit.model.pretrained.load_tokenizer": {"tokenizer": "model"},
    "`system_prompt` must be a string, got": {"system_prompt": [{"role": "system", "content": "a"}]},
    "`template_args` must be a dict like .*, got": {"template_args": '{"a": 1}'},
    "`tools` must be a list of functions or JSON schemas, got": {"tools": "[]"},
    "rows must be a list of dicts, got <list_iterator": {"rows": iter([ROW])},
    "rows must be a list of dicts, got a DataFrame: give rows.to_dict": {"rows": DataFrame()},
    "rows must be a list of dicts, got None": {"rows": None},
}


@pytest.mark.parametrize("line", WRONG)
@pytest.mark.parametrize("make", [sft_examples, preference_pairs, labelled_examples, rl_prompts])
def test_an_argument_of_another_type_is_named(make, line):
    limit = "max_prompt_tokens" if make is rl_prompts else "max_example_tokens"
    given = {"rows": [ROW], "tokenizer": tiny_tokenizer(), limit: 99, **WRONG[line]}
    with pytest.raises(TypeError, match=rf"\A{line}[^\n]*\Z"):
        make(given.pop("rows"), **given)


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_the_column_of_another_system_message_is_named(name):
    row = {name: "a", "messages": [{"role": "system", "content": "b"}, ASKED, ANSWERED]}
    with pytest.raises(ValueError, match=f"than that of column '{name}'.*--rename {name} OTHER"):
        sft_examples([row], tokenizer=tiny_tokenizer(), max_example_tokens=99)


def test_an_empty_conversation_is_named_as_its_column_is():
    with pytest.raises(ValueError, match="row 1: column 'conversations' must be a list of at least one message"):
        read([{"conversations": []}], CONVERSATION)


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        ("", "no tool calls: write them into 'content'"),
        ("{{ m.tool_calls }}", 'write "content": "" beside \'tool_calls\''),
    ],
)
def test_a_call_without_content_has_a_fix_where_the_template_needs_one(call, fix):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content }}" + call + "{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, ANSWERED]
    with pytest.raises(ValueError, match=f"row 1: cannot be rendered: .*; .*{fix}"):
        sft_examples([{"messages": messages}], tokenizer=tokenizer, max_example_tokens=99)
