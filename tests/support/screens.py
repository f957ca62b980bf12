"""What a person sees of a command: in a terminal, in a pipe, and where the streams are not UTF-8.

`refused(call)` and `everywhere(call)` run a call of this process on three kinds of streams and compare its errors;
`run(command, where)` starts a process in one of `PLACES`, and `refused_early` one that must not load torch. In a
terminal, text that the screen cuts within a word fails.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pyte
import pytest

ROWS = 300
STORE_LOG = re.compile(rb"\[[WE]\d{4} [^\n]*\[c10d\][^\n]*\n")


class Screen(pyte.Screen):
    """Remembers which rows go on in the next one because the text did not fit."""

    def __init__(self, columns: int, rows: int) -> None:
        self.wrapped: set[int] = set()
        self._drawing = False
        super().__init__(columns, rows)

    def draw(self, data: str) -> None:
        self._drawing = True
        super().draw(data)
        self._drawing = False

    def linefeed(self) -> None:
        (self.wrapped.add if self._drawing else self.wrapped.discard)(self.cursor.y)
        super().linefeed()

    @property
    def text(self) -> str:
        """What was written, without the breaks of lines wider than the screen: as one copies it."""
        rows = (row if n in self.wrapped else row.rstrip() + "\n" for n, row in enumerate(self.display))
        return "".join(rows).rstrip()


class Place(NamedTuple):
    """Columns of the terminal (0: a pipe), the environment, and whether stderr is a file beside the terminal."""

    columns: int = 0
    environment: Mapping[str, str] = MappingProxyType({})
    stderr_apart: bool = False


COLOURS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
PLACES = {
    "terminal": Place(80, COLOURS),
    "pipe": Place(),
    "latin-1": Place(0, {"PYTHONIOENCODING": "latin-1"}),
    "narrow": Place(40, COLOURS),
    "wide": Place(140, COLOURS),
    "no colour": Place(80, {**COLOURS, "NO_COLOR": "1"}),
    "dumb": Place(80, {"TERM": "dumb"}),
    "stderr in a file": Place(80, COLOURS, True),
    "ascii": Place(0, {"PYTHONIOENCODING": "ascii"}),
    "latin-1 terminal": Place(80, {**COLOURS, "PYTHONIOENCODING": "latin-1"}),
    "ascii terminal": Place(80, {**COLOURS, "PYTHONIOENCODING": "ascii"}),
}
EVERYWHERE = ("terminal", "pipe", "latin-1")


class Said(NamedTuple):
    """How a call ended, and its text: in a terminal that of both streams."""

    error: BaseException | None
    out: str
    err: str


def errors(text: str) -> list[str]:
    """The messages `error: ...` in a text, each as one line, however a terminal breaks it."""
    parts = re.split(r"^(?=error: )", text, flags=re.MULTILINE)
    return [" ".join(part.replace(" \\\n", " ").split()) for part in parts if part.startswith("error: ")]


def refused(call: Callable[..., Any], *args: Any, code: int = 2) -> str:
    """The one error that `call(*args)` ends with, the last thing that it says; see `everywhere`."""
    found = everywhere(partial(call, *args))
    assert isinstance(found.error, SystemExit), found
    assert found.error.code == code, found
    assert re.search(r"^error: .*(\n  .*)*\s*\Z", found.err, flags=re.MULTILINE), found.err
    (message,) = errors(found.err)
    return message


def run(command: Sequence[Any], where: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process in one of `PLACES`; in a terminal stderr is "" unless it is apart."""
    place = PLACES[where]
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "TERM", "COLORTERM")}
    options["env"] = {**kept, **place.environment, **options.pop("env", {})}
    if not place.columns:
        done = subprocess.run([*map(str, command)], capture_output=True, timeout=250, check=False, **options)
        return done.returncode, done.stdout.decode("latin-1"), done.stderr.decode("latin-1")
    main, side = _pty(place.columns)
    apart = subprocess.PIPE if place.stderr_apart else side
    with subprocess.Popen([*map(str, command)], stdin=side, stdout=side, stderr=apart, **options) as process:
        os.close(side)
        shown = _read(main)
        err = process.stderr.read().decode() if process.stderr else ""
    return process.returncode, _shown(shown, place.columns), err


