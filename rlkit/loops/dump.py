"""What was sampled, as it completes: into the run folder, and beside the bar for who is watching."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.rollout.limits import success
from rlkit.rollout.rollout import Prompt
from rlkit.run.folder import Run, trajectory_row
from rlkit.types import Trajectory


@dataclass
class _Tally:
    """One file's groups so far; tokens since the first of them."""

    groups: int = 0
    success: float = 0.0
    tokens: int = 0
    start: float = field(default_factory=time.perf_counter)


def dump_to(run: Run, tokenizer: Any, *, engine: Any) -> Callable[..., None]:
    """An `on_group` that writes each group into the run folder as it completes, and says how far the rollout is.

    Its keywords: `step` and `kind` (`train`, `eval_sampled`, `eval_greedy`) name the file; groups that were not `kept`
    go to `dropped_{step}.jsonl` instead. Running and waiting requests are the engine's, where it counts them.
    """
    tallies: dict[tuple[str, int], _Tally] = {}

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    def dump(prompt: Prompt, group: Sequence[Trajectory], *, step: int, kind: str = "train", kept: bool = True) -> None:
        kind = kind if kept else "dropped"
        run.trajectories(step, [trajectory_row(t, decode=decode, group=prompt.index) for t in group], kind=kind)
        tally = tallies.setdefault((kind, step), _Tally())
        tally.groups += 1
        tally.success += success(group)
        tally.tokens += sum(sum(t.mask) for t in group) if tally.groups > 1 else 0
        run.status(_line(kind, tally, getattr(engine, "progress", None)))

    return dump


def _line(kind: str, tally: _Tally, progress: Any) -> str:
    rate = tally.tokens / max(1e-9, time.perf_counter() - tally.start)
    queue = "" if progress is None else f", {progress.running} running, {progress.waiting} queued"
    return f"{kind}: {tally.groups} groups, reward {tally.success / tally.groups:.3f}, {rate:.0f} tok/s{queue}"
