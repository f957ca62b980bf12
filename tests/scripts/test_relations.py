"""Relations of flags to each other, of every command: each refuses what breaks it, and passes what it asks for."""

import importlib
import os
import re
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from rlkit.scripts.cli import COMMANDS, module_of
from rlkit.scripts.flags import help_of, list_flags
from rlkit.settings import OWN, check, check_relations, collected, relations

SCRIPTS = [name for name in COMMANDS if name not in ("copy", "patch", "plot", "track")]
CPU = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
VALUES = (
    "none",
    "muon",
    "orpo",
    "uld",
    "a.py:f",
    "{ }",
    "eval/x",
    0.3,
    3,
    ("a.py:f",),
    (CPU,),
    (0.0, 1.0),
    True,
    Path("x"),
    len,
)
SENTENCES = {"needs": "requires {}", "for": "is for {}", "without": "excludes `"}


hints_of = cache(get_type_hints)


def args_of(script):
    return importlib.import_module(module_of(script)).Args


def kinds_of(kind):
    """The dataclass and those in its fields."""
    yield kind
    for hint in hints_of(kind).values():
        if is_dataclass(hint):
            yield from kinds_of(hint)


def made(kind, changes):
    """An object with the defaults, and the `changes` by class and field, that nothing has checked."""
    hints, settings = hints_of(kind), object.__new__(kind)
    for f in fields(kind):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        value = made(hints[f.name], changes) if is_dataclass(hints[f.name]) else None if default is MISSING else default
        object.__setattr__(settings, f.name, changes.get((kind, f.name), value))
    return settings


def refusals(script, changes):
    with collected() as messages:
        check_relations(made(args_of(script), changes))
    return messages


def literals_of(hint):
    inner = get_args(hint)
    return inner if get_origin(hint) is Literal else tuple(x for one in inner for x in literals_of(one))


def values_of(kind, name):
    """Values other than the default that the field allows, and that are not off."""
    default, literals = getattr(kind, name, None), literals_of(hints_of(kind)[name])
    for value in (*literals, *((x,) for x in literals), *VALUES):
        with collected() as messages:
            check(made(kind, {(kind, name): value}))
        if value != default and not any(x.startswith(f"`{name}` must be") for x in messages):
            yield value


def holders_of(script, kind, relation):
    """The class that holds each of the other fields."""
    kinds = [kind, *kinds_of(args_of(script))]
    leaves = [(k, {name for name, hint in hints_of(k).items() if not is_dataclass(hint)}) for k in kinds]
    return {x: next(k for k, names in leaves if x in names) for x in relation.names if any(x in n for _, n in leaves)}


CASES: dict = {}
for script in SCRIPTS:
    for kind in kinds_of(args_of(script)):
        for name, relation in relations(kind):
            holders = holders_of(script, kind, relation)
            CASES.setdefault((kind, name, relation), (script, holders))
            if len(holders) > len(CASES[kind, name, relation][1]):
                CASES[kind, name, relation] = script, holders


@pytest.mark.parametrize("script", SCRIPTS)
def test_defaults_are_never_refused(script):
    assert refusals(script, {}) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2].kind}")
def test_a_relation_refuses_what_breaks_it_and_passes_what_it_asks_for(case):
    (kind, name, relation), (script, holders) = case, CASES[case]
    assert {*holders} == {*relation.names}, "no command has all of them"
    value = relation.of[0] if relation.of else next(values_of(kind, name))
    wrong, right = [], [{}]
    if relation.kind == "needs":
        wrong = [{(k, x): d if d is None else type(d)() for x, k in holders.items() for d in [getattr(k, x, None)]}]
        right = [{(k, x): next(values_of(k, x), True)} for x, k in holders.items()]
    elif relation.kind == "without":
        wrong = [{(k, x): next(values_of(k, x))} for x, k in holders.items()]
    else:
        ((other, holder),) = holders.items()
        several = isinstance(getattr(holder, other, None), tuple)
        right = [{(holder, other): (x,) if several else x.replace(OWN, "a.py:f")} for x in relation.values]
        default = [getattr(holder, other)] if hasattr(holder, other) else []  # none where the flag is required
        outside = [*values_of(holder, other), *default]
        wrong = [{(holder, other): x} for x in outside if {(holder, other): x} not in right]
    start, end = f"`{name}`{f' {value}' * bool(relation.of)} ", f": {relation.why}" * bool(relation.why)

    def lines(changes):
        said = [re.sub(" above [01]", "", line) for line in refusals(script, {(kind, name): value} | changes)]
        form = SENTENCES[relation.kind].format(relation.terms)
        return [
            line
            for line in said
            if line.startswith(start) and form in line and line.endswith(re.sub(" above [01]", "", end))
        ]

    assert all(len(lines(changes)) == 1 for changes in wrong)
    assert wrong
    assert not any(lines(changes) for changes in right)


def test_a_flag_that_needs_one_of_another_command_is_refused():
    rollouts = next(kind for kind in kinds_of(args_of("ppo")) if kind.__name__ == "Rollouts")
    (line,) = refusals("ppo", {(rollouts, "max_dropped"): 3})
    assert line.startswith("`max_dropped` requires `success_range`, which this command does not have: ")


def test_help_names_what_a_flag_needs():
    docs = help_of(list(list_flags(args_of("grpo"))))
    assert docs["lora_alpha"].endswith("; with `lora_rank`")
    assert docs["engine_tp"].endswith("; with `engine` sglang or vllm")
    assert "with" not in docs["max_batch"], "the default is what it needs"
    assert docs["limit_rate"].count("kl") == 1, "the text names it"
