"""Preference losses: DPO and related losses. docs/preference.md compares them and lists TRL's names.

Every function is `f(chosen_log_ratio, rejected_log_ratio, *, beta, ..., mask=None) -> one loss per pair`, elementwise
in any shape. A response's log-ratio is `logp - ref_logp`, summed over its tokens (`segments.sum_per_seq`) unless a
docstring says otherwise. Masked pairs have loss 0 and gradient 0, even if they hold NaN. The caller averages over
pairs. In this order:

Margin losses depend only on `delta = chosen_log_ratio - rejected_log_ratio`.

Anchored losses compare each response with an anchor, not only with the other response. Except for `apo_down` they are a
sum of one term per response, so they also apply to unpaired data: `kto_unpaired` and `sppo` take one response.

f-DPO replaces the reverse KL by another divergence. DPO's implicit reward under the penalty D_f(policy || reference) is
`beta f'(u)`, u = exp(log_ratio), plus a constant per prompt that cancels in the margin. A score function is f' as a
function of the log-ratio. Margin losses accept scores in place of log-ratios, e.g.
`dpo(js_score(chosen), js_score(rejected), beta=beta)`; anchored losses do not, because the constant does not cancel.

    | divergence       | f'(u), up to a constant        | here                               | TRL `f_divergence_type` |
    |------------------|--------------------------------|------------------------------------|-------------------------|
    | reverse KL       | log u                          | the log-ratio                      | `reverse_kl`            |
    | forward KL       | 1 - 1/u                        | `alpha_score`, alpha = 1           | `forward_kl`            |
    | Jensen-Shannon   | log(2u / (1 + u))              | `js_score`                         | `js_divergence`         |
    | alpha            | (1 - u^-alpha) / alpha         | `alpha_score`                      | `alpha_divergence`      |

Reference: arXiv:2309.16240.

Reference-free losses take log-probs of the responses instead of log-ratios; each docstring says whether they are summed
over tokens or averaged (`segments.mean_per_seq`). Several of these papers add the likelihood term `-chosen_logp`; the
caller adds it, with the mean over responses or over the tokens of the global batch (TRL).

`ld_log_ratio` (LD-DPO) and `wpo_weights` (WPO) are computed from tokens.

`aot` (alignment via optimal transport) compares sorted samples, not pairs. It couples the samples of a batch through
their current values, so micro-batch losses do not add up to the loss of the whole batch. Call it on the whole batch, or
accept that dominance is measured within each micro-batch.

The last losses use reward gaps, or responses sampled from the policy. Online DPO needs no function: sample two
responses per prompt, let a judge or reward model order them, and call `dpo`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import (
    MAX_LOG_RATIO,
    check_averaged,
    check_cu_seqlens,
    check_float,
    check_log_probs,
    check_mask,
    check_same_shape,
    masked,
    upcast,
)
from rlkit.losses._inputs import check_at_least, check_between, check_positive, check_probs, prepared
from rlkit.segments import broadcast_to_tokens, cumulative, mean_per_seq, sum_per_seq

__all__ = [
    "alpha_score",
    "aot",
    "apo_down",
    "bco_pair",
    "discopop",
    "dpo",
    "exo_pair",
    "hinge",
    "ipo",
    "js_score",
    "kto",
    "kto_reference_point",
    "kto_unpaired",
    "ld_log_ratio",
    "nash_md",
    "nca_pair",
    "orpo",
    "reward_aware_kl",
    "reward_aware_reverse_kl",
    "reward_aware_squared",
    "robust_dpo",
    "simpo",
    "sppo",
    "sppo_hard",
    "wpo_weights",
    "xpo",
]

Pairs = Float[Tensor, "*pairs"]
PairMask = Bool[Tensor, "*pairs"] | None


def smoothed_nll(x: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of the preference probability sigmoid(x) with a label that is wrong with probability e.

    -(1 - e) log sigmoid(x) - e log sigmoid(-x)
    """
    if label_smoothing == 0:
        return -F.logsigmoid(x)
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def dpo(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    margin: float | Pairs = 0.0,
    mask: PairMask = None,
) -> Pairs:
    """Direct preference optimisation, with `label_smoothing` its conservative form (cDPO), with a `margin` an offset.

        loss = -(1 - e) log sigmoid(x) - e log sigmoid(-x)          x = beta delta - margin, e = label_smoothing

    e in [0, 1/2] is the probability that a label is flipped. With e > 0 the optimal x is finite, log((1 - e) / e).
    `margin`, one number or one per pair, is how much larger beta delta should be than 0: how much better the chosen
    response was rated, in the units of the reward beta log_ratio. It is detached.
    Limits: e = 0 and margin 0 is DPO, ln 2 at delta = 0; e = 1/2 is symmetric in the two responses.
    Reference: arXiv:2305.18290, equation 7; cDPO: https://ericmitchell.ai/cdpo.pdf, equation 3; margin (ODPO):
    arXiv:2402.10571, equation 8.
    """
    check_between(0, 0.5, label_smoothing=label_smoothing)
    x = _scaled_margin(chosen_log_ratio, rejected_log_ratio, beta, mask)
    if not isinstance(margin, int | float):
        _, margin = prepared(mask, chosen_log_ratio=x, margin=margin.detach())
    return masked(smoothed_nll(x - margin, label_smoothing), mask)


