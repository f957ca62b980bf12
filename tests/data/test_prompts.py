from __future__ import annotations

import logging

import pytest

from rlkit.data.prompts import prompt_messages, rl_prompts, shared
from rlkit.data.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
START, END, SYSTEM, USER, ASSISTANT, NL = 257, 258, 259, 260, 261, 10


def question(text):
    return [START, USER, NL, *text.encode(), END, NL, START, ASSISTANT, NL]


def test_rows_of_one_prompt_differ_by_their_images_tools_and_for_an_environment_by_any_column():
    row = {"prompt": "What is it?", "image": "a.png", "seed": 1}
    assert shared([[row]], [[{**row, "seed": 2}]]) == ["the prompts of 1 of 1 rows are also in --data: row 1"]
    assert shared([[row]], [[{**row, "image": "b.png"}]]) == [""]
    assert shared([[row]], [[{**row, "tools": [{"name": "f"}]}]]) == [""]
    assert shared([[row]], [[{**row, "seed": 2}]], whole=True) == [""]
    train = [{"seed": 1, "image": "a.png", "prompt": "What is it?"}]
    held_out = [[row, {**row, "seed": 3}, row], [{"text": "a"}, {"text": "b"}], [row] * 9]
    several = "9 of 9 rows are also in --data: row 1, row 2, row 3, row 4, row 5, ..."
    assert shared(held_out, [train, [{"text": "b"}]], whole=True) == [
        "2 of 3 rows are also in --data: row 1, row 3", "1 of 2 rows are also in --data: row 2", several,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("What is 2+2?", "what is  2+2", True), ("Say it's so.\nThen go!", "say it's so then go", True),
        ("[2, 3]", "[2,3]", True), ("What is 5 - 3?", "What is 5 + 3?", False), ("Is it 1.5?", "Is it 15?", False),
        ("f'(2)", "f(2)", False), ("5!", "5", False), ("Is it so? Say.", "Is it so, say", True),
    ],
)  # fmt: skip
def test_prompts_that_differ_in_case_blanks_and_marks_alone_are_shared(one, other, alike):
    line = "the prompts of 1 of 2 rows are also in --data, but for case, blanks and marks: row 2"
    for of in (lambda x: {"prompt": x}, lambda x: {"messages": [{"role": "user", "content": x}]}):
        assert shared([[of("a"), of(one)]], [[of(other)]]) == [line * alike]
        assert shared([[of("a"), of(one)]], [[of(other)]], whole=True) == [""]


def test_prompts_and_messages_are_rendered_and_keep_their_row():
    rows = [
        {"prompt": "394215", "answer": "123459"},
        {"messages": [{"role": "user", "content": "b"}], "answer": "x"},
        {"prompt": [{"role": "user", "content": "c"}], "messages": None},
    ]
    prompts, num_dropped = rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=99)
    assert [p.ids for p in prompts] == [question("394215"), question("b"), question("c")]
    assert [p.row for p in prompts] == rows
    assert [p.index for p in prompts] == [0, 1, 2]
    assert num_dropped == 0
    assert len(prompts[0].ids) == 14


def test_a_system_prompt_goes_before_conversations_without_one():
    rows = [{"prompt": "a"}, {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]}]
    prompts, _ = rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=99, system_prompt="be")
    assert prompts[0].ids == [START, SYSTEM, NL, *b"be", END, NL, *question("a")]
    assert prompts[1].ids == [START, SYSTEM, NL, *b"own", END, NL, *question("a")]
    assert rows[0] == {"prompt": "a"}
    assert prompt_messages(rows[1], system_prompt="be") == rows[1]["messages"]


def test_plain_text_is_verbatim_after_the_tokenizers_own_start():
    rows = [{"prompt": "Q: 1+1\nA:"}]
    prompts, _ = rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=99, apply_chat_template=False)
    assert prompts[0].ids == list(b"Q: 1+1\nA:")
    from tokenizers import processors

    starts = tiny_tokenizer()
    starts._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    assert rl_prompts(rows, tokenizer=starts, max_prompt_tokens=99, apply_chat_template=False)[0][0].ids[:2] == [
        256,
        81,
    ]
    assert rl_prompts(rows, tokenizer=starts, max_prompt_tokens=99)[0][0].ids[:2] == [START, USER]
    with pytest.raises(ValueError, match="without a chat template there is no place for `system_prompt`"):
        rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=9, apply_chat_template=False, system_prompt="be")


def test_too_long_prompts_are_dropped_counted_and_logged_once(caplog):
    rows = [{"prompt": "x" * n} for n in (3, 20, 2, 9, 30, 31, 32, 33, 34)]
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        prompts, num_dropped = rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=8 + 9)
    assert [p.index for p in prompts] == [0, 2, 3]
    assert num_dropped == 6
    assert [r.getMessage() for r in caplog.records] == [
        "dropped 6 of 9 prompts that are longer than `max_prompt_tokens` 17: row 2 (28 tokens), row 5 (38 tokens), "
        "row 6 (39 tokens), row 7 (40 tokens), row 8 (41 tokens), ..."
    ]
    caplog.clear()
    rl_prompts(rows[:1], tokenizer=TOKENIZER, max_prompt_tokens=11)
    assert not caplog.records
    with pytest.raises(
        ValueError, match=r"all 9 prompts are longer than `max_prompt_tokens` 9; the shortest has 10 tokens"
    ):
        rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=9)


