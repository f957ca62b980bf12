"""What kind of environment a function or class is, by its signature and its bases. Imports no torch.

A form is a branch and a row of the table in `kind_of`, and a row of `_ADAPTERS` in `rlkit.compat.envs`; where it
works on messages, a name in `OF_MESSAGES`, and without a reward of its own, one in `UNJUDGED`. A library is a row of
`rlkit.compat.libraries.LIBRARIES`, and with games a name in `GAME_LIBRARIES`. A form without adapter is a row in
`_FOREIGN`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, cast

from rlkit.rollout.calling import accepted, is_async, takes

GAME_LIBRARIES = ("gymnasium", "gem", "textarena", "aviary")  # an object of theirs plays one episode
OF_MESSAGES = (  # kinds that need a chat template
    "tools", "interact", "verifiers", "verifiers_tasks", "openenv", *GAME_LIBRARIES,
)  # fmt: skip
UNJUDGED = {  # kinds without a reward of their own, and what to add
    "interact": "interact(messages) gives no reward: add its reward_fn(messages, answer)",
    "rl4llm": "a class of rl4llm gives no reward: add its reward functions",
}
RowsOf = Callable[[bool], Iterable[Mapping[str, Any]]]  # the rows of an environment, held out or not
_GYM = ("seed", "options")  # of Gymnasium's `reset`
_FOREIGN = {  # forms of other libraries that no adapter runs: methods of a class or parameters, and what to write
    "start_interaction generate_response": "verl's interaction: write its turns as a class with reset and step",
    "create execute": "a tool of verl: give the function that it calls as --tools",
    "args sample sampling_params": "slime's generate: here `await sample(prompt.ids)` samples a turn, `prompt.row` is "
    "the sample, and a Trajectory or Chat.end(...) is returned",
    "prompts trainer": "TRL's rollout_func: an environment gets one prompt, and samples by `await sample(prompt.ids)`",
}
_TRL_TOOLS = (
    "TRL's environment_factory, whose public methods are tools, has no step: give functions as --tools, or write a "
    "class whose step reads the call"
)
_EXPECTED = (
    "an environment is `async def env(prompt, sample)`, a function of the tokenizer that returns one, a class with "
    "reset and step, or one of another system (docs/environments.md)"
)


@dataclass(frozen=True)
class Published:
    """An environment of a library: what the adapter of its `kind` takes (`made`, `options`), and its own rows.

    `source` is what the user named, for errors: a function, class or object, or the text of the command line.
    """

    kind: str
    made: Any
    rows: RowsOf | None = None
    options: dict[str, Any] = field(default_factory=dict)
    at_once: int | None = None
    source: Any = None


def kind_of(foreign: Any) -> str:
    """The kind of environment, without its library; ValueError, with what is expected, for anything else.

    | object                                                              | kind         |
    |---------------------------------------------------------------------|--------------|
    | an async function of `prompt` and `sample`, by these names          | "env"        |
    | a function of `state`, `action`, `extra_info`, or of `sample` alone | "rl2"        |
    | a function of `messages` alone                                      | "interact"   |
    | a function with the name `load_environment`                         | "verifiers"  |
    | a subclass of gymnasium's, GEM's, TextArena's or aviary's base      | the library  |
    | a `Published`                                                       | its `kind`   |
    | a class, a partial or an object of rl4llm's `BaseMDPEnv`            | "rl4llm"     |
    | OpenRLHF's agents: a class with `step`, and `reset` of `states`     | "openrlhf"   |
    | any other class with `reset` and `step`                             | "object"     |
    | a function of `prompt` alone, which returns such an object          | "object"     |
    | a function of the tokenizer (any other single argument)             | "factory"    |
    """
    if isinstance(foreign, Published):
        return foreign.kind
    name = getattr(foreign, "__name__", type(foreign).__name__)
    if hasattr(foreign.func if isinstance(foreign, partial) else foreign, "_run_interaction_loop"):
        return "rl4llm"
    if isinstance(foreign, type):
        if hasattr(foreign, "reset") and hasattr(foreign, "step"):
            return _kind_of_class(foreign)
        if not isinstance(inspect.getattr_static(foreign, "__call__", None), FunctionType):
            theirs = _hint({*dir(foreign)}) or (_TRL_TOOLS if hasattr(foreign, "reset") else _EXPECTED)
            raise ValueError(f"the class {name} has no reset and step; {theirs}")
    names = {*inspect.signature(foreign).parameters}
    if names >= {"state", "action", "extra_info"} or names == {"sample"}:
        return "rl2"
    if names == {"messages"}:
        return "interact"
    if name == "load_environment":
        return "verifiers"
    needs: tuple[str, ...] = ("prompt", "sample") if is_async(foreign) else ("tokenizer",)
    named = needs == ("tokenizer",) or (_means(foreign, 0, "prompt") and _means(foreign, 1, "sample", "sampler"))
    if not (takes(foreign, *needs) and named):
        who = "an async function" if is_async(foreign) else "a function"
        found = f"{name}{inspect.signature(foreign)}"
        raise ValueError(f"{who} must take ({', '.join(needs)}), got {found:.120}; {_hint(names) or _EXPECTED}")
    if is_async(foreign):
        return "env"
    return "object" if names == {"prompt"} else "factory"


def _hint(names: set[str]) -> str:
    """What to write in place of another library's form that has these names; empty for an unknown one."""
    return next((hint for known, hint in _FOREIGN.items() if {*known.split()} <= names), "")


def _means(function: Callable[..., Any], position: int, *words: str) -> bool:
    """Whether the parameter has one of these words in its name or its type, or a name of one letter, or any name."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind != p.KEYWORD_ONLY]
    p = parameters[min(position, len(parameters) - 1)] if parameters else None
    if p is None or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
        return True
    of_type = getattr(p.annotation, "__name__", str(p.annotation)).rpartition(".")[2].lower()
    return len(p.name.strip("_")) <= 1 or bool({*p.name.lower().split("_"), of_type} & {*words})


def takes_prompt(kind: type) -> bool:
    """Whether a class is made with the prompt: its first argument is required, or has the name `prompt`."""
    found = inspect.signature(kind).parameters.values()
    first = next((p for p in found if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)), None)
    return first is not None and (first.default is first.empty or first.name == "prompt")


def _kind_of_class(kind: type) -> str:
    bases = {base.__module__.partition(".")[0] for base in kind.__mro__}
    reset, step = (inspect.getattr_static(kind, name) for name in ("reset", "step"))
    library = next((name for name in (*GAME_LIBRARIES, "openrlhf") if name in bases), None)
    if isinstance(reset, FunctionType) and "states" in inspect.signature(reset).parameters:
        library = library or "openrlhf"
    fault, method = "", cast(Any, kind)
    if not takes(kind, *["prompt"] * (library is None and takes_prompt(kind))):
        fault = "it must be made with the prompt or without arguments"
    elif library is None:
        if isinstance(reset, FunctionType) and not takes(reset, kind, **accepted(reset, dict.fromkeys(_GYM))):
            fault, method = "reset must take no arguments, or `seed` and `options`", reset
        elif isinstance(step, FunctionType) and not takes(step, kind, "turn"):
            fault, method = "step must take one argument, the turn", step
    if fault:
        raise ValueError(f"the class {kind.__name__}: {fault}, got {inspect.signature(method)!s:.120}")
    return library or "object"
