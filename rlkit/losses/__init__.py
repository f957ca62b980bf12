"""Losses, weights, corrections and penalties: small functions of token tensors.

    policy, policy_batch   policy-gradient surrogates; surrogates that need a statistic of the whole batch
    ratios                 sequence-level log-ratios
    weights                loss aggregation
    corrections            importance weights for samples of another engine or an older policy
    kl, entropy            penalties, bonuses and filters
    values                 value heads and reward models
    preference             DPO and related losses
    distillation           divergences from a teacher
    diagnostics            metrics

docs/losses.md and docs/preference.md list published losses that are one call or one operator away from these, and the
names that other frameworks use.
"""

from rlkit._util.elsewhere import elsewhere
from rlkit.losses import (
    corrections,
    diagnostics,
    distillation,
    entropy,
    kl,
    policy,
    policy_batch,
    preference,
    ratios,
    values,
    weights,
)
from rlkit.losses.corrections import *
from rlkit.losses.diagnostics import *
from rlkit.losses.distillation import *
from rlkit.losses.entropy import *
from rlkit.losses.kl import *
from rlkit.losses.policy import *
from rlkit.losses.policy_batch import *
from rlkit.losses.preference import *
from rlkit.losses.ratios import *
from rlkit.losses.values import *
from rlkit.losses.weights import *

__all__ = [
    *corrections.__all__,
    *diagnostics.__all__,
    *distillation.__all__,
    *entropy.__all__,
    *kl.__all__,
    *policy.__all__,
    *policy_batch.__all__,
    *preference.__all__,
    *ratios.__all__,
    *values.__all__,
    *weights.__all__,
]

__getattr__ = elsewhere(__name__)
