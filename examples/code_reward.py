"""A reward for programs: all tests must pass, in a sandbox, each within two seconds of CPU and four of wall time.

    rlkit grpo --model MODEL --data train.jsonl --reward examples/code_reward.py:score

Rows have `prompt` and `test_cases`: {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}. The answer is the last Python block.
"""

from functools import partial

from rlkit.rewards.code import stdin_tests
from rlkit.rewards.sandbox import Limits

score = partial(stdin_tests, all_or_nothing=True, limits=Limits(wall_s=4.0, cpu_s=2.0, memory_bytes=256 << 20))
