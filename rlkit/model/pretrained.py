"""Configs and tokenizers of model folders and hub ids, read so that nothing in them runs as code.

transformers can run Python that a model brings along (`auto_map` in its JSON files), and asks for it on a terminal;
a config can also name an attention kernel on the hub, which is code, too. Both are refused here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlkit._util import untrusted
from rlkit._util.files import INDEX, SINGLE, base_of, check_model_path, is_adapter, model_file

log = logging.getLogger("rlkit.model")

NO_CODE: dict[str, Any] = {"trust_remote_code": False}  # for every call of transformers that takes it
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # those of a model that are taken from the hub
_OF_ROPE = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # that classes read into `rope_parameters`
_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
_SIZES = {  # bounds of keys of config.json, far from any model
    "vocab_size": (1, 1 << 25), "hidden_size": (1, 1 << 20), "n_embd": (1, 1 << 20), "intermediate_size": (0, 1 << 22),
    "num_hidden_layers": (1, 10_000), "n_layer": (1, 10_000), "num_attention_heads": (1, 1 << 16),
    "n_head": (1, 1 << 16), "num_key_value_heads": (1, 1 << 16), "head_dim": (1, 1 << 16), "num_experts": (0, 1 << 16),
    "num_local_experts": (0, 1 << 16), "n_routed_experts": (0, 1 << 16), "max_position_embeddings": (1, 1 << 32),
    "rope_theta": (1e-3, 1e15), "rms_norm_eps": (0, 1), "layer_norm_eps": (0, 1),
}  # fmt: skip
_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # of transformers' line about `model_max_length`
_NOT_RUN = "{!r} has a {} in Python (auto_map), which is not run: transformers' is used"
_CODE = "has a {} in Python (auto_map), and rlkit runs no code of a model folder: choose one that transformers has"


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Inside the block transformers shows no progress bar."""
    from transformers.utils import logging as theirs

    had_bar = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        if had_bar:
            theirs.enable_progress_bar()


@contextmanager
def only_errors() -> Iterator[None]:
    """Inside the block transformers logs only errors."""
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity()
    theirs.set_verbosity_error()
    try:
        yield
    finally:
        theirs.set_verbosity(before)


@cache
def _warn_once(text: str) -> None:
    """Warn, once in a process: a script reads a config several times."""
    log.warning(text)


