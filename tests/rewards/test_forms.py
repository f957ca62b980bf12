# ruff: noqa: E501 (sources, one form a line)
"""Reward functions as users of other libraries write them: what each gives two answers, or the line that refuses it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from rlkit.compat.rewards import adapted
from rlkit.data.load import Rows
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rewards import load_function, scorer
from rlkit.rewards.call import RewardError, Sample, run_reward
from rlkit.rewards.rows import check_rows
from rlkit.rewards.trial import try_reward
from rlkit.rollout.groups import Prompt, sample_group
from rlkit.run.sync import run_sync
from rlkit.scripts import grpo
from rlkit.scripts.cli import run
from rlkit.types import Completion, Trajectory

ANSWERS = ("<answer>4</answer>", "five")
TEXT = {"prompt": "2+2?", "answer": "4", "data_source": "sums", "extra_info": {"split": "train"}, "id": 7}
CHAT = {**TEXT, "prompt": [{"role": "user", "content": "2+2?"}]}
HEAD = """
import asyncio, functools, math, operator, re
import numpy as np
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional
def extract(text):
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found.group(1).strip() if found else ""
"""

# name: (row, source, rewards of ANSWERS)
RUNS = {
    "TRL on messages (its GRPO guide)": (
        CHAT,
        """
def f(prompts, completions, answer, **kwargs) -> list[float]:
    question = prompts[0][-1]["content"]
    responses = [completion[0]["content"] for completion in completions]
    return [2.0 if extract(r) == a and question else 0.0 for r, a in zip(responses, answer)]
""",
        [2, 0],
    ),
    "TRL on strings": (
        TEXT,
        "def f(completions, **kwargs):\n    return [1.0 if re.match(r'^<answer>', c) else -1.0 for c in completions]",
        [1, -1],
    ),
    "TRL on both": (
        TEXT,
        """
def f(completions, answer, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(extract(t) == a) for t, a in zip(texts, answer)]
""",
        [1, 0],
    ),
    "TRL, token ids": (
        TEXT,
        "def f(completion_ids, **kwargs):\n    return [float(len(i)) for i in completion_ids]",
        [19, 5],
    ),
    "TRL, prompts alone": (CHAT, "def f(prompts, **kwargs):\n    return [float(len(p)) for p in prompts]", [1, 1]),
    "TRL, keywords alone": (
        CHAT,
        "def f(**kwargs):\n    return [float(len(c[0]['content'])) for c in kwargs['completions']]",
        [18, 4],
    ),
    "TRL, any arguments": (
        TEXT,
        "def f(*args, **kwargs):\n    return [float(len(c) + len(args)) for c in kwargs['completions']]",
        [18, 4],
    ),
    "TRL, async": (
        TEXT,
        "async def f(completions, **kwargs):\n    await asyncio.sleep(0)\n    return [float(len(c)) for c in completions]",
        [18, 4],
    ),
    "TRL, factory": (
        TEXT,
        """
def make(scale):
    def reward(completions, **kwargs):
        return [scale * len(c) for c in completions]
    return reward
f = make(0.5)
""",
        [9, 2],
    ),
    "TRL, optional trainer_state": (
        TEXT,
        "def f(completions, trainer_state=None, **kwargs):\n    return [float(trainer_state is None)] * len(completions)",
        [1, 1],
    ),
    "TRL, numpy": (
        TEXT,
        "def f(completions, id, **_):\n    return np.array([len(c) for c in completions]) - id",
        [11, -3],
    ),
    "verl": (
        TEXT,
        """
