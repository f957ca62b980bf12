"""Environments of verifiers 0.1: one turn, tools, several turns."""

import verifiers as vf
from datasets import Dataset


def sums(n):
    """Questions with answers."""
    return Dataset.from_list([{"question": f"What is {i}+1?", "answer": str(i + 1)} for i in range(4 - n, 4)])


def right(completion, answer, **_):
    """Whether the answer is in the last message."""
    return float(answer in completion[-1]["content"])


def brief(completion, **_):
    """Whether the last message is short."""
    return 1.0 if len(completion[-1]["content"]) < 30 else 0.25


def load_environment(n: int = 2):
    """One turn, two weighted rewards."""
    rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(dataset=sums(n), system_prompt="Answer with a number.", rubric=rubric)


def double(x: int) -> str:
    """Double a number.

    Args:
        x: the number
    """
    return str(2 * x)


def with_tools():
    """A tool."""
    return vf.ToolEnv(dataset=sums(2), tools=[double], rubric=vf.Rubric(funcs=[brief]))


class Insisting(vf.MultiTurnEnv):
    """Says no."""

    async def env_response(self, messages, state, **_):
        """The answer to each turn."""
        return [vf.UserMessage(content="Try again.")]


def turns():
    """Three turns."""
    return Insisting(dataset=sums(2), rubric=vf.Rubric(funcs=[brief]), max_turns=3)
