"""The two GRPO loops on a model that learns in seconds: what they log, keep and leave, and that both learn the same."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from dataclasses import replace
from functools import partial
from statistics import stdev

import pytest
import small
import torch
from small import async_grpo, call, tokenizer

from rlkit.controllers import kl_linear
from rlkit.data.prompts import Prompt
from rlkit.loops.grpo import grpo
from rlkit.loops.task import prompt_order
from rlkit.loops.updates import grpo_update
from rlkit.losses import icepop
from rlkit.model.lora import add_lora
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.groups import single_turn
from rlkit.rollout.limits import success_between

SIZES = {**small.SIZES, "layers": 2}
PROMPTS = [Prompt([20 + i, 60], {}, i) for i in range(100)]
CONTROLLER = kl_linear(target=1e-4, rate=0.1)


def small_model():
    return small.small_model(layers=2)


class CopyEngine(small.CopyEngine):
    def __init__(self, **options):
        super().__init__(SIZES, **options)


def ascii_share(completion, row):
    """1 for an answer of plain characters, which a random model writes now and then; it is easy to learn."""
    return sum(map(str.isascii, completion)) / max(1, len(completion))


def run(loop, model, engine, folder, reward=ascii_share, **changes):
    options = {
        "score": scorer(reward, tokenizer=tokenizer(), timeout_s=30.0),
        "output": folder, "steps": 4, "max_new_tokens": 6, "lr_at": lambda step: 3e-3,
        "prompts_per_step": 4, "group_size": 4, "prompts": PROMPTS,
    }  # fmt: skip
    return asyncio.run(call(loop, model, tokenizer(), engine, **options | changes))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def rows_of(folder, kind):
    return {
        int(path.stem[-6:]): [json.loads(line) for line in path.read_bytes().splitlines()]
        for path in sorted((folder / "trajectories").glob(f"{kind}_*.jsonl"))
    }


def test_dynamic_sampling_trains_on_groups_inside_the_range_and_writes_the_others_down(tmp_path):
    def coin(completion, row):
        return float(bytes(completion, "utf8", "ignore")[:1] < b"\x50")

    model = small_model()
    engine = LocalEngine(model, max_len=64)
    run(grpo, model, engine, tmp_path, reward=coin, keep_group=success_between(0.3, 0.8))
    kept, dropped, lines = rows_of(tmp_path, "train"), rows_of(tmp_path, "dropped"), lines_of(tmp_path)
    by_group = [
        (inside, [r["reward"] for r in rows[i : i + 4]])
        for files, inside in ((kept, True), (dropped, False))
        for rows in files.values()
        for i in range(0, len(rows), 4)
    ]
    assert all((0.3 <= sum(rewards) / 4 <= 0.8) == inside for inside, rewards in by_group)
    assert [len(rows) for rows in kept.values()] == [16] * 4
    assert [line["groups/dropped"] * 4 for line in lines] == [len(dropped.get(s, [])) for s in range(1, 5)]
    assert sum(line["groups/dropped"] for line in lines) > 0
    order = [r["group"] for s in range(1, 5) for r in kept[s] + dropped.get(s, [])]
    assert len(order) == 4 * len(set(order)), "sampled = kept + dropped: each prompt of the epoch once"


def test_held_out_prompts_are_sampled_several_times(tmp_path):
    """The mean, and the mean of the best of each prompt, are those of the answers written down."""
    model = small_model()
    options = {"steps": 1, "eval_prompts": PROMPTS[:5], "eval_steps": 1, "eval_samples": 3}
    run(grpo, model, LocalEngine(model, max_len=64), tmp_path, **options)
    for step, line in enumerate(lines_of(tmp_path)):
        rows, by_prompt = rows_of(tmp_path, "eval_sampled")[step], {}
        for row in rows:
            by_prompt.setdefault(row["prompt"], []).append(row["reward"])
        assert sorted(map(len, by_prompt.values())) == [3] * 5
        assert line["eval/sampled"] == pytest.approx(sum(row["reward"] for row in rows) / 15)
        assert line["eval/best"] == pytest.approx(sum(map(max, by_prompt.values())) / 5)
        assert line["eval/best"] > line["eval/sampled"]
        means = [sum(rewards) / 3 for rewards in by_prompt.values()]
        assert line["eval/sampled_se"] == pytest.approx(stdev(means) / 5**0.5)
        assert len(rows_of(tmp_path, "eval_greedy")[step]) == 5


async def unequal(prompt, sample):
    """Answers of up to 2, 10 or 18 tokens, by the prompt."""
    return await single_turn(prompt, lambda ids: sample(ids, max_new_tokens=2 + 8 * (prompt.index % 3)))


async def at_once(prompt, group):
    return [replace(t, reward=float(t.ids[0] % 2)) for t in group]


PARTIAL = {"score": at_once, "env": unequal, "max_new_tokens": 18, "staleness": 0.5, "steps": 6}


def test_partial_rollout_continues_what_it_interrupts(tmp_path):
    model = small_model()
    engine = LocalEngine(model, max_len=64, eos_token_ids=())
    run(grpo, model, engine, tmp_path, journal=True, **PARTIAL)
    lines = lines_of(tmp_path)
    ages = [line["staleness/max"] for line in lines]
    assert ages[0] == 0
    assert max(ages) == 1, "some tokens are one step old, none is older"
    rows = [r for rows in rows_of(tmp_path, "train").values() for r in rows]
    spanning = [r for r in rows if len(r["versions"]) > 1]
    assert spanning
    assert all(r["versions"][-1] - r["versions"][0] == 1 for r in spanning)
    assert all(r["length"] == 2 + 8 * (r["group"] % 3) for r in rows)
    assert max(line["mismatch/abs_max"] for line in lines) > 1e-3, "old tokens are off policy"
    journal = sorted(int(path.stem) for path in (tmp_path / "completions").iterdir())
    assert len(journal) <= 2, "what no checkpoint can ask for any more is deleted"


def test_partial_rollout_judges_what_waits_while_it_trains(tmp_path, monkeypatch):
    """Or the answer of a judge behind HTTP would be read after the step only, and seem to have come too late."""
    order = prompt_order(PROMPTS, seed=0)
    later = {order(place).index for place in range(4, 8)}
    begun, training, judged = asyncio.Event(), threading.Event(), threading.Event()

    async def judge(completion, row, index):
        if index in later:
            begun.set()
            while not training.is_set():
                await asyncio.sleep(0.01)
            judged.set()
        else:
            await begun.wait()
        return float(len(completion) % 2)

    def update(*args, **options):
        training.set()
        assert judged.wait(120)
        return grpo_update(*args, **options)

    monkeypatch.setattr("rlkit.loops.grpo.grpo_update", update)
    model = small_model()
    run(grpo, model, LocalEngine(model, max_len=64), tmp_path, reward=judge, staleness=1.0, steps=1)


def test_masked_old_tokens_make_partial_rollout_on_policy(tmp_path):
    model = small_model()
    engine = LocalEngine(model, max_len=64, eos_token_ids=())
    run(grpo, model, engine, tmp_path, drop_off_policy=True, **PARTIAL)
    lines = lines_of(tmp_path)
    assert max(line["staleness/max"] for line in lines) == 1
    assert max(line["mismatch/abs_max"] for line in lines) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("loop", [grpo, async_grpo])
def test_with_an_adapter_the_kl_is_to_the_model_without_it(tmp_path, loop):
    """Of an adapter that is not 0 from the start, while the engine samples with it."""
    lines = []
    for second in (True, False):
        model = add_lora(small_model(), rank=4)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.fill_(0.01)
        engine = CopyEngine() if loop is async_grpo else LocalEngine(model, max_len=64)
        reference = small_model() if second else model
        changes = {"steps": 2, "kl_coef": 0.1, "reference": reference, "eval_prompts": PROMPTS[:4], "eval_steps": 1}
        changes |= {"staleness": 0.0} if loop is async_grpo else {}
        run(loop, model, engine, tmp_path / str(second), **changes)
        lines.append(lines_of(tmp_path / str(second)))
        with pytest.raises(ValueError, match="ref_sync_steps"):
            run(loop, model, engine, tmp_path / "moves", **changes | {"reference": model, "ref_sync_steps": 1})
    for a, b in zip(*lines, strict=True):
        assert {k: v for k, v in a.items() if "time/" not in k} == {k: v for k, v in b.items() if "time/" not in k}
    assert lines[0][0]["eval/kl"] > 1e-4
    assert lines[0][1]["kl/ref"] > 1e-4


@pytest.mark.slow_cases("grpo1")
@pytest.mark.parametrize("loop", [grpo, async_grpo])
def test_truncated_answers_are_not_trained_on(tmp_path, capsys, loop):
    """No eos, so every answer is truncated: nothing is left to learn from, or to measure, and the weights stay."""
    model, reference = small_model(), small_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    engine = {grpo: LocalEngine, async_grpo: lambda _, **how: CopyEngine(**how)}[loop](model, eos_token_ids=())
    kl = {"kl_coef": 0.1, "controllers": {"kl": CONTROLLER}, "reference": reference}
    run(loop, model, engine, tmp_path, drop_truncated=True, steps=2, **kl)
    for line in lines_of(tmp_path):
        assert all(map(math.isfinite, line.values()))
        assert not {"entropy", "kl/ref", "mismatch/abs_max"} & line.keys()
        assert line["kl/coef"] == 0.1
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert [line["truncated"] for line in lines_of(tmp_path)] == [1.0, 1.0]
    assert lines_of(tmp_path)[0]["length/mean"] == 6
    said = capsys.readouterr().out
    assert said.count("no token of this step is trained on: a limit cut every answer") == 1
    assert "all rewards are equal" not in said


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0.0, 1.0, 2.0])
def test_the_asynchronous_loop_stays_inside_its_budget(tmp_path, staleness):
    model, engine = small_model(), CopyEngine()
    path = run(
        async_grpo, model, engine, tmp_path, staleness=staleness, steps=6, save_steps=2, eval_prompts=PROMPTS[:4],
        eval_steps=3, minibatches=2, correction=partial(icepop, low=0.5, high=5.0),
    )  # fmt: skip
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(7))
    ages = [line["staleness/max"] for line in lines[1:]]
    assert max(ages) <= staleness
    assert (max(ages) > 0) == (staleness > 0)
    assert [line["step"] for line in lines if "eval/greedy" in line] == [0, 3, 6]
    assert sum(len(rows) for rows in rows_of(tmp_path, "train").values()) >= 6 * 16
    own = dict(engine.model.named_parameters())
    assert all(torch.equal(p, own[n]) for n, p in model.named_parameters()), "the engine has the last weights"
    assert (path / "model.safetensors").exists()
    if staleness == 0:
        assert max(line["mismatch/abs_max"] for line in lines[1:]) < 1e-4


def test_at_staleness_0_the_asynchronous_loop_takes_the_steps_of_the_synchronous_one(tmp_path):
    """With the KL to a reference and its evaluation: the same numbers, up to the rounding of another order of sums."""
    runs = {}
    for name, loop, coef in (("sync", grpo, 1.0), ("async", async_grpo, 1.0), ("free", async_grpo, 0.0)):
        model, reference = small_model(), small_model()
        engine = LocalEngine(model, max_len=64) if loop is grpo else CopyEngine()
        run(
            loop, model, engine, tmp_path / name, reference=reference, kl_coef=coef,
            controllers={"kl": CONTROLLER} if coef else {},
            staleness=0.0, eval_prompts=PROMPTS[:6], eval_steps=4, minibatches=2,
        )  # fmt: skip
        runs[name] = lines_of(tmp_path / name)
        before = small_model().state_dict()
        assert all(torch.equal(p, before[n]) for n, p in reference.state_dict().items()), "the reference stays"
    names = ["reward/mean", "kl/ref", "kl/coef", "eval/kl", "grad_norm"]
    for a, b in zip(runs["sync"], runs["async"], strict=True):
        for key in {*names} & {*a, *b}:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-7), (a["step"], key)
    assert runs["async"][-1]["kl/ref"] > 1e-5
    assert abs(runs["free"][-1]["eval/kl"] / runs["async"][-1]["eval/kl"] - 1) > 0.1, "the term does something"
    assert not any("kl/coef" in line for line in runs["free"])
    with pytest.raises(ValueError, match="need a reference model"):
        run(async_grpo, small_model(), CopyEngine(), tmp_path / "none", kl_coef=0.1)


@pytest.mark.slow
def test_the_asynchronous_loop_moves_its_reference_and_resumes_with_it(tmp_path):
    options = {
        "kl_coef": 0.1,
        "controllers": {"kl": CONTROLLER},
        "ref_sync_steps": 2,
        "save_steps": 2,
        "staleness": 0.0,
    }
    model, reference = small_model(), small_model()
    run(async_grpo, model, CopyEngine(), tmp_path / "whole", steps=4, reference=reference, **options)
    assert all(torch.equal(p, model.state_dict()[n]) for n, p in reference.state_dict().items())
    lines = lines_of(tmp_path / "whole")
    coefs = [line["kl/coef"] for line in lines]
    expected = [0.1]
    for line in lines[:-1]:
        error = min(max(line["kl/ref"] / 1e-4 - 1, -0.2), 0.2)
        expected.append(max(0.0, expected[-1] + 0.1 * error))
    assert coefs == pytest.approx(expected)
    assert len(set(coefs)) > 1
    assert lines[2]["kl/ref"] == pytest.approx(0.0, abs=1e-6), "just copied"
    for steps in (2, 4):
        run(
            async_grpo, small_model(), CopyEngine(), tmp_path / "twice", steps=steps, reference=small_model(),
            resume=steps == 4, **options,
        )  # fmt: skip
    again = lines_of(tmp_path / "twice")
    assert [line["kl/coef"] for line in again] == pytest.approx(coefs)
    assert [line["kl/ref"] for line in again] == pytest.approx([line["kl/ref"] for line in lines], abs=1e-6)


@pytest.mark.slow
def test_the_asynchronous_loop_resumes_with_what_it_had_sampled(tmp_path):
    def reward_until(limit):
        count = 0

        def reward(completion, row):
            nonlocal count
            count += 1
            if count > limit:
                raise ZeroDivisionError("killed here")
            return ascii_share(completion, row)

        return reward

    with pytest.raises(Exception, match="killed here"):
        run(async_grpo, small_model(), CopyEngine(), tmp_path, reward=reward_until(70), save_steps=1, steps=7)
    interrupted = lines_of(tmp_path)
    assert 1 <= len(interrupted) < 7
    run(async_grpo, small_model(), CopyEngine(), tmp_path, resume=True, save_steps=1, steps=7)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert lines[: len(interrupted) - 1] == interrupted[:-1] or lines[: len(interrupted)] == interrupted
    assert max(line["staleness/max"] for line in lines) <= 1
    groups = [r["group"] for rows in rows_of(tmp_path, "train").values() for r in rows]
    assert len(groups) == 4 * len(set(groups)), "no group is written twice"


@pytest.mark.slow
def test_asynchronous_and_synchronous_training_learn_alike(tmp_path):
    ends = {}
    for name, loop, engine in (("sync", grpo, None), ("async", async_grpo, CopyEngine())):
        model = small_model()
        engine = engine or LocalEngine(model, max_len=64)
        run(loop, model, engine, tmp_path / name, steps=60, prompts_per_step=8, lr_at=lambda step: 2e-3)
        rewards = [line["reward/mean"] for line in lines_of(tmp_path / name)]
        ends[name] = sum(rewards[:3]) / 3, sum(rewards[-10:]) / 10
    assert ends["sync"][1] > ends["sync"][0] + 0.2
    assert ends["async"][1] == pytest.approx(ends["sync"][1], abs=0.08)