def f(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("sums", {"split": "train"})
    return {"score": float(extract(solution_str) == ground_truth), "acc": True}
""",
        [1, 0],
    ),
    "verl, shorter": (
        TEXT,
        "def f(solution_str, ground_truth, method='strict', **kw):\n    return ground_truth in solution_str",
        [1, 0],
    ),
    "verl, keywords alone": (
        TEXT,
        "def f(**kwargs):\n    return float(kwargs['ground_truth'] in kwargs['solution_str'])",
        [1, 0],
    ),
    "verl, batched": (
        TEXT,
        "def f(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [float(g in s) for s, g in zip(solution_strs, ground_truths)]",
        [1, 0],
    ),
    "OpenRLHF": (
        TEXT,
        "def f(queries, prompts, labels, **kwargs):\n"
        "    return {'rewards': [float(l in q.removeprefix(p)) for q, p, l in zip(queries, prompts, labels)]}",
        [1, 0],
    ),
    "slime": (
        TEXT,
        "async def f(args, sample, **kwargs):\n    return 1 if extract(sample.response) == sample.label else 0",
        [1, 0],
    ),
    "slime, a group": (
        TEXT,
        "async def f(args, samples, **kwargs):\n    return [len(s.response) for s in samples]",
        [18, 4],
    ),
    "RL2, step": (
        TEXT,
        "async def f(state, action, extra_info):\n    return {'reward': float('4' in action), 'next_state': None, 'done': True}",
        [1, 0],
    ),
    "RL2, older step": (
        TEXT,
        "async def f(state, action, answer):\n    return {'reward': float(answer in action), 'next_state': None, 'done': True}",
        [1, 0],
    ),
    "RL2, messages": (TEXT, "def f(messages, answer):\n    return float(answer in messages[-1]['content'])", [1, 0]),
    "rl4llm": (
        TEXT,
        "class F:\n    def __call__(self, messages, ground_truth, **kwargs):\n"
        "        assert messages[0].role == messages[0]['role'] == 'user'\n"
        "        return float(ground_truth in messages[-1].content)\nf = F()",
        [1, 0],
    ),
    "rl4llm, class": (
        TEXT,
        "class f:\n    def __init__(self, name='custom', **kwargs): self.name = name\n"
        "    def __call__(self, messages, ground_truth, **kwargs):\n        return len(messages) + len(self.name)",
        [8, 8],
    ),
    "rl-max": (
        TEXT,
        "class f:\n    def __init__(self, weight=3.0): self.weight = weight\n"
        "    def score(self, prompt, completion, metadata): return len(prompt) + len(completion) + metadata['id']\n"
        "    def normalized_score(self, *given): return self.score(*given) / 2",
        [43.5, 22.5],
    ),
    "own, class": (TEXT, "class f:\n    def __call__(self, completion, row): return len(completion)", [18, 4]),
    "own": (
        TEXT,
        "def f(completion: str, row: dict[str, Any]) -> float:\n    return float(row['answer'] in completion)",
        [1, 0],
    ),
    "own, other names": (TEXT, "def f(model_output, example):\n    return example['answer'] in model_output", [1, 0]),
    "own, names by type": (TEXT, "def f(pupil: str, exercise: dict):\n    return exercise['answer'] in pupil", [1, 0]),
    "own, batched": (
        TEXT,
        "def f(completions, rows):\n    return [r['answer'] in c for c, r in zip(completions, rows)]",
        [1, 0],
    ),
    "own, lambda": (TEXT, "f = lambda c, r: len(c)", [18, 4]),
    "own, partial": (TEXT, "def g(scale, text, row):\n    return scale * len(text)\nf = partial(g, 2)", [36, 8]),
    "own, partial by keyword": (
        TEXT,
        "def g(completion, row, *, scale):\n    return scale * len(completion)\nf = partial(g, scale=2)",
        [36, 8],
    ),
    "own, object": (
        TEXT,
        "class F:\n    def __call__(self, response, item):\n        return len(response)\nf = F()",
        [18, 4],
    ),
    "own, method": (TEXT, "class F:\n    def score(self, _, row):\n        return row['id']\nf = F().score", [7, 7]),
    "own, async": (TEXT, "async def f(response, sample):\n    return len(response)", [18, 4]),
    "own, decorated": (
        TEXT,
        "def logged(g):\n    @functools.wraps(g)\n    def inner(*args, **kwargs):\n        return g(*args, **kwargs)\n    return inner\n"
        "@logged\ndef f(completion, row):\n    return len(completion)",
        [18, 4],
    ),
    "own, more by name": (
        TEXT,
        "def f(completion, row, truncated, completion_ids=()):\n    return len(completion_ids) - truncated",
        [19, 5],
    ),
}
OURS = "write (completion, row)"
HIDES = "def hides(function):\n    def inner(*args, **kwargs):\n        return function(*args, **kwargs)\n    return inner\n"
WRAPS = "reward.py:hides.inner hides the parameters of reward.py:f, which it calls: add @functools.wraps(...) to it"
REFUSED = {
    "verl's manager": ("def f(data, return_dict=False):\n    return 1.0", "verl's reward manager gets a whole batch: give its compute_score"),
    "OpenAI's grader": ("def f(sample, item):\n    return 1.0", "for OpenAI's grader: sample['output_text'] is the completion"),
    "verifiers": ("def f(completion, answer, **kwargs):\n    return 1.0", "for verifiers: the completion is a text, not messages; the answer is row"),
    "verifiers, all": ("def f(prompt, completion, answer, state):\n    return 1.0", OURS),
    "verifiers, state": ("def f(completion, state):\n    return 1.0", OURS),
    "verifiers, info": ("def f(completion, info):\n    return 1.0", OURS),
    "ColossalAI": ("def f(input_ids, gt_answer, response_idx, **kwargs):\n    return 1.0", "for ColossalAI: the completion is a text"),
    "RL2's step of a sample": ("async def f(sample):\n    return {}", "is an environment: give it as --env"),
    "swapped": ("def f(row, completion):\n    return 1.0", "names them ['row', 'completion']: write (completion, row)"),
    "an answer": ("def f(response, answer):\n    return 1.0", "names them ['response', 'answer']: write (completion, row)"),
    "a ground truth": ("def f(response, ground_truth):\n    return 1.0", "the ground truth is row['answer'], or whatever column has it"),
    "an option second": ("def f(text, data=3):\n    return 1.0", "names them ['text', 'data']: write (completion, row)"),
    "lists of texts": ("def f(texts, rows):\n    return [1.0]", "names them ['texts', 'rows']: write (completion, row)"),
    "one argument": ("def f(completion):\n    return 1.0", "must take (completion, row) or (completions, rows), got (completion)"),
    "unknown keywords": ("def f(**kwargs):\n    return 1.0", "must take (completion, row) or (completions, rows), got (**kwargs)"),
    "keywords only": ("def f(*, completion, row):\n    return 1.0", "(completions, rows), got (*, completion, row)"),
    "verl's, wrapped": (HIDES + "@hides\ndef f(data_source, solution_str, ground_truth):\n    return 1.0", WRAPS),
    "TRL's, wrapped": (HIDES + "@hides\ndef f(completions, **kwargs):\n    return [1.0]", WRAPS),
    "unknown names": ("def f(foo, bar):\n    return 1.0", "names them ['foo', 'bar']: write (completion, row); row has all columns"),
    "TRL's state": ("def f(completions, trainer_state, **kwargs):\n    return [1.0]", "requires ['trainer_state'], which only its own library has"),
    "AReaL": (
        "def f(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):\n    return 1.0",
        "requires ['prompt'], which only its own library has",
    ),
    "TRL's messages for strings": (
        "def f(completions, **kwargs):\n    return [len(c[0]['content']) for c in completions]",
        "reward.py:f failed on rows.jsonl, line 1 with a batch of 2 completions: TypeError: string indices must be",
    ),
    "TRL's messages in a prompt": (
        "def f(prompts, completions, **kwargs):\n    for i, p in enumerate(prompts):\n        q = p[-1]['content']\n    return [1.0]",
        "(reward.py, line 12); as in TRL, a completion is a string where the row's prompt is a string",
    ),
    "one letter, of a prompt": ("def f(p, c):\n    return 1.0", "names them ['p', 'c']: write (completion, row)"),
    "one letter, of a row": ("f = lambda r, x: 1.0", "names them ['r', 'x']: write (completion, row)"),
    "one letter, of a text": ("def f(completion, t):\n    return 1.0", "names them ['completion', 't']: write"),
    "a class": (
        "class f:\n    def __init__(self, url, model='m'): ...\n    def __call__(self, completion, row): ...",
        "reward.py:f is a class: write `reward = f(url=...)` in the file, and give --reward reward.py:reward",
    ),
    "a class that fails": (
        "class f:\n    def __init__(self): open('lacks.txt')\n    def __call__(self, completion, row): ...",
        "reward.py:f cannot be made: FileNotFoundError: [Errno 2] No such file or directory: 'lacks.txt'",
    ),
    "rl4llm's transform": (
        "def f(reward_dict):\n    return reward_dict['a']",
        "for rl4llm's reward_transform_fn: give each reward its weight, --reward FILE.py:A=0.7",
    ),
    "a class with a method": (
        "class f:\n    def score(self, completion, row): ...",
        "reward.py:f is a class: write `reward = f().score` in the file",
    ),
    "verl's manager, the class": (
        "class f:\n    def __init__(self, tokenizer, num_examine): ...\n    def __call__(self, data, return_dict=False): ...",
        "reward.py:f is a class; verl's reward manager gets a whole batch: give its compute_score function",
    ),
    "a factory": ("def f(weight=1.0):\n    return 1.0", "(weight=1.0); if it makes the function, write `reward = f(...)`"),
    "a factory of two": ("def f(row=None, text='x'):\n    return 1.0", "if it makes the function, write `reward = f(...)`"),
    "a command line": (
        "import argparse\nargs = argparse.ArgumentParser().parse_args()",
        "reward.py, line 11: the file ends the program (exit code 2) while it is imported: what reads the command line",
    ),
    "a relative import": ("from .other import f", "reward.py, line 10: a relative import finds no package"),
}  # fmt: skip


def of(source, folder):
    path = folder / "reward.py"
    path.write_text(f"{HEAD}{source.strip()}\n")
    return f"{path}:f"


def judged(function, row, answers=ANSWERS):
    """The trajectories of these answers to the row's prompt, judged by the function."""
    tokenizer = tiny_tokenizer()

    def says(text):
        async def sample(prompt_ids, *, max_new_tokens=None):
            ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
            return Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop")

        return sample

    score = scorer(adapted(function), tokenizer=tokenizer, timeout_s=60)
    return asyncio.run(sample_group(Prompt([1], row, 0), [says(text) for text in answers], score=score))


@pytest.mark.parametrize("name", RUNS)
def test_a_function_runs_unchanged(name, tmp_path):
    row, source, expected = RUNS[name]
    assert [t.reward for t in judged(load_function(of(source, tmp_path)), dict(row))] == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_is_refused_in_one_line_before_the_model_is_loaded(name, tmp_path, monkeypatch, capsys):
    source, message = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(TEXT))
    given = ["--model", "none", "--data", "rows.jsonl", "--reward", of(source, tmp_path)]
    monkeypatch.setattr(sys, "argv", ["rlkit grpo", *given])
    with pytest.raises(SystemExit) as ended:
        run(grpo.main, grpo.Args, None, argv=given)
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith(("usage: ", "rlkit grpo: "))
    ]
    assert ended.value.code == 2
    assert line.startswith("error: ")
    assert message in line


