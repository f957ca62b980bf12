"""Losses for value heads and reward models.

Value heads: regression on returns, with and without clipping, and classification into value bins (logits have one more
axis, [.., B]). Targets (`returns`, `old_values`) get no gradient. Reward models: pairwise (outcome) and per step
(process). All are elementwise in any shape. Masked positions have loss 0 and gradient 0, even if they hold NaN.
"""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rlkit._util.tensors import check_float, check_mask, check_tensor, masked, readable, upcast
from rlkit.losses._inputs import check_at_least, check_probs, prepared, targets
from rlkit.losses.preference import PairMask, Pairs
from rlkit.types import Mask, Tokens

__all__ = [
    "bradley_terry",
    "hl_gauss",
    "hl_gauss_target",
    "hl_gauss_value",
    "process_bce",
    "value_clip",
    "value_huber",
    "value_mse",
]


def value_mse(values: Tokens, returns: Tokens, *, mask: Mask = None) -> Tokens:
    """Half the squared error of a value prediction.

        loss = 1/2 (V - R)^2                                gradient: V - R

    The factor 1/2 is included, here and in `value_clip`.
    Differs: RL2 has no 1/2.
    Reference: verl `compute_value_loss`, trainer/ppo/core_algos.py.
    """
    (returns,) = targets(returns, values=values)
    values, returns = prepared(mask, values=values, returns=returns)
    return 0.5 * (values - returns).square()


def value_huber(values: Tokens, returns: Tokens, *, delta: float, mask: Mask = None) -> Tokens:
    """Huber loss of a value prediction: outliers of the return have a bounded gradient.

        loss = 1/2 e^2 where |e| <= delta, else delta (|e| - delta / 2)          e = V - R

    Gradient: clip(V - R, -delta, delta).
    Limits: delta -> inf is `value_mse`.
    Reference: Huber 1964, https://doi.org/10.1214/aoms/1177703732.
    """
    if not delta > 0:
        raise ValueError(f"delta must be positive, got {delta}")
    (returns,) = targets(returns, values=values)
    values, returns = prepared(mask, values=values, returns=returns)
    return F.huber_loss(values, returns, reduction="none", delta=delta)


def value_clip(values: Tokens, old_values: Tokens, returns: Tokens, *, clip: float, mask: Mask = None) -> Tokens:
    """PPO's clipped value loss: the larger of the errors with and without clipping to within `clip` of `old_values`.

        loss = 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    Gradient V - R, and 0 where V is outside the clip range and closer to R than the range's bound. `clip` is in units
    of the value.
    Limits: clip = inf is `value_mse`.
    Errors: ValueError for `old_values` that are `values` themselves, with a gradient.
    Reference: OpenAI baselines ppo2/model.py; verl `compute_value_loss`.
    """
    check_at_least(0, clip=clip)
    if old_values is values and values.requires_grad:
        raise ValueError("old_values is values, with its gradient: nothing would be clipped; take those of before")
    old_values, returns = targets(old_values, returns, values=values)
    values, old_values, returns = prepared(mask, values=values, old_values=old_values, returns=returns)
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def hl_gauss(
    logits: Float[Tensor, "*shape B"],
    returns: Tokens,
    *,
    low: float,
    high: float,
    sigma: float | None = None,
    mask: Mask = None,
) -> Tokens:
    """Value prediction as classification: cross-entropy with a Gaussian around the return, binned on [low, high].

        loss = -sum_i p_i log softmax(logits)_i             p = hl_gauss_target(returns)

    The gradient is bounded for returns of any scale. The minimum of the loss is the entropy of p, not 0.
    Returns outside [low, high] are clamped, with a UserWarning on the CPU. `hl_gauss_value` converts logits to a value.
    `sigma` is in units of the value; the default is 0.75 bin widths, as the paper recommends.
    Reference: arXiv:2403.03950; histogram loss: arXiv:1806.04613.
    """
    check_float(logits=logits, returns=returns)
    if logits.shape[:-1] != returns.shape:
        raise ValueError(f"logits must have shape {[*returns.shape, 'B']}, got {list(logits.shape)}")
    check_mask(mask, returns=returns)
    logits = masked(upcast(logits), None if mask is None else mask.unsqueeze(-1))
    (returns,) = targets(returns, logits=logits)
    returns = masked(returns, mask, low)
    if readable(returns) and ((returns < low) | (returns > high)).any():
        warnings.warn(
            f"hl_gauss clamps returns to [{low:g}, {high:g}], and they reach from {returns.min():g} to "
            f"{returns.max():g}: no value outside the range is learnt; widen it, or normalize the returns", stacklevel=2
        )  # fmt: skip
    target = hl_gauss_target(returns, num_bins=logits.shape[-1], low=low, high=high, sigma=sigma)
    return masked(-(target * logits.log_softmax(-1)).sum(-1), mask)


