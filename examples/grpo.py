"""GRPO on your model, your prompts and your reward.

    python examples/grpo.py --model PATH_OR_HUB_ID --data train.jsonl --eval-data test.jsonl --reward my_rewards.py:score

Every row of the data holds `prompt` (a string) or `messages`, and whatever the reward needs, e.g. `answer`.
The reward is a Python function, `def score(completion: str, row: dict) -> float`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass
class Args:
    model: str
    """folder written by save_pretrained, or a hub id"""
    data: str
    """JSON, JSONL, CSV, Parquet or Arrow file, save_to_disk folder or hub id of the training prompts"""
    reward: str
    """FILE.py:FUNCTION or MODULE:FUNCTION that scores a completion"""
    output: Path = Path("runs/grpo")
    """run folder: metrics, trajectories, plot, checkpoints, exported model"""
    eval_data: str | None = None
    """held-out prompts; None: no evaluation"""
    steps: int = 200
    """number of rollouts to train on"""
    prompts_per_step: int = 8
    """prompts of a rollout"""
    group_size: int = 8
    """samples of each prompt"""
    minibatches: int = 1
    """optimizer steps a rollout's batch is split into"""
    epochs: int = 1
    """passes over a rollout's batch"""
    max_prompt_tokens: int = 1024
    """longer prompts are dropped, counted and reported"""
    max_new_tokens: int = 1024
    """limit of a completion"""
    temperature: float = 1.0
    """of sampling, and of all log-probs"""
    system_prompt: str | None = None
    """put before every conversation that has none"""
    chat_template: bool = True
    """render with the model's chat template; off for base models"""
    lr: float = 1e-6
    """highest learning rate"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up: stay, or fall to 0 at the last step"""
    warmup_steps: int = 0
    """rollouts until the highest learning rate"""
    weight_decay: float = 0.0
    """of AdamW, on matrices only"""
    max_norm: float = 1.0
    """global gradient norm to clip to"""
    clip_low: float = 0.2
    """the ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.28
    """the ratio is clipped above at 1 + clip_high"""
    scale_by_std: bool = False
    """divide advantages by their group's standard deviation, as the GRPO paper does"""
    kl_coef: float = 0.0
    """weight of the KL to the reference model in the loss; 0 does not load one"""
    reference: str | None = None
    """reference model; None: the initial weights of `model`"""
    kl_target: float | None = None
    """move kl_coef so that the KL (nats per token) stays near this; None: kl_coef stays"""
    ref_sync_steps: int = 0
    """copy the policy into the reference every so many rollouts; 0: never"""
    entropy_coef: float = 0.0
    """weight of an entropy bonus"""
    max_tokens: int = 16384
    """packed tokens of a micro-batch: lower it when memory is short"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """of the matrix products; weights and optimizer states are fp32"""
    device: str = "cpu"
    """where the model lives"""
    max_batch: int = 64
    """sequences the engine decodes at once"""
    compile: bool = False
    """compile the engine's decoding: about ten seconds once, then up to 1.5x the tokens/s"""
    eval_steps: int = 25
    """rollouts between evaluations"""
    eval_limit: int = 128
    """held-out prompts to use at most"""
    eval_kl: bool = False
    """report the KL to the reference model on evaluation prompts (loads it)"""
    reward_timeout: float = 30.0
    """seconds one call of the reward function may take"""
    save_steps: int = 50
    """rollouts between checkpoints"""
    keep: int = 2
    """newest checkpoints to keep"""
    seed: int = 0
    """of data order and sampling"""
    resume: bool = False
    """go on from the newest checkpoint in `output`"""


def main(args: Args) -> Path:
    import torch
    from transformers import AutoTokenizer

    from rlkit.advantages import group_centered, group_zscore
    from rlkit.controllers import fixed, kl_linear
    from rlkit.data.load import load_rows
    from rlkit.data.prompts import rl_prompts
    from rlkit.loops.grpo import grpo
    from rlkit.parallel.model import load_model
    from rlkit.parallel.optim import schedule
    from rlkit.rewards.adapters import scorer
    from rlkit.rewards.load import load_function
    from rlkit.rollout.local import LocalEngine
    from rlkit.types import SamplingParams

    torch.manual_seed(args.seed)
    reward = load_function(args.reward)
    rows = load_rows(args.data)
    eval_rows = load_rows(args.eval_data, limit=args.eval_limit) if args.eval_data else []
    model = load_model(args.model, device=args.device)
    needs_reference = args.kl_coef or args.eval_kl
    reference = load_model(args.reference or args.model, device=args.device) if needs_reference else None
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    render = {
        "tokenizer": tokenizer,
        "max_prompt_tokens": args.max_prompt_tokens,
        "system_prompt": args.system_prompt,
        "apply_chat_template": args.chat_template,
    }
    prompts, _ = rl_prompts(rows, **render)
    eval_prompts = rl_prompts(eval_rows, **render)[0] if eval_rows else []
    engine = LocalEngine(
        model,
        tokenizer=tokenizer,
        max_batch=args.max_batch,
        max_len=args.max_prompt_tokens + args.max_new_tokens,
        compile=args.compile,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "args.json").write_text(json.dumps(asdict(args), indent=1, default=str) + "\n")
    return asyncio.run(
        grpo(
            model,
            tokenizer,
            engine,
            prompts,
            score=scorer(reward, tokenizer=tokenizer, timeout_s=args.reward_timeout),
            folder=args.output,
            steps=args.steps,
            params=SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature),
            prompts_per_step=args.prompts_per_step,
            group_size=args.group_size,
            baseline=group_zscore if args.scale_by_std else group_centered,
            num_minibatches=args.minibatches,
            num_epochs=args.epochs,
            clip_low=args.clip_low,
            clip_high=args.clip_high,
            kl_coef=args.kl_coef,
            kl_controller=fixed() if args.kl_target is None else kl_linear(target=args.kl_target, rate=args.kl_coef),
            reference=reference,
            ref_sync_steps=args.ref_sync_steps,
            entropy_coef=args.entropy_coef,
            lr_at=schedule(args.lr_schedule, lr=args.lr, num_steps=args.steps, warmup_steps=args.warmup_steps),
            weight_decay=args.weight_decay,
            max_norm=args.max_norm,
            max_tokens=args.max_tokens,
            dtype=args.dtype,
            eval_prompts=eval_prompts,
            eval_steps=args.eval_steps,
            save_steps=args.save_steps,
            keep=args.keep,
            seed=args.seed,
            resume=args.resume,
        )
    )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
