"""The numbers of tokens that trajectories keep: those of the model itself, for a few samples of a few steps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from small import call, small_model, tokenizer

from rlkit.data.prompts import Prompt
from rlkit.loops import token_report
from rlkit.loops.grpo import grpo
from rlkit.loops.token_report import chosen, keeps_tokens, token_streams
from rlkit.model.forward import make_policy
from rlkit.packing import pack, with_streams
from rlkit.rollout.engines.local import LocalEngine
from rlkit.types import Trajectory

WITH_TOOL = Trajectory(
    [60, 61], [20, 21, 22, 23], [True, False, True, True], [-1.0, 0.0, -2.0, -3.0], [2, -1, 2, 3], 1.0
)
CUT = Trajectory([60, 61], [30, 31], [True, True], [-4.0, -5.0], [3, 3], 0.0, truncated=True)
OTHER = Trajectory([62], [40, 41, 42], [True] * 3, [-1.0] * 3, [3] * 3, 0.0)


def test_the_numbers_are_those_of_the_model():
    plain, groups = small_model(), [[OTHER, OTHER], [WITH_TOOL, CUT]]
    batch = pack(groups)
    batch = with_streams(batch, advantages=torch.arange(batch.num_tokens, dtype=torch.float32))
    found = token_streams(make_policy(small_model(), temperature=0.7), batch, groups, max_tokens=8)
    assert {2, 3} < set(found)
    plain.set_attn_implementation("sdpa")
    for place, t in ((2, WITH_TOOL), (3, CUT)):
        got, start, n = found[place], int(batch.cu_seqlens[place]), len(t.ids)
        with torch.no_grad():
            logits = plain(torch.tensor([[*t.prompt_ids, *t.ids]])).logits[0, len(t.prompt_ids) - 1 : -1] / 0.7
        log_probs = logits.double().log_softmax(-1)
        entropy = (log_probs.exp() * -log_probs).sum(-1).tolist()
        logp = [log_probs[i, x].item() for i, x in enumerate(t.ids)]
        ratio = [float(torch.tensor(now - old).exp()) for now, old in zip(logp, t.logp)]
        assert got["entropy"] == pytest.approx([x * m for x, m in zip(entropy, t.mask)], rel=1e-4)
        assert got["ratio"] == pytest.approx([x * m for x, m in zip(ratio, t.mask)], rel=1e-3)
        assert got["logp"] == t.logp
        assert (got["mask"], got["version"]) == ([int(m) for m in t.mask], t.versions)
        assert got["advantage"] == [x * m for x, m in zip(range(start, start + n), t.mask)]


def test_a_batch_of_other_sequences_has_no_numbers():
    assert token_streams(make_policy(small_model()), pack([[CUT]]), [[CUT, CUT]], max_tokens=8) == {}


def test_the_groups_whose_rewards_differ_most_are_kept_best_and_worst_first(monkeypatch):
    def group(*rewards):
        return [Trajectory([1], [2] * 10, [True] * 10, [0.0] * 10, [0] * 10, reward) for reward in rewards]

    groups = [group(1, 1), group(0, 0.5, 0.2, 0.4), group(0, 1), group(float("nan"), 0)]
    assert chosen(groups) == [7, 6, 3, 2, 5, 4]
    monkeypatch.setattr(token_report, "NUM_TOKENS", 40)
    assert chosen(groups) == [7, 6, 3, 2]
    monkeypatch.setattr(token_report, "NUM_TOKENS", 5)
    assert chosen(groups) == [7], "one sample, however long"


@pytest.mark.parametrize("steps", [1, 5, 32, 33, 100, 1000, 9999])
def test_steps_that_keep_tokens_are_few_and_even(steps):
    kept = [step for step in range(1, steps + 1) if keeps_tokens(step, steps=steps)]
    assert {1, steps} <= {*kept}
    assert min(steps, 16) <= len(kept) <= 34
    assert max((b - a for a, b in pairwise(kept)), default=1) <= steps / 16 + 1


async def at_once(prompt, group):
    return [replace(t, reward=float(t.ids[0] % 2)) for t in group]


def test_a_run_keeps_them_and_stays_what_it_is_without(tmp_path, monkeypatch):
    def run(folder):
        model = small_model()
        options = {"score": at_once, "output": folder, "steps": 2, "max_new_tokens": 5, "lr_at": lambda step: 3e-3}
        options |= {"prompts_per_step": 4, "group_size": 4, "minibatches": 2}
        prompts = [Prompt([20 + i, 60], {}, i) for i in range(20)]
        asyncio.run(call(grpo, model, tokenizer(), LocalEngine(model, max_len=64), prompts=prompts, **options))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [json.loads(x) for x in (folder / "trajectories/train_000002.jsonl").read_text().splitlines()]
        return [{k: x for k, x in line.items() if not k.startswith("time/")} for line in lines], rows

    lines, rows = run(tmp_path / "a")
    kept = [row for row in rows if "tokens" in row]
    assert len(kept) == 8, "two groups"
    for row in kept:
        tokens = row["tokens"]
        assert "".join(tokens["text"]) == row["completion"]
        assert len(tokens["text"]) == row["length"] == len(tokens["logp"])
        assert tokens["ratio"] == 1.0 or tokens["ratio"] == pytest.approx([1.0] * row["length"], abs=1e-3)
        assert (tokens["mask"], tokens["version"]) == (1, 1)
        assert tokens["advantage"] == pytest.approx(row["advantage"], abs=1e-3)
    monkeypatch.setattr("rlkit.loops.rl.keeps_tokens", lambda step, *, steps: False)
    assert run(tmp_path / "b") == (lines, [{k: x for k, x in row.items() if k != "tokens"} for row in rows])


def test_the_numbers_are_the_same_where_each_sequence_has_its_prompt():
    groups, found = [[OTHER, OTHER], [WITH_TOOL, CUT]], []
    for shared in (True, False):
        batch = pack(groups, share_prompts=shared)
        batch = with_streams(batch, advantages=torch.where(batch.mask, 0.5, 0.0))
        found.append(token_streams(make_policy(small_model(), temperature=0.7), batch, groups, max_tokens=16))
    assert found[0].keys() == found[1].keys()
    for place, numbers in found[0].items():
        for name, values in numbers.items():
            assert found[1][place][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
