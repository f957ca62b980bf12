"""Losses for reward models: of pairs of responses (outcome) and of single steps (process).

Elementwise in any shape. Masked places give loss 0 and gradient 0, whatever they hold (NaN included).
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rlkit._tensors import masked, readable
from rlkit.losses._inputs import check_at_least, prepared
from rlkit.losses._pairs import PairMask, Pairs


def bradley_terry(
    chosen_rewards: Pairs,
    rejected_rewards: Pairs,
    *,
    margin: float | Float[Tensor, "*pairs"] = 0.0,
    center_coef: float = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """The pairwise loss of a reward model, with an optional margin and a pull of the rewards towards 0.

        loss = -log sigmoid(r_c - r_r - margin) + center_coef (r_c + r_r)^2

    `margin` is one number or one per pair (how much better the chosen response was rated). `center_coef` fixes the
    offset that the pairwise term leaves free; TRL recommends 0.01.
    Limits: ln 2 at r_c = r_r = 0 without margin.
    Differs: nothing (TRL `center_rewards_coefficient`, OpenRLHF `PairWiseLoss`). To weight pairs by their margin
    instead, multiply the result.
    Reference: arXiv:2307.09288 (margin); arXiv:2312.09244, equation 2 (centring); TRL reward_trainer.py.
    """
    check_at_least(0, center_coef=center_coef)
    chosen, rejected = prepared(mask, chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    if isinstance(margin, Tensor):
        _, margin = prepared(mask, chosen_rewards=chosen, margin=margin.detach())
    return masked(-F.logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square(), mask)


def log_exp(chosen_rewards: Pairs, rejected_rewards: Pairs, *, mask: PairMask = None) -> Pairs:
    """The log-exp form of the pairwise loss.

        loss = log(1 + exp(r_r - r_c))

    The same number as `bradley_terry` without margin or centring.
    Differs: OpenRLHF `LogExpLoss` computes the exponential as written, which overflows for gaps above 88 in fp32.
    Reference: arXiv:2204.05862; OpenRLHF openrlhf/models/loss.py.
    """
    return bradley_terry(chosen_rewards, rejected_rewards, mask=mask)


def process_bce(logits: Pairs, labels: Pairs, *, mask: PairMask = None) -> Pairs:
    """Process reward model: binary cross-entropy of each step's logit with a hard or soft label.

        loss = -y log sigmoid(z) - (1 - y) log sigmoid(-z)

    z is the score at the last token of a step (mask: True there), y in [0, 1] says whether the step is right: 0 or 1,
    or the share of rollouts from it that reach the answer.
    Limits: y = 1/2 has its minimum ln 2 at z = 0.
    Reference: arXiv:2211.14275; arXiv:2312.08935 (soft labels).
    """
    z, y = prepared(mask, logits=logits, labels=labels.detach())
    if readable(y) and y.numel() and not (y.min() >= 0 and y.max() <= 1):
        raise ValueError(f"labels must lie in [0, 1], got {y.min().item()} to {y.max().item()}")
    return masked(-y * F.logsigmoid(z) - (1 - y) * F.logsigmoid(-z), mask)


def process_two_token(positive_logits: Pairs, negative_logits: Pairs, labels: Pairs, *, mask: PairMask = None) -> Pairs:
    """Process reward model that speaks through two tokens of the vocabulary, such as "+" and "-".

        loss = -y log p - (1 - y) log(1 - p)                p = softmax over the two tokens' logits

    The logits are those of the two tokens at a step's placeholder; no other token takes part.
    Limits: `process_bce` of the difference of the logits.
    Reference: OpenRLHF `PRMLoss` with `reward_token_ids`, up to 0.8.
    """
    positive, negative = prepared(mask, positive_logits=positive_logits, negative_logits=negative_logits)
    return process_bce(positive - negative, labels, mask=mask)
