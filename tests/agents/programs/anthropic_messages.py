"""A user's program for Anthropic's Messages: sync, async, streaming, the count of tokens, an error."""

import asyncio
import json
import os
from pathlib import Path

import anthropic

TOOLS = [{"name": "add", "description": "Add.", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
}}]  # fmt: skip
QUESTION = json.loads(Path(os.environ["RLKIT_ROW"]).read_text())["prompt"]
FIXED = {"model": "claude", "max_tokens": 500, "system": [{"type": "text", "text": "Use the tool."}], "tools": TOOLS}
ASKED = [{"role": "user", "content": QUESTION}]


def continued(message):
    uses = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use", message
    results = [{"type": "tool_result", "tool_use_id": u.id, "content": str(sum(u.input.values()))} for u in uses]
    return [*ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


def sync(client):
    first = client.messages.create(**FIXED, messages=ASKED)
    last = client.messages.create(**FIXED, messages=continued(first))
    assert last.stop_reason == "end_turn", last
    counted = {name: FIXED[name] for name in ("model", "system", "tools")}
    count = client.messages.count_tokens(**counted, messages=ASKED)
    assert count.input_tokens == first.usage.input_tokens, (count, first.usage)
    return last.content[0].text


async def with_async(client):
    first = await client.messages.create(**FIXED, messages=ASKED)
    async with client.messages.stream(**FIXED, messages=continued(first)) as events:
        return await events.get_final_text()


def streamed(client):
    with client.messages.stream(**FIXED, messages=ASKED) as events:
        first = events.get_final_message()
    with client.messages.stream(**FIXED, messages=continued(first)) as events:
        return "".join(events.text_stream)


def main():
    client = anthropic.Anthropic()
    answers = [sync(client), asyncio.run(with_async(anthropic.AsyncAnthropic())), streamed(client)]
    try:
        client.messages.create(**FIXED, messages=[])
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error", error  # noqa: PT017
    else:
        raise AssertionError("no messages, and no error")
    Path(os.environ["RLKIT_RESULT"]).write_text(json.dumps({"reward": float(answers == ["8", "8", "8"])}))


main()
