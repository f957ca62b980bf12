from __future__ import annotations

from rlkit.data import Prompt
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rewards import Sample, score, scorer, with_messages
from rlkit.types import Trajectory

TOKENIZER = tiny_tokenizer()
END = 258


def trajectory(ids, mask=None, **fields):
    mask = [True] * len(ids) if mask is None else mask
    return Trajectory([1, 2], ids, mask, [0.0] * len(ids), [0] * len(ids), **fields)


async def test_scorer_fills_rewards_scores_and_metrics_in():
    def judge(completion, row, truncated, prompt_ids, completion_ids, finish_reason):
        correct = completion == row["answer"]
        return {"reward": correct - truncated, "score": correct, "num": len(prompt_ids) * len(completion_ids)}

    prompt = Prompt([1, 2], {"answer": "ab"}, 7)
    group = [
        trajectory([*b"ab", END], info={"finish_reason": "stop"}),
        trajectory([*b"ab"], truncated=True, info={"finish_reason": "length"}),
        trajectory([*b"ba", END], reward=5.0, info={"finish_reason": "stop"}),
    ]
    out = await scorer(judge, tokenizer=TOKENIZER, timeout_s=5)(prompt, group)
    assert [(t.reward, t.score) for t in out] == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    assert out[0].info == {"finish_reason": "stop", "metrics": {"num": 6.0}}
    assert group[0].info == {"finish_reason": "stop"}
    assert [t.ids for t in out] == [t.ids for t in group]


async def test_the_completion_of_several_turns_is_the_last_sampled_one():
    seen = []

    def judge(completions, rows):
        seen.extend(completions)
        return [0.0] * len(rows)

    ids = [*b"ab", END, *b"tool", *b"cd", END]
    mask = [True] * 3 + [False] * 4 + [True] * 3
    group = [
        trajectory(ids, mask),
        trajectory([*ids, *b"x"], [*mask, False]),
        trajectory([9, 9], [False, False]),
        trajectory([]),
    ]
    await scorer(judge, tokenizer=TOKENIZER, timeout_s=5)(Prompt([1], {}, 0), group)
    assert seen == ["cd", "cd", "", ""]


async def test_a_function_of_messages_and_answer():
    def reward_fn(messages, answer):
        return len(messages) + (messages[-1] == {"role": "assistant", "content": answer}) / 2

    row = {"prompt": "q", "answer": "a"}
    talk = [{"role": "user", "content": "q"}] * 4 + [{"role": "assistant", "content": "b"}]
    items = [Sample("a", row, 0), Sample("b", row, 1)]
    assert [r.reward for r in await score(with_messages(reward_fn), items, timeout_s=5)] == [2.5, 2.0]
    items = [Sample("b", row, 0, {"messages": talk})]
    assert [r.reward for r in await score(with_messages(reward_fn), items, timeout_s=5)] == [5.0]
