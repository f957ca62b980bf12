"""What ranks must agree on: skipped steps, norms, flags, metrics, who samples; precision and compilation."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import zlib
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlkit._util.ranks import Stopped
from rlkit.data.order import Part
from rlkit.data.sources import identity
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.checks import check_same_data
from rlkit.metrics import all_reduce, finalize, largest, mean, smallest
from rlkit.model.forward import compute_log_probs, forward, prepare_model, token_outputs
from rlkit.model.optim import adamw, global_norm, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.model.weights import stream_weights
from rlkit.packing import microbatches, pack, select
from rlkit.parallel.data import any_rank, rank_microbatches, reduce_metrics, summed
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.rollout.engines import EngineError
from rlkit.rollout.shared import SharedEngine
from rlkit.run import saving
from rlkit.run.on_save import Command
from rlkit.settings import Schedule
from rlkit.types import Trajectory


def model(**options):
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), **{**sizes, **options})


def batch(lens=(7, 4, 9, 2, 12, 5)):
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, 263, (n,), generator=generator).tolist()
    return pack([[Trajectory(draw(3), draw(n), [True] * n, [-1.0] * n, [0] * n)] for n in lens])


def nan_on_rank(rank, world, sizes):
    """One rank's loss is not finite: nobody steps, everybody counts it; the next step works."""
    mesh = make_mesh(Parallel(**sizes))
    trained = parallelize(model(), mesh)
    optimizer = adamw(trained, lr=1e-2)
    before = [p.to_local().clone() for p in trained.parameters()]
    out = []
    for poison in (mesh.dp_rank == mesh.dp - 1, False):
        (forward(trained, batch()).logp.sum() * (torch.nan if poison else 1.0)).backward()
        out.append(finalize(optimizer_step(optimizer, max_norm=1.0)))
        same = all(torch.equal(a, p.to_local()) for a, p in zip(before, trained.parameters(), strict=True))
        assert same == (len(out) == 1)
        assert all(p.grad is None for p in trained.parameters())
        assert bool(optimizer.state) == (len(out) == 2)
    assert math.isnan(out[0]["grad_norm"])
    return [m["skipped_step"] for m in out], out[1]["grad_norm"]


@pytest.mark.slow_cases("sizes1")
@pytest.mark.parametrize(
    "sizes", [{"replicate": 4, "shard": 1}, {"tp": 2}, pytest.param({"shard": 4}, marks=pytest.mark.slow)]
)
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(ranks, sizes):
    found = ranks.run(nan_on_rank, sizes)
    assert all(skipped == [1.0, 0.0] for skipped, _ in found)
    assert len({norm for _, norm in found}) == 1, "all ranks clip by the same bits"


