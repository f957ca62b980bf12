"""An engine without a model, for tests and for loops that are being written."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from rlkit.rollout.groups import mix
from rlkit.types import Completion, Progress, SamplingParams, request_ids


class FakeEngine:
    """An `rlkit.types.Engine` of scripted or seeded tokens, one per turn of the event loop.

    Without a script, the token at position p (counted from the start of the prompt) is a hash of (seed, p), uniform
    over `vocab_size` ids, and its log-prob is `-log(vocab_size)`. Temperature 0 and `seed=None` take seed 0; top-p and
    top-k have no effect. `update_weights` only sets `version`.

    Args:
        script: the completions of the first call, the second call, ...; repeated from the start when it ends. A
            completion that is not cut by `max_new_tokens` or a stop token ends with "stop".
        vocab_size: number of token ids.

    >>> engine = FakeEngine([[5, 6], [7]])
    >>> asyncio.run(engine.generate([1, 2], params=SamplingParams(max_new_tokens=8))).ids
    [5, 6]
    """

    positional_noise = True  # see `rlkit.rollout.stream.continue_aborted`

    def __init__(self, script: Iterable[Sequence[int]] = (), *, vocab_size: int = 100) -> None:
        self._script, self._vocab_size = itertools.cycle(script), vocab_size
        self._running: dict[object, Completion] = {}
        self._num_tokens, self._closed, self.version = 0, False, 0

    async def generate(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """See `rlkit.types.Generate`. ValueError for stop strings: there is no tokenizer to find them with."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        prompt_ids = request_ids(prompt_ids, params)
        if not prompt_ids or params.stop or rid in self._running:
            raise ValueError(f"need a prompt, no stop strings, a new rid; got {prompt_ids=}, {params.stop=}, {rid=}")
        seed = (params.seed or 0) if params.temperature else 0
        drawn = (mix(seed, place) % self._vocab_size for place in itertools.count(len(prompt_ids)))
        tokens, name, out = next(self._script, drawn), rid or object(), Completion([], [], [], "abort")
        self._running[name] = out
        try:
            for num, token in enumerate(tokens, 1):
                await asyncio.sleep(0)
                if self._running.get(name) is not out:
                    return out
                out.ids.append(token)
                out.logp.append(-math.log(self._vocab_size))
                out.versions.append(self.version)
                self._num_tokens += 1
                if token in params.stop_token_ids:
                    break
                if num == params.max_new_tokens:
                    return replace(out, finish_reason="length")
            return replace(out, finish_reason="stop")
        finally:
            if self._running.get(name) is out:
                del self._running[name]

    async def abort(self, rid: str | None = None) -> int:
        """See `rlkit.types.Engine`."""
        names = [name for name in self._running if rid in (None, name)]
        return len([self._running.pop(name) for name in names])

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]] = (), *, version: int) -> None:
        """Stamp the tokens of the next turns with `version`. `weights` is not read."""
        del weights
        self.version = version

    @property
    def progress(self) -> Progress:
        """Requests in flight (none waits) and tokens so far."""
        return Progress(len(self._running), 0, self._num_tokens)

    async def close(self) -> None:
        """End what is in flight and refuse further requests."""
        self._closed = True
        await self.abort()
