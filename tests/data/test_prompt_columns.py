"""`--prompt`: the prompt of a row as a format string over its columns."""

from __future__ import annotations

import json

import pytest

from rlkit.compat.rows import read
from rlkit.data.load import Rows
from rlkit.data.prompt_columns import columns_in, filled
from rlkit.data.turns import LABELLED, PAIR, PROMPT, SFT
from rlkit.rewards.text import exact_match
from rlkit.scripts.args import Data

SQUAD = {"context": "Mia has {a} cat.", "question": "Who?", "answers": {"text": ["Mia"], "answer_start": [0]}}
ARC = {"question": "Hot?", "choices": {"text": ["ice", "fire"], "label": ["1", "2"]}, "answerKey": "2"}
MMLU = {"question": "2+2?", "choices": ["3", "4"], "answer": 1}


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        ("{context}\n\n{question}", SQUAD, "Mia has {a} cat.\n\nWho?"),
        ("{question}\n{choices}", ARC, "Hot?\n1. ice\n2. fire"),
        ("{question}\n{choices}", MMLU, "2+2?\nA. 3\nB. 4"),
        ("Use {n}, make {t}: {{1}}{note}", {"n": [3, 4], "t": 7.5, "note": None}, "Use [3, 4], make 7.5: {1}"),
        ("{a}{a} {b c}", {"a": "{b c}{0}", "b c": [{"input": "é"}]}, '{b c}{0}{b c}{0} [{"input": "é"}]'),
        ("{a} {b}", {"a": [], "b": True}, " true"),
    ],
)
def test_only_the_template_is_expanded(template, row, expected):
    assert filled(template, row) == expected
    ((read_row),) = read([row], PROMPT, prompt=template)
    assert read_row["prompt"] == expected
    assert read_row.own is row


@pytest.mark.parametrize("template", ["", "text", "{}", "{0:>3}", "{a!r}", "{a", "a}"])
def test_a_template_that_is_none_is_refused(template):
    with pytest.raises(ValueError, match=r"^`prompt` "):
        columns_in(template)


def rows(*given):
    return Rows(given, source="x.jsonl", places=[f"line {i + 1}" for i in range(len(given))])


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (SQUAD, "{contexts}", r"^x.jsonl, line 1: no column 'contexts' for `prompt`; columns found: \['answers', "),
        (SQUAD, "{question.__class__}", r"no column 'question.__class__' for `prompt`"),
        (SQUAD | {"prompt": "Hi"}, "{question}", "column 'prompt' is a prompt, too, .*--rename prompt OTHER"),
        (SQUAD | {"messages": [{"role": "user", "content": "Hi"}]}, "{question}", "column 'messages' is a prompt, too"),
        ({"m": [{"role": "user", "content": "Hi"}]}, "{m}", "column 'm' holds messages"),
        ({"m": ["x"] * 27}, "{m}", "column 'm' has 27 texts, and there are 26 letters"),
    ],
)
def test_what_cannot_be_written_is_one_line_with_the_row(row, template, message):
    with pytest.raises(ValueError, match=message):
        read(rows(row), PROMPT, prompt=template)
    with pytest.raises(ValueError, match=r"^x.jsonl, line 2: no column 'q' for `prompt`"):
        read(rows({"q": "a"}, {"p": "a"}), PROMPT, prompt="{q}")


def test_answers_of_other_forms_are_read_beside_it():
    labelled = {"question": "Who?", "context": "c", "completion": "Mia", "label": True}
    pair = {"question": "Who?", "context": "c", "chosen": "Mia", "rejected": "Bob"}
    template = "{context}: {question}"
    for forms, row, answers in (
        (SFT, {"question": "Who?", "context": "c", "answer": "Mia"}, {"completion": "Mia"}),
        (SFT, {"instruction": "Who?", "context": "c", "question": "Who?", "response": "Mia"}, {"response": "Mia"}),
        ((PAIR, LABELLED), labelled, {"completion": "Mia", "label": True}),
        ((PAIR,), pair, {"chosen": "Mia", "rejected": "Bob"}),
    ):
        (found,) = read([row], *forms, prompt=template)
        assert found["prompt"] == "c: Who?"
        assert answers.items() <= found.items()
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    with pytest.raises(ValueError, match="is a ShareGPT conversation, whose answers are turns: drop `prompt`"):
        read([{"conversations": turns, "context": "c"}], *SFT, prompt="{context}")


def test_the_place_of_a_choice_becomes_its_letter(caplog):
    first, second = read([MMLU, MMLU | {"answer": 0}], PROMPT, prompt="{question}\n{choices}")
    assert (first["answer"], second["answer"]) == ("B", "A")
    assert "the answer 1 is the place of a choice, and is read as its letter, B" in caplog.text
    assert read([MMLU], *SFT, prompt="{question}\n{choices}")[0]["completion"] == "B"
    caplog.clear()
    counted = [MMLU | {"answer": i + 1} for i in range(len(MMLU["choices"]))]
    read(counted, PROMPT, prompt="{question}\n{choices}")
    assert caplog.messages == [
        "the answers are 1 to the number of choices, and stay numbers: of places write the letters A, B, ..."
    ]
    caplog.clear()
    read([*counted, MMLU | {"answer": 0}], PROMPT, prompt="{question}\n{choices}")
    assert caplog.messages == []
    for others in ([MMLU, MMLU | {"answer": 2}], [MMLU | {"answer": "1"}], [MMLU | {"answer": True}]):
        assert read(others, PROMPT, prompt="{question}\n{choices}")[0]["answer"] == others[0]["answer"]
    assert read([MMLU], PROMPT, prompt="{question}")[0]["answer"] == 1


def test_the_flag_has_line_breaks_and_the_readers_name_it(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(SQUAD) + "\n")
    file = str(tmp_path / "x.jsonl")
    ((row,),), _ = Data(file, prompt=r"{context}\n{question}").rows(PROMPT)
    assert row["prompt"] == "Mia has {a} cat.\nWho?"
    assert exact_match("mia", row, column="answers") == 1
    for name, given, flag in (
        ("SQuAD", SQUAD, r"--prompt '\{context\}\\n\\n\{question\}'"),
        ("ARC", ARC, r"--prompt '\{question\}\\n\{choices\}'"),
        ("countdown", {"target": 5, "nums": [2, 3]}, r"--prompt '\.\.\. \{target\} \{nums\}'"),
    ):
        with pytest.raises(ValueError, match=f"{flag}$"):
            read([given], PROMPT)
        assert name
