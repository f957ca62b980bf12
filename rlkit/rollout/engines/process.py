"""The embedded engine in a process of its own, on a copy of the weights: sampling and training at the same time.

    async with await launch("path/to/model", max_len=2048) as engine:
        completion = await engine.generate(prompt_ids, params=SamplingParams(max_new_tokens=64))
        await engine.update_weights(stream_weights(model), version=1)

For CPU and small models, with the methods of `rlkit.rollout.engines.local.LocalEngine`. In one process a trainer and an
engine share the interpreter lock and the cores; here each has its own. Weights go through shared memory: one copy on
each side, between two tokens of the engine, without draining it.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.rollout.engines import EngineError
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.silence import Silence
from rlkit.types import Completion, Progress, SamplingParams, request_ids

_HEAD = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


class _Piece(NamedTuple):
    """A tensor in the shared block."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int

    def view(self, block: SharedMemory) -> Tensor:
        """The tensor, without a copy."""
        count = math.prod(self.shape)
        return torch.frombuffer(block.buf, dtype=self.dtype, count=count, offset=self.start).view(self.shape)


async def launch(
    path: str | Path, *, device: str = "cpu", num_threads: int = 1, cpus: Sequence[int] = (), **options: Any
) -> ProcessEngine:
    """Start the process and wait until it has loaded the model and tokenizer of the folder `path`.

    `num_threads` are those of torch, and `cpus` those that it may run on (default: all); `options` are arguments of
    `LocalEngine`.
    The child ends with this process, also when that is killed (on Linux also a child that hangs). A script needs the
    usual `if __name__ == "__main__":`.

    Errors: any error of loading the model; ValueError if the system cannot pin a process to `cpus` (macOS).
    """
    if cpus and not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"cpus {tuple(cpus)} (--engine-cpus) needs Linux: this system cannot pin a process")
    ours, theirs = socket.socketpair()
    child, deterministic = _Child(str(path), options, device), torch.are_deterministic_algorithms_enabled()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, daemon=True, name="rlkit-engine", args=(theirs, child, num_threads, cpus, deterministic)
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
    watch = engine._silence.watch(engine._ping, waiting=lambda: engine._waiting and engine._ended is None)
    engine._watcher = asyncio.create_task(watch, name="rlkit-process-engine-watch")
    return engine


