"""What becomes of prompts and examples above the limit: dropped, cut, or an error; the tokens counted by hand."""

from __future__ import annotations

import pytest

from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.prompts import prompt_messages, rl_prompts
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rollout.envs.chat import Chat

TOKENIZER = tiny_tokenizer()  # without a template one token per byte
PLAIN = {"tokenizer": TOKENIZER, "apply_chat_template": False}
END = TOKENIZER.eos_token_id
PAIR = {"prompt": "abcd", "chosen": "efg", "rejected": "hi"}
LABELLED = [{"prompt": "abcd", "completion": "efg", "label": True}, {"prompt": "a", "completion": "b", "label": False}]


def made(function, rows, limit, **how):
    name = "max_prompt_tokens" if function is rl_prompts else "max_example_tokens"
    return function(rows, **PLAIN, **{name: limit}, **how)[0]


@pytest.mark.parametrize(("too_long", "left"), [("cut-left", b"cdef"), ("cut-right", b"abcd")])
def test_a_prompt_keeps_one_end(too_long, left, caplog):
    prompts = made(rl_prompts, [{"prompt": "abcdef"}, {"prompt": "xyz"}], 4, too_long=too_long)
    assert [prompt.ids for prompt in prompts] == [[*left], [*b"xyz"]]
    side = "first" if too_long == "cut-left" else "last"
    assert f"1 of 2 prompts that are longer than `max_prompt_tokens` 4 and lose their {side} tokens" in caplog.text


def test_messages_without_a_chat_template_lose_tokens_of_their_last_user_message(caplog):
    row = {"messages": [{"role": "system", "content": "abc"}, {"role": "user", "content": "defghi"}]}
    (prompt,) = made(rl_prompts, [row], 5, too_long="cut-right")
    assert prompt.ids == [*b"abcde"]
    assert "lose the last tokens of the last user message" in caplog.text


def test_an_example_keeps_one_end_and_the_tokens_that_train():
    rows = [{"prompt": "abc", "response": "def"}, {"prompt": "a", "response": "b"}]  # "abcdef" and the end
    (cut, whole) = made(sft_examples, rows, 5, too_long="cut-right")
    assert (cut.ids, cut.mask) == ([*b"abcde"], [False] * 3 + [True] * 2)
    assert whole.ids == [*b"ab", END]
    (cut, _) = made(sft_examples, rows, 5, too_long="cut-left")
    assert (cut.ids, cut.mask) == ([*b"cdef", END], [False] + [True] * 4)


def test_an_example_without_a_trained_token_is_dropped(caplog):
    rows = [{"prompt": "abcdef", "response": "g"}, {"prompt": "a", "response": "b"}]
    assert [x.ids for x in made(sft_examples, rows, 6, too_long="cut-right")] == [[*b"ab", END]]
    assert "dropped 1 of 2 examples that have nothing left to train on" in caplog.text


def test_of_a_pair_the_left_is_the_prompt_and_the_right_the_responses():
    (pair,) = made(preference_pairs, [PAIR], 6, too_long="cut-left")
    assert (pair.prompt, pair.chosen, pair.rejected) == ([*b"cd"], [*b"efg", END], [*b"hi", END])
    (pair,) = made(preference_pairs, [PAIR], 6, too_long="cut-right")
    assert (pair.prompt, pair.chosen, pair.rejected) == ([*b"abcd"], [*b"ef"], [*b"hi"])
    same = PAIR | {"rejected": "eh"}
    assert len(made(preference_pairs, [same, PAIR], 5, too_long="cut-right")) == 1, "both responses would be e"


def test_a_labelled_response_is_cut_alike():
    (cut, _) = made(labelled_examples, LABELLED, 6, too_long="cut-right")
    assert (cut.prompt, cut.response) == ([*b"abcd"], [*b"ef"])
    (cut, _) = made(labelled_examples, LABELLED, 6, too_long="cut-left")
    assert (cut.prompt, cut.response) == ([*b"cd"], [*b"efg", END])


BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
BOS += "{% if add_generation_prompt %}[assistant]{% endif %}"
LONG = "abcdefghij" * 5
SYSTEM = {"role": "system", "content": "SYS"}
ROADS = {
    "string": ({"prompt": LONG}, "[user]{}<|im_end|>[assistant]"),
    "system": (
        {"messages": [SYSTEM, {"role": "user", "content": LONG}]},
        "[system]SYS<|im_end|>[user]{}<|im_end|>[assistant]",
    ),
    "tool": (
        {
            "prompt": [
                {"role": "user", "content": LONG},
                {"role": "assistant", "content": "x"},
                {"role": "tool", "content": "T"},
            ]
        },
        "[user]{}<|im_end|>[assistant]x<|im_end|>[tool]T<|im_end|>[assistant]",
    ),
    "begun": (
        {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "So"}]},
        "[user]{}<|im_end|>[assistant]So",
    ),
}


@pytest.mark.parametrize("too_long", ["cut-left", "cut-right"])
@pytest.mark.parametrize("road", ROADS)
def test_the_text_of_the_last_user_message_is_cut_and_the_rest_stays(road, too_long, caplog):
    """bos, system message, headers, the end of the turn and the generation prompt, and no character more is lost."""
    row, form = ROADS[road]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = BOS, "<|im_start|>"
    around = len(tokenizer.encode("<|im_start|>" + form.format(""), add_special_tokens=False))
    limit = around + 7
    (cut, _) = rl_prompts([row, row], tokenizer=tokenizer, max_prompt_tokens=limit, too_long=too_long)[0]
    kept = LONG[-7:] if too_long == "cut-left" else LONG[:7]
    assert tokenizer.decode(cut.ids) == "<|im_start|>" + form.format(kept)
    assert len(cut.ids) == limit
    assert [m["content"] for m in prompt_messages(cut.row) if m["role"] == "user"] == [kept], (
        "as environments render it"
    )
    assert f"lose the {'first' if too_long == 'cut-left' else 'last'} tokens of the last user message" in caplog.text


def test_a_prompt_whose_text_does_not_fit_at_all_is_dropped(caplog):
    rows = [{"prompt": "hi"}, {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "hi"}]}]
    found = rl_prompts(rows, tokenizer=TOKENIZER, max_prompt_tokens=40, too_long="cut-right")[0]
    assert [prompt.index for prompt in found] == [0]
    assert "dropped 1 of 2 prompts that have nothing left to train on" in caplog.text


def test_a_character_of_several_tokens_is_kept_whole():
    row = {"prompt": "\u00e9" * 20}  # two tokens each
    for limit in (8, 9):
        (cut,) = made(rl_prompts, [row], limit, too_long="cut-left")
        assert TOKENIZER.decode(cut.ids) == "\u00e9" * 4


def test_a_cut_prompt_is_what_environments_sample_after():
    """`Chat` renders the row again, and refuses other tokens than the prompt's."""
    (cut,) = rl_prompts([{"prompt": LONG}], tokenizer=TOKENIZER, max_prompt_tokens=30, too_long="cut-left")[0]
    chat = Chat(cut, lambda *_: None, tokenizer=TOKENIZER)
    assert chat.messages[-1]["content"] == cut.row["prompt"] != LONG


SHORT = {"prompt": "a", "completion": "b", "label": False}


@pytest.mark.parametrize(
    ("function", "rows", "limit"),
    [
        (rl_prompts, [{"prompt": "abc"}, {"prompt": "abcd"}], 3),
        (sft_examples, [SHORT, {"prompt": "abcd", "completion": "efg"}], 6),
        (preference_pairs, [PAIR | {"prompt": "a"}, PAIR], 6),
        (labelled_examples, LABELLED[::-1], 6),
    ],
)
def test_an_error_names_the_first_row(function, rows, limit):
    rows = [
        {key: value for key, value in row.items() if key != "label" or function is labelled_examples} for row in rows
    ]
    with pytest.raises(
        ValueError, match=r"^row 2: \d tokens; 1 of 2 .* are longer than .*`too_long` drop, cut-left or"
    ):
        made(function, rows, limit, too_long="error")


@pytest.mark.parametrize("column", ["messages", "prompt"])
@pytest.mark.parametrize("side", ["cut-left", "cut-right"])
def test_messages_without_a_chat_template_are_cut_as_one_text(side, column):
    rows = [{column: [{"role": "user", "content": "ab" * 50}]}] * 2
    options = {"max_prompt_tokens": 50, "too_long": side, "apply_chat_template": False}
    prompts, dropped = rl_prompts(rows, tokenizer=tiny_tokenizer(), **options)
    assert dropped == 0
    assert all(len(prompt.ids) <= 50 for prompt in prompts)
