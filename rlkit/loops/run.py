"""The run folder: what a run leaves for a person to read, each step written once, whatever interrupts it.

    args.json                          what the run was asked for
    metrics.jsonl                      one line a step; fields that depend on the clock are named time/...
    trajectories/train_000010.jsonl    what was sampled for step 10, one line a sample; eval_000010.jsonl likewise,
                                       and dropped_000010.jsonl what dynamic sampling refused
    completions/                       of runs that can be killed and keep what they sampled: rlkit.rollout.journal
    metrics.png                        the curves (`python -m rlkit.plot FOLDER` draws them again, or compares runs)
    checkpoints/                       see rlkit.parallel.checkpoint

`step` counts optimizer updates: line s describes the s-th update, a checkpoint of step s was written after it, and
step 0 is before the first one. On resume from step s everything after s is dropped, so each step appears once.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.loops.progress import Progress
from rlkit.parallel._files import append_file, explain_full_disk, replace_file, sync

if TYPE_CHECKING:  # reading a run folder needs no torch
    from rlkit.types import Trajectory

Decode = Callable[[list[int]], str]


class Run:
    """An open run folder. Made by `open_run`."""

    def __init__(self, folder: Path, progress: Progress | None) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self._progress = progress
        self._unsynced: set[Path] = set()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl and print the same step for a person.

        Values are numbers (or 0-dim tensors); floats are written with all their digits, so two runs can be compared bit
        for bit. NaN and infinities are written as NaN, Infinity, -Infinity, which Python's json reads.
        """
        if self._progress is None:
            return
        line = {"step": step, **{key: _number(key, value) for key, value in metrics.items()}, "time/unix": time.time()}
        self._append(self.folder / "metrics.jsonl", [line])
        self._progress.step(step, line)

    def trajectories(self, step: int, rows: Iterable[Mapping[str, Any]], *, kind: str = "train") -> None:
        """Append rows (see `trajectory_row`) to `trajectories/{kind}_{step}.jsonl`; on return they are in the file."""
        if self._progress is not None:
            self._append(self.folder / "trajectories" / f"{kind}_{step:06d}.jsonl", rows)

    def status(self, text: str) -> None:
        """What is going on inside the step, shown beside the bar ("rollout 43/64"). Only on a terminal."""
        if self._progress is not None:
            self._progress.status(text)

    def say(self, text: str) -> None:
        """A line for a person above the bar."""
        if self._progress is not None:
            self._progress.say(text)

    def sync(self) -> None:
        """Put all that was logged on the disk: before a checkpoint, which must not know more than its run folder."""
        for path in sorted(self._unsynced):
            sync(path)
        self._unsynced.clear()

    def plot(self) -> Path | None:
        """Draw metrics.png, in a process of its own: matplotlib takes 30 MB, and a hundred in some back ends.

        A plot that cannot be drawn is said in one line and never ends a run.
        """
        if self._progress is None or not (self.folder / "metrics.jsonl").exists():
            return None
        command = [sys.executable, "-m", "rlkit.plot", str(self.folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.say(f"no plot: {error}")
            return None
        if done.returncode:
            self.say(f"no plot: {(done.stderr.strip().splitlines() or ['it failed'])[-1].removeprefix('error: ')}")
            return None
        return Path(done.stdout.strip())

    def _append(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        data = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows).encode()
        fix = "Free space there and resume: all up to the last checkpoint is safe."
        with explain_full_disk(path.name, self.folder, needed=len(data), fix=fix):
            append_file(path, data)
        self._unsynced.add(path)


def keep_args(folder: Path | str, args: Any, *, resume: bool) -> None:
    """Write the dataclass `args` to `args.json` of a run folder; of many ranks the first does.

    A run that is resumed with other arguments than it had goes on with the new ones, and they are named on stdout.
    Errors: FileExistsError, on every rank, for a folder with a run in it, unless `resume`; see `open_run`.
    """
    folder = Path(folder)
    _refuse_a_run(folder, resume)
    if _first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        path, text = folder / "args.json", json.dumps(asdict(args), indent=1, default=str) + "\n"
        if resume and path.exists():
            new, old = json.loads(text), json.loads(path.read_bytes())
            for name in sorted((new.keys() | old.keys()) - {"resume"}):
                if new.get(name) != old.get(name):
                    sys.stdout.write(f"resumed with another {name}: {new.get(name)!r}, it was {old.get(name)!r}\n")
        replace_file(path, text.encode())


@contextmanager
def open_run(
    folder: Path | str, *, steps: int, start: int = 0, resume: bool = False, active: bool | None = None
) -> Iterator[Run]:
    """Open a run folder for writing, from step `start` to `steps`.

    A folder that already holds a run is refused unless `resume`. Then `start` is the step of the loaded checkpoint, and
    all that came after it is dropped; -1 (there was no checkpoint yet) drops everything, also what step 0 logged.
    `active=False` writes and prints nothing; by default that is every rank but the first.

    Errors: FileExistsError for a folder with a run in it; BlockingIOError where another process has it open.
    """
    folder = Path(folder)
    if not (_first_rank() if active is None else active):
        yield Run(folder, None)
        return
    _refuse_a_run(folder, resume)
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if resume:
            drop_after(folder, start)
        progress = Progress(steps=steps, start=start)
        try:
            yield Run(folder, progress)
        finally:
            progress.close()


def drop_after(folder: Path | str, step: int) -> None:
    """Delete what a run folder says about steps later than `step` (a killed run may have passed its checkpoint)."""
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            replace_file(path, b"".join(kept))
    for dump in (folder / "trajectories").glob("*.jsonl"):
        match = re.fullmatch(r"\w+_(\d+)", dump.stem)
        if match and int(match[1]) > step:
            dump.unlink()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. A last line that is still being written (or was cut off by a crash) is left out."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no metrics.jsonl: give the folder of a run")
    rows = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {line[:80]!r}; delete that line") from None
    return rows


def trajectory_row(
    trajectory: Trajectory, *, decode: Decode, group: int | None = None, with_ids: bool = False
) -> dict[str, Any]:
    """What a person wants to see of one sample, as JSON: texts with their special tokens, reward, length, why it ended.

    `length` is the number of tokens the policy sampled, `versions` are the weights that did. `with_ids` adds the token
    ids and their log-probs. A further piece of the episode of the row before it says `continues`.
    """
    row = {
        "group": group,
        "prompt": decode(trajectory.prompt_ids),
        "completion": decode(trajectory.ids),
        "reward": trajectory.reward,
        "score": trajectory.score,
        "length": sum(trajectory.mask),
        "versions": sorted({v for v, m in zip(trajectory.versions, trajectory.mask, strict=True) if m}),
        "finish_reason": trajectory.info.get("finish_reason", "length" if trajectory.truncated else "stop"),
        "info": {key: value for key, value in trajectory.info.items() if key != "finish_reason"},
    }
    if trajectory.continues:
        row["continues"] = True
    if with_ids:
        row |= {"prompt_ids": trajectory.prompt_ids, "ids": trajectory.ids, "logp": trajectory.logp}
    return row


def _refuse_a_run(folder: Path, resume: bool) -> None:
    for path in (folder, *folder.parents):
        if path.is_file():
            raise NotADirectoryError(f"{path} is a file: --output is the folder of a run, which may be new")
    if not resume and any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "completions")):
        raise FileExistsError(f"{folder} already holds a run: resume it (--resume), delete it or take another folder")


def _first_rank() -> bool:
    """Also before there is a process group: torchrun has said which rank this is."""
    from rlkit.parallel._ranks import distributed, rank

    return (rank() if distributed() else int(os.environ.get("RANK", "0"))) == 0


def _number(key: str, value: Any) -> int | float:
    if isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"metric {key!r} must be a number, got {type(value).__name__}: {value!r}") from None


def _step_of(line: bytes) -> float:
    """The step of a metrics line; infinite for a line that was cut off."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        warnings.warn(f"rlkit: dropped a broken line of metrics.jsonl: {line[:80]!r}", stacklevel=3)
        return float("inf")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder: two processes resuming the same run would interleave their lines.

    A POSIX lock ends with its process, whatever happens to it, and is not inherited by forked reward workers.
    """
    import fcntl

    with (folder / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                what = "another process writes to this run folder; wait for it or take another folder"
                raise BlockingIOError(errno.EAGAIN, what, str(folder)) from None
            # else the filesystem has no locks, which is no reason not to train
        yield
