"""Rewards for code: run the last Python block of a completion in the sandbox, against tests that it cannot see.

The reward is the share of tests passed, or with `all_or_nothing` 1 if all passed and else 0; `score` (logged) is 1 if
all passed. The note `reason` describes the first failure. A sandbox that cannot be set up is an error, not a reward.
`packages` are installed packages that code and tests can import, see `rlkit.rewards.sandbox.run`.

All tests of a completion share one time budget, at most the time left until the reward's deadline (`timeout_s`). A
program that exceeds it fails its tests; it does not cause the error of a reward that missed its deadline.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
import symtable
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlkit.data.messages import json_of
from rlkit.rewards import sandbox
from rlkit.rewards.call import needing
from rlkit.rewards.sandbox import Limits
from rlkit.rewards.text import gold_answer, last_code_block
from rlkit.rewards.timeouts import off_the_clock, time_left_s

_MODULES = {
    "np": "numpy", "pd": "pandas", "sp": "scipy", "plt": "matplotlib.pyplot", "torch": "torch", "sympy": "sympy",
}  # fmt: skip
_TAKEN_FROM = {
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "math": ("isclose",),
    "numpy": ("allclose", "array_equal"),
    "numpy.testing": ("assert_allclose", "assert_almost_equal", "assert_array_equal"),
    "pytest": ("approx",),
}
# how names resolve that tests use and do not define
_USUAL = {**_MODULES, **{name: f"{module}:{name}" for module, names in _TAKEN_FROM.items() for name in names}}
_ENTRY_POINT = "_entry_point"  # the name of it in the tests; its own may be a built-in function's


@needing(lambda column: (column, "ground_truth", "reward_model"))
async def stdin_tests(
    completion: str,
    row: dict[str, Any],
    *,
    column: str = "test_cases",
    limits: Limits = Limits(),
    packages: Sequence[str] = (),
    all_or_nothing: bool = False,
    same: Callable[[str, str], bool] | None = None,
    total_s: float | None = None,
    url: str | None = None,
) -> dict[str, Any]:
    """Test a program that reads stdin and writes stdout: one run per test, each in its own sandbox.

    `row[column]` is `{"inputs": [text, ...], "outputs": [text, ...]}`, or a list of `{"input": text, "output": text}`
    (codeforces, LiveCodeBench), or either as JSON. A row without that column gives `ground_truth` or
    `reward_model.ground_truth`. A test passes if the program exits with code 0 within the limits, and
    `same(stdout, output)` (default: `same_lines`). The program only receives the input; the outputs stay in this
    process. With `all_or_nothing` testing stops at the first failure.

    Tests run one after another. `total_s` is their total budget in seconds of wall time (default: three times
    `limits.wall_s`), not counting waits for a core; tests that do not start within it fail. `url` is the address of a
    remote sandbox, see `sandbox.run`.

    Differs: ColossalAI `code` and verl `prime_code` run the code in a process of the training machine with a few
    functions removed, which does not isolate it.
    """
    inputs, outputs = _cases(row, column)
    if (source := last_code_block(completion)) is None:
        return _verdict(["no closed ```python block"], len(inputs), all_or_nothing)
    compare = same or same_lines
    budget_s = left_s = min(time_left_s(), 3 * limits.wall_s if total_s is None else total_s)
    reasons: list[str] = []
    async with off_the_clock():
        for stdin, expected in zip(inputs, outputs):
            if left_s <= 0:
                reasons.append(f"timeout: the budget of {budget_s:.3g} s for all tests is spent (total_s)")
                break
            within = replace(limits, wall_s=min(limits.wall_s, left_s))
            ran = await sandbox.run(source, stdin=stdin, limits=within, packages=packages, url=url)
            left_s -= ran.wall_s
            reasons.append(ran.reason or ("" if compare(ran.stdout, expected) else _difference(ran.stdout, expected)))
            if all_or_nothing and reasons[-1]:
                break
    return _verdict(reasons, len(inputs), all_or_nothing)


@needing(lambda column: (column, "ground_truth", "reward_model"))
async def assert_tests(
    completion: str,
    row: dict[str, Any],
    *,
    column: str = "tests",
    limits: Limits = Limits(),
    packages: Sequence[str] = (),
    all_or_nothing: bool = False,
) -> dict[str, Any]:
    """Test functions and classes with Python tests that call them: `assert add(1, 2) == 3`.

    `row[column]` is a list of sources, one per test, or one source (one test). A row without that column gives
    `ground_truth` or `reward_model.ground_truth`. The tests run in order and in one namespace, so the first can import
    and define what the others need. If the row has an `entry_point`, the sources are as in HumanEval, and
    `check(<entry_point>)` is appended to each.

    Solution and tests run in two sandboxes, and only calls, arguments and results cross: the solution can neither read
    the tests nor end them, and the tests' own interpreter compares results, so an object that claims to be equal to
    everything gains nothing.

    Names. The tests see only functions and classes of the solution, and only by names that the tests use and do not
    define. Built-in names, modules (`math`) and the `packages` with their usual aliases (`np`) are always the tests'
    own, imported or not. So are the usual comparison helpers (`isclose`, `allclose`, `Counter`), unless they are all
    that the tests call.

    Values. Built-in values and numpy's numbers and arrays are copied. Lists, dicts and sets that the solution changes
    in place are changed for the tests (one level deep). Objects of the solution's own classes stay there: the tests can
    use their public attributes and methods, len, iteration, indexing, str, float and comparison with each other; not
    private names, arithmetic or ordering with plain values, a plain value's `in`, subclasses, nor await.

    Limits: the comparison of two objects of the solution's own class, and the methods of such an object, are computed
    by the solution; nothing else of it is trusted. Tests can `eval` their own literals, and arithmetic; not code in a
    result. `limits` apply to all tests of a completion together; after a timeout the remaining tests have failed. Only
    a local sandbox can run these tests.

    Differs: in HumanEval's, MBPP's and verl's checkers code and tests share a process: `sys.exit`, a changed `__eq__`
    or reading the calling frame pass every test.
    """
    tests = _sources(row, column)
    imports, asked = _names(row, column, tests, packages)
    if (source := last_code_block(completion)) is None:
        return _verdict(["no closed ```python block"], len(tests), all_or_nothing)
    limits = replace(limits, wall_s=min(limits.wall_s, max(time_left_s(), 0.01)))
    async with off_the_clock():
        reasons = await sandbox.run_tests(source, tests, imports=imports, asked=asked, limits=limits, packages=packages)
    return _verdict(reasons, len(tests), all_or_nothing)


def same_lines(actual: str, expected: str) -> bool:
    """Equal but for blanks at the ends of lines and empty lines at the end."""
    a, b = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (actual, expected))
    return a == b


def same_tokens(actual: str, expected: str, *, tolerance: float = 1e-6) -> bool:
    """Equal word by word; words that are numbers may differ by `tolerance`, relative or absolute."""
    a, b = actual.split(), expected.split()
    return len(a) == len(b) and all(x == y or _close(x, y, tolerance) for x, y in zip(a, b))


def _close(a: str, b: str, tolerance: float) -> bool:
    try:
        return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def _verdict(reasons: Sequence[str], num_tests: int, all_or_nothing: bool) -> dict[str, Any]:
    """The reward, and the first reason why it is not 1. Tests that were not run have failed."""
    num_passed = sum(not reason for reason in reasons[:num_tests])
    passed = num_passed == num_tests
    verdict: dict[str, Any] = {
        "reward": float(passed) if all_or_nothing else num_passed / num_tests,
        "score": float(passed),
        "passed": num_passed / num_tests,
        "timeout": float(any(reason.startswith("timeout") for reason in reasons)),
    }
    for i, reason in enumerate(reasons):
        if reason:
            return {**verdict, "reason": f"test {i + 1} of {num_tests}: {reason}"}
    return verdict


def _difference(actual: str, expected: str) -> str:
    a, b = actual.rstrip().splitlines(), expected.rstrip().splitlines()
    for i, (x, y) in enumerate(zip(a, b)):
        if x.rstrip() != y.rstrip():
            return f"line {i + 1} is {x[:80]!r}, expected {y[:80]!r}"
    return f"{len(a)} lines of output, expected {len(b)}"


def _cases(row: dict[str, Any], column: str) -> tuple[list[str], list[str]]:
    """The inputs and outputs of a row. Bad tests are an error, not a failed answer."""
    cases = _column(row, column)
    if isinstance(cases, str):
        cases = json.loads(cases)
    if isinstance(cases, list) and cases and all(isinstance(x, dict) and {"input", "output"} <= {*x} for x in cases):
        if any(case.get("testtype", "stdin") != "stdin" for case in cases):  # of LiveCodeBench
            raise ValueError(f"row[{column!r}] tests a function: write asserts and use assert_tests")
        cases = {f"{name}s": [case[name] for case in cases] for name in ("input", "output")}
    if not isinstance(cases, dict) or not {"inputs", "outputs"} <= set(cases):
        forms = "{'inputs': [...], 'outputs': [...]} or a list of {'input': ..., 'output': ...}"
        raise ValueError(f"row[{column!r}] must be {forms}, got {cases!r:.80}")
    if cases.get("fn_name"):
        raise ValueError(f"row[{column!r}] calls the function {cases['fn_name']!r}: write asserts and use assert_tests")
    if isinstance(cases["inputs"], str) or isinstance(cases["outputs"], str):
        raise ValueError(f"inputs and outputs of row[{column!r}] must be lists of texts, one for each test")
    inputs, outputs = list(cases["inputs"]), list(cases["outputs"])
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"row[{column!r}] has {len(inputs)} inputs and {len(outputs)} outputs")
    if not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise ValueError(f"inputs and outputs of row[{column!r}] must be texts")
    return inputs, outputs


def _entry_point(row: dict[str, Any], tests: Sequence[str]) -> str | None:
    """The function that `check` is called with; None where the tests call it themselves, as MBPP's asserts do."""
    if not (name := row.get("entry_point")):
        return None
    plain = all(
        re.search(rf"\b{re.escape(str(name))}\(", test) and not re.search(r"\bcheck\s*\(", test) for test in tests
    )
    return None if plain else name


