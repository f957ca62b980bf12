"""Controllers: adapt the coefficient of a KL penalty, an entropy bonus or a constraint, or a baseline, to measurements.

Each function takes the rule's constants and returns a `Controller(init, update)`. The state is a NamedTuple of floats,
and its `coef` is the coefficient of the next step. There is no other state: `state._asdict()` is JSON and a checkpoint.

    kl_rule = kl_exponential(target=0.1, num_samples=512)
    state = kl_rule.init(0.05)
    ...                                                     a step with state.coef
    state = kl_rule.update(state, measured_kl)

All rules have these two signatures. KL and entropy are in nats per token. The caller chooses the KL estimate
(`rlkit.loops.coefficients` defines the one that the loops measure). `update` does not modify its argument. A non-finite
measurement raises, because one NaN would never leave the state. Measure over the whole batch (`rlkit.metrics` reduces
over ranks), so that all ranks hold the same state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from rlkit.types import Controller


class Coef(NamedTuple):
    """A coefficient without further state."""

    coef: float


class PidState(NamedTuple):
    """The output, the sum of errors, the last error, and the number of updates so far."""

    coef: float
    integral: float
    error: float
    num_updates: float


class ScheduleState(NamedTuple):
    """The output, its start value, and the number of updates so far."""

    coef: float
    start: float
    num_updates: float


class TargetEntropyState(NamedTuple):
    """The output (0 while the entropy is above the target) and the coefficient before the gate."""

    coef: float
    ungated: float


class LagrangeState(NamedTuple):
    """The output `multiplier + penalty * max(0, violation)`, its multiplier, and the last violation (> 0: violated)."""

    coef: float
    multiplier: float
    violation: float


def fixed() -> Controller:
    """A constant coefficient: `update` returns its state unchanged."""

    def update(state: Coef, measured: float) -> Coef:
        _finite(measured)
        return state

    return Controller(_init_coef, update)


def kl_exponential(*, target: float, num_samples: float, horizon: float = 10_000, max_error: float = 0.2) -> Controller:
    """Increase the KL coefficient by a factor while the KL is above its target, decrease it while below.

        error = clip(kl / target - 1, -max_error, max_error)
        coef  = coef (1 + error num_samples / horizon)

    `init(coef)`, `update(state, kl)`. `num_samples` is the number of samples per step; it makes the rate independent of
    the batch size: at most a factor e^max_error per `horizon` samples.

    Limits:   kl = target leaves coef unchanged; coef = 0 stays 0; coef never changes sign.
    Errors:   ValueError for num_samples >= horizon / max_error, which could flip the sign.
    Differs:  from verl, OpenRLHF, SkyRL and ROLL `AdaptiveKLController`: only this error.
    Reference: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2
    """
    _positive(target=target, num_samples=num_samples, horizon=horizon, max_error=max_error)
    if not num_samples * max_error < horizon:
        raise ValueError(
            f"num_samples must be below horizon / max_error = {horizon / max_error:g}, got {num_samples}; raise horizon"
        )

    def update(state: Coef, measured: float) -> Coef:
        error = _clip(_finite(measured) / target - 1, -max_error, max_error)
        return Coef(state.coef * (1 + error * num_samples / horizon))

    return Controller(_init_coef, update)


def kl_linear(
    *, target: float, rate: float, max_error: float = 0.2, min_coef: float = 0.0, max_coef: float = math.inf
) -> Controller:
    """Add to the KL coefficient while the KL is above its target, subtract while below.

        error = clip(kl / target - 1, -max_error, max_error)
        coef  = clip(coef + rate error, min_coef, max_coef)

    `init(coef)`, `update(state, kl)`. Unlike `kl_exponential` it can leave 0 and does not slow down near it. This is
    the common rule made additive; RL2's enhanced fork names such a rule but publishes no formula.

    Limits:   kl = target leaves coef unchanged.
    """
    _positive(target=target, rate=rate, max_error=max_error)
    _range(min_coef, max_coef)

    def update(state: Coef, measured: float) -> Coef:
        error = _clip(_finite(measured) / target - 1, -max_error, max_error)
        return Coef(_clip(state.coef + rate * error, min_coef, max_coef))

    return Controller(_init_coef, update)


def kl_pid(
    *, target: float, kp: float, ki: float, kd: float = 0.0, min_coef: float = 0.0, max_coef: float = math.inf
) -> Controller:
    """PID control of the KL coefficient: from the error, its sum and its change.

        error    = kl - target
        integral = clip(integral + error, min_coef / ki, max_coef / ki)          anti-windup
        coef     = clip(kp error + ki integral + kd (error - last error), min_coef, max_coef)

    `init(coef)`, `update(state, kl)`. With ki > 0 `init` sets the integral so that a first error of 0 gives `coef`,
    where that is within the bounds. The first update has no derivative. The integral is clipped to the range in which
    it can change the output, so the output responds at once when the error changes sign after a long excursion.

    Limits:   kp = kd = 0 is dual ascent, `lagrange_at_most` with rate ki; ki = 0 keeps no sum.
    Differs:  from the paper: the derivative acts in both directions, and the sum also has an upper bound.
    Reference: Stooke, Achiam & Abbeel 2020, https://arxiv.org/abs/2007.03964, algorithm 2
    """
    _positive(target=target)
    _at_least_zero(kp=kp, ki=ki, kd=kd)
    _range(min_coef, max_coef)

    def init(coef: float) -> PidState:
        _at_least_zero(coef=coef)
        return PidState(coef=float(coef), integral=coef / ki if ki > 0 else 0.0, error=0.0, num_updates=0.0)

    def update(state: PidState, measured: float) -> PidState:
        error = _finite(measured) - target
        change = error - state.error if state.num_updates else 0.0
        integral = _clip(state.integral + error, min_coef / ki, max_coef / ki) if ki > 0 else 0.0
        output = kp * error + ki * integral + kd * change
        return PidState(_clip(output, min_coef, max_coef), integral, error, state.num_updates + 1)

    return Controller(init, update)


def schedule_linear(*, end: float, num_updates: float) -> Controller:
    """Linear schedule from the start value to `end`, then constant.

        coef = start + (end - start) min(1, n / num_updates)          n: updates so far

    `init(start)`, `update(state, measured)`; the measurement is not used.
    """
    return _schedule(end, num_updates, lambda progress: progress)


def schedule_cosine(*, end: float, num_updates: float) -> Controller:
    """Half-cosine schedule from the start value to `end`, then constant.

        coef = end + (start - end) (1 + cos(pi min(1, n / num_updates))) / 2          n: updates so far

    `init(start)`, `update(state, measured)`; the measurement is not used.
    Reference: Loshchilov & Hutter 2016, https://arxiv.org/abs/1608.03983, eq. 5
    """
    return _schedule(end, num_updates, lambda progress: (1 - math.cos(math.pi * progress)) / 2)


def target_entropy(*, target: float, delta: float = 0.005, min_coef: float = 0.0, max_coef: float = 1.0) -> Controller:
    """Raise the entropy bonus by `delta` per step while the entropy is at or below its target; switch it off above.

        ungated = clip(ungated + delta, ..) if entropy <= target else clip(ungated - delta, min_coef, max_coef)
        coef    = ungated if entropy <= target else 0

    `init(coef)` (the output is 0 until the first measurement), `update(state, entropy)`, entropy in nats per token.

    Limits:   delta = 0 is a constant bonus that acts only at or below the target.
    Differs:  from the paper: it gates with the entropy of the same step, this function with that of the previous one.
              Same as TRL `use_adaptive_entropy` (target .2, delta .005, range [0, 1], start `entropy_coef`).
    Reference: He et al. 2025 (Skywork Open Reasoner 1), https://arxiv.org/abs/2505.22312
    """
    _at_least_zero(target=target, delta=delta)
    _range(min_coef, max_coef)

    def init(coef: float = 0.0) -> TargetEntropyState:
        _at_least_zero(coef=coef)
        return TargetEntropyState(coef=0.0, ungated=_clip(float(coef), min_coef, max_coef))

    def update(state: TargetEntropyState, measured: float) -> TargetEntropyState:
        low = _finite(measured) <= target
        ungated = _clip(state.ungated + (delta if low else -delta), min_coef, max_coef)
        return TargetEntropyState(ungated if low else 0.0, ungated)

    return Controller(init, update)


def lagrange_at_most(*, bound: float, rate: float, penalty: float = 0.0, max_coef: float = math.inf) -> Controller:
    """Multiplier of the constraint x <= bound, e.g. a hard limit on the KL, by dual ascent.

        violation  = x - bound
        multiplier = clip(multiplier + rate violation, 0, max_coef)
        coef       = clip(multiplier + penalty max(0, violation), 0, max_coef)

    `init(coef)`, `update(state, x)`; add `coef * x` to the loss. This is the gradient of the augmented Lagrangian
    multiplier (x - bound) + penalty / 2 max(0, x - bound)^2: the penalty acts at once, the multiplier over many steps.

    Limits:   while x < bound, coef falls to 0; penalty = 0 is plain dual ascent.
    Reference: Hestenes 1969 and Powell 1969, as in Nocedal & Wright, Numerical Optimization, chapter 17; for RL,
               Tessler et al. 2018, https://arxiv.org/abs/1805.11074
    """
    if not math.isfinite(bound):
        raise ValueError(f"bound must be finite, got {bound}")
    _positive(rate=rate)
    _at_least_zero(penalty=penalty)
    _range(0.0, max_coef)

    def init(coef: float = 0.0) -> LagrangeState:
        _at_least_zero(coef=coef)
        return LagrangeState(coef=float(coef), multiplier=float(coef), violation=0.0)

    def update(state: LagrangeState, measured: float) -> LagrangeState:
        violation = _finite(measured) - bound
        multiplier = _clip(state.multiplier + rate * violation, 0.0, max_coef)
        return LagrangeState(_clip(multiplier + penalty * max(0.0, violation), 0.0, max_coef), multiplier, violation)

    return Controller(init, update)


def lagrange_at_least(*, bound: float, rate: float, penalty: float = 0.0, max_coef: float = math.inf) -> Controller:
    """Multiplier of the constraint x >= bound, e.g. a minimum entropy: `lagrange_at_most` of -x and -bound.

    `init(coef)`, `update(state, x)`; *subtract* `coef * x` from the loss. This is SAC's temperature without the
    logarithm.

    Limits:   while x > bound, coef falls to 0.
    Reference: see `lagrange_at_most`; for entropy Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905, section 5
    """
    mirrored = lagrange_at_most(bound=-bound, rate=rate, penalty=penalty, max_coef=max_coef)

    def update(state: LagrangeState, measured: float) -> LagrangeState:
        return mirrored.update(state, -measured)

    return Controller(mirrored.init, update)


def moving_average(*, decay: float = 0.95) -> Controller:
    """Exponential moving average of the measurements: the baseline of a role, from the rewards of earlier steps.

        coef = decay coef + (1 - decay) x

    `init(coef)`, of any sign, `update(state, x)`. After n updates coef is decay^n of its start plus (1 - decay) times
    the sum of decay^(n - i) x_i. A baseline of earlier steps knows nothing of a step's samples, so that R - coef leaves
    the policy gradient unbiased whatever the number of samples, also with one game per prompt.

    Limits:   decay = 0 is the last measurement; a constant x is a fixed point.
    Differs:  from SPIRAL (RAE), which updates with each game and subtracts afterwards: there R itself has a weight of
              1 - decay in its baseline, which scales its advantage by decay; here x is the mean of a step.
    Reference: Liu et al. 2025 (SPIRAL), https://arxiv.org/abs/2506.24119
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be at least 0 and below 1, got {decay}")

    def init(coef: float = 0.0) -> Coef:
        return Coef(_finite(coef))

    def update(state: Coef, measured: float) -> Coef:
        return Coef(decay * state.coef + (1 - decay) * _finite(measured))

    return Controller(init, update)


