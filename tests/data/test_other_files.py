"""Data files of other systems: what is trained of each, written out by hand, or the line that refuses it.

Each row is written as JSONL and as Parquet (or CSV), read by `load_rows`, and must give the same text from both.
A turn is written here as `<user>hi;`, which stands for `<|im_start|>user\nhi<|im_end|>\n`.
"""

from __future__ import annotations

import csv
import json
import re

import pyarrow
import pytest
from pyarrow import parquet

from rlkit.compat import rows as compat_rows
from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.load import load_rows
from rlkit.data.prompts import rl_prompts
from rlkit.data.rows import LABELLED, PAIR, PROMPT, SFT
from rlkit.data.tiny import tiny_tokenizer

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

# system and form, script, row, the text and the trained parts
READ = {
    "one response twice": ("sft", {"prompt": "hi", "response": "", "completion": "yo"}, HI_YO),
    "one labelled response twice": (
        "kto", {"prompt": "hi", "completion": "yo", "response": "yo", "label": True, "kto_tag": 1},
        ("<user>hi;<assistant>", "yo;", True),
    ),
    "one Alpaca output twice": ("sft", {"instruction": "hi", "output": "yo", "response": "yo"}, HI_YO),
    "a topic as label beside kto_tag": (
        "kto", {"instruction": "hi", "output": "no", "label": "greetings", "kto_tag": False},
        ("<user>hi;<assistant>", "no;", False),
    ),
    "tools and functions, a call in both keys": (
        "sft", {"messages": [user("Rome?"), answer(None, tool_calls=[call("weather", ROME)],
                                                   function_call={"name": "weather", "arguments": ROME})],
                "tools": [tool("weather", city=TEXT)], "functions": [tool("weather", city=TEXT)["function"]]},
        (f"<system>[{CITY}];" + '<user>Rome?;<assistant><call>weather {"city": "Rome"}</call>;',
         ['<call>weather {"city": "Rome"}</call>;']),
    ),
    "UltraFeedback": (
        "dpo", {"prompt": "hi", "prompt_id": "1", "chosen": [user("hi"), answer("yo")], "score_chosen": 8.0,
                "rejected": [user("hi"), answer("no")], "messages": [user("hi"), answer("yo")], "score_rejected": 5.0},
        PAIR_OF,
    ),
    "TRL messages": ("sft", {"messages": [user("hi"), answer("yo")]}, HI_YO),
    "TRL prompt and completion of messages": ("sft", {"prompt": [user("hi")], "completion": [answer("yo")]}, HI_YO),
    "TRL text": ("sft", {"text": "Once."}, ("Once.;", ["Once.;"])),
    "TRL implicit prompt of messages": (
        "dpo", {"chosen": [user("hi"), answer("yo")], "rejected": [user("hi"), answer("no")]}, PAIR_OF,
    ),
    "TRL unpaired, label of pandas": ("kto", {"prompt": "hi", "completion": "yo", "label": 1.0},
                                      ("<user>hi;<assistant>", "yo;", True)),
    "TRL unpaired, label 0.0": ("kto", {"prompt": "hi", "completion": "no", "label": 0.0},
                                ("<user>hi;<assistant>", "no;", False)),
    "TRL tools, two schemas": (
        "sft", {"messages": WEATHER, "tools": [tool("weather", city=TEXT), tool("add", x=NUMBER)]},
        (f"<system>[{CITY}, {SUM}];{WEATHER_TEXT}", WEATHER_PARTS),
    ),
    "TRL tools as text": ("sft", {"messages": WEATHER, "tools": json.dumps([tool("add", x=NUMBER)])},
                          (f"<system>[{SUM}];{WEATHER_TEXT}", WEATHER_PARTS)),
    "TRL calls with the arguments as objects": (
        "sft",
        {"messages": [user("?"), answer(None, tool_calls=[call("weather", {"city": "Rome"})]), said("tool", "20"),
                      user("2+3?"), answer(None, tool_calls=[call("add", {"x": 2, "y": 3})]), said("tool", "5"),
                      answer("5")]},
        ('<user>?;<assistant><call>weather {"city": "Rome"}</call>;<tool>20;<user>2+3?;'
         '<assistant><call>add {"x": 2, "y": 3}</call>;<tool>5;<assistant>5;',
         ['<call>weather {"city": "Rome"}</call>;', '<call>add {"x": 2, "y": 3}</call>;', "5;"]),
    ),
    "verl RL": (
        "grpo", {"data_source": "gsm8k", "prompt": [user("hi")], "ability": "math",
                 "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 0}},
        "<user>hi;<assistant>",
    ),
    "verl multi-turn sft": (
        "sft", {"messages": [said("system", "be"), user("a"), answer("b"), user("hi"), answer("yo")], "tools": None},
        ("<system>be;<user>a;<assistant>b;<user>hi;<assistant>yo;", ["b;", "yo;"]),
    ),
    "OpenRLHF input and label": ("grpo", {"input": "hi", "label": "4"}, "<user>hi;<assistant>"),
    "OpenRLHF context_messages": ("grpo", {"context_messages": [user("hi")], "label": "4"}, "<user>hi;<assistant>"),
    "OpenRLHF input and output": ("sft", {"input": "hi", "output": "yo"}, HI_YO),
    "OpenRLHF question and response": ("sft", {"question": "hi", "response": "yo"}, HI_YO),
    "slime step_loss_mask": (
        "sft", {"messages": [user("a"), answer("b", step_loss_mask=0), user("hi"), answer("yo", step_loss_mask=1)]},
        ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["yo;"]),
    ),
    "RL2 messages and answer": ("grpo", {"messages": [user("hi")], "answer": "4"}, "<user>hi;<assistant>"),
    "ColossalAI SFT": (
        "sft", {"messages": [{"from": "user", "content": "hi"}, {"from": "assistant", "content": "yo"}]}, HI_YO,
    ),
    "ColossalAI DPO": (
        "dpo", {"context": [{"from": "human", "content": "hi"}], "chosen": [{"from": "assistant", "content": "yo"}],
                "rejected": [{"from": "assistant", "content": "no"}]}, PAIR_OF,
    ),
    "ColossalAI KTO": (
        "kto", {"prompt": [{"from": "user", "content": "hi"}], "completion": {"from": "assistant", "content": "no"},
                "label": False}, ("<user>hi;<assistant>", "no;", False),
    ),
    "ColossalAI math": ("grpo", {"messages": user("hi"), "gt_answer": "4"}, "<user>hi;<assistant>"),
    "ShareGPT": ("sft", {"conversations": [human("hi"), gpt("yo")], "id": "x_1"}, HI_YO),
    "ShareGPT that gpt opens": (
        "sft", {"conversations": [gpt("hello"), human("hi"), gpt("yo")]},
        ("<assistant>hello;<user>hi;<assistant>yo;", ["yo;"]),
    ),
    "ShareGPT with weights": (
        "sft", {"conversations": [human("a"), gpt("b", weight=0), human("hi"), gpt("yo", weight=1)]},
        ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["yo;"]),
    ),
    "LLaMA-Factory function_call": (
        "sft", {"conversations": [human("Rome?"), {"from": "function_call", "value":
                '{"name": "weather", "arguments": {"city": "Rome"}}'}, {"from": "observation", "value": "20 C"},
                gpt("20 degrees.")], "tools": json.dumps([tool("weather", city=TEXT)])},
        (f"<system>[{CITY}];{WEATHER_TEXT}", WEATHER_PARTS),
    ),
    "LLaMA-Factory prompt, query, response": (
        "sft", {"prompt": "add", "query": "1 2", "response": "3", "system": "be", "history": [["a", "b"]]},
        ("<system>be;<user>a;<assistant>b;<user>add\n1 2;<assistant>3;", ["b;", "3;"]),
    ),
    "LLaMA-Factory ranking": (
        "dpo", {"conversations": [human("hi")], "chosen": gpt("yo"), "rejected": gpt("no"), "system": ""}, PAIR_OF,
    ),
    "LLaMA-Factory kto_tag": ("kto", {"conversations": [human("hi"), gpt("no")], "kto_tag": False},
                              ("<user>hi;<assistant>", "no;", False)),
    "Alpaca": ("sft", {"instruction": "add", "input": "1 2", "output": "3"}, ("<user>add\n1 2;<assistant>3;", ["3;"])),
    "Alpaca with response (GPTeacher)": (
        "sft", {"instruction": "add", "input": "1 2", "response": "3"}, ("<user>add\n1 2;<assistant>3;", ["3;"]),
    ),
    "Alpaca of pandas": ("sft", {"instruction": "hi", "input": float("nan"), "output": "yo"}, HI_YO),
    "Alpaca prompt": ("grpo", {"instruction": "add", "input": "1 2", "answer": "3"}, "<user>add\n1 2;<assistant>"),
    "Dolly": (
        "sft", {"instruction": "Who?", "context": "Bob is a cat.", "response": "Bob", "category": "qa"},
        ("<user>Who?\nBob is a cat.;<assistant>Bob;", ["Bob;"]),
    ),
    "OpenOrca": ("sft", {"id": "x", "system_prompt": "be", "question": "hi", "response": "yo"},
                 ("<system>be;<user>hi;<assistant>yo;", ["yo;"])),
    "Orca DPO": ("dpo", {"system": "be", "question": "hi", "chosen": "yo", "rejected": "no"},
                 ("<system>be;<user>hi;<assistant>", "yo;", "no;")),
    "system beside prompt": ("sft", {"system": "be", "prompt": "hi", "response": "yo"},
                             ("<system>be;<user>hi;<assistant>yo;", ["yo;"])),
    "system beside prompt, RL": ("grpo", {"system": "be", "prompt": "hi", "answer": "4"},
                                 "<system>be;<user>hi;<assistant>"),
    "system_prompt beside messages": ("kto", {"system_prompt": "be", "messages": [user("hi"), answer("yo")],
                                              "label": True}, ("<system>be;<user>hi;<assistant>", "yo;", True)),
    "axolotl train": (
        "sft", {"messages": [user("a", train=False), answer("b", train=False), user("hi", train=False),
                             answer("yo", train=True)]},
        ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["yo;"]),
    ),
    "axolotl training": (
        "sft", {"conversations": [human("a"), gpt("b", training=False), human("hi"), gpt("yo", training=True)]},
        ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["yo;"]),
    ),
    "ms-swift loss": (
        "sft", {"messages": [user("a"), answer("b", loss=False), user("hi"), answer("yo", loss=True)]},
        ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["yo;"]),
    ),
    "ms-swift tool_call, two in a row": (
        "sft", {"messages": [user("?"), said("tool_call", '{"name": "f", "arguments": {"a": 1}}'),
                             said("tool_call", '{"name": "g", "arguments": {"b": 2}}'), said("tool_response", "1"),
                             said("tool_response", "2"), answer("yo")]},
        ('<user>?;<assistant><call>f {"a": 1}</call><call>g {"b": 2}</call>;<tool>1;<tool>2;<assistant>yo;',
         ['<call>f {"a": 1}</call><call>g {"b": 2}</call>;', "yo;"]),
    ),
    "OpenAI weight": (
        "sft", {"messages": [said("system", "be"), user("a"), answer("b", weight=0), user("hi"), answer("yo",
                                                                                                    weight=1)]},
        ("<system>be;<user>a;<assistant>b;<user>hi;<assistant>yo;", ["yo;"]),
    ),
    "OpenAI developer": ("sft", {"messages": [said("developer", "be"), user("hi"), answer("yo")]},
                         ("<system>be;<user>hi;<assistant>yo;", ["yo;"])),
    "OpenAI function_call and functions": (
        "sft", {"messages": [user("Rome?"), answer(None, function_call={"name": "weather", "arguments": ROME}),
                             said("function", "20 C", name="weather"), answer("20 degrees.")],
                "functions": [tool("weather", city=TEXT)["function"]]},
        (f"<system>[{CITY}];{WEATHER_TEXT}", WEATHER_PARTS),
    ),
    "OpenAI preference": (
        "dpo", {"input": {"messages": [user("hi")], "tools": [tool("add", x=NUMBER)], "parallel_tool_calls": True},
                "preferred_output": [answer("yo")], "non_preferred_output": [answer("no")]},
        (f"<system>[{SUM}];<user>hi;<assistant>", "yo;", "no;"),
    ),
    "reasoning_content": ("sft", {"messages": [user("hi"), answer("yo", reasoning_content="hm")]},
                          ("<user>hi;<assistant><think>hm</think>yo;", ["<think>hm</think>yo;"])),
    "Hermes": (
        "sft", {"conversations": [{"from": "system", "value": "<tools>weather</tools>"}, human("Rome?"),
                                  gpt("<tool_call>x</tool_call>"), {"from": "tool", "value": "20"}, gpt("20")],
                "tools": None, "category": "w"},
        ("<system><tools>weather</tools>;<user>Rome?;<assistant><tool_call>x</tool_call>;<tool>20;<assistant>20;",
         ["<tool_call>x</tool_call>;", "20;"]),
    ),
    "ToolACE": ("sft", {"system": "be", "conversations": [{"from": "user", "value": "hi"},
                                                          {"from": "assistant", "value": "yo"}]},
                ("<system>be;<user>hi;<assistant>yo;", ["yo;"])),
    "MMLU": ("grpo", {"question": "Who?", "choices": ["Bob", "Al"], "answer": 1}, "<user>Who?;<assistant>"),
    "a question about a context": ("sft", {"context": "Bob is a cat.", "question": "Who?", "answer": "Bob"},
                                   ("<user>Who?;<assistant>Bob;", ["Bob;"])),
    "Numina, RL": ("grpo", {"problem": "2+2", "solution": "It is 4.", "answer": "4",
                            "messages": [user("2+2"), answer("It is 4.")]}, "<user>2+2;<assistant>"),
    "HotpotQA": ("grpo", {"question": "Who?", "answer": "Bob", "context": {"title": ["a"], "sentences": [["b"]]}},
                 "<user>Who?;<assistant>"),
    "Magpie": ("sft", {"instruction": "hi", "response": "yo", "conversations": [human("hi"), gpt("yo")]}, HI_YO),
    "the answer is the last turn and chosen": (
        "dpo", {"messages": [user("hi"), answer("yo")], "chosen": "yo", "rejected": "no"}, PAIR_OF,
    ),
    "the answer is the last turn of ShareGPT and chosen": (
        "dpo", {"conversations": [human("hi"), gpt("yo")], "chosen": gpt("yo"), "rejected": gpt("no")}, PAIR_OF,
    ),
    "the answer is the last turn of the prompt and the completion": (
        "sft", {"prompt": [user("hi"), answer("yo")], "completion": [answer("yo")]}, HI_YO,
    ),
    "the answer is the last turn of the prompt and the labelled completion": (
        "kto", {"prompt": [user("hi"), answer("no")], "completion": [answer("no")], "label": False},
        ("<user>hi;<assistant>", "no;", False),
    ),
    "the answer is the last turn and the labelled response": (
        "kto", {"messages": [user("hi"), answer("yo")], "response": "yo", "label": True},
        ("<user>hi;<assistant>", "yo;", True),
    ),
    "a labelled Alpaca response with history": (
        "kto", {"instruction": "hi", "response": "yo", "history": [["a", "b"]], "kto_tag": True},
        ("<user>a;<assistant>b;<user>hi;<assistant>", "yo;", True),
    ),
    "a labelled row of LLaMA-Factory with history": (
        "kto", {"prompt": "hi", "query": "", "response": "yo", "history": [["a", "b"]], "kto_tag": False},
        ("<user>a;<assistant>b;<user>hi;<assistant>", "yo;", False),
    ),
    "TRL prompt that ends with an answer, and a pair that goes on": (
        "dpo", {"prompt": [user("a"), answer("b")], "chosen": [user("hi"), answer("yo")],
                "rejected": [user("hi"), answer("no")]},
        ("<user>a;<assistant>b;<user>hi;<assistant>", "yo;", "no;"),
    ),
    "TRL prompt that ends with an answer, and a completion that goes on": (
        "sft", {"prompt": [said("system", "be"), user("a"), answer("b")], "completion": [user("hi"), answer("yo")]},
        ("<system>be;<user>a;<assistant>b;<user>hi;<assistant>yo;", ["yo;"]),
    ),
    "TRL completion of several turns": (
        "sft", {"prompt": [said("system", "be"), user("plan")],
                "completion": [answer("where"), user("hi"), answer("yo")]},
        ("<system>be;<user>plan;<assistant>where;<user>hi;<assistant>yo;", ["where;", "yo;"]),
    ),
    "TRL completion of several turns and a system message": (
        "sft", {"system": "be", "prompt": "plan", "completion": [answer("where"), user("hi"), answer("yo")]},
        ("<system>be;<user>plan;<assistant>where;<user>hi;<assistant>yo;", ["where;", "yo;"]),
    ),
    "Alpaca with history of messages": (
        "sft", {"instruction": "hi", "output": "yo", "history": [user("a"), answer("b")]},
        ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["b;", "yo;"]),
    ),
    "Alpaca with history of from and value": (
        "sft", {"instruction": "hi", "output": "yo", "history": [human("a"), gpt("b")]},
        ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["b;", "yo;"]),
    ),
    "Alpaca with history, RL": (
        "grpo", {"instruction": "hi", "input": "", "output": "yo", "history": [["a", "b"]]},
        "<user>a;<assistant>b;<user>hi;<assistant>",
    ),
    "Capybara": (
        "sft", {"conversation": [{"input": "a", "output": "b"}, {"input": "hi", "output": "yo"}]},
        ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["b;", "yo;"]),
    ),
    "LMSYS": ("sft", {"conversation": [user("hi"), answer("yo")], "conversation_id": "x"}, HI_YO),
    "responses that repeat the prompt": (
        "dpo", {"prompt": "Q: hi A:", "chosen": "Q: hi A: yo", "rejected": "Q: hi A: no"},
        ("<user>Q: hi A:;<assistant>", "Q: hi A: yo;", "Q: hi A: no;"),
    ),
    "a missing value as text": ("sft", {"prompt": "hi", "response": "nan"}, ("<user>hi;<assistant>nan;", ["nan;"])),
    "a missing value as a turn": (
        "dpo", {"chosen": [user("NaN"), answer("yo")], "rejected": [user("NaN"), answer("None")]},
        ("<user>NaN;<assistant>", "yo;", "None;"),
    ),
    "a gold answer that is None": ("grpo", {"prompt": "hi", "answer": "None"}, "<user>hi;<assistant>"),
    "two answers in a row": (
        "sft", {"messages": [user("hi"), answer("yo"), answer("oh")]},
        ("<user>hi;<assistant>yo;<assistant>oh;", ["yo;", "oh;"]),
    ),
    "two answers in a row, of which one trains": (
        "sft", {"messages": [user("hi"), answer("yo", weight=0), answer("oh")]},
        ("<user>hi;<assistant>yo;<assistant>oh;", ["oh;"]),
    ),
    "a response that repeats the prompt": (
        "sft", {"prompt": "Q: Who is it? A:", "response": "Q: Who is it? A: Bob"},
        ("<user>Q: Who is it? A:;<assistant>Q: Who is it? A: Bob;", ["Q: Who is it? A: Bob;"]),
    ),
    "a labelled completion that repeats the prompt": (
        "kto", {"prompt": "Q: Who is it? A:", "completion": "Q: Who is it? A: Bob", "label": True},
        ("<user>Q: Who is it? A:;<assistant>", "Q: Who is it? A: Bob;", True),
    ),
    "a response that greets as the prompt does": (
        "sft", {"prompt": "hi", "response": "hi you"}, ("<user>hi;<assistant>hi you;", ["hi you;"]),
    ),
    "UltraFeedback, pair": (
        "dpo", {"prompt": "hi", "messages": [user("hi"), answer("yo")], "chosen": [user("hi"), answer("yo")],
                "rejected": [user("hi"), answer("no")]}, PAIR_OF,
    ),
    # an input that the answer repeats is not part of the prompt
    "CommonGen": ("sft", {"prompt": "Write a sentence with the word.", "input": "cat", "completion": "The cat sat."},
                  ("<user>Write a sentence with the word.;<assistant>The cat sat.;", ["The cat sat.;"])),
    "a context that the answer repeats": (
        "sft", {"question": "When?", "context": "built in 1900 by monks", "answer": "It was built in 1900 by monks."},
        ("<user>When?;<assistant>It was built in 1900 by monks.;", ["It was built in 1900 by monks.;"]),
    ),
    "starter code that both responses repeat": (
        "dpo", {"prompt": "hi", "starter_code": "def add(a, b):", "chosen": "def add(a, b): return a + b",
                "rejected": "def add(a, b): pass"},
        ("<user>hi;<assistant>", "def add(a, b): return a + b;", "def add(a, b): pass;"),
    ),
    "a word to repeat": ("sft", {"prompt": "Repeat it.", "input": "yo", "response": "yo"},
                         ("<user>Repeat it.;<assistant>yo;", ["yo;"])),
    "an input that is the name of a role": ("sft", {"prompt": "Who?", "input": "assistant", "response": "yo"},
                                            ("<user>Who?;<assistant>yo;", ["yo;"])),
    "GSM8K in messages": ("sft", {"messages": [user("hi"), answer("So #### 72")], "answer": "72"},
                          ("<user>hi;<assistant>So #### 72;", ["So #### 72;"])),
    "LLaMA-Factory query within a word of the prompt": (
        "sft", {"prompt": "Translate into German.", "query": "man", "response": "Mann"},
        ("<user>Translate into German.\nman;<assistant>Mann;", ["Mann;"]),
    ),
    "LLaMA-Factory query that the prompt repeats": (
        "sft", {"prompt": "Q: What is the capital?\nA:", "query": "What is the capital?", "response": "yo"},
        ("<user>Q: What is the capital?\nA:;<assistant>yo;", ["yo;"]),
    ),
    "LLaMA-Factory history and a response, RL": (
        "grpo", {"prompt": "hi", "query": "", "response": "yo", "history": [["a", "b"]]},
        "<user>a;<assistant>b;<user>hi;<assistant>",
    ),
    "messages that end with the answer, RL": (
        "grpo", {"messages": [user("2+2?"), answer("4")], "answer": "4"}, "<user>2+2?;<assistant>",
    ),
    "messages of more than the question, RL": (
        "grpo", {"problem": "2+2", "answer": "4", "messages": [user("2+2, please"), answer("4")]},
        "<user>2+2, please;<assistant>",
    ),
    "a prompt that stands twice without a blank": (
        "sft", {"prompt": "What is 2+2 here?", "response": "What is 2+2 here?4"},
        ("<user>What is 2+2 here?;<assistant>What is 2+2 here?4;", ["What is 2+2 here?4;"]),
    ),
    "a prefix of the answer": ("sft", {"messages": [user("hi"), answer("yo", prefix=True)]}, HI_YO),
    "an answer that is the JSON text of messages": (
        "sft", {"prompt": "hi", "response": '[{"role": "assistant", "content": "yo"}]'}, HI_YO,
    ),
    "an answer of an Alpaca row that is the JSON text of messages": (
        "sft", {"instruction": "hi", "response": '[{"from": "gpt", "value": "yo"}]'}, HI_YO,
    ),
    "a pair that is the JSON text of messages": (
        "dpo", {"prompt": "hi", "chosen": '[{"role": "assistant", "content": "yo"}]',
                "rejected": '[{"role": "assistant", "content": "no"}]'}, PAIR_OF,
    ),
    "an answer that is the JSON text of a message and another object": (
        "sft", {"prompt": "hi", "response": '[{"role": "assistant", "content": "a"}, {"role": "x", "content": ""}]'},
        ('<user>hi;<assistant>[{"role": "assistant", "content": "a"}, {"role": "x", "content": ""}];',
         ['[{"role": "assistant", "content": "a"}, {"role": "x", "content": ""}];']),
    ),
    "an answer that is the JSON text of roles without content": (
        "sft", {"prompt": "hi", "response": '[{"role": "user", "name": "Al"}]'},
        ('<user>hi;<assistant>[{"role": "user", "name": "Al"}];', ['[{"role": "user", "name": "Al"}];']),
    ),
    "a pair beside the answer of a question": (
        "dpo", {"question": "hi", "answer": "other text", "chosen": "yo", "rejected": "no"}, PAIR_OF,
    ),
    "a pair beside the output of an Alpaca row": (
        "dpo", {"instruction": "hi", "output": "other text", "chosen": "yo", "rejected": "no"}, PAIR_OF,
    ),
    "an Alpaca row beside a pair": (
        "sft", {"instruction": "hi", "output": "yo", "chosen": "fine text here", "rejected": "other text here"}, HI_YO,
    ),
    "a chosen answer that is Python's text": (
        "dpo", {"prompt": "hi", "chosen": "[{'role': 1}]", "rejected": "no"},
        ("<user>hi;<assistant>", "[{'role': 1}];", "no;"),
    ),
    "a labelled answer": ("kto", {"question": "hi", "answer": "yo", "label": True},
                          ("<user>hi;<assistant>", "yo;", True)),
    "a labelled solution": ("kto", {"problem": "hi", "solution": "yo", "label": False},
                            ("<user>hi;<assistant>", "yo;", False)),
    "a labelled ShareGPT conversation": ("kto", {"conversations": [human("hi"), gpt("yo")], "label": True},
                                         ("<user>hi;<assistant>", "yo;", True)),
    "an Alpaca row with a label of another kind": (
        "sft", {"instruction": "hi", "output": "yo", "label": "positive"}, HI_YO,
    ),
    "a labelled pair": ("dpo", {"instruction": "hi", "chosen": "yo", "rejected": "no", "label": 1}, PAIR_OF),
    "a chosen answer that is JSON text": (
        "dpo", {"prompt": "hi", "chosen": '[{"from": "Al", "value": 10}]', "rejected": "[]"},
        ("<user>hi;<assistant>", '[{"from": "Al", "value": 10}];', "[];"),
    ),
    "a prompt that is the JSON text of other objects": (
        "grpo", {"prompt": '[{"from": "Al", "value": "10"}]'}, '<user>[{"from": "Al", "value": "10"}];<assistant>',
    ),
    "messages as an object of lists": (
        "sft", {"messages": {"role": ["user", "assistant"], "content": ["hi", "yo"]}}, HI_YO,
    ),
    "ShareGPT as an object of lists": (
        "sft", {"conversations": {"from": ["human", "gpt"], "value": ["hi", "yo"]}}, HI_YO,
    ),
    "one message, not of lists": ("grpo", {"prompt": {"role": "user", "content": "hi"}}, "<user>hi;<assistant>"),
    "UltraFeedback, RL": ("grpo", {"prompt": "hi", "messages": [user("hi"), answer("yo")]}, "<user>hi;<assistant>"),
}  # fmt: skip

