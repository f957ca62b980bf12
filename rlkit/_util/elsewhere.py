"""The error of an import that names a function of another module, or of another system (names.tsv)."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_OTHERS = Path(__file__).with_name("names.tsv")


def elsewhere(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that says where a name is which it does not have.

    ImportError, which `from rlkit import cispo` passes on, for a public function or class of another module of rlkit
    and for a name of another system; AttributeError for a submodule, which `import` then reads, and any other name.
    """

    def missing(name: str) -> Any:
        if not name.startswith("_") and not _is_module(_ROOT.joinpath(*module.split(".")[1:], name)):
            if others := [line for line in other_systems() if line[0] == name]:
                raise ImportError(f"{name} of other systems is {others[0][1]} (docs/losses.md, docs/migrating.md)")
            if homes := [*dict.fromkeys(_homes(name))]:
                raise ImportError(f"{name} is in {' and '.join(homes[:3])}, not in {module}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


def other_systems() -> list[list[str]]:
    """Names of other systems, each with rlkit's name for it."""
    return [line.split("\t") for line in _OTHERS.read_text(encoding="utf-8").splitlines()[1:]]


def _is_module(path: Path) -> bool:
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _homes(name: str) -> Iterator[str]:
    """The public modules that define a function or class, or the package that has it from them."""
    defined = re.compile(rf"^(?:async def|def|class) {re.escape(name)}\b", re.MULTILINE)
    for path in sorted(_ROOT.rglob("*.py")):
        parts = path.relative_to(_ROOT).with_suffix("").parts
        private = any(part.startswith("_") and part != "__init__" for part in parts)
        if private or parts[0] in ("scripts", "__init__") or not defined.search(path.read_text(encoding="utf-8")):
            continue
        home = ".".join(("rlkit", *parts)).removesuffix(".__init__")
        package = home.rpartition(".")[0]
        exported = package != "rlkit" and _exports(package, home, name)
        if exported or parts[0] != "testing":
            yield package if exported else home


def _exports(package: str, module: str, name: str) -> bool:
    """Whether the package imports the name from the module."""
    tree = ast.parse(_ROOT.joinpath(*package.split(".")[1:], "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == module]
    return bool({"*", name} & {alias.name for node in imports for alias in node.names})