REFUSED = """
import json, sys
from rlkit.scripts import cli
for argv in json.loads(sys.argv[1]):
    try:
        cli.main(argv)
    except SystemExit as ended:
        assert ended.code == 2, argv
    assert not {"torch", "numpy", "transformers"} & sys.modules.keys() and len(sys.modules) < 500, argv
"""


def refused_early(commands: Iterable[Sequence[str]], where: str, **options: Any) -> list[str]:
    """The error of each command line of `rlkit`, before torch is imported: all in one process."""
    commands = [*commands]
    code, out, err = run([sys.executable, "-c", REFUSED, json.dumps(commands)], where, **options)
    assert code == 0, out + err
    found = errors(out + err)
    assert len(found) == len(commands), out + err
    return found


def everywhere(call: Callable[[], Any]) -> Said:
    """What the call says in a pipe, after it has ended with the same errors in a terminal and in Latin-1."""
    found = {where: said(call, where) for where in EVERYWHERE}
    pipe = found["pipe"]
    expected = [line.encode("latin-1", "backslashreplace").decode("latin-1") for line in errors(pipe.err)]
    for where, other in found.items():
        assert repr(other.error) == repr(pipe.error), where
        shown = errors(f"{other.out}\n{other.err}")
        assert shown == (errors(pipe.err) if where == "pipe" else expected), (where, other)
    return pipe


def said(call: Callable[[], Any], where: str) -> Said:
    """What the call prints in this process, in one of `PLACES`."""
    place, error = PLACES[where], None
    with _streams(place) as read:
        try:
            call()
        except (Exception, SystemExit) as raised:
            error = raised
    return Said(error, *read())


@contextmanager
def _streams(place: Place) -> Iterator[Callable[[], tuple[str, str]]]:
    """Inside the block stdout and stderr are those of a place; the value then gives what was written."""
    encoding = place.environment.get("PYTHONIOENCODING", "utf-8")
    main, side = _pty(place.columns) if place.columns else os.pipe()
    other, apart = (None, os.dup(side)) if place.columns else os.pipe()
    got: dict[int | None, bytes] = {}
    threads = [threading.Thread(target=lambda end=end: got.update({end: _read(end)})) for end in (main, other) if end]
    for thread in threads:
        thread.start()
    sys.stdout.flush(), sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            patch.delenv(name, raising=False)
        for name, value in place.environment.items():
            patch.setenv(name, value)
        for number, end, name, errors in ((1, side, "stdout", "strict"), (2, apart, "stderr", "backslashreplace")):
            os.dup2(end, number)
            stream = io.TextIOWrapper(io.FileIO(end, "w"), encoding=encoding, errors=errors, write_through=True)
            patch.setattr(sys, name, stream)
        streams = sys.stdout, sys.stderr
        try:
            yield lambda: _decoded(got, main, other, place, encoding)
        finally:
            for number, end in enumerate(kept, 1):
                os.dup2(end, number)
                os.close(end)
            for stream in streams:
                stream.close()
            for thread in threads:
                thread.join()


def _decoded(got: Any, main: int, other: int | None, place: Place, encoding: str) -> tuple[str, str]:
    """The text of both streams; in a terminal all of it is the first.

    A thread that an earlier test left in a store of torch logs there when its time is over: those lines are left out.
    """
    got = {end: STORE_LOG.sub(b"", data) for end, data in got.items()}
    if place.columns:
        return _shown(got[main], place.columns), ""
    return got[main].decode(encoding), got[other].decode(encoding)


def _pty(columns: int) -> tuple[int, int]:
    main, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    return main, side


def _read(end: int) -> bytes:
    """Everything until the other end is closed."""
    found = b""
    while True:
        try:
            data = os.read(end, 1 << 16)
        except OSError:  # EIO: no process has the terminal any more
            data = b""
        if not data:
            os.close(end)
            return found
        found += data


def _shown(data: bytes, columns: int) -> str:
    """The text of a screen; only a word as wide as the screen may be cut."""
    screen = Screen(columns, ROWS)
    pyte.ByteStream(screen).feed(data)
    for row in screen.wrapped:
        cut = screen.display[row].split(" ")[-1] + screen.display[row + 1].split(" ")[0]
        assert len(cut) > columns - len("exported ") or " " in (screen.display[row][-1], screen.display[row + 1][0]), (
            f"cut within a word at {columns} columns: {screen.display[row]!r}"
        )
    return screen.text