AS_MESSAGES = (
    "{file}: kept 1 of 1 rows that have a response that is the JSON text of messages, and train on their contents: "
    "{place}"
)
NAMED = {  # what the screen says of the row above
    "a topic as label beside kto_tag": "{file}: column label is not part of the prompt or the response",
    "UltraFeedback": "{file}: columns score_chosen, score_rejected are not part of the prompt or the response",
    "CommonGen": "{file}: column input is not part of the prompt or the response",
    "a context that the answer repeats": "{file}: column context is not part of the prompt or the response",
    "starter code that both responses repeat": "{file}: column starter_code is not part of the prompt or the response",
    "a word to repeat": "{file}: column input is not part of the prompt or the response",
    "an input that is the name of a role": "{file}: column input is not part of the prompt or the response",
    "a prompt that stands twice without a blank": (
        "{file}: kept 1 of 1 rows that repeat the prompt at the beginning of the response, so that it stands twice: "
        "{place}"
    ),
    "a prefix of the answer": "{file}: message key prefix is not written by the chat template",
    "an answer that is the JSON text of messages": AS_MESSAGES,
    "an answer of an Alpaca row that is the JSON text of messages": AS_MESSAGES,
    "a pair that is the JSON text of messages": AS_MESSAGES,
    "responses that repeat the prompt": (
        "{file}: kept 1 of 1 pairs that repeat the prompt at the beginning of both responses, so that it stands twice: "
        "{place}"
    ),
    "a missing value as text": (
        "{file}: kept 1 of 1 rows that have a text that is a missing value, as pandas writes it: {place} ('nan')"
    ),
    "a missing value as a turn": (
        "{file}: kept 1 of 1 rows that have a text that is a missing value, as pandas writes it: {place} ('NaN', "
        "'None')"
    ),
    "two answers in a row": (
        "{file}: kept 1 of 1 conversations that have two assistant turns in a row, both trained: {place}"
    ),
    "a response that repeats the prompt": (
        "{file}: kept 1 of 1 rows that repeat the prompt at the beginning of the response, so that it stands twice: "
        "{place}"
    ),
    "a labelled completion that repeats the prompt": (
        "{file}: kept 1 of 1 rows that repeat the prompt at the beginning of the response, so that it stands twice: "
        "{place}"
    ),
    "ShareGPT that gpt opens": (
        "{file}: kept 1 of 1 rows that begin with an assistant turn, which is not trained: {place}"
    ),
    "a pair beside the answer of a question": "{file}: column answer is not part of the prompt or the response",
    "a pair beside the output of an Alpaca row": "{file}: column output is not part of the prompt or the response",
    "an Alpaca row beside a pair": "{file}: columns chosen, rejected are not part of the prompt or the response",
    "an Alpaca row with a label of another kind": "{file}: column label is not part of the prompt or the response",
    "a labelled pair": "{file}: column label is not part of the prompt or the response",
    "Dolly": "{file}: column category is not part of the prompt or the response",
    "Hermes": "{file}: column category is not part of the prompt or the response",
    "OpenAI function_call and functions": "{file}: message key name is not written by the chat template",
    "HotpotQA": "{file}: column context is not part of the prompt (rewards see all columns)",
    "MMLU": "{file}: column choices is not part of the prompt (rewards see all columns)",
    "a question about a context": "{file}: column context is not part of the prompt or the response",
}

