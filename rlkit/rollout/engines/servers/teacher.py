"""A served model as a teacher: SGLang or vLLM score the tokens that a student sampled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit._util.ranks import is_first, on_all_ranks
from rlkit._util.retrying import retried
from rlkit._util.text import masked
from rlkit.rollout.engines.http import Http, Refused, ReplicaError, reading
from rlkit.rollout.engines.servers.api import LogProbs
from rlkit.rollout.engines.servers.kinds import kind_named
from rlkit.segments import seq_lens
from rlkit.settings import SERVERS
from rlkit.types import Batch

if TYPE_CHECKING:
    from rlkit.rollout.engines.servers.api import Api

X = TypeVar("X")
PROBE = "The quick brown fox jumps over 1,234 lazy dogs: naïve café, 你好.\n\tx = f(y)"


@dataclass
class ServedTeacher:
    """A running SGLang or vLLM server of any model with the student's tokenizer, as a `Teacher`.

    vLLM needs `--max-logprobs` of at least k where that is above 20. Servers report log-probs of temperature 1, so the
    rollouts must sample at 1. Prompts and answers go to the server as token ids, `concurrent` at a time; only the first
    rank asks it.

    Args:
        url: the server, as http://127.0.0.1:30000.
        concurrent: sequences in flight.
        timeout: seconds for one sequence.
        tries: attempts for one sequence, before its error is raised.
    """

    url: str
    concurrent: int = 16
    timeout: float = 600.0
    tries: int = 3
    _api: Api | None = field(default=None, init=False, repr=False)  # None: not asked yet
    _model: str = field(default="", init=False, repr=False)

    def logp(self, batch: Batch) -> Float[Tensor, "T"]:  # noqa: D102
        return self._scored(batch, 1, sampled=True)[1][:, 0]

    def top_logp(self, batch: Batch, k: int) -> tuple[Int[Tensor, "T K"], Float[Tensor, "T K"]]:  # noqa: D102
        return self._scored(batch, k, sampled=False)

    def check(self, tokenizer: Any, *, k: int) -> None:
        """Ask the server for a few log-probs, and compare its tokens with those of `tokenizer`.

        Errors: ValueError for a server that is not one of these, that gives no log-probs of given tokens, or too few,
        or whose model has other tokens; ReplicaError for one that does not answer.
        """
        ids = tokenizer.encode(PROBE, add_special_tokens=False)

        async def ask(http: Http) -> None:
            await self._score(http, ids[:1], ids[1:8], k, sampled=False)
            body = {"prompt": PROBE, "add_special_tokens": False, "model": self._model}
            theirs = None
            with suppress(Refused):  # older servers do not tokenize
                theirs = (await http.request(f"{self.url}/tokenize", body, timeout=60.0)).get("tokens")
            if theirs is not None and theirs != ids:
                where = next((i for i, (a, b) in enumerate(zip(ids, theirs)) if a != b), min(len(ids), len(theirs)))
                pair = f"is {theirs[where : where + 1]} there and {ids[where : where + 1]} in the trained model"
                fault = (
                    f"{masked(self.url)} serves a model with other tokens: of {PROBE[:19]!r} ... token {where} {pair}"
                )
                raise ValueError(f"{fault}; a teacher must have the student's tokenizer")

        _in_thread(self._with_http(ask))

    def _scored(self, batch: Batch, k: int, *, sampled: bool) -> tuple[Tensor, Tensor]:
        pair = on_all_ranks(lambda: self._ask(batch, k, sampled) if is_first() else None)[0]
        assert pair is not None  # of the first rank
        return pair

    def _ask(self, batch: Batch, k: int, sampled: bool) -> tuple[Tensor, Tensor]:
        prefixes = batch.prefix_tokens.split(seq_lens(batch.prefix_cu).tolist())
        ids, logp = batch.targets[:, None].repeat(1, k), torch.zeros(batch.num_tokens, k)
        edges = batch.cu_seqlens.tolist()
        limit = asyncio.Semaphore(self.concurrent)

        async def one(http: Http, i: int) -> None:
            begin, end = edges[i], edges[i + 1] - int(batch.truncated[i])
            if begin == end:
                return
            prompt = [*prefixes[int(batch.prefix_ids[i])].tolist(), int(batch.tokens[begin])]
            async with limit:
                pairs = await self._score(http, prompt, batch.targets[begin:end].tolist(), k, sampled=sampled)
            ids[begin:end] = torch.tensor([x for x, _ in pairs])
            logp[begin:end] = torch.tensor([x for _, x in pairs])

        async def every(http: Http) -> None:
            await asyncio.gather(*(one(http, i) for i in range(batch.num_seqs)))

        _in_thread(self._with_http(every))
        return ids, logp

    async def _with_http(self, work: Callable[[Http], Coroutine[Any, Any, None]]) -> None:
        http = Http()
        try:
            if self._api is None:
                self._api, self._model = await _served(http, self.url)
            await work(http)
        finally:
            await http.close()

    async def _score(self, http: Http, prompt: list[int], ids: list[int], k: int, *, sampled: bool) -> LogProbs:
        """The `k` most likely tokens at each of `ids`, or with `sampled` those ids, and their log-probs."""
        assert self._api is not None  # of `_with_http`
        path, body, read = self._api.scoring(prompt, ids, 0 if sampled else k, model=self._model)

        async def attempt() -> LogProbs:
            reply = await http.patient(partial(http.request, f"{self.url}{path}", body, timeout=self.timeout))
            with reading(self.url, f"a reply of {path}", reply):
                pairs = [_checked(found_ids, logp, k) for found_ids, logp in read(reply)]
                if len(pairs) != len(ids):
                    raise ValueError(f"log-probs of {len(pairs)} tokens for {len(ids)}")
                if sampled and [token for (token,), _ in pairs] != ids:
                    raise ValueError("log-probs of other tokens")
            return pairs

        return await retried(attempt, on=(ReplicaError, TimeoutError), max_retries=self.tries - 1, total_s=math.inf)


async def _served(http: Http, url: str) -> tuple[Api, str]:
    """How the server is spoken to, and the name of its model; ValueError for a server of another kind."""
    reply = await http.request(f"{url}/v1/models", timeout=60.0, method="GET")
    with reading(url, "a reply of /v1/models", reply):
        model = reply["data"][0]
        kind, name = str(model.get("owned_by")), str(model["id"])
    if kind not in SERVERS:
        use = " or ".join(traits.name for traits in SERVERS.values())
        raise ValueError(f"{masked(url)} is a server of {kind}, which gives no log-probs of given tokens: use {use}")
    return kind_named(kind).api(), name


def _checked(ids: Sequence[int], logp: Sequence[float], k: int) -> tuple[list[int], list[float]]:
    if len(ids) != k or len({*ids}) != k:
        raise ValueError(f"{len(ids)} log-probs of a token, where {k} were asked for")
    if not all(isinstance(x, int) for x in ids) or not all(math.isfinite(x) and x < 0.01 for x in logp):
        raise ValueError("a log-prob that is not a number of at most 0")
    return [*ids], [*logp]


def _in_thread(coroutine: Coroutine[Any, Any, X]) -> X:
    """The result of a coroutine, also where an event loop runs in this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
