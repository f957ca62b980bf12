"""Rows of the advantage estimators; `loops` holds their definitions."""

from __future__ import annotations

from itertools import pairwise

import loops
import torch
from row import PACKED, WHOLE_BATCH, row

from rlkit import advantages as A
from rlkit.segments import seq_ids, seq_positions
from rlkit.testing import Case, Stream, laws
from rlkit.testing.check import ESTIMATOR, GROUP_BASELINE

REWARDS = Stream(axis="N", low=0.0, high=2.0, hard_low=0.0)
UNITS = ("rewards", "values", "q_values", "bootstrap", "greedy_rewards", "step_returns")
COUPLED = "it is normalised by a statistic of the whole batch"
SPREAD = "a larger reward also increases the standard deviation that all rewards are divided by"
BATCH = {"additive": COUPLED, "group_isolation": COUPLED}
WIDENED = {**BATCH, "rewards_raise": SPREAD}
EPS = {"eps": 0.0}


def baseline(fn, *more, degree: int | None = None, loop=None, **how):
    extra = [] if degree is None else [laws.scales(degree=degree, names=UNITS)]
    extra += [] if loop is None else [laws.equals_loop(loop)]
    return row(fn, *extra, *more, family=GROUP_BASELINE, **how)


def trace(fn, loop, *more, **how):
    return row(fn, laws.equals_loop(loop), laws.scales(degree=1, names=UNITS), *more, family=ESTIMATOR, **how)


def zeros(case: Case) -> torch.Tensor:
    return torch.zeros(case.num_tokens, dtype=torch.float64)


def like(fn, *names: str, **options):
    """Another estimator on the case's own streams, as the other side of a limit."""

    def other(case: Case):
        given = {k: case.streams[k] for k in names}
        return fn(**given, mask=case.mask, cu_seqlens=case.cu_seqlens, **options)

    return other


def by_group(fn, **options):
    return lambda case: fn(case.seqs["rewards"], group_ids=case.group_ids, **options)


def gae_minus_values(case: Case):
    returns = like(A.discounted_returns, "rewards", "gamma", "bootstrap")(case)
    return torch.where(case.mask, returns - case.tokens["values"], 0), returns


def td_error(case: Case):
    one_step = like(A.n_step, "rewards", "values", "gamma", "bootstrap", n=1)(case)
    return torch.where(case.mask, one_step - case.tokens["values"], 0), one_step


def vtrace_targets(rewards, values, log_ratio, gamma, lam, bootstrap, mask, cu_seqlens):
    given = {"gamma": gamma, "lam": lam, "bootstrap": bootstrap, "mask": mask, "cu_seqlens": cu_seqlens}
    return A.vtrace(rewards, values, log_ratio, **given).targets


