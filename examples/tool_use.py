"""GRPO over several turns: with tools, or against a game.

    python examples/tool_use.py                                      the tiny model learns to use a calculator
    python examples/tool_use.py --task search --model PATH_OR_HUB_ID
    python examples/tool_use.py --task code --model PATH_OR_HUB_ID --data problems.jsonl

Without `--model`, a Qwen3 of random weights is warmed up on demonstrations by a teacher who gives up three times out of
five; GRPO then finds out that calling the tool pays. The environments are in `environments.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal


@dataclass
class Args:
    task: Literal["calculator", "search", "guessing", "code"] = "calculator"
    """which environment of environments.py"""
    model: str | None = None
    """folder written by save_pretrained, or a hub id, of a model that can call tools; None: the tiny one"""
    data: str | None = None
    """rows of the task `code`: prompt, public_tests (to run) and tests (to be judged by)"""
    output: Path = Path("runs/tool_use")
    """run folder: metrics, trajectories, plot, checkpoints, exported model"""
    steps: int = 40
    """number of rollouts to train on"""
    prompts_per_step: int = 16
    """prompts of a rollout"""
    group_size: int = 8
    """episodes of each prompt"""
    max_turns: int = 8
    """turns of an episode at most"""
    max_new_tokens: int = 96
    """limit of a turn"""
    max_total_tokens: int = 512
    """limit of an episode with its prompt"""
    lr: float = 3e-4
    """learning rate; 1e-6 for a real model"""
    warmup_steps: int = 800
    """steps of supervised learning from demonstrations, of the tiny model only"""
    eval_limit: int = 64
    """held-out prompts"""
    eval_steps: int = 20
    """rollouts between evaluations"""
    max_tokens: int = 16384
    """packed tokens of a micro-batch: lower it when memory is short"""
    dtype: Literal["fp32", "bf16"] | None = None
    """of the matrix products; weights and optimizer states are fp32. None: bf16 on a CUDA GPU, else fp32"""
    device: str | None = None
    """cpu, cuda, or mps (untested). None: cpu for the tiny model, for others cuda where there is a GPU"""
    seed: int = 0
    """of data, weights and sampling"""
    deterministic: bool = False
    """reproducible CUDA kernels: a resumed run on GPUs repeats every bit, more slowly; on CPUs it does so anyway"""
    resume: bool = False
    """go on from the newest checkpoint in `output`"""


def make_task(args: Args, tokenizer: Any) -> Any:
    import environments

    from rlkit.data.load import load_rows

    if args.task == "code":
        if args.data is None:
            raise ValueError("--task code needs --data: rows of prompt, public_tests and tests")
        return environments.code(tokenizer, rows=load_rows(args.data))
    return getattr(environments, args.task)(tokenizer, seed=args.seed)


def warmed_up(args: Args) -> Path:
    """The tiny model after supervised learning from demonstrations."""
    import torch

    from rlkit.data.examples import sft_examples
    from rlkit.data.tiny import tiny_model, tiny_tokenizer
    from rlkit.loops.sft import sft
    from rlkit.model.forward import prepare
    from rlkit.model.optim import schedule

    torch.manual_seed(args.seed)
    tokenizer = tiny_tokenizer()
    # every byte is a token here: of a tool only the name is shown
    names = "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    tokenizer.chat_template = names + tokenizer.chat_template.partition("{% endif %}")[2]
    task = make_task(args, tokenizer)
    rows = [{"messages": task.demonstrate(row)} for row in task.rows[args.eval_limit :] for _ in range(2)]
    examples, _ = sft_examples(
        rows, tokenizer=tokenizer, max_example_tokens=args.max_total_tokens, tools=task.tools or None
    )
    model = prepare(tiny_model(tokenizer, hidden=96, layers=3, heads=3, kv_heads=1, intermediate=256, seed=args.seed))
    print("SFT: learning to talk from a teacher who gives up three times out of five")
    return sft(
        model, tokenizer, examples, folder=args.output / "sft", steps=args.warmup_steps, batch_size=32,
        lr_at=schedule("linear", lr=2e-3, num_steps=args.warmup_steps), seed=args.seed, resume=args.resume,
    )  # fmt: skip


def main(args: Args) -> Path:
    import torch
    from flag_checks import check_values, with_device
    from transformers import AutoTokenizer

    from rlkit.data.chat import stop_token_ids
    from rlkit.data.prompts import rl_prompts
    from rlkit.loops.grpo import grpo_sync
    from rlkit.model.forward import load_model
    from rlkit.model.launch import make_deterministic, report_model
    from rlkit.model.optim import schedule
    from rlkit.rewards.adapters import scorer
    from rlkit.rollout.engines.local import LocalEngine
    from rlkit.rollout.envs.gym import own_rewards, refuse_vision
    from rlkit.rollout.limits import limited
    from rlkit.run.folder import holds_run
    from rlkit.types import SamplingParams

    check_values(args)
    args = with_device(args if args.model or args.device else replace(args, device="cpu"))
    if args.deterministic:
        make_deterministic(args.seed)
    path = args.model or str(warmed_up(args))
    torch.manual_seed(args.seed)
    model = load_model(path, device=args.device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    report_model(model, dtype=args.dtype)
    refuse_vision(model, tokenizer)
    task = make_task(args, tokenizer)
    prompts, _ = rl_prompts(
        task.rows, tokenizer=tokenizer, max_prompt_tokens=args.max_total_tokens // 2, tools=task.tools or None
    )
    held_out, training = prompts[: args.eval_limit], prompts[args.eval_limit :]
    print("GRPO: learning what is right, from the reward alone")
    return grpo_sync(
        model,
        tokenizer,
        LocalEngine(model, max_batch=128, max_len=args.max_total_tokens + 1),
        training,
        env=limited(task.env, max_turns=args.max_turns, max_total_tokens=args.max_total_tokens),
        score=scorer(task.reward, tokenizer=tokenizer, timeout_s=30.0) if task.reward else own_rewards,
        folder=args.output / "grpo",
        steps=args.steps,
        params=SamplingParams(
            max_new_tokens=args.max_new_tokens,
            stop_token_ids=stop_token_ids(tokenizer, model.config, model.generation_config),
        ),
        prompts_per_step=args.prompts_per_step,
        group_size=args.group_size,
        lr_at=schedule("constant", lr=args.lr, num_steps=args.steps),
        max_tokens=args.max_tokens,
        dtype=args.dtype,
        eval_prompts=held_out,
        eval_steps=args.eval_steps,
        seed=args.seed,
        resume=args.resume and (args.model is not None or holds_run(args.output / "grpo")),  # stopped in the warm-up
    )


if __name__ == "__main__":
    import tyro

    from rlkit.model.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
