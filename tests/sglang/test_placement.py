"""`rlkit grpo --engine sglang` with servers that it starts itself: every way of the weights, arguments, two ranks."""

from __future__ import annotations

from functools import partial

import pytest
from served import check_trained, kill_a_server
from served import train as train_with

from rlkit.rollout.engines.sglang import Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
train = partial(train_with, "sglang")


@pytest.mark.slow
def test_a_server_that_the_run_starts_takes_its_arguments_and_weights_through_files(
    tmp_path, checkpoints, sglang_python
):
    folder = tmp_path / "weights"
    sync = ["--weight-sync", "disk", "--weight-sync-folder", str(folder)]
    check_trained(
        tmp_path, train(tmp_path, checkpoints[0], sglang_python, *sync, "--engine-args=--max-total-tokens 4096")
    )
    log = (tmp_path / "run" / "sglang_0_0.log").read_text()
    assert "max_total_tokens=4096" in log or "max_total_num_tokens=4096" in log
    assert not folder.exists(), "what was written goes with the engine"


@pytest.mark.slow
def test_two_ranks_share_a_server_that_the_first_one_starts(tmp_path, checkpoints, sglang_python):
    done = train(tmp_path, checkpoints[0], sglang_python, "--weight-sync", "group", ranks=2)
    check_trained(tmp_path, done)
    assert [path.name for path in (tmp_path / "run").glob("sglang_*.log")] == ["sglang_0_0.log"]


@pytest.mark.slow
def test_a_running_server_takes_weights_through_a_group(tmp_path, checkpoints, sglang_python, server: Server):
    given = ["--engine-urls", server.url, "--weight-sync", "group", "--engine-pause", "in_place"]
    check_trained(tmp_path, train(tmp_path, checkpoints[0], sglang_python, *given))


@pytest.mark.slow
def test_the_only_server_is_killed_and_the_run_goes_on(tmp_path, checkpoints, sglang_python):
    kill_a_server("sglang", tmp_path, checkpoints[0], sglang_python)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ipc", "group", "disk"])
def test_a_server_of_two_ranks(tmp_path, checkpoints, sglang_python, monkeypatch, sync):
    """Tensor parallel: each rank takes its part of every tensor."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    given = ["--engine-tp", "2", "--weight-sync", sync, "--engine-args=--max-total-tokens 4096"]
    check_trained(tmp_path, train(tmp_path, checkpoints[0], sglang_python, *given))
    assert " TP1]" in (tmp_path / "run" / "sglang_0_0.log").read_text()
