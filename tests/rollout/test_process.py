"""The engine in its own process: the same tokens, new weights after an update, and no process left behind."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import warm

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.process import _Child, _portable, launch
from rlkit.rollout.shared import rest
from rlkit.types import SamplingParams

pytestmark = pytest.mark.usefixtures("forked_engines")
ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_new_tokens=12, seed=3)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


@pytest.fixture(scope="module")
def model():
    tokenizer = tiny_tokenizer()
    return tiny_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


async def sample(engine):
    return await asyncio.gather(*(engine.generate(p, params=PARAMS) for p in PROMPTS))


def here(model):
    return asyncio.run(sample(LocalEngine(model, max_len=64)))


@pytest.mark.slow
def test_it_samples_what_the_embedded_engine_does_and_follows_the_weights(model, folder):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for p in changed.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))

    async def there():
        async with await launch(folder, max_len=64) as engine:
            first = await sample(engine)
            with pytest.raises(ValueError, match=r"lack \['model"):
                await engine.update_weights([("lm_head.weight", torch.zeros(263, 32))], version=9)
            odd = [(n, p[:5] if n == "lm_head.weight" else p) for n, p in stream_weights(changed)]
            with pytest.raises(ValueError, match=r"unknown weight names: \['another', 'lm_head.weight'\]"):
                await engine.update_weights([("another", torch.zeros(2)), *odd], version=9)
            same = await sample(engine)
            await engine.update_weights(stream_weights(changed), version=1)
            return first, same, await sample(engine), engine.progress.num_tokens

    first, same, after, num_tokens = asyncio.run(there())
    truth, other = here(model), here(changed)
    for outs, expected in ((first, truth), (same, truth), (after, other)):
        assert [c.ids for c in outs] == [c.ids for c in expected]
        for out, c in zip(outs, expected, strict=True):
            assert out.logp == pytest.approx(c.logp, abs=1e-5)
    assert {v for c in after for v in c.versions} == {1}
    assert num_tokens == sum(len(c.ids) for c in [*first, *same, *after])
    assert [c.ids for c in truth] != [c.ids for c in other]


@pytest.mark.slow
def test_batching_of_concurrent_requests_does_not_depend_on_timing(model, folder):
    """For bitwise repeatable runs: a batch rounds differently from its parts."""

    async def there():
        found = []
        async with await launch(folder, max_len=64, max_batch=16) as engine:
            for version in range(6):
                await engine.update_weights(stream_weights(model), version=version)  # forgets the prompts it has seen
                prompts = [[i, 2 * i, 3 * i][: 1 + i % 3] for i in range(1, 25)]
                out = await asyncio.gather(*(engine.generate(p, params=PARAMS) for p in prompts))
                found.append([(c.ids, c.logp) for c in out])
        return found

    first, *others = asyncio.run(there())
    assert all(found == first for found in others)


def test_requests_in_flight_continue_through_an_update_and_can_be_aborted(model, folder):
    async def go():
        long = SamplingParams(max_new_tokens=4000)
        async with await launch(folder, max_len=4100, eos_token_ids=(), seed=1) as engine:
            calls = [asyncio.create_task(engine.generate([5], params=long, rid=str(i))) for i in range(3)]
            while engine.progress.num_tokens == 0:
                await engine.generate([6], params=SamplingParams(max_new_tokens=1))
            await engine.update_weights(stream_weights(model), version=1)
            calls[2].cancel()
            await engine.generate([6], params=SamplingParams(max_new_tokens=3))
            assert await engine.abort("0") == 1
            first = await calls[0]
            assert await engine.abort() == 1, "the cancelled one is gone"
            return first, await calls[1]

    for out in asyncio.run(go()):
        assert out.finish_reason == "abort"
        assert set(out.versions) == {0, 1}
        assert out.versions == sorted(out.versions)
        assert len(out.ids) == len(out.logp) == len(out.versions)


def test_a_killed_engine_is_an_error_in_every_call(folder):
    async def go():
        engine = await launch(folder, max_len=4100, eos_token_ids=())
        calls = [asyncio.create_task(engine.generate([5], params=SamplingParams(max_new_tokens=4000))) for _ in "abc"]
        await asyncio.sleep(0.05)
        os.kill(engine._process.pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(RuntimeError, match=r"the engine process has died \(exit code -9\)"):
                await call
        with pytest.raises(RuntimeError, match="has died"):
            await engine.generate([5], params=PARAMS)
        await engine.close()

    asyncio.run(go())


def test_a_load_error_is_raised_by_launch(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder|without config"):
        asyncio.run(launch(tmp_path / "nothing"))


def test_it_rests_as_the_embedded_engine_does(model, folder):
    options = {"max_len": 64, "keep_turns": True, "eos_token_ids": tuple(range(263))}

    async def go():
        child = _Child("no model is loaded", {}, "cpu")
        child._engine = LocalEngine(model, **options)
        await sample(child._engine)
        assert child._engine._ended
        await child.rest()
        assert not child._engine._ended
        async with await launch(folder, **options) as engine:
            first = await sample(engine)
            await rest(engine)
            return first, await sample(engine)

    first, again = asyncio.run(go())
    assert [c.ids for c in first] == [c.ids for c in again]


def test_the_engines_side_closes_its_connection():
    """One that is left open prints a traceback when the interpreter has unloaded its modules first."""

    async def go():
        ours, theirs = socket.socketpair()
        child = _Child("no model is loaded", {}, "cpu")
        ours.close()
        await child.run(theirs)
        return child._writer.is_closing()

    assert asyncio.run(go())


class Status(RuntimeError):
    """It can be pickled and not unpickled: its argument has no default."""

    def __init__(self, *, code):
        super().__init__(f"status {code}")


def test_an_error_that_cannot_be_pickled_arrives_as_its_repr():
    assert repr(_portable(Status(code=3))) == "RuntimeError(\"Status('status 3')\")"
    assert isinstance(_portable(KeyError("a")), KeyError)


PARENT = """
    import asyncio, sys
    from rlkit.rollout.engines.process import launch
    from rlkit.types import SamplingParams
    async def main():
        engine = await launch(sys.argv[1], max_len=4100, eos_token_ids=())
        call = asyncio.create_task(engine.generate([5], params=SamplingParams(max_new_tokens=4000)))
        print(engine._process.pid, flush=True)
        await asyncio.sleep(60)
    if __name__ == "__main__":
        asyncio.run(main())
"""


def test_the_engine_ends_with_a_parent_that_was_killed(folder, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    with warm.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True, spawns=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    ) as parent:  # fmt: skip
        pid = int(parent.stdout.readline())
        engine = psutil.Process(pid)
        parent.kill()
    end = time.monotonic() + 120
    with suppress(psutil.NoSuchProcess):
        while engine.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.05)
