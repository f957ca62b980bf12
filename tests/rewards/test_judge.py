"""Against a real HTTP server on this machine that fails in every way it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial

import pytest
from aiohttp import web

from rlkit.rewards import RewardError, Sample, run_reward, run_reward_each
from rlkit.rewards.http import HttpError, post_json
from rlkit.rewards.judge import OPENRLHF, SGLANG, VLLM, chat, remote_reward_model, score_line

ROW = {"prompt": "What is {completion}?", "answer": "{question}"}


@contextlib.asynccontextmanager
async def serving(handler):
    """The URL of a server that gives every POST to `handler(path, body)`, which returns JSON or a response."""
    app = web.Application(client_max_size=1 << 24)
    seen = []

    async def handle(request):
        body = await request.json()
        seen.append((request.path, body, request.headers))
        answer = await handler(request.path, body)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


def says(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


async def test_a_judge_sees_question_reference_and_completion_and_its_score_is_the_reward():
    async def judge(path, body):
        return says(f"I read {len(body['messages'][0]['content'])} characters.\nScore: 7")

    async with serving(judge) as (url, seen):
        ask = partial(chat, url=url + "/", model="m", headers={"Authorization": "Bearer k"}, options={"max_tokens": 9})
        (reward,) = await run_reward(ask, [Sample("It is {reference}.", ROW, 0)], timeout_s=60)
    assert reward.reward == pytest.approx(0.7)
    assert reward.notes["judge"].endswith("Score: 7")
    ((path, body, headers),) = seen
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 9)
    text = body["messages"][0]["content"]
    for part, value in (
        ("question", "What is {completion}?"),
        ("reference", "{question}"),
        ("answer", "It is {reference}."),
    ):
        assert text.count(f"<{part}>\n{value}\n</{part}>") == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 10", 1.0),
        ("score: 3\n... Score: **4**", 0.4),
        ("SCORE = 2.5/10", 0.25),
        ("Score:0.", 0.0),
        ("Score - 8", 0.8),
        ("Score (0-10): 8", 0.8),
        ("**Score**: 9/10.", 0.9),
    ],
)
def test_score_lines(text, value):
    assert score_line(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "8", "Score: high", "Score: 11", "Score: -3", "Score:-3/10", "Score: 8/100", "Score: 4.5/5"]
)
def test_what_is_no_score(text):
    with pytest.raises(ValueError, match="the judge gives"):
        score_line(text)


async def test_a_judge_without_a_score_is_asked_again_and_then_an_error_of_its_sample():
    async def judge(path, body):
        hopeless = "hopeless" in body["messages"][0]["content"]
        return says("Hm." if hopeless or "seed" not in body else "Score: 5")

    async with serving(judge) as (url, seen):
        ask = partial(chat, url=url, model="m", retries=2)
        first, second = await run_reward_each(ask, [Sample("fine", ROW, 0), Sample("hopeless", ROW, 1)], timeout_s=60)
    assert first.reward == 0.5
    assert isinstance(second, RewardError)
    assert "the judge gives no score: 'Hm.' (3 attempts)" in second.cause
    assert [body.get("seed") for _, body, _ in seen if "hopeless" in str(body)] == [None, 1, 2]


async def test_transient_failures_are_retried():
    failures = iter(
        [
            web.Response(status=500, text="busy"),
            web.Response(status=429, headers={"Retry-After": "0"}),
            web.Response(text='{"cut": '),
            None,
            "hang",
        ]
    )

    async def flaky(path, body):
        failure = next(failures, {"ok": body})
        if failure is None:
            raise ConnectionResetError
        if failure == "hang":
            await asyncio.sleep(60)
        return failure

    async with serving(flaky) as (url, seen):
        assert await post_json(url + "/x", [1], retries=5, backoff_s=0.01, timeout_s=0.5) == {"ok": [1]}
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("status", "tries", "message"),
    [
        (503, 3, "HTTP 503: no, tried 3 times"),
        (529, 3, "HTTP 529: no, tried 3"),
        (400, 1, "HTTP 400: no$"),
        (401, 1, "HTTP 401"),
        (302, 1, "HTTP 302"),
    ],
)
async def test_what_does_not_pass_is_an_error_with_its_status(status, tries, message):
    async def refuse(path, body):
        return web.Response(status=status, text="no")

    async with serving(refuse) as (url, seen):
        with pytest.raises(HttpError, match=message) as caught:
            await post_json(url, {}, retries=2, backoff_s=0.01)
    assert caught.value.status == status
    assert len(seen) == tries


async def test_an_endless_or_a_deep_answer_is_an_error(monkeypatch):
    monkeypatch.setattr("rlkit.rewards.http.MAX_REPLY", 1 << 20)
    sent = []

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while len(sent) < 10_000:
                sent.append(await response.write(b" " * (1 << 16)))
        return response

    app = web.Application()
    app.router.add_post("/endless", endless)
    app.router.add_post("/deep", lambda _: _deep())
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        with pytest.raises(HttpError, match="the answer has more than 1 MiB"):
            await post_json(f"{url}/endless", {}, retries=0)
        with pytest.raises(HttpError, match=r"the answer is not JSON: '\[\["):
            await post_json(f"{url}/deep", {}, retries=0)
    finally:
        await runner.cleanup()
    assert len(sent) < 10_000


async def _deep():
    return web.Response(text="[" * 100_000)


async def test_a_refused_connection_is_an_error():
    async with serving(None) as (url, _):
        pass
    with pytest.raises(HttpError, match="tried 2 times") as caught:
        await post_json(url, {}, retries=1, backoff_s=0.01)
    assert caught.value.status is None


async def test_concurrency_is_limited_and_the_wait_is_off_the_clock():
    under_way = most = 0
    four = asyncio.Event()

    async def slow(path, body):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 4:
            four.set()
        await four.wait()
        await asyncio.sleep(0.2)
        under_way -= 1
        return {"n": body["n"]}

    async with serving(slow) as (url, _):

        async def ask(completion, row):
            return (await post_json(url, row, concurrency=4))["n"]

        samples = [Sample("", {"n": i}, i) for i in range(16)]
        rewards = await run_reward(ask, samples, timeout_s=0.7)  # all together take at least 0.8 s
    assert [r.reward for r in rewards] == list(range(16))
    assert most == 4


async def test_cancelling_leaves_no_task_and_no_connection():
    began = asyncio.Event()

    async def hang(path, body):
        began.set()
        await asyncio.sleep(60)

    async with serving(hang) as (url, _):
        sockets = number_of_sockets()
        tasks = asyncio.all_tasks()
        asking = asyncio.gather(*(post_json(url, {}) for _ in range(5)))
        await began.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(120):
            while number_of_sockets() > sockets:
                await asyncio.sleep(0.02)
        assert {t for t in asyncio.all_tasks() - tasks if "post_json" in str(t)} == set()


def number_of_sockets():
    return sum(
        os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in os.listdir("/proc/self/fd") if fd_open(fd)
    )


def fd_open(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


def render(messages):
    return "|".join(m["content"] for m in messages)


async def length_server(path, body):
    """Rewards a text with its length, in the form of the server whose path it is; refuses one that says `bad`."""
    texts = body.get("text") or body.get("input") or body["query"]
    if any("bad" in text for text in texts):
        return web.Response(status=400, text="too long")
    if path == "/get_reward":
        return {"rewards": [len(text) for text in texts]}
    if "text" in body:
        return [{"embedding": [len(text), 0.0], "meta_info": {}} for text in texts]
    data = [{"index": i, "probs": [0.0, float(len(text))]} for i, text in enumerate(texts)]
    return {"object": "list", "data": data[::-1]}


@pytest.mark.parametrize("wire", [SGLANG, VLLM, OPENRLHF])
async def test_reward_models_are_asked_in_batches(wire):
    completions = ["x" * i for i in range(7)]
    async with serving(length_server) as (url, seen):
        ask = partial(remote_reward_model, url=url, wire=wire, render=render, batch_size=3, body={"model": "rm"})
        rewards = await run_reward(ask, [Sample(c, {"prompt": "q"}, 0) for c in completions], timeout_s=60)
    assert [r.reward for r in rewards] == [2 + i for i in range(7)]
    assert sorted(len(next(v for k, v in body.items() if k != "model")) for _, body, _ in seen) == [1, 3, 3]
    assert all(body["model"] == "rm" for _, body, _ in seen)


async def test_a_text_that_the_server_refuses_spoils_only_itself():
    samples = [Sample(text, {"prompt": "q"}, i) for i, text in enumerate(["a", "bad", "abc", "d"])]
    async with serving(length_server) as (url, seen):
        ask = partial(remote_reward_model, url=url, render=render, batch_size=4)
        results = await run_reward_each(ask, samples, timeout_s=60)
    assert [getattr(r, "reward", None) for r in results] == [3.0, None, 5.0, 3.0]
    assert (results[1].index, "HTTP 400: too long" in results[1].cause) == (1, True)
    assert len(seen) == 5


@pytest.mark.parametrize("number", ["1" + "0" * 400, "NaN", "null"])
async def test_an_invalid_number_fails_only_its_text(number):
    async def huge(path, body):
        return web.Response(text=f'{{"rewards": [1, {number}, 3]}}', content_type="application/json")

    samples = [Sample(text, {"prompt": "q"}, i) for i, text in enumerate("abc")]
    async with serving(huge) as (url, _):
        results = await run_reward_each(
            partial(remote_reward_model, url=url, render=render, wire=OPENRLHF), samples, timeout_s=60
        )
    assert [getattr(r, "reward", None) for r in results] == [1.0, None, 3.0]
    assert (results[1].index, "the server gives" in results[1].cause) == (1, True)


async def test_a_busy_server_is_not_asked_for_each_text_alone():
    async def busy(path, body):
        return web.Response(status=429, text="slow down")

    samples = [Sample(text, {"prompt": "q"}, i) for i, text in enumerate("abcd")]
    async with serving(busy) as (url, seen):
        ask = partial(remote_reward_model, url=url, render=render, retries=0)
        results = await run_reward_each(ask, samples, timeout_s=60)
    assert all("HTTP 429: slow down" in result.cause for result in results)
    assert len(seen) == 1


async def test_an_answer_of_another_form_is_an_error():
    async def nonsense(path, body):
        return [{"embedding": [1.0]}]

    samples = [Sample("a", {"prompt": "q"}, 0), Sample("b", {"prompt": "q"}, 1)]
    async with serving(nonsense) as (url, _):
        with pytest.raises(RewardError, match="gives 1 numbers for 2 texts"):
            await run_reward(partial(remote_reward_model, url=url, render=render), samples, timeout_s=60)
        with pytest.raises(RewardError, match="not of the expected form"):
            await run_reward(partial(remote_reward_model, url=url, render=render, wire=VLLM), samples, timeout_s=60)
        with pytest.raises(RewardError, match="not a chat completion"):
            await run_reward(partial(chat, url=url, model="m"), samples, timeout_s=60)
