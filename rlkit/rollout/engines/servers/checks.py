"""Checks of a weight update: against the served checkpoint, where this machine can read it, and by a probe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from rlkit._util.files import weight_files
from rlkit._util.text import masked
from rlkit.model.source import source_of
from rlkit.types import Completion

NamedTensors = Iterable[tuple[str, Tensor]]
Shapes = Mapping[str, tuple[int, ...]]
HEAD = "lm_head.weight"  # optional in a checkpoint that ties it to the embedding
DERIVED = "rotary_emb.inv_freq"  # in old checkpoints; computed, not loaded


class WeightMismatch(RuntimeError):
    """After an update a server's log-probs are not those of the trainer: the run must stop."""


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


def config_of(model_path: str | None) -> dict[str, Any]:
    """The checkpoint's config.json; {} where it is not on this machine."""
    try:
        return json.loads((_folder(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return {}


def vocab_size(model_path: str | None) -> int | None:
    """Rows of the served embedding; None where the checkpoint is not on this machine."""
    config = config_of(model_path)
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def experts_of(model_path: str | None) -> int:
    """How many experts a token of the served model goes to; 0: it is dense, or its config is not on this machine."""
    config = config_of(model_path)
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    return max(part.get(name) or 0 for part in (config, config.get("text_config") or {}) for name in names)


@lru_cache(maxsize=4)
def shapes(model_path: str | None) -> Shapes:
    """Name and shape of every weight, from the safetensors headers; empty where they are not on this machine."""
    by_name: dict[str, tuple[int, ...]] = {}
    try:
        for path in weight_files(_folder(model_path)):
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header.pop("__metadata__", None)
            by_name |= {n: tuple(entry["shape"]) for n, entry in header.items() if not n.endswith(DERIVED)}
    except (OSError, ValueError):
        return {}
    if config_of(model_path).get("tie_word_embeddings", True):
        by_name.pop(HEAD, None)
    return by_name


def checked(
    named_tensors: NamedTensors, served: Shapes, *, unsent: tuple[str, ...] = (), model: Any = None
) -> NamedTensors:
    """The same stream; it raises at a tensor that the served checkpoint does not have, and at the end if one is
    missing, unless its name begins with one of `unsent` or `model` was read without it (multi-token prediction).

    SGLang silently skips an unknown name and keeps the old values of a missing tensor; an unexpected shape kills it.
    A sharded tensor is always refused. ValueError for a served checkpoint in FP8: these weights are no codes.
    """
    if scale := next((name for name in served if name.endswith((".weight_scale", ".weight_scale_inv"))), None):
        fix = "train an adapter on linear layers, which is sent alone, or serve the bf16 checkpoint of the same model"
        raise ValueError(f"the served model has FP8 weights ({scale}), which plain ones cannot replace: {fix}")

    def stream() -> Iterator[tuple[str, Tensor]]:
        missing = dict.fromkeys(name for name in served if not name.startswith(unsent))
        for name, tensor in named_tensors:
            if served and name not in served and name != HEAD:
                near = ", ".join(sorted(served)[:3])
                raise ValueError(f"the served model has no tensor {name!r}; its names are like {near}")
            if name in served and tuple(tensor.shape) != served[name]:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but the served model has {served[name]}")
            if hasattr(tensor, "full_tensor"):
                raise TypeError(f"{name} is sharded: pass stream_weights(model), which gathers it, on every rank")
            missing.pop(name, None)
            yield name, tensor
        if missing and model is not None:
            missing = dict.fromkeys(missing.keys() - {*source_of(model).left})
        if missing:
            few = ", ".join(sorted(missing)[:3])
            raise ValueError(
                f"the served model has {len(missing)} tensors that did not come, like {few}: they would keep their old "
                "values. Send them, or name them in `unsent` if the trainer does not have them"
            )

    return stream()


def check_release(servers: Iterable[Any]) -> None:
    """Refuse to free the memory of `Replica`s that draft tokens by weights of their own, which no update restores."""
    if url := next((masked(server.url) for server in servers if server.facts.has_draft), None):
        fault = f"{url} drafts tokens by weights of their own, which it would lose with `release`: no update has them"
        raise ValueError(f"{fault}. Use n-gram drafts, or no `release` (--engine-release)")


def check_probe(probe: Probe, out: Completion, *, url: str, version: int) -> None:
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


def _folder(model_path: str | None) -> Path:
    if model_path is None or Path(model_path).is_dir():
        return Path(model_path or "/nonexistent")
    cached = try_to_load_from_cache(model_path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else Path("/nonexistent")
