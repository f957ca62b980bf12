"""Preference optimization on your model and your pairs: DPO and its variants.

    rlkit dpo --model MODEL --data pairs.jsonl
    rlkit dpo --model MODEL --data pairs.jsonl --loss simpo
    torchrun --nproc-per-node 8 -m rlkit.scripts.dpo ... --parallel.tp 2

Every row has `prompt` (a string) or `messages`, and `chosen` and `rejected` (strings or messages).
Or `chosen` and `rejected` are whole conversations.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rlkit.data.examples import preference_pairs
from rlkit.data.turns import PAIR
from rlkit.scripts.args import Data, Evaluation, Examples, Lora, Model
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.offline import Made, answer_sets, bring, make_examples
from rlkit.scripts.start import Place, load_policies, open_place
from rlkit.scripts.trial import own_loss, trial_of
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
    beta: Annotated[Positive | None, For("loss", *LOSSES)] = None
    """dpo: strength of the pull to the reference; simpo: scale of the margin of average log-probs; orpo: weight of its
    term. None: 0.1 (simpo: 2)"""
    label_smoothing: Annotated[BelowHalf, For("loss", "dpo", "cpo", "simpo", "robust_dpo", "exo_pair")] = 0.0
    """expected share of wrong labels (dpo, cpo, simpo, robust_dpo; exo_pair, where 0 stands for 1e-3)"""
    gamma: Annotated[NotNegative, For("loss", "simpo")] = 0.5
    """target margin"""
    margin_column: Annotated[str | None, For("loss", "dpo", "cpo")] = None
    """column of numbers that are subtracted from beta times the difference of the log-ratios (ODPO)"""
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
    user_loss = own_loss(args.loss.loss, trial_of(lambda trial: trial.try_pair_loss))
    if user_loss is None:  # args.json and the card have the number
        args = replace(args, loss=replace(args.loss, beta=beta_of(args.loss)))
    brought = bring(args, PAIR)
    place = open_place(args, brought)
    made = make_examples(args, brought, place, partial(preference_pairs, margin_column=args.loss.margin_column), PAIR)
    from rlkit.loops.preference import dpo

    has_reference = args.loss.loss not in NO_REFERENCE and not args.precompute_reference
    model, reference = load_policies(place, has_reference=has_reference, reference=args.reference)
    pairs, held_out = scored(args, place, made, model) if args.precompute_reference else (made.examples, made.held_out)
    loss, reduce = loss_of(args.loss, user_loss)
    return dpo(
        model, place.tokenizer, pairs, args.schedule, place.optim, reference=reference, loss=loss, reduce=reduce,
        sft_coef=args.loss.sft_coef, batch_size=args.examples.batch_size, eval_pairs=held_out,
        eval_sets=answer_sets(args, brought, place, model), parts=made.parts,
    )  # fmt: skip


def scored(args: Args, place: Place, made: Made, model: Any) -> tuple[Any, dict[str, Any]]:
    """The pairs, and those of each held-out set, with the log-probs of the reference, which is freed."""
    from rlkit.loops.preference import with_reference
    from rlkit.model.launch import load_policy

    first = load_policy(args.reference, **place.loading()) if args.reference else model  # a checkpoint is read later
    pairs = with_reference(made.examples, first, place.optim)
    held_out = {name: with_reference(part, first, place.optim) for name, part in made.held_out.items()}
    del first
    gc.collect()  # a sharded model is part of cycles
    return pairs, held_out


def beta_of(args: Loss) -> float:
    """`beta`, or that of the loss: SimPO's margin is of average log-probs."""
    return args.beta or (2.0 if args.loss == "simpo" else 0.1)


def loss_of(args: Loss, user_loss: Any) -> tuple[Any, Any]:
    """The loss of a pair, and the reduction of a response's tokens; `user_loss` is the user's loss, or None."""
    from rlkit import losses
    from rlkit.segments import mean_per_seq, sum_per_seq

    reduce = mean_per_seq if args.loss in ("simpo", "orpo", "ipo") else sum_per_seq
    if user_loss is not None:
        return user_loss, reduce
    options = {"beta": beta_of(args)}
    if args.label_smoothing or args.loss == "robust_dpo":
        options["label_smoothing"] = args.label_smoothing
    if args.loss == "simpo":
        options["gamma"] = args.gamma
    function = {"apo_zero": "kto", "cpo": "dpo"}.get(args.loss, args.loss)  # on other inputs: docs/preference.md
    return partial(getattr(losses, function), **options), reduce


if __name__ == "__main__":
    run(main, Args, __doc__)
