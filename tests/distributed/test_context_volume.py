"""The bytes that context parallelism moves, counted on four ranks, are those of `benchmarks/context.py`."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward
from rlkit.model.parallelize import parallelize
from rlkit.packing import pack
from rlkit.parallel import collectives
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.types import Trajectory

LENGTH = 320
SHAPE = {"hidden": 32, "layers": 3, "heads": 8, "kv_heads": 4, "head_dim": 8}


@pytest.fixture(scope="module")
def paper():
    folder = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("benchmarks_context", folder / "context.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


class Counting:
    """The collectives of context parallelism, with the bytes that come from other ranks counted."""

    def __init__(self, monkeypatch) -> None:
        self.bytes = 0.0
        for name in ("_gather", "_reduce_scatter"):
            monkeypatch.setattr(collectives, name, partial(self._counted, getattr(collectives, name)))
        monkeypatch.setattr(dist, "all_to_all_single", partial(self._counted, dist.all_to_all_single))

    def _counted(self, collective, out, x, *splits, group):
        ranks = dist.get_world_size(group)
        self.bytes += max(out.numel(), x.numel()) * x.element_size() * (ranks - 1) / ranks
        collective(out, x, *splits, group=group)


def volume_on_rank(rank, world, sizes, again):
    """Bytes received per token of this rank, without those of the log-probs (two fp32 numbers a token)."""
    mesh = make_mesh(Parallel(**sizes))
    model = parallelize(tiny_model(tiny_tokenizer(), **SHAPE, intermediate=44), mesh, activation_checkpointing=again)
    n = LENGTH - 1
    batch = pack([[Trajectory([1], [2] * (n + 1), [True] * (n + 1), [0.0] * (n + 1), [0] * (n + 1))]])
    with pytest.MonkeyPatch.context() as patch:
        counting = Counting(patch)
        forward(model, batch).logp.sum().backward()
    own = LENGTH / mesh.sizes.cp
    return counting.bytes / own - 2 * 4 * (mesh.sizes.cp - 1)


WAYS = [(2, False, True), (2, True, False), (4, False, False), (4, True, True)]  # every pair of cp, ulysses and again
WAYS += [pytest.param(cp, ulysses, not again, marks=pytest.mark.slow) for cp, ulysses, again in WAYS]


@pytest.mark.parametrize(("cp", "ulysses", "again"), WAYS)
def test_bytes_are_those_on_paper(ranks, paper, cp, ulysses, again):
    shape = paper.Shape(3, 32, 8, 4, 44, 263, head_dim=8, qk_norm=True)
    expected = paper.moved(shape, cp, ulysses=ulysses, size=4, again=again)
    for found in ranks.run(volume_on_rank, {"cp": cp, "ulysses": ulysses}, again):
        assert found == pytest.approx(expected, rel=1e-6)


def test_cost_per_token_grows_with_attention_alone(paper):
    args = paper.Args()
    short, long = (paper.seconds(args, length, cp) for length, cp in ((16384, 1), (131072, 8)))
    assert long["dense"] == short["dense"]
    assert long["attention"] == pytest.approx(8 * short["attention"])
    assert 0 < long["ulysses"] < long["gather"] < 0.05 * (long["dense"] + long["attention"])
