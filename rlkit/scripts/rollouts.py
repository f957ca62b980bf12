"""Moved since rlkit 0.1: `rlkit.scripts.args` (flags), `rlkit.scripts.task` and `rlkit.scripts.engines`."""

from rlkit._moved import moved

__getattr__ = moved(__name__, {
    "in rlkit.scripts.args": "Episodes Correction",
    "Engines in rlkit.settings": "Engine",
    "in rlkit.scripts.task": "open_task load_models check_rl check_lengths render",
    "in rlkit.scripts.engines": "open_engine",
    "read_reward and read_env in rlkit.scripts.task": "reward_functions load_env environment",
})  # fmt: skip
