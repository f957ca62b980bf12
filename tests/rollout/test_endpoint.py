"""Programs that talk to the policy over HTTP, as to any OpenAI-compatible server."""

import asyncio
import json
import math
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from scripted import END, Script, check_exact, prompt_of, tokenizer_with

from rlkit.agents import AgentError, end_of, server
from rlkit.agents.endpoint import agent_env
from rlkit.data.chat import render
from rlkit.data.episode_images import EpisodeImages
from rlkit.data.tiny import tiny_model
from rlkit.loops.evaluate import rollout_metrics
from rlkit.metrics import finalize
from rlkit.rollout import calling
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.groups import all_or_cancel, rollout, sampler
from rlkit.rollout.limits import limited
from rlkit.rollout.stream import Pausable
from rlkit.testing import FakeEngine
from rlkit.types import SamplingParams

ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]


def post(base_url, **body):
    """A request as a sync program makes it."""
    data = json.dumps({"model": "policy", **body}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as reply:
        return json.loads(reply.read())


def refused(base_url, **body):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(base_url, **body)
    return caught.value.code, json.loads(caught.value.read())["error"]["code"]


def user(text):
    return {"role": "user", "content": text}


async def test_a_program_with_tools_is_one_token_exact_piece():
    tokenizer = tokenizer_with("qwen3")
    call = '<think>\nhm\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    script = Script(tokenizer, call, "<think>\nso\n</think>\n\n3")
    seen = []

    def agent(prompt, base_url):
        messages = [user(prompt.row["prompt"])]
        for result in ("2", None):
            reply = post(base_url, messages=messages, tools=TOOLS)
            seen.append(reply)
            messages.append({"refusal": None, "annotations": [], **reply["choices"][0]["message"]})
            if result:
                calls = messages[-1]["tool_calls"]
                messages.append(
                    {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": calls[0]["id"]}
                )
        return {"reward": 0.5, "info": {"answer": messages[-1]["content"]}}

    (piece,) = await agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), script)
    check_exact([piece], script.calls)
    first, second = (r["choices"][0] for r in seen)
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] == "<think>\nhm\n</think>\n\nI add.\n"
    assert first["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (second["finish_reason"], second["message"]["content"]) == ("stop", "<think>\nso\n</think>\n\n3")
    usage = seen[1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == tuple(
        map(len, (script.calls[1][0], script.calls[1][1].ids))
    )
    assert (piece.reward, piece.info["answer"]) == (0.5, "<think>\nso\n</think>\n\n3")
    assert piece.prompt_ids == render(tokenizer, [user("question")], add_generation_prompt=True, tools=TOOLS)
    assert "<tool_response>\n2\n</tool_response>" in tokenizer.decode(piece.ids)


async def test_another_conversation_is_another_piece():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, "a", "b", "c", "d")

    async def agent(prompt, base_url):
        async def ask(*messages, **more):
            reply = await asyncio.to_thread(post, base_url, messages=messages, **more)
            return reply["choices"][0]["message"]

        first = await ask(user("question"))
        await ask(user("question"), first, user("more"))
        await ask(user("summary: a, b"))  # begins anew
        await ask(user("summary: a, b"), {"role": "assistant", "content": "not c"}, user("x"))  # says it said otherwise

    pieces = await agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), script)
    check_exact(pieces, script.calls)
    assert [sum(p.mask) for p in pieces] == [4, 2, 2]
    assert pieces[0].prompt_ids == prompt_of(tokenizer).ids


async def test_concurrent_requests_are_branches():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, "a", "b", "c")

    async def slow(prompt_ids, *, max_new_tokens=None):
        await asyncio.sleep(0.05)
        return await script(prompt_ids)

    async def agent(prompt, base_url):
        await asyncio.gather(*(asyncio.to_thread(post, base_url, messages=[user(x)]) for x in "xyz"))

    pieces = await agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), slow)
    check_exact(pieces, script.calls)
    assert len(pieces) == 3


async def test_a_turn_with_a_broken_call_is_answered_as_text():
    tokenizer = tokenizer_with("chatml")
    said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": </tool_call>'
    replies = []

    def agent(prompt, base_url):
        replies.append(post(base_url, messages=[user("question")], tools=TOOLS)["choices"][0])

    await agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer, said))
    assert (replies[0]["finish_reason"], replies[0]["message"]) == ("stop", {"role": "assistant", "content": said})


