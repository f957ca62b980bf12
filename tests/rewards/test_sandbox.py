"""Hostile programs against the real sandbox: each must do no harm outside, and its end must be reported with why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlkit.rewards import sandbox
from rlkit.rewards.sandbox import Limits, SandboxError
from rlkit.rewards.sandbox._worker.codec import replace_content


async def run(source, *, stdin="", limits=Limits(wall_s=60, cpu_s=60)):
    return await sandbox.run(textwrap.dedent(source), stdin=stdin, limits=limits)


def descendants():
    """Processes of this machine that descend from the sandbox's server, whoever their parent is now."""
    server = sandbox._server(())._process.pid
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [server]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found


async def nothing_left():
    """A killed process is still there for a moment."""
    async with asyncio.timeout(120):
        while descendants():
            await asyncio.sleep(0.02)


async def test_a_program_reads_and_writes_as_in_python():
    source = """
        import sys, collections, asyncio, threading
        name = input()
        rest = sys.stdin.read()
        threading.Thread(target=lambda: print(name.upper(), len(rest.split()))).start()
        async def late(): return 7
        print(asyncio.run(late()), file=sys.stderr)
        with open("note.txt", "w") as file: file.write("kept")
        if __name__ == "__main__": print(open("note.txt").read(), open(0).read() == "")
    """
    ran = await run(source, stdin="zoë\n" + "1 2 3\n" * 50_000)
    assert ran.reason == ""
    assert sorted(ran.stdout.splitlines()) == sorted(["ZOË 150000", "kept True"])
    assert ran.stderr == "7\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "exit code 1: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import sys; sys.exit('no')", "exit code 1: no"),
        ("def f(:", "exit code 1: SyntaxError"),
        ("import os; os._exit(9)", "exit code 9"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
        ("import os; os.abort()", "killed by SIG"),
        ("import numpy", "exit code 1: ModuleNotFoundError"),
        ("def f(): f()\nf()", "exit code 1: RecursionError"),
    ],
)
async def test_the_reason_of_a_failing_program(source, reason):
    assert (await run(source)).reason.startswith(reason)


@pytest.mark.parametrize(
    "source",
    [
        "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(5)",
        "out = open(1, 'w')\nout.write('5')\nprint('4')",
        "import io, sys\nprint(5)\nsys.stdout = io.StringIO()\nprint(6)",
        "import sys\nprint(5)\nsys.stdout.close()",
        "import sys\nprint(5)\nsys.stdout.flush()\nsys.stdout = None",
        "import io, os, sys\nclass Fast(io.IOBase):\n    def __init__(self): self.buffer = io.BytesIO()\n"
        "    def write(self, text): self.buffer.write(text.encode())\n"
        "    def flush(self): os.write(1, self.buffer.getvalue()); self.buffer.truncate(0), self.buffer.seek(0)\n"
        "sys.stdout = Fast()\nprint(5)",
    ],
)
async def test_buffers_are_flushed_as_by_python(source):
    plain = subprocess.run(
        [sys.executable, "-S", "-c", source], capture_output=True, text=True, check=True, timeout=200
    )
    ran = await run(source)
    assert (ran.reason, ran.stdout) == ("", plain.stdout)


@pytest.mark.parametrize("surrogate", [chr(code) for code in (0xD800, 0xDC80, 0xDFFF)], ids=ascii)
async def test_a_lone_surrogate_in_a_source_is_a_failed_run(surrogate):
    for source in (f"print('{surrogate}')", f"{surrogate} = 1"):
        assert (await run(source)).reason.startswith("exit code 1: SyntaxError")
    assert (await run("print(len(open(0, 'rb').read()))", stdin=surrogate)).stdout == "3\n"


@pytest.mark.slow
async def test_every_test_has_a_reason_where_one_ends_them_all():
    tests = ["assert f(1) == 2", "while True: pass", "assert f(2) == 3", "assert f(3) == 4"]
    found = await sandbox.run_tests(
        "def f(x):\n    return x + 1", tests, imports={}, asked={"f": "f"}, limits=Limits(wall_s=2.0)
    )
    assert found[0] == ""
    assert len(found) == len(tests)
    assert all("timeout" in reason for reason in found[1:])


