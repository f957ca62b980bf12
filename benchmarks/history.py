"""Start-up time and memory of a two-step run, beside the last record of this kind of CPU in history.jsonl.

    python benchmarks/history.py              # prints; CI calls it
    python benchmarks/history.py --record     # adds a line, once per release, with the ratios of results/*.json
    python benchmarks/history.py --memory     # prints what the memory of a run holds, part by part (Linux)

A run is `rlkit grpo` on a random model of 1 M parameters, two steps of 8 prompts with 8 answers, in a fresh process:

    help          seconds of `rlkit grpo --help`
    import        processor seconds of the imports of such a run: torch, transformers' model class, the loop
    first update  seconds from the command to the line of the first step
    peak          resident set of the run, in MB

Medians of `--rounds`. Figures of different machines do not compare: the CPU is part of a record.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from _cli import run_script
from _timing import machine

import rlkit

HISTORY = Path(__file__).with_name("history.jsonl")
RESULTS = Path(__file__).with_name("results")
RLKIT = [sys.executable, "-m", "rlkit.scripts"]
MODEL = """
import sys
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.weights import export_hf
tokenizer = tiny_tokenizer()
export_hf(tiny_model(tokenizer, seed=0), tokenizer, sys.argv[1])
"""
IMPORTS = """
import time
import torch
import rlkit.loops.grpo, rlkit.rollout.engines.local
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
print(time.process_time())
"""

PARTS = """
import sys
before = [0, 0]
def part(name, step=None):
    if step is not None:
        step()
    kinds = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup") if line.endswith("kB\\n"))
    own, files = (int(kinds[kind]) / 1024 for kind in ("Anonymous:", "Rss:"))
    now = [own, files - own]
    print(f"{name:28}{now[0] - before[0]:8.0f}{now[1] - before[1]:8.0f}{sum(now):8.0f}", file=sys.stderr)
    before[:] = now
def load(*names):
    return lambda: [__import__(name) for name in names]
part("Python")
part("flags, data", load("rlkit.scripts.grpo", "tyro", "rlkit.data.load", "rlkit.compat.rewards", "asyncio"))
part("numpy", load("numpy"))
part("torch", load("torch"))
part("transformers", load("transformers.models.auto.tokenization_auto"))
part("rlkit", load("rlkit.loops.grpo", "rlkit.rollout.engines.local"))
part("the model's class", load("transformers.models.qwen3.modeling_qwen3"))
from rlkit.scripts import cli, grpo
cli.run(grpo.main, grpo.Args, None)
part("a run of two steps")
"""


@dataclass
class Args:
    rounds: int = 3
    """runs; the median counts"""
    record: bool = False
    """add a line to history.jsonl"""
    memory: bool = False
    """print the memory of each part of a run"""


def run_flags(task: Path) -> tuple[list[str], Path]:
    """The flags of a run of two steps, and its folder."""
    run = task / f"run-{time.time_ns()}"
    flags = [
        *("--model", task / "model", "--data", task / "data.jsonl", "--reward", f"{task / 'reward.py'}:score"),
        *("--output", run, "--steps", 2, "--prompts-per-step", 8, "--group-size", 8, "--max-new-tokens", 8),
        *("--max-prompt-tokens", 32, "--eval-steps", 0, "--save-steps", 0),
    ]
    return [*map(str, flags)], run


def print_memory(task: Path) -> None:
    """Print the megabytes that each part of a run adds to those of its process, and their sum so far."""
    print(f"{'MB':28}{'own':>8}{'files':>8}{'sum':>8}", file=sys.stderr)
    subprocess.run([sys.executable, "-c", PARTS, *run_flags(task)[0]], check=True, stdout=subprocess.DEVNULL)


def one_round(task: Path) -> dict[str, float]:
    """The figures of one run of each kind."""
    start = time.time()
    subprocess.run([*RLKIT, "grpo", "--help"], check=True, capture_output=True)
    help_s = time.time() - start
    imports = subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True).stdout
    flags, run = run_flags(task)
    start = time.time()
    child = subprocess.Popen([*RLKIT, "grpo", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit((child.stderr.read() if child.stderr else b"").decode())
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    return {
        "help_s": help_s,
        "import_cpu_s": float(imports),
        "first_update_s": first["time/unix"] - start,
        "peak_mb": _megabytes(usage),
    }


def _megabytes(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def ratios() -> dict[str, float]:
    """Medians of the comparison with TRL and of the training step, if they were run on this kind of CPU."""
    found: dict[str, float] = {}
    for name in ("trl_cpu", "trl_cpu_defaults", "trl_cpu_prefix"):
        rows = (row for row in _result(name).get("table", []) if row.get("better by"))
        found |= {f"{name}: {row['figure'].strip()}": round(row["better by"][0], 3) for row in rows}
    for row in _result("training_step_cpu").get("rows", []):
        name = "training: {model}, prompt {prompt}, {dtype}".format(**row)
        found[name] = round(row["packed"]["ratio"][0], 3)
    return found


def _result(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    result = json.loads(path.read_text()) if path.exists() else {"machine": {"cpu": ""}}
    return result if result["machine"]["cpu"] == machine()["cpu"] else {}


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        subprocess.run([sys.executable, "-c", MODEL, task / "model"], check=True)
        (task / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i:06}"}) + "\n" for i in range(64)))
        (task / "reward.py").write_text("def score(completion, row):\n    return len(completion) % 3\n")
        one_round(task)  # fills caches: the model check, .pyc files
        if args.memory:
            return print_memory(task)
        rounds = [one_round(task) for _ in range(args.rounds)]
    figures = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
    line: dict[str, Any] = {"date": str(date.today()), "rlkit": rlkit.__version__, **machine(), **figures}
    lines = [json.loads(text) for text in HISTORY.read_text().splitlines()] if HISTORY.exists() else []
    last = next((old for old in reversed(lines) if old["cpu"] == line["cpu"]), None)
    print(f"{'':16}{'now':>10}{'recorded':>10}   {line['cpu']}")
    for name, value in figures.items():
        spread = f"({min(r[name] for r in rounds):.2f}-{max(r[name] for r in rounds):.2f})"
        print(f"{name:16}{value:10.2f}" + ("" if last is None else f"{last[name]:10.2f}") + f"   {spread}")
    if args.record:
        with HISTORY.open("a") as file:
            file.write(json.dumps(line | {"ratios": ratios()}) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