def load_config(path: str | os.PathLike[str]) -> Any:
    """The config of a folder or hub id, of an adapter that of its base model.

    ValueError for one that needs code of its own, that is damaged, that names a kernel which transformers lacks, or
    whose folder holds two sets of weights with other names. A key that is misspelt is logged.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the folder of a model or a hub id, got {path!r:.80}")
    check_model_path(path)
    path = base_of(path)
    if (Path(path) / "adapter_config.json").is_file():  # transformers would load both into one model
        fix = "merge them (peft's merge_and_unload), and save the result"
        raise ValueError(f"model {str(path)!r} has an adapter beside its weights (adapter_config.json): {fix}")
    with explained(path, "config"):
        _check_config_files(path)
        config = AutoConfig.from_pretrained(str(path), **NO_CODE)
        raw = PreTrainedConfig.get_config_dict(str(path))[0]
        twice = _disagreement(Path(path))
    for name in ("attn_implementation", "experts_implementation"):
        kernel = next((str(k) for c in _configs(config) if (k := getattr(c, f"_{name}", None))), "eager")
        if why := _why_no_kernel(kernel.removeprefix("paged|"), name):
            key = name if f"_{name}" not in raw else f"_{name}"
            fix = f"remove {key} there, since rlkit chooses kernels itself"
            raise ValueError(f"model {str(path)!r}: config.json names the kernel {kernel!r}, {why}: {fix}")
    if twice:
        fault = f"has {SINGLE} and an index of other weights, {INDEX} ({twice} is in one of them)"
        raise ValueError(f"model {str(path)!r} {fault}: delete the one that is not meant, with its files")
    if getattr(config, "auto_map", None):
        _warn_once(_NOT_RUN.format(str(path), "model"))
    for key, near in _misspelt(config, raw):
        unread = f"{key}, which {type(config).__name__} does not read, and no {near}: is it misspelt?"
        _warn_once(f"{str(path)!r}: config.json has {unread}")
    return config


def _why_no_kernel(name: str, kind: str) -> str:
    """Why transformers cannot compute with a kernel that a config names; "" where it can."""
    if "/" in name:
        return "and rlkit runs no code of the hub"
    if name in ("eager", "sdpa"):
        return ""
    from transformers import modeling_utils as utils

    kernels: Any = utils.ALL_ATTENTION_FUNCTIONS if kind.startswith("attn") else utils.ALL_EXPERTS_FUNCTIONS
    if name not in kernels.valid_keys():
        return "which transformers does not have"
    flash = name.startswith("flash") and not any(map(find_spec, ("flash_attn", "flash_attn_interface")))
    return "which is not installed" if flash else ""


def _disagreement(folder: Path) -> str:
    """A weight that only one of model.safetensors and the index beside it has; "" where there are not both.

    transformers reads the first, and servers read the files of the index. Two that are whole are named once.
    """
    single, index = folder / SINGLE, folder / INDEX
    if not (single.is_file() and index.is_file()):
        return ""
    from safetensors import SafetensorError, safe_open

    with suppress(SafetensorError), safe_open(single, "np") as tensors:  # a damaged one is named where it is read
        files: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        parts = sorted(name for name in {*files.values()} - {SINGLE} if (folder / name).is_file())
        if files.keys() == {*tensors.keys()} and parts:
            fix = f"{SINGLE} is read, and {parts[0]} is not: delete the one that is not meant"
            _warn_once(f"model {str(folder)!r} has its weights twice, in {SINGLE} and in the files of {INDEX}; {fix}")
        return min({*tensors.keys()} ^ files.keys(), default="")
    return ""


def _misspelt(config: Any, raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys of config.json that its class does not read, each with the nearly equal one that is read and not there.

    Other keys are no news: those of other frameworks and of later versions are common, as are ids of further tokens
    and keys that all models once had.
    """
    from transformers import PreTrainedConfig

    kind: Any = type(config)
    fields = {*kind.__dataclass_fields__, *kind.attribute_map, *_OF_ROPE}
    lacking = fields - {*PreTrainedConfig.__dataclass_fields__} - raw.keys()
    for key in sorted(raw.keys() & vars(config).keys() - fields):
        near = get_close_matches(key, lacking, n=1, cutoff=0.9)
        if near and not hasattr(kind, key) and not re.search("_token_(id|index)$", key):
            yield key, near[0]
    for name in kind.sub_configs:
        if isinstance(raw.get(name), dict) and (inner := getattr(config, name, None)) is not None:
            yield from _misspelt(inner, raw[name])


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder or hub id, of an adapter without one that of its base model.

    ValueError for one that needs code of its own, or that is damaged.
    """
    from transformers import AutoTokenizer
    from transformers.utils.hub import cached_file

    if not (is_adapter(path) and (Path(path) / "tokenizer_config.json").is_file()):
        check_model_path(path)
        path = base_of(path)
    with explained(path, "tokenizer"):
        _check_tokenizer_files(path)
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path), **NO_CODE)
        with suppress(OSError):  # `rlkit.data.markup` looks for it beside the tokenizer
            cached_file(str(path), "generation_config.json")
        steps = _steps(tokenizer)
        growth = math.prod(max(1, len(step.get("content", ""))) for step in steps)  # of one character, at most
        if growth > 1000:  # "▁" for a blank is 1
            raise ValueError(f"its normalizer makes up to {growth:,} characters of one")
        tokenizer.deprecation_warnings[_TOO_LONG] = True  # the limits are the run's, and the model's positions
        empty = len(tokenizer) < 2 or not tokenizer.encode("hello", add_special_tokens=False)
    if empty:
        fault = "no tokenizer with a vocabulary: copy tokenizer.json and tokenizer_config.json of its base model there"
        raise ValueError(f"model {str(path)!r} has {fault}")
    if any(step.get("type") == "Lowercase" or step.get("lowercase") for step in steps):
        _warn_once(f"the tokenizer of {str(path)!r} writes all text in small letters, so that no answer has others")
    if _two_templates(Path(path)):
        read = "chat_template.jinja is read, and that of tokenizer_config.json is not: delete the one that is not meant"
        _warn_once(f"model {str(path)!r} has two chat templates that differ; {read}")
    if tokenizer.init_kwargs.get("auto_map"):
        _warn_once(_NOT_RUN.format(str(path), "tokenizer"))
    return tokenizer


def _steps(tokenizer: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's normalizer, as tokenizer.json has them."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    steps = json.loads(normalizer.__getstate__()) if normalizer is not None else {}
    return [steps, *steps.get("normalizers", ())]


def _two_templates(folder: Path) -> bool:
    """Whether a folder has a chat template of its own, and another one in tokenizer_config.json."""
    files = [folder / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    with suppress(OSError, ValueError, AttributeError):  # a damaged file is named where it is read
        own, other = files[0].read_text(encoding="utf-8"), json.loads(files[1].read_bytes()).get("chat_template")
        return isinstance(other, str) and own.strip() != other.strip()
    return False


@contextmanager
def explained(path: str | os.PathLike[str], part: str) -> Iterator[None]:
    """One line with the folder, and where it is damaged JSON with the file, for the errors of transformers."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)  # or it prints a line for each of its retries, before the error
    try:
        yield
    except untrusted.BadFile:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"model {str(path)!r} {_CODE.format(part)}") from None
        if damaged := _not_json(Path(path)):
            raise ValueError(f"{damaged} is damaged, it is not JSON: copy or download it again") from None
        if isinstance(error, OSError | ImportError):
            raise
        if part == "tokenizer" and model_file(path, "config.json"):
            load_config(path)  # transformers reads it for the tokenizer: the error may be its own
        text = " ".join(str(error).split())[:300]
        fix = {"tokenizer": "; copy or download tokenizer.json again", "config": "; correct config.json"}.get(part, "")
        fault = f"its {part} cannot be read: {type(error).__name__}: {text}{fix}"
        raise ValueError(f"model {str(path)!r}: {fault}") from error
    finally:
        hub.setLevel(level)


