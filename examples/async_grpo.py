"""GRPO with an engine that samples while the trainer trains, on your model, your prompts and your reward.

    python examples/async_grpo.py --model PATH_OR_HUB_ID --data train.jsonl --reward my_rewards.py:score

The engine has its own copy of the weights: in a process of its own (`--engine local`, small models, from a folder) or on
SGLang servers (`--engine sglang`). Data and rewards are those of examples/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import sampled_groups


@dataclass
class Args(sampled_groups.Args):
    output: Path = Path("runs/async_grpo")
    """run folder: metrics, trajectories, completions, plot, checkpoints, exported model"""
    staleness: float = 1.0
    """steps that a group may be older than the weights it trains; 1: sample one batch while training on the last"""
    engine_threads: int = 1
    """of the local engine"""
    engine_cpus: tuple[int, ...] = ()
    """processors the local engine may run on; none: all"""


def main(args: Args) -> Path:
    from flag_checks import with_device
    from sampled_engines import own_engine

    from rlkit.loops.grpo import grpo
    from rlkit.run.sync import run_sync

    args = with_device(args)
    model, tokenizer, options = sampled_groups.prepared(args)

    async def run() -> Path:
        async with own_engine(args, num_threads=args.engine_threads, cpus=args.engine_cpus) as engine:
            asynchronous = {"overlap": True, "journal": True, "staleness": args.staleness}
            return await grpo(model, tokenizer, engine, **asynchronous, **options)

    return run_sync(run())


if __name__ == "__main__":
    import tyro

    from rlkit.model.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
