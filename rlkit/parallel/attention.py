"""Causal attention of packed queries, where a plan chooses the keys of each segment.

A plan lists, for each segment of the query stream, the rows of the key stream that it attends to. Packing is "its own
rows"; a group with a shared prompt is "the prompt's rows, then its own"; context parallelism adds rows of other ranks.
A plan consists of index tensors, made once per micro-batch and used in every layer.

On the CPU and in fp32, attention runs as padded buckets of `scaled_dot_product_attention`; in half precision on CUDA,
as varlen flash kernels. Both take the keys of a segment as consecutive rows, so a prompt's keys are copied for each
sample. Where these copies would take more memory than a second pass over the queries, all samples of a prompt attend to
one copy of its keys, or to a view of them (`SharedKeys`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from rlkit._util.tensors import uncompiled
from rlkit.segments import cumulative, seq_lens
from rlkit.types import Batch

X = TypeVar("X")
Rows = Int[Tensor, "R"] | slice
FEW_QUERIES = 16  # up to here plain matrix products beat the CPU's fused attention: 2.7x at 7 queries over 25 keys
_SLACK = 1.25  # a bucket may hold this many times the query-key pairs of its segments,
_FREE_PAIRS = 8192  # or this many more pairs, which cost as much as one more call
# Copied keys of prompts for each key of their own that segments may have. With 4 query heads for each key head, these
# copies are about as many bytes as the results of a second pass over the queries.
_COPIES = 2
SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
AGREE = 0.02  # largest relative difference, in bf16, of attention in two parts and in one
_current: ContextVar[AttentionPlan | None] = ContextVar("_current", default=None)  # models do not pass a plan on


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
    call over context parallel ranks (see `rlkit.parallel.context`). `shared` is set where it saves memory, `rows` (see
    `rlkit.parallel.padded`) for models with recurrent layers, `experts` where a batch has those of its engine, `reads`
    for flash kernels where keys are read several times.
    """

    q_index: Rows
    k_index: Rows
    out_index: Rows
    buckets: tuple[Bucket, ...] = ()
    varlen: Varlen | None = None
    exchange: Callable[..., Tensor] | None = None
    shared: SharedKeys | None = None
    rows: Any = None
    experts: Int[Tensor, "S layers k"] | None = None
    reads: Reads | None = None

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same plan with its tensors on `device`."""
        return to_device(self, device)


class Reads(NamedTuple):
    """Where each row of a stream is read: for a gradient that sums without a sort and without atomics.

    The rows `once` are read at place `at` alone; row `often[i]` at `places[i]`, where `counted`.
    """

    once: Int[Tensor, "M"]
    at: Int[Tensor, "M"]
    often: Int[Tensor, "R"]
    places: Int[Tensor, "R C"]
    counted: Bool[Tensor, "R C"]


class SharedKeys(NamedTuple):
    """The same attention in two parts: each segment to its own keys, causal, and all samples of a prompt to its keys.

    The segments of `prompts` are runs of samples that share a prompt, whose keys `prompts.k_index` has once for each
    run. `longest`: the most keys that a query sees.
    """

    tails: AttentionPlan
    prompts: AttentionPlan
    longest: int


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
    return out + [Segment(*span, [prefixes[p], span]) for span, p in zip(sequences, batch.prefix_ids.tolist())]


def plan(spans: Sequence[Segment], *, flash: bool = False) -> AttentionPlan:
    """A plan from segments, on the CPU, for `flash` kernels or (default) for padded buckets.

    Causality is bottom-right: the last query of a segment sees all its keys, the one before all but the last, and so
    on. The queries must tile a nonempty stream; a segment needs at least as many keys as queries.
    """
    spans = [s for s in spans if s.length]
    for i, s in enumerate(spans):
        if s.length > s.num_keys:
            raise ValueError(f"segment {i} has {s.num_keys} keys for {s.length} queries; a query sees at least itself")
    made = _varlen_plan(spans) if flash else _bucket_plan(spans)
    return made._replace(shared=_shared_keys(spans, flash=flash))


def _varlen_plan(spans: Sequence[Segment]) -> AttentionPlan:
    q_lens, k_lens = [s.length for s in spans], [s.num_keys for s in spans]
    q = torch.from_numpy(_rows([s[:2] for s in spans]))
    k = torch.from_numpy(_rows([r for s in spans for r in s.keys]))
    cu_q, cu_k = (cumulative(torch.tensor(x, dtype=torch.int32)) for x in (q_lens, k_lens))
    varlen = Varlen(cu_q, cu_k, max(q_lens), max(k_lens))
    return AttentionPlan(as_slice(q), as_slice(k), as_slice(q.argsort()), varlen=varlen, reads=reads_of(k.numpy()))


def reads_of(index: Int[np.ndarray, "K"]) -> Reads | None:
    """Where `index` reads each row; None if it reads none of them twice."""
    order = np.argsort(index, kind="stable")
    read, first, counts = np.unique(index[order], return_index=True, return_counts=True)
    if counts.max(initial=0) < 2:
        return None
    once, often = counts == 1, counts > 1
    step = np.arange(counts.max())
    counted = step < counts[often, None]
    places = order[np.where(counted, first[often, None] + step, 0)]
    arrays = (read[once], order[first[once]], read[often], places, counted)
    return Reads(*map(torch.from_numpy, arrays))


def as_slice(index: Tensor) -> Rows:
    """A slice if the rows are consecutive: a view instead of a gather."""
    first = int(index[0])
    return slice(first or None, first + len(index)) if torch.equal(index, torch.arange(len(index)) + first) else index


def _shared_keys(spans: Sequence[Segment], *, flash: bool) -> SharedKeys | None:
    """The plan in two parts, where copies of prompts' keys would take more memory. The last range of a segment's keys
    is its own, the others are its prompt's."""
    tails = [Segment(s.start, s.length, s.keys[-1:]) for s in spans]
    runs: list[Segment] = []
    for s in spans:
        prompt = [r for r in s.keys[:-1] if r[1]]
        if runs and prompt == runs[-1].keys and s.start == runs[-1].start + runs[-1].length:
            runs[-1] = Segment(runs[-1].start, runs[-1].length + s.length, prompt)
        elif prompt:
            runs.append(Segment(s.start, s.length, prompt))
    once, copied = (sum(s.num_keys for s in some) for some in ([*tails, *runs], spans))
    few = copied - once <= _COPIES * sum(s.num_keys for s in tails)
    if few or not runs or any(s.num_keys < s.length for s in tails):
        return None
    prompts = _varlen_plan(runs)
    if not flash:
        buckets = tuple(Bucket(1, s.length, s.num_keys, None) for s in runs)
        prompts = prompts._replace(buckets=buckets, varlen=None)
    return SharedKeys(plan(tails, flash=flash), prompts, max(s.num_keys for s in spans))


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
    return rows_at(ranges, np.maximum(np.arange(width) - width + ranges[..., 1].sum(1, keepdims=True), 0))


