"""Namespaces, a file system with almost nothing in it, limits, no privileges, and a system call filter.

`enter` is a fork whose child has user, mount, pid, network, IPC, UTS and cgroup namespaces of its own and is process 1
there: when it ends, the kernel ends whatever it left behind. It sees the Python standard library (read only, without
site-packages but for what was asked for), /dev/null, /dev/zero, /dev/urandom and an empty scratch folder; no /proc, no
/sys, no network device.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import stat
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import syscalls

NOT_ISOLATED = "isolation failed"
"""How an error starts that says why a process cannot be isolated here."""
_libc = ctypes.CDLL(None, use_errno=True)
_gil_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock: for a call that returns twice
_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x20000 | 0x08000000 | 0x04000000 | 0x02000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_LOCKABLE = _NOSUID | _NODEV | 8 | 1024 | 2048  # and noexec, noatime, nodiratime
_DETACH = 2
_PDEATHSIG, _KEEPCAPS, _SECCOMP, _NO_NEW_PRIVS = 1, 8, 22, 38
_INSIDE = 1000  # the only user and group id inside
_NOBODY = 65534  # what they are outside, if the server is root: of root, the kernel does not count the processes
_THREADS = 16
_LIBRARY = tuple({os.path.realpath(sysconfig.get_path(name)): 0 for name in ("stdlib", "platstdlib")})
"""The folders of Python that a program may read."""
_INSTALLED = (f"{path}/{name}" for path in _LIBRARY for name in ("site-packages", "dist-packages"))
_MASKED = tuple(path for path in _INSTALLED if os.path.isdir(path))
"""The folders inside the library that hold what was installed: a program sees them empty."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SCRATCH = "/scratch"
_SCRATCH_FILES = 4096
_server_lives, _held = os.pipe()  # the server alone holds the writing end for long


def enter(child: Callable[[], None], fds: list[int], control: int, limits: dict[str, Any], shown: Sequence[str]) -> int:
    """The pid of a new isolated process that runs `child` with `fds` as its fds 0, 1, 2, ... and nothing else open.

    It may read the paths `shown`. On `control` it says that it is isolated, and then runs `child`, or why it is not.
    """
    ready, go = os.pipe()
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _gil_libc.syscall(ctypes.c_long(syscalls.CLONE), ctypes.c_ulong(_NAMESPACES | signal.SIGCHLD), 0, 0, 0, 0)
    number = ctypes.get_errno()
    if pid != 0:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        os.close(ready)
        os.close(go)
        raise OSError(f"{NOT_ISOLATED}: {_error('creating namespaces', number)}")
    if pid == 0:
        code = 1
        try:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            only_these([*fds, control, ready, _server_lives])
            _isolate(len(fds) + 1, limits, shown)
            _tell(len(fds), began=True)
        except BaseException as error:
            _tell(len(fds), error=f"{NOT_ISOLATED}: {error}")
            os._exit(1)
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    os.close(ready)
    try:
        _map_ids(pid)
        os.write(go, b"1")
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise OSError(f"{NOT_ISOLATED}: mapping user ids: {error}") from error
    finally:
        os.close(go)
    return pid


def _tell(control: int, **message: str | int) -> None:
    """The last thing said on a control socket from inside: it is closed."""
    with suppress(OSError):  # nobody listens any more
        os.write(control, json.dumps(message).encode() + b"\n")
        os.close(control)


def _map_ids(pid: int) -> None:
    """Give the child its one user id: nobody if this is root, otherwise the user's own."""
    proc = f"/proc/{pid}"
    for outside_uid, outside_gid in [(_NOBODY, _NOBODY), (os.geteuid(), os.getegid())]:
        try:
            if outside_uid != _NOBODY or os.geteuid() != 0:
                Path(proc, "setgroups").write_text("deny")
            Path(proc, "gid_map").write_text(f"{_INSIDE} {outside_gid} 1")
            Path(proc, "uid_map").write_text(f"{_INSIDE} {outside_uid} 1")
            return
        except PermissionError as error:
            refused = error
    raise refused


