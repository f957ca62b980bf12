"""`rlkit data`: forms, a rendered row with its mask, lengths, and the rows that are wrong."""

from __future__ import annotations

import json
import re
import sys

import pytest
import screens

from rlkit.scripts import cli


def conversation(question, *answers):
    turns = [{"role": "user", "content": question}]
    for answer in answers:
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    return {"messages": turns[:-1] if answers else turns}


@pytest.fixture(scope="module")
def task(make_task):
    good = [conversation("hi", "a" * (10 * i + 1)) for i in range(10)]
    wrong = [{"messages": []}, {"text": "x"}, conversation("no answer")]
    pairs = [{"prompt": "p", "chosen": "yes", "rejected": "no"}, {"prompt": "p", "chosen": "ja", "rejected": "nein"}]
    return make_task(good=good, mixed=[*good[:2], wrong[0], *good[2:4], *wrong[1:], *good[4:]], pairs=pairs)


@pytest.fixture
def command(task, monkeypatch, capsys):
    monkeypatch.chdir(task)

    def call(*flags):
        ended = 0
        try:
            cli.main(["data", *flags])
        except SystemExit as error:
            ended = error.code
        return ended, capsys.readouterr().out

    return call


def test_a_row_is_shown_with_what_is_trained_and_the_lengths_are_counted(command, monkeypatch):
    ended, out = command("good.jsonl", "--model", "model", "--row", "2", "--max-tokens", "50")
    assert not ended
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«aaaaaaaaaaa<|im_end|>»\n" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[2].startswith(
        "rlkit grpo, ppo no: good.jsonl, line 1: the conversation ends with an assistant message"
    )
    assert [*lines[:2], *lines[3:6]] == [
        "good.jsonl: 10 rows", "columns: messages (list)", "rlkit sft conversation",
        "rlkit dpo, reward_model no: good.jsonl, line 1: no column 'chosen'",
        "rlkit kto no: good.jsonl, line 1: no column 'label'",
    ]  # fmt: skip
    short = 11  # tokens of the shortest: start, user, line, h, i, end, line, start, assistant, line, then a and the end
    assert f"tokens of 10 examples: median {short + 51}, 95% at most {short + 91}, longest {short + 91}" in out
    assert "longer than 50: 6" in out
    bars = [re.findall(r"^(\d+) - (\d+) (\d+) #+$", line) for line in lines]
    assert sum(int(found[0][2]) for found in bars if found) == 10
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32maaaaaaaaaaa<|im_end|>\x1b[0m" in command("good.jsonl", "--model", "model", "--row", "2")[1]


@pytest.mark.parametrize("model", [(), ("--model", "model")])
def test_all_wrong_rows_are_named(model, command):
    ended, out = command("mixed.jsonl", *model)
    assert ended == 1
    named = re.findall(r"^  mixed.jsonl, line (\d+): (.*)$", out, re.MULTILINE)
    assert [number for number, _ in named] == ["3", "6", "7"]
    assert "at least one message" in named[0][1]
    assert "neither 'messages' nor 'prompt'" in named[1][1]
    assert "no response to train on" in named[2][1]
    assert "wrong: 3 of 13 rows" in out
    assert ("tokens of 10 examples" in out) == bool(model)


def test_pairs_show_both_responses_for_the_command_that_is_asked_for(command):
    for flags, answers in (((), ["yes", "no"]), (("--script", "kto", "--row", "2"), ["ja", "nein"])):
        ended, out = command("pairs.jsonl", "--model", "model", *flags)
        assert not ended
        assert re.findall(r"«(.*?)<\|im_end\|>»", out) == answers
    ended, out = command("pairs.jsonl", "--script", "sft")
    assert ended == 1
    assert "rlkit sft                no: pairs.jsonl, line 1: no response" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["gone.jsonl"], "gone.jsonl: no such file"),
        ([], "missing FILE"),
        (["good.jsonl", "--row", "11"], "--row 11: there are 10 rows"),
        (["good.jsonl", "--model", "nowhere"], "model 'nowhere': no folder"),
    ],
)
def test_what_cannot_be_read_is_one_line(flags, message, task, monkeypatch):
    monkeypatch.chdir(task)
    assert message in screens.refused(cli.main, ["data", *flags])


