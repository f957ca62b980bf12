"""Moved since rlkit 0.1: `rlkit.compat.envs`."""

from rlkit._moved import moved

_NAMES = "adapted rl2 interact openrlhf rl4llm gymnasium gem textarena openenv verifiers verifiers_tasks"
__getattr__ = moved(__name__, {"in rlkit.compat.envs": _NAMES})
