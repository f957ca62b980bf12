"""The one attention primitive: causal attention of packed queries, each segment over its own choice of keys.

A plan says, for each segment of the query stream, which rows of the key stream it sees. Packing is "its own rows"; a
group that shares a prompt is "the prompt's rows, then its own"; context parallelism is "also those of other ranks".
Segments never see anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlkit._tensors import uncompiled
from rlkit.segments import cumulative, seq_lens
from rlkit.types import Batch

IMPLEMENTATION = "rlkit_packed"  # the name under which transformers knows `packed_attention`
_SLACK = 1.25  # a bucket may hold this many times the query-key pairs of its segments,
_FREE_PAIRS = 8192  # or this many more: what one more call costs
_FEW_QUERIES = 16  # up to which plain matrix products beat the CPU's fused attention: 2.7x at 7 queries over 25 keys


class Segment(NamedTuple):
    """Queries `start .. start + length` of the query stream, and the ranges of key rows `(start, length)` they see."""

    start: int
    length: int
    keys: list[tuple[int, int]]


class Bucket(NamedTuple):
    """Segments that are attended to in one call, left-padded to `q_len` queries over `k_len` keys each."""

    size: int
    q_len: int
    k_len: int
    mask: Bool[Tensor, "B 1 q_len k_len"] | None  # None: plain causal with q_len == k_len


class Varlen(NamedTuple):
    """Boundaries of the segments, as flash kernels read them (int32), and the longest ones."""

    cu_q: Int[Tensor, "N1"]
    cu_k: Int[Tensor, "N1"]
    max_q: int
    max_k: int


class Exchange(NamedTuple):
    """How the ranks of `group` share the work of one attention call: see `rlkit.parallel.context`."""

    run: Callable[..., Tensor]
    group: Any


class AttentionPlan(NamedTuple):
    """Made once per micro-batch, used in every layer. `*_index` are rows of the packed streams, segment by segment.

    On the CPU (and in fp32) the segments are padded into buckets; flash kernels take them end to end.
    """

    q_index: Int[Tensor, "Q"]
    k_index: Int[Tensor, "K"]
    out_index: Int[Tensor, "T"]
    buckets: tuple[Bucket, ...] = ()
    varlen: Varlen | None = None
    exchange: Exchange | None = None

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same plan with its tensors on `device`."""
        buckets = tuple(b._replace(mask=None if b.mask is None else b.mask.to(device)) for b in self.buckets)
        v = self.varlen
        varlen = None if v is None else v._replace(cu_q=v.cu_q.to(device), cu_k=v.cu_k.to(device))
        q, k, out = (x.to(device) for x in self[:3])
        return AttentionPlan(q, k, out, buckets, varlen, self.exchange)


def segments(batch: Batch) -> list[Segment]:
    """What sees what in `[prefixes, sequences]` (see `rlkit.packing.join`): a sequence sees its prefix and itself."""
    prefix_lens = seq_lens(batch.prefix_cu).tolist()
    lens, prefix_ids = seq_lens(batch.cu_seqlens).tolist(), batch.prefix_ids.tolist()
    prefix_starts, base = batch.prefix_cu.tolist(), int(batch.prefix_cu[-1])
    out = [Segment(s, n, [(s, n)]) for s, n in zip(prefix_starts, prefix_lens)]
    for start, n, p in zip(batch.cu_seqlens.tolist(), lens, prefix_ids):
        out.append(Segment(base + start, n, [(prefix_starts[p], prefix_lens[p]), (base + start, n)]))
    return out


def plan(spans: Sequence[Segment], *, device: torch.device | str = "cpu", flash: bool = False) -> AttentionPlan:
    """A plan from segments, for `flash` kernels or (default) for padded buckets.

    Causality is bottom-right: the last query of a segment sees all its keys, the one before all but the last, and so
    on. The queries must tile the stream; a segment needs at least as many keys as queries.
    """
    spans = [s for s in spans if s.length]
    for i, s in enumerate(spans):
        if s.length > (b := _num_keys(s)):
            raise ValueError(f"segment {i} has {b} keys for {s.length} queries; a query sees at least itself")
    made = _varlen_plan(spans) if flash else _bucket_plan(spans)
    return made.to(device)


def _num_keys(s: Segment) -> int:
    return sum(n for _, n in s.keys)


def _varlen_plan(spans: Sequence[Segment]) -> AttentionPlan:
    q_lens, k_lens = [s.length for s in spans], [_num_keys(s) for s in spans]
    q = torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s, s + n) for s, n, _ in spans)])
    ranges = [r for s in spans for r in s.keys]
    k = torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s, s + n) for s, n in ranges)])
    out = torch.empty_like(q)
    out[q] = torch.arange(q.numel())
    cu_q, cu_k = (cumulative(torch.tensor(x, dtype=torch.int32)) for x in (q_lens, k_lens))
    return AttentionPlan(q, k, out, varlen=Varlen(cu_q, cu_k, max(q_lens, default=0), max(k_lens, default=0)))


