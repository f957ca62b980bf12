"""An embedded rollout engine: continuous batching in this process, over the trainer's own weights.

There is no server. Tokens in, tokens out. By default there is no second copy of the weights either, and no sync: the
next token sees an optimizer step. With a `dtype` (for CUDA) it samples from a copy of the weights in 16 bits, by CUDA
graphs, that `update_weights` refreshes; so does an engine on a copy of the model, as any other engine.

    engine = LocalEngine(model, tokenizer=tokenizer)
    completion = await engine.generate(prompt_ids, params=SamplingParams(max_new_tokens=64, stop_token_ids=(2,)))

Differs from HF `generate`: requests join and leave the batch one by one instead of waiting for its longest row, equal
concurrent prompts are forwarded once, log-probs are returned, and a request's noise does not depend on other requests.
Differs from SGLang (`rlkit.rollout.engines.sglang`): same contract, one process, no paged cache, and a prefix is shared
only between equal prompts in flight and, with `keep_turns`, from one turn of a conversation to the next.
"""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from rlkit.model.families import check_is_model, check_prompt_ids
from rlkit.model.sharding import is_cut, is_offloaded, own_part
from rlkit.model.vision import placeholder_ids
from rlkit.model.weights import in_names_of
from rlkit.rollout.engines.local.backends import context_limit, model_eos, pick_decoder
from rlkit.rollout.engines.local.decode import free_bytes
from rlkit.rollout.engines.local.fused import FusedDecoder
from rlkit.rollout.engines.local.rows import Flight, Request, Rows, StopStrings, runs
from rlkit.rollout.sampling import sample_kept, support_of, uniforms
from rlkit.types import Completion, Picture, Progress, SamplingParams, Support, request_ids

_log = logging.getLogger("rlkit.rollout")

_U64 = 2**64 - 1
# rows decoded together by default; a GPU reads a copy of the weights in the time of 256 rows' products
BATCH, GPU_BATCH = 64, 256