WHO = [user("<image>Who?"), answer("cat")]
BOTH = ", and sft trains on every row; columns found: "
KTO = "; rlkit kto reads it, or --rename {} OTHER trains all of them"
EXCLUDES = ", which excludes a row or a turn from the loss; columns found: "
WRITES = ", which the chat template writes itself; ready-made prompts and responses are strings for --no-chat-template"
WITHOUT = "holds media, and rlkit trains on text and on images in a column 'images'; columns found: "
SHOWN = "holds images, and the model reads text only; columns found: "
TEXT_OF = "; take a model that reads images (docs/models.md), or train on its text with --rename {} OTHER"
UNWRITTEN = (
    "the chat template does not write {!r} of the message {}; write it into 'content' as the model would, drop it, or "
    "use a model whose template has it"
)
PLAIN_CALL = UNWRITTEN.format(
    "tool_calls", "{'role': 'assistant', 'tool_calls': [{'id': 'c1', 'type': 'function', 'function'"
)
REFUSED = {  # script, row, the message after the file and the place
    "names of columns as answers": ("dpo", {"prompt": "hi", "a": "yo", "b": "no", "chosen": "a", "rejected": "b"},
                                    ": column 'chosen' holds 'a', the name of another column; columns found: ['a', "
                                    "'b', 'chosen', 'prompt', 'rejected']; write the text of that column there"),
    "LLaMA-Factory images": ("sft", {"messages": WHO, "images": ["1.jpg"]},
                             f": column 'images' {SHOWN}['images', 'messages']{TEXT_OF.format('images')}"),
    "LLaMA-Factory audios": ("sft", {"conversations": [human("hi"), gpt("yo")], "audios": ["1.wav"]},
                             f": column 'audios' {WITHOUT}['audios', 'conversations']; drop the row, or train on its "
                             "text with --rename audios OTHER"),
    "TRL image": ("sft", {"prompt": "hi", "completion": "yo", "image": "1.jpg"},
                  f": column 'image' {SHOWN}['completion', 'image', 'prompt']{TEXT_OF.format('image')}"),
    "TRL images of a pair": ("dpo", {"prompt": "hi", "chosen": "yo", "rejected": "no", "images": ["1.jpg"]},
                             f": column 'images' {SHOWN}['chosen', 'images', 'prompt', 'rejected']"
                             f"{TEXT_OF.format('images')}"),
    "TRL video of a labelled response": ("kto", {"prompt": "hi", "completion": "yo", "label": True, "video": "1.mp4"},
                                         f": column 'video' {WITHOUT}['completion', 'label', 'prompt', 'video']; drop "
                                         "the row, or train on its text with --rename video OTHER"),
    "verl geo3k": ("grpo", {"data_source": "geo3k", "prompt": [user("<image>area?")], "images": [{"path": "1.png"}],
                            "reward_model": {"ground_truth": "3"}},
                   f": column 'images' {SHOWN}['data_source', 'images', 'prompt', 'reward_model']"
                   f"{TEXT_OF.format('images')}"),
    "OpenAI image_url": ("grpo", {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
                         ": its messages show images, and the model reads text only; columns found: ['messages']; take "
                         "a model that reads images (docs/models.md), or drop the row"),
    "images of a message": ("grpo", {"prompt": [user("hi", images=["x"])]},
                            ": prompt[0] holds 'images', which is not read: images go into a column 'images' of the "
                            "row"),
    "axolotl train_detail": (
        "sft", {"messages": [user("hi"), answer("yo", train_detail=[{"begin_offset": 0, "end_offset": 1,
                                                                     "train": False}])]},
        ": a message has 'train_detail', and rlkit trains whole turns: split the turn or drop the key: {'role': "
        "'assistant', 'content': 'yo', 'train_detail': [{'begin_offset': 0, 'end",
    ),
    "a weight of a half": ("sft", {"messages": [user("hi"), answer("yo", weight=0.5)]},
                           ": 'weight' must be 0 or 1, false or true (a turn is trained or not), got 0.5 in the "
                           "message {'role': 'assistant', 'content': 'yo', 'weight': 0.5}"),
    "an excluded response": ("dpo", {"prompt": "hi", "chosen": [answer("yo", weight=0)], "rejected": [answer("no")]},
                             ": the last message of 'chosen' is excluded from the loss: drop the row"),
    "calls of a template without": ("sft", {"messages": WEATHER}, f": {PLAIN_CALL}"),
    "calls in a prompt": ("grpo", {"messages": WEATHER[:3]}, f": {PLAIN_CALL}"),
    "calls before a pair": ("dpo", {"messages": WEATHER[:3], "chosen": "yo", "rejected": "no"}, f": {PLAIN_CALL}"),
    "reasoning of a template without": (
        "sft", {"messages": [user("hi"), answer("yo", reasoning_content="hm")]},
        ": " + UNWRITTEN.format("reasoning_content", answer("yo", reasoning_content="hm")),
    ),
    "kto_tag in sft": ("sft", {"conversations": [human("hi"), gpt("no")], "kto_tag": False},
                       ": is a conversation with a label (column 'kto_tag' is False), and sft trains on every row; "
                       "columns found: ['conversations', 'kto_tag']; rlkit kto reads it, or --rename kto_tag OTHER "
                       "trains all of them"),
    "two system messages": (
        "sft", {"system": "be", "messages": [said("system", "do"), user("hi"), answer("yo")]},
        ": the messages begin with another system message than that of column 'system'; columns found: "
        "['messages', 'system']; rename the one that is not meant, e.g. --rename system OTHER",
    ),
    "two columns of system messages": (
        "sft", {"system": "be", "system_prompt": "do", "prompt": "hi", "response": "yo"},
        ": columns 'system' and 'system_prompt' are two system messages; columns found: ['prompt', 'response', "
        "'system', 'system_prompt']; rename the one that is not meant, e.g. --rename system_prompt OTHER",
    ),
    "a conversation with the label 0": (
        "sft", {"messages": [user("hi"), answer("no")], "label": 0},
        f": is a conversation with a label (column 'label' is 0){BOTH}['label', 'messages']{KTO.format('label')}",
    ),
    "a conversation with the label FALSE": (
        "sft", {"conversations": [human("hi"), gpt("no")], "label": "FALSE"},
        ": is a conversation with a label (column 'label' is FALSE)"
        f"{BOTH}['conversations', 'label']{KTO.format('label')}",
    ),
    "an instruction with response and label": (
        "sft", {"instruction": "hi", "response": "no", "label": 0},
        ": is a labelled response (column 'label' is 0)"
        f"{BOTH}['instruction', 'label', 'response']{KTO.format('label')}",
    ),
    "an instruction with response and kto_tag": (
        "sft", {"instruction": "hi", "response": "no", "kto_tag": False},
        ": is a labelled response (column 'kto_tag' is False)"
        f"{BOTH}['instruction', 'kto_tag', 'response']{KTO.format('kto_tag')}",
    ),
    "a prompt with response and label": (
        "sft", {"prompt": "hi", "response": "no", "label": "1"},
        f": is a labelled response (column 'label' is 1){BOTH}['label', 'prompt', 'response']{KTO.format('label')}",
    ),
    "a prompt with query, response and kto_tag": (
        "sft", {"prompt": "hi", "query": "", "response": "no", "kto_tag": True},
        ": is a labelled response (column 'kto_tag' is True)"
        f"{BOTH}['kto_tag', 'prompt', 'query', 'response']{KTO.format('kto_tag')}",
    ),
    "an input with response and label": (
        "sft", {"input": "hi", "response": "no", "label": 1.0},
        f": is a labelled response (column 'label' is 1.0){BOTH}['input', 'label', 'response']{KTO.format('label')}",
    ),
    "a row that is not to be trained": (
        "sft", {"messages": [user("hi"), answer("yo")], "train": False},
        f": column 'train' is False{EXCLUDES}['messages', 'train']; drop the row, write 'train' into the messages that "
        "are not to be trained, or train on the row with --rename train OTHER",
    ),
    "a pair of weight 0": (
        "dpo", {"prompt": "hi", "chosen": "yo", "rejected": "no", "weight": 0.0},
        f": column 'weight' is 0.0{EXCLUDES}['chosen', 'prompt', 'rejected', 'weight']; drop the row, write 'weight' "
        "into the messages that are not to be trained, or train on the row with --rename weight OTHER",
    ),
    "a loss mask beside a text": (
        "sft", {"text": "Once.", "loss_mask": [1, 0]},
        f": column 'loss_mask' is [1, 0]{EXCLUDES}['loss_mask', 'text']; drop the row, write 'loss_mask' into the "
        "messages that are not to be trained, or train on the row with --rename loss_mask OTHER",
    ),
    "a prompt in the markup of the template": (
        "sft", {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "completion": "yo"},
        f": the text of the user begins with '<|im_start|>'{WRITES}",
    ),
    "a system message in the markup of the template": (
        "grpo", {"system": "<|im_start|>system\nbe", "prompt": "hi"},
        f": the text of the system begins with '<|im_start|>'{WRITES}",
    ),
    "a response in the markup of the template": (
        "dpo", {"prompt": "hi", "chosen": "yo", "rejected": "<|im_start|>assistant\nno"},
        f": a response begins with '<|im_start|>'{WRITES}",
    ),
    "an argument that rlkit sets": (
        "sft", {"prompt": "hi", "response": "yo", "chat_template_kwargs": {"add_generation_prompt": False}},
        ": chat_template_kwargs: 'add_generation_prompt' is set by rlkit and cannot be given: drop it",
    ),
    "a call whose function is a name": (
        "sft", {"messages": [user("hi"), answer(None, tool_calls=[{"function": "f", "arguments": {"a": 1}}])]},
        ": a call in 'tool_calls' must be like {'type': 'function', 'function': {'name': 'weather', "
        "'arguments': {'city': 'Rome'}}}, got {'function': 'f', 'arguments': {'a': 1}}",
    ),
    "a label of null": ("kto", {"prompt": "hi", "completion": "yo", "label": None},
                        ": column 'label' must be true or false, got None; columns found: ['completion', 'label', "
                        "'prompt']"),
    "messages as Python text": ("sft", {"messages": "[{'role': 'user', 'content': 'hi'}]"},
                                ": cannot be read: messages must be JSON text, got Python's \"[{'role': 'user', "
                                "'content': 'hi'}]\": write them with json.dumps; columns found: ['messages']"),
    "texts that share a prompt": (
        "dpo", {"chosen": "The sky is blue", "rejected": "The sky is red"},
        ": neither 'messages' nor 'prompt' is there; columns found: ['chosen', 'rejected']; give the prompt as "
        "'prompt', or train on the two as plain text, as TRL does: --no-chat-template, where their common beginning is "
        "the prompt",
    ),
    "responses under other names": (
        "dpo", {"prompt": "hi", "chosen_response": "yo", "rejected_response": "no"},
        ": no column 'chosen'; columns found: ['chosen_response', 'prompt', 'rejected_response']; rename columns, "
        "e.g. --rename chosen_response chosen rejected_response rejected",
    ),
    "SQuAD": ("sft", {"context": "Bob is", "question": "Who?", "answers": {"text": ["Bob"]}},
              ": neither 'messages' nor 'prompt' is there; columns found: ['answers', 'context', 'question']; "
              "of a question with an answer it has 'question' and lacks "
              "'response' or 'completion' or 'answer'; a column under another name is renamed with --rename"),
    "ARC": ("grpo", {"question": "Who?", "answerKey": "B"},
            ": neither 'messages' nor 'prompt' is there; columns found: ['answerKey', 'question']; rename "
            "columns, e.g. --rename question prompt"),
    "an answer of a pair, in sft": ("sft", {"chosen": "yo", "label": "x"},
                                    ": neither 'messages' nor 'prompt' is there; columns found: ['chosen', 'label']; a "
                                    "conversation has {messages or prompt}; a column under another name is renamed "
                                    "with --rename"),
    "a question with half of a pair": (
        "dpo", {"question": "hi", "chosen": "yo"},
        ": no column 'rejected'; columns found: ['chosen', 'question']; a preference pair has {messages or prompt, "
        "chosen, rejected}; a column under another name is renamed with --rename",
    ),
    "query and response": ("sft", {"query": "hi", "response": "yo"},
                           ": neither 'messages' nor 'prompt' is there; columns found: ['query', 'response']; "
                           "rename columns, e.g. --rename query prompt"),
    "user and assistant": ("sft", {"user": "hi", "assistant": "yo"},
                           ": neither 'messages' nor 'prompt' is there; columns found: ['assistant', 'user']; "
                           "rename columns, e.g. --rename user prompt assistant response"),
    "source and target": ("grpo", {"source": "hi", "target": "yo"},
                          ": neither 'messages' nor 'prompt' is there; columns found: ['source', 'target']; rename "
                          "columns, e.g. --rename source prompt"),
    "a response that is null": (
        "sft", {"prompt": "hi", "response": None},
        ": no response to train on: needs the column 'completion' or 'response', or an assistant message (column "
        "'response' is null); columns found: ['prompt', 'response']; a column under another name is renamed with "
        "--rename",
    ),
    "names in capitals": ("sft", {"Question": "hi", "Complex_CoT": "hm", "Response": "yo"},
                          ": neither 'messages' nor 'prompt' is there; columns found: ['Complex_CoT', 'Question', "
                          "'Response']; rename columns, e.g. --rename Question question Response response"),
    "axolotl segments": ("sft", {"segments": [{"label": True, "text": "hi"}]},
                         ": neither 'messages' nor 'prompt' is there; columns found: ['segments']; "
                         "column 'segments' holds axolotl's segments with a label each, which "
                         "are not read: give a prompt and a response"),
    "tokens": ("sft", {"input_ids": [1, 2], "labels": [1, 2]},
               ": neither 'messages' nor 'prompt' is there; columns found: ['input_ids', 'labels']; "
               "column 'input_ids' holds tokens, which are not read: give the text or the "
               "messages, and rlkit tokenizes them"),
    "Gemini": ("sft", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
               ": neither 'messages' nor 'prompt' is there; columns found: ['contents']; "
               "column 'contents' holds the turns of Gemini, which are not read: write them as 'messages' "
               "of 'role' and 'content'"),
    "a header that is data": ("sft", {"What is 2+2?": "What is 3+3?", "4": "6"},
                              ": neither 'messages' nor 'prompt' is there; columns found: ['4', 'What is 2+2?']; a "
                              "column under another name is renamed with "
                              "--rename (line 1 of a CSV file is its header)"),
    "ms-swift rejected_response": (
        "dpo", {"messages": [user("hi"), answer("yo")], "rejected_response": "no"},
        ": no column 'chosen'; columns found: ['messages', 'rejected_response']; "
        "write the last assistant message of 'messages' as 'chosen', and "
        "'rejected_response' as 'rejected'",
    ),
    "ms-swift response and rejected_response": (
        "dpo", {"query": "hi", "response": "yo", "rejected_response": "no"},
        ": no column 'chosen'; columns found: ['query', 'rejected_response', 'response']; rename columns, e.g. "
        "--rename response chosen rejected_response rejected query prompt",
    ),
    "HelpSteer 3": (
        "dpo", {"context": [user("hi")], "response1": "yo", "response2": "no", "overall_preference": -2},
        ": no column 'chosen'; columns found: ['context', 'overall_preference', 'response1', 'response2']; "
        "write the better of response1, response2 as 'chosen' and the worse as 'rejected'",
    ),
    "several answers": ("sft", {"prompt": "hi", "response": ["yo", "hey"]},
                        ": column 'response' is a list of texts, got ['yo', 'hey']; columns found: ['prompt', "
                        "'response']; write one row for each of them"),
    "several answers of a question": (
        "sft", {"question": "hi", "answer": ["yo", "hey"]},
        ": column 'answer' is a list of texts, got ['yo', 'hey']; columns found: ['answer', 'question']; write one row "
        "for each of them",
    ),
    "an answer that is a number": (
        "sft", {"question": "hi", "answer": 3},
        ": column 'answer' must be a string or a list of at least one message, got 3; columns found: ['answer', "
        "'question']",
    ),
    "conversations without a text": (
        "sft", {"conversations": [human(3), gpt(4)]}, ": conversations[0].content must be a string, got 3",
    ),
    "a turn of ShareGPT without a text, after a system message": (
        "sft", {"system": "be", "conversations": [human("hi"), gpt("yo"), human(None), gpt("yo")]},
        ": conversations[2].content must be a string, got None",
    ),
    "messages of an answer": (
        "sft", {"problem": "hi", "solution": [answer(4)]}, ": solution[0].content must be a string, got 4",
    ),
    "an answer that ends with a question": (
        "sft", {"question": "hi", "answer": [user("yo")]},
        ": 'answer' must end with an assistant message of text that answers another message, got {'role': 'user', "
        "'content': 'yo'}",
    ),
    "a labelled conversation without an answer": (
        "kto", {"conversations": [human("hi")], "kto_tag": True},
        ": 'conversations' must end with an assistant message of text that answers another message, got {'role': "
        "'user', 'content': 'hi'}",
    ),
    "an excluded answer of ShareGPT": (
        "kto", {"conversations": [human("hi"), gpt("yo", weight=0)], "kto_tag": True},
        ": the last message of 'conversations' is excluded from the loss: drop the row",
    ),
    "OpenAI preference of a question": (
        "dpo", {"input": {"messages": [user("hi")]}, "preferred_output": [user("yo")],
                "non_preferred_output": [answer("no")]},
        ": 'preferred_output' must end with an assistant message of text that answers another message, got {'role': "
        "'user', 'content': 'yo'}",
    ),
    "OpenAI preference after another answer": (
        "dpo", {"input": {"messages": [user("hi"), answer("hey")]}, "preferred_output": [answer("yo")],
                "non_preferred_output": [answer("no")]},
        ": column 'input' ends with an assistant message, and 'preferred_output' is another answer; drop one of "
        "them, or --continue-answer, where the response goes on after the prompt's",
    ),
    "an answer beside a whole conversation": (
        "sft", {"input": [user("hi"), answer("hey")], "output": "yo"},
        ": columns 'input' and 'output' hold different texts (a conversation and a prompt with a response); columns "
        "found: ['input', 'output']; rename the one that is not meant, e.g. --rename output OTHER",
    ),
    "two responses": (
        "sft", {"prompt": "hi", "response": "yo", "completion": "no"},
        ": columns 'response' and 'completion' hold different texts; columns found: ['completion', 'prompt', "
        "'response']; rename the one that is not meant, e.g. --rename completion OTHER",
    ),
    "two labelled responses": (
        "kto", {"prompt": "hi", "completion": "no", "response": "yo", "label": True},
        ": columns 'response' and 'completion' hold different texts; columns found: ['completion', 'label', 'prompt', "
        "'response']; rename the one that is not meant, e.g. --rename completion OTHER",
    ),
    "two responses of an Alpaca row": (
        "sft", {"instruction": "hi", "output": "yo", "response": "no"},
        ": columns 'output' and 'response' hold different texts; columns found: ['instruction', 'output', 'response']; "
        "rename the one that is not meant, e.g. --rename response OTHER",
    ),
    "two labelled responses of an Alpaca row": (
        "kto", {"instruction": "hi", "output": "yo", "completion": "no", "kto_tag": True},
        ": columns 'output' and 'completion' hold different texts; columns found: ['completion', 'instruction', "
        "'kto_tag', 'output']; rename the one that is not meant, e.g. --rename completion OTHER",
    ),
    "two responses after a context": (
        "sft", {"context": [user("hi")], "completion": "no", "response": [answer("yo")]},
        ": columns 'response' and 'completion' hold different texts; columns found: ['completion', 'context', "
        "'response']; rename the one that is not meant, e.g. --rename completion OTHER",
    ),
    "two responses, one of them of the conversation": (
        "sft", {"messages": [user("hi"), answer("yo")], "response": "yo", "completion": "no"},
        ": columns 'response' and 'completion' hold different texts; columns found: ['completion', 'messages', "
        "'response']; rename the one that is not meant, e.g. --rename completion OTHER",
    ),
    "two labels": (
        "kto", {"instruction": "hi", "output": "yo", "label": "1", "kto_tag": False},
        ": columns 'label' and 'kto_tag' hold different labels; columns found: ['instruction', 'kto_tag', 'label', "
        "'output']; rename the one that is not meant, e.g. --rename kto_tag OTHER",
    ),
    "two pairs": (
        "dpo", {"input": {"messages": [user("hi")]}, "preferred_output": [answer("yo")],
                "non_preferred_output": [answer("no")], "chosen": "no", "rejected": "yo"},
        ": cannot be read as a preference row of OpenAI: column 'chosen' is another answer: --rename chosen OTHER "
        "leaves it out; columns found: ['chosen', 'input', 'non_preferred_output', 'preferred_output', 'rejected']",
    ),
    "other functions than tools": (
        "sft", {"prompt": "hi", "response": "yo", "tools": [tool("a", x=TEXT)],
                "functions": [tool("b", x=TEXT)["function"]]},
        ": columns 'tools' and 'functions' hold different tools; columns found: ['functions', 'prompt', 'response', "
        "'tools']; rename the one that is not meant, e.g. --rename functions OTHER",
    ),
    "another function_call than tool_calls": (
        "sft", {"messages": [user("hi"), answer(None, tool_calls=[call("a", ROME)],
                                                function_call={"name": "b", "arguments": ROME})]},
        ": a message has other calls in 'tool_calls' than in 'function_call': drop one of them",
    ),
    "content and value": (
        "sft", {"messages": [user("hi", value="ho"), answer("yo")]},
        ": messages[0] has two texts, under 'content' and under 'value': drop one",
    ),
    "content and value of ShareGPT": (
        "sft", {"conversations": [human("hi", content="ho"), gpt("yo")]},
        ": conversations[0] has two texts, under 'content' and under 'value': drop one",
    ),
    "a conversation of ShareGPT without a question": (
        "grpo", {"conversations": [human("hi"), gpt("yo")]},
        ": the conversation ends with an assistant message, so there is nothing to answer; drop that message (a known "
        "answer belongs in a column of its own), or --continue-answer samples on after it",
    ),
    "a role of ShareGPT that is a list": (
        "sft", {"conversations": [{"from": ["gpt"], "value": "yo"}]},
        ": conversations[0] must be an object like {'role': 'user', 'content': '...'}, got {'from': ['gpt'], 'value': "
        "'yo'}",
    ),
    "role and value": (
        "sft", {"messages": [{"role": "user", "value": "hi"}, {"role": "assistant", "value": "yo"}]},
        ": messages[0] has its text under the key 'value': beside 'role' the key is 'content', and 'value' goes with "
        "'from'",
    ),
    "several rejected answers": ("dpo", {"prompt": "hi", "chosen": "yo", "rejected": ["no", "go"]},
                                 ": column 'rejected' is a list of texts, got ['no', 'go']; columns found: ['chosen', "
                                 "'prompt', 'rejected']; write one row for each of them"),
    "OpenAI preference without messages": (
        "dpo", {"input": {"text": "hi"}, "preferred_output": [answer("yo")], "non_preferred_output": [answer("no")]},
        ": cannot be read as a preference row of OpenAI: 'input' must have 'messages', got ['text']; columns found: "
        "['input', 'non_preferred_output', 'preferred_output']",
    ),
    "the role of Gemma": ("sft", {"messages": [user("hi"), said("model", "yo")]},
                          ": unknown role 'model', and no message of the role 'assistant' to train on; write the role "
                          "'assistant' for 'model'"),
    "no answer after a developer's message": (
        "sft", {"messages": [said("developer", "be"), user("hi")]},
        ": no response to train on: needs the column 'completion' or 'response', or an assistant message; columns "
        "found: ['messages']; a column under another name is renamed with --rename",
    ),
    "an object of lists of different lengths": (
        "sft", {"messages": {"role": ["user", "assistant"], "content": ["hi"]}},
        ": messages[0] must be an object like {'role': 'user', 'content': '...'}, got {'role': ['user', 'assistant'], "
        "'content': ['hi']}",
    ),
    "a role that is a list": (
        "dpo", {"prompt": "hi", "chosen": [{"from": ["gpt"], "value": "yo"}], "rejected": [gpt("no")]},
        ": chosen[0] must be an object like {'role': 'user', 'content': '...'}, got {'from': ['gpt'], 'value': 'yo'}",
    ),
    "a prompt that ends with another answer": (
        "dpo", {"messages": [user("hi"), answer("hey")], "chosen": "yo", "rejected": "no"},
        ": column 'messages' ends with an assistant message, and 'chosen' is another answer; drop one of them, or "
        "--continue-answer, where the response goes on after the prompt's",
    ),
    "a prompt that ends with the rejected answer": (
        "dpo", {"prompt": [user("hi"), answer("no")], "chosen": [answer("yo")], "rejected": [answer("no")]},
        ": column 'prompt' ends with an assistant message, and 'chosen' is another answer; drop one of them, or "
        "--continue-answer, where the response goes on after the prompt's",
    ),
    "a system prompt beside a pair of conversations": (
        "dpo", {"prompt": "be brief", "chosen": [user("hi"), answer("yo")], "rejected": [user("hi"), answer("no")]},
        ": 'chosen' begins with a user message, and column 'prompt' is not part of it; columns found: ['chosen', "
        "'prompt', 'rejected']; --rename prompt system for a system prompt, --rename prompt OTHER to leave it out, or "
        "write it into 'chosen'",
    ),
    "a system prompt beside a labelled conversation": (
        "kto", {"prompt": "be brief", "completion": [user("hi"), answer("yo")], "label": True},
        ": 'completion' begins with a user message, and column 'prompt' is not part of it; columns found: "
        "['completion', 'label', 'prompt']; --rename prompt system for a system prompt, --rename prompt OTHER to leave "
        "it out, or write it into 'completion'",
    ),
    "a prompt of the same question with another answer": (
        "sft", {"prompt": [user("hi"), answer("hey")], "completion": [user("hi"), answer("yo")]},
        ": 'completion' begins with a user message, and column 'prompt' is not part of it; columns found: "
        "['completion', 'prompt']; --rename prompt system for a system prompt, --rename prompt OTHER to leave it out, "
        "or write it into 'completion'",
    ),
    "Alpaca history as Python text": (
        "sft", {"instruction": "hi", "output": "yo", "history": "[['a', 'b']]"},
        ": cannot be read as an Alpaca row: column 'history' must be a list of messages or of pairs [instruction, "
        "response], or its JSON text, got \"[['a', 'b']]\"; columns found: ['history', 'instruction', 'output']",
    ),
    "Alpaca input that is a list": (
        "sft", {"instruction": "sort", "input": ["b", "a"], "output": "a b"},
        ": cannot be read as an Alpaca row: column 'input' must be a string, got ['b', 'a']; columns found: ['input', "
        "'instruction', 'output']",
    ),
    "a conversation without a question": (
        "grpo", {"messages": [user("hi"), answer("yo")]},
        ": the conversation ends with an assistant message, so there is nothing to answer; drop that message (a known "
        "answer belongs in a column of its own), or --continue-answer samples on after it",
    ),
}  # fmt: skip
HALF = "column {!r} holds '\\ud83d', half of a surrogate pair, which is no character: ...'{}\\ud83d'...; repair or drop"
BROKEN = {
    "sft": ({"prompt": "a", "response": "b\ud83d"}, HALF.format("response", "b")),
    "dpo": ({"prompt": "a", "chosen": "b\ud83d", "rejected": "c"}, HALF.format("chosen", "b")),
    "kto": ({"prompt": "a", "completion": "b\ud83d", "label": True}, HALF.format("completion", "b")),
    "grpo": ({"messages": [user("a\ud83d")]}, HALF.format("messages", "a")),
}


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


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", READ)
def test_what_is_trained_of_a_file(tmp_path, caplog, name, suffix):
    script, row, expected = READ[name]
    path = write(tmp_path / f"rows{suffix}", [row])
    assert read(path, script, tokenizer_of()) == [expected]
    place = "line 1" if suffix == ".jsonl" else "row 1"
    named = [NAMED[name].format(file=path, place=place)] if name in NAMED else []
    assert [r.getMessage() for r in caplog.records] == named


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_of_a_file(tmp_path, name, suffix):
    script, row, message = REFUSED[name]
    path = write(tmp_path / f"rows{suffix}", [row])
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, (line|row) 1{re.escape(message)}$"):
        read(path, script, tokenizer_of(template=None))


@pytest.mark.parametrize("script", BROKEN)
def test_half_a_character_is_refused_with_its_row(tmp_path, script):
    row, message = BROKEN[script]
    path = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 1: {re.escape(message)}"):
        read(path, script, tokenizer_of())


@pytest.mark.parametrize(
    ("script", "row", "expected"),
    [
        ("grpo", {"prompt": json.dumps([said("system", "be"), user("hi")]), "answer": "007"},
         "<system>be;<user>hi;<assistant>"),
        ("sft", {"messages": json.dumps([user("hi"), answer("yo")])}, HI_YO),
        ("sft", {"conversations": json.dumps([human("hi"), gpt("yo")])}, HI_YO),
        ("dpo", {"prompt": "hi", "chosen": json.dumps([answer("yo")]), "rejected": json.dumps([answer("no")])},
         PAIR_OF),
        ("kto", {"prompt": "hi", "completion": "yo", "label": "1.0"}, ("<user>hi;<assistant>", "yo;", True)),
        ("sft", {"instruction": "hi", "output": "yo", "history": json.dumps([["a", "b"]])},
         ("<user>a;<assistant>b;<user>hi;<assistant>yo;", ["b;", "yo;"])),
        ("sft", {"prompt": "hi", "response": '[{"role of": "x"}]'},
         ('<user>hi;<assistant>[{"role of": "x"}];', ['[{"role of": "x"}];'])),
    ],
)  # fmt: skip
def test_a_csv_file_holds_messages_as_json_text(tmp_path, script, row, expected):
    assert read(write(tmp_path / "rows.csv", [row]), script, tokenizer_of()) == [expected]


@pytest.mark.parametrize(
    ("script", "row", "text"),
    [
        ("sft", {"conversations": "[{'from': 'human', 'value': 'hi'}]"}, "[{'from': 'human', 'value': 'hi'}]"),
        ("dpo", {"prompt": "hi", "chosen": "[{'role': 'user'}]", "rejected": "no"}, "[{'role': 'user'}]"),
    ],
)
def test_python_text_in_a_csv_file_is_refused_with_its_line(tmp_path, script, row, text):
    path = write(tmp_path / "rows.csv", [row])
    message = f'{path}, line 2: cannot be read: messages must be JSON text, got Python\'s "{text}": write them with'
    with pytest.raises(ValueError, match=f"^{re.escape(message)} json.dumps; columns found: "):
        read(path, script, tokenizer_of())


def test_the_index_of_pandas_is_not_named(tmp_path, caplog):
    row = {"": "0", "__index_level_0__": "3", "Unnamed: 0": "1", "prompt": "hi", "response": "yo"}
    assert read(write(tmp_path / "rows.csv", [row]), "sft", tokenizer_of()) == [HI_YO]
    assert caplog.records == []


def test_message_keys_are_named_in_the_order_of_the_file(tmp_path, caplog):
    more = dict.fromkeys(("zeta", "alpha", "mid", "beta", "omega"), "x")
    path = write(tmp_path / "rows.jsonl", [{"messages": [user("hi", **more), answer("yo")]}])
    assert read(path, "sft", tokenizer_of()) == [HI_YO]
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: message keys zeta, alpha, mid, beta, omega are not written by the chat template"
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_prompts_may_be_mixed_with_messages_though_a_table_has_nulls(tmp_path, suffix):
    rows = [{"prompt": "hi", "response": "yo", "messages": None},
            {"prompt": None, "response": None, "messages": [user("hi"), answer("yo")]}]  # fmt: skip
    assert read(write(tmp_path / f"rows{suffix}", rows), "sft", tokenizer_of()) == [HI_YO] * 2
    rows = [{"messages": [user("hi"), answer("yo")], "prompt": None, "completion": None, "label": True},
            {"messages": None, "prompt": "hi", "completion": "no", "label": False}]  # fmt: skip
    assert read(write(tmp_path / f"kto{suffix}", rows), "kto", tokenizer_of()) == [
        ("<user>hi;<assistant>", "yo;", True), ("<user>hi;<assistant>", "no;", False)
    ]  # fmt: skip


def test_a_null_in_the_first_row_decides_no_form(tmp_path):
    rows = [{"instruction": None, "input": "cat", "output": "chat"},
            {"instruction": "add", "input": "1 2", "output": "3"}]  # fmt: skip
    assert read(write(tmp_path / "rows.jsonl", rows), "sft", tokenizer_of()) == [
        ("<user>cat;<assistant>chat;", ["chat;"]), ("<user>add\n1 2;<assistant>3;", ["3;"])
    ]  # fmt: skip
    del rows[0]["instruction"]
    path = write(tmp_path / "without.jsonl", rows)
    with pytest.raises(ValueError, match=f"^{path}, line 2: is not a row of OpenRLHF or slime, as {path}, line 1 is;"):
        read(path, "sft", tokenizer_of())


def test_nulls_that_parquet_adds_are_in_no_text(tmp_path):
    """Two tools and two calls of different arguments, in one file of two rows."""
    other = [user("2+3?"), answer("", tool_calls=[call("add", {"x": 2})]), said("tool", "5"), answer("5")]
    rows = [
        {"messages": [user("?"), answer("", tool_calls=[call("weather", {"city": "Rome"})]), answer("20")],
         "tools": [tool("weather", city=TEXT)], "system": None},
        {"messages": other, "tools": [tool("add", x=NUMBER)], "system": "be"},
    ]  # fmt: skip
    files = [write(tmp_path / f"rows{suffix}", rows) for suffix in (".jsonl", ".parquet")]
    expected = [
        (f'<system>[{CITY}];<user>?;<assistant><call>weather {{"city": "Rome"}}</call>;<assistant>20;',
         ['<call>weather {"city": "Rome"}</call>;', "20;"]),
        (f'<system>[{SUM}];<system>be;<user>2+3?;<assistant><call>add {{"x": 2}}</call>;<tool>5;<assistant>5;',
         ['<call>add {"x": 2}</call>;', "5;"]),
    ]  # fmt: skip
    assert [read(path, "sft", tokenizer_of()) for path in files] == [expected, expected]


def test_a_template_that_joins_arguments_to_text_gets_their_json_text(tmp_path):
    """Of DeepSeek's form: `'...' + call['function']['arguments'] + '...'`; and one that writes them with `{{ }}`."""
    path = write(tmp_path / "rows.jsonl", [{"messages": WEATHER}])
    for template in (
        CALLS.replace("{{ c.function.name }} {{ c.function.arguments | tojson }}",
                      "{{ c['function']['name'] + ' ' + c['function']['arguments'] }}"),
        CALLS.replace("c.function.arguments | tojson", "c.function.arguments"),
    ):  # fmt: skip
        assert read(path, "sft", tokenizer_of(template)) == [(WEATHER_TEXT, WEATHER_PARTS)]


def test_a_template_that_drops_a_role_or_the_tools_is_refused(tmp_path):
    template = CALLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    path = write(tmp_path / "rows.jsonl", [{"system": "be", "prompt": "hi", "response": "yo"}])
    with pytest.raises(
        ValueError, match=r"line 1: the chat template does not write the content of the message {'role': 'system'"
    ):
        read(path, "sft", tokenizer_of(template))
    path = write(tmp_path / "tools.jsonl", [{"prompt": "hi", "tools": [tool("add", x=NUMBER)]}])
    with pytest.raises(ValueError, match=r"line 1: the chat template does not write the tools of the row; use a model"):
        read(path, "grpo", tokenizer_of(CALLS.replace("if tools", "if false")))


def test_columns_that_no_one_reads_may_hold_several_types(tmp_path, caplog):
    rows = [{"prompt": "hi", "response": "yo", "seed": 1, "info": {"a": 1}},
            {"prompt": "hi", "response": "yo", "seed": "x", "info": [1]}]  # fmt: skip
    path = write(tmp_path / "rows.jsonl", rows)
    assert read(path, "sft", tokenizer_of()) == [HI_YO] * 2
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: columns seed, info are not part of the prompt or the response"
    ]
    caplog.clear()
    assert read(path, "grpo", tokenizer_of()) == ["<user>hi;<assistant>"] * 2


