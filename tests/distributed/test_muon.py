"""Muon over ranks: each orthogonalizes a share of the matrices, and the weights are those of one process."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.checkpoint import load_checkpoint, save_checkpoint
from rlkit.model.forward import forward, prepare_model
from rlkit.model.heads import load_value_model, load_value_parallel
from rlkit.model.lora import add_lora
from rlkit.model.optim import adamw, muon, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.model.weights import clean_name, stream_weights
from rlkit.packing import pack
from rlkit.parallel.data import rank_microbatches
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.types import Trajectory

NAMES = ("k_proj", "v_proj", "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model():
    """Three layers and 44 hidden units, which no number of ranks here divides."""
    sizes = {"hidden": 32, "layers": 3, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), **sizes, tie_word_embeddings=False)


def step_on_fixed_gradients(trained, optimizer, step):
    for name, p in trained.named_parameters():
        generator = torch.Generator().manual_seed(step + zlib.crc32(clean_name(name).encode()))
        whole = torch.randn(p.shape, generator=generator)
        cut = isinstance(p, DTensor)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None) if cut else whole
    optimizer.step()


def weights_of(trained):
    return {name: x.clone() for name, x in stream_weights(trained)}


def on_rank(rank, world, sizes, options, folder):
    """Weights after two steps, the second from a checkpoint, and the matrices that this rank multiplied."""
    mesh, multiplied = make_mesh(Parallel(**sizes)), []
    trained = parallelize(prepare_model(model()), mesh, **options)
    optimizer = muon(trained, lr=0.01, weight_decay=0.1)
    kernel = torch.optim._muon._zeropower_via_newtonschulz
    with pytest.MonkeyPatch.context() as patch:
        count = lambda x, *rest: multiplied.append(x.shape) or kernel(x, *rest)
        patch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", count)
        step_on_fixed_gradients(trained, optimizer, 0)
    path = save_checkpoint(folder, step=1, model=trained, optimizer=optimizer, state={}, keep=1)
    other = parallelize(prepare_model(model()), mesh, **options)
    optimizer = muon(other, lr=0.5)
    load_checkpoint(path, model=other, optimizer=optimizer)
    step_on_fixed_gradients(other, optimizer, 1)
    return weights_of(other), len(multiplied)


@pytest.mark.slow_cases("4-sizes1-options1")
@pytest.mark.parametrize(
    ("world", "sizes", "options"),
    [
        (2, {"shard": 2}, {}),
        (4, {"replicate": 2}, {"offload": True}),
        pytest.param(4, {"tp": 2, "shard": 2}, {}, marks=pytest.mark.slow),
        pytest.param(4, {"pp": 2, "cp": 2}, {}, marks=pytest.mark.slow),
        pytest.param(4, {"replicate": 4}, {}, marks=pytest.mark.slow),
        pytest.param(4, {"tp": 4}, {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_share_the_matrices_and_have_the_bits_of_one_process(pool, tmp_path, world, sizes, options):
    alone = prepare_model(model())
    optimizer = muon(alone, lr=0.01, weight_decay=0.1)
    for step in range(2):
        step_on_fixed_gradients(alone, optimizer, step)
    truth, total = weights_of(alone), 3 * len(NAMES)
    results = pool(world).run(on_rank, sizes, options, tmp_path)
    for weights, multiplied in results:
        assert weights.keys() == truth.keys()
        for name, x in weights.items():
            assert torch.equal(x, truth[name]), name
        assert multiplied < total
    assert sum(multiplied for _, multiplied in results) == total


def train(trained, mesh=None):
    """Two steps on a real batch."""
    draw = lambda n: [(11 * i + n) % 263 for i in range(n)]
    batch = pack([[Trajectory(draw(p), draw(n), [True] * n, [-1.0] * n, [0] * n)] * 2 for p, n in [(5, 9), (3, 4)]])
    optimizer = muon(trained, lr=0.01)
    for _ in range(2):
        for micro, w in rank_microbatches((batch, batch.mask / batch.mask.sum()), mesh=mesh, max_tokens=64):
            (-w * forward(trained, micro).logp).sum().backward()
        optimizer_step(optimizer, max_norm=0.5, model=trained)
    return weights_of(trained)


def trained_on_rank(rank, world):
    mesh = make_mesh(Parallel(shard=2))
    return train(parallelize(prepare_model(model()), mesh), mesh)


@pytest.mark.slow
def test_ranks_train_as_one_process_does(pool):
    """Gradients are summed in another order, and the products of matrices in bf16 enlarge such rounding."""
    before, truth = weights_of(prepare_model(model())), train(prepare_model(model()))
    for weights in pool(2).run(trained_on_rank):
        for name, x in weights.items():
            assert (x - truth[name]).norm() < 0.15 * (truth[name] - before[name]).norm(), name


def tied_stage(rank, world, folder):
    """A step of the first and the last stage, which hold a copy of the embedding each, and a checkpoint of both."""
    mesh = make_mesh(Parallel(pp=2))
    stage = parallelize(prepare_model(tied()), mesh)
    optimizer = muon(stage, lr=0.01, weight_decay=0.1)
    step_on_fixed_gradients(stage, optimizer, 0)
    save_checkpoint(folder, step=1, model=stage, optimizer=optimizer, state={}, keep=1)
    return stage.base_model.embed_tokens.weight.full_tensor().detach()


def tied():
    sizes = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), **sizes, tie_word_embeddings=True)


def test_both_copies_of_a_tied_head_take_the_step_of_one_process(pool, tmp_path):
    alone = prepare_model(tied())
    step_on_fixed_gradients(alone, muon(alone, lr=0.01, weight_decay=0.1), 0)
    for found in pool(2).run(tied_stage, tmp_path):
        assert torch.equal(found, alone.model.embed_tokens.weight)


OPTIMIZERS = {"adamw": adamw, "muon": muon}


def headed_stage(rank, world, kind, model, one_process, folder):
    """The weights after two steps, the second from a checkpoint of one process, and a checkpoint of the first."""
    stage = load_value_parallel(model, make_mesh(Parallel(pp=2)), lora_rank=4, lora_alpha=32)
    optimizer = OPTIMIZERS[kind](stage, lr=0.01)
    step_on_fixed_gradients(stage, optimizer, 0)
    save_checkpoint(folder, step=1, model=stage, optimizer=optimizer, state={}, keep=1)
    load_checkpoint(one_process, model=stage, optimizer=optimizer)
    step_on_fixed_gradients(stage, optimizer, 1)
    return weights_of(stage), [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_head_that_trains_on_one_stage_only_is_saved_and_loaded(pool, tmp_path, kind):
    """A critic's head, matrix and bias, trains whole over LoRA: the first stage has no vector, and no part for AdamW
    beside Muon."""
    pytest.importorskip("peft")
    tied().save_pretrained(tmp_path / "model")
    make = lambda: add_lora(load_value_model(tmp_path / "model"), rank=4)
    alone = make()
    optimizer = OPTIMIZERS[kind](alone, lr=0.01)
    step_on_fixed_gradients(alone, optimizer, 0)
    path = save_checkpoint(tmp_path / "one", step=1, model=alone, optimizer=optimizer, state={}, keep=1)
    results = pool(2).run(headed_stage, kind, tmp_path / "model", path, tmp_path / "two")
    other = make()
    optimizer = OPTIMIZERS[kind](other, lr=0.5)
    load_checkpoint(tmp_path / "two" / path.name, model=other, optimizer=optimizer)
    step_on_fixed_gradients(other, optimizer, 1)
    truth = weights_of(other)
    for weights, _ in results:
        assert all(torch.equal(x, truth[name]) for name, x in weights.items())
        assert weights.keys() == truth.keys()
    empty, whole = [sizes for _, sizes in results]
    assert len(empty) == len(whole) == len(optimizer.param_groups)
    assert 0 in empty
    assert 0 not in whole
