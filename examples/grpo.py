"""GRPO on your model, your prompts and your reward.

    python examples/grpo.py --model PATH_OR_HUB_ID --data train.jsonl --eval-data test.jsonl --reward my_rewards.py:score
    torchrun --nproc-per-node 8 examples/grpo.py --parallel.tp 2 --engine sglang ...

Every row of the data holds `prompt` (a string) or `messages`, and whatever the reward needs, e.g. `answer`.
The reward is a Python function, `def score(completion: str, row: dict) -> float`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlkit.parallel.flags import ParallelArgs


@dataclass
class Args:
    model: str
    """folder written by save_pretrained, or a hub id"""
    data: str
    """JSON, JSONL, CSV, Parquet or Arrow file, save_to_disk folder or hub id of the training prompts"""
    reward: str | None = None
    """FILE.py:FUNCTION or MODULE:FUNCTION that scores a completion; None: the environment's own reward"""
    env: str | None = None
    """FILE.py:FUNCTION of an environment, `async def env(prompt, sample)`, or of a function of the tokenizer that
    returns one; None: one question, one answer"""
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
    success_range: tuple[float, float] | None = None
    """dynamic sampling: replace groups whose mean score is outside, e.g. 0.01 0.99; None: keep all"""
    staleness: float = 0.0
    """partial rollout: start so many times more groups than a step needs, interrupt the last ones and go on with them
    in the next step; 0: every step waits for all of its groups"""
    drop_off_policy: bool = False
    """of interrupted answers, train only on tokens of the newest weights"""
    drop_truncated: bool = False
    """do not train on answers that a length limit cut"""
    minibatches: int = 1
    """optimizer steps a rollout's batch is split into"""
    epochs: int = 1
    """passes over a rollout's batch"""
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
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    """how the model is cut over the ranks of torchrun"""
    engine: Literal["local", "sglang"] = "local"
    """local: embedded, on the trainer's weights; sglang: servers that were started on `model`"""
    engine_urls: tuple[str, ...] = ()
    """of the SGLang servers; none: one is started here"""
    journal: bool = False
    """keep every completion on disk, so that a killed run resumes with what it had sampled (always so with sglang)"""
    max_batch: int = 64
    """sequences the local engine decodes at once"""
    compile: bool = False
    """compile the local engine's decoding: about ten seconds once, then up to 1.5x the tokens/s"""
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
    from rlkit.loops.grpo import grpo
    from rlkit.parallel.launch import load_policy
    from rlkit.parallel.optim import schedule
    from rlkit.rollout.limits import success_between
    from rlkit.types import SamplingParams

    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    env, score = environment(args, tokenizer)
    prompts, eval_prompts = load_prompts(args, tokenizer)
    load = partial(load_policy, args=args.parallel, device=args.device, dtype=args.dtype)
    model = load(args.model)
    needs_reference = args.kl_coef or args.eval_kl
    reference = load(args.reference or args.model) if needs_reference else None
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "args.json").write_text(json.dumps(asdict(args), indent=1, default=str) + "\n")

    async def run() -> Path:
        async with open_engine(args, model, tokenizer) as engine:
            return await grpo(
                model,
                tokenizer,
                engine,
                prompts,
                score=score,
                folder=args.output,
                steps=args.steps,
                params=SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature),
                env=env,
                prompts_per_step=args.prompts_per_step,
                group_size=args.group_size,
                keep_group=None if args.success_range is None else success_between(*args.success_range),
                staleness=args.staleness,
                drop_truncated=args.drop_truncated,
                drop_off_policy=args.drop_off_policy,
                journal=args.journal or args.engine == "sglang",
                baseline=group_zscore if args.scale_by_std else group_centered,
                num_minibatches=args.minibatches,
                num_epochs=args.epochs,
                clip_low=args.clip_low,
                clip_high=args.clip_high,
                kl_coef=args.kl_coef,
                kl_controller=fixed()
                if args.kl_target is None
                else kl_linear(target=args.kl_target, rate=args.kl_coef),
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

    return asyncio.run(run())


def load_prompts(args: Any, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """The rendered prompts of the training data and of the evaluation data, if any."""
    from rlkit.data.load import load_rows
    from rlkit.data.prompts import rl_prompts

    rows = load_rows(args.data)
    eval_rows = load_rows(args.eval_data, limit=args.eval_limit) if args.eval_data else []
    render = {
        "tokenizer": tokenizer,
        "max_prompt_tokens": args.max_prompt_tokens,
        "system_prompt": args.system_prompt,
        "apply_chat_template": args.chat_template,
    }
    return rl_prompts(rows, **render)[0], rl_prompts(eval_rows, **render)[0] if eval_rows else []


def environment(args: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The `env` and the `score` of a rollout, by their names on the command line."""
    from rlkit.rewards.adapters import scorer
    from rlkit.rewards.load import load_function
    from rlkit.rollout.limits import limited
    from rlkit.rollout.rollout import single_turn

    if args.env is None and args.reward is None:
        raise ValueError("give --reward, --env or both: something has to judge what is sampled")
    env = single_turn if args.env is None else load_function(args.env)
    env = env if inspect.iscoroutinefunction(env) else env(tokenizer)
    if args.env is not None:
        env = limited(env, max_turns=args.max_turns, max_total_tokens=max_len(args))
    if args.reward is None:
        return env, None
    return env, scorer(load_function(args.reward), tokenizer=tokenizer, timeout_s=args.reward_timeout)


def max_len(args: Any) -> int:
    """The longest context of an episode."""
    return args.max_total_tokens or args.max_prompt_tokens + args.max_new_tokens


@asynccontextmanager
async def open_engine(args: Any, model: Any, tokenizer: Any) -> AsyncIterator[Any]:
    """The engine of the command line: embedded where it can share the model, else one with weights of its own."""
    from rlkit.parallel._ranks import world_size

    if args.engine == "local" and world_size() == 1:
        from rlkit.rollout.local import LocalEngine

        yield LocalEngine(
            model, tokenizer=tokenizer, max_batch=args.max_batch, max_len=max_len(args), compile=args.compile
        )
        return
    async with own_engine(args) as engine:
        yield engine


@asynccontextmanager
async def own_engine(args: Any, **process: Any) -> AsyncIterator[Any]:
    """An engine with weights of its own, which the first of many ranks has. `process`: how a local one's runs."""
    from rlkit.parallel._ranks import rank, world_size

    if world_size() == 1:
        async with _start_engine(args, process) as engine:
            yield engine
        return
    from rlkit.parallel.shared import SharedEngine

    async with _start_engine(args, process) if rank() == 0 else nullcontext() as engine:
        yield SharedEngine(engine)


@asynccontextmanager
async def _start_engine(args: Any, process: dict[str, Any]) -> AsyncIterator[Any]:
    """A local one in a process, or SGLang; a server that was started for it ends with it."""
    if args.engine == "local":
        from rlkit.rollout.process import launch as launch_process

        options = {"max_batch": args.max_batch, "max_len": max_len(args), "compile": args.compile, **process}
        async with await launch_process(args.model, device=args.device, **options) as engine:
            yield engine
        return
    from rlkit.rollout.sglang import connect, launch

    with ExitStack() as stack:
        urls = args.engine_urls or [stack.enter_context(launch(args.model, device=args.device)).url]
        async with connect(list(urls)) as engine:
            yield engine


if __name__ == "__main__":
    import tyro

    from rlkit.parallel.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
