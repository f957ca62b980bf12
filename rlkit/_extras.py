"""Optional packages: imported where they are used, and one line that names the extra where one is missing."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtra(ModuleNotFoundError):
    """An optional package is not installed, or cannot be imported; the message has the command that installs it."""


def optional(module: str, extra: str, why: str) -> Any:
    """The module, imported. `extra` is the extra of rlkit-lm that brings it.

    >>> optional("no_such_module", "plot", "plots need")
    Traceback (most recent call last):
    rlkit._extras.MissingExtra: plots need no_such_module: pip install 'rlkit-lm[plot]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(error, module, extra, why) from None


def missing(error: ImportError, module: str, extra: str, why: str) -> MissingExtra:
    """What to raise for the `error` of importing `module`; why, where the package is there and cannot be imported."""
    package = module.partition(".")[0]
    broken = "" if getattr(error, "name", None) == package else f" ({error})"
    return MissingExtra(lacks(package, extra, why) + broken, name=package)


def lacks(package: str, extra: str, why: str) -> str:
    """The line that names the missing package and the command that installs it."""
    return f"{why} {package}: pip install 'rlkit-lm[{extra}]'"
