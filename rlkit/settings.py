"""The flags `--parallel.*` of a script. Without torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parallel:
    """Sizes of the grid of ranks; their product, without `ep`, is the number of ranks."""

    replicate: int = 1
    """full copies of the sharded model (HSDP: shards inside a node, copies across nodes)"""
    shard: int = 0
    """ranks that share one copy of parameters, gradients and optimizer states (ZeRO-3); 0: all that are left"""
    cp: int = 1
    """ranks that share the tokens of a sequence"""
    tp: int = 1
    """ranks that share every matrix"""
    pp: int = 1
    """pipeline stages"""
    ep: int = 1
    """ranks that share the experts of a MoE layer, taken out of shard * cp * tp"""
    ulysses: bool = False
    """context parallel by exchanging heads for tokens instead of gathering keys"""


@dataclass(frozen=True)
class ParallelArgs(Parallel):
    """Sizes, and how a model is cut."""

    activation_checkpointing: bool = False
    """keep only each layer's input, and compute the rest again in the backward"""
    offload: bool = False
    """parameters, gradients and optimizer states in CPU memory"""
    compile: bool = False
    """compile each layer"""
    timeout_s: float = 1800.0
    """seconds that ranks wait for each other, e.g. for the slowest rollout, before the job ends with an error"""
