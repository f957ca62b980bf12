"""The training benchmark: its arithmetic against torch's counter, its sides against each other, and its bounds."""

from __future__ import annotations

import importlib
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("_training")
    if dist.is_initialized():
        dist.destroy_process_group()


def tiny(training: Any) -> Any:
    return training.Size(32, 2, 4, 2, 8, 64, True)  # what `build` makes without a device


@pytest.mark.slow
def test_flops_are_those_that_torch_counts(training: Any) -> None:
    """torch counts the whole square of keys, and the head at every token."""
    from torch.utils.flop_counter import FlopCounterMode

    from rlkit.parallel.attention import Segment

    size, n = tiny(training), 12
    model = training.build(training.SIZES["0.6B"])
    model.set_attn_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=torch.arange(2 * n).view(2, n), use_cache=False).logits.sum().backward()
    causal = 12 * size.layers * size.heads * size.head_dim * 2 * (n * (n + 1) // 2)
    square = 12 * size.layers * size.heads * size.head_dim * 2 * n * n
    spans = [Segment(0, n, [(0, n)]), Segment(n, n, [(n, n)])]
    assert training.flops(size, spans, 2 * n) - causal == counter.get_total_flops() - square
    after = training.flops(size, [Segment(0, 5, [(9, 7), (0, 5)])], 0) - 6 * size.matrices * 5
    assert after == 12 * size.layers * size.heads * size.head_dim * (8 + 9 + 10 + 11 + 12)


class Still(torch.optim.SGD):
    """Leaves weights and gradients alone."""

    def step(self, *_: Any) -> None: ...

    def zero_grad(self, *_: Any) -> None: ...


@pytest.mark.slow_cases("sft")
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_all_sides_have_the_same_gradient(training: Any, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal weights and tokens, advantages of 1 and no correction for the engine."""
    from rlkit.loops.updates import PolicyLoss

    training.start(device="cpu")
    monkeypatch.setattr(training, "chosen_optimizer", lambda _, model: Still(model.parameters(), lr=1.0))
    monkeypatch.setattr(torch, "randn", torch.ones)
    monkeypatch.setattr(training, "PolicyLoss", lambda: PolicyLoss(correction=torch.ones_like))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    for module in ("_training", "rlkit.loops.updates"):
        monkeypatch.setattr(f"{module}.optimizer_step", lambda *_, **__: {})
    ids = torch.randint(training.VOCAB, (training.GROUP, training.PROMPT + training.ANSWER))
    if task == "grpo":
        ids[:, : training.PROMPT] = ids[0, : training.PROMPT].clone()
    grads = {}
    whole = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g
    for side, share in [("transformers", False), ("rlkit", False), *([("rlkit", True)] if task == "grpo" else [])]:
        case, model = training.Case("0.6B", task, side, share), training.build(training.SIZES["0.6B"])
        make = training.rlkit_step if side == "rlkit" else training.bare_step
        step, _ = make(case, model, training.packed(case, ids) if side == "rlkit" else ids, 32)
        step()
        grads[side, share] = torch.cat([whole(p.grad).flatten() for p in model.parameters()])
    bare = grads["transformers", False]
    assert bare.abs().max() > 0
    for grad in grads.values():
        assert torch.nn.functional.cosine_similarity(grad, bare, dim=0) > 0.999
        assert 0.99 < grad.norm() / bare.norm() < 1.01


@pytest.mark.slow
def test_a_row_that_does_not_fit_is_tried_smaller_and_leaves_no_model(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    build, seconds = training.build, training.seconds

    def watched(size: Any) -> Any:
        assert not any(ref() for ref in built), "the model before is still in memory"
        built.append(weakref.ref(model := build(size)))
        return model

    def full(step: Any) -> float:
        if len(built) == 1:
            step()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return seconds(step)

    monkeypatch.setattr(training, "build", watched)
    monkeypatch.setattr(training, "seconds", full)
    row = training.measure(training.Case("0.6B", "grpo", "rlkit", True))
    assert row["micro_tokens"] == training.MICRO_TOKENS[1]
    assert row["seconds"] > 0

    def never(step: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training, "seconds", never)
    row = training.measure(training.Case("0.6B", "sft", "transformers"))
    assert row == {"error": f"out of memory at {training.MICRO_TOKENS[-1]} tokens per micro-batch"}


@pytest.mark.slow
def test_a_row_has_a_time_limit_and_the_next_one_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("gpu_training")
    worker = bench.Worker(tmp_path)
    row = worker.row(bench.Case("0.6B", "sft"), seconds=0.01)
    assert row == {"error": "stopped after 0 s"}
    worker.stop()
    assert not worker.process.is_alive()
    worker = bench.Worker(tmp_path)
    assert "KeyError" in worker.row(bench.Case("no such size", "sft"), seconds=100)["error"]
    worker.process.kill()
    worker.process.join()
    assert "exit code -9" in worker.row(bench.Case("0.6B", "sft"), seconds=100)["error"]


def test_rates_are_shares_of_named_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("gpu_training")
    row = {"tflops": 494.5, "unshared_tflops": 989.0}
    assert bench.with_rates(dict(row), {"machine": {"device": "NVIDIA H200"}, "product_tflops": 800.0}) == row | {
        "mfu": 0.5, "unshared_mfu": 1.0, "of_product": 0.618,
    }  # fmt: skip
    unknown = bench.with_rates(dict(row), {"machine": {"device": "NVIDIA H100 NVL"}, "product_tflops": 400.0})
    assert "mfu" not in unknown


def rehearse(out: Path, *names: str, seconds: int = 280) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks/gpu_training.py"), "--rehearse", "--out", str(out)]
    command += ["--seconds", str(seconds), "--curve-seconds", "90", *(["--only", *names] if names else [])]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = warm.run(command, env=env, capture_output=True, text=True, check=False, spawns=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((out / "training_rehearsal_on_a_cpu.json").read_text())["rows"]
    assert all(line in done.stdout for line in rows if line != "curve")
    return rows


@pytest.mark.slow
def test_rows_of_each_kind(tmp_path: Path) -> None:
    rows = rehearse(tmp_path, "0.6B grpo rlkit shared", "0.6B grpo transformers", "0.6B decode rlkit")
    assert not [row for row in rows.values() if "error" in row]
    assert len(rows) == 4
    ours, bare = rows["0.6B grpo rlkit shared"], rows["0.6B grpo transformers"]
    assert ours["tokens_s"] * ours["seconds"] == pytest.approx(bare["tokens_s"] * bare["seconds"], rel=0.01)
    assert ours["processed_tokens_s"] < ours["tokens_s"]
    assert ours["optimizer"] == "AdamW"
    assert rows["0.6B decode rlkit"]["backend"] == "FusedDecoder"


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_every_row(tmp_path: Path) -> None:
    rows = rehearse(tmp_path, seconds=1200)  # about 250 on a quiet machine
    assert not [(name, row["error"]) for name, row in rows.items() if "error" in row and "TRL" not in name]
    assert len(rows) == 36
    assert [point[0] for point in rows["curve"]["curve"]] == [0, 2]


@pytest.mark.slow
def test_the_wrapper_benchmark_runs_without_torchrun_in_bf16(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/fsdp_overhead.py"), "--dtype", "bf16", "--repeats", "1"]
    command += ["--num-tokens", "32", "--hidden", "64", "--layers", "1", "--vocab", "100", "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    warm.run(command, env=env, check=True, capture_output=True)
    result = json.loads((tmp_path / "fsdp_overhead_cpu.json").read_text())
    assert result["args"]["dtype"] == "bf16"
    assert len(result["ratios"]) == 1