@pytest.mark.slow
async def test_endless_programs_end_in_time():
    ignores = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    loops, ignores, sleeps = await asyncio.gather(
        *(run(source, limits=Limits(wall_s=60, cpu_s=1)) for source in ("while True: pass", ignores)),
        run("import time; time.sleep(1000)", limits=Limits(wall_s=0.5, cpu_s=60)),
    )
    assert loops.reason == ignores.reason == "timeout: more than 1 s of processor time"
    assert sleeps.reason == "timeout: no end after 0.5 s"
    assert "EOFError" in (await run("input()")).reason


@pytest.mark.parametrize(("cpu_s", "reason"), [(0.85, "timeout: more than 1 s of processor time"), (0.2, "killed")])
def test_the_cpu_limit_is_recognized_although_the_kernel_reports_less(cpu_s, reason):
    """On a busy machine a tick that hits a program is charged to it whole: it is killed up to a fifth too early."""
    child = object.__new__(sandbox.Child)
    child._limits = Limits(cpu_s=1)
    assert child._reason({"code": -9, "reason": "exit", "cpu_s": cpu_s}, "", False).startswith(reason)


def test_a_process_that_ends_before_it_is_isolated_is_an_error_and_not_a_failed_program():
    def waited(**said):
        child = object.__new__(sandbox.Child)
        child._limits, child._pipes = Limits(wall_s=3), []
        child._control, server = socket.socketpair()
        with server:
            server.sendall(json.dumps({"wall_s": 0.1, "cpu_s": 0.1} | said).encode() + b"\n")
        return child.wait()

    with pytest.raises(SandboxError, match="ended before it was isolated"):
        waited(reason="exit", code=1)
    assert waited(reason="exit", code=1, began=True).reason == "exit code 1"
    assert waited(reason="timeout", code=-9).reason == "timeout: no end after 3 s"


async def test_endless_output_is_cut():
    limits = Limits(wall_s=60, cpu_s=60, output_bytes=100_000)
    ran = await run("while True: print('x' * 1000)", limits=limits)
    assert ran.reason == "more than 100000 bytes of output"
    assert len(ran.stdout) == 100_000
    ran = await run("import sys\nfor _ in range(2000): sys.stderr.write('y' * 1000)\nprint('done')", limits=limits)
    assert (ran.reason, ran.stdout) == ("", "done\n")
    assert len(ran.stderr) < 200_000


@pytest.mark.slow_cases("x = 'a'\\nwhile True: x += x")
@pytest.mark.parametrize(
    "source",
    [
        "x = bytearray(10 * 2**30)",
        "x = []\nwhile True: x.append(bytearray(2**20))",
        "import mmap\nx = mmap.mmap(-1, 10 * 2**30)",
        "x = 'a'\nwhile True: x += x",
        "import os\nfd = os.open('big', os.O_CREAT | os.O_RDWR)\nwhile True: os.write(fd, bytes(2**20))",
        "n = 0\nwhile True:\n n += 1\n open(f'{n}', 'wb').write(bytes(2**20))",
        "n = 0\nwhile True:\n n += 1\n open(f'{n}', 'wb').close()",
        "import os\nfd = os.memfd_create('x')\nwhile True: os.write(fd, bytes(2**20))",
        "import os\nwhile True: os.pipe()",
    ],
)
async def test_memory_disk_and_files_run_out_soon(source):
    ran = await run(source)
    assert ran.reason.startswith(
        (
            "memory",
            "exit code 1: MemoryError",
            "exit code 1: OSError",
            "exit code 1: Permission",
        )
    )
    await nothing_left()


FORKS = """
    import os
    print(os.getpid(), flush=True)
    made = 0
    try:
        while True:
            if os.fork() == 0:
                while True:
                    try: os.fork()
                    except OSError: pass
            made += 1
    except OSError as error:
        print(made, type(error).__name__)
"""


