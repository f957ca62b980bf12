"""A program that knows nothing of rlkit: it asks a model over HTTP, and runs the calculator that the model calls.

OPENAI_BASE_URL=http://localhost:8000/v1 python examples/http_agent.py "12*34"
rlkit grpo --model MODEL --data sums.jsonl --agent "python examples/http_agent.py {prompt}" --reward FILE.py:FUNCTION
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from typing import Any

NUMBER = {"type": "string", "description": "e.g. 2*(3+4)"}
PARAMETERS = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"]}
CALC = {"type": "function", "function": {"name": "calc", "description": "Calculate.", "parameters": PARAMETERS}}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [CALC]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}
    url = os.environ["OPENAI_BASE_URL"]
    try:
        with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as reply:
            return json.loads(reply.read())["choices"][0]["message"]
    except OSError as error:
        sys.exit(f"error: OPENAI_BASE_URL {url}: {error}")


def calc(arguments: str) -> str:
    """The product, sum or difference in a call's arguments."""
    try:
        expression = json.loads(arguments)["x"]
        if set(expression) <= set("0123456789+-*() ") and "**" not in expression:
            return str(eval(expression))
        return "Error: only whole numbers, + - * and parentheses"
    except Exception as error:
        return f"Error: {error!r}"


def main(question: str) -> None:
    messages = [{"role": "user", "content": question}]
    for _ in range(4):
        messages.append(ask(messages))
        calls = messages[-1].get("tool_calls") or ()
        for call in calls:
            result = calc(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            break
    print(messages[-1]["content"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    args = parser.parse_args()
    if "OPENAI_BASE_URL" not in os.environ:
        sys.exit("error: OPENAI_BASE_URL is not set: the address of a server, such as http://localhost:8000/v1")
    main(args.question)
