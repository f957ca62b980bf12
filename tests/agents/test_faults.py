"""Agents that misbehave: the episode fails with a reason, the run goes on, nothing is left behind."""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest
import warm
from scripted import Script, prompt_of, tokenizer_with

from rlkit.agents import AgentError, endpoint, server
from rlkit.agents.command import _supervised, check_command, command, scored
from rlkit.agents.endpoint import agent_env
from rlkit.rewards.scoring import env_rewards
from rlkit.rollout.calling import CLOCK, Clock
from rlkit.rollout.groups import last_pieces, rollout
from rlkit.testing import FakeEngine
from rlkit.types import Completion, SamplingParams

FAULTY = Path(__file__).parent / "programs" / "faulty.py"
FAILS = {  # kind: what the reason says
    "asks_nothing": "it asked for no turn",
    "never_ends": "it had not ended after 1.5 s",
    "floods": "more than 50 of its requests were refused",
    "floods_the_log": "it had not ended after 1.5 s",
    "dies": "signal 9",
    "fails": "exit code 1: KeyError: 'mine'",
    "kills_its_parent": "its supervisor was killed",
    "eats_memory": "it had more than 0.125 GiB of memory",
    "writes_nonsense": "what it wrote to $RLKIT_RESULT is no JSON",
    "writes_text_as_a_metric": "info.metrics in $RLKIT_RESULT has a wrong type",
    "writes_a_number_as_notes": "info.notes in $RLKIT_RESULT has a wrong type",
    "writes_text_as_truncated": "truncated in $RLKIT_RESULT has a wrong type",
    "writes_two_turn_rewards": "turn_rewards must have one entry per turn, 1, got 2",
    "writes_nothing": "it wrote no reward to $RLKIT_RESULT, and there is no reward function",
}
GOOD = ("good", "leaves_children", "sends_64_mib", "guesses")


def faulty_of(folder):
    """Running commands whose row is in this folder: other tests run theirs at the same time."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if "faulty.py" in str(process.info["cmdline"]):
            with suppress(psutil.NoSuchProcess):
                found += [process.pid] if process.environ().get("RLKIT_ROW", "").startswith(str(folder)) else []
    return found


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """After the test there is no process, folder, socket or thread more than before it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(endpoint, "MAX_REFUSED", 50)
    monkeypatch.setattr(server, "MAX_ACTIVE", 4)
    me = psutil.Process()
    before, children = (me.num_fds(), threading.active_count()), {*me.children(recursive=True)}
    listening = lambda: {c.laddr for c in me.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    of_others = listening()  # a store of torch.distributed stays open in a process
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and ({*me.children(recursive=True)} - children or me.num_fds() > before[0]):
        time.sleep(0.05)
    assert {*me.children(recursive=True)} - children == set()
    assert faulty_of(tmp_path) == []
    assert not list(tmp_path.glob("rlkit-agents-*/*"))
    assert listening() <= of_others
    assert (me.num_fds(), threading.active_count()) <= before


async def episodes(kinds, *, num, logs):
    """The episodes of a rollout with a group of `num` for each kind, by kind."""
    tokenizer = tokenizer_with("chatml")
    reply = tokenizer.encode("answer<|im_end|>", add_special_tokens=False)
    line, limits = f"{sys.executable} -S {FAULTY} {{prompt}}", {"logs": logs, "memory_gib": 0.125}
    short, long = (command(line, timeout_s=seconds, **limits) for seconds in (1.5, 100.0))

    async def agent(prompt, base_url):
        return await (short if "not ended" in FAILS.get(prompt.row["prompt"], "") else long)(prompt, base_url)

    groups = await rollout(
        [prompt_of(tokenizer, kind) for kind in kinds],
        generate=FakeEngine([reply]).generate,
        params=SamplingParams(max_new_tokens=20),
        group_size=num,
        seed=0,
        env=agent_env(agent, tokenizer=tokenizer, raise_errors=False),
        score=scored(env_rewards(max_failed=0.99)),
    )
    return dict(zip(kinds, groups, strict=True))


def check(groups, *, num):
    """Each failed episode has the reason of its kind and trains nothing; the others have their reward."""
    for kind, group in groups.items():
        assert len(group) == num
        if kind in GOOD:
            assert Counter(t.reward for t in group) == {1.0: num}, (kind, [t.info for t in group])
            assert all(any(t.mask) for t in group)
            assert all(t.info["metrics"]["failed"] == 0.0 for t in group)
        else:
            assert all(FAILS[kind] in t.info["error"] for t in group), (kind, [t.info["error"] for t in group])
            assert not any(any(t.mask) for t in group)
            assert sum(t.info["metrics"]["failed"] for t in group) == num


@pytest.mark.slow
async def test_every_fault_beside_good_agents(nothing_left, tmp_path):
    groups = await episodes([*FAILS, *GOOD], num=2, logs=tmp_path / "logs")
    check(groups, num=2)
    logs = [*(tmp_path / "logs").iterdir()]
    assert len(logs) == 2 * len(groups)
    assert max(log.stat().st_size for log in logs) < 1.1 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FAILS, *GOOD])