THREADS = """
    import os, threading, time
    try:
        for _ in range(1000):
            threading.Thread(target=time.sleep, args=(99,)).start()
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
"""


async def test_a_fork_bomb_does_not_go_off():
    ran = await run(FORKS)
    assert ran.stdout == "1\n0 PermissionError\n"
    ran = await run(FORKS, limits=Limits(wall_s=60, cpu_s=60, processes=4))
    assert ran.reason == ""
    assert 0 < int(ran.stdout.split()[1]) <= 20
    assert ran.stdout.split()[2] == "BlockingIOError"
    ran = await run(THREADS)
    assert "can't start new thread" in ran.stdout, ran
    await nothing_left()


async def test_daemons_do_not_outlive_the_program():
    source = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.close(0); os.close(1); os.close(2)
                time.sleep(1000)
            os._exit(0)
        time.sleep(0.2)
        print("left")
    """
    ran = await run(source, limits=Limits(wall_s=60, cpu_s=60, processes=4))
    assert (ran.reason, ran.stdout) == ("", "left\n")
    await nothing_left()


async def test_the_network_is_out_of_reach():
    listener = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0rlkit-sandbox-test")
    abstract.listen()
    port = listener.getsockname()[1]
    source = f"""
        import socket, urllib.request, ctypes, _socket
        def attempt(name, act):
            try: print(name, act())
            except BaseException as error: print(name, "refused")
        attempt("tcp", lambda: socket.create_connection(("127.0.0.1", {port}), 1))
        attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)))
        attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect("\\0rlkit-sandbox-test"))
        attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM).connect((2, 1)))
        attempt("raw", lambda: _socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        attempt("http", lambda: urllib.request.urlopen("http://127.0.0.1:{port}", timeout=1))
        attempt("interfaces", lambda: [n for _, n in socket.if_nameindex() if n != "lo"])
        attempt("syscall", lambda: 1 / (1 + ctypes.CDLL(None).socket(2, 1, 0)))
    """
    ran = await run(source)
    names = ["tcp", "udp", "unix", "vsock", "raw", "http", "interfaces", "syscall"]
    assert ran.stdout.splitlines() == [f"{name} refused" for name in names]
    for server in (listener, abstract):
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
        server.close()


async def test_files_outside_the_scratch_folder_are_out_of_reach(tmp_path):
    secret = tmp_path / "expected.txt"
    secret.write_text("the answer 42")
    system = [
        "/etc/passwd",
        "/proc/1/environ",
        "/proc/self/maps",
        "/sys",
        "/tmp",
        "/var",
        "/bin/sh",
        "/dev/sda",
        "/dev/shm",
        "/dev/tty",
    ]
    places = [secret, Path.home(), Path.home() / ".ssh", Path(__file__), sandbox.__file__, pytest.__file__, *system]
    source = f"""
        import os
        for place in {[str(p) for p in places]}:
            for path in (place, "../../../../../../.." + place, "/proc/1/root" + place, "/dev/../" + place):
                try: print("read", path, (os.listdir if os.path.isdir(path) else open)(path))
                except OSError: pass
            os.symlink(place, "link")
            try: print("link", place, os.listdir("link") if os.path.isdir("link") else open("link").read(1))
            except OSError: pass
            os.unlink("link")
        for path in ["/x", "/dev/x", "/etc/x", os.path.dirname(os.__file__) + "/x.py", os.__file__]:
            try: open(path, "a"); print("wrote", path)
            except OSError: pass
        print(sorted(os.environ), [fd for fd in range(100) if os.path.exists(f"/dev/fd/{{fd}}")])
        opened = []
        for fd in range(3, 100):
            try: os.fstat(fd); opened.append(fd)
            except OSError: pass
        print(opened, os.getuid() > 0, os.getpid(), os.getppid())
    """
    ran = await run(source)
    lines = [line for line in ran.stdout.splitlines() if not _is_way_to_the_library(line)]
    assert lines == ["['HOME', 'PATH', 'TMPDIR'] []", "[] True 1 0"], ran.stderr
    assert secret.read_text() == "the answer 42"


def _is_way_to_the_library(line):
    """A folder that is only there because the standard library lies below it: nothing else is in it."""
    library = Path(os.path.realpath(os.__file__)).parent
    word, _, rest = line.partition(" ")
    place = Path(os.path.normpath("/" + rest.split(" [")[0].lstrip("./").removeprefix("proc/1/root/")))
    if word not in ("read", "link") or place not in library.parents:
        return False
    return rest.endswith(f"['{library.relative_to(place).parts[0]}']")


async def test_nothing_can_be_killed_traced_or_remounted():
    canary = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    source = f"""
        import ctypes, os, signal
        libc = ctypes.CDLL(None, use_errno=True)
        def attempt(act):
            try: return act()
            except OSError: return "OSError"
        for pid in ({canary.pid}, {os.getpid()}, os.getppid(), -1):
            attempt(lambda: os.kill(pid, signal.SIGKILL))
        calls = [
            libc.ptrace(16, {canary.pid}, 0, 0), libc.unshare(0x10000000), libc.umount2(b"/scratch", 2),
            libc.mount(b"x", b"/scratch", b"tmpfs", 0, None), libc.chroot(b"/scratch"), libc.setns(0, 0),
            libc.reboot(0x1234567), libc.prctl(38, 0, 0, 0, 0), libc.setuid(0), libc.execl(b"/bin/sh", b"sh", None),
        ]
        acts = [
            lambda: os.setresuid(0, 0, 0), lambda: os.chroot("/scratch"), lambda: os.nice(-5),
            lambda: os.mknod("disk", 0o60666, os.makedev(8, 0)), lambda: os.execv("/bin/sh", ["sh"]),
        ]
        print(calls)
        print([attempt(act) for act in acts])
        import resource
        try: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print("raised")
        except ValueError: print("kept")
    """
    ran = await run(source)
    assert ran.stdout.splitlines() == [str([-1] * 10), str(["OSError"] * 5), "kept"], ran.stderr
    assert canary.poll() is None
    canary.kill()
    canary.wait()


async def test_one_run_leaves_nothing_to_the_next():
    await run("import builtins, sys, math\nbuiltins.print = None\nmath.pi = 3\nopen('left', 'w').write('me')")
    ran = await run("import math, os, random; print(math.pi, os.listdir('.'), random.random())")
    assert ran.stdout.split()[:2] == ["3.141592653589793", "[]"]
    again = await run("import random, os; print(0, 0, random.random(), hash('a'))")
    assert ran.stdout.split()[2] == again.stdout.split()[2]
    assert again.stdout.split()[3] == (await run("print(hash('a'))")).stdout.strip()


@pytest.mark.slow
async def test_many_at_once_each_get_their_own_input_and_no_file_stays_open():
    await run("")
    before = len(os.listdir("/proc/self/fd"))
    began = time.perf_counter()
    results = await asyncio.gather(*(run("print(int(input()) ** 2)", stdin=str(i)) for i in range(60)))
    print(f"{(time.perf_counter() - began) / 60 * 1e3:.1f} ms per run")
    assert [int(r.stdout) for r in results] == [i * i for i in range(60)]
    assert len(os.listdir("/proc/self/fd")) <= before
    await nothing_left()


@pytest.mark.usefixtures("many_open_files")
async def test_a_process_with_many_open_files_can_run_programs():
    assert (await run("print(1)")).stdout == "1\n"


async def test_a_cancelled_run_is_killed():
    task = asyncio.create_task(run("while True: pass"))
    while not (sandbox._server(())._process and descendants()):
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nothing_left()
    assert (await run("print(1)")).stdout == "1\n"


def test_a_run_that_is_cancelled_in_its_first_moments_ends():
    for i in range(50):
        child = sandbox.Child("program", ["", None, None, "while True: pass"], Limits(wall_s=300))
        waiting = threading.Thread(target=child.wait, daemon=True)
        waiting.start()
        time.sleep(i * 0.00025)
        child.cancel()
        waiting.join(60)
        assert not waiting.is_alive()


def test_too_many_open_files_leave_none_open():
    """A start opens six files: the limit is reached at each of them, in a process of its own."""
    code = """
        import os, resource
        from rlkit.rewards import sandbox
        for room in range(6):
            child = sandbox.Child("program", ["", None, None, "print(1)"], sandbox.Limits(wall_s=60))
            before = os.listdir("/proc/self/fd")
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + room, 4096))
            try:
                child.start()
            except OSError as error:
                resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
                print(error.errno, len(os.listdir("/proc/self/fd")) - len(before))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "24 0\n" * 6


