"""Every form of row that docs/data.md lists, from a file to the tokens that each script trains on, and what is refused.

The expected texts are written out by hand in ChatML, as the tiny model's template writes it. The files are read by the
scripts themselves, up to the call of the loop.
"""

from __future__ import annotations

import importlib
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow
import pytest
import screens
import tyro
from pyarrow import parquet

from rlkit.data.tiny import tiny_tokenizer
from rlkit.scripts.cli import on_ranks

TOKENIZER = tiny_tokenizer()
PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
PAIRS, RL = ("dpo", "kto", "reward_model"), ("grpo", "ppo")
END, OPEN = "<|im_end|>", "<|im_start|>assistant\n"
PLAIN = ("--no-chat-template",)


def turn(role, text):
    return f"<|im_start|>{role}\n{text}{END}\n"


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def user(text):
    return said("user", text)


def answer(text, **more):
    return said("assistant", text, **more)


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


HI = turn("user", "hi") + OPEN
YO, NO = f"yo{END}", f"no{END}"
ONCE = [(HI + YO, YO)]  # a supervised example: its text, and the trained part
SYSTEM = turn("system", "be") + HI
BOTH = [turn("user", "a") + OPEN + f"b{END}\n" + HI + YO]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
WITH_TOOL = f"<|im_start|>system\n{json.dumps([TOOL])}{END}\n" + HI
VERL = {
    "data_source": "openai/gsm8k", "prompt": [user("hi")], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "yo"}, "extra_info": {"split": "train", "index": 0},
}  # fmt: skip

