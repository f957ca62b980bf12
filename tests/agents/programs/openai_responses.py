"""A user's program for OpenAI's Responses: sync, async, streaming, with and without the stored history."""

import asyncio
import json
import os
from pathlib import Path

import openai

TOOLS = [{"type": "function", "name": "add", "description": "Add.", "strict": False, "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
}}]  # fmt: skip
QUESTION = json.loads(Path(os.environ["RLKIT_ROW"]).read_text())["prompt"]
FIXED = {"model": "gpt", "tools": TOOLS, "instructions": "Use the tool."}


def results(response):
    calls = [item for item in response.output if item.type == "function_call"]
    sums = [sum(json.loads(call.arguments).values()) for call in calls]
    return [{"type": "function_call_output", "call_id": c.call_id, "output": str(x)} for c, x in zip(calls, sums)]


def with_history(client):
    asked = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(**FIXED, input=asked)
    return client.responses.create(**FIXED, input=[*asked, *first.output, *results(first)]).output_text


async def stored(client):
    first = await client.responses.create(**FIXED, input=QUESTION)
    last = await client.responses.create(**FIXED, input=results(first), previous_response_id=first.id)
    assert last.status == "completed", last
    return last.output_text


def streamed(client):
    with client.responses.stream(**FIXED, input=QUESTION) as events:
        texts = [e.delta for e in events if e.type == "response.output_text.delta"]
        first = events.get_final_response()
    assert "".join(texts).strip() == "I add.", texts
    with client.responses.stream(**FIXED, input=results(first), previous_response_id=first.id) as events:
        return events.get_final_response().output_text


def main():
    client = openai.OpenAI()
    answers = [with_history(client), asyncio.run(stored(openai.AsyncOpenAI())), streamed(client)]
    for wrong in ({"input": []}, {"input": "q", "previous_response_id": "resp_none"}):
        try:
            client.responses.create(model="gpt", **wrong)
        except openai.BadRequestError:
            continue
        raise AssertionError(f"no error for {wrong}")
    Path(os.environ["RLKIT_RESULT"]).write_text(json.dumps({"reward": float(answers == ["8", "8", "8"])}))


main()