def checked(source, row, folder):
    """Load a function and check it on rows, as a script does."""
    check_rows(adapted(load_function(of(source, folder))), Rows([row], source="rows.jsonl", places=(1,)))


def each(expression):
    return f"def f(completions, **kwargs):\n    return [float(bool({expression})) for c in completions]"


READ_AS_TEXTS = [
    each("c.count('a')"),
    each("c.strip()"),
    each("'a' in c"),
    each("len(c)"),
    each("c == 'a'"),
    "def f(completions, answer, **kw):\n    return [float(c != a) for c, a in zip(completions, answer)]",
    "def f(completions, **kw):\n    return [len(completions[i]) / 9 for i in range(len(completions))]",
    "def f(**kwargs):\n    return [float('a' in c) for c in kwargs['completions']]",
    "def f(completions, **kw):\n    out = []\n    for i, c in enumerate(completions):\n        out.append('a' in c)\n    return out",
]


def failures_of(source, row, folder):
    """What a function in TRL's form fails on when it is tried."""
    function = adapted(load_function(of(source, folder)))
    return [error.fix.partition(":")[0] for _, error in run_sync(try_reward(function, [row], timeout_s=60)).failures]


@pytest.mark.parametrize("source", READ_AS_TEXTS)
def test_a_function_that_reads_messages_as_texts_fails_when_it_is_tried(source, tmp_path):
    fixes = failures_of(source, CHAT, tmp_path)
    assert fixes
    assert all(fix.startswith("as in TRL, a completion is a string where the row's prompt is") for fix in fixes)
    assert failures_of(source, TEXT, tmp_path) == []


