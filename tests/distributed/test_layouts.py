"""Every layout computes what one process computes: loss, each gradient, the norm, and two optimizer steps.

The truth is a plain model in this process, which no mesh, DTensor or hook has touched. On four ranks the same model is
cut up, trained on the same batch, and gathered again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.metrics import finalize, largest, mean, merge
from rlkit.model.forward import compute_log_probs, forward, prepare_model
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.model.sharding import mesh_of, sync_gradients
from rlkit.packing import microbatches, pack
from rlkit.parallel.data import each_stage, rank_microbatches, reduce_metrics, summed
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.parallel.pipeline import pipelined
from rlkit.types import Trajectory

STEPS = 2
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Case:
    """A layout, and how it is trained."""

    sizes: dict
    options: dict = field(default_factory=dict)
    tied: bool = False
    max_tokens: int = 4096
    late_sync: bool = False


CASES = {
    "one copy each": Case({"replicate": 4, "shard": 1}),
    "shard": Case({"shard": 4}),
    "shard tied accumulate": Case({"shard": 4}, tied=True, max_tokens=30),
    "replicate x shard": Case({"replicate": 2, "shard": 2}, max_tokens=30),
    "tp2 x shard2": Case({"tp": 2}),
    "tp2 x shard2 tied accumulate": Case({"tp": 2}, tied=True, max_tokens=40),
    "tp2 x replicate2 late sync": Case({"tp": 2, "replicate": 2}, max_tokens=40, late_sync=True),
    "tp2 x replicate2 offload checkpointing accumulate late": Case(
        {"tp": 2, "replicate": 2}, {"offload": True, "activation_checkpointing": True}, max_tokens=40, late_sync=True
    ),
    "tp4": Case({"tp": 4}, {}, max_tokens=60),
    "tp4 tied": Case({"tp": 4}, tied=True),
    "cp4": Case({"cp": 4}),
    "cp4 ulysses": Case({"cp": 4, "ulysses": True}, max_tokens=60),
    "cp2 x shard2 accumulate": Case({"cp": 2}, max_tokens=40),
    "cp2 x replicate2 tied": Case({"cp": 2, "replicate": 2}, tied=True),
    "cp2 ulysses x shard2": Case({"cp": 2, "ulysses": True}, max_tokens=40),
    "cp2 x tp2": Case({"cp": 2, "tp": 2}, max_tokens=60),
    "cp2 ulysses x tp2 tied": Case({"cp": 2, "tp": 2, "ulysses": True}, tied=True),
    "pp2 x shard2 accumulate": Case({"pp": 2}, max_tokens=30),
    "pp2 x replicate2 checkpointing": Case(
        {"pp": 2, "replicate": 2}, {"activation_checkpointing": True}, max_tokens=40
    ),
    "pp2 x tp2 accumulate": Case({"pp": 2, "tp": 2}, max_tokens=40),
    "pp2 x cp2 offload accumulate": Case({"pp": 2, "cp": 2}, {"offload": True}, max_tokens=40),
    "pp2 x shard2 tied accumulate": Case({"pp": 2}, tied=True, max_tokens=30),
    "pp2 x replicate2 tied offload late sync": Case(
        {"pp": 2, "replicate": 2}, {"offload": True}, tied=True, max_tokens=40, late_sync=True
    ),
    "pp2 x tp2 tied accumulate": Case({"pp": 2, "tp": 2}, tied=True, max_tokens=60),
    "shard checkpointing": Case({"shard": 4}, {"activation_checkpointing": True}),
    "shard gathered once tied accumulate": Case(
        {"shard": 4}, {"reshard_after_forward": False}, tied=True, max_tokens=30
    ),
    "pp2 x tp2 gathered once checkpointing late sync": Case(
        {"pp": 2, "tp": 2},
        {"reshard_after_forward": False, "activation_checkpointing": True},
        max_tokens=40,
        late_sync=True,
    ),
    "cp2 x tp2 checkpointing": Case({"cp": 2, "tp": 2}, {"activation_checkpointing": True}, max_tokens=60),
    "shard offload": Case({"shard": 4}, {"offload": True}, tied=True),
    "replicate x shard offload tied accumulate": Case(
        {"replicate": 2, "shard": 2}, {"offload": True}, tied=True, max_tokens=30
    ),
    "tp2 x shard2 offload checkpointing accumulate late": Case(
        {"tp": 2}, {"offload": True, "activation_checkpointing": True}, max_tokens=40, late_sync=True
    ),
}
CI = {  # each size and option, and the pairs that meet in the code; the others are of the same parts
    "replicate x shard offload tied accumulate", "tp2 x replicate2 offload checkpointing accumulate late",
    "cp4 ulysses", "cp2 ulysses x tp2 tied", "pp2 x tp2 tied accumulate", "pp2 x cp2 offload accumulate",
    "pp2 x replicate2 checkpointing",
}  # fmt: skip


def model(tied: bool):
    """Four key-value heads, a vocabulary (263) and hidden units that no layout divides evenly."""
    sizes = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    made = tiny_model(tiny_tokenizer(), **sizes, tie_word_embeddings=tied)
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):  # norms that are not all 1, so that theirs count
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return made


def data():
    """Groups that share prompts, truncated samples, tool tokens in between; lengths that nothing divides."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, 263, (n,), generator=generator).tolist()
    groups = []
    for prompt_len, lens in [(9, [5, 7, 3]), (1, [4]), (14, [12, 1]), (3, [9, 9, 2])]:
        prompt = draw(prompt_len)
        masks = [(torch.rand(n, generator=generator) < 0.8).tolist() for n in lens]
        groups.append(
            [Trajectory(prompt, draw(n), m, [-1.0] * n, [0] * n, truncated=n % 3 == 0) for n, m in zip(lens, masks)]
        )
    batch = pack(groups)
    weights = torch.sin(torch.arange(batch.num_tokens) + 1.0) * batch.mask / batch.mask.sum()
    return batch, weights


