"""Training steps and decoding on a CUDA device, against bare transformers with FSDP2, TRL's head, and the hardware.

    PYTHONPATH=. python benchmarks/gpu_training.py --seconds 400 --out RESULTS
    PYTHONPATH=. python benchmarks/gpu_training.py --rehearse --out /tmp/x     # tiny shapes on the CPU

Qwen3 models of random weights. A training batch is 16 answers of 1024 tokens to one prompt of 1024 (SFT: 16 examples of
that length). Products in bf16, fp32 master weights, FSDP2 on one device, every layer checkpointed. The optimizer is
AdamW, or SGD on all sides where AdamW's states do not fit. Each side uses the largest micro-batch of 32k, 16k, ... 2k
tokens that fits. The sides:

- rlkit: `parallelize`, and `forward` and the update of its loops, with the packing of micro-batches and the entropy.
- transformers: the model's own forward with `sdpa`, all logits in fp32, no entropy.
- TRL: the same with TRL's chunked head and its entropy, where `gpu_peers.py` finds it.

    FLOPs = 6 N T + 12 L H D sum_t k_t + 6 V E A       MFU = FLOPs / (seconds * peak)

N weights in the layers' matrices, T tokens, L layers, H heads of D dimensions, k_t keys that token t sees, V x E the
head's weights, A tokens with a loss. Recomputation is not counted. T is what is processed, a shared prompt once per
micro-batch. `unshared` counts the batch without sharing, the same work on every side; so does tokens/s. The peak is
from the data sheet: 989 TFLOP/s (bf16, dense) for an H100 SXM, an H200 the same. `of product` is relative to the
practical ceiling, an 8192^3 product measured in the same run. Decoding: 64 prompts of 128 tokens, 256 new tokens each,
a plain model in bf16.

The last row trains: `examples/demo.py` on a model of 107 M weights, ten digits, for at most `--curve-seconds`.

A process measures the rows; it is killed at a row's time limit, and started again then and after an error. A row that
does not fit into the memory says so. Results are written after every row to `--out`/training_<device>.json. The
constants in `--out`/tuning.json are used (see `gpu_tune.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from _gpu import CUDA, Row, reason, save
from _timing import file_name
from _training import Case, curve, measure
from gpu_tune import use

PEAK_TFLOPS = {"NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H200": 989.0}  # bf16, dense
EAGER_SECONDS, COMPILED_SECONDS, LEAST_SECONDS = 75.0, 120.0, 10.0  # of a row, with the start of its process
COLUMNS = {
    "seconds": "seconds", "tokens_s": "tokens/s", "mfu": "MFU", "unshared_mfu": "unshared", "of_product": "of product",
    "peak_gb": "peak GB", "micro_tokens": "micro",
}  # fmt: skip


def cases() -> list[Case]:
    """The rows, the most wanted first: one that finds no time left is named and left out."""

    sft, grpo = ("sft", "rlkit"), ("grpo", "rlkit")
    sides = [sft, ("sft", "transformers"), (*grpo, True), grpo, ("grpo", "transformers")]
    small, middle, large = ([Case(size, *side) for side in sides] for size in ("0.6B", "1.7B", "8B"))
    return [
        Case("", "ceilings"),
        *small,
        Case("0.6B", "decode"),
        Case("0.6B", "decode", "transformers"),
        *(size[i] for size in (large, middle) for i in (2, 4)),
        *large[:2],
        Case("0.6B", "grpo", "TRL"),
        *(c._replace(compiled=True) for c in (small[2], small[4])),
        *(middle[i] for i in (0, 1, 3)),
        large[3],
        Case("0.6B", "decode", compiled=True),
        *(c._replace(compiled=True) for c in (large[2], large[4], small[0], small[1], small[3], *middle, *large[:2])),
        large[3]._replace(compiled=True),
    ]


class Worker:
    """A process that measures one case after the other."""

    def __init__(self, out: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, out), daemon=True)
        self.process.start()
        theirs.close()

    def row(self, case: Case, *, seconds: float) -> Row:
        """The case's row, within the time."""
        try:
            self.pipe.send(case)
            if not self.pipe.poll(seconds):
                return {"error": f"stopped after {seconds:.0f} s"}
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return {"error": f"the process ended with exit code {self.process.exitcode}"}

    def stop(self) -> None:
        """End the process, at once if it does not obey."""
        self.process.terminate()
        self.process.join(10)
        self.process.kill()
        self.process.join()


