"""Sharded loading from safetensors, and what is refused."""

from __future__ import annotations

import time
from datetime import timedelta

import huggingface_hub
import pytest
import torch
import torch.distributed as dist

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model import parallelize
from rlkit.model.forward import forward, load_model
from rlkit.model.parallelize import load_parallel
from rlkit.model.sharding import mesh_of
from rlkit.packing import pack
from rlkit.parallel.data import each_stage, of_last_stage
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.types import Trajectory


def save(folder, *, tied, dtype=torch.float32, **options):
    sizes = {"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 44}
    model = tiny_model(tiny_tokenizer(), **sizes, tie_word_embeddings=tied, seed=7)
    model.generation_config.eos_token_id = [5, 7]
    model.to(dtype).save_pretrained(folder, **options)


def batch():
    t = Trajectory(list(range(5)), list(range(60, 70)), [True] * 10, [0.0] * 10, [0] * 10)
    return pack([[t, t]])


def load_on_rank(rank, world, folder, sizes, options):
    """Differences between the model cut while loading, and the model loaded whole."""
    model, true = load_parallel(folder, make_mesh(Parallel(**sizes)), **options), load_model(folder)
    names = dict(model.named_parameters())
    held = {name for stage in each_stage(set(names), mesh=mesh_of(model)) for name in stage}
    assert held == dict(true.named_parameters()).keys()
    assert all(p.dtype == torch.float32 and not p.is_meta for p in names.values())
    assert model.generation_config.eos_token_id == true.generation_config.eos_token_id == [5, 7]
    true_names = dict(true.named_parameters())
    for name, p in names.items():
        assert torch.equal(p.full_tensor(), true_names[name]), name
    with torch.no_grad():
        found = of_last_stage(forward(model, batch()).logp, mesh=mesh_of(model))
        return float((found - forward(true, batch()).logp).abs().max())


def download_on_rank(rank, world, folder):
    """The first rank of the node downloads for 2 s, and a collective gives up after 1 s."""
    impatient, barrier, done = dist.new_group(timeout=timedelta(seconds=1)), dist.barrier, folder / "done"

    def download(*_, **options):
        if rank == 0 and not done.exists():
            time.sleep(2)
            done.touch()
        return str(folder / str(done.exists()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank))
        patch.setattr(dist, "barrier", lambda: barrier(impatient))
        patch.setattr(huggingface_hub, "snapshot_download", download)
        patch.setattr(parallelize, "load_config", lambda path: None)
        patch.setattr(parallelize, "check_causal_lm", lambda config: None)
        return parallelize.local_folder("owner/name").name


def test_a_download_may_take_longer_than_a_collective(pool, tmp_path):
    assert pool(2).run(download_on_rank, tmp_path) == ["True", "True"]


LAYOUTS = [{"tp": 2}, {}, {"pp": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "tp": 2}]
CASES = [(sizes, i % 2 == 0) for i, sizes in enumerate(LAYOUTS)]
CASES += [pytest.param(sizes, not tied, marks=pytest.mark.slow) for sizes, tied in CASES]


@pytest.mark.slow_cases("sizes0-True", "sizes3-False", "sizes4-True")
@pytest.mark.parametrize(("sizes", "tied"), CASES)
def test_each_rank_reads_its_shards(ranks, tmp_path, tied, sizes):
    save(tmp_path, tied=tied, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert max(ranks.run(load_on_rank, tmp_path, sizes, {})) < 1e-5


@pytest.mark.slow
def test_bf16_files_become_fp32_masters_and_offloaded_ones(ranks, tmp_path):
    save(tmp_path, tied=True, dtype=torch.bfloat16)
    assert max(ranks.run(load_on_rank, tmp_path, {"tp": 2}, {"offload": True})) < 1e-5
    assert 0 < max(ranks.run(load_on_rank, tmp_path, {}, {"dtype": torch.bfloat16})) < 0.2


def refuse_on_rank(rank, world, path, sizes):
    try:
        load_parallel(path, make_mesh(Parallel(**sizes)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 4}, r"ValueError: tp=4 must divide the 2 key-value heads of the model: use \[1, 2\]"),
        ({"tp": 2, "cp": 2, "ulysses": True}, r"tp=2 \* cp=2 \(ulysses\) must divide .* without ulysses"),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(ranks, tmp_path, sizes, message):
    import re

    save(tmp_path, tied=False)
    for said in ranks.run(refuse_on_rank, tmp_path, sizes):
        assert re.search(message, said), said


def test_missing_weights_and_folders_are_named(ranks, tmp_path):
    save(tmp_path / "m", tied=False, max_shard_size="20KB")
    (tmp_path / "empty").mkdir()
    lost = next(iter(sorted((tmp_path / "m").glob("*.safetensors"))))
    lost.unlink()
    assert all(
        "FileNotFoundError" in said and "empty" in said for said in ranks.run(refuse_on_rank, tmp_path / "empty", {})
    )
    assert all("no such folder" in said for said in ranks.run(refuse_on_rank, "/nowhere/at all", {}))
    for said in ranks.run(refuse_on_rank, tmp_path / "m", {}):
        assert "m does not hold this model: model.embed_tokens.weight is missing (1 differences in all)" in said


def test_an_architecture_without_a_plan_is_refused_but_for_shards(ranks, tmp_path):
    import transformers

    config = transformers.GPTNeoXConfig(vocab_size=67, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    for said in ranks.run(refuse_on_rank, tmp_path, {"tp": 2}):
        assert "'gpt_neox' is not covered by tp, cp, pp and ep, only gemma2" in said
