"""Controllers: their published rules step by step, closed loops on a simple plant, purity, serialisation, errors."""

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import controllers as C
from rlkit.types import Controller

ALL = {
    "fixed": C.fixed(),
    "kl_exponential": C.kl_exponential(target=0.1, num_samples=512),
    "kl_linear": C.kl_linear(target=0.1, rate=0.01),
    "kl_pid": C.kl_pid(target=0.1, kp=0.5, ki=0.1, kd=0.2),
    "schedule_linear": C.schedule_linear(end=0.1, num_updates=10),
    "schedule_cosine": C.schedule_cosine(end=0.1, num_updates=10),
    "target_entropy": C.target_entropy(target=0.2),
    "moving_average": C.moving_average(decay=0.75),
    "lagrange_at_most": C.lagrange_at_most(bound=0.1, rate=0.5, penalty=2.0),
    "lagrange_at_least": C.lagrange_at_least(bound=0.1, rate=0.5, penalty=2.0),
}
MEASURED = st.lists(st.floats(0, 10), max_size=20)


def run(name, measured):
    rule = ALL[name]
    states = [rule.init(0.3)]
    for x in measured:
        states.append(rule.update(states[-1], x))
    return states


@pytest.mark.parametrize("name", ALL)
@given(measured=MEASURED)
def test_pure_serialisable_and_never_negative(name, measured):
    """The same history gives the same state; a state sent through JSON half-way changes nothing; fields are floats."""
    rule = ALL[name]
    assert isinstance(rule, Controller)
    states = run(name, measured)
    assert states == run(name, measured)
    half = len(measured) // 2
    before = states[half]
    state = type(before)(**json.loads(json.dumps(before._asdict())))
    for x in measured[half:]:
        state = rule.update(state, x)
    assert state == states[-1]
    assert states[half] == before
    for s in states:
        assert all(type(x) is float and math.isfinite(x) for x in s)
        assert s.coef >= 0


@pytest.mark.parametrize("name", [n for n in ALL if not n.startswith("schedule")])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_measurement_raises(name, bad):
    rule = ALL[name]
    with pytest.raises(ValueError, match="measured must be finite"):
        rule.update(rule.init(0.3), bad)


def test_kl_exponential_is_the_common_rule():
    """verl AdaptiveKLController(init .2, target 6, horizon 10000): KL 12, then 0, then 6.6, with 256 samples each."""
    rule = C.kl_exponential(target=6.0, num_samples=256)
    s = rule.init(0.2)
    s = rule.update(s, 12.0)
    assert math.isclose(s.coef, 0.2 * (1 + 0.2 * 256 / 10_000))
    s = rule.update(s, 0.0)
    assert math.isclose(s.coef, 0.2 * (1 + 0.00512) * (1 - 0.00512))
    t = rule.update(s, 6.6)
    assert math.isclose(t.coef, s.coef * (1 + 0.1 * 0.0256))
    assert rule.update(t, 6.0) == t


def test_kl_exponential_speed_does_not_depend_on_the_batch():
    rule = C.kl_exponential(target=1.0, horizon=1000, num_samples=1)
    s = rule.init(1.0)
    for _ in range(1000):
        s = rule.update(s, 5.0)
    assert math.isclose(s.coef, math.exp(0.2), rel_tol=1e-4)
    with pytest.raises(ValueError, match="num_samples must be below"):
        C.kl_exponential(target=1.0, horizon=1000, num_samples=5000)


def test_kl_linear():
    rule = C.kl_linear(target=2.0, rate=0.1, max_coef=0.33)
    s = rule.init(0.3)
    assert rule.update(s, 2.0) == s
    assert math.isclose(rule.update(s, 2.2).coef, 0.3 + 0.1 * 0.1)
    assert math.isclose(rule.update(s, 50.0).coef, 0.3 + 0.1 * 0.2)
    assert rule.update(rule.update(s, 50.0), 50.0).coef == 0.33
    assert rule.update(rule.init(0.0), 0.0).coef == 0.0
    assert rule.update(rule.init(0.0), 9.0).coef > 0


