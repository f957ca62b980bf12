"""Preference optimization on your model and your pairs: DPO and its relatives.

    python examples/dpo.py --model PATH_OR_HUB_ID --data pairs.jsonl
    python examples/dpo.py --model PATH_OR_HUB_ID --data pairs.jsonl --loss simpo --beta 2
    torchrun --nproc-per-node 8 examples/dpo.py --parallel.tp 2 --model PATH_OR_HUB_ID --data pairs.jsonl

Every row holds `prompt` (a string) or `messages`, and `chosen` and `rejected` (strings or messages); or `chosen` and
`rejected` are whole conversations.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import fixed_data as shared


@dataclass
class Args(shared.Args):
    output: Path = Path("runs/dpo")
    """run folder: metrics, plot, checkpoints, exported model"""
    loss: Literal["dpo", "ipo", "hinge", "robust_dpo", "exo_pair", "apo_zero", "nca_pair", "simpo", "orpo", "cpo"] = (
        "dpo"
    )
    """of a pair; simpo, orpo and cpo need no reference model. More, and what each does: docs/preference.md"""
    beta: float = 0.1
    """strength of the pull to the reference (dpo), scale of the margin (simpo: 2 or more), weight of the term (orpo)"""
    label_smoothing: float = 0.0
    """share of labels expected to be wrong (dpo, cpo, simpo, robust_dpo; exo_pair: at least 1e-3)"""
    gamma: float = 0.5
    """margin that simpo asks for"""
    sft_coef: float = 0.0
    """weight of the chosen response's NLL per token (orpo and cpo: 1 in their papers)"""
    reference: str | None = None
    """reference model; None: the initial weights of `model` (with LoRA, `model` without its adapter: no second one)"""
    precompute_reference: bool = False
    """compute the reference's log-probs once, before training, and free it: less memory, less work from epoch 2 on"""
    lora_rank: int = 0
    """rank of LoRA adapters on all linear layers, which then are all that trains; 0: every weight (needs peft)"""
    lr: float = 1e-6
    """highest learning rate"""


def main(args: Args) -> Path:
    from flag_checks import with_device

    from rlkit.data.chat import check_same_tokens
    from rlkit.data.examples import preference_pairs
    from rlkit.loops.preference import dpo, with_reference
    from rlkit.model.launch import load_policy, reference_of, report_model

    args = with_device(args)
    loss, reduce, needs_reference = loss_of(args)
    tokenizer, pairs, held_out, options = shared.prepared(args, preference_pairs)
    if args.reference:
        check_same_tokens(tokenizer, args.reference)
    load = partial(load_policy, args=args.parallel, device=args.device, dtype=args.dtype)
    model = load(args.model, lora_rank=args.lora_rank)
    report_model(model, dtype=args.dtype)
    reference = None
    if needs_reference and args.precompute_reference:
        first = load(args.reference) if args.reference else model  # a checkpoint is only read later
        scoring = {"max_tokens": args.max_tokens, "dtype": args.dtype}
        pairs, held_out = with_reference(pairs, first, **scoring), with_reference(held_out, first, **scoring)
        del first
        gc.collect()  # a sharded model is part of cycles
    elif needs_reference:
        reference = reference_of(model, args.reference, path=args.model, load=load)
    how = {"reference": reference, "loss": loss, "reduce": reduce, "sft_coef": args.sft_coef}
    return dpo(model, tokenizer, pairs, eval_pairs=held_out, **how, **options)


def loss_of(args: Args) -> tuple[Any, Any, bool]:
    """The loss of a pair, how a response's tokens become its number, and whether a reference is subtracted."""
    from rlkit import losses
    from rlkit.segments import seq_mean, seq_sum

    options = {"beta": args.beta}
    if args.label_smoothing and args.loss not in ("dpo", "cpo", "simpo", "robust_dpo", "exo_pair"):
        raise ValueError(f"--label-smoothing is not part of {args.loss}: drop it")
    if args.label_smoothing or args.loss == "robust_dpo":
        options["label_smoothing"] = args.label_smoothing
    if args.loss == "simpo":
        options["gamma"] = args.gamma
    elif args.gamma != Args.gamma:
        raise ValueError(f"--gamma is the margin of simpo, and not part of {args.loss}: drop it")
    free = args.loss in ("simpo", "orpo", "cpo")
    if free and args.reference:
        raise ValueError(f"--loss {args.loss} compares log-probs without a reference: drop --reference")
    if free and args.precompute_reference:
        raise ValueError(f"--loss {args.loss} has no reference: drop --precompute-reference")
    reduce = seq_mean if args.loss in ("simpo", "orpo", "ipo") else seq_sum
    function = {"apo_zero": "kto", "cpo": "dpo"}.get(args.loss, args.loss)  # docs/preference.md says of which inputs
    return partial(getattr(losses, function), **options), reduce, not free


if __name__ == "__main__":
    import tyro

    from rlkit.model.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
