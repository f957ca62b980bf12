"""OpenAI's Responses: `POST /v1/responses`. Reference: platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.agents import request as shared
from rlkit.agents.completions import ROLES, SHOWING, failure
from rlkit.agents.demands import BadRequest, need
from rlkit.agents.request import Answer, Event, Request

__all__ = ["events", "failure", "read", "write"]
_TEXT = ("input_text", "output_text", "text")


def read(body: Mapping[str, Any], stored: Mapping[str, list[dict[str, Any]]]) -> Request:
    """The request of a body; `stored` are the conversations of earlier responses, for `previous_response_id`."""
    inputs, instructions, before = body.get("input"), body.get("instructions"), body.get("previous_response_id")
    need(isinstance(inputs, str | list) and inputs, "`input` must be a text or a list of at least one item")
    need(isinstance(instructions, str | None), "`instructions` must be a string")
    if before is not None and (not isinstance(before, str) or before not in stored):
        raise BadRequest(f"there is no response {str(before)[:80]!r} in this episode", "previous_response_not_found")
    items = [{"role": "user", "content": inputs}] if isinstance(inputs, str) else inputs
    items = shared.objects(items, "items of `input`")
    images: dict[str, bytes] = {}
    messages = [m for i, item in enumerate(items) for m in _messages(item, f"input[{i}]", images)]
    messages = shared.joined_turns([*(stored[before] if before else ()), *messages])
    need(messages, "`input` must have at least one message")
    if instructions:
        messages = [{"role": "system", "content": instructions}, *messages]
    tools = shared.tools_of(body, ("function",), "parameters")
    need(isinstance(body.get("text"), dict | None), "`text` must be an object")
    chat = {**body, "n": None, "response_format": (body.get("text") or {}).get("format")}
    include = body.get("include") or []
    need(isinstance(include, list), "`include` must be a list")
    fields = shared.options(chat, tools, limit=("max_output_tokens",), stop=None)
    return Request(messages, tools, images=images, logprobs="message.output_text.logprobs" in include, **fields)


def write(request: Request, answers: Sequence[Answer]) -> dict[str, Any]:
    """The body of the answer. Its `id` is what `previous_response_id` names."""
    (answer,) = answers
    cut = answer.reason == "length"
    usage = {
        "input_tokens": answer.num_prompt, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.num_sampled, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt + answer.num_sampled,
    }  # fmt: skip
    return {
        "id": shared.identity("resp_"), "object": "response", "created_at": 0, "model": request.model,
        "status": "incomplete" if cut else "completed", "error": None, "instructions": None, "metadata": {},
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "output": _items(answer),
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None, "top_p": None,
        "usage": usage,
    }  # fmt: skip


def events(request: Request, whole: Mapping[str, Any]) -> list[Event]:  # noqa: ARG001
    """The answer `whole` as a stream. The engine gives whole turns, so each item comes in one piece."""
    chunks = list[Event]()

    def add(kind: str, **data: Any) -> None:
        chunks.append((kind, {"type": kind, "sequence_number": len(chunks), **data}))

    started = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    add("response.created", response=started)
    add("response.in_progress", response=started)
    for i, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": i}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        add("response.output_item.added", output_index=i, item={**item, **empty, "status": "in_progress"})
        if item["type"] == "message":
            (part,) = item["content"]
            at |= {"content_index": 0}
            add("response.content_part.added", **at, part={**part, "text": "", "logprobs": []})
            add("response.output_text.delta", **at, delta=part["text"], logprobs=part["logprobs"])
            add("response.output_text.done", **at, text=part["text"], logprobs=part["logprobs"])
            add("response.content_part.done", **at, part=part)
        else:
            add("response.function_call_arguments.delta", **at, delta=item["arguments"])
            add("response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        add("response.output_item.done", output_index=i, item=item)
    add(f"response.{whole['status']}", response=whole)
    return chunks


def _items(answer: Answer) -> list[dict[str, Any]]:
    status = "incomplete" if answer.reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": shared.log_probs(answer)}
        items.append({"type": "message", "id": shared.identity("msg_"), "role": "assistant", "content": [part]})
    for call in answer.calls:
        made = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "id": shared.identity("fc_"), **made})
    return [{**item, "status": status} for item in items]


def _messages(item: Mapping[str, Any], place: str, images: dict[str, bytes]) -> list[dict[str, Any]]:
    """An item as messages of chat templates; reasoning of other models is left out."""
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "reasoning":
        return []
    if kind == "function_call":
        call = shared.call_of(item.get("name"), item.get("arguments"), item.get("call_id"), place)
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        need(isinstance(item.get("call_id"), str), f"{place}: `call_id` must be a string")
        text = shared.text_of(item.get("output"), f"{place}: `output`", kinds=_TEXT, images=images)
        return [{"role": "tool", "content": text, "tool_call_id": item["call_id"]}]
    need(kind == "message", f"{place}: items of type {str(kind)[:80]!r} are not supported")
    need(role in ROLES, f"{place}: `role` must be one of {', '.join(ROLES)}")
    collected = images if role in SHOWING else None
    text = shared.text_of(item.get("content"), f"{place}: `content` of the {role}", kinds=_TEXT, images=collected)
    return [{"role": role, "content": text}]