def _not_json(folder: Path) -> Path | None:
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            json.loads(untrusted.read(path, "tokenizer_mib"))
        except (ValueError, RecursionError):
            return path
    return None


@contextmanager
def building(path: str | os.PathLike[str]) -> Iterator[None]:
    """One line with the folder for what transformers raises in a model's class where its config has a wrong value."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        if type(error).__name__ == "OutOfMemoryError":  # of a GPU, which other flags mend
            raise
        fault, file = " ".join(f"{type(error).__name__}: {error}".split())[:300], Path(path) / "config.json"
        if isinstance(error, KeyError) and file.is_file() and (key := _key_of(untrusted.read_json(file), *error.args)):
            fault = f"{key} is {error.args[0]!r}, which transformers does not know"
        raise ValueError(f"model {str(path)!r}: no model can be built from its config.json: {fault}") from error


def _key_of(config: Any, value: Any) -> str | None:
    """The key of a config, or of an object in it, that has this value."""
    pairs = config.items() if isinstance(config, dict) else ()
    return next((f for key, x in pairs if (f := key if x == value else _key_of(x, value))), None)


def _check_config_files(path: str | os.PathLike[str]) -> None:
    """ValueError, with the file and the key, for values of which no model can be built, and for an index of weights
    that names other files than safetensors beside it."""
    rows: Any = None
    for name in ("config.json", "generation_config.json"):
        if (file := model_file(path, name)) is None:
            continue
        content = untrusted.read_json(file)
        if not isinstance(content, dict):
            raise untrusted.BadFile(f"{file} is damaged, it is no JSON object: copy or download it again")
        inner: Any = content.get("text_config")
        text = inner if isinstance(inner, dict) else {}
        for prefix, part in (("", content), ("text_config.", text)):
            for key, value in part.items():
                if (fault := _wrong(key, value)) is not None:
                    fault = f"{prefix}{key} {fault}, got {value!r:.80}"
                    raise untrusted.BadFile(f"{file}: {fault}: copy or download it again")
        rows = text.get("vocab_size") or content.get("vocab_size") or rows
        ends: Any = (name != "config.json" and content.get("eos_token_id")) or []
        for end in ends if isinstance(ends, list) else [ends]:
            if isinstance(rows, int) and not 0 <= end < rows:
                fault = f"is not one of the {rows} tokens of the vocabulary, and ends no answer"
                _warn_once(f"{file}: eos_token_id {end} {fault}")
    if Path(path).is_dir() and (index := Path(path) / INDEX).exists():
        content = untrusted.read_json(index)
        names, about = (content.get(x) if isinstance(content, dict) else None for x in ("weight_map", "metadata"))
        if not isinstance(names, dict):
            raise untrusted.BadFile(f"{index} has no weight_map: copy or download it again")
        for tensor, name in names.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                fault = f"weight_map: {tensor} is in {name!r:.80}, which is no file of safetensors beside it"
                raise untrusted.BadFile(f"{index}: {fault}")
            if (file := Path(path) / name).exists():  # a missing one is named where it is read
                untrusted.check_file(file)
        if not isinstance(about, dict) and not (Path(path) / SINGLE).is_file():  # transformers needs it
            raise untrusted.BadFile(f"{index} has no metadata: copy or download it again")


def _wrong(key: str, value: Any) -> str | None:
    """What is wrong with a value of a config; None for nothing, and for a key that is not known."""
    if key in _TOKENS and value is not None:
        ids = value if isinstance(value, list) else [value]
        return None if all(type(i) is int for i in ids) else "must be a token, or a list of tokens"
    if key not in _SIZES or value is None or isinstance(value, list):  # some models have one for each layer
        return None
    low, high = _SIZES[key]
    fine = isinstance(value, int | float) and low <= value <= high
    return None if fine else f"must be a number from {low:,} to {high:,}"


def _check_tokenizer_files(path: str | os.PathLike[str]) -> None:
    """ValueError, with the file, for a tokenizer that is too large to be read, or nested too deeply."""
    for name in ("tokenizer_config.json", "tokenizer.json", "added_tokens.json"):
        if (file := model_file(path, name)) is None:
            continue
        data = untrusted.read(file, "tokenizer_mib")
        num = data.count(b"\n" if name == "added_tokens.json" else b'"content"')
        if num > untrusted.limit("tokens"):
            raise untrusted.too_much(file, f"it adds about {num:,} tokens", "tokens")
        if name != "tokenizer.json":  # which `tokenizers` reads, with a limit of depth
            untrusted.parsed(file, data)


def _configs(config: Any) -> Iterator[Any]:
    """The config and those inside it."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)
