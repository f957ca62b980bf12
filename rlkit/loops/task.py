"""The arguments of the loop and of an algorithm: a `Task` to train on, and the `Step` of `prepare` and `update`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlkit.data.order import Leg, Parts, check_parts, mixed_index
from rlkit.loops.evaluate import EvalSet
from rlkit.metrics import Metrics
from rlkit.rollout.groups import Env, Group, Prompt, Score, single_turn
from rlkit.types import Batch


@dataclass(frozen=True)
class Step:
    """The argument of `prepare` and `update`: the step's index, from 0, and the coefficients of its controllers.

    `check(batch)` stops the run at the first NaN or infinity in a stream; with `Rollouts.skip_nan` it drops the sample.
    `averages` are the rewards of earlier steps by role, where `rl` has a `role_average`.
    """

    index: int
    kl_coef: float
    entropy_coef: float
    check: Callable[[Batch], Batch]
    averages: Mapping[str, float] = field(default_factory=dict)


Prepare = Callable[[Sequence[Group], Step], Batch]
Update = Callable[[Batch, Step], Metrics]


@dataclass(frozen=True)
class Task:
    """The prompts, the environment and the reward.

    `score` gives an episode its reward (None: the environment does). A group that `keep_group` rejects is replaced by
    another one. `eval_prompts` are never trained on, nor are those of `eval_sets`, named sets with a reward and a
    sampling of their own. `parts` are the sizes and weights of consecutive parts of the prompts, which are mixed in
    these shares; (): each prompt comes once in a pass over all.
    Of several `objectives`, names of further numbers of the reward (`reward/NAME`), evaluations keep the Pareto front,
    see `rlkit.loops.pareto`.
    """

    prompts: Sequence[Prompt]
    score: Score | None
    env: Env = single_turn
    keep_group: Callable[[Group], bool] | None = None
    eval_prompts: Sequence[Prompt] = ()
    eval_sets: Mapping[str, EvalSet] = field(default_factory=dict)
    parts: Parts = ()
    objectives: Sequence[str] = ()

    @property
    def held_out(self) -> dict[str, EvalSet]:
        """All held-out sets, `eval_prompts` as the one named ""."""
        return ({"": EvalSet(self.eval_prompts)} if len(self.eval_prompts) else {}) | {**self.eval_sets}


def prompt_order(
    prompts: Sequence[Prompt], *, seed: int, parts: Parts = (), leg: Leg = Leg()
) -> Callable[[int], Prompt]:
    """Index in an endless stream -> prompt: each epoch visits all prompts, in its own order. A pure function.

    With `parts` they are mixed by their weights, see `rlkit.data.order.mixed_index`.
    """
    check_parts(len(prompts), parts)
    return lambda index: prompts[mixed_index(index, parts=parts or [(len(prompts), 1.0)], seed=seed, leg=leg)]