# form of docs/data.md, where the row comes from, scripts, row, what the loop gets, flags
CASES = [
    ("prompt", "TRL", RL, {"prompt": "hi", "answer": "yo"}, HI, ()),
    ("prompt", "TRL, messages", RL, {"prompt": [said("system", "be"), user("hi")]}, SYSTEM, ()),
    ("prompt", "verl.parquet", RL, VERL, HI, ()),
    ("prompt", "slime", RL, {"prompt": [user("hi")], "label": "34", "metadata": {"id": 1}}, HI, ()),
    ("prompt", "slime, tools", RL, {"prompt": [user("hi")], "label": "34", "tools": [TOOL]}, WITH_TOOL, ()),
    ("prompt", "tools as text", RL, {"prompt": "hi", "tools": json.dumps([TOOL])}, WITH_TOOL, ()),
    ("prompt", "RL2", RL, {"prompt": "hi", "extra_info": {"answer": "yo"}}, "hi", PLAIN),
    ("prompt", "a pair's", RL, {"prompt": "hi", "chosen": "yo", "rejected": "no"}, HI, ()),
    ("messages", "RL2", RL, {"messages": [user("hi")], "answer": "yo"}, HI, ()),
    ("messages", "RL2, extra_info", RL, {"messages": [user("hi")], "extra_info": {"answer": "yo"}}, HI, ()),
    ("messages", "RL2, no template", RL, {"messages": [said("system", "be "), user("hi")], "answer": "yo"}, "be hi",
     PLAIN),
    ("messages", "ColossalAI", RL, {"messages": user("hi"), "gt_answer": "yo"}, HI, ()),
    ("messages", "ColossalAI, code.parquet", RL,
     {"messages": user("hi"), "test_cases": {"inputs": ["3\n"], "outputs": ["1\n"]}}, HI, ()),
    ("conversation", "TRL", ("sft",), {"messages": [user("hi"), answer("yo")]}, ONCE, ()),
    ("conversation", "verl.parquet", ("sft",), {"messages": [user("hi"), answer("yo")], "enable_thinking": False},
     ONCE, ()),
    ("conversation", "turns", ("sft",), {"messages": [user("a"), answer("b"), user("hi"), answer("yo")]},
     [(BOTH[0], f"b{END}{YO}")], ()),
    ("conversation", "OpenAI, weight", ("sft",),
     {"messages": [user("a"), answer("b", weight=0), user("hi"), answer("yo", weight=1)]}, [(BOTH[0], YO)], ()),
    ("conversation", "slime, step_loss_mask", ("sft",),
     {"messages": [user("a"), answer("b", step_loss_mask=0), user("hi"), answer("yo", step_loss_mask=1)]},
     [(BOTH[0], YO)], ()),
    ("conversation", "TRL, tools", ("sft",), {"messages": [user("hi"), answer("yo")], "tools": [TOOL]},
     [(WITH_TOOL + YO, YO)], ()),
    ("conversation", "prompt beside", ("sft",), {"prompt": "hi", "messages": [user("hi"), answer("yo")]}, ONCE, ()),
    ("conversation", "completion beside", ("sft",),
     {"prompt": "hi", "completion": "yo", "messages": [user("hi"), answer("yo")]}, ONCE, ()),
    ("prompt and response", "RL2", ("sft",), {"prompt": "hi", "response": "yo"}, ONCE, ()),
    ("prompt and response", "RL2, no template", ("sft",), {"prompt": "hi", "response": " yo"},
     [(f"hi {YO}", f" {YO}")], PLAIN),
    ("prompt and response", "TRL", ("sft",), {"prompt": "hi", "completion": "yo"}, ONCE, ()),
    ("prompt and response", "TRL, messages", ("sft",), {"prompt": [user("hi")], "completion": [answer("yo")]}, ONCE,
     ()),
    ("prompt and response", "TRL.csv", ("sft",), {"prompt": "hi", "completion": "yo"}, ONCE, ()),
    ("prompt and response", "label renamed", ("sft",), {"prompt": "hi", "completion": "yo", "label": True}, ONCE,
     ("--rename", "label", "kind")),
    ("text", "TRL", ("sft",), {"text": "hi yo"}, [(f"hi {YO}", f"hi {YO}")], ()),
    ("text", "TRL, no template", ("sft",), {"text": "hi yo"}, [(f"hi {YO}", f"hi {YO}")], PLAIN),
    ("text", "a rendered chat", ("sft",), {"text": HI + YO + "\n"}, [(HI + YO,) * 2], ()),
    ("pair", "TRL", PAIRS, {"prompt": "hi", "chosen": "yo", "rejected": "no"}, [(HI, YO, NO)], ()),
    ("pair", "TRL, no template", PAIRS, {"prompt": "hi", "chosen": " yo", "rejected": " no"},
     [("hi", f" {YO}", f" {NO}")], PLAIN),
    ("pair", "TRL, messages", PAIRS, {"prompt": [user("hi")], "chosen": [answer("yo")], "rejected": [answer("no")]},
     [(HI, YO, NO)], ()),
    ("pair", "RL2", PAIRS, {"messages": [user("hi")], "chosen": "yo", "rejected": "no"}, [(HI, YO, NO)], ()),
    ("pair of conversations", "TRL, RL2, OpenRLHF", PAIRS,
     {"chosen": [user("hi"), answer("yo")], "rejected": [user("hi"), answer("no")]}, [(HI, YO, NO)], ()),
    ("pair of conversations", "prompt beside.parquet", PAIRS,
     {"prompt": "hi", "chosen": [user("hi"), answer("yo")], "rejected": [user("hi"), answer("no")]},
     [(HI, YO, NO)], ()),
    ("pair of texts", "TRL", PAIRS, {"chosen": "The sky is blue.", "rejected": "The sky is green."},
     [("The sky is", f" blue.{END}", f" green.{END}")], PLAIN),
    ("pair of texts", "words that begin alike", PAIRS, {"chosen": "The sky is blue", "rejected": "The sky is black"},
     [("The sky is", f" blue{END}", f" black{END}")], PLAIN),
    ("labelled response", "TRL", ("kto",), {"prompt": "hi", "completion": "yo", "label": True}, [(HI, YO, True)], ()),
    ("labelled response", "TRL, messages", ("kto",),
     {"prompt": [user("hi")], "completion": [answer("no")], "label": False}, [(HI, NO, False)], ()),
    ("labelled response", "text.csv", ("kto",), {"prompt": "hi", "completion": "yo", "label": "true"},
     [(HI, YO, True)], ()),
    ("labelled response", "a conversation", ("kto",), {"messages": [user("hi"), answer("yo")], "label": True},
     [(HI, YO, True)], ()),
    ("ShareGPT", "human, gpt", ("sft",), {"conversations": [human("hi"), gpt("yo")]}, ONCE, ()),
    ("ShareGPT", "user, assistant", ("sft",),
     {"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]}, ONCE, ()),
    ("ShareGPT", "role, content", ("sft",), {"conversations": [user("hi"), answer("yo")]}, ONCE, ()),
    ("ShareGPT", "system and tool.parquet", ("sft",),
     {"conversations": [{"from": "system", "value": "be"}, human("hi"), gpt("a"), {"from": "tool", "value": "3"},
                        gpt("yo")]},
     [(SYSTEM + f"a{END}\n" + turn("tool", "3") + OPEN + YO, f"a{END}{YO}")], ()),
    ("ShareGPT", "system column", ("sft",), {"conversations": [human("hi"), gpt("yo")], "system": "be"},
     [(SYSTEM + YO, YO)], ()),
    ("ShareGPT", "a question", RL, {"conversations": [human("hi")], "answer": "yo"}, HI, ()),
    ("ShareGPT", "a pair", PAIRS, {"conversations": [human("hi")], "chosen": gpt("yo"), "rejected": gpt("no")},
     [(HI, YO, NO)], ()),
    ("ShareGPT", "kto_tag", ("kto",), {"conversations": [human("hi"), gpt("no")], "kto_tag": False},
     [(HI, NO, False)], ()),
    ("Alpaca", "instruction", ("sft",), {"instruction": "hi", "input": "", "output": "yo", "text": "hi yo"}, ONCE, ()),
    ("Alpaca", "input", ("sft",), {"instruction": "add", "input": "1 2", "output": "3"},
     [(turn("user", "add\n1 2") + OPEN + f"3{END}", f"3{END}")], ()),
    ("Alpaca", "system", ("sft",), {"instruction": "hi", "output": "yo", "system": "be"}, [(SYSTEM + YO, YO)], ()),
    ("Alpaca", "history", ("sft",), {"instruction": "hi", "output": "yo", "history": [["a", "b"]]},
     [(BOTH[0], f"b{END}{YO}")], ()),
    ("Alpaca", "a prompt", RL, {"instruction": "add", "input": "1 2", "output": "3"},
     turn("user", "add\n1 2") + OPEN, ()),
    ("Alpaca", "a pair", PAIRS, {"instruction": "hi", "chosen": "yo", "rejected": "no"}, [(HI, YO, NO)], ()),
    ("Alpaca", "kto_tag", ("kto",), {"instruction": "hi", "output": "yo", "kto_tag": True}, [(HI, YO, True)], ()),
    ("question and answer", "GSM8K.parquet", RL, {"question": "hi", "answer": "#### 4"}, HI, ()),
    ("question and answer", "GSM8K, no template", RL, {"question": "hi", "answer": "#### 4"}, "hi", PLAIN),
    ("question and answer", "GSM8K", ("sft",), {"question": "hi", "answer": "yo"}, ONCE, ()),
    ("question and answer", "OpenOrca", ("sft",), {"system_prompt": "be", "question": "hi", "response": "yo"},
     [(SYSTEM + YO, YO)], ()),
    ("question and answer", "Orca, pairs", PAIRS, {"system": "be", "question": "hi", "chosen": "yo", "rejected": "no"},
     [(SYSTEM, YO, NO)], ()),
    ("Alpaca", "Dolly", ("sft",), {"instruction": "add", "context": "1 2", "response": "3", "category": "qa"},
     [(turn("user", "add\n1 2") + OPEN + f"3{END}", f"3{END}")], ()),
    ("prompt and query", "LLaMA-Factory", ("sft",), {"prompt": "add", "query": "1 2", "response": "3"},
     [(turn("user", "add\n1 2") + OPEN + f"3{END}", f"3{END}")], ()),
    ("prompt and query", "LLaMA-Factory, history", ("sft",),
     {"prompt": "hi", "response": "yo", "history": [["a", "b"]]}, [(BOTH[0], f"b{END}{YO}")], ()),
    ("prompt and query", "LLaMA-Factory, a pair", PAIRS,
     {"prompt": "hi", "query": "", "chosen": "yo", "rejected": "no", "system": "be"}, [(SYSTEM, YO, NO)], ()),
    ("context of messages", "ColossalAI", PAIRS,
     {"context": [{"from": "human", "content": "hi"}], "chosen": [{"from": "assistant", "content": "yo"}],
      "rejected": [{"from": "assistant", "content": "no"}]}, [(HI, YO, NO)], ()),
    ("context of messages", "OpenRLHF", RL, {"context_messages": [user("hi")], "label": "4"}, HI, ()),
    ("context of messages", "OpenRLHF", ("sft",), {"context_messages": [user("hi")], "response": "yo"}, ONCE, ()),
    ("conversation in turns", "Capybara", ("sft",), {"conversation": [{"input": "hi", "output": "yo"}]}, ONCE, ()),
    ("conversation in turns", "LMSYS, kto_tag", ("kto",), {"conversation": [user("hi"), answer("yo")], "kto_tag": True},
     [(HI, YO, True)], ()),
    ("preference of OpenAI", "OpenAI", PAIRS,
     {"input": {"messages": [user("hi")]}, "preferred_output": [answer("yo")], "non_preferred_output": [answer("no")]},
     [(HI, YO, NO)], ()),
    ("problem and solution", "MATH", RL, {"problem": "hi", "solution": "yo", "answer": "4", "level": 1}, HI, ()),
    ("problem and solution", "AIME", RL, {"problem": "hi", "answer": 34}, HI, ()),
    ("problem and solution", "MATH", ("sft",), {"problem": "hi", "solution": "yo", "answer": "4"}, ONCE, ()),
    ("input and output", "OpenRLHF, slime", RL, {"input": "hi", "label": "4"}, HI, ()),
    ("input and output", "messages", RL, {"input": [user("hi")], "label": "4"}, HI, ()),
    ("input and output", "OpenRLHF", ("sft",), {"input": "hi", "output": "yo"}, ONCE, ()),
    ("input and output", "OpenRLHF, messages", ("sft",), {"input": [user("hi"), answer("yo")]}, ONCE, ()),
    ("input and output", "OpenRLHF, label", ("kto",), {"input": "hi", "output": "no", "label": 0},
     [(HI, NO, False)], ()),
]  # fmt: skip


def write(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(reward="def score(completion, row):\n    return len(row.get('question', completion)) % 3\n")


@cache
def parsed(script, *flags):
    """The settings of a script's command line; `flags` come last. Its files are given later: parsing takes longest."""
    given = ["--model", "m", "--data", "d", "--device", "cpu", "--steps", "2", "--warmup-steps", "0"]
    if script in RL:
        given += ["--reward", "a:b", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4"]
    else:
        given += ["--batch-size", "2"]
    return tyro.cli(importlib.import_module(f"rlkit.scripts.{script}").Args, args=[*given, *flags])


def call(task, script, path, output, *flags):
    """A script in this process."""
    args = parsed(script, *flags)
    files = {
        "model": replace(args.model, model=str(task / "model")), "data": replace(args.data, data=str(path)),
        "schedule": replace(args.schedule, output=output),
    }  # fmt: skip
    if script in RL:
        files["episodes"] = replace(args.episodes, reward=f"{task / 'reward.py'}:score")
    return on_ranks(importlib.import_module(f"rlkit.scripts.{script}").main, replace(args, **files))


@asynccontextmanager
async def no_engine(*_):
    yield None


def texts(found):
    """What a loop gets, decoded."""

    def text(ids):
        return TOKENIZER.decode(ids)

    if hasattr(found, "mask"):
        return text(found.ids), text([i for i, on in zip(found.ids, found.mask, strict=True) if on])
    if hasattr(found, "desirable"):
        return text(found.prompt), text(found.response), found.desirable
    return text(found.prompt), text(found.chosen), text(found.rejected)


@pytest.fixture
def reading(task, tmp_path, monkeypatch):
    """`reading(script, file, *flags)`: the examples or prompts that the script's loop gets, without a model."""

    def read(script, path, *flags):
        module = importlib.import_module(f"rlkit.scripts.{script}")
        place = {"sft": "sft", "dpo": "preference", "kto": "preference"}.get(script, script)
        caught = []
        if script in RL:
            monkeypatch.setattr(module, "load_models", lambda *_: (None, None, None))
            monkeypatch.setattr("rlkit.scripts.task.open_engine", no_engine)
            at = 4 if script == "ppo" else 3

            async def loop(*args, **_):
                caught.extend(args[at].prompts)

            monkeypatch.setattr("rlkit.model.launch.load_critic", lambda *_, **__: None)
        else:

            def loop(*args, **_):
                caught.extend(args[2])

        monkeypatch.setattr("rlkit.model.launch.report_model", lambda *_, **__: None)
        monkeypatch.setattr("rlkit.model.launch.load_judge", lambda *_, **__: None)
        if hasattr(module, "load_policies"):
            monkeypatch.setattr(module, "load_policies", lambda *_, **__: (None, None))
        monkeypatch.setattr(f"rlkit.loops.{place}.{script}", loop)
        call(task, script, path, tmp_path / "run", *flags)
        return caught

    return read


READ = [(form, origin, script, *rest) for form, origin, scripts, *rest in CASES for script in scripts]


@pytest.mark.parametrize(
    ("form", "origin", "script", "row", "expected", "flags"), READ, ids=[f"{s}-{f}-{o}" for f, o, s, *_ in READ]
)
def test_a_form_is_read_to_these_tokens(reading, tmp_path, form, origin, script, row, expected, flags):
    suffix = Path(origin).suffix if Path(origin).suffix in (".parquet", ".csv") else ".jsonl"
    found = reading(script, write(tmp_path / f"data{suffix}", [row, row]), *flags)
    if script in RL:
        assert [TOKENIZER.decode(prompt.ids) for prompt in found] == [expected] * 2
        if "conversations" not in row:  # their turns are messages from the loading on
            assert row.items() <= found[0].row.items(), "the reward sees the columns as they were"
        assert {"prompt", "messages"} & found[0].row.keys(), "another library's reward finds the prompt"
    elif script == "kto" and expected[0][-1] not in (True, False):
        prompt, chosen, rejected = expected[0]
        assert [*map(texts, found)] == [(prompt, chosen, True), (prompt, rejected, False)] * 2
    else:
        assert [*map(texts, found)] == expected * 2


def test_the_page_lists_these_forms_and_no_others():
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.splitlines() if line.startswith("|")]
    listed = {
        cells[0].strip(): set(re.findall(r"`(\w+)`", cells[2])) for cells in rows if len(cells) == 4 and "`" in cells[1]
    }
    known = {}
    for form, _, script, *_ in READ:
        known.setdefault(form, set()).add(script)
    assert listed == known


RUNS = {
    "sft": {"conversations": [human("hi"), gpt("yo")]},
    "dpo": {"conversations": [human("hi")], "chosen": gpt("yo"), "rejected": gpt("no")},
    "kto": {"input": "hi", "output": "yo", "label": True},
    "reward_model": {"chosen": [user("hi"), answer("yo")], "rejected": [user("hi"), answer("no")]},
    "grpo": {"question": "hi", "answer": "4"},
    "ppo": {"messages": user("hi"), "gt_answer": "4"},
}


@pytest.mark.slow_cases("ppo")
@pytest.mark.parametrize("script", RUNS)
def test_a_run_on_a_file_of_another_library(task, tmp_path, script):
    rows = [RUNS[script] | ({"label": i % 2 == 0} if script == "kto" else {}) for i in range(4)]
    exported = call(task, script, write(tmp_path / "data.jsonl", rows), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2
    assert (exported / "config.json").exists()


GOOD = {"prompt": "hi", "response": "yo"}
STEPS = {"prompt": "hi", "completions": ["a", "b"], "labels": [True, False]}
REFUSED = [  # script, rows, flags, the line of the row, the message
    ("sft", [{"prompt": "hi", "completion": "yo", "label": True}], (), 1,
     "is a labelled response (column 'label' is True), and sft trains on every row; columns found: ['completion', "
     "'label', 'prompt']; rlkit kto reads it, or --rename label OTHER trains all of them"),
    ("sft", [{"input": "hi", "output": "yo", "label": 1}], (), 1,
     "is a labelled response (column 'label' is 1), and sft trains on every row; columns found: ['input', 'label', "
     "'output']; rlkit kto reads it, or --rename label OTHER trains all of them"),
    ("sft", [VERL], (), 1,
     "no response to train on: needs the column 'completion' or 'response', or an assistant message; columns found: "
     "['ability', 'data_source', 'extra_info', 'prompt', 'reward_model']; a column under another name is renamed with "
     "--rename"),
    ("sft", [{"prompt": "hi", "answer": "yo"}], (), 1,
     "no response to train on: needs the column 'completion' or 'response', or an assistant message; columns found: "
     "['answer', 'prompt']; rename columns, e.g. --rename answer response"),
    ("sft", [{"prompt": "hi", "question": "hi", "answer": "yo"}], (), 1,
     "no response to train on: needs the column 'completion' or 'response', or an assistant message; columns found: "
     "['answer', 'prompt', 'question']; rename columns, e.g. --rename answer response"),
    ("sft", [{"conversations": [human("hi"), {"from": "asistant", "value": "yo"}]}], (), 1,
     "unknown role 'asistant', and no message of the role 'assistant' to train on"),
    ("sft", [STEPS], (), 1,
     "no response to train on: needs the column 'completion' or 'response', or an assistant message; columns found: "
     "['completions', 'labels', 'prompt']; the row looks most like a row of stepwise supervision; no rlkit script "
     "trains on labels of steps, and reward_model learns one reward per response"),
    ("reward_model", [STEPS], (), 1,
     "no column 'chosen'; columns found: ['completions', 'labels', 'prompt']; the row looks most like a row of "
     "stepwise supervision; no rlkit script trains on labels of steps, and reward_model learns one reward per "
     "response"),
    ("kto", [STEPS], (), 1,
     "neither 'response' nor 'completion' nor 'messages' is there; columns found: ['completions', 'labels', 'prompt']; "
     "the row looks most like a row of stepwise supervision; no rlkit script trains on labels of steps, and "
     "reward_model learns one reward per response"),
    ("dpo", [{"text": "hi"}], (), 1,
     "no column 'chosen'; columns found: ['text']; the row looks most like a text; rlkit sft reads it"),
    ("grpo", [{"query": "hi"}], (), 1,
     "neither 'messages' nor 'prompt' is there; columns found: ['query']; rename columns, e.g. --rename query "
     "prompt"),
    ("grpo", [{"chosen": "yo", "rejected": "no"}], (), 1,
     "neither 'messages' nor 'prompt' is there; columns found: ['chosen', 'rejected']; the row looks most like a "
     "preference pair; rlkit dpo, kto and reward_model read it"),
    ("dpo", [{"chosen": "a b", "rejected": "a c"}], (), 1,
     "neither 'messages' nor 'prompt' is there; columns found: ['chosen', 'rejected']; give the prompt as 'prompt', or "
     "train on the two as plain text, as TRL does: --no-chat-template, where their common beginning is the prompt"),
    ("dpo", [{"chosen": "yo", "rejected": "no"}], PLAIN, 1,
     "no column 'prompt'; columns found: ['chosen', 'rejected']; chosen and rejected share no beginning"),
    ("sft", [{"messages": [user("hi"), answer("yo")]}], PLAIN, 1,
     "no column 'prompt'; columns found: ['messages']; messages need a chat template: drop --no-chat-template, or give "
     "--chat-template FILE"),
    ("dpo", [{"query": "hi"}], (), 1,
     "no column 'chosen'; columns found: ['query']; a preference pair has {messages or prompt, chosen, rejected}; a "
     "column under another name is renamed with --rename"),
    ("grpo", [{"prompt": "hi", "chat_template_kwargs": [1]}], (), 1,
     "column 'chat_template_kwargs' must be an object like {'enable_thinking': False}, got [1]; columns found: "
     "['chat_template_kwargs', 'prompt']; rename a column of other content with --rename"),
    ("sft", [{**GOOD, "enable_thinking": "no"}], (), 1,
     "column 'enable_thinking' must be true or false, got 'no'; columns found: ['enable_thinking', 'prompt', "
     "'response']; rename a column of other content with --rename"),
    ("grpo", [{"prompt": "what", "messages": [user("hi")]}], (), 1,
     "columns 'messages' and 'prompt' hold different texts (a conversation and a prompt); columns found: "
     "['messages', 'prompt']; rename the one that is not meant, e.g. --rename prompt OTHER"),
    ("sft", [{"messages": [user("hi"), answer("yo")], "completion": "no"}], (), 1,
     "columns 'messages' and 'completion' hold different texts (a conversation and a prompt with a "
     "response); columns found: ['completion', 'messages']; rename the one that is not meant, e.g. --rename completion "
     "OTHER"),
    ("grpo", [{"question": "hi", "answer": "4", "problem": "what", "solution": "yo"}], (), 1,
     "is both a question with an answer (answer, question) and a problem with a solution (answer, problem, solution); "
     "columns found: ['answer', 'problem', 'question', 'solution']; rename what is not meant, e.g. --rename "
     "problem OTHER"),
    ("sft", [{"conversations": [human("hi"), gpt("yo")], "instruction": "what", "output": "no"}], (), 1,
     "is both a ShareGPT conversation (conversations) and an Alpaca row (instruction, output); columns found: "
     "['conversations', 'instruction', 'output']; rename what is not meant, e.g. --rename instruction OTHER"),
    ("grpo", [*[{"question": "hi", "answer": "4"}] * 2, *[{"prompt": "hi"}] * 2], (), 3,
     "is not a question with an answer, as {file}, line 1 is; columns found: ['prompt']; write all rows in one form"),
    ("sft", [GOOD, {"text": "hi"}], (), 2,
     "neither 'messages' nor 'prompt' is there; columns found: ['text']; the row looks most like a text; {file}, line "
     "1 is a prompt with a response, and all rows must be in one form"),
    ("sft", [{"text": "hi"}, GOOD], (), 2,
     "no column 'text'; columns found: ['prompt', 'response']; the row looks most like a prompt with a response; "
     "{file}, line 1 is a text, and all rows must be in one form"),
    ("kto", [{"prompt": "hi", "completion": "yo", "label": True}, {"prompt": "hi", "chosen": "yo", "rejected": "no"}],
     (), 2,
     "neither 'response' nor 'completion' nor 'messages' is there; columns found: ['chosen', 'prompt', 'rejected']; "
     "the row looks most like a preference pair; {file}, line 1 is a labelled response, and all rows must be in one "
     "form"),
    ("sft", [{"question": "hi", "answer": 4}], (), 1,
     "column 'answer' must be a string or a list of at least one message, got 4; columns found: ['answer', "
     "'question']"),
    ("sft", [{"conversations": "hi"}], (), 1,
     "column 'conversations' must be a list of at least one message, got 'hi'; columns found: ['conversations']"),
    ("sft", [{"instruction": 3, "output": "yo", "input": "hi"}], (), 1,
     "cannot be read as an Alpaca row: column 'instruction' must be a string, got 3; columns found: ['input', "
     "'instruction', 'output']"),
    ("sft", [{"messages": [user("hi"), answer("yo", weight=0)]}], (), 1,
     "every assistant message is excluded from the loss: drop the row"),
    ("grpo", [{"prompt": "hi", "tools": ["search"]}], (), 1,
     "column 'tools' must be a list of JSON schemas or its JSON text, got ['search']; columns found: ['prompt', "
     "'tools']; rename a column of other content with --rename tools OTHER"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "rows", "flags", "line", "message"), REFUSED, ids=[f"{i}-{case[0]}" for i, case in enumerate(REFUSED)]
)
def test_what_is_not_understood_ends_in_one_line(task, tmp_path, script, rows, flags, line, message):
    path = write(tmp_path / "data.jsonl", rows)
    said = screens.refused(lambda: call(task, script, path, tmp_path / "run", *flags))
    assert said == f"error: {path}, line {line}: {message.replace('{file}', str(path))}"


def test_wrong_columns_are_refused_before_torch_is_loaded(tmp_path):
    import subprocess
    import sys

    path = write(tmp_path / "data.jsonl", [{"query": "hi"}])
    code = (
        "import sys\nfrom rlkit.compat.rows import read\nfrom rlkit.data.turns import SFT\n"
        "from rlkit.data.load import load_rows\n"
        f"try:\n    read(load_rows({str(path)!r}), *SFT)\nexcept ValueError as error:\n    print(error)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "neither 'messages' nor 'prompt' is there; columns found: ['query']" in done.stdout
