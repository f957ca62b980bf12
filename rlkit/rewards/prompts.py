"""System prompts that ask for what the rewards look for. They are data: `--system-prompt`, or `rl_prompts`."""

from __future__ import annotations

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."  # for `math.boxed`
THINK_ANSWER = (
    "Think about the question before you answer it. Write your reasoning between <think> and </think>, then only the "
    "final answer between <answer> and </answer>: <think>reasoning</think><answer>answer</answer>"
)
CODE = (
    "Solve the problem with one complete Python program. It reads from standard input and writes only what is asked "
    "for to standard output. Think first, then give the program in one block that starts with ```python and ends with "
    "```."
)
FUNCTION = (
    "Write the Python function that is asked for, with the name and the arguments given. Think first, then give the "
    "whole function, with its imports, in one block that starts with ```python and ends with ```."
)
JSON = "Answer with one JSON value and nothing else: no explanation, no Markdown."

BY_REWARD = {
    "rlkit.rewards.math:boxed": BOXED,
    "rlkit.rewards.math:anywhere": BOXED,
    "rlkit.rewards.math:answer_tag": THINK_ANSWER,
    "rlkit.rewards.format:think_answer_tags": THINK_ANSWER,
    "rlkit.rewards.format:valid_json": JSON,
    "rlkit.rewards.code:stdin_tests": CODE,
    "rlkit.rewards.code:assert_tests": FUNCTION,
}
"""The system prompt of each reward that looks for a form, by the name that `--reward` takes."""
