"""Flags in a YAML file: `--config run.yaml` reads one, `--print-config` prints one, and each run leaves its own.

    rlkit grpo --config run.yaml --lr 2e-6                         flags win over the file
    rlkit grpo --model MODEL --data DATA --print-config > run.yaml

A file becomes words of a command line, so its values have the types, ranges and errors of the flags. Nothing of it is
constructed by YAML: a tag such as `!!python/object` is refused.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_origin

from rlkit._util import untrusted
from rlkit._util.text import masked
from rlkit.scripts.flags import (
    Flag,
    assigned,
    complaint,
    flags_of,
    grouped,
    has_config,
    help_of,
    is_flag,
    list_flags,
    members_of,
    script_of,
)
from rlkit.scripts.translate import Translation, translate
from rlkit.settings import collected

Explain = Callable[[str, set[str]], str]  # an unknown name, the known ones -> what is wrong with it
_YAML = "tag:yaml.org,2002:"
_NOT_KEPT = ("resume",)  # a config starts a run


class Entry(NamedTuple):
    """A key of the file: its name with dots, its node, and where it stands, as `run.yaml:3`."""

    name: str
    node: Any
    place: str


class Expanded(NamedTuple):
    """A command line without `--config` and `--print-config`: its words, the place of each flag that came from a file,
    whether to print instead of running, and what to print above, of a file of another system."""

    words: list[str]
    places: dict[str, str]
    prints: bool
    notes: Sequence[str] = ()


def expand(argv: Sequence[str], kind: type, *, explain: Explain) -> Expanded:
    """The words of a command line with those of its `--config` file before them, for the commands that train.

    A flag of the command line replaces the file's. ValueError, with a line for each wrong key, for a file that cannot
    be read.
    """
    flags = list(list_flags(kind))
    if not has_config(flags):
        return Expanded(list(argv), {}, False)
    file, rest = _without_config(argv)
    prints = "--print-config" in rest
    rest = [word for word in rest if word != "--print-config"]
    if file is None:
        return Expanded(rest, {}, prints)
    typed = {*map(_bare, assigned(rest, flags)[0])}
    words: list[str] = []
    places, faults = dict[str, str](), dict[str, str]()
    entries = list(_entries(file, {flag.name for flag in flags if get_origin(flag.hint) is dict}))
    _refuse_other_script(entries, kind)
    if prints and (theirs := _translated(entries, flags, kind, explain)):
        remaining = {x: words for x, words in {**theirs.flags, **theirs.defaults}.items() if _bare(x) not in typed}
        notes = [f"{file} of {theirs.system}, as flags of rlkit", *theirs.notes]
        return Expanded([*theirs._replace(flags=remaining, defaults={}).words(), *rest], {}, True, notes)
    for entry in entries:
        try:
            if entry.name == "script":
                continue
            if entry.name in places:
                raise ValueError(f"is given twice: also in {places[entry.name]}")
            elif (parts := _words(entry, flags, explain=explain)) is not None:
                places[entry.name] = entry.place
                words += [] if _bare(entry.name) in typed else parts
        except ValueError as error:
            faults[f"{entry.place}: {entry.name}"] = str(error)
    if faults:
        lines = [f"{key} {fault}" for key, fault in faults.items()]
        if len(lines) > 1 and (theirs := _translated(entries, flags, kind, explain)):
            command = f"{shlex.join([*program(kind).split(), '--config', str(file), '--print-config'])} > run.yaml"
            lines.append(f"write the file of {theirs.system} with our flags: {command}")
        raise ValueError("\n  ".join(lines if len(lines) == 1 else [f"{len(faults)} keys are wrong", *lines]))
    return Expanded([*words, *rest], {x: place for x, place in places.items() if _bare(x) not in typed}, prints)


def _translated(entries: Sequence[Entry], flags: Sequence[Flag], kind: type, explain: Explain) -> Translation | None:
    """A file of another system in flags of the script, with a note for each key that has none; None for one of ours."""
    options = {entry.name: [x for x in _texts(entry.node) if x != "None"] for entry in entries if _is_plain(entry.node)}
    translation = translate(options, flags, script_of(kind))
    if translation is None:
        return None
    names = {flag.name for flag in flags}
    said = [f"{x.place}: {x.name} {explain(x.name, names)}" for x in entries if x.name not in {*names, "script"}]
    left = [line for line in said if " is --" not in line]
    unread = [f"{x.place}: {x.name} has values within values" for x in entries if not _is_plain(x.node)]
    return translation._replace(notes=[*translation.notes, *left, *unread])


def _is_plain(node: Any) -> bool:
    try:
        return bool(_texts(node)) or True
    except ValueError:
        return False


def program(kind: type) -> str:
    """The command of a script: rlkit grpo."""
    return sys.argv[0] if sys.argv[0].startswith("rlkit ") else f"rlkit {script_of(kind)}"


def _bare(name: str) -> str:
    """`chat_template` for `no_chat_template`, which is another flag for the same."""
    return name.removeprefix("no_")


def _without_config(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file of `--config`, and the other words."""
    file, rest, left = None, list[str](), list(argv)
    while left and left[0] != "--":
        word, equals, value = left.pop(0).partition("=")
        if word != "--config":
            rest.append(word + equals + value)
            continue
        if not equals and (not left or is_flag(left[0])):
            raise ValueError("--config needs a YAML file; --print-config prints one")
        if file is not None:
            raise ValueError("--config is given twice: give one file")
        file = Path(value if equals else left.pop(0)).expanduser()
    return file, rest + left


