"""Forms of row: one check for all of them, and a form is one row of a table."""

from __future__ import annotations

import pytest

from rlkit.compat.rows import FOREIGN, read
from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.forms import Form, Turn
from rlkit.data.load import Rows
from rlkit.data.prompts import rl_prompts
from rlkit.data.rows import read_rows
from rlkit.data.template import Template
from rlkit.data.tiny import tiny_tokenizer
from rlkit.data.turns import CONVERSATION as TURNS
from rlkit.data.turns import LABELLED, PAIR, PROMPT, RESPONSE, SFT, TEXT

TOKENIZER = tiny_tokenizer()
CONVERSATION = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
ROWS = {
    "prompt": {"prompt": "hi"},
    "conversation": {"messages": CONVERSATION},
    "prompt with a response": {"prompt": "hi", "response": "yo"},
    "preference pair": {"prompt": "hi", "chosen": "yo", "rejected": "no"},
    "labelled response": {"prompt": "hi", "completion": "yo", "label": True},
}
FOREIGN_ROWS = {
    "ShareGPT conversation": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    "Alpaca row": {"instruction": "hi", "input": "", "output": "yo"},
    "question with an answer": {"question": "hi", "answer": "yo"},
    "problem with a solution": {"problem": "hi", "solution": "yo"},
    "row of OpenRLHF or slime": {"input": "hi", "output": "yo"},
    "row of LLaMA-Factory": {"prompt": "hi", "query": "", "response": "yo"},
    "row with a context of messages": {"context": CONVERSATION[:1], "completion": "yo"},
    "row with a conversation": {"conversation": [{"input": "hi", "output": "yo"}]},
    "preference row of OpenAI": {
        "input": {"messages": CONVERSATION[:1]},
        "preferred_output": CONVERSATION[1:],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    },
}
SCRIPTS = {
    rl_prompts: (PROMPT,), sft_examples: SFT, preference_pairs: (PAIR,), labelled_examples: (PAIR, LABELLED),
}  # fmt: skip
TEMPLATE = Template(TOKENIZER, None, True, None, None)


@pytest.mark.parametrize("form", [PROMPT, TURNS, RESPONSE, PAIR, LABELLED], ids=lambda form: form.name)
def test_every_form_reads_its_row(form):
    ((turn, *_),) = read_rows([ROWS[form.name]], TEMPLATE, form, max_tokens=1)
    check(turn)


@pytest.mark.parametrize("name", FOREIGN_ROWS)
def test_a_form_of_another_system_is_read_as_one_of_rlkit(name):
    forms = (PAIR,) if name == "preference row of OpenAI" else SFT
    rows = [FOREIGN_ROWS[name]]
    ((turn, *_),) = read_rows(read(rows, *forms), TEMPLATE, *forms, max_tokens=1)
    check(turn)
    assert [*map(dict, read(rows))] == [*map(dict, read(rows, *forms))], "without forms nothing is checked"
    assert rows == [FOREIGN_ROWS[name]]


@pytest.mark.parametrize("first", [{"prompt": "a", "answer": "1"}, {"input": "a"}])
def test_the_first_row_decides_the_form_of_all_prompts(first):
    with pytest.raises(ValueError, match=r"^row 2: .*(all rows must be in one form|write all rows in one form)"):
        read([first, {"question": "b", "answer": "2"}], PROMPT)


def test_every_form_of_another_system_has_a_row_here():
    assert {known.form.name for known in FOREIGN} == {*FOREIGN_ROWS}


@pytest.mark.parametrize("name", FOREIGN_ROWS)
@pytest.mark.parametrize("reader", SCRIPTS)
def test_python_readers_name_the_call_that_reads_rows_of_another_system(reader, name):
    """Rows that have `prompt`, or an answer beside a context, are rlkit's too."""
    options = {"tokenizer": TOKENIZER, ("max_prompt_tokens" if reader is rl_prompts else "max_example_tokens"): 99}
    if reader in (rl_prompts, sft_examples) and name == "row of LLaMA-Factory":
        return
    with pytest.raises(ValueError, match=r"^row 1: .*rlkit.compat.rows.read\(rows\) reads rows of other systems$"):
        reader([FOREIGN_ROWS[name]], **options)


def check(turn):
    assert turn.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert turn.whole.removeprefix(turn.prompt) in ("", "yo", "yo<|im_end|>\n")
    assert not turn.empty


def test_a_text_is_read_without_a_prompt():
    ((turn,),) = read_rows([{"text": "hi"}], TEMPLATE, TEXT, max_tokens=1)
    assert (turn.prompt, turn.whole, turn.empty) == ("", "hi", False)


