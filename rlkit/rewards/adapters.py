"""Moved since rlkit 0.1: `rlkit.rewards.scoring` and `rlkit.compat.rewards`."""

from rlkit._moved import moved

__getattr__ = moved(__name__, {
    "in rlkit.rewards": "scorer env_rewards",
    "in rlkit.rewards.rows": "check_rows",
    "in rlkit.compat.rewards": "adapted trl verl openrlhf slime rl2 with_messages",
})  # fmt: skip