TRACES = [
    trace(A.discounted_returns, loops.discounted_returns),
    trace(
        A.td_lambda,
        loops.td_lambda,
        laws.limit(
            like(A.discounted_returns, "rewards", "gamma", "bootstrap"), note="lam = 1 is discounted_returns", lam=1.0
        ),
        laws.limit(
            like(A.n_step, "rewards", "values", "gamma", "bootstrap", n=1), note="lam = 0 is the 1-step return", lam=0.0
        ),
    ),
    trace(
        A.gae,
        loops.gae,
        laws.limit(gae_minus_values, note="lam = 1 is the return minus the value", lam=1.0),
        laws.limit(td_error, note="lam = 0 is the TD error", lam=0.0),
    ),
    trace(
        A.gae_decoupled,
        loops.gae_decoupled,
        laws.limit(
            like(A.gae, "rewards", "values", "gamma", "bootstrap", lam=0.75),
            note="equal lambdas are gae",
            lam_policy=0.75,
            lam_value=0.75,
        ),
    ),
    trace(
        A.n_step,
        loops.n_step,
        laws.limit(
            like(A.discounted_returns, "rewards", "gamma", "bootstrap"), note="n = 99 is discounted_returns", n=99
        ),
        options={"n": 2},
    ),
    trace(
        A.vtrace,
        loops.vtrace,
        laws.limit(
            like(A.gae, "rewards", "values", "gamma", "bootstrap", lam=1.0),
            note="at ratio 1 and lam = 1 it is gae",
            log_ratio=zeros,
            lam=1.0,
        ),
        options={"rho_max": 1.5, "c_max": 1.0},
    ),
    row(
        A.vtrace,
        laws.limit(
            like(A.td_lambda, "rewards", "values", "gamma", "lam", "bootstrap"),
            note="at ratio 1 the targets are td_lambda",
            log_ratio=zeros,
        ),
        call=vtrace_targets,
        variant="targets",
        family=(),
    ),
    trace(A.vtrace, loops.vtrace, variant="caps above 1", options={"rho_max": 3.0, "c_max": 3.0}),
    trace(
        A.retrace,
        loops.retrace,
        laws.limit(
            like(A.discounted_returns, "rewards", "gamma", "bootstrap"),
            note="ratio 1, lam = 1 and Q = V is discounted_returns",
            log_ratio=zeros,
            lam=1.0,
            q_values=lambda case: case.tokens["values"],
        ),
        options={"c_max": 1.0},
        skip={"all_count": "the target of the first action does not contain its own ratio"},
    ),
    trace(
        A.q_lambda,
        loops.q_lambda,
        laws.limit(
            like(A.td_lambda, "rewards", "values", "gamma", "bootstrap", lam=0.75),
            note="Q = V is td_lambda",
            lam=0.75,
            q_values=lambda case: case.tokens["values"],
        ),
    ),
    trace(
        A.clipped_is_returns,
        loops.clipped_is_returns,
        laws.limit(
            like(A.discounted_returns, "rewards", "gamma", "bootstrap"),
            note="at ratio 1 it is discounted_returns",
            log_ratio=zeros,
        ),
        options={"rho_max": 1.5},
    ),
    row(
        A.bootstrap_values,
        family=ESTIMATOR,
        skip={"all_count": "it reads the last value of each sequence and no other"},
    ),
    row(A.length_adaptive_lam, family=PACKED, options={"alpha": 0.5, "dtype": torch.float64}),
]

OUTCOME = [
    baseline(A.group_centered, laws.centred, degree=1, loop=loops.group_centered),
    baseline(A.group_zscore, laws.centred, degree=0, loop=loops.group_zscore, options=EPS),
    baseline(A.leave_one_out, laws.centred, degree=1, loop=loops.leave_one_out),
    baseline(
        A.max_rl,
        laws.centred,
        degree=0,
        loop=loops.max_rl,
        streams={"rewards": REWARDS},
        options=EPS,
        skip={
            "shift_invariant": "it divides by the mean of the rewards: it is meant for success rates",
            "stated_scale": "it divides by the mean of the rewards, not by their std",
        },
    ),
    baseline(
        A.group_mean_batch_std,
        degree=0,
        options=EPS,
        skip={
            **WIDENED,
            "shift_invariant": "the batch's std includes the differences between groups",
            "stated_scale": "it divides by the std of the rewards before the groups' means are subtracted",
        },
    ),
    baseline(A.opo, degree=1, loop=loops.opo),
    baseline(A.gpg, laws.centred, degree=1, skip=BATCH),
    baseline(
        A.max_at_k,
        laws.limit(by_group(A.leave_one_out), note="k = 1 is leave_one_out", k=1),
        degree=1,
        loop=loops.max_at_k,
        options={"k": 2},
    ),
    baseline(
        A.pass_at_k,
        degree=0,
        loop=loops.pass_at_k,
        options={"k": 2, **EPS},
        skip={"rewards_raise": SPREAD, "stated_scale": "it divides by the std of pass@k, not of its result"},
    ),
    baseline(
        A.normalize_then_sum,
        laws.centred,
        degree=0,
        options=EPS,
        skip={"stated_scale": "the std of a sum of normalised rewards is not 1"},
    ),
    baseline(A.gdpo, laws.centred, degree=0, options=EPS, skip=WIDENED),
]


def gigpo(rewards, step_returns, cu_seqlens, group_ids):
    """Steps as tokens; two steps start in the same state where task and position agree."""
    steps = step_returns.shape[0]
    episode = seq_ids(cu_seqlens, num_tokens=steps)
    state = group_ids[episode] * 16 + seq_positions(cu_seqlens, num_tokens=steps)
    return A.gigpo(rewards, step_returns, group_ids=group_ids, step_seq_ids=episode, step_group_ids=state)