@pytest.mark.parametrize(
    ("reader", "row", "message"),
    [
        (preference_pairs, "labelled response", "no column 'chosen'.* looks most like a labelled response;"),
        (labelled_examples, "prompt with a response", "no column 'label'.* looks most like a prompt with a response;"),
        (sft_examples, "labelled response", "is a labelled response .*; columns found: .'completion', 'label', "),
        (rl_prompts, "preference pair", None),
    ],
)  # fmt: skip
def test_a_row_of_another_form_is_refused_with_its_columns_and_the_form_it_looks_like(reader, row, message):
    options = {"tokenizer": TOKENIZER, ("max_prompt_tokens" if reader is rl_prompts else "max_example_tokens"): 99}
    rows = Rows([ROWS[row]], source="train.jsonl", places=["line 3"])
    if message is None:
        assert len(reader(read(rows, PROMPT), **options)[0]) == 1, "more columns than a form needs are no error"
    else:
        with pytest.raises(ValueError, match=f"^train.jsonl, line 3: {message}"):
            read(rows, *SCRIPTS[reader])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "hi", "chosen": 3, "rejected": "no"},
            "column 'chosen' must be a string, got 3; columns found: .'cho",
        ),
        (
            {"prompt": "hi", "chosen": CONVERSATION, "rejected": "no"},
            r"must be a string \(messages need a chat template\)",
        ),
        ({"messages": CONVERSATION, "chosen": "yo", "rejected": "no"}, "no column 'prompt'; columns found"),
    ],
)
def test_without_a_chat_template_columns_are_strings(row, message):
    options = {"tokenizer": TOKENIZER, "max_example_tokens": 99, "apply_chat_template": False}
    with pytest.raises(ValueError, match=f"^row 1: .*{message}"):
        preference_pairs([row], **options)


def test_a_null_beside_another_name_of_the_column_is_skipped():
    """Arrow tables fill absent columns with null."""
    rows = [
        {"messages": None, "prompt": "hi", "response": "yo"},
        {"messages": CONVERSATION[:1], "prompt": None, "response": "yo"},
    ]
    first, second = sft_examples(rows, tokenizer=TOKENIZER, max_example_tokens=99)[0]
    assert first == second


def test_a_new_form_is_one_row_of_the_table():
    def instruction(row, place, template):
        prompt = template.text([{"role": "user", "content": row["instruction"]}], place, opened=True)
        return [Turn(place, prompt, prompt + row["output"])]

    form = Form("instruction", (("instruction",), ("output", "answer")), read=instruction)
    ((turn,),) = read_rows([{"instruction": "hi", "output": "yo"}], TEMPLATE, form, max_tokens=1)
    assert turn.whole == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo"
    message = "row 1: neither 'output' nor 'answer' is there; .* an instruction has {instruction, output or answer}"
    with pytest.raises(ValueError, match=message):
        read_rows([{"instruction": "hi"}], TEMPLATE, form, max_tokens=1)


def thinking_tokenizer():
    """A template that writes its argument `enable_thinking` before the assistant's turns, and `note` before all."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ note }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "run<user>hi<assistant>True"),
        ({"enable_thinking": False}, "run<user>hi<assistant>False"),
        ({"enable_thinking": "false"}, "run<user>hi<assistant>False"),  # a cell of a CSV file
        ({"chat_template_kwargs": {"note": "own", "enable_thinking": None}}, "own<user>hi<assistant>True"),
        ({"chat_template_kwargs": '{"note": "own"}'}, "own<user>hi<assistant>True"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True}, "run<user>hi<assistant>False"),
        ({"chat_template_kwargs": None, "enable_thinking": None}, "run<user>hi<assistant>True"),
    ],
)
def test_the_template_arguments_of_a_row_win_over_those_of_the_run(own, expected):
    tokenizer = thinking_tokenizer()
    run = {"tokenizer": tokenizer, "template_args": {"enable_thinking": True, "note": "run"}}
    ((prompt, after), _) = rl_prompts([{"prompt": "hi", **own}, {"prompt": "hi"}], max_prompt_tokens=99, **run)
    ((example, _), _) = sft_examples(
        [{"prompt": "hi", "response": "yo", **own}, ROWS["prompt with a response"]], max_example_tokens=99, **run
    )
    ((pair,), _) = preference_pairs([{**ROWS["preference pair"], **own}], max_example_tokens=99, **run)
    assert tokenizer.decode(prompt.ids) == tokenizer.decode(pair.prompt) == expected
    assert tokenizer.decode(example.ids).startswith(expected + "yo")
    assert tokenizer.decode(after.ids) == "run<user>hi<assistant>True", "the next row has the run's own"


def test_without_a_chat_template_in_the_tokenizer_the_error_says_what_helps():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    for reader, row, limit in [
        (sft_examples, "conversation", "max_example_tokens"), (rl_prompts, "prompt", "max_prompt_tokens"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=r"^row 1: a chat template is needed, and the tokenizer has none: give "):
            reader([ROWS[row]], tokenizer=tokenizer, **{limit: 99})


def test_a_conversation_that_the_assistant_opens_is_read_once():
    opened = [{"role": "assistant", "content": "ask"}, *CONVERSATION]
    ((example,), _) = labelled_examples([{"messages": opened, "label": 1}], tokenizer=TOKENIZER, max_example_tokens=99)
    assert TOKENIZER.decode(example.prompt).count("ask") == 1
    with pytest.raises(ValueError, match="'messages' must end with an assistant message of text that answers another"):
        labelled_examples([{"messages": opened[:1], "label": 1}], tokenizer=TOKENIZER, max_example_tokens=99)
