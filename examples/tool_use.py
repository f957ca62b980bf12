"""GRPO over several turns: with tools, or against a game.

    python examples/tool_use.py                                      a tiny model learns to use a calculator
    python examples/tool_use.py --task search --model PATH_OR_HUB_ID
    python examples/tool_use.py --task code --model PATH_OR_HUB_ID --data problems.jsonl

Without `--model`, a Qwen3 with random weights is first trained on demonstrations of a teacher who gives up three times
out of five; GRPO then learns that calling the tool pays. The environments are in `environments.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlkit.scripts.cli import Flat, run
from rlkit.settings import Count, CountOr0, Optim, Rollouts, Schedule, check


@dataclass(frozen=True)
class Args:
    task: Literal["calculator", "search", "guessing", "code"] = "calculator"
    """which environment of environments.py"""
    model: str | None = None
    """folder written by save_pretrained, or a hub id, of a model that can call tools; None: the tiny one"""
    data: str | None = None
    """rows of the task `code`: prompt, public_tests (to run) and tests (to be judged by)"""
    max_turns: Count = 8
    """turns of an episode at most"""
    max_total_tokens: Count = 512
    """limit of an episode with its prompt"""
    sft_steps: CountOr0 = 800
    """steps of supervised learning from demonstrations, of the tiny model only"""
    eval_limit: Count = 64
    """held-out prompts"""
    device: str | None = None
    """cpu, cuda, or mps (untested). None: cpu for the tiny model, for others cuda where there is a GPU"""
    deterministic: bool = False
    """reproducible CUDA kernels: a resumed run on GPUs repeats every bit, more slowly; on CPUs it does so anyway"""
    debug: bool = False
    """show the traceback of an error that is otherwise one line"""
    rollouts: Flat[Rollouts] = Rollouts(prompts_per_step=16, group_size=8, max_new_tokens=96)
    schedule: Flat[Schedule] = Schedule(Path("runs/tool_use"), steps=40, eval_steps=20)
    optim: Flat[Optim] = Optim(lr=3e-4)

    def __post_init__(self) -> None:
        check(self)


def make_task(args: Args, tokenizer: Any) -> Any:
    import environments

    from rlkit.data.load import load_rows

    if args.task == "code":
        if args.data is None:
            raise ValueError("`task` code needs `data`: rows of prompt, public_tests and tests")
        return environments.code(tokenizer, rows=load_rows(args.data))
    return getattr(environments, args.task)(tokenizer, seed=args.schedule.seed)


def warmed_up(args: Args) -> Path:
    """The tiny model after supervised learning from demonstrations."""
    import torch

    from rlkit.data.examples import sft_examples
    from rlkit.data.tiny import tiny_model, tiny_tokenizer
    from rlkit.loops.sft import sft
    from rlkit.model.forward import prepare_model

    seed = args.schedule.seed
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer()
    # every byte is a token here, so only the names of the tools are shown
    names = "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    tokenizer.chat_template = names + tokenizer.chat_template.partition("{% endif %}")[2]
    task = make_task(args, tokenizer)
    rows = [{"messages": task.demonstrate(row)} for row in task.rows[args.eval_limit :] for _ in range(2)]
    examples, _ = sft_examples(
        rows, tokenizer=tokenizer, max_example_tokens=args.max_total_tokens, tools=task.tools or None
    )
    model = prepare_model(tiny_model(tokenizer, hidden=96, layers=3, heads=3, kv_heads=1, intermediate=256, seed=seed))
    print("SFT: imitate a teacher who gives up three times out of five")
    schedule = Schedule(args.schedule.output / "sft", steps=args.sft_steps, seed=seed, resume=args.schedule.resume)
    return sft(model, tokenizer, examples, schedule, Optim(lr=2e-3, lr_schedule="linear"), batch_size=32)


def main(args: Args) -> Path:
    import torch
    from transformers import AutoTokenizer

    from rlkit.data.chat import stop_token_ids
    from rlkit.data.prompts import rl_prompts
    from rlkit.loops.grpo import grpo_sync
    from rlkit.loops.rl import Task
    from rlkit.model.forward import default_dtype, load_model
    from rlkit.model.launch import make_deterministic, report_model
    from rlkit.rewards.scoring import scorer
    from rlkit.rollout.engines.local import LocalEngine
    from rlkit.rollout.envs.chat import refuse_vision
    from rlkit.rollout.limits import limited
    from rlkit.run.folder import holds_run
    from rlkit.scripts.start import check_device

    device = args.device or ("cuda" if args.model and torch.cuda.is_available() else "cpu")
    check_device(device)
    if args.deterministic:
        make_deterministic(args.schedule.seed)
    path = args.model or str(warmed_up(args))
    torch.manual_seed(args.schedule.seed)
    model = load_model(path, device=device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    report_model(model, dtype=args.optim.dtype or default_dtype(device))
    refuse_vision(model, tokenizer)
    task = make_task(args, tokenizer)
    prompts, _ = rl_prompts(
        task.rows, tokenizer=tokenizer, max_prompt_tokens=args.max_total_tokens // 2, tools=task.tools or None
    )
    print("GRPO: learn from the reward alone")
    output = args.schedule.output / "grpo"
    resume = args.schedule.resume and (args.model is not None or holds_run(output))  # it may have stopped during SFT
    return grpo_sync(
        model,
        tokenizer,
        LocalEngine(model, max_batch=128, max_len=args.max_total_tokens + 1),
        Task(
            prompts[args.eval_limit :],
            score=scorer(task.reward, tokenizer=tokenizer, timeout_s=30.0) if task.reward else None,
            env=limited(task.env, max_turns=args.max_turns, max_total_tokens=args.max_total_tokens),
            eval_prompts=prompts[: args.eval_limit],
        ),
        replace(args.rollouts, stop_token_ids=stop_token_ids(tokenizer, model.config, model.generation_config)),
        replace(args.schedule, output=output, resume=resume),
        args.optim,
    )


if __name__ == "__main__":
    run(main, Args, __doc__)
