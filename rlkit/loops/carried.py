"""State that `rl` carries from step to step and saves: one value, `Carried`, and the rules that move it.

    given = rules(penalties, rollouts, steps=schedule.steps)
    now = start(given, penalties, saved=checkpoint)
    for step in ...:
        update(batch, Step(step, **of_step(now), check=...))
        now = after(given, now, finalize(metrics), groups)
    save(to_save(given, now))

A checkpoint that lacks a key of `to_save` starts that part anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.loops import coefficients, roles
from rlkit.rollout.groups import Group
from rlkit.settings import Penalties, Rollouts
from rlkit.types import Controller


class Rules(NamedTuple):
    """The controllers by their names (`rlkit.loops.coefficients`), and the rule of `rlkit.loops.roles`."""

    controllers: coefficients.Controllers
    role_average: Controller | None = None
    skip_nan: bool = False


class Carried(NamedTuple):
    """The controllers' states, and the average reward of each role."""

    coefs: coefficients.States
    averages: roles.Averages


def rules(penalties: Penalties, rollouts: Rollouts, *, steps: int, role_average: Controller | None = None) -> Rules:
    """The rules of a run of `steps` steps."""
    num_samples = rollouts.prompts_per_step * rollouts.group_size
    controllers = coefficients.rules(penalties, steps=steps, num_samples=num_samples)
    return Rules(controllers, role_average, rollouts.skip_nan)


def start(rules: Rules, penalties: Penalties, *, saved: Mapping[str, Any]) -> Carried:
    """The first value, or that of a checkpoint (`saved`, with the keys of `to_save`)."""
    return Carried(
        coefficients.start(rules.controllers, penalties, saved=saved.get("controllers")),
        roles.start(rules.role_average, saved.get("averages")),
    )


def of_step(now: Carried) -> dict[str, Any]:
    """`kl_coef`, `entropy_coef` and `averages` of a `Step`."""
    return {**coefficients.coefs(now.coefs), "averages": {role: state.coef for role, state in now.averages.items()}}


def after(rules: Rules, now: Carried, line: Mapping[str, float], groups: Sequence[Group]) -> Carried:
    """The value after a step with the metrics `line` on `groups`."""
    return now._replace(
        coefs=coefficients.advance(rules.controllers, now.coefs, line, skip_nan=rules.skip_nan),
        averages=roles.advance(rules.role_average, now.averages, groups),
    )


def logged(rules: Rules, now: Carried) -> dict[str, float]:
    """The coefficients of the step that ends."""
    return coefficients.logged(rules.controllers, now.coefs)


def to_save(rules: Rules, now: Carried) -> dict[str, Any]:
    """The value as JSON, for a checkpoint."""
    return {
        "controllers": coefficients.to_save(rules.controllers, now.coefs),
        "averages": {role: state._asdict() for role, state in now.averages.items()},
    }
