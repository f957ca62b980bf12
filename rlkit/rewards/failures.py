"""What to say of an error in a user's function: its name, the line of the user's file, and the fix."""

from __future__ import annotations

import inspect
import multiprocessing
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlkit._util.extras import MissingExtra
from rlkit.rewards.load import PRIVATE
from rlkit.rewards.timeouts import TimedOut

Made = TypeVar("Made")
_PACKAGE = Path(__file__).parents[1]  # rlkit
_NO_ALARM = (
    "turn its own alarm off (math_verify: parse(..., parsing_timeout=None), verify(..., timeout_seconds=None)) and use "
    "timeout_s (--reward-timeout); --reward rlkit.rewards.math:anywhere runs math_verify in processes"
)
ALARM = f"it works in the main thread only, and rewards run in others, where it raises an error; {_NO_ALARM}"
_FIXES = {  # words of an error, all of which must be there, and the fix
    ("signal only works in main thread",): _NO_ALARM,
    ("math-verify", "threaded environment"): _NO_ALARM,
    ("no current event loop",): "declare it `async def` and await in it, or call asyncio.run(...) in a plain function",
    ("cannot be called from a running event loop",): "await the coroutine: the function is `async def` already",
    ("can't pickle",): "a process gets only functions that are at the top level of a file: move it there",
    ("can't get local object",): "a process gets only functions that are at the top level of a file: move it there",
    ("eoferror",): "it reads what nobody can type during a run: return a number without input()",
}


def name_of(function: Any) -> str:
    """The name of a function or class for errors: `my_rewards.py:reward`, or only the name if the file is unknown.

    Of a partial or a wrapper it is that of the wrapped function; a text is a name.
    """
    if isinstance(function, str):
        return function
    inner = unwrapped(function)
    name = (getattr(inner, "__qualname__", None) or type(inner).__qualname__).replace(".<locals>", "")
    file = _file_of(inner)
    return f"{Path(file).name}:{name}" if file else name


def unwrapped(function: Any) -> Any:
    """The function that partials and wrappers call."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    return function


def is_ours(function: Any) -> bool:
    """Whether a function, or what a partial binds, is of this package."""
    return str(getattr(unwrapped(function), "__module__", "")).startswith("rlkit.")


def _file_of(inner: Any) -> str | None:
    """The file of a function, or of the class of an object."""
    code = getattr(inner, "__code__", None) or getattr(getattr(inner, "__func__", None), "__code__", None)
    if code is not None:
        return str(code.co_filename)
    kind = inner if inspect.isclass(inner) else type(inner)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") and kind.__module__ != "functools" else None


def place_in(function: Callable[..., Any], error: BaseException) -> str:
    """The user's file and line of an error, in parentheses; empty where no line is the user's."""
    frame = _users_frame(function, error)
    return f" ({Path(frame.filename).name}, line {frame.lineno})" if frame else ""


def _users_frame(function: Callable[..., Any], error: BaseException) -> traceback.FrameSummary | None:
    """The last frame in the function's file, else in a file outside of Python and its packages, else in a package."""
    frames = traceback.extract_tb(error.__traceback__)
    file = _file_of(unwrapped(function))
    libraries = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(_PACKAGE), "<frozen")
    in_file = [frame for frame in frames if frame.filename == file]
    others = [frame for frame in frames if not frame.filename.startswith(str(_PACKAGE))]
    of_user = in_file or [frame for frame in frames if not frame.filename.startswith(libraries)] or others
    return of_user[-1] if of_user else None