def norm_on_rank(rank, world):
    """Plain tensors and DTensors of two meshes, cut and copied."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    x = [torch.randn(5, 3) for _ in range(5)]
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    grads = [
        x[0],
        distribute_tensor(x[1], flat, [Shard(0)]),
        distribute_tensor(x[2], grid, [Shard(0), Shard(1)]),
        distribute_tensor(x[3], grid, [Replicate(), Shard(0)]),
        distribute_tensor(x[4], grid["b"], [Replicate()]),
    ]
    return float(global_norm(grads)), float(torch.cat([t.flatten() for t in x]).norm())


def test_the_norm_counts_every_entry_once_over_mixed_meshes(ranks):
    for found, true in ranks.run(norm_on_rank):
        assert found == pytest.approx(true, rel=1e-6)


def microbatches_on_rank(rank, world, sizes, max_tokens):
    mesh = make_mesh(Parallel(**sizes))
    whole = batch()
    rows = torch.arange(whole.num_tokens)
    flat = torch.tensor([False, True, False, True, True, False])
    parts = list(rank_microbatches((whole, rows), mesh=mesh, max_tokens=max_tokens, isolate=flat))
    return mesh.dp_rank, [x.tolist() for _, x in parts]


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"cp": 2, "tp": 2}])
@pytest.mark.parametrize("max_tokens", [16, 100])
def test_ranks_get_as_many_microbatches_and_together_the_batch(ranks, sizes, max_tokens):
    found = ranks.run(microbatches_on_rank, sizes, max_tokens)
    assert len({len(parts) for _, parts in found}) == 1
    places = dict(found)  # ranks of one data parallel place get the same
    assert all(places[place] == parts for place, parts in found)
    assert sorted(x for parts in places.values() for part in parts for x in part) == list(range(batch().num_tokens))


def test_balance_over_ranks_is_near_the_bound():
    from rlkit.packing.balancing import plan_microbatches

    generator = torch.Generator().manual_seed(0)
    lens = torch.randn(256, generator=generator).exp().mul(60).clamp(4, 960).long().tolist()
    for ranks in (2, 4, 8):
        plan = plan_microbatches(batch(lens), max_tokens=4096, ranks=ranks)
        assert len(plan.bins) % ranks == 0
        assert plan.makespan <= 1.05 * plan.bound


def agree_on_rank(rank, world):
    mesh = make_mesh(Parallel(tp=2))
    x = torch.full((3,), float(mesh.dp_rank + 1))
    metrics = {"a": mean(x), "b": largest(x)}
    policy = lambda b: forward(trained, b)
    trained = parallelize(model(), mesh)
    whole = batch()
    scored = compute_log_probs(policy, whole, max_tokens=30, mesh=mesh)
    empty = forward(trained, select(whole, [])).logp
    return {
        "any": (any_rank(rank == 3), any_rank(False)),
        "sum": summed(x, mesh=mesh).tolist(),
        "metrics": finalize(reduce_metrics(metrics, mesh=mesh)),
        "score": scored.tolist(),
        "empty": list(empty.shape),
    }


def nan_in_an_extreme(rank, world, bad):
    x = torch.tensor([float("nan") if rank == bad else float(rank)])
    metrics = all_reduce({"low": smallest(x), "mean": mean(torch.tensor(float(rank))), "high": largest(x)})
    sound = all_reduce({"low": smallest(torch.tensor([rank]).float()), "high": largest(torch.tensor([rank]).float())})
    return finalize(metrics), finalize(sound)


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_nan_on_any_rank_is_the_extreme_of_all(ranks, bad):
    for broken, sound in ranks.run(nan_in_an_extreme, bad):
        assert [*broken] == ["low", "mean", "high"]
        assert math.isnan(broken["low"])
        assert math.isnan(broken["high"])
        assert broken["mean"] == 1.5
        assert sound == {"low": 0.0, "high": 3.0}


def test_agreement(ranks):
    with torch.no_grad():
        true = forward(prepare_model(model()), batch()).logp.tolist()
    for found in ranks.run(agree_on_rank):
        assert found["any"] == (True, False)
        assert found["sum"] == [3.0] * 3
        assert found["metrics"] == {"a": 1.5, "b": 2.0}
        assert found["score"] == pytest.approx(true, rel=1e-5, abs=1e-5)
        assert found["empty"] == [0]


class Engine:
    """Keeps what it is sent."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.weights = fails, {}

    async def update_weights(self, weights, *, version):
        for name, x in weights:
            if self.fails:
                raise EngineError("the engine is gone")
            self.weights[name] = x.clone()


def engine_on_rank(rank, world, fails):
    trained = parallelize(model(seed=3), make_mesh(Parallel(tp=2)))
    engine = Engine(fails) if rank == 0 else None
    try:
        asyncio.run(SharedEngine(engine).update_weights(stream_weights(trained), version=1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    true = dict(model(seed=3).named_parameters())
    return rank or (engine.weights.keys() == true.keys() and all(torch.equal(engine.weights[n], true[n]) for n in true))


def test_rank_0_sends_the_weights_of_all_ranks(ranks):
    assert ranks.run(engine_on_rank, False) == [True, 1, 2, 3]


def test_an_engine_that_fails_fails_on_all_ranks(ranks):
    assert ranks.run(engine_on_rank, True) == ["EngineError: the engine is gone"] * 4


def bf16_on_rank(rank, world, sizes):
    trained = parallelize(model(), make_mesh(Parallel(**sizes)), dtype=torch.bfloat16)
    out = forward(trained, batch())
    out.logp.sum().backward()
    assert out.logp.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in trained.parameters())
    return out.logp.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "cp": 2}])
def test_bf16_compute_over_fp32_masters(ranks, sizes):
    with torch.no_grad():
        true = forward(prepare_model(model()), batch()).logp
    for logp in ranks.run(bf16_on_rank, sizes):
        assert 1e-4 < (torch.tensor(logp) - true).abs().max() < 0.1


def head_on_rank(rank, world, sizes, truth):
    """A head of one's own: its values come back whole, and its gradient is right."""
    made = model()
    made.value = torch.nn.Linear(32, 1, bias=False)
    torch.nn.init.constant_(made.value.weight, 0.1)
    trained = parallelize(made, mesh := make_mesh(Parallel(**sizes)))
    whole = batch()
    (values,) = token_outputs(trained, whole, lambda hidden, _: (trained.value(hidden)[:, 0],))
    (values.square().sum() / mesh.dp).backward()
    values_true, grad_true = truth
    torch.testing.assert_close(values, values_true, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trained.value.weight.grad.full_tensor(), grad_true, rtol=1e-5, atol=1e-4)


