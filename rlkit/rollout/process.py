"""The embedded engine in a process of its own, on a copy of the weights: sampling and training at the same time.

    async with await launch("path/to/model", max_len=2048) as engine:
        completion = await engine.generate(prompt_ids, params=SamplingParams(max_new_tokens=64))
        await engine.update_weights(stream_weights(model), version=1)

For CPU and small models, as `rlkit.rollout.local.LocalEngine`, whose methods it has. In one process a trainer and an
engine share the interpreter lock and the cores; here each has its own. Weights go through shared memory: one copy on
each side, between two tokens of the engine, without draining it.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import pickle
import socket
from collections.abc import Iterable, Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.rollout._process_child import HEAD, Piece, read, serve
from rlkit.rollout.local import Progress
from rlkit.types import Completion, SamplingParams


async def launch(
    path: str | Path,
    *,
    max_batch: int = 64,
    max_len: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
    seed: int = 0,
    compile: bool = False,
    device: str = "cpu",
    num_threads: int = 1,
    cpus: Sequence[int] = (),
) -> ProcessEngine:
    """Start the process and wait until it has loaded the model and tokenizer of the folder `path`.

    Arguments are those of `LocalEngine`, and: `num_threads` of torch, and the `cpus` it may run on (all). The child
    ends with this process, however that ends. A script that calls this needs the usual `if __name__ == "__main__":`.

    Errors: whatever loading the model raised there.
    """
    ours, theirs = socket.socketpair()
    options = {
        "max_batch": max_batch, "max_len": max_len, "eos_token_ids": eos_token_ids, "seed": seed, "compile": compile,
    }  # fmt: skip
    process = multiprocessing.get_context("spawn").Process(
        target=serve,
        args=(theirs, str(path), options, device, num_threads, tuple(cpus)),
        daemon=True,
        name="rlkit-engine",
    )
    process.start()
    theirs.close()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    engine = ProcessEngine(process, reader, writer)
    try:
        await engine._ask("ready")
    except BaseException:
        await engine.close()
        raise
    return engine


class ProcessEngine:
    """See `launch`. It belongs to the event loop it was launched in."""

    def __init__(self, process: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[bytes] = []
        self._shared: SharedMemory | None = None
        self._ended: str | None = None
        self._listener = asyncio.get_running_loop().create_task(self._listen(), name="rlkit-process-engine")
        self.version = 0
        self.progress = Progress(0, 0, 0)

    async def __aenter__(self) -> ProcessEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """See `LocalEngine.generate`. RuntimeError, in every call, when the process has died."""
        return await self._ask("generate", list(prompt_ids), params, rid)

    async def abort(self, rid: str | None = None) -> int:
        """See `LocalEngine.abort`."""
        return await self._ask("abort", rid)

    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy the weights over; tokens sampled from then on are stamped `version`. Requests in flight go on.

        ValueError where names or shapes are not those of the engine's model; its weights are then as they were.
        """
        pieces: list[Piece] = []
        tensors: list[Tensor] = []
        offset = 0
        for name, tensor in named_tensors:
            pieces.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            tensors.append(tensor.detach())
            offset += -(-tensor.nbytes // 16) * 16
        block = self._block(offset)
        for (_, dtype, shape, start), tensor in zip(pieces, tensors, strict=True):
            if tensor.numel():
                kind = getattr(torch, dtype)
                torch.frombuffer(block.buf, dtype=kind, count=tensor.numel(), offset=start).view(shape).copy_(tensor)
        await self._ask("update", block.name, pieces, version)
        self.version = version

    async def close(self) -> None:
        """End the process, and with it what is in flight."""
        self._ended = self._ended or "the engine is closed"
        self._writer.close()
        await asyncio.to_thread(self._process.join, 10)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        await self._listener
        self._release()

    async def _ask(self, what: str, *args: Any) -> Any:
        if self._ended is not None:
            raise RuntimeError(self._ended)
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send((what, number, args))
        try:
            return await self._waiting[number]
        except asyncio.CancelledError:
            if self._ended is None:
                self._send(("cancel", number, ()))
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(self, message: Any) -> None:
        """Together with whatever else is sent now, so that which requests start beside which is no matter of timing."""
        data = pickle.dumps(message)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(data)

    def _flush(self) -> None:
        data = b"".join(self._outbox)
        self._outbox.clear()
        self._writer.write(HEAD.pack(len(data)) + data)

    async def _listen(self) -> None:
        """Hand answers to those who wait; when the other end is gone, everyone gets an error."""
        try:
            while True:
                for number, answer, progress in await read(self._reader):
                    self.progress = progress
                    future = self._waiting.get(number)
                    if future is None or future.done():
                        continue
                    if isinstance(answer, BaseException):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
        except (EOFError, OSError):
            await asyncio.to_thread(self._process.join, 10)
            self._ended = self._ended or f"the engine process has died (exit code {self._process.exitcode})"
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(RuntimeError(self._ended))

    def _block(self, size: int) -> SharedMemory:
        if self._shared is None or self._shared.size < size:
            self._release()
            self._shared = SharedMemory(create=True, size=max(1, size))
        return self._shared

    def _release(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared.unlink()
            self._shared = None