def _sources(row: dict[str, Any], column: str) -> list[str]:
    """The tests of a row as sources. A test that does not compile is an error, not a failed answer."""
    tests = _column(row, column)
    tests = found if isinstance(found := json_of(tests), str | list | dict) else tests
    tests = tests["functional"] if isinstance(tests, dict) and "functional" in tests else tests  # of TACO
    tests = [tests] if isinstance(tests, str) else list(tests)
    if not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"row[{column!r}] must be a text or a list of texts with at least one test")
    if _entry_point(row, tests):
        tests = [f"{test}\ncheck({_ENTRY_POINT})\n" for test in tests]
    for test in tests:
        try:
            compile(test, f"row[{column!r}]", "exec", dont_inherit=True)
        except (RecursionError, MemoryError) as error:
            raise ValueError(f"row[{column!r}] is nested too deeply to be compiled ({type(error).__name__})") from error
    if not any(map(_does_something, tests)):
        raise ValueError(f"row[{column!r}] tests nothing: {tests[0][:60]!r} has no statement but values")
    return tests


def _does_something(source: str) -> bool:
    """Whether a source has a statement, or calls something."""
    parts = [*ast.walk(ast.parse(source))]
    return any(isinstance(x, ast.Call) or (isinstance(x, ast.stmt) and not isinstance(x, ast.Expr)) for x in parts)


