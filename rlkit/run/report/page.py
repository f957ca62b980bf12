"""The report of a run, or of several beside each other: one HTML file that opens offline.

`rlkit report RUN` writes it; so does every run at its end, as `report.html` in its folder. See docs/report.md.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from os.path import commonprefix
from pathlib import Path
from typing import Any

from rlkit._util.files import replace_file
from rlkit.run.folder import FORMAT, Run, read_args, read_metrics
from rlkit.run.history import OWN, best, compare_answers, peak_memory, read_starts, seen_text
from rlkit.run.report.meanings import meaning_of
from rlkit.run.report.plot import Panel, label, panels_of
from rlkit.run.trajectories import Group, Trajectories, read_trajectories

MAX_POINTS = 4000  # of one curve
CHUNK = 1 << 18  # characters of JSON that the page decompresses at once
_MARK = '<meta name="generator" content="rlkit report">'
_SHOWN = ("eval/greedy", "eval/sampled", "reward/mean", "eval/accuracy", "accuracy", "eval/loss", "loss", "length/mean")
SHOWN_ANSWERS = 3  # held-out prompts at the top of the page


def report(run: Run) -> None:
    """Write `report.html` of an open run. Any error is one line on the screen: the run's model is not exported yet."""
    if not (run.active and (run.folder / "metrics.jsonl").exists()):
        return
    try:
        write_report(run.folder)
    except Exception as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        run.say(f"no report: {kind}{str(error).strip() or repr(error)}".splitlines()[0])


def write_report(*folders: Path | str, out: Path | str | None = None, force: bool = False) -> Path:
    """Write the report of a run (as `report.html` in its folder) or of several (in this folder); returns its path.

    A file that exists is replaced with `force` only, except a run's own report in its folder.

    Errors: FileExistsError for such a file, FileNotFoundError if the folder of `out` is missing; those of `page`.
    """
    in_folder = out is None and len(folders) == 1
    target = Path(folders[0]) / "report.html" if in_folder else Path(out or "report.html")
    if not (in_folder or target.parent.is_dir()):
        raise FileNotFoundError(f"`out` {target}: there is no folder {target.parent}")
    if target.is_dir():
        raise IsADirectoryError(f"`out` {target} is a folder: give a file, such as {target / 'report.html'}")
    ours = in_folder and target.is_file() and _MARK in target.read_text("utf-8", "replace")[:2000]
    if target.exists() and not force and not ours:
        raise FileExistsError(f"`out` {target} is there already: give another file, or --force to replace it")
    replace_file(target, page(*folders).encode())
    return target


def page(*folders: Path | str, live: str = "") -> str:
    """The page of some runs as HTML. With `live`, the state that it shows, it asks its server for a newer one.

    What models and data wrote is only in compressed blocks, which the script shows as text; the page's policy lets it
    run that script alone, and load nothing.

    Errors: FileNotFoundError for a folder without metrics; ValueError for one of another format, for runs that measure
    different things, and for a damaged file.
    """
    chart, script, style = _asset("uPlot.iife.min.js"), _asset("page.js"), _asset("uPlot.min.css") + _asset("page.css")
    policy = [
        "default-src 'none'", f"script-src {_hash(chart)} {_hash(script)}", f"style-src {_hash(style)}",
        "img-src data:", "base-uri 'none'", "form-action 'none'", *(["connect-src 'self'"] if live else []),
    ]  # fmt: skip
    blocks = "\n".join(f'<script type="text/plain" class="data">{x}</script>' for x in data(*folders, live=bool(live)))
    values = {
        "mark": _MARK, "policy": "; ".join(policy), "style": style, "chart": chart, "script": script, "data": blocks,
        "title": html.escape(", ".join(label(folder, folders) for folder in folders)), "live": live,
    }  # fmt: skip
    before, *parts = _asset("page.html").split("{{")
    return before + "".join(values[name] + rest for name, rest in (part.split("}}", 1) for part in parts))