def robust_dpo(
    chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, label_smoothing: float, mask: PairMask = None
) -> Pairs:
    """DPO corrected for labels that are flipped with probability e = `label_smoothing` in [0, 1/2).

        loss = ((1 - e) l(x) - e l(-x)) / (1 - 2e)          l(x) = -log sigmoid(x), x = beta delta

    The mean over random flips is DPO's loss on the clean label. For e > 0 it is unbounded below: -inf as delta grows.
    cDPO (`dpo` with `label_smoothing`) is biased but bounded below.
    Limits: e = 0 is `dpo`.
    Reference: arXiv:2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
    x = _scaled_margin(chosen_log_ratio, rejected_log_ratio, beta, mask)
    unflipped, flipped = -F.logsigmoid(x), -F.logsigmoid(-x)
    return masked(((1 - label_smoothing) * unflipped - label_smoothing * flipped) / (1 - 2 * label_smoothing), mask)


def ipo(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Identity preference optimisation: regress the margin on 1 / (2 beta), so that it stays bounded.

        loss = (delta - 1 / (2 beta))^2

    beta is the paper's tau. The caller chooses the length normalisation: log-ratios summed over tokens
    (`segments.sum_per_seq`; the paper, OpenRLHF, ROLL) or averaged (`segments.mean_per_seq`; TRL and AReaL, so that
    beta means the same for short and long responses).
    Reference: arXiv:2310.12036, equation 17.
    """
    check_positive(beta=beta)
    delta = _scaled_margin(chosen_log_ratio, rejected_log_ratio, 1.0, mask)
    return masked((delta - 1 / (2 * beta)).square(), mask)


