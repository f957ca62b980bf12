"""Environments that libraries publish, in one line of the command: `--env gem:game:Sudoku-v0-easy`.

    LIBRARY:ID      LIBRARY:ID(argument=value)      FILE.py:NAME of an object, class or function of a library

A library is a row of `LIBRARIES`, imported when a line names it and not before. What it brings besides an environment
is its rows: the data of a run without --data. Imports no torch.
"""

from __future__ import annotations

import importlib
import json
import re
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from importlib.metadata import distributions
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from rlkit._util.extras import MissingExtra
from rlkit._util.text import parse_call
from rlkit.compat.actions import actions_of, show_observation
from rlkit.compat.recognise import GAME_LIBRARIES, Published, RowsOf, kind_of, takes_prompt
from rlkit.data.messages import seed_row
from rlkit.data.sources import Source
from rlkit.rewards.failures import called
from rlkit.rewards.load import load_object
from rlkit.rollout.calling import takes

GAMES, HELD_OUT_GAMES, HELD_OUT_SEED = 1024, 64, 1_000_000  # rows of a game without data, and the first held-out seed


class Library(NamedTuple):
    """The module that is imported, the package that has it, and a function (module, id, arguments) -> `Published`."""

    module: str
    package: str
    find: Callable[[Any, str, dict[str, Any]], Published]


def published(spec: str) -> Published | None:
    """The environment of `LIBRARY:ID` or `LIBRARY:ID(arguments)`; None for a text of another form.

    `at_once`, of the arguments, limits the episodes that are played at a time; the library gets the others.
    Errors: MissingExtra without the library; ValueError, with the nearest ids, for one that it does not have.
    """
    name, _, rest = spec.partition(":")
    library = LIBRARIES.get(name)
    if library is None or not rest:
        return None
    line, arguments = parse_call(spec)
    at_once = arguments.pop("at_once", None)
    if at_once is not None and (not isinstance(at_once, int) or at_once < 1):
        raise ValueError(f"{spec}: at_once is a number of episodes, at least 1")
    made = library.find(_imported(name), line.partition(":")[2], arguments)
    return replace(made, at_once=at_once, source=spec)


