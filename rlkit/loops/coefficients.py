"""KL and entropy coefficients of each step: the controllers, the metrics they read, and their checkpoint.

    controllers = rules(penalties, steps=200, num_samples=64)
    states = start(controllers, penalties)
    for step in ...:
        metrics = update(batch, **coefs(states))            # kl_coef, entropy_coef
        states = advance(controllers, states, finalize(metrics))

A controller (`rlkit.controllers`) has one of these names:

| name            | adds to        | starts at      | measures                                                     |
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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from rlkit import controllers as library
from rlkit import losses
from rlkit._util.tensors import check_call
from rlkit.controllers import Coef, ScheduleState
from rlkit.loops.trial_losses import try_kl
from rlkit.rewards.failures import is_ours
from rlkit.settings import Penalties, refuse_if
from rlkit.types import Controller

Controllers = Mapping[str, Controller]
States = dict[str, Any]  # a controller's NamedTuple by its name

ADDS_TO = {"kl": "kl_coef", "kl_limit": "kl_coef", "entropy": "entropy_coef", "entropy_limit": "entropy_coef"}
MEASURED = {"kl_coef": "kl/ref", "entropy_coef": "entropy"}


def rules(penalties: Penalties, *, steps: int, num_samples: int) -> Controllers:
    """The controllers of the settings, for a run of `steps` steps of `num_samples` samples each.

    Errors: ValueError for a controller of an unknown name, and for a `kl_horizon` of at most a fifth of the samples of
    a step.
    """
    target, coef = penalties.kl_target or 0.0, penalties.kl_coef
    falling = {"end": 0.0, "num_updates": max(1, steps - 1)}  # the last step has 0
    out: dict[str, Controller] = {}
    match penalties.kl_controller or ("fixed" if penalties.kl_target is None else "linear"):
        case "linear":
            out["kl"] = library.kl_linear(target=target, rate=coef)
        case "exponential":
            least = 0.2 * num_samples
            if least >= penalties.kl_horizon:
                raise ValueError(f"`kl_horizon` must be above {least:g}, a fifth of the samples of a step: raise it")
            out["kl"] = library.kl_exponential(target=target, horizon=penalties.kl_horizon, num_samples=num_samples)
        case "pid":  # a KL of twice its target adds kl_coef at once, and a tenth of it in each step that it lasts
            gain = coef / target
            out["kl"] = library.kl_pid(target=target, kp=gain, ki=0.1 * gain)
        case "decay":
            out["kl"] = library.schedule_linear(**falling)
        case "cosine":
            out["kl"] = library.schedule_cosine(**falling)
    if penalties.kl_limit is not None:
        out["kl_limit"] = library.lagrange_at_most(bound=penalties.kl_limit, rate=penalties.limit_rate)
    if penalties.entropy_target is not None:
        out["entropy"] = library.target_entropy(target=penalties.entropy_target)
    if penalties.entropy_limit is not None:
        out["entropy_limit"] = library.lagrange_at_least(bound=penalties.entropy_limit, rate=penalties.limit_rate)
    if unknown := sorted(set(penalties.controllers) - set(ADDS_TO)):
        raise ValueError(f"controllers must be named {', '.join(ADDS_TO)}; got {', '.join(unknown)}")
    return {**out, **penalties.controllers}


def has_kl(penalties: Penalties, reference: Any) -> bool:
    """Whether `kl_coef` is, or may become, other than 0, so that each step needs the log-probs of `reference`.

    Errors: ValueError where `reference` is None, and this or `ref_sync_steps` needs it.
    """
    if reference is None and (penalties.has_kl or penalties.ref_sync_steps):
        raise ValueError("kl_coef, a KL controller and ref_sync_steps need a reference model")
    return penalties.has_kl


class KlTerm(NamedTuple):
    """Where the KL to the reference goes, and its estimator `f(logp, ref_logp)`, or `unbiased_kl` in the loss."""

    place: str = "loss"
    estimator: Callable[..., Tensor] = losses.unbiased_kl

    def in_loss(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        """The KL of each token as a loss."""
        extra = (old_logp,) if self.estimator is losses.unbiased_kl else ()
        return self.estimator(logp, ref_logp, *extra)


def kl_term(
    penalties: Penalties, kl_estimator: Callable[..., Tensor] | None = None, *, default: str = "loss"
) -> KlTerm:
    """The term of the settings with an estimator; None: `unbiased_kl` in the loss, `k1` elsewhere.

    `default` is the loop's own place. ValueError for an estimator without effect or meaning there. One of yours is
    called on a small vocabulary (`rlkit.loops.trial_losses.try_kl`).
    """
    refuse_if(kl_estimator and not penalties.has_kl, "`kl_estimator` requires `kl_coef` above 0, or `kl_limit`")
    place = penalties.kl_in or default
    estimator = kl_estimator or (losses.unbiased_kl if place == "loss" else losses.k1)
    unbiased = estimator is losses.unbiased_kl
    refuse_if(
        place == "loss" and estimator is losses.k1,
        "`kl_estimator` k1 in the loss has gradient 0 on average: use k2 or unbiased, or `kl_in` reward",
    )
    refuse_if(place != "loss" and unbiased, f"`kl_estimator` unbiased is for `kl_in` loss, not {place}")
    if not unbiased:
        check_call("kl_estimator", estimator, "kl_estimator(logp, ref_logp)")
    if not is_ours(estimator):
        try_kl(estimator, place=place)
    return KlTerm(place, estimator)


def start(
    controllers: Controllers, penalties: Penalties, *, saved: Mapping[str, Mapping[str, float]] | None = None
) -> States:
    """The initial states, or those of a checkpoint (`saved`, see `to_save`).

    A controller that the checkpoint lacks, or whose state has other fields there, gets its initial state.
    """
    constant = {"kl": penalties.kl_coef, "entropy": penalties.entropy_coef}
    states: States = {name: Coef(float(value)) for name, value in constant.items()}
    for name, controller in controllers.items():
        state = controller.init(constant.get(name, 0.0))
        old = (saved or {}).get(name, {})
        states[name] = type(state)(**old) if old.keys() == state._asdict().keys() else state
    return states


def coefs(states: States) -> dict[str, float]:
    """`kl_coef` and `entropy_coef` of the next step: the sums of their controllers' coefficients."""
    return {name: sum(states[x].coef for x in states if ADDS_TO[x] == name) for name in MEASURED}


def advance(controllers: Controllers, states: States, line: Mapping[str, float], *, skip_nan: bool = False) -> States:
    """The states after a step whose metrics are `line`.

    A controller whose metric is missing (no token of the policy was trained) keeps its state, but for a schedule, which
    counts steps. With a metric that is not finite the controller raises ValueError; with `skip_nan` it keeps its state.
    """
    new = dict(states)
    for name, controller in controllers.items():
        measured = line.get(MEASURED[ADDS_TO[name]])
        if isinstance(states[name], ScheduleState):
            new[name] = controller.update(states[name], 0.0)
        elif measured is not None and (math.isfinite(measured) or not skip_nan):
            new[name] = controller.update(states[name], measured)
    return new


def logged(controllers: Controllers, states: States) -> dict[str, float]:
    """`NAME/coef` of each controller, and of a constant that is not 0."""
    return {f"{name}/coef": state.coef for name, state in states.items() if name in controllers or state.coef}


def to_save(controllers: Controllers, states: States) -> dict[str, dict[str, float]]:
    """The controllers' states as JSON, for a checkpoint."""
    return {name: states[name]._asdict() for name in controllers}
