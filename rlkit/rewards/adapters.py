"""Moved since rlkit 0.1: `rlkit.rewards.scoring` and `rlkit.compat.rewards`."""

from rlkit._moved import moved

_HERE = "it is in rlkit.rewards"
_ROWS = "it is in rlkit.rewards.rows"
_OTHERS = "reward functions of other systems are in rlkit.compat.rewards"
__getattr__ = moved(__name__, {"scorer": _HERE, "env_rewards": _HERE, "check_rows": _ROWS, "*": _OTHERS})
