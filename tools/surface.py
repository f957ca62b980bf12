"""Compare what users see of two checkouts of rlkit: public functions, their signatures and docstrings, help texts.

    python tools/surface.py OTHER_CHECKOUT

Prints what exists only in the other checkout, only here, or differs. Functions are matched by name, not by file: a
moved function is no difference, a removed function or a changed signature is.
"""

from __future__ import annotations

import ast
import difflib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ("grpo", "ppo", "sft", "dpo", "kto", "reward_model")


def names(checkout: Path) -> Counter[tuple[str, str, str]]:
    """(name, signature, docstring) of every public function, class and method under rlkit/."""
    found: Counter[tuple[str, str, str]] = Counter()
    for path in (checkout / "rlkit").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            for item in [node, *(node.body if isinstance(node, ast.ClassDef) else [])]:
                if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    continue
                owner = f"{node.name}." if item is not node and isinstance(node, ast.ClassDef) else ""
                if item.name.startswith("_") or owner.startswith("_"):
                    continue
                takes = "class" if isinstance(item, ast.ClassDef) else ast.unparse(item.args)
                found[owner + item.name, takes, ast.get_docstring(item) or ""] += 1
    return found


def helps(checkout: Path) -> dict[str, str]:
    """The output of `--help`, per script."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "COLUMNS": "120", "NO_COLOR": "1"}
    out = {}
    for name in SCRIPTS:
        file = checkout / "examples" / f"{name}.py"
        command = [str(file)] if file.exists() else ["-m", f"rlkit.scripts.{name}"]
        done = subprocess.run(
            [sys.executable, *command, "--help"], env=env, cwd=checkout, capture_output=True, text=True, check=True
        )
        out[name] = done.stdout.replace(str(checkout), "")
    return out


def main(other: Path) -> None:
    """Print the differences."""
    old, new = names(other), names(ROOT)
    gone, come = old - new, new - old
    by_name = {name for name, _, _ in come}
    for name, takes, _ in sorted(gone):
        if name not in by_name:
            print(f"lost      {name}({takes})")
    before = {name: (takes, doc) for name, takes, doc in gone}
    for name, takes, doc in sorted(come):
        if name not in before:
            print(f"new       {name}({takes})")
        elif takes != before[name][0]:
            print(f"takes     {name}({before[name][0]})\n      ->  {name}({takes})")
        elif doc != before[name][1]:
            print(f"docstring {name}")
    print(
        f"{old.total()} public names there, {new.total()} here, {(old & new).total()} identical with their docstrings"
    )
    there = helps(other)
    for name, text in helps(ROOT).items():
        lines = difflib.unified_diff(there[name].splitlines(), text.splitlines(), "there", "here", lineterm="", n=0)
        print("\n".join([f"--help of {name}:", *lines]) if text != there[name] else f"--help of {name} is identical")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
