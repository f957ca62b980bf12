"""Send what a run writes to trackers: in a process beside the run (`--track`), or afterwards (`rlkit track`).

That process reads only files of the run folder, so a tracker that is slow or down neither delays nor ends the run. What
has arrived is noted in the folder, and the next call sends the rest, to the same run of the tracker.

Sent are the arguments, the numbers of each step, the first answers of the steps that show some on the screen or are
evaluations, how much of the machine is used while the run trains (`system/...`), and at the end the picture and, with
`track_model`, the exported model.
"""

from __future__ import annotations

import json
import math
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from rlkit._util import untrusted
from rlkit._util.files import replace_file
from rlkit._util.platform import num_cores
from rlkit._util.text import printable
from rlkit.run.cores import usage
from rlkit.run.folder import CURVES, Run, new_metrics, object_of, read_args, read_metrics
from rlkit.run.trackers import TRACKERS, Row, Tracker, load
from rlkit.settings import Schedule

_SAMPLES, _CHARACTERS = 16, 2000  # of a table, and of a text in it
_POLL_S = 2.0
_CLOSE_S, _UPLOAD_S = 60.0, 5e-7  # how long the end of a run waits: for the numbers, and for a byte of the model
Children = Mapping[str, subprocess.Popen[bytes]]
_CHILD = "import sys; from rlkit.run.tracking import follow; follow(*sys.argv[1:])"


def track(folder: Path | str, *, to: str, project: str | None = None, again: Callable[[], bool] = lambda: False) -> int:
    """Send what was not sent yet, and repeat while `again()` is true; returns the number of steps sent.

    Each step is sent once: the steps that a resumed run repeats have the same numbers. Numbers that are not finite are
    left out. `project` is by default the run's own, else "rlkit". Errors: FileNotFoundError for a folder without
    metrics, ModuleNotFoundError without the tracker's package.
    """
    read_metrics(folder)
    return _track(Path(folder).resolve(), to, project=project, again=again)


def follow(folder: str, to: str, project: str, *with_model: str) -> None:
    """Track a run until it ends, which writes to this process's stdin or closes it, and then send the last of it."""
    system, ended = System(), False

    def again() -> bool:
        nonlocal ended
        if ended:
            return False
        ended = bool(select.select([sys.stdin], [], [], _POLL_S)[0])
        system.read()
        return True

    again()  # a reading comes before the first step
    _track(Path(folder), to, project=project, with_model=bool(with_model), again=again, system=system)


def _track(
    folder: Path, to: str, *, project: str | None, again: Callable[[], bool], with_model: bool = False,
    system: System | None = None,
) -> int:  # fmt: skip
    note, config, count, at = folder / f".track_{to}.json", read_args(folder), 0, 0
    state: Row = {"id": None, "step": -1} | (object_of(untrusted.read(note, "json_mib")) or {} if note.exists() else {})
    state["project"] = project or state.get("project") or config.get("track_project") or "rlkit"
    state["model"] = with_model or state.get("model", bool(config.get("track_model")))
    with TRACKERS[to](folder, state["project"], state["id"], config) as tracker:
        state["id"] = tracker.id
        replace_file(note, json.dumps(state).encode())
        while True:
            rows, at = new_metrics(folder, at)
            for step, numbers in _new_steps(rows, after=state["step"]):
                if system is not None:
                    numbers |= system.means()
                _send_samples(tracker, folder, step, every=config.get("print_samples_steps") or 25)
                tracker.numbers(step, numbers)
                state["step"] = step
                count += 1
            if tracker.sure:
                replace_file(note, json.dumps(state).encode())
            if not again():
                break
        _send_files(tracker, folder, state)
    replace_file(note, json.dumps(state).encode())
    return count


def _new_steps(rows: Sequence[Row], *, after: int) -> Iterator[tuple[int, dict[str, float]]]:
    """The finite numbers of later steps than `after`."""
    for row in rows:
        step = row.pop("step")
        if step > after:
            yield step, {name: x for name, x in row.items() if isinstance(x, int | float) and math.isfinite(x)}


def _send_samples(tracker: Tracker, folder: Path, step: int, *, every: int) -> None:
    """The first samples of a step: of training at step 1 and every `every`-th, and of each evaluation."""
    places, end = folder / "trajectories", f"_{step:06d}.jsonl"
    trained = [places / f"train{end}"] if step == 1 or step % every == 0 else []
    for path in (*sorted(places.glob(f"eval_*{end}")), *trained):
        if path.exists():
            with path.open("rb") as file:
                first = [line for line in islice(untrusted.lines(file, path), _SAMPLES) if line.endswith(b"\n")]
            rows = [_sample(row, step) for row in map(object_of, first) if row is not None]
            if rows:
                tracker.table(step, path.name.removesuffix(end), rows)


