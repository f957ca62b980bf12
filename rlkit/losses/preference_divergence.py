"""f-DPO: preference losses under other divergences than the reverse KL.

DPO's implicit reward under the penalty D_f(policy || reference) is `beta f'(u)`, u = exp(log_ratio) (plus a constant of
the prompt, which cancels in the margin). A score function here is f' as a function of the log-ratio; with the reverse
KL it is the log-ratio itself. Any loss of the margin takes scores in place of log-ratios, e.g.
`ipo(js_score(chosen), js_score(rejected), beta=beta)`; the losses that hold a response to an anchor do not, since the
constant does not cancel there.

    | divergence       | f'(u), up to a constant        | here                               | TRL `f_divergence_type` |
    |------------------|--------------------------------|------------------------------------|-------------------------|
    | reverse KL       | log u                          | the log-ratio                      | `reverse_kl`            |
    | forward KL       | 1 - 1/u                        | `forward_kl_score`                 | `forward_kl`            |
    | Jensen-Shannon   | log(2u / (1 + u))              | `js_score`                         | `js_divergence`         |
    | alpha            | (1 - u^-alpha) / alpha         | `alpha_score`                      | `alpha_divergence`      |

Reference: arXiv:2309.16240.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from rlkit._tensors import MAX_LOG_RATIO, check_float, upcast
from rlkit.losses._inputs import prepared
from rlkit.losses._pairs import PairMask, Pairs
from rlkit.losses.preference import dpo


def forward_kl_score(log_ratio: Pairs) -> Pairs:
    """f' of the forward KL, KL(reference || policy).

        1 - exp(-log_ratio)

    Bounded above by 1; below log_ratio -20 held at 1 - e^20, without gradient. It is `alpha_score` with alpha = 1.
    Differs: TRL does not bound it (it overflows in fp32 below log_ratio -88).
    Reference: arXiv:2309.16240; TRL dpo_trainer.py.
    """
    return alpha_score(log_ratio, alpha=1.0)


def js_score(log_ratio: Pairs) -> Pairs:
    """f' of the Jensen-Shannon divergence.

        log(2u / (1 + u)) = ln 2 + log sigmoid(log_ratio)          u = exp(log_ratio)

    Bounded above by ln 2, and the log-ratio plus ln 2 far below 0.
    Differs: nothing.
    Reference: arXiv:2309.16240; TRL dpo_trainer.py.
    """
    check_float(log_ratio=log_ratio)
    return math.log(2) + F.logsigmoid(upcast(log_ratio))


def alpha_score(log_ratio: Pairs, *, alpha: float) -> Pairs:
    """f' of the alpha divergence, in the paper's parametrisation.

        (1 - exp(-alpha log_ratio)) / alpha

    Limits: alpha -> 0 is the log-ratio (reverse KL; at alpha = 0 exactly), alpha = 1 is the forward KL.
    Where -alpha log_ratio exceeds 20 the exponential is held at e^20, without gradient.
    Differs: TRL's `f_alpha_divergence_coef` a has (u^(a-1) - 1) / (a - 1), so alpha here = 1 - a there (both 0.5 by
    its default); it bounds the exponent at 80 in fp32.
    Reference: arXiv:2309.16240; TRL dpo_trainer.py.
    """
    check_float(log_ratio=log_ratio)
    log_ratio = upcast(log_ratio)
    if alpha == 0:
        return log_ratio
    return -torch.expm1((-alpha * log_ratio).clamp(max=MAX_LOG_RATIO)) / alpha


def dpo_forward_kl(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """DPO under the forward KL: `dpo` of `forward_kl_score`.

        loss = -log sigmoid(beta (1/u_rejected - 1/u_chosen))          u = exp(log_ratio)

    Differs: TRL `f_divergence_type="forward_kl"`; see `forward_kl_score` for the bound.
    Reference: arXiv:2309.16240.
    """
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    scores = forward_kl_score(chosen), forward_kl_score(rejected)
    return dpo(*scores, beta=beta, label_smoothing=label_smoothing, mask=mask)


def dpo_js(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """DPO under the Jensen-Shannon divergence: `dpo` of `js_score`.

        loss = -log sigmoid(beta (log sigmoid(chosen_log_ratio) - log sigmoid(rejected_log_ratio)))

    Differs: nothing (TRL `f_divergence_type="js_divergence"`).
    Reference: arXiv:2309.16240.
    """
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    return dpo(js_score(chosen), js_score(rejected), beta=beta, label_smoothing=label_smoothing, mask=mask)


def dpo_alpha(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    *,
    beta: float,
    alpha: float,
    label_smoothing: float = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """DPO under the alpha divergence: `dpo` of `alpha_score`.

        loss = -log sigmoid(beta (u_rejected^-alpha - u_chosen^-alpha) / alpha)          u = exp(log_ratio)

    Limits: alpha = 0 is `dpo`, alpha = 1 is `dpo_forward_kl`.
    Differs: TRL `f_divergence_type="alpha_divergence"`; see `alpha_score` for its other parametrisation.
    Reference: arXiv:2309.16240.
    """
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    scores = alpha_score(chosen, alpha=alpha), alpha_score(rejected, alpha=alpha)
    return dpo(*scores, beta=beta, label_smoothing=label_smoothing, mask=mask)
