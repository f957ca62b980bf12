"""The size of the house: lines of code by room, long functions, long parameter lists.

A line of code is a line that is not blank, a comment or a docstring. The number of a room is raised by hand, with the
reason in the commit's message. The tables of functions only get shorter, and their numbers smaller.
"""

from __future__ import annotations

import ast
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "rlkit"
MAX_BODY, MAX_PARAMETERS = 40, 12
ROOMS = {  # those of folders inside count apart from the folder round them
    "_util": 957, "advantages": 688, "data": 5231, "kernels": 1831, "loops": 2869, "losses": 1811, "model": 4485,
    "packing": 576, "parallel": 1261, "rewards": 2748, "rollout": 6495, "run": 1945, "run/report": 750, "scripts": 3686,
    "testing": 1422, "modules right below rlkit": 1183,
    "agents": 1621, "compat": 2310, "rewards/sandbox": 1095, "scripts/tools": 1273,
}  # fmt: skip
LONG_BODIES = {  # lines; rl.py has 60 as its aim
    "loops/ppo.py:ppo": 45,
    "loops/rl.py:rl": 60,
    "loops/supervised.py:supervised": 45,
    "loops/updates.py:grpo_update": 45,
}
LONG_SIGNATURES = {  # parameters, without `self`
    "kernels/decode/triton.py:rotate_kernel": 18,
    "kernels/decode/triton.py:attend_kernel": 19,
    "kernels/linear_logp/ops.py:_gradients": 14,
    "kernels/linear_logp/triton.py:stats_kernel": 18,
    "kernels/linear_logp/triton.py:gradient_kernel": 21,
    "loops/distill.py:distill": 15,
    "loops/evaluate.py:evaluate": 15,
    "loops/grpo.py:grpo": 13,
    "loops/ppo.py:ppo": 14,
    "loops/preference.py:dpo": 13,
    "loops/rl.py:rl": 13,
    "loops/updates.py:grpo_update": 13,
    "rollout/engines/servers/engine.py:ServerEngine.__init__": 17,
    "rollout/stream.py:GroupStream.__init__": 19,
}
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def trees() -> dict[str, tuple[ast.Module, list[int]]]:
    """The tree of each file and the numbers of its lines of code, by its path below rlkit."""
    return {str(path.relative_to(ROOT)): parsed(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}


def parsed(text: str) -> tuple[ast.Module, list[int]]:
    tree = ast.parse(text)
    docs = set()
    for node in [tree, *statements(tree)]:
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docs |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    lines = ((i, line.strip()) for i, line in enumerate(text.splitlines(), 1))
    return tree, [i for i, line in lines if line and not line.startswith("#") and i not in docs]


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function below a node, with its name: `Class.method`, `function.nested`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}{child.name}", child
        if not isinstance(child, ast.expr):
            named = isinstance(child, WITH_DOCSTRING)
            yield from functions(child, f"{prefix}{child.name}." if named else prefix)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, code: list[int]) -> int:
    return bisect(code, node.end_lineno) - bisect(code, node.body[0].lineno - 1)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = node.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    return sum(x.arg not in ("self", "cls") for x in given)


def check_above(found: dict[str, int], limit: int, table: dict[str, int], what: str) -> None:
    """What is above the limit is in the table, with at most its number; what no longer is has left the table."""
    above = {name: number for name, number in found.items() if number > limit}
    grown = {name: number for name, number in above.items() if number > table.get(name, limit)}
    assert grown == {}, f"more than {limit} {what}: call what exists already, or take a part out that others use"
    assert table.keys() - above.keys() == set(), f"these have at most {limit} {what} now, or are gone: drop their rows"


def test_no_room_has_more_lines_of_code_than_its_number():
    rooms: Counter[str] = Counter()
    for name, (_, code) in trees().items():
        folder, slash, rest = name.partition("/")
        inside = f"{folder}/{rest.partition('/')[0]}"
        rooms[inside if inside in ROOMS else folder if slash else "modules right below rlkit"] += len(code)
    assert rooms.keys() == ROOMS.keys()
    above = {
        room: f"{lines} lines, the table has {ROOMS[room]}" for room, lines in rooms.items() if lines > ROOMS[room]
    }
    assert above == {}, "subtract, or raise the number by hand, with the reason in the commit's message"


def test_function_bodies_are_short():
    found = {
        f"{file}:{name}": body_lines(x, code) for file, (tree, code) in trees().items() for name, x in functions(tree)
    }
    assert len(found) > 2000
    check_above(found, MAX_BODY, LONG_BODIES, "lines in a body")


def test_functions_have_few_parameters():
    found = {f"{file}:{name}": parameters(x) for file, (tree, _) in trees().items() for name, x in functions(tree)}
    check_above(found, MAX_PARAMETERS, LONG_SIGNATURES, "parameters")


def test_lines_of_code_bodies_and_parameters_are_counted():
    text = '"""Module."""\n\n# comment\nclass A:\n    """A."""\n\n    def f(self, a, *b, c=1, **d):\n        """F."""\n'
    text += "        # why\n        def g():\n            return 1\n\n        return (\n            g\n        )\n"
    tree, code = parsed(text)
    assert code == [4, 7, 10, 11, 13, 14, 15]
    found = {name: (body_lines(x, code), parameters(x)) for name, x in functions(tree)}
    assert found == {"A.f": (5, 4), "A.f.g": (1, 0)}


def test_a_number_that_grew_and_a_row_that_is_stale_are_named():
    check_above({"long": 50, "short": 3}, 40, {"long": 50}, "lines")
    for found, table in (
        ({"long": 51}, {"long": 50}),
        ({"new": 41}, {}),
        ({"fixed": 40}, {"fixed": 45}),
        ({}, {"gone": 50}),
    ):
        with pytest.raises(AssertionError, match="|".join({*found, *table})):
            check_above(found, 40, table, "lines")
