"""Rows of the policy surrogates. Their coefficients c are written here in Python floats, from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from row import STATISTIC, STOP_GRADIENT, SURROGATE, WEIGHT, WHOLE_BATCH, Case, masked_mean, row

from rlkit import losses as L
from rlkit.testing import laws

PULL = "a penalty towards the old policy is part of the loss, so the gradient is not a multiple of A"
PULLED = {"coefficient": PULL, "descends": PULL, "no_advantage_no_gradient": PULL}
PENALTY = "a penalty on moving the selected tokens is part of the loss, so the gradient is not a multiple of A"


def per_token(f: Callable[..., float], *names: str) -> Callable[[Case], torch.Tensor]:
    """c of each token from a formula of its ratio, its advantage and the named streams."""

    def c(case: Case) -> torch.Tensor:
        columns = [case.ratio, case.tokens["advantages"], *(case.tokens[n] for n in names)]
        return torch.tensor([f(*values) for values in zip(*(x.tolist() for x in columns))], dtype=torch.float64)

    return c


def per_seq(f: Callable[[list[float], list[float]], list[float]]) -> Callable[[Case], torch.Tensor]:
    """c of each trainable token from a formula of its sequence's log-ratios and advantages."""

    def c(case: Case) -> torch.Tensor:
        out = torch.zeros(case.num_tokens, dtype=torch.float64)
        for start, stop in zip(case.cu_seqlens.tolist(), case.cu_seqlens.tolist()[1:]):
            places = [t for t in range(start, stop) if case.mask[t]]
            x, a = (case.tokens[n][places].tolist() for n in ("log_ratio", "advantages"))
            out[places] = torch.tensor(f(x, a), dtype=torch.float64)
        return out

    return c


def ppo(r: float, a: float, low: float = 0.2, high: float = 0.2) -> float:
    return 0.0 if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) else r


def dual(r: float, a: float, cap: float) -> float:
    return 0.0 if a < 0 and r > cap else ppo(r, a)


def aspo(r: float, a: float) -> float:
    return ppo(r, a) if a <= 0 else 0.0 if r > 1.2 else min(1 / r, 2.0)


