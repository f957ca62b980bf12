"""PPO with the settings of the one loop: overlapping, partial rollout, and a reference that follows the policy."""

from __future__ import annotations

import asyncio
import json

import pytest
from small import SIZES, CopyEngine, call, small_model, tokenizer

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model
from rlkit.loops.ppo import ppo
from rlkit.model.heads import load_value_model
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine

PROMPTS = [Prompt([20 + i, 60], {}, i) for i in range(60)]


def run(folder, *, overlap=False, **options):
    """Metric lines of a run of four steps."""
    tiny_model(tokenizer(), **SIZES).save_pretrained(folder / "critic")
    model, critic = small_model(), load_value_model(folder / "critic")
    engine = CopyEngine(eos_token_ids=()) if overlap else LocalEngine(model, max_len=64, eos_token_ids=())
    score = scorer(lambda text, row: sum(map(str.isascii, text)) / 6, tokenizer=tokenizer(), timeout_s=30.0)
    flat = {
        "prompts": PROMPTS, "score": score,
        "output": folder / "run", "steps": 4, "max_new_tokens": 6, "lr": 3e-3, "prompts_per_step": 8, "group_size": 1,
        "overlap": overlap,
    }  # fmt: skip
    asyncio.run(call(ppo, model, critic, tokenizer(), engine, **flat | options))
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_overlap_bounds_the_age_and_corrects_for_it(tmp_path):
    lines = run(tmp_path, overlap=True)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert max(line["staleness/max"] for line in lines) == 1
    assert all(line["groups/ready"] >= 0 for line in lines)
    assert max(line["mismatch/abs_max"] for line in lines) > 1e-4, "older weights sampled some tokens"
    assert (tmp_path / "run/completions").is_dir(), "an asynchronous run keeps what it sampled"
    assert (tmp_path / "run/critic/model.safetensors").exists()


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("drop", [False, True])
def test_partial_rollout_with_and_without_old_tokens(tmp_path, drop):
    async def unequal(prompt, sample):
        from rlkit.rollout.groups import single_turn

        return await single_turn(prompt, lambda ids: sample(ids, max_new_tokens=2 + 8 * (prompt.index % 3)))

    lines = run(tmp_path, env=unequal, max_new_tokens=18, staleness=0.5, drop_off_policy=drop)
    assert max(line["staleness/max"] for line in lines) == 1
    gaps = [line["mismatch/abs_max"] for line in lines if "mismatch/abs_max" in line]
    assert (max(gaps) < 1e-4) == drop


def test_a_reference_that_follows_the_policy(tmp_path):
    lines = run(tmp_path, kl_coef=0.1, ref_sync_steps=2, reference=small_model())
    assert lines[0]["kl/ref"] == pytest.approx(0, abs=1e-9)
    assert lines[1]["kl/ref"] > 1e-6
    assert lines[2]["kl/ref"] == pytest.approx(0, abs=1e-9), "it was copied after the second step"
