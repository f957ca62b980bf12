"""Data files of other systems that are refused, each with its line."""

from __future__ import annotations

import re

import pytest
from chat_rows import ROME, TEXT, WEATHER, answer, call, gpt, human, read, said, tokenizer_of, tool, user, write

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
    "tool_calls", "{'role': 'assistant', 'tool_calls': [{'id': 'c1', 'type': 'function', 'function'..."
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
        "'assistant', 'content': 'yo', 'train_detail': [{'begin_offset': 0, 'end...",
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