async def test_unsupported_requests_are_rejected():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, "first", "second")
    codes = []

    def agent(prompt, base_url):
        messages = [user("question")]
        codes.append(refused(base_url, messages=messages, stream="yes"))
        codes.append(refused(base_url, messages=messages, n=1000))
        messages.append(post(base_url, messages=messages)["choices"][0]["message"])
        codes.append(refused(base_url, messages=[*messages, user("more")]))
        codes.append(refused(base_url.replace("/v1", "x/v1"), messages=messages))

    (piece,) = await limited(agent_env(agent, tokenizer=tokenizer), max_turns=1)(prompt_of(tokenizer), script)
    bad = (400, "invalid_request_error")
    assert codes == [bad, bad, (400, "context_length_exceeded"), (404, "not_found")]
    assert (piece.truncated, len(script.calls)) == (True, 1)


async def test_errors_end_the_run():
    tokenizer = tokenizer_with("chatml")

    async def failing(prompt_ids, *, max_new_tokens=None):
        raise RuntimeError("the engine is gone")

    def agent(prompt, base_url):
        post(base_url, messages=[user("question")])

    def careless(prompt, base_url):
        assert refused(base_url, messages=[user("question")])[0] == 500

    for program in (agent, careless):
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await agent_env(program, tokenizer=tokenizer)(prompt_of(tokenizer), failing)

    def broken(prompt, base_url):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await agent_env(broken, tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer))
    for raises in (True, False):
        env = agent_env(lambda prompt, base_url: "done", tokenizer=tokenizer, raise_errors=raises)
        with pytest.raises(
            TypeError, match=r"returned str 'done': return its reward, a number, or a dict with some of"
        ):
            await env(prompt_of(tokenizer), Script(tokenizer))
    env = agent_env(agent, tokenizer=tokenizer, parse=lambda text: [1 / 0] if text else [])
    with pytest.raises(ZeroDivisionError):
        await env(prompt_of(tokenizer), Script(tokenizer, "text"))


@pytest.mark.parametrize("reward", [1, True, 0.5, np.float32(0.25), Decimal("0.5"), torch.tensor(2.0)])
async def test_a_number_that_a_program_returns_is_its_reward(reward):
    tokenizer = tokenizer_with("chatml")

    def agent(prompt, base_url):
        post(base_url, messages=[user("question")])
        return reward

    (piece,) = await agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer, "text"))
    assert (type(piece.reward), piece.reward) == (float, float(reward))
    (piece,) = await agent_env(lambda prompt, base_url: reward, tokenizer=tokenizer)(
        prompt_of(tokenizer), Script(tokenizer)
    )
    assert (type(piece.reward), piece.reward, piece.ids) == (float, float(reward), [])
    env = agent_env(lambda prompt, base_url: reward, tokenizer=tokenizer, raise_errors=False)
    (piece,) = await env(prompt_of(tokenizer), Script(tokenizer))
    assert (piece.reward, piece.info["error"]) == (None, "the agent failed: it asked for no turn")


@pytest.mark.parametrize(
    "end", ["1.0", [1.0], (1.0, {}), {"rewrad": 1.0}, {"info": 3}, {"info": {"metrics": 3}}, object()]
)
def test_what_is_no_end_of_an_episode_is_refused(end):
    with pytest.raises(
        TypeError, match=r"the program returned .*: (return its reward, a number, or a dict|give a dict)"
    ):
        end_of(end)
    assert end_of(math.nan).keys() == {"reward"}  # which is named with its row, as any other


async def test_a_program_that_asks_nothing_has_an_episode_without_tokens(caplog, monkeypatch):
    monkeypatch.setattr(calling, "_reported", set())
    tokenizer = tokenizer_with("chatml")
    env = agent_env(lambda prompt, base_url: {"reward": -1.0, "info": {"why": "lazy"}}, tokenizer=tokenizer)
    for _ in range(2):
        (piece,) = await env(prompt_of(tokenizer), Script(tokenizer))
    assert (piece.ids, piece.mask, piece.reward, piece.truncated) == ([], [], -1.0, True)
    assert (piece.prompt_ids, piece.info["why"]) == (prompt_of(tokenizer).ids, "lazy")
    assert [r.getMessage() for r in caplog.records] == [
        "an agent asked for no turn (row 1): such episodes train nothing"
    ]