def serve(pipe: Connection, out: Path) -> None:
    """Measure what the pipe asks for."""
    use(out)
    while True:
        case = pipe.recv()
        try:
            row = measure(case)
        except Exception as error:  # the other rows are worth having
            row = {"error": reason(error)}
        pipe.send(row)


def limit(case: Case, args: argparse.Namespace) -> float:
    """Seconds that a row may take."""
    if case.task == "curve":
        return args.curve_seconds
    return COMPILED_SECONDS if case.compiled or case.task == "ceilings" else EAGER_SECONDS


def with_rates(row: Row, ceilings: Row) -> Row:
    """The row with its shares of the data sheet's peak and of the measured product."""
    if "tflops" not in row:
        return row
    peak = PEAK_TFLOPS.get(ceilings.get("machine", {}).get("device", ""))
    if peak:
        row |= {"mfu": round(row["tflops"] / peak, 3), "unshared_mfu": round(row["unshared_tflops"] / peak, 3)}
    if product := ceilings.get("product_tflops"):
        row["of_product"] = round(row["tflops"] / product, 3)
    return row


def show(case: Case, row: Row) -> None:
    """Print a row."""
    cells = "".join(f"{row.get(key, '-'):>12}" for key in COLUMNS)
    rest = {k: row[k] for k in ("error", "backend", "steps", "curve", "product_tflops", "copy_tb_s") if k in row}
    rest |= {"optimizer": row["optimizer"]} if row.get("optimizer", "AdamW") != "AdamW" else {}
    print(f"{case.name:36}{cells}  {'  '.join(f'{k}: {v}' for k, v in rest.items())}", flush=True)


def run(todo: list[Case], args: argparse.Namespace) -> None:
    """Measure, print and save the rows until the time is over; the curve's time is kept for it."""
    end = time.monotonic() + args.seconds
    path, ceilings, worker = args.out / "training.json", {}, None
    print(f"{'':36}{''.join(f'{title:>12}' for title in COLUMNS.values())}")
    for case in todo:
        reserved = args.curve_seconds if case.task != "curve" and todo[-1].task == "curve" else 0.0
        seconds = min(limit(case, args), end - reserved - time.monotonic())
        if seconds < LEAST_SECONDS:
            print(f"{case.name:36}no time left")
            continue
        if worker is not None and case.task == "curve":  # a script of its own, without a process group
            worker.stop()
            worker = None
        worker = worker or Worker(args.out)
        row: Row = worker.row(case, seconds=seconds)
        if "error" in row:
            worker.stop()
            worker = None
        if case.task == "ceilings" and "machine" in row:
            ceilings = row
            path = args.out / f"training_{file_name(row['machine']['device'])}.json"
        if case.task == "curve":
            row |= curve(Path(case.side))
        save(path, "rows", case.name if case.task != "curve" else "curve", with_rates(row, ceilings))
        show(case if case.task != "curve" else Case("", "curve", "107M"), row)
    if worker is not None:
        worker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=400.0, help="for all rows together")
    parser.add_argument("--curve-seconds", type=float, default=150.0, help="of them for the last row; 0: leave it out")
    parser.add_argument("--only", nargs="*", help="names of rows; all if not given")
    parser.add_argument("--rehearse", action="store_true", help="without a device: tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    if not CUDA and not args.rehearse:
        parser.error("no CUDA device; --rehearse --out SOMEWHERE runs every line on the CPU")
    todo = [c for c in cases() if args.only is None or c.name in args.only or c.task == "ceilings"]
    folder = Path(tempfile.mkdtemp(prefix="rlkit-curve-"))
    if args.curve_seconds and (args.only is None or "curve" in args.only):
        todo.append(Case("", "curve", str(folder / "demo")))
    try:
        run(todo, args)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
