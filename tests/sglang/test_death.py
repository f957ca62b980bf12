"""Servers that are killed in the middle of a rollout. The tests run in this order and use up one pair of servers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil
import pytest

from rlkit.rollout.rollout import rollout
from rlkit.rollout.sglang import ReplicaError, Server, connect
from rlkit.types import SamplingParams, Trajectory

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
PARAMS = SamplingParams(max_new_tokens=150)


@dataclass
class Question:
    ids: list[int]
    index: int
    row: dict = field(default_factory=dict)


QUESTIONS = [Question(list(b"question %02d:" % i), i) for i in range(12)]


def kill(server: Server) -> None:
    """As the machine would: everything at once, the guard included."""
    os.killpg(server.pid, signal.SIGKILL)


async def test_one_of_two_dies_and_every_group_completes_once(pair: list[Server]) -> None:
    done: Counter[int] = Counter()

    def on_group(question: Question, group: list[Trajectory]) -> None:
        done[question.index] += 1
        if len(done) == 1:
            kill(pair[0])

    async with connect([server.url for server in pair]) as engine:
        groups = await rollout(
            QUESTIONS, generate=engine.generate, params=PARAMS, group_size=8, seed=0, on_group=on_group
        )
        assert done == {question.index: 1 for question in QUESTIONS}
        assert [len(group) for group in groups] == [8] * 12
        for question, group in zip(QUESTIONS, groups, strict=True):
            for t in group:
                assert t.prompt_ids == question.ids
                assert len(t.ids) == len(t.logp) == len(t.versions) == 150
        assert not pair[0].alive
        assert pair[1].alive
        await engine.generate([1, 2, 3], params=SamplingParams(max_new_tokens=2))


async def test_the_last_one_dies_and_the_error_says_so(pair: list[Server]) -> None:
    done: list[int] = []

    def on_group(question: Question, _group: list[Trajectory]) -> None:
        done.append(question.index)
        if len(done) == 1:
            kill(pair[1])

    before = asyncio.all_tasks()
    async with connect(pair[1].url) as engine:
        began = time.monotonic()
        with pytest.raises(ReplicaError, match=r"restart one and resume the run(.|\n)*Connect call failed") as caught:
            await rollout(QUESTIONS, generate=engine.generate, params=PARAMS, group_size=8, seed=0, on_group=on_group)
        assert pair[1].url in str(caught.value)
        assert time.monotonic() - began < 60
    assert done, "a group that was complete before stays complete"
    assert asyncio.all_tasks() == before
    groups = {server.pid for server in pair}
    left = [p for p in psutil.process_iter(["status"]) if _group(p.pid) in groups and p.info["status"] != "zombie"]
    assert left == []


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
