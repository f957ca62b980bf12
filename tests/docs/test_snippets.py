"""Code blocks of the pages: those that have no test of their own run here, under the names that they use."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from pictures import no_pictures
from safetensors.torch import load_file
from snippets import ROOT, blocks, run

from rlkit import losses
from rlkit.advantages import group_centered
from rlkit.data.examples import labelled_examples, preference_pairs
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops import preference
from rlkit.loops.reward_model import reward_model
from rlkit.model.forward import Policy, prepare_model, with_old_logp, with_ref_logp
from rlkit.model.heads import load_reward_model
from rlkit.model.weights import export_hf, stream_weights
from rlkit.packing import pack, with_advantages
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.groups import Prompt, rollout, single_turn
from rlkit.rollout.limits import success_between
from rlkit.rollout.stream import GroupStream
from rlkit.segments import sum_per_seq
from rlkit.settings import Optim, Schedule
from rlkit.types import SamplingParams

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
RUN_ELSEWHERE = {  # page: the test that runs its code
    "README.md": "tests/test_readme.py",
    "docs/advantages.md": "tests/docs/test_pages.py",
    "docs/distillation.md": "tests/test_readme.py",
    "docs/engines.md": "tests/docs/test_engines_page.py",
    "docs/environments.md": "tests/rollout/test_recipes.py",
    "docs/migrating.md": "tests/docs/test_migrating.py",
    "docs/own-loop.md": "tests/loops/test_own_loop.py",
    "docs/own-trainer.md": "tests/docs/test_own_trainer.py",
    "docs/recipes.md": "tests/losses/test_recipes.py",
    "docs/rewards.md": "tests/rewards/test_docs.py",
    "docs/sglang.md": "tests/sglang/test_page.py",
    "docs/start.md": "tests/docs/test_start_page.py",
    "docs/tutorial-new-loss.md": "tests/laws/test_docs.py",
    "docs/vllm.md": "tests/vllm/test_page.py",
}
HERE = ("losses", "laws", "preference", "rollout", "parallel", "optimizers", "distillation")


def test_every_block_of_every_page_is_run_by_a_test() -> None:
    pages = {str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
    assert {page for page in pages if blocks(page)} == {*RUN_ELSEWHERE, *(f"docs/{name}.md" for name in HERE)}
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(), (page, test)


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    """What a loop has at hand: models, an engine, prompts, and two groups of samples as a batch with its log-probs."""
    tokenizer = tiny_tokenizer()
    model, reference = (prepare_model(tiny_model(tokenizer, seed=seed, **SIZES)) for seed in (0, 1))
    engine, policy = LocalEngine(model), Policy(model)
    prompts = [Prompt(ids=tokenizer.encode(f"{i}: "), row={}, index=i) for i in range(4)]
    odd = scorer(lambda completion, row: len(completion) % 2, tokenizer=tokenizer, timeout_s=60)
    asks = {"params": SamplingParams(max_new_tokens=6), "score": odd}
    groups = asyncio.run(rollout(prompts[:2], generate=engine.generate, group_size=4, seed=0, **asks))
    batch = with_old_logp(policy, with_advantages(pack(groups), group_centered), max_tokens=4096)
    batch = with_ref_logp(Policy(reference), batch, max_tokens=4096)
    names = {"tokenizer": tokenizer, "model": model, "reference": reference, "engine": engine, "policy": policy}
    return names | asks | {"prompts": prompts, "groups": groups, "batch": batch, "env": single_turn, "step": 0}


def test_the_sum_of_losses(world: dict[str, Any]) -> None:
    batch = world["batch"]
    logp = world["policy"](batch).logp
    names = vars(losses) | {"batch": batch, "logp": logp, "num_tokens": int(batch.mask.sum())}
    loss = run(blocks("docs/losses.md")[0], names)["loss"]
    (gradient,) = torch.autograd.grad(loss, logp, retain_graph=True)
    weights = (batch.old_logp - batch.rollout_logp).exp().clamp(max=2.0) / batch.mask.sum()
    torch.testing.assert_close(gradient, -weights * batch.advantages * batch.mask, atol=1e-5, rtol=1e-4)
    names |= {"teacher_logp": batch.ref_logp, "weights": losses.token_mean(batch.mask, num_tokens=names["num_tokens"])}
    loss = run(blocks("docs/distillation.md")[0], names)["loss"]  # at ratio 1: minus the mean of log p - log q
    want = (batch.old_logp - batch.ref_logp)[batch.mask].mean()
    torch.testing.assert_close(loss, want, atol=1e-5, rtol=1e-4)


def test_statistics_of_the_batch(world: dict[str, Any]) -> None:
    batch = world["batch"]
    x = 0.3 * torch.randn(batch.old_logp.shape, generator=torch.Generator().manual_seed(0)) * batch.mask
    names = vars(losses) | {"torch": torch, "x": x, "advantages": batch.advantages, "mask": batch.mask, "step": 3}
    left = run(blocks("docs/losses.md")[1], names | {"old_logp": batch.old_logp, "logp": batch.old_logp + x})
    loss = losses.ppo_clip(x, batch.advantages, clip_low=left["clip"].clip_low, clip_high=left["clip"].clip_high)
    assert loss.isfinite().all()
    assert left["cutoff"] >= 0
    assert left["cov"].shape == x.shape
    assert left["selected"].dtype == torch.bool


@pytest.mark.slow
def test_laws_of_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    run(blocks("docs/laws.md")[0], {"my_loss": lambda log_ratio, advantages: -advantages * log_ratio.exp() ** 2})
    assert "FAILS" in capsys.readouterr().out


def test_rollouts(world: dict[str, Any]) -> None:
    first, stream, _ = blocks("docs/rollout.md")
    groups = run(first, world | {"rollout": rollout})["groups"]
    assert [len(group) for group in groups] == [8] * 4
    names = {"GroupStream": GroupStream, "success_between": success_between, "stream_weights": stream_weights}
    names |= {"steps": 2, "prompt_at": lambda index: world["prompts"][index % 4]}
    groups = run(stream.replace("groups_per_step=32", "groups_per_step=2"), world | names)["groups"]
    assert len(groups) == 2
    assert all({0.0, 1.0} == {sample.reward for sample in group} for group in groups)


@pytest.mark.slow
def test_steps_that_are_saved(make_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": str(i), "answer": "7"} for i in range(4)]
    task = make_task(train=rows, reward="def score(completion, row):\n    return len(set(completion)) / 8\n")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def rlkit(*flags: str) -> None:
        command = [sys.executable, "-m", "rlkit.scripts.grpo", *flags]
        warm.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True, plots=False)

    sizes = "--steps 2 --prompts-per-step 2 --group-size 4 --max-new-tokens 6 --lr 1e-3 --output runs/a"
    rlkit(*f"--model {task}/model --data {task}/train.jsonl --reward {task}/reward.py:score {sizes}".split())
    page = (ROOT / "docs/rollout.md").read_text()
    for line in re.findall(r"^    rlkit grpo (.*?) +#", page, re.MULTILINE):
        rlkit(*line.split())
    first, again = (load_file(f"runs/{name}/model/model.safetensors") for name in "bc")
    assert all(torch.equal(first[name], again[name]) for name in first)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets, pandas = (pytest.importorskip(name) for name in ("datasets", "pandas"))
    names = run(blocks("docs/rollout.md")[2], {"Path": Path, "datasets": datasets, "pandas": pandas})
    assert len(names["rows"]) == 2 * len(names["frame"]) == 16
    assert pack(names["groups"]).num_seqs == 8
    assert [prompt.row["answer"] for prompt in names["prompts"]] == ["7", "7"]


def test_preferences(world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer, batch = world["tokenizer"], world["batch"]
    rows = [{"prompt": f"{i}+1?", "chosen": str(i + 1), "rejected": "no"} for i in range(4)]
    pairs, _ = preference_pairs(rows, tokenizer=tokenizer, max_example_tokens=64)
    examples, _ = labelled_examples(rows, tokenizer=tokenizer, max_example_tokens=64)
    export_hf(tiny_model(tokenizer, **SIZES), tokenizer, tmp_path / "model")
    names = world | vars(preference) | {"partial": partial, "losses": losses, "Path": Path, "pairs": pairs}
    names |= {"Schedule": Schedule, "Optim": Optim, "reward_model": reward_model, "path": tmp_path / "model"}
    names |= {"load_reward_model": load_reward_model, "examples": examples}
    trained, scored, labelled, tokens = blocks("docs/preference.md")
    with no_pictures():
        for code in (trained.replace("steps=300", "steps=1"), scored, labelled):
            for statement in ast.parse(code).body:  # each run is one of its own in the same folder
                shutil.rmtree("runs", ignore_errors=True)
                names = run(ast.unparse(statement), names)
            assert (tmp_path / "runs/dpo/model").is_dir()
    names = {"dpo": losses.dpo, "sum_per_seq": sum_per_seq, "policy": world["policy"], "batch": batch, "weights": 0.25}
    assert run(tokens, names)["loss"].isfinite()


def test_an_optimizer_of_your_own() -> None:
    pytest.importorskip("torchao")
    adamw8 = run(blocks("docs/optimizers.md")[0], {})["adamw8"]
    assert adamw8([torch.nn.Parameter(torch.zeros(8, 8))]).param_groups


PARALLEL = """
import asyncio, os, torch
from rlkit import LocalEngine, Prompt, SamplingParams, adamw, group_centered, optimizer_step, pack, ppo_clip
from rlkit import token_mean, with_advantages
from rlkit.data.tiny import tiny_tokenizer
from rlkit.model.forward import forward, load_model
from rlkit.model.parallelize import load_parallel
from rlkit.parallel.data import rank_microbatches, reduce_metrics
from rlkit.parallel.mesh import make_mesh, start
from rlkit.parallel.pipeline import pipelined
from rlkit.rollout import rollout
from rlkit.settings import Parallel
prompts = [Prompt(ids=[5, 6, 7], row={}, index=0)]
engine, params = LocalEngine(load_model("model")), SamplingParams(max_new_tokens=6)
groups = asyncio.run(rollout(prompts, generate=engine.generate, params=params, group_size=4, seed=0))
groups = [[replace(sample, reward=float(i)) for i, sample in enumerate(group)] for group in groups]
metrics = {}
CODE
os.write(1, f"{float(metrics['grad_norm'].total)}\\n".encode())  # of two ranks, each in one piece
"""


@pytest.mark.slow
def test_a_step_over_ranks(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    export_hf(tiny_model(tokenizer, **SIZES), tokenizer, tmp_path / "model")
    (code,) = blocks("docs/parallel.md")
    for big, small in (('"cuda"', '"cpu"'), ("shard=4, tp=2", "shard=2, tp=1"), ("Qwen/Qwen3-8B", "model")):
        assert big in code
        code = code.replace(big, small)
    (tmp_path / "step.py").write_text("from dataclasses import replace\n" + PARALLEL.replace("CODE", code))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "step.py"]
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    assert first == second > 0
