"""The checkpoint that a model was read from: weights that its class leaves out, their dtypes, and what its config says.

transformers skips weights that a class has no place for: multi-token prediction (`mtp.*` of Qwen3-Next and Qwen3.5, the
layer past the last one of DeepSeek-V3 and GLM-4.5), old buffers. They do not train; an export has them as they were, so
that a server still finds what config.json promises.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit._util.files import weight_files
from rlkit._util.ranks import is_first

log = logging.getLogger("rlkit.model")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")


class Stored(NamedTuple):
    """A tensor of a checkpoint: its file, the dtype as safetensors names it, its shape and size in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def stored(path: str | Path) -> dict[str, Stored]:
    """The tensors of the `weight_files` of a folder or a downloaded hub id; {} where there are none (any more)."""
    from safetensors import SafetensorError, safe_open

    headers: dict[str, Stored] = {}
    for file in weight_files(_folder(path)):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    shape, kind = tuple(part.get_shape()), part.get_dtype()
                    size = int(re.search(r"\d*$", kind.partition("_")[0])[0] or 8)  # type: ignore[index]
                    headers[name] = Stored(file, kind, shape, torch.Size(shape).numel() * max(1, size // 8))
        except (OSError, SafetensorError):
            return {}
    return headers


def check_sizes(path: str | os.PathLike[str], config: Any) -> None:
    """ValueError where a config asks for far more numbers than its weights have (transformers draws the rest), and for
    weights in 8-bit floats or integers, which it would read without their scales."""
    tensors = stored(Path(path) if Path(path).is_dir() else str(path))
    odd = {
        n: x.dtype for n, x in tensors.items() if x.dtype not in DTYPES and (n.endswith("weight") or "F8" in x.dtype)
    }
    dtype = next((f"{name} is {dtype}" for name, dtype in odd.items()), "")
    if dtype and getattr(config, "quantization_config", None) is None:
        fix = "load the bf16 or fp32 checkpoint instead"
        raise ValueError(f"model {str(path)!r}: {dtype}, quantized, and config.json has no quantization_config: {fix}")
    num = 2 * sum(x.nbytes for x in tensors.values())  # of 4 bits
    config = config.get_text_config()
    sizes: dict[str, Any] = {
        name: getattr(config, name, None) for name in ("vocab_size", "num_hidden_layers", "hidden_size")
    }
    if not num or not all(isinstance(x, int) for x in sizes.values()):
        return
    vocab, layers, hidden = sizes.values()
    for name, wanted in (("vocab_size", vocab * hidden), ("num_hidden_layers", layers * hidden * hidden)):
        if wanted > 16 * num:
            text = f"{name} {sizes[name]:,} with hidden_size {hidden:,} is more than its files have, {num // 2:,} bytes"
            raise ValueError(f"model {str(path)!r}: config.json: {text}: copy or download it again")


def check_names(path: str | os.PathLike[str], missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """ValueError, with the reason, for a checkpoint that lacks weights of layers, or has them under other names."""
    lacking, others, wanted = sorted(missing), sorted(unexpected), {*missing}
    if not any(re.search(r"\.\d+\.", name) for name in lacking):
        return
    tails_of = lambda name: (name[dot.end() :] for dot in re.finditer(r"\.", name))  # noqa: E731
    tails = {name: next((tail for tail in tails_of(name) if tail in wanted), "") for name in others}
    why = f"{len(lacking)} of them; is a file missing, or of another model? copy or download it again"
    if prefixed := next((name for name in others if tails[name]), ""):
        prefix = prefixed.removesuffix(tails[prefixed])
        why = f"which its files call {prefixed}: save them without the prefix {prefix!r}"
    elif others and not any("." in name for name in others):
        why = f"its file has a dict of {', '.join(others[:3])} in place of weights: save the inner dict alone"
    raise ValueError(f"model {str(path)!r} has no weights for {lacking[0]}, {why}")


def _folder(path: str | Path) -> Path:
    if Path(path).is_dir() or str(path).count("/") != 1:
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return Path(path)


def class_of(model: Any) -> Any:
    """The class of transformers of a model, also of one that is cut over ranks: FSDP2 makes a subclass."""
    from torch.distributed.fsdp import FSDPModule

    return next(c for c in type(vars(model).get("_model", model)).__mro__ if not issubclass(c, FSDPModule))


class Source(NamedTuple):
    """What an export takes from the checkpoint `path` that the model was read from.

    Attributes:
        tensors: all of its tensors; {} where it is gone, or has no safetensors.
        left: names of those that the model's class has no place for.
    """

    path: str
    tensors: Mapping[str, Stored] = {}
    left: tuple[str, ...] = ()

    @property
    def in_fp8(self) -> bool:
        """Whether some of its weights are 8-bit floats, with scales beside them (`rlkit.model.fp8`)."""
        return any(x.dtype.startswith("F8") for x in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of most of its numbers."""
        sizes: dict[str, int] = {}
        for name, x in self.tensors.items():
            if x.dtype in DTYPES and name not in self.left:
                sizes[x.dtype] = sizes.get(x.dtype, 0) + x.nbytes
        return DTYPES[max(sizes, key=lambda kind: sizes[kind])] if sizes else None

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The dtype of a weight there; that of most for a name that it lacks."""
        x = self.tensors.get(name)
        return DTYPES[x.dtype] if x is not None and x.dtype in DTYPES else self.dtype

    def carried(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of `left`, one after the other."""
        from safetensors import safe_open

        for name in self.left:
            with safe_open(self.tensors[name].file, "pt") as tensors:
                yield name, tensors.get_tensor(name)

    @property
    def carried_bytes(self) -> int:
        """The size of `carried`."""
        return sum(self.tensors[name].nbytes for name in self.left)


def source_of(model: Any) -> Source:
    """The checkpoint of a model, by its config. A model with one number per token (`score`) carries nothing on: its
    other weights are those of the policy's head. Nor does an FP8 checkpoint, of which an export has no codes.

    Cost: where the names of the checkpoint are not all the model's own, its class is built on the meta device.
    """
    path = str(getattr(model.config, "name_or_path", "") or "")
    tensors = stored(path) if path else {}
    if Path(path).is_absolute() and not tensors and is_first() and not Path(path).exists():
        log.warning("%s is gone: exports are in fp32, without tensors there that had no place in the model", path)
    if not tensors or hasattr(model, "score") or Source(path, tensors).in_fp8:  # as are its layers of prediction
        return Source(path, tensors)
    left = _left(class_of(model), model.config, tensors)
    if model.config.get_text_config().vocab_size != (rows := _rows(tensors)) and rows:  # copies of a smaller embedding
        left = [name for name in left if tensors[name].shape[:1] != (rows,)]
    return Source(path, tensors, tuple(left))


def _rows(tensors: Mapping[str, Stored]) -> int:
    return next((x.shape[0] for name, x in tensors.items() if re.search(r"(embed_tokens|wte)\.weight$", name)), 0)


def _left(kind: Any, config: Any, names: Iterable[str]) -> list[str]:
    """The names of a checkpoint that a model of class `kind` does not read, as transformers renames them."""
    with torch.device("meta"):
        empty = kind._from_config(copy.deepcopy(config), dtype=torch.float32)
    state = empty.state_dict()
    return sorted(name for name, as_read in _as_read(empty, state, names).items() if not {name, as_read} & state.keys())


def _as_read(model: Any, state: Any, names: Iterable[str]) -> dict[str, str]:
    """The names of a checkpoint, each with that in the model, whose state is `state`: GPT-NeoX's files call the head
    `embed_out`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [x for x in mapping if isinstance(x, WeightRenaming)]
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    prefix = model.base_model_prefix
    return {name: rename_source_key(name, renamings, converters, prefix, state)[0] for name in names}


def untie(config: Any, *, equal: bool, path: Any) -> None:
    """Let the config say that head and embedding are two matrices, where it ties those of the files that differ."""
    parts = [part for part in (config, config.get_text_config()) if getattr(part, "tie_word_embeddings", False)]
    if equal or not parts:
        return
    for part in parts:
        part.tie_word_embeddings = False
    if is_first():
        log.warning("model %r: config.json ties head and embedding, which differ in its files: both train", str(path))


def same_tensors(path: str | Path, one: str, other: str) -> bool:
    """Whether the files of a model lack one of two tensors, or have the same numbers in both."""
    from safetensors import safe_open

    tensors = stored(path)
    if one not in tensors or other not in tensors:
        return True
    with safe_open(tensors[one].file, "pt") as a, safe_open(tensors[other].file, "pt") as b:
        return torch.equal(a.get_tensor(one), b.get_tensor(other))


def said_of(source: Source, config: Any) -> str:
    """One line about the weights that do not train, or that config.json promises and the checkpoint lacks; "" where
    all are read."""
    text = config.get_text_config()
    if source.left:
        first = ", ".join(source.left[:2]) + ", ..." * (len(source.left) > 2)
        fault = f"{len(source.left)} tensors of {source.path} ({first}) have no place in the model"
        return f"{fault}: they do not train, and exports have them unchanged{_beyond(source.left, text)}"
    keys = [name for name in _PREDICTION if getattr(text, name, 0) and not _predicts(source.tensors, text)]
    if keys and source.path:
        return f"config.json has {keys[0]}, and no weights of it are there or can be carried on: exports have 0"
    return ""


def _beyond(left: Iterable[str], text: Any) -> str:
    """A question about decoder layers that the files have beyond those of config.json; "" for those that predict."""
    last = getattr(text, "num_hidden_layers", None) or 1 << 30
    found = (re.search(r"\b(?:language_)?model\.layers\.(\d+)\.", name) for name in left)
    more = sorted({int(match[1]) for match in found if match and int(match[1]) >= last})
    if not more or any(getattr(text, name, 0) for name in _PREDICTION):
        return ""
    return f"; config.json has num_hidden_layers {last}, and layer {more[0]} of the files is beyond: is it meant?"


def _predicts(names: Iterable[str], text: Any) -> bool:
    """Whether some names are those of layers of multi-token prediction."""
    last = getattr(text, "num_hidden_layers", None) or 1 << 30
    matches = (re.search(r"\blayers\.(\d+)\.|mtp|nextn", name) for name in names)
    return any(match is not None and (match[1] is None or int(match[1]) >= last) for match in matches)


def corrected(config: dict[str, Any], source: Source, model: Any, written: Mapping[str, torch.Size]) -> dict[str, Any]:
    """The `config` of an export with the keys that contradict its weights (`written`: name -> shape) corrected; each is
    logged: tied embeddings, the vocabulary, the number of layers, and layers of prediction that it does not have."""
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    facts = dict(_facts(model, written))
    if not _predicts([*source.left, *written], model.config.get_text_config()):
        facts |= {name: 0 for name in _PREDICTION if text.get(name)}
    for name, value in facts.items():
        parts = [part for part in ((config, text) if name == "tie_word_embeddings" else (text,)) if name in part]
        if parts and all(part[name] != value for part in parts):  # of some vision models only one of both counts
            log.warning("the export's config.json has %s %s (it was %s), like its weights", name, value, parts[0][name])
            parts[0][name] = value
    layers, kinds = text.get("num_hidden_layers"), text.get("layer_types")
    if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) > layers:
        text["layer_types"] = kinds[:layers]
    return config


def _facts(model: Any, written: Mapping[str, torch.Size]) -> Iterator[tuple[str, Any]]:
    """What the weights of an export say of its config."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    embedded = f"{names.get(id(embedding), 'model.embed_tokens')}.weight"
    if head is not None and hasattr(head, "weight") and embedded in written:
        headed = f"{names.get(id(head), 'lm_head')}.weight"
        plain = vars(model).get("_model", model)
        there = headed in written or headed in _as_read(plain, plain.state_dict(), written).values()
        yield "tie_word_embeddings", not there
    if embedded in written and written[embedded][0] == len(getattr(head, "weight", embedding.weight)):
        yield "vocab_size", written[embedded][0]  # an embedding may have a row more than there are words (Moshi)
    layers = getattr(getattr(model.base_model, "language_model", model.base_model), "layers", None)
    if isinstance(layers, torch.nn.ModuleList):
        yield "num_hidden_layers", len(layers)
