"""How a model type is trained: packed, or unpacked by its own forward on padded rows; what is not causal is refused.

`check_architecture(config)` builds a small copy of the model (few and narrow layers, but each kind of layer and every
option that changes the mathematics) with large random weights, and compares its packed log-probs with its own forward,
one sequence at a time; where they differ, also its unpacked log-probs (`rlkit.model.unpacked`). This takes a second,
once per architecture: the verdict is cached in `$XDG_CACHE_HOME/rlkit/checked` (default `~/.cache`). docs/models.md
lists the verdict for every model type of transformers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rlkit
from rlkit._util.files import cache_folder, replace_file
from rlkit._util.tensors import readable
from rlkit.model.fp8 import unquantized
from rlkit.model.pretrained import NO_CODE, only_errors
from rlkit.model.recurrent import TOLL, recurrent_layers, unwrap, wrap
from rlkit.model.routing import unwrap_routers, wrap_routers
from rlkit.model.sharding import mesh_of
from rlkit.model.small_copy import VOCAB, shrunk
from rlkit.model.vision import Noise, auto_class, image_inputs, reads_images, token_types
from rlkit.packing import pack
from rlkit.parallel.attention import IMPLEMENTATION, as_inference, register, set_attention
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
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), ("logit_scale", 1)),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"), ("logits_scaling", -1)),
    "falcon_h1": ("lm_head_multiplier", 1), "hyperclovax": ("logits_scaling", 1), "minicpm3": ("logits_scaling", -1),
}  # fmt: skip
_SCALES = (
    r"(_scale_inv|(weight|input)_(scale|zero_point|packed)|[._](scales|qweight|qzeros|g_idx|blocks)|absmax|quant_map)$"
)
_proven: dict[str, Verdict] = {}
_no_images: dict[type, str] = {}  # classes of decoders -> why they are not trained on images
_unpacked: dict[type, bool] = {}  # classes of decoders that run unpacked -> whether only their model's logits are right


class Verdict(NamedTuple):
    """How a model type is trained.

    Attributes:
        packed: whether it is packed, with recurrent layers that `replay` prompts where they ignore a given state.
        reason: why it is not, and whether its log-probs come from its `logits`, which are not one head's.
        images: why it is not trained on images, "" where it is or reads none.
    """

    packed: bool
    reason: str = ""
    logits: bool = False
    replay: bool = False
    images: str = ""


def check_causal_lm(config: Any) -> None:
    """Refuse a model type by its config, before anything is built: one without a class in `AutoModelForCausalLM`, one
    whose export it cannot read, and quantized weights but those of `rlkit.model.fp8`.

    Errors: ValueError naming the model type and the reason.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = unquantized(config)
    if reads_images(config):
        check_unquantized(config)
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(config, "transformers has no causal language model of this type")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    exported = model_class.config_class
    if exported is not None and exported not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = f"an export would be of type {exported.model_type!r}, which AutoModelForCausalLM cannot read"
        raise _refusal(config, what)
    check_unquantized(config)


def check_unquantized(config: Any) -> None:
    """Refuse quantized weights: they would train as copies in fp32, which an export writes back as codes.

    Errors: ValueError naming the model and the method.
    """
    for part in (config, config.get_text_config()):
        if quantization := getattr(part, "quantization_config", None) or getattr(part, "compression_config", None):
            fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
            method = fields.get("quant_method") or "quantized"
            fault = f"model {config.name_or_path!r} has {getattr(method, 'value', method)} weights: rlkit trains"
            raise ValueError(f"{fault} no quantized weights, load the bf16 or fp32 checkpoint of the same model")


def check_leftover(path: Any, names: Iterable[str]) -> None:
    """Refuse tensors of a checkpoint that the model does not read, if they are the scales of quantized weights."""
    if scales := sorted(name for name in names if re.search(_SCALES, name)):
        fault = f"model {str(path)!r} has {len(scales)} tensors of quantized weights ({scales[0]}), and its config"
        raise ValueError(f"{fault} does not say how to read them: load the bf16 or fp32 checkpoint of the same model")


