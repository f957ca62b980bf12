"""Reinforcement learning for language models, as functions.

Import what you need from where it lives: `rlkit.advantages`, `rlkit.losses`, `rlkit.kernels`, `rlkit.packing`,
`rlkit.parallel`, `rlkit.rollout`, `rlkit.rewards`, `rlkit.data`, `rlkit.loops`, `rlkit.testing`. Nothing heavy is
imported here.
"""

__version__ = "0.1.0"
