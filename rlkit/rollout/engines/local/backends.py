"""The decoders of `LocalEngine`: `Decoder` where it provably computes the same function, else the model's own forward.

`CachedForward` keeps keys and values in slots through a transformers attention function; `Recompute` forwards whole
sequences and works with any model. Both have the methods of `Decoder`, whose docstrings describe them.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlkit._util.tensors import upcast
from rlkit.model import vision
from rlkit.model.families import NOT_CAUSAL, is_causal
from rlkit.model.positions import check_positions, positions
from rlkit.model.recurrent import States, recurrent_layers
from rlkit.model.routing import Chosen, num_experts, routers
from rlkit.model.sharding import dtype_of, inside
from rlkit.parallel.attention import as_attention, as_inference, masked_attention
from rlkit.rollout.engines.local.decode import Decoder, padded_turns, why_unsupported
from rlkit.rollout.engines.local.fused import FusedDecoder
from rlkit.types import Picture

logger = logging.getLogger(__name__)
IMPLEMENTATION = "rlkit_slots"
UNBOUNDED = 1 << 20  # tokens of a context of models whose positions have no end
_STATES = ("linear_attention", "conv", "hybrid", "mamba", "mlp", "moe")  # types of layers without attention, or with
_active: CachedForward | None = None


class CachedForward:
    """The model's own forward, with its attention replaced by one that reads and writes slots of a key-value cache.

    For models whose attention goes through transformers' `AttentionInterface` and is causal, full or sliding, with or
    without a softcap or sinks. Anything else an attention may be given (biases, prepared masks) raises. The states of
    recurrent and convolutional layers are in the slots too (`keeps_states`): a slot then cannot serve a prompt that is
    shorter than what it has read, and prompts are read together only where they are of one length.
    `windows` collects the sliding windows that were met.
    """

    def __init__(self, model: Any, *, max_batch: int, max_len: int) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, slot_attention)
        self._model, self._max_len = model, max_len
        self.sizes = sorted({*(n for n in (1, 2, 4) if n < max_batch), *range(8, max_batch, 8), max_batch})
        self.windows: set[int] = set()
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[nn.Module, States] = {}
        self._recurrent = dict(recurrent_layers(model))
        self.keeps_states = bool(self._recurrent)
        self._routers, self._num_experts = routers(model), num_experts(model.config)
        self._shape = (0, 0)
        self.reads_images = vision.reads_images(model.config) and vision.packs_images(model)
        self._shift = torch.zeros(max_batch, dtype=torch.long, device=model.device)  # of rotary positions, by images

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def release(self, *, whole: bool = False) -> None:  # noqa: ARG002
        """Free the cache."""
        self._layers, self._states, self._shape = {}, {}, (0, 0)

    @torch.no_grad()
    def reserve(self, rows: int, length: int, *, keep: int) -> None:
        """Make room for `length` positions in slots 0..rows-1; slots below `keep` keep what they hold."""
        self._longest = length
        self._shift[keep:] = 0
        had_rows, had = self._shape
        if had_rows >= rows and had >= length:
            return
        capacity = max(length, min(self._max_len, 2 * had)) if length > had else had
        self._shape = rows, capacity
        for layer, cached in self._layers.items():
            grown = tuple(old.new_zeros(rows, old.shape[1], capacity, old.shape[3]) for old in cached)
            for new, old in zip(grown, cached, strict=True):
                new[:keep, :, :had] = old[:keep]
            self._layers[layer] = grown[0], grown[1]
        if rows > had_rows:
            for states in self._states.values():
                states.resize(rows)

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], images: Sequence[Sequence[Picture]] = ()
    ) -> None:
        """Write the keys and values of each prompt, with its images, into its slot."""
        images = images or [()] * len(prompts)
        for some in self._together(prompts):
            self._prefill([prompts[i] for i in some], [slots[i] for i in some], [images[i] for i in some])

    def _together(self, tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Which of these are read in one call: all, or those of one length, where padding would change a state."""
        if not self.keeps_states:
            return [[*range(len(tokens))]]
        lens = [*map(len, tokens)]
        return [[i for i, n in enumerate(lens) if n == length] for length in sorted(set(lens))]

    def _prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], images: Sequence[Sequence[Picture]]
    ) -> None:
        device, longest = self._model.device, max(map(len, prompts))
        ids = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
        positions = torch.arange(longest, device=device).expand(len(prompts), -1)
        index = torch.tensor(slots, device=device)
        self._shift[index] = 0
        rotary = self._rotary(index, positions)
        for i, (prompt, pictures) in enumerate(zip(prompts, images, strict=True)):
            if pictures:
                rotary = rotary.clone() if rotary.ndim == 3 else rotary.repeat(3, 1, 1)
                places = vision.document_positions(self._model, ids[i, : len(prompt)], pictures)
                rotary[:, i, : len(prompt)] = places
                self._shift[slots[i]] = places.max() + 1 - len(prompt)
        inputs = vision.image_inputs([x for of in images for x in of], device)
        self._read(index, positions, input_ids=ids, position_ids=rotary, **inputs)

    def _read(self, slots: Int[Tensor, "B"], places: Int[Tensor, "B L"], **inputs: Any) -> None:
        """Tokens at places of slots through the layers, without logits, in the dtype in which `decode` computes."""
        with self._attending(slots, places):
            inside(self._model, lambda model: model.base_model(use_cache=False, **inputs))

    def _rotary(self, slots: Int[Tensor, "B"], positions: Int[Tensor, "B L"]) -> Tensor:
        """The rotary positions of places in slots: on three axes, shifted, where a slot has images."""
        shift = self._shift[slots] if self.reads_images else None
        return positions if shift is None or not shift.any() else (positions + shift[:, None]).expand(3, -1, -1)

    @torch.no_grad()
    def extend(self, tokens: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> None:
        """Write the keys and values of further tokens of slots that hold `starts` positions."""
        device = self._model.device
        for some in self._together(tokens):
            ids, positions = (x.to(device) for x in padded_turns([tokens[i] for i in some], [starts[i] for i in some]))
            index = torch.tensor([slots[i] for i in some], device=device)
            self._read(index, positions, input_ids=ids, position_ids=self._rotary(index, positions))

    def held_bytes(self, length: int) -> int:
        """Size of what `hold` copies."""
        states = [x[0] for of in self._states.values() for held in (of.conv, of.recurrent) for x in held.values()]
        keys = [x[0, :, 0] for kv in self._layers.values() for x in kv]
        return length * sum(x.nbytes for x in keys) + sum(x.nbytes for x in states)

    def hold(self, slot: int, length: int) -> tuple[dict[int, list[Tensor]], dict[nn.Module, States]]:
        """A copy of the first `length` positions of a slot, which are all that it has read, for `restore`."""
        row = torch.tensor([slot], device=self._model.device)
        keys = {layer: [block[slot, :, :length].clone() for block in kv] for layer, kv in self._layers.items()}
        return keys, {layer: states.of_rows(row) for layer, states in self._states.items()}

    def restore(self, held: tuple[dict[int, list[Tensor]], dict[nn.Module, States]], slot: int) -> None:
        """Write what `hold` has copied into a slot."""
        self._shift[slot] = 0
        keys, states = held
        for layer, blocks in keys.items():
            for block, x in zip(self._blocks(layer, *blocks), blocks, strict=True):
                block[slot, :, : x.shape[1]] = x
        for module, of_slot in states.items():
            self._write(module, of_slot, torch.tensor([slot], device=self._model.device))

    def _blocks(self, layer: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        """The cache of a layer, made for keys and values of the size of these [..., kv heads, L, dim] if needed."""
        if layer not in self._layers:
            rows, capacity = self._shape
            keys, values = (t.new_zeros(rows, t.shape[-3], capacity, t.shape[-1]) for t in like)
            self._layers[layer] = keys, values
        return self._layers[layer]

    @torch.no_grad()
    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source slot into its target slot."""
        self._shift[torch.tensor(targets)] = self._shift[torch.tensor(sources)]
        for cached in self._layers.values():
            for block in cached:
                block[torch.tensor(targets), :, :length] = block[torch.tensor(sources), :, :length]
        for states in self._states.values():
            states.write(states.of_rows(torch.tensor(sources)), torch.tensor(targets))

    @torch.no_grad()
    def decode(self, tokens: Int[Tensor, "B"], positions: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Logits after reading `tokens[i]` at `positions[i]` of slot i."""
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        with self._attending(rows, positions[:, None]):
            rotary = self._rotary(rows, positions[:, None])
            out = self._model(input_ids=tokens[:, None], position_ids=rotary, use_cache=False)
        return upcast(out.logits[:, -1])

    @contextmanager
    def _attending(self, rows: Tensor, positions: Tensor) -> Iterator[None]:
        global _active
        config = self._model.config.get_text_config()
        with as_inference(self._model):
            implementation = config._attn_implementation
            config._attn_implementation = IMPLEMENTATION
            self._rows, self._positions, self._first = rows, positions, positions[:, 0] == 0
            self._continues = self.keeps_states and not self._first.all()  # here, so that the host waits once
            _active = self
            forwards = {layer: vars(layer).get("forward") for layer in (*self._recurrent, *self._routers)}
            for layer, name in self._recurrent.items():
                layer.forward = partial(self._continue, layer, layer.forward, name)
            for i, router in enumerate(self._routers):
                router.forward = partial(self._choose, i, router.forward)
            try:
                yield
            finally:
                _active = None
                config._attn_implementation = implementation
                for layer, forward in forwards.items():
                    del layer.forward
                    if forward is not None:
                        layer.forward = forward

    def _continue(
        self, layer: nn.Module, forward: Any, name: str, hidden_states: Tensor, *args: Any, **options: Any
    ) -> Any:
        """A recurrent layer from the states of the slots, which it replaces; from 0 at the start of a document."""
        states = States()
        if layer in self._states and self._continues:
            states = self._states[layer].of_rows(self._rows).cleared(self._first)
        out = forward(hidden_states, *args, **options | {name: states, "attention_mask": None})
        self._write(layer, states, self._rows)
        return out

    def _choose(self, index: int, forward: Any, *args: Any, **options: Any) -> Any:
        """A router, whose choice is kept beside the keys of its layer."""
        with Chosen(self._num_experts) as chosen:
            out = forward(*args, **options)
        if chosen.indices is not None:
            experts = chosen.indices.to(torch.int16).view(*self._positions.shape, -1)[:, None]
            self._store(-1 - index, experts, experts[..., :0])
        return out

    def experts(self, slot: int, length: int) -> Any:
        """The experts of the first `length` tokens of a slot, an array [length, layers, k]; None of a dense model."""
        blocks = [self._layers[-1 - i][0] for i in range(len(self._routers)) if -1 - i in self._layers]
        if not blocks or len(blocks) < len(self._routers):
            return None
        return torch.stack([block[slot, 0, :length] for block in blocks], 1).cpu().numpy()

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, kv heads, L, dim] at the current positions of a layer's cache."""
        keys, values = self._blocks(layer, k, v)
        keys[self._rows[:, None], :, self._positions] = k.transpose(1, 2)
        values[self._rows[:, None], :, self._positions] = v.transpose(1, 2)
        return keys, values

    def _write(self, layer: nn.Module, states: States, rows: Tensor) -> None:
        if layer not in self._states:
            self._states[layer] = states.of_rows(rows.new_zeros(1))
            self._states[layer].resize(self._shape[0])
        self._states[layer].write(states, rows)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, **options: Any
    ) -> Float[Tensor, "B H L D"]:
        """Store k and v [B, kv heads, L, dim] at the current positions; attend with q [B, heads, L, dim]."""
        rows, positions = self._rows, self._positions
        keys, values = self._store(layer, k, v)
        keys, values = keys[rows, :, : self._longest], values[rows, :, : self._longest]
        behind = positions[:, :, None] - torch.arange(self._longest, device=q.device)
        seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        return masked_attention(q, keys, values, seen[:, None], **options)


