"""What a run shows while it goes: one line a step, below them a live bar where stdout is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A field of the step line: the sum of those of `keys` that are present, times `scale`."""

    title: str
    keys: tuple[str, ...]
    width: int
    format: str
    scale: float = 1.0


COLUMNS = (
    Column("loss", ("loss",), 7, ".4f"),
    Column("acc", ("accuracy",), 7, ".3f"),
    Column("reward", ("reward/mean",), 7, ".3f"),
    Column("entropy", ("entropy",), 7, ".3f"),
    Column("kl", ("kl/ref",), 8, ".5f"),
    Column("length", ("length/mean",), 7, ".1f"),
    Column("clip%", ("ratio/clip_low", "ratio/clip_high"), 7, ".2f", 100.0),
    Column("mismatch", ("mismatch/abs_mean",), 9, ".1e"),
    Column("grad", ("grad_norm",), 7, ".3f"),
    Column("s/step", ("time/step",), 7, ".2f"),
    Column("tok/s", ("time/tokens_per_s",), 8, ".0f"),
)


def header(columns: Sequence[Column] = COLUMNS, *, fixed_data: bool = False) -> str:
    """The titles above the step lines. What is evaluated depends on what is trained on: fixed data, or rewards."""
    evals = "loss/accuracy" if fixed_data else "sampled/greedy"
    return "  step" + "".join(f" {c.title:>{c.width}}" for c in columns) + f"  eval: {evals}"


def step_line(step: int, metrics: Mapping[str, Any], columns: Sequence[Column] = COLUMNS) -> str:
    """One step in fixed columns, at most 120 characters; "-" where a metric is missing."""
    cells = "".join(f" {_cell(c, metrics):>{c.width}}" for c in columns)
    pairs = [("eval/sampled", "eval/greedy"), ("eval/loss", "eval/accuracy")]
    evals = [metrics.get(key) for key in next((pair for pair in pairs if any(k in metrics for k in pair)), pairs[0])]
    shown = "/".join("-" if x is None else f"{x:.3f}" for x in evals) if any(x is not None for x in evals) else ""
    return f"{step:>6}{cells}  {shown}".rstrip()


def _cell(column: Column, metrics: Mapping[str, Any]) -> str:
    found = [metrics[key] for key in column.keys if key in metrics]
    if not found:
        return "-"
    value = sum(found) * column.scale
    text = format(value, column.format)
    return text if len(text) <= column.width else format(value, ".0e")


class Progress:
    """Prints step lines; on a terminal also a bar with step, ETA, reward and tokens/s. `rich` is imported only then."""

    def __init__(self, *, steps: int, start: int = 0) -> None:
        self._lines = 0
        self._columns: list[Column] = []
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24),
                TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(),
                TextColumn("{task.fields[last]} {task.fields[status]}"),
                refresh_per_second=2, speed_estimate_period=600, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("run", total=steps, completed=max(start, 0), last="", status="")
            self._bar.start()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the line of a step and move the bar. Columns are those that have been seen; the header comes back."""
        columns = [c for c in COLUMNS if c in self._columns or any(key in metrics for key in c.keys)]
        if columns != self._columns or self._lines % 25 == 0:
            self._columns, self._lines = columns, 0
            self.say(header(columns, fixed_data="loss" in metrics or "eval/loss" in metrics))
        self._lines += 1
        self.say(step_line(step, metrics, columns))
        if self._bar is not None:
            shown = {c.title: _cell(c, metrics) for c in columns}
            last = f"reward {shown['reward']} " * ("reward" in shown) + f" {shown.get('tok/s', '-')} tok/s "
            self._bar.update(self._task, completed=step, last=last, status="")

    def status(self, text: str) -> None:
        """Text beside the bar."""
        if self._bar is not None:
            self._bar.update(self._task, status=text)

    def say(self, text: str) -> None:
        """A line above the bar, or on plain stdout, flushed."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, no_wrap=True, crop=False, overflow="ignore")
        else:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def close(self) -> None:
        """Take the bar off the screen; the lines stay."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
