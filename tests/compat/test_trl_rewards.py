"""TRL's own reward functions, unchanged, against what they return when they are called as TRL calls them."""

from __future__ import annotations

import pytest

from rlkit.compat.rewards import adapted
from rlkit.rewards import Sample, run_reward
from rlkit.rewards.combine import weighted
from rlkit.rewards.rows import check_rows

theirs = pytest.importorskip("trl.rewards", reason="TRL is not installed: pip install --no-deps trl")

PROMPT = [{"role": "user", "content": "48 + 24?"}]
TEXTS = [
    "<think>48 + 24</think>So it is $\\boxed{72}$.",
    "It is $\\boxed{72.0}$.",
    "<think>guess</think>\\boxed{27}",
    "no idea no idea no idea",
]
IDS = [[7] * n for n in (20, 40, 50, 60)]
SOLUTIONS = {"good": "$72$", "unreadable": "nothing"}
FUNCTIONS = {
    "accuracy": theirs.accuracy_reward,
    "reasoning": theirs.reasoning_accuracy_reward,
    "think": theirs.think_format_reward,
    "overlong": theirs.get_soft_overlong_punishment(max_completion_len=50, soft_punish_cache=20),
    "cosine": theirs.get_cosine_scaled_reward(max_len=50),
    "repetition": theirs.get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0),
}


@pytest.mark.parametrize("solution", SOLUTIONS)
async def test_trls_rewards_and_their_weighted_sum(solution):
    rows = [{"prompt": PROMPT, "solution": SOLUTIONS[solution]} for _ in TEXTS]
    samples = [Sample(t, r, 0, {"completion_ids": i}) for t, r, i in zip(TEXTS, rows, IDS)]
    ours = {name: adapted(function) for name, function in FUNCTIONS.items()}
    weights = dict(zip(FUNCTIONS, (1.0, 0.5, 0.25, 2.0, 0.125, 3.0)))
    found = await run_reward(weighted(ours, weights=weights, timeout_s=120), samples, timeout_s=120)
    completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
    given = {"prompts": [PROMPT] * 4, "completions": completions, "completion_ids": IDS}
    given["solution"] = [SOLUTIONS[solution]] * 4
    expected = {name: function(**given) for name, function in FUNCTIONS.items()}
    assert expected["accuracy"] == ([1.0, 1.0, 0.0, 0.0] if solution == "good" else [None] * 4)
    assert expected["overlong"] == [0.0, -0.5, -1.0, -1.0]
    for i, reward in enumerate(found):
        parts = {name: values[i] for name, values in expected.items() if values[i] is not None}
        assert {name: value for name, value in reward.metrics.items() if "/" not in name} == pytest.approx(parts)
        assert reward.reward == pytest.approx(sum(weights[name] * value for name, value in parts.items()))
        assert reward.notes["accuracy/solution"] == SOLUTIONS[solution]
        assert {"accuracy/gold_parsed", "accuracy/answer_parsed"} <= reward.notes.keys()


def test_a_missing_solution_is_known_before_training():
    with pytest.raises(ValueError, match=r"accuracy_rewards\.py:accuracy_reward needs the column 'solution'"):
        check_rows(adapted(theirs.accuracy_reward), [{"prompt": PROMPT, "answer": "72"}])


async def test_a_prompt_that_is_null_beside_messages():
    def wants(prompts, completions, **_kwargs):
        return [float(len(prompt[0]["content"])) for prompt in prompts]

    rows = [{"prompt": None, "messages": PROMPT}, {"prompt": PROMPT, "messages": None}]
    samples = [Sample("a", row, 0) for row in rows]
    assert [r.reward for r in await run_reward(adapted(wants), samples, timeout_s=60)] == [8.0, 8.0]
