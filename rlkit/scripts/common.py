"""Moved since rlkit 0.1: `rlkit.scripts.args` (flags) and `rlkit.scripts.start`."""

from rlkit._moved import moved

_ARGS = dict.fromkeys(("Model", "Data", "Examples", "Lora"), "it is in rlkit.scripts.args")
__getattr__ = moved(__name__, {**_ARGS, "*": "it is in rlkit.scripts.start"})
