"""GRPO on your model, your prompts and your reward.

    rlkit grpo --model PATH_OR_HUB_ID --data train.jsonl --eval-data test.jsonl --reward my_rewards.py:score
    rlkit grpo ... --overlap                         asynchronous: sample while training
    torchrun --nproc-per-node 8 -m rlkit.scripts.grpo --parallel.tp 2 --engine sglang ...

Every row of the data holds `prompt` (a string) or `messages`, and whatever the reward needs, e.g. `answer`.
The reward is a Python function, `def score(completion: str, row: dict) -> float`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlkit.scripts.cli import Flat, run
from rlkit.scripts.common import Data, Lora, Model, named_or_file
from rlkit.scripts.rollouts import Engine, Episodes, load_models, open_engine, open_task
from rlkit.settings import (
    Finite,
    Limit,
    LimitOr0,
    Optim,
    Penalties,
    Rollouts,
    Schedule,
    check,
    check_all,
    is_default,
)  # fmt: skip

CONSTANTS: dict[str, dict[str, float]] = {  # those of the papers, as in docs/recipes.md
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"max_weight": 5.0},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
}
OF_SEQUENCES = ("gspo", "gmpo")
MEAN_OF_EPISODES = ("gspo", "gmpo", "sapo")


@dataclass(frozen=True)
class Loss:
    """The policy loss and the advantages."""

    loss: str = "ppo_clip"
    """ppo_clip, dual_clip, gspo, gmpo, cispo, sapo, or FILE.py:FUNCTION, `def loss(log_ratio, batch)` that returns a
    loss per token. All named ones coincide on-policy (one minibatch, one epoch)"""
    clip_low: LimitOr0 | None = None
    """the ratio is clipped below at 1 - clip_low; None: 0.2 (gspo: 3e-4, per sequence; gmpo: 0.4, of the logarithm)"""
    clip_high: LimitOr0 | None = None
    """the ratio is clipped above at 1 + clip_high; None: 0.28 (gspo: 4e-4; gmpo: 0.4)"""
    aggregate: Literal["token", "episode", "prompt", "length"] | None = None
    """loss average: over tokens, answers (as in the papers of GRPO and GSPO) or prompts; length: sum of an answer's
    tokens over --max-new-tokens (Dr. GRPO). None: episode for gspo, gmpo and sapo, else token"""
    baseline: Literal["group_centered", "group_zscore", "leave_one_out", "group_mean_batch_std", "max_rl", "gpg"] = (
        "group_centered"
    )
    """advantage estimator (docs/advantages.md); group_zscore divides by the group's standard deviation"""
    correction: Literal["tis", "icepop", "none"] = "tis"
    """for tokens that older weights, or an engine with other numerics, sampled: tis caps a token's weight, icepop drops
    tokens whose weight is outside [0.5, 5], none weighs every token by 1"""
    tis_max_weight: Limit = 2.0
    """the cap of tis"""
    success_range: tuple[Finite, Finite] | None = None
    """dynamic sampling: replace groups whose mean score is outside, e.g. 0.01 0.99; None: keep all"""

    def __post_init__(self) -> None:
        check(self)
        low, high = self.success_range or (0, 0)
        given = self.clip_low is not None or self.clip_high is not None
        check_all(
            (
                self.correction != "tis" and not is_default(self, "tis_max_weight"),
                "`tis_max_weight` is for `correction` tis",
            ),
            (low > high, f"`success_range` is from low to high, got {low} {high}"),
            (
                given and (self.loss in ("cispo", "sapo") or ":" in self.loss),
                f"`clip_low` and `clip_high` are not part of `loss` {self.loss}: drop them",
            ),
        )


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    episodes: Flat[Episodes]
    rollouts: Flat[Rollouts] = Rollouts()
    schedule: Flat[Schedule] = Schedule(Path("runs/grpo"), steps=200, eval_steps=25, save_steps=50)
    optim: Flat[Optim] = Optim()
    loss: Flat[Loss] = Loss()
    penalties: Flat[Penalties] = Penalties()
    reference: str | None = None
    """reference model; None: the initial weights of `model` (with LoRA, `model` without its adapter: no second one)"""
    lora: Flat[Lora] = Lora()
    engine: Flat[Engine] = Engine()


def main(args: Args) -> Path:
    """The folder of the exported model."""
    check_all(
        (
            args.rollouts.group_size < 2,
            "`group_size` must be at least 2: a sample is compared with the others of its prompt (or use ppo)",
        ),
        (
            args.rollouts.max_dropped is not None and args.loss.success_range is None,
            "`max_dropped` is a limit on `success_range`: give one",
        ),
    )
    surrogate = named_or_file("loss", args.loss.loss, tuple(CONSTANTS))
    args, tokenizer, task = open_task(args, keep_group=keep_group(args.loss))
    from rlkit import advantages
    from rlkit.loops.grpo import grpo
    from rlkit.run.sync import run_sync

    model, reference, rollouts = load_models(args, tokenizer)
    loss = policy_loss(args.loss, surrogate, max_length=rollouts.max_new_tokens)
    baseline = getattr(advantages, args.loss.baseline)

    async def train() -> Path:
        async with open_engine(args, model, tokenizer) as engine:
            return await grpo(
                model, tokenizer, engine, task, rollouts, args.schedule, args.optim, args.penalties, loss=loss,
                baseline=baseline, reference=reference,
            )  # fmt: skip

    return run_sync(train())


def keep_group(args: Loss) -> Any:
    """Which groups dynamic sampling keeps; None: all."""
    if args.success_range is None:
        return None
    from rlkit.rollout.limits import success_between

    return success_between(*args.success_range)


def policy_loss(args: Loss, surrogate: Any, *, max_length: int) -> Any:
    """The `PolicyLoss` of the flags; `surrogate` is the user's own, or None."""
    import torch

    from rlkit import losses
    from rlkit.loops import updates

    if surrogate is None:
        given = {"clip_low": args.clip_low, "clip_high": args.clip_high}
        constants = CONSTANTS[args.loss] | {name: value for name, value in given.items() if value is not None}
        function, of_sequences = getattr(losses, args.loss), args.loss in OF_SEQUENCES

        def surrogate(log_ratio: Any, batch: Any) -> Any:
            where = {"cu_seqlens": batch.cu_seqlens} if of_sequences else {}
            return function(log_ratio, batch.advantages, mask=batch.mask, **where, **constants)

    mean = args.aggregate or ("episode" if args.loss in MEAN_OF_EPISODES else "token")
    aggregate = getattr(updates, f"per_{mean}")
    corrections: dict[str, Any] = {
        "tis": partial(losses.tis, max_weight=args.tis_max_weight), "icepop": losses.icepop, "none": torch.ones_like,
    }  # fmt: skip
    return updates.PolicyLoss(
        surrogate,
        partial(aggregate, max_length=max_length) if mean == "length" else aggregate,
        corrections[args.correction],
    )


def cli() -> None:
    """The flags of the command line."""
    run(main, Args, __doc__)


if __name__ == "__main__":
    cli()