def _imported(name: str) -> Any:
    """The module of a library; MissingExtra, with the command that installs it, where it cannot be imported."""
    module, package, _ = LIBRARIES[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        there = find_spec(module.partition(".")[0]) is not None
        broken = f" (it fails to import: {' '.join(str(error).split())})" * there
        raise MissingExtra(f"--env {name}:... needs {module}: pip install {package}{broken}", name=module) from None


def resolved(foreign: Any) -> Any:
    """The `Published` that an object stands for, or a class or a function without arguments of such objects.

    Such a function is called, once. Anything else is returned as it is. Errors: ValueError, with what to write, for an
    object that cannot be played.
    """
    if isinstance(foreign, Published):
        return foreign
    name = getattr(foreign, "__name__", type(foreign).__name__)
    if isinstance(foreign, type):
        found = _of_class(foreign, name)
    elif callable(foreign) and library_of(foreign) is None:
        found = _of_call(foreign, name) if _takes_nothing(foreign) else None
    else:
        found = _of_object(foreign, name, again=None)
    return foreign if found is None else replace(found, source=foreign)


def _of_class(kind: type, name: str) -> Published | None:
    library = library_of(kind)
    if library == "verifiers" or (library == "aviary" and not hasattr(kind, "reset")):
        return _of_object(_alone(kind), name, again=None)
    if paste := wrapper_for(kind):
        raise ValueError(f"the class {name}: {paste}")
    is_game = hasattr(kind, "reset") and hasattr(kind, "step") and not takes_prompt(kind)
    if is_game and (form := kind_of(kind)) in ("object", *GAME_LIBRARIES):
        return Published(form, lambda _: kind(), _seeds(name))
    return None


def _alone(kind: type) -> Any:
    """An object of a class of data: a taskset of verifiers is made with its configuration."""
    if not hasattr(kind, "load"):
        return kind()
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.taskset import Taskset
    from verifiers.v1.utils.generic import concrete_type

    return kind((concrete_type(kind, TasksetConfig, origin=Taskset) or TasksetConfig)())


def _of_call(function: Callable[[], Any], name: str) -> Published:
    made = function()
    if (found := _of_object(made, name, again=function)) is None:
        expected = "an object with reset and step, or an environment of a library (docs/environments.md)"
        raise ValueError(f"{name}() must return {expected}, got {made!r:.80}")
    return found


def _of_object(made: Any, name: str, *, again: Callable[[], Any] | None) -> Published | None:
    """The environment of an object that `again()` makes anew, if it does; None for one that is none."""
    library = library_of(made)
    if library == "verifiers" and hasattr(made, "rubric"):
        return Published("verifiers", made, partial(_verifiers_rows, made))
    if library == "verifiers" and hasattr(made, "load"):
        return _of_taskset(name, made)
    if library == "aviary" and hasattr(made, "get_new_env_by_idx"):
        return _of_dataset(name, made)
    if paste := wrapper_for(made):
        raise ValueError(f"{name}: {paste}")
    if not (hasattr(made, "reset") and hasattr(made, "step")):
        return None
    if again is None:
        fault = f"{name} is one {type(made).__name__}, and each episode needs its own"
        raise ValueError(f"{fault}: write `def make(): return ...` around what makes it, and give FILE.py:make")
    return Published(library if library in GAME_LIBRARIES else "object", lambda _: again(), _seeds(name))


def library_of(made: Any) -> str | None:
    """The library of `LIBRARIES` that a class or an object, or one of its bases, comes from."""
    bases = (made if isinstance(made, type) else type(made)).__mro__
    modules = {base.__module__.partition(".")[0] for base in bases}
    return next((name for name, library in LIBRARIES.items() if library.module.partition(".")[0] in modules), None)


def wrapper_for(made: Any) -> str | None:
    """What to write for a client of OpenEnv, whose actions are Python objects; None for anything else."""
    kind = made if isinstance(made, type) else type(made)
    if library_of(kind) != "openenv" or not hasattr(kind, "_step_payload"):
        return None
    return (
        "a client of OpenEnv: --env openenv:URL plays its server by the schema of its actions; or paste, with its own "
        f"action and observation: env = functools.partial(rlkit.compat.envs.openenv, lambda prompt: {kind.__name__}("
        "base_url=URL), act=lambda text: ACTION(...), show=lambda observation: observation.TEXT)"
    )


def _takes_nothing(function: Any) -> bool:
    """Whether a function is called without arguments: it has none, or is a `load_environment` of verifiers."""
    named = getattr(function, "__name__", "") == "load_environment"
    return takes(function) if named else takes(function) and not takes(function, "one")


@cache
def environment_of(spec: str) -> Any:
    """What `--env` names: `published`, or the object of FILE.py:NAME, `resolved`. Made once for each text."""
    if (made := published(spec)) is not None:
        return made
    check_named(spec)
    foreign = load_object(spec)
    return called(lambda: resolved(foreign), foreign, spec)


def is_place(spec: str) -> bool:
    """Whether a text is FILE.py:NAME, or MODULE:NAME of an installed package. Imports nothing."""
    module, _, name = spec.rpartition(":")
    if module.endswith(".py"):
        return re.fullmatch(r"\S+:\w+", spec) is not None
    dotted = all(part.isidentifier() for part in (*module.split("."), name))
    found = find_spec(module.partition(".")[0]) if dotted else None
    return found is not None and found.origin is not None  # that of a folder without code is None


def check_named(spec: str) -> None:
    """ValueError, with what to write, for a text of `--env` that names no library, file or installed module."""
    name, _, rest = spec.partition(":")
    if name in LIBRARIES or is_place(spec):
        return
    if name.endswith(".py"):
        load_object(spec)  # which says what is missing
        return
    near = [one for one in LIBRARIES if one.startswith(name)] + get_close_matches(name, LIBRARIES, n=1)
    near = [f"{name}.py"] if Path(f"{name}.py").is_file() else near
    other = "for another package write `def make(): return ...`, and give FILE.py:make (docs/environments.md)"
    fix = f"did you mean {near[0]}:{rest or 'ID'}?" if near else other
    known = f"FILE.py:NAME, MODULE:NAME of an installed package, nor {', '.join(LIBRARIES)} with an id"
    raise ValueError(f"it is neither {known}: {fix}")


def env_rows(spec: str, *, held_out: bool = False) -> str | Source:
    """The rows that an environment brings, for `load_rows`; a text that names none as it is."""
    if not is_place(spec) and spec.partition(":")[0] not in LIBRARIES:
        return spec

    def rows() -> Iterator[tuple[str, Any]]:
        if (rows_of := getattr(environment_of(spec), "rows", None)) is None:
            fix = "give --data FILE, a row for each episode, or what makes the environment without arguments"
            raise ValueError(f"{spec} brings no rows of its own: {fix}")
        for number, row in enumerate(rows_of(held_out), start=1):
            yield f"row {number}", dict(row)

    return Source(f"{spec} held out" if held_out else spec, rows)


def _said(text: str) -> list[dict[str, str]]:
    """The prompt of a row, which an environment with an opening of its own does not show."""
    return [{"role": "user", "content": text}]


def _seeds(name: str) -> RowsOf:
    """Rows of a game that has no data: its seeds."""

    def rows(held_out: bool) -> Iterator[dict[str, Any]]:
        first, num = (HELD_OUT_SEED, HELD_OUT_GAMES) if held_out else (0, GAMES)
        for seed in range(first, first + num):
            yield seed_row(name, seed)

    return rows


def _checked_id(library: str, name: str, ids: Iterable[str]) -> str:
    """The id; ValueError with the nearest ones where the library does not have it."""
    every = sorted({*ids})
    if name in every:
        return name
    near = [one for one in every if name.lower() in one.lower()][:5] or get_close_matches(name, every, n=5, cutoff=0.4)
    nearest = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(every[:5])} ..."
    raise ValueError(f"{library} has no {name!r}: {nearest}")