def check_architecture(config: Any, forward: PackedForward, *, model_class: Any = None) -> Verdict | None:
    """How an architecture is trained; None where no small copy can be built and run.

    The check runs a small copy of the model on the CPU in fp32, with weights of standard deviation 0.2: at least two
    layers, one of each kind, and windows shorter than the sequences.

    Args:
        forward: `rlkit.model.forward.forward`, which is what is checked (an argument, since it imports this module).
        model_class: a `PreTrainedModel` with a language-model head; by default that of `AutoModelForCausalLM`.

    Errors: ValueError for quantized weights but those of `rlkit.model.fp8`, and for a model that is not causal.
    """
    config = unquantized(config)
    check_unquantized(config)
    try:
        small = shrunk(config)
        key = _key(small, model_class)
    except Exception as error:
        logger.debug("no small config of %s: %r", config.model_type, error)
        return None
    if (verdict := _recalled(key)) is not None:
        return verdict
    with only_errors(), warnings.catch_warnings(action="ignore"):  # they are about the small copy
        if (built := _built(small, model_class)) is None:
            return None
        verdict = _verdict(*built, forward, of=config)
        if reads_images(config):
            verdict = verdict._replace(images=_why_no_images(built[0], verdict, forward))
    _remember(key, config, verdict)
    return verdict


def _verdict(
    model: Any, groups: Sequence[Sequence[Trajectory]], expected: Tensor, forward: PackedForward, *, of: Any
) -> Verdict:
    """Compare the packed log-probs, then the unpacked ones, with the model's `expected`; the attention stays as it was.

    Errors: ValueError that names the config `of` where neither are right.
    """
    before, kind = model.config.get_text_config()._attn_implementation, type(model.base_model)
    reason, had = None, dict(_unpacked)
    _unpacked.pop(kind, None)
    try:
        for replay in (False, True) if recurrent_layers(model) else (False,):
            set_packed(model, replay=replay, toll=0)
            if (reason := why_different(model, groups, expected, forward)) is None:
                return Verdict(True, replay=replay)
            set_plain(model, before)
        for logits in (False, True):
            _unpacked[kind] = logits
            if _difference(model, pack(groups), expected, forward) is None:
                return Verdict(False, str(reason), logits)
    finally:
        _unpacked.clear()
        _unpacked.update(had)
    with suppress(Exception):
        reason = reason if is_causal(model) else NOT_CAUSAL
    raise _refusal(of, str(reason))


def _why_no_images(model: Any, verdict: Verdict, forward: PackedForward) -> str:
    """Compare log-probs after prompts with images; "" where they are the model's own."""
    one, two = Noise(model.config), Noise(model.config, seed=1)
    groups = probe(VOCAB)
    for prompt, group, images in (([5, *one.ids, 6, *two.ids, 7], 0, (one, two)), ([*two.ids, 8, 9], 2, (two,))):
        groups[group] = [replace(t, prompt_ids=prompt, images=images) for t in groups[group]]
    try:
        expected = own_log_probs(model, groups)
    except Exception as error:
        return f"its own forward fails on an image: {_first_line(error)}"
    before = model.config.get_text_config()._attn_implementation
    try:
        if verdict.packed:
            set_packed(model, replay=verdict.replay)
        reasons = (_difference(model, pack(groups, share_prompts=share), expected, forward) for share in (True, False))
        return next(filter(None, reasons), "")
    finally:
        set_plain(model, before)


def check_images(model: Any) -> None:
    """Refuse images for a model that reads none, or not as its own forward does: ValueError."""
    if not reads_images(model.config):
        raise ValueError(f"the prompts show images, and model type {model.config.model_type!r} is not trained on any")
    if reason := _no_images.get(type(model.base_model)):
        raise _refusal(model.config, f"on images {reason}")
    if (mesh := mesh_of(model)) is not None and max(mesh.sizes.cp, mesh.sizes.tp, mesh.sizes.pp, mesh.sizes.ep) > 1:
        raise ValueError("images are not trained under cp, tp, pp or ep: use --parallel.shard or replicate")


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
        outside = low if low < 0 else high
        fault = f"{name} must be in [0, {size}), the model's vocabulary, got {outside}"
        raise ValueError(f"{fault}: is this its tokenizer, or were tokens added to it (--resize-embeddings)?")


