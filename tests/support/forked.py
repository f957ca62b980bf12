"""Processes that have imported torch and transformers: forked from a server, which a pytest process starts once."""

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOAD = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint",
    "transformers.models.qwen3.modeling_qwen3", "rlkit.model.forward", "rlkit.rollout.engines.process",
    "matplotlib.figure",
]  # fmt: skip


def context(_method: str = "forkserver") -> ForkServerContext:
    """What `multiprocessing.get_context` returns, for any method."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOAD)
    return made