def _entries(file: Path, mappings: set[str]) -> Iterator[Entry]:
    """The keys of a file, with dots for nested ones; the value of a key in `mappings` may be a mapping."""
    import yaml

    try:
        root = yaml.compose(untrusted.read(file, "yaml_mib").decode(), Loader=yaml.SafeLoader)
    except untrusted.BadFile as error:
        raise ValueError(f"--config {error}") from None
    except OSError as error:
        raise ValueError(f"--config {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: it is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise ValueError(f"{file}: it is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", error)
        raise ValueError(f"{file}{f':{mark.line + 1}' if mark else ''}: this is no YAML: {problem}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{file}: it must hold `flag: value` lines, as --print-config prints them")
    yield from _flat(root, f"{file}", mappings, "", (), count()) if root is not None else ()


def _flat(
    root: Any, file: str, mappings: set[str], prefix: str, above: tuple[Any, ...], seen: Iterator[int]
) -> Iterator[Entry]:
    for key, node in root.value:
        if next(seen) >= untrusted.limit("yaml_keys"):  # an anchor can hold others, and each of them more
            raise untrusted.too_much(file, "it has too many keys", "yaml_keys")
        if key.id != "scalar":
            raise ValueError(f"{file}:{key.start_mark.line + 1}: a key must be the name of a flag")
        name = f"{prefix}{key.value}".replace("-", "_")
        if node.id == "mapping" and name not in mappings and node not in above:  # an anchor can hold itself
            yield from _flat(node, file, mappings, f"{name}.", (*above, node), seen)
        else:
            yield Entry(name, node, f"{file}:{key.start_mark.line + 1}")


def _refuse_other_script(entries: Sequence[Entry], kind: type) -> None:
    """A file of a run names its script. A script of one's own takes those of the others."""
    script = Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    for entry in entries:
        if entry.name == "script" and script.is_relative_to(Path(__file__).parent) and entry.node.value != script.name:
            raise ValueError(f"{entry.place}: this file is for {entry.node.value}, and this is {script.name}")


def _words(entry: Entry, flags: Sequence[Flag], *, explain: Explain) -> list[str] | None:
    """The words that give the flag its value; None where the value is the same as no flag."""
    flag = next((flag for flag in flags if flag.name == entry.name), None)
    if flag is None:
        raise ValueError(explain(entry.name, {flag.name for flag in flags}))
    name, node = f"--{entry.name.replace('_', '-')}", entry.node
    values = _texts(node)
    if node.tag == f"{_YAML}bool" and any(other.name == f"no_{flag.name}" for other in flags):  # chat_template
        return [] if _is_true(node) else [f"--no-{name[2:]}"]
    if flag.hint is bool:
        if node.tag != f"{_YAML}bool":
            raise ValueError(f"must be true or false, got {' '.join(values) or 'nothing'}")
        prefix, dot, last = name[2:].rpartition(".")
        return [name] if _is_true(node) else [f"--{prefix}{dot}no-{last}"] if flag.default is not False else []
    if node.tag == f"{_YAML}null":
        if flag.default is None or flag.default is MISSING:
            return None
        values = values if NoneType in members_of(flag.hint) else []
    if values == [] and flag.default in ((), {}):
        return None
    if (node.id == "mapping") != (get_origin(flag.hint) is dict) and values:
        raise ValueError("must be a mapping of names" if node.id != "mapping" else "must not be a mapping")
    if fault := complaint(flag.hint, values):
        raise ValueError(fault)
    if hidden := next((x for x in values if "***" in x and masked(x.replace("***", "x")) == x), ""):
        raise ValueError(f"has *** for a password, {hidden}: write the password, or give {name}")
    if node.id == "scalar":
        return [f"{name}={values[0]}"]
    if dashed := next(filter(is_flag, values), None):
        raise ValueError(f"has {dashed!r} in a list, which would be a flag: give it alone, as {name[2:]}: {dashed!r}")
    return [name, *values]


def _texts(node: Any) -> list[str]:
    """The texts of a scalar, of a list of scalars, or of a mapping of scalars: its names and values in turn."""
    if not node.tag.startswith(_YAML) or node.tag.startswith((f"{_YAML}python", f"{_YAML}binary")):
        raise ValueError(f"has the tag {node.tag}: give plain values")
    if node.id == "scalar":
        number = node.value.lstrip("+-").lower()
        of_yaml = node.tag == f"{_YAML}float" and number in (".inf", ".nan")
        return ["None" if node.tag == f"{_YAML}null" else node.value.replace(".", "") if of_yaml else node.value]
    inner = [x for pair in node.value for x in pair] if node.id == "mapping" else node.value
    if any(x.id != "scalar" for x in inner):
        raise ValueError("must be a value or a list of values")
    return [text for x in inner for text in _texts(x)]


def _is_true(node: Any) -> bool:
    return node.value.lower() in ("true", "yes", "on")


def where(message: str, places: Mapping[str, str]) -> str:
    """The places, in brackets, of the flags that a message names and that come from a file."""
    names = [name.replace("-", "_") for name in re.findall(r"--([\w.-]*\w)", message)]
    named = dict.fromkeys(places[name] for name in names if name in places)
    return f" ({', '.join(named)})" if named else ""


def render(settings: Any, *, missing: Collection[str] = (), explained: bool = False) -> str:
    """YAML that gives all flags the values in `settings`, an instance of a script's dataclass.

    `missing` flags are left empty, with REQUIRED beside them; `explained` adds each flag's help as a comment. What no
    text stands for (functions) is left out; passwords of URLs become ***.
    """
    kind, values = type(settings), dict(flags_of(settings))
    flags = [flag for flag in list_flags(settings) if flag.name in values and flag.name not in _NOT_KEPT]
    docs, lines = help_of(flags), list[str]()
    for title, group in grouped(kind, flags):
        lines += ["", f"# {title}"]
        for flag in group:
            if explained:
                text = re.sub(r"\bNone\b", "null", docs[flag.name])
                lines += ["", *textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="#   ")]
            value = "  # REQUIRED" if flag.name in missing else f" {_dumped(masked(values[flag.name]))}"
            lines.append(f"{flag.name}:{value}")
    return "\n".join(lines[1:]) + "\n"


