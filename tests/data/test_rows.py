"""Data files of other systems: what is trained of each, written out by hand, in the notation of `chat_rows`.

Each row is written as JSONL and as Parquet, read by `load_rows`, and must give the same text from both.
"""

from __future__ import annotations

import json

import pytest
from chat_rows import (
    CITY,
    HI_YO,
    NUMBER,
    PAIR_OF,
    ROME,
    SUM,
    TEXT,
    WEATHER,
    WEATHER_PARTS,
    WEATHER_TEXT,
    answer,
    call,
    gpt,
    human,
    read,
    said,
    tokenizer_of,
    tool,
    user,
    write,
)

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
    "TRL tools as text": ("sft", {"messages": WEATHER, "tools": json.dumps([tool("weather", city=TEXT)])},
                          (f"<system>[{CITY}];{WEATHER_TEXT}", WEATHER_PARTS)),
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
    "an answer that is the JSON text of one message": (
        "sft", {"prompt": "hi", "response": '{"role": "assistant", "content": "yo"}'}, HI_YO,
    ),
    "a pair that is the JSON text of one message each": (
        "dpo", {"prompt": "hi", "chosen": '{"role": "assistant", "content": "yo"}',
                "rejected": '{"from": "gpt", "value": "no"}'}, PAIR_OF,
    ),
    "a prompt and an answer that are the JSON text of one message": (
        "sft", {"prompt": '{"role": "user", "content": "hi"}',
                "response": '{"role": "assistant", "content": "yo"}'}, HI_YO,
    ),
    "a prompt that is the JSON text of one message, RL": (
        "grpo", {"prompt": '{"role": "user", "content": "hi"}'}, "<user>hi;<assistant>",
    ),
    "JSON texts of other objects": (
        "sft", {"prompt": '{"role": "user", "id": 5}', "response": '{"role": "admin", "content": "yo"}'},
        ('<user>{"role": "user", "id": 5};<assistant>{"role": "admin", "content": "yo"};',
         ['{"role": "admin", "content": "yo"};']),
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
    "a context that the answer repeats": (
        "{file}: column context is not part of the prompt or the response; to include: --prompt "
        r"'{{context}}\n\n{{question}}'"
    ),
    "starter code that both responses repeat": "{file}: column starter_code is not part of the prompt or the response",
    "a word to repeat": "{file}: column input is not part of the prompt or the response",
    "an input that is the name of a role": "{file}: column input is not part of the prompt or the response",
    "a prompt that stands twice without a blank": (
        "{file}: kept 1 of 1 rows that repeat the prompt at the beginning of the response, so that it stands twice: "
        "{place}"
    ),
    "a prefix of the answer": "{file}: message key prefix is not written by the chat template",
    "an answer that is the JSON text of messages": AS_MESSAGES,
    "an answer that is the JSON text of one message": AS_MESSAGES,
    "a pair that is the JSON text of one message each": AS_MESSAGES,
    "an answer of an Alpaca row that is the JSON text of messages": AS_MESSAGES,
    "a pair that is the JSON text of messages": AS_MESSAGES,
    "responses that repeat the prompt": (
        "{file}: kept 1 of 1 pairs that repeat the prompt at the beginning of both responses, so that it stands twice: "
        "{place}"
    ),
    "a missing value as text": (
        "{file}: kept 1 of 1 rows that have a text that stands for a missing value: {place} ('nan')"
    ),
    "a missing value as a turn": (
        "{file}: kept 1 of 1 rows that have a text that stands for a missing value: {place} ('NaN', 'None')"
    ),
    "LLaMA-Factory query that the prompt repeats": (
        "{file}: 1 of the rows hold 'A:' at the end of a prompt, where the chat template writes who speaks next: "
        "remove it (and a stop word at the end of the answers): {place}"
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
    "HotpotQA": (
        "{file}: column context is not part of the prompt (rewards see all columns); to include: --prompt "
        r"'{{context}}\n\n{{question}}'"
    ),
    "MMLU": (
        "{file}: column choices is not part of the prompt (rewards see all columns); to include: --prompt "
        r"'{{question}}\n{{choices}}'"
    ),
    "a question about a context": (
        "{file}: column context is not part of the prompt or the response; to include: --prompt "
        r"'{{context}}\n\n{{question}}'"
    ),
}


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