class ProcessEngine:
    """An `rlkit.types.Engine`; see `launch`. It belongs to the event loop it was launched in."""

    positional_noise = True  # that of a `LocalEngine`

    def __init__(self, process: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[bytes] = []
        self._shared: SharedMemory | None = None
        self._ended: str | None = None
        self._silence, self._asked = Silence(f"the engine (process {process.pid})"), False
        self._watcher: asyncio.Task[None] | None = None
        atexit.register(process.kill)  # before multiprocessing waits for the child at exit
        self._listener = asyncio.get_running_loop().create_task(self._listen(), name="rlkit-process-engine")
        self.version = 0
        self.progress = Progress(0, 0, 0)

    reports_support = True

    async def __aenter__(self) -> ProcessEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def silent_s(self) -> float:
        """Seconds for which calls have been in flight without any sign of life; 0 if there are none."""
        return self._silence.seconds

    async def generate(
        self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None, **options: Any
    ) -> Completion:
        """See `LocalEngine.generate`. EngineError, a RuntimeError, in every call when the process has died."""
        prompt_ids = request_ids(prompt_ids, params)
        return await self._ask("generate", prompt_ids, params=params, rid=rid, **options)

    async def abort(self, rid: str | None = None) -> int:
        """See `LocalEngine.abort`."""
        return await self._ask("abort", rid)

    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy the weights to the engine; later tokens are stamped `version`. Requests in flight continue.

        ValueError if names or shapes differ from the engine's model, whose weights are then unchanged.
        """
        tensors = [(name, tensor.detach()) for name, tensor in named_tensors]
        ends = list(itertools.accumulate((-(-t.nbytes // 16) * 16 for _, t in tensors), initial=0))
        pieces = [_Piece(n, t.dtype, t.shape, start) for (n, t), start in zip(tensors, ends, strict=False)]
        block = await self._block(ends[-1])
        for piece, (_, tensor) in zip(pieces, tensors, strict=True):
            piece.view(block).copy_(tensor)
        await self._ask("update", pieces, version)
        self.version = version

    async def rest(self) -> None:
        """See `LocalEngine.rest`: what it frees is there for other processes, as one that trains on the same GPU."""
        await self._ask("rest")

    async def close(self) -> None:
        """End what is in flight as "abort", then the process; one that does not answer for 10 seconds is killed, and
        one that has hung for longer at once.
        """
        hangs = self._silence.hangs
        if self._watcher is not None:
            self._watcher.cancel()
        if self._waiting and self._ended is None and not hangs:
            with suppress(Exception):  # it dies meanwhile, or nothing is left to wait for
                await asyncio.wait_for(self.abort(), 10)
                await asyncio.wait(self._waiting.values(), timeout=10)
        self._ended = self._ended or "the engine is closed"
        self._writer.close()
        await asyncio.to_thread(self._process.join, 0 if hangs else 10)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        await self._listener
        self._release()
        atexit.unregister(self._process.kill)

    def _ping(self) -> None:
        if not self._asked:  # a hanging engine reads none of them
            self._asked = True
            self._send("ping", -1, (), {})

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._ended is not None:
            raise EngineError(self._ended)
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(method, number, args, kwargs)
        try:
            return await self._waiting[number]
        except asyncio.CancelledError:
            if self._ended is None:
                self._send("cancel", number, (), {})
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(self, *message: Any) -> None:
        """Flush once per turn of the event loop, so that batching does not depend on timing."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(pickle.dumps(message))

    def _flush(self) -> None:
        self._writer.write(_framed(self._outbox))
        self._outbox.clear()

    async def _listen(self) -> None:
        """Set the results of waiting calls; when the process is gone, every call gets an error."""
        try:
            while True:
                for number, answer, progress in await _received(self._reader):
                    self._silence.heard()
                    self.progress, self._asked = progress, False
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
                    future.set_exception(EngineError(self._ended))

    async def _block(self, size: int) -> SharedMemory:
        """Shared memory of at least `size` bytes. It has no name once both sides have mapped it, so that the system
        frees it with the processes, however they end.
        """
        if self._shared is None or self._shared.size < size:
            self._release()
            block = SharedMemory(create=True, size=max(1, size))
            try:
                await self._ask("map", block.name)
                self._shared = block
            finally:
                block.unlink()
                if self._shared is None:
                    block.close()
        return self._shared

    def _release(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None


class _Child:
    """The other side: a LocalEngine that answers messages until the connection closes."""

    def __init__(self, path: str, options: dict[str, Any], device: str) -> None:
        self._path, self._options, self._device = path, options, device
        self._engine: Any = None
        self._shared: SharedMemory | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        with suppress(EOFError, OSError):
            while True:
                for message in await _received(reader):
                    self._begin(*message)
        for task in self._tasks.values():
            task.cancel()
        self._writer.close()  # else it complains when the interpreter ends

    def _begin(self, method: str, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if method == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        if method == "ping":
            return self._send(number, None)
        work = getattr(self._engine if method in ("generate", "abort") else self, method)(*args, **kwargs)
        task = self._tasks[number] = asyncio.create_task(self._answer(number, work))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(self, number: int, work: Any) -> None:
        try:
            answer = await work
        except Exception as error:
            answer = _portable(error)
        self._send(number, answer)

    def _send(self, number: int, answer: Any) -> None:
        progress = Progress(0, 0, 0) if self._engine is None else self._engine.progress
        self._writer.write(_framed([pickle.dumps((number, answer, progress))]))

    async def ready(self) -> None:
        from rlkit.model.forward import load_model
        from rlkit.model.pretrained import load_tokenizer

        self._model = load_model(self._path, device=self._device)
        tokenizer = load_tokenizer(self._path)
        self._engine = LocalEngine(self._model, tokenizer=tokenizer, **self._options)

    async def map(self, block: str) -> None:
        """Open the shared memory of this name, from which `update` copies."""
        if self._shared is not None:
            self._shared.close()
        self._shared = SharedMemory(name=block)

    async def update(self, pieces: Sequence[_Piece], version: int) -> None:
        """Copy the weights without an await, so that the engine takes no step in between."""
        assert self._shared is not None
        weights = [(piece.name, piece.view(self._shared)) for piece in pieces]
        await self._engine.update_weights(weights, version=version)

    async def rest(self) -> None:
        """Give memory back to the system, too, which torch would keep for this process."""
        await self._engine.rest()
        torch.cuda.empty_cache()


def _serve(
    connection: socket.socket, child: _Child, num_threads: int, cpus: Sequence[int], deterministic: bool
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to handle; a scheduler sends SIGTERM to all processes
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # a process that is stopped or hangs would not notice that its parent is gone
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(deterministic)
    asyncio.run(child.run(connection))


def _framed(messages: list[bytes]) -> bytes:
    data = pickle.dumps(messages)
    return _HEAD.pack(len(data)) + data


async def _received(reader: asyncio.StreamReader) -> list[Any]:
    """The messages of one frame. EOFError when the other end is gone."""
    (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return [pickle.loads(message) for message in pickle.loads(await reader.readexactly(size))]


def _portable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its repr where it cannot be pickled and unpickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
