"""Supervised fine-tuning on your model and your conversations.

    python examples/sft.py --model PATH_OR_HUB_ID --data train.jsonl
    torchrun --nproc-per-node 8 examples/sft.py --parallel.tp 2 --model PATH_OR_HUB_ID --data train.jsonl

Every row holds `prompt` and `response` (strings), or `messages`; only assistant turns are trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """columns of the data under other names: `--rename instruction prompt output response`"""
    output: Path = Path("runs/sft")
    """run folder: metrics, plot, checkpoints, exported model"""
    eval_data: str | None = None
    """held-out rows for `eval/loss`; None: no evaluation"""
    steps: int = 300
    """optimizer steps"""
    batch_size: int = 64
    """examples of a step"""
    max_example_tokens: int = 2048
    """longer examples are dropped, counted and reported"""
    system_prompt: str | None = None
    """put before every conversation that has none"""
    chat_template: bool = True
    """render with the model's chat template; off for base models, whose rows are {prompt, response}"""
    lora_rank: int = 0
    """rank of LoRA adapters on all linear layers, which then are all that trains; 0: every weight (needs peft)"""
    lr: float = 1e-5
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
    """packed tokens of a micro-batch: lower it when memory is short"""
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
    from rlkit.data.sft import sft_examples
    from rlkit.loops.run import keep_args
    from rlkit.loops.sft import sft
    from rlkit.parallel.launch import load_policy
    from rlkit.parallel.model import check_path
    from rlkit.parallel.optim import schedule

    check_path(args.model)
    keep_args(args.output, args, resume=args.resume)
    torch.manual_seed(args.seed)
    rows = load_rows(args.data, rename=args.rename)
    eval_rows = load_rows(args.eval_data, rename=args.rename) if args.eval_data else []
    model = load_policy(args.model, args.parallel, device=args.device, dtype=args.dtype, lora_rank=args.lora_rank)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    render: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_tokens": args.max_example_tokens,
        "system_prompt": args.system_prompt,
        "apply_chat_template": args.chat_template,
    }
    examples, _ = sft_examples(rows, **render)
    eval_examples = sft_examples(eval_rows, **render)[0] if eval_rows else []
    return sft(
        model,
        tokenizer,
        examples,
        folder=args.output,
        steps=args.steps,
        batch_size=args.batch_size,
        lr_at=schedule(args.lr_schedule, lr=args.lr, num_steps=args.steps, warmup_steps=args.warmup_steps),
        weight_decay=args.weight_decay,
        max_norm=args.max_norm,
        max_tokens=args.max_tokens,
        dtype=args.dtype,
        eval_examples=eval_examples,
        eval_steps=args.eval_steps,
        save_steps=args.save_steps,
        keep=args.keep,
        seed=args.seed,
        resume=args.resume,
    )


if __name__ == "__main__":
    import tyro

    from rlkit.parallel.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