def hinge(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Hinge on the scaled margin: no gradient once the pair is separated by 1 / beta.

        loss = max(0, 1 - beta delta)

    beta is the reciprocal of the margin. With plain log-probs instead of log-ratios it is SLiC's calibration loss.
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

    e = `label_smoothing` in (0, 1/2]; at 0 the KL is infinite. The loss is 0 where sigmoid(x) = 1 - e.
    `dpo` with the same e is the other direction, KL(p || q), up to the constant entropy of p.
    Reference: arXiv:2402.00856, equation 16 with K = 2; it recommends e = 1e-3.
    """
    if not 0 < label_smoothing <= 0.5:
        raise ValueError(f"label_smoothing must be in (0, 0.5], got {label_smoothing}")
    x = _scaled_margin(chosen_log_ratio, rejected_log_ratio, beta, mask)
    log_q, log_q_flipped = F.logsigmoid(x), F.logsigmoid(-x)
    log_p, log_p_flipped = math.log1p(-label_smoothing), math.log(label_smoothing)
    return masked(log_q.exp() * (log_q - log_p) + log_q_flipped.exp() * (log_q_flipped - log_p_flipped), mask)


def discopop(
    chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, tau: float = 0.05, mask: PairMask = None
) -> Pairs:
    """DiscoPOP, found by a language model (log-ratio modulated): logistic for lost pairs, exponential for won ones.

        loss = (1 - m) (-log sigmoid(x)) + m exp(-x)          m = sigmoid(x / tau), x = beta delta

    tau is in (0, 1], which bounds m exp(-x) for every x. Neither convex nor monotone: around x = 0 it has a bump of
    width tau, where a likelier chosen response raises the loss.
    Limits: tau -> 0 is the logistic loss for x < 0 and exp(-x) for x > 0; (ln 2 + 1) / 2 at x = 0 for every tau.
    Differs: TRL `discopop` overflows below x = -88 in fp32; here the product is formed in log space.
    Reference: arXiv:2406.08414, equation 5.
    """
    if not 0 < tau <= 1:
        raise ValueError(f"tau must be in (0, 1], got {tau}")
    x = _scaled_margin(chosen_log_ratio, rejected_log_ratio, beta, mask)
    logistic = torch.sigmoid(-x / tau) * -F.logsigmoid(x)
    exponential = (F.logsigmoid(x / tau) - x).exp()
    return masked(logistic + exponential, mask)


def _scaled_margin(chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """beta * (chosen - rejected) of checked, upcast tensors; 0 at masked pairs."""
    check_positive(beta=beta)
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    return beta * (chosen - rejected)


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
    """Kahneman-Tversky optimisation on pairs: the sum of the two `kto_unpaired` terms of each pair.

        loss = w_d (1 - sigmoid(beta (chosen_log_ratio - kl))) + w_u (1 - sigmoid(beta (kl - rejected_log_ratio)))

    `kl` is the reference point, see `kto_unpaired`.
    Limits: kl = 0 (the default) with unit weights is APO-zero (arXiv:2408.06266, equation 7).
    Differs: TRL `KTOTrainer` averages over the 2N responses, so its mean is half the mean of this loss.
    Reference: arXiv:2402.01306, equation 7.
    """
    check_float(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    check_same_shape(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    desirable = torch.ones_like(chosen_log_ratio, dtype=torch.bool)
    chosen = kto_unpaired(chosen_log_ratio, desirable, beta=beta, kl=kl, mask=mask, **weights)
    return chosen + kto_unpaired(rejected_log_ratio, ~desirable, beta=beta, kl=kl, mask=mask, **weights)


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
    """KTO for single responses with a label, desirable or not: one loss per response.

        loss = w_d (1 - sigmoid(beta (log_ratio - kl)))     where desirable
               w_u (1 - sigmoid(beta (kl - log_ratio)))     elsewhere

    `kl` is the reference point, one number for the whole batch of all ranks: `kto_reference_point` of mismatched
    responses, or 0. The mean log-ratio of the responses that train is no estimate of the KL: it moves with them. A `kl`
    is not clamped: the paper's is at least 0, and a negative one shifts log-ratios up. No gradient flows through it.
    For unbalanced data choose w_d n_d / (w_u n_u) in [1, 4/3] (n: number of responses); TRL warns outside this range.
    Reference: arXiv:2402.01306, equation 7 (with lambda_D, lambda_U as weights of the loss, as in both systems).
    """
    check_positive(beta=beta)
    check_at_least(0, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    check_same_shape(log_ratio=log_ratio, desirable=desirable)
    if desirable.dtype != torch.bool:
        raise TypeError(f"desirable must be bool (True = desirable), got {desirable.dtype}")
    (log_ratio,) = prepared(mask, log_ratio=log_ratio)
    gain = log_ratio - _one_number(kl=kl)
    loss = torch.where(
        desirable, desirable_weight * torch.sigmoid(-beta * gain), undesirable_weight * torch.sigmoid(beta * gain)
    )
    return masked(loss, mask)


def _one_number(**named: float | Tensor) -> float | Tensor:
    """The statistic of a whole batch, detached; ValueError, with its name, for one number per response."""
    ((name, x),) = named.items()
    if isinstance(x, Tensor) and x.ndim:
        raise ValueError(f"{name} must be one number for the whole batch, got shape {list(x.shape)}")
    return x.detach() if isinstance(x, Tensor) else x


def kto_reference_point(log_ratio: Pairs, *, mask: PairMask = None) -> Float[Tensor, ""]:
    """KTO's estimate of KL(policy || reference): the mean log-ratio of mismatched responses, at least 0, detached.

        max(0, mean(log_ratio))          0 without responses

    `log_ratio` is of prompts paired with the responses of *other* prompts (e.g. rolled by one within the batch). It is
    a statistic of the whole batch: compute it once, over all ranks, before the batch is split.
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
    Reference: arXiv:2404.04656.
    """
    check_positive(beta=beta)
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    shift = _one_number(delta=delta)
    return masked(-F.logsigmoid(beta * chosen - shift) - F.logsigmoid(shift - beta * rejected), mask)


def nca_pair(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Noise-contrastive alignment on pairs: absolute rewards, so that the chosen likelihood does not decrease.

        loss = -log sigmoid(c) - 1/2 log sigmoid(-c) - 1/2 log sigmoid(-r)
        c = beta chosen_log_ratio, r = beta rejected_log_ratio

    The chosen terms have their minimum at c = ln 2.
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
    samples; no gradient flows through it. 1 / beta is the paper's eta.
    Reference: arXiv:2405.00675, equation 4.7.
    """
    check_positive(beta=beta)
    log_ratio, win_prob = prepared(mask, log_ratio=log_ratio, win_prob=win_prob.detach())
    check_probs(win_prob=win_prob)
    return masked((log_ratio - (win_prob - 0.5) / beta).square(), mask)


def sppo_hard(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """`sppo` on a pair with hard labels: win probability 1 for the chosen response, 0 for the rejected one.

        loss = (chosen_log_ratio - 1 / (2 beta))^2 + (rejected_log_ratio + 1 / (2 beta))^2

    Reference: arXiv:2405.00675, equation 4.7 with P in {0, 1}.
    """
    check_float(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    check_same_shape(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    won = sppo(chosen_log_ratio, torch.ones_like(chosen_log_ratio), beta=beta, mask=mask)
    return won + sppo(rejected_log_ratio, torch.zeros_like(rejected_log_ratio), beta=beta, mask=mask)


def apo_down(chosen_log_ratio: Pairs, rejected_log_ratio: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Anchored preference optimisation, down: decrease the likelihood of both responses, of the rejected one more.

        loss = sigmoid(beta chosen_log_ratio) + 1 - sigmoid(beta (chosen_log_ratio - rejected_log_ratio))

    For chosen responses that are worse than the policy's own. Once the margin is large, the chosen log-ratio is pushed
    down, so the loss may rise as the chosen response becomes likelier.
    Reference: arXiv:2408.06266, equation 8.
    """
    check_positive(beta=beta)
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    return masked(torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected)), mask)


def js_score(log_ratio: Pairs, *, mask: PairMask = None) -> Pairs:
    """f' of the Jensen-Shannon divergence.

        log(2u / (1 + u)) = ln 2 + log sigmoid(log_ratio)          u = exp(log_ratio)

    Bounded above by ln 2; for log-ratios far below 0 it tends to the log-ratio plus ln 2.
    Reference: arXiv:2309.16240; TRL dpo_trainer.py.
    """
    (log_ratio,) = prepared(mask, log_ratio=log_ratio)
    return math.log(2) + F.logsigmoid(log_ratio)


def alpha_score(log_ratio: Pairs, *, alpha: float, mask: PairMask = None) -> Pairs:
    """f' of the alpha divergence, in the paper's parametrisation; alpha = 1 is the forward KL, 1 - exp(-log_ratio).

        (1 - exp(-alpha log_ratio)) / alpha

    Where -alpha log_ratio exceeds 20 the exponential is capped at e^20, without gradient. Of averaged log-probs this is
    AlphaPO's reward (arXiv:2501.03884).
    Limits: alpha -> 0 is the log-ratio (reverse KL; at alpha = 0 exactly).
    Differs: TRL's `f_alpha_divergence_coef` a has (u^(a-1) - 1) / (a - 1), so alpha here = 1 - a there.
    Reference: arXiv:2309.16240; TRL dpo_trainer.py.
    """
    (log_ratio,) = prepared(mask, log_ratio=log_ratio)
    if alpha == 0:
        return log_ratio
    return -torch.expm1((-alpha * log_ratio).clamp(max=MAX_LOG_RATIO)) / alpha


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

    `gamma` is the margin in units of the reward, i.e. after beta. A typical beta is 2.
    Limits: gamma = 0 is `dpo` of the averaged log-probs.
    Reference: arXiv:2405.14734; TRL experimental/cpo, `cpo_loss`.
    """
    check_positive(beta=beta)
    check_between(0, 0.5, label_smoothing=label_smoothing)
    chosen, rejected = prepared(mask, chosen_logp=chosen_logp, rejected_logp=rejected_logp)
    check_averaged(chosen_logp=chosen, rejected_logp=rejected)
    return masked(smoothed_nll(beta * (chosen - rejected) - gamma, label_smoothing), mask)


def orpo(chosen_logp: Pairs, rejected_logp: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """The odds-ratio term of ORPO; log-probs are *averaged* over tokens.

        loss = -beta log sigmoid(log odds(chosen) - log odds(rejected))          odds = p / (1 - p), p = exp(logp)

    beta is the paper's lambda (0.1). The whole ORPO objective is `orpo(...) - chosen_logp`. 1 - p is clamped to at
    least machine epsilon, so that a response of probability 1 (logp = 0) gives a finite loss.
    Errors: ValueError for a log-prob above 0.01 on the CPU, e.g. a log-ratio to a reference model.
    Reference: arXiv:2403.07691, equations 4 and 7; TRL experimental/orpo, `odds_ratio_loss`.
    """
    check_positive(beta=beta)
    chosen, rejected = prepared(mask, chosen_logp=chosen_logp, rejected_logp=rejected_logp)
    check_log_probs(chosen_logp=chosen, rejected_logp=rejected)
    check_averaged(chosen_logp=chosen, rejected_logp=rejected)
    return masked(-beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected)), mask)


def _log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logp), with 1 - p not below machine epsilon."""
    return logp - torch.log(-torch.expm1(logp.clamp(max=-torch.finfo(logp.dtype).eps)))


def ld_log_ratio(
    log_ratio: Float[Tensor, "T"],
    *,
    shared_lens: Int[Tensor, "N"],
    ld_alpha: float,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
) -> Float[Tensor, "N"]:
    """Length-desensitised log-ratio of each response: tokens beyond the pair's shared length have weight `ld_alpha`.

        sum_{i <= shared_len} log_ratio_i + ld_alpha sum_{i > shared_len} log_ratio_i          i counts action tokens

    `shared_lens[n]` is the shorter of the pair's two lengths in action tokens (`segments.seq_count` of both, then
    `torch.minimum`), the same for the chosen and the rejected sequence. Pass the result to `dpo` or any margin loss.
    Limits: ld_alpha = 1 is `segments.sum_per_seq`; ld_alpha = 0 truncates both responses to the shared length.
    Reference: arXiv:2409.06411; TRL dpo_trainer.py.
    """
    check_float(log_ratio=log_ratio)
    check_mask(mask, log_ratio=log_ratio)
    check_cu_seqlens(cu_seqlens, log_ratio=log_ratio)
    check_between(0, 1, ld_alpha=ld_alpha)
    if shared_lens.shape != (cu_seqlens.numel() - 1,):
        raise ValueError(f"shared_lens must have shape [{cu_seqlens.numel() - 1}], got {list(shared_lens.shape)}")
    count = cumulative(mask.long())
    last_shared = count[cu_seqlens[:-1]] + shared_lens
    tail = count[1:] > broadcast_to_tokens(last_shared, cu_seqlens=cu_seqlens, num_tokens=log_ratio.shape[0])
    x = masked(upcast(log_ratio), mask)
    return sum_per_seq(torch.where(tail, ld_alpha * x, x), cu_seqlens=cu_seqlens)


def wpo_weights(
    logp: Float[Tensor, "T"],
    log_collision: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
) -> Float[Tensor, "N"]:
    """Weighted preference optimisation: a weight for how on-policy a response is. Detached.

        w = exp(mean_t (logp_t - log sum_v p_t(v)^2))          mean over action tokens

    `log_collision` is log sum_v p(v)^2 of each token's distribution, `logsumexp(2 log_probs)`. It is the log of the
    expected probability of a sample, so on-policy text has weights near 1 at any entropy. A pair's weight is the
    product `w[chosen] * w[rejected]`, a factor of its loss. A response without tokens has weight 1.
    Differs: TRL `use_weighting` caps the product at 1.
    Reference: arXiv:2406.11827, equation 2; TRL dpo_trainer.py.
    """
    check_float(logp=logp, log_collision=log_collision)
    check_same_shape(logp=logp, log_collision=log_collision)
    check_mask(mask, logp=logp)
    check_cu_seqlens(cu_seqlens, logp=logp)
    aligned = masked(upcast(logp), mask) - masked(upcast(log_collision), mask)
    return mean_per_seq(aligned.detach(), cu_seqlens=cu_seqlens, mask=mask).exp()


def aot(
    chosen_log_ratio: Float[Tensor, "N"],
    rejected_log_ratio: Float[Tensor, "N"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
    mask: Bool[Tensor, "N"] | None = None,
) -> Float[Tensor, "N"]:
    """Unpaired AOT: the distribution of chosen rewards should dominate that of rejected ones. One loss per *rank*.

        loss_i = -(1 - e) log sigmoid(beta d_i) - e log sigmoid(-beta d_i)          d = sort(chosen) - sort(rejected)

    Entry i belongs to the i-th smallest chosen and the i-th smallest rejected log-ratio, not to pair i, so the loss
    must not be weighted per pair. With a mask, the unmasked responses are ranked and fill the first entries; the rest
    is 0. The gradient flows through the sorted values, not the order.
    Limits: one pair is `dpo`; invariant to permuting either side.
    Differs: this is TRL's `aot_unpaired`; for TRL's `aot`, pass the margins logp(chosen) - logp(rejected) of the policy
    and of the reference model, summed over tokens.
    Reference: arXiv:2406.05882; TRL dpo_trainer.py.
    """
    check_positive(beta=beta)
    check_between(0, 0.5, label_smoothing=label_smoothing)
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    if chosen.ndim != 1:
        raise ValueError(f"chosen_log_ratio and rejected_log_ratio must have shape [N], got {list(chosen.shape)}")
    valid = None if mask is None else torch.arange(chosen.numel(), device=chosen.device) < mask.sum()
    # NaN sorts last. Masked entries become NaN too, so a trainable NaN is still among the first mask.sum() entries.
    chosen, rejected = (masked(masked(x, mask, float("nan")).sort().values, valid) for x in (chosen, rejected))
    return masked(smoothed_nll(beta * (chosen - rejected), label_smoothing), valid)


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
    the *policy's* log-prob of the latter, chosen or not. Lowering it makes the policy explore. The term is linear and
    unbounded below, so alpha is tiny (1e-5).
    Limits: alpha = 0 is `dpo`.
    Reference: arXiv:2405.21046, algorithm 1.
    """
    check_at_least(0, alpha=alpha)
    check_same_shape(chosen_log_ratio=chosen_log_ratio, reference_sample_logp=reference_sample_logp)
    (sample_logp,) = prepared(mask, reference_sample_logp=reference_sample_logp)
    return dpo(chosen_log_ratio, rejected_log_ratio, beta=beta, mask=mask) + alpha * sample_logp


def nash_md(logp: Pairs, ref_logp: Pairs, win_prob: Pairs, *, beta: float, mask: PairMask = None) -> Pairs:
    """Nash mirror descent by policy gradient, one loss per sampled response.

        loss = -logp sg(win_prob - 1/2 - beta (logp - ref_logp))          sg: no gradient

    `logp` and `ref_logp` are of a response sampled from the policy; `win_prob` is the probability that it beats a
    response sampled from the geometric mixture of policy and reference. 1/2 is the control variate. The gradient is the
    exact policy gradient of win_prob - beta KL(policy || reference) over sequences.
    Reference: arXiv:2312.00886.
    """
    check_at_least(0, beta=beta)
    logp, ref_logp, win_prob = prepared(mask, logp=logp, ref_logp=ref_logp, win_prob=win_prob)
    check_probs(win_prob=win_prob)
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
    """Reward-aware preference optimisation, squared distance: match the implicit reward gap to the given one.

        loss = (beta delta - reward_scale reward_gap)^2          reward_gap = reward(chosen) - reward(rejected)

    No gradient flows through `reward_gap`, which may be negative.
    Reference: arXiv:2406.11704 (RPO); NeMo-Aligner megatron_gpt_dpo_model.py.
    """
    implicit, target = _gaps(chosen_log_ratio, rejected_log_ratio, reward_gap, beta, reward_scale, mask)
    return masked((implicit - target).square(), mask)


def reward_aware_kl(
    chosen_log_ratio: Pairs,
    rejected_log_ratio: Pairs,
    reward_gap: Pairs,
    *,
    beta: float,
    reward_scale: float = 1.0,
    mask: PairMask = None,
) -> Pairs:
    """Reward-aware preference optimisation, KL(given || model) of the two preferences.

        loss = KL(p || q)          p = sigmoid(reward_scale reward_gap), q = sigmoid(beta delta), as Bernoullis

    Limits: reward_scale -> inf with a positive gap is `dpo`; p = 1 - e is cDPO less the label's entropy.
    Reference: arXiv:2406.11704 (RPO); NeMo-Aligner megatron_gpt_dpo_model.py.
    """
    implicit, target = _gaps(chosen_log_ratio, rejected_log_ratio, reward_gap, beta, reward_scale, mask)
    return masked(_bernoulli_kl(target, implicit), mask)


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
    Reference: arXiv:2406.11704 (RPO); NeMo-Aligner megatron_gpt_dpo_model.py.
    """
    implicit, target = _gaps(chosen_log_ratio, rejected_log_ratio, reward_gap, beta, reward_scale, mask)
    return masked(_bernoulli_kl(implicit, target), mask)


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
