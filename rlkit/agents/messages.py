"""Anthropic's Messages: `POST /v1/messages`. Reference: docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from rlkit.agents import request as shared
from rlkit.agents.demands import need
from rlkit.agents.request import Answer, Event, Request

_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERRORS = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"}


def read(body: Mapping[str, Any], *, counting: bool = False) -> Request:
    """The request of a body; `counting`: one that only asks for the number of its tokens."""
    raw = shared.objects(body.get("messages"), "`messages`")
    need(raw, "`messages` must be a list of at least one message")
    need(counting or body.get("max_tokens") is not None, "`max_tokens` is required")
    system = shared.text_of(body.get("system"), "`system`")
    images: dict[str, bytes] = {}
    messages = [m for i, message in enumerate(raw) for m in _messages(message, f"messages[{i}]", images)]
    tools = shared.tools_of(body, (None, "custom"), "input_schema")
    chat = {**body, "n": None, **_asked(body)}
    fields = shared.options(chat, tools, limit=("max_tokens",), stop="stop_sequences")
    thinking = body.get("thinking")
    need(isinstance(thinking, dict | None), "`thinking` must be an object")
    fields["thinking"] = (thinking or {}).get("type") in ("enabled", "adaptive")
    first = [{"role": "system", "content": system}] if system else []
    return Request([*first, *shared.joined_turns(messages)], tools, images=images, **fields)


def write(request: Request, answers: Sequence[Answer]) -> dict[str, Any]:
    """The body of the answer."""
    (answer,) = answers
    thought, text = shared.reasoned(answer.text) if request.thinking else ("", answer.text)
    signed = {"type": "thinking", "thinking": thought, "signature": sha256(thought.encode()).hexdigest()}
    texts = [{"type": "text", "text": text}] if text or not (answer.calls or thought) else []
    reason = _REASONS[answer.reason] if answer.stop is None else "stop_sequence"
    uses = [{"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in answer.calls]
    return {
        "id": shared.identity("msg_"), "type": "message", "role": "assistant", "model": request.model,
        "content": [*([signed] if thought else []), *texts, *uses], "stop_reason": reason, "stop_sequence": answer.stop,
        "usage": {
            "input_tokens": answer.num_prompt, "output_tokens": answer.num_sampled,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        },
    }  # fmt: skip


def events(request: Request, whole: Mapping[str, Any]) -> list[Event]:  # noqa: ARG001
    """The answer `whole` as a stream. The engine gives whole turns, so each block comes in one piece."""
    chunks = list[Event]()

    def add(kind: str, **data: Any) -> None:
        chunks.append((kind, {"type": kind, **data}))

    usage = whole["usage"]
    started = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    add("message_start", message=started)
    for i, block in enumerate(whole["content"]):
        empty, deltas = _streamed(block)
        add("content_block_start", index=i, content_block={**block, **empty})
        for delta in deltas:
            add("content_block_delta", index=i, delta=delta)
        add("content_block_stop", index=i)
    add("message_delta", delta={key: whole[key] for key in ("stop_reason", "stop_sequence")}, usage=usage)
    add("message_stop")
    return chunks


def _streamed(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields of a block that are empty where a stream begins it, and what it streams then."""
    if block["type"] == "text":
        return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return {"thinking": "", "signature": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]


def _asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """`tool_choice` and the format of the text as OpenAI names them."""
    choice, config = body.get("tool_choice"), body.get("output_config")
    need(isinstance(choice, dict | None), "`tool_choice` must be an object with a `type`")
    need(isinstance(config, dict | None), "`output_config` must be an object")
    kind, config = (choice or {}).get("type"), config or {}
    if choice is not None:
        need(kind in ("auto", "any", "tool", "none"), "`tool_choice` must have as `type` auto, any, tool or none")
    parallel = (choice or {}).get("disable_parallel_tool_use")
    need(isinstance(parallel, bool | None), "`disable_parallel_tool_use` must be true or false")
    return {
        "tool_choice": choice if kind == "tool" else kind, "parallel_tool_calls": not parallel,
        "response_format": config.get("format") or body.get("output_format"),
        "output_config": {key: value for key, value in config.items() if key != "format"},
    }  # fmt: skip


def failure(message: str, code: str, status: int) -> dict[str, Any]:
    """The body of an error; Anthropic's have no code."""
    message = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
    return {"type": "error", "error": {"type": _ERRORS.get(status, "invalid_request_error"), "message": message}}


def _messages(message: Mapping[str, Any], place: str, images: dict[str, bytes]) -> list[dict[str, Any]]:
    """A message as those of chat templates: results of tools are messages of their own, before the text."""
    role, content = message.get("role"), message.get("content")
    need(role in ("user", "assistant", "system"), f"{place}: `role` must be user or assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": shared.text_of(content, f"{place}: `content`")}]
    blocks = shared.objects(content, f"{place}: blocks of `content`")
    of_policy = ("text", "tool_use", "thinking", "redacted_thinking")
    kinds = of_policy if role == "assistant" else ("text", "image", "tool_result") if role == "user" else ("text",)
    for block in blocks:
        kind = block.get("type")
        need(kind in kinds, f"{place}: blocks of type {str(kind)[:80]!r} are not supported in a message of the {role}")
    visible = [block for block in blocks if block["type"] in ("text", "image")]
    thoughts = [b.get("thinking") for b in blocks if b["type"] == "thinking"]
    need(all(isinstance(x, str) for x in thoughts), f"{place}: `thinking` must be a string")
    text = shared.text_of(visible, f"{place}: `content`", images=images)
    if role == "assistant":
        uses = [block for block in blocks if block["type"] == "tool_use"]
        calls = [shared.call_of(b.get("name"), b.get("input"), b.get("id"), place) for b in uses]
        thought = "".join(map(str, thoughts))
        text = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
        return [{"role": role, "content": text, **({"tool_calls": calls} if calls else {})}]
    results = [_result(block, place, images) for block in blocks if block["type"] == "tool_result"]
    return [*results, {"role": role, "content": text}] if text or not results else results


def _result(block: Mapping[str, Any], place: str, images: dict[str, bytes]) -> dict[str, Any]:
    need(isinstance(block.get("tool_use_id"), str), f"{place}: `tool_use_id` must be a string")
    text = shared.text_of(block.get("content"), f"{place}: `content` of a result", images=images)
    return {"role": "tool", "content": text, "tool_call_id": block["tool_use_id"]}
