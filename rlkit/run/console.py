"""Output of a run: one line per step, and on a terminal a live progress bar below them."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from rlkit._util.ranks import is_first
from rlkit._util.text import masked, printable

TRAINING = "training had started"  # starts the note on an error raised after the set-up of a run


class Column(NamedTuple):
    """A column of the step line: the sum of the metrics `keys` that are present, times `scale`.

    On a narrow terminal those with `drop` leave, the lowest number first.
    """

    title: str
    keys: tuple[str, ...]
    width: int
    format: str
    scale: float = 1.0
    drop: int = 0


COLUMNS = (
    Column("loss", ("loss",), 7, ".4f", drop=7),
    Column("acc", ("accuracy",), 7, ".3f"),
    Column("reward", ("reward/mean",), 7, ".3f"),
    Column("entropy", ("entropy",), 7, ".3f", drop=2),
    Column("kl", ("kl/ref",), 8, ".5f", drop=4),
    Column("length", ("length/mean",), 7, ".1f", drop=5),
    Column("clip%", ("ratio/clip_low", "ratio/clip_high"), 7, ".2f", 100.0, drop=3),
    Column("teacher", ("teacher/loss",), 7, ".4f"),
    Column("mismatch", ("mismatch/abs_mean",), 9, ".1e", drop=1),
    Column("grad", ("grad_norm",), 7, ".3f", drop=6),
    Column("s/step", ("time/step",), 7, ".2f"),
    Column("tok/s", ("time/tokens_per_s",), 8, ".0f"),
)
_NO_PARTS = ("reward/mean", "reward/std")


def header(columns: Sequence[Column] = COLUMNS, *, evals: str = "sampled/greedy") -> str:
    """The titles above the step lines; `evals` names the two numbers of an evaluation ("" without evaluations)."""
    return "  step" + "".join(f" {c.title:>{c.width}}" for c in columns) + (f"  eval: {evals}" if evals else "")


def step_line(step: int, metrics: Mapping[str, Any], columns: Sequence[Column] = COLUMNS) -> str:
    """One step in fixed columns, at most 120 characters; "-" where a metric is missing."""
    cells = "".join(f" {_cell(c, metrics):>{c.width}}" for c in columns)
    pair = ("eval/loss", "eval/accuracy") if "eval/loss" in metrics else ("eval/sampled", "eval/greedy")
    evals = [metrics.get(key) for key in pair]
    evaluation = "/".join("-" if x is None else f"{x:z.3f}" for x in evals) if any(x is not None for x in evals) else ""
    return f"{step:>6}{cells}  {evaluation}".rstrip()


def reward_parts(metrics: Mapping[str, Any]) -> list[str]:
    """The keys `reward/NAME` of a step: further numbers of the reward function, such as the parts of a sum."""
    return [key for key in metrics if key.startswith("reward/") and key.count("/") == 1 and key not in _NO_PARTS]


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns whose header fits into `width` characters; the least important are dropped first."""
    fitted = list(columns)
    parts = [c.title for c in columns if c not in COLUMNS]
    sampled = any(c.title == "reward" for c in columns)  # then the loss does not measure progress
    first = [c.title for c in sorted(columns, key=lambda c: c.drop) if c.drop]
    for title in (*["loss"] * sampled, *first, *reversed(parts)):
        if len(header(fitted)) > width:
            fitted = [c for c in fitted if c.title != title]
    return fitted


def say(text: str, *, whole: bool = False) -> None:
    """Print a line on stdout, flushed; on a terminal it is broken between words, unless `whole`.

    A closed pipe or terminal (`| head -3`) does not end the run.
    """
    with _unless_lost():
        if sys.stdout is not None:
            text = printable(masked(text))
            sys.stdout.write((text if whole else wrapped(text, sys.stdout)) + "\n")
            sys.stdout.flush()


def encode_anything() -> None:
    """Let stdout and stderr print every character: where their encoding has none, as an escape like \\u2192.

    A stream that is not UTF-8 (a C locale, PYTHONIOENCODING) otherwise raises at the first answer of a model.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and getattr(stream, "errors", None) in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def wrapped(text: str, stream: Any) -> str:
    """The text, with its lines broken between words where `stream` is a terminal, which would break them anywhere.

    A line goes on below its indentation, and a row of a list, `  name   text`, below its text.
    """
    if stream is None or not stream.isatty():
        return text
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)  # escapes are longer
    return "\n".join(_filled(line, _columns(stream) - 3) for line in text.split("\n"))  # as above a bar


def _filled(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    before = re.match(r" +\S+(?: \S+)*  +(?=\S)| *", line)
    indent = len(before[0]) if before and len(before[0]) <= width // 2 else 2
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return textwrap.fill(line, width, subsequent_indent=" " * indent, **options)


def with_command(text: str, command: str, stream: Any) -> str:
    """`text: command`. A command too long for the terminal is below, with a backslash at the end of a line, to be
    copied."""
    width = _columns(stream) - 3 if stream is not None and stream.isatty() else math.inf
    if len(text) + 2 + len(command) <= width:
        return f"{text}: {command}"
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + len(word) + 7 > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return f"{text}:\n    " + " \\\n    ".join(lines)


def is_live(stream: Any) -> bool:
    """Whether the stream is a terminal whose lines can be erased."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _columns(stream: Any) -> int:
    """The width of the terminal that `stream` is."""
    with suppress(OSError, ValueError):
        return int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(stream.fileno()).columns or 80
    return 80