@pytest.mark.slow
def test_many_rows_keep_their_order():
    rows = [{"prompt": str(i)} for i in range(2500)]
    prompts, _ = rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=99)
    assert [p.ids for p in prompts] == [question(str(i)) for i in range(2500)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "a", "answer": 1},
            r"row 2: neither 'messages' nor 'prompt' is there; columns found: \['answer', 'q",
        ),
        ({"messages": []}, r"row 2: column 'messages' must be a list of at least one message, got \[\]"),
        ({"messages": "hi"}, r"row 2: column 'messages' must be a list of at least one message, got 'hi'"),
        ({"messages": ["hi"]}, r"row 2: messages\[0\] must be an object like .* got 'hi'"),
        ({"prompt": [{"content": "a"}]}, r"row 2: prompt\[0\] must be an object like \{'role'"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "row 2: the conversation ends with an assistant message.*drop that message",
        ),
        ({"prompt": [{"role": "user", "content": "late"}]}, "row 2: cannot be rendered: TemplateError: no text"),
        ({"prompt": [{"role": "user", "content": 3}]}, r"row 2: prompt\[0\].content must be a string, got 3"),
        ({"messages": [{"role": "user"}]}, r"row 2: messages\[0\].content must be a string, got None"),
        ({"messages": [{"role": "user", "content": []}]}, r"row 2: messages\[0\].content must be a string, got \[\]"),
        ({"prompt": [{"role": "asistant", "content": "a"}]}, "row 2: unknown role 'asistant'; roles are system, user,"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "b"}]}]},
            "row 2: its messages show images, and the model reads text only; columns found",
        ),
        ({"prompt": [{"role": "user", "content": ["a"]}]}, r"row 2: prompt\[0\].content\[0\] is 'a': rlkit reads text"),
    ],
)
def test_a_bad_row_is_named(row, message):
    tokenizer = tiny_tokenizer()
    check = "{% for m in messages %}{% if m.content == 'late' %}{{ raise_exception('no text') }}{% endif %}{% endfor %}"
    tokenizer.chat_template = check + tokenizer.chat_template
    with pytest.raises(ValueError, match=message):
        rl_prompts([{"prompt": "ok"}, row], tokenizer=tokenizer, max_prompt_tokens=99)


def test_no_rows_and_no_room_are_errors():
    with pytest.raises(ValueError, match="rows is empty"):
        rl_prompts([], tokenizer=TOKENIZER, max_prompt_tokens=9)
    with pytest.raises(ValueError, match="max_prompt_tokens must be at least 1, got 0"):
        rl_prompts([{"prompt": "a"}], tokenizer=TOKENIZER, max_prompt_tokens=0)
    with pytest.raises(ValueError, match="no column 'prompt'"):
        rl_prompts([{"messages": []}], tokenizer=TOKENIZER, max_prompt_tokens=9, apply_chat_template=False)


def test_parts_of_text_are_read_as_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]
    bedrock = [{"text": "a"}, {"text": "b", "type": None}]
    rows = [{"messages": [{"role": "user", "content": content}]} for content in (parts, bedrock)]
    for prompt in rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=99)[0]:
        assert prompt.ids == question("ab")
    told = [{"system": system, "prompt": "a"} for system in ("b", [{"text": "b"}])]
    first, second = rl_prompts(told, tokenizer=TOKENIZER, max_prompt_tokens=99)[0]
    assert first.ids == second.ids != question("a")
    rows[1]["messages"][0]["content"] = [{"text": "a", "cachePoint": {"type": "default"}}]
    with pytest.raises(ValueError, match=r"row 2: messages\[0\].content\[0\] is None: rlkit reads text only"):
        rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=99)


def test_a_role_that_the_template_names_is_known():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message.role }}", "{{ 'critic' if message.role == \"judge\" else message.role }}"
    )
    for role in ("critic", "judge"):
        rows = [{"messages": [{"role": role, "content": "a"}, {"role": "user", "content": "b"}]}]
        with pytest.raises(ValueError, match=f"row 1: unknown role '{role}'"):
            rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=99)
        (prompt,), _ = rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=99)
        assert prompt.ids[-len(question("b")) :] == question("b")


@pytest.mark.parametrize("plain", [False, True])
def test_prompts_without_text_are_dropped_and_named(caplog, plain):
    rows = [{"prompt": "a"}, {"prompt": " \n"}, {"prompt": "b"}, {"prompt": ""}]
    options = {"tokenizer": TOKENIZER, "max_prompt_tokens": 99, "apply_chat_template": not plain}
    prompts, num_dropped = rl_prompts(rows, **options)
    assert ([p.index for p in prompts], num_dropped) == ([0, 2], 2)
    assert [r.getMessage() for r in caplog.records] == ["dropped 2 of 4 prompts that have no text: row 2, row 4"]
    with pytest.raises(ValueError, match="all 1 prompts have no text; check which columns hold the texts"):
        rl_prompts(rows[1:2], **options)
