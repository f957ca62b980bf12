"""KTO on your model and single responses, each labelled desirable or undesirable.

    rlkit kto --model MODEL --data labelled.jsonl
    rlkit kto --model MODEL --data labelled.jsonl --undesirable-weight 2.5
    torchrun --nproc-per-node 8 -m rlkit.scripts.kto ... --parallel.tp 2

Every row has `prompt` (a string) or `messages`, `completion` or `response` (a string or messages),
and `label` (true or false). `messages` alone is a conversation that ends with the response.
Rows of preference pairs (see `rlkit dpo`) are read as two responses each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rlkit.data.examples import labelled_examples, name_one_label
from rlkit.data.turns import LABELLED, PAIR
from rlkit.scripts.args import Data, Examples, Lora, Model, log
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.offline import bring, make_examples
from rlkit.scripts.start import load_policies, open_place
from rlkit.scripts.trial import own_loss, trial_of
from rlkit.settings import NotNegative, Optim, Positive, Schedule, check, named, refuse_if


@dataclass(frozen=True)
class Loss:
    """The loss of a labelled response."""

    loss: Annotated[str, named("kto", "apo_zero")] = "kto"
    """kto, or apo_zero: reference point 0 instead of a KL estimate, which saves a forward of mismatched responses.
    Or FILE.py:FUNCTION, `def loss(log_ratio, desirable, *, kl, beta, desirable_weight, undesirable_weight)`"""
    beta: Positive = 0.1
    """strength of the pull to the reference"""
    desirable_weight: NotNegative = 1.0
    """weight of desirable responses"""
    undesirable_weight: NotNegative = 1.0
    """weight of undesirable responses; a warning suggests one for unbalanced data"""

    def __post_init__(self) -> None:
        check(self)
        nothing = self.desirable_weight == self.undesirable_weight == 0
        refuse_if(nothing, "`desirable_weight` and `undesirable_weight` are 0, so nothing trains: raise one")


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    examples: Flat[Examples] = Examples()
    schedule: Flat[Schedule] = Schedule(Path("runs/kto"), steps=300, eval_steps=50, save_steps=100)
    optim: Flat[Optim] = Optim(lr=1e-6, lr_schedule="linear", warmup_steps=20)
    loss: Flat[Loss] = Loss()
    reference: str | None = None
    """reference model; None: the initial weights of `model` (with LoRA, and no second copy: `model`
    without its adapter, or with `adapter` as it was)"""
    lora: Flat[Lora] = Lora()


def main(args: Args) -> Path:
    """Train, and return the folder of the exported model."""
    weights = {name: getattr(args.loss, name) for name in ("beta", "desirable_weight", "undesirable_weight")}
    user_loss = own_loss(args.loss.loss, trial_of(lambda trial: trial.try_label_loss, **weights))
    brought = bring(args, PAIR, LABELLED)
    place = open_place(args, brought)
    made = make_examples(args, brought, place, labelled_examples, PAIR, LABELLED)
    warn_of_labels(args.loss, brought.data, made.examples)
    from rlkit import losses
    from rlkit.loops.preference import kto

    model, reference = load_policies(place, has_reference=True, reference=args.reference)
    return kto(
        model, place.tokenizer, made.examples, args.schedule, place.optim, reference=reference,
        loss=partial(user_loss or losses.kto_unpaired, **weights), batch_size=args.examples.batch_size,
        reference_point=None if args.loss.loss == "apo_zero" else losses.kto_reference_point,
        eval_examples=made.held_out, parts=made.parts,
    )  # fmt: skip


def warn_of_labels(loss: Loss, data: Data, examples: list[Any]) -> None:
    """Warn of data with a single label, and of weights outside the paper's range: w_d n_d / (w_u n_u) in [1, 4/3]."""
    labels = [e.desirable for e in examples]
    good, bad = labels.count(True), labels.count(False)
    name_one_label(" ".join(data.files()), labels)
    desirable, undesirable = loss.desirable_weight * good, loss.undesirable_weight * bad
    if 0 < good != bad > 0 and not undesirable <= desirable <= 4 / 3 * undesirable:
        log.warning(
            "%d desirable and %d undesirable responses: balance them with --undesirable-weight %.3g or "
            "--desirable-weight %.3g", good, bad, desirable / bad, undesirable / good
        )  # fmt: skip


if __name__ == "__main__":
    run(main, Args, __doc__)
