from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.compat.rows import read
from rlkit.data.chat import render, render_text
from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.load import load_rows
from rlkit.data.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
START, END, USER, ASSISTANT, TOOL, NL = 257, 258, 260, 261, 262, 10

FORGETFUL = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</t>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def convo(*turns):
    roles = {"u": "user", "a": "assistant", "t": "tool"}
    return {"messages": [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]}


def examples(rows, tokenizer=TOKENIZER, max_example_tokens=999, **options):
    return sft_examples(rows, tokenizer=tokenizer, max_example_tokens=max_example_tokens, **options)[0]


def trained(example):
    assert len(example.ids) == len(example.mask)
    return [t for t, on in zip(example.ids, example.mask, strict=True) if on]


def question(text, role=USER):
    return [START, role, NL, *text.encode(), END, NL, START, ASSISTANT, NL]


def test_a_response_and_its_end_of_turn_are_trained_and_nothing_else():
    want_ids, want_mask = [*question("hi"), *b"yo", END], [False] * 10 + [True] * 3
    by_response = examples([{"prompt": "hi", "response": "yo"}])
    by_messages = examples([convo("u:hi", "a:yo")])
    both = examples([{**convo("u:hi"), "response": "yo"}])
    for (example,) in (by_response, by_messages, both):
        assert example.ids == want_ids
        assert example.mask == want_mask


def test_all_assistant_turns_of_a_conversation_are_trained_in_one_example():
    (example,) = examples([convo("u:q", "a:call", "t:7", "a:b", "u:z", "a:", "u:left out")])
    assert example.ids == (
        [*question("q"), *b"call", END, NL, *question("7", TOOL), *b"b", END, NL, *question("z"), END]
    )
    assert trained(example) == [*b"call", END, *b"b", END, END]
    assert example.mask[-1]


def test_an_end_of_turn_inside_the_response_is_not_doubled_and_one_inside_the_content_ends_nothing():
    (example,) = examples([{"prompt": "a", "response": "b<|im_end|>"}])
    assert trained(example) == [98, END]
    (example,) = examples([convo("u:a", "a:b<|im_end|>c")])
    assert trained(example) == [98, END, 99, END]


def test_plain_text_rows_end_with_eos():
    (example,) = examples([{"prompt": "Q:", "response": " A"}], apply_chat_template=False)
    assert (example.ids, example.mask) == ([*b"Q: A", END], [False, False, True, True, True])
    with pytest.raises(ValueError, match="row 1: no column 'prompt'"):
        examples([convo("u:a", "a:b")], apply_chat_template=False)


def test_rewritten_history_makes_each_turn_an_example_in_its_own_context():
    tokenizer = with_template(FORGETFUL)
    rows = [
        convo("u:q", "a:<t>x</t>b", "t:7", "a:c", "u:z", "a:<t>y</t>d", "t:8", "a:e"),
        convo("u:q", "a:b", "u:z", "a:c"),
    ]
    first, second, third = examples(rows, tokenizer=tokenizer)
    assert first.ids == [*question("q"), *b"<t>x</t>b", END, NL, *question("7", TOOL), *b"c", END]
    assert trained(first) == [*b"<t>x</t>b", END, *b"c", END]
    history = [*question("q"), *b"b", END, NL, *question("7", TOOL), *b"c", END, NL]
    assert second.ids == [*history, *question("z"), *b"<t>y</t>d", END, NL, *question("8", TOOL), *b"e", END]
    assert trained(second) == [*b"<t>y</t>d", END, *b"e", END]
    assert trained(third) == [98, END, 99, END]


def test_the_templates_own_blocks_decide_and_the_end_of_turn_is_added():
    tokenizer = with_template(BLOCKS)
    (example,) = examples([convo("u:q", "a:xy", "u:r", "a:é z")], tokenizer=tokenizer)
    assert example.ids == [*question("q"), *b"xy", END, NL, *question("r"), *"é z".encode(), END]
    assert trained(example) == [*b"xy", END, *"é z".encode(), END]
    partly = with_template(
        BLOCKS.replace("{% generation %}{{ m.content }}", "{{ m.content[:1] }}{% generation %}{{ m.content[1:] }}")
    )
    assert trained(examples([convo("u:q", "a:xyz")], tokenizer=partly)[0]) == [*b"yz", END]
    beyond = with_template(
        BLOCKS.replace("{% endgeneration %}{% else %}", "<|im_end|>\n{% endgeneration %}{% else %}").replace(
            "{% endif %}<|im_end|>\n", "<|im_end|>\n{% endif %}"
        )
    )
    assert trained(examples([convo("u:q", "a:xyz")], tokenizer=beyond)[0]) == [*b"xyz", END]
    never = with_template(BLOCKS.replace("m.role == 'assistant'", "m.role == 'tool'"))
    with pytest.raises(ValueError, match="row 1: no token of an assistant turn is trained"):
        examples([convo("u:q", "a:xyz")], tokenizer=never)


