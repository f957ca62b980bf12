"""Preference optimization on your model and your pairs: DPO and its relatives.

    rlkit dpo --model PATH_OR_HUB_ID --data pairs.jsonl
    rlkit dpo --model PATH_OR_HUB_ID --data pairs.jsonl --loss simpo --beta 2
    torchrun --nproc-per-node 8 -m rlkit.scripts.dpo --parallel.tp 2 --model PATH_OR_HUB_ID --data pairs.jsonl

Every row holds `prompt` (a string) or `messages`, and `chosen` and `rejected` (strings or messages); or `chosen` and
`rejected` are whole conversations.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlkit.scripts.cli import Flat, run
from rlkit.scripts.common import Data, Examples, Lora, Model, load_policies, named_or_file, offline, where
from rlkit.settings import NotNegative, Optim, Positive, Schedule, Share, check, check_all, is_default

LOSSES = ("dpo", "ipo", "hinge", "robust_dpo", "exo_pair", "apo_zero", "nca_pair", "simpo", "orpo", "cpo")
FREE = ("simpo", "orpo", "cpo")  # of a reference model
SMOOTHED = ("dpo", "cpo", "simpo", "robust_dpo", "exo_pair")


@dataclass(frozen=True)
class Loss:
    """The loss of a pair."""

    loss: str = "dpo"
    """dpo, ipo, hinge, robust_dpo, exo_pair, apo_zero, nca_pair, simpo, orpo, cpo (the last three need no reference
    model), or FILE.py:FUNCTION, `def loss(chosen, rejected)` of a pair's log-ratios. All are in docs/preference.md"""
    beta: Positive = 0.1
    """strength of the pull to the reference (dpo), scale of the margin (simpo: 2 or more), weight of the term (orpo)"""
    label_smoothing: Share = 0.0
    """share of labels expected to be wrong (dpo, cpo, simpo, robust_dpo; exo_pair: at least 1e-3)"""
    gamma: NotNegative = 0.5
    """target margin of simpo"""
    sft_coef: NotNegative = 0.0
    """weight of the chosen response's NLL per token (orpo and cpo: 1 in their papers)"""

    def __post_init__(self) -> None:
        check(self)
        check_all(
            (
                self.label_smoothing and self.loss not in SMOOTHED,
                f"`label_smoothing` is not part of {self.loss}: drop it",
            ),
            (
                self.loss != "simpo" and not is_default(self, "gamma"),
                f"`gamma` is the margin of simpo, and not part of {self.loss}: drop it",
            ),
            (":" in self.loss and not is_default(self, "beta"), f"`beta` is not part of {self.loss}: drop it"),
        )

    @property
    def free(self) -> bool:
        """Whether no reference is subtracted."""
        return self.loss in FREE


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    examples: Flat[Examples] = Examples()
    schedule: Flat[Schedule] = Schedule(Path("runs/dpo"), steps=300, eval_steps=50, save_steps=100)
    optim: Flat[Optim] = Optim(lr=1e-6, lr_schedule="linear", warmup_steps=20)
    loss: Flat[Loss] = Loss()
    reference: str | None = None
    """reference model; None: the initial weights of `model` (with LoRA, `model` without its adapter: no second one)"""
    precompute_reference: bool = False
    """compute the reference's log-probs once, before training, and free it: less memory, less work from epoch 2 on"""
    lora: Flat[Lora] = Lora()


def main(args: Args) -> Path:
    """The folder of the exported model."""
    from rlkit.data.examples import preference_pairs

    how = args.loss
    own = named_or_file("loss", how.loss, LOSSES)
    check_all(
        (args.reference and how.free, f"`loss` {how.loss} compares log-probs without a reference: drop `reference`"),
        (args.precompute_reference and how.free, f"`loss` {how.loss} has no reference: drop `precompute_reference`"),
    )
    args, tokenizer, pairs, held_out = offline(args, preference_pairs, args.reference)
    from rlkit.loops.preference import dpo, with_reference
    from rlkit.model.launch import load_policy

    model, reference = load_policies(args, has_reference=not how.free and not args.precompute_reference)
    if args.precompute_reference:
        first = load_policy(args.reference, **where(args)) if args.reference else model  # a checkpoint is read later
        pairs, held_out = (with_reference(part, first, args.optim) for part in (pairs, held_out))
        del first
        gc.collect()  # a sharded model is part of cycles
    loss, reduce = loss_of(how, own)
    return dpo(
        model, tokenizer, pairs, args.schedule, args.optim, reference=reference, loss=loss, reduce=reduce,
        sft_coef=how.sft_coef, batch_size=args.examples.batch_size, eval_pairs=held_out,
    )  # fmt: skip


def loss_of(args: Loss, own: Any) -> tuple[Any, Any]:
    """The loss of a pair, and how a response's tokens become its number; `own` is the user's own loss, or None."""
    from rlkit import losses
    from rlkit.segments import seq_mean, seq_sum

    reduce = seq_mean if args.loss in ("simpo", "orpo", "ipo") else seq_sum
    if own is not None:
        return own, reduce
    options = {"beta": args.beta}
    if args.label_smoothing or args.loss == "robust_dpo":
        options["label_smoothing"] = args.label_smoothing
    if args.loss == "simpo":
        options["gamma"] = args.gamma
    function = {"apo_zero": "kto", "cpo": "dpo"}.get(args.loss, args.loss)  # docs/preference.md says of which inputs
    return partial(getattr(losses, function), **options), reduce


def cli() -> None:
    """The flags of the command line."""
    run(main, Args, __doc__)


if __name__ == "__main__":
    cli()
