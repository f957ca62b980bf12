"""Malformed requests of an agent's program: status 400 as OpenAI's server answers, and the episode goes on."""

import copy
import http.client
import json
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit.agents import completions, messages, responses
from rlkit.agents.endpoint import agent_env
from rlkit.agents.request import others
from rlkit.run.sync import run_sync
from rlkit.settings import SamplingParams

DEEP = 500
CALL = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
GOOD = {
    "model": "policy", "max_tokens": 5, "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "question"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call1"},
    ],
}  # fmt: skip


RESPONSES = {
    "model": "policy", "max_output_tokens": 5, "instructions": "s", "stream": False,
    "text": {"format": {"type": "text"}}, "tools": [{"type": "function", "name": "add", "parameters": {}}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "question"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "call1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call1", "output": "2"},
    ],
}  # fmt: skip
MESSAGES = {
    "model": "policy", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
    "stream": False, "tools": [{"name": "add", "input_schema": {}}], "tool_choice": {"type": "auto"},
    "messages": [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "a"}, {"type": "tool_use", "id": "call1", "name": "add", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call1", "content": [{"type": "text", "text": "2"}]},
            {"type": "text", "text": "and?"},
        ]},
    ],
}  # fmt: skip
FORMATS = {"/chat/completions": GOOD, "/responses": RESPONSES, "/messages": MESSAGES}


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


def send(base_url, data, path="/chat/completions"):
    """(status, parsed reply) of a request with the bytes `data`."""
    where = urlsplit(base_url + path)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=100)
    try:
        connection.request("POST", where.path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        raw = reply.read()
        return reply.status, raw if raw.startswith((b"data:", b"event:")) else json.loads(raw)
    finally:
        connection.close()


def episode(bodies, *, template="chatml", path="/chat/completions"):
    """What each of the bodies (bytes) got, and a right request after them; the episode's pieces and the script."""
    tokenizer = tokenizer_with(template)
    script, got = Script(tokenizer, *["answer"] * (len(bodies) + 1)), []

    def agent(prompt, base_url):
        got.extend(send(base_url, body, path) for body in bodies)
        got.append(send(base_url, json.dumps({"messages": [{"role": "user", "content": "question"}]}).encode()))
        return {"reward": 0.5}

    pieces = run_sync(agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), script))
    check_exact(pieces, script.calls)
    return got, pieces, script


def with_messages(messages, **more):
    return {"messages": messages, **more}


def deep_call(depth):
    function = {"name": "f", "arguments": json.dumps({"x": nested(depth)})}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}]


