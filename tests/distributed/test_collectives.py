"""Collectives of a step, counted as they are issued: how many, of which kind, how many bytes."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model import launch
from rlkit.model.forward import compute_log_probs, forward
from rlkit.model.memory import shape_of
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.model.sharding import mesh_of
from rlkit.packing import pack
from rlkit.parallel.data import rank_microbatches
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.parallel.pipeline import pipelined
from rlkit.settings import ParallelArgs
from rlkit.types import Trajectory

LAYERS = 4
KINDS = {  # of torch.distributed, and of DTensor
    "_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce", "all_reduce": "all-reduce",
}  # fmt: skip


class Collectives(TorchDispatchMode):
    """Counts the collectives of a rank by kind, and the bytes of their largest tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.sizes = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name in KINDS:
            self.counts[KINDS[name]] += 1
            self.sizes.append((KINDS[name], max(x.numel() for x in tree_leaves(args) if isinstance(x, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def model(**options):
    sizes = {"hidden": 32, "layers": LAYERS, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), **{**sizes, **options})


def data():
    draw = lambda n: [(7 * i * i + n) % 263 for i in range(n)]
    groups = []
    for p, lens in [(9, [5, 7, 3]), (1, [4]), (14, [12, 1]), (3, [9, 9, 2])]:
        groups.append([Trajectory(draw(p), draw(n), [True] * n, [-1.0] * n, [0] * n) for n in lens])
    batch = pack(groups)
    return batch, torch.sin(torch.arange(batch.num_tokens) + 1.0) / batch.num_tokens


def backward_all(trained, *, max_tokens):
    """The gradients of a step over the whole batch; returns the number of micro-batches."""
    mesh, num = mesh_of(trained), 0
    with pipelined(mesh) as backward:
        for micro, w in rank_microbatches(data(), mesh=mesh, max_tokens=max_tokens):
            out = forward(trained, micro)
            backward((w * (out.logp - 0.1 * out.entropy)).sum())
            num += 1
    return num


def kept_on_rank(rank, world, sizes, options):
    """Counts, gradients and log-probs with the gathered layers freed after the forward, and kept."""
    found = []
    for reshard in (True, False):
        trained = parallelize(model(), make_mesh(Parallel(**sizes)), reshard_after_forward=reshard, **options)
        optimizer = adamw(trained, lr=1e-2)
        with Collectives() as seen:
            num = backward_all(trained, max_tokens=26)
        grads = {n: p.grad.full_tensor() for n, p in trained.named_parameters()}
        score = partial(compute_log_probs, partial(forward, trained), data()[0], max_tokens=26, mesh=mesh_of(trained))
        before = score()
        optimizer_step(optimizer, max_norm=1.0, model=trained)  # a forward without a backward keeps no old weights
        found.append((num, seen.counts, grads, before, score()))
    return found


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"shard": 4}, {}),
        ({"pp": 2}, {"activation_checkpointing": True}),
        pytest.param({"tp": 2}, {"offload": True}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "shard": 2}, {"activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_kept_layers_are_gathered_once_and_give_the_same_gradients(ranks, sizes, options):
    for freed, kept in ranks.run(kept_on_rank, sizes, options):
        num, counts, grads, before, after = freed
        assert num == kept[0]
        units = [name for name in grads if ".q_proj.weight" in name or ("embed_tokens" in name and "tp" not in sizes)]
        again = num * len(units)  # beside the root, with tp the embedding in it
        assert kept[1]["all-gather"] == counts["all-gather"] - again
        assert {**kept[1], "all-gather": 0} == {**counts, "all-gather": 0}
        assert grads.keys() == kept[2].keys()
        assert all(torch.equal(x, kept[2][name]) for name, x in grads.items())
        assert torch.equal(before, kept[3])
        assert torch.equal(after, kept[4])
        assert not torch.equal(before, after)


def from_flags_on_rank(rank, world, folder):
    counts = []
    for args in (ParallelArgs(shard=2), ParallelArgs(shard=2, reshard_after_forward=False)):
        trained = launch.load_policy(folder, args)
        with Collectives() as seen:
            backward_all(trained, max_tokens=2696)
        counts.append(seen.counts["all-gather"])
    return counts


def test_the_flag_keeps_layers(pool, tmp_path):
    """A gather of the root, and one or two of the embedding and of each layer."""
    model().save_pretrained(tmp_path)
    assert pool(2).run(from_flags_on_rank, tmp_path) == [[1 + 2 * (1 + LAYERS), 2 + LAYERS]] * 2


def gathered_on_rank(rank, world):
    """Bytes of gathered parameters between forward and backward, and of the model in bf16."""
    found = []
    for reshard in (True, False):
        trained = parallelize(model(), make_mesh(Parallel()), dtype=torch.bfloat16, reshard_after_forward=reshard)
        out = forward(trained, data()[0])
        gathered = [p for p in trained.parameters() if not hasattr(p, "placements")]
        assert {p.dtype for p in gathered} == {torch.bfloat16}
        found.append(sum(p.numel() * p.element_size() for p in gathered))
        out.logp.sum().backward()
        assert all(hasattr(p, "placements") for p in trained.parameters())
    return found


def test_kept_bytes_are_those_on_paper(pool):
    shape = shape_of(model().config)
    head = shape.hidden + shape.vocab * shape.hidden
    assert pool(2).run(gathered_on_rank) == [[2 * head, 2 * shape.parameters]] * 2


def tensors_on_rank(rank, world):
    trained = parallelize(model(), make_mesh(Parallel(tp=2)))
    batch, w = data()
    with Collectives() as seen:
        (w * forward(trained, batch).logp).sum().backward()
    return seen.sizes.count(("all-reduce", 32 * (batch.num_tokens + batch.prefix_tokens.numel())))


def test_a_layer_has_two_all_reduces_of_its_tokens_each_way(pool):
    """Behind attention and the MLP, and before them in the backward; and one behind the embedding."""
    assert pool(2).run(tensors_on_rank) == [4 * LAYERS + 1] * 2