def _bucket_plan(spans: Sequence[Segment]) -> AttentionPlan:
    q_lens, k_lens = [s.length for s in spans], [_num_keys(s) for s in spans]
    order = sorted(range(len(spans)), key=lambda i: (q_lens[i] > _FEW_QUERIES, k_lens[i], q_lens[i]))
    q_rows, k_rows = [torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)]
    buckets: list[Bucket] = []
    place = torch.empty(sum(q_lens), dtype=torch.long)
    done = 0
    for members in _bucketed(order, q_lens, k_lens):
        a, b = max(q_lens[i] for i in members), max(k_lens[i] for i in members)
        ql, kl = torch.tensor([q_lens[i] for i in members]), torch.tensor([k_lens[i] for i in members])
        q = _left_padded([[spans[i][:2]] for i in members], a)
        k = _left_padded([spans[i].keys for i in members], b)
        real = torch.arange(a) >= a - ql[:, None]
        place[q[real]] = done + real.flatten().nonzero().flatten()
        uniform = bool((ql == a).all() and (kl == b).all())
        buckets.append(Bucket(len(members), a, b, None if uniform and a == b else _mask(ql, kl, a, b)))
        q_rows.append(q.flatten())
        k_rows.append(k.flatten())
        done += q.numel()
    return AttentionPlan(torch.cat(q_rows), torch.cat(k_rows), place, tuple(buckets))


def attend(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "S Hk D"],
    v: Float[Tensor, "S Hk D"],
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "T H D"]:
    """softmax(scale q k^T) v for every segment of the plan; `H` may be a multiple of `Hk` (grouped queries).

    `window`: a query sees at most that many keys, itself the last one. `softcap`: z -> softcap tanh(z / softcap) on the
    scaled scores.
    """
    if plan.varlen is not None:
        qs, ks, vs = rows(q, plan.q_index), rows(k, plan.k_index), rows(v, plan.k_index)
        return flash(qs, ks, vs, plan.varlen, scale=scale, window=window, softcap=softcap)[plan.out_index]
    sizes = [b.size * b.q_len for b in plan.buckets], [b.size * b.k_len for b in plan.buckets]
    queries = rows(q, plan.q_index).split(sizes[0])
    keys, values = rows(k, plan.k_index).split(sizes[1]), rows(v, plan.k_index).split(sizes[1])
    out = [
        _bucket_attention(
            qb.view(bucket.size, bucket.q_len, *q.shape[1:]).transpose(1, 2),
            kb.view(bucket.size, bucket.k_len, *k.shape[1:]).transpose(1, 2),
            vb.view(bucket.size, bucket.k_len, *v.shape[1:]).transpose(1, 2),
            _windowed(bucket, window, q.device),
            scale=scale,
            softcap=softcap,
        )
        for bucket, qb, kb, vb in zip(plan.buckets, queries, keys, values)
    ]
    return rows(torch.cat([x.transpose(1, 2).flatten(0, 1) for x in out]), plan.out_index) if out else q


def rows(x: Float[Tensor, "T *rest"], index: Int[Tensor, "R"]) -> Float[Tensor, "R *rest"]:
    """`x[index]`, on the CPU by `index_select`, whose backward is 3 to 6 times faster (with atomics on CUDA)."""
    return x.index_select(0, index) if x.device.type == "cpu" else x[index]


def flash(
    q: Float[Tensor, "Q H D"],
    k: Float[Tensor, "K Hk D"],
    v: Float[Tensor, "K Hk D"],
    varlen: Varlen,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "Q H D"]:
    """A flash kernel on segments laid end to end: torch's own, or the `flash_attn` package for a softcap.

    Both align causality bottom-right where a segment has more keys than queries (FlashAttention 2.1 and later).
    """
    cu_q, cu_k, max_q, max_k = varlen
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms with fp32 weights return fp32 under autocast
    sees = (-1 if window is None else window - 1, 0)
    if softcap is not None:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=True, window_size=sees, softcap=softcap
        )
    from torch.nn.attention import varlen as kernels

    attn: Callable[..., Tensor] = kernels.varlen_attn  # type: ignore[assignment]
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(attn).parameters else {}  # torch 2.11 needs no flag
    return attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=sees, **grouped)