def _init_coef(coef: float) -> Coef:
    _at_least_zero(coef=coef)
    return Coef(float(coef))


def _schedule(end: float, num_updates: float, shape: Callable[[float], float]) -> Controller:
    _positive(num_updates=num_updates)
    _at_least_zero(end=end)

    def init(start: float) -> ScheduleState:
        _at_least_zero(start=start)
        return ScheduleState(float(start), float(start), 0.0)

    def update(state: ScheduleState, measured: float) -> ScheduleState:  # noqa: ARG001
        done = state.num_updates + 1
        progress = shape(min(1.0, done / num_updates))
        return ScheduleState(state.start + (end - state.start) * progress, state.start, done)

    return Controller(init, update)


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _finite(measured: float) -> float:
    measured = float(measured)
    if not math.isfinite(measured):
        raise ValueError(f"measured must be finite, got {measured}; do not update the controller on a skipped step")
    return measured


def _positive(**values: float) -> None:
    for name, x in values.items():
        if not x > 0:
            raise ValueError(f"{name} must be positive, got {x}")


def _at_least_zero(**values: float) -> None:
    for name, x in values.items():
        if not 0 <= x < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {x}")


def _range(min_coef: float, max_coef: float) -> None:
    if not 0 <= min_coef <= max_coef:
        raise ValueError(f"min_coef and max_coef must satisfy 0 <= min_coef <= max_coef, got {min_coef}, {max_coef}")
