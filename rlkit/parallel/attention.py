"""Causal attention of packed queries, where a plan chooses the keys of each segment.

A plan lists, for each segment of the query stream, the rows of the key stream that it attends to. Packing is "its own
rows"; a group with a shared prompt is "the prompt's rows, then its own"; context parallelism adds rows of other ranks.
A plan consists of index tensors, made once per micro-batch and used in every layer.

On the CPU and in fp32, attention runs as padded buckets of `scaled_dot_product_attention`; in half precision on CUDA,
as varlen flash kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rlkit._tensors import uncompiled
from rlkit.segments import cumulative, seq_lens
from rlkit.types import Batch

X = TypeVar("X")
Rows = Int[Tensor, "R"] | slice
FEW_QUERIES = 16  # up to here plain matrix products beat the CPU's fused attention: 2.7x at 7 queries over 25 keys
_SLACK = 1.25  # a bucket may hold this many times the query-key pairs of its segments,
_FREE_PAIRS = 8192  # or this many more pairs, which cost as much as one more call


class Segment(NamedTuple):
    """Queries `start .. start + length` of the query stream, and the ranges `(start, length)` of their key rows."""

    start: int
    length: int
    keys: list[tuple[int, int]]

    @property
    def num_keys(self) -> int:
        """Number of keys of the last query."""
        return sum(n for _, n in self.keys)


class Bucket(NamedTuple):
    """Segments computed in one call, each left-padded to `q_len` queries and `k_len` keys."""

    size: int
    q_len: int
    k_len: int
    mask: Bool[Tensor, "B 1 q_len k_len"] | None  # None: plain causal with q_len == k_len


class Varlen(NamedTuple):
    """Segment bounds for flash kernels (int32), and the maximum lengths."""

    cu_q: Int[Tensor, "N1"]
    cu_k: Int[Tensor, "N1"]
    max_q: int
    max_k: int


class AttentionPlan(NamedTuple):
    """Made once per micro-batch, used in every layer. `*_index` are rows of the packed streams, segment by segment.

    `buckets` is set on the CPU and in fp32, `varlen` for flash kernels. `exchange(q, k, v, attend)` distributes one
    call over context parallel ranks (see `rlkit.parallel.context`).
    """

    q_index: Rows
    k_index: Rows
    out_index: Rows
    buckets: tuple[Bucket, ...] = ()
    varlen: Varlen | None = None
    exchange: Callable[..., Tensor] | None = None

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same plan with its tensors on `device`."""
        return to_device(self, device)


def to_device(tree: X, device: torch.device | str) -> X:
    """The same tuple with its tensors on `device`; copies to a GPU are asynchronous."""
    non_blocking = torch.device(device).type != "cpu"
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), tree)


def segments(batch: Batch) -> list[Segment]:
    """Segments of `[prefixes, sequences]` (see `rlkit.packing.join`): a sequence attends to its prefix and itself."""
    prefixes = list(zip(batch.prefix_cu.tolist(), seq_lens(batch.prefix_cu).tolist()))
    starts = batch.prefix_cu[-1] + batch.cu_seqlens
    sequences = zip(starts.tolist(), seq_lens(batch.cu_seqlens).tolist())
    out = [Segment(*prefix, [prefix]) for prefix in prefixes]
    return out + [Segment(*own, [prefixes[p], own]) for own, p in zip(sequences, batch.prefix_ids.tolist())]


def plan(spans: Sequence[Segment], *, flash: bool = False) -> AttentionPlan:
    """A plan from segments, on the CPU, for `flash` kernels or (default) for padded buckets.

    Causality is bottom-right: the last query of a segment sees all its keys, the one before all but the last, and so
    on. The queries must tile a nonempty stream; a segment needs at least as many keys as queries.
    """
    spans = [s for s in spans if s.length]
    for i, s in enumerate(spans):
        if s.length > s.num_keys:
            raise ValueError(f"segment {i} has {s.num_keys} keys for {s.length} queries; a query sees at least itself")
    return _varlen_plan(spans) if flash else _bucket_plan(spans)


