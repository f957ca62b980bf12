"""Preference losses of the margin between a chosen and a rejected response: DPO and its relatives.

Every function is `f(chosen_log_ratio, rejected_log_ratio, *, beta, ..., mask=None) -> one loss per pair`, elementwise
in any shape. A response's log-ratio is `logp - ref_logp` over its completion, summed over tokens (`segments.seq_sum`)
unless a docstring says otherwise. Here only the margin counts:

    delta = chosen_log_ratio - rejected_log_ratio

Masked pairs give loss 0 and gradient 0, whatever they hold (NaN included). The mean over pairs is the caller's.
Losses that hold each response to an anchor are in `preference_anchored`, those without a reference model in
`preference_reference_free`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from rlkit._tensors import check_same_shape, masked
from rlkit.losses._inputs import check_positive, prepared
from rlkit.losses._pairs import PairMask, Pairs, check_between, smoothed_nll


def dpo(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """Direct preference optimisation, and with `label_smoothing` its conservative form (cDPO).

        loss = -(1 - e) log sigmoid(beta delta) - e log sigmoid(-beta delta)          e = label_smoothing

    e in [0, 1/2] is the probability that a label is flipped; with e > 0 the margin has an optimum at
    beta delta = log((1 - e) / e) instead of growing for ever.
    Limits: e = 0 is DPO, ln 2 at delta = 0; e = 1/2 is symmetric in the two responses.
    Differs: TRL `sigmoid` has no smoothing. NeMo-RL `reference_policy_kl_penalty`, its beta, is 0.05 by default.
    Reference: arXiv:2305.18290, equation 7; cDPO: https://ericmitchell.ai/cdpo.pdf, equation 3.
    """
    check_between(0, 0.5, label_smoothing=label_smoothing)
    return masked(smoothed_nll(_scaled_margin(chosen_log_ratio, rejected_log_ratio, beta, mask), label_smoothing), mask)


def robust_dpo(
    chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, label_smoothing: float, mask: PairMask = None
) -> Pairs:
    """DPO made unbiased under labels that are flipped with probability e = `label_smoothing`.

        loss = ((1 - e) l(x) - e l(-x)) / (1 - 2e)          l(x) = -log sigmoid(x), x = beta delta

    Its mean over random flips is DPO's loss on the clean label. Unbounded below: -inf as delta grows, for e > 0.
    Limits: e = 0 is `dpo`. e must lie in [0, 1/2).
    Differs: nothing (TRL `robust`); cDPO (`dpo` with `label_smoothing`) is biased, but bounded below.
    Reference: arXiv:2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    x = _scaled_margin(chosen_log_ratio, rejected_log_ratio, beta, mask)
    kept, flipped = -F.logsigmoid(x), -F.logsigmoid(-x)
    return masked(((1 - label_smoothing) * kept - label_smoothing * flipped) / (1 - 2 * label_smoothing), mask)


