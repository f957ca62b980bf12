"""The server of `warm.py`: imports what rlkit's commands import, then forks a child for each command."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing.spawn
import multiprocessing.util
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import types
from typing import Any

from parsers import keep

sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
PRELOAD = (
    "torch.optim", "tyro", "matplotlib.backends.backend_agg", "matplotlib.figure",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3", "rlkit.model.forward", "rlkit.model.checkpoint", "rlkit.model.optim",
    "rlkit.loops.grpo", "rlkit.loops.ppo", "rlkit.loops.sft", "rlkit.loops.preference", "rlkit.loops.reward_model",
    "rlkit.rollout.engines.local", "rlkit.run.report.plot", "rlkit.rollout.envs.chat", "rlkit.rollout.text",
    "rlkit.scripts.cli", "rlkit.scripts.task", "rlkit.scripts.engines", "rlkit.compat.flags", "rlkit.model.launch",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.nn",
    "torch.distributed.tensor.parallel", "torch.utils.serialization.config", "torch.utils._device", "numpy.random",
    "rlkit.objectives", "rlkit.rewards.combine", "rlkit.compat.envs", "rlkit.agents.endpoint",
    "rlkit.rollout.envs.gym", "rlkit.compat.recognise", "rlkit.rollout.envs.tools", "typeguard",
    "tyro._backends._argparse_formatter", "tyro.constructors._struct_spec_dataclass",
)  # fmt: skip
ABOVE = 200  # most numbers that a descriptor of a command has


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Returns in each child, with its job; in the server at the end, with None."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for the children
    while True:
        data, fds, *_ = socket.recv_fds(requests, 1 << 20, 16)
        if not data:
            return None
        if os.fork() == 0:
            requests.close()
            return forked(json.loads(data), fds)
        for fd in fds:
            os.close(fd)


def forked(job: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Forks the child and returns in it; its parent reports its status, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        return job | {"fds": fds}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status, *others = fds
    for fd in others:
        os.close(fd)
    os.write(status, struct.pack("i", os.waitpid(child, 0)[1]))
    os._exit(0)


def renumber(fds: list[int], numbers: list[int]) -> None:
    """Give the descriptors these numbers, one for each; an old number may be one of the new ones."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, max([ABOVE, *numbers]) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def become(job: dict[str, Any]) -> None:
    """Takes over the job's descriptors, session, folder, environment and arguments."""
    first, *others = job["fds"]
    status = fcntl.fcntl(first, fcntl.F_DUPFD, max([ABOVE, *job["numbers"]]) + 1)
    os.close(first)
    renumber(others, job["numbers"])
    if job["terminal"]:
        os.login_tty(0)
    elif job["session"]:
        os.setsid()
    os.write(status, struct.pack("i", os.getpid()))  # only now: a test may signal the session's processes
    os.close(status)
    standard = open(0), open(1, "w", buffering=1 if os.isatty(1) else -1), open(2, "w", buffering=1)  # noqa: SIM115
    for name, stream in zip(("stdin", "stdout", "stderr"), standard, strict=True):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if not job["plots"]:
        sys.modules["matplotlib"] = None  # type: ignore[assignment]
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.orig_argv, sys.argv = job["argv"], job["argv"][1:]
    sys.path[:1] = filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep))


def offer_spawned() -> None:
    """Fork a process that waits to be the first one that the command spawns: a child of it, with the same imports."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        be_spawned(theirs)
    theirs.close()
    real = multiprocessing.util.spawnv_passfds

    def spawn(path: bytes, args: list[str], numbers: tuple[int, ...]) -> int:
        if "spawn_main" not in args[-2]:  # the tracker of shared memory
            return real(path, args, numbers)
        multiprocessing.util.spawnv_passfds = real
        socket.send_fds(ours, [json.dumps([args[1:], numbers]).encode()], numbers)
        ours.close()
        return pid

    multiprocessing.util.spawnv_passfds = spawn


def be_spawned(requests: socket.socket) -> None:
    """Wait for the command's `spawn`; end with the command if there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    data, fds, *_ = socket.recv_fds(requests, 1 << 16, 16)
    if not data:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requests.close()
    args, numbers = json.loads(data)
    renumber(fds, numbers)
    sys.argv = ["-c", *args[args.index("-c") + 2 :]]
    exec(args[args.index("-c") + 1], {"__name__": "__main__"})


def read_flags() -> None:
    """Does once what tyro does to the first command whose flags have these types and texts."""
    from rlkit.scripts.cli import parsed

    with contextlib.suppress(ValueError):  # flags that are missing
        parsed([], importlib.import_module("rlkit.scripts.grpo").Args)
    del sys.modules["rlkit.scripts.grpo"]  # `python -m` warns of a module that is imported already
    del sys.modules["rlkit.scripts"].grpo


def try_tiny_model() -> None:
    """Does once what a process does to the first model and chat template of their kind."""
    from rlkit.data.markup import check_template
    from rlkit.data.tiny import tiny_model, tiny_tokenizer
    from rlkit.model.forward import prepare_model

    tokenizer = tiny_tokenizer()
    check_template(tokenizer)
    prepare_model(tiny_model(tokenizer, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate=16))


def leave() -> None:
    """The last of the exit functions: a command that has ended has nothing left but to take down its modules."""
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def execute(argv: list[str]) -> None:
    """What `python` does with these arguments."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if argv[0] == "-c":
        sys.argv, name, code = ["-c", *argv[2:]], "<string>", argv[1]
        sys.path.insert(0, "")
    else:
        main.__file__ = name = argv[0]
        sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
        with open(name, encoding="utf-8") as file:
            code = file.read()
    exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    status: int | None = None  # of a command that has ended; Ctrl-C ends it by the signal, later
    atexit.register(leave)  # before the imports register theirs, which run first
    gc.disable()
    for module in PRELOAD:
        importlib.import_module(module)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from rlkit.run.signals import keep_interrupt

    get_checkpoint_conversion_mapping("qwen3")  # kept by transformers, and read at each export
    keep()
    keep_interrupt()
    read_flags()
    try_tiny_model()
    assert threading.active_count() == 1, "a forked child would lack the threads"
    gc.freeze()  # the children's collections leave these pages shared
    gc.enable()
    os.fsync = lambda _: None  # as in the tests' own process
    job = serve(socket.socket(fileno=int(sys.argv[1])))
    if job is not None:
        become(job)
        if job["spawns"]:
            offer_spawned()
        try:
            execute(job["argv"][1:])
            status = 0
        except SystemExit as end:
            status = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
            raise
        except Exception:
            status = 1
            raise
