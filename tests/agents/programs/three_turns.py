"""A user's program: three turns with a tool, of which the second is streamed, whatever the model says."""

import json
import os
from pathlib import Path

import openai

CALC = {"type": "function", "function": {"name": "calculate", "description": "Calculate.", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}},
}}}  # fmt: skip
client = openai.OpenAI()
row = json.loads(Path(os.environ["RLKIT_ROW"]).read_text())
messages = [{"role": "user", "content": row["prompt"]}]
shared = {"model": "policy", "tools": [CALC], "max_tokens": 24}
said = client.chat.completions.create(messages=messages, **shared).choices[0].message
messages += [said, {"role": "user", "content": "Are you sure?"}]
chunks = client.chat.completions.create(messages=messages, stream=True, **shared)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Only the number."}]
text = client.chat.completions.create(messages=messages, **shared).choices[0].message.content
Path(os.environ["RLKIT_RESULT"]).write_text(str(float(row["answer"] in text)))
