"""Curves of one run, or of several runs in one picture: `rlkit plot RUN_FOLDER [RUN_FOLDER ...]`.

Raw values are drawn faintly, with a centred running mean on top. Evaluations are points joined by lines. A panel is
drawn if any run has its metric. Of a run with several rewards, the Pareto front of its evaluations is drawn too.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlkit._util import untrusted
from rlkit._util.extras import optional
from rlkit._util.files import replace_file
from rlkit.run.console import in_notebook, reward_parts
from rlkit.run.folder import CURVES, PARETO, Run, read_metrics
from rlkit.run.history import SCORES, read_starts
from rlkit.run.report.meanings import set_of


class Curve(NamedTuple):
    """One metric in a panel. `sparse`: measured at some steps, drawn as points. `raw`: not smoothed, drawn faintly.

    A metric with a standard error (`key` + "_se") is drawn with its 95% confidence interval.
    """

    key: str
    label: str
    sparse: bool = False
    raw: bool = False


class Panel(NamedTuple):
    """One plot: its title, the unit of its y axis, and its curves.

    `from_zero` starts the y axis at 0, so that a small change looks small. `picture`: also drawn in metrics.png; the
    report page has all panels.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    from_zero: bool = True
    picture: bool = True


def _panel(title: str, unit: str, labels: Mapping[str, str], *, from_zero: bool = True, picture: bool = True) -> Panel:
    """A panel of some metrics with their labels. Those of evaluations are sparse."""
    curves = (Curve(key, x, key.startswith(("eval/", "pareto/")), key in _RAW) for key, x in labels.items())
    return Panel(title, unit, tuple(curves), from_zero, picture)


_RAW = ("length/max", "staleness/max", "lr", "lr/critic", "memory/peak")  # drawn as they are
_PHASES = ("rollout", "wait", "score", "train", "sync", "eval")
PANELS = (
    _panel("Loss", "nats per token, or per preference", {"loss": "training", "eval/loss": "evaluation"}),
    _panel("Preferences met", "share of pairs, or of labels", {"accuracy": "training", "eval/accuracy": "evaluation"}),
    _panel("Reward", "mean reward per answer", {
        "reward/mean": "training, sampled", "eval/sampled": "evaluation, sampled", "eval/greedy": "evaluation, greedy",
    }, from_zero=False),
    _panel("Policy entropy", "nats per token", {"entropy": "training"}),
    _panel("Response length", "tokens per answer", {"length/mean": "mean", "length/max": "max"}),
    _panel("KL to the reference", "nats per token", {"eval/kl": "evaluation prompts", "kl/ref": "training"}),
    _panel("Hypervolume of the Pareto front", "product of the rewards", {"pareto/hypervolume": "evaluations"}),
    _panel("Critic", "mean over tokens", {"value/mean": "value", "value/return": "return"}, from_zero=False),
    _panel("Margin", "chosen minus rejected",
           {"margin": "training", "eval/margin": "evaluation"}, from_zero=False, picture=False),
    _panel("Chosen and rejected", "number per response",
           {x: x for x in ("chosen", "rejected")}, from_zero=False, picture=False),
    _panel("Log-probs of the responses", "nats per token",
           {"logp/chosen": "chosen", "logp/rejected": "rejected"}, from_zero=False, picture=False),
    _panel("Explained variance of the critic", "share",
           {"value/explained": "training"}, from_zero=False, picture=False),
    _panel("Truncated episodes", "share", {"truncated": "training"}, picture=False),
    _panel("Clipped tokens", "share of tokens",
           {"ratio/clip_high": "advantage > 0", "ratio/clip_low": "advantage < 0"}, picture=False),
    _panel("Mismatch of engine and trainer", "nats", {"mismatch/abs_mean": "mean"}, picture=False),
    _panel("Staleness", "steps", {"staleness/mean": "mean", "staleness/max": "max"}, picture=False),
    _panel("Replaced groups", "groups", {"groups/dropped": "dropped", "groups/ready": "ready"}, picture=False),
    _panel("Groups that train nothing", "share of groups", {"groups/equal": "training"}, picture=False),
    _panel("Policy loss", "mean over tokens", {"loss": "training"}, from_zero=False, picture=False),
    _panel("Gradient norm", "L2 norm before clipping", {"grad_norm": "training"}, picture=False),
    _panel("Learning rate", "per step", {"lr": "policy", "lr/critic": "critic"}, picture=False),
    _panel("Time per phase", "seconds per step",
           {f"time/{phase}": "evaluation" if phase == "eval" else phase for phase in _PHASES}, picture=False),
    _panel("Weights sent to the engine", "bytes per step", {"sync/bytes": "read by the engine"}, picture=False),
    _panel("Time per step", "seconds", {"time/step": "step"}, picture=False),
    _panel("Throughput", "tokens per second", {"time/tokens_per_s": "training"}, picture=False),
    _panel("Model FLOPs utilization", "share of the GPUs' peak", {"time/mfu": "training"}, picture=False),
    _panel("GPU memory", "GiB", {"memory/peak": "peak"}, picture=False),
    _panel("Peak memory by phase", "GiB",
           {f"memory/{phase}": phase for phase in ("rollout", "score", "train")}, picture=False),
)  # fmt: skip
LARGEST = 1e290  # that is drawn: the axis of two numbers near the end of fp64 has no length
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # distinguishable for colour-blind readers


