"""Data that a Python package makes, by the name of the package and of one of its tasks.

    rows = load_rows("reasoning_gym:chain_sum(size=2000, max_terms=3)")
    rows = list(reasoning_gym("chain_sum", size=2000, max_terms=3))          # the same

A package is a function here and a row of `PACKAGES`, with the reward that scores its rows. It is imported when one of
its tasks is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from rlkit._util.extras import MissingExtra
from rlkit._util.text import parse_call
from rlkit.data.files import Row

_HELD_OUT = 1 << 31  # the first seed of held-out rows


class Package(NamedTuple):
    """`rows(task, held_out=..., **arguments)` makes the rows; `reward` (MODULE:FUNCTION) scores them."""

    rows: Callable[..., Iterator[Row]]
    reward: str


def package_of(spec: str) -> Package | None:
    """The package that PACKAGE:TASK or PACKAGE:TASK(arguments) names; None for anything else."""
    package, _, task = spec.partition(":")
    return PACKAGES.get(package.replace("-", "_")) if task else None


def rows_of(spec: str, *, held_out: bool = False) -> Iterator[Row]:
    """The rows of PACKAGE:TASK(arguments). Errors: ValueError, and MissingExtra for what is not installed."""
    package, (name, arguments) = package_of(spec), parse_call(spec)
    assert package is not None
    try:
        return package.rows(name.partition(":")[2], held_out=held_out, **arguments)
    except ValueError as error:
        raise ValueError(f"{spec}: {error}") from None


def reasoning_gym(
    task: str, *, size: int = 500, seed: int | None = None, held_out: bool = False, **arguments: Any
) -> Iterator[Row]:
    """`size` rows of a task of reasoning-gym (arXiv:2505.24760): `question`, `answer` and `metadata` as the package
    makes them, `prompt` (the question), and the task with its arguments in `data_source`, for the scorer.

        rows = list(reasoning_gym("chain_sum", size=2000, min_terms=2, max_terms=3))

    Row i is made from the seed `seed + i`. `seed` None: 0, and 2^31 with `held_out`, so that no seed of a training row
    is that of a held-out one; a small task may ask the same question under two seeds. `arguments` are those of the
    task's own configuration. `rlkit.rewards.packages.reasoning_gym` is the task's own scorer as a reward.

    Limits: the seed does not fix all of list_functions, and isomorphic_strings, polynomial_multiplication and
    ransom_note differ between processes (0.1.25): for several ranks or `--resume` write their rows to a file.

    Raises ValueError for a task, an argument or a value that the package does not have, and MissingExtra, with the
    command that installs it.
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a whole number of at least 1, got {size!r}")
    first = (_HELD_OUT if held_out else 0) if seed is None else seed
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    data_source = f"reasoning_gym:{task}{written and f'({written})'}"
    entries = gym_task(task, size=size, seed=first, **arguments)
    return ({"prompt": entry["question"], **entry, "data_source": data_source} for entry in entries)


def gym_task(task: str, **arguments: Any) -> Any:
    """A data set of reasoning-gym, with its `score_answer`. Errors: see `reasoning_gym`."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        broken = "" if error.name == "reasoning_gym" else f" ({error})"
        raise MissingExtra(f"reasoning_gym is not installed here: pip install reasoning-gym{broken}") from None
    if task not in DATASETS:
        near = get_close_matches(task, DATASETS, n=3, cutoff=0.4) or sorted(DATASETS)[:3]
        raise ValueError(f"reasoning-gym has no task {task!r}; near it are {', '.join(near)}, of {len(DATASETS)} tasks")
    make, config = DATASETS[task]
    names = [field.name for field in fields(config)]
    if unknown := [name for name in arguments if name not in names]:
        near = get_close_matches(unknown[0], names, n=3) or names
        raise ValueError(f"{task} has no argument {unknown[0]!r}; it has {', '.join(near)}")
    try:
        return make(config=config(**arguments))  # which checks it
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym refuses the arguments: {error or type(error).__name__}") from error


PACKAGES = {"reasoning_gym": Package(reasoning_gym, "rlkit.rewards.packages:reasoning_gym")}