def test_kl_pid_terms():
    rule = C.kl_pid(target=1.0, kp=0.5, ki=0.1, kd=0.2)
    s = rule.init(0.3)
    assert math.isclose(rule.update(s, 1.0).coef, 0.3)
    s = rule.update(s, 3.0)  # error 2, integral 3 + 2, no derivative yet
    assert math.isclose(s.coef, 0.5 * 2 + 0.1 * 5)
    s = rule.update(s, 2.0)  # error 1, integral 6, change -1
    assert math.isclose(s.coef, 0.5 * 1 + 0.1 * 6 - 0.2)


def test_kl_pid_is_dual_ascent_without_p_and_d():
    pid = C.kl_pid(target=1.0, kp=0.0, ki=0.25, max_coef=0.75)
    dual = C.lagrange_at_most(bound=1.0, rate=0.25, max_coef=0.75)
    a, b = pid.init(0.25), dual.init(0.25)
    for kl in (2.0, 3.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.5, 1.25):
        a, b = pid.update(a, kl), dual.update(b, kl)
        assert math.isclose(a.coef, b.coef, abs_tol=1e-12)


def test_kl_pid_does_not_wind_up():
    """After a hundred steps at either bound, the first error of the other sign moves the output."""
    rule = C.kl_pid(target=1.0, kp=0.1, ki=0.1, max_coef=2.0)
    s = rule.init(0.5)
    for _ in range(100):
        s = rule.update(s, 0.0)
    assert s.coef == 0.0
    assert rule.update(s, 1.5).coef > 0
    for _ in range(100):
        s = rule.update(s, 5.0)
    assert s.coef == 2.0
    assert rule.update(s, 0.5).coef < 2.0


@pytest.mark.parametrize(
    "rule",
    [
        C.kl_exponential(target=0.1, horizon=1000, num_samples=100),
        C.kl_linear(target=0.1, rate=0.05),
        C.kl_pid(target=0.1, kp=1.0, ki=0.3, kd=0.5),
        C.lagrange_at_most(bound=0.1, rate=0.5, penalty=1.0),
    ],
    ids=["exponential", "linear", "pid", "lagrange"],
)
def test_kl_settles_at_its_target(rule):
    """Closed loop on a plant whose KL falls with the coefficient, with a lag: from above and from below."""
    for start in (0.02, 3.0):
        s, kl = rule.init(start), 0.5
        for _ in range(3000):
            kl += 0.2 * (0.05 / (0.05 + s.coef) - kl)
            s = rule.update(s, kl)
        assert abs(kl - 0.1) < 0.01


def test_schedules():
    linear, cosine = (
        C.schedule_linear(end=0.2, num_updates=4),
        C.schedule_cosine(end=0.2, num_updates=4),
    )
    a, b, seen = linear.init(1.0), cosine.init(1.0), []
    for _ in range(6):
        seen.append((a.coef, b.coef))
        a, b = linear.update(a, 0.7), cosine.update(b, 0.7)
    assert [x for x, _ in seen] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    half = [0.2 + 0.4 * (1 + math.cos(math.pi * n / 4)) for n in range(5)]
    assert [y for _, y in seen] == pytest.approx([*half, 0.2])


def test_target_entropy_is_trl():
    """TRL 1.x GRPOTrainer: at or below the target the coefficient walks up and acts, above it walks down and is 0."""
    rule = C.target_entropy(target=0.2, delta=0.005, max_coef=0.012)
    s = rule.init(0.004)
    assert s.coef == 0.0
    expected = [
        (0.2, 0.009, 0.009),
        (0.1, 0.012, 0.012),
        (0.3, 0.0, 0.007),
        (0.9, 0.0, 0.002),
        (0.9, 0.0, 0.0),
        (0.0, 0.005, 0.005),
    ]
    for entropy, coef, ungated in expected:
        s = rule.update(s, entropy)
        assert (s.coef, s.ungated) == pytest.approx((coef, ungated))


