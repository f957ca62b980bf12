"""`rlkit grpo --engine vllm`: a server that the run starts itself, and one that runs already."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from served import check_trained, kill_a_server
from served import train as train_with

from rlkit.rollout.engines.vllm import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
train = partial(train_with, "vllm")


def test_a_server_that_the_run_starts(tmp_path, checkpoints, vllm_python):
    check_trained(tmp_path, train(tmp_path, checkpoints[0], vllm_python, "--engine-args=--max-num-seqs 7"))
    assert "'max_num_seqs': 7" in (tmp_path / "run" / "vllm_0_0.log").read_text()
    assert not (tmp_path / "run" / "weights").exists(), "what was written goes with the engine"


def test_a_running_server(tmp_path, checkpoints, vllm_python, server: Server):
    given = ["--engine-urls", server.url, "--engine-pause", "in_place", "--weight-sync-folder", str(tmp_path / "w")]
    check_trained(tmp_path, train(tmp_path, checkpoints[0], vllm_python, *given))


def test_a_way_of_the_weights_that_the_cpu_build_lacks_is_refused_at_once(tmp_path, checkpoints, vllm_python):
    done = train(tmp_path, checkpoints[0], vllm_python, "--weight-sync", "group")
    assert done.returncode == 2
    assert "--weight-sync group: vLLM on a CPU takes weights from files only" in done.stderr


@pytest.mark.slow
def test_the_only_server_is_killed_and_the_run_goes_on(tmp_path, checkpoints, vllm_python):
    kill_a_server("vllm", tmp_path, checkpoints[0], vllm_python)


@pytest.mark.slow
@pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's fp8 cache needs AVX-512 on a CPU"
)
def test_a_quantised_cache_shows_as_mismatch(tmp_path, checkpoints, vllm_python):
    """Features of the server pass through; weights are pushed as ever, and truncated importance sampling is on."""
    done = train(tmp_path, checkpoints[0], vllm_python, "--engine-args=--kv-cache-dtype fp8_e5m2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(1e-3 < line["mismatch/abs_mean"] < 0.5 for line in lines)


@pytest.mark.slow
def test_layers_are_quantized_anew_at_every_update(tmp_path, checkpoints, vllm_python):
    """The mismatch is that of 8 bits after large steps, too; weights of the start would be off by far more."""
    done = train(tmp_path, checkpoints[0], vllm_python, "--engine-quantization", "fp8", "--lr", "0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "quantization=fp8_per_channel" in (tmp_path / "run" / "vllm_0_0.log").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(1e-3 < line["mismatch/abs_mean"] < 0.5 for line in lines)
