"""System prompts that ask for what the rewards look for. They are data: `--system-prompt`, or `rl_prompts`.

`BOXED` is for `math.boxed` and `math.anywhere`, `THINK_ANSWER` for `math.answer_tag` and `format.think_answer_tags`,
`CODE` for `code.stdin_tests`, `FUNCTION` for `code.assert_tests`, and `JSON` for `format.valid_json`.
"""

from __future__ import annotations

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
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