def test_a_column_beside_a_text_is_not_called_part_of_a_prompt(tmp_path, caplog):
    path = write(tmp_path / "rows.jsonl", [{"text": "hi", "mood": "good"}])
    read(path, "sft", tokenizer_of())
    assert [r.getMessage() for r in caplog.records] == [f"{path}: column mood is not part of the text"]


def test_unused_columns_are_one_line_and_where_a_row_is_from_is_none(tmp_path, caplog):
    known = {
        "id": 1,
        "source": "x",
        "data_source": "y",
        "extra_info": {"a": 1},
        "index": 3,
        "prompt_id": "z",
        "url": "u",
    }
    more = dict.fromkeys("abcdefgh", 1)
    empty = {"images": [], "note": "", "video": None, "copy": "hi, my friend"}
    path = write(tmp_path / "rows.jsonl", [{"prompt": "hi, my friend", "response": "yo", **known, **more, **empty}])
    assert read(path, "sft", tokenizer_of()) == [("<user>hi, my friend;<assistant>yo;", ["yo;"])]
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: columns a, b, c, d, e, f and 2 more are not part of the prompt or the response"
    ]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"source": "The river rose by two metres on Tuesday."}], "source"),
        ([{"source": "Der Hund"}, {"source": "Die Katze"}], "source"),
        ([{"source": "Common Crawl"}, {"source": "Stack Exchange"}, {"source": "Common Crawl"}] * 3, None),
        ([{"source": "aqua_rat"}, {"source": "gsm8k"}], None),
        ([{"language": "Rust"}, {"language": "Python"}], "language"),
        ([{"picture_url": "https://x.org/a"}], "picture_url"),
        ([{"url": "https://x.org/a.jpg"}], "url"),
        ([{"url": "https://x.org/a", "source_url": "https://x.org/", "id": "a b", "row_hash": "f0"}], None),
        ([{"meta": {"note": "Answer as one would in a letter."}}], "meta"),
        ([{"extra_info": {"question": "hi", "answer": "It is a long answer of many words."}}], None),
        ([{"source": ["The river rose by two metres on Tuesday."]}], "source"),
        ([{"source": "Hund"}, {"source": "Katze"}], "source"),
        ([{"source": "a1.txt"}, {"source": "b2.txt"}], None),
        ([{"meta": "Answer as one would in a letter."}], "meta"),
        ([{"correct": 1}], "correct"),
        ([{"correct": "yo"}], "correct"),
        ([{"problem": "hi"}], None),
    ],
)
def test_columns_that_say_where_a_row_is_from_are_named_if_they_hold_a_text(tmp_path, caplog, rows, named):
    path = write(tmp_path / "rows.jsonl", [{"messages": [user("hi"), answer("yo")], **row} for row in rows])
    assert read(path, "sft", tokenizer_of()) == [HI_YO] * len(rows)
    line = f"{path}: column {named} is not part of the prompt or the response"
    assert [r.getMessage() for r in caplog.records] == ([line] if named else [])


