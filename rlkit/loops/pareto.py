"""The Pareto front of a run's evaluations in several objectives, and the hypervolume that it dominates.

Each evaluation is a point, the means `eval/reward/NAME` of the objectives. The hypervolume is that above the first
evaluation, so it starts at 0 and never falls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlkit._util.files import replace_file
from rlkit._util.ranks import is_first
from rlkit.objectives import Archive, archive_init, archive_insert, hypervolume
from rlkit.run.folder import PARETO, read_metrics


class Front(NamedTuple):
    """The names of the objectives, the first evaluation's point (empty before it), and the front with its steps."""

    names: tuple[str, ...]
    first: tuple[float, ...]
    archive: Archive


def front_of(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Front:
    """The front of the evaluations among lines of metrics; a line that lacks an objective, or has NaN, is left out."""
    first, archive = (), archive_init()
    for row in rows:
        point = tuple(row[key] for name in names if (key := f"eval/reward/{name}") in row)
        if point and len(point) == len(names) and not any(x != x for x in point):
            first, archive = first or point, archive_insert(archive, point, row["step"])
    return Front(tuple(names), first, archive)


def logged(names: Sequence[str], evals: Mapping[str, float], folder: Path, *, step: int) -> dict[str, float]:
    """On the first rank, `pareto/hypervolume` and `pareto/size` after an evaluation of a run in this folder.

    Its earlier evaluations are those in its metrics. The front is written to `pareto.json` there.
    """
    if not (names and is_first()):
        return {}
    rows = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    front = front_of(names, [*rows, {**evals, "step": step}])
    if not front.first:
        return {}
    points, reference = (torch.tensor(x, dtype=torch.float64) for x in (front.archive.points, front.first))
    pairs = zip(front.archive.items, front.archive.points, strict=True)
    entries = [{"step": step, "point": list(point)} for step, point in pairs]
    content = {"objectives": list(names), "first": list(front.first), "front": entries}
    replace_file(folder / PARETO, (json.dumps(content, indent=1) + "\n").encode())
    return {"pareto/hypervolume": float(hypervolume(points, reference=reference)), "pareto/size": float(len(points))}
