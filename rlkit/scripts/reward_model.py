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

from rlkit.data.examples import preference_pairs
from rlkit.data.turns import PAIR
from rlkit.scripts.args import Data, Examples, Lora, Model
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.offline import bring, make_examples
from rlkit.scripts.start import load_trained, open_place
from rlkit.scripts.trial import own_loss, trial_of
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
    """weight of the penalty that pulls the sum of a pair's rewards towards 0"""
    lora: Flat[Lora] = Lora()

    def __post_init__(self) -> None:
        check(self)


def main(args: Args) -> Path:
    """Train, and return the folder of the exported model."""
    user_loss = own_loss(args.loss, trial_of(lambda trial: trial.try_pair_loss))
    brought = bring(args, PAIR)
    place = open_place(args, brought)
    made = make_examples(args, brought, place, preference_pairs, PAIR)
    from rlkit.loops.reward_model import reward_model
    from rlkit.losses import bradley_terry
    from rlkit.model.launch import load_judge

    model = load_trained(place, partial(load_judge, **place.loading()))
    return reward_model(
        model, place.tokenizer, made.examples, args.schedule, place.optim, eval_pairs=made.held_out, parts=made.parts,
        loss=user_loss or partial(bradley_terry, center_coef=args.center_coef), batch_size=args.examples.batch_size,
    )  # fmt: skip


if __name__ == "__main__":
    run(main, Args, __doc__)