def ipo(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Identity preference optimisation: regress the margin on 1 / (2 beta), so that it cannot run away.

        loss = (delta - 1 / (2 beta))^2

    beta is the paper's tau. There is no hidden choice of length normalisation: pass log-ratios summed over tokens
    (`segments.seq_sum`; the paper's equation, OpenRLHF, ROLL) or averaged (`segments.seq_mean`; TRL and AReaL, so
    that beta means the same for short and long responses).
    Reference: arXiv:2310.12036, equation 17.
    """
    check_positive(beta=beta)
    delta = _scaled_margin(chosen_log_ratio, rejected_log_ratio, 1.0, mask)
    return masked((delta - 1 / (2 * beta)).square(), mask)


def hinge(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Hinge on the scaled margin: no gradient once the pair is separated by 1 / beta.

        loss = max(0, 1 - beta delta)

    beta is the reciprocal of the margin. With plain log-probs instead of log-ratios it is SLiC's calibration loss.
    Differs: nothing (TRL `hinge`).
    Reference: arXiv:2309.06657 (hinge on normalised log-ratios); SLiC: arXiv:2305.10425; TRL dpo_trainer.py.
    """
    return masked(torch.relu(1 - _scaled_margin(chosen_log_ratio, rejected_log_ratio, beta, mask)), mask)


def exo_pair(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    *,
    beta: float,
    label_smoothing: float = 1e-3,
    mask: PairMask = None,
) -> Pairs:
    """Efficient exact optimisation on pairs: the *reverse* KL between the model's preference and the smoothed label.

        q = (sigmoid(x), sigmoid(-x)), p = (1 - e, e), x = beta delta          loss = KL(q || p) = sum q log(q / p)

    e = `label_smoothing` in (0, 1/2]; at 0 the KL is infinite. Zero exactly where sigmoid(x) = 1 - e.
    `dpo` with the same e is the other direction, KL(p || q), up to the constant entropy of p.
    Differs: TRL `exo_pair` takes the same argument but its default (0) is refused there.
    Reference: arXiv:2402.00856, equation 16 with K = 2; it recommends e = 1e-3.
    """
    if not 0 < label_smoothing <= 0.5:
        raise ValueError(f"label_smoothing must lie in (0, 0.5], got {label_smoothing}")
    x = _scaled_margin(chosen_log_ratio, rejected_log_ratio, beta, mask)
    log_q, log_q_flipped = F.logsigmoid(x), F.logsigmoid(-x)
    log_p, log_p_flipped = math.log1p(-label_smoothing), math.log(label_smoothing)
    return masked(log_q.exp() * (log_q - log_p) + log_q_flipped.exp() * (log_q_flipped - log_p_flipped), mask)


def discopop(
    chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, tau: float = 0.05, mask: PairMask = None
) -> Pairs:
    """The loss that a language model found (log-ratio modulated): logistic for lost pairs, exponential for won ones.

        loss = (1 - m) (-log sigmoid(x)) + m exp(-x)          m = sigmoid(x / tau), x = beta delta

    tau in (0, 1]: then m exp(-x) is bounded for every x. Not convex, and not monotone either: around x = 0 it has a
    bump of width tau, where raising the chosen response raises the loss.
    Limits: tau -> 0 is the logistic loss for x < 0 and exp(-x) for x > 0; (ln 2 + 1) / 2 at x = 0 for every tau.
    Differs: TRL `discopop` (`discopop_tau`) overflows below x = -88 in fp32; the product is formed in log space here.
    Reference: arXiv:2406.08414, equation 5.
    """
    if not 0 < tau <= 1:
        raise ValueError(f"tau must lie in (0, 1], got {tau}")
    x = _scaled_margin(chosen_log_ratio, rejected_log_ratio, beta, mask)
    logistic = torch.sigmoid(-x / tau) * -F.logsigmoid(x)
    exponential = (F.logsigmoid(x / tau) - x).exp()
    return masked(logistic + exponential, mask)


def sigmoid_norm(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    *,
    chosen_lens: Int[Tensor, "*pairs"],
    rejected_lens: Int[Tensor, "*pairs"],
    beta: float,
    mask: PairMask = None,
) -> Pairs:
    """Length-normalised DPO: each log-ratio, summed over tokens, is divided by its number of completion tokens.

        loss = -log sigmoid(beta (chosen_log_ratio / chosen_lens - rejected_log_ratio / rejected_lens))

    The same as `dpo` on averaged log-ratios, so beta must be larger than plain DPO's by about a response's length.
    An empty response (length 0) counts as length 1.
    Differs: nothing (TRL `sigmoid_norm`, open-instruct `dpo_norm`).
    Reference: arXiv:2411.15124 (length-normalised DPO); TRL dpo_trainer.py.
    """
    check_same_shape(chosen_log_ratio=chosen_log_ratio, chosen_lens=chosen_lens, rejected_lens=rejected_lens)
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    return dpo(chosen / chosen_lens.clamp(min=1), rejected / rejected_lens.clamp(min=1), beta=beta, mask=mask)


def _scaled_margin(chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """beta * (chosen - rejected) of checked, upcast tensors; 0 at masked pairs."""
    check_positive(beta=beta)
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    return beta * (chosen - rejected)
