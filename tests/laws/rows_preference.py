"""Rows of the preference and distillation losses."""

from __future__ import annotations

import torch
from row import STATISTIC, WEIGHT, WHOLE_BATCH, row

from rlkit import losses as L
from rlkit._util.tensors import upcast
from rlkit.testing import Stream, laws

BETA = {"beta": 0.5}
RANKS = "it compares sorted samples: a loss belongs to a rank, not to a pair, and couples the batch"
SORTED = {"permutation": RANKS, "padded_is_packed": RANKS, "additive": RANKS, "masked_is_zero": RANKS}
RATIO = Stream(low=-3.0, high=3.0)
COLLISION = Stream(low=-6.0, high=-0.125, hard_low=-12.0, hard_high=0.0)  # at least -log of the vocabulary's size
LOGITS = Stream(low=-3.0, high=3.0, size=(5,))


def preference(fn, *more, **how):
    how["options"] = {**BETA, **how.get("options", {})}
    return row(fn, *more, **how)


def pair(fn, **options):
    """A loss of a pair's two log-ratios as the other side of a limit."""
    return lambda case: fn(
        case.tokens["chosen_log_ratio"], case.tokens["rejected_log_ratio"], mask=case.mask, **{**BETA, **options}
    )


def logits(fn, **options):
    """A divergence of two logits as the other side of a limit."""
    return lambda case: fn(case.tokens["student_logits"], case.tokens["teacher_logits"], mask=case.mask, **options)


OPTIMUM = {"prefers_chosen": "the loss increases beyond the optimal margin"}
MARGIN = (laws.prefers_chosen, laws.margin_only)
PAIR = (laws.prefers_chosen,)
NO_MARGIN = {"margin": None}

MARGINS = [
    preference(L.dpo, *MARGIN, streams=NO_MARGIN),
    preference(L.dpo, laws.no_gradient_by("margin"), *MARGIN, variant="a margin per pair"),
    preference(L.dpo, *MARGIN, variant="smoothed", streams=NO_MARGIN, options={"label_smoothing": 0.2}, skip=OPTIMUM),
    preference(
        L.robust_dpo,
        laws.limit(pair(L.dpo), note="label_smoothing = 0 is dpo", label_smoothing=0.0),
        *MARGIN,
        options={"label_smoothing": 0.2},
    ),
    preference(L.ipo, *MARGIN, skip=OPTIMUM),
    preference(L.hinge, *MARGIN),
    preference(L.exo_pair, *MARGIN, options={"label_smoothing": 0.2}, skip=OPTIMUM),
    preference(L.discopop, *MARGIN, skip={"prefers_chosen": "around margin 0 it has a bump by construction (its tau)"}),
    row(L.js_score),
    row(
        L.alpha_score,
        laws.limit(
            lambda case: torch.where(case.mask, case.tokens["log_ratio"], 0),
            note="alpha = 0 is the log-ratio",
            alpha=0.0,
        ),
        options={"alpha": 0.5},
    ),
]

ANCHORED = [
    preference(L.kto, *PAIR, options={"kl": 0.25}),
    preference(L.kto_unpaired, options={"kl": 0.25, "desirable_weight": 1.5}),
    row(L.kto_reference_point, family=STATISTIC, skip=WHOLE_BATCH),
    preference(L.bco_pair, *PAIR, options={"delta": 0.25}),
    preference(L.nca_pair, *PAIR, skip={"prefers_chosen": "the chosen term has its minimum at ln 2, by construction"}),
    preference(L.sppo, laws.no_gradient_by("win_prob")),
    preference(L.sppo_hard, *PAIR, skip={"prefers_chosen": "it regresses each log-ratio on a target, from both sides"}),
    preference(L.apo_down, *PAIR, skip={"prefers_chosen": "it lowers both responses, the rejected one more"}),
]

GAP = laws.no_gradient_by("reward_gap")
GIVEN = {"prefers_chosen": "it regresses the margin on a given reward gap, from both sides"}
OTHERS = [
    preference(L.simpo, *MARGIN),
    preference(L.orpo, *PAIR),
    preference(L.xpo, *MARGIN, options={"alpha": 0.25}),
    preference(L.nash_md, skip={"gradcheck": "a policy gradient: the win probability and the KL are detached"}),
    preference(L.reward_aware_kl, *MARGIN, GAP, skip=GIVEN),
    preference(L.reward_aware_reverse_kl, *MARGIN, GAP, skip=GIVEN),
    preference(L.reward_aware_squared, *MARGIN, GAP, skip=GIVEN),
    row(L.ld_log_ratio, options={"ld_alpha": 0.5}),
    row(L.wpo_weights, family=WEIGHT, streams={"log_collision": COLLISION}),
    preference(
        L.aot,
        *MARGIN,
        skip=SORTED,
        axis="T",
        streams=dict.fromkeys(("chosen_log_ratio", "rejected_log_ratio"), RATIO),
    ),
]


