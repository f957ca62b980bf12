"""GRPO on your model, your prompts and your reward.

    python examples/grpo.py --model PATH_OR_HUB_ID --data train.jsonl --eval-data test.jsonl --reward my_rewards.py:score
    torchrun --nproc-per-node 8 examples/grpo.py --parallel.tp 2 --engine sglang ...

Every row of the data holds `prompt` (a string) or `messages`, and whatever the reward needs, e.g. `answer`.
The reward is a Python function, `def score(completion: str, row: dict) -> float`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import sampled_groups


@dataclass
class Args(sampled_groups.Args):
    output: Path = Path("runs/grpo")
    """run folder: metrics, trajectories, plot, checkpoints, exported model"""
    staleness: float = 0.0
    """partial rollout: start so many times more groups than a step needs, interrupt the last ones and go on with them
    in the next step; 0: every step waits for all of its groups"""
    drop_off_policy: bool = False
    """of interrupted answers, train only on tokens of the newest weights"""
    journal: bool = False
    """keep every completion on disk, so that a killed run resumes with what it had sampled (always so with sglang)"""


def main(args: Args) -> Path:
    from flag_checks import with_device
    from sampled_engines import open_engine

    from rlkit.loops.grpo import grpo
    from rlkit.run.sync import run_sync

    args = with_device(args)
    model, tokenizer, options = sampled_groups.prepared(args)

    async def run() -> Path:
        async with open_engine(args, model, tokenizer) as engine:
            return await grpo(
                model,
                tokenizer,
                engine,
                staleness=args.staleness,
                drop_off_policy=args.drop_off_policy,
                journal=args.journal or args.engine == "sglang",
                **options,
            )

    return run_sync(run())


if __name__ == "__main__":
    import tyro

    from rlkit.model.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