def check_loaded(model: Any, forward: PackedForward) -> Verdict:
    """How a model is trained: `check_architecture`, else the same check at full size. From then on `forward` knows it.

    Errors: ValueError.
    """
    has_head = model.get_output_embeddings() is not None
    if (verdict := check_architecture(model.config, forward, model_class=type(model) if has_head else None)) is None:
        warn_full_size(model.config)
        verdict = Verdict(True)
        if has_head and model.device.type != "meta":  # `rlkit.model.heads` checks heads; meta has no weights
            groups = probe(model.config.get_text_config().vocab_size)
            try:
                expected = own_log_probs(model, groups)
            except Exception as error:
                raise _refusal(model.config, f"its own forward fails on plain text: {_first_line(error)}") from error
            verdict = _verdict(model, groups, expected, forward, of=model.config)
    elif verdict.packed and model.device.type == "cuda" and recurrent_layers(model):
        verdict = verdict_on(model.device, model.config, verdict, forward)
    if not verdict.packed:
        runs_unpacked(model, verdict)
    _no_images[type(model.base_model)] = verdict.images
    return verdict


def set_packed(model: Any, *, replay: bool = False, toll: int = TOLL) -> None:
    """Set the attention and the recurrent layers up for packed streams, in place (see `rlkit.model.recurrent.wrap`)."""
    set_attention(model, register())
    wrap(model, replay=replay, toll=toll)
    wrap_routers(model)


def set_plain(model: Any, implementation: str) -> None:
    """Undo `set_packed`, with transformers' attention of this name."""
    set_attention(model, implementation)
    unwrap(model)
    unwrap_routers(model)


def verdict_on(device: torch.device, config: Any, verdict: Verdict, forward: PackedForward) -> Verdict:
    """The verdict on a device whose recurrent layers call other kernels: a small copy there against the CPU's own
    forward, to 1e-3. Where they differ the model is trained unpacked, by kernels that see one document a row."""
    with only_errors(), warnings.catch_warnings(action="ignore"):  # they are about the small copy
        if (built := _built(shrunk(config), None)) is None:
            return verdict
        model, groups, expected = built
        set_packed(model.to(device), replay=verdict.replay, toll=0)
        reason = _difference(model, pack(groups), expected.to(device), forward, tolerance=1e-3)
    return verdict if reason is None else Verdict(False, f"on {device.type}, {reason}")


def runs_unpacked(model: Any, verdict: Verdict) -> None:
    """From now on `forward` runs models of this class unpacked, unless they are set to packed attention."""
    if type(model.base_model) not in _unpacked:
        logger.warning(
            "model type %r is trained unpacked: %s. Each sample is a padded row with its whole prompt, which costs "
            "time and memory where samples share a long one",
            model.config.model_type,
            verdict.reason,
        )
    _unpacked[type(model.base_model)] = verdict.logits


def runs_packed(model: Any) -> bool:
    """Whether `forward` runs the model packed; else it runs it unpacked.

    Errors: ValueError for a model that was not prepared.
    """
    if model.base_model.config.get_text_config()._attn_implementation == IMPLEMENTATION:
        return True
    if type(model.base_model) not in _unpacked:
        raise ValueError(f"{type(model).__name__} is not set up for training: pass `prepare_model(model)`")
    return False


def gives_logits(model: Any) -> bool:
    """Whether an unpacked model's log-probs come from its logits, which are not one head's of its hidden states."""
    return not runs_packed(model) and _unpacked[type(model.base_model)]


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


def _why_not_packed(config: Any) -> str | None:
    """What the config says of layers that keep a state or choose their keys."""
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    kinds = sorted({_LEGACY.get(x, x) for x in layers} - set(LAYER_TYPES))
    if kinds or text.model_type in _RECURRENT:
        names = " and ".join(map(repr, kinds or ["recurrent"]))
        return f"its layers of type {names} have no packed form"
    return None


def why_different(
    model: Any, groups: Sequence[Sequence[Trajectory]], expected: Tensor, forward: PackedForward
) -> str | None:
    """The reason why the packed log-probs of `groups` differ from `expected` (see `own_log_probs`), or None."""
    for share in (True, False):
        if (reason := _difference(model, pack(groups, share_prompts=share), expected, forward)) is not None:
            return _why_not_packed(model.config) or _known_cause(model) or reason
    return None