def draw(run: Run) -> Path | None:
    """Draw metrics.png of an open run and return its path, or None if it cannot be drawn. A notebook shows it.

    The picture is drawn here, unless `Run.start_plot` was called and its process succeeds. Any error is reported in one
    line and does not end the run, whose model is not exported yet.
    """
    if not (run.active and (run.folder / "metrics.jsonl").exists()):
        return None
    try:
        picture = run.folder / CURVES if run.drawn() else plot_run(run.folder)
        if in_notebook():
            from IPython.display import Image, display

            display(Image(filename=str(picture), width=700))
        return picture
    except Exception as error:
        kind = "" if isinstance(error, ImportError | OSError | ValueError) else f"{type(error).__name__}: "
        run.say(f"no plot: {kind}{str(error).strip() or repr(error)}".splitlines()[0])
        return None


def plot_run(*folders: Path | str, out: Path | str | None = None, title: str | None = None) -> Path:
    """Draw the curves of a run (as `metrics.png` in its folder), or of several runs; returns the path of the picture.

    A dashed line is a step after which a run was resumed with other arguments.

    The suffix of `out` selects the format: .png, .pdf, .svg or another that matplotlib writes. `title` defaults
    to the names of the runs. Only `matplotlib.figure.Figure` is used: pyplot's state and back end do not change.

    Errors: ModuleNotFoundError, which names the extra, without matplotlib; FileNotFoundError for a folder without
    metrics or that `out` is not in; ValueError if there is nothing to draw, or for another suffix.
    """
    if not folders:
        raise ValueError("give at least one run folder")
    runs = {label(folder, folders): read_metrics(folder) for folder in folders}
    panels = [panel for panel in panels_of(runs) if panel.picture]
    if not panels:
        raise ValueError(f"no metric to draw in {', '.join(map(str, folders))}: metrics.jsonl holds no finished step")
    fronts = {label(folder, folders): front for folder in folders if (front := _front(Path(folder)))}
    pairs = list(dict.fromkeys((x["objectives"][0], y) for x in fronts.values() for y in x["objectives"][1:]))
    num = len(panels) + len(pairs)
    columns = min(2, num)
    rows = -(-num // columns)
    optional("matplotlib", "plot", "plots need")
    from matplotlib.figure import Figure

    target = Path(out) if out is not None else Path(folders[0]) / CURVES
    if not target.parent.is_dir():
        raise FileNotFoundError(f"`out` {target}: there is no folder {target.parent}")
    if target.suffix and target.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise ValueError(f"`out` {target}: {target.suffix} is no format of a picture: take .png, .pdf or .svg")
    figure = Figure(figsize=(5.6 * columns, 3.5 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[num:]:
        axis.set_visible(False)
    changes = {start["step"] for folder in folders for start in read_starts(Path(folder)) if start["changed"]}
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel, runs)
        for step in changes:  # the run went on with other arguments
            axis.axvline(step, color="0.5", linestyle="--", linewidth=0.9)
    for axis, pair in zip(axes.flat[len(panels) :], pairs, strict=False):
        _draw_front(axis, pair, fronts, runs)
    names = ", ".join(runs) if len(runs) < 4 else f"{len(runs)} runs"
    figure.suptitle(title or names, fontsize=13, fontweight="bold")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130, format=target.suffix[1:] or "png")
    replace_file(target, picture.getvalue())
    return target


def panels_of(runs: dict[str, list[dict[str, Any]]]) -> list[Panel]:
    """The panels of which any run has a metric, with the reward's parts and held-out sets; `runs`: name -> its metrics.

    The loss of a run that samples says nothing of its progress, and comes late.
    """
    measured = {key for rows in runs.values() for row in rows for key, value in row.items() if value is not None}
    other = "Loss" if "reward/mean" in measured else "Policy loss"
    keys = dict.fromkeys(key for rows in runs.values() for row in rows for key in reward_parts(row))
    curves = tuple(Curve(key, key.removeprefix("reward/")) for key in keys)
    more = Panel("Parts of the reward", "mean per answer", curves, from_zero=False), _sets(measured)
    ordered = [x for panel in PANELS for x in ((panel, *more) if panel.title == "Reward" else (panel,))]
    return [panel for panel in ordered if panel.title != other and any(c.key in measured for c in panel.curves)]


def _sets(measured: Iterable[str]) -> Panel:
    """A curve for each named held-out set, of the first of `SCORES` that any of them has."""
    scores = [[key for key in sorted(measured) if key == f"eval/{set_of(key)}/{score[5:]}"] for score in SCORES]
    keys = next(filter(None, scores), [])
    unit = keys[0].rpartition("/")[2] if keys else ""
    return Panel("Held-out sets", unit, tuple(Curve(key, set_of(key), sparse=True) for key in keys))


def _draw(axis: Any, panel: Panel, runs: dict[str, list[dict[str, Any]]]) -> None:
    several, low, high = len(runs) > 1, math.inf, -math.inf
    for i, (name, rows) in enumerate(runs.items()):
        for j, curve in enumerate(panel.curves):
            x, y = _series(rows, curve.key)
            if not np.isfinite(y).any() or (several and curve.raw):
                continue
            color = COLORS[(i if several else j) % len(COLORS)]
            style: Any = {"color": color, "linestyle": ("-", "--", ":")[j % 3] if several else "-"}
            style["label"] = f"{name}, {curve.label}" if several else curve.label
            where, error = _series(rows, f"{curve.key}_se")
            if error.size:
                at = y[np.searchsorted(x, where)]
                axis.fill_between(where, at - 1.96 * error, at + 1.96 * error, color=color, alpha=0.12, linewidth=0)
            if curve.sparse:
                axis.plot(x, y, marker="o", markersize=3.5, linewidth=1.2, **style)
            elif curve.raw:
                axis.plot(x, y, alpha=0.45, linewidth=0.8, **style)
            else:
                axis.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
                axis.plot(x, smooth(y), linewidth=1.8, **style)
            low, high = min(low, np.nanmin(y)), max(high, np.max(y, where=np.isfinite(y), initial=-math.inf))
    axis.locator_params(axis="x", integer=True)
    if panel.from_zero and low >= 0:
        axis.set_ylim(0, 1.08 * high or None)
    _label(axis, panel.title, xlabel="step", ylabel=panel.unit)


def _label(axis: Any, title: str, **labels: str) -> None:
    axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axis.set(**labels)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


def _front(folder: Path) -> dict[str, Any] | None:
    """The front that a run with several rewards left (`rlkit.loops.pareto`)."""
    path = folder / PARETO
    try:
        front = json.loads(untrusted.read(path, "json_mib")) if path.exists() else None
        return front and {**front, "front": sorted(entry["point"] + [entry["step"]] for entry in front["front"])}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): delete it, and the front is not drawn") from None


