"""Curves of one run, or of several runs in one picture: `rlkit plot RUN_FOLDER [RUN_FOLDER ...]`.

Raw values are drawn faintly, with a centred running mean on top. Evaluations are points joined by lines. A panel is
drawn if any run has its metric. Of a run with several rewards, the Pareto front of its evaluations is drawn too.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlkit._util import untrusted
from rlkit._util.extras import optional
from rlkit._util.files import replace_file
from rlkit.run.console import in_notebook, reward_parts
from rlkit.run.folder import CURVES, PARETO, Run, read_metrics
from rlkit.run.history import read_starts


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


PANELS = (
    Panel(
        "Loss",
        "nats per token, or per preference",
        (Curve("loss", "training"), Curve("eval/loss", "evaluation", sparse=True)),
    ),
    Panel(
        "Preferences met",
        "share of pairs, or of labels",
        (Curve("accuracy", "training"), Curve("eval/accuracy", "evaluation", sparse=True)),
    ),
    Panel(
        "Reward",
        "mean reward per answer",
        (
            Curve("reward/mean", "training, sampled"),
            Curve("eval/sampled", "evaluation, sampled", sparse=True),
            Curve("eval/greedy", "evaluation, greedy", sparse=True),
        ),
        from_zero=False,
    ),
    Panel("Policy entropy", "nats per token", (Curve("entropy", "training"),)),
    Panel("Response length", "tokens per answer", (Curve("length/mean", "mean"), Curve("length/max", "max", raw=True))),
    Panel(
        "KL to the reference",
        "nats per token",
        (Curve("eval/kl", "evaluation prompts", sparse=True), Curve("kl/ref", "training")),
    ),
    Panel(
        "Hypervolume of the Pareto front",
        "product of the rewards",
        (Curve("pareto/hypervolume", "evaluations", sparse=True),),
    ),
    Panel(
        "Critic", "mean over tokens", (Curve("value/mean", "value"), Curve("value/return", "return")), from_zero=False
    ),
    Panel(
        "Margin",
        "chosen minus rejected",
        (Curve("margin", "training"), Curve("eval/margin", "evaluation", sparse=True)),
        from_zero=False,
        picture=False,
    ),
    Panel(
        "Chosen and rejected",
        "number per response",
        (Curve("chosen", "chosen"), Curve("rejected", "rejected")),
        from_zero=False,
        picture=False,
    ),
    Panel(
        "Log-probs of the responses",
        "nats per token",
        (Curve("logp/chosen", "chosen"), Curve("logp/rejected", "rejected")),
        from_zero=False,
        picture=False,
    ),
    Panel(
        "Explained variance of the critic",
        "share",
        (Curve("value/explained", "training"),),
        from_zero=False,
        picture=False,
    ),
    Panel("Truncated episodes", "share", (Curve("truncated", "training"),), picture=False),
    Panel(
        "Clipped tokens",
        "share of tokens",
        (Curve("ratio/clip_high", "advantage > 0"), Curve("ratio/clip_low", "advantage < 0")),
        picture=False,
    ),
    Panel("Mismatch of engine and trainer", "nats", (Curve("mismatch/abs_mean", "mean"),), picture=False),
    Panel(
        "Staleness", "steps", (Curve("staleness/mean", "mean"), Curve("staleness/max", "max", raw=True)), picture=False
    ),
    Panel(
        "Replaced groups", "groups", (Curve("groups/dropped", "dropped"), Curve("groups/ready", "ready")), picture=False
    ),
    Panel("Groups that train nothing", "share of groups", (Curve("groups/equal", "training"),), picture=False),
    Panel("Policy loss", "mean over tokens", (Curve("loss", "training"),), from_zero=False, picture=False),
    Panel("Gradient norm", "L2 norm before clipping", (Curve("grad_norm", "training"),), picture=False),
    Panel(
        "Learning rate",
        "per step",
        (Curve("lr", "policy", raw=True), Curve("lr/critic", "critic", raw=True)),
        picture=False,
    ),
    Panel(
        "Time per phase",
        "seconds per step",
        (
            Curve("time/rollout", "rollout"),
            Curve("time/wait", "wait"),
            Curve("time/score", "score"),
            Curve("time/train", "train"),
            Curve("time/sync", "sync"),
            Curve("time/eval", "evaluation"),
        ),
        picture=False,
    ),
    Panel("Weights sent to the engine", "bytes per step", (Curve("sync/bytes", "read by the engine"),), picture=False),
    Panel("Time per step", "seconds", (Curve("time/step", "step"),), picture=False),
    Panel("Throughput", "tokens per second", (Curve("time/tokens_per_s", "training"),), picture=False),
    Panel("Model FLOPs utilization", "share of the GPUs' peak", (Curve("time/mfu", "training"),), picture=False),
    Panel("GPU memory", "GiB", (Curve("memory/peak", "peak", raw=True),), picture=False),
    Panel(
        "Peak memory by phase",
        "GiB",
        (Curve("memory/rollout", "rollout"), Curve("memory/score", "score"), Curve("memory/train", "train")),
        picture=False,
    ),
)
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
    """The panels of which any run has a metric, with one for the reward's parts; `runs`: name -> its metrics.

    The loss of a run that samples says nothing of its progress, and comes late.
    """
    measured = {key for rows in runs.values() for row in rows for key, value in row.items() if value is not None}
    other = "Loss" if "reward/mean" in measured else "Policy loss"
    keys = dict.fromkeys(key for rows in runs.values() for row in rows for key in reward_parts(row))
    curves = tuple(Curve(key, key.removeprefix("reward/")) for key in keys)
    parts = Panel("Parts of the reward", "mean per answer", curves, from_zero=False)
    ordered = [x for panel in PANELS for x in ((panel, parts) if panel.title == "Reward" else (panel,))]
    return [panel for panel in ordered if panel.title != other and any(c.key in measured for c in panel.curves)]


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
    axis.set_title(panel.title, loc="left", fontweight="bold", fontsize=11)
    axis.set(xlabel="step", ylabel=panel.unit)
    axis.locator_params(axis="x", integer=True)
    if panel.from_zero and low >= 0:
        axis.set_ylim(0, 1.08 * high or None)
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
    axis.set_title("Pareto front", loc="left", fontweight="bold", fontsize=11)
    axis.set(xlabel=f"eval/reward/{pair[0]}", ylabel=f"eval/reward/{pair[1]}")
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


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
    return np.asarray(x, dtype=float), np.asarray(y, dtype=float)


def label(folder: Path | str, folders: Sequence[Path | str]) -> str:
    """The name of a run: its folder's, with the folder above where `folders` has that name twice."""
    path = Path(folder).resolve()
    same = [f for f in folders if Path(f).resolve().name == path.name]
    return path.name if len(same) < 2 else f"{path.parent.name}/{path.name}"