@pytest.mark.slow_cases("sizes2")
@pytest.mark.parametrize("sizes", [pytest.param({}, marks=pytest.mark.slow), {"cp": 4}, {"tp": 2, "cp": 2}])
def test_a_head_of_ones_own(ranks, sizes):
    made = prepare_model(model())
    made.value = torch.nn.Linear(32, 1, bias=False)
    torch.nn.init.constant_(made.value.weight, 0.1)
    (values,) = token_outputs(made, batch(), lambda hidden, _: (made.value(hidden)[:, 0],))
    values.square().sum().backward()
    ranks.run(head_on_rank, sizes, (values.detach(), made.value.weight.grad))


def compile_on_rank(rank, world, options):
    import torch._dynamo

    torch._dynamo.config.suppress_errors = False
    trained = parallelize(model(), make_mesh(Parallel(cp=2)), compile=True, **options)
    losses = []
    for (micro,) in microbatches((batch(),), max_tokens=30):
        loss = forward(trained, micro).logp.sum()
        loss.backward()
        losses.append(loss.item())
    return losses, float(global_norm([p.grad for p in trained.parameters()]))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}])
def test_compiled_layers_compute_the_same(pool, options):
    made = prepare_model(model())
    losses = []
    for (micro,) in microbatches((batch(),), max_tokens=30):
        loss = forward(made, micro).logp.sum()
        loss.backward()
        losses.append(loss.item())
    norm = float(global_norm([p.grad for p in made.parameters()]))
    for found, found_norm in pool(2).run(compile_on_rank, options, timeout=500):
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norm == pytest.approx(norm, rel=1e-5)


def refuse_on_rank(rank, world):
    with pytest.raises(ValueError, match="compile=True with tp > 1"):
        parallelize(model(), make_mesh(Parallel(tp=2)), compile=True)


def test_compiled_tensor_parallel_is_refused(pool):
    pool(2).run(refuse_on_rank)


def end_on_rank(rank, world, folder):
    """The end of a run whose group gives up after 2 s, while rank 0 waits for 4 s for a command of the user."""
    impatient = dist.new_group(timeout=timedelta(seconds=2))
    any_rank = saving.any_rank

    def within_the_timeout(flag):
        dist.barrier(group=impatient)
        return any_rank(flag)

    saving.any_rank = within_the_timeout
    try:
        with saving.open_training(Schedule(folder, steps=1), start=-1) as job:
            if rank == 0:
                job.commands.append(Command(subprocess.Popen(["sleep", "4"]), folder))
                job.stop.requested = True
    except Stopped:
        return True
    finally:
        saving.any_rank = any_rank
    return False


def test_the_others_wait_without_bound_for_what_rank_0_waits_for_at_the_end(pool, tmp_path):
    assert pool(2).run(end_on_rank, tmp_path / "run") == [True, True]


def data_on_rank(rank, world, folder):
    """Each rank has a copy of its own, as if it were another node; the names are the same."""
    (folder / str(rank)).mkdir()
    with pytest.MonkeyPatch.context() as there:
        there.chdir(folder / str(rank))
        said = []
        for num, text in ((3, "same\n"), (3, f"{rank} other\n"), (3 + rank, "same\n")):
            Path("train.jsonl").write_text(text * num)
            for parts in ([Part(num, 1.0, identity(["train.jsonl"]))], []):
                try:
                    check_same_data(num, parts)
                    said.append("")
                except ValueError as error:
                    said.append(str(error))
    return said


def test_copies_of_the_data_that_differ_between_ranks_are_refused_on_all(pool, tmp_path):
    (same, no_names, other, as_many, longer, nameless), there = pool(2).run(data_on_rank, tmp_path)
    assert there == [same, no_names, other, as_many, longer, nameless]
    assert same == no_names == as_many == ""
    sums = [f"{zlib.crc32(text * 16, zlib.crc32(b'24')):08x}" for text in (b"0 other\n" * 3, b"1 other\n" * 3)]
    assert other == (
        f"train.jsonl: 3 rows (checksum {sums[0]}) on rank 0, 3 ({sums[1]}) on rank 1: give all nodes the same files"
    )
    assert re.fullmatch(r"train.jsonl: 3 rows \(checksum \w{8}\) on rank 0, 4 \(\w{8}\) on rank 1: .*", longer)
    assert nameless.startswith("the data: 3 rows (checksum -) on rank 0, 4 (-) on rank 1: ")
