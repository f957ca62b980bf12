"""GRPO side by side with TRL: the same task, model, batch, lengths, learning rate, algorithm and threads, in turns.

    make bench-trl        (python benchmarks/peers/compare_trl.py --steps 60 --rounds 3)

The task is the demo's: sort six digits, from an SFT warm start on a noisy teacher. TRL lives in its own environment,
made on first use with the project's version of torch, or is that of `--trl-python`. Both train in fp32 with TRL's
default algorithm: rewards centred and divided by their group's standard deviation, token mean, no KL, AdamW, gradient
norm clipped to 1. Neither evaluates or saves during the run; both save the model at its end. With `--defaults` TRL
keeps its own, bf16 and activation checkpointing, and rlkit takes bf16. `--prefix 256` puts 256 tokens before each
prompt and rewards each digit in its place, since the model is not used to such prompts. `--model FOLDER` takes a model
of yours on the two-digit sums of recipes/sums, without a warm start (with `--prefix`, for the share of vowels); without
a chat template it gets them as plain text:

    python benchmarks/peers/compare_trl.py --model $(make -s smollm) --prompts 4 --max-new-tokens 32 --lr 1e-5 --steps 8

trl_grpo.py says how TRL is set up; the other side is `rlkit grpo`, and both write `time/forward`.

What is measured, each in a fresh process:

    first update   seconds from starting the command until the first step's line is logged
    step           seconds between the lines of two steps; medians over the steps after the third, also of its parts:
      rollout        prompts in, rewards and advantages out (nearly all of it generation)
      log-probs      forward over the samples; there is no second one: with one update per rollout, old = new
      training       the rest: loss, backward, optimizer, metrics, logging
    tokens/s       sampled: tokens of completions over rollout time; trained: tokens of all samples, each with its
                   prompt, over log-probs and training
    peak RSS       of the process, from wait4
    to reward      seconds from the command (and steps) until the mean reward of the last 10 steps reaches `--reward`,
                   or where some run does not, the highest multiple of 0.05 that every run reaches

"better by" is TRL / rlkit for times and memory, rlkit / TRL for tokens/s, taken within a round. Every cell is the
median of the rounds (lowest-highest); a round has its own seed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro
from trl_setup import ROOT, make_task, make_trl_environment, versions_of
from trl_table import Run, common_level, measure, show, tabulate

SUMS = ROOT / "recipes" / "sums"
COUNT = """  # in a process of its own: a child's peak memory starts at its parent's
import json, sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
text = json.loads(open(sys.argv[2]).readline())["prompt"]
chat, has_template = [{"role": "user", "content": text}], bool(tokenizer.chat_template)
ids = (tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) if has_template
       else tokenizer(text).input_ids)
print(len(ids), int(has_template))
"""
DENSE = Path(__file__).with_name("dense_rewards.py")


@dataclass
class Args:
    steps: int = 60
    """optimizer steps of each run"""
    rounds: int = 3
    """runs of each, in turns"""
    reward: float = 0.80
    """training reward to time"""
    threads: int = 2
    """of each process"""
    lr: float = 1e-4
    """constant learning rate"""
    sft_steps: int = 300
    """of the warm start"""
    model: str | None = None
    """folder of a model, to learn two-digit sums as it is; without: the demo's task"""
    prompts: int = 8
    """per step"""
    group: int = 8
    """answers per prompt"""
    max_new_tokens: int = 8
    """of an answer"""
    prefix: int = 0
    """tokens before each prompt, as instructions and examples are"""
    defaults: bool = False
    """bf16 on both sides, and TRL's activation checkpointing"""
    trl: str = "1.16.0"
    """version of TRL"""
    trl_python: Path | None = None
    """a Python that has TRL, any version; None: that of an environment made for it, .venv-trl"""
    work: Path = ROOT / "runs" / "bench-trl"
    """where the task is kept between calls, and the runs"""
    out: Path = ROOT / "benchmarks" / "results" / "trl_cpu.json"
    """where the result goes"""


