"""Train a reward model on pairs with the Bradley-Terry loss.

    rlkit reward_model --model MODEL --data pairs.jsonl
    torchrun --nproc-per-node 8 -m rlkit.scripts.reward_model ...

Every row has `prompt` (a string) or `messages`, and `chosen` and `rejected` (strings or messages).
Or `chosen` and `rejected` are whole conversations.

The export is a sequence classifier with one label.
Serve it, and `rlkit.rewards.judge.remote_reward_model` makes a reward of the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from rlkit.scripts.args import Data, Examples, Lora, Model
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.start import check_rank, offline, own_loss, report_adapter, trial_of, where
from rlkit.settings import For, NotNegative, Optim, Schedule, check, named


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    examples: Flat[Examples] = Examples()
    schedule: Flat[Schedule] = Schedule(Path("runs/reward_model"), steps=300, eval_steps=50, save_steps=100)
    optim: Flat[Optim] = Optim(lr=1e-5, lr_schedule="linear", warmup_steps=20)
    loss: Annotated[str, named("bradley_terry")] = "bradley_terry"
    """bradley_terry, or FILE.py:FUNCTION, `def loss(chosen, rejected)` of a pair's rewards"""
    center_coef: Annotated[NotNegative, For("loss", "bradley_terry")] = 0.01
    """weight of the penalty that pulls a pair's rewards towards 0"""
    lora: Flat[Lora] = Lora()

    def __post_init__(self) -> None:
        check(self)


def main(args: Args) -> Path:
    """Train, and return the folder of the exported model."""
    from rlkit.data.examples import preference_pairs
    from rlkit.data.rows import PAIR

    own = own_loss(args.loss, trial_of(lambda trial: trial.try_pair_loss))
    args, tokenizer, (pairs, parts), held_out, _ = offline(args, preference_pairs, PAIR)
    from rlkit.loops.reward_model import reward_model
    from rlkit.losses import bradley_terry
    from rlkit.model.launch import load_judge, report_model

    check_rank(args.model.model, args.lora.lora_rank)
    model = load_judge(args.model.model, **where(args), adapter=args.model.adapter, **args.lora.options())
    report_model(model, dtype=str(args.optim.dtype))
    report_adapter(args.model, args.lora)
    return reward_model(
        model, tokenizer, pairs, args.schedule, args.optim, eval_pairs=held_out, parts=parts,
        loss=own or partial(bradley_terry, center_coef=args.center_coef), batch_size=args.examples.batch_size,
    )  # fmt: skip


if __name__ == "__main__":
    run(main, Args, __doc__)
