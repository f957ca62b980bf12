"""Rows of chats for tests of data files: messages, tools, a template that writes both, and the readers of a file.

A turn is written as `<user>hi;`, which stands for `<|im_start|>user\nhi<|im_end|>\n`.
"""

from __future__ import annotations

import csv
import json
import re

import pyarrow
from pyarrow import parquet

from rlkit.compat import rows as compat_rows
from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.load import load_rows
from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_tokenizer
from rlkit.data.turns import LABELLED, PAIR, PROMPT, SFT

CALLS = (  # a template that writes tools, calls and reasoning
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMS = {"sft": SFT, "dpo": (PAIR,), "kto": (PAIR, LABELLED), "grpo": (PROMPT,)}
READERS = {"sft": sft_examples, "dpo": preference_pairs, "kto": labelled_examples, "grpo": rl_prompts}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def user(text, **more):
    return said("user", text, **more)


def answer(text, **more):
    return said("assistant", text, **more)


def human(text, **more):
    return {"from": "human", "value": text, **more}


def gpt(text, **more):
    return {"from": "gpt", "value": text, **more}


def call(name, arguments):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
ROME = '{"city": "Rome"}'
CITY = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}'  # noqa: E501
SUM = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}}'  # noqa: E501
WEATHER = [user("Rome?"), answer(None, tool_calls=[call("weather", ROME)]), said("tool", "20 C"), answer("20 degrees.")]
WEATHER_TEXT = '<user>Rome?;<assistant><call>weather {"city": "Rome"}</call>;<tool>20 C;<assistant>20 degrees.;'
WEATHER_PARTS = ['<call>weather {"city": "Rome"}</call>;', "20 degrees.;"]
HI_YO = ("<user>hi;<assistant>yo;", ["yo;"])
PAIR_OF = ("<user>hi;<assistant>", "yo;", "no;")


def tokenizer_of(template=CALLS):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def write(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, script, tokenizer):
    """What the script trains on, as it is written above."""

    def shown(ids):
        text = re.sub(r"<\|im_start\|>(\w+)\n", r"<\1>", tokenizer.decode(ids))
        return re.sub(r"<\|im_end\|>\n?", ";", text)

    rows = compat_rows.read(load_rows(path), *FORMS[script])
    limit = {"max_prompt_tokens" if script == "grpo" else "max_example_tokens": 4000}
    found, num_dropped = READERS[script](rows, tokenizer=tokenizer, **limit)
    assert num_dropped == 0
    if script == "grpo":
        return [shown(prompt.ids) for prompt in found]
    if script == "dpo":
        return [(shown(p.prompt), shown(p.chosen), shown(p.rejected)) for p in found]
    if script == "kto":
        return [(shown(e.prompt), shown(e.response), e.desirable) for e in found]
    return [(shown(e.ids), [shown(part) for part in parts(e)]) for e in found]


def parts(example):
    """The runs of trained tokens."""
    runs = [[]]
    for token, on in zip(example.ids, example.mask, strict=True):
        if on:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