def _draw_front(
    axis: Any, pair: tuple[str, str], fronts: dict[str, dict[str, Any]], runs: dict[str, list[dict[str, Any]]]
) -> None:
    """Two objectives of all evaluations, and of those on the front, with their steps.

    Of two objectives in all, the area that the front dominates above the first evaluation is the hypervolume.
    """
    for i, (name, front) in enumerate(fronts.items()):
        if not {*pair} <= {*front["objectives"]}:
            continue
        start, color = f"{name}, " if len(runs) > 1 else "", COLORS[i % len(COLORS)]
        columns = [front["objectives"].index(one) for one in pair]
        keys = [f"eval/reward/{one}" for one in pair]
        every = [[row[key] for key in keys] for row in runs[name] if all(row.get(key) is not None for key in keys)]
        axis.plot(*zip(*every, strict=True), "o-", color=color, alpha=0.25, linewidth=0.8, markersize=3)
        first = [front["first"][k] for k in columns]
        best = [[*(entry[k] for k in columns), entry[-1]] for entry in front["front"]]
        axis.plot(*first, "x", color=color, label=f"{start}first evaluation")
        for x, y, step in best:
            axis.plot(x, y, "o", color=color, markersize=5, label=f"{start}front" if step == best[0][2] else None)
            axis.annotate(f"{step}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        above = [(x, y) for x, y, _ in best if x > first[0] and y > first[1]]
        if len(front["objectives"]) == 2 and above:
            x, y = zip((first[0], above[0][1]), *above, strict=True)
            style: Any = {"color": color, "alpha": 0.12, "linewidth": 0, "label": f"{start}hypervolume"}
            axis.fill_between(x, y, first[1], step="pre", **style)
    _label(axis, "Pareto front", xlabel=f"eval/reward/{pair[0]}", ylabel=f"eval/reward/{pair[1]}")


def smooth(y: np.ndarray, *, window: int | None = None) -> np.ndarray:
    """Centred running mean over `window` values (default: a 25th of the length), fewer at the ends; NaN is ignored."""
    half = (len(y) // 25 if window is None else window) // 2
    present = np.isfinite(y)
    total = np.concatenate([[0.0], np.cumsum(np.where(present, y, 0.0))])
    count = np.concatenate([[0], np.cumsum(present)])
    at = np.arange(len(y))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[high] - total[low]) / (count[high] - count[low])


def _series(rows: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    x, y = zip(*points, strict=True) if points else ((), ())
    values = np.asarray(y, dtype=float)
    return np.asarray(x, dtype=float), np.where(np.isinf(values), values, values.clip(-LARGEST, LARGEST))


def label(folder: Path | str, folders: Sequence[Path | str]) -> str:
    """The name of a run: its folder's, with the folder above where `folders` has that name twice."""
    path = Path(folder).resolve()
    same = [f for f in folders if Path(f).resolve().name == path.name]
    return path.name if len(same) < 2 else f"{path.parent.name}/{path.name}"
