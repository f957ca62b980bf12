"""Which model types can be trained packed: some are refused by name, every other architecture is checked.

`check_family(config)` reads only the config. `check_architecture(config)` also builds a small copy of the model (few
and narrow layers, but each kind of layer and every option that changes the mathematics) with large random weights, and
compares its packed log-probs with its own forward, one sequence at a time. This takes a fraction of a second, once per
architecture: the verdict is cached in `$XDG_CACHE_HOME/rlkit/checked` (default `~/.cache`). docs/models.md lists the
verdict for every model type of transformers.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rlkit
from rlkit._tensors import readable
from rlkit.files import cache_folder, replace_file
from rlkit.model.pretrained import NO_CODE
from rlkit.packing import pack
from rlkit.parallel.attention import IMPLEMENTATION, as_inference, register
from rlkit.types import Batch, LogProbs, Trajectory

logger = logging.getLogger(__name__)
PackedForward = Callable[[Any, Batch], LogProbs]

LAYER_TYPES = ("full_attention", "sliding_attention")
TOLERANCE = 1e-4  # of a log-prob, in nats
NOT_CAUSAL = "its attention is not causal"
_MAX_SIZE = 30_000_000  # parameters of a small copy: a second on a CPU
_LEGACY = {"attention": "full_attention"}
_RECURRENT = ("rwkv", "xlstm")  # they have no `layer_types`
_LOGIT_SCALE = {  # model type -> (attribute, power): its logits are those of the head times attribute ** power
    "cohere": ("logit_scale", 1),
    "cohere2": ("logit_scale", 1),
    "cohere2_moe": ("logit_scale", 1),
    "granite": ("logits_scaling", -1),
    "granitemoe": ("logits_scaling", -1),
    "granitemoeshared": ("logits_scaling", -1),
    "hyperclovax": ("logits_scaling", 1),
}
_SCALES = (
    r"(_scale_inv|(weight|input)_(scale|zero_point|packed)|[._](scales|qweight|qzeros|g_idx|blocks)|absmax|quant_map)$"
)
_proven: set[str] = set()
VOCAB, WINDOW, SOFTCAP, HEAD_DIM = 64, 4, 2.0, 16
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "decoder_num_key_value_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_CAPS = {  # (pattern of the name, largest value of the small config)
    r"vocab_size.*|n_words": VOCAB,
    r".*(intermediate|ffn|inner|feed_forward|mlp)_?(size|dim|hidden_size).*|n_inner": 32,
    r"(n|num|moe_num)_(local_|routed_)?experts": 4,
    r".*experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|n_group|num_expert_group": 2,
    r".*shared_experts|topk_group": 1,
    r"[HL](_bp)?_cycles": 1,  # each runs the layers once more, and multiplies the rounding
    r"rotary_dim": 8,
    r"hidden_size_per_layer_input": 16,
    r"sliding_window|(local_)?attention_window(_size)?|window_size|attention_chunk_size": WINDOW,
    r"attn_logit_softcapping|final_logit_softcapping|attn_logit_cap|logits_soft_cap": SOFTCAP,
}


def shrunk(config: Any) -> Any:
    """A small config of the same architecture, for a model that is built and run in a fraction of a second.

    Widths, heads, vocabulary, experts and layers shrink, but keep the ratios that model code depends on: multi-head,
    grouped-query or multi-query attention, and whether the heads fill the hidden size. Windows become shorter than the
    test sequences, and softcaps small enough to change the logits. One layer of each kind remains, at least two in all.
    """
    return type(config).from_dict(_shrunk(config.to_dict()))


def _shrunk(old: dict[str, Any]) -> dict[str, Any]:
    """`shrunk` for a config's dictionary and the configs nested in it."""
    new = {k: _shrunk(v) if isinstance(v, dict) and "model_type" in v else v for k, v in copy.deepcopy(old).items()}
    _narrow(new)
    _shorten(new)
    for name, x in new.items():
        if name.endswith(("_token_id", "_token_index")):
            big = max(x) if isinstance(x, list) and x else x
            new[name] = 0 if isinstance(big, int) and big >= VOCAB else x
        else:
            for cap in (cap for pattern, cap in _CAPS.items() if re.fullmatch(pattern, name)):
                new[name] = [_capped(y, cap) for y in x] if isinstance(x, list) else _capped(x, cap)
    return new