def test_lagrange():
    rule = C.lagrange_at_most(bound=1.0, rate=0.5, penalty=3.0, max_coef=5.0)
    s = rule.update(rule.init(), 1.2)
    assert (s.coef, s.multiplier, s.violation) == pytest.approx((0.1 + 3 * 0.2, 0.1, 0.2))
    s = rule.update(s, 0.9)  # satisfied: the penalty is off, the multiplier falls
    assert (s.coef, s.multiplier, s.violation) == pytest.approx((0.05, 0.05, -0.1))
    assert rule.update(s, 100.0).coef == 5.0
    assert rule.update(s, -100.0).coef == 0.0

    low = C.lagrange_at_least(bound=0.5, rate=0.5, penalty=3.0)
    s = low.update(low.init(), 0.3)
    assert (s.coef, s.multiplier, s.violation) == pytest.approx((0.1 + 3 * 0.2, 0.1, 0.2))
    assert low.update(s, 2.0).coef == 0.0


def test_lagrange_finds_the_multiplier_of_a_known_problem():
    """min (x - 3)^2 subject to x <= 1: at the solution x = 1 the multiplier is 4."""
    rule = C.lagrange_at_most(bound=1.0, rate=0.2, penalty=1.0)
    s, x = rule.init(), 3.0
    for _ in range(500):
        x -= 0.1 * (2 * (x - 3) + s.coef)
        s = rule.update(s, x)
    assert math.isclose(x, 1.0, abs_tol=1e-4)
    assert math.isclose(s.multiplier, 4.0, abs_tol=1e-3)


def test_a_moving_average_is_its_closed_form():
    """In exact fractions: decay^n of the start, and (1 - decay) decay^(n - i) of the i-th measurement."""
    decay, measured, start = Fraction(3, 4), [Fraction(x, 8) for x in (5, -3, 0, 7, 7, -8, 1)], Fraction(-1, 2)
    rule = C.moving_average(decay=float(decay))
    s = rule.init(float(start))
    for n, x in enumerate(measured, 1):
        s = rule.update(s, float(x))
        closed = decay**n * start + (1 - decay) * sum(decay ** (n - i) * m for i, m in enumerate(measured[:n], 1))
        assert s.coef == closed  # the fractions are exact in binary
    assert rule.update(C.Coef(0.3), 0.3).coef == pytest.approx(0.3)
    assert C.moving_average(decay=0.0).update(s, -2.5).coef == -2.5


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: C.kl_exponential(target=0.0, num_samples=8), "target"),
        (lambda: C.kl_exponential(target=1.0, horizon=math.nan, num_samples=8), "horizon"),
        (lambda: C.kl_linear(target=1.0, rate=-1.0), "rate"),
        (lambda: C.kl_linear(target=1.0, rate=1.0, min_coef=2.0, max_coef=1.0), "min_coef"),
        (lambda: C.kl_pid(target=1.0, kp=-1.0, ki=0.0), "kp"),
        (lambda: C.schedule_linear(end=0.0, num_updates=0), "num_updates"),
        (lambda: C.target_entropy(target=-1.0), "target"),
        (lambda: C.lagrange_at_most(bound=1.0, rate=0.0), "rate"),
        (lambda: C.lagrange_at_least(bound=1.0, rate=1.0, penalty=math.nan), "penalty"),
        (lambda: C.fixed().init(-1.0), "coef"),
        (lambda: C.moving_average(decay=1.0), "decay"),
        (lambda: C.moving_average(decay=-0.1), "decay"),
    ],
)
def test_errors_name_the_argument(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_non_finite_constants_raise():
    for bound in (math.nan, math.inf, -math.inf):
        for rule in (C.lagrange_at_most, C.lagrange_at_least):
            with pytest.raises(ValueError, match="bound must be finite"):
                rule(bound=bound, rate=0.1)
    with pytest.raises(ValueError, match="coef must be"):
        C.target_entropy(target=0.2).init(math.nan)
