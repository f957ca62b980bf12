"""A GRPO step beside other processes' busy loops, as a multiple of its time alone.

    python benchmarks/contention.py --out benchmarks/results/contention_cpu.json
    python benchmarks/contention.py --late            # the loops begin after the run has chosen its threads

Each run is `rlkit grpo` on a random model of 1 M parameters (8 prompts, 8 answers of up to 16 tokens) in a fresh
process; the settings take turns. A loop has a session of its own (setsid), as another user's job has: Linux gives each
session an equal share. `--threads` fixes the number of threads, for comparison.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from _cli import run_script
from _runs import digits, grpo, write_task
from _timing import machine

LOOP = [sys.executable, "-c", "while True: pass"]
WARM = 5  # steps that are not timed


@dataclass(frozen=True)
class Args:
    rounds: int = 3
    """runs of each setting"""
    steps: int = 60
    """steps of a run, the first five untimed"""
    loops: tuple[int, ...] = (0, 1, 2)
    """foreign busy loops beside the run"""
    late: bool = False
    """start the loops after the untimed steps"""
    threads: int | None = None
    """set OMP_NUM_THREADS; None: the run chooses"""
    out: Path | None = None
    """write the figures here as JSON"""


def make_task(folder: Path) -> list[str]:
    """The command without --output."""
    write_task(folder)
    sizes = "--prompts-per-step 8 --group-size 8 --max-new-tokens 16 --save-steps 1000 --no-chat-template"
    return grpo(folder, [*digits(folder), *sizes.split()])


def run(command: list[str], output: Path, loops: int, args: Args) -> tuple[float, int]:
    """Median seconds of a step, and the run's number of threads."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "MKL_"))}
    if args.threads:
        env["OMP_NUM_THREADS"] = str(args.threads)
    with ExitStack() as stack:

        def begin() -> None:
            for _ in range(loops):
                stack.callback(stack.enter_context(subprocess.Popen(LOOP, start_new_session=True)).kill)

        if not args.late:
            begin()
        full = [*command, "--output", str(output), "--steps", str(args.steps)]
        process = stack.enter_context(subprocess.Popen(full, env=env, stdout=subprocess.DEVNULL))
        stack.callback(process.kill)
        if args.late:
            while len(lines(output)) < WARM:
                time.sleep(0.02)
            begin()
        if process.wait():
            raise SystemExit("the run failed")
    clock = [line["time/unix"] for line in lines(output)][WARM:]
    step = statistics.median(b - a for a, b in pairwise(clock))
    return step, json.loads((output / "args.json").read_text()).get("threads", args.threads or 0)


def lines(output: Path) -> list[dict[str, float]]:
    """The whole lines of metrics.jsonl so far."""
    path = output / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main(args: Args) -> None:
    found: dict[int, list[tuple[float, int]]] = {n: [] for n in args.loops}
    with tempfile.TemporaryDirectory() as name:
        command = make_task(Path(name))
        for number in range(args.rounds):
            for loops in args.loops:
                step, threads = run(command, Path(name) / f"run_{number}_{loops}", loops, args)
                found[loops].append((step, threads))
                print(f"round {number + 1}, {loops} loops: {step:.3f} s, {threads} threads", flush=True)
    alone = [step for step, _ in found[args.loops[0]]]
    rows = []
    print(f"{'loops':>6}{'step s':>9}{'lowest':>9}{'highest':>9}{'ratio':>8}  threads")
    for loops, runs in found.items():
        steps = [step for step, _ in runs]
        ratios = [a / b for a, b in zip(steps, alone, strict=True)]
        row = {
            "loops": loops, "step_s": statistics.median(steps), "lowest_s": min(steps), "highest_s": max(steps),
            "ratio": statistics.median(ratios), "threads": [n for _, n in runs],
        }  # fmt: skip
        rows.append(row)
        print(
            f"{loops:6}{row['step_s']:9.3f}{min(steps):9.3f}{max(steps):9.3f}{row['ratio']:8.2f}  "
            + " ".join(map(str, row["threads"]))
        )
    if args.out:
        sizes = {"steps": args.steps, "late": args.late, "threads": args.threads}
        args.out.write_text(json.dumps({"machine": machine(), "sizes": sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
