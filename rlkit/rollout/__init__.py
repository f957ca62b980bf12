"""From prompts to groups of trajectories.

rollout                         groups for a list of prompts, the function of `groups`
groups, stream, limits          episodes and environments; an endless, interruptible stream; filters and limits
envs.turns, text, envs.chat     episodes in tokens, in text, in messages
envs.gym, .tools                environments: Gym-like objects, functions to call (programs: `rlkit.agents.endpoint`)
shared, saved                   one engine for several ranks; samples of a run that are read again
engines.local, .process         the local engine, in this process or its own
engines.servers                 what SGLang and vLLM share: requests, replicas, weights
engines.sglang                  SGLang servers
engines.vllm                    vLLM servers
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlkit._util.elsewhere import elsewhere
from rlkit._util.platform import refuse_windows

if TYPE_CHECKING:
    from rlkit.rollout.groups import rollout as rollout

refuse_windows(__name__)

_elsewhere = elsewhere(__name__)

__all__ = ["rollout"]


def __getattr__(name: str) -> Any:
    """`rollout` is imported at its first use: the package itself loads no torch."""
    return importlib.import_module("rlkit.rollout.groups").rollout if name == "rollout" else _elsewhere(name)