def test_a_run_ends_with_its_child_whoever_holds_its_pipes(monkeypatch):
    held, close = [], sandbox._close

    def keep(fds):
        held.extend(map(os.dup, fds))
        close(fds)

    child = sandbox.Child("program", ["", None, None, "print('x' * 100_000)"], Limits(wall_s=60))
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_close", keep)
        child.start()
    ran = child.wait()
    close(held)
    assert held
    assert (ran.reason, ran.stdout) == ("", "x" * 100_000 + "\n")


STAYS = """
    import ctypes, time
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_ulong] * 5
    print([prctl(option + (high << 32), 0, 0, 0, 0) for option in (1, 3) for high in (0, 1)])
    prctl(15, ctypes.addressof(name := ctypes.create_string_buffer(b"stays")), 0, 0, 0)
"""


async def test_the_parent_death_signal_cannot_be_changed():
    assert (await run(STAYS)).stdout == "[-1, -1, 0, 0]\n"  # of another option, the kernel reads 32 bits


async def test_a_killed_server_is_an_error_and_is_replaced():
    assert (await run("print(1)")).stdout == "1\n"
    task = asyncio.create_task(run(STAYS + "    time.sleep(600)"))
    while "stays" not in map(_name, children := descendants()):
        await asyncio.sleep(0.02)
    os.kill(sandbox._server(())._process.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the server died while the child was running"):
        await task
    deadline = time.monotonic() + 120
    while any(map(_alive, children)):  # it does not outlive its server
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (await run("print(2)")).stdout == "2\n"


LATE = """
def late(user, become=sandboxd.isolate._become):
    become(user)
    sandboxd.isolate._libc.prctl(1, 0, 0, 0, 0)  # as if it had not asked yet
    sandboxd.isolate._libc.prctl(15, b"late", 0, 0, 0)
    sandboxd.isolate.select.select([6], [], [])  # until the server is dead

sandboxd.isolate._become = late
"""


async def test_a_child_whose_server_dies_during_the_set_up_does_not_start_its_program(monkeypatch):
    server = sandbox._server.__wrapped__(())
    command = server._command[4]
    server._command[4] = command.replace("sandboxd.main()", f"exec({LATE!r}); sandboxd.main()")
    monkeypatch.setattr(sandbox, "_server", lambda _packages: server)
    task = asyncio.create_task(run("import time; time.sleep(600)"))
    while not server._process or "late" not in map(_name, children := descendants()):
        await asyncio.sleep(0.02)
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match=r"the server died|isolation failed"):
        await task
    deadline = time.monotonic() + 120
    while any(map(_alive, children)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    server.close()


def test_a_signal_without_a_name_in_python_can_be_reported():
    child = object.__new__(sandbox.Child)
    child._limits = Limits()
    assert child._reason({"code": -40, "reason": "exit", "cpu_s": 0.0}, "", False) == "killed by signal 40"


NO_NAMESPACES = """
import asyncio, ctypes
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000) == 0, ctypes.get_errno()  # a namespace of users with a limit of its own
Path("/proc/sys/user/max_user_namespaces").write_text("0")
from rlkit.rewards import sandbox
asyncio.run(sandbox.run("print(1)"))
"""


def test_where_the_system_forbids_namespaces_the_error_names_the_setting_and_the_ways_out():
    done = subprocess.run([sys.executable, "-c", NO_NAMESPACES], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rlkit.rewards.sandbox.SandboxError: "), done.stderr
    for part in ("creating namespaces: ENOSPC", "user.max_user_namespaces = 0", "sysctl -w", "RLKIT_SANDBOX_URL"):
        assert part in last


async def test_elsewhere_it_says_that_it_needs_linux_and_offers_a_remote_sandbox(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(SandboxError, match=r"needs Linux .*, this is Darwin .*SandboxFusion.*RLKIT_SANDBOX_URL"):
        await run("print(1)")


async def test_packages_are_there_by_name_and_nothing_beside_them():
    source = """
        import numpy as np, sys, os
        from numpy.random import default_rng
        print(np.linalg.solve(np.eye(3) * 2, np.arange(3.0)).tolist(), len(default_rng(0).random(4)))
        for name in ("torch", "pytest", "rlkit"):
            try: __import__(name); print("found", name)
            except ModuleNotFoundError: pass
        site = os.path.dirname(os.path.dirname(np.__file__))
        print(sorted(n for n in os.listdir(site) if not n.startswith("numpy")))
        for path in (os.path.join(site, "x"), np.__file__, os.path.join(np.__path__[0], "x")):
            try: open(path, "a"); print("wrote", path)
            except OSError: pass
    """
    ran = await sandbox.run(textwrap.dedent(source), packages=["numpy"], limits=Limits(wall_s=60, cpu_s=60))
    assert ran.reason == "", ran.stderr
    assert ran.stdout.splitlines() == ["[0.0, 0.5, 1.0] 4", "[]"]
    bomb = "import numpy\nx = numpy.ones(2**31)"
    ran = await sandbox.run(bomb, packages=["numpy"], limits=Limits(wall_s=60, cpu_s=60))
    assert "MemoryError" in ran.reason
    assert "No module named 'numpy'" in (await run("import numpy")).reason


async def test_packages_that_cannot_be_had_are_errors(tmp_path, monkeypatch):
    for name in ("no_such_package", "numpy.linalg"):
        with pytest.raises(ValueError, match=f"installed top-level packages, '{name}' is not one"):
            await sandbox.run("print(1)", packages=[name])
    (tmp_path / "needy.py").write_text("import helpful\nprint(helpful.x)")
    (tmp_path / "helpful.py").write_text("x = 5")
    monkeypatch.syspath_prepend(tmp_path)
    message = r"nothing was run: .*package 'needy' cannot be imported in the sandbox .*helpful.*; name the packages"
    with pytest.raises(SandboxError, match=message):
        await sandbox.run("print(1)", packages=["needy"])
    ran = await sandbox.run("import needy\nprint(needy.helpful.x)", packages=["needy", "helpful"])
    assert ran.stdout.split()[-1] == "5", ran.stderr


def test_it_ends_with_its_process():
    code = "import os\nfrom rlkit.rewards import sandbox\nimport asyncio\nasyncio.run(sandbox.run('print(1)'))\n"
    code += "print(sandbox._server(())._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 120
    while _alive(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _name(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_forked_process_has_a_server_of_its_own():
    assert asyncio.run(run("print(1)")).stdout == "1\n"
    server, lock = sandbox._server(())._process.pid, sandbox._server(())._lock
    with lock:  # as if another thread were asking
        child = os.fork()
        if child == 0:
            code = 1
            try:
                told = asyncio.run(run("print(2)")).stdout
                code = 0 if told == "2\n" and sandbox._server(())._process.pid != server else 2
            finally:
                os._exit(code)
    deadline = time.monotonic() + 120
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert asyncio.run(run("print(3)")).stdout == "3\n"


async def test_threads_share_the_server():
    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(asyncio.run(run(f"print({i})")).stdout)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == ["0\n", "1\n", "2\n", "3\n"]


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="wall_s must be positive, got 0"):
        Limits(wall_s=0)
    with pytest.raises(ValueError, match="processes"):
        Limits(processes=-1)


def test_a_list_of_arrays_takes_the_changes_of_its_copy():
    old, new = [np.array([1, 2])], [np.array([1, 3]), np.array([4])]
    replace_content(old, new)
    assert [x.tolist() for x in old] == [[1, 3], [4]]
