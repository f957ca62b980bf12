"""A reward model from your model and your pairs, by the Bradley-Terry loss.

    python examples/reward_model.py --model PATH_OR_HUB_ID --data pairs.jsonl
    torchrun --nproc-per-node 8 examples/reward_model.py --parallel.tp 2 --model PATH_OR_HUB_ID --data pairs.jsonl

The export is a sequence classifier with one label: serve it, and it is a reward (`rlkit.rewards.judge.remote_reward_model`).

Every row holds `prompt` (a string) or `messages`, and `chosen` and `rejected` (strings or messages); or `chosen` and
`rejected` are whole conversations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fixed_data as shared


@dataclass
class Args(shared.Args):
    output: Path = Path("runs/reward_model")
    """run folder: metrics, plot, checkpoints, exported model"""
    center_coef: float = 0.01
    """pull of a pair's rewards towards 0"""


def main(args: Args) -> Path:
    from flag_checks import with_device

    from rlkit.data.examples import preference_pairs
    from rlkit.loops.reward_model import reward_model
    from rlkit.losses import bradley_terry
    from rlkit.model.launch import load_judge, report_model

    args = with_device(args)
    tokenizer, pairs, held_out, options = shared.prepared(args, preference_pairs)
    model = load_judge(args.model, args.parallel, device=args.device, dtype=args.dtype)
    report_model(model, dtype=args.dtype)
    loss = partial(bradley_terry, center_coef=args.center_coef)
    return reward_model(model, tokenizer, pairs, loss=loss, eval_pairs=held_out, **options)


if __name__ == "__main__":
    import tyro

    from rlkit.model.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
