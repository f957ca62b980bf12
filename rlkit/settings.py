"""Settings that travel together: plain data, the same objects in Python and on the command line.

Without torch, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rollouts:
    """How many samples a step takes, and how old they may be."""

    prompts_per_step: int = 8
    """groups of a batch"""
    group_size: int = 8
    """samples of each prompt"""
    staleness: float = 0.0
    """with `overlap`: steps that a group may be older than the weights; else: partial rollout, the share of additional
    groups that are started in a step, interrupted, and finished in the next one"""
    overlap: bool = False
    """sample while training; the engine needs weights of its own"""
    max_dropped: int | None = None
    """groups that may be refused in one step before the run stops; None: 20 * prompts_per_step"""
    journal: bool = False
    """keep every completion on disk, so that a killed run resumes with what it had sampled"""


@dataclass(frozen=True)
class Schedule:
    """The run folder, and what happens at which step."""

    folder: Path
    """run folder: metrics, trajectories, plot, checkpoints, exported model"""
    steps: int
    """batches to train on"""
    eval_steps: int = 0
    """steps between evaluations, of which the first is before any step; 0: none"""
    eval_samples: int = 1
    """samples of each held-out prompt"""
    print_steps: int = 1
    """print every n-th step, and those with an evaluation"""
    save_steps: int = 0
    """steps between checkpoints; 0: only the last"""
    keep: int = 2
    """newest checkpoints to keep"""
    seed: int = 0
    """of the prompts' order and the sampling"""
    resume: bool = False
    """go on from the newest checkpoint in `folder`"""
    skip_nan: bool = False
    """drop samples with NaN or infinities and skip optimizer steps whose gradient norm is not finite; off: stop"""


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
