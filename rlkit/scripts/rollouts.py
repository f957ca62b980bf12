"""Moved since rlkit 0.1: `rlkit.scripts.args` (flags), `rlkit.scripts.task` and `rlkit.scripts.engines`."""

from rlkit._moved import moved

_ARGS = dict.fromkeys(("Episodes", "Correction", "Engine"), "it is in rlkit.scripts.args")
_TASK = "read_reward and read_env of rlkit.scripts.task"
_OTHERS = {"environment": _TASK, "reward_functions": _TASK, "open_engine": "it is in rlkit.scripts.engines"}
__getattr__ = moved(__name__, {**_ARGS, **_OTHERS, "*": "it is in rlkit.scripts.task"})
