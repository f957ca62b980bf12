"""SGLang's own router in front of two servers: it distributes requests, and weights go to each server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.sglang import Server, SGLang
from rlkit.types import SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1200)]
PARAMS = SamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module")
def router(sglang_python: str, pair: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a router that prefers a server which has the prompt's prefix."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = free.getsockname()[1], other.getsockname()[1]
    command = [sglang_python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--policy", "cache_aware", "--health-check-interval-secs", "2"]
    command += ["--worker-urls", *(server.url for server in pair)]
    log = tmp_path_factory.mktemp("router") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
    try:
        while not answers(f"{url}/health"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def num_served(server: Server) -> int:
    return Path(server.log).read_text().count('"POST /generate HTTP/1.1" 200')


async def test_requests_go_through_it_and_weights_to_each_server(
    router: str,
    pair: list[Server],
    models: list[torch.nn.Module],
    forward_logp: Callable[..., list[float]],
    kill: Callable[[Server], None],
) -> None:
    """Every token's log-prob is the trainer's before and after an update, also once a server is gone."""
    before = [num_served(server) for server in pair]
    async with SGLang([server.url for server in pair], router=router) as engine:
        for version in (0, 1):
            await engine.update_weights(stream_weights(models[version]), version=version)
            prompts = [list(b"%d: the quick brown fox" % (i % 6)) for i in range(24)]
            out = await asyncio.gather(*(engine.generate(prompt, params=PARAMS) for prompt in prompts))
            for prompt, one in zip(prompts, out, strict=True):
                assert one.versions == [version] * 40
                assert one.logp == pytest.approx(forward_logp(models[version], prompt, one.ids), abs=1e-4)
        served = [num_served(server) - n for server, n in zip(pair, before, strict=True)]
        assert all(n >= 5 for n in served), served
        assert sum(served) >= 48

        running = [asyncio.create_task(engine.generate(prompt, params=PARAMS)) for prompt in prompts]
        await asyncio.sleep(0.2)
        kill(pair[0])
        for prompt, one in zip(prompts, await asyncio.gather(*running), strict=True):
            assert one.versions == [1] * 40
            assert one.logp == pytest.approx(forward_logp(models[1], prompt, one.ids), abs=1e-4)
        await engine.update_weights(stream_weights(models[2]), version=2)
        one = await engine.generate(prompts[0], params=PARAMS)
        assert one.logp == pytest.approx(forward_logp(models[2], prompts[0], one.ids), abs=1e-4)
