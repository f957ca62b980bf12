"""Processes that have imported torch and transformers: forked from a server, which a pytest process starts once."""

import gc
import multiprocessing
import runpy
from multiprocessing.context import ForkServerContext

PRELOAD = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint",
    "transformers.models.qwen3.modeling_qwen3", "rlkit.model.forward", "rlkit.rollout.engines.process",
    "matplotlib.figure", "rlkit.data.tiny", "rlkit.loops.ppo", "rlkit.loops.preference", "rlkit.model.checkpoint",
    "torch.distributed.checkpoint.state_dict", "peft", "pytest",
]  # fmt: skip


def context(_method: str = "forkserver") -> ForkServerContext:
    """What `multiprocessing.get_context` returns, for any method."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOAD)
    return made


def run_file(path: str, names: dict[str, object]) -> None:
    """`runpy.run_path` in a forked process, whose collections leave the pages of the server shared."""
    gc.freeze()
    runpy.run_path(path, names)
