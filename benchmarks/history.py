"""Start-up time and memory of a two-step run, beside the last record of this kind of CPU in history.jsonl.

    python benchmarks/history.py              # prints; CI calls it
    python benchmarks/history.py --record     # adds a line, once per release, with the ratios of results/*.json

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

import tyro
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
from rlkit.scripts.imports import defer_compiler
import torch
defer_compiler()
import rlkit.loops.grpo, rlkit.rollout.engines.local
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
print(time.process_time())
"""


@dataclass
class Args:
    rounds: int = 3
    """runs; the median counts"""
    record: bool = False
    """add a line to history.jsonl"""


def one_round(task: Path) -> dict[str, float]:
    """The figures of one run of each kind."""
    start = time.time()
    subprocess.run([*RLKIT, "grpo", "--help"], check=True, capture_output=True)
    help_s = time.time() - start
    imports = subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True).stdout
    run = task / f"run-{time.time_ns()}"
    flags = [
        *("--model", task / "model", "--data", task / "data.jsonl", "--reward", f"{task / 'reward.py'}:score"),
        *("--output", run, "--steps", 2, "--prompts-per-step", 8, "--group-size", 8, "--max-new-tokens", 8),
        *("--max-prompt-tokens", 32, "--eval-steps", 0, "--save-steps", 0),
    ]
    start = time.time()
    child = subprocess.Popen([*RLKIT, "grpo", *map(str, flags)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
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
        found[name] = round(row["dense"]["ratio"][0], 3)
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
    main(tyro.cli(Args, description=__doc__))
