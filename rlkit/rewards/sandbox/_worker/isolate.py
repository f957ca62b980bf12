"""Isolation: namespaces, a minimal root file system, rlimits, no privileges, and a seccomp filter.

`enter` is a fork whose child has user, mount, pid, network, IPC, UTS and cgroup namespaces of its own and is process 1
there: when it ends, the kernel kills all its processes. It sees the Python standard library (read only, and of
site-packages only the requested packages), /dev/null, /dev/zero, /dev/urandom and an empty scratch folder; no /proc, no
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
"""The prefix of errors that say why a process cannot be isolated here."""
_libc = ctypes.CDLL(None, use_errno=True)
_gil_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock: for a call that returns twice
_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x20000 | 0x08000000 | 0x04000000 | 0x02000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_LOCKABLE = _NOSUID | _NODEV | 8 | 1024 | 2048  # and noexec, noatime, nodiratime
_DETACH = 2
_PDEATHSIG, _KEEPCAPS, _SECCOMP, _NO_NEW_PRIVS = 1, 8, 22, 38
_INSIDE = 1000  # the only user and group id inside
_NOBODY = 65534  # what they map to if the server is root, whose processes the kernel does not count
_THREADS = 16
_LIBRARY = tuple({os.path.realpath(sysconfig.get_path(name)): 0 for name in ("stdlib", "platstdlib")})
"""The folders of Python that a program may read."""
_INSTALLED = (f"{path}/{name}" for path in _LIBRARY for name in ("site-packages", "dist-packages"))
_MASKED = tuple(path for path in _INSTALLED if os.path.isdir(path))
"""Folders of installed packages inside the library: a program sees them empty."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SCRATCH = "/scratch"
_SCRATCH_FILES = 4096
_server_lives, _held = os.pipe()  # only the server keeps the write end open


def enter(child: Callable[[], None], fds: list[int], control: int, limits: dict[str, Any], extra: Sequence[str]) -> int:
    """The pid of a new isolated process that runs `child` with `fds` as its fds 0, 1, 2, ... and nothing else open.

    It may read the paths `extra`. It reports on `control` that it is isolated, and runs `child`; or why it is not.
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
            _keep_only([*fds, control, ready, _server_lives])
            _isolate(len(fds) + 1, limits, extra)
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
    """Send the last message from inside, and close the control socket."""
    with suppress(OSError):  # the other end may be closed
        os.write(control, json.dumps(message).encode() + b"\n")
        os.close(control)


def _map_ids(pid: int) -> None:
    """Map the user id inside to nobody if this is root, otherwise to the user's own id."""
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


def _isolate(ready: int, limits: dict[str, Any], extra: Sequence[str]) -> None:
    _check(_libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "asking to die with the server")
    if os.read(ready, 1) != b"1":
        raise OSError("the server could not map user ids")
    os.close(ready)
    os.setsid()
    paths = (*_LIBRARY, *extra, *_DEVICES)
    sources = [(path, os.open(path, os.O_PATH)) for path in paths]  # while this is still root, which may read /root
    _become(_INSIDE)
    if select.select([ready + 1], [], [], 0)[0]:  # before PR_SET_PDEATHSIG was set
        raise OSError("the server died")
    os.close(ready + 1)
    _new_root(sources, limits["scratch_bytes"])
    _confine(limits)


def _become(user: int) -> None:
    """Take the namespace's user and group; keep the capabilities for the set-up."""
    _check(_libc.prctl(_KEEPCAPS, 1, 0, 0, 0), "keeping capabilities for the set-up")
    with suppress(PermissionError):  # an ordinary user may not drop groups; no file inside has them
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _check(_libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "asking to die with the server")


def _new_root(sources: list[tuple[str, int]], scratch_bytes: int) -> None:
    """Make a new root from the opened sources, and detach the old one."""
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
    for folder in _MASKED:  # only now: shown packages may be mounted inside
        _mount(None, base + folder, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.mkdir(base + _SCRATCH)
    options = f"size={scratch_bytes},nr_inodes={_SCRATCH_FILES},mode=0700"
    _mount("tmpfs", base + _SCRATCH, "tmpfs", _NOSUID | _NODEV, options)
    os.chdir(base)
    _check(_libc.syscall(syscalls.PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "leaving the old root")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(_SCRATCH)


def _keep_only(fds: list[int]) -> None:
    """Drop the server's signal handlers, and every fd but these, which become 0, 1, 2, ..."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    high = max(fds) + len(fds) + 1
    for i, fd in enumerate(fds):  # out of the way first: the numbers may overlap
        os.dup2(fd, high + i)
    for i in range(len(fds)):
        os.dup2(high + i, i)
    os.closerange(len(fds), 1 << 20)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def _confine(limits: dict[str, Any]) -> None:
    """Irrevocably apply rlimits, drop capabilities and install the seccomp filter."""
    pages = int(limits["base_pages"])
    for which, value in {
        resource.RLIMIT_AS: limits["memory_bytes"] + pages * resource.getpagesize(),
        resource.RLIMIT_CPU: max(1, int(limits["cpu_s"] + 0.999)),
        resource.RLIMIT_FSIZE: limits["scratch_bytes"],
        resource.RLIMIT_NPROC: _THREADS + limits["processes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_STACK: min(limits["memory_bytes"], 64 << 20),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.syscall(syscalls.CAPSET, header, (ctypes.c_uint32 * 6)()), "dropping capabilities")
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges")
    program = syscalls.DENY[limits["processes"] > 0]
    code = ctypes.create_string_buffer(program, len(program))
    argument = _FilterProgram(len(program) // 8, ctypes.addressof(code))
    _check(_libc.prctl(_SECCOMP, 2, ctypes.byref(argument), 0, 0), "installing the system call filter")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    if flags & _REMOUNT:  # flags that an outer namespace has locked must be kept
        flags |= os.statvfs(target).f_flag & _LOCKABLE
    arguments = [None if x is None else os.fsencode(x) for x in (source, target, kind)]
    text = None if data is None else data.encode()
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), text), f"mounting {kind or source or target} ({flags:#x})")


def _check(result: int, call: str) -> None:
    if result != 0:
        raise _error(call, ctypes.get_errno())


def _error(call: str, number: int) -> OSError:
    return OSError(number, f"{call}: {errno.errorcode.get(number, number)} {os.strerror(number)}")
