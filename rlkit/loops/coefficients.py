"""The coefficients of a loss from step to step: what the controllers say, what they are told, and their checkpoint.

    states = start(controllers, kl_coef=0.05, entropy_coef=0.0)
    for step in ...:
        metrics = update(batch, **coefs(states))            # kl_coef, entropy_coef
        states = advance(controllers, states, finalize(metrics))

`controllers` has a controller (`rlkit.controllers`) by one of these names:

| name            | adds to        | starts at      | is told                                                      |
|-----------------|----------------|----------------|--------------------------------------------------------------|
| `kl`            | `kl_coef`      | `kl_coef`      | `kl/ref`: mean of k3(logp, ref_logp), nats per trained token |
| `kl_limit`      | `kl_coef`      | 0              | the same: a constraint, e.g. `lagrange_at_most`              |
| `entropy`       | `entropy_coef` | `entropy_coef` | `entropy`: mean per trained token, nats                      |
| `entropy_limit` | `entropy_coef` | 0              | the same: a constraint, e.g. `lagrange_at_least`             |

Both are averaged over all optimizer steps of the batch, with the policy as it was in each; k3 estimates
KL(policy || reference) on samples of the policy. Without a controller a coefficient stays at its start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlkit.controllers import Coef
from rlkit.types import Controller

Controllers = Mapping[str, Controller]
States = dict[str, Any]  # a controller's NamedTuple by its name

ADDS_TO = {"kl": "kl_coef", "kl_limit": "kl_coef", "entropy": "entropy_coef", "entropy_limit": "entropy_coef"}
TOLD = {"kl_coef": "kl/ref", "entropy_coef": "entropy"}


def needs_reference(controllers: Controllers, *, kl_coef: float) -> bool:
    """Whether the KL to a reference model is part of the loss, or may become one.

    Errors: ValueError for a controller of an unknown name.
    """
    unknown = sorted(set(controllers) - set(ADDS_TO))
    if unknown:
        raise ValueError(f"controllers must be named {', '.join(ADDS_TO)}; got {', '.join(unknown)}")
    return bool(kl_coef) or any(ADDS_TO[name] == "kl_coef" for name in controllers)


def start(
    controllers: Controllers,
    *,
    kl_coef: float,
    entropy_coef: float,
    saved: Mapping[str, Mapping[str, float]] | None = None,
) -> States:
    """The states before the first step, or those of a checkpoint (`saved`, see `to_save`).

    A controller that the checkpoint lacks, or whose state has other fields there, starts anew.
    """
    constant = {"kl": kl_coef, "entropy": entropy_coef}
    states: States = {name: Coef(float(value)) for name, value in constant.items()}
    for name, controller in controllers.items():
        state = controller.init(constant.get(name, 0.0))
        old = (saved or {}).get(name, {})
        states[name] = type(state)(**old) if old.keys() == state._asdict().keys() else state
    return states


def coefs(states: States) -> dict[str, float]:
    """`kl_coef` and `entropy_coef` of the next step: the sums of what their controllers say."""
    return {name: sum(states[x].coef for x in states if ADDS_TO[x] == name) for name in TOLD}


def advance(controllers: Controllers, states: States, line: Mapping[str, float], *, skip_nan: bool = False) -> States:
    """The states after a step whose metrics are `line`.

    A controller whose metric is missing there (no token was trained on) keeps its state. A metric that is not finite is
    the controller's ValueError; with `skip_nan` it keeps its state.
    """
    new = dict(states)
    for name, controller in controllers.items():
        measured = line.get(TOLD[ADDS_TO[name]])
        if measured is not None and (math.isfinite(measured) or not skip_nan):
            new[name] = controller.update(states[name], measured)
    return new


def logged(controllers: Controllers, states: States) -> dict[str, float]:
    """`NAME/coef` of each controller, and of a constant that is not 0."""
    return {f"{name}/coef": state.coef for name, state in states.items() if name in controllers or state.coef}


def to_save(controllers: Controllers, states: States) -> dict[str, dict[str, float]]:
    """The controllers' states as JSON, for a checkpoint."""
    return {name: states[name]._asdict() for name in controllers}
