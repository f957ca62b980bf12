"""Preference pairs: the tokens of both responses after one prompt, in every format that rows come in."""

from __future__ import annotations

import json
import logging

import pytest

from rlkit.data.examples import Pair, preference_pairs
from rlkit.data.load import load_rows
from rlkit.data.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
START, END, SYSTEM, USER, ASSISTANT, NL = 257, 258, 259, 260, 261, 10


def turn(role, text):
    return [START, role, NL, *text.encode(), END, NL]


HI = [*turn(USER, "hi"), START, ASSISTANT, NL]
YO_NO = Pair(HI, [*b"yo", END], [*b"no!", END])


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def pairs(*rows, max_example_tokens=99, **options):
    return preference_pairs(list(rows), tokenizer=TOKENIZER, max_example_tokens=max_example_tokens, **options)


FORMATS = {
    "strings": {"prompt": "hi", "chosen": "yo", "rejected": "no!"},
    "a conversation before strings": {"messages": [user("hi")], "chosen": "yo", "rejected": "no!"},
    "a message each": {"prompt": [user("hi")], "chosen": [answer("yo")], "rejected": [answer("no!")]},
    "whole conversations": {"chosen": [user("hi"), answer("yo")], "rejected": [user("hi"), answer("no!")]},
    "whole conversations beside the prompt": {
        "prompt": "hi", "chosen": [user("hi"), answer("yo")], "rejected": [user("hi"), answer("no!")],
    },
}  # fmt: skip


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_every_format_gives_the_same_tokens(row):
    assert pairs({**row, "source": "x"}) == ([YO_NO], 0)


def test_the_system_prompt_and_earlier_turns_belong_to_the_prompt():
    rows = {
        "prompt": "hi",
        "chosen": [answer("a"), user("b"), answer("c")],
        "rejected": [answer("a"), user("b"), answer("d")],
    }
    ((pair,), _) = pairs(rows, system_prompt="s")
    before = [*turn(SYSTEM, "s"), *turn(USER, "hi"), *turn(ASSISTANT, "a"), *turn(USER, "b"), START, ASSISTANT, NL]
    assert pair == Pair(before, [*b"c", END], [*b"d", END])


