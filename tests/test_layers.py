"""Each module imports only from the layers before its own; there are no circles; private modules stay at home."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1] / "rlkit"
LAYERS = (  # each may import what stands before it; left before right within a line
    "_platform _elsewhere _extras _numbers _retrying _text untrusted settings files ranks types _tensors",
    "segments metrics kernels",
    "advantages losses controllers objectives",
    "balancing packing",
    "parallel",
    "model",
    "data",
    "rollout",
    "rewards",
    "run",
    "loops",
    "compat",
    "scripts __main__",
)
ORDER = {name: place for place, name in enumerate(" ".join(LAYERS).split())}


class Import(NamedTuple):
    """`user` imports `used`, both dotted below rlkit, when it is imported itself or in a call."""

    user: str
    used: str


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def imports() -> list[Import]:
    return [*read_imports()]


def read_imports() -> Iterator[Import]:
    for user, path in MODULES.items():
        tree = ast.parse(path.read_text())
        typing = {id(n) for x in ast.walk(tree) if is_for_types(x) for n in ast.walk(x)}
        for node in ast.walk(tree):
            if id(node) not in typing:
                for used in imported(node, user, is_package=path.name == "__init__.py"):
                    yield Import(user, used)


def imported(node: ast.AST, user: str, *, is_package: bool) -> list[str]:
    """The modules below rlkit that a statement imports: `import a.b`, `from a import b`, relative or not."""
    if isinstance(node, ast.Import):
        names = [alias.name.split(".") for alias in node.names]
        return [".".join(parts[1:]) for parts in names if parts[0] == "rlkit" and len(parts) > 1]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = (node.module or "").split(".")
    if node.level:
        here = ["rlkit", *user.split(".")] if user else ["rlkit"]
        base = here[: len(here) - node.level + is_package] + [part for part in base if part]
    if base[0] != "rlkit":
        return []
    below = ".".join(base[1:])
    full = [f"{below}.{alias.name}".removeprefix(".") for alias in node.names]
    return [name if name in MODULES else below for name in full]


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_no_import_runs_up_the_layers():
    """Also none inside a function: what a module needs at any time stands before it. `testing` may import anything."""
    rooms = {i: (i.user.split(".")[0], i.used.split(".")[0]) for i in imports()}
    found = {i: r for i, r in rooms.items() if r[0] != r[1] and r[0] not in ("testing", "")}
    assert len(found) > 200
    assert {f"{i.user} imports {i.used}" for i, (user, used) in found.items() if ORDER[user] < ORDER[used]} == set()


def test_every_top_level_module_has_a_layer():
    assert {name.split(".")[0] for name in MODULES} - {"", "testing"} == set(ORDER)


def test_there_are_no_circles():
    """Nor of imports inside functions, without which a circle would only be hidden."""
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for i in imports():
        if i.user != i.used:
            graph[i.user].add(i.used)
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_private_modules_are_imported_by_their_own_package_only():
    """Those right below rlkit are the whole package's."""
    found = set()
    for i in imports():
        owner, dot, _ = i.used.partition("._")
        if dot and not f"{i.user}.".startswith(f"{owner}."):
            found.add(f"{i.user} imports {i.used}")
    assert found == set()


def test_the_variables_of_torchrun_are_read_in_ranks_only():
    names = re.compile(r"environ.*\b(LOCAL_)?(RANK|WORLD_SIZE)\b")
    lines = [(name, line) for name, path in MODULES.items() for line in path.read_text().splitlines()]
    assert {name for name, line in lines if names.search(line)} == {"ranks"}
