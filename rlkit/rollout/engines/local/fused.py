"""Decoding from a copy of the weights in the compute dtype, with fused operators, recorded in CUDA graphs.

On a GPU a decoding step of a small model is a few hundred short kernels, and the host needs longer to launch them than
the device to run them: `Decoder` takes 11 ms a token for 1.5 B weights in bf16, whatever the number of rows. Here a
layer is ten kernels (`rlkit.kernels.decode` between the products), the shapes of a step are fixed by the number of rows
and the capacity of the cache, and sampling is part of the step, so that one launch replays all of it.

The copy is in 16 bits (joint q, k, v and joint gate, up); the residual stream, norms, rotations, softmax and logits are
in fp32, as in a forward under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.kernels.decode import add_rms_norm, append_rotated, attend_slots, fits_kernels, silu_mul
from rlkit.kernels.linear_logp.chunked import full_sums, product_into
from rlkit.parallel.attention import Segment, attend, has_flash, plan
from rlkit.rollout.engines.local.decode import Decoder, Layer, Weights, free_bytes, weights_of
from rlkit.rollout.sampling import Sampled, sample

SMALL, WIDE = (1, 2, 4, 8, 16, 32, 64, 128), 64  # numbers of rows with a graph of their own: these, then steps of WIDE
PLACES = 64  # the capacity of the cache is a multiple of it
CACHE_SHARE = 0.8  # of the free memory of a device, for keys and values
_JOINT = {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias"), "gate_up": ("gate", "up")}
_APART = ("o", "o_bias", "down")  # other products
KEEP_SHARE = 16  # a cache of at most this part of the device's memory is kept between batches, with its graphs


class FusedLayer(NamedTuple):
    """The weights of a layer as a step reads them: joint projections, and the others of `own`, which has their parts.
    `norms`: of the heads of queries and keys."""

    own: Layer
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    gate_up: Tensor


class FusedDecoder(Decoder):
    """`Decoder` over a copy of the weights in `dtype`, for CUDA (on a CPU without graphs: the same values, slower).

    `refresh` writes the model's weights into the copy. The cache has one fixed capacity, from the first `reserve` to
    the next longer one: `reserve` takes the final length of the sequences, and `slots` says how many fit. `launch`
    decodes and samples.

    Attributes:
        copied_bytes: size of the copy.
        reads_late: whether a step is best launched before the tokens of the one before it are read.
    """

    def __init__(self, model: Any, *, max_batch: int, max_len: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._copy: tuple[Weights, list[FusedLayer]] | None = None
        super().__init__(model, max_batch=max_batch, max_len=max_len)
        config = model.config
        heads = {"heads": config.num_attention_heads, "kv_heads": self._kv_heads, "head_dim": self._head_dim}
        self._cuda = self.reads_late = model.device.type == "cuda"
        self._impl = None if fits_kernels(dtype, **heads) else "reference"
        self._flash = has_flash(model.device, dtype, head_dim=self._head_dim, softcap=False)
        self.sizes = sorted({*(n for n in SMALL if n < max_batch), *range(SMALL[-1], max_batch, WIDE), max_batch})
        self._graphs: dict[tuple[int, bool], tuple[Any, Sampled]] = {}
        self._pool: Any = None
        self._half_table: tuple[Tensor, Tensor] | None = None
        device = model.device
        self._ints = torch.zeros(2, self.sizes[-1], dtype=torch.long, device=device)  # tokens and positions
        self._floats = torch.zeros(2, self.sizes[-1], dtype=torch.float64, device=device)  # noise and temperatures

    def slots(self, length: int) -> int:
        """How many sequences of `length` tokens the device has memory for: one of `sizes`."""
        if not self._cuda:
            return self.sizes[-1]
        mine = sum(t.nbytes for kv in self._cache for t in kv)
        count = int(CACHE_SHARE * (free_bytes(self._ints.device) + mine)) // (self._place * self._capacity(length))
        return max([n for n in self.sizes if n <= count], default=self.sizes[0])

    def refresh(self) -> None:
        """Copy the model's weights, on the device; graphs read the same memory. Adapters are merged layer by layer."""
        new = weights_of(self._model, layers=iter)
        if self._copy is None:
            self._copy = self._weights, self._layers = copied(new, self._dtype)
            self.copied_bytes = sum(t.nbytes for t in _tensors(self._weights))
            return
        with torch.no_grad():
            for old, fresh in zip(_tensors(self._weights), _tensors(new), strict=True):
                old.copy_(fresh)

    def release(self, *, whole: bool = False) -> None:
        """Drop a cache that is large, or the `whole` of any, and its graphs."""
        size = sum(t.nbytes for kv in self._cache for t in kv)
        total = torch.cuda.get_device_properties(self._ints.device).total_memory if self._cuda else 1 << 30
        if whole or size > total // KEEP_SHARE:
            self._cache, self._graphs, self._pool = [], {}, None

    @torch.inference_mode()
    def reserve(self, rows: int, length: int, *, keep: int) -> None:
        """Make room for `length` positions in slots 0..rows-1; slots below `keep` keep what they hold."""
        had_rows, had = (self._cache[0][0].shape[0], self._cache[0][0].shape[2]) if self._cache else (0, 0)
        if had_rows >= rows and had >= length:
            return
        need = self._capacity(length)
        largest = max(rows, had_rows), max(had, need)  # which spares layouts, where the device has room for it
        rows, capacity = largest if largest[0] <= self.slots(largest[1]) else (rows, need)
        kept = min(had, capacity)
        shape = (rows, self._kv_heads, capacity, self._head_dim)
        self._graphs, self._pool = {}, None
        olds: list[Any] = self._cache or [None] * len(self._layers)
        for i, old in enumerate(olds):  # one after the other: the old block of a layer is free before the next is made
            new = [torch.zeros(shape, dtype=self._dtype, device=self._ints.device) for _ in range(2)]
            for block, before in zip(new, old or ()):
                block[:keep, :, :kept] = before[:keep, :, :kept]
            self._cache[i : i + 1] = [(new[0], new[1])]
        if self._half_table is None or self._half_table[0].shape[0] < capacity:  # cos and sin of half a head, in fp32
            like, positions = torch.zeros(1, 1, 1, device=self._ints.device), torch.arange(capacity)[None]
            cos, sin = (
                t[0, :, : self._head_dim // 2] for t in self._model.model.rotary_emb(like, positions.to(like.device))
            )
            self._half_table = cos.float().contiguous(), sin.float().contiguous()

    def _capacity(self, length: int) -> int:
        return -(-length // PLACES) * PLACES

    def _through(
        self, tokens: Tensor, positions: Tensor, slots: Tensor | None, attended: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """The tokens through all layers, their keys and values into the cache; normed hidden states of the last."""
        assert self._half_table is not None
        options: dict[str, Any] = {"eps": self._eps, "dtype": self._dtype}
        x = F.embedding(tokens, self._weights.embed).float()
        norms = [*(layer.own.norm for layer in self._layers), self._weights.norm]
        h = add_rms_norm(x, None, norms[0], **options)
        for i, layer in enumerate(self._layers):
            own = layer.own
            qkv = F.linear(h, layer.qkv, layer.qkv_bias)
            q = append_rotated(
                qkv, *self._half_table, positions, *self._cache[i],
                slots=slots, norms=layer.norms, eps=self._eps, impl=self._impl,
            )  # fmt: skip
            h = add_rms_norm(x, F.linear(attended(q, i), own.o, own.o_bias), own.mlp_norm, **options)
            h = add_rms_norm(x, F.linear(silu_mul(F.linear(h, layer.gate_up)), own.down), norms[i + 1], **options)
        return h

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Write the keys and values of each prompt into its slot: one packed sequence of tokens, no padding."""
        device, lens = self._ints.device, [len(p) for p in prompts]
        tokens = torch.tensor([t for p in prompts for t in p], device=device)
        positions = torch.cat([torch.arange(n) for n in lens]).to(device)
        slot = torch.tensor(slots, device=device).repeat_interleave(torch.tensor(lens, device=device))
        starts = np.concatenate(([0], np.cumsum(lens)))
        spans = [Segment(int(s), n, [(int(s), n)]) for s, n in zip(starts, lens, strict=False)]
        packed = plan(spans, flash=self._flash).to(device)

        def attended(q: Tensor, layer: int) -> Tensor:
            k, v = (block[slot, :, positions] for block in self._cache[layer])
            return attend(q.unflatten(1, (-1, self._head_dim)), k, v, packed, scale=self._head_dim**-0.5).flatten(1)

        self._through(tokens, positions, slot, attended)

    @torch.inference_mode()
    def extend(self, tokens: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> None:
        """Write the keys and values of further tokens of slots that hold `starts` positions."""
        device, lens = self._ints.device, torch.tensor([len(row) for row in tokens])
        ids = torch.tensor([t for row in tokens for t in row], device=device)
        positions = torch.cat([torch.arange(s, s + int(n)) for s, n in zip(starts, lens, strict=True)]).to(device)
        slot = torch.tensor(slots).repeat_interleave(lens).to(device)
        self._through(ids, positions, slot, lambda q, i: self._attend(q, i, positions, slot))

    def _attend(self, q: Tensor, layer: int, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        return attend_slots(q, *self._cache[layer], positions, slots=slots, impl=self._impl)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits after reading `tokens[i]` at `positions[i]` of slot i, fp32."""
        h = self._through(tokens, positions, None, lambda q, i: self._attend(q, i, positions))
        logits = torch.empty(len(h), len(self._weights.head), dtype=torch.float32, device=h.device)
        with full_sums():
            product_into(logits, h, self._weights.head.t())
        return logits

    @torch.inference_mode()
    def launch(
        self, read: tuple[np.ndarray, np.ndarray] | None, noise: np.ndarray, temperatures: np.ndarray | None
    ) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Queue a step: read a token per row and sample the next. Returns what waits for the ids and log-probs, so that
        the host works meanwhile.

        `read` are the tokens and their positions; None: what the last step samples, one place further. The number of
        rows is one of `sizes`.
        """
        rows = len(noise)
        if read is not None:
            self._ints[:, :rows] = self._sent(np.stack(read))
        self._floats[:, :rows] = self._sent(np.stack((noise, np.ones(rows) if temperatures is None else temperatures)))
        out = self._recorded(rows, temperatures is not None)
        if not self._cuda:
            return lambda: (out.ids.numpy(), out.logp.numpy())
        copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in out]
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> tuple[np.ndarray, np.ndarray]:
            copied.synchronize()
            return copies[0].numpy(), copies[1].numpy()

        return wait

    def _sent(self, array: np.ndarray) -> Tensor:
        """A copy on the device, which the host does not wait for."""
        there = torch.from_numpy(array)
        return there.pin_memory().to(self._ints.device, non_blocking=True) if self._cuda else there

    def replay_differs(self) -> str | None:
        """How a recorded step differs from the same operations one by one; None if it does not."""
        rows, u = self.sizes[0], 0.3
        self.reserve(rows, PLACES, keep=0)
        tokens, positions = np.full(rows, 3), np.zeros(rows, np.int64)
        _, logp = self.launch((tokens, positions), np.full(rows, u), None)()
        read = torch.from_numpy(np.stack((tokens, positions))).to(self._ints.device)
        want = sample(self.decode(*read), self._floats[0, :rows]).logp.cpu().numpy()
        self._cache, self._graphs, self._pool = [], {}, None
        worst = float(np.abs(logp - want).max())
        return None if worst <= 1e-4 else f"its log-probs from a CUDA graph differ by {worst:.1e}"

    def _recorded(self, rows: int, tempered: bool) -> Sampled:
        """A step from its graph, which is recorded when it is first asked for. It leaves what the next one reads."""

        def step() -> Sampled:
            (tokens, positions), (noise, temperatures) = self._ints[:, :rows], self._floats[:, :rows]
            logits = self.decode(tokens, positions)
            out = sample(logits, noise, temperature=temperatures.float() if tempered else None)
            tokens.copy_(out.ids)
            positions.add_(1)
            return out

        if not self._cuda or torch.are_deterministic_algorithms_enabled():  # whose cumsum is on the host
            return step()
        if (rows, tempered) not in self._graphs:
            before = self._ints.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles the kernels and makes the library's handles
                step()
            torch.cuda.current_stream().wait_stream(stream)
            self._ints.copy_(before)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others take memory
                out = step()
            self._pool = self._pool or graph.pool()
            self._graphs[rows, tempered] = graph, out
        graph, out = self._graphs[rows, tempered]
        graph.replay()
        return out


def copied(weights: Weights, dtype: torch.dtype) -> tuple[Weights, list[FusedLayer]]:
    """A copy in `dtype` (norms keep theirs) with joint projections, and the same memory by the names of `Weights`."""

    def half(x: Tensor) -> Tensor:
        return x.detach().to(dtype, copy=True)

    layers, fused = [], []
    for layer in weights.layers:
        joint, made = dict[str, Tensor](), dict[str, Tensor]()
        for name, x in layer._asdict().items():
            if x is not None and ("norm" in name or name in _APART):
                made[name] = x.detach().clone() if "norm" in name else half(x)
        for name, parts in _JOINT.items():
            tensors = [getattr(layer, part) for part in parts]
            if tensors[0] is not None:
                joint[name] = torch.cat([x.detach().to(dtype) for x in tensors])
                made |= zip(parts, joint[name].split([len(x) for x in tensors]), strict=True)
        layers.append(own := layer._replace(**made))
        norms = None if own.q_norm is None or own.k_norm is None else (own.q_norm, own.k_norm)
        fused.append(FusedLayer(own, joint["qkv"], joint.get("qkv_bias"), norms, joint["gate_up"]))
    embed = half(weights.embed)
    return Weights(embed, layers, weights.norm.detach().clone(), embed if _tied(weights) else half(weights.head)), fused


def _tied(weights: Weights) -> bool:
    return weights.head.data_ptr() == weights.embed.data_ptr()


def _tensors(weights: Weights) -> Iterator[Tensor]:
    yield weights.embed
    for layer in weights.layers:
        yield from (t for t in layer if t is not None)
    yield from (weights.norm,) if _tied(weights) else (weights.norm, weights.head)