def test_the_line_of_unused_columns_names_its_files(tmp_path, caplog):
    row = {"prompt": "hi", "response": "yo"}
    more = {"a.jsonl": {"mood": 1}, "b.jsonl": {}, "c.parquet": {"mood": 1}, "d.csv": {"hint": "x"}}
    paths = [write(tmp_path / name, [{**row, **columns}]) for name, columns in more.items()]
    sft_examples(load_rows(paths), tokenizer=tokenizer_of(), max_example_tokens=99)
    assert [r.getMessage() for r in caplog.records] == [
        f"{paths[0]}, {paths[2]}: column mood is not part of the prompt or the response",
        f"{paths[3]}: column hint is not part of the prompt or the response",
    ]


def test_markup_of_the_template_inside_a_text_is_named(tmp_path, caplog):
    """What begins a text is refused; a response may end with the end of its turn, which is not written twice."""
    rows = [{"prompt": "hi", "response": "yo<|im_end|>"}, {"prompt": "hi", "response": "yo<|im_end|>\n"}]
    path = write(tmp_path / "rows.jsonl", [*rows, {"prompt": "What is <|im_start|>?", "response": "a token"}])
    texts = read(path, "sft", tokenizer_of())
    assert texts[:2] == [HI_YO] * 2
    written = "in their text, which the chat template writes itself (ready-made prompts and responses are read with"
    plain = "in messages that are not the assistant's it is read as text, no token"
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: 1 of the rows hold '<|im_start|>' {written} --no-chat-template); {plain}: line 3",
    ]
    assert texts[2][0] == "<user>What is <\u200b|im_start|>?;<assistant>a token;"


