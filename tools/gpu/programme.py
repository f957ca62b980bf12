"""Run one of rlkit's GPU programmes: stages in order of worth, each with a time limit, results kept after every stage.

    python tools/gpu/programme.py A --out results                  # 12 minutes on one CUDA device
    python tools/gpu/programme.py A --out results --seconds 540    # as many stages as fit
    python tools/gpu/programme.py A --out results --resume         # later: the stages that have not ended well yet
    python tools/gpu/programme.py A --out /tmp/x --rehearse        # every stage with tiny shapes on the CPU

`A` tests every kernel and training on the device, then measures the kernels beside other libraries. A stage that fails
or reaches its limit costs its own time only. `--out` gets `summary.json` (how each stage ended), `results.tar.gz` (all
files and logs), and a folder `results` and `logs` of the same; `--resume` reads `summary.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MARGIN = 10.0  # seconds at the end for the archive
LEAST = 30.0  # a stage begins if this much of its limit is left
STOP = ((signal.SIGINT, 8.0), (signal.SIGKILL, 5.0))  # what a stage over its limit gets, and the seconds to react
MAX_FILE = 8 << 20  # larger files (weights) stay out of the archive


@dataclass(frozen=True)
class Stage:
    """A command of `python` from the repository's root, and its limit in seconds."""

    name: str
    seconds: float
    command: tuple[str, ...]


def programmes(out: Path, rehearse: bool) -> dict[str, list[Stage]]:
    """The stages of each programme; `out` is the folder for their files."""
    tiny = ("--rehearse",) if rehearse else ()
    workers = () if rehearse else ("-n", "8")

    def tests(name: str, seconds: float, file: str, expression: str = "") -> Stage:
        chosen = ("-k", expression) if expression else ()
        run = ("-m", "pytest", "-q", "--maxfail=8", "-m", "gpu", "-p", "no:cacheprovider", *workers, file, *chosen)
        return Stage(name, seconds, run)

    def kernels(name: str, seconds: float, *shapes: str, cap: float = 10) -> Stage:
        only = ("tiny", *shapes) if rehearse else shapes
        limits = ("--seconds", f"{seconds:.0f}", "--cap", f"{cap:.0f}", "--out", str(out))
        return Stage(name, seconds + 5, ("benchmarks/gpu_kernels.py", *limits, *tiny, "--only", *only))

    def tune(seconds: float, *groups: str) -> Stage:
        limits = ("--seconds", f"{seconds:.0f}", "--out", str(out))
        return Stage("tune", seconds + 15, ("benchmarks/gpu_tune.py", "--groups", *groups, *limits, *tiny))

    start = [Stage("probe", 40, ("tools/gpu/probe.py", "--out", str(out)))]
    smoke = "forward_is or bf16_is or flash or engine or fsdp"
    start.append(tests("smoke", 60, "tests/test_gpu.py", smoke))
    main = "qwen3-8b 16k"
    return {
        "A": [
            *start,
            tests("kernel tests", 110, "tests/kernels/test_gpu_kernels.py", "not compiled"),
            kernels("main shape", 105, "8192", main),
            kernels("logits and scan", 80, "8192 x 151936", "8.4M tokens", cap=5),
            kernels("peaked", 90, f"{main}, peaked"),
            tune(90, "backward", "statistics", "forward"),
            kernels("tuned", 90, main, cap=8),
            kernels("other shapes", 170, "qwen3-0.6b 64k", "gemma-2-2b 8k", "odd vocabulary 8k", "llama-3.1-8b 4k", cap=7),
            tests("compiled tests", 80, "tests/kernels/test_gpu_kernels.py", "compiled"),
        ],
    }  # fmt: skip


def run(stage: Stage, log: Path, limit: float, env: dict[str, str]) -> str:
    """Run a stage in a process group of its own. Returns "ok", "failed CODE" or "stopped" (at its limit)."""
    with log.open("wb") as file:
        command = [sys.executable, *stage.command]
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
        )
        try:
            code = child.wait(limit)
            return "ok" if code == 0 else f"failed {code}"
        except subprocess.TimeoutExpired:
            for number, seconds in STOP:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, number)
                    child.wait(seconds)
            return "stopped"


def environment(rehearse: bool) -> dict[str, str]:
    """Environment of the stages; a rehearsal sees no CUDA device."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if rehearse:
        env |= {"RLKIT_GPU_TESTS_ON": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return env


def archive(out: Path, said: dict[str, dict]) -> None:
    """Write `summary.json` and `results.tar.gz`; a call may be killed after any stage."""
    (out / "summary.json").write_text(json.dumps(said, indent=1) + "\n")
    with tarfile.open(out / "results.tar.gz", "w:gz") as tar:
        for name in ("results", "logs"):
            tar.add(out / name, name, filter=lambda info: None if info.size > MAX_FILE else info)


def main() -> None:
    """Run the stages that are asked for; exit code 1 if one did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programme", choices=list(programmes(Path(), False)))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all stages; one that does not fit is named")
    parser.add_argument("--only", nargs="*", help="names of stages")
    parser.add_argument("--resume", action="store_true", help="skip stages that ended well before")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU, no limits")
    args = parser.parse_args()
    end, out = time.monotonic() + args.seconds, args.out.resolve()
    for name in ("results", "logs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    stages = programmes(out / "results", args.rehearse)[args.programme]
    if unknown := set(args.only or ()) - {s.name for s in stages}:
        parser.error(f"no stage {unknown.pop()!r} in {args.programme}: {', '.join(s.name for s in stages)}")
    before = out / "summary.json"
    said = json.loads(before.read_text()) if args.resume and before.exists() else {}
    env = environment(args.rehearse)
    for stage in stages:
        key = f"{args.programme} {stage.name}"
        if (args.only and stage.name not in args.only) or said.get(key, {}).get("said") == "ok":
            continue
        left = end - time.monotonic() - MARGIN
        if left < min(stage.seconds, LEAST):
            said[key] = {"said": "no time"}
            print(f"{stage.name:16} no time: run again with --resume", flush=True)
            continue
        began, log = time.monotonic(), out / "logs" / f"{key.replace(' ', '_')}.log"
        ended = run(stage, log, 1e6 if args.rehearse else min(stage.seconds, left), env)
        said[key] = {"said": ended, "seconds": round(time.monotonic() - began, 1), "limit": stage.seconds}
        tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        print(f"{stage.name:16} {ended:10} {said[key]['seconds']:6.1f} s  {' | '.join(x[-150:] for x in tail)}", flush=True)
        archive(out, said)
    archive(out, said)
    sys.exit(any(v["said"] != "ok" for v in said.values()))


if __name__ == "__main__":
    main()