READ_RIGHT = [
    "def f(completions, **kw):\n    texts = [c[0]['content'] for c in completions]\n    return [len(c) for c in texts]",
    "def f(completions, **kw):\n    completions = [c[0]['content'] for c in completions]\n    return [len(c) for c in completions]",
    "def f(completions, **kw):\n    return [len(c) if isinstance(c, str) else len(c[0]['content']) for c in completions]",
    "def text_of(all):\n    return [c[0]['content'] for c in all]\ndef f(completions, **kw):\n    texts = text_of(completions)\n    return [float('a' in c) for c in texts]",
    "def f(completions, **kw):\n    return [1.0] * len(completions)",
    "def f(completions, **kw):\n    out = []\n    for c in completions:\n        c = c[-1]['content']\n        out.append(len(c))\n    return out",
]


@pytest.mark.parametrize("source", READ_RIGHT)
def test_a_function_that_reads_messages_is_not_refused_nor_warned_of(source, tmp_path, caplog):
    checked(source, CHAT, tmp_path)
    assert failures_of(source, CHAT, tmp_path) == []
    assert not caplog.records


OPENRLHF = "def f(queries, prompts, labels):\n    return [float(len(q.split({})[-1])) for q in queries]"
WARNED = {  # row, source, what is said of it
    "a column that is popped": (
        TEXT, "def f(completions, **kwargs):\n    return [float(len(g)) for g in kwargs.pop('target', ['', ''])]",
        "reward.py:f reads 'target', of which rows.jsonl has no column",
    ),
    "a column with an empty default": (
        TEXT, "def f(completions, answers=(), worth=1.0, **kwargs):\n    return [worth * (c in answers) for c in completions]",
        "reward.py:f reads 'answers', of which rows.jsonl has no column",
    ),
    "a source of verl's that the data has not": (
        {"prompt": "a", "answer": "b"},
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return float(data_source == 'mine')",
        "reward.py:f reads data_source, which is None: the data has no such column",
    ),
    "no such column": (
        TEXT,
        "def f(completions, **kwargs):\n    gold = kwargs.get('target', [''] * 2)\n    return [float(g in c) for c, g in zip(completions, gold)]",
        "reward.py:f reads 'target', of which rows.jsonl has no column; columns found: answer, data_source, extra_info, id, prompt",
    ),
    "a column without a default": (
        TEXT,
        "def f(completions, **kwargs):\n    return [float(g == c) for c, g in zip(completions, kwargs['target'])]",
        "reward.py:f reads 'target', of which rows.jsonl has no column",
    ),
    "a chat header": (TEXT, OPENRLHF.format("'<|im_start|>assistant'"), "looks for '<|im_start|>assistant', which a query"),
    "Llama's header": (TEXT, OPENRLHF.format("'[/INST]'"), "looks for '[/INST]', which a query does not have here"),
    "a mean of the batch": (
        TEXT,
        "def f(queries, prompts, labels):\n    n = torch.tensor([len(q) for q in queries])\n    return n - n.mean()",
        "reward.py:f uses mean, and gets one query per call, as in OpenRLHF 0.11: to compare the answers of a group, write",
    ),
    "a header of the file": (TEXT, "HEAD = 'ASSISTANT:'\n" + OPENRLHF.format("HEAD"), "looks for 'ASSISTANT:'"),
}  # fmt: skip