class _Warnings(logging.Handler):
    """Prints warnings as Python does without a handler, with lines that fit the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            sys.stderr.write(wrapped(printable(masked(self.format(record))), sys.stderr) + "\n")


@contextmanager
def warnings_that_fit() -> Iterator[None]:
    """Inside the block, warnings of rlkit and asyncio are printable, and broken between words on a terminal, unless
    logging is configured."""
    handler, named = _Warnings(logging.WARNING), map(logging.getLogger, ("rlkit", "asyncio"))
    loggers = [logger for logger in named if not logger.hasHandlers()]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False  # a library that configures logging while it is imported would print each line again
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True


class _Progress(logging.Handler):
    """Shows the latest message: on a terminal in a line that is erased, elsewhere every ten seconds."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.due = time.monotonic() + after_s
        self.shown = False

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or time.monotonic() < self.due:
            return
        live = is_live(sys.stderr)
        text = printable(record.getMessage())
        sys.stderr.write(f"\r\x1b[K{text[: _columns(sys.stderr) - 1]}" if live else f"{text}\n")
        sys.stderr.flush()
        self.shown, self.due = live, time.monotonic() + (0.2 if live else 10.0)

    def erase(self, _record: Any = None) -> bool:
        """Erase the line; True, as a filter of a logger whose records are printed there."""
        if self.shown and sys.stderr is not None:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self.shown = False
        return True


@contextmanager
def data_progress(*, after_s: float = 2.0) -> Iterator[None]:
    """Inside the block, show how far the reading, rendering and tokenizing of data is, once it takes `after_s`."""
    logger, data = logging.getLogger("rlkit.data.progress"), logging.getLogger("rlkit.data")
    if logger.handlers or not is_first():
        yield
        return
    handler, before = _Progress(after_s), (logger.level, logger.propagate)
    logger.addHandler(handler)
    data.addFilter(handler.erase)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        handler.erase()
        logger.removeHandler(handler)
        data.removeFilter(handler.erase)
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextmanager
def _unless_lost() -> Iterator[None]:
    """Ignore failed writes to stdout inside the block; if its reader is gone, redirect stdout to /dev/null."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.close(null)


def line_width() -> int:
    """Characters per line: the width of the terminal, else 120."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size((120, 24)).columns if terminal else 120


def _cell(column: Column, metrics: Mapping[str, Any]) -> str:
    values = [metrics[key] for key in column.keys if key in metrics]
    if not values:
        return "-"
    value = sum(values) * column.scale
    texts = [format(value, f"z{form}") for form in (column.format, ".1f", ".0f", ".1e", ".0e")]
    return next((text for text in texts if len(text) <= column.width), texts[-1])


