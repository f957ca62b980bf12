"""Preference optimization on your model and your pairs: DPO and its variants.

    rlkit dpo --model MODEL --data pairs.jsonl
    rlkit dpo --model MODEL --data pairs.jsonl --loss simpo --beta 2
    torchrun --nproc-per-node 8 -m rlkit.scripts.dpo ... --parallel.tp 2

Every row has `prompt` (a string) or `messages`, and `chosen` and `rejected` (strings or messages).
Or `chosen` and `rejected` are whole conversations.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rlkit.scripts.args import Data, Evaluation, Examples, Lora, Model
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.start import load_policies, offline, own_loss, trial_of, where
from rlkit.scripts.task import offline_sets
from rlkit.settings import OWN, BelowHalf, For, Needs, NotNegative, Optim, Positive, Schedule, Without, check, named

LOSSES = ("dpo", "ipo", "hinge", "robust_dpo", "exo_pair", "apo_zero", "nca_pair", "simpo", "orpo", "cpo")
NO_REFERENCE = ("simpo", "orpo", "cpo")
_OF_REFERENCE = For("loss", *(x for x in LOSSES if x not in NO_REFERENCE), OWN, why="the others have no reference")


@dataclass(frozen=True)
class Loss:
    """The loss of a pair."""

    loss: Annotated[str, named(*LOSSES), Needs("label_smoothing", of=("robust_dpo",), why="at 0 it is dpo")] = "dpo"
    """dpo, ipo, hinge, robust_dpo, exo_pair, apo_zero, nca_pair; without a reference model: simpo, orpo, cpo.
    Or FILE.py:FUNCTION, `def loss(chosen, rejected)` of a pair's log-ratios. See docs/preference.md"""
    beta: Annotated[Positive, For("loss", *LOSSES)] = 0.1
    """dpo: strength of the pull to the reference; simpo: scale of the margin (2 or more); orpo: weight of its term"""
    label_smoothing: Annotated[BelowHalf, For("loss", "dpo", "cpo", "simpo", "robust_dpo", "exo_pair")] = 0.0
    """expected share of wrong labels (dpo, cpo, simpo, robust_dpo; exo_pair: at least 1e-3)"""
    gamma: Annotated[NotNegative, For("loss", "simpo")] = 0.5
    """target margin"""
    sft_coef: NotNegative = 0.0
    """weight of the chosen response's NLL per token (orpo and cpo: 1 in the papers)"""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    evaluation: Flat[Evaluation] = Evaluation()
    examples: Flat[Examples] = Examples()
    schedule: Flat[Schedule] = Schedule(Path("runs/dpo"), steps=300, eval_steps=50, save_steps=100)
    optim: Flat[Optim] = Optim(lr=1e-6, lr_schedule="linear", warmup_steps=20)
    loss: Flat[Loss] = Loss()
    reference: Annotated[str | None, _OF_REFERENCE] = None
    """reference model; None: the initial weights of `model` (with LoRA, and no second copy: `model`
    without its adapter, or with `adapter` as it was)"""
    precompute_reference: Annotated[bool, _OF_REFERENCE, Without("stream", why="it reads all pairs")] = False
    """compute the reference's log-probs once, before training, and free it: less memory, and faster from epoch 2 on"""
    lora: Flat[Lora] = Lora()


def main(args: Args) -> Path:
    """Train, and return the folder of the exported model."""
    from rlkit.data.examples import preference_pairs
    from rlkit.data.rows import PAIR

    flags, has_reference = args.loss, args.loss.loss not in NO_REFERENCE
    own = own_loss(flags.loss, trial_of(lambda trial: trial.try_pair_loss))
    args, tokenizer, (pairs, parts), held_out, sets = offline(
        args, preference_pairs, PAIR, reference=args.reference, answers=offline_sets
    )
    from rlkit.loops.preference import dpo, with_reference
    from rlkit.model.launch import load_policy

    model, reference = load_policies(args, has_reference=has_reference and not args.precompute_reference)
    if args.precompute_reference:
        first = load_policy(args.reference, **where(args)) if args.reference else model  # a checkpoint is read later
        pairs = with_reference(pairs, first, args.optim)
        held_out = {name: with_reference(part, first, args.optim) for name, part in held_out.items()}
        del first
        gc.collect()  # a sharded model is part of cycles
    loss, reduce = loss_of(flags, own)
    return dpo(
        model, tokenizer, pairs, args.schedule, args.optim, reference=reference, loss=loss, reduce=reduce,
        sft_coef=flags.sft_coef, batch_size=args.examples.batch_size, eval_pairs=held_out,
        eval_sets=sets(tokenizer, model), parts=parts,
    )  # fmt: skip


def loss_of(args: Loss, own: Any) -> tuple[Any, Any]:
    """The loss of a pair, and the reduction of a response's tokens; `own` is the user's loss, or None."""
    from rlkit import losses
    from rlkit.segments import mean_per_seq, sum_per_seq

    reduce = mean_per_seq if args.loss in ("simpo", "orpo", "ipo") else sum_per_seq
    if own is not None:
        return own, reduce
    options = {"beta": args.beta}
    if args.label_smoothing or args.loss == "robust_dpo":
        options["label_smoothing"] = args.label_smoothing
    if args.loss == "simpo":
        options["gamma"] = args.gamma
    function = {"apo_zero": "kto", "cpo": "dpo"}.get(args.loss, args.loss)  # on other inputs: docs/preference.md
    return partial(getattr(losses, function), **options), reduce


if __name__ == "__main__":
    run(main, Args, __doc__)
