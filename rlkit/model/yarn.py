"""A longer context by YaRN (arXiv:2309.00071): a model's config with scaled rotary frequencies, and a folder with it.

    load_model(yarn_folder("Qwen/Qwen2.5-7B", 4.0, "runs/long/extended"))

The folder has its own config.json and links to the other files of the model, so that whatever reads it (training, an
engine, a server that is started, an adapter's base) has the same frequencies. `--yarn` trains on such a folder.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from rlkit._util.files import replace_file, temporary
from rlkit.model.positions import positions, ropes
from rlkit.model.pretrained import HUB_FILES, load_config

EXTENDED = "extended"  # the folder in a run folder


def yarn_config(config: Any, factor: float) -> Any:
    """A copy of a transformers config with `factor` times its positions.

        f_i' = r_i f_i + (1 - r_i) f_i / factor         rotary frequency i of d/2
        cos, sin are multiplied by 0.1 ln(factor) + 1, so the logits of attention by its square

    r_i is 1 where frequency i turns at least 32 times in the original context, 0 where at most once, and linear in i
    between. The original context is the config's `max_position_embeddings`, which becomes `factor` times that: vLLM and
    SGLang then derive the same length. A config that has YaRN of this factor is copied as it is.

    Limits: factor 1 is the model itself. The factor is the same for short sequences, which it changes a little.
    Errors: ValueError for a factor that is not above 1, a model without rotary positions, with several kinds of them
    (Gemma 3), and with another scaling.
    """
    kind, num = config.model_type, positions(config)
    if not factor > 1:
        raise ValueError(f"`yarn` must be above 1, got {factor}")
    config = copy.deepcopy(config)
    text = config.get_text_config()
    scaled = [*ropes(text)]
    if not scaled or num is None:
        raise ValueError(f"`yarn` scales rotary positions, and models of type {kind!r} have none: drop it")
    if len(scaled) > 1:
        raise ValueError(f"`yarn` is for one kind of rotary positions, and {kind!r} has one per layer type: drop it")
    name, before = scaled[0].get("rope_type") or "default", scaled[0].get("factor")
    if (name, before) == ("yarn", factor):
        return config
    if name != "default":
        said = f"{name}{f' of factor {before:g}' if before else ''}"
        raise ValueError(f"`yarn` {factor:g}: the model's config.json has {said} already: drop the flag")
    more = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": num}
    text.rope_parameters = scaled[0] | more
    text.max_position_embeddings = int(factor * num)
    try:
        read = type(config).from_dict(config.to_dict())
        fits = [x.get("rope_type") for x in ropes(read.get_text_config())] == ["yarn"]
    except (KeyError, TypeError, ValueError):  # of some types transformers reads it as another scaling
        fits = False
    if not fits:
        raise ValueError(f"`yarn`: transformers has no YaRN for models of type {kind!r}: drop it")
    return config


def yarn_folder(path: str | os.PathLike[str], factor: float, folder: str | os.PathLike[str]) -> Path:
    """Write `folder`: the model at `path`, a folder or hub id, with the config of `yarn_config`; returns its path.

    The weights are links to the files of `path`, or of the hub's cache. Several processes may write it at once.

    Errors: those of `yarn_config` and of `rlkit.model.pretrained.load_config`.
    """
    config, folder = yarn_config(load_config(path), factor), Path(folder).absolute()
    source = Path(path)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(str(path), allow_patterns=HUB_FILES))
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(x.absolute() for x in source.iterdir() if x.is_file() and x.name != "config.json"):
        link = temporary(folder / file.name)
        link.symlink_to(file)
        link.replace(folder / file.name)
    replace_file(folder / "config.json", config.to_json_string().encode())
    return folder
