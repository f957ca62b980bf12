"""A user's program for chat completions: sync, async, streaming, several choices, an error."""

import asyncio
import json
import os
from pathlib import Path

import openai

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
}}}]  # fmt: skip
QUESTION = json.loads(Path(os.environ["RLKIT_ROW"]).read_text())["prompt"]


def opening():
    return {"model": "gpt", "messages": [{"role": "user", "content": QUESTION}], "tools": TOOLS, "temperature": 0.2}


def continued(message):
    """The request after a message with calls: each has its result."""
    calls = message["tool_calls"]
    sums = [sum(json.loads(c["function"]["arguments"]).values()) for c in calls]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": str(x)} for c, x in zip(calls, sums)]
    return opening() | {"messages": [*opening()["messages"], message, *results]}


def sync(client):
    first = client.chat.completions.create(**opening()).choices[0]
    assert first.finish_reason == "tool_calls", first
    last = client.chat.completions.create(**continued(first.message.model_dump()))
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    return last.choices[0].message.content


async def with_async(client):
    first = (await client.chat.completions.create(**opening())).choices[0].message
    async with client.chat.completions.stream(**continued(first.model_dump(exclude_none=True))) as events:
        return (await events.get_final_completion()).choices[0].message.content


def streamed(client):
    calls, usage = {}, None
    for chunk in client.chat.completions.create(**opening(), stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for delta in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            calls.setdefault(delta.index, delta.model_dump()).setdefault("type", "function")
    assert usage.completion_tokens > 0
    return sync_after(client, {"role": "assistant", "content": "I add.", "tool_calls": [*calls.values()]})


def sync_after(client, message):
    return client.chat.completions.create(**continued(message), n=2).choices[1].message.content


def main():
    client = openai.OpenAI()
    assert [model.id for model in client.models.list()] == ["policy"]
    answers = [sync(client), asyncio.run(with_async(openai.AsyncOpenAI())), streamed(client)]
    try:
        client.chat.completions.create(model="gpt", messages=[])
    except openai.BadRequestError as error:
        assert error.code == "invalid_request_error", error  # noqa: PT017
    else:
        raise AssertionError("no messages, and no error")
    Path(os.environ["RLKIT_RESULT"]).write_text(json.dumps({"reward": float(answers == ["8", "8", "8"])}))


main()
