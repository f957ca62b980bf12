"""Pipeline stages compute what one process computes: losses, gradients, three optimizer steps."""

from __future__ import annotations

import pytest
import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.packing import microbatches, pack
from rlkit.parallel.data import rank_microbatches, summed
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.parallel.model import forward, prepare
from rlkit.parallel.optim import adamw, optimizer_step
from rlkit.parallel.pipeline import cut_stage, pipeline_step
from rlkit.types import Trajectory


def model(**options):
    sizes = {"hidden": 32, "layers": 5, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), **{**sizes, **options})


def data():
    draw = lambda n: [(7 * i * i + n) % 263 for i in range(n)]
    groups = []
    for p, lens in [(9, [5, 7, 3]), (1, [4]), (14, [12, 1]), (3, [9, 9, 2])]:
        groups.append([Trajectory(draw(p), draw(n), [True] * n, [-1.0] * n, [0] * n) for n in lens])
    batch = pack(groups)
    return batch, torch.sin(torch.arange(batch.num_tokens) + 1.0) / batch.num_tokens


def objective(out, w):
    return (w * (out.logp - 0.1 * out.entropy)).sum()


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


@pytest.fixture(scope="module")
def truth():
    trained, out = prepare(model()), {"loss": [], "norm": []}
    optimizer = adamw(trained, lr=1e-2, weight_decay=0.1, eps=1e-4)
    for step in range(3):
        total = torch.zeros(())
        for micro, w in microbatches(data(), max_tokens=40):
            loss = objective(forward(trained, micro, temperature=0.7), w)
            loss.backward()
            total += loss.detach()
        if step == 0:
            out["grads"] = {n: p.grad.clone() for n, p in trained.named_parameters()}
        out["norm"].append(float(optimizer_step(optimizer, max_norm=0.05)["grad_norm"].total))
        out["loss"].append(total.item())
    return out | {"params": {n: whole(p) for n, p in trained.named_parameters()}}


def pipeline_on_rank(rank, world, sizes, options):
    mesh = make_mesh(Parallel(**sizes))
    stage = cut_stage(model(), mesh, **options)
    optimizer = adamw(stage, lr=1e-2, weight_decay=0.1, eps=1e-4)
    out = {"loss": [], "norm": []}
    for step in range(3):
        parts = list(rank_microbatches(data(), mesh=mesh, max_tokens=40))
        losses = pipeline_step(
            stage, [m for m, _ in parts], lambda o, i, parts=parts: objective(o, parts[i][1]), temperature=0.7
        )
        if step == 0:
            out["grads"] = {n: whole(p.grad) for n, p in stage.model.named_parameters()}
        norm = optimizer_step(optimizer, max_norm=0.05, stages=mesh.group("pp"))["grad_norm"]
        out["norm"].append(float(norm.total))
        out["loss"].append(float(summed(torch.stack([*losses, torch.zeros(())]).sum(), mesh=mesh)))
    return out | {"params": {n: whole(p) for n, p in stage.model.named_parameters()}}


CASES = {
    "pp4": ({"pp": 4}, {}),
    "pp2 x shard2, checkpointing": ({"pp": 2, "shard": 2}, {"activation_checkpointing": True}),
    "pp2 x replicate2": ({"pp": 2, "replicate": 2}, {}),
    "pp2 x tp2": ({"pp": 2, "tp": 2}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_stages_equal_one_process(ranks, truth, case):
    names = set()
    for found in ranks.run(pipeline_on_rank, *CASES[case]):
        if any(found["loss"]):
            assert found["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-6)
        assert found["norm"] == pytest.approx(truth["norm"], rel=1e-5)
        for kind in ("grads", "params"):
            for name, x in found[kind].items():
                scale = truth[kind][name].abs().max().item()
                gap = (x - truth[kind][name]).abs().max().item() / scale
                assert gap < 1e-5, (kind, name, gap)
        names |= found["params"].keys()
    assert names == truth["params"].keys()


def refused_on_rank(rank, world):
    for options, sizes in ((dict(tie_word_embeddings=True), dict(pp=2)), (dict(layers=3), dict(pp=4))):
        with pytest.raises(ValueError, match="needs untied embeddings"):
            cut_stage(model(**options), make_mesh(Parallel(**sizes)))


def test_what_does_not_fit_is_refused(ranks):
    ranks.run(refused_on_rank)