def sapo(r: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    p = 1 / (1 + math.exp(-tau * (r - 1)))
    return 4 * p * (1 - p) * r


def dppo(r: float, a: float, old: float) -> float:
    moved = math.exp(old) * (r - 1)
    return 0.0 if (a > 0 and moved > 0.2) or (a <= 0 and moved < -0.2) else min(r, 4.0)


def dppo_kl(r: float, a: float, old: float) -> float:
    q, p = math.exp(old), math.exp(old) * r
    d = q * math.log(q / p) + (1 - q) * math.log(max(1 - q, 1e-8) / max(1 - p, 1e-8))
    dropped = d > 0.05 and ((a > 0 and p > q) or (a <= 0 and p < q))
    return 0.0 if dropped else min(r, 4.0)


def gspo(x: list[float], a: list[float]) -> list[float]:
    s = math.exp(sum(x) / max(len(x), 1))
    return [ppo(s, b, 0.1, 0.3) for b in a]


def gmpo(x: list[float], a: list[float]) -> list[float]:
    bound = [min(y, 0.4) if b > 0 else max(y, -0.4) for y, b in zip(x, a)]
    s = math.exp(sum(bound) / max(len(x), 1))
    return [s if y == z else 0.0 for y, z in zip(x, bound)]


def vespo(x: list[float], a: list[float]) -> list[float]:
    w = math.exp(sum(x))
    return [w**k * math.exp(lam * (1 - w)) for k, lam in ((2.0, 3.0) if b >= 0 else (3.0, 2.0) for b in a)]


def m2_dropped(r: float, a: float, cutoff: float) -> float:
    on = (a > 0 and r > 1) or (a < 0 and r < 1)
    return 0.0 if on and math.log(r) ** 2 > cutoff else r


one = laws.coefficient(per_token(lambda r, a: 1.0))
plain_ratio = laws.coefficient(per_token(lambda r, a: r))


def surrogate(fn, c, *more, **how):
    return row(fn, laws.coefficient(c), *more, family=SURROGATE, **how)


ROWS = [
    row(L.reinforce, one, family=SURROGATE),
    row(L.dft, laws.non_negative, skip={"gradcheck": "the probability is detached by design"}),
    row(L.importance_sampling, plain_ratio, family=SURROGATE),
    surrogate(
        L.ppo_clip,
        per_token(lambda r, a: ppo(r, a, high=0.28)),
        laws.clipped(clip_low=0.2, clip_high=0.28),
        laws.limit(
            lambda case: L.importance_sampling(case.tokens["log_ratio"], case.tokens["advantages"], mask=case.mask),
            note="open clips are importance_sampling",
            clip_low=math.inf,
            clip_high=math.inf,
        ),
        options={"clip_high": 0.28},
    ),
    surrogate(
        L.dual_clip,
        per_token(lambda r, a: dual(r, a, 3.0)),
        laws.clipped(clip_low=0.2, clip_high=0.2, max_ratio=3.0),
        laws.limit(
            lambda case: L.ppo_clip(case.tokens["log_ratio"], case.tokens["advantages"], mask=case.mask),
            note="clip_c = inf is ppo_clip",
            clip_c=math.inf,
        ),
        options={"clip_c": 3.0},
    ),
    surrogate(L.aspo, per_token(aspo), options={"max_weight": 2.0}, skip=STOP_GRADIENT),
    surrogate(L.unbounded_positive, per_token(lambda r, a: 1.0 if a > 0 else dual(r, a, 3.0))),
    surrogate(
        L.cispo,
        per_token(lambda r, a: min(r, 5.0)),
        laws.limit(
            lambda case: L.reinforce(case.tokens["log_ratio"], case.tokens["advantages"], mask=case.mask),
            note="both caps 1 is reinforce",
            max_weight=1.0,
            min_weight=1.0,
        ),
        skip=STOP_GRADIENT,
    ),
    surrogate(L.topr, per_token(lambda r, a: 1.0 if a > 0 else min(r, 1.0)), skip=STOP_GRADIENT),
    surrogate(L.sapo, per_token(sapo)),
    surrogate(L.dppo, per_token(dppo, "old_logp"), options={"max_weight": 4.0}, skip=STOP_GRADIENT),
    surrogate(L.dppo_kl, per_token(dppo_kl, "old_logp"), options={"max_weight": 4.0}, skip=STOP_GRADIENT),
    row(L.dro, one, family=SURROGATE, options={"beta": 0.5}, skip=PULLED),
    surrogate(L.gspo, per_seq(gspo), options={"clip_low": 0.1, "clip_high": 0.3}),
    surrogate(
        L.luspo,
        per_seq(lambda x, a: [len(x) * c for c in gspo(x, a)]),
        options={"clip_low": 0.1, "clip_high": 0.3},
        skip={"on_policy": "the loss is GSPO's times the sequence's length, so on-policy c is the length"},
    ),
    surrogate(L.gmpo, per_seq(gmpo)),
    surrogate(
        L.vespo,
        per_seq(vespo),
        skip={"gradcheck": "the weight phi(W) is detached by design; the coefficient is checked instead"},
    ),
    row(L.kimi15, one, family=SURROGATE, options={"tau": 0.5}, skip=PULLED),
    surrogate(
        L.m2po,
        lambda case: per_token(lambda r, a: m2_dropped(r, a, 0.3))(case),
        laws.limit(
            lambda case: L.importance_sampling(case.tokens["log_ratio"], case.tokens["advantages"], mask=case.mask),
            note="cutoff = inf is importance_sampling",
            cutoff=math.inf,
        ),
        options={"cutoff": 0.3},
    ),
    surrogate(
        L.clip_cov,
        per_token(lambda r, a, selected: 0.0 if selected else ppo(r, a), "selected"),
        skip={"on_policy": "selected tokens get no gradient, on-policy too"},
    ),
    row(L.kl_cov, plain_ratio, family=SURROGATE, skip=dict.fromkeys(PULLED, PENALTY)),
    row(
        L.m2_cutoff,
        family=STATISTIC,
        skip={**WHOLE_BATCH, "finite": "the result is inf if every token is kept"},
    ),
    row(L.bapo_clip_range, family=STATISTIC, skip=WHOLE_BATCH),
    row(
        L.token_covariance,
        family=WEIGHT,
        statistics={
            "mean_logp": lambda case: masked_mean(case, "logp"),
            "mean_advantage": lambda case: masked_mean(case, "advantages"),
        },
    ),
    row(
        L.token_covariance,
        variant="own means",
        family=WEIGHT,
        streams={"mean_logp": None, "mean_advantage": None},
        skip=WHOLE_BATCH,
    ),
    row(
        L.select_top,
        family=WEIGHT,
        options={"fraction": 0.4},
        statistics={"generator": lambda case: torch.Generator().manual_seed(0)},
        skip={
            **WHOLE_BATCH,
            "permutation": "ties are broken at random by position",
            "padded_is_packed": "ties are broken at random by position",
        },
    ),
    row(
        L.select_between,
        family=WEIGHT,
        options={"low": 0.0, "high": 3.0, "fraction": 0.4},
        statistics={"generator": lambda case: torch.Generator().manual_seed(0)},
        skip={
            **WHOLE_BATCH,
            "permutation": "the selection is random by position",
            "padded_is_packed": "the selection is random by position",
        },
    ),
]
