"""Peak memory of SFT on a JSONL file, held in memory and with `--stream`: a run of a few steps of a tiny model each.

    python benchmarks/streaming.py FOLDER [--megabytes 20 80 2000] [--held 20 80]

Each run is a process of its own; its peak is the kernel's (`ru_maxrss`). The page cache, in which the kernel keeps what
was read of the file, is not part of it. Prints a line for each run: size, rows, peak, seconds, and seconds per step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.run.folder import read_metrics

ROW = 1000  # bytes


def write(path: Path, megabytes: int) -> int:
    """Rows of about a kilobyte; returns their number."""
    rng, num = random.Random(0), megabytes * 1_000_000 // ROW
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(2000)]
    with path.open("w") as file:
        for i in range(num):
            text = " ".join(rng.choices(words, k=134))
            file.write(json.dumps({"prompt": f"{i:07d} {text[:60]}", "response": text[60:-20]}) + "\n")
    return num


def run(folder: Path, data: Path, *flags: str) -> tuple[float, float, float]:
    """The peak in MB, the seconds of the run, and the median seconds of a step."""
    output = folder / "run"
    command = [sys.executable, "-m", "rlkit", "sft", "--model", str(folder / "model"), "--data", str(data)]
    command += ["--output", str(output), "--steps", "10", "--batch-size", "16", "--device", "cpu", "--eval-steps", "0"]
    started = time.perf_counter()
    process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    assert status == 0, f"{command} failed"
    step = statistics.median(row["time/step"] for row in read_metrics(output)[1:])
    subprocess.run(["rm", "-r", str(output)], check=True)
    return usage.ru_maxrss / 1000, seconds, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 80, 2000])
    parser.add_argument("--held", type=int, nargs="+", default=[20, 80], help="sizes that are also held in memory")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    for x in (tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64), tokenizer):
        x.save_pretrained(args.folder / "model")
    for megabytes in args.megabytes:
        data = args.folder / "rows.jsonl"
        num = write(data, megabytes)
        for flags in [["--stream"], *([[]] if megabytes in args.held else [])]:
            peak, seconds, step = run(args.folder, data, *flags)
            how = "streamed" if flags else "held"
            print(f"{megabytes} MB, {num} rows, {how}: {peak:.0f} MB, {seconds:.0f} s, {step:.3f} s/step", flush=True)
        data.unlink()


if __name__ == "__main__":
    main()
