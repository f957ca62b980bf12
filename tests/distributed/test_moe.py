"""MoE on many ranks computes what one process computes: losses, every gradient, two steps, checkpoints, weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlkit.model.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from rlkit.model.forward import compute_log_probs, forward, prepare_model
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import load_parallel, parallelize
from rlkit.model.sharding import sync_gradients
from rlkit.model.weights import export_hf, stream_weights
from rlkit.packing import pack
from rlkit.parallel.data import rank_microbatches, summed
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.parallel.pipeline import pipelined
from rlkit.types import Trajectory

CASES = {
    "ep4": ({"ep": 4}, {}, 64, False),
    "ep2 x shard2, accumulated": ({"ep": 2}, {}, 40, False),
    "ep2 x replicate2": ({"ep": 2, "replicate": 2}, {}, 40, False),
    "ep2 x cp2, checkpointing, accumulated": ({"ep": 2, "cp": 2}, {"activation_checkpointing": True}, 30, True),
    "ep4 = cp2 x shard2, ulysses, late sync": ({"ep": 4, "cp": 2, "ulysses": True}, {}, 40, True),
    "ep4, offload, one expert each": ({"ep": 4}, {"offload": True}, 64, False),
    "ep1": ({}, {}, 64, False),
    "tp2 x shard2": ({"tp": 2}, {}, 64, False),
    "tp2 x shard2, checkpointing, late sync": ({"tp": 2}, {"activation_checkpointing": True}, 40, True),
    "tp2 x ep2 over the tensor ranks": ({"tp": 2, "ep": 2}, {}, 40, False),
    "tp2 x ep4 over all, offload": ({"tp": 2, "ep": 4}, {"offload": True}, 40, False),
    "tp2 x ep2 x replicate2": ({"tp": 2, "ep": 2, "replicate": 2}, {}, 40, False),
    "tp2 x cp2": ({"tp": 2, "cp": 2}, {}, 40, False),
    "tp2 x cp2 x ep4, ulysses": ({"tp": 2, "cp": 2, "ep": 4, "ulysses": True}, {}, 64, False),
    "tp4": ({"tp": 4}, {}, 30, True),
    "pp2 x ep2": ({"pp": 2, "ep": 2}, {}, 40, False),
    "pp2 x tp2": ({"pp": 2, "tp": 2}, {}, 40, False),
}
CI = {  # "tp2 x ep2" is in the test of checkpoints, tp4 and pp2 x tp2 of a dense model in test_layouts.py
    "ep2 x cp2, checkpointing, accumulated", "ep4, offload, one expert each",
    "tp2 x cp2 x ep4, ulysses", "pp2 x ep2",
}  # fmt: skip


def model(experts: int = 8, kv_heads: int = 4):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(  # the first layer, and so the first of two pipeline stages, is dense
        vocab_size=263, hidden_size=32, num_hidden_layers=3, mlp_only_layers=[0], intermediate_size=120, head_dim=8,
        num_attention_heads=8, num_key_value_heads=kv_heads,
        moe_intermediate_size=12, num_experts=experts, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    made = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return made


def data():
    draw = lambda n: [(7 * i * i + n) % 263 for i in range(n)]
    groups = []
    for p, lens in [(9, [5, 7, 3]), (1, [4]), (14, [12, 1]), (3, [9, 9, 2])]:
        groups.append([Trajectory(draw(p), draw(n), [True] * n, [-1.0] * n, [0] * n) for n in lens])
    batch = pack(groups)
    return batch, torch.sin(torch.arange(batch.num_tokens) + 1.0) / batch.num_tokens


def train(trained, mesh, *, max_tokens: int, late: bool) -> dict:
    optimizer = adamw(trained, lr=1e-2, weight_decay=0.1, eps=1e-4)
    out = {"loss": [], "norm": []}
    for step in range(2):
        parts, total = list(rank_microbatches(data(), mesh=mesh, max_tokens=max_tokens)), torch.zeros(())
        with pipelined(mesh) as backward:
            for i, (micro, w) in enumerate(parts):
                sync_gradients(trained, not late or i == len(parts) - 1)
                found = forward(trained, micro)
                loss = (w * (found.logp - 0.1 * found.entropy)).sum()
                backward(loss)
                total += loss.detach()
        if step == 0:
            out["grads"] = {n: whole(p.grad) for n, p in trained.named_parameters()}
        out["loss"].append(float(summed(total, mesh=mesh)))
        out["norm"].append(float(optimizer_step(optimizer, max_norm=0.5, model=trained)["grad_norm"].total))
    out["params"] = {n: whole(p) for n, p in trained.named_parameters()}
    out["score"] = compute_log_probs(partial(forward, trained), data()[0], max_tokens=max_tokens, mesh=mesh)
    return out, optimizer


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def replayed(trained, mesh):
    """Gradients of a step whose experts are given: not those of the router."""
    batch, w = data()
    draw = np.random.default_rng(0)
    choices = lambda n: np.stack([draw.permutation(8)[:2] for _ in range(2 * n)]).reshape(n, 2, 2)
    experts = {
        k: torch.from_numpy(choices(len(x))).short()
        for k, x in (("experts", w), ("prefix_experts", batch.prefix_tokens))
    }
    for micro, weights in rank_microbatches((replace(batch, **experts), w), mesh=mesh, max_tokens=40):
        (weights * forward(trained, micro).logp).sum().backward()
    return {n: whole(p.grad) for n, p in trained.named_parameters() if p.grad is not None}


def replayed_on_rank(rank, world, sizes):
    options = {"activation_checkpointing": True}
    return replayed(parallelize(model(), mesh := make_mesh(Parallel(**sizes)), **options), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep": 2, "cp": 2}, {"tp": 2, "ep": 2}])
def test_given_experts_are_replayed_on_every_layout(ranks, sizes):
    one, own = replayed(prepare_model(model()), None), prepare_model(model())
    (data()[1] * forward(own, data()[0]).logp).sum().backward()
    assert (own.model.layers[1].mlp.gate.weight.grad - one["model.layers.1.mlp.gate.weight"]).abs().max() > 1e-4
    for found in ranks.run(replayed_on_rank, sizes):
        for name, grad in one.items():
            torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-4)


@pytest.fixture(scope="module")
def truth():
    return train(prepare_model(model()), None, max_tokens=4096, late=False)[0]


def moe_on_rank(rank, world, sizes, options, max_tokens, late):
    mesh = make_mesh(Parallel(**sizes))
    made = parallelize(model(), mesh, **options)
    dense = not any("layers.1." in name for name, _ in made.named_parameters())
    assert dense == (mesh.sizes.pp == 2 and mesh.pp_rank == 0)
    held = sum(p.to_local().numel() for n, p in made.named_parameters() if ".experts." in n)
    whole = sum(p.numel() for n, p in made.named_parameters() if ".experts." in n)
    assert held == whole * mesh.sizes.replicate * mesh.sizes.pp / 4
    return train(made, mesh, max_tokens=max_tokens, late=late)[0]


@pytest.mark.slow_cases(
    "ep2 x cp2, checkpointing, accumulated", "tp2 x cp2 x ep4, ulysses", "ep4, offload, one expert each"
)
@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x not in CI)) for x in CASES])
def test_layout_equals_one_process(ranks, truth, case):
    for found in ranks.run(moe_on_rank, *CASES[case]):
        assert_equal(found, truth, staged="pp" in CASES[case][0])


def assert_equal(found, truth, *, staged: bool = False):
    assert found["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-6)
    assert found["norm"] == pytest.approx(truth["norm"], rel=1e-5)
    for kind in ("grads", "params"):
        assert staged or found[kind].keys() == truth[kind].keys()
        for name, x in found[kind].items():
            scale = truth[kind][name].abs().max().item()
            torch.testing.assert_close(x, truth[kind][name], atol=1e-5 * scale, rtol=1e-5, msg=f"{kind} {name}")
    torch.testing.assert_close(found["score"], truth["score"], atol=1e-5, rtol=1e-5)


def written_on_rank(rank, world, folder):
    mesh = make_mesh(Parallel(tp=2, ep=2))
    made = parallelize(model(), mesh)
    found, optimizer = train(made, mesh, max_tokens=64, late=False)
    save_checkpoint(folder / "c", step=2, model=made, optimizer=optimizer, state={}, keep=1)
    export_hf(made, None, folder / "m")
    return found, {n: x.clone() for n, x in stream_weights(made)}


def read_on_rank(rank, world, folder, layouts, truth):
    for sizes in layouts:
        mesh = make_mesh(Parallel(**sizes))
        other = parallelize(model(), mesh)
        optimizer = adamw(other, lr=0.1)
        load_checkpoint(latest_checkpoint(folder / "c"), model=other, optimizer=optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        loaded = load_parallel(folder / "m", mesh)
        for again in (other, loaded):
            assert all(torch.equal(whole(p), truth[n]) for n, p in again.named_parameters()), sizes


@pytest.mark.parametrize("readers", [({"ep": 4}, {"tp": 2}), ({"ep": 2, "cp": 2}, {"pp": 2})])
@pytest.mark.slow
def test_checkpoints_and_exports_reshard_experts(ranks, truth, tmp_path, readers):
    """Written on tp2 x ep2, read by one process, written again and read on other layouts; exports are transformers'."""
    results = ranks.run(written_on_rank, tmp_path)
    for found, _ in results:
        assert_equal(found, truth)
    found, streamed = results[0]
    wrote = found["params"]
    alone = prepare_model(model())
    optimizer = adamw(alone, lr=0.1)
    load_checkpoint(latest_checkpoint(tmp_path / "c"), model=alone, optimizer=optimizer)
    assert all(torch.equal(p, wrote[name]) for name, p in alone.named_parameters())
    save_checkpoint(tmp_path / "c", step=3, model=alone, optimizer=optimizer, state={}, keep=1)
    ranks.run(read_on_rank, tmp_path, readers, wrote)
    for name, p in AutoModelForCausalLM.from_pretrained(tmp_path / "m").named_parameters():
        assert torch.equal(p, wrote[name]), name
    alone.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in theirs
    assert streamed.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in streamed.items())


def refused_on_rank(rank, world):
    with pytest.raises(ValueError, match="ep=4 must divide the experts of the model, which has 6"):
        parallelize(model(experts=6), make_mesh(Parallel(ep=4)))
    with pytest.raises(ValueError, match="tp=4 must divide the 2 key-value heads"):
        parallelize(model(kv_heads=2), make_mesh(Parallel(tp=4)))


def test_what_does_not_fit_is_refused(ranks):
    ranks.run(refused_on_rank)
