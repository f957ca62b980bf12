"""The GRPO loops on a real SGLang server: on-policy after each sync, nothing lost, resumed after a server died."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.model.forward import load_model
from rlkit.rollout.engines.http import ReplicaError
from rlkit.rollout.engines.sglang import Server, SGLang
from rlkit.rollout.groups import single_turn
from rlkit.rollout.limits import success_between
from rlkit.settings import Optim, Rollouts, Schedule

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
PROMPTS = [Prompt([10 + i, 60], {}, i) for i in range(60)]


async def odd(prompt: Prompt, group: list) -> list:
    """Rewards that differ inside a group."""
    return [replace(t, reward=float(t.ids[0] % 2)) for t in group]


async def unequal(prompt: Prompt, sample: Any) -> Any:
    """Answers of 8 or 120 tokens, by the prompt."""
    return await single_turn(prompt, lambda ids: sample(ids, max_new_tokens=8 + 112 * (prompt.index % 2)))


def train(url: str, model: Any, folder: Path, *, score: Any = odd, keep_group: Any = None, **changes: Any) -> Path:
    """A run of four steps; `changes` are fields of `Rollouts` and `Schedule`."""
    when = {f.name for f in fields(Schedule)}
    schedule = Schedule(folder, **{"steps": 4} | {k: v for k, v in changes.items() if k in when})
    sampled = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 120}
    rollouts = Rollouts(**sampled | {k: v for k, v in changes.items() if k not in when})
    task = Task(PROMPTS, score, env=unequal, keep_group=keep_group)

    async def run() -> Path:
        async with SGLang(url) as engine:
            path = await grpo(model, tiny_tokenizer(), engine, task, rollouts, schedule, Optim(lr=3e-3))
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left
        return path

    return asyncio.run(run())


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def rows_of(folder: Path, kind: str = "train") -> list[dict]:
    paths = sorted((folder / "trajectories").glob(f"{kind}_*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def test_synchronous_training_is_on_policy_after_every_sync(server, checkpoints, tmp_path):
    """The server's log-probs are the trainer's, before the first and after each update; groups are refilled."""
    keep = success_between(0.1, 0.9)
    train(server.url, load_model(checkpoints[0]), tmp_path, keep_group=keep, journal=True)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert max(line["mismatch/abs_max"] for line in lines) < 1e-3
    assert max(line["mismatch/abs_mean"] for line in lines) < 1e-4
    assert max(line["staleness/max"] for line in lines) == 0
    assert min(line["grad_norm"] for line in lines) > 0
    dropped = rows_of(tmp_path, "dropped")
    assert len(rows_of(tmp_path)) == 4 * 16
    assert len(dropped) == 4 * sum(line["groups/dropped"] for line in lines)


def test_partial_rollout_continues_under_new_weights(server, checkpoints, tmp_path):
    train(server.url, load_model(checkpoints[0]), tmp_path, staleness=0.5, drop_off_policy=True, steps=5)
    rows = rows_of(tmp_path)
    assert any(len(r["versions"]) > 1 for r in rows)
    assert all(r["length"] == 8 + 112 * (r["group"] % 2) for r in rows)
    lines = lines_of(tmp_path)
    assert max(line["staleness/max"] for line in lines) == 1
    assert max(line["mismatch/abs_max"] for line in lines) < 1e-3, "tokens of the newest weights are on policy"


def test_asynchronous_training_keeps_the_staleness_bound(server, checkpoints, tmp_path):
    train(server.url, load_model(checkpoints[0]), tmp_path, steps=6, overlap=True)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 7))
    ages = [line["staleness/max"] for line in lines]
    assert max(ages) == 1
    assert ages[0] == 0
    rows = rows_of(tmp_path)
    assert all(r["length"] == 8 + 112 * (r["group"] % 2) for r in rows)


@pytest.mark.slow
def test_a_killed_server_is_an_error_and_the_run_resumes(pair, kill, server, checkpoints, tmp_path):
    """None of its processes is left. Complete groups are on disk and are not sampled again."""
    folder, killed = tmp_path / "run", pair[1]
    seen = 0

    async def kill_later(prompt: Prompt, group: list) -> list:
        nonlocal seen
        seen += 1
        if seen == 11:
            kill(killed)
        return await odd(prompt, group)

    options = {"save_steps": 1, "steps": 5, "overlap": True}
    with pytest.raises(ReplicaError, match=killed.url):
        train(killed.url, load_model(checkpoints[0]), folder, score=kill_later, **options)
    end = time.monotonic() + 240  # a process that was killed still has its memory to give back
    while alive(killed):
        assert time.monotonic() < end, alive(killed)
        time.sleep(0.1)
    before = lines_of(folder)
    assert before
    written = {
        tuple(json.loads(line)["key"]): json.loads(line)["ids"]
        for path in (folder / "completions").iterdir()
        for line in path.read_bytes().splitlines()
    }
    assert written
    train(server.url, load_model(checkpoints[0]), folder, resume=True, **options)
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == list(range(1, 6))
    groups = [r["group"] for r in rows_of(folder)]
    assert len(groups) == 4 * len(set(groups)), "no group is written twice"


def alive(server: Server) -> list[psutil.Process]:
    """Processes of the server's group, without zombies."""
    processes = [p for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE]
    return [p for p in processes if group_of(p) == server.pid]


def group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None
