"""Rows of ratios, weights, corrections, KL, entropy, value losses, reward models and diagnostics."""

from __future__ import annotations

import math

import torch
from row import LOSS, PACKED, STATISTIC, WEIGHT, WHOLE_BATCH, masked_mean, num_seqs, num_tokens, row

from rlkit import losses as L
from rlkit.testing import Case, Stream, laws

EVERYWHERE = {"masked_is_zero": "a sequence's ratio is broadcast to all its tokens; the surrogate applies the mask"}
METRICS = (*(x for x in PACKED if x not in (laws.shape, laws.masked_is_zero, laws.finite)), laws.detached)
SOURCES = Stream(low=0.0, high=2.0, hard_low=0.0, step=1.0, axis="N", dtype=torch.int64)
FLAG = Stream(low=0.0, high=1.0, hard_low=0.0, hard_high=1.0, step=1.0)
KL = (*LOSS, laws.zero_at_equality)
TWO_RATIOS = {"gradcheck": "it has one log-ratio's value and another's gradient by design"}
KL_STOP = {"gradcheck": "it has one estimator's value and another's gradient by design"}


def num_groups(case: Case) -> int:
    counts = torch.diff(torch.cat([torch.zeros(1), case.mask.cumsum(0)])[case.cu_seqlens.long()])
    return len(case.group_ids[counts > 0].unique())


def tokens_per_source(case: Case) -> torch.Tensor:
    """Of a step with more tokens than the case, so that a sequence may change its source."""
    out = torch.full((3,), case.num_tokens)
    for i, source in enumerate(case.seqs["source_ids"].tolist()):
        out[source] += case.mask[case.cu_seqlens[i] : case.cu_seqlens[i + 1]].sum()
    return out


def weights(fn, *more, **how):
    return row(fn, *more, family=WEIGHT, **how)


RATIOS = [
    row(L.seq_log_ratio, skip=EVERYWHERE),
    row(L.seq_log_ratio_sum, skip=EVERYWHERE),
    row(L.token_gradient, skip=TWO_RATIOS),
]

WEIGHTS = [
    weights(L.token_mean, laws.sums_to_one, statistics={"num_tokens": num_tokens}),
    weights(L.seq_mean, laws.sums_to_one, statistics={"num_seqs": num_seqs}),
    weights(L.seq_mean_token_sum, statistics={"num_seqs": num_seqs}),
    weights(L.constant_length, options={"max_length": 64}, statistics={"num_seqs": num_seqs}),
    weights(
        L.prompt_mean, laws.sums_to_one, streams={"group_tokens": None}, statistics={"num_groups": num_groups},
    ),
    weights(
        L.per_source_mean,
        streams={"source_ids": SOURCES},
        options={"source_weights": torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)},
        statistics={"num_tokens": tokens_per_source},
    ),
]  # fmt: skip


def veto(log_ratio, min_ratio):
    return [float(all(math.exp(x) >= min_ratio for x in log_ratio))] * len(log_ratio)


def on_a_set(logits, mask):
    """Two of five tokens, as a sampler recorded them, and padding."""
    return L.log_support_mass(logits, torch.tensor([0, 3, -1]).expand(*logits.shape[:-1], 3), mask=mask)


CORRECTIONS = [
    weights(
        L.tis,
        laws.limit(lambda case: case.mask * case.ratio, note="max_weight = inf is the ratio", max_weight=math.inf),
        options={"max_weight": 2.0},
    ),
    weights(L.clipped_is, options={"low": 0.5, "high": 2.0}),
    weights(L.icepop),
    weights(L.keep_ratio, options={"low": 0.5, "high": 2.0}),
    weights(L.keep_divergence, options={"max_divergence": 1.0}),
    weights(L.keep_whole_sequences, streams={"keep": FLAG}),
    weights(L.veto, laws.equals_loop(veto), options={"min_ratio": 0.2}),
    weights(L.seq_mask_tis, options={"low": 0.5, "high": 2.0, "max_weight": 3.0}),
    weights(L.opsm),
    weights(L.batch_normalized, statistics={"mean": lambda case: masked_mean(case, "weights")}),
    weights(L.batch_normalized, variant="own mean", streams={"mean": None}, skip=WHOLE_BATCH),
    row(L.effective_sample_size, family=STATISTIC, skip=WHOLE_BATCH),
    weights(L.log_kept_mass, options={"top_p": 0.7, "top_k": 3}),
    row(L.log_support_mass, call=on_a_set, streams={"logits": Stream(low=-3.0, high=3.0, size=(5,))}),
]