def test_without_a_template_the_texts_are_verbatim():
    ((pair,), _) = pairs({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, apply_chat_template=False)
    assert pair == Pair([*b"2+2="], [*b"4", END], [*b"5", END])


def test_a_pair_that_is_too_long_is_dropped_as_a_whole(caplog):
    long = {"prompt": "hi", "chosen": "yo", "rejected": "n" * 30}
    with caplog.at_level(logging.WARNING):
        kept, dropped = pairs(FORMATS["strings"], long, FORMATS["strings"], max_example_tokens=len(HI) + 4)
    assert (kept, dropped) == ([YO_NO, YO_NO], 1)
    assert "dropped 1 of 3 pairs" in caplog.text
    assert "row 2 (41 tokens)" in caplog.text
    with pytest.raises(ValueError, match="all 1 pairs are longer than `max_example_tokens` 5"):
        pairs(long, max_example_tokens=5)


BAD = {
    "no column 'rejected'; columns found: .'chosen', 'prompt'.; a preference pair": {"prompt": "hi", "chosen": "yo"},
    "column 'rejected' must be a string": {"prompt": "hi", "chosen": "yo", "rejected": None},
    "neither 'messages' nor 'prompt'": {"chosen": "yo", "rejected": "no"},
    "differ before their last message": {
        "chosen": [user("hi"), answer("yo")], "rejected": [user("ho"), answer("no")],
    },
    "the last message of 'chosen' holds tool_calls beside its content": {
        "prompt": "hi", "rejected": [answer("no")], "chosen": [{**answer("yo"), "tool_calls": [{"function": "f"}]}],
    },
    r"content\[0\] is 'image': rlkit reads text only": {
        "prompt": "hi", "chosen": [answer([{"type": "image", "image": "x"}])], "rejected": "no",
    },
    "must end with an assistant message": {"prompt": "hi", "chosen": [user("yo")], "rejected": [answer("no")]},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_a_bad_pair_is_named_with_its_row(message):
    with pytest.raises(ValueError, match=f"row 2.*: .*{message}"):
        pairs(FORMATS["strings"], BAD[message])


EMPTY = {"strings": "", "white space": " \n", "messages": [answer("")], "null content": [answer(None)]}


SCORES = ["chosen_score rejected_score", "score_chosen score_rejected", "chosen-rating rejected-rating"]
SCORES += ["chosen_avg_rating rejected_avg_rating"]


@pytest.mark.parametrize("inside", [dict, lambda of: {"metadata": of}, lambda of: {"info": json.dumps(of)}])
@pytest.mark.parametrize("names", [*map(str.split, SCORES)])
def test_pairs_whose_scores_contradict_them_are_named_once(caplog, names, inside):
    pair = {"prompt": "hi", "chosen": "yo", "rejected": "no!"}
    scores = [(2, 1.5), (1, 9), ("1", "1.5"), (None, 3), ("a", "b"), (1, 1)]
    with caplog.at_level(logging.WARNING, logger="rlkit.data"):
        assert pairs(*({**pair, **inside(dict(zip(names, each, strict=True)))} for each in scores))[1] == 0
    assert [line for line in caplog.messages if "score for" in line] == [
        "kept 2 of 6 pairs that have a lower score for the chosen response than for the rejected one: row 2, row 3"
    ]


def test_pairs_with_a_margin_below_zero_are_named_once(caplog):
    pair = {"prompt": "hi", "chosen": "yo", "rejected": "no!"}
    pairs(*({**pair, "margin": margin} for margin in (1, -0.5, "-2", 0, None, "none", float("nan"))))
    assert [line.rpartition(": ")[2] for line in caplog.messages if "lower score" in line] == ["row 2, row 3"]


def test_the_margin_column_is_read_and_each_row_needs_a_number(caplog):
    pair = {"prompt": "hi", "chosen": "yo", "rejected": "no!"}
    rows = [{**pair, "gap": gap} for gap in (0.5, 2, 0)]
    assert [p.margin for p in pairs(*rows, margin_column="gap")[0]] == [0.5, 2.0, 0.0]
    assert not [line for line in caplog.messages if "gap" in line], "a column that is read is not reported"
    assert [p.margin for p in pairs(*rows)[0]] == [None] * 3
    for wrong, shown in ((None, "None"), ("0.5", "'0.5'"), (float("nan"), "nan")):
        with pytest.raises(
            ValueError, match=rf"^row 4: column 'gap' of --margin-column must hold a number, got \w+ {shown}$"
        ):
            pairs(*rows, {**pair, "gap": wrong}, margin_column="gap")


@pytest.mark.parametrize("nothing", EMPTY.values(), ids=EMPTY)
def test_a_pair_that_teaches_nothing_is_dropped_and_named(caplog, nothing):
    same = {"prompt": "hi", "chosen": "yo", "rejected": "yo"}
    none = {"prompt": "hi", "chosen": nothing, "rejected": "no!"}
    against = {"prompt": "hi", "chosen": "yo", "rejected": nothing}
    if not isinstance(nothing, str):
        none["rejected"], against["chosen"] = [answer("no!")], [answer("yo")]
    kept, num_dropped = pairs(FORMATS["strings"], same, none, against, same)
    assert kept[0] == YO_NO
    assert [(pair.chosen, pair.rejected[-1]) for pair in kept] == [([*b"yo", END], END)] * 2
    assert num_dropped == 3
    assert [r.getMessage() for r in caplog.records] == [
        "dropped 1 of 5 pairs that have an empty chosen response: row 3",
        "dropped 2 of 4 pairs that have the same chosen and rejected response: row 2, row 5",
        "kept 1 of 2 pairs that have an empty rejected response: row 4",
    ]
    for row, why in (
        (same, "the same chosen and rejected"), (none, "an empty chosen"), (against, "an empty rejected"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^all 2 pairs have {why} response; check which columns"):
            pairs(row, row)
    with pytest.raises(ValueError, match=r"^all 1 pairs have the same chosen and rejected response"):
        pairs(none, same)


def test_the_parts_of_a_response_are_its_text():
    parts = [{"type": "text", "text": "y"}, {"type": "text", "text": "o"}]
    assert pairs({"prompt": "hi", "chosen": [answer(parts)], "rejected": [answer("no!")]}) == ([YO_NO], 0)


def test_a_file_and_its_lines_are_named(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,chosen,rejected\nhi,yo,no\nhi,yo,yo\n")
    assert len(pairs(*load_rows(path))[0]) == 1
    rows = load_rows(path)
    rows[1] = {"prompt": "hi", "chosen": "yo"}
    with pytest.raises(ValueError, match=f"^{path}, line 3: no column 'rejected'"):
        preference_pairs(rows, tokenizer=TOKENIZER, max_example_tokens=99)
