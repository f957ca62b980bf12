"""Moved since rlkit 0.1: `rlkit.data.rows` and `rlkit.compat.rows`."""

from rlkit._moved import moved

_OTHERS = "rows of other systems are read by rlkit.compat.rows.read"
__getattr__ = moved(__name__, {"with_prompt": _OTHERS, "rl_row": _OTHERS, "*": "it is in rlkit.data.rows"})