class RunDisplay:
    """Prints step lines; on a terminal a bar with step, ETA and status (only then is `rich` imported), and in a
    notebook one line with the same, which changes.

    A line is printed for every `print_steps`-th step, for the last step and for steps with an evaluation. A run of no
    step has no bar.
    """

    def __init__(self, *, steps: int, start: int = 0, print_steps: int = 1) -> None:
        self._steps, self._print_steps = steps, print_steps
        self._lines = 0
        self._parts: list[str] = []
        self._seen: list[Column] = []
        self._shown = self._evals = ""
        self._bar: Any = None
        self._eta = _Eta(steps, max(start, 0))
        self._line = _NotebookLine(steps, self._eta) if steps and in_notebook() else None
        encode_anything()
        if self._line is None and steps and is_live(sys.stdout):
            with _unless_lost():
                self._open_bar(steps, max(start, 0))

    def _open_bar(self, steps: int, start: int) -> None:
        """A bar of one line. The cursor stays visible, so that a killed process leaves the terminal usable."""
        from rich.console import Console
        from rich.progress import BarColumn, RenderableColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.table import Column as TableColumn

        whole = TableColumn(no_wrap=True)  # on a narrow terminal only the status is cut
        self._status = _Status()
        bar = Bar(
            "step {task.completed}/{task.total}",
            BarColumn(bar_width=10, table_column=whole),
            TimeElapsedColumn(table_column=whole),
            RenderableColumn(self._eta, table_column=TableColumn(no_wrap=True)),
            RenderableColumn(self._status),
            refresh_per_second=2,
            transient=True,
            console=Console(file=sys.stdout),  # also while a reward has another one for a moment (redirect_stdout)
        )
        self._task = bar.add_task("run", total=steps, completed=start)
        bar.console.width = line_width() - 3  # room for the ^C that a terminal prints after the cursor
        try:
            bar.start()
            bar.console.show_cursor(True)
        except BaseException:  # Ctrl-C, as soon as the bar is seen
            bar.stop()
            raise
        self._bar = bar

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the line of a step, with a column per metric seen so far (header: every 25 lines), and move the bar."""
        self._parts = list(dict.fromkeys([*self._parts, *reward_parts(metrics)]))
        parts = [Column(name := key.removeprefix("reward/"), (key,), max(7, len(name)), ".3f") for key in self._parts]
        after = 1 + next(i for i, c in enumerate(COLUMNS) if c.title == "reward")
        candidates = (*COLUMNS[:after], *parts, *COLUMNS[after:])
        self._seen = [c for c in candidates if c in self._seen or any(key in metrics for key in c.keys)]
        evaluated = any(key.startswith("eval/") for key in metrics)
        if evaluated or step % self._print_steps == 0 or step == self._steps:
            pair = "loss/accuracy" if "eval/loss" in metrics else "sampled/greedy"
            self._evals = pair if evaluated else self._evals
            columns = fitting(self._seen, line_width())
            if (titles := header(columns, evals=self._evals)) != self._shown or self._lines % 25 == 0:
                self._shown, self._lines = titles, 0
                self.say(titles)
            self._lines += 1
            self.say(step_line(step, metrics, columns))
        self.status("")
        self._eta.step(step)
        if self._bar is not None:
            self._bar.console.width = line_width() - 3
            self._bar.update(self._task, completed=step)
        if self._line is not None:
            self._line.status("")

    def status(self, text: str) -> None:
        """Text beside the bar."""
        if self._bar is not None:
            self._status.text = printable(masked(text))
        if self._line is not None:
            self._line.status(printable(masked(text)))

    def say(self, text: str) -> None:
        """A line above the bar, or on plain stdout, flushed."""
        if self._bar is None:
            return say(text, whole=True)
        with _unless_lost():
            text = printable(masked(text))
            self._bar.console.print(text, markup=False, highlight=False, no_wrap=True, crop=False, overflow="ignore")

    def close(self) -> None:
        """Remove the bar; the lines stay."""
        if self._bar is not None:
            with _unless_lost():
                self._bar.stop()
            self._bar = None
        if self._line is not None:
            self._line.status("")


class _Eta:
    """The time that the steps left need, at the pace of the last ten minutes, with their evaluations.

    A step that takes longer than the mean counts as one that ends now, so the time does not stand still meanwhile.
    """

    def __init__(self, steps: int, start: int) -> None:
        self.steps, self.done = steps, start
        self._ends = deque([(start, time.monotonic())])

    def step(self, step: int) -> None:
        now = time.monotonic()
        self._ends.append((step, now))
        while len(self._ends) > 2 and self._ends[1][1] < now - 600:
            self._ends.popleft()
        self.done = step

    def seconds(self) -> float | None:
        """None before the first step."""
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        now, num, left = time.monotonic(), last - first, self.steps - last
        if num < 1 or left < 1:
            return 0.0 if left < 1 else None
        mean = (ended - began) / num
        return mean * left - (now - ended) if now - ended < mean else (now - began) / (num + 1) * (left - 1)

    def __rich__(self) -> Any:
        from rich.text import Text

        seconds = self.seconds()
        return Text("eta -" if seconds is None else f"eta {_clock(seconds)}")


class _Status:
    """A text of parts, of which a narrow terminal shows the first ones that fit whole."""

    text = ""

    def __rich_console__(self, _console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        parts = self.text.split(", ")
        while len(parts) > 1 and len(", ".join(parts)) > options.max_width:
            parts.pop()
        yield Text(", ".join(parts), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, _console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        return Measurement(1, max(1, len(self.text))).with_maximum(options.max_width)


class _NotebookLine:
    """A line below a notebook's cell, which changes: "step 12/200, 0:43, eta 11:20, rollout 3/8"."""

    def __init__(self, steps: int, eta: _Eta) -> None:
        from IPython.display import display

        self._steps, self._eta = steps, eta
        self._began, self._shown = time.monotonic(), 0.0
        self._handle: Any = display({"text/plain": self._text("")}, raw=True, display_id=True)

    def status(self, text: str) -> None:
        if not text or time.monotonic() > self._shown + 0.5:
            self._update(text)

    def _update(self, status: str) -> None:
        self._shown = time.monotonic()
        self._handle.update({"text/plain": self._text(status)}, raw=True)

    def _text(self, status: str) -> str:
        seconds = self._eta.seconds()
        eta = f"eta {_clock(seconds)}" if seconds else ""
        elapsed = _clock(time.monotonic() - self._began)
        return ", ".join(filter(None, (f"step {self._eta.done}/{self._steps}", elapsed, eta, status)))


def _clock(seconds: float) -> str:
    """0:43, 11:20, 1:02:03."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def in_notebook() -> bool:
    """Whether a cell of a notebook runs, which shows more than text."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")