async def test_fifty_of_each_fault(kind, nothing_left, tmp_path):
    check(await episodes([kind], num=50, logs=tmp_path / "logs"), num=50)


async def post(base_url, body, *, status):
    """One request on a connection of its own, and its status."""
    async with aiohttp.ClientSession() as client, client.post(f"{base_url}/chat/completions", json=body) as reply:
        assert reply.status in status, await reply.text()
        return reply.status


ASK = {"messages": [{"role": "user", "content": "question"}]}


FUNCTIONS = {
    "asks_nothing": FAILS["asks_nothing"], "never_ends": "it had not ended after 1 s", "fails": "KeyError: 'mine'",
    "asks_after_its_end": None, "asks_at_once": None,
}  # fmt: skip


@pytest.mark.slow_cases("asks_at_once", "never_ends")
@pytest.mark.parametrize("kind", FUNCTIONS)
async def test_fifty_functions_of_each_fault(kind, nothing_left):
    """Programs in this process, all at once."""
    tokenizer = tokenizer_with("chatml")
    late, statuses = [], Counter()

    async def after(base_url):
        await asyncio.sleep(0.02)
        try:
            return await post(base_url, ASK, status=[404])
        except aiohttp.ClientConnectionError:  # the last episode has ended too, before or while it answers
            return 404

    async def agent(prompt, base_url):
        if kind != "asks_nothing":
            await post(base_url, ASK, status=[200])
        if kind == "never_ends":
            await asyncio.sleep(1000)
        if kind == "fails":
            raise KeyError("mine")
        if kind == "asks_after_its_end":
            late.append(asyncio.ensure_future(after(base_url)))
        if kind == "asks_at_once":
            statuses.update(await asyncio.gather(*(post(base_url, ASK, status=[200, 429]) for _ in range(8))))
        return {"reward": 1.0}

    (group,) = await rollout(
        [prompt_of(tokenizer)],
        generate=FakeEngine([tokenizer.encode("answer<|im_end|>", add_special_tokens=False)]).generate,
        params=SamplingParams(max_new_tokens=20),
        group_size=50,
        seed=0,
        env=agent_env(agent, tokenizer=tokenizer, raise_errors=False, timeout_s=1.0 if kind == "never_ends" else 60.0),
        score=env_rewards(max_failed=0.99),
    )
    ends, reason = last_pieces(group), FUNCTIONS[kind]
    assert len(ends) == 50
    assert all(reason in t.info["error"] if reason else t.reward == 1.0 for t in ends)
    assert all(any(t.mask) == (reason is None) for t in group)
    assert await asyncio.gather(*late) == [404] * len(late)
    assert len(late) == (50 if kind == "asks_after_its_end" else 0)
    assert sum(t.info["num_turns"] for t in ends) == statuses[200] + (0 if kind == "asks_nothing" else 50)
    assert kind != "asks_at_once" or min(statuses[200], statuses[429]) > 0


@pytest.mark.slow
async def test_two_hundred_commands_at_once(nothing_left, tmp_path):
    check(await episodes(["good"], num=200, logs=tmp_path / "logs"), num=200)


async def test_a_cancelled_episode_ends_its_command(nothing_left, tmp_path):
    tokenizer = tokenizer_with("chatml")
    asked = asyncio.Event()

    async def sample(prompt_ids, **_):
        asked.set()
        return Completion([7], [-1.0], [0], "stop")

    forever = command(f"{sys.executable} -S {FAULTY} never_ends", logs=tmp_path, timeout_s=100)
    for _ in range(2):  # the folder of the first is gone with it
        asked.clear()
        episode = asyncio.ensure_future(agent_env(forever, tokenizer=tokenizer)(prompt_of(tokenizer), sample))
        await asyncio.wait_for(asked.wait(), 60)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode


