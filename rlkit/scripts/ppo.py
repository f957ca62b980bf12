"""PPO with a critic on your model, your prompts and your reward.

    rlkit ppo --model MODEL --data train.jsonl --reward my_rewards.py:score
    rlkit ppo ... --critic REWARD_MODEL --critic-steps 20 --kl-coef 0.02

The critic starts from `--critic`, or from the policy's weights with a value head of 0.
Data, rewards, environments and engines are those of `rlkit grpo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rlkit.scripts.args import Correction, Data, Episodes, Estimator, Evaluation, KlEstimator, Lora, Model, log
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.engines import open_engine
from rlkit.scripts.start import advantage_of, check_rank, kl_estimator_of, where
from rlkit.scripts.task import load_models, open_task
from rlkit.settings import (
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
    """estimator of the advantages (docs/advantages.md): gae, vapo, td_lambda, n_step, vtrace or retrace, with --gamma,
    --lam-policy and --lam-value; further arguments in brackets: "n_step(n=16)".
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
    reference: str | None = None
    """reference model; None: the initial weights of `model` (with LoRA, and no second copy: `model`
    without its adapter, or with `adapter` as it was)"""
    lora: Flat[Lora] = Lora()
    bins: Flat[Bins] = Bins()
    critic_lora_rank: CountOr0 = 0
    """rank of LoRA adapters of the critic, which train with its head alone; 0: train all its weights"""
    engine: Flat[Engines] = Engines()


def main(args: Args) -> Path:
    """Train, and return the folder of the exported model."""
    name = args.loss.advantage.partition("(")[0]
    refuse_if(
        name == "vtrace" and args.correction.correction != "none",
        "`advantage` vtrace has the ratio to the sampling policy in it: add `correction` none",
    )
    given = {field: getattr(args.values, field) for field in ("gamma", "lam_policy", "lam_value")}
    advantage = advantage_of(args.loss.advantage, values=True, **given) if name != "gae" else None
    if args.values.critic_steps >= args.schedule.steps > 0:
        log.warning(
            "--critic-steps %d is not below --steps %d: only the critic learns, never the policy",
            args.values.critic_steps, args.schedule.steps,
        )  # fmt: skip
    kl_estimator = kl_estimator_of(args, place="reward")
    args, tokenizer, task = open_task(args)
    from rlkit.loops.ppo import ppo
    from rlkit.loops.updates import PolicyLoss, clipped, per_token
    from rlkit.model.heads import head_of
    from rlkit.model.launch import load_critic, report_model
    from rlkit.model.pretrained import load_config
    from rlkit.run.sync import run_sync

    path, rank = args.critic or args.model.model, args.critic_lora_rank
    alpha = None if args.model.adapter else args.lora.lora_alpha
    lora = replace(args.lora, lora_rank=rank, lora_alpha=alpha).options() if rank else {}
    lora |= {} if args.critic else {"adapter": args.model.adapter}
    check_rank(path, args.critic_lora_rank)
    head_of(load_config(path), args.bins)
    model, reference, rollouts = load_models(args, tokenizer)
    critic = load_critic(path, **where(args), bins=args.bins, **lora)
    report_model(critic, dtype=str(args.optim.dtype), name="critic")
    clip = partial(clipped, clip_low=args.loss.clip_low, clip_high=args.loss.clip_high)
    loss = PolicyLoss(clip, per_token, args.correction.function())

    async def train() -> Path:
        async with open_engine(args, model, tokenizer) as engine:
            return await ppo(
                model, critic, tokenizer, engine, task, rollouts, args.schedule, args.optim, args.penalties,
                args.values, loss=loss, advantage=advantage, kl_estimator=kl_estimator, reference=reference,
            )  # fmt: skip

    return run_sync(train())


if __name__ == "__main__":
    run(main, Args, __doc__)
