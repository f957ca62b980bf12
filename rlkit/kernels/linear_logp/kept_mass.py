"""How much probability top-p and top-k left in play, from hidden states, a few rows of logits at a time."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import cumsum
from rlkit.kernels._checks import check_head
from rlkit.kernels.linear_logp.chunked import Head, blocks, columns, compute_dtype, logits_into
from rlkit.kernels.linear_logp.ops import finite, present
from rlkit.kernels.linear_logp.products import full_sums, product_dtype, product_into

CPU_CHUNK_BYTES, CHUNK_BYTES = 32 << 20, 1 << 30
COLUMNS = 8192  # of the weight, brought to the compute dtype at a time
FIRST_CANDIDATES = 128  # most nuclei are smaller; rows whose nucleus is not are looked at again with 8 times as many


@torch.no_grad()
def log_kept_mass(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    *,
    top_p: float = 1.0,
    top_k: int = 0,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
) -> Float[Tensor, "T"]:
    """log S: the log of the probability of the tokens that top-p and top-k sampling keep, at each row, in nats.

        p = softmax(z), z as in `linear_logp`, sorted to fall: p_(1) >= p_(2) >= ...
        S = sum of p_(i) with  i <= top_k  and  p_(1) + ... + p_(i-1) < top_p

    `rollout_logp - log S` is what the sampler's truncated distribution gave to the token it drew; without it every
    ratio is too large by 1 / S. Detached: it belongs to the behaviour, not to the policy that is trained. `top_k=0` and
    `top_p=1.0` are off, and log S is 0 then, as where `mask` is False. No sort of the vocabulary: the largest 128 (or
    top_k) entries are taken, and more only for rows whose nucleus is larger. Memory: 32 MB of logits (1 GB on
    other devices than the CPU; at least one row), and as much again for their softmax.

    Limits:     top_k = 1 is the largest log-probability; top_k >= V and top_p = 1 give 0.
    Differs:    both limits look at p itself, as SGLang and `rlkit.rollout` do; Hugging Face `generate` and vLLM apply
                top-p to what top-k left, renormalised. The two differ only where both limits are on.
    Reference:  nucleus sampling, arXiv:1904.09751; the bias without the correction, huggingface/trl#6789.
    """
    check_head(hidden, weight, bias, mask, temperature=temperature, softcap=softcap)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if top_k < 0:
        raise ValueError(f"top_k must be >= 0 (0 is off), got {top_k}")
    vocab, dtype = weight.shape[0], compute_dtype(hidden, weight, bias)
    out = hidden.new_zeros(hidden.shape[0], dtype=dtype)
    if top_p == 1 and not 0 < top_k < vocab:
        return out
    head = Head(weight, finite(bias, dtype), temperature, softcap)
    rows = present(mask)
    rows = torch.arange(hidden.shape[0], device=hidden.device) if rows is None else rows
    chunk_bytes = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES
    for chunk in rows.split(max(1, chunk_bytes // (vocab * dtype.itemsize))):
        z = out.new_empty(chunk.numel(), vocab)
        if hidden.is_cuda and dtype == torch.float32:
            _logits_of_halves(z, hidden[chunk], head)
        else:
            h = hidden[chunk].to(dtype)
            for first, last in blocks(vocab, COLUMNS):
                logits_into(z[:, first:last], h, *columns(head, first, last, dtype), head)
        out[chunk] = _kept(z.softmax(1), top_p, min(top_k or vocab, vocab)).log().clamp_(max=0).to(dtype)
    return out


def _logits_of_halves(out: Tensor, h: Tensor, head: Head) -> None:
    """The same as `logits_into` all columns, without an fp32 copy of the weight."""
    dtype = product_dtype(h, head.weight)
    with full_sums():
        product_into(out, h.to(dtype), head.weight.to(dtype).t())
    if head.bias is not None:
        out.add_(head.bias)
    if head.softcap is not None:
        out.div_(head.softcap).tanh_().mul_(head.softcap)
    out.div_(head.temperature)


def _kept(p: Tensor, top_p: float, top_k: int) -> Tensor:
    """Kept mass of each row, fp64: candidates in falling order, up to `top_k` of them and until their sum is top_p."""
    size = top_k if top_p == 1 else min(FIRST_CANDIDATES, top_k)
    mass, todo = p.new_zeros(p.shape[0], dtype=torch.float64), torch.arange(p.shape[0], device=p.device)
    while todo.numel():
        largest = (p if todo.numel() == p.shape[0] else p[todo]).topk(size, dim=1).values.double()
        total = cumsum(largest, 1)
        before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], dim=1)
        mass[todo] = torch.where((before < top_p) | (top_p == 1), largest, 0).sum(1)
        todo = todo[total[:, -1] < top_p] if size < top_k else todo[:0]
        size = min(8 * size, top_k)
    return mass


def kept_support(
    p: Float[Tensor, "B V"], *, top_p: Float[Tensor, "B"] | None = None, top_k: Int[Tensor, "B"] | None = None
) -> Bool[Tensor, "B V"]:
    """Where top-p and top-k leave mass: rank < top_k, and less than top_p lies strictly before the token.

    Tokens are ranked by falling probability, the lower id first in a tie. Both conditions are on `p` itself, so
    their order does not matter; the most probable token is always kept. `top_p=1.0` and `top_k=0` keep everything.
    Reference: nucleus sampling, arXiv:1904.09751
    """
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_p is not None:
        total = cumsum(ranked, -1)
        before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], dim=-1)
        keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    if top_k is not None:
        rank = torch.arange(p.shape[-1], device=p.device)
        keep &= (rank < top_k[:, None]) | (top_k == 0)[:, None]
    return torch.empty_like(keep).scatter_(-1, order, keep)
