"""A model that is cut over one rank only, and optimizers of models that a forward has left gathered."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward, prepare_model
from rlkit.model.lora import add_lora
from rlkit.model.optim import adamw
from rlkit.model.parallelize import parallelize
from rlkit.model.sharding import inside, mesh_of
from rlkit.packing import pack
from rlkit.parallel.attention import as_inference
from rlkit.parallel.context import gather_keys
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.rollout.engines.local import LocalEngine
from rlkit.scripts.args import Model
from rlkit.scripts.engines import EngineSpec, open_engine
from rlkit.settings import Engines
from rlkit.types import Trajectory

REPO = Path(__file__).parents[2]
SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48}


def optimizer_after_forward(rank, world):
    model = parallelize(tiny_model(tiny_tokenizer(), **SIZES), make_mesh(Parallel()))
    with torch.no_grad(), as_inference(model):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    assert not all(hasattr(p, "device_mesh") for p in model.parameters()), "torch leaves the outermost gathered"
    optimizer = adamw(model, lr=1e-3)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(ValueError, match="not cut over ranks"):
        LocalEngine(model)
    return all(hasattr(p, "device_mesh") for p in held) and {id(p) for p in held} == {id(p) for p in model.parameters()}


def test_the_optimizer_holds_shards_even_after_a_forward_without_backward(ranks):
    assert all(ranks.run(optimizer_after_forward))


def left_on_a_cut_model(rank, world):
    model = add_lora(prepare_model(tiny_model(tiny_tokenizer(), **SIZES)), rank=2)
    row, mesh = model.lm_head.weight[3].clone(), make_mesh(Parallel())
    before = set(vars(model))
    cut = parallelize(model, mesh)
    assert mesh_of(cut).data is mesh.data
    assert (mesh_of(cut).attention > 0) == (mesh.dp > 1)
    assert [*cut.state_dict()] == [*model.state_dict()]
    with pytest.raises(RuntimeError, match="work fails"):
        inside(cut, lambda model: (_ for _ in ()).throw(RuntimeError("work fails")))
    assert torch.equal(inside(cut, lambda model, at: model.lm_head.weight[at].clone(), 3), row), "it is gathered"
    with pytest.raises(ValueError, match="use what `parallelize` returned"):
        forward(model, pack([[Trajectory([1, 2], [3], [True], [-1.0], [0])]]))
    return set(vars(model)) - before, mesh_of(model), mesh_of(cut.base_model)


def test_a_model_is_cut_without_attributes_of_ours(ranks):
    assert ranks.run(left_on_a_cut_model)[0] == (set(), None, None)


def keys_of_another_type(rank, world):
    q, k, v = (torch.randn(4, 2, 8) for _ in range(3))
    types = []
    attend = lambda q, k, v: types.append((k.dtype, v.dtype)) or q
    gather_keys(q, k, v.bfloat16(), attend, group=dist.group.WORLD)
    return types


def test_gathered_keys_and_values_have_the_type_of_the_values(ranks):
    """fp32 norms under autocast leave keys in fp32, and flash kernels take no values that were raised to it."""
    assert ranks.run(keys_of_another_type)[0] == [(torch.bfloat16, torch.bfloat16)]


def sampler_of_offloaded(rank, world):
    """What samples a model of one rank whose parameters stay on the CPU of the machine, while its GPU computes."""

    async def opened(model):
        async with open_engine(EngineSpec(Engines(), Model("tiny", device="cpu"), Path(), 32), model, None) as engine:
            return type(engine).__name__

    mesh = make_mesh(Parallel())
    model = parallelize(tiny_model(tiny_tokenizer(), **SIZES), mesh, offload=True)
    found = []
    for device in (mesh.device, torch.device("cuda", 0)):
        mesh.device = device
        with mock.patch("rlkit.rollout.engines.process.launch", mock.AsyncMock()):
            found.append(asyncio.run(opened(model)))
    with pytest.raises(ValueError, match=r"not offloaded to the CPU; use rlkit\.rollout\.engines\.process\.launch"):
        LocalEngine(model)
    return found


def test_an_offloaded_model_is_sampled_by_a_process_of_its_own(pool):
    here, apart = pool(1).run(sampler_of_offloaded)[0]
    assert here == "LocalEngine"  # where everything is on the CPU
    assert apart != "LocalEngine"


@pytest.mark.slow
def test_grpo_on_one_rank_of_torchrun_is_the_plain_run(tmp_path):
    tiny_model(tiny_tokenizer(), **SIZES).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}"}) + "\n" for i in range(20)))
    (tmp_path / "reward.py").write_text(
        "def score(completion, row):\n    return sum(map(str.isascii, completion)) / 8\n"
    )
    command = [
        "-m",
        "rlkit.scripts.grpo",
        "--model",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "data.jsonl"),
    ]
    command += [
        "--reward",
        f"{tmp_path / 'reward.py'}:score",
        "--steps",
        "2",
        "--prompts-per-step",
        "4",
        "--lr",
        "1e-3",
    ]
    command += ["--group-size", "4", "--max-new-tokens", "6", "--minibatches", "2", "--output"]
    lines = {}
    for name, prefix in (
        ("plain", []),
        ("rank", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]),
    ):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        run = [sys.executable, *prefix, *command, str(tmp_path / name)]
        done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        lines[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(lines["rank"], lines["plain"], strict=True):
        for key in ("reward/mean", "grad_norm", "entropy", "length/mean"):
            assert a[key] == pytest.approx(b[key], rel=1e-3), key