def data(*folders: Path | str, live: bool = False) -> list[str]:
    """What the page shows, in blocks of JSON, compressed by gzip and in base64: an index, then chunks of samples.

    With `live`, a run without a finished step has an empty page. Errors: see `page`.
    """
    if not folders:
        raise ValueError("give at least one run folder")
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError("a run folder is given twice: give each once")
    names = [label(folder, folders) for folder in folders]
    args = [_checked_args(Path(folder)) for folder in folders]
    metrics = [_metrics(Path(folder), live=live) for folder in folders]
    _refuse_different(names, args, metrics)
    panels = panels_of(dict(zip(names, metrics, strict=True)))
    sampled = [read_trajectories(Path(folder), parts=len(folders)) for folder in folders]
    try:
        groups, chunks = _groups(sampled)
        every = zip(folders, names, args, metrics, sampled)
        runs = [_run(Path(folder), name, a, m, s, panels) for folder, name, a, m, s in every]
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        where = f"{' or '.join(map(str, folders))}: its args.json, starts.jsonl or trajectories/"
        raise ValueError(f"{where} is not as a run writes it ({type(error).__name__}: {error})") from error
    index = {
        "runs": runs,
        "panels": [panel._asdict() | {"curves": [curve._asdict() for curve in panel.curves]} for panel in panels],
        "meanings": {c.key: row._asdict() for p in panels for c in p.curves if (row := meaning_of(c.key))},
        "differences": _differences(args),
        "groups": groups,
    }
    return [_packed(_json(index)), *map(_packed, chunks)]


def _run(
    folder: Path, name: str, args: dict[str, Any], rows: list[dict[str, Any]], texts: Trajectories, panels: list[Panel]
) -> dict[str, Any]:
    """What the page shows of one run beside its samples."""
    keys = [curve.key for panel in panels for curve in panel.curves]
    starts = read_starts(folder)
    num_samples, notes = sum(len(group.rows) for group in texts.groups), []
    if not texts.whole:
        size = f"{texts.num_bytes / 1e9:.1f} GB" if texts.num_bytes > 1e9 else f"{texts.num_bytes / 1e6:.0f} MB"
        notes.append(f"{name} wrote {size} of samples; this page has {num_samples:,} of them, in whole groups")
    series = {key: _series(rows, key) for key in dict.fromkeys([*keys, *(f"{key}_se" for key in keys)])}
    return {
        "name": name, "facts": _facts(folder, args, rows, starts), "notes": notes, "args": args,
        "command": starts[0].get("command") if starts else None, "changes": _changes(rows),
        "starts": [_start(start) for start in starts[1:]], "answers": _answers(folder),
        "series": {key: values for key, values in series.items() if values[0]},
    }  # fmt: skip


def _facts(
    folder: Path, args: dict[str, Any], rows: list[dict[str, Any]], starts: list[dict[str, Any]]
) -> dict[str, Any]:
    """What trained, how long and on what machine: title -> text, as far as the run left it."""
    done = max((row["step"] for row in rows), default=0)
    seconds = sum(x for x in (row.get("time/step", 0.0) for row in rows) if _finite(x))
    planned = f" of {args['steps']}" if args.get("steps") else ""
    first, last = (starts or [{}])[0], (starts or [{}])[-1]
    resumed, trained = [str(start.get("step")) for start in starts[1:]], folder / "model"
    top, sizes = best(args, rows), last.get("held_out") or {}
    held_out = ", ".join(f"{name}: {size:,} rows" if name else f"{size:,} rows" for name, size in sizes.items())
    facts = {
        "Algorithm": _script(args).upper() if len(_script(args)) < 5 else _script(args).replace("_", " "),
        "Model": args.get("model"), "Trained model": trained if trained.is_dir() else None,
        "Data": _with(args.get("data"), f"{last['rows']:,} rows" if last.get("rows") else ""),
        "Reward": args.get("reward"), "Held-out data": _with(args.get("eval_data"), held_out),
        "Seen": seen_text(args, rows, starts),
        "Best": f"{top[0]} {top[1]:.4g}, after step {top[2]}" if top else None,
        "Steps": f"{done}{planned}" + (f", resumed after step {', '.join(resumed)}" if resumed else ""),
        "Time": f"{_duration(seconds)} in steps" if seconds else None,
        "Peak memory": peak_memory(rows, starts), "Machine": _machine(last), "Started": first.get("unix"),
        "Versions": ", ".join(f"{name} {x}" for name, x in last.get("versions", {}).items()),
    }  # fmt: skip
    return {name: value if name == "Started" else _text(value) for name, value in facts.items() if value}


