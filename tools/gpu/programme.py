"""Run one of rlkit's GPU programmes: stages in order of worth, each with a time limit, results kept after every stage.

    python tools/gpu/programme.py A --out results                  # on one CUDA device
    python tools/gpu/programme.py A --out results --seconds 540    # as many stages as fit
    python tools/gpu/programme.py A --out results --resume         # later: the stages that have not ended well yet
    python tools/gpu/programme.py A --out /tmp/x --rehearse        # every stage with tiny shapes on the CPU

    A   8 minutes     tests of every kernel and of training; the kernels beside other libraries; their constants
    B   14 minutes    a GRPO step beside TRL's, a decoding step beside its bound, training rows, a profile of the update
    C   14 minutes    learning curves, overlap, one sequence of 8k to 128k tokens

B needs trl, datasets and their needs for its rows of TRL; C has SmolLM2 from the folder `--smollm` (`make smollm`) and
needs tyro and datasets for it. A stage that fails or reaches its limit costs its own time only. `--out` gets
`summary.json` (how each stage ended), folders `results` and `logs`, and both in `results.tar.gz`; `--resume` reads
`summary.json`.
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
REWARD = "recipes/sums/reward.py:correct"
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


def programmes(out: Path, *, rehearse: bool, smollm: str) -> dict[str, list[Stage]]:
    """The stages of each programme; `out` is the folder for their files."""
    tiny = ("--rehearse",) if rehearse else ()
    into = ("--out", str(out), *tiny)

    def tests(name: str, seconds: float, *files: str, only: str = "", workers: int = 8) -> Stage:
        chosen = ("-k", only) if only else ()
        several = () if rehearse else ("-n", str(workers))
        options = ("-m", "pytest", "-q", "--maxfail=8", "-m", "gpu", "-p", "no:cacheprovider", *several)
        return Stage(name, seconds, (*options, *files, *chosen))

    def kernels(name: str, seconds: float, *shapes: str, cap: int = 10) -> Stage:
        limits = ("--seconds", f"{seconds:.0f}", "--cap", str(cap))
        only = ("tiny", *shapes) if rehearse else shapes
        return Stage(name, seconds + 5, ("benchmarks/gpu_kernels.py", *limits, *into, "--only", *only))

    def tune(seconds: float, *groups: str) -> Stage:
        limits = ("--seconds", f"{seconds:.0f}")
        return Stage("tune", seconds + 15, ("benchmarks/gpu_tune.py", "--groups", *groups, *limits, *into))

    def grpo(name: str, seconds: float, side: str, size: str, *more: str) -> Stage:
        return Stage(name, seconds, ("benchmarks/gpu_grpo.py", "--side", side, "--size", size, *more, *into))

    def train(name: str, seconds: float, *rows: str) -> Stage:
        limits = ("--seconds", f"{seconds - 5:.0f}", "--curve-seconds", "0")
        return Stage(name, seconds, ("benchmarks/gpu_training.py", *limits, *into, "--only", *rows))

    def sums(name: str, seconds: float, *more: str) -> Stage:
        size = ("2", "4", "8") if rehearse else ("16", "16", "32")
        names = ("--prompts-per-step", "--group-size", "--max-new-tokens")
        flags = [x for pair in zip(names, size, strict=True) for x in pair]
        task = ("--data", "recipes/sums/train.jsonl", "--eval-data", "recipes/sums/test.jsonl", "--reward", REWARD)
        run = ("-m", "rlkit.scripts", "grpo", "--model", smollm, *task, "--lr", "1e-5", "--save-steps", "0", *flags)
        folder = out / name.replace(" ", "_")
        again = ("--resume",) if folder.exists() else ()  # a run that reached its limit
        return Stage(name, seconds, (*run, *more, *again, "--output", str(folder)))

    few = ("--steps", "1", "--eval-limit", "4")
    demo = ("--hidden", "768", "--layers", "12", "--digits", "10", "--device", "cuda")
    short = ("--sft-steps", "2", "--grpo-steps", "2", "--eval-limit", "4")
    curve = ("examples/demo.py", "--output", str(out / "demo"), *(short if rehearse else demo))
    quick = "forward_is or bf16_is or flash or recorded or engine or fsdp or offloaded or few_bits"
    start = [
        Stage("probe", 40, ("tools/gpu/probe.py", "--out", str(out))),
        tests("smoke", 60, "tests/test_gpu.py", only=quick),
    ]
    main, ours = "qwen3-8b 16k", ("0.6B grpo rlkit shared", "1.7B grpo rlkit shared", "8B grpo rlkit shared")
    others = ("0.6B grpo transformers", "1.7B grpo transformers", "0.6B grpo TRL")
    return {
        "A": [
            *start,
            tests("kernel tests", 110, "tests/kernels/test_gpu_kernels.py", only="not compiled"),
            kernels("main shape", 105, "8192", main),
            kernels("logits and scan", 80, "8192 x 151936", "8.4M tokens", cap=5),
            kernels("peaked", 90, f"{main}, peaked"),
            tune(90, "backward", "statistics", "forward"),
            kernels("tuned", 90, main, cap=8),
            kernels("other shapes", 170, "qwen3-0.6b 64k", "gemma-2-2b 8k", "odd vocabulary 8k", "llama-3.1-8b 4k"),
            tests("compiled tests", 80, "tests/kernels/test_gpu_kernels.py", only="compiled", workers=1),
        ],
        "B": [
            *start,
            grpo("step", 80, "rlkit", "1.5B", "--profile"),
            grpo("step, checkpointed", 60, "rlkit", "1.5B", "--checkpointing", "--micro", "32768"),
            grpo("step, compiled", 110, "rlkit", "1.5B", "--compile"),
            grpo("step of TRL", 150, "trl", "1.5B", "--steps", "3"),
            Stage("decode", 60, ("benchmarks/gpu_decode.py", *(() if rehearse else ("--profile",)), *into)),
            train("training", 110, *ours, *others),
            train("decoding", 60, "0.6B decode rlkit", "0.6B decode transformers"),
            grpo("step of 0.5B", 40, "rlkit", "0.5B"),
            grpo("step of 0.5B, TRL", 110, "trl", "0.5B", "--steps", "3"),
            grpo("step in fp32", 110, "rlkit-eager", "1.5B", "--steps", "3"),
        ],
        "C": [
            *start,
            Stage("curve", 170, curve),
            sums("sums", 170, *(few if rehearse else ("--steps", "100", "--eval-steps", "20", "--eval-limit", "200"))),
            Stage("context", 120, ("benchmarks/gpu_context.py", *into)),
            sums("sums overlap", 70, "--overlap", *(few if rehearse else ("--steps", "20"))),
            sums("deterministic", 70, "--deterministic", *(few if rehearse else ("--steps", "10"))),
            tests("sync", 60, "tests/sglang/test_ipc_gpu.py", "tests/vllm/test_transports_gpu.py", workers=1),
        ],
    }


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


def environment(*, rehearse: bool, ipc: bool) -> dict[str, str]:
    """Environment of a stage; a rehearsal sees no CUDA device."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if not rehearse and not ipc:  # CUDA IPC needs plain segments
        env |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
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
    parser.add_argument("programme", choices=("A", "B", "C"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all stages; one that does not fit is named")
    parser.add_argument("--only", nargs="*", help="names of stages")
    parser.add_argument("--resume", action="store_true", help="skip stages that ended well before")
    parser.add_argument("--smollm", default="SmolLM2-135M-Instruct", help="C: the folder of the model")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU, no limits")
    args = parser.parse_args()
    end, out = time.monotonic() + args.seconds, args.out.resolve()
    for name in ("results", "logs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    stages = programmes(out / "results", rehearse=args.rehearse, smollm=args.smollm)[args.programme]
    if unknown := set(args.only or ()) - {s.name for s in stages}:
        parser.error(f"no stage {unknown.pop()!r} in {args.programme}: {', '.join(s.name for s in stages)}")
    before = out / "summary.json"
    said = json.loads(before.read_text()) if args.resume and before.exists() else {}
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
        env = environment(rehearse=args.rehearse, ipc=stage.name == "sync")
        ended = run(stage, log, 1e6 if args.rehearse else min(stage.seconds, left), env)
        said[key] = {"said": ended, "seconds": round(time.monotonic() - began, 1), "limit": stage.seconds}
        tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        print(
            f"{stage.name:16} {ended:10} {said[key]['seconds']:6.1f} s  {' | '.join(x[-150:] for x in tail)}",
            flush=True,
        )
        archive(out, said)
    archive(out, said)
    sys.exit(any(v["said"] != "ok" for v in said.values()))


if __name__ == "__main__":
    main()
