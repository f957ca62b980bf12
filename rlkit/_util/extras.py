"""Import optional packages at their first use; a missing one raises one line that names the extra to install."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Any


class MissingExtra(ModuleNotFoundError):
    """An optional package is not installed or fails to import. The message has the command that installs it."""


def optional(module: str, extra: str, why: str) -> Any:
    """Import and return `module`; `extra` is the extra of rlkit-lm that installs it.

    >>> optional("no_such_module", "plot", "plots need")
    Traceback (most recent call last):
    rlkit._util.extras.MissingExtra: plots need no_such_module: pip install 'matplotlib>=3.8'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(error, module, extra, why) from None


def missing(error: ImportError, module: str, extra: str, why: str) -> MissingExtra:
    """The exception for a failed import of `module`; includes the `error` if the package is installed but broken."""
    package = module.partition(".")[0]
    broken = "" if getattr(error, "name", None) == package else f" ({error})"
    return MissingExtra(lacks(package, extra, why) + broken, name=package)


def lacks(package: str, extra: str, why: str) -> str:
    """The line that names the missing package and the command that installs it.

    The command has the packages of the extra: it is right for a clone and for a wheel, whatever they are called.
    """
    try:
        listed = requires("rlkit-lm") or []
    except PackageNotFoundError:  # a copy of the folder
        listed = []
    packages = [
        name for name, _, marker in (line.partition("; ") for line in listed) if marker == f'extra == "{extra}"'
    ]
    return f"{why} {package}: pip install {shlex.join(packages or [f'rlkit-lm[{extra}]'])}"


def interpreter(package: str, python: str | None = None) -> str:
    """The Python that has `package`, which may be in an environment of its own: `python`, $RLKIT_PACKAGE_PYTHON, or the
    running one.

    Errors: MissingExtra, with what to install, where the running one would be taken and does not have it.
    """
    variable = f"RLKIT_{package.upper()}_PYTHON"
    if path := python or os.environ.get(variable):
        return path
    if find_spec(package) is None:
        fix = f"`pip install {package}`, or in an environment of its own, with its Python in ${variable}"
        raise MissingExtra(f"{package} is not installed here: {fix}")
    return sys.executable
