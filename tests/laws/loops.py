"""Definitions of the estimators, for one sequence or one group, in Python floats: written from the papers' sums.

Traces get lists over the action tokens of one sequence (per-token gamma and lam too) and the sequence's bootstrap.
"""

from __future__ import annotations

import itertools
import math

Numbers = list[float]


def product(xs: Numbers) -> float:
    return math.prod(xs)


def discounted_returns(rewards: Numbers, gamma: Numbers, bootstrap: float) -> Numbers:
    n = len(rewards)
    tail = [product(gamma[t:n]) * bootstrap for t in range(n)]
    return [sum(product(gamma[t:k]) * rewards[k] for k in range(t, n)) + tail[t] for t in range(n)]


def _deltas(rewards: Numbers, values: Numbers, gamma: Numbers, bootstrap: float) -> Numbers:
    following = [*values[1:], bootstrap]
    return [r + g * w - v for r, g, w, v in zip(rewards, gamma, following, values)]


def _advantages(deltas: Numbers, decay: Numbers) -> Numbers:
    n = len(deltas)
    return [sum(product(decay[t:k]) * deltas[k] for k in range(t, n)) for t in range(n)]


def gae(rewards: Numbers, values: Numbers, gamma: Numbers, lam: Numbers, bootstrap: float) -> tuple[Numbers, Numbers]:
    a = _advantages(_deltas(rewards, values, gamma, bootstrap), [g * x for g, x in zip(gamma, lam)])
    return a, [x + v for x, v in zip(a, values)]


def gae_decoupled(
    rewards: Numbers, values: Numbers, gamma: Numbers, lam_policy: Numbers, lam_value: Numbers, bootstrap: float
) -> tuple[Numbers, Numbers]:
    return (
        gae(rewards, values, gamma, lam_policy, bootstrap)[0],
        gae(rewards, values, gamma, lam_value, bootstrap)[1],
    )


def td_lambda(rewards: Numbers, values: Numbers, gamma: Numbers, lam: Numbers, bootstrap: float) -> Numbers:
    """The mixture of all n-step returns: the n-step one has weight (1 - lam) after n - 1 factors lam."""
    n = len(rewards)
    out = []
    for t in range(n):
        mixed, kept = 0.0, 1.0
        for k in range(t, n):
            target = n_step(rewards, values, gamma, bootstrap, n=k - t + 1)[t]
            last = k == n - 1
            mixed += kept * (1.0 if last else 1 - lam[k]) * target
            kept *= lam[k]
        out.append(mixed)
    return out


def n_step(rewards: Numbers, values: Numbers, gamma: Numbers, bootstrap: float, *, n: int) -> Numbers:
    out = []
    for t in range(len(rewards)):
        stop = min(t + n, len(rewards))
        end = values[stop] if stop < len(rewards) else bootstrap
        out.append(sum(product(gamma[t:k]) * rewards[k] for k in range(t, stop)) + product(gamma[t:stop]) * end)
    return out


def vtrace(
    rewards: Numbers,
    values: Numbers,
    log_ratio: Numbers,
    gamma: Numbers,
    lam: Numbers,
    bootstrap: float,
    *,
    rho_max: float,
    c_max: float,
) -> tuple[Numbers, Numbers]:
    ratio = [math.exp(x) for x in log_ratio]
    deltas = [min(rho_max, r) * d for r, d in zip(ratio, _deltas(rewards, values, gamma, bootstrap))]
    decay = [g * x * min(c_max, r) for g, x, r in zip(gamma, lam, ratio)]
    targets = [v + x for v, x in zip(values, _advantages(deltas, decay))]
    following = [*targets[1:], bootstrap]
    steps = zip(ratio, rewards, gamma, following, values)
    return [min(rho_max, r) * (b + g * w - v) for r, b, g, w, v in steps], targets