def test_blocks_in_a_template_that_rewrites_history_train_each_turn_once():
    block = "{% generation %}{{ m.content }}{% endgeneration %}"
    rewriting = FORGETFUL.replace(
        "{% else %}{{ m.content }}",
        "{% elif m.role == 'assistant' %}" + block + "{% else %}{{ m.content }}",
    ).replace("{{ m.content.split('</t>')[-1] }}", block.replace("m.content", "m.content.split('</t>')[-1]"))
    first, second = examples([convo("u:q", "a:<t>x</t>b", "u:z", "a:c")], tokenizer=with_template(rewriting))
    assert trained(first) == [*b"<t>x</t>b", END]
    assert second.ids == [*question("q"), *b"b", END, NL, *question("z"), *b"c", END]
    assert trained(second) == [99, END]


def test_a_token_over_the_boundary_is_split_as_generation_would():
    """A tokenizer that merges two newlines: the prompt's last newline and the content's first must stay apart."""
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer()
    tokenizer._tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    pair = tokenizer.convert_tokens_to_ids("\n\n")
    (example,) = examples([convo("u:q", "a:\nx")], tokenizer=tokenizer)
    assert render(tokenizer, convo("u:q", "a:\nx")["messages"], add_generation_prompt=False).count(pair) == 1
    assert example.ids == [*question("q"), *b"\nx", END]
    assert trained(example) == [*b"\nx", END]
    literal = examples([{"prompt": "q", "response": "\nx"}], tokenizer=tokenizer)[0]
    assert literal == example
    one, two = examples([convo("u:q", "a:\nx", "u:r", "a:y")], tokenizer=tokenizer)
    assert trained(one) + trained(two) == [*b"\nx", END, *b"y", END]


def test_a_template_without_its_own_generation_prompt_is_refused():
    forced = FORGETFUL.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<t>{% endif %}")
    with pytest.raises(
        ValueError, match=r"row 2: the chat template opens a turn with '<t>' but writes .*as 'b<\|im_end\|>"
    ):
        examples([convo("u:q", "a:<t>x</t>a"), convo("u:q", "a:b")], tokenizer=with_template(forced))
    (example,) = examples([{"prompt": "q", "response": "x</t>b"}], tokenizer=with_template(forced))
    assert example.ids == [*question("q"), *b"<t>x</t>b", END]
    assert trained(example) == [*b"x</t>b", END]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda t: "<|" not in t)


@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4).filter(lambda x: any(a.strip() for _, a in x)))
def test_every_assistant_token_and_only_those_are_trained(turns):
    messages = [m for u, a in turns for m in ({"role": "user", "content": u}, {"role": "assistant", "content": a})]
    (example,) = examples([{"messages": messages}])
    assert example.ids == render(TOKENIZER, messages, add_generation_prompt=False)[:-1]
    encoded = [TOKENIZER.encode(a, add_special_tokens=False) for _, a in turns]
    assert trained(example) == [t for ids in encoded for t in [*ids, END]]


def test_too_long_examples_are_dropped_counted_and_logged(caplog):
    rows = [{"prompt": "q", "response": "x" * n} for n in (2, 30, 3)]
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        kept, num_dropped = sft_examples(rows, tokenizer=TOKENIZER, max_example_tokens=20)
    assert ([len(e.ids) for e in kept], num_dropped) == ([12, 13], 1)
    assert [r.getMessage() for r in caplog.records] == [
        "dropped 1 of 3 examples that are longer than `max_example_tokens` 20: row 2 (40 tokens)"
    ]
    with pytest.raises(
        ValueError, match=r"all 3 examples are longer than `max_example_tokens` 5; the shortest has 12 tokens"
    ):
        sft_examples(rows, tokenizer=TOKENIZER, max_example_tokens=5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "answer": "b"},
            r"row 2: no response to train on: needs the column 'completion' or 'response', or an assistant message;",
        ),
        (convo("a:hello"), r"row 2: needs an assistant message with a message before it, got roles \['assistant'\]"),
        (
            {"prompt": "a", "response": None},
            r"row 2: no response to train on: needs .*, or an assistant message \(column 'response' is null\); columns",
        ),
        (
            {"text": "a"},
            r"row 2: neither 'messages' nor 'prompt' is there; columns found: \['text'\]",
        ),
    ],
)
def test_a_bad_row_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        examples([{"prompt": "a", "response": "b"}, row])


def call_of(name):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": {}}}]}