ITEMS = [
    "def f(prompts, completions, **kw):\n    return [float(len(p[-1])) for p in prompts]",
    each("c[-1]"),
    each("c[0] == '<'"),
    each("c and c[-1]"),
]


@pytest.mark.parametrize("source", ITEMS)
def test_a_character_that_is_read_for_a_message_is_named_when_it_is_tried(source, tmp_path, caplog):
    function = adapted(load_function(of(source, tmp_path)))
    trial = run_sync(try_reward(function, [TEXT], timeout_s=60))
    said = [*caplog.messages, *(f"{error.cause}: {error.fix}" for _, error in trial.failures)]
    assert any(
        "line 11" in line and "reads one character of a completion or prompt: as in TRL" in line for line in said
    )


@pytest.mark.parametrize("expression", ["[c[i] for i in range(len(c))]", "c[:1]", "[*c]", "c.startswith('<')"])
def test_texts_that_are_read_as_texts_are_not_spoken_of(expression, tmp_path, caplog):
    run_sync(try_reward(adapted(load_function(of(each(expression), tmp_path))), [TEXT], timeout_s=60))
    assert "one character" not in caplog.text


@pytest.mark.parametrize("name", WARNED)
def test_what_a_function_may_misread_is_named(name, tmp_path, caplog):
    row, source, said = WARNED[name]
    checked(source, row, tmp_path)
    assert said in caplog.text
    assert len(caplog.records) == 1


