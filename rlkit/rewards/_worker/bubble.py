"""The same isolation by bubblewrap, where the system lets that program make namespaces and not this one.

Ubuntu since 23.10 is such a system (an AppArmor profile decides who may have user namespaces), and others where `bwrap`
is setuid root. Nobody can fork into what bwrap makes, so every run starts a Python of its own: some tens of
milliseconds more. Of the system it sees, besides what `isolate` shows, the interpreter and the shared libraries that
the server has loaded. Process 1 there is trusted code of this module, and the program its child: it reaps what is left,
counts the files in the scratch folder, which no option of bwrap limits, and says by which signal the program ended.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from . import isolate

PLACES = ("/usr/bin/bwrap", "/bin/bwrap", "/usr/local/bin/bwrap")
_LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
_USERS = 40000  # where root is: 20000 user ids from here on, of which every run takes another one
_WORKER = "/worker/_worker"
_RUN = "import sys; sys.path.insert(0, '/worker'); from _worker import sandboxd; del sys.path[0]; sandboxd.inside()"


def enter(request: dict[str, Any], fds: list[int], control: int, shown: Sequence[str]) -> int:
    """As `isolate.enter`; what runs is said by `request`, which `sandboxd.inside` reads."""
    bwrap = next((place for place in PLACES if os.access(place, os.X_OK)), None)
    if bwrap is None:
        raise OSError("bubblewrap is not installed")
    python = [os.path.realpath(sys.executable), "-S", "-s", "-B", "-c", _RUN]
    walls = [bwrap, *_walls(), *_mounts(request["limits"]["scratch_bytes"], tuple(shown)), "--"]
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)  # see forkd
            inside = {**request, "control": len(fds), "user": _USERS + os.getpid() % 20000}
            isolate.only_these([*fds, control])
            os.execv(bwrap, [*walls, *python, json.dumps(inside)])
        except BaseException as error:
            isolate.tell(len(fds), error=str(error))
        os._exit(1)
    return pid


def _walls() -> Iterator[str]:
    """Namespaces. Root needs none of users: it takes another user id inside instead."""
    yield from ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    yield from ("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL")
    if os.geteuid() == 0:
        yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    else:
        yield from ("--unshare-user", "--uid", "1000", "--gid", "1000")


@cache
def _mounts(scratch_bytes: int, shown: tuple[str, ...]) -> list[str]:
    """What a program sees, in the order in which it is mounted."""
    library, masked = isolate.LIBRARY, isolate.MASKED
    system = _system((*library, *shown))
    targets = (*library, *shown, *isolate.DEVICES, _WORKER, *system)
    folders = sorted({str(parent) for path in targets for parent in Path(path).parents} - {"/"})
    places = ":".join(dict.fromkeys(os.path.dirname(path) for path in system))
    return [
        *(x for folder in folders for x in ("--perms", "0755", "--dir", folder)),  # bwrap's own are its user's only
        *(x for path in library for x in ("--ro-bind", path, path)),
        *(x for folder in masked for x in ("--tmpfs", folder)),
        *(x for path in shown for x in ("--ro-bind", path, path)),
        *(x for folder in masked for x in ("--remount-ro", folder)),
        *(x for path in isolate.DEVICES for x in ("--dev-bind", path, path)),
        *("--ro-bind", str(Path(__file__).parent), _WORKER),
        *(x for path, to in system.items() for x in (("--symlink", to, path) if to else ("--ro-bind", path, path))),
        *("--setenv", "LD_LIBRARY_PATH", places),
        *("--perms", "0777", "--size", str(scratch_bytes), "--tmpfs", isolate.SCRATCH),
        *("--remount-ro", "/", "--chdir", isolate.SCRATCH),
    ]


def _system(seen: tuple[str, ...]) -> dict[str, str]:
    """The interpreter and every shared library that is loaded here, but for what is `seen`; other names as links."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in maps if "/" in line}
    libraries = sorted(path for path in mapped if ".so" in Path(path).name and not path.startswith(seen))
    found = dict.fromkeys([os.path.realpath(sys.executable), *libraries], "")
    if (loader := _LOADERS.get(platform.machine(), "")) and os.path.exists(loader):
        found[loader] = ""
    for library in libraries:
        stem = Path(library).name.split(".so")[0]
        for other in os.scandir(os.path.dirname(library)):
            if other.name.startswith(stem) and other.is_symlink() and os.path.realpath(other.path) == library:
                found[other.path] = os.path.basename(library)
    return found


def wall_in(request: dict[str, Any]) -> None:
    """In process 1 of what bwrap made: returns, with all limits, in the child that is to run the program."""
    control: int = request["control"]
    try:
        os.umask(0o077)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # of which process 1 gets none from inside
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        program = os.fork()
        if program == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            if os.getuid() == 0:  # process 1 stays what bwrap is, which could not kill it otherwise
                isolate.become(request["user"])
            isolate.confine(request["limits"], others=1)
            isolate.tell(control, began=True)
            return
        isolate.drop_capabilities()
        os.closerange(0, control)
        _watch(program, control)
    except BaseException as error:
        isolate.tell(control, error=str(error))
    os._exit(1)


def _watch(program: int, control: int) -> None:
    """Reap until the program has ended, and end as it did. Does not return."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                os.write(control, json.dumps({"signal": -code}).encode())
            os._exit(code & 0xFF)
        files = os.statvfs(isolate.SCRATCH)
        if files.f_files - files.f_ffree > isolate.SCRATCH_FILES:
            os.write(control, json.dumps({"why": f"more than {isolate.SCRATCH_FILES} files"}).encode())
            os._exit(1)
        if not pid:
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
