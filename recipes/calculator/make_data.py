"""Word problems of two steps for a model with a calculator: 400 demonstrations, 2,000 questions, 200 held out.

    python recipes/calculator/make_data.py

The conversations are those of a poor teacher: in six of ten the answer is guessed without the tool, and wrong.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tool import calculate
from transformers.utils import get_json_schema

HERE = Path(__file__).parent
STORIES = (
    ("A shop has {a} boxes of {b} {thing} each and sells {c} {thing}. How many {thing} are left?", "-"),
    ("{a} people bring {b} {thing} each, and {c} {thing} are there already. How many are there now?", "+"),
    ("A box holds {b} {thing}. Anna has {a} full boxes and {c} loose {thing}. How many {thing} has she?", "+"),
    ("One of the {thing} costs {b} cents. Ben buys {a} and pays {c} cents for a bag. How many cents is that?", "+"),
    ("Every day {a} {thing} are made, for {b} days, and {c} are thrown away. How many remain?", "-"),
)
THINGS = (
    *("pens", "apples", "books", "cups", "nails", "stamps"),
    *("tickets", "candles", "buttons", "shells", "coins", "bricks"),
)


def question(rng: random.Random) -> dict[str, str]:
    story, sign = rng.choice(STORIES)
    numbers = {"a": rng.randint(12, 99), "b": rng.randint(12, 99), "c": rng.randint(11, 99)}
    expression = "{a} * {b} {sign} {c}".format(**numbers, sign=sign)
    text = story.format(**numbers, thing=rng.choice(THINGS))
    return {"prompt": text, "answer": str(eval(expression)), "expression": expression}  # our own numbers


def demonstration(rng: random.Random, row: dict[str, str]) -> dict[str, Any]:
    """A conversation to imitate, and the schema of the tool that it may call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    if rng.random() < 0.6:
        messages += [{"role": "assistant", "content": f"The answer is {rng.randint(200, 9999)}."}]
    else:
        call = {"name": "calculate", "arguments": {"expression": row["expression"]}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": row["answer"]},
            {"role": "assistant", "content": f"The answer is {row['answer']}."},
        ]
    return {"messages": messages, "tools": [get_json_schema(calculate)]}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rng = random.Random(0)
    rows = list({row["prompt"]: row for row in (question(rng) for _ in range(3000))}.values())[:2600]
    demos = [demonstration(rng, row) for row in rows[:400]]
    plain = [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
    for name, part in (("sft", demos), ("train", plain[400:2400]), ("test", plain[2400:])):
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
