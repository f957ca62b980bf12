"""Weights leave every layout whole, exact, under their checkpoint names, a bucket at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlkit._util.ranks import on_rank0
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model import weights
from rlkit.model.parallelize import parallelize
from rlkit.model.weights import export_hf, stream_weights
from rlkit.parallel.mesh import Parallel, make_mesh

LAYOUTS = {
    "plain": None,
    "shard": ({"shard": 4}, {}),
    "replicate x shard": ({"replicate": 2}, {}),
    "tp4": ({"tp": 4}, {}),
    "shard x tp, checkpointing": ({"tp": 2}, {"activation_checkpointing": True}),
    "shard x tp, offload": ({"tp": 2}, {"offload": True}),
    "cp x tp": ({"cp": 2, "tp": 2}, {}),
    "pp x shard": ({"pp": 2}, {}),
}


def dense(**options):
    sizes = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), **{**sizes, **options})


def cut(model, layout):
    sizes, options = layout
    return parallelize(model, make_mesh(Parallel(**sizes)), **options)


def moe():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=263, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=36, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def shard(model):
    mesh = init_device_mesh("cpu", (4,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


EVERY = tuple(LAYOUTS)
SOME = ("replicate x shard", "tp4", "pp x shard")  # with one copy of a tied embedding, with parts, and with two copies
OTHERS = tuple(name for name in EVERY if name not in SOME)


def layouts(names, **options):
    for name in names:
        model, layout = dense(**options), LAYOUTS[name]
        yield name, model if layout is None else cut(model, layout)


HOW = [(None, 5_000), (torch.bfloat16, 1), (torch.bfloat16, 1 << 28)]  # dtype, bytes of a bucket
REST = [(None, 1), (None, 1 << 28), (torch.bfloat16, 5_000)]


def stream_on_rank(rank, world, tied, names, how):
    truth = {k: v.clone() for k, v in dense(tie_word_embeddings=tied).named_parameters()}
    for name, model in layouts(names, tie_word_embeddings=tied):
        for dtype, bucket_bytes in how:
            seen = list(stream_weights(model, dtype=dtype, bucket_bytes=bucket_bytes))
            assert [k for k, _ in seen] == list(truth), (name, tied)
            for key, x in seen:
                assert type(x.detach()) is torch.Tensor, (name, type(x))
                assert torch.equal(x, truth[key].to(dtype or torch.float32)), (name, key, dtype)


STREAMS = {  # tied, layouts, ways
    "untied": (False, EVERY, HOW),
    "tied": (True, SOME, HOW),
    "tied, the other layouts": (True, OTHERS, HOW),
    "untied, the other ways": (False, EVERY, REST),
    "tied, the other ways": (True, EVERY, REST),
}


@pytest.mark.slow_cases("untied")
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * ("other" in x)) for x in STREAMS])
def test_stream_is_exact_under_every_layout(ranks, name):
    ranks.run(stream_on_rank, *STREAMS[name])


def gathered_on_rank(rank, world):
    model = shard(dense())
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    for (key, x), truth in zip(stream_weights(model), dense().parameters(), strict=True):
        assert torch.equal(x, truth), key


def test_stream_after_a_forward_that_left_weights_gathered(ranks):
    ranks.run(gathered_on_rank)


def experts_on_rank(rank, world, folder):
    on_rank0(lambda: moe().save_pretrained(folder / "truth"))
    truth = load_file(folder / "truth" / "model.safetensors")
    assert "model.layers.1.mlp.experts.7.gate_proj.weight" in truth
    for bucket_bytes in (1, 1 << 28):
        for name, layout in (("plain", lambda m: m), ("shard", shard)):
            seen = dict(stream_weights(layout(moe()), bucket_bytes=bucket_bytes))
            assert seen.keys() == truth.keys(), (name, seen.keys() ^ truth.keys())
            assert all(torch.equal(seen[k], truth[k]) for k in truth), name
    again = AutoModelForCausalLM.from_pretrained(export_hf(shard(moe()), None, folder / "exported"))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), moe().parameters(), strict=True))


@pytest.mark.slow
def test_experts_leave_under_the_names_of_the_checkpoint(ranks, tmp_path):
    ranks.run(experts_on_rank, tmp_path)


def export_on_rank(rank, world, folder, tied, names):
    for _, model in layouts(names, tie_word_embeddings=tied):
        for shard_bytes in (1 << 30, 20_000):
            path = export_hf(model, tiny_tokenizer(), folder / "m", dtype=torch.bfloat16, shard_bytes=shard_bytes)
            on_rank0(partial(check_export, path, dense(tie_word_embeddings=tied), shard_bytes > 1 << 20))


def check_export(path, truth, one_file):
    assert ([f.name for f in path.glob("*.safetensors")] == ["model.safetensors"]) == one_file
    again = AutoModelForCausalLM.from_pretrained(path)
    assert type(again) is type(truth)
    assert again.dtype == torch.bfloat16
    for (key, a), b in zip(again.named_parameters(), truth.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16()), key


EXPORTS = {  # tied, layouts: what an export writes are the weights that `stream_weights` yields
    "untied": (False, ("shard x tp, checkpointing", "cp x tp")),
    "tied": (True, SOME),
    "untied, the other layouts": (False, EVERY),
    "tied, the other layouts": (True, OTHERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_export_loads_from_every_layout(ranks, tmp_path, name):
    ranks.run(export_on_rank, tmp_path, *EXPORTS[name])
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def compiled_on_rank(rank, world, folder, tied):
    truth = dict(dense(tie_word_embeddings=tied).named_parameters())
    model = cut(dense(tie_word_embeddings=tied), ({}, {"compile": True}))
    seen = {name: x.clone() for name, x in stream_weights(model)}
    assert seen.keys() == truth.keys()
    assert all(torch.equal(seen[name], x) for name, x in truth.items())
    path = export_hf(model, tiny_tokenizer(), folder / "m", dtype=torch.bfloat16)
    on_rank0(partial(check_export, path, dense(tie_word_embeddings=tied), True))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tied"), [(1, False), (4, True)], ids=["one rank", "four ranks"])
def test_compiled_layers_keep_their_names(pool, tmp_path, world, tied):
    pool(world).run(compiled_on_rank, tmp_path, tied)


def full_disk_on_rank(rank, world, folder):
    def full(*_):
        raise OSError(28, "full")

    real, weights._write_config = weights._write_config, full
    try:
        with pytest.raises(OSError, match="cannot save the model") as caught:
            export_hf(shard(dense()), None, folder / "m")
    finally:
        weights._write_config = real
    assert caught.value.errno == 28


def test_export_that_fails_on_rank_0_fails_on_all(ranks, tmp_path):
    ranks.run(full_disk_on_rank, tmp_path)
    assert not list(tmp_path.iterdir())


def memory_on_rank(rank, world):
    """Growth of the resident set in MiB while 105 MiB of weights leave in buckets of 4 MiB."""
    with torch.device("meta"):
        model = dense(hidden=512, layers=8, heads=8, head_dim=64, kv_heads=8, intermediate=1536)
    model = shard(model).to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(1.0)
    assert sum(p.numel() * 4 for p in model.parameters()) > 100 * 2**20
    growth = []
    for dtype in (torch.bfloat16, None, torch.bfloat16):
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_mib()
        for _, x in stream_weights(model, dtype=dtype, bucket_bytes=1 << 22):
            assert x.flatten()[-1] == 1
            del x
        growth.append(peak_mib() - before)
    return growth


def peak_mib():
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return float(line.split()[1]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to reset the peak")
def test_stream_holds_a_bucket_not_the_model(ranks):
    for growth in ranks.run(memory_on_rank):
        assert max(growth) < 40, growth