def hl_gauss_target(
    returns: Tokens, *, num_bins: int, low: float, high: float, sigma: float | None = None
) -> Float[Tensor, "*shape B"]:
    """The probabilities of B equal bins of [low, high] under a Gaussian around each return, renormalised.

        p_i = (Phi((e_{i+1} - R) / sigma) - Phi((e_i - R) / sigma)) / (Phi((high - R) / sigma) - Phi((low - R) / sigma))

    with bin edges e_0 = low .. e_B = high. Returns outside [low, high] are clamped: choose the range wide enough.
    Limits: sigma -> 0 is the one-hot of the return's bin (half in each of two bins at their common edge).
    Differs: the paper's code does not clamp returns, and divides 0 by 0 far outside the range.
    Reference: arXiv:2403.03950, appendix A.
    """
    check_float(returns=returns)
    sigma = _bin_width(num_bins, low, high) * 0.75 if sigma is None else sigma
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma must be positive and finite, got {sigma}")
    returns = upcast(returns).clamp(low, high)
    sigma = max(sigma, torch.finfo(returns.dtype).tiny)  # the limit, not 0 / 0
    edges = torch.linspace(low, high, num_bins + 1, dtype=returns.dtype, device=returns.device)
    cdf = torch.erf((edges - returns.unsqueeze(-1)) / (math.sqrt(2) * sigma))
    return cdf.diff(dim=-1) / (cdf[..., -1:] - cdf[..., :1])


def hl_gauss_value(logits: Float[Tensor, "*shape B"], *, low: float, high: float) -> Tokens:
    """The value of a distribution over bins: its mean over the bin centres.

        V = sum_i softmax(logits)_i c_i                     c_i = (e_i + e_{i+1}) / 2

    It lies between the first and the last centre, so values near low or high are biased inwards.
    Reference: arXiv:2403.03950, appendix A (`transform_from_probs`).
    """
    check_float(logits=logits)
    logits = upcast(logits)
    num_bins = logits.shape[-1]
    half = _bin_width(num_bins, low, high) / 2
    centers = torch.linspace(low + half, high - half, num_bins, dtype=logits.dtype, device=logits.device)
    return (logits.softmax(-1) * centers).sum(-1)


def _bin_width(num_bins: int, low: float, high: float) -> float:
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    if not low < high:
        raise ValueError(f"low must be below high, got low {low}, high {high}")
    return (high - low) / num_bins


def bradley_terry(
    chosen_rewards: Pairs,
    rejected_rewards: Pairs,
    *,
    margin: float | Float[Tensor, "*pairs"] = 0.0,
    center_coef: float = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """Pairwise reward-model loss, with an optional margin and an optional penalty that centres the rewards at 0.

        loss = -log sigmoid(r_c - r_r - margin) + center_coef (r_c + r_r)^2

    `margin` is one number, or one per pair (how much better the chosen response was rated). `center_coef` fixes the
    offset that the pairwise term leaves free; TRL recommends 0.01. To weight pairs instead, multiply the result.
    Limits: ln 2 at r_c = r_r = 0 without margin.
    Reference: arXiv:2307.09288 (margin); arXiv:2312.09244, equation 2 (centring); TRL reward_trainer.py.
    """
    check_at_least(0, center_coef=center_coef)
    chosen, rejected = prepared(mask, chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    if not isinstance(margin, int | float):
        check_tensor(margin=margin)
        _, margin = prepared(mask, chosen_rewards=chosen, margin=margin.detach())
    return masked(-F.logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square(), mask)


def process_bce(logits: Pairs, labels: Pairs, *, mask: PairMask = None) -> Pairs:
    """Process reward model: binary cross-entropy of each step's logit with a hard or soft label.

        loss = -y log sigmoid(z) - (1 - y) log sigmoid(-z)

    z is the logit at the last token of a step (the mask is True there). y in [0, 1] is the step's label: 0 or 1, or the
    share of rollouts from this step that reach the answer.
    Limits: y = 1/2 has its minimum ln 2 at z = 0.
    Reference: arXiv:2211.14275; arXiv:2312.08935 (soft labels).
    """
    (labels,) = targets(labels, logits=logits)
    z, y = prepared(mask, logits=logits, labels=labels)
    check_probs(labels=y)
    return masked(-y * F.logsigmoid(z) - (1 - y) * F.logsigmoid(-z), mask)
