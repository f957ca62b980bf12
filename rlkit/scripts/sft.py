"""Supervised fine-tuning on your model and your conversations.

    rlkit sft --model MODEL --data train.jsonl
    torchrun --nproc-per-node 8 -m rlkit.scripts.sft ... --parallel.tp 2

Every row has `prompt` and `response` or `completion`, or `messages`; only assistant turns are trained on.
Or it has `text`, which is trained on whole. Files of other libraries are read as they are: docs/data.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlkit.data.examples import sft_examples
from rlkit.data.turns import SFT
from rlkit.scripts.args import Data, Evaluation, Examples, Lora, Model
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.offline import answer_sets, bring, make_examples
from rlkit.scripts.start import load_policies, open_place
from rlkit.settings import Optim, Schedule


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    evaluation: Flat[Evaluation] = Evaluation()
    examples: Flat[Examples] = Examples()
    schedule: Flat[Schedule] = Schedule(Path("runs/sft"), steps=300, eval_steps=50, save_steps=100)
    optim: Flat[Optim] = Optim(lr=1e-5, lr_schedule="linear", warmup_steps=20)
    lora: Flat[Lora] = Lora()
    loss: Literal["nll", "dft"] = "nll"
    """nll: negative log-likelihood; dft: weighted by the token's probability (rlkit.losses.dft). Both log the NLL"""


def main(args: Args) -> Path:
    """Train, and return the folder of the exported model."""
    brought = bring(args, *SFT)
    place = open_place(args, brought)
    made = make_examples(args, brought, place, sft_examples, *SFT)
    from rlkit.loops.sft import sft
    from rlkit.losses import dft

    model, _ = load_policies(place, has_reference=False)
    return sft(
        model, place.tokenizer, made.examples, args.schedule, place.optim, batch_size=args.examples.batch_size,
        eval_examples=made.held_out, eval_sets=answer_sets(args, brought, place, model), parts=made.parts,
        loss=dft if args.loss == "dft" else None,
    )  # fmt: skip


if __name__ == "__main__":
    run(main, Args, __doc__)