def _varlen_plan(spans: Sequence[Segment]) -> AttentionPlan:
    q_lens, k_lens = [s.length for s in spans], [s.num_keys for s in spans]
    q = torch.from_numpy(_rows([s[:2] for s in spans]))
    k = torch.from_numpy(_rows([r for s in spans for r in s.keys]))
    cu_q, cu_k = (cumulative(torch.tensor(x, dtype=torch.int32)) for x in (q_lens, k_lens))
    varlen = Varlen(cu_q, cu_k, max(q_lens), max(k_lens))
    return AttentionPlan(_as_slice(q), _as_slice(k), _as_slice(q.argsort()), varlen=varlen)


def _as_slice(index: Tensor) -> Rows:
    """A slice if the rows are all in order: a view instead of a gather."""
    return slice(len(index)) if torch.equal(index, torch.arange(len(index))) else index


def _bucket_plan(spans: Sequence[Segment]) -> AttentionPlan:
    """Segments of similar size share a bucket; the arrays below have a row per segment, in the order of the buckets."""
    order = sorted((len(s.keys), s.length > FEW_QUERIES, s.num_keys, s.length, i) for i, s in enumerate(spans))
    spans = [spans[i] for *_, i in order]
    q_lens, k_lens = np.array([x[3] for x in order]), np.array([x[2] for x in order])
    keys = np.array([[*s.keys, *[(0, 0)] * (order[-1][0] - len(s.keys))] for s in spans])
    queries = np.array([s[:2] for s in spans])[:, None]
    q_rows, k_rows, is_real = [], [], []
    buckets: list[Bucket] = []
    for part in _bucketed(order):
        a, b = int(q_lens[part].max()), int(k_lens[part].max())
        q_rows.append(_left_padded(queries[part], a))
        k_rows.append(_left_padded(keys[part], b))
        is_real.append(np.arange(a) >= a - q_lens[part, None])
        plain = int(q_lens[part].min()) == b  # every segment has b queries and b keys
        mask = None if plain else _mask(torch.from_numpy(q_lens[part]), torch.from_numpy(k_lens[part]), a, b)
        buckets.append(Bucket(part.stop - part.start, a, b, mask))
    q, k, real = (np.concatenate([x.ravel() for x in parts]) for parts in (q_rows, k_rows, is_real))
    out_index = np.empty(q.max() + 1, np.int64)
    out_index[q[real]] = real.nonzero()[0]
    return AttentionPlan(torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(out_index), tuple(buckets))


def _bucketed(order: Sequence[tuple[int, bool, int, int, int]]) -> list[slice]:
    """Cut the sorted segments into runs with bounded padding and one kind: as many ranges of keys (so that prompts are
    apart from the samples that share them), and few queries or many."""
    starts: list[int] = []
    pairs = widest = 0
    for i, (_, _, num_keys, length, _) in enumerate(order):
        pairs, widest = pairs + length * num_keys, max(widest, length)
        padded = (i + 1 - starts[-1]) * widest * num_keys if starts else 0
        same_kind = bool(starts) and order[starts[-1]][:2] == order[i][:2]
        if not (same_kind and padded <= max(_SLACK * pairs, pairs + _FREE_PAIRS)):
            starts.append(i)
            pairs, widest = length * num_keys, length
    return [slice(*bounds) for bounds in zip(starts, [*starts[1:], len(order)])]


