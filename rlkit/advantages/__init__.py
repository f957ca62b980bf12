"""Advantages: from rewards and values to what multiplies the gradient of the log-probability.

Per sequence `[N]` from a group's rewards; per token `[T]` from rewards, values and traces. No function draws on another
rank or keeps state; what needs the whole batch says so.
"""

from rlkit.advantages.batch import gdpo, gigpo, normalize_then_sum, reinforce_pp, reinforce_pp_baseline, whiten
from rlkit.advantages.groups import (
    gpg,
    group_centered,
    group_mean_batch_std,
    group_zscore,
    leave_one_out,
    max_at_k,
    max_rl,
    opo,
    optimal_token_baseline,
    pass_at_k,
    remax,
)
from rlkit.advantages.off_policy import VTrace, clipped_is_returns, q_lambda, retrace, vtrace
from rlkit.advantages.traces import (
    Gae,
    bootstrap_values,
    discounted_returns,
    gae,
    gae_decoupled,
    length_adaptive_lam,
    n_step,
    td_lambda,
)

__all__ = [
    "Gae",
    "VTrace",
    "bootstrap_values",
    "clipped_is_returns",
    "discounted_returns",
    "gae",
    "gae_decoupled",
    "gdpo",
    "gigpo",
    "gpg",
    "group_centered",
    "group_mean_batch_std",
    "group_zscore",
    "leave_one_out",
    "length_adaptive_lam",
    "max_at_k",
    "max_rl",
    "n_step",
    "normalize_then_sum",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "q_lambda",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "retrace",
    "td_lambda",
    "vtrace",
    "whiten",
]
