"""KTO on your model and your labelled responses: each one by itself is marked as desirable or not.

    python examples/kto.py --model PATH_OR_HUB_ID --data labelled.jsonl
    python examples/kto.py --model PATH_OR_HUB_ID --data labelled.jsonl --undesirable-weight 2.5
    torchrun --nproc-per-node 8 examples/kto.py --parallel.tp 2 --model PATH_OR_HUB_ID --data labelled.jsonl

Every row holds `prompt` (a string) or `messages`, `completion` or `response` (a string or messages), and `label` (true
or false); `messages` alone is a conversation that ends with the response. Rows of preference pairs (see
examples/dpo.py) are read too, as two responses each.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import fixed_data as shared


@dataclass
class Args(shared.Args):
    output: Path = Path("runs/kto")
    """run folder: metrics, plot, checkpoints, exported model"""
    loss: Literal["kto", "apo_zero"] = "kto"
    """apo_zero measures from 0 where kto does from an estimate of the KL, which costs a forward of mismatched responses"""
    beta: float = 0.1
    """strength of the pull to the reference"""
    desirable_weight: float = 1.0
    """of the loss of a desirable response"""
    undesirable_weight: float = 1.0
    """of the others; for unbalanced data a hint says which"""
    reference: str | None = None
    """reference model; None: the initial weights of `model` (with LoRA, `model` without its adapter: no second one)"""
    lora_rank: int = 0
    """rank of LoRA adapters on all linear layers, which then are all that trains; 0: every weight (needs peft)"""
    lr: float = 1e-6
    """highest learning rate"""


def main(args: Args) -> Path:
    from flag_checks import with_device

    from rlkit import losses
    from rlkit.data.chat import check_same_tokens
    from rlkit.data.examples import labelled_examples
    from rlkit.loops.preference import kto
    from rlkit.model.launch import load_policy, reference_of, report_model

    args = with_device(args)
    weights = {"desirable_weight": args.desirable_weight, "undesirable_weight": args.undesirable_weight}
    tokenizer, examples, held_out, options = shared.prepared(args, labelled_examples)
    hint_at_labels(args, examples)
    if args.reference:
        check_same_tokens(tokenizer, args.reference)
    load = partial(load_policy, args=args.parallel, device=args.device, dtype=args.dtype)
    model = load(args.model, lora_rank=args.lora_rank)
    report_model(model, dtype=args.dtype)
    return kto(
        model,
        tokenizer,
        examples,
        eval_examples=held_out,
        reference=reference_of(model, args.reference, path=args.model, load=load),
        loss=partial(losses.kto_unpaired, beta=args.beta, **weights),
        reference_point=losses.kto_reference_point if args.loss == "kto" else None,
        **options,
    )


def hint_at_labels(args: Args, examples: list[Any]) -> None:
    """Warn of data of one label, and of weights outside the paper's range: w_d n_d / (w_u n_u) between 1 and 4/3."""
    good = sum(e.desirable for e in examples)
    bad = len(examples) - good
    if not (good and bad):
        logging.getLogger("rlkit.examples").warning(
            "%s: all %d responses are %s: KTO learns from the contrast, so add some of the other label",
            args.data, len(examples), "desirable" if good else "undesirable",
        )  # fmt: skip
    desirable, undesirable = args.desirable_weight * good, args.undesirable_weight * bad
    if 0 < good != bad > 0 and not undesirable <= desirable <= 4 / 3 * undesirable:
        logging.getLogger("rlkit.examples").warning(
            "%d desirable and %d undesirable responses: weigh them against that, with --undesirable-weight %.3g or "
            "--desirable-weight %.3g", good, bad, desirable / bad, undesirable / good
        )  # fmt: skip


if __name__ == "__main__":
    import tyro

    from rlkit.model.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
