"""Load a function by name, from a file or an installed module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rlkit._util.extras import MissingExtra
from rlkit._util.text import parse_call

PRIVATE = "_rlkit_"  # how the module of a file begins that no `import` would find
_TEXT = "__rlkit_text__"  # of a module: the text of the file when it was executed


def load_function(spec: str) -> Callable[..., Any]:
    """The function named by `"my_rewards.py:reward"` (a file) or `"package.module:reward"` (an importable module).

    Keyword arguments may follow, as literals: `"rlkit.rewards.text:length_target(target=200, scale=0.001)"`.

    The folder of a file, the one that holds its package (folders with `__init__.py`) and the current one are appended
    to `sys.path`, so that the file can import files next to it, of its package and of the project. The file is executed
    once, and again when its text has changed. Its module has the file's name, in its package, so that processes that
    the function starts (`multiprocessing` with spawn) can import it; where another module has that name, it gets a
    private one.
    Errors name what was looked for: ValueError (the form of `spec`), FileNotFoundError,
    ModuleNotFoundError, AttributeError (lists the functions of the module), TypeError (not callable), and ImportError
    with the traceback if the user's code fails while it is imported.
    """
    name, arguments = parse_call(spec)
    function = load_object(name)
    if not callable(function):
        raise TypeError(f"{name} is not a function but {type(function).__name__} {function!r:.80}")
    return _bound(function, arguments, spec) if arguments else function


def load_object(spec: str) -> Any:
    """What `"file.py:name"` or `"package.module:name"` names, callable or not; see `load_function`, also for errors."""
    place, colon, name = spec.rpartition(":")
    if not (colon and place and name.isidentifier()):
        fault = "a function is named 'file.py:function' or 'package.module:function'"
        raise ValueError(f"{fault}, got {spec!r}{_hint(spec)}")
    module = _from_file(Path(place).expanduser()) if place.endswith(".py") else _from_module(place)
    if not hasattr(module, name):
        there = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise AttributeError(f"{place} has no {name!r}; it has {there}")
    return getattr(module, name)


def _bound(function: Callable[..., Any], arguments: dict[str, Any], spec: str) -> Callable[..., Any]:
    """The function with these keyword arguments; ValueError for names that it does not have."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if unknown := [x for x in arguments if x not in names and not any(p.kind == p.VAR_KEYWORD for p in parameters)]:
        raise ValueError(f"{spec}: there is no argument {unknown[0]!r}; the function has {', '.join(names)}")
    return partial(function, **arguments)


def _hint(spec: str) -> str:
    """What a file without a function has, or the modules that have a function of this name. Imports nothing."""
    if (path := Path(spec.partition(":")[0]).expanduser()).is_file():
        names = [name for name in functions_in(path) if not name.startswith("_")]
        return f"; {path} has {names}"
    module, _, name = spec.rpartition(".")
    file = Path(*module.split(".")).with_suffix(".py") if module and ":" not in spec else None
    if file and file.is_file() and name in functions_in(file):
        return f"; did you mean {file}:{name}?"
    trl = importlib.util.find_spec("trl")
    rewards = [("rlkit.rewards.{}", file) for file in Path(__file__).parent.glob("*.py")]
    if trl and trl.origin:
        rewards += [("trl.rewards", file) for file in (Path(trl.origin).parent / "rewards").glob("*.py")]
    near = [f"{module.format(file.stem)}:{spec}" for module, file in rewards if spec in functions_in(file)]
    return f"; did you mean {' or '.join(sorted(near))}?" if near else ""


def in_packages(file: str | None) -> bool:
    """Whether a file is one of an installed package, which nobody edits."""
    return bool({"site-packages", "dist-packages"} & {*Path(file or "").parts})


def functions_in(path: Path) -> list[str]:
    """The functions that a file defines at its top level, or assigns as the result of a call."""
    names = re.findall(r"^(?:(?:async )?def (\w+)\(|(\w+) = [\w.]+\()", path.read_text(errors="replace"), re.MULTILINE)
    return [defined or assigned for defined, assigned in names]


def _from_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py"))[:8] if path.parent.is_dir() else "no such folder"
        raise FileNotFoundError(f"no file {path} (Python files in that folder: {near})")
    root = next(folder for folder in path.parents if not (folder / "__init__.py").is_file())
    _append(path.parent, root, Path.cwd())
    private = f"{PRIVATE}{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    dotted = ".".join(path.relative_to(root).with_suffix("").parts)
    name = next((name for name in (dotted, path.stem) if _finds(name, path)), private)
    text = path.read_bytes()
    if (loaded := sys.modules.get(name)) is not None and vars(loaded).get(_TEXT) == text:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    vars(module)[_TEXT] = text
    try:
        spec.loader.exec_module(module)
    except MissingExtra:
        del sys.modules[name]
        raise
    except BaseException as error:
        del sys.modules[name]
        raise _import_error(str(path), error) from error
    return module


def _append(*folders: Path) -> None:
    """Add folders to the end of `sys.path`, where they shadow nothing."""
    sys.path += [path for path in dict.fromkeys(map(str, folders)) if path not in sys.path]
    importlib.invalidate_caches()  # their files may be new


def _finds(name: str, path: Path) -> bool:
    """Whether `import name` finds the file, in this process and in those that it starts. Imports its package."""
    with suppress(ValueError, ModuleNotFoundError):  # a module without a spec, such as __main__; another package
        try:
            spec = importlib.util.find_spec(name)
        except (MissingExtra, ValueError):
            raise
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                raise
            raise _import_error(name.rpartition(".")[0], error) from error
        origin = Path((spec and spec.origin) or "")  # "": of a package without a file
        return origin.is_file() and path.samefile(origin)
    return False


def _from_module(place: str) -> ModuleType:
    _append(Path.cwd())
    try:
        return importlib.import_module(place)
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise _import_error(place, error) from error
        raise ModuleNotFoundError(f"no module {error.name!r} (a file is given with its suffix .py)") from None
    except Exception as error:
        raise _import_error(place, error) from error


def _import_error(place: str, error: BaseException) -> ImportError:
    """An error with the user's part of the traceback, without the frames of importlib."""
    frames = error.__traceback__
    while frames and re.search(f"^{re.escape(__file__)}$|importlib", frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    line = f", line {frames.tb_lineno}" if frames else ""
    if isinstance(error, ImportError) and "attempted relative import" in str(error):
        return ImportError(
            f"{place}{line}: a relative import finds no package: write `from NAME import ...` (the file's folder is on "
            "sys.path), or make its folder a package by an empty __init__.py"
        )
    own = not (frames and in_packages(frames.tb_frame.f_code.co_filename))  # else nobody removes its imports
    if isinstance(error, ModuleNotFoundError) and frames and (frames.tb_next is None or not own):
        remove = "remove the import (no class of another system, as slime's Sample, is needed), or " * own
        where = f"where rlkit runs ({sys.executable} -m pip install ...)"
        return ImportError(f"{place}{line}: no module {error.name!r}: {remove}install it {where}")
    if isinstance(error, SystemExit):
        return ImportError(
            f"{place}{line}: the file ends the program (exit code {error.code}) while it is imported: what reads the "
            'command line, such as parse_args(), belongs under `if __name__ == "__main__":`'
        )
    text = "".join(traceback.format_exception(type(error), error, frames, chain=False))
    return ImportError(f"{place} failed while it was imported:\n{text}")