def test_a_column_beside_the_prompt_is_named_once(command, make_task, caplog):
    folder = make_task(rows=[{"prompt": "a", "most": 8}, {"prompt": "b", "most": 8}])
    for _ in range(2):  # and again by the next command
        caplog.clear()
        assert not command(str(folder / "rows.jsonl"), "--model", str(folder / "model"))[0]
        assert [x.getMessage() for x in caplog.records if "most" in x.getMessage()] == [
            f"{folder / 'rows.jsonl'}: column most is not part of the prompt (rewards see all columns)"
        ]


def test_rows_that_sft_refuses_are_listed_with_its_reasons(command, task):
    """Not with those of grpo, which reads no conversation with its answer."""
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (task / "masked.jsonl").write_text(json.dumps({"messages": said, "loss_mask": [0, 1]}) + "\n")
    for model in ((), ("--model", "model")):
        ended, out = command("masked.jsonl", *model)
        assert ended == 1
        assert re.findall(r"^  masked.jsonl, line 1: column 'loss_mask' is \[0, 1\], which excludes", out, re.MULTILINE)


def test_an_argument_of_the_template_that_helps_is_named(command, task):
    """A template that opens <think>, as Nemotron 3's, and rows without reasoning."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>\n' }}{% endif %}"
    )
    (task / "thinks.jinja").write_text(template)
    how = ("good.jsonl", "--model", "model", "--chat-template", "thinks.jinja")
    ended, out = command(*how)
    assert ended == 1
    flag = """--template-args '{"enable_thinking": false}'"""
    assert f"where the answers have no reasoning, {flag}" in out
    assert re.search(r"rlkit sft +no: good.jsonl, line 1: the chat template opens a turn with", out)
    ended, out = command(*how, "--template-args", '{"enable_thinking": false}')
    assert not ended
    assert "<think></think>«a" in out


PAIRS = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(3)]
ASKED = [{"prompt": f"q{i}", "response": f"a{i}"} for i in range(3)]
SAME = "dropped 1 of 4 pairs that have the same chosen and rejected response: line {}"
NO_TEXT = "column 'prompt' must be a string or a list of at least one message, got 5"


@pytest.mark.parametrize(
    ("rows", "verdicts", "shown"),
    [
        ([{"prompt": "q", "chosen": "x", "rejected": "x"}, *PAIRS],
         {"grpo, ppo": "prompt", "dpo, reward_model": f"preference pair; {SAME.format(1)}",
          "kto": f"preference pair; {SAME.format(1)}"}, "line 2, as rlkit dpo reads it"),
        ([*PAIRS, {"prompt": "q", "chosen": "x", "rejected": "x"}],
         {"dpo, reward_model": f"preference pair; {SAME.format(4)}"}, "line 1, as rlkit dpo reads it"),
        ([{"prompt": "q", "response": ""}, *ASKED],
         {"grpo, ppo": "prompt",
          "sft": "prompt with a response; dropped 1 of 4 rows that have an empty response: line 1"},
         "line 2, as rlkit sft reads it"),
        ([{"prompt": "", "response": "x"}, *ASKED],
         {"grpo, ppo": "prompt; dropped 1 of 4 prompts that have no text: line 1", "sft": "prompt with a response"},
         "line 1, as rlkit sft reads it"),
        ([{"prompt": "q", "completion": "", "label": True}, *({**row, "label": 0} for row in ASKED)],
         {"kto": "labelled response; dropped 1 of 4 examples that have an empty response and are desirable: line 1"},
         "line 2, as rlkit kto reads it"),
        ([{"question": f"q{i}", "answer": f"a{i}" if i else None} for i in range(3)],
         {"grpo, ppo": "prompt, from a question with an answer"}, "line 2, as rlkit grpo reads it"),
        ([{"text": ""}, {"text": "abc"}], {"sft": "text; dropped 1 of 2 rows that have no text: line 1"},
         "line 2, as rlkit sft reads it"),
    ],
)  # fmt: skip
def test_a_row_that_is_dropped_decides_for_no_command(command, task, rows, verdicts, shown):
    """The trainers drop it and go on, wherever it stands."""
    (task / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended, out = command("some.jsonl", "--model", "model")
    found = dict(re.findall(r"^  rlkit ([a-z_, ]+?)  +(.*)$", out, re.MULTILINE))
    assert not ended
    assert {name: found[name] for name in verdicts} == verdicts
    assert f"\n{shown}:\n" in out


REPEATED = {"prompt": "What is the capital?", "response": "What is the capital? Rome.", "mood": "x"}


def test_what_is_said_of_the_file_is_not_said_again_of_the_row_that_is_shown(command, task, caplog):
    rows = [REPEATED, {**REPEATED, "prompt": "q"}, {**REPEATED, "response": "<eos>?<eos>", "tone": "y"}]
    (task / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not command("some.jsonl", "--model", "model")[0]
    assert len([line for line in caplog.messages if "repeat the prompt" in line]) == 1
    assert len([line for line in caplog.messages if "column" in line]) == 1


@pytest.mark.parametrize("label", [-1, "", float("nan")])
@pytest.mark.parametrize("at", [0, 1])
def test_labels_with_a_wrong_value_are_shown_as_kto_refuses_them(command, task, caplog, label, at):
    rows = [{"prompt": f"q{i}", "completion": f"a{i}", "label": 1} for i in range(3)]
    rows[at]["label"] = label
    (task / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for model in ((), ("--model", "model")):
        ended, out = command("some.jsonl", *model)
        assert ended == 1
        assert "as rlkit grpo reads it" not in out
        assert "wrong: 1 of 3 rows" in out
        assert "KTO" not in caplog.text  # of a file that kto refuses
        assert f"  some.jsonl, line {at + 1}: column 'label' must be true or false, got {label!r}" in out


@pytest.mark.parametrize("model", [(), ("--model", "model")])
def test_data_of_one_label_are_named_as_kto_names_them(command, task, caplog, model):
    for labels, said in ((["True"] * 3, "desirable"), ([0, 0], "undesirable"), ([1, 0], "")):
        rows = [{"prompt": f"q{i}", "completion": f"a{i}", "label": label} for i, label in enumerate(labels)]
        (task / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert not command("some.jsonl", "--script", "kto", *model)[0]
        line = f"some.jsonl: all {len(labels)} responses are {said}: KTO learns from the contrast"
        assert [x.partition(", so")[0] for x in caplog.messages if "KTO" in x] == [line] * bool(said)
        caplog.clear()


def test_pairs_of_which_one_is_wrong_are_shown_as_dpo_refuses_it(command, task):
    (task / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*PAIRS, {**PAIRS[0], "chosen": 5}]))
    ended, out = command("some.jsonl", "--model", "model")
    assert ended == 1
    assert "line 1, as rlkit dpo reads it" in out
    assert "wrong: 1 of 4 rows" in out


@pytest.mark.parametrize("model", [(), ("--model", "model")])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("bad", "why"), [({"prompt": 5, "response": "x"}, NO_TEXT), ({}, "neither 'messages' nor 'prompt' is there")]
)
def test_a_row_at_which_the_trainers_stop_is_in_every_verdict(command, task, at, bad, why, model):
    rows = [*ASKED[:at], bad, *ASKED[at:]]
    (task / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended, out = command("some.jsonl", *model)
    assert ended == 1
    for name, form in (("grpo, ppo", "prompt"), ("sft", "prompt with a response")):
        line = re.search(rf"^  rlkit {name}  +(.*)$", out, re.MULTILINE)[1]
        assert line == f"{form}, but not all rows: some.jsonl, line {at + 1}: {why}"
    assert "wrong: 1 of 4 rows" in out
    assert (f"line {2 if at == 0 else 1}, as rlkit sft reads it" in out) == bool(model)


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ({name: f"\n\nHuman: Hi\n\nAssistant: {name}" for name in ("chosen", "rejected")}, "--no-chat-template"),
        ({"Messages": [{"role": "user", "content": "Hi"}]}, "--rename Messages messages"),
    ],
)  # fmt: skip
def test_a_file_that_no_command_reads_gets_the_fix_of_the_trainers(command, task, row, fix):
    (task / "some.jsonl").write_text(json.dumps(row))
    ended, out = command("some.jsonl", "--model", "model")
    assert ended == 1
    line = re.search(r"^  rlkit dpo, reward_model  +(.*)$", out, re.MULTILINE)[1]
    assert line.startswith("no: some.jsonl, line 1: ")
    assert fix in line
    assert "columns found" not in line


def test_a_file_of_which_nothing_is_left_is_a_no(command, task):
    rows = [{"prompt": "p", "chosen": "x", "rejected": "x"}] * 3
    (task / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended, out = command("some.jsonl", "--model", "model", "--script", "dpo")
    assert ended == 1
    assert "rlkit dpo, reward_model  no: some.jsonl: all 3 pairs have the same chosen and rejected response" in out
