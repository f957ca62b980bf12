"""PPO with a critic on your model, your prompts and your reward.

    rlkit ppo --model PATH_OR_HUB_ID --data train.jsonl --eval-data test.jsonl --reward my_rewards.py:score
    rlkit ppo ... --critic REWARD_MODEL --critic-steps 20 --kl-coef 0.02

The critic starts from `--critic`, or from the policy's weights with values that are 0. Data, rewards, environments and
engines are those of `rlkit grpo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlkit.scripts.cli import Flat, run
from rlkit.scripts.common import Data, Lora, Model, log, where
from rlkit.scripts.rollouts import Engine, Episodes, load_models, open_engine, open_task
from rlkit.settings import (
    Critic,
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


@dataclass(frozen=True)
class Loss:
    """The policy loss."""

    clip_low: LimitOr0 = 0.2
    """the ratio is clipped below at 1 - clip_low"""
    clip_high: LimitOr0 = 0.2
    """the ratio is clipped above at 1 + clip_high"""
    correction: Literal["tis", "icepop", "none"] = "tis"
    """for tokens that older weights, or an engine with other numerics, sampled: tis caps a token's weight, icepop drops
    tokens whose weight is outside [0.5, 5], none weighs every token by 1"""
    tis_max_weight: Limit = 2.0
    """the cap of tis"""

    def __post_init__(self) -> None:
        check(self)
        capped = self.correction == "tis" or is_default(self, "tis_max_weight")
        check_all((not capped, "`tis_max_weight` is for `correction` tis"))


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    episodes: Flat[Episodes]
    rollouts: Flat[Rollouts] = Rollouts(prompts_per_step=64, group_size=1)
    schedule: Flat[Schedule] = Schedule(Path("runs/ppo"), steps=200, eval_steps=25, save_steps=50)
    optim: Flat[Optim] = Optim()
    loss: Flat[Loss] = Loss()
    penalties: Flat[Penalties] = Penalties()
    critic: str | None = None
    """folder or hub id the critic starts from; None: `model`"""
    values: Flat[Critic] = Critic()
    reference: str | None = None
    """reference model; None: the initial weights of `model` (with LoRA, `model` without its adapter: no second one)"""
    lora: Flat[Lora] = Lora()
    engine: Flat[Engine] = Engine()


def main(args: Args) -> Path:
    """The folder of the exported model."""
    check_all((args.rollouts.max_dropped is not None, "`max_dropped` is for grpo, which can replace groups: drop it"))
    if args.values.critic_steps >= args.schedule.steps > 0:
        log.warning(
            "--critic-steps %d is not below --steps %d: only the critic learns, never the policy",
            args.values.critic_steps, args.schedule.steps,
        )  # fmt: skip
    args, tokenizer, task = open_task(args)
    import torch

    from rlkit.loops.ppo import ppo
    from rlkit.loops.updates import PolicyLoss, clipped, per_token
    from rlkit.losses import icepop, tis
    from rlkit.model.launch import load_critic, report_model
    from rlkit.run.sync import run_sync

    model, reference, rollouts = load_models(args, tokenizer)
    critic = load_critic(args.critic or args.model.model, **where(args))
    report_model(critic, dtype=str(args.optim.dtype), name="critic")
    tis_capped = partial(tis, max_weight=args.loss.tis_max_weight)
    corrections: dict[str, Any] = {"tis": tis_capped, "icepop": icepop, "none": torch.ones_like}
    clip = partial(clipped, clip_low=args.loss.clip_low, clip_high=args.loss.clip_high)
    loss = PolicyLoss(clip, per_token, corrections[args.loss.correction])

    async def train() -> Path:
        async with open_engine(args, model, tokenizer) as engine:
            return await ppo(
                model, critic, tokenizer, engine, task, rollouts, args.schedule, args.optim, args.penalties,
                args.values, loss=loss, reference=reference,
            )  # fmt: skip

    return run_sync(train())


def cli() -> None:
    """The flags of the command line."""
    run(main, Args, __doc__)


if __name__ == "__main__":
    cli()
