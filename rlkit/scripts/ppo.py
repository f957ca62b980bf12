"""PPO with a critic on your model, your prompts and your reward.

    rlkit ppo --model MODEL --data train.jsonl --reward my_rewards.py:score
    rlkit ppo ... --critic REWARD_MODEL --critic-steps 20 --kl-coef 0.02

The critic starts from `--critic`, or from the policy's weights with a value head of 0.
Data, rewards, environments and engines are those of `rlkit grpo`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from rlkit.scripts.args import Correction, Data, Episodes, Estimator, Evaluation, KlEstimator, Lora, Model, log
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.start import Place, check_rank, open_place
from rlkit.scripts.task import bring, clipped_loss, load_models, make_task, with_engine
from rlkit.scripts.trial import advantage_of, kl_estimator_of
from rlkit.settings import (
    OF_KL,
    Bins,
    CountOr0,
    Critic,
    Engines,
    LimitOr0,
    Optim,
    Penalties,
    Rollouts,
    Schedule,
    check,
    refuse_if,
)


@dataclass(frozen=True)
class Loss:
    """The policy loss."""

    clip_low: LimitOr0 = 0.2
    """clip the ratio below at 1 - clip_low"""
    clip_high: LimitOr0 = 0.2
    """clip the ratio above at 1 + clip_high"""
    advantage: Estimator = "gae"
    """estimator of the advantages (docs/advantages.md): gae, vapo, td_lambda, n_step, vtrace or retrace, with those of
    --gamma, --lam-policy and --lam-value that it has; further arguments in brackets: "n_step(n=16)".
    Or FILE.py:FUNCTION, `def advantage(batch, bootstrap)`"""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    episodes: Flat[Episodes]
    evaluation: Flat[Evaluation] = Evaluation()
    rollouts: Flat[Rollouts] = Rollouts(prompts_per_step=64, group_size=1)
    schedule: Flat[Schedule] = Schedule(Path("runs/ppo"), steps=200, eval_steps=25, save_steps=50)
    optim: Flat[Optim] = Optim()
    loss: Flat[Loss] = Loss()
    correction: Flat[Correction] = field(default_factory=Correction)
    penalties: Flat[Penalties] = Penalties()
    kl: Flat[KlEstimator] = KlEstimator()
    critic: str | None = None
    """folder or hub id that the critic starts from, e.g. a reward model; None: `model`"""
    values: Flat[Critic] = Critic()
    reference: Annotated[str | None, OF_KL] = None
    """reference model; None: the initial weights of `model` (with LoRA, and no second copy: `model`
    without its adapter, or with `adapter` as it was)"""
    lora: Flat[Lora] = Lora()
    bins: Flat[Bins] = Bins()
    critic_lora_rank: CountOr0 = 0
    """rank of LoRA adapters of the critic, which train with its head alone; 0: train all its weights"""
    engine: Flat[Engines] = Engines()

    def __post_init__(self) -> None:
        refuse_if(
            self.loss.advantage.partition("(")[0] == "vtrace" and self.correction.correction == "none",
            "`advantage` vtrace leaves the ratio to the sampling policy to `correction`: drop none (IMPALA: tis, with "
            "`tis_max_weight` 1)",
        )


def main(args: Args) -> Path:
    """Train, and return the folder of the exported model."""
    advantage = advantage_of(args.loss.advantage, args, critic=args.values)
    kl_estimator = kl_estimator_of(args.kl, args.penalties, place="reward")
    brought = bring(args)
    place = open_place(args, brought)
    task = make_task(args, brought, place)
    from rlkit.loops.ppo import ppo

    load_critic = checked_critic(args, place)
    model, reference, rollouts = load_models(args, place)
    critic = load_critic()
    return with_engine(args, place, model, lambda engine: ppo(
        model, critic, place.tokenizer, engine, task, rollouts, args.schedule, place.optim, args.penalties,
        args.values, loss=clipped_loss(args.loss, args.correction), advantage=advantage, kl_estimator=kl_estimator,
        reference=reference,
    ))  # fmt: skip


def checked_critic(args: Args, place: Place) -> Callable[[], Any]:
    """A function that loads the critic, whose head and adapters are checked now."""
    from rlkit.model.heads import head_of
    from rlkit.model.launch import load_critic, report_model

    if args.values.critic_steps >= args.schedule.steps > 0:
        log.warning(
            "--critic-steps %d is not below --steps %d: only the critic learns, never the policy",
            args.values.critic_steps, args.schedule.steps,
        )  # fmt: skip
    path, rank = args.critic or place.model.model, args.critic_lora_rank
    check_rank(place.configs[path], rank)
    head_of(place.configs[path], args.bins)
    alpha = None if place.model.adapter else place.lora.lora_alpha
    lora = replace(place.lora, lora_rank=rank, lora_alpha=alpha).options() if rank else {}
    lora |= {} if args.critic else {"adapter": place.model.adapter}

    def make() -> Any:
        critic = load_critic(path, **place.loading(), bins=args.bins, **lora)
        report_model(critic, dtype=str(place.optim.dtype), name="critic")
        return critic

    return make


if __name__ == "__main__":
    run(main, Args, __doc__)
