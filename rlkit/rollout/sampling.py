"""Sampling from logits with noise that is a pure function of (seed, position): one uniform per token, inverse CDF."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64
from torch import Tensor

from rlkit._tensors import cumsum, upcast
from rlkit.losses.corrections import kept_support

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Sampled(NamedTuple):
    """One token per row and its log-prob under the temperature-scaled, untruncated distribution, in nats."""

    ids: Int[Tensor, "B"]
    logp: Float[Tensor, "B"]


def uniforms(seeds: UInt64[np.ndarray, "B"], positions: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B"]:
    """Counter-based noise: u = (mix(mix(seed) + (position + 1) * golden) >> 12 + 1/2) / 2^52, in (0, 1), fp64.

    The same (seed, position) gives the same bits on every machine and in every batch. `mix` is SplitMix64's finalizer.
    `position` is the index of the sampled token in its sequence, prompt included, so a request that is aborted and
    continued with its tokens as a longer prompt draws the same noise as without the abort.
    Reference: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the use of counters as
    in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    bits = _mix(_mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def sample(
    logits: Float[Tensor, "B V"],
    u: Float[Tensor, "B"],
    *,
    temperature: Float[Tensor, "B"] | None = None,
    top_p: Float[Tensor, "B"] | None = None,
    top_k: Int[Tensor, "B"] | None = None,
) -> Sampled:
    """The token whose interval of the CDF holds `u`, for each row.

        p = softmax(logits / temperature)        token = min { v : sum_{w <= v} kept_w > u * sum_w kept_w }

    with kept = p where `kept_support` holds, else 0. Temperature 0 is argmax (the lowest id wins a tie) with p at
    temperature 1. The log-prob is log p of the token, untruncated. The CDF is summed in fp64; a token of probability
    0 is never returned. `top_p=None` and `top_k=None` disable truncation for all rows; in a tensor, 1.0 and 0 disable
    it for that row.

    Differs from HF `generate`, which applies top-p to what top-k left, renormalised; here (as in SGLang) both look
    at p.
    """
    z = upcast(logits)
    if temperature is not None:
        z = z / torch.where(temperature == 0, 1.0, temperature)[:, None]
    p = z.softmax(-1)
    kept = p if top_p is None and top_k is None else p * kept_support(p, top_p=top_p, top_k=top_k)
    cdf = cumsum(kept, -1)
    ids = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    if temperature is not None:
        ids = torch.where(temperature[:, None] == 0, logits.argmax(-1, keepdim=True), ids)
    return Sampled(ids[:, 0], p.gather(-1, ids)[:, 0].log_())


def _mix(x: UInt64[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
