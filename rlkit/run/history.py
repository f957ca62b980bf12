"""What the files of a run tell: its starts, the data that it has seen, its best step, answers before and after."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.run.folder import read_lines
from rlkit.run.report.meanings import sign_of
from rlkit.run.trajectories import Group, read_file

Row = Mapping[str, Any]
OWN = ("format", "run", "script", "resume", "output", "debug", "threads")  # arguments in which starts differ anyway
SCORES = ("eval/greedy", "eval/sampled", "eval/accuracy", "eval/loss")
_START: dict[str, Any] = {  # the types of what is read of a start
    "args": dict, "machine": dict, "versions": dict, "held_out": dict, "rows": int, "ranks": int, "nodes": int,
    "process_gib": int | float,
}  # fmt: skip
MAX_READ = 16 << 20  # bytes of one file of answers


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run (`rlkit.run.machine.start_row`), each with `changed`: argument -> before and now.

    `changed` is empty where a start has no `args`, as those of version 0.1.
    """
    path = folder / "starts.jsonl"
    starts = read_lines(path, fits=_is_start) if path.exists() else []
    for before, start in zip([{}, *starts], starts):
        old, new = before.get("args") or {}, start.get("args") or {}
        names = [name for name in dict.fromkeys([*old, *new]) if name not in OWN] if old and new else []
        start["changed"] = {name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)}
    return starts


def _is_start(row: Row) -> bool:
    return type(row.get("step")) is int and all(isinstance(row.get(x), kind | None) for x, kind in _START.items())


def seen(args: Row, rows: Sequence[Row], starts: Sequence[Row]) -> dict[str, float]:
    """How much a run has trained on: `num` and `samples`, or `examples`; `tokens`; `passes` over its data.

    Each step counts with the arguments of its start. What is not known is left out.
    """
    amounts: dict[str, float] = {}
    for row in (row for row in rows if row["step"] > 0):
        flags = next((s["args"] for s in reversed(starts) if s["step"] < row["step"] and s.get("args")), args)
        num, size = flags.get("prompts_per_step"), flags.get("group_size")
        counts = {"prompts": num, "samples": num and size and num * size, "examples": flags.get("batch_size")}
        tokens = row.get("time/tokens_per_s", 0) * row.get("time/step", 0)
        counts["tokens"] = round(tokens) if math.isfinite(tokens) else 0
        for name, count in counts.items():
            if isinstance(count, int):
                amounts[name] = amounts.get(name, 0) + count
    size = next((start["rows"] for start in reversed(starts) if start.get("rows")), 0)
    taken = amounts.get("prompts", amounts.get("examples"))
    return amounts | ({"passes": taken / size} if size and taken else {})


def seen_text(args: Row, rows: Sequence[Row], starts: Sequence[Row]) -> str:
    """`seen` for people: 1,600 prompts (40 passes), 12,800 samples, 1,234,000 tokens."""
    counts = seen(args, rows, starts)
    passes = counts.pop("passes", None)
    parts = [f"{count:,} {name if count != 1 else name[:-1]}" for name, count in counts.items() if count]
    if passes and parts:
        parts[0] += f" ({passes:.3g} pass{'es' * (passes != 1)} over the data)"
    return ", ".join(parts)


def best(args: Row, rows: Sequence[Row]) -> tuple[str, float, int] | None:
    """The metric of held-out data, its best value and the step of it; None where nothing was measured twice.

    The metric is that of `keep_best`, else the first of `SCORES`. The highest is best, and of a loss the lowest.
    """
    for key in map(str, filter(None, (args.get("keep_best"), *SCORES))):
        values = [(row[key], row["step"]) for row in rows if isinstance(row.get(key), int | float)]
        if len(values) > 1:
            value, step = max(values, key=lambda x: (sign_of(key) * x[0], -x[1]))
            return key, value, step
    return None


def peak_memory(rows: Sequence[Row], starts: Sequence[Row]) -> str:
    """The largest memory of the run: of the first rank's GPU, and of its process."""
    gpu = max(
        (x for row in rows for k, x in row.items() if k.startswith("memory/") and isinstance(x, float)), default=0
    )
    parts = [f"{gpu:.1f} GiB on the GPU"] if gpu and any((s.get("machine") or {}).get("gpus") for s in starts) else []
    process = max((start.get("process_gib") or 0 for start in starts), default=0)
    return ", ".join([*parts, *([f"{process:.1f} GiB of the process"] if process else [])])


def process_gib() -> float:
    """The largest memory that this process has taken, in GiB."""
    import resource  # not on every system

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(size / (2**30 if sys.platform == "darwin" else 2**20), 2)


class Answers(NamedTuple):
    """A held-out prompt, and its first answer at two steps, as rows of `trajectories/`."""

    prompt: str
    gold: Any
    before: Row
    after: Row


class Compared(NamedTuple):
    """Held-out answers at the first and the last evaluation: of some prompts, and how many got better and worse."""

    kind: str
    steps: tuple[int, int]
    answers: list[Answers]
    better: int
    worse: int
    equal: int


def compare_answers(folder: Path, *, most: int) -> Compared | None:
    """The answers to the first `most` held-out prompts, greedy where there are greedy ones; None without two steps."""
    files: dict[str, dict[int, Path]] = {}
    for path in (folder / "trajectories").glob("eval_*.jsonl"):
        kind, _, step = path.stem.rpartition("_")
        if re.fullmatch("[0-9]+", step):
            files.setdefault(kind, {})[int(step)] = path
    several = sorted((kind for kind, steps in files.items() if len(steps) > 1), key=lambda x: ("greedy" not in x, x))
    if not several:
        return None
    kind = several[0]
    first, last = min(files[kind]), max(files[kind])
    groups = [{group.row: group for group in read_file(files[kind][step], step, MAX_READ)} for step in (first, last)]
    pairs = [(before, groups[1][row]) for row, before in sorted(groups[0].items()) if row in groups[1]]
    changes = [_mean(after) - _mean(before) for before, after in pairs]
    answers = [Answers(before.rows[0].get("prompt", ""), before.rows[0].get("gold"), before.ends[0], after.ends[0])
               for before, after in pairs[:most]]  # fmt: skip
    counts = (sum(x > 0 for x in changes), sum(x < 0 for x in changes), sum(x == 0 for x in changes))
    return Compared(kind, (first, last), answers, *counts) if answers else None


def _mean(group: Group) -> float:
    rewards = [x for row in group.ends if isinstance(x := row.get("reward"), int | float)]
    return sum(rewards) / len(rewards) if rewards else 0.0
