"""A terminal for tests: the child's controlling pty, its keys, and the screen as a person sees it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyte
import warm
from screens import ROWS, Screen

ROOT = Path(__file__).parents[2]


class Terminal:
    """Runs `command` in a terminal of so many columns, tall enough that nothing scrolls off; see `warm.Popen`."""

    def __init__(
        self,
        command: Sequence[Any],
        *,
        columns: int = 80,
        spawns: bool = False,
        plots: bool = False,
        **environment: str,
    ) -> None:
        self._main, side = os.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        self._screen = Screen(columns, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "RANK")}
        go, self._go = os.pipe()
        env = {**kept, "GO": str(go), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
        how = {"stdin": side, "stdout": side, "stderr": side, "terminal": True, "spawns": spawns, "plots": plots}
        self.process = warm.Popen(command, env=env | environment, pass_fds=[go], cwd=ROOT, **how)
        os.close(side)
        os.close(go)

    def go(self) -> None:
        """Let the child, which reads a byte from the descriptor $GO, do one more step."""
        os.write(self._go, b" ")

    def press(self, key: str) -> None:
        os.write(self._main, key.encode())

    def hang_up(self) -> None:
        """The window is closed, and the child goes on alone."""
        os.close(self._main)
        os.close(self._go)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """What was written, without the breaks of lines wider than the screen: as one copies it."""
        return self._screen.text

    @property
    def cursor_is_visible(self) -> bool:
        return not self._screen.cursor.hidden

    def wait_for(self, pattern: str | Callable[[], bool], seconds: float = 250) -> None:
        """Read until the screen has the regular expression, or until the condition holds."""
        met = pattern if callable(pattern) else lambda: re.search(pattern, self.text, re.M) is not None
        end = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < end, self.text
            assert self._read(), f"the process has ended:\n{self.text}"

    def wait(self, seconds: float = 250) -> int:
        """Read to the end; the exit code."""
        end = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < end, self.text
        return self.process.wait()

    def _read(self) -> bool:
        """What has been written since; False at its end."""
        if not select.select([self._main], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._main, 1 << 16)
        except OSError:  # EIO: no process has the terminal any more
            data = b""
        self.raw += data
        self._stream.feed(data)
        return bool(data)


def steps_on(lines: Sequence[str]) -> list[int]:
    """The steps whose line is on the screen, each time it is."""
    words = "\n".join(lines).partition("go on with:")[0]  # not the numbers in a command of several lines
    cells = [line[:6] for line in words.splitlines() if line[6:7] in {"", " "}]
    return [int(cell) for cell in cells if re.fullmatch(r" {0,5}\d+", cell) and len(cell) == 6]


def assert_clean(terminal: Terminal) -> None:
    """A person can type again, and nothing of a bar is left."""
    assert terminal.cursor_is_visible
    for garbage in ("━", "╸", " eta ", "^C"):
        assert garbage not in terminal.text, terminal.text
