"""The user's command after each checkpoint (`--on-save`), which copies or evaluates it while the run goes on."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Say = Callable[[str], None]


class Command(NamedTuple):
    """A command that was started for a checkpoint."""

    process: subprocess.Popen[bytes]
    folder: Path


def start(command: str, folder: Path, *, log: Path, say: Say) -> list[Command]:
    """Start `command`, in whose words "{folder}" is the checkpoint's folder; its output is added to the file `log`.

    The words are those of a shell (quotes, backslashes), but no shell reads them: the folder's name is always (a part
    of) one word. A command that cannot be started is reported, and none is returned.
    """
    words = [word.replace("{folder}", str(folder.absolute())) for word in shlex.split(command)]
    try:
        with log.open("ab") as out:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    except OSError as error:
        say(f"on_save did not start for {folder.name}, training goes on: {error}")
        return []
    return [Command(process, folder)]


def report(commands: list[Command], *, log: Path, say: Say, wait: bool = False) -> None:
    """Remove the commands that have ended from the list, with `wait` all of them, and report each that failed."""
    for command in [*commands]:
        code = command.process.wait() if wait else command.process.poll()
        if code is not None:
            commands.remove(command)
        if code:
            say(f"on_save failed for {command.folder.name} with exit code {code}, training goes on: see {log}")