def step_returns(rewards, cu_seqlens):
    return A.step_returns(rewards, step_seq_ids=seq_ids(cu_seqlens, num_tokens=rewards.shape[0]), gamma=0.75)


def turn_returns(rewards, cu_seqlens, group_ids):
    """Tokens as steps."""
    episode = seq_ids(cu_seqlens, num_tokens=rewards.shape[0])
    return A.turn_returns(rewards, group_ids=group_ids, step_seq_ids=episode, gamma=0.75)


def trace_credit(outcome, answer_logp, cu_seqlens):
    episode = seq_ids(cu_seqlens, num_tokens=answer_logp.shape[0])
    return A.trace_credit(outcome, answer_logp, step_seq_ids=episode)


def turn_lens(mask, cu_seqlens):
    """The length of each turn at its first token."""
    starts = A.turn_starts(mask, cu_seqlens=cu_seqlens)
    return torch.zeros(mask.shape, dtype=torch.int64).masked_scatter(starts, A.turn_lens(mask, cu_seqlens=cu_seqlens))


def walked(case: Case) -> torch.Tensor:
    """The same by a walk over the tokens."""
    mask, lens, first = case.mask.tolist(), [0] * case.num_tokens, 0
    for begin, end in pairwise(case.cu_seqlens.tolist()):
        for t in range(begin, end):
            if mask[t]:
                first = first if t > begin and mask[t - 1] else t
                lens[first] += 1
    return torch.tensor(lens, dtype=torch.int64)


GAPS = {"padded_is_packed": "a masked token between two sampled ones starts a new turn"}
OTHERS = [
    row(A.whiten, laws.scales(degree=0, names=("advantages",)), family=ESTIMATOR, options=EPS, skip=WHOLE_BATCH),
    row(
        A.reinforce_pp,
        family=ESTIMATOR,
        skip={"additive": COUPLED, "segment_isolation": COUPLED, "rewards_raise": SPREAD},
    ),
    row(
        A.reinforce_pp_baseline,
        family=ESTIMATOR,
        skip={**WIDENED, "segment_isolation": COUPLED},
    ),
    row(
        A.gigpo,
        laws.scales(degree=1, names=UNITS),
        family=ESTIMATOR,
        call=gigpo,
        streams={"rewards": Stream(axis="N"), "step_returns": Stream()},
        skip={"segment_isolation": "an episode is compared with the others of its group"},
    ),
    row(
        A.step_returns,
        laws.scales(degree=1, names=UNITS),
        family=ESTIMATOR,
        call=step_returns,
        streams={"rewards": Stream()},
    ),
    row(
        A.turn_returns,
        laws.scales(degree=1, names=UNITS),
        family=ESTIMATOR,
        call=turn_returns,
        streams={"rewards": Stream()},
        skip={"segment_isolation": "a turn is compared with those of the other episodes of its group"},
    ),
    row(
        A.turn_starts,
        laws.limit(lambda case: walked(case) > 0, note="it is a walk over the tokens"),
        family=PACKED,
        skip=GAPS,
    ),
    row(
        A.turn_lens,
        laws.limit(walked, note="it is a walk over the tokens"),
        family=PACKED,
        call=turn_lens,
        skip=GAPS,
    ),
    row(
        A.trace_credit,
        family=ESTIMATOR,
        call=trace_credit,
        streams={"outcome": Stream(axis="N"), "answer_logp": Stream(low=-4.0, high=-0.125, hard_high=0.0)},
        skip={"all_count": "an episode of one turn has its outcome, whatever the answer's log-prob is"},
    ),
    row(
        A.optimal_token_baseline,
        laws.scales(degree=1, names=UNITS),
        family=ESTIMATOR,
        skip={
            "segment_isolation": "a sequence is compared with the others of its group",
            "all_count": "at the last actions of a group's longest sequence nothing is left to compare with: 0 there",
        },
    ),
]

ROWS = [*TRACES, *OUTCOME, *OTHERS]
