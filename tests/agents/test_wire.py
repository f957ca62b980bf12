"""The wire formats as clients expect them: the table of `wire.py`, by plain HTTP and with the official clients."""

import http.client
import inspect
import json
import logging
import socket
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from scripted import Script, check_tree, prompt_of, tokenizer_with
from wire import CALL, ROWS, THOUGHT, TOOLS

from rlkit.agents import demands
from rlkit.agents.endpoint import agent_env
from rlkit.agents.request import answer_of
from rlkit.data.tiny import tiny_model
from rlkit.rollout import calling
from rlkit.rollout.engines.local import LocalEngine
from rlkit.run.sync import run_sync
from rlkit.types import SamplingParams

GOOD = [row for row in ROWS if row.status == 200]


def http_ask(base_url, path, body, method="POST"):
    """(status, reply) of a request: the JSON, or the list of a stream's events."""
    where = urlsplit(base_url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=100)
    try:
        connection.request(method, f"{where.path}/{path}", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        raw = reply.read().decode()
    finally:
        connection.close()
    if not raw.startswith(("data:", "event:")):
        return reply.status, json.loads(raw)
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in raw.splitlines() if line.startswith("event: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert not names or names == [event["type"] for event in events]
    return reply.status, events


def client_ask(base_url, path, body, clients={}):  # noqa: B006
    """The same with the official client of the path; what its method has no argument for goes into `extra_body`."""
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    if base_url not in clients:
        own = {"api_key": "none", "max_retries": 0}
        root = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), **own)
        clients[base_url] = openai.OpenAI(base_url=base_url, **own), root
    chat, claude = clients[base_url]
    ask = {"chat/completions": chat.chat.completions, "responses": chat.responses, "messages": claude.messages}[path]
    arguments = inspect.signature(ask.create).parameters
    more = {key: value for key, value in body.items() if key not in arguments}
    try:
        found = ask.create(**{k: v for k, v in body.items() if k in arguments}, extra_body=more or None)
        if body.get("stream"):
            return 200, [event.model_dump() for event in found]
        return 200, found.model_dump()
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        whole = error.body if "error" in error.body else {"error": error.body}
        return error.status_code, whole


def texts(row):
    """What the policy samples for a row: of a stop string all up to it."""
    stop = (row.body.get("stop") or row.body.get("stop_sequences") or [None])[-1]
    said = row.said if stop is None else row.said[: row.said.find(stop) + len(stop)]
    return [said] * row.body.get("n", 1)


def cut(tokenizer, text):
    """The tokens of a turn that a stop string ended have no end token."""
    return tokenizer.encode(text, add_special_tokens=False)


def run(rows, ask):
    """What each of the rows got in one episode, which is token-exact; its last piece."""
    tokenizer, got = tokenizer_with("chatml"), []
    stops = ("stop", "stop_sequences")
    turns = [
        cut(tokenizer, text) if any(row.body.get(stop) for stop in stops) else text
        for row in rows
        if row.status == 200
        for text in texts(row)
    ]
    script = Script(tokenizer, *turns)
    pieces = run_sync(
        agent_env(lambda _, url: got.extend(ask(url, row.path, row.body) for row in rows) or 1.0, tokenizer=tokenizer)(
            prompt_of(tokenizer), script
        )
    )
    check_tree(pieces, script.calls)
    assert script.turns == []
    sampled = sum(len(out.ids) for _, out in script.calls)
    assert sum(sum(p.mask) for p in pieces) == sampled, "each sampled token trains, also those of unmet demands"
    return got, pieces[-1]


def faults(rows, got):
    """The rows that did not get what they must."""
    found = {}
    for row, (status, reply) in zip(rows, got, strict=True):
        if isinstance(row.check, str):
            fine = row.check in reply["error"]["message"]
            if row.path != "messages":
                fine = fine and {*reply["error"]} >= {"message", "type", "param", "code"}
        else:
            fine = status == 200 and row.check(reply)
        if not fine or status != row.status:
            found[row.name] = status, reply
    return found