def _sample(row: Row, step: int) -> Row:
    texts = {name: printable(str(row.get(name) or "")[:_CHARACTERS]) for name in ("prompt", "completion", "gold")}
    numbers = {name: row.get(name) for name in ("reward", "advantage", "length")}
    return {"step": step, "row": row.get("group"), **texts, **numbers, "end": row.get("finish_reason")}


def _send_files(tracker: Tracker, folder: Path, state: Row) -> None:
    """The picture and the model, where they are newer than what was sent."""
    sent: dict[str, int] = state.setdefault("sent", {})
    model = tracker.model if state["model"] else None
    for path, send in ((folder / CURVES, tracker.picture), (folder / "model", model)):
        if send is not None and path.exists() and sent.get(path.name) != path.stat().st_mtime_ns:
            send(path)
            sent[path.name] = path.stat().st_mtime_ns


class System:
    """Use of this machine: readings, and their means since the last step that was sent."""

    def __init__(self) -> None:
        self._before, self._readings = usage(), list[dict[str, float]]()

    def read(self) -> None:
        """Sample the use of CPU, memory and GPUs; omit what this machine does not report."""
        now, reading = usage(), dict[str, float]()
        if now.everyone and now.clock > self._before.clock:
            used = now.everyone - self._before.everyone
            reading["system/cpu"] = used / (now.clock - self._before.clock) / num_cores()
        with suppress(OSError, KeyError, ValueError):
            memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            total, free = (int(memory[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
            reading["system/memory"] = (total - free) / 2**20
        self._before = now
        self._readings.append(reading | _gpus())

    def means(self) -> dict[str, float]:
        """The mean of each number since the last call."""
        taken, self._readings = self._readings, []
        names = dict.fromkeys(name for reading in taken for name in reading)
        return {
            name: math.fsum(values) / len(values) for name in names if (values := [r[name] for r in taken if name in r])
        }


def _gpus() -> dict[str, float]:
    """Use (share) and memory (GiB) of each NVIDIA GPU."""
    if not (tool := shutil.which("nvidia-smi")):
        return {}
    query = [tool, "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    gpus = dict[str, float]()
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        for line in subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines():
            index, used, memory = (part.strip() for part in line.split(","))
            gpus |= {f"system/gpu{index}": int(used) / 100, f"system/gpu{index}_memory": int(memory) / 1024}
    return gpus


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is not installed (ModuleNotFoundError) or that nobody is logged in to (ValueError)."""
    for name in names:
        module = load(name)
        offline = name == "wandb" and module.setup().settings.mode not in (None, "online", "shared")
        if name == "wandb" and not offline and not module.login(prompt=False, verify=False):
            fix = "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
            raise ValueError(f"`track` wandb: nobody is logged in to Weights & Biases: {fix}")


@contextmanager
def tracking(run: Run, schedule: Schedule) -> Iterator[None]:
    """Inside the block, a process for each of `schedule.track` sends what the run writes; its log is in the folder.

    At the end the run waits until all is sent, at most a minute, and longer for a model.
    """
    names = schedule.track if run.active else ()
    options = [schedule.track_project, *(["model"] if schedule.track_model else [])]
    children: Children = {name: _start(run.folder.resolve(), name, *options) for name in names}
    try:
        yield
    finally:
        for child in children.values():
            if (pipe := child.stdin) is not None:
                with suppress(OSError):  # of a child that has ended itself
                    pipe.write(b"\n")  # processes that this one forked may hold the pipe open after `close`
                    pipe.close()
        files = (run.folder / "model").rglob("*") if schedule.track_model else ()
        limit_s = _CLOSE_S + _UPLOAD_S * sum(path.stat().st_size for path in files if path.is_file())
        try:
            _finish(run, children, limit_s=limit_s)
        finally:
            for child in children.values():
                child.kill()
                child.wait()


def _start(folder: Path, name: str, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _CHILD, str(folder), name, *options]
    with (folder / f"track_{name}.log").open("ab") as log:  # and a session of its own: Ctrl-C is for the run
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)


def _finish(run: Run, children: Children, *, limit_s: float) -> None:
    """Wait for the processes, and report each that has not sent all."""
    began, said = time.monotonic(), False
    while (left := [name for name, child in children.items() if child.poll() is None]) and (
        waited := time.monotonic() - began
    ) < limit_s:
        if waited > 3 and not said:
            run.say(f"sending the rest to {' and '.join(left)}")
            said = True
        time.sleep(0.1)
    for name, child in children.items():
        if child.poll() != 0:
            lines = (run.folder / f"track_{name}.log").read_text(errors="replace").strip().splitlines()
            why = "it took too long" if child.returncode is None else lines[-1] if lines else "it failed"
            run.say(f"not all was sent to {name}: {why}; later: rlkit track {shlex.quote(str(run.folder))} --to {name}")
