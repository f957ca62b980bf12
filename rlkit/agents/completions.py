"""OpenAI's chat completions: `POST /v1/chat/completions`. Reference: platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.agents import request as shared
from rlkit.agents.demands import need
from rlkit.agents.request import Answer, Event, Request
from rlkit.data.messages import ARGUMENTS

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHOWING = ("user", "tool", "function")  # roles whose messages may show images
_TEXTS = ("reasoning_content", "name", "tool_call_id")


def read(body: Mapping[str, Any]) -> Request:
    """The request of a body; `BadRequest` where OpenAI has status 400."""
    messages, tools = body.get("messages"), body.get("tools")
    need(isinstance(messages, list) and messages, "`messages` must be a list of at least one message")
    fine = tools is None or (isinstance(tools, list) and all(map(_is_tool, tools)))
    need(fine, "`tools` must be a list of functions")
    images: dict[str, bytes] = {}
    told = [_message(m, f"messages[{i}]", images) for i, m in enumerate(messages or ())]
    streaming = body.get("stream_options")
    usage = isinstance(streaming, dict) and bool(streaming.get("include_usage"))
    asked = body.get("logprobs")
    need(isinstance(asked, bool | None), "`logprobs` must be true or false")
    fields = shared.options(body, tools, limit=("max_completion_tokens", "max_tokens"))
    return Request(told, tools or None, stream_usage=usage, images=images, logprobs=bool(asked), **fields)


def write(request: Request, answers: Sequence[Answer]) -> dict[str, Any]:
    """The body of the answer."""
    told = [{"content": shared.log_probs(answer), "refusal": None} if request.logprobs else None for answer in answers]
    choices = [
        {"index": i, "message": answer.written(), "finish_reason": answer.reason, "logprobs": told[i]}
        for i, answer in enumerate(answers)
    ]
    return {
        "id": shared.identity("chatcmpl-"), "object": "chat.completion", "created": 0, "model": request.model,
        "choices": choices, "usage": _usage(answers),
    }  # fmt: skip


def events(request: Request, whole: Mapping[str, Any]) -> list[Event]:
    """The answer `whole` as a stream. The engine gives whole turns, so each choice comes in one piece."""
    head, chunks = {**whole, "object": "chat.completion.chunk", "usage": None}, list[Event]()

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> None:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        chunks.append((None, head | {"choices": [choice]}))

    for choice in whole["choices"]:
        said, i = {**choice["message"]}, choice["index"]
        calls = [{"index": k, **call} for k, call in enumerate(said.pop("tool_calls", ()))]
        chunk(i, said, logprobs=choice["logprobs"])
        for call in calls:
            chunk(i, {"tool_calls": [call]})
        chunk(i, {}, choice["finish_reason"])
    if request.stream_usage:
        chunks.append((None, head | {"choices": [], "usage": whole["usage"]}))
    return [*chunks, (None, "[DONE]")]


def failure(message: str, code: str, status: int) -> dict[str, Any]:
    """The body of an error; `param` is the field with which the message begins."""
    field = re.match(r"`(\w+)`|(\w+)\[", message)
    kind = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": field and (field[1] or field[2]), "code": code}}


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    read, sampled = answers[0].num_prompt, sum(a.num_sampled for a in answers)
    return {
        "prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


def _message(source: Any, place: str, images: dict[str, bytes]) -> dict[str, Any]:
    need(isinstance(source, dict), f"{place} must be an object")
    need(source.get("role") in ROLES, f"{place}: `role` must be one of {', '.join(ROLES)}")
    need(
        not source.get("function_call"),
        f"{place}: `function_call` is not supported: it is the older form of `tool_calls`",
    )
    message = {key: source[key] for key in ("role", *_TEXTS) if source.get(key) is not None}
    for key in _TEXTS:
        need(isinstance(message.get(key, ""), str), f"{place}: `{key}` must be a string")
    collected = images if source["role"] in SHOWING else None
    message["content"] = shared.text_of(
        source.get("content"), f"{place}: `content` of the {source['role']}", images=collected
    )
    if calls := shared.objects(source.get("tool_calls"), f"{place}: `tool_calls`"):
        message["tool_calls"] = [_call(c, f"{place}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return message


def _call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    function = call.get("function")
    need(isinstance(function, dict), f"{place} must have a function's name")
    assert isinstance(function, dict)
    arguments = next((function[key] for key in ARGUMENTS if function.get(key) is not None), None)
    return shared.call_of(function.get("name"), arguments, call.get("id"), place)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
