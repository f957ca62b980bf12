"""Preference losses that know more than who won (reward gaps), or whose responses the policy itself just sampled.

Online DPO needs no function of its own: sample two responses per prompt, let a judge or reward model order them, and
call `dpo`. The form of the functions is that of `rlkit.losses.preference`: log-ratios and log-probs summed over
completion tokens, one loss per pair, masked pairs give 0.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rlkit._tensors import check_same_shape, masked
from rlkit.losses._inputs import check_at_least, check_positive, prepared
from rlkit.losses._pairs import PairMask, Pairs
from rlkit.losses.preference import dpo


def xpo(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    reference_sample_logp: Pairs,
    *,
    beta: float,
    alpha: float,
    mask: PairMask = None,
) -> Pairs:
    """Exploratory preference optimisation: online DPO with an optimism bonus.

        loss = -log sigmoid(beta delta) + alpha reference_sample_logp

    One response of the pair is sampled from the policy, the other from the reference model; `reference_sample_logp` is
    the *policy's* log-prob of the latter, chosen or not. Making it less likely makes the policy explore.
    Limits: alpha = 0 is `dpo`. alpha is tiny (1e-5): the term is linear and unbounded below.
    Reference: arXiv:2405.21046, algorithm 1.
    """
    check_at_least(0, alpha=alpha)
    check_same_shape(chosen_log_ratio=chosen_log_ratio, reference_sample_logp=reference_sample_logp)
    (sample_logp,) = prepared(mask, reference_sample_logp=reference_sample_logp)
    return dpo(chosen_log_ratio, rejected_log_ratio, beta=beta, mask=mask) + alpha * sample_logp


def nash_md(logp: Pairs, ref_logp: Pairs, win_prob: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Nash mirror descent by policy gradient, one loss per sampled response.

        loss = -logp sg(win_prob - 1/2 - beta (logp - ref_logp))          sg: no gradient

    `logp` and `ref_logp` are of a response sampled from the policy; `win_prob` is the probability that it beats one
    sampled from the geometric mixture of policy and reference. 1/2 is the control variate. The gradient is the exact
    policy gradient of win_prob - beta KL(policy || reference) over sequences.
    Reference: arXiv:2312.00886.
    """
    check_at_least(0, beta=beta)
    logp, ref_logp, win_prob = prepared(mask, logp=logp, ref_logp=ref_logp, win_prob=win_prob)
    return masked(-logp * (win_prob - 0.5 - beta * (logp - ref_logp)).detach(), mask)


def reward_aware_squared(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    reward_gap: Pairs,
    *,
    beta: float,
    reward_scale: float = 1.0,
    mask: PairMask = None,
) -> Pairs:
    """Reward-aware preference optimisation, squared distance: match the implicit reward gap to a given one.

        loss = (beta delta - reward_scale reward_gap)^2          reward_gap = reward(chosen) - reward(rejected)

    No gradient flows through `reward_gap`, which may be negative.
    Differs: nothing (NeMo-Aligner `rpo_sq`, `gt_reward_scale`).
    Reference: arXiv:2406.11704 (RPO); NeMo-Aligner megatron_gpt_dpo_model.py.
    """
    implicit, given = _gaps(chosen_log_ratio, rejected_log_ratio, reward_gap, beta, reward_scale, mask)
    return masked((implicit - given).square(), mask)


def reward_aware_kl(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    reward_gap: Pairs,
    *,
    beta: float,
    reward_scale: float = 1.0,
    mask: PairMask = None,
) -> Pairs:
    """Reward-aware preference optimisation, KL from the given preference to the model's.

        loss = KL(p || q)          p = sigmoid(reward_scale reward_gap), q = sigmoid(beta delta), as Bernoullis

    Limits: reward_scale -> inf with a positive gap is `dpo`; p = 1 - e is cDPO less the label's entropy.
    Differs: nothing (NeMo-Aligner `rpo_bwd_kl`).
    Reference: arXiv:2406.11704 (RPO); NeMo-Aligner megatron_gpt_dpo_model.py.
    """
    implicit, given = _gaps(chosen_log_ratio, rejected_log_ratio, reward_gap, beta, reward_scale, mask)
    return masked(_bernoulli_kl(given, implicit), mask)


def reward_aware_reverse_kl(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    reward_gap: Pairs,
    *,
    beta: float,
    reward_scale: float = 1.0,
    mask: PairMask = None,
) -> Pairs:
    """Reward-aware preference optimisation, KL from the model's preference to the given one.

        loss = KL(q || p)          p = sigmoid(reward_scale reward_gap), q = sigmoid(beta delta), as Bernoullis

    Limits: p = 1 - e is `exo_pair`.
    Differs: nothing (NeMo-Aligner `rpo_fwd_kl`).
    Reference: arXiv:2406.11704 (RPO); NeMo-Aligner megatron_gpt_dpo_model.py.
    """
    implicit, given = _gaps(chosen_log_ratio, rejected_log_ratio, reward_gap, beta, reward_scale, mask)
    return masked(_bernoulli_kl(implicit, given), mask)


def _gaps(
    chosen: Tensor, rejected: Tensor, reward_gap: Tensor, beta: float, reward_scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The implicit and the given reward gap, checked, upcast and 0 at masked pairs."""
    check_positive(beta=beta, reward_scale=reward_scale)
    chosen, rejected, reward_gap = prepared(
        mask, chosen_log_ratio=chosen, rejected_log_ratio=rejected, reward_gap=reward_gap.detach()
    )
    return beta * (chosen - rejected), reward_scale * reward_gap


def _bernoulli_kl(x: Tensor, y: Tensor) -> Tensor:
    """KL(Bernoulli(sigmoid(x)) || Bernoulli(sigmoid(y))) from logits."""
    won, lost = F.logsigmoid(x), F.logsigmoid(-x)
    return won.exp() * (won - F.logsigmoid(y)) + lost.exp() * (lost - F.logsigmoid(-y))
