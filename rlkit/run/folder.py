"""The run folder: metrics, samples and checkpoints of a run, each step written once despite interruptions.

    args.json                          the flags of the run
    config.yaml                        the same for `--config`, written by the scripts: it repeats the run
    chat_template.json                 the template of --chat-template, if one was given
    metrics.jsonl                      one line per step; keys that depend on the clock are named time/...
    trajectories/train_000010.jsonl    samples that step 10 trained on, one line each; also eval_sampled_000010.jsonl,
                                       eval_greedy_..., and dropped_... for groups that dynamic sampling dropped
    completions/                       the journal of completions, see rlkit.rollout.stream
    starts.jsonl                       command, arguments, machine and versions of each start of the run
    metrics.png                        the curves (`rlkit plot FOLDER` draws them again, or compares runs)
    report.html                        the report (`rlkit report FOLDER` writes it again, or compares runs)
    tensorboard/ wandb/ track_*.log    of --track, see rlkit.run.tracking
    profile/                           of --profile-steps, see rlkit.run.profile
    model/ best/                       the exported model, and that of --keep-best, each with its model card
    checkpoints/                       see rlkit.model.checkpoint

`step` counts optimizer updates: line s describes the s-th update, a checkpoint of step s was written after it, and
step 0 is before the first one. On resume from step s, later steps are deleted, so each step appears once.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlkit._util import untrusted
from rlkit._util.files import append_file, explain_full_disk, replace_file, sync
from rlkit._util.ranks import is_first
from rlkit._util.text import masked
from rlkit.run.console import RunDisplay, say, wrapped
from rlkit.run.cores import Waiting
from rlkit.run.machine import start_row

if TYPE_CHECKING:
    from rlkit.run.profile import Profile

CONFIG, CURVES, PARETO = "config.yaml", "metrics.png", "pareto.json"
FORMAT = 1  # of a run folder; increased when the files that a resume reads change
_RUN = ("metrics.jsonl", "checkpoints", "completions")  # a new run would mix with them
_OPENED = ("args.json", ".lock", *_RUN)  # a run leaves one of them, however early it ended
_FULL_FIX = "Free space there and resume: all up to the last checkpoint is safe."
_DRAW = "import sys; from rlkit.run.report.plot import plot_run; plot_run(sys.argv[1])"
_DRAW_S = 60.0  # seconds until this process draws itself
_held: dict[Path, IO[str]] = {}  # lock files of the run folders that this process holds
_resumed: dict[Path, dict[str, bytes]] = {}  # new args and config of runs that have not loaded their checkpoint yet


class Run:
    """An open run folder, made by `open_run`."""

    def __init__(self, folder: Path, progress: RunDisplay | None) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self._progress = progress
        self._unsynced: set[Path] = set()
        self._drawing: subprocess.Popen[bytes] | None = None
        self._waiting = Waiting()
        self.profile: Profile | None = None

    @property
    def active(self) -> bool:
        """Whether this rank writes and prints."""
        return self._progress is not None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl, and print the step if it is due (see `open_run`).

        Values are numbers or 0-dim tensors. Floats are written with all digits, so that runs can be compared bit for
        bit. NaN and infinities are written as NaN, Infinity, -Infinity, which Python's json reads.
        """
        if self._progress is None:
            return
        if taken := {"step", "time/unix"} & metrics.keys():
            raise ValueError(f"{min(taken)!r} is a metric of rlkit's own: give it another name")
        line = {"step": step, **{key: _number(key, value) for key, value in metrics.items()}, "time/unix": time.time()}
        self._append(self.folder / "metrics.jsonl", [line])
        self._progress.step(step, line)
        if slow := self._waiting.report():
            self._progress.say(slow)
        if self.profile is not None and (written := self.profile.reached(step)):
            self.say(written)

    def trajectories(self, step: int, rows: Iterable[Mapping[str, Any]], *, kind: str = "train") -> None:
        """Append rows (`rlkit.run.samples`) to `trajectories/{kind}_{step}.jsonl`; they are in the file on return."""
        if self.active:
            self._append(self.folder / "trajectories" / f"{kind}_{step:06d}.jsonl", rows)

    def status(self, text: str) -> None:
        """Show the progress inside a step beside the bar, e.g. "rollout 43/64". Only on a terminal."""
        if self._progress is not None:
            self._progress.status(text)

    def say(self, text: str, *, whole: bool = False) -> None:
        """Print a line above the bar; on a terminal it is broken between words, unless `whole` (to be copied)."""
        if self._progress is not None:
            self._progress.say(text if whole else wrapped(text, sys.stdout))

    def note(self, **facts: Any) -> None:
        """Add facts of this start to its line of starts.jsonl: for people, so a full disk does not matter."""
        path = self.folder / "starts.jsonl"
        if self.active and path.exists():
            *before, last = read_lines(path)
            text = "".join(json.dumps(row) + "\n" for row in [*before, last | facts])
            with suppress(OSError):
                replace_file(path, text.encode())

    def sync(self) -> None:
        """Sync all logged lines to disk. Call it before a checkpoint, which must not be ahead of the log."""
        for path in sorted(self._unsynced):
            sync(path)
        self._unsynced.clear()

    def start_plot(self) -> None:
        """Start to draw metrics.png in a process of its own, beside other work; `report.plot.draw` waits for it.

        No line may be logged in between. Matplotlib's import and 40 MB do not count for this process then. Where it is
        imported already, as in a notebook, nothing is started.
        """
        if self._progress is not None and self._drawing is None and "matplotlib.figure" not in sys.modules:
            with suppress(OSError):  # `draw` draws in this process
                self._drawing = subprocess.Popen(
                    [sys.executable, "-c", _DRAW, str(self.folder)], stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,  # not for Ctrl-C
                )  # fmt: skip

    def drawn(self) -> bool:
        """Whether the process of `start_plot` has drawn metrics.png; waits for it."""
        if self._drawing is not None:
            with suppress(subprocess.TimeoutExpired):
                if self._drawing.wait(_DRAW_S) == 0:
                    return True
            self.close()
        return False

    def close(self) -> None:
        """End a process of `start_plot` that has not finished."""
        if self._drawing is not None:
            self._drawing.kill()
            self._drawing.wait()
            self._drawing = None

    def _append(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        data = text.encode(errors="backslashreplace")  # half of a surrogate pair becomes its JSON escape
        with explain_full_disk(path.name, self.folder, needed=len(data), fix=_FULL_FIX):
            append_file(path, data)
        self._unsynced.add(path)


def keep_args(
    folder: Path | str, args: Mapping[str, Any], *, script: str, resume: bool, config: str | None = None
) -> None:
    """Lock a run folder and write the flags `args` of a `script` to its `args.json`, on the first rank.

    `config` is the text of its `config.yaml` (`rlkit.scripts.config.render`).
    A resumed run continues with the new flags; those that changed are printed, and `open_run` writes them if there are
    steps left to train with them. Nothing is written if the run is refused. The folder stays locked until the run that
    `open_run` opens there ends.

    Errors: on every rank, FileExistsError for a folder that holds a run (without `resume`) and FileNotFoundError for
    one that holds none (with `resume`); on the first, BlockingIOError if another process has it open, ValueError for a
    run of another script or format and for a damaged `args.json`, OSError, with the space needed and free, on a full
    disk.
    """
    folder = Path(folder)
    check_folder(folder, resume=resume)
    if not is_first():
        return
    path, old = folder / "args.json", read_args(folder) if resume else {}
    run = old.get("run") if resume else secrets.token_hex(4)  # each checkpoint names the run that wrote it
    content = {"format": FORMAT, "script": script, "run": run, **masked(dict(args))}
    text = json.dumps(content, indent=1, default=str) + "\n"
    with explain_full_disk(path.name, folder, needed=len(text), fix=_FULL_FIX):
        hold(folder)
        _resumed.pop(folder.resolve(), None)
        changed = True
        if old:
            new = json.loads(text)
            if old.get("format") != FORMAT:
                other = f"format {old.get('format')}, and this version reads format {FORMAT}"
                raise ValueError(f"{folder} was written in {other}: resume it with the version that wrote it")
            if script != old.get("script"):
                raise ValueError(
                    f"{folder} is a run of {old.get('script')}: resume it with that, or give another `output`"
                )
            names = [n for n in sorted(new.keys() | old.keys()) if n != "resume" and new.get(n) != old.get(n)]
            added = {"threads", "run", *(n for n in new if not new[n])} - old.keys()  # flags of a later version, unused
            for name in names:
                if name not in added:
                    say(f"resumed with {name} {new.get(name)!r} (it was {old.get(name)!r})")
            changed = bool(names) or masked(path.read_text()) != path.read_text()
        new_files = {path.name: text.encode()} | ({CONFIG: config.encode()} if config is not None else {})
        if resume and changed:
            _resumed[folder.resolve()] = new_files
        elif changed:
            _write(folder, new_files)


def _write(folder: Path, new_files: Mapping[str, bytes]) -> None:
    for name, data in new_files.items():
        replace_file(folder / name, data)


def read_args(folder: Path | str) -> dict[str, Any]:
    """The flags in a run folder's args.json, {} without that file; ValueError if it is damaged.

    It has *** for the passwords of URLs: a run that is resumed takes them from its command line.
    """
    path = Path(folder) / "args.json"
    if not path.exists():
        return {}
    try:
        flags: dict[str, Any] = untrusted.loads(untrusted.read(path, "json_mib"))
        if not isinstance(flags, dict):
            raise ValueError(f"it holds no JSON object: {str(flags)[:40]!r}")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, and the run uses the given flags") from None
    return {name: masked(value) for name, value in flags.items()}


def holds_run(folder: Path | str) -> bool:
    """Whether a run was started in this folder and can be resumed."""
    return any((Path(folder) / name).exists() for name in _OPENED)


def check_folder(folder: Path | str, *, resume: bool) -> None:
    """Refuse a folder that holds a run, or with `resume` one that holds none. Errors: see `keep_args`."""
    folder = Path(folder)
    for path in (folder, *folder.parents):
        if path.is_file():
            raise NotADirectoryError(errno.ENOTDIR, "this is a file: --output is the folder of a run", str(path))
    if resume and not holds_run(folder):
        fault = "there is no run to resume in this folder: leave out --resume to start one, or give the folder of a run"
        raise FileNotFoundError(errno.ENOENT, fault, str(folder))
    if not resume and any((folder / name).exists() for name in _RUN):
        fault = "this folder already holds a run: resume it (--resume), delete it or take another folder"
        raise FileExistsError(errno.EEXIST, fault, str(folder))


def hold(folder: Path | str) -> None:
    """Lock a run folder (made if needed) against other processes, until its run or this process ends.

    Two processes that resume the same run would interleave their lines. A POSIX lock ends with its process, however
    that ends, and is not inherited by forked reward workers.

    Errors: BlockingIOError if another process holds the lock.
    """
    import fcntl

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() in _held:
        return
    if (path := folder / ".lock").exists():
        untrusted.check_file(path)
    file = path.open("w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            fault = "another process writes to this run folder; wait for it or take another folder"
            raise BlockingIOError(errno.EAGAIN, fault, str(folder)) from None
        # other errors: a filesystem without locks; train anyway
    _held[folder.resolve()] = file


@contextmanager
def open_run(
    folder: Path | str,
    *,
    steps: int,
    start: int = 0,
    resume: bool = False,
    active: bool | None = None,
    print_steps: int = 1,
) -> Iterator[Run]:
    """Open a run folder for writing, from step `start` to `steps`.

    Every step is logged; every `print_steps`-th step and each step with an evaluation is printed.

    A folder that already holds a run is refused unless `resume`. Then `start` is the step of the loaded checkpoint, and
    later steps are deleted; -1 (no checkpoint yet) deletes all steps, also step 0. With `active=False` nothing is
    written or printed; by default only the first rank is active.

    Errors: those of `keep_args`.
    """
    folder = Path(folder)
    if not (is_first() if active is None else active):
        yield Run(folder, None)
        return
    check_folder(folder, resume=resume)
    with explain_full_disk("the run", folder, needed=1 << 16, fix=_FULL_FIX):
        hold(folder)
        (folder / "trajectories").mkdir(exist_ok=True)
        if resume:
            drop_after(folder, start)
            if (new_files := _resumed.pop(folder.resolve(), None)) and start < steps:
                _write(folder, new_files)
        _append_start(folder / "starts.jsonl", start)
    progress = RunDisplay(steps=steps, start=start, print_steps=print_steps)
    run = Run(folder, progress)
    try:
        yield run
    finally:
        run.close()
        progress.close()
        if (lock := _held.pop(folder.resolve(), None)) is not None:
            lock.close()


def _append_start(path: Path, step: int) -> None:
    """Append this start of the run; it replaces starts whose steps are all deleted."""
    if path.exists():
        lines = takewhile(lambda line: _step_of(line) < step, untrusted.read(path, "metrics_mib").splitlines(True))
        os.truncate(path, sum(map(len, lines)))
    row = start_row(step) | {"args": read_args(path.parent)}
    append_file(path, (json.dumps(row) + "\n").encode())


def drop_after(folder: Path | str, step: int) -> None:
    """Delete logs and samples of steps later than `step`: a killed run may have passed its last checkpoint."""
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    if path.exists():
        lines = untrusted.read(path, "metrics_mib").splitlines(keepends=True)
        left = [line for line in lines if _step_of(line) <= step]
        last = max(map(_step_of, left), default=-1)
        if last < step and step > 0:
            say(f"{path} has no lines of steps {max(1, last + 1):.0f} to {step}, which were trained: they are lost")
        if left == lines[: len(left)]:
            os.truncate(path, sum(map(len, left)))  # needs no space on a full disk
        else:
            replace_file(path, b"".join(left))
    for dump in (folder / "trajectories").glob("*.jsonl"):
        match = re.fullmatch(r"\w+_(\d+)", dump.stem)
        if match and int(match[1]) > step:
            dump.unlink()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without a last line that is incomplete (being written, or cut off by a crash)."""
    path = Path(folder) / "metrics.jsonl"
    if Path(folder).is_file():
        raise NotADirectoryError(f"{folder} is a file: give its folder, {Path(folder).parent}")
    if not path.exists():
        fault = "no finished step yet" if holds_run(folder) else "no metrics.jsonl: give the folder of a run"
        raise FileNotFoundError(f"{folder} holds {fault}")
    return read_lines(path, fits=_is_metrics)


def new_metrics(folder: Path, at: int) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of metrics.jsonl from the byte `at` on, and the byte after them, for the next call; from the
    beginning where a resumed run has made the file shorter."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        file.seek(at if path.stat().st_size >= at else 0)
        at, data = file.tell(), file.read()
    end = data.rfind(b"\n") + 1
    return [row for row in map(object_of, data[:end].splitlines()) if row is not None and _is_metrics(row)], at + end


def read_lines(path: Path, *, fits: Callable[[dict[str, Any]], bool] = bool) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines that fit, without a last line that is incomplete. Any other line is named and
    left out."""
    rows, lines = [], untrusted.read(path, "metrics_mib").splitlines()
    for number, line in enumerate(lines, 1):
        row = object_of(line)
        if row is not None and fits(row):
            rows.append(row)
        elif number < len(lines) or row is not None:
            _say_once(f"{path}, line {number} is left out, it is not what a run writes: {line[:80]!r}")
    return rows


_say_once = lru_cache(maxsize=1000)(say)  # a page that is served reads its files again and again


def object_of(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None for anything else, and for one that is nested too deeply."""
    try:
        row = untrusted.parsed("", line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_metrics(row: Mapping[str, Any]) -> bool:
    numbers = all(isinstance(x, float) or (isinstance(x, int) and abs(x) < 2**63) for x in row.values())
    return numbers and _has_step(row)


def _has_step(row: Mapping[str, Any]) -> bool:
    return type(row.get("step")) is int and 0 <= row["step"] < 2**53


def _number(key: str, value: Any) -> int | float:
    if isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"metric {key!r} must be a number, got {type(value).__name__}: {value!r}") from None


def _step_of(line: bytes) -> float:
    """The step of a metrics line; infinite for a line that was cut off."""
    if not line.endswith(b"\n"):
        return float("inf")
    row = object_of(line)
    if row is not None and _has_step(row):
        return float(row["step"])
    say(f"dropped a broken line of metrics.jsonl: {line[:80]!r}")
    return float("inf")
