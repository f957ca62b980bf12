"""Does a server sample from the weights that the trainer has?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlkit.types import Completion


class WeightMismatch(RuntimeError):
    """After an update a server's log-probs are not those of the trainer: the run must not go on."""


class Probe(NamedTuple):
    """How `update_weights` checks itself: each server samples greedily after `prompt_ids`, the trainer scores it.

    `score(prompt_ids, ids)` returns the trainer's log-probs of `ids` after the prompt, at temperature 1. The prompt is
    the same every time, so that a prefix cache which was not flushed shows. `tolerance` bounds the mean absolute
    difference in nats: 1e-3 if both compute in fp32, about 0.05 in bf16.
    """

    prompt_ids: list[int]
    score: Callable[[list[int], list[int]], Sequence[float]]
    tolerance: float
    num_tokens: int = 16


def check(probe: Probe, out: Completion, *, url: str, version: int) -> None:
    """Compare the log-probs of a greedy completion of the probe's prompt with the trainer's.

    Raises:
        WeightMismatch: they differ, or the completion carries another version.
    """
    expected = list(probe.score(probe.prompt_ids, out.ids))
    if len(expected) != len(out.ids):
        raise ValueError(f"Probe.score must return {len(out.ids)} log-probs, one per token, got {len(expected)}")
    errors = [abs(a - b) for a, b in zip(out.logp, expected, strict=True)]
    mean = sum(errors) / max(1, len(errors))
    if set(out.versions) - {version}:
        raise WeightMismatch(f"{url} serves versions {sorted(set(out.versions))} after the update to {version}")
    if not mean <= probe.tolerance:
        raise WeightMismatch(
            f"{url}: after the update to version {version} the log-probs of the probe differ from the trainer's by "
            f"{mean:.3g} nats on average (up to {max(errors):.3g}; tolerance {probe.tolerance:.3g}). The usual causes: "
            "tensor names that the server does not know, a prefix cache that was not flushed, an update that was only "
            "half done, a temperature or dtype that differs."
        )
