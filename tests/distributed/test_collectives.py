"""Collectives of a step, counted as they are issued: how many, of which kind, how many bytes."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model import launch
from rlkit.model.forward import compute_log_probs, forward
from rlkit.model.memory import Layout, shape_of
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.model.sharding import mesh_of
from rlkit.model.traffic import microbatch_traffic
from rlkit.packing import pack
from rlkit.parallel.data import rank_microbatches
from rlkit.parallel.forest import forest
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.parallel.pipeline import pipelined
from rlkit.settings import ParallelArgs
from rlkit.types import Trajectory

LAYERS = 4
KINDS = {  # of torch.distributed, and of DTensor
    "_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce", "all_reduce": "all-reduce", "alltoall_base_": "all-to-all", "send": "send",
}  # fmt: skip


class Collectives(TorchDispatchMode):
    """The collectives of a rank as they are issued: kind, bytes of the largest tensor, ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name in KINDS:
            sizes = [x.numel() * x.element_size() for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            given = [x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x)]
            group = dist.ProcessGroup.unbox(given[0]) if given else _resolve_process_group(args[-1])
            self.seen.append((KINDS[name], max(sizes), group.size()))
        return out

    @property
    def counts(self):
        return Counter(kind for kind, *_ in self.seen)

    def received(self):
        """Bytes of each kind that reach the rank, in a ring."""
        total = Counter()
        for kind, size, ranks in self.seen:
            share = (ranks - 1) / ranks * (1 + (kind == "all-reduce"))
            total[kind] += size if kind == "send" else size * share
        return total


def model(**options):
    sizes = {"hidden": 32, "layers": LAYERS, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), **{**sizes, **options})


def tied():
    return model(tie_word_embeddings=True)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"shard": 4}, {}),
        ({"pp": 2}, {"activation_checkpointing": True}),
        ({"tp": 2}, {"offload": True}),
        ({"cp": 2, "shard": 2}, {"activation_checkpointing": True}),
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_kept_bytes_are_those_on_paper(pool):
    shape = shape_of(model().config)
    head = shape.hidden + shape.vocab * shape.hidden
    assert pool(2).run(gathered_on_rank) == [[2 * head, 2 * shape.parameters]] * 2


def tensors_on_rank(rank, world):
    trained = parallelize(model(), make_mesh(Parallel(tp=2)))
    batch, w = data()
    with Collectives() as seen:
        (w * forward(trained, batch).logp).sum().backward()
    shared = forest(batch)  # some of the samples begin alike
    return seen.seen.count(("all-reduce", 4 * 32 * len(shared.source), 2))


def test_a_layer_has_two_all_reduces_of_its_tokens_each_way(pool):
    """Behind attention and the MLP, and before them in the backward; and one behind the embedding."""
    assert pool(2).run(tensors_on_rank) == [4 * LAYERS + 1] * 2


def mixture():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=LAYERS, head_dim=8, num_attention_heads=8,
        num_key_value_heads=4, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


TOKENS = 96


def traffic_on_rank(rank, world, make, sizes, options):
    """Counts and bytes of one micro-batch on this rank, as issued and as on paper."""
    mesh, made = make_mesh(Parallel(**sizes)), globals()[make]()
    shape = shape_of(made.config)
    trained = parallelize(made, mesh, dtype=torch.bfloat16, **options)
    ids = [(7 * i * i) % 263 for i in range(TOKENS)]
    sequence = Trajectory([1], ids, [True] * TOKENS, [-1.0] * TOKENS, [0] * TOKENS)
    with Collectives() as seen:
        forward(trained, pack([[sequence]])).logp.sum().backward()
    layout = Layout(
        world,
        tokens=TOKENS,
        checkpointing=options.get("activation_checkpointing", False),
        reshard_after_forward=options.get("reshard_after_forward", True),
        **{name: size for name, size in sizes.items() if name != "shard"},
    )
    paper = microbatch_traffic(shape.stages(mesh.sizes.pp)[mesh.pp_rank], layout)
    return dict(seen.counts), dict(seen.received()), paper


CKPT, KEPT = {"activation_checkpointing": True}, {"reshard_after_forward": False}


@pytest.mark.slow_cases(
    "4-mixture-sizes6-options6",
    "4-model-sizes3-options3",
    "2-tied-sizes1-options1",
    "4-model-sizes2-options2",
    "4-model-sizes4-options4",
    "4-model-sizes5-options5",
)
@pytest.mark.parametrize(
    ("world", "make", "sizes", "options"),
    [
        (2, "model", {"shard": 2}, CKPT),
        (2, "tied", {"shard": 2}, KEPT),
        (4, "model", {"replicate": 2}, KEPT),
        (4, "model", {"tp": 2}, CKPT),
        (4, "model", {"cp": 2}, CKPT),
        (4, "model", {"pp": 2}, CKPT),
        (4, "mixture", {"ep": 2}, CKPT),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (2, "model", {"tp": 2}, {}),
                (4, "model", {"cp": 2, "tp": 2}, KEPT),
                (4, "tied", {"pp": 4}, {}),
                (4, "tied", {"pp": 2, "tp": 2}, KEPT),
                (4, "mixture", {"ep": 4}, {}),
                (4, "mixture", {"pp": 2, "cp": 2, "ep": 2}, CKPT),
                (4, "mixture", {"replicate": 2, "ep": 2}, {}),
            ]
        ),
    ],
)
def test_collectives_of_a_micro_batch_are_those_on_paper(pool, world, make, sizes, options):
    """Every count, and the bytes to 2%; those of all-to-alls, which depend on the router, to a third."""
    for counts, received, paper in pool(world).run(traffic_on_rank, make, sizes, options):
        assert counts == {kind: count for kind, (count, _) in paper.items()}
        for kind, (_, size) in paper.items():
            assert received[kind] == pytest.approx(size, rel=1 / 3 if kind == "all-to-all" else 0.02), kind


def test_experts_under_tensor_parallelism_are_not_counted():
    stage = shape_of(mixture().config).stages(1)[0]
    with pytest.raises(ValueError, match="for tp=1 only"):
        microbatch_traffic(stage, Layout(4, tp=2))