def fix_of(function: Callable[..., Any], error: BaseException, row: Mapping[str, Any] | None) -> str:
    """What to change for this error in a user's function; empty for an error that an answer may have caused.

    `row` is the row of the data that the function got, if it is known.
    """
    text, frame = f"{type(error).__name__}: {error}", _users_frame(function, error)
    line = (frame.line or "") if frame else ""
    for words, fix in _FIXES.items():
        if all(word in text.lower() for word in words):
            return fix
    if isinstance(error, SystemExit) or "SystemExit" in text:
        return "do not call exit() in it, which would end the run: return what such an answer is worth"
    if isinstance(error, FileNotFoundError):
        return f"make the file, or correct its path: a relative one starts at {Path.cwd()}"
    if isinstance(error, ImportError) and "'slime" in text:
        return "remove the import: a sample has slime's attributes, and is not of its class"
    if isinstance(error, ImportError):
        return f"install it where rlkit runs ({sys.executable} -m pip install ...), or correct the name"
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and "environ" not in line:
        return _no_key(error.args[0], row, line)
    if isinstance(error, TypeError) and "string indices must be" in text:
        if "completion" in line:
            return "the completion is a text here, not a list of messages: read it as it is"
        if isinstance((row or {}).get("prompt"), str):
            return "the prompt of the row is a string, not a list of messages: read row['prompt'] as it is"
    if isinstance(error, TypeError) and "'coroutine'" in text:
        return "await the async function that this line calls"
    if isinstance(error, AttributeError) and text.startswith("AttributeError: 'Turn' object"):
        return "step gets a Turn: read turn.text"
    none = "NoneType" in text  # a search that found nothing in an answer
    if isinstance(error, NameError) or (isinstance(error, AttributeError) and not none):
        return "correct this line: the error is in the code, whatever the answer"
    return ""


def _no_key(key: str, row: Mapping[str, Any] | None, line: str) -> str:
    """The columns of the row, or the keys of its column that the line reads, where `key` is in neither."""
    if row is None:
        return f"if {key!r} is a column: rename one with --rename, or read it by .get({key!r})"
    literal = re.search(rf"[\"']{re.escape(key)}[\"']", line)
    before, end = (line[: literal.start()], r"\W*(get\W*)?$") if literal else (line, "")
    objects = [name for name, value in row.items() if isinstance(value, dict)]
    inner = next((name for name in objects if re.search(rf"\b{re.escape(name)}\b{end}", before)), None)
    fields = row if inner is None else row[inner]
    if key in fields:
        return f"{key!r} is a column of the data: read row[{key!r}]" if inner is None else ""
    if inner is not None:
        return f"the row's {inner} has no key {key!r}; keys found: {sorted(map(str, fields))}"
    return f"the row has no column {key!r}; columns found: {sorted(map(str, fields))}; rename one with --rename"


def called(make: Callable[[], Made], foreign: Any, spec: str) -> Made:
    """`make()`, of an environment; ValueError with file, line and fix where the user's code in it fails."""
    try:
        return make()
    except MissingExtra:
        raise
    except Exception as error:
        if not (place := place_in(foreign, error)):
            raise
        fix = fix_of(foreign, error, None) or "correct it"
        raise ValueError(f"`env` {spec}: {type(error).__name__}: {error!s:.300}{place}; {fix}") from error


def lost_processes(function: Callable[..., Any], error: BaseException) -> str:
    """The fix where processes that the function started may have ended without a result; empty elsewhere."""
    waits = any("PoolWorker" in process.name for process in multiprocessing.active_children())
    if not (isinstance(error, BrokenExecutor) or (isinstance(error, TimedOut) and waits)):
        return ""
    module = getattr(unwrapped(function), "__module__", None) or ""
    if module.startswith(PRIVATE):
        stem = module.removeprefix(PRIVATE).rpartition("_")[0]
        return f"rename {stem}.py: another module is named {stem!r}, so processes with spawn cannot import the function"
    if isinstance(error, BrokenExecutor):
        return "a process that the function started has ended; its own error, if it wrote one, is above"
    return (
        "it waits for a multiprocessing.Pool, which never returns if a process ends before its result, killed or by an "
        "error (see above): concurrent.futures.ProcessPoolExecutor raises one. Or raise timeout_s (--reward-timeout)"
    )