KLS = [
    row(L.k1, laws.expectation(), laws.gradient_expectation(laws.nothing), family=KL),
    row(L.k2, laws.non_negative, laws.gradient_expectation(), family=KL),
    row(L.k3, laws.non_negative, laws.expectation(), laws.gradient_expectation(laws.backward), family=KL),
    row(L.abs_kl, laws.non_negative, family=KL),
    row(L.k1_straight_through, laws.expectation(), laws.gradient_expectation(), family=KL, skip=KL_STOP),
    row(
        L.k3_straight_through,
        laws.non_negative,
        laws.expectation(),
        laws.gradient_expectation(),
        family=KL,
        skip=KL_STOP,
    ),
    row(L.unbiased_kl, laws.non_negative, laws.expectation(), laws.gradient_expectation(), family=KL),
    row(
        L.unbiased_kl,
        laws.expectation(),
        laws.gradient_expectation(),
        variant="k1",
        family=KL,
        options={"estimator": L.k1},
    ),
    weights(L.kl_in_reward, options={"kl_coef": 0.5}),
    row(L.kl_from_logits),
]

ENTROPY = [
    row(L.entropy_from_logits),
    row(
        L.entropy_quantile,
        family=STATISTIC,
        options={"top": 0.3},
        skip={**WHOLE_BATCH, "finite": "the result is -inf if no token is trainable"},
    ),
    weights(L.top_entropy_mask, options={"threshold": 1.0}),
    weights(L.top_entropy_mask, variant="own threshold", streams={"threshold": None}, skip=WHOLE_BATCH),
]


def value_huber(values, returns, delta):
    errors = [abs(v - r) for v, r in zip(values, returns)]
    return [e**2 / 2 if e <= delta else delta * (e - delta / 2) for e in errors]


def value_clip(values, old_values, returns, clip):
    near = [min(max(v, o - clip), o + clip) for v, o in zip(values, old_values)]
    return [0.5 * max((v - r) ** 2, (c - r) ** 2) for v, c, r in zip(values, near, returns)]


RANGE = {"low": -4.0, "high": 4.0}
VALUES = [
    row(L.value_mse, laws.no_gradient_by("returns")),
    row(
        L.value_huber,
        laws.limit(
            lambda case: L.value_mse(case.tokens["values"], case.tokens["returns"], mask=case.mask),
            note="delta = inf is value_mse",
            delta=1e30,
        ),
        laws.equals_loop(value_huber),
        laws.no_gradient_by("returns"),
        options={"delta": 0.7},
    ),
    row(
        L.value_clip,
        laws.limit(
            lambda case: L.value_mse(case.tokens["values"], case.tokens["returns"], mask=case.mask),
            note="clip = inf is value_mse",
            clip=math.inf,
        ),
        laws.equals_loop(value_clip),
        laws.no_gradient_by("returns", "old_values"),
        options={"clip": 0.5},
    ),
    row(L.hl_gauss, laws.no_gradient_by("returns"), options=RANGE),
    row(L.hl_gauss_target, options={**RANGE, "num_bins": 6}),
    row(L.hl_gauss_value, options=RANGE),
]


REWARD_MODELS = [
    row(L.bradley_terry, laws.no_gradient_by("margin"), options={"center_coef": 0.01}),
    row(L.bradley_terry, laws.prefers_chosen, laws.margin_only, variant="plain", streams={"margin": None}),
    row(L.process_bce, laws.no_gradient_by("labels")),
]

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
DIAGNOSTICS = [
    row(L.ratio_stats, family=METRICS, options=CLIP),
    row(L.mismatch_stats, family=METRICS),
    row(L.weight_stats, family=METRICS, options={"max_weight": 2.0}),
    row(L.kl_stats, family=METRICS),
    row(L.seq_kl_stats, family=METRICS),
    row(L.policy_stats, family=METRICS),
]

ROWS = [*RATIOS, *WEIGHTS, *CORRECTIONS, *KLS, *ENTROPY, *VALUES, *REWARD_MODELS, *DIAGNOSTICS]
