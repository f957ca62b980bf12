"""A user's program with smolagents: an agent with a tool, then one that writes code."""

import json
import os
from pathlib import Path

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")
question = json.loads(Path(os.environ["RLKIT_ROW"]).read_text())["prompt"]
answers = [str(kind(tools=[add], model=model, max_steps=4).run(question)) for kind in (ToolCallingAgent, CodeAgent)]
result = {"reward": float(answers == ["8", "8"]), "info": {"answers": answers}}
Path(os.environ["RLKIT_RESULT"]).write_text(json.dumps(result))
