"""Preference optimization on your model and your pairs: DPO and its relatives.

    python examples/dpo.py --model PATH_OR_HUB_ID --data pairs.jsonl
    python examples/dpo.py --model PATH_OR_HUB_ID --data pairs.jsonl --loss simpo --beta 2
    torchrun --nproc-per-node 8 examples/dpo.py --parallel.tp 2 --model PATH_OR_HUB_ID --data pairs.jsonl

Every row holds `prompt` (a string) or `messages`, and `chosen` and `rejected` (strings or messages); or `chosen` and
`rejected` are whole conversations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlkit.parallel.flags import ParallelArgs


@dataclass
class Args:
    model: str
    """folder written by save_pretrained, or a hub id"""
    data: str
    """JSON, JSONL, CSV, Parquet or Arrow file, save_to_disk folder or hub id (OWNER/NAME:CONFIG:SPLIT)"""
    rename: dict[str, str] = field(default_factory=dict)
    """columns of the data under other names: `--rename question prompt`"""
    output: Path = Path("runs/dpo")
    """run folder: metrics, plot, checkpoints, exported model"""
    eval_data: str | None = None
    """held-out pairs for `eval/loss`, `eval/accuracy` and `eval/margin`; None: no evaluation"""
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
    """reference model; None: the initial weights of `model`"""
    steps: int = 300
    """optimizer steps"""
    batch_size: int = 64
    """pairs of a step"""
    max_example_tokens: int = 2048
    """pairs whose prompt and longer response are longer are dropped, counted and reported"""
    system_prompt: str | None = None
    """put before every conversation that has none"""
    chat_template: bool = True
    """render with the model's chat template; off for base models and plain strings"""
    lora_rank: int = 0
    """rank of LoRA adapters on all linear layers, which then are all that trains; 0: every weight (needs peft)"""
    lr: float = 1e-6
    """highest learning rate"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """after the warm-up: stay, or fall to 0 at the last step"""
    warmup_steps: int = 20
    """steps until it is reached"""
    weight_decay: float = 0.0
    """of AdamW, on matrices only"""
    max_norm: float = 1.0
    """global gradient norm to clip to"""
    max_tokens: int = 16384
    """packed tokens of a micro-batch, a whole pair at least: lower it when memory is short"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """of the matrix products; weights and optimizer states are fp32"""
    device: str = "cpu"
    """where the model lives"""
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    """how the model is cut over the ranks of torchrun"""
    eval_steps: int = 50
    """steps between evaluations"""
    save_steps: int = 100
    """steps between checkpoints"""
    keep: int = 2
    """newest checkpoints to keep"""
    seed: int = 0
    """of the data order"""
    resume: bool = False
    """go on from the newest checkpoint in `output`"""


def main(args: Args) -> Path:
    import torch
    from transformers import AutoTokenizer

    from rlkit.data.load import load_rows
    from rlkit.data.pairs import preference_pairs
    from rlkit.loops.dpo import dpo
    from rlkit.loops.run import keep_args
    from rlkit.parallel.launch import load_policy
    from rlkit.parallel.model import check_path
    from rlkit.parallel.optim import schedule

    check_path(args.model)
    keep_args(args.output, args, resume=args.resume)
    torch.manual_seed(args.seed)
    rows = load_rows(args.data, rename=args.rename)
    eval_rows = load_rows(args.eval_data, rename=args.rename) if args.eval_data else []
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    render: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_tokens": args.max_example_tokens,
        "system_prompt": args.system_prompt,
        "apply_chat_template": args.chat_template,
    }
    pairs, _ = preference_pairs(rows, **render)
    eval_pairs = preference_pairs(eval_rows, **render)[0] if eval_rows else []
    load = partial(load_policy, args=args.parallel, device=args.device, dtype=args.dtype)
    loss, reduce, needs_reference = loss_of(args)
    model = load(args.model, lora_rank=args.lora_rank)
    reference = load(args.reference or args.model) if needs_reference else None
    return dpo(
        model,
        tokenizer,
        pairs,
        folder=args.output,
        steps=args.steps,
        reference=reference,
        loss=loss,
        reduce=reduce,
        sft_coef=args.sft_coef,
        batch_size=args.batch_size,
        lr_at=schedule(args.lr_schedule, lr=args.lr, num_steps=args.steps, warmup_steps=args.warmup_steps),
        weight_decay=args.weight_decay,
        max_norm=args.max_norm,
        max_tokens=args.max_tokens,
        dtype=args.dtype,
        eval_pairs=eval_pairs,
        eval_steps=args.eval_steps,
        save_steps=args.save_steps,
        keep=args.keep,
        seed=args.seed,
        resume=args.resume,
    )


def loss_of(args: Args) -> tuple[Any, Any, bool]:
    """The loss of a pair, how a response's tokens become its number, and whether a reference is subtracted."""
    from rlkit import losses
    from rlkit.segments import seq_mean, seq_sum

    options = {"beta": args.beta}
    if args.label_smoothing and args.loss not in ("dpo", "cpo", "simpo", "robust_dpo", "exo_pair"):
        raise ValueError(f"--label-smoothing is not part of {args.loss}")
    if args.label_smoothing or args.loss == "robust_dpo":
        options["label_smoothing"] = args.label_smoothing
    if args.loss == "simpo":
        options["gamma"] = args.gamma
    free = args.loss in ("simpo", "orpo", "cpo")
    if free and args.reference:
        raise ValueError(f"--loss {args.loss} compares log-probs without a reference: drop --reference")
    reduce = seq_mean if args.loss in ("simpo", "orpo", "ipo") else seq_sum
    return partial(getattr(losses, args.loss), **options), reduce, not free


if __name__ == "__main__":
    import tyro

    from rlkit.parallel.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
