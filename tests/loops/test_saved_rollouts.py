"""Runs that save what they sample, and runs that train on it without sampling."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from small import call, small_model, tokenizer

from rlkit.data.prompts import Prompt
from rlkit.loops.grpo import grpo
from rlkit.loops.ppo import ppo
from rlkit.model.heads import load_value_model
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine

PROMPTS = [Prompt([20 + i, 60], {"answer": str(i)}, i) for i in range(4)]
BASE = {"steps": 3, "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6, "max_tokens": 64, "lr": 0.02,
        "minibatches": 2, "top_k": 50}  # fmt: skip
calls = 0


def digits(completion, row):
    global calls
    calls += 1
    return {"reward": float(sum(map(ord, completion)) % 7), "half": 0.5}


def run(folder, *, critic=None, model=None, vocabulary=None, **flat):
    """The model that a run has trained, and its metrics without times."""
    model = model or small_model()
    models = (model,) if critic is None else (model, load_value_model(critic))
    engine, reads = LocalEngine(model, max_len=64, tokenizer=tokenizer()), vocabulary or tokenizer()
    task = {"prompts": PROMPTS, "score": scorer(digits, tokenizer=tokenizer(), timeout_s=60), "output": folder}
    asyncio.run(call(ppo if critic else grpo, *models, reads, engine, **BASE | task | flat))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return models, [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def same_weights(a, b):
    pairs = [(x, y) for m, n in zip(a, b, strict=True) for x, y in zip(m.parameters(), n.parameters(), strict=True)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.slow_cases("True")
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("with_critic", [False, True])
def test_the_weights_are_those_of_the_run_that_sampled(with_critic, tmp_path, capsys):
    small_model().save_pretrained(tmp_path / "begin")
    critic = tmp_path / "begin" if with_critic else None
    true, lines = run(tmp_path / "a", critic=critic, save_rollouts=tmp_path / "rollouts")
    num = calls
    models, again = run(tmp_path / "b", critic=critic, from_rollouts=tmp_path / "rollouts")
    assert calls == num  # no answer was judged
    assert same_weights(models, true)
    assert again == lines
    assert not same_weights(models[:1], (small_model(),))
    said = " ".join(capsys.readouterr().out.split())
    assert "from_rollouts: trains on the steps in" in said
    for name in ("train_000001.jsonl", "train_000003.jsonl"):
        texts = [(tmp_path / x / "trajectories" / name).read_text() for x in "ab"]
        assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_resumed_run_goes_on_in_the_folder(tmp_path):
    true, _ = run(tmp_path / "a", save_rollouts=tmp_path / "whole")
    saved = {"save_rollouts": tmp_path / "parts", "save_steps": 1}
    run(tmp_path / "b", **saved, steps=2)
    run(tmp_path / "b", **saved, resume=True)
    files = [path.name for path in sorted((tmp_path / "whole").iterdir())]
    assert files == ["origin.json", "step_000001.jsonl", "step_000002.jsonl", "step_000003.jsonl"]
    assert all((tmp_path / "parts" / name).read_text() == (tmp_path / "whole" / name).read_text() for name in files)
    run(tmp_path / "c", from_rollouts=tmp_path / "parts", save_steps=1, steps=2)
    models, _ = run(tmp_path / "c", from_rollouts=tmp_path / "parts", save_steps=1, resume=True)
    assert same_weights(models, true)


@pytest.mark.usefixtures("no_pictures")
def test_rollouts_of_another_run_are_refused(tmp_path):
    folder = tmp_path / "rollouts"
    run(tmp_path / "a", save_rollouts=folder, steps=1)
    other = tokenizer()
    other.add_tokens(["<new>"])
    wide = small_model(hidden=64)
    for changes, message in (
        ({"model": wide}, r"was sampled by \S+ \(qwen3, 1 layers of width 32, .*\), and this model is .* width 64"),
        ({"vocabulary": other}, "was sampled with another tokenizer"),
        ({"temperature": 0.5}, "was sampled with 1.0, and `temperature` is 0.5 here"),
        ({"group_size": 2}, "was sampled with 4, and `group_size` is 2 here"),
        ({"steps": 2}, r"has no step_000002.jsonl: give `steps` 1"),
        ({"from_rollouts": tmp_path / "a"}, "has no origin.json: give a folder of --save-rollouts"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "b", **{"from_rollouts": folder, "steps": 1} | changes)
        assert not (tmp_path / "b").exists()
    with pytest.raises(ValueError, match="holds the rollouts of a run: give a new folder"):
        run(tmp_path / "b", save_rollouts=folder, steps=1)