def _dumped(value: Any, *, inner: bool = False) -> str:
    """The value in one line of YAML; a text inside a list or mapping has quotes."""
    import yaml

    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_dumped(str(x), inner=True)}: {_dumped(y, inner=True)}" for x, y in value.items()) + "}"
        )
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_dumped(x, inner=True) for x in value) + "]"
    plain = value if value is None or isinstance(value, bool | int | float) else str(value)
    quotes = '"' if isinstance(plain, str) and (inner or "\n" in plain) else None
    text = yaml.safe_dump(plain, default_style=quotes, allow_unicode=True, width=math.inf)
    return str(text).removesuffix("...\n").strip()


def printed(argv: Sequence[str], kind: type, notes: Sequence[str] = ()) -> str:
    """The text of `--print-config`: the flags of a command line, which may be incomplete, and the others' defaults,
    below the `notes`."""
    import tyro

    flags = list(list_flags(kind))
    typed = assigned(argv, flags)[0]
    missing = [flag.name for flag in flags if flag.default is MISSING and flag.name not in typed]
    filled = [f"--{name.replace('_', '-')}=REQUIRED" for name in missing]
    with collected():  # what is wrong is reported by the run
        text = render(tyro.cli(kind, args=[*argv, *filled]), missing=missing, explained=True).rstrip()
    return "\n".join([*(f"# {note}" for note in notes), *[""] * bool(notes), text])
