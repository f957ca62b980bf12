"""`warm.run` and `warm.Popen` do what `subprocess` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import warm

CODE = {
    "arguments and folder": "import os, sys; print(sys.argv, os.getcwd(), sorted(os.environ), sys.path[0])",
    "stdin": "print(input(), input())",
    "the command as typed": "import sys; print(sys.orig_argv)",
    "a status": "import sys; print('out'); sys.exit(3)",
    "a status that is text": "import sys; sys.exit('why')",
    "an error": "print('out'); 1 / 0",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "import os; print('out', flush=True); os.kill(os.getpid(), 9)",
    "SIGINT raises": "import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()",
    "exit functions": "import atexit, threading\natexit.register(print, 'b')\nthreading.Timer(0.1, print, 'a').start()",
    "a session": "import os; print(os.getsid(0) == os.getpid() == os.getpgid(0), os.isatty(1))",
    "SIGPIPE and SIGCHLD": "import signal; print(signal.getsignal(13), signal.getsignal(17))",
}
HOW = [(name, "-c") for name in CODE] + [
    pytest.param(name, how, marks=[] if name in ("arguments and folder", "the command as typed") else pytest.mark.slow)
    for how in ("-m", "file")
    for name in list(CODE)[:4]
]


def ended(run, command, folder: Path) -> tuple[int, str, str]:
    env = {"OMP_NUM_THREADS": "1", "ONLY": "this", "LC_CTYPE": "C.UTF-8"}
    options = {"cwd": folder, "env": env, "start_new_session": True, "input": "one\ntwo\n"}
    done = run(command, capture_output=True, text=True, timeout=100, **options)
    return done.returncode, done.stdout, done.stderr.rstrip().rpartition("\n")[2]


@pytest.mark.slow_cases(
    "SIGINT raises--c",
    "SIGPIPE and SIGCHLD--c",
    "a session--c",
    "a signal--c",
    "a status that is text--c",
    "a status--c",
    "an error--c",
    "an interrupt--c",
    "arguments and folder--c",
    "arguments and folder-file",
    "exit functions--c",
    "stdin--c",
    "the command as typed--c",
    "the command as typed-file",
)
@pytest.mark.parametrize(("name", "how"), HOW)
def test_a_command_ends_as_in_an_interpreter_of_its_own(tmp_path, name, how):
    (tmp_path / "program.py").write_text(CODE[name])
    given = {"-c": ["-c", CODE[name]], "-m": ["-m", "program"], "file": ["program.py"]}[how]
    command = [sys.executable, *given, "a", "-b"]
    assert ended(warm.run, command, tmp_path) == ended(subprocess.run, command, tmp_path)


def test_a_terminal_controls_the_process_and_signals_reach_its_group():
    main, side = os.openpty()
    code = "import os, time; print(os.tcgetpgrp(0) == os.getpid(), os.isatty(1), flush=True); time.sleep(100)"
    streams = {"stdin": side, "stdout": side, "stderr": subprocess.DEVNULL}
    process = warm.Popen([sys.executable, "-c", code], terminal=True, **streams)
    os.close(side)
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert os.read(main, 100) == b"True True\r\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.1)
    os.write(main, b"\x03")
    assert process.wait(timeout=100) == -signal.SIGINT == process.poll()
    os.close(main)


SPAWNS = """
import multiprocessing, os, sys
context = multiprocessing.get_context("spawn")
for target, given in ((sys.exit, 3), (print, "second"), (eval, "1 / 0")):
    process = context.Process(target=target, args=(given,))
    process.start()
    assert os.getpid() == int(open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[1])
    process.join()
    print(process.exitcode, process.is_alive(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_command_spawns_is_its_child_and_ends_as_spawned_ones_do(tmp_path):
    command = [sys.executable, "-c", SPAWNS]
    found = ended(partial(warm.run, spawns=True), command, tmp_path)
    assert found == ended(subprocess.run, command, tmp_path)
    assert found[1].split() == ["3", "False", "second", "0", "False", "1", "False"]