REFUSED = {
    "no messages": {},
    "empty": with_messages([]),
    "a string": with_messages("question"),
    "a list of strings": with_messages(["question"]),
    "no role": with_messages([{"content": "q"}]),
    "unknown role": with_messages([{"role": "wizard", "content": "q"}]),
    "role of another type": with_messages([{"role": ["user"], "content": "q"}]),
    "a number as content": with_messages([{"role": "user", "content": 5}]),
    "an image": with_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    "a part that is a string": with_messages([{"role": "user", "content": ["q"]}]),
    "text that is none": with_messages([{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    "calls that are no list": with_messages([{"role": "assistant", "tool_calls": 5}]),
    "a call without a function": with_messages([{"role": "assistant", "tool_calls": [{}]}]),
    "a name that is a list": with_messages([{"role": "user", "content": "q", "name": [1]}]),
    "arguments nested 500 deep": with_messages(deep_call(500)),
    "arguments nested 100,000 deep": with_messages([
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[" * 10**5}}]},
    ]),
    "messages nested 500 deep": with_messages([{"role": "user", "content": nested(DEEP)}]),
    "tools that are none": with_messages([{"role": "user", "content": "q"}], tools=[5]),
    "tools nested 500 deep": with_messages([{"role": "user", "content": "q"}], tools=[{**TOOL, "x": nested(DEEP)}]),
    "half a character": with_messages([{"role": "user", "content": "\ud800"}]),
    "half a character in a name": with_messages([{"role": "user", "content": "q", "name": "\ud800"}]),
    "a limit of 0": with_messages([{"role": "user", "content": "q"}], max_tokens=0),
    "a limit that is text": with_messages([{"role": "user", "content": "q"}], max_tokens="many"),
    "a fraction as limit": with_messages([{"role": "user", "content": "q"}], max_completion_tokens=1.5),
    "a model that is a list": with_messages([{"role": "user", "content": "q"}], model=[1]),
    "a list": [1, 2],
    "null": None,
}  # fmt: skip
RAW = {
    "no JSON": b"{",
    "nothing": b"",
    "not UTF-8": b'{"messages": "\xff"}',
    "200,000 lists": b"[" * 200_000 + b"]" * 200_000,
    "5,000 digits": b'{"messages": ' + b"9" * 5000 + b"}",
}


def test_what_openai_refuses_is_refused_and_the_episode_goes_on():
    bodies = {name: json.dumps(body).encode() for name, body in REFUSED.items()} | RAW
    got, pieces, script = episode([*bodies.values()])
    *bad, good = got
    answers = dict(zip(bodies, bad, strict=True))
    assert {name: status for name, (status, _) in answers.items() if status != 400} == {}
    for _, reply in answers.values():
        assert reply["error"]["code"] == reply["error"]["type"] == "invalid_request_error"
        assert {"message", "type", "param", "code"} == reply["error"].keys()
        assert 0 < len(reply["error"]["message"]) < 1000
    assert "`role` must be one of system" in answers["unknown role"][1]["error"]["message"]
    assert good[1]["choices"][0]["message"]["content"] == "answer"
    assert (len(script.calls), len(pieces), pieces[0].reward) == (1, 1, 0.5)


def test_a_conversation_that_the_template_refuses_leaves_the_episode_as_it_was():
    """The turn before it is then continued, not begun again."""
    tokenizer = copy.deepcopy(tokenizer_with("chatml"))
    guard = "{%- if messages[-1].content == 'x' %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    tokenizer.chat_template = guard + tokenizer.chat_template
    script, got = Script(tokenizer, "one", "two"), []

    def agent(prompt, base_url):
        messages = [{"role": "user", "content": "question"}]

        def ask(*more):
            got.append(send(base_url, json.dumps(with_messages([*messages, *more])).encode()))
            return got[-1][1]

        messages.append(ask()["choices"][0]["message"])
        ask({"role": "user", "content": "x"})
        ask({"role": "user", "content": "y"})

    pieces = run_sync(agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), script))
    check_exact(pieces, script.calls)
    assert [status for status, _ in got] == [200, 400, 200]
    assert got[1][1]["error"]["message"] == "the chat template refuses this: TemplateError: roles must alternate"
    assert len(pieces) == 1


def test_a_call_that_the_model_nests_500_deep_comes_back_as_text():
    """As `tool_calls` it would come back in the history, which the template cannot render."""
    tokenizer = tokenizer_with("chatml")
    said = '<tool_call>{"name": "f", "arguments": ' + json.dumps({"x": nested(DEEP)}) + "}</tool_call>"
    script, got = Script(tokenizer, said, "done"), []

    def agent(prompt, base_url):
        messages = [{"role": "user", "content": "question"}]
        for _ in range(2):
            got.append(send(base_url, json.dumps(with_messages(messages, tools=[TOOL])).encode()))
            messages += [got[-1][1]["choices"][0]["message"], {"role": "user", "content": "more"}]

    run_sync(agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), script))
    assert [status for status, _ in got] == [200, 200]
    assert got[0][1]["choices"][0]["message"] == {"role": "assistant", "content": said}


def test_a_body_has_a_limit_and_another_name_is_answered_before_its_body():
    tokenizer = tokenizer_with("chatml")
    got = []

    def agent(prompt, base_url):
        got.append(send(base_url, b" " * (33 << 20)))
        where = urlsplit(base_url)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=100)
        connection.putrequest("POST", where.path.replace("/v1", "x/v1") + "/chat/completions")
        connection.putheader("Content-Length", str(8 << 30))
        connection.endheaders()  # and nothing of the body
        got.append((connection.getresponse().status, None))
        connection.close()
        got.append(send(base_url, json.dumps(with_messages([{"role": "user", "content": "question"}])).encode()))

    run_sync(agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer, "a")))
    assert [status for status, _ in got] == [413, 404, 200]


junk = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.floats(), st.text(max_size=5), st.characters(categories=["Cs"]),
    st.sampled_from([10**400, "9" * 50, "user", "assistant", "tool", '{"a": [[1]]}', "<500 lists>"]),
    st.sampled_from([nested(63), {}, []]),
    st.lists(st.sampled_from([1, "x", {"type": "text", "text": "x"}, {"type": "text"}, CALL]), max_size=3),
    st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name"]), st.text(max_size=3), max_size=3),
)  # fmt: skip


def places(value, path=()):
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, x in inside:
        yield from places(x, (*path, key))


