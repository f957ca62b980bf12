"""Preference losses that hold each response to an anchor, not only to the other response.

The functions on pairs have the form of `rlkit.losses.preference`: log-ratios `logp - ref_logp` summed over completion
tokens, one loss per pair, masked pairs give 0. Each is a sum of a term of the chosen and a term of the rejected
response, so (`apo_down` apart) they also serve data that comes unpaired: `kto_unpaired` and `sppo` take one response.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._tensors import check_float, check_same_shape, masked
from rlkit.losses._inputs import check_at_least, check_positive, prepared
from rlkit.losses._pairs import PairMask, Pairs


def kto(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    *,
    beta: float,
    kl: float | Float[Tensor, ""] = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    mask: PairMask = None,
) -> Pairs:
    """Kahneman-Tversky optimisation on pairs: the two `kto_unpaired` terms of each pair, added.

        loss = w_d (1 - sigmoid(beta (chosen_log_ratio - kl))) + w_u (1 - sigmoid(beta (kl - rejected_log_ratio)))

    `kl` is the reference point, a detached number of the whole batch (`kto_reference_point`).
    Limits: kl = 0 (the default) with unit weights is `apo_zero`.
    Differs: TRL `KTOTrainer` averages over the 2N responses, so its mean is half the mean of this.
    Reference: arXiv:2402.01306, equation 7.
    """
    check_float(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    check_same_shape(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    return kto_unpaired(
        chosen_log_ratio,
        torch.ones_like(chosen_log_ratio, dtype=torch.bool),
        beta=beta,
        kl=kl,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        mask=mask,
    ) + kto_unpaired(
        rejected_log_ratio,
        torch.zeros_like(rejected_log_ratio, dtype=torch.bool),
        beta=beta,
        kl=kl,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        mask=mask,
    )


def kto_unpaired(
    log_ratio: Pairs,
    desirable: Bool[Tensor, "*pairs"],
    *,
    beta: float,
    kl: float | Float[Tensor, ""] = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    mask: PairMask = None,
) -> Pairs:
    """KTO for single responses, each labelled desirable or not: one loss per response.

        loss = w_d (1 - sigmoid(beta (log_ratio - kl)))     where desirable
               w_u (1 - sigmoid(beta (kl - log_ratio)))     elsewhere

    No gradient flows through `kl`. For unbalanced data choose w_d n_d / (w_u n_u) between 1 and 4/3 (n: number of
    responses), the range outside which TRL warns.
    Differs: TRL `KTOTrainer` splits the batch by label; here the label is a tensor.
    Reference: arXiv:2402.01306, equation 7 (with lambda_D, lambda_U as weights of the loss, as in both systems).
    """
    check_positive(beta=beta)
    check_at_least(0, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    check_same_shape(log_ratio=log_ratio, desirable=desirable)
    if desirable.dtype != torch.bool:
        raise TypeError(f"desirable must be bool (True = desirable), got {desirable.dtype}")
    (log_ratio,) = prepared(mask, log_ratio=log_ratio)
    gain = log_ratio - (kl.detach() if isinstance(kl, Tensor) else kl)
    loss = torch.where(
        desirable, desirable_weight * torch.sigmoid(-beta * gain), undesirable_weight * torch.sigmoid(beta * gain)
    )
    return masked(loss, mask)


def kto_reference_point(log_ratio: Pairs, *, mask: PairMask = None) -> Float[Tensor, ""]:
    """KTO's estimate of KL(policy || reference): the mean log-ratio of mismatched responses, not below 0, detached.

        max(0, mean(log_ratio))

    `log_ratio` is of prompts paired with *other* prompts' responses (e.g. rolled by one within the batch). It is a
    statistic of the whole batch: compute it once, over all ranks, before the batch is split. No response at all: 0.
    Differs: nothing (TRL gathers over ranks).
    Reference: arXiv:2402.01306; TRL kto_trainer.py.
    """
    (log_ratio,) = prepared(mask, log_ratio=log_ratio.detach())
    count = log_ratio.numel() if mask is None else mask.sum()
    return (log_ratio.sum() / torch.as_tensor(count, device=log_ratio.device).clamp(min=1)).clamp(min=0)


def bco_pair(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    *,
    beta: float,
    delta: float | Float[Tensor, ""] = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """Binary classifier optimisation: the log-ratio is the logit of "this response was chosen".

        loss = -log sigmoid(beta chosen_log_ratio - delta) - log sigmoid(delta - beta rejected_log_ratio)

    `delta` is the paper's reward shift, the running mean of all rewards beta * log_ratio; no gradient flows through it.
    Differs: TRL `bco_pair` has delta = 0, the default here.
    Reference: arXiv:2404.04656.
    """
    check_positive(beta=beta)
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    shift = delta.detach() if isinstance(delta, Tensor) else delta
    return masked(-F.logsigmoid(beta * chosen - shift) - F.logsigmoid(shift - beta * rejected), mask)


def nca_pair(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Noise-contrastive alignment on pairs: absolute rewards, so that the chosen likelihood does not sink.

        loss = -log sigmoid(c) - 1/2 log sigmoid(-c) - 1/2 log sigmoid(-r)
        c = beta chosen_log_ratio, r = beta rejected_log_ratio

    The chosen term has its minimum at c = ln 2, where pushing further costs.
    Differs: nothing (TRL `nca_pair`).
    Reference: arXiv:2402.05369 (NCA with two responses); TRL dpo_trainer.py.
    """
    check_positive(beta=beta)
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    chosen, rejected = beta * chosen, beta * rejected
    return masked(-F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected), mask)