ABSENT = {  # what the function asks of its row, and what is not there
    "by get": ("def f(completion, row):\n    return float(row.get('gold') == completion)", "'gold'"),
    "in a helper": ("def gold(r):\n    return r.get('gold', '')\ndef f(completion, row):\n    return float(len(gold(row)))", "'gold'"),
    "by a constant": ("NAME = 'gold'\ndef f(completion, row):\n    return float(NAME in row)", "'gold'"),
    "in an object": (
        "class F:\n    def __call__(self, completion, row):\n        return float(row.pop('gold', '') == completion)\nf = F()",
        "'gold'",
    ),
    "caught": (
        "def f(text, example):\n    try:\n        return float(example['gold'] == text)\n    except KeyError:\n        return 0.0",
        "'gold'",
    ),
    "of each row": (
        "def f(completions, rows):\n    return [float('b' in r and r.get('a', 0) == r['c']) for r in rows]", "'b'",
    ),
}  # fmt: skip
THERE = {  # what looks like a column that is not there, and is none
    "added": "def f(completion, row):\n    row['x'] = 1\n    return row['x']",
    "added where it is not": "def f(completion, row):\n    if 'x' not in row:\n        row['x'] = 1\n    return row['x']",
    "updated": "def f(completion, row):\n    row.update(x=1)\n    return row['x']",
    "another dict": "def f(completion, row):\n    return float(row['extra_info'].get('x', 0))",
    "a copy": "def f(completion, row):\n    return float({**row, 'x': 1}['x'])",
    "this package's columns": "from rlkit.rewards.text import gold_answer\ndef f(completion, row):\n    return len(gold_answer(row))",
    "other samples' fields": "def f(completion, row, **kwargs):\n    return float(kwargs.get('truncated', 0.0))",
}