def _machine(start: dict[str, Any]) -> str:
    machine, gpus = start.get("machine", {}), start.get("machine", {}).get("gpus", [])
    ranks = ""
    if start.get("ranks", 1) > 1:
        ranks = f"{start['ranks']} ranks on {start['nodes']} node{'s' * (start['nodes'] > 1)}"
    memory = f"{machine['memory_gib']:g} GiB" if "memory_gib" in machine else ""
    cores = f"{machine['cores']} cores of {machine['cpu']}" if machine else ""
    gpu = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return ", ".join(part for part in (ranks, gpu, cores, memory, machine.get("system", "")) if part)


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{hours:.1f} h"


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _with(value: Any, more: str) -> str:
    """The value with what is known of it: `a.jsonl (40 rows)`."""
    text = _text(value or "")
    return f"{text} ({more})" if text and more else text or more


def _start(start: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a start after the first: its step, its command, and the arguments that changed."""
    changed = [[name, _text(old), _text(new)] for name, (old, new) in start["changed"].items()]
    return {name: start.get(name) for name in ("step", "unix", "command")} | {"changed": changed}


def _answers(folder: Path) -> dict[str, Any] | None:
    """A few held-out prompts with their answers at the first and the last evaluation."""
    compared = compare_answers(folder, most=SHOWN_ANSWERS)
    if compared is None:
        return None
    start, end = _common({pair.prompt for pair in compared.answers})
    shared = compared.answers[0].prompt
    start = max(map(shared[:start].rfind, "\n>]")) + 1  # whole markup of the template, no letter of a question
    last = shared[len(shared) - end :]
    end = len(last) - min(at if (at := last.find(mark)) >= 0 else len(last) for mark in "\n<[")
    titles = [" ".join(pair.prompt[start : len(pair.prompt) - end].split())[:400] for pair in compared.answers]
    ends = [
        [[row.get("reward"), str(row.get("completion", ""))[:2000]] for row in (pair.before, pair.after)]
        for pair in compared.answers
    ]
    golds = [pair.gold for pair in compared.answers]
    pairs = [{"prompt": x, "gold": gold, "ends": two} for x, gold, two in zip(titles, golds, ends, strict=True)]
    return compared._asdict() | {"answers": pairs}


def _changes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first and the last value of the numbers that matter most, with their steps and standard errors."""
    changes = []
    sampled = any("reward/mean" in row for row in rows)  # then the loss does not measure progress
    for key in (name for name in _SHOWN if not (sampled and name == "loss")):
        ends = [row for row in rows if _finite(row.get(key))]
        if len(ends) > 1:
            pairs = [[row["step"], row[key], _plain(row.get(f"{key}_se"))] for row in (ends[0], ends[-1])]
            changes.append({"key": key, "ends": pairs})
    return changes


def _series(rows: list[dict[str, Any]], key: str) -> list[list[Any]]:
    """Steps and values of a metric, at most `MAX_POINTS`; NaN and infinities are null."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    every = -(-len(points) // MAX_POINTS) or 1
    points = [*points[:-1:every], *points[-1:]]
    return [[step for step, _ in points], [float(f"{x:.6g}") if _finite(x) else None for _, x in points]]


def _groups(sampled: Sequence[Trajectories]) -> tuple[list[list[Any]], list[str]]:
    """A row per group for the page's list, and the groups' samples in chunks of JSON."""
    index: list[list[Any]] = []
    chunks: list[list[str]] = []
    size = 0  # of the last chunk
    for i, trajectories in enumerate(sampled):
        start, end = _common({_prompt(group) for group in trajectories.groups})
        for group in trajectories.groups:
            prompt, rows = _prompt(group), group.rows
            if not chunks or size > CHUNK:
                chunks.append([])
                size = 0
            entry = {"prompt": prompt, "gold": rows[0].get("gold"), "rows": [_slim(row, rows[0]) for row in rows]}
            chunks[-1].append(_json(entry))
            size += len(chunks[-1][-1])
            index.append([
                i, group.kind, group.step, group.row, len(chunks) - 1, len(chunks[-1]) - 1,
                " ".join(prompt[start : len(prompt) - end].split())[:160],
                [row.get("reward") for row in group.ends], [row.get("length", 0) for row in group.ends],
                int(any("tokens" in row for row in rows)),
            ])  # fmt: skip
    return index, [f"[{','.join(chunk)}]" for chunk in chunks]


def _prompt(group: Group) -> str:
    return str(group.rows[0].get("prompt", ""))


def _slim(row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The row without what its group has, and without the completion where its tokens have it."""
    same = {"step", "group", "gold", *(["prompt"] if row.get("prompt") == first.get("prompt") else [])}
    if "tokens" in row and "".join(row["tokens"]["text"]) == row.get("completion"):
        same.add("completion")
    return {name: value for name, value in row.items() if name not in same}


def _common(prompts: set[str]) -> tuple[int, int]:
    """How many characters all prompts share at their start and at their end: the chat template's."""
    if len(prompts) < 2:
        return 0, 0
    start = len(commonprefix([*prompts]))  # noqa: RUF071, texts and not paths
    return start, len(commonprefix([prompt[start:][::-1] for prompt in prompts]))  # noqa: RUF071


def _checked_args(folder: Path) -> dict[str, Any]:
    args = read_args(folder)
    if args and args.get("format", FORMAT) != FORMAT:
        fault = f"format {args['format']}, and this version reads format {FORMAT}"
        raise ValueError(f"{folder} was written in {fault}: use the version that wrote it")
    return args


def _metrics(folder: Path, *, live: bool) -> list[dict[str, Any]]:
    try:
        rows = read_metrics(folder)
    except FileNotFoundError:
        if live and folder.is_dir():
            return []
        raise
    rows = [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]
    if not rows and not live:
        raise ValueError(f"{folder}: metrics.jsonl holds no finished step, so there is nothing to report")
    return rows


def _refuse_different(
    names: Sequence[str], args: Sequence[dict[str, Any]], metrics: Sequence[list[dict[str, Any]]]
) -> None:
    """ValueError for runs that do not measure the same: of GRPO and DPO, say. All that sample can be compared."""
    kinds = ["sampled" if any("reward/mean" in row for row in rows) else _script(a) for a, rows in zip(args, metrics)]
    for name, kind, flags in zip(names, kinds, args):
        if kind != kinds[0] and kind and kinds[0]:
            raise ValueError(
                f"{names[0]} is a run of {_script(args[0])} and {name} of {_script(flags)}, which measure different "
                "things: give runs of one command"
            )


def _differences(args: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The arguments that all runs have and in which they differ, each with its value in every run."""
    differences = {}
    for name in (name for name in args[0] if name not in OWN and all(name in a for a in args)):
        values = [_text(a[name]) for a in args]
        if len(set(values)) > 1:
            differences[name] = values
    return differences


def _script(args: dict[str, Any]) -> str:
    return str(args.get("script", "")).removesuffix(".py")


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """The value without NaN and infinities, which JSON in a browser has not: they become texts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): _plain(x) for name, x in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def _json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_plain(value), separators=(",", ":"))


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


@cache
def _asset(name: str) -> str:
    return files("rlkit.run.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
