"""Laws of controllers, `(init, update)` pairs over a NamedTuple of floats."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from rlkit.testing.law import law
from rlkit.testing.strategies import measurements
from rlkit.types import Controller

__all__ = ["Rule", "feedback", "refuses_nan", "state_is_plain", "update_is_pure", "within_bounds"]


class Rule(NamedTuple):
    """A controller under test: `init(*start)`, `update(state, measured)`.

    `direction` is +1 if a larger measurement must not lower the coefficient, -1 if it must not raise it, 0 if it must
    have no effect.
    """

    controller: Controller
    start: tuple[float, ...] = ()
    direction: int = 1
    low: float = 0.0
    high: float = math.inf
    name: str = "controller"
    hidden: tuple[str, ...] = ()

    def takes(self, *names: str) -> bool:
        """Controllers have none of a batch's arguments."""
        return not names

    def after(self, measured: list[float], state: Any = None) -> Any:
        """The state after these measurements."""
        state = self.controller.init(*self.start) if state is None else state
        for x in measured:
            state = self.controller.update(state, x)
        return state


@law(draw=measurements())
def state_is_plain(r: Rule, measured: list[float]) -> None:
    """The state is a NamedTuple of finite floats, and a JSON round trip after any update is exact."""
    whole = r.after(measured)
    for name, x in whole._asdict().items():
        if type(x) is not float or not math.isfinite(x):
            raise AssertionError(f"{name} is {x!r}, expected a finite float")
    half = len(measured) // 2
    state = r.after(measured[:half])
    restored = type(state)(**json.loads(json.dumps(state._asdict())))
    if r.after(measured[half:], restored) != whole:
        raise AssertionError(f"resumed after {half} updates: {r.after(measured[half:], restored)}, expected {whole}")


@law(draw=measurements())
def update_is_pure(r: Rule, measured: list[float]) -> None:
    """`update` does not modify its argument, returns the same result every time, and has no hidden state."""
    state = r.after(measured[:-1])
    copy = type(state)(*state)
    first = r.controller.update(state, measured[-1])
    r.after([3.0, 0.0, 1.0])
    second = r.controller.update(state, measured[-1])
    if state != copy:
        raise AssertionError(f"the state became {state}, it was {copy}")
    if first != second:
        raise AssertionError(f"the second call gave {second}, the first {first}")


@law(draw=measurements())
def feedback(r: Rule, measured: list[float]) -> None:
    """A larger measurement moves the coefficient in the stated direction or leaves it unchanged."""
    low, high = r.after(measured).coef, r.after([*measured[:-1], measured[-1] + 1.0]).coef
    if (high - low) * r.direction < 0 or (r.direction == 0 and high != low):
        raise AssertionError(f"coef is {low:.6g}, and {high:.6g} where the last measurement is larger by 1")


@law(draw=measurements())
def within_bounds(r: Rule, measured: list[float]) -> None:
    """The coefficient stays in its range for all measurements."""
    for x in (measured, [1e9 * m for m in measured]):
        coef = r.after(x).coef
        if not r.low <= coef <= r.high:
            raise AssertionError(f"coef is {coef:.6g}, expected within [{r.low:g}, {r.high:g}]")


@law(draw=measurements())
def refuses_nan(r: Rule, measured: list[float]) -> None:
    """A non-finite measurement raises ValueError."""
    state = r.after(measured)
    for bad in (math.nan, math.inf, -math.inf):
        try:
            r.controller.update(state, bad)
        except ValueError:
            continue
        raise AssertionError(f"update took {bad}")
