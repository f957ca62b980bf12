"""Four environments of several turns to copy from: a calculator, search, a guessing game, and code with feedback.

Each is a function `(tokenizer, rows) -> Task`. The first three make their own rows and demonstrations, so that they run
with the tiny model of `rlkit.data.tiny`; `tool_use.py` trains on any of them.
"""

from __future__ import annotations

import ast
import json
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit._util.extras import optional
from rlkit.rollout.envs.gym import Step, Turn, gym_env
from rlkit.rollout.envs.tools import tool_env
from rlkit.rollout.groups import Env, Prompt

Row = dict[str, Any]
Messages = list[dict[str, Any]]


@dataclass
class Task:
    env: Env
    rows: list[Row]
    """what there is to ask"""
    reward: Callable[..., Any] | None
    """of a final answer, for `rlkit.rewards.scorer`; None: the environment rewards"""
    demonstrate: Callable[[Row], Messages] | None = None
    """how a teacher who often gives up would talk, to warm up a model that knows nothing"""
    tools: Sequence[Callable[..., Any]] = field(default_factory=list)
    """to show in the prompt"""


def exact(completion: str, row: Row, num_calls: int, num_bad_calls: int) -> dict[str, float]:
    """1 if the final turn is the answer. How often tools were called is only logged."""
    return {"reward": float(completion.strip() == row["answer"]), "calls": num_calls, "bad_calls": num_bad_calls}


def spoken(call: str, arguments: dict[str, Any]) -> str:
    """A tool call in the format of Hermes and Qwen."""
    return f"<tool_call>{json.dumps({'name': call, 'arguments': arguments})}</tool_call>"


# A calculator. The teacher gives up three times out of five.


def calc(x: str) -> int:
    """Calculate.

    Args:
        x: e.g. 2*(3+4)
    """
    known = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)) if abs(number) < 10**9:
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in known:
                return known[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in known:
                return known[type(op)](value(operand))
        raise ValueError("only whole numbers, + - * and parentheses")

    return value(ast.parse(x, mode="eval").body)


def calculator(tokenizer: Any, *, num_rows: int = 4096, seed: int = 0) -> Task:
    rng = random.Random(seed)
    pairs = [divmod(n, 90) for n in rng.sample(range(90 * 90), num_rows)]
    rows = [{"prompt": f"{a + 10}*{b + 10}", "answer": str((a + 10) * (b + 10))} for a, b in pairs]

    def demonstrate(row: Row) -> Messages:
        question = {"role": "user", "content": row["prompt"]}
        if rng.random() < 0.6:
            return [question, {"role": "assistant", "content": "?"}]
        return [
            question,
            {"role": "assistant", "content": spoken("calc", {"x": row["prompt"]})},
            {"role": "tool", "content": row["answer"]},
            {"role": "assistant", "content": row["answer"]},
        ]

    return Task(tool_env([calc], tokenizer=tokenizer, timeout_s=5.0), rows, exact, demonstrate, [calc])


# BM25 search in your own documents.


def search_tool(documents: Sequence[str], *, k: int = 1) -> Callable[[str], str]:
    """A function `search(query)` over an index of `documents`."""
    bm25s = optional("bm25s", "search", "the search tool needs")

    def tokens(texts: Sequence[str]) -> Any:
        return bm25s.tokenize(list(texts), stopwords="en", show_progress=False)

    index = bm25s.BM25()
    index.index(tokens(documents), show_progress=False)

    def search(query: str) -> str:
        """Search the documents.

        Args:
            query: words to find
        """
        found, scores = index.retrieve(tokens([query]), corpus=list(documents), k=k, show_progress=False)
        return "\n".join(d for d, s in zip(found[0], scores[0]) if s > 0) or "nothing found"

    return search


def search(tokenizer: Any, *, num_rows: int = 512, seed: int = 0) -> Task:
    rng = random.Random(seed)

    def name() -> str:
        return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)).capitalize()

    places = {name(): name() for _ in range(num_rows)}
    find = search_tool([f"The capital of {land} is {city}." for land, city in places.items()])
    rows = [{"prompt": land, "answer": city} for land, city in places.items()]

    def demonstrate(row: Row) -> Messages:
        question = {"role": "user", "content": row["prompt"]}
        if rng.random() < 0.6:
            return [question, {"role": "assistant", "content": "?"}]
        return [
            question,
            {"role": "assistant", "content": spoken("search", {"query": row["prompt"]})},
            {"role": "tool", "content": find(row["prompt"])},
            {"role": "assistant", "content": row["answer"]},
        ]

    return Task(tool_env([find], tokenizer=tokenizer), rows, exact, demonstrate, [find])


# A game with state: guess a digit in three turns; halving the remaining range wins 7 times out of 10.


class Guessing:
    """One game; the prompt's row holds the secret."""

    def __init__(self, prompt: Prompt) -> None:
        self.secret, self.turns = int(prompt.row["answer"]), 0

    def reset(self) -> None:
        """The prompt opens the game."""

    def step(self, turn: Turn) -> Step:
        """Higher, lower, or won."""
        self.turns += 1
        guess = int(turn.text) if len(turn.text) == 1 and turn.text in "0123456789" else -1
        if guess == self.secret:
            return Step("", reward=1.0, done=True)
        return Step("+" if guess < self.secret else "-", done=self.turns == 3)


def guessing(tokenizer: Any, *, num_rows: int = 1000, seed: int = 0) -> Task:
    rng = random.Random(seed)
    rows = [{"prompt": "?", "answer": str(rng.randrange(10))} for _ in range(num_rows)]

    def demonstrate(row: Row) -> Messages:
        messages, low, high, listens = [{"role": "user", "content": "?"}], 0, 9, rng.random() < 0.5
        for turn in range(3):
            guess = rng.randint(low, high)
            messages.append({"role": "assistant", "content": str(guess)})
            if guess == int(row["answer"]) or turn == 2:
                break
            messages.append({"role": "user", "content": "+" if guess < int(row["answer"]) else "-"})
            if listens:
                low, high = (guess + 1, high) if guess < int(row["answer"]) else (low, guess - 1)
        return messages

    return Task(gym_env(Guessing, tokenizer=tokenizer), rows, None, demonstrate)


# Code with feedback: public tests may be run in every turn, hidden ones decide. Rows: see `rlkit.rewards.code`.


def code_tools(prompt: Prompt | None) -> list[Callable[..., Any]]:
    from rlkit.rewards.code import assert_tests

    async def run_tests(code: str) -> str:
        """Run the public tests on a solution.

        Args:
            code: Python source
        """
        assert prompt is not None
        verdict = await assert_tests(f"```python\n{code}\n```", {"tests": prompt.row["public_tests"]})
        return verdict.get("reason", "all tests passed")

    return [run_tests]


def code(tokenizer: Any, *, rows: list[Row]) -> Task:
    from rlkit.rewards.code import assert_tests

    return Task(tool_env(code_tools, tokenizer=tokenizer), rows, assert_tests, tools=code_tools(None))