FIRST = (  # writes a system message at the start only, and the first of several calls
    "{% for m in messages if m.role in ['user', 'assistant'] or loop.first %}<|im_start|>{{ m.role }}\n"
    "{{ '<call>' ~ m.tool_calls[0].function.name if m.tool_calls else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("or loop.first", "or m == messages[0]")
DROPPED = (
    "the chat template does not write the content of the message {{'role': '{}', 'content': '{}'}}; move it into a "
    "message that is written"
)


@pytest.mark.parametrize(
    ("script", "row", "message"),
    [
        ("sft", {"messages": [user("a"), answer("b"), said("system", "a"), user("hi"), answer("yo")]},
         DROPPED.format("system", "a")),
        ("grpo", {"messages": [user("a"), answer("b"), said("tool", "b"), user("hi")]}, DROPPED.format("tool", "b")),
        ("dpo", {"prompt": [user("a"), answer("b"), said("developer", "b"), user("hi")], "chosen": "yo",
                 "rejected": "no"}, DROPPED.format("developer", "b")),
        ("sft", {"messages": [user("hi"), answer("Let us see", tool_calls=[call("f", {})]), user("a"), answer("b")]},
         "the chat template does not write the content of the message {'role': 'assistant', 'content': 'Let us see', "),
        ("sft", {"messages": [user("hi"), answer("", tool_calls=[call("f", {}), call("g", {})])]},
         "the chat template does not write 'tool_calls' of the message {'role': 'assistant', 'content': '', "),
    ],
)  # fmt: skip
def test_each_message_of_each_row_must_be_written(tmp_path, script, row, message):
    """The first row is written: what holds of it says nothing of the second."""
    answers = {"chosen": "yo", "rejected": "no"} if script == "dpo" else {}
    first = {next(iter(row)): [said("system", "be"), user("hi"), *([answer("yo")] if script == "sft" else [])]}
    path = write(tmp_path / "rows.jsonl", [{**first, **answers}, row])
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 2: {re.escape(message)}"):
        read(path, script, tokenizer_of(FIRST))


@pytest.mark.parametrize(
    ("first", "line"),
    [({"prompt": [said("system", "be"), user("hi")]}, 2), ({"prompt": "call add: hi"}, 1)],
)
def test_the_tools_of_each_row_must_be_written(tmp_path, first, line):
    """By a template that writes them after a system message; the name of a tool in a prompt says nothing."""
    template = CALLS.replace("if tools", "if tools and messages[0].role == 'system'")
    tools = {"tools": [tool("add", x=NUMBER)]}
    path = write(tmp_path / "rows.jsonl", [{**first, **tools}, {"prompt": "call add: hi", **tools}])
    message = f"^{re.escape(str(path))}, line {line}: the chat template does not write the tools of the row"
    with pytest.raises(ValueError, match=message):
        read(path, "grpo", tokenizer_of(template))


def test_tools_that_are_given_must_be_written_too():
    rows = [{"prompt": "call add: hi", "response": "yo"}]
    with pytest.raises(ValueError, match=r"^row 1: the chat template does not write the tools of the row"):
        sft_examples(
            rows,
            tokenizer=tokenizer_of(CALLS.replace("if tools", "if false")),
            max_example_tokens=99,
            tools=[tool("add")],
        )


def test_a_key_is_written_if_the_text_changes_with_it(tmp_path, caplog):
    """`name` and `tools` stand in the source of the template, which writes `name` of users only."""
    template = CALLS.replace("{{ m.role }}", "{{ m.role }}{{ ' ' ~ m.name if m.name and m.role == 'user' }}")
    system = said("system", "be", tools="x")
    rows = [{"messages": [system, user("hi", name="Bob"), answer("yo")]}]
    path = write(tmp_path / "rows.jsonl", rows)
    sft_examples(load_rows(path), tokenizer=tokenizer_of(template), max_example_tokens=99)
    path = write(tmp_path / "more.jsonl", [{"messages": [user("hi"), answer("yo", name="Al")]}])
    sft_examples(load_rows(path), tokenizer=tokenizer_of(template), max_example_tokens=99)
    pair = {"prompt": "hi", "chosen": [answer("yo", name="Al")], "rejected": [answer("no")]}
    pairs = write(tmp_path / "pairs.jsonl", [pair])
    preference_pairs(load_rows(pairs), tokenizer=tokenizer_of(template), max_example_tokens=99)
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path / 'rows.jsonl'}: message key tools is not written by the chat template",
        f"{path}: message key name is not written by the chat template",
        f"{pairs}: message key name is not written by the chat template",
    ]


