"""A command as the program of an episode, with a folder, limits and a log of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlkit import agents
from rlkit._util.numbers import is_number
from rlkit.agents import ENDS, AgentError, end_of
from rlkit.data.images import MARK, PLACE, gathered
from rlkit.data.load import place_of
from rlkit.data.prompts import question_messages
from rlkit.rollout.calling import CLOCK, Clock, in_own_thread

if TYPE_CHECKING:
    from rlkit.rollout.groups import Prompt, Score
    from rlkit.types import Trajectory

_SUPERVISE = Path(agents.__file__).with_name("supervise.py")
_MAX_LOGS = 1000  # newest ones that are kept
_MAX_RESULT = 1 << 20  # bytes of what a command writes as its result
_MAX_WORD = 128 << 10  # bytes of an argument on Linux, its end included
_END_S = 5.0  # seconds that the end of a cancelled command may take
_NAME = re.compile(r"\{(\w+)\}")


def command(
    line: str, *, logs: Path, timeout_s: float, memory_gib: float | None = None, needs_reward: bool = True
) -> Callable[[Prompt, str], Coroutine[Any, Any, dict[str, Any]]]:
    """The agent, for `agent_env`, that runs `line` once per episode and ends with it.

    `line` is split as by a shell, and no shell runs it. `{prompt}` is the last message of the row's prompt and
    `{COLUMN}` a column; words that name a file here are made absolute. The command runs in an empty folder, with

        OPENAI_BASE_URL, OPENAI_API_BASE, OPENAI_API_KEY     the episode's endpoint; keys are not checked
        ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY                the same for Anthropic's clients
        RLKIT_ROW                                            a JSON file with the row, images as data: URLs in `images`
        RLKIT_RESULT                                         a file to write: the reward, or a JSON object of keywords
                                                             of `Branches.end`, such as {"reward": 1, "info": {...}}

    Its output goes to a file in `logs` (the first MiB; of the newest 1000 episodes), `info["log"]`. `info["folder"]` is
    its folder, for reward functions; `scored` deletes it. At the end of the episode all its processes are killed.

    An exit code other than 0, no end after `timeout_s` (see `agent_env`), more than 1000 processes (Linux), more memory
    than `memory_gib` (of all its processes, measured ten times a second; Linux) and a result that cannot be read are
    an `AgentError`; so is, with `needs_reward`, none.

    This is no sandbox: the command has the rights of the run.
    """
    words, log_files, homes = _words(line), deque[Path](), list[str]()

    async def agent(prompt: Prompt, base_url: str) -> dict[str, Any]:
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"row{prompt.index + 1:05d}-{secrets.token_hex(4)}.log"
        log_files.append(log)
        if len(log_files) > _MAX_LOGS:
            log_files.popleft().unlink(missing_ok=True)
        if not homes:  # of all episodes; what is left of them goes with the run
            homes.append(tempfile.mkdtemp(prefix="rlkit-agents-"))
            weakref.finalize(agent, shutil.rmtree, homes[0], ignore_errors=True)
        os.makedirs(homes[0], exist_ok=True)  # the supervisor of a cancelled episode removes it where it is empty
        home = Path(tempfile.mkdtemp(dir=homes[0]))
        folder, row, result = home / "work", home / "row.json", home / "result.json"
        try:
            folder.mkdir()
            row.write_text(_row(prompt))
            about = home / "command.json"
            spec = {
                "argv": [_filled(word, prompt.row) for word in words],
                "folder": str(folder), "log": str(log.absolute()), "seconds": timeout_s,
                "memory": None if memory_gib is None else int(memory_gib * 2**30),
            }  # fmt: skip
            about.write_text(json.dumps(spec))  # a word of a command line is short
            ended = await _supervised(about, env=_environment(base_url, RLKIT_ROW=str(row), RLKIT_RESULT=str(result)))
            _check(ended, log)
            end = _read(result, needs_reward=needs_reward)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
        return {**end, "info": {**end.get("info", {}), "folder": str(folder), "log": log.name}}

    return agent


def check_command(line: str, *parts: Sequence[Any]) -> None:
    """ValueError for a command that cannot start, or that names a column that a row does not have, or one whose text is
    longer than a word of a command line may be. `parts` are rows."""
    words = _words(line)
    columns: Mapping[str, Any] = next((row for rows in parts for row in rows), {})
    names = [name for word in words for name in _NAME.findall(word)]
    if absent := [name for name in names if name != "prompt" and name not in columns]:
        raise ValueError(f"the data has no column {absent[0]!r}; found: {', '.join(columns)}")
    long = ((rows, i) for rows in parts if names for i, row in enumerate(rows) if len(str(row)) > _MAX_WORD // 4)
    for rows, i in long:  # a character has at most 4 bytes
        for word in filter(_NAME.search, words):
            if (size := len(_filled(word, rows[i]).encode(errors="replace"))) >= _MAX_WORD:
                place, most = place_of(rows, i), f"a word of a command line may have {_MAX_WORD:,}"
                fault = f"{place}: {word} has {size:,} bytes, and {most}"
                raise ValueError(f"{fault}: let the program read the row from the file $RLKIT_ROW, and drop that word")
    if shutil.which(words[0]) is None:
        raise ValueError(f"there is no program {words[0]!r}: give a command, such as 'python my_agent.py'")
    if absent := [w for w in words if w.endswith(".py") and "{" not in w and not os.path.isfile(w)]:
        raise ValueError(f"there is no file {absent[0]}: name it as from here, {os.getcwd()}")


def scored(score: Score) -> Score:
    """`score`, after which the folders of the episodes' commands are deleted."""

    async def then_deleted(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        try:
            judged = await score(prompt, group)
            return [replace(t, info={name: x for name, x in t.info.items() if name != "folder"}) for t in judged]
        finally:
            for folder in (t.info["folder"] for t in group if "folder" in t.info):
                await asyncio.to_thread(shutil.rmtree, Path(folder).parent, ignore_errors=True)

    return then_deleted


def _words(line: str) -> list[str]:
    """The words of the command, files among them by their absolute path."""
    if not (words := shlex.split(line)):
        raise ValueError("the command is empty")
    return [os.path.abspath(word) if os.path.isfile(word) else word for word in words]


def _filled(word: str, row: Mapping[str, Any]) -> str:
    """A word of the command with the columns of a row in it."""

    def value(match: re.Match[str]) -> str:
        cell = row.get(match[1])
        if match[1] == "prompt" and not isinstance(cell, str):
            cell = question_messages({**row, **gathered(dict(row), "")})[-1]["content"].replace(PLACE, MARK)
        return cell if isinstance(cell, str) else json.dumps(cell, default=str)

    return _NAME.sub(value, word).replace("\0", "")


def _row(prompt: Prompt) -> str:
    """The row as JSON, in which `images` are data: URLs of all its images."""
    images: Any = prompt.images
    urls = {"images": [image.url for image in images]} if images else {}
    return json.dumps({**prompt.row, **urls}, default=str)


def _environment(base_url: str, **more: str) -> dict[str, str]:
    host, root = urlsplit(base_url).hostname or "", base_url.removesuffix("/v1")
    direct = {name: ",".join(filter(None, (os.environ.get(name), host))) for name in ("NO_PROXY", "no_proxy")}
    openai = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": "none"}
    anthropic = {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": "none"}
    return {**os.environ, **direct, **openai, **anthropic, **more}


async def _supervised(spec: Path, *, env: Mapping[str, str]) -> dict[str, Any]:
    """Run `supervise.py` and return its report. If this is cancelled, it ends the command and then itself."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SUPERVISE), str(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=env, start_new_session=True,
    )  # fmt: skip

    def ended() -> bytes:
        with process:
            return process.stdout.read() if process.stdout else b""

    def told(stands: bool) -> None:
        with suppress(OSError, ValueError):  # it has ended
            os.write(pipe.fileno(), b"-" if stands else b"+")

    assert process.stdin is not None
    pipe = process.stdin
    CLOCK.get(Clock()).on_change = told
    report = asyncio.ensure_future(in_own_thread(ended))
    try:
        outcome: dict[str, Any] = json.loads(await asyncio.shield(report))
    except asyncio.CancelledError:
        pipe.close()
        await asyncio.wait({report}, timeout=_END_S)
        raise
    except ValueError:
        raise AgentError("its supervisor was killed") from None
    return outcome


def _check(ended: Mapping[str, Any], log: Path) -> None:
    code, reason = ended["code"], ended["reason"]
    if not reason and code:
        status = f"exit code {code}" if code > 0 else f"signal {-code}"
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((text.strip()[:300] for text in reversed(lines) if text.strip()), "")
        reason = f"{status}: {last}" if last else status
    if reason:
        raise AgentError(f"{reason} (its output is in {log})")


def _read(result: Path, *, needs_reward: bool) -> dict[str, Any]:
    """What the command wrote, as keywords of `Branches.end`."""
    if not result.is_file():
        if needs_reward:
            raise AgentError("it wrote no reward to $RLKIT_RESULT, and there is no reward function")
        return {}
    if result.stat().st_size > _MAX_RESULT:
        raise AgentError(f"it wrote more than {_MAX_RESULT >> 20} MiB to $RLKIT_RESULT")
    try:
        fields = json.loads(result.read_text())
    except (ValueError, RecursionError):
        raise AgentError("what it wrote to $RLKIT_RESULT is no JSON") from None
    try:
        fields = end_of(fields)
    except TypeError:
        raise AgentError(f"$RLKIT_RESULT must have a number or an object with {', '.join(ENDS)}") from None
    if "failed" in fields.get("info", {}).get("metrics", {}):
        raise AgentError("$RLKIT_RESULT: `failed` is a metric of rlkit's own: give it another name")
    if mistyped := [name for name, fine in _fields(fields).items() if not fine]:
        raise AgentError(f"{mistyped[0]} in $RLKIT_RESULT has a wrong type")
    if needs_reward and not is_number(fields.get("reward")):
        raise AgentError("it wrote no reward to $RLKIT_RESULT, and there is no reward function")
    return fields


def _fields(fields: Mapping[str, Any]) -> dict[str, bool]:
    """The fields of a result, and whether each has its type."""
    rewards, info = fields.get("turn_rewards"), fields.get("info", {})
    metrics = info.get("metrics", {})
    return {
        "truncated": isinstance(fields.get("truncated"), bool | None),
        "turn_rewards": rewards is None or (isinstance(rewards, list) and all(map(is_number, rewards))),
        "info.metrics": isinstance(metrics, dict) and all(x is None or is_number(x) for x in metrics.values()),
        "info.notes": isinstance(info.get("notes", {}), dict),
    }
