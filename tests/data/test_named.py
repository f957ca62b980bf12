"""What of rows is named once on the screen, and errors of messages in another form, which name the fix."""

from __future__ import annotations

import pytest
from families import FAMILIES, tokenizer_of

from rlkit.compat.rows import read
from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.prompts import rl_prompts
from rlkit.data.template import role_fix
from rlkit.data.tiny import tiny_tokenizer
from rlkit.data.turns import CONVERSATION

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


QWEN3 = (  # as Qwen3's: what stands before </think> is reasoning
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}{% endif %}"
    "\n</think>\n\n{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CUT, ALONE = "never close the reasoning", "have reasoning without an answer after it"
REASONED = {
    "<think>\ncut": CUT, "<think>\nr\n</think>\n\n": ALONE, "<think>r</think>": ALONE,
    "<think>\nr\n</think>\n\na": None, "Write <think> first.": None, "a": None, "r\n</think>\n\na": None,
}  # fmt: skip


def answered(form, text):
    """The reader of a form and a row of it with this answer."""
    return {
        "messages": (sft_examples, {"messages": [ASKED, {"role": "assistant", "content": text}]}),
        "response": (sft_examples, {"prompt": "1+1?", "response": text}),
        "chosen": (preference_pairs, {"prompt": "1+1?", "chosen": text, "rejected": "b"}),
        "label": (labelled_examples, {"prompt": "1+1?", "completion": text, "label": True}),
    }[form]


@pytest.mark.parametrize("form", ["messages", "response", "chosen", "label"])
@pytest.mark.parametrize("template", [QWEN3, None])
def test_reasoning_that_is_not_finished_is_named_with_its_row(form, template, caplog):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    for text, why in REASONED.items():
        make, row = answered(form, text)
        make([answered(form, "ok")[1], row], tokenizer=tokenizer, max_example_tokens=99)
        found = [line for line in caplog.messages if CUT in line or ALONE in line]
        assert len(found) == (why is not None), text
        assert not found or (f" that {why}" in found[0] and found[0].endswith(": row 2"))
        caplog.clear()


def test_reasoning_that_the_template_opens_and_that_has_no_answer_is_named(caplog, tmp_path):
    tokenizer = tokenizer_of(FAMILIES["deepseek-r1"], tmp_path)
    rows = [{"prompt": "1+1?", "response": f"r\n</think>\n\n{text}"} for text in ("", "2")]
    sft_examples(rows, tokenizer=tokenizer, max_example_tokens=99)
    assert [line for line in caplog.messages if ALONE in line or CUT in line] == [
        f"kept 1 of 2 rows that {ALONE}: the end of turn trains there: row 1"
    ]


@pytest.mark.parametrize("text", ["The </think> tag.", "Use `</think>` to end"])
def test_prose_that_a_template_takes_for_reasoning_is_named(text, caplog):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN3
    how = {"tokenizer": tokenizer, "max_example_tokens": 99}
    (example,), _ = sft_examples([answered("messages", text)[1]], **how)
    assert tokenizer.decode(example.ids).count("</think>") == 1
    assert "1 of the rows hold '</think>' inside a line of an answer that opens no reasoning" in caplog.text
    caplog.clear()
    sft_examples([answered("response", text)[1]], **how)  # verbatim
    tokenizer.chat_template = None
    tokenizer = tiny_tokenizer()
    sft_examples([answered("messages", text)[1]], tokenizer=tokenizer, max_example_tokens=99)
    assert "inside a line" not in caplog.text


@pytest.mark.parametrize("form", ["response", "chosen", "label", "messages"])
def test_empty_prompts_are_named_and_kept(form, caplog):
    make, row = answered(form, "a")
    empty = (
        {"messages": [{"role": "user", "content": " "}, *row["messages"][1:]]} if form == "messages" else {"prompt": ""}
    )
    how = {"tokenizer": tiny_tokenizer(), "max_example_tokens": 99}
    assert len(make([row, {**row, **empty}], **how)[0]) == 2
    line = "1 of the rows hold '' as the text of a user, and train the answer without a prompt (kept: drop them"
    assert caplog.messages == [f"{line} if that is not meant): row 2"]
    caplog.clear()
    if form != "messages":
        make([row, {**row, **empty}], **how, apply_chat_template=False)
        assert caplog.text == ""


def test_prompts_without_text_are_dropped_in_one_line(caplog):
    assert len(prompts("", "a")) == 1
    assert caplog.messages == ["dropped 1 of 2 prompts that have no text: row 1"]


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
        (
            "{% if m.content is none %}{{ m.tool_calls }}{% endif %}",
            r"writes no calls beside a content, nor without one: write them into 'content' .* \(--chat-template\)",
        ),
    ],
)
def test_a_call_without_content_has_a_fix_where_the_template_needs_one(call, fix):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content }}" + call + "{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, ANSWERED]
    with pytest.raises(ValueError, match=f"row 1: cannot be rendered: .*; .*{fix}"):
        sft_examples([{"messages": messages}], tokenizer=tokenizer, max_example_tokens=99)