def _gymnasium(gymnasium: Any, name: str, arguments: dict[str, Any]) -> Published:
    if ":" not in name:  # else MODULE:ID, which gymnasium imports
        _checked_id("gymnasium", name, gymnasium.registry)
    return Published("gymnasium", lambda _: gymnasium.make(name, **arguments), _seeds(name))


def _gem(gem: Any, name: str, arguments: dict[str, Any]) -> Published:
    _checked_id("gem", name, importlib.import_module("gem.envs.registration").ENV_REGISTRY)
    return Published("gem", lambda _: gem.make(name, **arguments), _seeds(name))


def _textarena(textarena: Any, name: str, arguments: dict[str, Any]) -> Published:
    """The raw version of a game: the other wrappers write the whole game into each observation."""
    registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    plain = re.sub("-(raw|train)$", "", name)
    _checked_id("textarena", plain, (one for one in registry if not one.endswith(("-raw", "-train"))))
    return Published("textarena", lambda _: textarena.make(f"{plain}-raw", **arguments), _seeds(plain))


def with_opponent(environment: Any, opponent: str | None) -> Any:
    """A game of TextArena with its other players: none, "self", or FILE.py:FUNCTION of the text so far.

    Anything else is returned as it is, without an opponent. Errors: ValueError for an opponent that has no place, or a
    game that lacks one.
    """
    if not isinstance(environment, Published) or environment.kind != "textarena":
        if opponent is not None:
            raise ValueError("`opponent` is for games of TextArena: textarena:ID, or FILE.py:NAME of such a game")
        return environment
    name = environment.source if isinstance(environment.source, str) else "the game"
    num_players = _players_of(environment.made, name)
    if opponent is None and num_players > 1:
        fix = "add --opponent self (the policy plays and trains all of them) or --opponent FILE.py:FUNCTION"
        raise ValueError(f"{name} has {num_players} players: {fix}")
    if opponent is not None and num_players == 1:
        raise ValueError(f"{name} has one player: drop --opponent")
    others = [load_object(opponent)] * (num_players - 1) if opponent not in (None, "self") else []
    if others and not takes(others[0], "text"):
        raise ValueError(f"--opponent {opponent} must be a function of the text so far, which returns its action")
    options = {"seats": num_players} if opponent == "self" else {"opponents": others}
    return replace(environment, options=options)


def _players_of(make: Callable[[Any], Any], name: str) -> int:
    """The least number of players that a game of TextArena takes; ValueError where it cannot be reset."""
    said = ""
    for num in range(1, 16):
        try:
            make(None).reset(num_players=num, seed=0)
        except (AssertionError, ValueError, KeyError, IndexError) as error:
            said = str(error)
        except LookupError as error:
            corpus = re.search(r"nltk\.download\('(\w+)'\)", str(error))
            fix = f"python -m nltk.downloader {corpus[1]}" if corpus else " ".join(str(error).split())
            raise ValueError(f"{name} needs a corpus of nltk that is not here: {fix}") from None
        else:
            return num
    raise ValueError(f"{name} cannot be reset with 1 to 15 players: {said}")