@pytest.mark.slow_cases("client_ask")
@pytest.mark.parametrize("ask", [http_ask, client_ask])
def test_each_request_gets_what_it_asks_for_or_a_clear_400(ask, caplog, monkeypatch):
    monkeypatch.setattr(calling, "_reported", set())
    with caplog.at_level(logging.WARNING):
        got, piece = run(ROWS, ask)
    assert faults(ROWS, got) == {}
    assert piece.info["metrics"]["agent/unmet"] == sum(row.unmet for row in ROWS) == 9
    lines = [r.getMessage() for r in caplog.records]
    assert len({*lines}) == len(lines), "each is named once"
    for asked in ("`seed`", "`tool_choice`", "`response_format`", "`strict`", "the model 'gpt-9'", "`thinking`"):
        assert any(asked in line for line in lines), asked


@pytest.mark.slow
def test_with_a_tiny_model_the_clients_get_the_same_answers_and_sampled_tokens_train():
    """Whatever the model says: statuses, forms and token-exactness; its log-probs are those of the answers."""
    tokenizer = tokenizer_with("chatml")
    model = tiny_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    got, calls = [], []

    async def sampled():
        async with LocalEngine(model, eos_token_ids=range(0, 263, 9), max_len=1024, tokenizer=tokenizer) as engine:

            async def sample(ids, *, max_new_tokens=None, stop=(), images=None):
                out = await engine.generate(ids, params=SamplingParams(max_new_tokens=24, seed=len(calls), stop=stop))
                calls.append((list(ids), out))
                return out

            def agent(_, url):
                got.extend(client_ask(url, row.path, row.body) for row in ROWS)
                return 0.0

            return await agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), sample)

    pieces = run_sync(sampled())
    check_tree(pieces, calls)
    assert {row.name: s for row, (s, _) in zip(ROWS, got, strict=True) if s != row.status} == {}
    (chat,) = [reply for row, (_, reply) in zip(ROWS, got, strict=True) if row.name == "chat: logprobs"]
    entries = chat["choices"][0]["logprobs"]["content"]
    assert any([e["logprob"] for e in entries] == out.logp for _, out in calls)
    assert len(entries) == chat["usage"]["completion_tokens"]


def test_thinking_comes_back_and_the_conversation_goes_on_token_by_token():
    """With its blocks, as Anthropic asks for; without them the turn is another text, which is counted."""
    for kept, rerendered in ((slice(0, None), 0), (slice(1, None), 1)):
        tokenizer = tokenizer_with("chatml")
        script = Script(tokenizer, THOUGHT, "more")

        def agent(_, url, kept=kept):
            body = {"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}}
            asked = [{"role": "user", "content": "q"}]
            said = http_ask(url, "messages", {**body, "messages": asked})[1]["content"]
            asked += [{"role": "assistant", "content": said[kept]}, {"role": "user", "content": "and?"}]
            http_ask(url, "messages", {**body, "messages": asked})

        pieces = run_sync(agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), script))
        check_tree(pieces, script.calls)
        assert pieces[-1].info["metrics"] == {"agent/branches": rerendered, "agent/rerendered": rerendered}


def test_a_call_that_tool_choice_none_left_in_the_text_goes_on_token_by_token():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, CALL, "more")

    def agent(_, url):
        asked = [{"role": "user", "content": "q"}]
        for _ in range(2):
            said = http_ask(url, "chat/completions", {"messages": asked, "tools": TOOLS, "tool_choice": "none"})[1]
            asked += [said["choices"][0]["message"], {"role": "user", "content": "and?"}]

    pieces = run_sync(agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), script))
    check_tree(pieces, script.calls)
    assert [(len(pieces), piece.info["metrics"]["agent/branches"]) for piece in pieces] == [(1, 0)]


