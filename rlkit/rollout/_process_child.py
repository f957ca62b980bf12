"""The other side of `rlkit.rollout.process`: a LocalEngine that answers messages until the socket closes."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import signal
import struct
from collections.abc import Sequence
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from socket import socket
from typing import Any

import torch

from rlkit.rollout.local import LocalEngine, Progress

HEAD = struct.Struct("!Q")
Piece = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, place in the shared block


async def read(reader: asyncio.StreamReader) -> list[Any]:
    """The messages that were sent together. EOFError when the other end is gone."""
    (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    data, out = io.BytesIO(await reader.readexactly(size)), []
    while data.tell() < size:
        out.append(pickle.load(data))
    return out


def serve(
    connection: socket, path: str, options: dict[str, Any], device: str, num_threads: int, cpus: tuple[int, ...]
) -> None:
    """Run the engine until the parent closes the connection or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if cpus:
        os.sched_setaffinity(0, cpus)
    torch.set_num_threads(num_threads)
    asyncio.run(_Child(path, options, device).run(connection))


class _Child:
    def __init__(self, path: str, options: dict[str, Any], device: str) -> None:
        self._path, self._options, self._device = path, options, device
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, connection: socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        try:
            while True:
                for message in await read(reader):
                    self._begin(*message)
        except (EOFError, OSError):
            for task in self._tasks.values():
                task.cancel()

    def _begin(self, what: str, number: int, args: tuple[Any, ...]) -> None:
        if what == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        task = asyncio.create_task(self._answer(number, getattr(self, f"_{what}")(*args)))
        self._tasks[number] = task
        task.add_done_callback(partial(self._forget, number))

    def _forget(self, number: int, _task: Any) -> None:
        del self._tasks[number]

    async def _answer(self, number: int, work: Any) -> None:
        try:
            answer = await work
        except Exception as error:
            answer = error
        progress = self._engine.progress if hasattr(self, "_engine") else Progress(0, 0, 0)
        try:
            data = pickle.dumps((number, answer, progress))
        except Exception:  # an exception that does not travel
            data = pickle.dumps((number, RuntimeError(repr(answer)), progress))
        self._writer.write(HEAD.pack(len(data)) + data)

    async def _ready(self) -> None:
        from transformers import AutoTokenizer

        from rlkit.parallel.model import load_model

        self._model = load_model(self._path, device=self._device)
        tokenizer = AutoTokenizer.from_pretrained(self._path)
        self._engine = LocalEngine(self._model, tokenizer=tokenizer, **self._options)

    async def _generate(self, prompt_ids: list[int], params: Any, rid: str | None) -> Any:
        return await self._engine.generate(prompt_ids, params=params, rid=rid)

    async def _abort(self, rid: str | None) -> int:
        return self._engine.abort(rid)

    async def _update(self, block: str, pieces: Sequence[Piece], version: int) -> None:
        """Without an await before the weights are in: the engine takes no step in between."""
        own = self._model.state_dict(keep_vars=True)
        given = {name: shape for name, _, shape, _ in pieces}
        required = {name for name, _ in self._model.named_parameters()}
        if missing := sorted(required - set(given)):
            raise ValueError(f"the new weights lack {missing[:4]} ({len(missing)} in all)")
        wrong = [n for n, shape in given.items() if n not in own or tuple(own[n].shape) != tuple(shape)]
        if wrong:
            raise ValueError(f"the engine's model has no such weights: {wrong[:4]} ({len(wrong)} in all)")
        shared = SharedMemory(name=block)
        with torch.no_grad():
            for name, dtype, shape, start in pieces:
                if own[name].numel():
                    view = torch.frombuffer(
                        shared.buf, dtype=getattr(torch, dtype), count=own[name].numel(), offset=start
                    )
                    own[name].copy_(view.view(shape))
                    del view
        shared.close()
        await self._engine.update_weights(version=version)
