"""Which decoder serves a model: the fast one where it is provably the same function, else the model's own forward."""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import Any

import torch

from rlkit.parallel.attention import as_inference
from rlkit.rollout.engines.local.decode import Decoder
from rlkit.rollout.engines.local.decode_weights import why_unsupported
from rlkit.rollout.engines.local.fallback import CachedForward, Recompute

logger = logging.getLogger(__name__)


Backend = Decoder | CachedForward | Recompute  # they take the same calls: see `Decoder`


def pick_decoder(model: Any, *, max_batch: int, max_len: int, compile: bool = False) -> Backend:
    """The first of `Decoder`, `CachedForward` and `Recompute` that supports the model and agrees with it on a probe.

    The probe prefills two short prompts of different lengths and decodes four tokens of each. Why it is not the first
    is logged in one line. `compile` is for `Decoder`, and ignored by the others.
    """
    reason = why_unsupported(model, max_len)
    if reason is None:
        decoder = Decoder(model, max_batch=max_batch, max_len=max_len, compile=compile)
        reason = disagreement(decoder, model, max_len=max_len)
        if reason is None:
            return decoder
    name = type(model).__name__
    cached = CachedForward(model, max_batch=max_batch, max_len=max_len)
    why_not = _why_not_cached(cached, model, max_len)
    if why_not is None:
        logger.warning("LocalEngine decodes %s through the model's own forward: %s", name, reason)
        return cached
    logger.warning("LocalEngine forwards whole sequences of %s for every token: %s; %s", name, reason, why_not)
    return Recompute(model, max_batch=max_batch, max_len=max_len)


def _why_not_cached(cached: CachedForward, model: Any, max_len: int) -> str | None:
    """Why the attention function does not serve this model; windows, longer than the probe, must have reached it."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention", "sliding_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        return f"its layer types are {sorted(kinds)}"
    try:
        reason = disagreement(cached, model, max_len=max_len)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < max_len and window not in cached.windows:
        return f"its sliding window {window} does not reach the attention function"
    return reason


@torch.no_grad()
def disagreement(decoder: Backend, model: Any, *, max_len: int) -> str | None:
    """How the decoder's logits differ from the model's on a probe, in words; None if they are equal up to rounding."""
    vocab = model.get_input_embeddings().weight.shape[0]
    lens = [min(n, max_len - 4) for n in (9, 6)][: decoder.sizes[-1]]
    if min(lens) < 1:
        return f"max_len {max_len} is too short to check it"
    count = len(lens)
    ids = (torch.arange(count * (max(lens) + 4), device=model.device) * 7919 % vocab).view(count, -1)
    with as_inference(model):
        truth = model(input_ids=ids, use_cache=False).logits.float()
    rows = torch.arange(decoder.sizes[bisect_left(decoder.sizes, count)], device=model.device)
    decoder.reserve(len(rows), max(lens) + 4, keep=0)
    decoder.prefill([row[: n - 1] for row, n in zip(ids.tolist(), lens, strict=True) if n > 1], range(count))
    worst = torch.zeros((), device=model.device)
    for step in range(4):
        positions = torch.zeros_like(rows)
        positions[:count] = torch.tensor([n - 1 + step for n in lens])
        tokens = ids[rows % count, positions]
        logits = decoder.decode(tokens, positions)
        worst = torch.maximum(worst, (logits[:count] - truth[rows[:count], positions[:count]]).abs().max())
    decoder.release()
    tolerance = max(1e-4, 8 * torch.finfo(model.dtype).eps) * max(1.0, float(truth.abs().max()))
    return None if float(worst) <= tolerance else f"its logits differ by {float(worst):.1e} on a probe"


def context_limit(model: Any, max_len: int | None) -> int:
    """`max_len` if the model can serve it; None: all that the model can."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    max_len = limit if max_len is None else max_len
    if max_len is None:
        raise ValueError("max_len must be given: the model's config has no max_position_embeddings")
    if max_len < 2 or (limit is not None and max_len > limit):
        raise ValueError(f"max_len must be in [2, {limit}] (the model's max_position_embeddings), got {max_len}")
    return max_len


def model_eos(model: Any) -> tuple[int, ...]:
    """The model's end-of-sequence tokens, as its generation config has them."""
    config = getattr(model, "generation_config", None) or model.config
    eos = getattr(config, "eos_token_id", None)
    return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
