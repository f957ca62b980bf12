"""Tests on several ranks: `ranks.run(function, *args)` calls a function of a test module on all ranks of one group.

    def on_rank(rank, world, a): ...            # top level; arguments and results are pickled

    def test_it(ranks):                         # four gloo ranks, shared by all tests of the session
        assert ranks.run(on_rank, 3) == [...]   # one result per rank

A function that raises on any rank, or takes longer than `timeout`, fails the test with that rank's traceback; the
ranks are then started anew for the next test. `pool(2)` gives another number of ranks. Processes are forked from a
server that has imported torch and transformers once.
"""

from __future__ import annotations

import importlib.util
import multiprocessing.connection
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import forked
import pytest


class Ranks:
    """A process group of `world` forked ranks."""

    def __init__(self, world: int) -> None:
        self.world, self._pipes, self._processes = world, [], []

    def run(self, function, *args, timeout: float = 240.0):
        """`function(rank, world, *args)` on every rank; the results in the order of the ranks."""
        if not self._processes:
            self._start()
        where = function.__code__.co_filename, function.__name__
        for pipe in self._pipes:
            pipe.send((*where, args))
        results, deadline = {}, time.monotonic() + timeout
        while len(results) < self.world:
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in results}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                pytest.fail(f"ranks {sorted(waiting.values())} of {where[1]} took longer than {timeout} s")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "died"
                if not ok:
                    self.stop()
                    pytest.fail(f"rank {rank} of {where[1]}:\n{value}")
                results[rank] = value
        return [results[r] for r in range(self.world)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        context = forked.context()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=forked.run_file, args=(__file__, {"JOB": (rank, self.world, port, theirs)}), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def serve(rank: int, world: int, port: int, pipe) -> None:
    """What a rank does: join the group, then answer calls until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timedelta(seconds=180))
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=180))
    while True:
        try:
            path, name, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(load(path), name)(rank, world, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def load(path: str):
    """The test module at `path`, imported once."""
    name = f"on_ranks_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def pool():
    """pool(n): a process group of n ranks, started when first used."""
    made: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        return made.setdefault(world, Ranks(world))

    yield of
    for ranks in made.values():
        ranks.stop()


@pytest.fixture(scope="session")
def ranks(pool):
    """Four ranks."""
    return pool(4)


if "JOB" in globals():
    serve(*globals()["JOB"])