class LocalEngine:
    """An `rlkit.types.Engine` over one model, which serves concurrent calls in batches of up to `max_batch` rows.

    One task steps the batch and yields to the event loop after each token. There are no threads and no clock: the
    same calls in the same order give the same bits. It serves one event loop at a time and can be used from one
    `asyncio.run` after another.

    Under top-p, top-k and min-p each completion has its `support`; without `top_k` at most the 1,024 most likely tokens
    are then kept.

    Args:
        model: a Hugging Face causal LM. Its weights are read in place at every step, its mode (train, eval) stays.
        tokenizer: needed for `stop` strings only; anything with `decode(ids, skip_special_tokens=False)`.
        max_batch: rows decoded together; further requests wait in order. Default: 64, from a copy on CUDA 256.
        max_len: prompt and completion together, in tokens; by default the model's positions.
        eos_token_ids: end every request, in addition to its own `stop_token_ids`; `()` for none; by default the
            `eos_token_id` of the model's generation config.
        seed: seed of the generator that gives a seed to requests without one.
        keep_turns: keep the keys and values of up to `max_batch` completions that ended with a stop token (on a GPU as
            many as leave half of the free memory) for a next turn: a prompt that begins with their tokens is read from
            there on, and before other waiting requests.
        compile: torch.compile the decoding step, once for all lengths and batch sizes: ten seconds or more. Not with a
            `dtype`, nor for models that the own decoder does not take.
        dtype: sample from a copy of the weights in this dtype (bf16 or fp16; see `fused`), where the model's family is
            one of `decode.SUPPORTED`. Others are read in place, and a log line says why.

    Memory: the cache takes 2 * layers * max_batch * kv_heads * head_dim * (longest sequence so far) elements; with a
    `dtype`, of the longest that the running requests may reach, and requests wait where the device has no room.
    """

    positional_noise = True  # see `rlkit.rollout.stream.continue_aborted`
    reports_support = True  # see `Completion.support`

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        max_batch: int | None = None,
        max_len: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        seed: int = 0,
        keep_turns: bool = False,
        compile: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_is_model(model)
        if max_batch is not None and max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        if (cut := is_cut(model)) or is_offloaded(model):
            fault = f"LocalEngine needs a model that is not {'cut over ranks' if cut else 'offloaded to the CPU'}"
            raise ValueError(f"{fault}; use rlkit.rollout.engines.process.launch")
        self.model, self.max_len = model, context_limit(model, max_len)
        self.version = 0
        self._eos = model_eos(model) if eos_token_ids is None else tuple(eos_token_ids)
        self._never = placeholder_ids(model.config)
        self._device, self._tokenizer = model.device, tokenizer
        rows, copy_rows = max_batch or BATCH, max_batch or (GPU_BATCH if model.device.type == "cuda" else BATCH)
        self._decoder = pick_decoder(
            model, max_batch=rows, copy_batch=copy_rows, max_len=self.max_len, compile=compile, dtype=dtype
        )
        self.max_batch = self._decoder.sizes[-1]
        self._seeds, self._keep_turns = random.Random(seed), keep_turns
        self._flight: Flight | None = None  # a step that was launched before the tokens of the one before it were read
        self._clear()
        self._num_calls = self._num_tokens = self._epoch = 0
        self._driver: asyncio.Task[None] | None = None
        self._closed = False
        self._state: tuple[float, ...] = ()  # of the model, at the last update without weights
        self._still = 0

    async def __aenter__(self) -> LocalEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def copied_bytes(self) -> int:
        """Size of the engine's own copy of the weights, with a `dtype`; 0 where it reads the model's."""
        return self._fused.copied_bytes if self._fused else 0

    @property
    def _fused(self) -> FusedDecoder | None:
        """The decoder, if it has a copy of the weights and a cache of fixed capacity."""
        return self._decoder if isinstance(self._decoder, FusedDecoder) else None

    @property
    def progress(self) -> Progress:
        """Requests running and waiting, and tokens generated so far."""
        return Progress(len(self._rows), len(self._waiting), self._num_tokens)

    async def generate(
        self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None, images: Sequence[Picture] = ()
    ) -> Completion:
        """Sample a completion of `prompt_ids`. See `rlkit.types.SamplingParams` and `Completion`.

        Noise is a function of (seed, position), the position counted from the start of the prompt. A cancelled call
        frees its row.

        Raises:
            ValueError: `prompt_ids` is empty, leaves no room below `max_len` or has an id outside the vocabulary;
            `stop` without a tokenizer; `rid` is in use. RuntimeError: the engine is closed, or serves another running
            event loop. Whatever a step raised, in every call that was in flight.
        """
        request = self._request(prompt_ids, params, rid, tuple(images))
        self._ensure_driver()
        self._rids[request.rid] = request
        (self._waiting.append if request.held is None else self._waiting.appendleft)(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            if self._rids.get(request.rid) is request:
                self._abort([request])
            raise

    async def abort(self, rid: str | None = None) -> int:
        """End the request `rid` (None: all) now: its caller gets the tokens so far, with finish_reason "abort".

        Returns the number of ended requests; 0 if `rid` is not in flight.
        """
        return self._abort(list(self._rids.values()) if rid is None else [r for r in [self._rids.get(rid)] if r])

    async def update_weights(self, weights: Any = None, *, version: int) -> None:
        """Stamp tokens sampled from here on with `version`. Call it after every optimizer step.

        `stream_weights(model)` of the engine's own model is left unread, because its weights are in place. Those of
        another model, and other (name, tensor) pairs, are copied into the engine's model, between two of its steps; the
        pairs are held in memory until all names are checked. Later requests do not reuse cached prompts of older
        weights. Requests in flight continue with the keys and values they have.

        Errors: ValueError if names or shapes differ from the engine's model, whose weights are then unchanged.
        """
        if weights is None:
            self._name_still()
        elif not self._reads(getattr(weights, "model", None)):
            self._load(dict(weights))
        self._flight = None  # its tokens are of the weights before
        self._decoder.refresh()
        self._ended.clear()
        self.version = version
        self._epoch += 1

    def _name_still(self) -> None:
        """Log that two updates without weights found the model as it was: another copy of it may train."""
        params = sorted(self.model.parameters(), key=lambda x: (not x.requires_grad, x.numel()))
        known = sum(x._version for x in params if not x.is_inference())
        state = known, *(float(own_part(x.detach()).double().sum()) for x in params[:4])
        self._still = self._still + 1 if state == self._state else 0
        self._state = state
        if self._still == 2:
            fix = "give LocalEngine the model that trains, or update_weights its weights, stream_weights(model)"
            _log.warning(
                "update_weights without weights, and the engine's model has not changed in two updates: %s", fix
            )

    def _reads(self, model: Any) -> bool:
        """Whether these weights are the engine's own: `model` is its model, or a wrapper of it."""
        return model is not None and next(model.parameters()) is next(self.model.parameters())

    @torch.no_grad()
    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        params = self.model.state_dict(keep_vars=True)
        needed = {name for name, _ in self.model.named_parameters()}
        if not needed <= weights.keys():
            weights = in_names_of(self.model, weights)
        if missing := sorted(needed - weights.keys()):
            raise ValueError(f"the new weights lack {missing[:4]} ({len(missing)} in all)")
        if unknown := [name for name, x in weights.items() if name not in params or params[name].shape != x.shape]:
            raise ValueError(f"unknown weight names: {unknown[:4]} ({len(unknown)} in all)")
        for name, x in weights.items():
            params[name].copy_(x)

    async def rest(self) -> None:
        """Free kept turns and, where nothing is in flight, the cache. The loops call it after sampling."""
        self._ended.clear()
        if not self._waiting and not len(self._rows):
            self._flight = None
            self._decoder.release()

    async def close(self) -> None:
        """Abort what is in flight and free the cache. A closed engine refuses `generate`."""
        self._closed = True
        await self.abort()
        driver = self._driver
        if driver is not None and not driver.done() and driver.get_loop() is asyncio.get_running_loop():
            await driver
        self._ended.clear()
        self._decoder.release()

    def _abort(self, requests: Sequence[Request]) -> int:
        for request in requests:
            if request.slot < 0:
                self._waiting.remove(request)
                request.finish("abort")
        self._retire([(r.slot, "abort") for r in requests if r.slot >= 0])
        for request in requests:
            self._rids.pop(request.rid, None)
        return len(requests)

    def _request(
        self, prompt_ids: list[int], params: SamplingParams, rid: str | None, images: tuple[Picture, ...]
    ) -> Request:
        if self._closed:
            raise RuntimeError("the engine is closed")
        prompt_ids = request_ids(prompt_ids, params)
        if not 0 < len(prompt_ids) < self.max_len:
            fix = "give at least one token" if not prompt_ids else "shorten it or raise max_len"
            fault = f"prompt_ids must hold 1 to {self.max_len - 1} tokens (max_len - 1), got {len(prompt_ids)}"
            raise ValueError(f"{fault}: {fix}")
        check_prompt_ids(torch.as_tensor(prompt_ids), self.model)
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need LocalEngine(..., tokenizer=...); use stop_token_ids without one")
        if rid is not None and rid in self._rids:
            raise ValueError(f"rid {rid!r} is already in flight")
        if images and not self._decoder.reads_images:
            raise ValueError(f"{type(self.model).__name__} cannot sample after images in LocalEngine")
        self._num_calls += 1
        start, held = self._turn_before(prompt_ids) if not images else (0, None)
        return Request(
            rid=rid if rid is not None else f"local-{self._num_calls}",
            prompt=prompt_ids,
            key=np.asarray(prompt_ids, np.int64).tobytes() + "".join(x.digest for x in images).encode(),
            images=images,
            params=params,
            stop_token_ids=frozenset((*params.stop_token_ids, *self._eos)),
            seed=(self._seeds.getrandbits(64) if params.seed is None else params.seed) & _U64,
            max_tokens=min(params.max_new_tokens, self.max_len - len(prompt_ids)),
            future=asyncio.get_running_loop().create_future(),
            stop=StopStrings(self._tokenizer, params.stop) if params.stop else None,
            start=start,
            held=held,
            epoch=self._epoch,
        )

    def _turn_before(self, prompt_ids: Sequence[int]) -> tuple[int, Any]:
        """The number of tokens of the longest kept turn that the prompt continues, and its keys and values: (0, None)
        without one."""
        ids = np.asarray(prompt_ids, np.int64)
        for length in sorted({len(key) // ids.itemsize for key in self._ended}, reverse=True):
            if length < len(ids) and (kept := self._ended.pop(ids[:length].tobytes(), None)) is not None:
                return length, kept[0]
        return 0, None

    def _ensure_driver(self) -> None:
        loop = asyncio.get_running_loop()
        if self._driver is not None and not self._driver.done():
            if self._driver.get_loop() is loop:
                return
            if self._driver.get_loop().is_running():
                raise RuntimeError("the engine serves another event loop; use one engine per running loop")
            self._forget()
        self._driver = loop.create_task(self._drive(), name="rlkit-local-engine")

    async def _drive(self) -> None:
        try:
            while self._waiting or len(self._rows):
                self._step()
                await asyncio.sleep(0)
            self._flight = None
            self._decoder.release()
        except Exception as error:
            failure = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error  # which no future takes
            for request in self._forget():
                if not request.future.done():
                    request.future.set_exception(failure)
        except BaseException:  # cancelled with its event loop, or interrupted
            for request in self._forget():
                request.future.cancel()
            raise

    def _clear(self) -> None:
        self._rows = Rows(self.max_batch)
        self._flight = None
        self._waiting = deque[Request]()
        self._rids: dict[str, Request] = {}
        self._ended: dict[bytes, tuple[Any, int]] = {}  # tokens of completions that ended: keys and values, their bytes
        self._decoder.release(whole=True)

    def _forget(self) -> list[Request]:
        requests = [*self._rows.requests, *self._waiting]
        self._clear()
        return requests

    def _step(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            sources = self._admit()
            rows, n = self._rows, len(self._rows)
            if self._fused and sources:  # then every row reads its own last token
                self._decoder.copy(sources, range(n - len(sources), n), int(rows.position[sources].max()))
                sources = []
            batch = self._size(n - len(sources))
            self._decoder.reserve(max(batch, n), self._room(), keep=n)
            limits = rows.limits()
            if self._fused is None or limits or self._never:
                self._step_from_logits(sources, limits)
                return
            flight = self._launch(self._fused)
        if self._fused and self._fused.reads_late and self._goes_on(flight):
            self._flight = self._launch(self._fused, ahead=1)
        self._push(*flight.of(self._rows.requests), flight.version)

    def _size(self, rows: int) -> int:
        """The number of rows, of those that the decoder takes, for so many."""
        return self._decoder.sizes[bisect_left(self._decoder.sizes, rows)]

    def _launch(self, decoder: FusedDecoder, *, ahead: int = 0) -> Flight:
        """Queue a step of all rows; with `ahead` 1, the one after that which is in flight."""
        rows, batch = self._rows, self._size(len(self._rows))
        noise = uniforms(rows.seed[:batch], rows.position[:batch] + 1 + ahead)
        read = None if ahead else (rows.token[:batch], rows.position[:batch])
        return Flight([*rows.requests], self.version, decoder.launch(read, noise, rows.temperatures(batch)))

    def _goes_on(self, flight: Flight) -> bool:
        """Whether the next step has the rows of this one, as far as the host knows before it has read the tokens."""
        same = len(flight.requests) == len(self._rows)
        unfinished = any(len(r.ids) + 1 < r.max_tokens for r in flight.requests)
        return same and unfinished and not self._free()

    def _step_from_logits(self, sources: Sequence[int], limits: dict[str, np.ndarray]) -> None:
        """A step with everything that sampling knows. The last rows take the logits, keys and values of `sources`."""
        rows, n = self._rows, len(self._rows)
        read = n - len(sources)
        batch = self._size(read)
        logits = self._decoder.decode(self._to(rows.token[:batch]), self._to(rows.position[:batch]))[:read]
        with torch.inference_mode():
            if sources:
                self._decoder.copy(sources, range(read, n), int(rows.position[read:n].max()) + 1)
                logits = torch.cat((logits, logits[sources]))
            (ids, logp), kept = sample_kept(
                logits,
                self._to(uniforms(rows.seed[:n], rows.position[:n] + 1)),
                temperature=None if (warm := rows.temperatures(n)) is None else self._to(warm),
                **{name: self._to(x) for name, x in limits.items()},
                never=self._never,
            )
            truncated = [i for i, request in enumerate(rows.requests) if request.params.truncates]
            support = support_of(kept[truncated]) if truncated else Support((), ())
        for i, chosen, mass in zip(truncated, *support, strict=True):
            rows.requests[i].support.append(Support(chosen[None], mass[None]))
        self._push(ids.cpu().numpy(), logp.cpu().numpy(), self.version)

    def _push(self, ids: np.ndarray, logp: np.ndarray, version: int) -> None:
        if not np.isfinite(logp).all():
            raise FloatingPointError("the model's logits are not finite; its weights or activations have overflowed")
        self._num_tokens += len(ids)
        self._retire(self._rows.push(ids, logp, version))

    def _room(self) -> int:
        """Positions that the cache needs: what the rows have now, or may reach where the cache is fixed."""
        of = self._rows.final if self._fused else self._rows.position + 1
        return int(of[: len(self._rows)].max())

    def _limit(self) -> int:
        """Rows that fit, if waiting requests join them."""
        if self._fused is None:
            return self.max_batch
        waiting = max(r.final_length for r in islice(self._waiting, self.max_batch))
        return self._fused.slots(max(waiting, self._room() if len(self._rows) else 0))

    def _free(self) -> int:
        """Rows for waiting requests; 0 also while there are too few to stop for."""
        running = len(self._rows)
        limit = self._limit() if self._waiting and running < self.max_batch else 0
        free = limit - running
        return 0 if free <= 0 or (running and free < min(len(self._waiting), -(-limit // 8))) else free

    def _admit(self) -> list[int]:
        """Give free rows to waiting requests. Of several new requests with one prompt only the first is read.

        The others have the last rows; they take logits, keys and values from the rows returned, one for each.
        """
        running, free = len(self._rows), self._free()
        if not free:
            return []
        fits = not self._decoder.keeps_states  # else a row that has read on cannot give its prompt's state
        by_key = {r.key: r for r in self._rows.requests if r.epoch == self._epoch and fits}
        new: list[Request] = []
        copies: list[tuple[Request, Request]] = []
        twins: list[tuple[Request, Request]] = []
        for _ in range(min(free, len(self._waiting))):
            request = self._waiting.popleft()
            if request.held is not None and request.epoch != self._epoch:
                request.start, request.held = 0, None  # of older weights
            request.epoch = self._epoch
            source = by_key.setdefault(request.key, request)
            if source.slot >= running:
                twins.append((source, request))
                continue
            self._rows.add(request)
            if source is not request:
                copies.append((source, request))
            elif len(request.prompt) > 1:
                new.append(request)
        for _, twin in twins:
            self._rows.add(twin)
        self._decoder.reserve(len(self._rows), self._room(), keep=running)  # also of what running rows have sampled
        for chunk in runs([r for r in new if not r.start]):
            pictures: dict[str, Any] = {"images": [r.images for r in chunk]} if any(r.images for r in chunk) else {}
            self._decoder.prefill([r.prompt[:-1] for r in chunk], [r.slot for r in chunk], **pictures)
        for request in (r for r in new if r.start):
            self._decoder.restore(request.held, request.slot)
            request.held = None
        for chunk in runs([r for r in new if 0 < r.start < len(r.prompt) - 1]):
            tokens = [r.prompt[r.start : -1] for r in chunk]
            self._decoder.extend(tokens, [r.slot for r in chunk], [r.start for r in chunk])
        if copies:
            length = max(len(r.prompt) for _, r in copies) - 1
            self._decoder.copy([s.slot for s, _ in copies], [r.slot for _, r in copies], length)
        return [source.slot for source, _ in twins]

    def _retire(self, finished: Sequence[tuple[int, Any]]) -> None:
        if not finished:
            return
        for slot, reason in finished:
            request = self._rows.requests[slot]
            if self._keep_turns and not request.images and reason == "stop" and request.epoch == self._epoch:
                self._keep(request)
            self._rids.pop(request.rid, None)
            request.finish(reason, self._decoder.experts(slot, len(request.prompt) + len(request.ids) - 1))
        sources, targets = self._rows.remove([slot for slot, _ in finished])
        if sources:
            ahead = self._flight is not None  # whose step adds a place
            self._decoder.copy(sources, targets, int(self._rows.position[targets].max()) + ahead)

    def _keep(self, request: Request) -> None:
        """Keep the keys and values of a completion that ends now, in place of older ones where there is no room for
        all; those of its last token were never computed."""
        ids = np.asarray([*request.prompt, *request.ids[:-1]], np.int64)
        size = self._decoder.held_bytes(len(ids))
        while len(self._ended) == self.max_batch or not self._has_room(size):
            if not self._ended:
                return
            del self._ended[next(iter(self._ended))]
        self._ended[ids.tobytes()] = self._decoder.hold(request.slot, len(ids)), size

    def _has_room(self, size: int) -> bool:
        """Whether kept turns leave the device at least as much as they take, with one more of `size` bytes."""
        return sum(num for _, num in self._ended.values()) + size <= free_bytes(self._device) - size

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
