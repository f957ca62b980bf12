"""Moved since rlkit 0.1: `rlkit.compat.envs`."""

from rlkit._moved import moved

__getattr__ = moved(__name__, {"*": "environments of other systems are in rlkit.compat.envs"})