def _isolate(ready: int, limits: dict[str, Any], shown: Sequence[str]) -> None:
    _check(_libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "asking to die with the server")
    if os.read(ready, 1) != b"1":
        raise OSError("the server could not map user ids")
    os.close(ready)
    os.setsid()
    paths = (*_LIBRARY, *shown, *_DEVICES)
    sources = [(path, os.open(path, os.O_PATH)) for path in paths]  # while root may still look in /root
    _become(_INSIDE)
    if select.select([ready + 1], [], [], 0)[0]:  # it ended before it was asked for its death
        raise OSError("the server died")
    os.close(ready + 1)
    _new_root(sources, limits["scratch_bytes"])
    _confine(limits)


def _become(user: int) -> None:
    """Take the namespace's user and group; keep the capabilities for the set-up."""
    _check(_libc.prctl(_KEEPCAPS, 1, 0, 0, 0), "keeping capabilities for the set-up")
    with suppress(PermissionError):  # an ordinary user may not drop groups; there is nothing to use them on
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _check(_libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "asking to die with the server")


def _new_root(sources: list[tuple[str, int]], scratch_bytes: int) -> None:
    """Make a new root from the opened sources, and leave the old one for ever."""
    base = next(path for path in ("/tmp", "/mnt", "/var") if os.path.isdir(path))
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=1024,mode=0755")
    for path, fd in sources:
        target = base + path
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{fd}", target, None, _BIND | _REC)
        os.close(fd)
        if path not in _DEVICES:
            _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
        for folder in _MASKED:
            if os.path.dirname(folder) == path:
                _mount("tmpfs", base + folder, "tmpfs", _NOSUID | _NODEV, "size=4k,mode=0755")
    for folder in _MASKED:  # only now: what is shown may lie in them
        _mount(None, base + folder, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.mkdir(base + _SCRATCH)
    options = f"size={scratch_bytes},nr_inodes={_SCRATCH_FILES},mode=0700"
    _mount("tmpfs", base + _SCRATCH, "tmpfs", _NOSUID | _NODEV, options)
    os.chdir(base)
    _check(_libc.syscall(syscalls.PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "leaving the old root")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(_SCRATCH)


def only_these(fds: list[int]) -> None:
    """Leave the server behind: its signal handlers, and every fd but these, which become 0, 1, 2, ..."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    high = max(fds) + len(fds) + 1
    for i, fd in enumerate(fds):  # out of the way first: they may lie on each other's places
        os.dup2(fd, high + i)
    for i in range(len(fds)):
        os.dup2(high + i, i)
    os.closerange(len(fds), 1 << 20)


def _confine(limits: dict[str, Any]) -> None:
    """Set limits, give up privileges, install the filter. None of it can be undone."""
    pages = int(limits["base_pages"])
    cpu_s = max(1, int(limits["cpu_s"] + 0.999))
    for which, value in {
        resource.RLIMIT_AS: limits["memory_bytes"] + pages * resource.getpagesize(),
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: limits["scratch_bytes"],
        resource.RLIMIT_NPROC: _THREADS + limits["processes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_STACK: min(limits["memory_bytes"], 64 << 20),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }.items():
        set_limit(which, value)
    _drop_capabilities()
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges")
    _install_filter(forks=limits["processes"] > 0)


def set_limit(which: int, value: int) -> None:
    """A resource limit of this process, for ever; not above the one that it has."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _drop_capabilities() -> None:
    """Give up every capability."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.syscall(syscalls.CAPSET, header, (ctypes.c_uint32 * 6)()), "dropping capabilities")


def _install_filter(*, forks: bool) -> None:
    """Deny the system calls that no solution needs, for ever."""
    program = syscalls.DENY[forks]
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    argument = Program(len(program) // 8, ctypes.addressof(code))
    _check(_libc.prctl(_SECCOMP, 2, ctypes.byref(argument), 0, 0), "installing the system call filter")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    if flags & _REMOUNT:  # flags that an outer namespace has locked must be kept
        flags |= os.statvfs(target).f_flag & _LOCKABLE
    arguments = [None if x is None else os.fsencode(x) for x in (source, target, kind)]
    text = None if data is None else data.encode()
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), text), f"mounting {kind or source or target} ({flags:#x})")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise _error(what, ctypes.get_errno())


def _error(what: str, number: int) -> OSError:
    return OSError(number, f"{what}: {errno.errorcode.get(number, number)} {os.strerror(number)}")
