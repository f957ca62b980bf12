"""A remote sandbox, against a server that speaks SandboxFusion's protocol and really runs the programs."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlkit.rewards import RewardError, Sample, run_reward, sandbox
from rlkit.rewards.code import stdin_tests
from rlkit.rewards.sandbox import Limits, SandboxError

LIMITS = Limits(wall_s=60, cpu_s=60)
FOLDER = web.AppKey("folder", Path)


async def run_code(request):
    """`POST /run_code` with the fields of SandboxFusion's `RunCodeRequest` and `RunCodeResponse`."""
    asked = await request.json()
    known = {"compile_timeout", "run_timeout", "memory_limit_MB", "code", "stdin", "language", "files", "fetch_files"}
    if asked.keys() - known or not isinstance(asked["code"], str) or asked["language"] != "python":
        return web.json_response({"detail": "unprocessable"}, status=422)
    limit = asked["memory_limit_MB"] << 20
    file = Path(tempfile.mkdtemp(dir=request.app[FOLDER]), "main.py")
    file.write_text(asked["code"])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", file,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    ran = {"status": "Finished", "execution_time": 0.25, "return_code": None, "stdout": None, "stderr": None}
    try:
        async with asyncio.timeout(asked["run_timeout"]):
            out, err = await process.communicate(asked["stdin"].encode())
        ran |= {"return_code": process.returncode, "stdout": out.decode(), "stderr": err.decode()}
    except TimeoutError:
        process.kill()
        await process.wait()
        ran["status"] = "TimeLimitExceeded"
    status = "Success" if ran["return_code"] == 0 else "Failed"
    answer = {"status": status, "message": "", "compile_result": None, "run_result": ran, "files": {}}
    return web.json_response({**answer, "executor_pod_name": None})


async def broken(_request):
    return web.json_response(
        {"status": "SandboxError", "message": "no disk", "compile_result": None, "run_result": None}
    )


async def other(_request):
    return web.json_response(["hello"])


@pytest.fixture
async def server(tmp_path):
    app = web.Application()
    app[FOLDER] = tmp_path
    for path, handler in [("/run_code", run_code), ("/broken/run_code", broken), ("/other/run_code", other)]:
        app.router.add_post(path, handler)
    async with TestServer(app) as running:
        yield str(running.make_url("/"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("print(2 * int(input()))", ""),
        ("1 / 0", "exit code 1: ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
        ("x = bytearray(10 * 2**30)", "memory: more than 536870912 bytes"),
        ("print('\ud800' == '?')", ""),
        ("print(1)\0", "exit code 1: "),
        ("print('x' * 2_000_000)", "more than 1048576 bytes of output"),
    ],
)
async def test_a_program_ends_there_as_it_ends_here(server, source, reason):
    ran = await sandbox.run(source, stdin="21\n", limits=LIMITS, url=server)
    assert ran.reason.startswith(reason) if reason else ran.reason == ""
    assert math.isnan(ran.cpu_s)
    if "input" in source:
        assert (ran.stdout, ran.wall_s) == ("42\n", 0.25)


async def test_the_address_may_come_from_the_environment_and_end_in_the_path(server, monkeypatch):
    monkeypatch.setenv("RLKIT_SANDBOX_URL", f"{server}run_code")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert (await sandbox.run("import sys; print(sys.flags.isolated)")).stdout == "1\n"
    row = {"test_cases": json.dumps({"inputs": ["1", "2"], "outputs": ["2", "4"]})}
    samples = [Sample(f"```python\n{source}\n```", row, 0) for source in ("print(2 * int(input()))", "print(2)")]
    assert [result.reward for result in await run_reward(stdin_tests, samples, timeout_s=60)] == [1.0, 0.5]


async def test_a_program_without_end_is_a_timeout(server):
    ran = await sandbox.run("import time; time.sleep(9)", limits=Limits(wall_s=0.5), url=server)
    assert ran.reason == "timeout: no end after 0.5 s"


async def test_a_server_that_fails_is_an_error_and_no_verdict(server):
    for place, message in [
        ("broken", "failed: .*no disk"),
        ("other", "failed: .*hello"),
        ("nowhere", "does not run programs: .*HTTP 404"),
    ]:
        with pytest.raises(SandboxError, match=message):
            await sandbox.run("print(1)", url=server + place)
    row = {"test_cases": {"inputs": [""], "outputs": ["1"]}}
    remote = partial(stdin_tests, url=server + "broken")
    with pytest.raises(RewardError, match="no disk"):
        await run_reward(remote, [Sample("```python\nprint(1)\n```", row, 0)], timeout_s=60)
