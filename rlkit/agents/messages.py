"""Anthropic's Messages: `POST /v1/messages`. Reference: docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.agents.request import (
    Answer,
    Event,
    Request,
    call_of,
    identity,
    joined_turns,
    need,
    objects,
    options,
    text_of,
    tools_of,
)

_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERRORS = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"}


def read(body: Mapping[str, Any], *, counting: bool = False) -> Request:
    """The request of a body; `counting`: one that only asks for the number of its tokens."""
    raw = objects(body.get("messages"), "`messages`")
    need(raw, "`messages` must be a list of at least one message")
    need(counting or body.get("max_tokens") is not None, "`max_tokens` is required")
    system = text_of(body.get("system"), "`system`")
    images: dict[str, bytes] = {}
    messages = [m for i, message in enumerate(raw) for m in _messages(message, f"messages[{i}]", images)]
    tools = tools_of(body, (None, "custom"), "input_schema")
    choice = body.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    shared = options({**body, "n": None, "tool_choice": choice}, limit=("max_tokens",), stop="stop_sequences")
    first = [{"role": "system", "content": system}] if system else []
    return Request([*first, *joined_turns(messages)], tools, images=images, **shared)


def write(request: Request, answers: Sequence[Answer]) -> dict[str, Any]:
    """The body of the answer."""
    (answer,) = answers
    texts = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
    uses = [{"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in answer.calls]
    return {
        "id": identity("msg_"), "type": "message", "role": "assistant", "model": request.model,
        "content": [*texts, *uses], "stop_reason": _REASONS[answer.reason], "stop_sequence": None,
        "usage": {"input_tokens": answer.num_prompt, "output_tokens": answer.num_sampled},
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
        empty: dict[str, Any]
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        add("content_block_start", index=i, content_block={**block, **empty})
        add("content_block_delta", index=i, delta=delta)
        add("content_block_stop", index=i)
    add("message_delta", delta={"stop_reason": whole["stop_reason"], "stop_sequence": None}, usage=usage)
    add("message_stop")
    return chunks


def failure(message: str, code: str, status: int) -> dict[str, Any]:  # noqa: ARG001
    """The body of an error; Anthropic's have no code."""
    return {"type": "error", "error": {"type": _ERRORS.get(status, "invalid_request_error"), "message": message}}


def _messages(message: Mapping[str, Any], place: str, images: dict[str, bytes]) -> list[dict[str, Any]]:
    """A message as those of chat templates: results of tools are messages of their own, before the text."""
    role, content = message.get("role"), message.get("content")
    need(role in ("user", "assistant", "system"), f"{place}: `role` must be user or assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, f"{place}: `content`")}]
    blocks = objects(content, f"{place}: blocks of `content`")
    of_policy = ("text", "tool_use", "thinking", "redacted_thinking")
    kinds = of_policy if role == "assistant" else ("text", "image", "tool_result") if role == "user" else ("text",)
    for block in blocks:
        kind = block.get("type")
        need(kind in kinds, f"{place}: blocks of type {str(kind)[:80]!r} are not supported in a message of the {role}")
    visible = [block for block in blocks if block["type"] in ("text", "image")]
    text = text_of(visible, f"{place}: `content`", images=images)
    if role == "assistant":
        uses = [block for block in blocks if block["type"] == "tool_use"]
        calls = [call_of(b.get("name"), b.get("input"), b.get("id"), place) for b in uses]
        return [{"role": role, "content": text, **({"tool_calls": calls} if calls else {})}]
    results = [_result(block, place, images) for block in blocks if block["type"] == "tool_result"]
    return [*results, {"role": role, "content": text}] if text or not results else results


def _result(block: Mapping[str, Any], place: str, images: dict[str, bytes]) -> dict[str, Any]:
    need(isinstance(block.get("tool_use_id"), str), f"{place}: `tool_use_id` must be a string")
    text = text_of(block.get("content"), f"{place}: `content` of a result", images=images)
    return {"role": "tool", "content": text, "tool_call_id": block["tool_use_id"]}