@pytest.mark.slow
def test_many_episodes_at_once_and_no_server_afterwards():
    """With a real engine, in two event loops."""
    tokenizer = tokenizer_with("chatml")
    model = tiny_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    urls = set()

    def agent(prompt, base_url):
        urls.add(base_url)
        messages = [user(prompt.row["prompt"])]
        for _ in range(2):
            reply = post(base_url, messages=messages, max_tokens=5)
            assert reply["usage"]["completion_tokens"] <= 5
            if reply["choices"][0]["finish_reason"] == "length":
                break
            messages += [reply["choices"][0]["message"], user("more")]
        return {"reward": 0.0}

    env = agent_env(agent, tokenizer=tokenizer)

    async def once():
        async with LocalEngine(model, eos_token_ids=range(0, 263, 3), max_len=512) as engine:
            return await rollout(
                [prompt_of(tokenizer, x) for x in "abcd"],
                generate=engine.generate,
                params=SamplingParams(max_new_tokens=20),
                group_size=4,
                seed=0,
                env=env,
            )

    runs = [asyncio.run(once()) for _ in range(2)]
    tokens = [[(t.prompt_ids, t.ids) for g in groups for t in g] for groups in runs]
    assert tokens[0] == tokens[1]
    assert len(urls) == 32
    with pytest.raises(OSError, match="refused"):
        post(next(iter(urls)), messages=[user("a")])


@pytest.mark.slow
async def test_two_hundred_episodes_at_once_share_one_port():
    import aiohttp

    tokenizer = tokenizer_with("chatml")
    barrier, urls = asyncio.Barrier(200), []

    async def agent(prompt, base_url):
        urls.append(base_url)
        await barrier.wait()
        messages = [user("question")]
        async with aiohttp.ClientSession() as client:
            for _ in range(2):
                async with client.post(f"{base_url}/chat/completions", json={"messages": messages}) as reply:
                    messages += [(await reply.json())["choices"][0]["message"], user("more")]
        return {"reward": float(messages[-2]["content"] == "answer")}

    (group,) = await rollout(
        [prompt_of(tokenizer)],
        generate=FakeEngine([tokenizer.encode("answer<|im_end|>", add_special_tokens=False)]).generate,
        params=SamplingParams(max_new_tokens=20),
        group_size=200,
        seed=0,
        env=agent_env(agent, tokenizer=tokenizer),
    )
    assert [t.reward for t in group] == [1.0] * 200
    assert len({*urls}) == 200
    assert len({url.split("/")[2] for url in urls}) == 1


async def test_an_address_that_is_taken_ends_the_run_also_where_agents_may_fail():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        env = agent_env(lambda *_: None, tokenizer=tokenizer_with("chatml"), address=address, raise_errors=False)
        with pytest.raises(OSError, match=f"cannot listen at {address}"):
            await env(prompt_of(tokenizer_with("chatml")), Script(tokenizer_with("chatml")))


async def test_a_program_that_has_no_room_and_fails_ends_a_truncated_episode():
    """Its turns train; other failures leave nothing to train on, and say why."""
    tokenizer = tokenizer_with("chatml")

    def agent(prompt, base_url):
        messages = [user("question")]
        while True:
            messages += [post(base_url, messages=messages)["choices"][0]["message"], user("more")]

    def failing(prompt, base_url):
        post(base_url, messages=[user("question")])
        raise KeyError("mine")

    for program, reward, error in ((agent, 0.0, None), (failing, None, "the agent failed: KeyError: 'mine'")):
        env = limited(agent_env(program, tokenizer=tokenizer, raise_errors=False), max_turns=2)
        script = Script(tokenizer, "a", "b")
        (piece,) = await env(prompt_of(tokenizer), script)
        assert (piece.reward, piece.info.get("error"), piece.truncated) == (reward, error, True)
        check_exact([piece], script.calls)


