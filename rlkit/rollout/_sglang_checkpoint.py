"""What the checkpoint behind a server says of it, where this machine can read it: things SGLang dies of are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from rlkit.rollout._sglang_weights import NamedTensors

Shapes = Mapping[str, tuple[int, ...]]
NEVER_IN_TIED_CHECKPOINTS = "lm_head.weight"


def vocab_size(model_path: str | None) -> int | None:
    """Number of rows of the served embedding; None where the checkpoint is not here."""
    try:
        config = json.loads((_folder(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


@lru_cache(maxsize=4)
def shapes(model_path: str | None) -> Shapes:
    """Name and shape of every tensor, from the headers of the safetensors files; empty where they are not here."""
    found: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(_folder(model_path).glob("*.safetensors")):
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            found |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError):
        return {}
    return found


def checked(named_tensors: NamedTensors, known: Shapes) -> NamedTensors:
    """The same stream, which raises at a tensor that the served checkpoint does not have."""

    def stream() -> Iterator:
        for name, tensor in named_tensors:
            if known and name not in known and name != NEVER_IN_TIED_CHECKPOINTS:
                near = ", ".join(sorted(known)[:3])
                raise ValueError(f"the served model has no tensor {name!r}; its names are like {near}")
            if name in known and tuple(tensor.shape) != known[name]:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but the served model has {known[name]}")
            yield name, tensor

    return stream()


def _folder(model_path: str | None) -> Path:
    if model_path is None or Path(model_path).is_dir():
        return Path(model_path or "/nonexistent")
    cached = try_to_load_from_cache(model_path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else Path("/nonexistent")