async def run_on(source, folder):
    function = adapted(load_function(of(source, folder)))
    return await run_reward(function, [Sample("c", dict(TEXT), 0)], timeout_s=5)


@pytest.mark.parametrize("name", ABSENT)
async def test_a_column_that_a_function_asks_for_in_vain_is_named_once(name, tmp_path, caplog):
    source, names = ABSENT[name]
    for _ in range(2):
        await run_on(source.replace("gold", f"gold_{name[-4:].strip()}"), tmp_path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        f" reads {names.replace('gold', f'gold_{name[-4:].strip()}')}, of which the data has no column; found: answer"
        in line
    )


@pytest.mark.parametrize("name", THERE)
async def test_what_is_no_column_of_the_row_is_not_warned_of(name, tmp_path, caplog):
    await run_on(THERE[name], tmp_path)
    assert not caplog.records


AS_COLUMN = [
    "def f(completion, row, answer=None):\n    return float(completion == answer)",
    "def f(completion, row, *, answer=''):\n    return float(completion == answer)",
    "def f(completion, row, **kwargs):\n    return float(completion == kwargs.get('answer'))",
]


@pytest.mark.parametrize("source", AS_COLUMN)
def test_a_column_that_a_function_asks_for_beside_its_row_is_refused(source, tmp_path):
    with pytest.raises(
        TypeError, match=r"f asks for answer, and columns of the data are in the row: read row\['answer'\]"
    ):
        checked(source, TEXT, tmp_path)


TEXTS_AT_RUN_TIME = [
    "def f(completions, **kw):\n    return [float(len(f'{c}')) for c in completions]",
    "def f(completions, **kw):\n    return [*map(len, completions)]",
    "def f(completions, **kw):\n    texts = completions\n    return [float(len(t)) for t in texts]",
    "def g(c):\n    return float(len(str(c)))\ndef f(completions, **kw):\n    return [g(c) for c in completions]",
]


@pytest.mark.parametrize("source", TEXTS_AT_RUN_TIME)
async def test_messages_that_are_used_as_texts_are_an_error(source, tmp_path):
    function = adapted(load_function(of(source, tmp_path)))
    with pytest.raises(RewardError, match="read a completion as a text, and it is a list of messages"):
        await run_reward(function, [Sample("c", dict(CHAT), 0)], timeout_s=5)
    await run_reward(function, [Sample("c", dict(TEXT), 0)], timeout_s=5)


async def test_a_function_that_judges_ids_may_print_its_completions(tmp_path):
    source = "def f(completions, completion_ids, **kw):\n    print(completions[0])\n    return [float(len(x)) for x in completion_ids]"
    function = adapted(load_function(of(source, tmp_path)))
    sample = Sample("c", dict(CHAT), 0, {"completion_ids": [1, 2, 3]})
    assert [x.reward for x in await run_reward(function, [sample], timeout_s=5)] == [3.0]
    source = "def f(completions, completion_ids, **kw):\n    return [float(len(x)) for x in completions]"
    function = adapted(load_function(of(source, tmp_path)))
    with pytest.raises(RewardError, match="read a completion as a text"):
        await run_reward(function, [sample], timeout_s=5)


async def test_rows_of_strings_and_of_messages_get_each_their_form(tmp_path):
    source = "def f(completions, **kw):\n    return [float(len(c if isinstance(c, str) else c[0]['content'])) for c in completions]"
    function = adapted(load_function(of(source, tmp_path)))
    for row in (CHAT, TEXT):
        (reward,) = await run_reward(function, [Sample("four", dict(row), 0)], timeout_s=5)
        assert reward.reward == 4.0


def test_columns_that_are_there_and_plain_queries_are_not_warned_of(tmp_path, caplog):
    checked("def f(completions, **kwargs):\n    return [kwargs.get('id', [0])[0]] * 2", TEXT, tmp_path)
    checked(
        "def f(queries, prompts, labels):\n    return [float(len(q.removeprefix(p))) for q, p in zip(queries, prompts)]",
        TEXT,
        tmp_path,
    )
    assert not caplog.records


