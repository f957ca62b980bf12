"""A reward for mathematics: the boxed answer must be right, and the completion not too long.

    rlkit grpo --model MODEL --data train.jsonl --reward examples/math_reward.py:score

Rows have `prompt` and `answer`. For rewards without options no file is needed: `--reward rlkit.rewards.math:boxed`.
"""

from functools import partial

from rlkit.rewards.combine import weighted
from rlkit.rewards.math import boxed
from rlkit.rewards.text import soft_overlong

score = weighted(
    {"right": boxed, "length": partial(soft_overlong, max_tokens=1024, cache_tokens=256)},
    weights={"right": 1.0, "length": 0.5},
)
