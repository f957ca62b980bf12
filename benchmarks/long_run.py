"""Whether a long run leaks: memory, open files, processes and /dev/shm over 2,000 steps of `rlkit grpo`.

    python benchmarks/long_run.py --out benchmarks/results/long_run_cpu.json
    python benchmarks/long_run.py --kinds overlap --steps 200

Three runs of random models, one after the other: with a program that calls the policy over HTTP (`agents`), with images
(`images`), and with sampling in a process beside the training (`overlap`). Each is looked at after each hundredth of
its steps; the table has medians over its second and its last tenth, and the slope over its second half.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from _cli import run_script
from _runs import digits, grpo, write_task
from _timing import machine, say
from PIL import Image

AGENT = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "digits"}]}).encode()
url, headers = os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"Content-Type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
    text = json.loads(reply.read())["choices"][0]["message"]["content"]
with open(os.environ["RLKIT_RESULT"], "w") as file:
    file.write(str(sum(map(str.isdigit, text))))
"""
SMALL = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1}
SEEN = ("memory MB", "files", "processes", "shm")


@dataclass(frozen=True)
class Args:
    kinds: tuple[str, ...] = ("agents", "images", "overlap")
    """which of agents, images, overlap"""
    steps: int = 2000
    """of each run"""
    out: Path | None = None
    """write the figures here as JSON"""


def agents(folder: Path) -> list[str]:
    """A program is started for each of four episodes a step."""
    write_task(folder, **SMALL)
    (folder / "agent.py").write_text(AGENT)
    agent = f"{sys.executable} -S {folder / 'agent.py'}"
    return ["--agent", agent, "--max-turns", "1", "--max-total-tokens", "64", "--group-size", "2"]


def overlap(folder: Path) -> list[str]:
    """Weights go to another process after each step."""
    write_task(folder, **SMALL)
    return [*digits(folder), "--overlap", "--group-size", "4"]


def images(folder: Path) -> list[str]:
    """A picture in each prompt."""
    from rlkit.data.tiny import tiny_vision_model

    tiny_vision_model(folder / "model", hidden=16, layers=1)
    rows = []
    for i in range(16):
        Image.fromarray(np.full((16, 16, 3), 16 * i, np.uint8)).save(folder / f"{i}.png")
        rows.append(json.dumps({"prompt": "<image>digits", "images": [f"{i}.png"]}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return [*digits(folder), "--group-size", "4"]


KINDS: dict[str, Callable[[Path], list[str]]] = {"agents": agents, "images": images, "overlap": overlap}


def look(process: psutil.Process) -> list[float]:
    """The private and shared memory of a process and its children, what they have open, and /dev/shm."""
    memory = files = num = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            memory, files, num = memory + one.memory_full_info().pss / 1e6, files + one.num_fds(), num + 1
        except psutil.Error:  # it has ended
            continue
    return [memory, files, num, len([*Path("/dev/shm").iterdir()])]


def run(kind: str, folder: Path, steps: int) -> list[list[float]]:
    """The step and what `look` saw, a hundred times."""
    sizes = f"--prompts-per-step 2 --max-new-tokens 6 --steps {steps} --save-steps 500".split()
    command = grpo(folder, [*KINDS[kind](folder), *sizes, "--output", str(folder / "run")])
    metrics = folder / "run" / "metrics.jsonl"
    step, seen = 0, list[list[float]]()
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        process, lines = stack.enter_context(psutil.Popen(command, stdout=log, stderr=log)), None
        while process.poll() is None:
            if lines is None and metrics.exists():
                lines = stack.enter_context(metrics.open())
            step += lines.read().count("\n") if lines else 0
            if step >= (seen[-1][0] if seen else 0) + steps / 100:
                seen.append([step, *look(process)])
            say(f"{kind}: step {step}/{steps}")
            time.sleep(0.05)
        if process.returncode:
            raise SystemExit(f"{kind} failed:\n" + "\n".join((folder / "log").read_text().splitlines()[-15:]))
    return seen


def main(args: Args) -> None:
    rows: list[dict[str, Any]] = []
    print(f"{'run':8}{'':12}{'early':>9}{'late':>9}  per 1,000 steps")
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as name:
            seen = run(kind, Path(name), args.steps)
        tenth = max(1, len(seen) // 10)
        row: dict[str, Any] = {"kind": kind}
        for i, what in enumerate(SEEN, 1):
            early, late = (
                statistics.median(x[i] for x in part) for part in (seen[tenth : 2 * tenth] or seen, seen[-tenth:])
            )
            half = seen[len(seen) // 2 :]
            slope = 1000 * np.polyfit(*([x[k] for x in half] for k in (0, i)), 1)[0] if len(half) > 1 else 0.0
            row[what] = {"early": early, "late": late, "per_1000_steps": float(slope)}
            print(f"{kind:8}{what:12}{early:9.1f}{late:9.1f}  {slope:+.2f}", flush=True)
        rows.append(row)
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "steps": args.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
