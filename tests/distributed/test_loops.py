"""DPO, KTO, a reward model and PPO with a critic: each run logs on pipeline stages what it logs in one process."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import nightly
import pytest
import torch
from safetensors.torch import load_file

from rlkit.data.examples import Labelled, Pair
from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.distill import Distillation, distill
from rlkit.loops.ppo import ppo
from rlkit.loops.preference import dpo, kto, with_reference
from rlkit.loops.reward_model import reward_model
from rlkit.loops.rl import Task
from rlkit.model.forward import Policy, load_model
from rlkit.model.heads import load_reward_model, load_value_model
from rlkit.model.parallelize import parallelize
from rlkit.model.teachers import LocalTeacher
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.shared import SharedEngine
from rlkit.settings import Critic, Optim, Penalties, Rollouts, Schedule

STEPS = 2
PAIRS = [
    Pair([65 + i] * (1 + i % 5), [97 + i] * (1 + i % 7) + [258], [48 + i % 10] * (8 - i % 7) + [258]) for i in range(24)
]
LABELLED = [Labelled(p.prompt, ids, ids is p.chosen) for p in PAIRS for ids in (p.chosen, p.rejected)]
PROMPTS = [Prompt([20 + i, 60], {}, i) for i in range(40)]
ROUTED = [Prompt([20 + i, 60], {"teacher": "ab"[i % 3 == 0]}, i) for i in range(40)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose head is tied to the embedding."""
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 44}
    folder = tmp_path_factory.mktemp("model")
    tiny_model(tiny_tokenizer(), **sizes, tie_word_embeddings=True).save_pretrained(folder)
    return folder


class Engine(LocalEngine):
    """Samples from a model of its own, which takes the weights that are sent."""

    def __init__(self, model) -> None:
        super().__init__(model, max_len=64)
        self.model = model

    async def update_weights(self, weights, *, version):
        self.model.load_state_dict(dict(weights), strict=False)  # the head's weight is the embedding's
        await super().update_weights(version=version)


async def score(prompt, group):
    """The share of small bytes."""
    return [replace(t, reward=sum(i < 128 for i in t.ids) / len(t.ids)) for t in group]


def sharp(path, seed):
    """A teacher with other weights than the student's."""
    model = load_model(path)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def trained(name, path, folder, *, cut, engine):
    """What the loop logs, and the weights that it exports."""
    common = [Schedule(folder, steps=STEPS, eval_steps=2), Optim(lr=3e-3, max_tokens=40)]
    pairs = {"batch_size": 8, "eval_pairs": PAIRS[:6]}
    model = cut((load_reward_model if name == "reward model" else load_model)(path))
    if name == "dpo":
        dpo(model, None, PAIRS, *common, reference=cut(load_model(path)), **pairs)
    elif name == "kto":
        how = {"batch_size": 8, "eval_examples": LABELLED[:7]}
        kto(model, None, LABELLED, *common, reference=cut(load_model(path)), **how)
    elif name == "reward model":
        reward_model(model, None, PAIRS, *common, **pairs)
    elif name.startswith("distill"):
        rollouts = Rollouts(prompts_per_step=8, group_size=2, minibatches=2, max_new_tokens=6)
        teachers = {key: LocalTeacher(Policy(cut(sharp(path, seed))), 40) for key, seed in (("a", 1), ("b", 2))}
        how = Distillation(top_k=5 if name == "distill top k" else 0)
        work = distill(
            model, teachers, tiny_tokenizer(), engine(), Task(ROUTED, score), rollouts, *common, distillation=how
        )
        asyncio.run(work)
    else:
        rollouts = Rollouts(prompts_per_step=8, group_size=1, minibatches=2, max_new_tokens=6)
        critic = Critic(critic_lr=3e-3, critic_steps=1)
        work = ppo(
            model, cut(load_value_model(path)), tiny_tokenizer(), engine(), Task(PROMPTS, score), rollouts, *common,
            Penalties(kl_coef=0.05), critic, reference=cut(load_model(path)),
        )  # fmt: skip
        asyncio.run(work)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counted = ("time/", "ratio/ratio_is_one")  # by the clock, in bits
    return [{k: v for k, v in line.items() if not k.startswith(counted)} for line in lines], {
        f"{file.parent.name}/{key}": x
        for file in folder.glob("*/model.safetensors")
        for key, x in load_file(file).items()
    }


def on_rank(rank, world, name, path, folder, sizes):
    mesh = make_mesh(Parallel(**sizes))
    engine = lambda: SharedEngine(Engine(load_model(path)) if rank == 0 else None)
    return trained(name, path, folder, cut=lambda model: parallelize(model, mesh), engine=engine)


def scored(model):
    return [[list(logp) for logp in pair.ref_logp] for pair in with_reference(PAIRS, model, Optim(max_tokens=40))]


def scored_on_rank(rank, world, path, sizes):
    return scored(parallelize(load_model(path), make_mesh(Parallel(**sizes))))


def test_every_rank_gets_the_references_log_probs_of_all_pairs(ranks, path):
    alone = scored(load_model(path))
    assert [list(map(len, both)) for both in alone] == [[len(p.chosen), len(p.rejected)] for p in PAIRS]
    for found in ranks.run(scored_on_rank, path, {"pp": 2}):
        for a, b in zip(found, alone, strict=True):
            assert a[0] == pytest.approx(b[0], abs=1e-5)
            assert a[1] == pytest.approx(b[1], abs=1e-5)


LAYOUTS = nightly.only([(name, {"pp": 2}) for name in ("dpo", "kto", "reward model", "ppo")], ("kto", {"pp": 2}))
LAYOUTS += [
    pytest.param(name, sizes, marks=pytest.mark.slow)
    for name, sizes in (("distill", {"tp": 2, "cp": 2}), ("distill", {"pp": 2}), ("distill top k", {"tp": 2, "cp": 2}))
]
LAYOUTS += [pytest.param("dpo", {"pp": 2, "tp": 2}, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), LAYOUTS)
def test_a_run_on_stages_logs_what_one_process_logs(ranks, path, tmp_path, name, sizes):
    alone = lambda model: model
    lines, weights = trained(name, path, tmp_path / "alone", cut=alone, engine=lambda: Engine(load_model(path)))
    assert lines[-1]["step"] == STEPS
    for found, exported in ranks.run(on_rank, name, path, tmp_path / "ranks", sizes):
        for a, b in zip(found, lines, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-6, nan_ok=True)
        torch.testing.assert_close(exported, weights, rtol=0, atol=2e-4)  # Adam blows rounding up
