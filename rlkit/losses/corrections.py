"""Importance weights and rejection masks for samples of another engine or an older policy.

The importance weights take `log_ratio = old_logp - rollout_logp` (training engine over sampling engine, both at the
weights that sampled); all functions return detached weights, 0 where the mask is False. They multiply the *policy* term
of the loss, never KL or entropy. Multiplied into `token_mean(...)`, they keep the token count before rejection as the
denominator; to count only kept tokens, give `token_mean` the mask `weights > 0`.

The functions are elementwise; the log-ratio sets the level: per token, per sequence (`seq_log_ratio_sum`: exact, high
variance) or the geometric mean over a sequence (`seq_log_ratio`: biased, low variance).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import (
    bounded_exp,
    carry_nan,
    check_cu_seqlens,
    check_float,
    check_mask,
    cumsum,
    masked,
    readable,
    traced,
    upcast,
)
from rlkit.losses._inputs import check_alone, check_at_least, check_between, check_cap, check_one_number, prepared
from rlkit.losses.ratios import seq_log_ratio
from rlkit.segments import broadcast_to_tokens, sum_per_seq
from rlkit.types import Mask, Tokens

FIRST_RANKED = 128  # of the most likely tokens, in `kept_support`: eight times as many where they are too few

__all__ = [
    "batch_normalized",
    "clipped_is",
    "effective_sample_size",
    "icepop",
    "keep_divergence",
    "keep_ratio",
    "keep_whole_sequences",
    "log_kept_mass",
    "log_support_mass",
    "opsm",
    "seq_mask_tis",
    "tis",
    "veto",
]


def tis(log_ratio: Tokens, *, max_weight: float, mask: Mask = None) -> Tokens:
    """Truncated importance sampling: the capped ratio.

        w = min(exp(log_ratio), max_weight)            detached

    Limits: max_weight = inf is plain importance sampling (unbiased, heavy tails). The usual cap is 2.
    Differs: RL2 `tis_coef` uses the *current* log-probs over the rollout's.
    Reference: https://fengyao.notion.site/off-policy-rl, verl PR#2953.
    """
    check_cap(max_weight)
    return clipped_is(log_ratio, low=0.0, high=max_weight, mask=mask)


def clipped_is(log_ratio: Tokens, *, low: float, high: float, mask: Mask = None) -> Tokens:
    """Importance weights clipped to an interval.

        w = clip(exp(log_ratio), low, high)            detached

    Limits: low = 0 is `tis`.
    Reference: slime examples/train_infer_mismatch_helper/mis.py.
    """
    check_at_least(0, low=low)
    check_at_least(low, high=high)
    (log_ratio,) = prepared(mask, log_ratio=log_ratio.detach())
    return masked(bounded_exp(log_ratio).clamp(low, high), mask)


def icepop(log_ratio: Tokens, *, low: float = 0.5, high: float = 5.0, mask: Mask = None) -> Tokens:
    """Importance weights, with rejection of tokens on which the two engines disagree too much.

        w = r where low <= r <= high, else 0           r = exp(log_ratio), detached

    Reference: https://ringtech.notion.site/icepop, arXiv:2510.18855.
    """
    weight = clipped_is(log_ratio, low=0.0, high=float("inf"), mask=mask)
    return weight * keep_ratio(log_ratio, low=low, high=high, mask=mask)


def keep_ratio(log_ratio: Tokens, *, low: float, high: float, mask: Mask = None) -> Tokens:
    """Rejection by ratio: 1 where low <= exp(log_ratio) <= high, else 0; NaN where log_ratio is NaN. Detached.

    With `seq_log_ratio` it keeps or drops whole sequences by their geometric mean, with `seq_log_ratio_sum` by their
    exact ratio.
    Errors: ValueError unless 0 <= low <= 1 <= high: bounds of the log-ratio would drop every token.
    Differs: verl `token_k1`, `seq_mean_k1`, `seq_sum_k1` bound 1 / r instead of r.
    Reference: verl trainer/ppo/rollout_corr_helper.py.
    """
    if not 0 <= low <= 1 <= high:
        logs = f": for bounds of the log-ratio give low=exp({low:g}), high=exp({high:g})" * (low < 0)
        raise ValueError(f"low and high bound the ratio, 0 <= low <= 1 <= high, got low={low:g}, high={high:g}{logs}")
    (log_ratio,) = prepared(mask, log_ratio=log_ratio.detach())
    ratio = bounded_exp(log_ratio)
    return masked(carry_nan(((ratio >= low) & (ratio <= high)).to(ratio.dtype), ratio), mask)


def keep_divergence(divergence: Tokens, *, max_divergence: float, mask: Mask = None) -> Tokens:
    """Rejection by divergence: 1 where it is at most `max_divergence`, else 0; NaN where it is NaN. Detached.

    `divergence` is any non-negative estimate: `k2` or `k3(rollout_logp, old_logp)` per token, or its sum, mean or
    maximum over a sequence (`rlkit.segments`), broadcast to tokens.
    Reference: verl trainer/ppo/rollout_corr_helper.py.
    """
    check_at_least(0, max_divergence=max_divergence)
    (divergence,) = prepared(mask, divergence=divergence.detach())
    return masked(carry_nan((divergence <= max_divergence).to(divergence.dtype), divergence), mask)


def keep_whole_sequences(
    keep: Float[Tensor, "T"], *, mask: Bool[Tensor, "T"] | None, cu_seqlens: Int[Tensor, "N1"]
) -> Float[Tensor, "T"]:
    """Reject whole sequences: 0 on all tokens of a sequence in which any trainable token is 0.

    verl `seq_max_k2` and AReaL `agg=max` are `keep_divergence` followed by this.
    """
    (keep,) = prepared(mask, keep=keep.detach())
    check_cu_seqlens(cu_seqlens, keep=keep)
    rejected = sum_per_seq(carry_nan((keep == 0).to(keep.dtype), keep), cu_seqlens=cu_seqlens, mask=mask)
    whole = carry_nan((rejected == 0).to(keep.dtype), rejected)
    weights = broadcast_to_tokens(whole, cu_seqlens=cu_seqlens, num_tokens=keep.shape[0])
    return masked(weights, mask)


def veto(
    log_ratio: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"] | None,
    cu_seqlens: Int[Tensor, "N1"],
    min_ratio: float = 1e-4,
) -> Float[Tensor, "T"]:
    """Reject a whole sequence if one of its tokens is nearly impossible under the training engine.

        w = 0 on a sequence with any r < min_ratio, else 1

    Reference: slime examples/train_infer_mismatch_helper/mis.py, `calculate_veto_mask`.
    """
    check_cu_seqlens(cu_seqlens, log_ratio=log_ratio)
    keep = keep_ratio(log_ratio, low=min_ratio, high=float("inf"), mask=mask)
    return keep_whole_sequences(keep, mask=mask, cu_seqlens=cu_seqlens)


def seq_mask_tis(
    log_ratio: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"] | None,
    cu_seqlens: Int[Tensor, "N1"],
    low: float = 0.999,
    high: float = 1.002,
    max_weight: float = float("inf"),
) -> Float[Tensor, "T"]:
    """Token importance weights on sequences whose geometric-mean ratio is inside the interval, 0 on the others.

        w_t = min(r_t, max_weight) 1[low <= exp(mean log r) <= high]

    Reference: https://yingru.notion.site/When-Speed-Kills-Stability, NeMo-RL docs/guides/grpo.md.
    """
    geometric = seq_log_ratio(log_ratio.detach(), mask=mask, cu_seqlens=cu_seqlens)
    keep = keep_ratio(geometric, low=low, high=high, mask=mask)
    return keep * tis(log_ratio, max_weight=max_weight, mask=mask)


def opsm(
    log_ratio: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"] | None,
    cu_seqlens: Int[Tensor, "N1"],
    delta: float = 1e-4,
) -> Float[Tensor, "T"]:
    """Off-policy sequence masking: no further push down on bad samples that the policy has already moved away from.

        w_t = 0 where A_t < 0 and mean(-log_ratio) > delta over t's sequence, else 1

    `log_ratio` is the *current* logp minus rollout_logp, so it includes both staleness and engine mismatch.
    Reference: DeepSeek-V3.2, arXiv:2512.02556; TRL `get_off_policy_mask`.
    """
    check_at_least(0, delta=delta)
    drift = -seq_log_ratio(log_ratio.detach(), mask=mask, cu_seqlens=cu_seqlens)
    drift, advantages = prepared(mask, drift=drift, advantages=advantages.detach())
    weights = (~((advantages < 0) & (drift > delta))).to(drift.dtype)
    return masked(carry_nan(weights, advantages, drift), mask)


def batch_normalized(weights: Tokens, *, mask: Mask = None, mean: Float[Tensor, ""] | float | None = None) -> Tokens:
    """Weights divided by their mean over the trainable tokens, so that a correction does not change the step size.

        w / mean(w)                                    0 where the mean is 0

    `mean` is over the whole optimizer step's batch; default: over the given tokens.
    Differs: verl `rollout_is_batch_normalize` averages weights of sequences over sequences; pass that as `mean`.
    Reference: verl trainer/ppo/rollout_corr_helper.py.
    """
    (weights,) = prepared(mask, weights=weights.detach())
    if mean is None:
        check_alone("mean")
        count = torch.ones_like(weights).sum() if mask is None else mask.sum()
        mean = weights.sum() / count.clamp(min=1)
    check_one_number(mean=mean)
    mean = torch.as_tensor(mean, dtype=weights.dtype, device=weights.device)
    if readable(weights) and readable(mean) and mean <= 0 and (weights > 0).any():
        raise ValueError(f"mean must be positive where a weight is, got {mean.item():g}")
    return torch.where(mean == 0, 0, weights / torch.where(mean == 0, 1, mean))


def effective_sample_size(weights: Tokens, *, mask: Mask = None) -> Float[Tensor, ""]:
    """Kish's effective sample size: the number of equally weighted tokens with the same variance.

        (sum w)^2 / sum w^2                            between 1 and the number of tokens; 0 if all weights are 0

    Differs: verl `rollout_is_eff_sample_size` is this divided by the number of tokens.
    Reference: https://en.wikipedia.org/wiki/Effective_sample_size
    """
    (weights,) = prepared(mask, weights=weights.detach())
    squares = weights.square().sum()
    return torch.where(squares == 0, 0, weights.sum().square() / torch.where(squares == 0, 1, squares))


def log_kept_mass(
    logits: Float[Tensor, "*shape V"], *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, mask: Mask = None
) -> Tokens:
    """log S: log of the probability mass that top-p, top-k and min-p sampling keep at each position, in nats.

        S = sum of the kept probabilities              top_k = 0, top_p = 1 and min_p = 0 are off: log S = 0

    `logits` are temperature-scaled. A token is kept (see `kept_support`) if its rank is below top_k, less than top_p
    of the probability is strictly before it, and it has at least min_p times the largest probability. The engine
    reports the untruncated `rollout_logp`; the token was sampled with log-prob `rollout_logp - log_kept_mass(logits,
    ...)`. Memory: several copies of [*shape, V], and a sort.
    Differs: the limits apply to the full distribution, as in SGLang; HF `generate`, vLLM, and SGLang where a
    request has min-p renormalise after top-k.
    Reference: https://github.com/huggingface/trl/issues/6789
    """
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    check_at_least(0, top_k=top_k)
    check_between(0, 1, min_p=min_p)
    check_float(logits=logits)
    check_mask(mask, positions=logits[..., 0])
    logits = masked(upcast(logits.detach()), None if mask is None else mask.unsqueeze(-1))
    logp = logits.reshape(-1, logits.shape[-1]).log_softmax(-1)
    if top_p == 1 and top_k == 0 and min_p == 0:
        return logp.new_zeros(logits.shape[:-1])
    rows, device = logp.shape[:1], logp.device
    options = {"top_p": logp.new_full(rows, top_p), "top_k": torch.full(rows, top_k, device=device)}
    options["min_p"] = logp.new_full(rows, min_p)
    support = kept_support(logp.exp(), **options)
    mass = torch.where(support, logp, -torch.inf).logsumexp(-1).clamp(max=0).view(logits.shape[:-1])
    return masked(torch.where(support.all(-1).view_as(mass), 0, mass), mask)


def log_support_mass(
    logits: Float[Tensor, "*shape V"], support: Int[Tensor, "*shape K"], *, mask: Mask = None
) -> Tokens:
    """log S: log of the probability that a policy gives to a recorded set of tokens at each position, in nats.

        log S_t = log sum_{a in support_t} softmax(z_t)_a        gradient w.r.t. z: softmax over the set - softmax(z)

    `logp - log_support_mass(logits, support)` is the log-prob of the policy renormalised over the set that the sampler
    kept, for any weights: the ratio of two such log-probs is that of two distributions over one set. `support` are
    distinct ids; -1 is padding, and a row of padding alone is the whole vocabulary. Memory: a copy of [*shape, V] for
    16-bit logits, and of [*shape, K].
    Limits: the whole vocabulary gives 0 with gradient 0; one token gives its log-prob.
    Differs: from `log_kept_mass`, which finds the set of the current weights and has no gradient.
    Reference: slime, which replays the keep mask of top-p; https://github.com/huggingface/trl/issues/6789
    """
    check_float(logits=logits)
    if support.dtype not in (torch.int32, torch.int64) or support.shape[:-1] != logits.shape[:-1]:
        shape = f"[{', '.join(map(str, [*logits.shape[:-1], 'K']))}]"
        raise ValueError(f"support must be ids of shape {shape}, got {[*support.shape]} of {support.dtype}")
    check_mask(mask, positions=logits[..., 0])
    low, high = map(int, support.aminmax()) if readable(support) and support.numel() else (-1, -1)
    if not -1 <= low <= high < logits.shape[-1]:
        raise ValueError(f"support must hold ids below {logits.shape[-1]}, and -1 as padding, got {low} to {high}")
    z = masked(upcast(logits), None if mask is None else mask.unsqueeze(-1))
    inside = support >= 0
    some = inside.any(-1)
    some = some if mask is None else some & mask
    chosen = z.gather(-1, support.clamp(min=0).long()).masked_fill(~inside & some.unsqueeze(-1), -torch.inf)
    return torch.where(some, chosen.logsumexp(-1) - z.logsumexp(-1), 0)


def kept_support(
    p: Float[Tensor, "B V"],
    *,
    top_p: Float[Tensor, "B"] | None = None,
    top_k: Int[Tensor, "B"] | None = None,
    min_p: Float[Tensor, "B"] | None = None,
) -> Bool[Tensor, "B V"]:
    """The tokens that truncated sampling keeps: rank < top_k, less than top_p strictly before the token, and

        p >= min_p * max(p)

    Tokens are ranked by descending probability, ties by ascending id. All conditions are on `p` itself, so their order
    does not matter. The most likely token is always kept. `top_p=1.0`, `top_k=0` and `min_p=0.0` keep everything.
    Reference: nucleus sampling, arXiv:1904.09751; min-p, arXiv:2407.01082
    """
    kept = torch.ones_like(p, dtype=torch.bool)
    if top_p is not None or top_k is not None:
        kept = _ranked_support(p, top_p=top_p, top_k=top_k)
    if min_p is not None:
        peak = p.amax(-1, keepdim=True)
        kept &= p >= min_p[:, None] * peak
        kept[:, :1] |= peak.isnan()  # NaN, which ranks first, has to show
    return kept


def _ranked_support(
    p: Float[Tensor, "B V"], *, top_p: Float[Tensor, "B"] | None, top_k: Int[Tensor, "B"] | None
) -> Bool[Tensor, "B V"]:
    """`kept_support` of top-p and top-k."""
    every = torch.ones(p.shape[0], dtype=torch.bool, device=p.device)  # rows that keep all
    if top_p is not None:
        every = every & (top_p >= 1)
    if top_k is not None:
        every = every & (top_k == 0)
    size = p.shape[-1] if traced() else min(FIRST_RANKED, p.shape[-1])
    while True:  # a sort of the whole vocabulary costs more than all else of sampling
        ranked = p.topk(size, dim=-1).values
        num = _num_kept(ranked, top_p=top_p, top_k=top_k)
        if size == p.shape[-1] or bool((every | (num < size)).all()):
            break
        size = min(8 * size, p.shape[-1])
    least = ranked.gather(-1, num[:, None] - 1)
    above, ties = p > least, p == least
    room = num - above.sum(-1)
    support = above | (ties & (ties.cumsum(-1) <= room[:, None])) | every[:, None]
    support[:, 0] |= ranked[:, 0].isnan()  # NaN, which ranks first, has to show
    return support


def _num_kept(
    ranked: Float[Tensor, "B n"], *, top_p: Float[Tensor, "B"] | None, top_k: Int[Tensor, "B"] | None
) -> Int[Tensor, "B"]:
    """How many of the n largest probabilities, in order, are kept."""
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_p is not None:
        total = cumsum(ranked, -1)
        before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], dim=-1)
        keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    if top_k is not None:
        rank = torch.arange(ranked.shape[-1], device=ranked.device)
        keep &= (rank < top_k[:, None]) | (top_k == 0)[:, None]
    return keep.sum(-1).clamp(min=1)
