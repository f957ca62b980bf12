"""Requests to the endpoint in its three formats, and what each must get: a table for plain HTTP and official clients.

A row is (name, path, body, what the policy says, status, check). `check` gets the reply as a dict, or the list of
events of a stream, and must return True; of an error it is a part of the message.
"""

import json
from typing import Any, NamedTuple

FUNCTION = {
    "name": "add", "description": "Add.",
    "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
    },
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TWICE = f"{CALL}{CALL}"
ROWS = []


class Row(NamedTuple):
    """A request, what the policy samples for it, and what it must get."""

    name: str
    path: str
    body: dict[str, Any]
    said: str
    status: int
    check: Any

    @property
    def unmet(self) -> bool:
        """Whether the turn must be counted as one that lacks what was asked."""
        return self.name.endswith(", unmet")


def chat(name, check, status=200, said="answer", **body):
    ROWS.append(
        Row(
            f"chat: {name}",
            "chat/completions",
            {"model": "policy", "messages": [{"role": "user", "content": name}], **body},
            said,
            status,
            check,
        )
    )


def responses(name, check, status=200, said="answer", **body):
    ROWS.append(Row(f"responses: {name}", "responses", {"model": "policy", "input": name, **body}, said, status, check))


def messages(name, check, status=200, said="answer", **body):
    body = {"model": "policy", "max_tokens": 500, "messages": [{"role": "user", "content": name}], **body}
    ROWS.append(Row(f"messages: {name}", "messages", body, said, status, check))


def first(reply):
    return reply["choices"][0]


def text_of(reply):
    """The text of a reply in any format."""
    if "choices" in reply:
        return first(reply)["message"]["content"]
    blocks = reply["content"] if "content" in reply else [p for item in reply["output"] for p in item["content"]]
    return "".join(block["text"] for block in blocks if block["type"] in ("text", "output_text"))


def named(field, value):
    """A check of one field of the reply's first level."""
    return lambda reply: reply[field] == value


def says(text):
    return lambda reply: text_of(reply) == text


def kinds(events):
    return [event["type"] for event in events]


def has_log_probs(entries):
    """The tokens of "answer" and the end, with falling log-probs (the script's)."""
    return "".join(e["token"] for e in entries) == "answer<|im_end|>" and all(
        e["logprob"] < 0 and bytes(e["bytes"]).decode() == e["token"] for e in entries
    )


TOOLS = [{"type": "function", "function": FUNCTION}]
STRICT = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
WRONG = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integre"}}}
PREFILL = [{"role": "user", "content": "prefill"}, {"role": "assistant", "content": "The an"}]

