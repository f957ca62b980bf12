"""The one attention primitive: causal attention of packed queries, each segment over its own choice of keys.

A plan says, for each segment of the query stream, which rows of the key stream it sees. Packing is "its own rows"; a
group that shares a prompt is "the prompt's rows, then its own"; context parallelism is "also those of other ranks".
Segments never see anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlkit.segments import seq_lens
from rlkit.types import Batch

IMPLEMENTATION = "rlkit_packed"  # the name under which transformers knows `packed_attention`
_SLACK = 1.25  # a bucket may hold this many times the query-key pairs of its segments,
_FREE_PAIRS = 8192  # or this many more: what one more call costs


class Bucket(NamedTuple):
    """Segments that are attended to in one call, left-padded to `q_len` queries over `k_len` keys each."""

    size: int
    q_len: int
    k_len: int
    mask: Bool[Tensor, "B 1 q_len k_len"] | None  # None: plain causal with q_len == k_len


class AttentionPlan(NamedTuple):
    """Made once per micro-batch, used in every layer. `*_index` are rows of the packed streams, bucket by bucket."""

    q_index: Int[Tensor, "Q"]
    k_index: Int[Tensor, "K"]
    out_index: Int[Tensor, "T"]
    buckets: tuple[Bucket, ...]


def plan_batch(batch: Batch, *, device: torch.device | str) -> AttentionPlan:
    """The plan for `[prefixes, sequences]` as `rlkit.packing.join` lays them out: one sees its prefix and itself."""
    prefix_lens = seq_lens(batch.prefix_cu).tolist()
    lens, prefix_ids = seq_lens(batch.cu_seqlens).tolist(), batch.prefix_ids.tolist()
    prefix_starts, base = batch.prefix_cu.tolist(), int(batch.prefix_cu[-1])
    starts = batch.cu_seqlens.tolist()
    q_ranges = [(s, n) for s, n in zip(prefix_starts, prefix_lens)]
    keys = [[r] for r in q_ranges]
    for start, n, p in zip(starts, lens, prefix_ids):
        q_ranges.append((base + start, n))
        keys.append([(prefix_starts[p], prefix_lens[p]), (base + start, n)])
    return plan(q_ranges, keys, device=device)


def plan(
    q_ranges: list[tuple[int, int]], k_ranges: list[list[tuple[int, int]]], *, device: torch.device | str = "cpu"
) -> AttentionPlan:
    """A plan from ranges `(start, length)`: each segment's queries, and the ranges of keys that it sees, in order.

    Causality is bottom-right: the last query of a segment sees all its keys, the one before all but the last, and so
    on. The query ranges must tile the stream; a segment needs at least as many keys as queries.
    """
    q_lens = [n for _, n in q_ranges]
    k_lens = [sum(n for _, n in ranges) for ranges in k_ranges]
    for i, (a, b) in enumerate(zip(q_lens, k_lens, strict=True)):
        if a > b:
            raise ValueError(f"k_ranges[{i}] holds {b} keys for {a} queries; a query sees at least itself")
    order = sorted((i for i in range(len(q_lens)) if q_lens[i]), key=lambda i: (k_lens[i], q_lens[i]))
    q_rows: list[Tensor] = []
    k_rows: list[Tensor] = []
    buckets: list[Bucket] = []
    place = torch.empty(sum(q_lens), dtype=torch.long)
    done = 0
    for members in _bucketed(order, q_lens, k_lens):
        a, b = max(q_lens[i] for i in members), max(k_lens[i] for i in members)
        ql, kl = torch.tensor([q_lens[i] for i in members]), torch.tensor([k_lens[i] for i in members])
        q = _left_padded([[q_ranges[i]] for i in members], a)
        k = _left_padded([k_ranges[i] for i in members], b)
        real = torch.arange(a) >= a - ql[:, None]
        place[q[real]] = done + real.flatten().nonzero().flatten()
        uniform = bool((ql == a).all() and (kl == b).all())
        mask = None if uniform and a == b else _mask(ql, kl, a, b).to(device)
        buckets.append(Bucket(len(members), a, b, mask))
        q_rows.append(q.flatten())
        k_rows.append(k.flatten())
        done += q.numel()
    empty = [torch.empty(0, dtype=torch.long)]
    index = [torch.cat(rows or empty).to(device) for rows in (q_rows, k_rows)]
    return AttentionPlan(index[0], index[1], place.to(device), tuple(buckets))


def attend(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "S Hk D"],
    v: Float[Tensor, "S Hk D"],
    plan: AttentionPlan,
    *,
    scale: float,
) -> Float[Tensor, "T H D"]:
    """softmax(scale q k^T) v for every segment of the plan; `H` may be a multiple of `Hk` (grouped queries)."""
    sizes = [b.size * b.q_len for b in plan.buckets], [b.size * b.k_len for b in plan.buckets]
    queries = q[plan.q_index].split(sizes[0])
    keys, values = k[plan.k_index].split(sizes[1]), v[plan.k_index].split(sizes[1])
    out = [
        F.scaled_dot_product_attention(
            qb.view(bucket.size, bucket.q_len, *q.shape[1:]).transpose(1, 2),
            kb.view(bucket.size, bucket.k_len, *k.shape[1:]).transpose(1, 2),
            vb.view(bucket.size, bucket.k_len, *v.shape[1:]).transpose(1, 2),
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        .transpose(1, 2)
        .flatten(0, 1)
        for bucket, qb, kb, vb in zip(plan.buckets, queries, keys, values)
    ]
    return torch.cat(out)[plan.out_index] if out else q


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
    if attention_mask is not None or dropout or softcap:
        raise ValueError(f"packed attention has no attention_mask, dropout or softcap (got {dropout=}, {softcap=})")
    if sliding_window is not None and max((b.k_len for b in attention_plan.buckets), default=0) > sliding_window:
        raise ValueError(f"a sequence is longer than the model's sliding window of {sliding_window}; not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, attention_plan, scale=scale)[None], None


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
    """Cut the sorted segments into runs whose padding stays inside the slack."""
    runs: list[list[int]] = []
    pairs = widest = 0
    for i in order:
        pairs, widest = pairs + q_lens[i] * k_lens[i], max(widest, q_lens[i])
        padded = (len(runs[-1]) + 1 if runs else 1) * widest * k_lens[i]
        if runs and padded <= max(_SLACK * pairs, pairs + _FREE_PAIRS):
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