def with_topk(fn):
    """The K most likely tokens of a teacher given by its logits, as a server would report them."""

    def call(student_logits, teacher_logits, mask, **options):
        logp, ids = upcast(teacher_logits).log_softmax(-1).topk(3, -1)
        return fn(student_logits, torch.where(mask.unsqueeze(-1), ids, torch.arange(3)), logp, mask=mask, **options)

    return call


def with_all(fn):
    """The same with all tokens of the vocabulary: the tail is empty."""

    def call(student_logits, teacher_logits, mask, **options):
        ids = torch.arange(student_logits.shape[-1]).expand(student_logits.shape)
        return fn(student_logits, ids, upcast(teacher_logits).log_softmax(-1), mask=mask, **options)

    return call


def teachers(fn):
    """Two teachers, given beside each other per token."""

    def call(first_logits, second_logits):
        return fn(torch.stack([first_logits, second_logits]), first_logits.new_tensor([0.75, 0.25]))

    return call


TEACHER = laws.no_gradient_by("teacher_logits")
TWO_LOGITS = {"student_logits": LOGITS, "teacher_logits": LOGITS}
TWO_TEACHERS = {"first_logits": LOGITS, "second_logits": LOGITS}
CHUNKS = {"chunk_size": 3}


def topk(fn, whole, *more, **how):
    """The rows of a top-k divergence: K = 3 of 5, and K = V, where it is the whole divergence."""
    how["options"] = {**CHUNKS, **how.get("options", {})}
    options = {k: v for k, v in how["options"].items() if k != "chunk_size"}
    same = laws.limit(logits(whole, **options), note=f"K = V is {whole.__name__}")
    return [
        row(fn, TEACHER, *more, call=with_topk(fn), streams=TWO_LOGITS, **how),
        row(fn, same, family=(), call=with_all(fn), streams=TWO_LOGITS, variant="K = V", **how),
    ]


DISTILLATION = [
    row(L.forward_kl, TEACHER, options=CHUNKS),
    row(L.reverse_kl, TEACHER, options=CHUNKS),
    row(
        L.mixed_kl,
        laws.limit(logits(L.forward_kl), note="forward_weight = 1 is forward_kl", forward_weight=1.0),
        laws.limit(logits(L.reverse_kl), note="forward_weight = 0 is reverse_kl", forward_weight=0.0),
        TEACHER,
        options={**CHUNKS, "forward_weight": 0.25},
    ),
    row(
        L.jsd,
        laws.limit(logits(L.forward_kl), note="beta = 0 is forward_kl", beta=0.0),
        laws.limit(logits(L.reverse_kl), note="beta = 1 is reverse_kl", beta=1.0),
        TEACHER,
        options={**CHUNKS, "beta": 0.25},
    ),
    row(L.uld, TEACHER, options=CHUNKS),
    *topk(L.forward_kl_topk, L.forward_kl),
    *topk(L.reverse_kl_topk, L.reverse_kl),
    *topk(L.mixed_kl_topk, L.mixed_kl, options={"forward_weight": 0.25}),
    *topk(L.jsd_topk, L.jsd, options={"beta": 0.25}),
    row(
        L.opd_advantages,
        laws.equals_loop(lambda logp, teacher_logp: [q - p for p, q in zip(logp, teacher_logp)]),
        family=WEIGHT,
    ),
    row(L.proximal_teacher, family=WEIGHT, options={"alpha": 0.5}),
    row(
        L.iw_opd_weights,
        family=WEIGHT,
        skip={"all_count": "with a single action the drift before it is 0, so the size of its gap does not matter"},
    ),
    row(
        L.minillm_advantages,
        laws.limit(
            lambda case: L.opd_advantages(case.tokens["logp"], case.tokens["teacher_logp"], mask=case.mask),
            note="gamma = 0 is opd_advantages",
            gamma=0.0,
        ),
        family=WEIGHT,
        options={"gamma": 0.9},
    ),
    row(L.teacher_mixture, family=WEIGHT, call=teachers(L.teacher_mixture), streams=TWO_TEACHERS),
    row(L.teacher_product, family=WEIGHT, call=teachers(L.teacher_product), streams=TWO_TEACHERS),
]

ROWS = [*MARGINS, *ANCHORED, *OTHERS, *DISTILLATION]
