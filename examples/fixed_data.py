"""What examples/sft.py, dpo.py, kto.py and reward_model.py share: flags and data of training on what was written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlkit.settings import ParallelArgs


@dataclass
class Args:
    model: str
    """folder written by save_pretrained, or a hub id"""
    data: str
    """JSON, JSONL, CSV, Parquet or Arrow file, save_to_disk folder or hub id (OWNER/NAME:CONFIG:SPLIT)"""
    rename: dict[str, str] = field(default_factory=dict)
    """columns of the data under other names: `--rename question prompt output response`"""
    output: Path = Path("runs")
    """run folder: metrics, plot, checkpoints, exported model"""
    eval_data: str | None = None
    """held-out rows, for `eval/loss` and, of preferences, `eval/accuracy` and more; None: no evaluation"""
    steps: int = 300
    """optimizer steps"""
    batch_size: int = 64
    """examples, pairs or labelled responses of a step"""
    max_example_tokens: int = 2048
    """longer examples, or pairs with a longer response, are dropped, counted and reported"""
    system_prompt: str | None = None
    """put before every conversation that has none"""
    chat_template: bool = True
    """render with the model's chat template; off for base models and plain strings"""
    template_args: str = "{}"
    """JSON of what else the chat template takes, e.g. {"enable_thinking": false} for Qwen3"""
    lr: float = 1e-5
    """highest learning rate"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """after the warm-up: stay, or fall to 0 at the last step"""
    warmup_steps: int = 20
    """steps until it is reached"""
    weight_decay: float = 0.0
    """of AdamW, on matrices only"""
    max_norm: float = 1.0
    """global gradient norm to clip to; inf: not clipped"""
    max_tokens: int = 16384
    """packed tokens of a micro-batch, a whole pair at least: lower it when memory is short"""
    dtype: Literal["fp32", "bf16"] | None = None
    """of the matrix products; weights and optimizer states are fp32. None: bf16 on a CUDA GPU, else fp32"""
    device: str | None = None
    """cpu, cuda, or mps (untested). None: cuda where there is a GPU, else cpu; ranks of torchrun take a GPU each"""
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    """how the model is cut over the ranks of torchrun"""
    eval_steps: int = 50
    """steps between evaluations, of which the first is before any step; 0: none"""
    print_steps: int = 1
    """print every n-th step, and those with an evaluation; metrics.jsonl has all of them"""
    save_steps: int = 100
    """steps between checkpoints; 0: only the last"""
    keep: int = 2
    """newest checkpoints to keep"""
    seed: int = 0
    """of the data order"""
    deterministic: bool = False
    """reproducible CUDA kernels: a resumed run on GPUs repeats every bit, more slowly; on CPUs it does so anyway"""
    resume: bool = False
    """go on from the newest checkpoint in `output`"""


def prepared(
    args: Args, read: Callable[..., tuple[list[Any], int]]
) -> tuple[Any, list[Any], list[Any], dict[str, Any]]:
    """The tokenizer, the training data and the held-out data as `read` makes them of rows, and the keywords of a loop
    that all of these flags say; the run folder is made."""
    import torch
    from flag_checks import check_values, template_args
    from transformers import AutoTokenizer

    from rlkit.data.load import load_rows
    from rlkit.model.forward import check_path
    from rlkit.model.launch import make_deterministic
    from rlkit.model.optim import schedule
    from rlkit.run.folder import keep_args

    check_values(args)
    given = template_args(args)
    check_path(args.model)
    keep_args(args.output, args, resume=args.resume)
    torch.manual_seed(args.seed)
    if args.deterministic:
        make_deterministic(args.seed)
    rows = load_rows(args.data, rename=args.rename)
    held_out = load_rows(args.eval_data, rename=args.rename) if args.eval_data else []
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    render: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_example_tokens": args.max_example_tokens,
        "system_prompt": args.system_prompt,
        "apply_chat_template": args.chat_template,
        "template_args": given,
    }
    options = {
        "folder": args.output,
        "steps": args.steps,
        "batch_size": args.batch_size,
        "lr_at": schedule(args.lr_schedule, lr=args.lr, num_steps=args.steps, warmup_steps=args.warmup_steps),
        "weight_decay": args.weight_decay,
        "max_norm": args.max_norm,
        "max_tokens": args.max_tokens,
        "dtype": args.dtype,
        "eval_steps": args.eval_steps,
        "print_steps": args.print_steps,
        "save_steps": args.save_steps,
        "keep": args.keep,
        "seed": args.seed,
        "resume": args.resume,
    }
    return tokenizer, read(rows, **render)[0], read(held_out, **render)[0] if held_out else [], options
