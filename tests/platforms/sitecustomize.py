"""Python starts this in every process of a test of macOS: it hides from rlkit what only Linux has.

What it imitates: `sys.platform` as rlkit's modules see it, no /proc, /sys and /dev/shm, no processor affinity, memfd,
epoll or prctl, no SOCK_SEQPACKET, no limit of the address space, and at most 10240 open files.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import importlib.abc
import importlib.machinery
import io
import os
import resource
import select
import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = ("rlkit", "_worker", "flag_checks", "sampled_")
HIDDEN = ("/proc", "/sys", "/dev/shm")


def hide_paths(module: Any, name: str) -> None:
    real = getattr(module, name)

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike) and str(path).startswith(HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return real(path, *args, **kwargs)

    setattr(module, name, opened)


class Darwin:
    """A module with some other names."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Finder(importlib.abc.MetaPathFinder):
    """Gives rlkit's modules a `sys` and a `platform` of macOS."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith(OURS):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if hasattr(module, "sys"):
                    module.sys = Darwin(sys, platform="darwin")
                if isinstance(getattr(module, "platform", None), ModuleType):
                    module.platform = SimpleNamespace(system=lambda: "Darwin", machine=lambda: "arm64")

            spec.loader.exec_module = exec_module
        return spec


def socketpair(family: Any = socket.AF_UNIX, type: Any = socket.SOCK_STREAM, proto: int = 0) -> Any:
    if type == socket.SOCK_SEQPACKET:
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
    return make_pair(family, type, proto)


def setrlimit(which: int, limits: tuple[int, int]) -> None:
    if which == resource.RLIMIT_AS or (which == resource.RLIMIT_NOFILE and limits[0] > 10240):
        raise ValueError("current limit exceeds maximum limit")
    set_limit(which, limits)


def no_prctl(self: ctypes.CDLL, name: str) -> Any:
    if name in ("prctl", "unshare", "mount"):
        raise AttributeError(name)
    return find_symbol(self, name)


make_pair, set_limit, find_symbol = socket.socketpair, resource.setrlimit, ctypes.CDLL.__getattr__
socket.socketpair, resource.setrlimit, ctypes.CDLL.__getattr__ = socketpair, setrlimit, no_prctl
for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("epoll",):
    delattr(select, name)
for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "listdir"), (os, "scandir"), (os, "stat")):
    hide_paths(module, name)
sys.meta_path.insert(0, Finder())