chat("plain", lambda r: (
    says("answer")(r) and r["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    and r["usage"]["total_tokens"] == r["usage"]["prompt_tokens"] + r["usage"]["completion_tokens"]
))  # fmt: skip
chat("logprobs", lambda r: has_log_probs(first(r)["logprobs"]["content"]), logprobs=True)
chat(
    "logprobs of a stream",
    lambda events: has_log_probs(events[0]["choices"][0]["logprobs"]["content"]),
    logprobs=True,
    stream=True,
)
chat("no logprobs", lambda r: first(r)["logprobs"] is None, logprobs=False, top_logprobs=0)
chat("top_logprobs", "`top_logprobs` must be 0", 400, logprobs=True, top_logprobs=3)
chat("required", lambda r: first(r)["finish_reason"] == "tool_calls", said=CALL, tools=TOOLS, tool_choice="required")
chat("required, unmet", says("answer"), tools=TOOLS, tool_choice="required")
chat(
    "named function",
    lambda r: first(r)["message"]["tool_calls"][0]["function"]["name"] == "add",
    said=CALL,
    tools=TOOLS,
    tool_choice={"type": "function", "function": {"name": "add"}},
)
chat(
    "unknown function",
    "which is not among `tools`",
    400,
    tools=TOOLS,
    tool_choice={"type": "function", "function": {"name": "sub"}},
)
chat("required without tools", "`tools` has no function", 400, tool_choice="required")
chat(
    "tool_choice none",
    lambda r: says(CALL)(r) and first(r)["finish_reason"] == "stop",
    said=CALL,
    tools=TOOLS,
    tool_choice="none",
)
chat(
    "one call",
    lambda r: len(first(r)["message"]["tool_calls"]) == 1,
    said=CALL,
    tools=TOOLS,
    parallel_tool_calls=False,
)
chat(
    "one call, unmet",
    lambda r: len(first(r)["message"]["tool_calls"]) == 2,
    said=TWICE,
    tools=TOOLS,
    parallel_tool_calls=False,
)
chat("strict", lambda r: first(r)["finish_reason"] == "tool_calls", said=CALL, tools=STRICT)
chat(
    "strict, unmet",
    lambda r: json.loads(first(r)["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": "one"},
    said=CALL.replace("1", '"one"'),
    tools=STRICT,
)
chat("json_object", says('{"x": 1}'), said='{"x": 1}', response_format={"type": "json_object"})
chat("json_object, unmet", says("[1]"), said="[1]", response_format={"type": "json_object"})
chat("json_schema", says('{"x": 1}'), said='{"x": 1}', response_format=FORMAT)
chat("json_schema, unmet", says('{"x": "1"}'), said='{"x": "1"}', response_format=FORMAT)
chat("a wrong schema", "the JSON schema is not valid", 400, response_format=WRONG)
chat("an unknown format", "`response_format` must have as `type`", 400, response_format={"type": "xml"})
chat("stop", lambda r: says("an")(r) and first(r)["finish_reason"] == "stop", stop=["sw"])
chat("seed and temperature", says("answer"), seed=3, temperature=0.2, top_p=0.5)
chat("a temperature of 3", "`temperature` must be a number from 0 to 2", 400, temperature=3)
chat("n", lambda r: [c["index"] for c in r["choices"]] == [0, 1], n=2)
chat("both limits", says("answer"), max_tokens=400, max_completion_tokens=300)
chat("prefill", says("swer"), said="swer", messages=PREFILL)
chat("functions", "the older form of `tools`", 400, functions=[FUNCTION])
chat("audio", '`modalities` must be ["text"]', 400, modalities=["text", "audio"])
chat("another model", named("model", "gpt-9"), model="gpt-9")
chat(
    "stream",
    lambda events: (
        [c["delta"].get("content") for e in events for c in e["choices"]] == ["answer", None]
        and events[-1]["choices"] == []
        and events[-1]["usage"]["completion_tokens"] > 0
        and events[-2]["choices"][0]["finish_reason"] == "stop"
    ),
    stream=True,
    stream_options={"include_usage": True},
)

RESPONSE_TOOLS = [{"type": "function", "strict": False, **FUNCTION}]
responses("plain", lambda r: says("answer")(r) and r["usage"]["input_tokens_details"]["cached_tokens"] == 0)
responses(
    "logprobs",
    lambda r: has_log_probs(r["output"][0]["content"][0]["logprobs"]),
    include=["message.output_text.logprobs"],
)
responses("top_logprobs", "`top_logprobs` must be 0", 400, top_logprobs=2)
responses(
    "named function",
    lambda r: r["output"][-1]["name"] == "add",
    said=CALL,
    tools=RESPONSE_TOOLS,
    tool_choice={"type": "function", "name": "add"},
)
responses("required, unmet", says("answer"), tools=RESPONSE_TOOLS, tool_choice="required")
FLAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
responses("text.format", says('{"x": 1}'), said='{"x": 1}', text={"format": FLAT})
responses("text.format, unmet", says("answer"), text={"format": {"type": "json_object"}})
responses("background", "`background` is not supported", 400, background=True)
responses(
    "stream",
    lambda events: kinds(events) == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ],
    stream=True,
)  # fmt: skip

MESSAGE_TOOLS = [{"name": "add", "description": "Add.", "input_schema": FUNCTION["parameters"]}]
THOUGHT = "<think>\nhm\n</think>\n\nanswer"
THINKING = {"type": "enabled", "budget_tokens": 1024}
BLOCKS = ["content_block_start", "content_block_delta", "content_block_stop"]


def has_thought(reply):
    thinking, text = reply["content"]
    fine = thinking["type"] == "thinking" and thinking["signature"]
    return bool(fine) and (thinking["thinking"], text["text"]) == ("hm", "answer")


messages("plain", lambda r: says("answer")(r) and r["usage"]["cache_read_input_tokens"] == 0)
messages("end of turn", lambda r: (r["stop_reason"], r["stop_sequence"]) == ("end_turn", None))
messages(
    "stop_sequences",
    lambda r: (text_of(r), r["stop_reason"], r["stop_sequence"]) == ("an", "stop_sequence", "sw"),
    stop_sequences=["zz", "sw"],
)
messages(
    "stop_sequences of a stream",
    lambda events: next(e["delta"] for e in events if e["type"] == "message_delta")["stop_sequence"] == "sw",
    stop_sequences=["sw"],
    stream=True,
)
messages("thinking", has_thought, said=THOUGHT, thinking=THINKING, max_tokens=2048)
messages("thinking that is not asked for", says(THOUGHT), said=THOUGHT)
messages(
    "thinking in a stream",
    lambda events: kinds(events) == [
        "message_start", BLOCKS[0], BLOCKS[1], BLOCKS[1], BLOCKS[2], *BLOCKS, "message_delta", "message_stop",
    ] and [e["delta"]["type"] for e in events if e["type"] == BLOCKS[1]] == [
        "thinking_delta", "signature_delta", "text_delta",
    ],
    said=THOUGHT, thinking=THINKING, max_tokens=2048, stream=True,
)  # fmt: skip
messages(
    "any tool",
    lambda r: r["content"][-1]["input"] == {"a": 1} and r["stop_reason"] == "tool_use",
    said=CALL,
    tools=MESSAGE_TOOLS,
    tool_choice={"type": "any"},
)
messages("a tool, unmet", says("answer"), tools=MESSAGE_TOOLS, tool_choice={"type": "tool", "name": "add"})
messages("tool_choice none", says(CALL), said=CALL, tools=MESSAGE_TOOLS, tool_choice={"type": "none"})
messages(
    "one tool, unmet",
    lambda r: len(r["content"]) == 2,
    said=TWICE,
    tools=MESSAGE_TOOLS,
    tool_choice={"type": "auto", "disable_parallel_tool_use": True},
)
messages("output_config", says('{"x": 1}'), said='{"x": 1}', output_config={"format": FLAT})
messages("prefill", says("swer"), said="swer", messages=PREFILL)
messages("another model", named("model", "claude"), model="claude")
messages("a container", "`container` is not supported", 400, container="c")