RUN = """
import asyncio, sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[1]
from rlkit.agents.command import command
agent = command("sleep 1000", logs=Path(sys.argv[1]), timeout_s=500)
class Prompt:
    row, index, images = {"prompt": "x"}, 0, ()
asyncio.run(agent(Prompt, "http://127.0.0.1:1/x/v1"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their environment")
@pytest.mark.slow
def test_a_command_ends_with_the_run_that_started_it(tmp_path):
    """Even with one that is killed: its supervisor sees the end of a pipe."""
    with warm.Popen([sys.executable, "-c", RUN, str(tmp_path)]) as run:
        deadline = time.monotonic() + 60
        while not (found := [p for p in psutil.Process(run.pid).children(recursive=True) if p.name() == "sleep"]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert [*tmp_path.glob("rlkit-agents-*/*/work")] != []
        run.kill()
        run.wait()
    _, alive = psutil.wait_procs(found, timeout=20)
    assert alive == []
    deadline = time.monotonic() + 20
    while [*tmp_path.glob("rlkit-agents-*")] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [*tmp_path.glob("rlkit-agents-*")] == []


async def test_the_clock_of_a_command_stands_still_in_a_pause(tmp_path):
    spec, clock = tmp_path / "command.json", Clock()
    about = {"argv": ["sleep", "60"], "folder": str(tmp_path), "log": str(tmp_path / "log"), "seconds": 0.5}
    spec.write_text(json.dumps({**about, "memory": None}))
    CLOCK.set(clock)
    ended = asyncio.create_task(_supervised(spec, env=os.environ))
    await asyncio.sleep(0)
    for _ in range(2):
        with clock.stopped(), clock.stopped():
            await asyncio.sleep(1.0)
        assert not ended.done()
    begun = time.monotonic()
    assert (await ended)["reason"] == "it had not ended after 0.5 s"
    assert time.monotonic() - begun > 0.2
    assert clock.seconds < 2.0 + time.monotonic() - begun


async def test_a_command_has_no_file_of_the_trainer(tmp_path):
    tokenizer = tokenizer_with("chatml")
    code = (
        "import json, os, urllib.request as r\n"
        "numbers = [n for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n)]\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': 'a'}]}).encode()\n"
        "r.urlopen(r.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body)).read()\n"
        "json.dump({'reward': len(numbers)}, open(os.environ['RLKIT_RESULT'], 'w'))\n"
    )
    (tmp_path / "count.py").write_text(code)
    agent = command(f"{sys.executable} {tmp_path / 'count.py'}", logs=tmp_path / "logs", timeout_s=100)
    with (tmp_path / "count.py").open() as _, a_socket():
        env = agent_env(agent, tokenizer=tokenizer)
        (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, "answer"))
    assert piece.reward == 3  # standard input, output and errors


def a_socket():
    return socket.create_server(("127.0.0.1", 0))


async def test_a_prompt_for_a_long_command_line_is_refused_before_the_run_and_in_the_log_of_an_episode(tmp_path):
    rows = [{"prompt": "short"}, {"prompt": "\u00e9" * 70_000}]
    line = f"{sys.executable} {FAULTY} {{prompt}}"
    check_command(line, rows[:1])
    said = r"row 2: \{prompt\} has 140,000 bytes, and .* 131,072: let the .*\$RLKIT_ROW"
    with pytest.raises(ValueError, match=said):
        check_command(line, rows)
    check_command(f"{sys.executable} {FAULTY} good", rows)
    tokenizer = tokenizer_with("chatml")
    prompt = replace(prompt_of(tokenizer), row={"prompt": "a" * 140_000})
    agent = command(line, logs=tmp_path, timeout_s=100)
    with pytest.raises(AgentError, match=r"exit code 127: .*Argument list too long"):
        await agent(prompt, "http://127.0.0.1:1/x/v1")


async def test_a_command_whose_row_is_long_reads_it_from_the_file(tmp_path):
    tokenizer = tokenizer_with("chatml")
    (tmp_path / "read.py").write_text(
        "import json, os\nrow = json.load(open(os.environ['RLKIT_ROW']))\n"
        "json.dump(len(row['prompt']), open(os.environ['RLKIT_RESULT'], 'w'))\n"
    )
    agent = command(f"{sys.executable} {tmp_path / 'read.py'}", logs=tmp_path / "logs", timeout_s=100)
    end = await agent(prompt_of(tokenizer, "a" * 9000), "http://127.0.0.1:1/x/v1")
    assert end["reward"] == 9000