def has_flash(device: torch.device, dtype: torch.dtype, *, softcap: bool) -> bool:
    """Whether `flash` can run: half precision on an NVIDIA GPU from Ampere on, and `flash_attn` where it is needed."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or torch.version.hip:
        return False
    enough = torch.cuda.get_device_capability(device) >= (8, 0)
    return enough and (not softcap or find_spec("flash_attn") is not None)


@uncompiled  # it loops over segments, which differ from call to call
def packed_attention(
    module: nn.Module,  # noqa: ARG001
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 Hk T D"],
    value: Float[Tensor, "1 Hk T D"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 T H D"], None]:
    """`attend` with the signature that transformers calls; the plan comes as a keyword of the model's forward."""
    if attention_plan is None:
        raise ValueError(
            "attention_plan is missing: this model is set up for packed training. Use rlkit.parallel.model.forward, "
            "or model.set_attn_implementation('sdpa') to call it as a plain transformers model"
        )
    if attention_mask is not None or dropout:
        raise ValueError(f"packed attention has no attention_mask and no dropout (got {dropout=})")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    work = partial(attend, plan=attention_plan, scale=scale, window=sliding_window, softcap=softcap)
    exchange = attention_plan.exchange
    out = work(q, k, v) if exchange is None else exchange.run(q, k, v, exchange.group, work)
    return out[None], None


def register() -> str:
    """Make `packed_attention` known to transformers; returns the name to pass as `attn_implementation`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
    return IMPLEMENTATION


@contextmanager
def as_inference(model: Any) -> Iterator[None]:
    """Inside the block `model(input_ids, attention_mask=...)` works as in plain transformers, without dropout."""
    implementation, training = model.config._attn_implementation, model.training
    packed = implementation == IMPLEMENTATION
    if packed:
        model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        if packed:
            model.set_attn_implementation(implementation)


def _bucketed(order: list[int], q_lens: list[int], k_lens: list[int]) -> list[list[int]]:
    """Cut the sorted segments into runs whose padding stays inside the slack; few queries and many stay apart."""
    runs: list[list[int]] = []
    pairs = widest = 0
    for i in order:
        pairs, widest = pairs + q_lens[i] * k_lens[i], max(widest, q_lens[i])
        padded = (len(runs[-1]) + 1 if runs else 1) * widest * k_lens[i]
        alike = bool(runs) and (q_lens[runs[-1][0]] <= _FEW_QUERIES) == (q_lens[i] <= _FEW_QUERIES)
        if alike and padded <= max(_SLACK * pairs, pairs + _FREE_PAIRS):
            runs[-1].append(i)
        else:
            runs.append([i])
            pairs, widest = q_lens[i] * k_lens[i], q_lens[i]
    return runs


def _left_padded(ranges: list[list[tuple[int, int]]], width: int) -> Tensor:
    """Row indices `[B, width]`; padding repeats the segment's own first row, so that no other document is ever read."""
    rows = []
    for parts in ranges:
        row = np.concatenate([np.arange(s, s + n) for s, n in parts])
        rows.append(np.concatenate([row[:1].repeat(width - row.size), row]))
    return torch.from_numpy(np.stack(rows))


def _mask(q_lens: Tensor, k_lens: Tensor, a: int, b: int) -> Tensor:
    """Bottom-right causal; keys of the left padding are hidden, and padded queries see the last key (their rows are
    dropped, but a row without keys would be NaN)."""
    i, j = torch.arange(a)[:, None], torch.arange(b)
    seen = (j <= i + (b - a)) & (j >= b - k_lens[:, None, None])
    padded = (i < a - q_lens[:, None, None]) & (j == b - 1)
    return (seen | padded)[:, None]


def _windowed(bucket: Bucket, window: int | None, device: torch.device) -> Tensor | None:
    """The bucket's mask, without the keys that are `window` or more places behind the query."""
    if window is None or bucket.k_len <= window:
        return bucket.mask
    i, j = torch.arange(bucket.q_len, device=device)[:, None], torch.arange(bucket.k_len, device=device)
    last = i + bucket.k_len - bucket.q_len
    near = (j <= last) & (j > last - window)
    return near if bucket.mask is None else bucket.mask & (near | (j == bucket.k_len - 1))


def _few_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    (n, heads, a, d), (kv_heads, b) = q.shape, k.shape[1:3]
    seen = torch.ones(a, b, dtype=torch.bool).tril() if mask is None else mask
    bias = torch.zeros(seen.shape, dtype=torch.promote_types(q.dtype, torch.float32)).masked_fill_(~seen, -torch.inf)
    lanes, grouped = n * kv_heads, (n, kv_heads, heads // kv_heads, a, b)
    bias = bias.view(-1, 1, 1, a, b).expand(grouped).reshape(lanes, -1, b)
    q, k, v = q.reshape(lanes, -1, d), k.reshape(lanes, b, d), v.reshape(lanes, b, d)
    probs = torch.baddbmm(bias, q.to(bias), k.mT.to(bias), alpha=scale).softmax(-1)
    return (probs.to(v.dtype) @ v).view(n, heads, a, d)


def _bucket_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None
) -> Tensor:
    if softcap is None and q.shape[2] <= _FEW_QUERIES and q.device.type == "cpu":
        return _few_queries(q, k, v, mask, scale=scale)
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    z = softcap * torch.tanh(q @ k.mT * (scale / softcap))
    seen = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril() if mask is None else mask
    z = z.masked_fill(~seen, -torch.inf)
    return z.softmax(-1, dtype=torch.promote_types(z.dtype, torch.float32)).to(v.dtype) @ v
