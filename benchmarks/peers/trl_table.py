"""From the metric lines of runs to the table of compare_trl.py, which says what each figure means."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import mean, median
from typing import Any

WINDOW = 10

Run = dict[str, Any]  # {"started": unix time of the command, "lines": of metrics.jsonl, "rss_mb": peak memory}


def smoothed(run: Run) -> list[float]:
    """Mean reward of the last `WINDOW` steps, from the first step with that many before it."""
    rewards = [line["reward/mean"] for line in run["lines"]]
    return [mean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]


def common_level(runs: list[Run], target: float) -> float:
    """The target, or where some run stays below it the highest multiple of 0.05 that all reach."""
    reached = min(max(smoothed(run), default=0.0) for run in runs)
    return target if reached >= target else math.floor(reached / 0.05 + 1e-9) * 0.05


def measure(run: Run, *, level: float, prompt_tokens: int, samples: int) -> dict[str, float]:
    """The figures of one run, in the order of the table."""
    lines, parts = run["lines"], []
    for before, line in list(pairwise(lines))[2:]:
        step = line["time/unix"] - before["time/unix"]
        rollout, forward = line["time/rollout"] + line.get("time/score", 0.0), line["time/forward"]
        parts.append((step, rollout, forward, step - rollout - forward, line["length/mean"]))
    step, rollout, forward, training, length = (median(column) for column in zip(*parts, strict=True))
    figures = {
        "first update, s": lines[0]["time/unix"] - run["started"],
        "step, s": step,
        "  rollout, s": rollout,
        "  log-probs, s": forward,
        "  training, s": training,
        "tokens/s sampled": samples * length / rollout,
        "tokens/s trained": samples * (prompt_tokens + length) / (forward + training),
        "peak RSS, MB": run["rss_mb"],
    }
    curve = smoothed(run)
    if level > 0:
        line = lines[next(i for i, reward in enumerate(curve) if reward >= level) + WINDOW - 1]
        figures[f"to reward {level:.2f}, s"] = line["time/unix"] - run["started"]
        figures[f"to reward {level:.2f}, steps"] = line["step"]
    if curve:
        figures["reward, last 10 steps"] = curve[-1]
    return figures


def tabulate(figures: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """One row per figure: [median, lowest, highest] of each side and of the ratio within a round."""
    rows = []
    for name in figures["trl"][0]:
        trl, ours = ([run[name] for run in figures[side]] for side in ("trl", "rlkit"))
        row: dict[str, Any] = {"figure": name, "trl": _spread(trl), "rlkit": _spread(ours)}
        if not name.startswith("reward"):
            ratios = [o / t if "tokens/s" in name else t / o for t, o in zip(trl, ours, strict=True)]
            row["better by"] = _spread(ratios)
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"\n{'':24}" + "".join(f"{title:>26}" for title in ("TRL", "rlkit", "better by")))
    for row in rows:
        print(f"{row['figure']:24}" + "".join(f"{_cell(row.get(key)):>26}" for key in ("trl", "rlkit", "better by")))


def _spread(values: list[float]) -> list[float]:
    return [median(values), min(values), max(values)]


def _cell(values: list[float] | None) -> str:
    if values is None:
        return "-"
    middle, low, high = (f"{v:.0f}" if abs(v) >= 100 else f"{v:#.3g}" for v in values)
    return f"{middle} ({low}-{high})"
