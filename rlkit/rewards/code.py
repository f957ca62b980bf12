"""Rewards for code: a completion's last Python block, run in the sandbox against tests that it cannot see.

The reward is the share of tests passed, or with `all_or_nothing` 1 for all of them and else 0; `score` (logged) is 1 if
all passed. What went wrong first is in the note `reason`. A sandbox that cannot be set up is an error, not a reward.
`packages` are installed ones that code and tests may import, see `rlkit.rewards.sandbox.run_program`.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlkit.rewards._run import a_core, in_thread
from rlkit.rewards.extract import last_code_block
from rlkit.rewards.sandbox import Child, Limits, Ran, run_program

_MARGIN_S = 5.0  # the tests' process outlives the solution's, to say what became of the rest
_GONE = "the solution's process ended"  # as `_worker/rpc.py` says it


async def stdin_tests(
    completion: str,
    row: dict[str, Any],
    *,
    column: str = "test_cases",
    limits: Limits = Limits(),
    packages: Sequence[str] = (),
    all_or_nothing: bool = False,
    same: Callable[[str, str], bool] | None = None,
) -> dict[str, Any]:
    """Programs that read stdin and write stdout: one run, in a sandbox of its own, per test.

    `row[column]` is `{"inputs": [text, ...], "outputs": [text, ...]}`, or that as JSON. A test is passed if the program
    ends by itself with exit code 0, within the limits, and `same(stdout, output)` (default: `same_lines`). The program
    is given the input only; the outputs stay in this process. With `all_or_nothing` the first failure ends the testing.

    Differs: ColossalAI and verl (`prime_code`) run the code in a process of the training machine from which a few
    functions have been taken away, which does not isolate it.
    """
    inputs, outputs = _cases(row, column)
    source = last_code_block(completion)
    if source is None:
        return _verdict(["no closed ```python block"], len(inputs), all_or_nothing)
    compare = same or same_lines

    async def reason(stdin: str, expected: str) -> str:
        ran = await run_program(source, stdin=stdin, limits=limits, packages=packages)
        return ran.reason or ("" if compare(ran.stdout, expected) else _difference(ran.stdout, expected))

    if not all_or_nothing:
        reasons = await asyncio.gather(*map(reason, inputs, outputs))
        return _verdict(reasons, len(inputs), all_or_nothing)
    reasons = []
    for stdin, expected in zip(inputs, outputs):
        reasons.append(await reason(stdin, expected))
        if reasons[-1]:
            break
    return _verdict(reasons, len(inputs), all_or_nothing)


async def assert_tests(
    completion: str,
    row: dict[str, Any],
    *,
    column: str = "tests",
    limits: Limits = Limits(),
    packages: Sequence[str] = (),
    all_or_nothing: bool = False,
) -> dict[str, Any]:
    """Functions and classes that Python tests call: `assert add(1, 2) == 3`.

    `row[column]` is a list of sources, each one test, or one source (one test). They run in their order and in one
    namespace, so the first may import and define what the others need. If the row has an `entry_point`, the source is
    as in HumanEval and `check(<entry_point>)` is added to each.

    Solution and tests run in two sandboxes, and only calls, arguments and results pass between them: the solution can
    neither read the tests nor end them, and what it returns is compared by the tests' own interpreter, so an object
    that is equal to everything wins nothing. The price is that tests see objects of the solution's own classes through
    proxies: their attributes, methods, len, iteration, indexing, str, float and comparison with each other work; their
    arithmetic or ordering with plain values and a plain value's `in` do not, nor do subclasses of the solution's
    classes, nor awaiting its coroutines. Built-in values and numpy's numbers and arrays are copied. Lists, dicts and
    sets that the solution changes in place are changed for the tests (one level deep).
    Comparing two objects of the solution's own class asks that class: only there it is believed.

    `limits` hold for all tests of a completion together; after a timeout the remaining tests have failed.

    Differs: in HumanEval's, MBPP's and verl's checkers code and tests share a process: `sys.exit`, a changed `__eq__`
    or reading the calling frame pass every test.
    """
    tests = _sources(row, column)
    source = last_code_block(completion)
    if source is None:
        return _verdict(["no closed ```python block"], len(tests), all_or_nothing)
    return _verdict(await _run_tests(source, tests, limits, packages), len(tests), all_or_nothing)


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


async def _run_tests(source: str, tests: list[str], limits: Limits, packages: Sequence[str]) -> list[str]:
    """Run a solution and its tests, in two sandboxes joined by a socket: a reason per test, empty if it passed."""
    solution = Child("solution", ["", -1, -1, source], limits, packages)
    longer = replace(limits, wall_s=limits.wall_s + _MARGIN_S, cpu_s=limits.cpu_s + _MARGIN_S)
    testing = Child("tests", ["", None, None, json.dumps(tests)], longer, packages)

    def run() -> tuple[Ran, Ran]:
        ends = socket.socketpair()
        with ends[0], ends[1]:
            solution.start(ends[0].fileno())
            testing.start(ends[1].fileno())
        try:
            told = testing.wait()
        finally:
            solution.cancel()  # where it has not ended yet
            ran = solution.wait()
        return told, ran

    def cancel() -> None:
        solution.cancel()
        testing.cancel()

    async with a_core():
        told, ran = await in_thread(run, cancel=cancel)
    reasons = [json.loads(line) or "" for line in told.stdout.split("\n")[:-1]]  # whole lines
    if _GONE in reasons and ran.reason not in ("", "cancelled"):
        reasons[reasons.index(_GONE)] = ran.reason
    rest = f"the tests ended early: {told.reason}" if told.reason else "not reached"
    return [*reasons, *[rest] * (len(tests) - len(reasons))]


def _verdict(reasons: Sequence[str], num_tests: int, all_or_nothing: bool) -> dict[str, Any]:
    """The reward, and the first reason why it is not 1. Tests that were not run have failed."""
    num_passed = sum(not reason for reason in reasons)
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
    """Inputs and outputs of a row, checked: bad tests are an error, not a failed answer."""
    cases = _column(row, column)
    if isinstance(cases, str):
        cases = json.loads(cases)
    if not isinstance(cases, dict) or not {"inputs", "outputs"} <= set(cases):
        raise ValueError(f"row[{column!r}] must be {{'inputs': [...], 'outputs': [...]}}, got {repr(cases)[:80]}")
    if cases.get("fn_name"):
        raise ValueError(f"row[{column!r}] calls the function {cases['fn_name']!r}: write asserts and use assert_tests")
    inputs, outputs = list(cases["inputs"]), list(cases["outputs"])
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"row[{column!r}] has {len(inputs)} inputs and {len(outputs)} outputs")
    if not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise ValueError(f"inputs and outputs of row[{column!r}] must be texts")
    return inputs, outputs


def _sources(row: dict[str, Any], column: str) -> list[str]:
    """The tests of a row as compilable sources: a test that does not compile is an error, not a failed answer."""
    tests = _column(row, column)
    tests = [tests] if isinstance(tests, str) else list(tests)
    if not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"row[{column!r}] must be a text or a list of texts with at least one test")
    if row.get("entry_point"):
        tests = [f"{test}\ncheck({row['entry_point']})\n" for test in tests]
    for test in tests:
        compile(test, f"row[{column!r}]", "exec", dont_inherit=True)
    return tests


def _column(row: dict[str, Any], column: str) -> Any:
    if row.get(column) is None:
        raise ValueError(f"the row has no {column!r}; columns found: {sorted(row)}")
    return row[column]
