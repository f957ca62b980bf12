"""docs/rewards.md and the example rewards: they run, and nothing is missing from the table."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
from pathlib import Path

import pytest

from rlkit.rewards import RewardError, Sample, load_function, run_reward

pytestmark = pytest.mark.usefixtures("new_math_pool")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text()
HELPERS = {
    "text": {
        "first_value",
        "gold_answer",
        "is_blank",
        "no_gold_answer",
        "squad_normalize",
        "repeated_share",
        "last_boxed",
        "final_answer",
        "last_tag",
        "last_number",
        "last_code_block",
    },
    "math": {"equal"},
    "code": {"same_lines", "same_tokens"},
    "judge": {"score_line"},
}


def test_the_code_prints_what_the_page_says():
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (printed,) = re.findall(r"prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "rewards.md", "exec", dont_inherit=True), {"__name__": "page"})
    assert out.getvalue() == printed


async def test_the_function_around_a_scorer_of_a_package(tmp_path):
    pytest.importorskip("if_verifiable")
    *_, code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "around.py").write_text(code)
    asked = ["punctuation:no_comma", "keywords:existence"]
    row = {"key": 1, "prompt": "?", "instruction_id_list": asked, "kwargs": [{}, {"keywords": ["blue"]}]}
    samples = [Sample(text, row, 0, {}) for text in ("a blue sky", "a sky", "a, b")]
    score = load_function(f"{tmp_path}/around.py:score")
    assert [r.reward for r in await run_reward(score, samples, timeout_s=60)] == [1.0, 0.5, 0.0]


async def test_the_reward_of_each_source(tmp_path):
    _, code, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "by_source.py").write_text(code)
    score = load_function(f"{tmp_path}/by_source.py:score")
    rows = [{"source": "gsm8k", "answer": "1/2"}, {"source": "squad", "answer": "Paris"}]
    for row, rewards in zip(rows, ([1.0, 0.0], [0.0, 1.0]), strict=True):
        samples = [Sample(text, row, 0, {}) for text in ("\\boxed{0.5}", "Paris")]
        assert [r.reward for r in await run_reward(score, samples, timeout_s=60)] == rewards
    with pytest.raises(RewardError, match="no reward for row 1: gsm8k and squad returned None, and nothing else gives"):
        await run_reward(score, [Sample("x", {"source": "other"}, 0, {})], timeout_s=60)


def test_the_table_has_every_reward_and_no_other():
    listed = set(re.findall(r"^\| `(\w+\.\w+)` \|", PAGE, re.MULTILINE))
    there = set()
    for name in ("math", "code", "text", "judge", "combine"):
        module = importlib.import_module(f"rlkit.rewards.{name}")
        there |= {
            f"{name}.{key}"
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        } - {f"{name}.{key}" for key in HELPERS.get(name, ())}
    assert listed == there


async def test_the_example_of_mathematics():
    function = load_function(f"{ROOT}/examples/math_reward.py:score")
    samples = [
        Sample(f"\\boxed{{{answer}}}", {"answer": "1/2"}, 0, {"completion_ids": [0] * length})
        for answer, length in (("0.5", 10), ("0.5", 1024), ("2", 10))
    ]
    assert [r.reward for r in await run_reward(function, samples, timeout_s=60)] == [1.0, 0.5, 0.0]


async def test_the_example_of_code():
    function = load_function(f"{ROOT}/examples/code_reward.py:score")
    row = {"test_cases": {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}}
    programs = ["print(sum(map(int, input().split())))", "print(3)"]
    samples = [Sample(f"```python\n{program}\n```", row, 0) for program in programs]
    assert [r.reward for r in await run_reward(function, samples, timeout_s=60)] == [1.0, 0.0]
