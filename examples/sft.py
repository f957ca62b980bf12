"""Supervised fine-tuning on your model and your conversations.

    python examples/sft.py --model PATH_OR_HUB_ID --data train.jsonl
    torchrun --nproc-per-node 8 examples/sft.py --parallel.tp 2 --model PATH_OR_HUB_ID --data train.jsonl

Every row holds `prompt` and `response` (strings), or `messages`; only assistant turns are trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import fixed_data as shared


@dataclass
class Args(shared.Args):
    output: Path = Path("runs/sft")
    """run folder: metrics, plot, checkpoints, exported model"""
    lora_rank: int = 0
    """rank of LoRA adapters on all linear layers, which then are all that trains; 0: every weight (needs peft)"""


def main(args: Args) -> Path:
    from flag_checks import with_device

    from rlkit.data.examples import sft_examples
    from rlkit.loops.sft import sft
    from rlkit.model.launch import load_policy, report_model

    args = with_device(args)
    tokenizer, examples, held_out, options = shared.prepared(args, sft_examples)
    model = load_policy(args.model, args.parallel, device=args.device, dtype=args.dtype, lora_rank=args.lora_rank)
    report_model(model, dtype=args.dtype)
    return sft(model, tokenizer, examples, eval_examples=held_out, **options)


if __name__ == "__main__":
    import tyro

    from rlkit.model.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
