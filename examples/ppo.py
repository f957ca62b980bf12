"""PPO with a critic on your model, your prompts and your reward.

    python examples/ppo.py --model PATH_OR_HUB_ID --data train.jsonl --eval-data test.jsonl --reward my_rewards.py:score
    python examples/ppo.py ... --critic REWARD_MODEL --critic-steps 20 --kl-coef 0.02

The critic starts from `--critic`, or from the policy's weights with values that are 0. Data, rewards, environments and
engines are those of examples/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import sampled_data as shared


@dataclass
class Args(shared.Args):
    output: Path = Path("runs/ppo")
    """run folder: metrics, trajectories, plot, checkpoints, exported model and critic"""
    prompts_per_step: int = 64
    """prompts of a batch"""
    group_size: int = 1
    """samples of each prompt"""
    clip_low: float = 0.2
    """the ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.2
    """the ratio is clipped above at 1 + clip_high"""
    kl_coef: float = 0.0
    """weight of the KL to the reference model in the reward; 0 does not load one"""
    critic: str | None = None
    """folder or hub id the critic starts from; None: `model`"""
    critic_lr: float = 1e-5
    """highest learning rate of the critic, on the policy's schedule"""
    critic_steps: int = 0
    """steps in which the critic learns alone, at first"""
    gamma: float = 1.0
    """discount of a token"""
    lam_policy: float = 0.95
    """lambda of the advantages"""
    lam_value: float = 1.0
    """lambda of the critic's targets"""
    bootstrap: bool = True
    """an answer that a length limit cuts ends in the critic's value; off: in 0, so that length is punished"""
    value_clip: float = 0.5
    """how far a value may move in a step's updates, in units of the reward"""


def main(args: Args) -> Path:
    from flag_checks import with_device
    from sampled_engines import open_engine

    from rlkit.loops.ppo import ppo
    from rlkit.model.launch import load_critic, report_model
    from rlkit.model.optim import schedule
    from rlkit.run.sync import run_sync

    args = with_device(args)
    model, tokenizer, options = shared.prepared(args)
    critic = load_critic(args.critic or args.model, args.parallel, device=args.device, dtype=args.dtype)
    report_model(critic, dtype=args.dtype, name="critic")
    falling = {"num_steps": args.steps, "warmup_steps": args.warmup_steps}

    async def run() -> Path:
        async with open_engine(args, model, tokenizer) as engine:
            return await ppo(
                model,
                critic,
                tokenizer,
                engine,
                critic_lr_at=schedule(args.lr_schedule, lr=args.critic_lr, **falling),
                critic_steps=args.critic_steps,
                clip_low=args.clip_low,
                clip_high=args.clip_high,
                gamma=args.gamma,
                lam_policy=args.lam_policy,
                lam_value=args.lam_value,
                bootstrap=args.bootstrap,
                value_clip=args.value_clip,
                journal=args.engine == "sglang",
                **options,
            )

    return run_sync(run())


if __name__ == "__main__":
    import tyro

    from rlkit.model.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
