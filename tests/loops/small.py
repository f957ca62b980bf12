"""What the tests of the loops share: a tiny model, an engine with its own weights, and settings from flat keywords."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from functools import cache, wraps

import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.loops.updates import PolicyLoss
from rlkit.model.forward import prepare_model
from rlkit.rollout.engines.local import LocalEngine
from rlkit.settings import Critic, Optim, Penalties, Rollouts, Schedule

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
SETTINGS = {
    "task": Task,
    "rollouts": Rollouts,
    "schedule": Schedule,
    "optim": Optim,
    "penalties": Penalties,
    "critic": Critic,
}


def call(loop, *args, **flat):
    """`loop(*args, ...)` with the fields of all its settings as keywords, as on a command line."""
    parameters = inspect.signature(loop).parameters
    given = {name: kind for name, kind in SETTINGS.items() if name in parameters}
    given |= {"loss": PolicyLoss} if {"surrogate", "correction", "aggregate"} & flat.keys() else {}
    made = {
        name: kind(**{f.name: flat.pop(f.name) for f in fields(kind) if f.name in flat}) for name, kind in given.items()
    }
    return loop(*args, **made, **flat)


@wraps(grpo)
def async_grpo(*args, rollouts, **options):
    """`grpo` with an engine that samples while a step trains."""
    return grpo(*args, rollouts=replace(rollouts, overlap=True), **options)


@cache
async def unchanged(_prompt, trajectories):
    return trajectories


def tokenizer():
    return tiny_tokenizer()


def small_model(seed=0, **sizes):
    return prepare_model(tiny_model(tokenizer(), **SIZES | sizes, seed=seed))


class CopyEngine(LocalEngine):
    """A LocalEngine with its own model: new weights are copied into it, between two of its steps."""

    def __init__(self, sizes=SIZES, **options):
        super().__init__(tiny_model(tokenizer(), **sizes), max_len=64, **options)

    async def update_weights(self, weights=None, *, version):
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)
        await super().update_weights(version=version)