def sppo(log_ratio: Pairs, win_prob: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Self-play preference optimisation for single responses: regress the log-ratio on the centred win probability.

        loss = (log_ratio - (win_prob - 1/2) / beta)^2

    `win_prob` in [0, 1] is P(this response beats the policy's own), from a preference model or as an average over
    samples; 1 / beta is the paper's eta. No gradient flows through it.
    Differs: TRL has the hard form only (`sppo_hard`).
    Reference: arXiv:2405.00675, equation 4.7.
    """
    check_positive(beta=beta)
    log_ratio, win_prob = prepared(mask, log_ratio=log_ratio, win_prob=win_prob.detach())
    return masked((log_ratio - (win_prob - 0.5) / beta).square(), mask)


def sppo_hard(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """`sppo` on a pair with hard labels: win probability 1 for the chosen response, 0 for the rejected one.

        loss = (chosen_log_ratio - 1 / (2 beta))^2 + (rejected_log_ratio + 1 / (2 beta))^2

    Differs: nothing (TRL `sppo_hard`).
    Reference: arXiv:2405.00675, equation 4.7 with P in {0, 1}.
    """
    check_float(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    check_same_shape(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    won = sppo(chosen_log_ratio, torch.ones_like(chosen_log_ratio), beta=beta, mask=mask)
    return won + sppo(rejected_log_ratio, torch.zeros_like(rejected_log_ratio), beta=beta, mask=mask)


def apo_zero(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Anchored preference optimisation, zero: raise the chosen response, lower the rejected one, each by itself.

        loss = 1 - sigmoid(beta chosen_log_ratio) + sigmoid(beta rejected_log_ratio)

    For chosen responses that are better than what the policy writes. Unpaired: `kto_unpaired` with kl = 0.
    Differs: nothing (TRL `apo_zero`; its KTO trainer's `apo_zero_unpaired` is the unpaired form).
    Reference: arXiv:2408.06266, equation 7.
    """
    return kto(chosen_log_ratio, rejected_log_ratio, beta=beta, mask=mask)


def apo_down(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Anchored preference optimisation, down: lower both responses, the rejected one more.

        loss = sigmoid(beta chosen_log_ratio) + 1 - sigmoid(beta (chosen_log_ratio - rejected_log_ratio))

    For chosen responses that are worse than what the policy writes; the chosen log-ratio is pulled down where the
    margin is already there, so this is the one loss on pairs that need not fall as the chosen response gains.
    Differs: nothing (TRL `apo_down`).
    Reference: arXiv:2408.06266, equation 8.
    """
    check_positive(beta=beta)
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    return masked(torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected)), mask)