def off_policy_q(
    rewards: Numbers, q_values: Numbers, values: Numbers, c: Numbers, gamma: Numbers, bootstrap: float
) -> Numbers:
    """Q(s_t) + the sum of discounted deltas, each cut by the c of the actions between: Munos et al., equation 3."""
    following = [*values[1:], bootstrap]
    deltas = [r + g * w - q for r, g, w, q in zip(rewards, gamma, following, q_values)]
    n = len(rewards)
    return [
        q_values[t] + sum(product(gamma[t:k]) * product(c[t + 1 : k + 1]) * deltas[k] for k in range(t, n))
        for t in range(n)
    ]


def retrace(
    rewards: Numbers,
    q_values: Numbers,
    values: Numbers,
    log_ratio: Numbers,
    gamma: Numbers,
    lam: Numbers,
    bootstrap: float,
    *,
    c_max: float,
) -> Numbers:
    c = [x * min(c_max, math.exp(y)) for x, y in zip(lam, log_ratio)]
    return off_policy_q(rewards, q_values, values, c, gamma, bootstrap)


def q_lambda(
    rewards: Numbers, q_values: Numbers, values: Numbers, gamma: Numbers, lam: Numbers, bootstrap: float
) -> Numbers:
    return off_policy_q(rewards, q_values, values, lam, gamma, bootstrap)


def clipped_is_returns(
    rewards: Numbers, log_ratio: Numbers, gamma: Numbers, bootstrap: float, *, rho_max: float
) -> Numbers:
    rho = [min(rho_max, math.exp(x)) for x in log_ratio]
    n = len(rewards)
    return [
        sum(product(gamma[t:k]) * product(rho[t : k + 1]) * rewards[k] for k in range(t, n))
        + product(gamma[t:n]) * product(rho[t:n]) * bootstrap
        for t in range(n)
    ]


def scan(a: Numbers, b: Numbers, x_end: float) -> Numbers:
    n = len(a)
    return [sum(product(a[t:k]) * b[k] for k in range(t, n)) + product(a[t:n]) * x_end for t in range(n)]


def mean(xs: Numbers) -> float:
    return sum(xs) / len(xs)


def unbiased_std(xs: Numbers) -> float:
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1)) if len(xs) > 1 else 0.0


def group_centered(rewards: Numbers) -> Numbers:
    return [r - mean(rewards) for r in rewards]


def group_zscore(rewards: Numbers, *, eps: float) -> Numbers:
    std = unbiased_std(rewards)
    return [(r - mean(rewards)) / (std + eps) if std > 0 else 0.0 for r in rewards]


def leave_one_out(rewards: Numbers) -> Numbers:
    if len(rewards) == 1:
        return [0.0]
    return [r - mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def max_rl(rewards: Numbers, *, eps: float) -> Numbers:
    return [(r - mean(rewards)) / (mean(rewards) + eps) if mean(rewards) else 0.0 for r in rewards]


def opo(rewards: Numbers, lengths: list[int]) -> Numbers:
    weights = lengths if sum(lengths) else [1] * len(lengths)
    baseline = sum(x * r for x, r in zip(weights, rewards)) / sum(weights)
    return [r - baseline for r in rewards]


def max_at_k(rewards: Numbers, *, k: int) -> Numbers:
    """Over all size-k subsets with i: their maximum minus the maximum without i."""
    n = len(rewards)
    out = [0.0] * n
    for subset in itertools.combinations(range(n), k):
        for i in subset:
            others = [rewards[j] for j in subset if j != i]
            out[i] += (max(rewards[j] for j in subset) - max(others)) * n / math.comb(n, k)
    return out


def pass_at_k(rewards: Numbers, *, k: int, eps: float) -> Numbers:
    """The z-score (ddof 0) of a subset's maximum, averaged over the subsets with i."""
    n = len(rewards)
    subsets = [(s, max(rewards[j] for j in s)) for s in itertools.combinations(range(n), k)]
    if not subsets:
        return [0.0] * n
    best = [m for _, m in subsets]
    std = math.sqrt(mean([(m - mean(best)) ** 2 for m in best]))
    if std == 0:
        return [0.0] * n
    return [(mean([m for s, m in subsets if i in s]) - mean(best)) / (std + eps) for i in range(n)]
