from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.rewards import Sample, run_reward
from rlkit.rewards import text as prompts
from rlkit.rewards.text import matches, tag_count, think_answer_tags, think_tags, valid_json

GOOD = "<think>a\n</think>\n<answer>b</answer>"


@pytest.mark.parametrize(
    ("text", "both", "think", "share"),
    [
        (GOOD, 1, 1, 1.0),
        (f"\n {GOOD} \n", 1, 1, 1.0),
        ("<think></think><answer></answer>", 1, 1, 1.0),
        (f"{GOOD}x", 0, 1, 1.0),
        (f"x{GOOD}", 0, 0, 1.0),
        ("<think>a</think>b", 0, 1, 0.5),
        ("<think>a</think> ", 0, 0, 0.5),
        ("<answer>b</answer><think>a</think>", 0, 0, 1.0),
        ("<think>a<answer>b</answer></think>", 0, 0, 1.0),
        ("<think>a<think>c</think></think><answer>b</answer>", 0, 0, 0.5),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0, 1, 0.5),
        ("<think>a</think><answer>b</answer>c</answer>", 0, 1, 0.75),
        ("<think>a</think><answer>b", 0, 1, 0.75),
        ("a</think><answer>b</answer>", 0, 0, 0.75),
        ("", 0, 0, 0.0),
    ],
)
def test_tags(text, both, think, share):
    assert think_answer_tags(text, {}) == both
    assert think_tags(text, {}) == think
    assert tag_count(text, {}) == share


async def test_a_pattern_is_set_by_partial():
    samples = [Sample(text, {}, 0) for text in ("ab\ncd", "ab", "xab\ncdx")]
    rewards = await run_reward(partial(matches, pattern=r"a.*d"), samples, timeout_s=60)
    assert [r.reward for r in rewards] == [1.0, 0.0, 0.0]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_what_json_writes_is_json(value):
    assert valid_json(json.dumps(value, indent=1), {})["reward"] == 1.0
    assert valid_json(f"```json\n{json.dumps(value)}\n```\n", {})["reward"] == 1.0


@pytest.mark.parametrize(
    "text", ["", "NaN", "[1, Infinity]", "{'a': 1}", "[1,]", '{"a": 1} ok', '{"a": 1, "a": 2}', "01", "[" * 100_000]
)
def test_what_is_not_json(text):
    verdict = valid_json(text, {})
    assert verdict["reward"] == 0.0
    assert verdict["reason"]


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ({"name": "a", "n": 3, "x": 0.5}, True),
        ({"name": "a", "n": 3, "x": 2, "more": None}, True),
        ({"name": "a", "n": True, "x": 2}, False),
        ({"name": None, "n": 3, "x": 2}, False),
        ({"name": "a", "n": 3}, False),
        ([1], False),
    ],
)
def test_keys_and_types(value, right):
    types = {"name": str, "n": int, "x": (int, float)}
    assert valid_json(json.dumps(value), {}, types=types)["reward"] == right


def test_each_prompt_names_its_form():
    assert "\\boxed{}" in prompts.BOXED
    for prompt in (prompts.CODE, prompts.FUNCTION):
        assert "```python" in prompt
    example = prompts.THINK_ANSWER.rpartition(": ")[2]
    assert think_answer_tags(example, {}) == 1
