"""What of rows is named once on the screen, and errors of messages in another form, which name the fix."""

from __future__ import annotations

import pytest

from rlkit.data.examples import sft_examples
from rlkit.data.prompts import rl_prompts
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