def weighted(out, w):
    return w * (out.logp - 0.1 * out.entropy)


def train(trained, cut, reduce, max_tokens, *, late_sync: bool = False) -> dict:
    """Losses, gradients, norms and metrics of STEPS steps, and the parameters after them."""
    optimizer = adamw(trained, lr=1e-2, weight_decay=0.1, eps=1e-4)  # 1e-8 would blow up rounding where g is near 0
    out = {"loss": [], "norm": [], "grads": {}, "metrics": []}
    streams = data()
    for step in range(STEPS):
        parts, total, metrics = list(cut(streams)), torch.zeros(()), {}
        with pipelined(mesh_of(trained)) as backward:
            for i, (micro, w) in enumerate(parts):
                sync_gradients(trained, not late_sync or i == len(parts) - 1)
                found = forward(trained, micro, temperature=0.7)
                loss = weighted(found, w).sum()
                backward(loss)
                total += loss.detach()
                new = {"logp": mean(found.logp, mask=micro.mask), "entropy": largest(found.entropy, mask=micro.mask)}
                metrics = merge(metrics, new)
        total, metrics = reduce(total, metrics)
        out["loss"].append(float(total))
        if step == 0:
            out["grads"] = {n: whole(p.grad) for n, p in trained.named_parameters()}
        stepped = optimizer_step(optimizer, max_norm=0.5, model=trained)
        out["norm"].append(finalize(stepped)["grad_norm"])
        out["metrics"].append(finalize(metrics))
    policy = partial(forward, trained, temperature=0.7)
    out["score"] = compute_log_probs(policy, streams[0], max_tokens=max_tokens, mesh=mesh_of(trained))
    out["params"] = {n: whole(p) for n, p in trained.named_parameters()}
    return out


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


@pytest.fixture(scope="module")
def truth():
    """What one process computes, without and with tied weights, in one micro-batch."""
    alone = lambda streams: microbatches(streams, max_tokens=4096)
    return [train(prepare_model(model(tied)), alone, lambda *x: x, 40) for tied in (False, True)]