def command(side: str, args: Args, task: dict[str, Any], *, steps: int, seed: int, output: Path) -> list[str]:
    """The command line of one run."""
    trl, ours = Path(__file__).with_name("trl_grpo.py"), (sys.executable, "-m", "rlkit.scripts", "grpo")
    script = (args.trl_python, trl) if side == "trl" else ours
    common = [
        *("--model", task["model"], "--data", data(args, task), "--output", output, "--steps", steps, "--lr", args.lr),
        *("--reward", f"{DENSE}:{'vowels' if args.model else 'digits'}" if args.prefix else task["reward"]),
        *("--prompts-per-step", args.prompts, "--group-size", args.group, "--max-new-tokens", args.max_new_tokens),
        *("--seed", seed),
    ]
    own = [
        *("--max-prompt-tokens", 2 * task["prompt_tokens"] + 2 * args.prefix),
        *("--baseline", "group_zscore", "--eval-steps", 0, "--save-steps", 0),
    ]
    own += [] if task.get("has_template", True) else ["--no-chat-template"]
    if args.defaults:
        own += ["--dtype", "bf16"]
        common += ["--defaults"] if side == "trl" else []
    parts = [*script, *common, *(own if side == "rlkit" else [])]
    return [str(part) for part in parts]


def model_task(args: Args) -> dict[str, Any]:
    """The sums of the recipe, and the length of their prompts as `args.model` renders them."""
    prompts = SUMS / "train.jsonl"
    tokens = subprocess.run(
        [sys.executable, "-c", COUNT, str(args.model), str(prompts)], check=True, capture_output=True
    )
    reward, (number, has_template) = f"{SUMS / 'reward.py'}:correct", map(int, tokens.stdout.split())
    task = {"model": args.model, "data": str(prompts), "reward": reward, "prompt_tokens": number}
    return task | {"has_template": bool(has_template)}


def data(args: Args, task: dict[str, Any]) -> Path:
    """The prompts, with a prefix of that many tokens (the demo's tokenizer is byte-level, for others: words)."""
    if not args.prefix:
        return Path(task["data"])
    path = args.work.absolute() / f"prefix-{args.prefix}{'-words' * bool(args.model)}.jsonl"
    text = "word " * args.prefix if args.model else ("Sort the digits: 394215 becomes 123459. " * 99)[: args.prefix]
    rows = [json.loads(line) for line in Path(task["data"]).read_text().splitlines()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({**row, "prompt": text + row["prompt"]}) + "\n" for row in rows))
    return path


def train(line: list[str], output: Path, *, threads: int) -> Run:
    """Run a command in a fresh process to its end: its metric lines, when it started, its peak memory."""
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    log = output.with_suffix(".log")
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        started = time.time()
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(line)}\nfailed, see {log}:\n" + "\n".join(log.read_text().splitlines()[-15:]))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB on Linux
    return {"started": started, "lines": lines, "rss_mb": usage.ru_maxrss / unit}


def in_turns(args: Args, task: dict[str, Any]) -> dict[str, list[Run]]:
    """All runs. Round 0 fills file and bytecode caches and does not count."""
    runs: dict[str, list[Run]] = {"trl": [], "rlkit": []}
    for number in range(args.rounds + 1):
        for side, done in runs.items():
            output = args.work.absolute() / f"round-{number}" / side
            line = command(side, args, task, steps=args.steps if number else 2, seed=number, output=output)
            run = train(line, output, threads=args.threads)
            print(f"round {number}/{args.rounds} {side:6}{time.time() - run['started']:7.1f} s", flush=True)
            if number:
                done.append(run)
    return runs


def machine() -> dict[str, Any]:
    """What the figures depend on, besides versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def main(args: Args) -> None:
    if args.steps < 5 or args.rounds < 1:
        raise SystemExit("error: --steps must be at least 5 (the first 3 are not timed) and --rounds at least 1")
    args.trl_python = args.trl_python or make_trl_environment(args.trl)
    versions = {"trl": versions_of(args.trl_python)}
    versions["rlkit"] = {name: version(name) for name in ("torch", "transformers")}
    task = model_task(args) if args.model else make_task(args.work.absolute() / "task", args.sft_steps)
    runs = in_turns(args, task)
    level = common_level([*runs["trl"], *runs["rlkit"]], args.reward)
    tokens, samples = task["prompt_tokens"] + args.prefix, args.prompts * args.group
    fixed = {"level": level, "prompt_tokens": tokens, "samples": samples}
    figures = {side: [measure(run, **fixed) for run in done] for side, done in runs.items()}
    rows = tabulate(figures)
    show(rows)
    settings = {key: value for key, value in asdict(args).items() if not isinstance(value, Path)}
    settings["model"] = args.model and Path(args.model).name
    result = {"args": settings, "machine": machine(), "versions": versions, "table": rows, "rounds": figures}
    name = f"_{Path(args.model).name}_{args.prompts}x{args.group}x{args.max_new_tokens}" if args.model else ""
    out = args.out.with_stem(args.out.stem + name + "_defaults" * args.defaults + "_prefix" * bool(args.prefix))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