def test_other_paths_have_errors_of_their_form():
    got = {}

    def agent(_, url):
        got["models"] = http_ask(url, "models", None, "GET")
        got["model"] = http_ask(url, "models/openai/gpt", None, "GET")
        got["text"] = http_ask(url, "completions", {"prompt": "q"})
        got["method"] = http_ask(url, "chat/completions", None, "GET")
        got["old"] = http_ask(url, "messages/batches", {})
        got["count"] = http_ask(url, "messages/count_tokens", {"messages": [{"role": "user", "content": "q"}]})

    tokenizer = tokenizer_with("chatml")
    run_sync(agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer)))
    assert {key: status for key, (status, _) in got.items()} == {
        "models": 200, "model": 200, "text": 404, "method": 405, "old": 404, "count": 200,
    }  # fmt: skip
    assert got["models"][1]["data"][0]["id"] == "policy"
    assert got["model"][1]["id"] == "openai/gpt"
    assert got["count"][1] == {"input_tokens": len(prompt_of(tokenizer, "q").ids)}
    error = got["text"][1]["error"]
    assert error["message"].startswith("there is no POST completions here: after /v1/ are POST chat/completions")
    assert error["type"] == "invalid_request_error"


def test_what_is_no_http_gets_400_and_leaves_no_traceback(capfd):
    good, got = json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode(), {}
    bodies = {
        "length": b"Content-Length: -5\r\n\r\n", "chunk": b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        "zip": b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(good) + good,
        "header": b"a" * 9000 + b": b\r\n\r\n",
    }  # fmt: skip

    def agent(_, url):
        where = urlsplit(url)
        for name, body in bodies.items():
            with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
                start = f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: x\r\n".encode()
                connection.sendall(start + body)
                got[name] = connection.recv(1000)
        got["good"] = http_ask(url, "chat/completions", json.loads(good))[0]

    tokenizer = tokenizer_with("chatml")
    run_sync(agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer, "yes")))
    assert got.pop("good") == 200
    assert {name: reply[9:12] for name, reply in got.items()} == dict.fromkeys(bodies, b"400")
    assert b"the body cannot be read" in got["zip"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "schema", "fits"),
    [
        ('{"x": 1}', {"properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}, True),
        ('{"x": "1"}', {"properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}, False),
        ("<think>\n{}\n</think>\n\n[1]", {"type": "array"}, True),
        ("```json\n{}\n```", {}, False),
        ("[" * 10**5, {}, False),
        ("NaN", {"type": "string"}, False),
        ('{"x":', {}, False),
    ],
)
def test_json_is_checked_against_its_schema(text, schema, fits):
    asked, _ = demands.read(None, {"type": "json_schema", "schema": schema}, None, None)
    assert demands.unmet(asked, text, []) is not fits


def test_a_schema_reads_nothing_from_elsewhere(tmp_path):
    (tmp_path / "s.json").write_text("{}")
    asked, _ = demands.read(
        None, {"type": "json_schema", "schema": {"$ref": (tmp_path / "s.json").as_uri()}}, None, None
    )
    with pytest.raises(demands.BadRequest, match="cannot be checked"):
        demands.unmet(asked, "1", [])


def test_without_jsonschema_the_text_must_be_json(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jsonschema.validators", None)
    schema = {"type": "integer", "title": "read without jsonschema"}
    asked, _ = demands.read(None, {"type": "json_schema", "schema": schema}, None, None)
    assert [demands.unmet(asked, text, []) for text in ("1", '"one"', "one")] == [False, False, True]
    demands._validator.cache_clear()


def test_each_of_many_calls_of_a_turn_has_an_id_of_its_own():
    calls = [SimpleNamespace(id="", name="look", arguments={"at": i}) for i in range(40)]
    turn = SimpleNamespace(ids=[1], text="", finish_reason="stop")
    said = SimpleNamespace(calls=calls, turn=turn, stop=None, num_prompt=1, logp=[0.0])
    ids = [call.id for call in answer_of(said, None, SimpleNamespace(reads_calls=True, logprobs=False)).calls]
    assert len({*ids}) == 40
    assert {len(x) for x in ids} == {9}  # as Mistral's template requires