def rows_at(ranges: Int[np.ndarray, "B R 2"], place: Int[np.ndarray, "B L"]) -> Int[np.ndarray, "B L"]:
    """The rows of the stream at these places of each document, whose tokens are its ranges (start, length)."""
    starts, lens = ranges[..., 0], ranges[..., 1]
    ends = lens.cumsum(1)
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
    v: Float[Tensor, "S Hk E"],
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "T H E"]:
    """softmax(scale q k^T) v for every segment of the plan; `H` may be a multiple of `Hk` (grouped queries).

    `window`: the maximum number of keys per query, including itself. `softcap`: z -> softcap tanh(z / softcap) on the
    scaled scores. `sinks`: one more score per head in the denominator of the softmax, which has no value. Values may
    have another size than keys (multi-head latent attention).
    """
    if q.shape[-1] != v.shape[-1] and (plan.varlen is not None or plan.shared is not None):
        width = max(q.shape[-1], v.shape[-1])  # the kernels take one size; zeros change no score and no value
        wide_q, wide_k, wide_v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        out = attend(wide_q, wide_k, wide_v, plan, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out[..., : v.shape[-1]]
    if plan.shared is not None and sinks is None and _can_share(plan, q, k, v, window=window, softcap=softcap):
        return _attend_shared(q, k, v, plan.shared, scale=scale)
    if plan.varlen is not None and sinks is not None:
        gathered = rows(q.to(v.dtype), plan.q_index), rows(k.to(v.dtype), plan.k_index), rows(v, plan.k_index)
        return rows(_Sinks.apply(*gathered, sinks, plan, scale, window), plan.out_index)
    q, k, v = rows(q, plan.q_index), *(read_rows(x, plan.k_index, plan.reads) for x in (k, v))
    if plan.varlen is not None:
        return rows(_flash(q, k, v, plan.varlen, scale=scale, window=window, softcap=softcap), plan.out_index)
    outputs = []
    for bucket, qb, kb, vb in _by_bucket(plan.buckets, (q,), (k, v)):
        mask = _windowed(bucket, window, q.device)
        outputs.append(_packed(_bucket_attention(qb, kb, vb, mask, scale=scale, softcap=softcap, sinks=sinks)))
    return rows(torch.cat(outputs), plan.out_index)


def _by_bucket(buckets: Sequence[Bucket], queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Iterator[Any]:
    """Each bucket with its rows of the query streams and of the key streams: `[n heads rows ...]` each."""
    streams = [(x, [b.size * b.q_len for b in buckets]) for x in queries]
    streams += [(x, [b.size * b.k_len for b in buckets]) for x in keys]
    for bucket, *parts in zip(buckets, *(x.split(sizes) for x, sizes in streams)):
        yield bucket, *(rearrange(x, "(n rows) heads ... -> n heads rows ...", n=bucket.size) for x in parts)


def _packed(x: Float[Tensor, "n heads rows *d"]) -> Float[Tensor, "R heads *d"]:
    return rearrange(x, "n heads rows ... -> (n rows) heads ...")


def rows(x: Float[Tensor, "T *rest"], index: Rows) -> Float[Tensor, "R *rest"]:
    """`x[index]`; on the CPU by `index_select`, whose backward is 3 to 6 times faster (on CUDA it uses atomics)."""
    return x[index] if isinstance(index, slice) or x.device.type != "cpu" else x.index_select(0, index)


def read_rows(x: Float[Tensor, "T *rest"], index: Rows, reads: Reads | None) -> Float[Tensor, "R *rest"]:
    """`rows`, with a gradient that sums the places of each row in fp32: torch's sorts the index in every layer."""
    return rows(x, index) if reads is None or isinstance(index, slice) else _ReadRows.apply(x, index, reads)


class _ReadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, reads: Reads) -> Tensor:
        ctx.save_for_backward(*reads)
        ctx.num_rows = x.shape[0]
        return rows(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        once, at, often, places, counted = ctx.saved_tensors
        out = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        out[once] = grad[at]
        each = grad[places].masked_fill(~counted.view(*counted.shape, *[1] * (grad.ndim - 1)), 0)
        dtype = torch.promote_types(grad.dtype, torch.float32)
        out[often] = each.sum(1, dtype=dtype).to(grad.dtype)
        return out, None, None


def _flash(
    q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, *, scale: float, window: int | None, softcap: float | None
) -> Float[Tensor, "Q H D"]:
    """Varlen flash attention: torch's kernel, or the `flash_attn` package for a softcap.

    Both are bottom-right causal if a segment has more keys than queries (FlashAttention 2.1 and later).
    """
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms with fp32 weights return fp32 under autocast
    window_size = (-1 if window is None else window - 1, 0)
    if softcap is None:
        return _varlen_attn(q, k, v, varlen, scale=scale, window_size=window_size)
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k, v, *varlen, softmax_scale=scale, causal=True, window_size=window_size,
        softcap=softcap, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _varlen_attn(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, **options: Any) -> Any:
    """torch's kernel, which takes grouped queries without a flag in torch 2.11."""
    from torch.nn.attention import varlen as kernels

    attn: Callable[..., Any] = kernels.varlen_attn
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(attn).parameters else {}
    return attn(q, k, v, *varlen, **options, **grouped)


def _can_share(
    plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, softcap: float | None
) -> bool:
    """Whether there are kernels that return what `_Shared` needs, and every query of a run sees the whole prompt."""
    sees_all = plan.shared is not None and (window is None or window >= plan.shared.longest)
    if not sees_all or softcap is not None:
        return False
    if plan.varlen is None:
        return q.device.type == "cpu"
    return _parts_agree(str(q.device), v.dtype, q.shape[1], k.shape[1], v.shape[2])


@cache
def _parts_agree(device: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether attention in two parts gives this device's numbers of one part, tried once on a small random case.

    The parts call a backward operator that torch does not document, and which has run here on stand-ins only: what it
    may do on a GPU or in another torch is found out before it trains a model.
    """
    spans = [Segment(0, 40, [(0, 40)]), *(Segment(40 + 8 * i, 8, [(0, 40), (40 + 8 * i, 8)]) for i in range(6))]
    made = to_device(plan(spans, flash=True), device)
    draw = torch.Generator().manual_seed(0)
    sizes = [(88, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    *inputs, grad = (torch.randn(size, generator=draw).to(device, dtype) for size in sizes)

    def numbers(way: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            out = way(*leaves, scale=head_dim**-0.5)
            return [out.detach().float(), *(x.float() for x in torch.autograd.grad(out, leaves, grad))]

    try:
        assert made.shared is not None
        two = numbers(partial(_attend_shared, shared=made.shared))
        one = numbers(partial(attend, plan=made._replace(shared=None)))
        off = max(float((a - b).norm() / b.norm()) for a, b in zip(two, one))
    except (RuntimeError, TypeError, ImportError, AttributeError) as error:
        said = str(error).partition("\n")[0]
    else:
        if off < AGREE:
            return True
        said = f"its numbers differ by {off:.2g}"
    fault = f"attention in two parts failed a check: {said}"
    warnings.warn(f"each sample gets a copy of its prompt's keys on {device}: {fault}", stacklevel=2)
    return False


def _attend_shared(q: Tensor, k: Tensor, v: Tensor, shared: SharedKeys, *, scale: float) -> Tensor:
    q, k = q.to(v.dtype), k.to(v.dtype)
    keys = (rows(x, part.k_index) for part in (shared.tails, shared.prompts) for x in (k, v))
    return _Shared.apply(q, *keys, shared, scale)


class _Shared(torch.autograd.Function):
    """Two attentions of the same queries, to their own keys (1) and to their prompt's (2), as one over all keys:

        lse = log(e^lse_1 + e^lse_2)        out = e^(lse_1 - lse) out_1 + e^(lse_2 - lse) out_2

    with lse the log of a query's softmax denominator. The backward of a kernel computes the probabilities from lse, so
    from the joint `lse` and `out` it computes the terms of its own keys in the joint gradient. Ring attention adds
    up the parts of different ranks in the same way (arXiv:2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k1: Tensor, v1: Tensor, k2: Tensor, v2: Tensor, shared: SharedKeys, scale: float
    ) -> Tensor:
        tails, prompts, _ = shared
        first = _with_lse((rows(q, tails.q_index), k1, v1), tails, causal=True, scale=scale)
        out, lse = (rows(x, tails.out_index) for x in first)
        out2, lse2 = _with_lse((rows(q, prompts.q_index), k2, v2), prompts, causal=False, scale=scale)
        out1, lse1 = rows(out, prompts.q_index), rows(lse, prompts.q_index)
        both = torch.logaddexp(lse1, lse2)
        share1, share2 = ((x - both).exp()[..., None] for x in (lse1, lse2))
        out[prompts.q_index] = (share1 * out1 + share2 * out2).to(out.dtype)
        lse[prompts.q_index] = both
        ctx.save_for_backward(q, k1, v1, k2, v2, out, lse)
        ctx.shared, ctx.scale = shared, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k1, v1, k2, v2, out, lse = ctx.saved_tensors
        (tails, prompts, _), scale = ctx.shared, ctx.scale
        q1, q2 = rows(q, tails.q_index), rows(q, prompts.q_index)
        filled = [(grad, 0.0), (out, 0.0), (lse, torch.inf)]  # probabilities of a padded query: e^(z - inf) = 0
        results = [_unrows(x, tails.out_index, q1.shape[0], fill) for x, fill in filled]
        dq, dk1, dv1 = _lse_backward(results, (q1, k1, v1), tails, causal=True, scale=scale)
        results = [rows(x, prompts.q_index) for x in (grad, out, lse)]
        dq2, dk2, dv2 = _lse_backward(results, (q2, k2, v2), prompts, causal=False, scale=scale)
        dq = rows(dq, tails.out_index)
        dq[prompts.q_index] += dq2
        return dq, dk1, dv1, dk2, dv2, None, None


def _unrows(x: Float[Tensor, "R *rest"], index: Rows, size: int, fill: float) -> Float[Tensor, "{size} *rest"]:
    """The tensor of which `x` is `rows(..., index)`, with `fill` in the other rows; a slice has no others."""
    if isinstance(index, slice):
        return x
    out = x.new_full((size, *x.shape[1:]), fill)
    out[index] = x
    return out


class _Sinks(torch.autograd.Function):
    """Attention with one more score s per head in the denominator, from a kernel that knows none but returns the log of
    its softmax denominator:

        lse = log(e^lse_1 + e^s)      out = e^(lse_1 - lse) out_1      ds = -sum_i e^(s - lse_i) (dout_i . out_i)

    with lse_1 and out_1 of the attention without it. As in `_Shared`, the kernel's backward takes the joint lse.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, plan: AttentionPlan, scale: float, window: int | None
    ) -> Tensor:
        out, lse = _with_lse((q, k, v), plan, causal=True, scale=scale, window=window)
        joint = torch.logaddexp(lse, sinks.to(lse))
        out = ((lse - joint).exp()[..., None] * out).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, joint)
        ctx.plan, ctx.options = plan, {"causal": True, "scale": scale, "window": window}
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, joint = ctx.saved_tensors
        gradients = _lse_backward((grad, out, joint), (q, k, v), ctx.plan, **ctx.options)
        dots = (grad.to(joint) * out.to(joint)).sum(-1)
        return *gradients, -((sinks.to(joint) - joint).exp() * dots).sum(0).to(sinks.dtype), None, None, None


def _with_lse(
    inputs: Sequence[Tensor], part: AttentionPlan, *, causal: bool, scale: float, window: int | None = None
) -> tuple[Float[Tensor, "Q H D"], Float[Tensor, "Q H"]]:
    """Attention of q, k and v in the rows of `part`, and the log of each query's softmax denominator."""
    if part.varlen is not None:
        from torch.nn.attention.varlen import AuxRequest

        sides = (-1 if window is None else window - 1, 0 if causal else -1)
        options: dict[str, Any] = {"window_size": sides, "return_aux": AuxRequest(lse=True)}
        q, k, v = inputs
        out, lse = _varlen_attn(q, k, v, part.varlen, scale=scale, **options)
        return out, lse.mT  # [H, Q] there
    results = []
    for bucket, *parts in _by_bucket(part.buckets, inputs[:1], inputs[1:]):
        mask = _windowed(bucket, window, parts[0].device)
        plain, bias = causal and mask is None, _bias(mask, parts[0].dtype)
        results.append(_CPU_FORWARD(*parts, 0.0, plain, attn_mask=bias, scale=scale))
    out, lse = (torch.cat([_packed(x) for x in of_buckets]) for of_buckets in zip(*results))
    return out, lse


def _lse_backward(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    part: AttentionPlan,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the inputs of `_with_lse`, from the results of all parts: the gradient of out, out and lse."""
    if part.varlen is not None:
        grad, out, lse = (x.contiguous() for x in results)
        seed, unused = torch.zeros(2, dtype=torch.uint64, device=grad.device), torch.empty(0, device=grad.device)
        left = -1 if window is None else window - 1
        sides = {"window_size_left": left, "window_size_right": 0 if causal else -1}
        saved = *inputs, out, lse.mT.contiguous(), *part.varlen
        return torch.ops.aten._flash_attention_backward(grad, *saved, 0.0, causal, seed, unused, scale=scale, **sides)
    grads = []
    for bucket, grad, out, lse, *parts in _by_bucket(part.buckets, (*results, inputs[0]), inputs[1:]):
        mask = _windowed(bucket, window, grad.device)
        plain, bias = causal and mask is None, _bias(mask, grad.dtype)
        grads.append(_CPU_BACKWARD(grad, *parts, out, lse, 0.0, plain, attn_mask=bias, scale=scale))
    dq, dk, dv = (torch.cat([_packed(x) for x in of_buckets]) for of_buckets in zip(*grads))
    return dq, dk, dv


# what torch's attention calls on a CPU, with lse
_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


def has_flash(device: torch.device, dtype: torch.dtype, *, head_dim: int, softcap: bool) -> bool:
    """Whether flash kernels can run: half precision on an NVIDIA GPU, Ampere or later; a head dimension of at most 256,
    divisible by 8; and `flash_attn` installed if there is a softcap."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or torch.version.hip:
        return False
    if head_dim % 8 or head_dim > 256 or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return not softcap or find_spec("flash_attn") is not None


@contextmanager
def attending(plan: AttentionPlan | None) -> Iterator[None]:
    """Inside the block `packed_attention` uses this plan; models pass no keyword of ours to their attention."""
    token = _current.set(plan)
    try:
        yield
    finally:
        _current.reset(token)


def current_plan() -> AttentionPlan | None:
    """The plan of the packed forward that runs; None outside."""
    return _current.get()


def recomputing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint(context_fn=...)`: the backward recomputes with the plan of the forward."""
    return nullcontext(), attending(_current.get())


def as_attention(work: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """`work(module, q, k, v, scale=, window=, softcap=, sinks=)` with transformers' attention signature: of `q`
    [B, heads, L, dim] it returns [B, L, heads, dim].

    Errors: ValueError for what it does not compute: a mask, dropout, biases.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None or dropout or is_causal is False:
            raise ValueError("its attention takes a mask of its own, dropout (call model.eval()), or is not causal")
        if unknown := [name for name, x in others.items() if isinstance(x, Tensor) and name not in _UNUSED]:
            raise ValueError(f"its attention has inputs that are not supported ({', '.join(unknown)})")
        options = {"scale": query.shape[-1] ** -0.5 if scaling is None else scaling, "window": sliding_window}
        return work(module, query, key, value, **options, softcap=softcap, sinks=s_aux), None

    return attention


def _packed_attention(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """`attend` by the plan of `attending`; ValueError without one."""
    if (attention_plan := _current.get()) is None:
        raise ValueError(
            "the attention plan is missing: this model is set up for packed training. Use rlkit.model.forward.forward, "
            "or model.set_attn_implementation('sdpa') to call it as a plain transformers model"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    work: Callable[..., Tensor] = partial(attend, plan=attention_plan, **options)
    exchange = attention_plan.exchange
    return (work(q, k, v) if exchange is None else exchange(q, k, v, work))[None]


packed_attention = uncompiled(as_attention(_packed_attention))  # the number of buckets differs from call to call


def register() -> str:
    """Register `packed_attention` with transformers; returns the name to pass as `attn_implementation`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
    return IMPLEMENTATION


def set_attention(model: Any, name: str) -> None:
    """Set the attention of the language model; a vision tower keeps its own, in which images are segments."""
    apart = "text_config" in model.config.sub_configs and getattr(model.config, "vision_config", None) is not None
    model.set_attn_implementation({"text_config": name} if apart else name)


@contextmanager
def as_inference(model: Any, *, always: bool = False) -> Iterator[None]:
    """Context manager in which `model(input_ids, attention_mask=...)` works as in transformers, in eval mode.

    The attention of a packed model is eager there; `always`: that of any other model, too.
    """
    training, before = model.training, model.config.get_text_config()._attn_implementation
    if eager := always or before == IMPLEMENTATION:
        set_attention(model, "eager")
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        if eager:
            set_attention(model, before)


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
    if q.device.type != "cpu" and (mask is not None or q.dtype not in (torch.bfloat16, torch.float16)):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's fused attention, on CUDA without cuDNN's, which plans on the host for each new shape.

    A rollout has tens of shapes, and a plan took 56 to 60 ms on an H200 (torch 2.11, cuDNN 9.19), the first 1.4 s; the
    other kernels need 0.1 ms.
    """
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel(SDPA):
        return F.scaled_dot_product_attention(q, k, v, **options)


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
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    few = q.shape[2] <= FEW_QUERIES and q.device.type == "cpu"
    plain = softcap is None and sinks is None
    if plain and not few:
        return causal_sdpa(q, k, v, mask, scale=scale)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if plain:
        return _few_queries(q, k, v, mask, scale=scale)
    return masked_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)


def masked_attention(
    q: Float[Tensor, "B H a D"],
    k: Float[Tensor, "B Hk b D"],
    v: Float[Tensor, "B Hk b E"],
    mask: Bool[Tensor, "B 1 a b"],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "B H a E"]:
    """softmax over the keys where the mask is True, with a softcap and sinks as in `attend`."""
    if softcap is None and sinks is None:
        return causal_sdpa(q, k, v, mask, scale=scale)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    z = q @ k.mT * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # one more column of scores, without values
        z = torch.cat((z, sinks.to(z)[:, None, None].expand(*z.shape[:-1], 1)), -1)
    probs = z.softmax(-1, dtype=torch.promote_types(z.dtype, torch.float32))[..., : k.shape[2]]
    return probs.to(v.dtype) @ v
