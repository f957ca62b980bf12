"""Reinforcement learning for language models, as functions.

The names below, and the subpackages, are imported at first use: `import rlkit` loads nothing heavy, and
`rlkit.losses.cispo` works after it.
"""

from __future__ import annotations

import importlib
from pkgutil import iter_modules
from typing import Any

from rlkit._util.elsewhere import elsewhere as _find

__version__ = "0.1.0"

_NAMES = {
    "types": "Batch Completion LogProbs Trajectory",
    "settings": "Optim Penalties Rollouts SamplingParams Schedule",
    "packing": "from_padded microbatches pack split to_padded with_advantages",
    "advantages": "gae group_centered group_zscore leave_one_out",
    "losses": "k3 ppo_clip seq_mean tis token_mean unbiased_kl",
    "kernels.linear_logp": "linear_logp",
    "model.forward": "Policy load_model with_old_logp with_ref_logp",
    "model.optim": "adamw optimizer_step",
    "data.load": "load_rows",
    "data.prompts": "Prompt rl_prompts",
    "rollout.engines.local": "LocalEngine",
    "rewards.scoring": "scorer",
    "loops.preference": "pair_trajectories",
    "loops.task": "Task",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

_elsewhere = _find(__name__)

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"rlkit.{_HOMES[name]}"), name)
    if not name.startswith("_") and name in _submodules():
        return importlib.import_module(f"rlkit.{name}")
    return _elsewhere(name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", *_submodules()]


def _submodules() -> list[str]:
    return [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
