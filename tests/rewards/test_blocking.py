"""Rewards that a deadline cannot end: those that block the event loop, hold Python's lock or wait for stdin."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlkit.rewards import RewardError, Sample, run_reward

ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, re, sys, time
from rlkit.rewards import Sample, run_reward_each, timeouts

timeouts._SILENT_S = 0.5
samples = [Sample("a", {"prompt": "q"}, i) for i in range(2)]

def asks(completion, row):
    return float(input())

def backtracks(completion, row):
    return float(bool(re.match("(a+)+$", "a" * 40 + "!")))

async def sleeps(completion, row):
    await asyncio.sleep(1.5)
    return 1.0

def works(completion, row):
    time.sleep(0.8)
    return 1.0

print(asyncio.run(run_reward_each(globals()[sys.argv[1]], samples, timeout_s=float(sys.argv[2]))))
sys.exit(3)
"""


def start(name, timeout_s, **streams):
    command = [sys.executable, "-c", SCRIPT, name, str(timeout_s)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, **streams)


async def test_an_async_reward_that_blocks_past_its_deadline_fails():
    calls = []

    async def blocks(completion, row):
        calls.append(completion)
        time.sleep(0.3)
        return 1.0

    samples = [Sample("a", {}, i) for i in range(3)]
    with pytest.raises(RewardError, match=r"blocks failed on row 1: blocked the event loop for 0\.\d s"):
        await run_reward(blocks, samples, timeout_s=0.1)
    assert len(calls) == 1


@pytest.mark.slow
async def test_an_async_reward_that_blocks_for_a_second_is_named_once(caplog):
    async def dawdles(completion, row):
        time.sleep(1.1)
        return 1.0

    found = await run_reward(dawdles, [Sample("a", {}, i) for i in range(2)], timeout_s=60)
    assert [one.reward for one in found] == [1.0, 1.0]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "dawdles is async and ran without an await for 1.1 s: await in it (asyncio.sleep, httpx" in said


def test_a_reward_that_holds_the_lock_of_python_is_shown_by_its_stack():
    process = start("backtracks", 0.1, stderr=subprocess.PIPE)
    try:
        said = ""
        while "in backtracks" not in said:
            said += process.stderr.readline() or pytest.fail(said)
        assert said.startswith("Timeout (")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sleeps", "works"])
def test_no_stack_is_printed_while_the_loop_runs(name):
    said, errors = start(name, 5, stdout=subprocess.PIPE, stderr=subprocess.PIPE).communicate()
    assert said.count("reward=1.0") == 2
    assert errors == ""


def test_the_exit_code_is_kept_while_a_reward_waits_for_stdin():
    process = start("asks", 0.2, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.wait(60) == 3
    said, errors = process.communicate()
    assert "no result after 0.2 s" in said
    assert errors == ""