def _names(
    row: dict[str, Any], column: str, tests: list[str], packages: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Resolve the names that tests use and do not define: `imports`, modules and functions, and `asked`, names of the
    solution.
    """
    used, called, stars = _free_names(tests)
    entry_point = row.get("entry_point") if _ENTRY_POINT in used else None
    if entry_point and "check" in used:
        fault = f"the row has an entry_point, {entry_point}, and row[{column!r}] neither defines `check` nor calls it"
        raise ValueError(f"{fault}: drop the column entry_point, or correct the tests")
    imports, asked = {}, {_ENTRY_POINT: entry_point} if entry_point else {}
    helps = bool(entry_point or called & used - set(_USUAL))  # something else is tested
    for name in used - {_ENTRY_POINT}:
        usual = _USUAL.get(name, name)
        package = usual.partition(":")[0].partition(".")[0]
        there = package in packages or package in sys.stdlib_module_names
        theirs = (not helps or stars or name == entry_point) if ":" in usual else name in called
        if theirs or not (there or name in _USUAL):
            asked[name] = name
        elif there:
            imports[name] = usual
        else:
            raise ValueError(f"row[{column!r}] uses {name}: import it in the tests, and add {package!r} to `packages`")
    return imports, asked


def _free_names(tests: list[str]) -> tuple[set[str], set[str], bool]:
    """The global names that tests use, but neither define nor have from Python; which of them they call; and whether a
    test has a star import.
    """
    used, bound, called, stars = set[str](), set[str](), set[str](), False
    for test in tests:
        tables = [symtable.symtable(test, "tests", "exec")]
        for table in tables:
            tables += table.get_children()
            for symbol in table.get_symbols():
                if table.get_type() == "module" or symbol.is_global():
                    used |= {symbol.get_name()} if symbol.is_referenced() else set()
                    bound |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
        for node in ast.walk(ast.parse(test)):
            called |= {node.func.id} if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else set()
            stars |= isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    return used - bound - set(dir(builtins)), called, stars


def _column(row: dict[str, Any], column: str) -> Any:
    """`row[column]`, else `ground_truth`, else `reward_model.ground_truth`."""
    if (value := row.get(column)) is None:
        value = gold_answer({name: row.get(name) for name in ("ground_truth", "reward_model")})
    if value is None:
        raise ValueError(f"the row has no {column!r}, nor reward_model.ground_truth; columns found: {sorted(row)}")
    return value