def test_rows_without_a_response_are_dropped_and_named(caplog):
    blank = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]}
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": " \n"}, convo("u:q", "a:"), blank]
    rows += [convo("u:q", "a:", "u:r", "a:b"), {"messages": [{"role": "user", "content": "q"}, call_of("f")]}]
    calling = with_template(
        TOKENIZER.chat_template.replace(
            "message.content or ''", "message.tool_calls[0].function.name if message.tool_calls else message.content"
        )
    )
    kept, num_dropped = sft_examples(rows, tokenizer=calling, max_example_tokens=99)
    assert [trained(e) for e in kept] == [[98, END], [END, 98, END], [102, END]]
    assert num_dropped == 3
    assert [r.getMessage() for r in caplog.records] == [
        "dropped 3 of 6 rows that have an empty response: row 2, row 3, row 4",
        "kept 1 of 6 rows that have an empty assistant turn: row 5",
    ]
    for row in rows[1:4]:
        with pytest.raises(ValueError, match=r"^all 2 rows have an empty response; check which columns"):
            examples([row, row])
    with pytest.raises(ValueError, match=r"^all 1 rows have an empty response"):
        examples(rows[1:2], apply_chat_template=False)


def test_an_assistant_turn_of_parts_is_trained_as_its_text():
    parts = [{"type": "text", "text": "y"}, {"type": "text", "text": "o"}]
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": parts}]}]
    assert examples(rows) == examples([convo("u:hi", "a:yo")])
    rows[0]["messages"][1]["content"] = [{"type": "audio", "audio": "x.wav"}]
    with pytest.raises(ValueError, match=r"row 1: messages\[1\].content\[0\] is 'audio': rlkit reads text only"):
        examples(rows)


def test_an_unknown_role_is_refused_where_a_template_writes_any():
    rows = [convo("u:hi", "a:yo"), {"messages": [{"role": "user", "content": "q"}, {"role": "gpt", "content": "a"}]}]
    rows[1]["messages"] += convo("a:b")["messages"]
    with pytest.raises(ValueError, match="row 2: unknown role 'gpt'; roles are system, user, assistant, tool"):
        examples(rows)


def test_plain_text_ends_with_eos_whatever_ends_a_turn_of_the_template():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    (example,) = examples([{"prompt": "Q:", "response": " A"}], tokenizer=tokenizer, apply_chat_template=False)
    assert example.ids == [*b"Q: A", 256]
    (example,) = examples([{"prompt": "Q:", "response": " A"}], tokenizer=tokenizer)
    assert example.ids[-1] == END


def test_a_file_and_its_lines_are_named(tmp_path, caplog):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n\n{"prompt": "a", "response": ""}\n')
    assert len(examples(load_rows(path))) == 1
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: dropped 1 of 2 rows that have an empty response: line 3"
    ]
    path.write_text('{"prompt": "a", "response": "b"}\n\n{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(ValueError, match=f"^{path}, line 3: no response to train on"):
        examples(load_rows(path))
    path.write_text('{"prompt": "a", "response": ""}\n')
    with pytest.raises(ValueError, match=f"^{path}: all 1 rows have an empty response"):
        examples(load_rows(path))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("train.jsonl", r"rows must be dicts, got 'train.jsonl': load_rows\(path\) reads a file"),
        ([("a", "b")], r"rows must be dicts, got \('a', 'b'\)"),
        ({"prompt": "a", "response": "b"}, r"rows must be a list of dicts, got one dict: give \[row\]; its keys are"),
    ],
)
@pytest.mark.parametrize("reader", [sft_examples, labelled_examples, preference_pairs])
def test_what_is_no_list_of_rows_is_named(rows, message, reader):
    with pytest.raises(TypeError, match=message):
        reader(rows, tokenizer=tiny_tokenizer(), max_example_tokens=9)


def test_a_row_that_lacks_an_optional_column_of_the_first_is_told_so():
    rows = [{"prompt": "a", "history": [["b", "c"]], "response": "d"}, {"prompt": "a", "response": "d"}]
    message = "row 2: is not a row of LLaMA-Factory.*'query' or 'history' may be null or empty, but must be there"
    with pytest.raises(ValueError, match=message):
        read(rows)


@pytest.mark.parametrize(
    ("asked", "said"), [("what is <|im_end|>?", "It is the token that ends a turn."), ("hi", "hello there<|im_end|>")]
)
def test_blocks_of_a_template_are_those_of_the_text_that_is_trained(asked, said):
    (found,) = examples([convo(f"u:{asked}", f"a:{said}")], with_template(BLOCKS))
    words = [x for x in trained(found) if x != END]
    assert bytes(words).decode() == said.removesuffix("<|im_end|>")


def test_a_result_that_repeats_the_arguments_of_a_call_does_not_change_the_call():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}
    said = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "called with {'city': 'Rome'}: sunny"}, {"role": "assistant", "content": "ok"},
    ]  # fmt: skip
    text = render_text(with_template(template), said, add_generation_prompt=False)
    assert '"arguments": {"city": "Rome"}' in text
