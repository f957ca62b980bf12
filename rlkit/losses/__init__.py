"""Losses, weights, corrections and penalties: small functions of token tensors."""

from rlkit.losses.corrections import tis
from rlkit.losses.diagnostics import ratio_stats
from rlkit.losses.kl import abs_kl, k1, k2, k3, kl_in_reward
from rlkit.losses.surrogates import ppo_clip
from rlkit.losses.weights import token_mean

__all__ = [
    "abs_kl",
    "k1",
    "k2",
    "k3",
    "kl_in_reward",
    "ppo_clip",
    "ratio_stats",
    "tis",
    "token_mean",
]
