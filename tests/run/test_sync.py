"""Coroutines as plain functions, with and without an event loop that runs: results, errors, context, Ctrl-C."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path

import pytest
import warm

from rlkit.rewards.math import equal
from rlkit.run.folder import read_metrics
from rlkit.run.sync import blocking, run_sync
from rlkit.scripts import cli

ROOT = Path(__file__).parents[2]
where: ContextVar[str] = ContextVar("where", default="nowhere")


async def look() -> tuple[str, bool]:
    await asyncio.sleep(0)
    return where.get(), threading.current_thread() is threading.main_thread()


async def in_a_loop(function, *args):
    """As a notebook's cell calls it."""
    return function(*args)


def test_the_result_and_the_context_are_the_same_inside_a_running_loop():
    token = where.set("here")
    try:
        assert run_sync(look()) == ("here", True)
        assert asyncio.run(in_a_loop(lambda: run_sync(look()))) == ("here", False)
        nested = in_a_loop(lambda: run_sync(in_a_loop(lambda: run_sync(look()))))
        assert asyncio.run(nested) == ("here", False)
    finally:
        where.reset(token)


def test_errors_come_out_and_handlers_go_back():
    before = signal.getsignal(signal.SIGINT)

    async def fails():
        raise ZeroDivisionError("no luck")

    async def both():
        with pytest.raises(ZeroDivisionError, match="no luck"):
            run_sync(fails())
        return run_sync(look())

    assert asyncio.run(both()) == ("nowhere", False)
    with pytest.raises(ZeroDivisionError, match="no luck"):
        run_sync(fails())
    assert signal.getsignal(signal.SIGINT) is before


def test_a_coroutine_argument_is_launched_and_closed_by_the_call():
    seen = []

    @asynccontextmanager
    async def engine():
        seen.append(asyncio.get_running_loop())
        yield "engine"
        seen.append("closed")

    async def launched():
        return engine()

    async def train(model, engine, *, steps):
        """Docs."""
        seen.append(asyncio.get_running_loop())
        return model, engine, steps

    train_sync = blocking(train)
    assert train_sync.__doc__ == "Docs."
    for call in (lambda: train_sync("model", launched(), steps=3), lambda: train_sync("model", "engine", steps=3)):
        assert call() == asyncio.run(in_a_loop(call)) == ("model", "engine", 3)
    for started, trained, closed in (seen[:3], seen[3:6]):
        assert started is trained
        assert closed == "closed"


INTERRUPTED = """
import asyncio, sys
from rlkit.run.signals import stop_on_interrupt
from rlkit.run.sync import run_sync
async def work():
    try:
        if sys.argv[1] == "caught":
            with stop_on_interrupt() as stop:
                print("begun", flush=True)
                while not stop.requested:
                    await asyncio.sleep(0.01)
                print("saved", flush=True)
                await asyncio.sleep(600)
        print("begun", flush=True)
        await asyncio.sleep(600)
    finally:
        print("closed", flush=True)
async def cell():
    try:
        run_sync(work())
    except KeyboardInterrupt:
        print("ended", flush=True)
        raise
asyncio.run(cell())
"""


@pytest.mark.slow_cases("15-caught", "2-caught", "2-not caught")
@pytest.mark.parametrize("kind", ["caught", "not caught"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_reaches_the_other_thread(kind, number):
    """SIGTERM that nothing catches ends the process, as it did."""
    command = [sys.executable, "-c", INTERRUPTED, kind]
    child = warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout.readline() == "begun\n"
    child.send_signal(number)
    if kind == "caught":
        assert child.stdout.readline() == "saved\n"
        child.send_signal(number)
    out, err = child.communicate(timeout=250)
    if kind == "not caught" and number == signal.SIGTERM:
        assert (out, child.returncode) == ("", -signal.SIGTERM)
    else:
        assert (out, child.returncode) == ("closed\nended\n", -signal.SIGINT), err


OVERLAPPED = """
import asyncio, sys
from pathlib import Path
from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo_sync
from rlkit.loops.rl import Task
from rlkit.model.forward import prepare_model
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.process import launch
from rlkit.settings import Rollouts, Schedule
folder = Path(sys.argv[1])
tokenizer = tiny_tokenizer()
model = tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32)
model.save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")
prompts = [Prompt(ids=[1, 2, i], row={}, index=i) for i in range(8)]
async def cell():
    engine = launch(folder / "model", max_len=64)
    rollouts = Rollouts(prompts_per_step=2, group_size=2, max_new_tokens=4, overlap=True)
    score = scorer(lambda completion, row: len(set(completion)) / 8, tokenizer=tokenizer, timeout_s=30)
    task, schedule = Task(prompts, score), Schedule(folder / "run", steps=3)
    return grpo_sync(prepare_model(model), tokenizer, engine, task, rollouts, schedule)
if __name__ == "__main__":
    print(asyncio.run(cell()))
"""


@pytest.mark.slow
def test_asynchronous_grpo_trains_inside_a_running_loop(tmp_path):
    """Its engine belongs to one event loop, and so is launched in the call."""
    command = [sys.executable, "-c", OVERLAPPED, str(tmp_path)]
    done = warm.run(command, spawns=True, plots=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.splitlines()[-1]) / "model.safetensors").exists()
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_the_calls_of_a_command_share_a_loop(capsys):
    async def loop():
        return asyncio.get_running_loop()

    apart = [run_sync(loop()), run_sync(loop())]
    assert apart[0] is not apart[1]
    one, other = cli.on_ranks(lambda: [run_sync(loop()), run_sync(loop())])
    assert one is other
    assert one.is_closed()

    def ends():
        run_sync(loop())
        raise ValueError("wrong")

    with pytest.raises(SystemExit):
        cli.on_ranks(ends)
    assert capsys.readouterr().err == "error: wrong\n"


def test_only_what_a_command_has_started_is_named_at_its_end(capsys):
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=time.sleep, args=(600,), name=name) for name in ("earlier", "own")]
    try:
        others[0].start()
        verdict = cli.on_ranks(lambda: run_sync(equal("4", "$2+2$", search=False, timeout_s=60.0)))
        assert verdict.equal
        assert capsys.readouterr().err == ""
        cli.on_ranks(others[1].start)
        said = "waiting for what a reward or environment has started: own (Ctrl-C ends it)\n"
        assert capsys.readouterr().err == said
    finally:
        for process in others:
            process.kill()
