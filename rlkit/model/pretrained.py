"""Configs and tokenizers of model folders and hub ids, read so that nothing in them runs as code.

transformers can run Python that a model brings along (`auto_map` in its JSON files), and asks for it on a terminal;
a config can also name an attention kernel on the hub, which is code, too. Both are refused here.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from rlkit._util.files import base_of, check_model_path, is_adapter

log = logging.getLogger("rlkit.model")

NO_CODE: dict[str, Any] = {"trust_remote_code": False}  # for every call of transformers that takes it
_CODE = "has a {} in Python (auto_map), and rlkit runs no code of a model folder: choose one that transformers has"


@cache
def _report_code(path: str, what: str) -> None:
    """Warn, once in a process, of code that is not run: a script reads a config several times."""
    log.warning("%r has a %s in Python (auto_map), which is not run: transformers' is used", path, what)


def load_config(path: str | os.PathLike[str]) -> Any:
    """The config of a folder or hub id, of an adapter that of its base model.

    ValueError for one that needs code of its own, or that is damaged.
    """
    from transformers import AutoConfig

    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the folder of a model or a hub id, got {path!r:.80}")
    check_model_path(path)
    path = base_of(path)
    if (Path(path) / "adapter_config.json").is_file():  # transformers would load both into one model
        fix = "merge them (peft's merge_and_unload), and save the result"
        raise ValueError(f"model {str(path)!r} has an adapter beside its weights (adapter_config.json): {fix}")
    with explained(path, "config"):
        config = AutoConfig.from_pretrained(str(path), **NO_CODE)
    for name in ("_attn_implementation", "_experts_implementation"):
        kernel = next((k for c in _configs(config) if "/" in str(k := getattr(c, name, None))), None)
        if kernel is not None:
            what = f"names the kernel {kernel!r}, and rlkit runs no code of the hub: remove {name[1:]}"
            raise ValueError(f"model {str(path)!r}: config.json {what} there")
    if getattr(config, "auto_map", None):
        _report_code(str(path), "model")
    return config


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder or hub id, of an adapter without one that of its base model.

    ValueError for one that needs code of its own, or that is damaged.
    """
    from transformers import AutoTokenizer
    from transformers.utils.hub import cached_file

    if not (is_adapter(path) and has_tokenizer(path)):
        check_model_path(path)
        path = base_of(path)
    with explained(path, "tokenizer"):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path), **NO_CODE)
        with suppress(OSError):  # `rlkit.data.markup` looks for it beside the tokenizer
            cached_file(str(path), "generation_config.json")
    if len(tokenizer) < 2 or not tokenizer.encode("hello", add_special_tokens=False):
        what = "no tokenizer with a vocabulary: copy tokenizer.json and tokenizer_config.json of its base model there"
        raise ValueError(f"model {str(path)!r} has {what}")
    if tokenizer.init_kwargs.get("auto_map"):
        _report_code(str(path), "tokenizer")
    return tokenizer


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a tokenizer."""
    return (Path(path) / "tokenizer_config.json").is_file()


@contextmanager
def explained(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """One line with the folder, and where it is damaged JSON with the file, for the errors of transformers."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)  # or it prints a line for each of its retries, before the error
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"model {str(path)!r} {_CODE.format(what)}") from None
        if damaged := _not_json(Path(path)):
            raise ValueError(f"{damaged} is damaged, it is not JSON: copy or download it again") from None
        if isinstance(error, OSError | ImportError):
            raise
        text = str(error).partition("\n")[0]
        fix = "; copy or download tokenizer.json again" * (what == "tokenizer")
        found = f"its {what} cannot be read: {type(error).__name__}: {text}{fix}"
        raise ValueError(f"model {str(path)!r}: {found}") from error
    finally:
        hub.setLevel(level)


def _not_json(folder: Path) -> Path | None:
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return path
    return None


def _configs(config: Any) -> Iterator[Any]:
    """The config and those inside it."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)
