"""Preference losses without a reference model: they take log-probs of the responses, not log-ratios.

The form is that of `rlkit.losses.preference`: one loss per pair, elementwise in any shape, masked pairs give 0. Whether
a response's log-prob is summed over its tokens (`segments.seq_sum`) or averaged (`segments.seq_mean`) stands in each
docstring. The likelihood term that several of these papers add is its own function, `sft`, so that its denominator is
the caller's choice: a mean over responses, or over the tokens of the global batch (TRL).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit._tensors import check_float, check_same_shape, masked
from rlkit.losses._inputs import check_positive, prepared
from rlkit.losses._pairs import PairMask, Pairs, check_between, smoothed_nll
from rlkit.losses.preference import dpo
from rlkit.losses.preference_divergence import alpha_score


def sft(logp: Pairs, *, mask: PairMask = None) -> Pairs:
    """Negative log-likelihood: the term that keeps the chosen response likely.

        loss = -logp

    Per token ([T], weighted by `token_mean`) or per response. The sums that papers and systems name are then
    CPO `cpo + sft`; ORPO `sft + orpo`; TPO (arXiv:2405.16681) `cpo + alpha sft(gold response)`; MPO a weighted sum of
    `dpo`, `bco_pair` and `sft` (TRL `loss_weights`); NeMo-RL's DPO `preference_loss_weight dpo + sft_loss_weight sft`.
    Differs: TRL `sft` averages over all chosen tokens of the local batch.
    Reference: TRL dpo_trainer.py.
    """
    (logp,) = prepared(mask, logp=logp)
    return -logp


def cpo(
    chosen_logp: Pairs, rejected_logp: Pairs, *, beta: float, label_smoothing: float = 0.0, mask: PairMask = None
) -> Pairs:
    """Contrastive preference optimisation, its preference term: DPO with a uniform reference.

        loss = -(1 - e) log sigmoid(x) - e log sigmoid(-x)          x = beta (chosen_logp - rejected_logp)

    Log-probs are summed over tokens. The whole CPO objective is `cpo(...) + sft(chosen_logp)`.
    Differs: TRL's `CPOTrainer` (`sigmoid`) adds `cpo_alpha` (1.0) times the chosen tokens' mean NLL.
    Reference: arXiv:2401.08417, equation 3; TRL experimental/cpo, `cpo_loss`.
    """
    check_float(chosen_logp=chosen_logp, rejected_logp=rejected_logp)
    check_same_shape(chosen_logp=chosen_logp, rejected_logp=rejected_logp)
    return dpo(chosen_logp, rejected_logp, beta=beta, label_smoothing=label_smoothing, mask=mask)


def simpo(
    chosen_logp: Pairs,
    rejected_logp: Pairs,
    *,
    beta: float,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """Simple preference optimisation: *averaged* log-probs as rewards, and a target margin.

        loss = -(1 - e) log sigmoid(x) - e log sigmoid(-x)          x = beta (chosen_logp - rejected_logp) - gamma

    `gamma` is the margin in units of the reward, i.e. after beta. beta is around 2.
    Limits: gamma = 0 is `cpo` on averaged log-probs.
    Differs: TRL writes beta (delta - simpo_gamma / beta), the same number (`simpo_gamma` 0.5); TPO-L is this with
    `sft` of a third, gold response added (TRL `tpo-l`).
    Reference: arXiv:2405.14734; TRL experimental/cpo, `cpo_loss`.
    """
    check_positive(beta=beta)
    check_between(0, 0.5, label_smoothing=label_smoothing)
    chosen, rejected = prepared(mask, chosen_logp=chosen_logp, rejected_logp=rejected_logp)
    return masked(smoothed_nll(beta * (chosen - rejected) - gamma, label_smoothing), mask)


def alphapo(
    chosen_logp: Pairs, rejected_logp: Pairs, *, beta: float, alpha: float, gamma: float = 0.5, mask: PairMask = None
) -> Pairs:
    """SimPO with a reward whose shape alpha bends: rewards of unlikely responses fall faster (alpha > 0) or slower.

        loss = -log sigmoid(beta (r(chosen) - r(rejected)) - gamma)          r = (1 - p^-alpha) / alpha, p = exp(logp)

    Log-probs are averaged over tokens, so p is the geometric mean of the token probabilities.
    Limits: alpha = 0 is `simpo`. Where -alpha logp exceeds 20 the power is held at e^20 and has no gradient.
    Differs: TRL's `CPOTrainer` (`alphapo`, `alpha`) computes p^-alpha by exp and pow, which overflows for small p.
    Reference: arXiv:2501.03884; TRL experimental/cpo, `cpo_loss`.
    """
    chosen, rejected = prepared(mask, chosen_logp=chosen_logp, rejected_logp=rejected_logp)
    return simpo(
        alpha_score(chosen, alpha=alpha), alpha_score(rejected, alpha=alpha), beta=beta, gamma=gamma, mask=mask
    )


def orpo(chosen_logp: Pairs, rejected_logp: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Odds-ratio preference optimisation, its odds-ratio term; log-probs *averaged* over tokens.

        loss = -beta log sigmoid(log odds(chosen) - log odds(rejected))          odds = p / (1 - p), p = exp(logp)

    beta is the paper's lambda (0.1). The whole ORPO objective is `sft(chosen_logp) + orpo(...)`.
    1 - p is held at machine epsilon from below, so that a certain response (logp = 0) gives a finite number.
    Differs: TRL's `odds_ratio_loss` returns this with the sign flipped, does not guard p = 1, and its NLL term covers
    the prompt's tokens too.
    Reference: arXiv:2403.07691, equations 4 and 7; TRL experimental/orpo, `odds_ratio_loss`.
    """
    check_positive(beta=beta)
    chosen, rejected = prepared(mask, chosen_logp=chosen_logp, rejected_logp=rejected_logp)
    return masked(-beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected)), mask)


def rpo(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    chosen_logp: Pairs,
    *,
    beta: float,
    sft_coef: float = 1.0,
    label_smoothing: float = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """DPO plus the chosen response's likelihood, as in iterative reasoning preference optimisation.

        loss = dpo(chosen_log_ratio, rejected_log_ratio) - sft_coef chosen_logp

    `chosen_logp` is averaged over tokens (`segments.seq_mean`): the paper divides by the response's length.
    This needs a reference model; it stands here as the sum of `dpo` and `sft`. "RPO" also names NVIDIA's reward-aware
    losses: `reward_aware_kl` and its siblings.
    Limits: sft_coef = 0 is `dpo`.
    Differs: TRL `loss_type=["sigmoid", "sft"]` averages the likelihood over all chosen tokens of the local batch.
    Reference: arXiv:2404.19733.
    """
    check_float(chosen_logp=chosen_logp)
    check_same_shape(chosen_log_ratio=chosen_log_ratio, chosen_logp=chosen_logp)
    preference = dpo(chosen_log_ratio, rejected_log_ratio, beta=beta, label_smoothing=label_smoothing, mask=mask)
    return preference + sft_coef * sft(chosen_logp, mask=mask)


def _log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logp), with 1 - p not below machine epsilon."""
    return logp - torch.log(-torch.expm1(logp.clamp(max=-torch.finfo(logp.dtype).eps)))