def leaks(trained) -> list[int]:
    """Sequences whose log-probs change by a bit when all tokens of sequence 3 change, prompt included."""
    batch, _ = data()
    before = after = None
    changed = {"tokens": batch.tokens.clone(), "targets": batch.targets.clone()}
    mine = slice(int(batch.cu_seqlens[3]), int(batch.cu_seqlens[4]))
    assert int(batch.group_ids.bincount()[batch.group_ids[3]]) == 1, "its prompt is nobody else's"
    for x in changed.values():
        x[mine] = (x[mine] + 17) % 263
    with torch.no_grad():
        before, after = forward(trained, batch), forward(trained, replace(batch, **changed))
    differ = (before.logp != after.logp) | (before.entropy != after.entropy)
    return [i for i, x in enumerate(differ.split(batch.cu_seqlens.diff().tolist())) if bool(x.any())]


def on_rank(rank, world, case, truth):
    """The largest error of each kind on this rank, relative to the largest entry of the true tensor."""
    mesh = make_mesh(Parallel(**case.sizes))
    cut_up = parallelize(model(case.tied), mesh, **case.options)
    if mesh.pp_rank == mesh.sizes.pp - 1:
        assert leaks(cut_up) == [3]
    else:
        leaks(cut_up)
    cut = partial(rank_microbatches, mesh=mesh, max_tokens=case.max_tokens)
    reduce = lambda total, metrics: (summed(total, mesh=mesh), reduce_metrics(metrics, mesh=mesh))
    found = train(cut_up, cut, reduce, case.max_tokens, late_sync=case.late_sync)
    if case.tied and mesh.sizes.pp > 1:  # the first stage and the last have a part of the gradient each, until the step
        first, last = ([x[kind][EMBEDDING] for kind in ("grads", "params")] for x in each_stage(found, mesh=mesh))
        assert torch.equal(first[1], last[1])
        found["grads"][EMBEDDING] = first[0] + last[0]
    errors = {}
    for kind in ("grads", "params"):
        assert mesh.sizes.pp > 1 or found[kind].keys() == truth[kind].keys()
        errors[kind] = max((error(x, truth[kind][n]), n) for n, x in found[kind].items())
    for kind in ("loss", "norm", "score"):
        errors[kind] = error(torch.as_tensor(found[kind]), torch.as_tensor(truth[kind])), kind
    for a, b in zip(found["metrics"], truth["metrics"], strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    return errors


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


@pytest.mark.slow_cases(
    "cp2 ulysses x tp2 tied",
    "cp4 ulysses",
    "pp2 x replicate2 checkpointing",
    "pp2 x tp2 tied accumulate",
    "tp2 x replicate2 offload checkpointing accumulate late",
    "replicate x shard offload tied accumulate",
)
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in CI)) for x in CASES])
def test_layout_equals_one_process(ranks, truth, name):
    case = CASES[name]
    for rank, errors in enumerate(ranks.run(on_rank, case, truth[case.tied])):
        assert all(e < 1e-5 for e, _ in errors.values()), f"rank {rank}: {errors}"


FEWER = {
    "1 shard": (1, Case({})),
    "1 offload checkpointing tied": (1, Case({}, {"offload": True, "activation_checkpointing": True}, tied=True)),
    "2 shard": (2, Case({}, max_tokens=30)),
    "2 tp": (2, Case({"tp": 2}, tied=True)),
    "2 cp": (2, Case({"cp": 2}, max_tokens=60)),
}
# tp on two ranks is in test_updates.py, shards on one and three in test_checkpoints.py
CI_FEWER = {"1 offload checkpointing tied", "2 cp"}


@pytest.mark.slow_cases("2 cp")
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in CI_FEWER)) for x in FEWER])
def test_other_numbers_of_ranks_equal_one_process(pool, truth, name):
    world, case = FEWER[name]
    for rank, errors in enumerate(pool(world).run(on_rank, case, truth[case.tied])):
        assert all(e < 1e-5 for e, _ in errors.values()), f"rank {rank}: {errors}"
