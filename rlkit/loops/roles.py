"""A baseline for each role of an environment that remembers earlier steps: role-conditioned advantages (RAE).

    averages = start(rule, saved)                                      # rule: `rlkit.controllers.moving_average`
    for step in ...:
        states = {role: state.coef for role, state in averages.items()}
        batch = with_advantages(pack(groups), against(states, groups))
        averages = advance(rule, averages, groups)

The episodes of a role, "" in an environment without roles, are compared with the average of that role's rewards in
earlier steps. No group is needed: a step may play each game once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit.rollout.groups import Group, is_judged, last_pieces
from rlkit.types import Controller

Averages = dict[str, Any]  # a controller's NamedTuple by the role


def start(rule: Controller | None, saved: Mapping[str, Mapping[str, float]] | None = None) -> Averages:
    """The averages of a checkpoint (`saved`, the states as dicts); none before the first step and without a rule."""
    if rule is None:
        return {}
    names = rule.init(0.0)._asdict().keys()  # an average of another kind begins anew
    return {role: type(rule.init(0.0))(**state) for role, state in (saved or {}).items() if state.keys() == names}


def against(averages: Mapping[str, float], groups: Sequence[Group]) -> Callable[..., Tensor]:
    """A baseline for `rlkit.packing.with_advantages` of these groups: A = R - average of the episode's role.

    A role that was not met before has the average 0.
    """
    values = [averages.get(t.role, 0.0) for group in groups for t in group if not t.continues]

    def baseline(rewards: Tensor, *, group_ids: Tensor) -> Tensor:  # noqa: ARG001
        if rewards.numel() != len(values):
            raise ValueError("an average of a role's earlier rewards suits episodes, not turns: use another `baseline`")
        return rewards - torch.tensor(values).to(rewards)

    return baseline


def advance(rule: Controller | None, averages: Averages, groups: Sequence[Group]) -> Averages:
    """The averages after a step, each updated with the mean reward of its role, without failed episodes; a role that
    has none keeps its."""
    if rule is None:
        return averages
    rewards = defaultdict[str, list[float]](list)
    for t in (t for group in groups for t in last_pieces(group) if is_judged(t)):
        rewards[t.role].append(t.reward)
    states = {role: averages.get(role, rule.init(0.0)) for role in rewards}
    return averages | {role: rule.update(states[role], sum(values) / len(values)) for role, values in rewards.items()}