FIXES = {  # the line of the function, and the fix
    "a column": ("return row['solution']", "the row has no column 'solution'; columns found: ['answer', 'data_source'"),
    "a key": ("return row['extra_info']['level']", "the row's extra_info has no key 'level'; keys found: ['split']"),
    "a package": ("import rlkit_no_such_package", "install it where rlkit runs"),
    "a name": ("return lenght", "correct this line"),
    "a method": ("return completion.lenght()", "correct this line"),
    "nothing found": ("return re.search('x', 'y').group()", "handle it in the function"),
    "a message": ("return row['prompt'][0]['content']", "the prompt of the row is a string, not a list of messages"),
    "a loop": ("return asyncio.get_event_loop()", "or call asyncio.run(...) in a plain function"),
    "a pickle": ("import pickle; return pickle.dumps(lambda: 1)", "only functions that are at the top level of a file"),
    "an exit": ("exit(1)", "do not call exit() in it"),
    "a dimension": ("return np.array([1.0])", "use .squeeze(-1) on the results"),
}


@pytest.mark.parametrize("name", FIXES)
def test_the_fix_is_that_of_the_error(name, tmp_path):
    line, fix = FIXES[name]
    function = load_function(of(f"def f(completion, row):\n    {line}", tmp_path))
    with pytest.raises(RuntimeError) as raised:
        judged(function, dict(TEXT))
    assert fix in str(raised.value).partition("\n  fix: ")[2]


CHANGES = {
    "own": "def f(completion, row):\n    row['answer'] = row.pop('id'); row['extra_info']['split'] = 'x'\n    return 1.0",
    "async": "async def f(completion, row):\n    row.clear()\n    return 1.0",
    "batched": "def f(completions, rows):\n    [row.clear() for row in rows]\n    return [1.0] * len(rows)",
    "TRL": "def f(prompts, completions, extra_info, **kwargs):\n    prompts[0].append(1); extra_info[0].clear()\n    return [1.0] * 2",
    "verl": "def f(solution_str, ground_truth, extra_info):\n    extra_info.clear()\n    return 1.0",
    "tokens": "def f(completion, row, completion_ids, prompt_ids):\n    completion_ids.clear(); prompt_ids.clear()\n    return 1.0",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_function_cannot_change_the_data_of_the_run(name, tmp_path):
    row = json.loads(json.dumps(CHAT))
    first, second = judged(load_function(of(CHANGES[name], tmp_path)), row)
    assert row == CHAT
    assert (first.reward, len(first.ids), len(second.ids), first.prompt_ids) == (1.0, 19, 5, [1])


def test_an_environment_cannot_change_the_data_of_the_run():
    row = json.loads(json.dumps(CHAT))

    async def env(prompt, sample):
        prompt.row["answer"] = prompt.row.pop("id")
        prompt.row["extra_info"].clear()
        out = await sample(prompt.ids)
        return Trajectory(prompt.ids, out.ids, [True] * len(out.ids), out.logp, out.versions, reward=1.0)

    async def sample(prompt_ids, *, max_new_tokens=None):
        return Completion([5], [0.0], [0], "stop")

    (one,) = asyncio.run(sample_group(Prompt([1], row, 0), [sample], env=env))
    assert (one.reward, row) == (1.0, CHAT)


def test_an_error_names_the_last_line_of_the_users_file(tmp_path):
    source = (
        "import os\ndef f(completion, row):\n    return helper()\ndef helper():\n    return os.environ['MY_REWARD']"
    )
    with pytest.raises(RuntimeError, match=r"KeyError: 'MY_REWARD' \(reward\.py, line 14\)"):
        judged(load_function(of(source, tmp_path)), dict(TEXT))