def _capped(x: Any, cap: float) -> Any:
    return min(x, cap) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


def _narrow(config: dict[str, Any]) -> None:
    """Shrink heads and widths."""
    heads, kv, width = (next((n for n in names if config.get(n)), None) for names in (_HEADS, _KV_HEADS, _WIDTHS))
    if heads is None or width is None or not isinstance(config[heads], int):
        return
    num_heads = config[heads]
    num_kv = config[kv] if kv is not None else num_heads
    head_dim = config.get("head_dim") or config[width] // num_heads
    filled = config[width] == num_heads * head_dim
    small_kv = min(num_kv, 2)
    small = 4 if num_kv == num_heads else 2 * small_kv
    config |= {n: small for n in _HEADS if config.get(n)}
    config |= {n: small if num_kv == num_heads else small_kv for n in _KV_HEADS if config.get(n)}
    config |= {n: HEAD_DIM for n in ("head_dim", "attention_head_size", "global_head_dim") if config.get(n)}
    config |= {n: small * HEAD_DIM + (0 if filled else HEAD_DIM) for n in _WIDTHS if config.get(n)}
    for rope in _ropes(config):
        if section := rope.get("mrope_section"):
            rope["mrope_section"] = [HEAD_DIM // 2 * n // sum(section) for n in section]
        for name in ("short_factor", "long_factor"):
            if isinstance(x := rope.get(name), list):
                rope[name] = x[:: max(1, head_dim // HEAD_DIM)][: len(x) * HEAD_DIM // head_dim]


def _ropes(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of rotary positions: one, or one per layer type."""
    found = [x for x in (config.get("rope_parameters"), config.get("rope_scaling")) if isinstance(x, dict)]
    return [config, *found, *(x for rope in found for x in rope.values() if isinstance(x, dict))]


def _shorten(config: dict[str, Any]) -> None:
    """Keep the first layer of each kind, where kinds differ in the config's lists with one entry per layer."""
    count = next((config[n] for n in _LAYERS if isinstance(config.get(n), int)), 0)
    if count <= 2:
        return
    lists = {n: x for n, x in config.items() if isinstance(x, list) and len(x) == count}
    shared = config.get("num_kv_shared_layers") or 0  # the last layers use keys and values of earlier ones
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([i >= count - shared, *(x[i] for x in lists.values())]), i)
    kept = sorted(kinds.values()) if len(kinds) < 9 else [*range(8)]
    step = max([1, *(config.get(n) or 1 for n in ("decoder_sparse_step", "moe_layer_interval"))])
    size = max(2, len(kept), step)
    kept = sorted({*kept, *[i for i in range(count) if i not in kept][: size - len(kept)]})
    config |= {n: [x[i] for i in kept] for n, x in lists.items()}
    config |= {n: size for n in _LAYERS if isinstance(config.get(n), int)}
    config |= {"num_kv_shared_layers": sum(i >= count - shared for i in kept)} if shared else {}
    for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        if isinstance(config.get(name), int):
            config[name] = size if config[name] >= count else min(config[name], 1)
    if isinstance(config.get("moe_layer_end_index"), int):
        config["moe_layer_end_index"] = size - 1
    if config.get("mlp_only_layers"):
        config["mlp_only_layers"] = [0]


def check_family(config: Any) -> None:
    """Refuse a model type by its config, before anything is built.

    Errors: ValueError naming the model type and the reason.
    """
    if (reason := _why_refused(config)) is not None:
        raise _refusal(config, reason)
    check_unquantized(config)


def check_causal_lm(config: Any) -> None:
    """`check_family`; also refuses a config without a class in `AutoModelForCausalLM`.

    Errors: ValueError.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(config, "transformers has no causal language model of this type")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class.config_class not in (None, *MODEL_FOR_CAUSAL_LM_MAPPING):
        saved = model_class.config_class.model_type
        raise _refusal(config, f"an export would be of type {saved!r}, which AutoModelForCausalLM cannot read")
    check_family(config)


def check_unquantized(config: Any) -> None:
    """Refuse quantized weights: they would train as copies in fp32, which an export writes back as codes.

    Errors: ValueError naming the model and the method.
    """
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None) or getattr(part, "compression_config", None)
        if found:
            fields = found if isinstance(found, dict) else found.to_dict()
            method = fields.get("quant_method") or "quantized"
            raise ValueError(
                f"model {config.name_or_path!r} has {getattr(method, 'value', method)} weights: rlkit trains no "
                "quantized weights, load the bf16 or fp32 checkpoint of the same model"
            )


def check_leftover(path: Any, names: Iterable[str]) -> None:
    """Refuse tensors of a checkpoint that the model does not read, if they are the scales of quantized weights."""
    if scales := sorted(name for name in names if re.search(_SCALES, name)):
        raise ValueError(
            f"model {str(path)!r} has {len(scales)} tensors of quantized weights ({scales[0]}), and its config does "
            "not say how to read them: load the bf16 or fp32 checkpoint of the same model"
        )


def check_architecture(config: Any, forward: PackedForward, *, model_class: Any = None) -> bool:
    """Refuse an architecture whose packed log-probs differ from its own forward; returns whether it was checked.

    The check runs a small copy of the model on the CPU in fp32, with weights of standard deviation 0.2: at least two
    layers, one of each kind, and windows shorter than the sequences. False: no small copy can be built and run.

    Args:
        forward: `rlkit.model.forward.forward`, which is what is checked (an argument, since it imports this module).
        model_class: a `PreTrainedModel` with a language-model head; by default that of `AutoModelForCausalLM`.

    Errors: ValueError.
    """
    check_family(config)
    try:
        small = shrunk(config)
        key = _key(small, model_class)
    except Exception as error:
        logger.debug("no small config of %s: %r", config.model_type, error)
        return False
    if key in _proven or _file(key).is_file():
        return True
    with _quiet():
        built = _built(small, model_class)
        if built is None:
            return False
        reason = why_different(*built, forward)
    if reason is not None:
        raise _refusal(config, reason)
    _remember(key, config)
    return True


def check_is_model(model: Any, name: str = "model") -> None:
    """Refuse a path, a `Policy`, an iterator of parameters, None: TypeError with what to pass instead."""
    if isinstance(model, str | os.PathLike):
        raise TypeError(f"{name} is a path: give load_model({str(model)!r})")
    if not isinstance(model, nn.Module) and isinstance(getattr(model, "model", None), nn.Module):
        raise TypeError(f"{name} is a {type(model).__name__}: give its model, {name}.model")
    if not callable(model):
        raise TypeError(f"{name} must be a model, e.g. load_model(path), got a {type(model).__name__}")


def check_prompt_ids(ids: Tensor, model: Any, name: str = "prompt_ids") -> None:
    """Each id has a row in the model's embedding (values: on the CPU): ValueError with the id and the range."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embedding, "num_embeddings", None)
    if size is None or not ids.numel() or not readable(ids):
        return
    low, high = map(int, ids.aminmax())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(f"{name} must be in [0, {size}), the model's vocabulary, got {wrong}: is this its tokenizer?")


def check_loaded(model: Any, forward: PackedForward) -> None:
    """Refuse a model that cannot be trained packed: `check_architecture`, else the same check at full size.

    Errors: ValueError.
    """
    has_head = model.get_output_embeddings() is not None
    if check_architecture(model.config, forward, model_class=type(model) if has_head else None):
        return
    warn_full_size(model.config)
    if not has_head or model.device.type == "meta":  # `rlkit.model.heads` checks heads; meta has no weights
        return
    groups = probe(model.config.get_text_config().vocab_size)
    try:
        own = own_log_probs(model, groups)
    except Exception as error:
        raise _refusal(model.config, f"its own forward fails on plain text: {_first_line(error)}") from error
    if (reason := why_different(model, groups, own, forward)) is not None:
        raise _refusal(model.config, reason)


def warn_full_size(config: Any) -> None:
    """Warn that the model is checked at full size, since no small copy can be built."""
    logger.warning(
        "no small copy of model type %r can be built: it is checked at full size, with its own weights, which may be "
        "too small to show an error",
        config.model_type,
    )


def logit_scale(config: Any) -> float:
    """The factor of a model's logits over the product of hidden states and head: 1 for most, 1/16 for Cohere."""
    name, power = _LOGIT_SCALE.get(config.model_type, (None, 1))
    return 1.0 if name is None else float(getattr(config, name)) ** power


def longest_sequence(config: Any) -> int | None:
    """The maximum number of tokens of a packed sequence; None: no limit.

    Rotary frequencies of type "dynamic" and "longrope" depend on the longest sequence of the whole pack.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limits = []
    for kind in [x for x in rope.values() if isinstance(x, dict)] or [rope]:  # one, or one per layer type
        if "dynamic" in (name := kind.get("rope_type") or ""):
            limits.append(text.max_position_embeddings)
        elif name == "longrope":
            limits.append(kind.get("original_max_position_embeddings") or text.max_position_embeddings)
    return min(limits, default=None)


def _why_refused(config: Any) -> str | None:
    try:
        text = config.get_text_config()
    except ValueError:
        return "it has several text models"
    kind = text.model_type
    if kind.startswith("gemma4"):
        return "its layers differ in head dimension and share keys and values, which is not supported"
    layers = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    kinds = sorted({_LEGACY.get(x, x) for x in layers} - set(LAYER_TYPES))
    if kinds or kind in _RECURRENT:
        names = " and ".join(map(repr, kinds or ["recurrent"]))
        return f"layer type {names} is not supported, only {' and '.join(LAYER_TYPES)}"
    value_dim = getattr(text, "v_head_dim", None)
    key_dim = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None)
    if hasattr(text, "qk_nope_head_dim"):
        key_dim = text.qk_nope_head_dim + text.qk_rope_head_dim
    if value_dim is not None and key_dim is not None and value_dim != key_dim:
        what = "multi-head latent attention (MLA)" if hasattr(text, "kv_lora_rank") else "attention"
        return f"{what} with values of {value_dim} and keys of {key_dim} dimensions per head is not supported"
    return None


def why_different(
    model: Any, groups: Sequence[Sequence[Trajectory]], own: Tensor, forward: PackedForward
) -> str | None:
    """The reason why the packed log-probs of `groups` differ from `own` (see `own_log_probs`), or None."""
    for share in (True, False):
        batch = pack(groups, share_prompts=share).to(model.device)
        try:
            with torch.no_grad():
                packed = forward(model, batch).logp[batch.mask]
        except Exception as error:
            if "attention_plan is missing" in str(error):
                return "its layers do not pass the attention plan on"
            return _known_cause(model) or _first_line(error)
        if not (off := (packed - own).abs().max().item()) < TOLERANCE:
            return _known_cause(model) or f"its packed log-probs differ from its own forward by {off:.2g} nats"
    return None


def _first_nan(model: Any) -> str:
    """Which parameter holds NaN, and the fix."""
    name = next((name for name, p in model.named_parameters() if p.isnan().any()), None)
    return f"its weights are damaged, {name} holds NaN: copy or download it again" if name else "its weights overflow"


@torch.no_grad()
def is_causal(model: Any, num_tokens: int = 8) -> bool:
    """Whether the logits of a token stay the same when the token after it changes, tried on `num_tokens` tokens."""
    ids = torch.arange(3, 3 + num_tokens, device=model.device)[None] % model.config.get_text_config().vocab_size
    other = torch.cat((ids[:, :-1], ids[:, :1]), 1)
    with as_inference(model):
        a, b = (model(input_ids=x, use_cache=False).logits[:, :-1].float() for x in (ids, other))
    if a.isnan().any():
        raise ValueError(f"{type(model).__name__} computes NaN: {_first_nan(model)}")
    tolerance = max(TOLERANCE, 8 * torch.finfo(model.dtype).eps * float(a.abs().max()) if a.numel() else 0.0)
    return bool(torch.allclose(a, b, atol=tolerance))


@torch.no_grad()
def _known_cause(model: Any) -> str | None:
    """The first known cause of a difference that the model has, for the error message."""
    body, head = model.base_model, model.get_output_embeddings()
    if body.config.get_text_config()._attn_implementation != IMPLEMENTATION:
        return "its attention is not transformers' AttentionInterface (it may have ALiBi or relative positions)"
    if body is model:
        return "its decoder cannot be run without the head"
    if "position_ids" not in signature(body.forward).parameters:
        return "its decoder takes no position_ids, so a packed sequence would not start at position 0"
    ids = torch.arange(3, 11, device=model.device)[None] % model.config.get_text_config().vocab_size
    with as_inference(model), suppress(Exception):
        if not is_causal(model):
            return NOT_CAUSAL
        a = model(input_ids=ids, use_cache=False).logits
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state
        logits = head(hidden) * logit_scale(model.config) if hidden.shape[-1] == head.weight.shape[1] else None
        cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        logits = logits if logits is None or cap is None else cap * (logits / cap).tanh()
        if logits is None or not torch.allclose(logits, a, atol=TOLERANCE):
            return "its logits are not the product of the last hidden states and one matrix"
    return None


@torch.no_grad()
def own_log_probs(model: Any, groups: Sequence[Sequence[Trajectory]]) -> Tensor:
    """Log-probs of the completions by the model's own forward in transformers' eager attention, one sequence at a time.

    Afterwards the model is set to packed attention, if it supports that.
    """
    model.set_attn_implementation(register())
    out = []
    with as_inference(model):
        for t in (t for group in groups for t in group):
            ids = torch.tensor([[*t.prompt_ids, *t.ids]], device=model.device)
            logp = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
            places = slice(len(t.prompt_ids) - 1, ids.shape[1] - 1)
            out.append(logp[places].gather(1, ids[0, len(t.prompt_ids) :, None])[:, 0])
    return torch.cat(out)


def probe(vocab_size: int) -> list[list[Trajectory]]:
    """Six sequences of unequal lengths in three groups; the shortest is one token and its target."""
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:  # the first ids are often special
        return torch.randint(min(3, vocab_size - 1), min(vocab_size, VOCAB), (n,), generator=generator).tolist()

    groups = []
    for prompt_len, lens in ((5, (7, 1, 3)), (1, (1, 12)), (9, (4,))):
        prompt = draw(prompt_len)
        groups.append([Trajectory(prompt, draw(n), [True] * n, [0.0] * n, [0] * n) for n in lens])
    return groups


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _refusal(config: Any, reason: str) -> ValueError:
    return ValueError(f"model type {config.model_type!r} cannot be trained: {reason}")


@torch.no_grad()
def _built(config: Any, model_class: Any) -> tuple[Any, list[list[Trajectory]], Tensor] | None:
    """A model of this config with random weights, the test sequences, and its own log-probs of them."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from_config: Any = AutoModelForCausalLM.from_config
    make = partial(from_config, **NO_CODE) if model_class is None else model_class._from_config
    groups = probe(VOCAB)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(0)
            with torch.device("meta"):
                size = make(config, dtype=torch.float32).num_parameters()
            if size > _MAX_SIZE:
                raise ValueError(f"it has {size} parameters")
            model = make(config, dtype=torch.float32).eval()
            for p in model.parameters():
                p.normal_(std=0.2) if p.ndim > 1 else p.add_(0.2 * torch.randn_like(p))
            return model, groups, own_log_probs(model, groups)
    except Exception as error:
        logger.debug("no small copy of %s: %r", config.model_type, error)
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings, which are about the small copy and not about the user's model."""
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity()
    theirs.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(before)


def _key(config: Any, model_class: Any) -> str:
    """The key of a verdict: a hash of the small config, the model class, and the code that is compared."""
    import transformers

    kept = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    name = "" if model_class is None else f"{model_class.__module__}.{model_class.__qualname__}"
    versions = (torch.__version__, transformers.__version__, rlkit.__version__, _source())
    return sha256(json.dumps([kept, name, versions], sort_keys=True, default=str).encode()).hexdigest()


@cache
def _source() -> int:
    """A checksum of this package's code, which may change within a version."""
    value = 0
    for path in sorted(Path(__file__).parent.glob("*.py")):
        value = zlib.crc32(path.read_bytes(), value)
    return value


def _file(key: str) -> Path:
    return cache_folder() / "checked" / f"{key}.json"


def _remember(key: str, config: Any) -> None:
    """Cache the verdict, in this process and, where possible, on the disk."""
    _proven.add(key)
    with suppress(OSError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        replace_file(_file(key), json.dumps({"model_type": config.model_type, "packed": "equal"}).encode())