def _rows(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([np.arange(s, s + n) for s, n in ranges])


def _left_padded(ranges: Int[np.ndarray, "B R 2"], width: int) -> Int[np.ndarray, "B {width}"]:
    """Rows of each segment's ranges (start, length), padded by its first row, so that no other document is read."""
    starts, lens = ranges[..., 0], ranges[..., 1]
    ends = lens.cumsum(1)
    place = np.maximum(np.arange(width) - width + ends[:, -1:], 0)
    which = (place[:, :, None] >= ends[:, None, :-1]).sum(2) if ends.shape[1] > 1 else np.zeros_like(place)
    return place + np.take_along_axis(starts - (ends - lens), which, 1)


def _mask(q_lens: Tensor, k_lens: Tensor, a: int, b: int) -> Tensor:
    """Bottom-right causal mask. Padded keys are masked; padded queries see the last key, because a row without keys
    would be NaN, and their outputs are dropped."""
    i, j = torch.arange(a)[:, None], torch.arange(b)
    seen = (j <= i + (b - a)) & (j >= b - k_lens[:, None, None])
    padded = (i < a - q_lens[:, None, None]) & (j == b - 1)
    return (seen | padded)[:, None]


IMPLEMENTATION = "rlkit_packed"  # the name of `packed_attention` in transformers
_UNUSED = ("position_ids", "cache_position")  # tensors that models pass to attention and attention ignores


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

    `window`: the maximum number of keys per query, including itself. `softcap`: z -> softcap tanh(z / softcap) on the
    scaled scores.
    """
    q, k, v = rows(q, plan.q_index), rows(k, plan.k_index), rows(v, plan.k_index)
    if plan.varlen is not None:
        return rows(flash(q, k, v, plan.varlen, scale=scale, window=window, softcap=softcap), plan.out_index)
    q_sizes, k_sizes = [b.size * b.q_len for b in plan.buckets], [b.size * b.k_len for b in plan.buckets]
    out = []
    for bucket, *parts in zip(plan.buckets, q.split(q_sizes), k.split(k_sizes), v.split(k_sizes)):
        qb, kb, vb = (rearrange(x, "(n rows) heads d -> n heads rows d", n=bucket.size) for x in parts)
        mask = _windowed(bucket, window, q.device)
        of_bucket = _bucket_attention(qb, kb, vb, mask, scale=scale, softcap=softcap)
        out.append(rearrange(of_bucket, "n heads rows d -> (n rows) heads d"))
    return rows(torch.cat(out), plan.out_index)


def rows(x: Float[Tensor, "T *rest"], index: Rows) -> Float[Tensor, "R *rest"]:
    """`x[index]`; on the CPU by `index_select`, whose backward is 3 to 6 times faster (on CUDA it uses atomics)."""
    return x[index] if isinstance(index, slice) or x.device.type != "cpu" else x.index_select(0, index)


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
    """Varlen flash attention: torch's kernel, or the `flash_attn` package for a softcap.

    Both are bottom-right causal if a segment has more keys than queries (FlashAttention 2.1 and later).
    """
    cu_q, cu_k, max_q, max_k = varlen
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms with fp32 weights return fp32 under autocast
    window_size = (-1 if window is None else window - 1, 0)
    if softcap is not None:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=True, window_size=window_size,
            softcap=softcap, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
    from torch.nn.attention import varlen as kernels

    attn: Callable[..., Tensor] = kernels.varlen_attn  # type: ignore[assignment]
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(attn).parameters else {}  # torch 2.11 needs no flag
    return attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size, **grouped)


def has_flash(device: torch.device, dtype: torch.dtype, *, head_dim: int, softcap: bool) -> bool:
    """Whether `flash` can run: half precision on an NVIDIA GPU, Ampere or later; a head dimension of at most 256,
    divisible by 8; and `flash_attn` installed if there is a softcap."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or torch.version.hip:
        return False
    if head_dim % 8 or head_dim > 256 or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return not softcap or find_spec("flash_attn") is not None


@uncompiled  # the number of buckets differs from call to call
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
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "1 T H D"], None]:
    """`attend` with transformers' attention signature; the plan is a keyword argument of the model's forward.

    Errors: ValueError for a call without a plan, and for unsupported inputs: a mask, dropout, sinks, biases.
    """
    if attention_plan is None:
        raise ValueError(
            "attention_plan is missing: this model is set up for packed training. Use rlkit.model.forward.forward, "
            "or model.set_attn_implementation('sdpa') to call it as a plain transformers model"
        )
    if attention_mask is not None or dropout or is_causal is False:
        raise ValueError("its attention takes a mask of its own, dropout, or is not causal")
    unknown = [name for name, x in others.items() if isinstance(x, Tensor) and name not in _UNUSED]
    if unknown:
        what = "sinks" if "s_aux" in unknown else f"inputs that are not supported ({', '.join(unknown)})"
        raise ValueError(f"its attention has {what}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    work = partial(attend, plan=attention_plan, scale=scale, window=sliding_window, softcap=softcap)
    exchange = attention_plan.exchange
    out = work(q, k, v) if exchange is None else exchange(q, k, v, work)
    return out[None], None


def register() -> str:
    """Register `packed_attention` with transformers; returns the name to pass as `attn_implementation`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
    return IMPLEMENTATION


@contextmanager
def as_inference(model: Any) -> Iterator[None]:
    """Context manager in which `model(input_ids, attention_mask=...)` works as in transformers, in eval mode."""
    training = model.training
    packed = model.config.get_text_config()._attn_implementation == IMPLEMENTATION
    if packed:
        model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        if packed:
            model.set_attn_implementation(IMPLEMENTATION)


def _windowed(bucket: Bucket, window: int | None, device: torch.device) -> Tensor | None:
    """The bucket's mask, without the keys that are `window` or more positions before the query."""
    if window is None or bucket.k_len <= window:
        return bucket.mask
    i, j = torch.arange(bucket.q_len, device=device)[:, None], torch.arange(bucket.k_len, device=device)
    last = i + bucket.k_len - bucket.q_len
    near = (j <= last) & (j > last - window)
    return near if bucket.mask is None else bucket.mask & (near | (j == bucket.k_len - 1))


def causal_sdpa(
    q: Float[Tensor, "B H a D"],
    k: Float[Tensor, "B Hk b D"],
    v: Float[Tensor, "B Hk b D"],
    mask: Bool[Tensor, "B 1 a b"] | None = None,
    *,
    scale: float | None = None,
) -> Float[Tensor, "B H a D"]:
    """torch's fused attention, with grouped queries; causal (a == b) without a mask.

    On CUDA no fused kernel supports grouped queries in fp32 or with a mask, and torch would materialise all scores, so
    keys and values are repeated there.
    """
    if q.device.type != "cpu":
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _few_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    n, kv, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    bias = torch.zeros(mask.shape, dtype=torch.promote_types(q.dtype, torch.float32)).masked_fill_(~mask, -torch.inf)
    bias = bias.view(-1, *mask.shape[-2:]).expand(n, -1, -1)
    bias = repeat(bias, "n a b -> (n kv) (group a) b", kv=kv, group=group)
    q = rearrange(q, "n (kv group) a d -> (n kv) (group a) d", kv=kv)
    k, v = (rearrange(x, "n kv b d -> (n kv) b d") for x in (k, v))
    probs = torch.baddbmm(bias, q.to(bias), k.mT.to(bias), alpha=scale).softmax(-1)
    return rearrange(probs.to(v.dtype) @ v, "(n kv) (group a) d -> n (kv group) a d", n=n, group=group)


def _bucket_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None
) -> Tensor:
    few = q.shape[2] <= FEW_QUERIES and q.device.type == "cpu"
    if softcap is None and not few:
        return causal_sdpa(q, k, v, mask, scale=scale)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if softcap is None:
        return _few_queries(q, k, v, mask, scale=scale)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    z = softcap * torch.tanh(q @ k.mT * (scale / softcap))
    z = z.masked_fill(~mask, -torch.inf)
    return z.softmax(-1, dtype=torch.promote_types(z.dtype, torch.float32)).to(v.dtype) @ v
