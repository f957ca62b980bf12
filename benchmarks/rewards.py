"""What one check costs: programs in the sandbox, asserts, mathematics; compared with a bare Python process, in one run.

    python benchmarks/rewards.py --out benchmarks/results/rewards.json

`*_at_once` have all checks of a round under way together (as many run as there are cores): the time per check is the
round's divided by their number. The peer is `python -I -S -c`, which isolates nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from _cli import run_script
from _timing import interleaved, report

from rlkit.rewards import sandbox
from rlkit.rewards.code import assert_tests, stdin_tests
from rlkit.rewards.math import equal

PROGRAM = "print(sum(map(int, input().split())))"
BLOCK = "```python\n{}\n```"
STDIN = {"test_cases": {"inputs": ["1 2"] * 10, "outputs": ["3"] * 10}}
ASSERTS = {"tests": ["assert add(1, 2) == 3"] * 10}


@dataclass
class Args:
    """Sizes and where the result goes."""

    num: int = 40
    """checks of a round; a tenth as many of ten tests each"""
    repeats: int = 15
    out: Path | None = Path("benchmarks/results/rewards.json")


async def program(_: int) -> None:
    assert (await sandbox.run(PROGRAM, stdin="1 2")).stdout == "3\n"


async def ten_stdin_tests(_: int) -> None:
    assert (await stdin_tests(BLOCK.format(PROGRAM), STDIN))["reward"] == 1.0


async def ten_asserts(_: int) -> None:
    assert (await assert_tests(BLOCK.format("def add(a, b): return a + b"), ASSERTS))["reward"] == 1.0


async def fraction(i: int) -> None:
    assert (await equal(f"{i + 1}/7", f"\\frac{{{2 * i + 2}}}{{14}}")).equal


async def bare_python(_: int) -> None:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    await asyncio.to_thread(subprocess.run, command, input=b"1 2", check=True, capture_output=True)


def main(args: Args) -> None:
    torch.set_num_threads(2)  # wall time: the work is in other processes
    loop = asyncio.new_event_loop()

    def variant(check: Callable[[int], Awaitable[None]], *, at_once: bool, num: int) -> Callable[[], None]:
        async def checks() -> None:
            if at_once:
                await asyncio.gather(*map(check, range(num)))
            else:
                for i in range(num):
                    await check(i)

        return lambda: loop.run_until_complete(checks())

    variants, few = {}, max(1, args.num // 10)
    for name, check in [("program", program), ("bare_python", bare_python), ("fraction", fraction)]:
        variants[name] = variant(check, at_once=False, num=args.num)
        variants[f"{name}_at_once"] = variant(check, at_once=True, num=args.num)
    for name, check in [("ten_stdin_tests", ten_stdin_tests), ("ten_asserts", ten_asserts)]:
        variants[name] = variant(check, at_once=False, num=few)
    times = interleaved(variants, repeats=args.repeats)
    num = {name: few if name.startswith("ten") else args.num for name in times}
    each = {name: [seconds / num[name] for seconds in values] for name, values in times.items()}
    sizes = {"num": args.num, "repeats": args.repeats}
    report(each, baseline="bare_python", sizes=sizes, memory={}, out=args.out)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
