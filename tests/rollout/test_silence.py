"""Engines that stop answering (SIGSTOP): reported once, waited for, and left behind after a stop request."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.rollout.engines import silence
from rlkit.rollout.engines.process import launch
from rlkit.rollout.engines.sglang import SGLang
from rlkit.run.saving import unless_hung
from rlkit.run.signals import Stop
from rlkit.types import SamplingParams

LONG = SamplingParams(max_new_tokens=4000)
HERE = Path(__file__).parent
SERVER = """
import asyncio, sys
sys.path.append(sys.argv[1])
from fake_server import serving
async def never(number, request):
    await asyncio.sleep(3600)
async def main():
    async with serving(never) as (url, _):
        print(url, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.fixture
def hung_soon(monkeypatch, caplog):
    monkeypatch.setattr(silence, "HUNG_AFTER_S", 3.0)
    monkeypatch.setattr(silence, "ASK_AFTER_S", 1.0)
    monkeypatch.setattr(silence, "TICK_S", 0.2)
    caplog.set_level(logging.WARNING)


async def check(engine, pid, caplog):
    """A slow answer is no silence; a hang is said once, then its end; a stop request does not wait for it."""
    stop, said = Stop(), []
    run = SimpleNamespace(say=said.append)
    call = asyncio.ensure_future(engine.generate([5], params=LONG))
    await asyncio.sleep(5)
    assert engine.silent_s < 3
    assert not caplog.messages

    os.kill(pid, signal.SIGSTOP)
    waiting = asyncio.ensure_future(unless_hung(asyncio.shield(call), engine=engine, stop=stop, run=run))
    await until(lambda: any("has not answered for" in m for m in caplog.messages))
    await asyncio.sleep(1)
    assert len(caplog.messages) == 1
    assert not waiting.done()  # nobody asked to stop
    os.kill(pid, signal.SIGCONT)
    await until(lambda: any("answers again" in m for m in caplog.messages))
    assert engine.silent_s < 3

    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    stop.requested = True
    assert await asyncio.wait_for(waiting, 60) is None
    assert time.monotonic() - began > 2
    assert said[0].startswith("stopping without the engine, which has not answered for ")
    call.cancel()


async def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_engines", "hung_soon")
async def test_the_engine_of_another_process(tmp_path, caplog):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = await launch(tmp_path, max_len=1 << 14, eos_token_ids=())
    caplog.clear()
    long = SamplingParams(max_new_tokens=16000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "LONG", long)
        await check(engine, engine._process.pid, caplog)
    began = time.monotonic()
    await engine.close()
    assert time.monotonic() - began < 9  # killed at once
    assert not engine._process.is_alive()


@pytest.mark.usefixtures("hung_soon")
@pytest.mark.slow
async def test_an_sglang_server(caplog):
    line = [sys.executable, "-c", SERVER, str(HERE)]
    server = warm.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(HERE.parents[1])})
    try:
        url = (await asyncio.to_thread(server.stdout.readline)).strip()
        engine = SGLang(url)
        await check(engine, server.pid, caplog)
        os.kill(server.pid, signal.SIGCONT)  # else closing waits for the answers to its aborts
        await engine.close()
    finally:
        server.kill()
        server.wait()
