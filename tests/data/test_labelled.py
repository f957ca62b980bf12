"""Labelled responses: the tokens of prompt and response and the label, in every format that rows come in."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from rlkit.data.examples import Labelled, labelled_examples
from rlkit.data.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
START, END, USER, ASSISTANT, NL = 257, 258, 260, 261, 10
HI = [START, USER, NL, *b"hi", END, NL, START, ASSISTANT, NL]
YO, NO = Labelled(HI, [*b"yo", END], True), Labelled(HI, [*b"no!", END], False)


def examples(*rows, max_example_tokens=99, **options):
    return labelled_examples(list(rows), tokenizer=TOKENIZER, max_example_tokens=max_example_tokens, **options)


def messages(text, role="assistant"):
    return [{"role": role, "content": text}]


FORMATS = {
    "strings": {"prompt": "hi", "completion": "yo", "label": True},
    "response": {"prompt": "hi", "response": "yo", "label": 1},
    "a conversation": {"messages": messages("hi", "user"), "response": "yo", "label": True},
    "messages": {"prompt": messages("hi", "user"), "completion": messages("yo"), "label": True},
    "a whole conversation": {"messages": messages("hi", "user") + messages("yo"), "label": True},
    "text of a CSV file": {"prompt": "hi", "completion": "yo", "label": "true"},
    "a digit of a CSV file": {"prompt": "hi", "completion": "yo", "label": " 1"},
}


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_every_format_gives_the_same_tokens(row):
    false = {"True": False, "true": "FALSE", "1": 0, " 1": "0 "}[str(row["label"])]
    assert examples(row, {**row, "label": false, "source": "x"}) == ([YO, Labelled(HI, YO.response, False)], 0)


def test_a_pair_is_two_examples():
    pair = {"prompt": "hi", "chosen": "yo", "rejected": "no!"}
    assert examples(pair, pair) == ([YO, NO, YO, NO], 0)


def test_labels_stay_with_their_responses_where_one_is_too_long(caplog):
    rows = [{"prompt": "hi", "completion": "n" * 30, "label": False}, FORMATS["strings"]]
    with caplog.at_level(logging.WARNING):
        assert examples(*rows, max_example_tokens=len(HI) + 3) == ([YO], 1)
    assert "dropped 1 of 2 examples" in caplog.text
    assert "row 1 (41 tokens)" in caplog.text
    with pytest.raises(ValueError, match="all 2 examples are longer than `max_example_tokens` 5"):
        examples(*rows, max_example_tokens=5)


def test_without_a_template_the_texts_are_verbatim():
    row = {"prompt": "2+2=", "completion": "4", "label": False}
    assert examples(row, apply_chat_template=False) == ([Labelled([*b"2+2="], [*b"4", END], False)], 0)


BAD = {
    "neither 'response' nor 'completion' nor 'messages' is there; columns found: .'answer', 'label', 'prompt'.": {
        "prompt": "hi", "answer": "yo", "label": True,
    },
    "no column 'label'; columns found: .'completion', 'prompt'.": {"prompt": "hi", "completion": "yo"},
    "column 'label' must be true or false, got 'good'": {"prompt": "hi", "completion": "yo", "label": "good"},
    "column 'label' must be true or false, got None": {"prompt": "hi", "completion": "yo", "label": None},
    "column 'label' must be true or false, got 0.5": {"prompt": "hi", "completion": "yo", "label": 0.5},
    "'completion' must be a string": {"prompt": "hi", "completion": 4, "label": True},
    "'messages' must end with an assistant message": {"messages": messages("hi", "user"), "label": True},
    "neither 'messages' nor 'prompt'": {"question": "hi", "completion": "yo", "label": True},
    "neither 'response' nor 'completion' nor 'messages' is there": {"prompt": "hi", "chosen": "yo", "rejected": "no"},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_a_bad_labelled_response_is_named_with_its_row(message):
    with pytest.raises(ValueError, match=f"row 2: .*{message}"):
        examples(FORMATS["strings"], BAD[message])


def test_rows_with_assistant_messages_that_are_not_trained_are_named(caplog):
    two = messages("yo") + messages("ok?", "user") + messages("no!")
    context = [START, USER, NL, *b"hi", END, NL, START, ASSISTANT, NL, *b"yo", END, NL, START, USER, NL, *b"ok?", END]
    last = Labelled([*context, NL, START, ASSISTANT, NL], [*b"no!", END], True)
    excluded = [{**two[0], "weight": 0}, *two[1:]]
    rows = [
        {"prompt": "hi", "completion": two, "label": True},
        {"messages": messages("hi", "user") + two, "label": True},
        {"prompt": "hi", "completion": excluded, "label": True},
        {"messages": messages("hi", "user") + two[:2], "response": "no!", "label": True},
    ]
    assert examples(*rows) == ([last] * 4, 0)
    assert caplog.messages == [
        "the 4 rows are all the same text: each trains as often as it is there",
        "kept 2 of 4 examples that hold several assistant messages, of which only the last is trained: row 1, row 2",
    ]


def test_a_response_that_is_labelled_true_and_false_is_named_and_kept(caplog):
    row, other = FORMATS["strings"], {"prompt": "ho", "completion": "yo", "label": False}
    rows = [row, other, {**FORMATS["messages"], "label": "false"}, row]
    assert examples(*rows)[0] == [
        YO,
        Labelled([*HI[:3], *b"ho", *HI[5:]], YO.response, False),
        replace(YO, desirable=False),
        YO,
    ]
    assert caplog.messages == [
        "kept 3 of 4 examples that have a response that is labelled true and false: row 1, row 3, row 4"
    ]


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="rows is empty"):
        examples()


def test_empty_responses_are_dropped_where_they_are_desirable_and_named(caplog):
    row = FORMATS["strings"]
    good, bad = ({**row, "completion": " ", "label": label} for label in (True, False))
    found, num_dropped = examples(row, good, bad)
    assert found[0] == YO
    assert [(e.response[-1], e.desirable) for e in found] == [(END, True), (END, False)]
    assert num_dropped == 1
    assert [r.getMessage() for r in caplog.records] == [
        "dropped 1 of 3 examples that have an empty response and are desirable: row 2",
        "kept 1 of 3 examples that have an empty response and are undesirable: row 3",
    ]
    with pytest.raises(ValueError, match=r"^all 2 examples have an empty response; check which columns"):
        examples(good, bad)


def test_an_unknown_role_and_a_part_that_is_not_text_are_refused():
    whole = {"messages": [{"role": "human", "content": "hi"}, *messages("yo")], "label": True}
    with pytest.raises(ValueError, match="row 2: unknown role 'human'"):
        examples(FORMATS["strings"], {**whole, "prompt": "hi"})
    image = {"prompt": "hi", "completion": messages([{"type": "image_url", "image_url": "x"}]), "label": True}
    with pytest.raises(ValueError, match=r"row 2: completion\[0\].content\[0\] is 'image_url'"):
        examples(FORMATS["strings"], image)


REVERSED = "rows that have the label true and a lower score than all that have false: "


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        ((9, 8.5, 1, 2), f"kept 2 of 2 {REVERSED}row 3 (1), row 4 (2)"),
        ((None, 8, "1", 2), f"kept 1 of 1 {REVERSED}row 4 (2)"), ((1, 8, 9, 2), ""), ((8, 8, None, None), ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inside", [dict, lambda of: {"metadata": of}])
def test_labels_that_all_scores_contradict_are_named(caplog, scores, line, inside):
    rows = [{"prompt": f"p{i}", "response": "yo", "label": i > 1, **inside({"score": x})} for i, x in enumerate(scores)]
    examples(*rows)
    assert [x for x in caplog.messages if "lower score" in x] == [line] * bool(line)


def test_rows_whose_pairs_are_null_are_labelled():
    rows = [{"prompt": "q", "completion": f"a{i}", "label": i > 0, "chosen": None, "rejected": None} for i in range(2)]
    examples, dropped = labelled_examples(rows, tokenizer=tiny_tokenizer(), max_example_tokens=99)
    assert ([x.desirable for x in examples], dropped) == ([False, True], 0)