def _slot_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, **options: Any) -> Tensor:
    """`CachedForward.attend` in a layer of its model."""
    if _active is None:
        raise NotImplementedError("no decoder reads the slots of this model")
    if window is not None:
        _active.windows.add(window)
    return _active.attend(module.layer_idx, q, k, v, window=window, **options).transpose(1, 2)


slot_attention = as_attention(_slot_attention)


class Recompute:
    """The whole sequence through `model(input_ids, attention_mask)` for every token; slots hold tokens and images."""

    keeps_states = False

    def experts(self, slot: int, length: int) -> None:
        """None: whole sequences are forwarded, with more tokens than were read."""

    def __init__(self, model: Any, *, max_batch: int) -> None:
        self._model, self.reads_images = model, vision.reads_images(model.config)
        self.sizes = list(range(1, max_batch + 1))
        self._slots: dict[int, tuple[list[int], Sequence[Picture]]] = {}

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def release(self, *, whole: bool = False) -> None:
        """Nothing worth freeing."""

    def reserve(self, rows: int, length: int, *, keep: int) -> None:
        """Have slots 0..rows-1 for `length` tokens; slots below `keep` keep theirs."""
        self._longest = length
        self._slots = {slot: self._slots[slot] if slot < keep else ([], ()) for slot in range(rows)}

    def prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], images: Sequence[Sequence[Picture]] = ()
    ) -> None:
        """Store each prompt, and its images, in its slot."""
        for prompt, slot, pictures in zip(prompts, slots, images or [()] * len(prompts), strict=True):
            self._slots[slot] = [*prompt], pictures

    def extend(self, tokens: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> None:
        """Store further tokens of slots that hold `starts` tokens."""
        for row, slot, start in zip(tokens, slots, starts, strict=True):
            self._slots[slot][0][start:] = row

    def held_bytes(self, length: int) -> int:  # noqa: ARG002
        """0: on the device it copies nothing."""
        return 0

    def hold(self, slot: int, length: int) -> list[int]:
        """A copy of the first `length` tokens of a slot, for `restore`."""
        return self._slots[slot][0][:length]

    def restore(self, held: list[int], slot: int) -> None:
        """Write what `hold` has copied into a slot."""
        self._slots[slot] = [*held], ()

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of each source slot into its target slot."""
        copied = [(ids[:length], images) for ids, images in map(self._slots.__getitem__, sources)]
        self._slots |= zip(targets, copied, strict=True)

    @torch.no_grad()
    def decode(self, tokens: Int[Tensor, "B"], positions: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Logits after reading `tokens[i]` at `positions[i]` of slot i."""
        slots = [self._slots[i] for i in range(len(tokens))]
        for (ids, _), token, position in zip(slots, tokens.tolist(), positions.tolist(), strict=True):
            ids[position:] = [token]
        mask = torch.arange(self._longest, device=tokens.device) <= positions[:, None]
        padded = torch.tensor([ids + [0] * (self._longest - len(ids)) for ids, _ in slots], device=tokens.device)
        with as_inference(self._model):
            media = [x for _, images in slots for x in images]
            pictures = vision.image_inputs(media, padded.device)
            pictures |= vision.token_types(self._model, padded) if media else {}
            logits = self._model(input_ids=padded, attention_mask=mask.long(), use_cache=False, **pictures).logits
        return upcast(logits[torch.arange(len(tokens), device=logits.device), positions])


Backend = Decoder | CachedForward | Recompute


def pick_decoder(
    model: Any, *, max_batch: int, max_len: int, compile: bool = False, dtype: torch.dtype | None = None,
    copy_batch: int | None = None,
) -> Backend:  # fmt: skip
    """The first of `FusedDecoder` (with a `dtype`), `Decoder`, `CachedForward` and `Recompute` that supports the model
    and agrees with it on a probe.

    The probe prefills two short prompts of different lengths and decodes four tokens of each. If it is not the first of
    them, the reason is logged in one line. `compile` is for `Decoder`, and ignored by the others. `copy_batch`: the
    `max_batch` of a `FusedDecoder`, if another, since only that one counts the memory of its cache.

    Errors: ValueError for a model whose attention is not causal: the log-prob of a token would depend on later ones.
    """
    reason = why_unsupported(model, max_len)
    if reason is None and dtype is not None:
        fused, why_not = _fused(model, max_batch=copy_batch or max_batch, max_len=max_len, dtype=dtype)
        if fused is not None:
            return fused
        logger.warning("LocalEngine samples from the model's own weights, not from a copy in %s: %s", dtype, why_not)
    if reason is None:
        decoder = Decoder(model, max_batch=max_batch, max_len=max_len, compile=compile)
        if (reason := disagreement(decoder, model, max_len=max_len)) is None:
            return decoder
    name = type(model).__name__
    if not is_causal(model, min(8, max_len)):
        raise ValueError(f"{name} (model type {model.config.model_type!r}) cannot sample: {NOT_CAUSAL}")
    cached = CachedForward(model, max_batch=max_batch, max_len=max_len)
    if (why_not := _why_not_cached(cached, model, max_len)) is None:
        logger.warning("LocalEngine decodes %s through the model's own forward: %s", name, reason)
        return cached
    logger.warning("LocalEngine forwards whole sequences of %s for every token: %s; %s", name, reason, why_not)
    return Recompute(model, max_batch=max_batch)


def _fused(model: Any, *, max_len: int, **options: Any) -> tuple[FusedDecoder | None, str | None]:
    """A `FusedDecoder`, or why it cannot serve: what its kernels raise is a reason, except full memory."""
    try:
        decoder = FusedDecoder(model, max_len=max_len, **options)
        reason = disagreement(decoder, model, max_len=max_len, dtype=options["dtype"]) or decoder.replay_differs()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return (decoder, None) if reason is None else (None, reason)


def _why_not_cached(cached: CachedForward, model: Any, max_len: int) -> str | None:
    """Why `CachedForward` cannot serve this model, or None. A window longer than the probe must reach it too."""
    config = model.config.get_text_config()
    if vision.reads_images(model.config) and not vision.packs_images(model):
        return "the tokens of an image see one another in both directions"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention", "sliding_attention"])
    if not kinds <= {"full_attention", "sliding_attention", *(_STATES if cached.keeps_states else ())}:
        return f"its layer types are {sorted(kinds)}"
    try:
        reason = disagreement(cached, model, max_len=max_len)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < max_len and window not in cached.windows:
        return f"its sliding window {window} does not reach the attention function"
    return reason


@torch.no_grad()
def disagreement(decoder: Backend, model: Any, *, max_len: int, dtype: torch.dtype | None = None) -> str | None:
    """Describe how the decoder's logits differ from the model's on a probe; None if they are equal up to rounding.

    `dtype`: of the decoder's weights, if not that in which the model computes.
    """
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
    own = dtype_of(model)
    eps = max(torch.finfo(x).eps for x in (own, dtype or own))
    tolerance = max(1e-4, 8 * eps) * max(1.0, float(truth.abs().max()))
    return None if float(worst) <= tolerance else f"its logits differ by {float(worst):.1e} on a probe"


def context_limit(model: Any, max_len: int | None) -> int:
    """`max_len` if the model can serve it; None: the model's positions, `UNBOUNDED` where they have no end."""
    if max_len is None:
        return positions(model.config) or UNBOUNDED
    if max_len < 2:
        raise ValueError(f"max_len must be at least 2, got {max_len}")
    check_positions(max_len, model.config, setting="max_len", packed=False)
    return max_len


def model_eos(model: Any) -> tuple[int, ...]:
    """The end-of-sequence tokens of the model's generation config."""
    config = getattr(model, "generation_config", None) or model.config
    eos = getattr(config, "eos_token_id", None)
    return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
