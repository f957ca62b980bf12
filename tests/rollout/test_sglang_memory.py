"""Memory shared with a server, tested without SGLang."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm

from rlkit.rollout.engines.servers.api import Facts
from rlkit.rollout.engines.sglang.weights import FromTensors

TRAINER = """
import subprocess, sys, time, torch
from rlkit.rollout.engines.servers.tensors import Memory, flatten
from rlkit.rollout.engines.sglang.weights import _handle
bucket = flatten([("x", torch.ones(1000))], Memory())
with open(sys.argv[2], "w") as out:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], _handle(bucket)], stdout=out, stderr=subprocess.DEVNULL)
while not open(sys.argv[2]).read().endswith("mapped"):
    time.sleep(0.02)
print("stdout")
print("stderr", file=sys.stderr)
"""
SERVER = """
import base64, os, pickle, sys, time, torch
flat = pickle.loads(base64.b64decode(sys.argv[1]))["flattened_tensor"].view(torch.float32)
assert flat.sum() == 1000
print(os.getpid(), "mapped", end="", flush=True)
time.sleep(600)
"""
FORGETS = """
import base64, pickle, sys
flat = pickle.loads(base64.b64decode(sys.argv[1]))["flattened_tensor"]
del flat
print("loaded", flush=True)
sys.stdin.read()
"""


def test_close_frees_shared_memory_that_a_running_server_has_mapped():
    def shared():
        return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}

    async def update(servers):
        async def post(path, body):
            command = [sys.executable, "-c", FORGETS, *body["serialized_named_tensors"]]
            servers.append(warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert servers[-1].stdout.readline() == b"loaded\n"

        transport = FromTensors()
        await transport.send([SimpleNamespace(facts=Facts(), post=post)], [("x", torch.ones(1000))], version=1)
        assert len(shared() - before) == 1
        await transport.close()
        assert servers[0].poll() is None
        assert shared() <= before

    before, servers = shared(), []
    try:
        asyncio.run(update(servers))
    finally:
        for server in servers:
            server.communicate()


@pytest.mark.slow
def test_an_exiting_trainer_closes_its_pipes_while_a_server_maps_its_memory(tmp_path):
    """As in `... 2>&1 | tee log`: torch's shared-memory helper outlives the trainer and must not keep its stderr."""
    command = [sys.executable, "-c", TRAINER, SERVER, str(tmp_path / "said")]
    try:
        done = warm.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200, check=True)
    finally:
        pid = int((tmp_path / "said").read_text().split()[0])
        os.kill(pid, 9)  # an error where it has ended already
    assert (done.stdout, done.stderr) == ("stdout\n", "stderr\n")
