"""examples/compaction.py: what is trained of an episode, and a policy that learns what to write down."""

from __future__ import annotations

import asyncio
import random

import compaction
import pytest

from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rollout.groups import sample_group


def test_summaries_alone_are_masked():
    tokenizer = tiny_tokenizer()
    (prompt,), _ = rl_prompts([compaction.book(1)], tokenizer=tokenizer, max_prompt_tokens=compaction.AT)
    env, trained = compaction.reading(tokenizer), []
    for of_env in (env, compaction.masked(env)):
        reader = compaction.reader(tokenizer, random.Random(0))
        pieces = asyncio.run(sample_group(prompt, [reader], env=of_env))
        assert max(len(t.prompt_ids) + len(t.ids) for t in pieces) <= compaction.AT
        trained.append([tokenizer.decode([i for i, m in zip(t.ids, t.mask, strict=True) if m]) for t in pieces])
    box = trained[0][0].split("<|im_end|>")[-2]
    assert box in {"".join(pair) for pair in zip("ABCD", prompt.row["pages"][0][1::2], strict=True)}
    end = "<|im_end|>"
    assert trained[0][:2] == [f"ok{end}" * 3 + box + end, f"ok{end}" + box + end]
    assert trained[1] == [f"ok{end}" * 3, f"ok{end}", trained[0][2]]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_what_summaries_carry_is_learned_by_training_them():
    shares = compaction.main()
    assert shares["trained"][-1] > 0.9
    assert max(shares["masked"]) < 0.5