def test_an_argument_is_read_if_the_text_changes_with_it(tmp_path, caplog):
    """`thinking` stands in the template as a key of messages; `enable_thinking` is read where it is false."""
    template = CALLS.replace(
        "<|im_start|>assistant\n", "<|im_start|>assistant\n{% if enable_thinking is false %}.{% endif %}"
    )
    template = template.replace("{% if m.reasoning", "{{ m.thinking }}{% if m.reasoning")
    args = {"enable_thinking": True, "thinking": True}
    path = write(tmp_path / "rows.jsonl", [{"prompt": "hi", "chat_template_kwargs": args}])
    assert read(path, "grpo", tokenizer_of(template)) == ["<user>hi;<assistant>"]
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: template argument thinking is not read by the chat template"
    ]


def test_message_keys_and_template_arguments_that_the_template_does_not_read_are_named(tmp_path, caplog):
    row = {"messages": [user("hi", mood="sad", id=3, note=None), answer("yo", train=True)], "enable_thinking": False}
    row["messages"][0]["train"] = True
    path = write(tmp_path / "rows.jsonl", [row])
    assert read(path, "sft", tokenizer_of()) == [HI_YO]
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: message key mood is not written by the chat template",
        f"{path}: template argument enable_thinking is not read by the chat template",
        f"{path}: role user is not trained, though its turns have 'train': true: assistant turns are",
    ]


def test_a_conversation_that_the_tokenizer_splits_is_reported(tmp_path, caplog):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = tiny_tokenizer()
    vocab = {token: i for token, i in tokenizer.get_vocab().items() if i < 256}
    backend = Tokenizer(models.BPE(vocab={**vocab, "ĊĊ": 263}, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # of GPT-2
    backend.decoder = tokenizer.backend_tokenizer.decoder
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer._tokenizer = backend
    tokenizer.chat_template = tokenizer.chat_template.replace("\n{{", "\n\n{{").replace(
        "assistant\n{%", "assistant\n\n{%"
    )
    row = {"messages": [user("a"), answer("b"), user("hi"), answer("yo")]}
    path = write(tmp_path / "rows.jsonl", [row])
    found, _ = sft_examples(load_rows(path), tokenizer=tokenizer, max_example_tokens=999)
    assert len(found) == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: kept 1 of 1 conversations that become 2 examples, since the tokenizer merges the opening of a turn "
        "with its text: line 1"
    ]