@st.composite
def changed(draw, good):
    """`good` with one or two of its values replaced, removed or repeated."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from([p for p in places(value) if len(p) < 12 and p]))
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "repeat"])):
            case "remove" if len(value) > 1:
                del inside[path[-1]]
            case "repeat" if isinstance(inside, list):
                inside.append(inside[path[-1]])
            case _:
                inside[path[-1]] = copy.deepcopy(draw(junk))
    return json.dumps(value).replace('"<500 lists>"', json.dumps(nested(DEEP))).encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "path"),
    [
        *((t, "/chat/completions") for t in ("chatml", "qwen3", "llama3")),
        *(("chatml", p) for p in ("/responses", "/messages")),
    ],
)
@given(data=st.data())
def test_every_request_is_answered_with_200_or_400(template, path, data):
    bodies = data.draw(st.lists(changed(FORMATS[path]), min_size=10, max_size=10))
    got, _, script = episode(bodies, template=template, path=path)
    assert {status for status, _ in got} <= {200, 400}
    assert got[-1][0] == 200
    assert len(script.calls) == sum(status == 200 for status, _ in got)
    kind = "error" if path == "/messages" else None
    assert all(reply.get("type") == kind and reply["error"]["message"] for status, reply in got if status == 400)


def test_a_conversation_is_the_same_in_every_format():
    """Text, a call and its result, as chat templates have them."""
    call = CALL | {"function": {"name": "add", "arguments": {"a": 1}}}
    told = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "call1"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    given = copy.deepcopy(GOOD)
    given["messages"][2]["content"] = "a"
    assert completions.read(given).messages == told
    request = responses.read(RESPONSES, {})
    assert (request.messages, request.tools, request.max_new_tokens) == (told, tools, 5)
    assert others(request, None) == []
    request = messages.read(MESSAGES)
    assert (request.messages, request.tools, request.stop) == (
        [*told, {"role": "user", "content": "and?"}],
        tools,
        ("x",),
    )


def test_a_response_continues_the_one_that_it_names():
    """Without its instructions, which each request gives again."""
    tokenizer = tokenizer_with("chatml")
    script, got = Script(tokenizer, "one", "two"), []

    def agent(prompt, base_url):
        body = {"input": "question", "instructions": "first"}
        got.append(send(base_url, json.dumps(body).encode(), "/responses")[1])
        body = {"input": "more", "instructions": "second", "previous_response_id": got[0]["id"]}
        got.append(send(base_url, json.dumps(body).encode(), "/responses")[1])

    run_sync(agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer), script))
    context = tokenizer.decode(script.calls[1][0])
    roles = [part.split("\n")[0] for part in context.split("<|im_start|>")[1:]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert ("second" in context, "first" in context, "one" in context) == (True, False, True)
    assert got[1]["output"][0]["content"][0]["text"] == "two"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "q"}]}),
        ("/responses", {"input": "q"}),
        ("/messages", {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}),
    ],
)
def test_fields_that_change_sampling_are_ignored_or_refused(path, body):
    tokenizer = tokenizer_with("chatml")
    asked = body | {"temperature": 0.3}
    for refuse, statuses in ((False, [200, 200]), (True, [400, 200])):
        got = []

        def agent(prompt, base_url, got=got):
            got += [send(base_url, json.dumps(b).encode(), path) for b in (asked, body | {"top_p": 1, "seed": None})]

        env = agent_env(agent, tokenizer=tokenizer, refuse_sampling=refuse)
        run_sync(env(prompt_of(tokenizer), Script(tokenizer, "a", "b")))
        assert [status for status, _ in got] == statuses
    assert "`temperature`: the run sets how turns are sampled" in got[0][1]["error"]["message"]


def test_another_distribution_is_named_by_what_asks_for_it():
    user = [{"role": "user", "content": "q"}]
    forced = {"type": "function", "function": {"name": "add"}}

    def named(request, params=None):
        return others(request, params)

    asked = {"messages": user, "tools": [TOOL], "tool_choice": forced, "top_p": 0.5, "frequency_penalty": 0}
    assert named(completions.read(asked)) == ["top_p", "tool_choice"]
    structured = {"messages": user, "response_format": {"type": "json_object"}, "parallel_tool_calls": False}
    assert named(completions.read(structured)) == ["response_format", "parallel_tool_calls"]
    structured = {"messages": user, "guided_json": {"type": "object"}}
    assert named(completions.read(structured)) == ["guided_json"]
    structured = {"messages": user, "max_tokens": 5, "output_config": {"effort": "low"}}
    assert named(messages.read(structured)) == ["output_config"]
    structured = {"input": "q", "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}}
    assert named(responses.read(structured, {})) == ["reasoning", "response_format"]
    anthropic = {"messages": user, "max_tokens": 1, "tool_choice": {"type": "any"}, "top_k": 5}
    anthropic["tools"] = MESSAGES["tools"]
    assert named(messages.read(anthropic)) == ["top_k", "tool_choice"]
    run = SamplingParams(temperature=0.7, top_k=5)
    assert named(messages.read(anthropic | {"temperature": 0.7}), run) == ["tool_choice"]
    assert named(messages.read(anthropic | {"temperature": 1}), run) == ["temperature", "tool_choice"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ({"arguments": json.dumps('{"a": 1}')}, {"a": 1}),
        ({"arguments": '{"a": null}'}, {"a": None}),
        ({"parameters": {"a": 1}}, {"a": 1}),
        ({"args": '{"a": 1}'}, {"a": 1}),
        ({"arguments": ""}, {}),
        ({}, {}),
        ({"arguments": "[1, 2]"}, {"arguments": "[1, 2]"}),
        ({"arguments": "{a: 1"}, {"arguments": "{a: 1"}),
    ],
)
def test_the_arguments_of_earlier_calls_are_objects(function, expected):
    """Those that are none are kept as they are: an agent's run is not ended for them."""
    body = copy.deepcopy(GOOD)
    body["messages"][2]["tool_calls"] = [{**CALL, "function": {"name": "add", **function}}]
    (call,) = completions.read(body).messages[2]["tool_calls"]
    assert call == {**CALL, "function": {"name": "add", "arguments": expected}}
