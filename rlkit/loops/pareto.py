"""The Pareto front of a run's evaluations in several objectives, and the hypervolume that it dominates.

Each evaluation is a point, the means `eval/reward/NAME` of the objectives. The hypervolume is that above the first
evaluation, so it starts at 0 and never falls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlkit._util.files import replace_file
from rlkit._util.ranks import is_first
from rlkit.objectives import Archive, archive_init, archive_insert, hypervolume
from rlkit.run.folder import PARETO


class Front(NamedTuple):
    """The names of the objectives, the first evaluation's point (empty before it), and the front with its steps."""

    names: tuple[str, ...]
    first: tuple[float, ...]
    archive: Archive


def start(names: Sequence[str], *, saved: Mapping[str, Any] | None = None) -> Front:
    """An empty front, or that of a checkpoint (`to_save`) with the same objectives."""
    if saved and tuple(saved["objectives"]) == tuple(names):
        points = [tuple(entry["point"]) for entry in saved["front"]]
        archive = Archive(tuple(points), tuple(entry["step"] for entry in saved["front"]))
        return Front(tuple(names), tuple(saved["first"]), archive)
    return Front(tuple(names), (), archive_init())


def advance(front: Front, line: Mapping[str, float], *, step: int) -> Front:
    """The front with the evaluation in the metrics `line`; unchanged where that has none of all objectives."""
    point = tuple(line[key] for name in front.names if (key := f"eval/reward/{name}") in line)
    if not point or len(point) < len(front.names) or any(x != x for x in point):
        return front
    return front._replace(first=front.first or point, archive=archive_insert(front.archive, point, step))


def logged(front: Front, folder: Path) -> dict[str, float]:
    """`pareto/hypervolume` and `pareto/size`; the first rank writes the front to `pareto.json` in the run folder."""
    if not front.first:
        return {}
    points, reference = (torch.tensor(x, dtype=torch.float64) for x in (front.archive.points, front.first))
    if is_first():
        replace_file(folder / PARETO, (json.dumps(to_save(front), indent=1) + "\n").encode())
    return {"pareto/hypervolume": float(hypervolume(points, reference=reference)), "pareto/size": float(len(points))}


def to_save(front: Front) -> dict[str, Any]:
    """The front as JSON."""
    pairs = zip(front.archive.items, front.archive.points, strict=True)
    entries = [{"step": step, "point": list(point)} for step, point in pairs]
    return {"objectives": list(front.names), "first": list(front.first), "front": entries}
