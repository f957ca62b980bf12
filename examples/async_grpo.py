"""GRPO with an engine that samples while the trainer trains, on your model, your prompts and your reward.

    python examples/async_grpo.py --model PATH_OR_HUB_ID --data train.jsonl --reward my_rewards.py:score

The engine has its own copy of the weights: in a process of its own (`--engine local`, small models) or on SGLang servers
(`--engine sglang`). Data and rewards are those of examples/grpo.py.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import grpo as sync

from rlkit.parallel.flags import ParallelArgs


@dataclass
class Args:
    model: str
    """folder written by save_pretrained, or a hub id; a local engine needs a folder"""
    data: str
    """JSON, JSONL, CSV, Parquet or Arrow file, save_to_disk folder or hub id of the training prompts"""
    reward: str | None = None
    """FILE.py:FUNCTION or MODULE:FUNCTION that scores a completion; None: the environment's own reward"""
    env: str | None = None
    """FILE.py:FUNCTION of an environment, `async def env(prompt, sample)`, or of a function of the tokenizer that
    returns one; None: one question, one answer"""
    output: Path = Path("runs/async_grpo")
    """run folder: metrics, trajectories, completions, plot, checkpoints, exported model"""
    eval_data: str | None = None
    """held-out prompts; None: no evaluation"""
    steps: int = 200
    """batches to train on"""
    prompts_per_step: int = 8
    """groups in a batch"""
    group_size: int = 8
    """samples of each prompt"""
    staleness: float = 1.0
    """steps that a group may be older than the weights it trains; 1: sample one batch while training on the last"""
    success_range: tuple[float, float] | None = None
    """dynamic sampling: replace groups whose mean score is outside, e.g. 0.01 0.99; None: keep all"""
    drop_truncated: bool = False
    """do not train on answers that a length limit cut"""
    correction: Literal["tis", "icepop"] = "tis"
    """of the policy at the start of a step over the one that sampled: tis caps the weight of a token at 2, icepop
    drops tokens whose weight is outside [0.5, 5]"""
    engine: Literal["local", "sglang"] = "local"
    """local: a process of its own; sglang: servers that were started on `model`"""
    engine_urls: tuple[str, ...] = ()
    """of the SGLang servers; none: one is started here"""
    engine_threads: int = 1
    """of the local engine"""
    engine_cpus: tuple[int, ...] = ()
    """processors the local engine may run on; none: all"""
    minibatches: int = 1
    """optimizer steps a batch is split into"""
    epochs: int = 1
    """passes over a batch"""
    max_prompt_tokens: int = 1024
    """longer prompts are dropped, counted and reported"""
    max_new_tokens: int = 1024
    """limit of a completion"""
    max_turns: int | None = None
    """turns of an episode; None: the environment's own limit"""
    max_total_tokens: int | None = None
    """of an episode's context, prompt and all turns; None: max_prompt_tokens + max_new_tokens"""
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
    """steps until the highest learning rate"""
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
    entropy_coef: float = 0.0
    """weight of an entropy bonus"""
    max_tokens: int = 16384
    """packed tokens of a micro-batch: lower it when memory is short"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """of the matrix products; weights and optimizer states are fp32"""
    device: str = "cpu"
    """where the model lives"""
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    """how the model is cut over the ranks of torchrun"""
    max_batch: int = 64
    """sequences the local engine decodes at once"""
    compile: bool = False
    """compile the local engine's decoding"""
    eval_steps: int = 25
    """steps between evaluations"""
    eval_limit: int = 128
    """held-out prompts to use at most"""
    reward_timeout: float = 30.0
    """seconds one call of the reward function may take"""
    save_steps: int = 50
    """steps between checkpoints"""
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
    from rlkit.loops.async_grpo import async_grpo
    from rlkit.losses import icepop, tis
    from rlkit.parallel.launch import load_policy
    from rlkit.parallel.optim import schedule
    from rlkit.rollout.limits import success_between
    from rlkit.types import SamplingParams

    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    env, score = sync.environment(args, tokenizer)
    prompts, eval_prompts = sync.load_prompts(args, tokenizer)
    model = load_policy(args.model, args.parallel, device=args.device, dtype=args.dtype)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "args.json").write_text(json.dumps(asdict(args), indent=1, default=str) + "\n")

    async def run() -> Path:
        async with sync.own_engine(args, num_threads=args.engine_threads, cpus=args.engine_cpus) as engine:
            return await async_grpo(
                model,
                tokenizer,
                engine,
                prompts,
                score=score,
                folder=args.output,
                steps=args.steps,
                params=SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature),
                lr_at=schedule(args.lr_schedule, lr=args.lr, num_steps=args.steps, warmup_steps=args.warmup_steps),
                env=env,
                prompts_per_step=args.prompts_per_step,
                group_size=args.group_size,
                staleness=args.staleness,
                keep_group=None if args.success_range is None else success_between(*args.success_range),
                drop_truncated=args.drop_truncated,
                baseline=group_zscore if args.scale_by_std else group_centered,
                num_minibatches=args.minibatches,
                num_epochs=args.epochs,
                clip_low=args.clip_low,
                clip_high=args.clip_high,
                correction=icepop if args.correction == "icepop" else partial(tis, max_weight=2.0),
                entropy_coef=args.entropy_coef,
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

    return asyncio.run(run())


if __name__ == "__main__":
    import tyro

    from rlkit.parallel.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