async def test_a_function_that_does_not_end_fails():
    tokenizer = tokenizer_with("chatml")
    ended = asyncio.Event()

    async def agent(prompt, base_url):
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()

    env = agent_env(agent, tokenizer=tokenizer, timeout_s=0.1)
    with pytest.raises(AgentError, match=r"it had not ended after 0.1 s"):
        await env(prompt_of(tokenizer), Script(tokenizer))
    assert ended.is_set()


async def test_the_time_of_a_pause_is_not_that_of_the_program():
    """Episodes that a training step interrupted failed, as if the program had hung."""
    tokenizer = tokenizer_with("chatml")
    engine = FakeEngine([tokenizer.encode("answer<|im_end|>", add_special_tokens=False)])
    pausable = Pausable(engine.generate, engine.abort)

    def agent(prompt, base_url):
        if prompt.index == 0:
            with ThreadPoolExecutor() as both:
                return len([*both.map(lambda _: post(base_url, messages=[user("x")]), range(2))])
        return threading.Event().wait(3)

    async def episode(index):
        sample = sampler(pausable.generate, SamplingParams(max_new_tokens=20), (0, index))
        return await env(replace(prompt_of(tokenizer), index=index), sample)

    env = agent_env(agent, tokenizer=tokenizer, timeout_s=1.0)
    await pausable.pause()
    waits, hangs = (asyncio.create_task(episode(index)) for index in range(2))
    with pytest.raises(AgentError, match="it had not ended after 1 s"):
        await hangs
    await asyncio.sleep(1.0)
    assert not waits.done()
    pausable.resume()
    assert {t.reward for t in await waits} == {2}


async def test_a_client_that_goes_away_leaves_no_turn():
    """What it asked for is no longer sampled, and trains nothing."""
    tokenizer = tokenizer_with("chatml")
    script, asked, cancelled = Script(tokenizer, "answer"), asyncio.Event(), asyncio.Event()

    async def sample(prompt_ids, **_):
        if not asked.is_set():
            asked.set()
            try:
                await asyncio.sleep(100)
            finally:
                cancelled.set()
        return await script(prompt_ids)

    async def agent(prompt, base_url):
        where = urlsplit(base_url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        body = json.dumps({"messages": [user("question")]})
        writer.write(f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: x\r\n".encode())
        writer.write(f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await asked.wait()
        writer.close()
        await asyncio.wait_for(cancelled.wait(), 30)
        await asyncio.to_thread(post, base_url, messages=[user("question")])

    (piece,) = await agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), sample)
    check_exact([piece], script.calls)


async def test_a_cancelled_episode_leaves_no_server():
    tokenizer = tokenizer_with("chatml")
    urls = []

    async def agent(prompt, base_url):
        urls.append(base_url)
        await asyncio.sleep(60)

    async def fails():
        while not urls:
            await asyncio.sleep(0.001)
        raise RuntimeError("another one failed")

    with pytest.raises(RuntimeError, match="another one failed"):
        await all_or_cancel([agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer)), fails()])
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(post, urls[0], messages=[user("a")])


async def test_a_request_in_flight_does_not_delay_the_end_of_a_cancelled_episode():
    tokenizer = tokenizer_with("chatml")
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def hangs(prompt_ids, *, max_new_tokens=None):
        asked.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    def agent(prompt, base_url):
        post(base_url, messages=[user("question")])

    async def fails():
        await asked.wait()
        raise RuntimeError("another one failed")

    async with asyncio.timeout(40):
        with pytest.raises(RuntimeError, match="another one failed"):
            await all_or_cancel([agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), hangs), fails()])
        await cancelled.wait()


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("template", ["chatml", "qwen3", "llama3"])
async def test_an_answer_that_the_request_begins_is_continued(path, template):
    """The turn is sampled after the text; the conversation that has both as one message goes on token by token."""
    tokenizer = tokenizer_with(template)
    script = Script(tokenizer, "a", "b", end=END[template])
    said = []

    def ask(base_url, *messages):
        data = json.dumps({"model": "policy", "max_tokens": 9, "messages": messages}).encode()
        request = urllib.request.Request(f"{base_url}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=100) as reply:
            found = json.loads(reply.read())
        said.append(found["content"][0]["text"] if path == "messages" else found["choices"][0]["message"]["content"])

    def agent(prompt, base_url):
        ask(base_url, user("question"), {"role": "assistant", "content": "Sure, "})
        ask(base_url, user("question"), {"role": "assistant", "content": f"Sure, {said[0]}"}, user("more"))
        return {"reward": 1.0}

    (piece,) = await agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), script)
    assert said == ["a", "b"]
    check_exact([piece], script.calls)
    assert tokenizer.decode(piece.prompt_ids) == tokenizer.decode(prompt_of(tokenizer).ids) + "Sure, "
    assert [m["content"] for m in piece.info["messages"]] == ["question", "Sure, a", "more", "b"]
    assert piece.info["metrics"] == {"agent/branches": 0, "agent/rerendered": 0}