def _verifiers(verifiers: Any, name: str, arguments: dict[str, Any]) -> Published:
    """An installed environment, `load_environment(**arguments)` of verifiers 0.1, or a taskset of a later release."""
    try:
        if find_spec("verifiers.envs"):
            made = verifiers.load_environment(name, **arguments)
            return Published("verifiers", made, partial(_verifiers_rows, made))
        kind = importlib.import_module("verifiers.v1.utils.loaders").taskset_class(name)
    except (ValueError, ModuleNotFoundError) as error:
        if not str(error).lower().startswith(("could not import", "taskset")):
            raise
        needs = lambda one: any(re.match(r"verifiers\b", x) for x in one.requires or ())  # noqa: E731
        if installed := [one.metadata["Name"] for one in distributions() if needs(one)]:
            _checked_id("verifiers", name, installed)
        raise ValueError(f"verifiers:{name}: {' '.join(str(error).split())}") from None
    if arguments:
        config = type(_alone(kind).config)(**arguments)
        return _of_taskset(name, kind(config))
    return _of_taskset(name, _alone(kind))


def _verifiers_rows(made: Any, held_out: bool) -> Iterable[Mapping[str, Any]]:
    rows: Iterable[Mapping[str, Any]] = made.get_eval_dataset() if held_out else made.get_dataset()
    return rows


def _of_taskset(name: str, taskset: Any) -> Published:
    """The tasks of `verifiers.v1`, of an endless taskset the first; run by its own chat loop in a process each."""
    if which("uv") is None:
        raise MissingExtra("verifiers runs its tasks by uv: pip install uv", name="uv")
    tasks = list(islice(taskset, None if taskset.bounded else GAMES))

    def rows(_held_out: bool) -> Iterator[dict[str, Any]]:
        for number, task in enumerate(tasks):
            yield {"messages": _said(task.data.prompt_text or f"{name}, task {number}")}

    return Published("verifiers_tasks", tasks, rows)


def _aviary(aviary: Any, name: str, arguments: dict[str, Any]) -> Published:
    """A data set of tasks, or else an environment, of aviary's registries."""
    datasets, environments = aviary.TASK_DATASET_REGISTRY, aviary.ENV_REGISTRY
    _checked_id("aviary", name, [*datasets, *environments])
    try:
        if name in datasets:
            return _of_dataset(name, aviary.TaskDataset.from_name(name, **arguments))
        aviary.Environment.from_name(name, **arguments)
    except ImportError as error:
        raise MissingExtra(f"{error} pip install aviary.{name}", name=f"aviary.{name}") from None
    return Published("aviary", lambda _: aviary.Environment.from_name(name, **arguments), _seeds(name))


def _of_dataset(name: str, dataset: Any) -> Published:
    """A `TaskDataset` of aviary: an environment for each index, or new ones without end.

    Where it has one object for an index (`EnvsTaskDataset`), each episode gets a copy.
    """
    try:
        num = len(dataset)
    except TypeError:
        return Published("aviary", lambda _: dataset.get_new_env(), _seeds(name))
    fresh = deepcopy if num and dataset.get_new_env_by_idx(0) is dataset.get_new_env_by_idx(0) else lambda one: one

    def rows(_held_out: bool) -> Iterator[dict[str, Any]]:
        return ({"messages": _said(f"{name}, task {i}"), "task": i} for i in range(num))

    return Published("aviary", lambda prompt: fresh(dataset.get_new_env_by_idx(prompt.row.get("task", 0))), rows)


def _openenv(openenv: Any, url: str, arguments: dict[str, Any]) -> Published:
    """The server at an address, with actions in JSON after its schema; of one text field, the text itself."""
    if arguments.keys() - {"wait_s"}:
        raise ValueError(f"openenv:{url}: its arguments are at_once and wait_s, got {', '.join(arguments)}")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=10) as reply:
            schema = json.loads(reply.read())["action"]
    except (OSError, ValueError, KeyError) as error:
        fix = "give the address of a running one, as in openenv:http://127.0.0.1:8000"
        raise ValueError(f"no OpenEnv server answers at {url}/schema ({error}): {fix}") from None
    act, hint = actions_of(schema)
    options = {"act": act, "show": show_observation, "hint": hint, **arguments}
    return Published("openenv", lambda _: openenv.GenericEnvClient(base_url=url), _seeds(url), options)


LIBRARIES = {
    "gem": Library("gem", "gem-llm", _gem),
    "textarena": Library("textarena", "textarena", _textarena),
    "gymnasium": Library("gymnasium", "gymnasium", _gymnasium),
    "verifiers": Library("verifiers", "verifiers", _verifiers),
    "openenv": Library("openenv.core", "openenv-core", _openenv),
    "aviary": Library("aviary.env", "fhaviary", _aviary),
}