def _difference(
    model: Any, batch: Batch, expected: Tensor, forward: PackedForward, *, tolerance: float = TOLERANCE
) -> str | None:
    try:
        with torch.no_grad():
            batch = batch.to(model.device)
            actual = forward(model, batch).logp[batch.mask]
    except Exception as error:
        return _first_line(error)
    off = (actual - expected).abs().max().item()
    return None if off < tolerance else f"its packed log-probs differ from its own forward by {off:.2g} nats"


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
    """Log-probs of the completions by the model's own forward in eager attention, one sequence at a time."""
    out = []
    with as_inference(model, always=True):
        for t in (t for group in groups for t in group):
            ids = torch.tensor([[*t.prompt_ids, *t.ids]], device=model.device)
            pictures = image_inputs((*t.images, *t.later_images), model.device)
            pictures |= token_types(model, ids) if pictures else {}
            logp = model(input_ids=ids, use_cache=False, **pictures).logits[0].float().log_softmax(-1)
            places = slice(len(t.prompt_ids) - 1, ids.shape[1] - 1)
            out.append(logp[places].gather(1, ids[0, len(t.prompt_ids) :, None])[:, 0])
    return torch.cat(out)


def probe(vocab_size: int) -> list[list[Trajectory]]:
    """Nine sequences of unequal lengths in four groups; the shortest is one token and its target, the longest has 14.

    The last group continues a sample of the third, which continues one of the first: states at three depths.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:  # the first ids are often special
        return torch.randint(min(3, vocab_size - 1), min(vocab_size, VOCAB), (n,), generator=generator).tolist()

    groups: list[list[Trajectory]] = []
    for after, prompt_len, lens in ((None, 5, (3, 1, 7)), (None, 1, (1, 12)), (0, 1, (2, 3)), (2, 1, (2, 2))):
        before = None if after is None else groups[after][0]
        prompt = [*(() if before is None else (*before.prompt_ids, *before.ids)), *draw(prompt_len)]
        groups.append([Trajectory(prompt, draw(n), [True] * n, [0.0] * n, [0] * n) for n in lens])
    return groups


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _refusal(config: Any, reason: str) -> ValueError:
    return ValueError(f"model type {config.model_type!r} cannot be trained: {reason}")


@torch.no_grad()
def _built(config: Any, model_class: Any) -> tuple[Any, list[list[Trajectory]], Tensor] | None:
    """A model of this config with random weights, the test sequences, and its own log-probs of them."""
    from_config: Any = auto_class(config).from_config
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


def _key(config: Any, model_class: Any) -> str:
    """The key of a verdict: a hash of the small config, the model class, and the code that is compared."""
    import transformers

    fields = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    name = "" if model_class is None else f"{model_class.__module__}.{model_class.__qualname__}"
    versions = (torch.__version__, transformers.__version__, rlkit.__version__, _source())
    return sha256(json.dumps([fields, name, versions], sort_keys=True, default=str).encode()).hexdigest()


_COMPARED = "model", "parallel", "packing", "kernels"  # folders of rlkit


@cache
def _source() -> int:
    """A checksum of the code that a check runs, which may change within a version."""
    root, value = Path(rlkit.__file__).parent, 0
    for path in sorted(path for folder in _COMPARED for path in (root / folder).rglob("*.py")):
        value = zlib.crc32(path.read_bytes(), value)
    return value


def _file(key: str) -> Path:
    return cache_folder() / "checked" / f"{key}.json"


def _recalled(key: str) -> Verdict | None:
    """The verdict of an earlier check, in this process or another."""
    if key not in _proven:
        with suppress(OSError, ValueError, TypeError, KeyError):  # of another version, or damaged: made again
            _proven[key] = Verdict(**json.loads(_file(key).read_text())["verdict"])
    return _proven.get(key)


def _remember(key: str, config: Any, verdict: Verdict) -> None:
    """Cache the verdict, in this process and, where possible, on the disk."""
    _proven[key] = verdict
    with suppress(OSError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        replace_file(_file(key), json.dumps({"model_type": config.model_type, "verdict": verdict._asdict()}).encode())