async def talk(base_url, text="question"):
    import aiohttp

    body = {"messages": [user(text)]}
    async with aiohttp.ClientSession() as client, client.post(f"{base_url}/chat/completions", json=body) as reply:
        return (await reply.json())["choices"][0]["message"]["content"]


async def one_episode(agent, **options):
    tokenizer = tokenizer_with("chatml")
    env = agent_env(agent, tokenizer=tokenizer, **options)
    return await env(prompt_of(tokenizer), Script(tokenizer, *["answer"] * 9))


async def until_closed(connections):
    return [await asyncio.wait_for(reader.read(), 10) for reader, _ in connections]


async def test_foreign_connections_take_no_place_and_end(monkeypatch):
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 8)
    monkeypatch.setattr(server, "_WAIT_S", 0.3)

    async def agent(prompt, base_url):
        where = urlsplit(base_url)
        foreign = [await asyncio.open_connection(where.hostname, where.port) for _ in range(30)]
        slow = await asyncio.open_connection(where.hostname, where.port)
        slow[1].write(b"POST /x/v1/chat/completions HTTP/1.1\r\n")  # and never more
        said = await talk(base_url)
        assert await until_closed([*foreign, slow]) == [b""] * 31
        assert await talk(base_url) == said == "answer"
        for _, writer in [*foreign, slow]:
            writer.close()

    start = asyncio.get_running_loop().time()
    *_, piece = await one_episode(agent)
    assert piece.info["num_turns"] == 2
    assert asyncio.get_running_loop().time() - start < 9


async def test_the_oldest_foreign_connection_gives_its_place_to_a_client(monkeypatch):
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 2)

    async def agent(prompt, base_url):
        where = urlsplit(base_url)
        first = await asyncio.open_connection(where.hostname, where.port)
        await asyncio.sleep(0.1)
        second = await asyncio.open_connection(where.hostname, where.port)
        await asyncio.sleep(0.1)
        assert await talk(base_url) == "answer"
        assert await until_closed([first]) == [b""]
        first[1].close()
        second[1].close()

    await one_episode(agent)


async def test_a_large_conversation_is_rendered_off_the_event_loop(monkeypatch):
    threads, render = [], EpisodeImages.render

    def noting(self, messages, **how):
        threads.append(threading.current_thread().name)
        return render(self, messages, **how)

    monkeypatch.setattr(EpisodeImages, "render", noting)

    async def agent(prompt, base_url):
        assert await talk(base_url) == "answer"
        assert await talk(base_url, "word " * 50_000) == "answer"

    await one_episode(agent)
    assert threads[0] == threading.main_thread().name
    assert threads[1].startswith("rlkit-agents")


@pytest.mark.parametrize("name", ["failed", "agent/branches"])
async def test_a_metric_of_rlkit_is_refused_of_an_agent(name):
    async def agent(prompt, base_url):
        await talk(base_url)
        return {"reward": 1.0, "info": {"metrics": {name: 1.0}}}

    with pytest.raises(ValueError, match=f"info\\['metrics'\\] has '{name}', a metric of rlkit's own"):
        await one_episode(agent)


async def test_numbers_named_as_those_of_rlkit_stand_beside_them():
    async def agent(prompt, base_url):
        await talk(base_url)
        return {"reward": 0.5, "info": {"metrics": {"mean": 7.0, "std": 8.0, "time/step": 9.0}}}

    found = finalize(rollout_metrics([await one_episode(agent)], version=0))
    names = ("mean", "own/mean", "own/std", "time/step")
    assert [found[f"reward/{name}"] for name in names] == [0.5, 7.0, 8.0, 9.0]
    assert "time/step" not in found
