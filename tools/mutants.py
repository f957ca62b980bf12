"""Mutation testing: put small mistakes into the library, one at a time, and see which tests fail.

    python tools/mutants.py draw tools/mutants.tsv             draw mutants (fixed seed, at least three per folder)
    python tools/mutants.py run tools/mutants.tsv OUT.tsv      try each of them, in a copy of this checkout

A mutant is one changed line of one function. It is identified by the function's name and the line's text, so that
the same mutants can be tried before and after files move. `run` appends a row per mutant: killed, survived, or absent
(the function or its line no longer exists), and skips mutants that are already in OUT.tsv.
"""

from __future__ import annotations

import ast
import csv
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Add: "-", ast.Sub: "+",
    ast.Mult: "/", ast.Div: "*", ast.And: "or", ast.Or: "and", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
TEXTS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Add: "+"}
TEXTS |= {ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.And: "and", ast.Or: "or", ast.Is: "is", ast.IsNot: "is not"}
SKIPPED = ("rlkit/testing/", "triton", "sglang", "vllm", "_worker")  # need a device, a server or a sandbox
SEED, NUM, PER_FOLDER, LIMIT_S = 7, 60, 3, 420


class Mutant(NamedTuple):
    """`old` and `new` are the line in the function `name` (with its class, if any) without its indentation."""

    folder: str
    name: str
    old: str
    new: str


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module and of its classes, by qualified name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def is_text(node: ast.AST) -> bool:
    """Text or a list, for which the other operators only raise."""
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr | ast.List)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every operator of a function's body on one line, replaced by another; not in messages of errors."""
    text = path.read_text()
    lines, folder = text.splitlines(), str(path.parent.relative_to(ROOT))
    for name, function in functions(ast.parse(text)):
        raised = {id(n) for x in ast.walk(function) if isinstance(x, ast.Raise) for n in ast.walk(x)}
        for node in (n for statement in function.body for n in ast.walk(statement)):
            if id(node) in raised or isinstance(node, ast.JoinedStr):
                continue
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                left, op, right = node.left, node.ops[0], node.comparators[0]
            elif isinstance(node, ast.BinOp) and not any(is_text(x) for x in (node.left, node.right)):
                left, op, right = node.left, node.op, node.right
            elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
                left, op, right = node.values[0], node.op, node.values[1]
            else:
                continue
            if type(op) not in SWAPS or left.end_lineno != right.lineno:
                continue
            line = lines[right.lineno - 1].encode()
            between = line[left.end_col_offset : right.col_offset].decode()
            if between.count(TEXTS[type(op)]) != 1:
                continue
            between = between.replace(TEXTS[type(op)], SWAPS[type(op)])
            new = line[: left.end_col_offset].decode() + between + line[right.col_offset :].decode()
            if lines.count(line.decode()) == 1 and '"""' not in new:
                yield Mutant(folder, name, line.decode().strip(), new.strip())


def draw() -> list[Mutant]:
    """NUM mutants: at least PER_FOLDER per folder (if it has that many), at most one per function."""
    rng, found = random.Random(SEED), defaultdict(list)
    for path in sorted((ROOT / "rlkit").rglob("*.py")):
        if not any(part in str(path.relative_to(ROOT)) for part in SKIPPED):
            for mutant in mutants_of(path):
                found[mutant.folder].append(mutant)
    chosen: list[Mutant] = []
    rest: list[Mutant] = []
    for folder in sorted(found):
        rng.shuffle(found[folder])
        single = list({m.name: m for m in found[folder]}.values())
        chosen += single[:PER_FOLDER]
        rest += single[PER_FOLDER:]
    rng.shuffle(rest)
    return sorted([*chosen, *rest[: max(0, NUM - len(chosen))]])


def apply(mutant: Mutant, root: Path) -> tuple[Path, str] | None:
    """Write the mutant into the checkout at `root`; the file and its text before, or None if not found exactly once."""
    hits = []
    for path in sorted((root / "rlkit").rglob("*.py")):
        text = path.read_text()
        if mutant.old not in text:
            continue
        for name, function in functions(ast.parse(text)):
            if name == mutant.name:
                span = range(function.lineno - 1, function.end_lineno)  # type: ignore[attr-defined]
                hits += [(path, i) for i in span if text.splitlines()[i].strip() == mutant.old]
    if len(hits) != 1:
        return None
    path, i = hits[0]
    before = path.read_text()
    lines = before.splitlines(keepends=True)
    lines[i] = lines[i].replace(mutant.old, mutant.new)
    path.write_text("".join(lines))
    return path, before


def tests_for(root: Path, path: Path) -> list[str]:
    """The test files that mention the mutated module, its folder's own tests first."""
    module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    package, own = module.rpartition(".")[0], root / "tests" / path.relative_to(root / "rlkit").parts[0]
    others = ("gpu", "sglang", "vllm", "interpreted")  # need a device, a server or an interpreter of their own
    every = ((f, str(f.relative_to(root))) for f in sorted((root / "tests").rglob("test_*.py")))
    mention = [f for f, name in every if not any(word in name for word in others)]
    texts = {f: f.read_text() for f in mention}
    direct = [f for f in mention if module in texts[f] or f"test_{path.stem}" in f.name]
    near = [f for f in mention if own in f.parents or f"from {package} import" in texts[f]]
    broad = [root / f"tests/{name}" for name in ("laws/test_table.py", "scripts/test_grpo.py")]
    return [str(f) for f in dict.fromkeys([*direct, *near, *broad]) if f.exists()]


def run(listed: Path, out: Path) -> None:
    """Try the mutants of `listed`; append the outcome of each to `out`."""
    done = {tuple(row[:4]) for row in csv.reader(out.open(), delimiter="\t")} if out.exists() else set()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", ".*_cache", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for row in csv.reader(listed.open(), delimiter="\t"):
            mutant = Mutant(*row[:4])
            if tuple(mutant) in done:
                continue
            outcome, killer = "absent", ""
            if (applied := apply(mutant, copy)) is not None:
                path, before = applied
                outcome, killer = verdict(copy, path)
                path.write_text(before)  # not from ROOT, which may have changed meanwhile
            with out.open("a", newline="") as file:
                csv.writer(file, delimiter="\t", lineterminator="\n").writerow([*mutant, outcome, killer])
            print(outcome, mutant.folder, mutant.name, killer, flush=True)


def verdict(copy: Path, path: Path) -> tuple[str, str]:
    """Whether a test fails on the mutant, and which one fails first; a mutant that hangs is killed, too."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    command += ["-m", "not slow and not gpu and not sglang and not vllm", *tests_for(copy, path)]
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=copy, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as ran:
        try:
            text, _ = ran.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(ran.pid, 9)
            return "survived", f"nothing failed within {LIMIT_S} s"
    failed = [line.split(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ("killed", failed[0]) if ran.returncode else ("survived", "")


if __name__ == "__main__":
    if sys.argv[1] == "draw":
        with Path(sys.argv[2]).open("w", newline="") as file:
            csv.writer(file, delimiter="\t", lineterminator="\n").writerows(draw())
    else:
        run(Path(sys.argv[2]), Path(sys.argv[3]))
