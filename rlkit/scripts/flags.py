"""The flags of a script: its dataclass as a list, the check of a command line, and the text of `--help`.

tyro parses the words. What it prints depends on the terminal (colour, width, encoding), so errors and help are
written here, from the types, the defaults and the docstrings of the fields. Does not import torch.
"""

from __future__ import annotations

import ast
import logging
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from rlkit.settings import refuse_if, relations

_TEMPLATE = (
    "chat template for a model without one, or in place of its own: a Jinja file, a tokenizer_config.json or "
    "chat_template.json, or a folder with one of them"
)
_NO_TEMPLATE = "take prompts and responses as plain text (base models, strings)"


def _two_flags(chat_template: str | None = None, no_chat_template: bool = False) -> str | bool:
    refuse_if(chat_template is not None and no_chat_template, "give --chat-template FILE or --no-chat-template")
    return not no_chat_template if chat_template is None else chat_template


try:
    from tyro.conf import Positional, arg

    FLAT: Any = arg(name="")
    TEMPLATE: Any = arg(name="", constructor=_two_flags)
except ModuleNotFoundError:  # a machine without a command line can still call `main(Args(...))`
    FLAT = TEMPLATE = Positional = None
ChatTemplate = Annotated[str | bool, TEMPLATE]  # --chat-template FILE and --no-chat-template

MAIN = ("model", "data", "reward", "eval_data", "steps", "output", "config", "print_config")  # first in `--help`


_log = logging.getLogger("rlkit.scripts.flags")


class Flag(NamedTuple):
    """One flag: `group_size`, or `parallel.tp` of settings with a prefix; `default` is MISSING if it is required."""

    name: str
    hint: Any
    default: Any
    kind: type
    positional: str = ""
    aliases: tuple[str, ...] = ()
    text: str = ""  # its help; "": the string below the field

    def __str__(self) -> str:
        return self.positional or f"--{self.name.replace('_', '-')}"


CONFIG = (
    Flag("config", Path, None, object, text="YAML file with flags, which those of the command line replace"),
    Flag("print_config", bool, False, object, text="print the flags as YAML for --config, and exit"),
)


def script_of(kind: type) -> str:
    """The script whose flags the dataclass has: grpo."""
    return kind.__module__.rpartition(".")[2]


def has_config(flags: Sequence[Flag]) -> bool:
    """Whether a command takes --config and --print-config: those that train do."""
    return {"model", "output", "steps"} <= {flag.name for flag in flags}


def flags_of(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of every flag, e.g. ("group_size", 8), ("parallel.tp", 1); of a class, the value is the default."""
    hints = get_type_hints(settings if isinstance(settings, type) else type(settings), include_extras=True)
    for f in fields(settings):
        hint, notes = hints[f.name], getattr(hints[f.name], "__metadata__", ())
        value = getattr(settings, f.name, get_args(hint)[0] if notes else hint)
        if is_dataclass(value):
            flat = any(note is FLAT for note in notes)
            yield from flags_of(value, prefix if flat else f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value


def list_flags(settings: Any, prefix: str = "") -> Iterator[Flag]:
    """Every flag that a command line can give, of a dataclass or of the instance that holds the defaults."""
    kind = settings if isinstance(settings, type) else type(settings)
    hints = get_type_hints(kind, include_extras=True)
    for f in fields(settings):
        notes = getattr(hints[f.name], "__metadata__", ())
        hint = get_args(hints[f.name])[0] if notes else hints[f.name]
        default = _default(f) if settings is kind else getattr(settings, f.name)
        if is_dataclass(hint):
            inner = hint if default is MISSING else default
            yield from list_flags(inner, prefix if any(note is FLAT for note in notes) else f"{prefix}{f.name}.")
        elif any(note is TEMPLATE for note in notes):
            yield Flag(f"{prefix}{f.name}", Path, None, kind, text=_TEMPLATE)
            yield Flag(f"{prefix}no_{f.name}", bool, False, kind, text=_NO_TEMPLATE)
        elif not _in_python_only(hint):
            names = [getattr(note, "metavar", None) for note in notes]
            positional = next(filter(None, names), f.name.upper()) if any(n is Positional for n in notes) else ""
            aliases = tuple(alias for note in notes for alias in getattr(note, "aliases", None) or ())
            yield Flag(prefix + f.name, hint, default, kind, positional, aliases)


def _default(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _in_python_only(hint: Any) -> bool:
    """Whether no text stands for the values: functions, and mappings to anything."""
    return any(x is Any or get_origin(x) is Callable or x is Callable for x in (hint, *get_args(hint)))


def wrong_words(argv: Sequence[str], kind: type) -> dict[str, str]:
    """What is wrong with the values on a command line whose flags are all known: `{"--steps": "must be ..."}`."""
    flags = list(list_flags(kind))
    typed, loose, twice = assigned(argv, flags)
    faults: dict[str, str] = {}
    for flag in (flag for flag in flags if flag.name in twice and _count(flag.hint) is None):
        _log.warning("%s is given twice: the later values replace the others (several follow one flag)", flag)
    for flag in (flag for flag in flags if flag.positional):
        count = _count(flag.hint)
        typed[flag.name], loose = loose[:count], loose[count:] if count else []
    if loose:
        faults[" ".join(loose)] = "is no value of a flag"
    for flag in flags:
        words = typed.get(flag.name)
        if words is not None and (words or not flag.positional) and (fault := complaint(flag.hint, words)):
            faults[str(flag)] = fault
            if str(flag) == "--resume" and len(words) == 1 and words[0].lower() not in ("true", "false", "0", "1"):
                faults[str(flag)] = f"takes no value: write --resume --output {shlex.quote(words[0])}"
    missing = [flag for flag in flags if flag.default is MISSING and not typed.get(flag.name)]
    if missing and not faults:
        faults["missing"] = " and ".join(f"{flag}{_choices(flag.hint)}" for flag in missing)
    return faults


def assigned(argv: Sequence[str], flags: list[Flag]) -> tuple[dict[str, list[str]], list[str], set[str]]:
    """The words of each flag that is given, the later ones of one that is given twice; those of no flag; and which
    flags are given twice."""
    by_name = {name: flag for flag in flags for name in (flag.name, *flag.aliases)}
    places = any(flag.positional for flag in flags)
    words_of: dict[str, list[str]] = {}
    loose: list[str] = []
    twice: set[str] = set()
    left, last = list(argv), ""
    while left and left[0] != "--":
        word = left.pop(0)
        if not is_flag(word):
            (words_of[last] if last and not places else loose).append(word)  # more than the flag takes, or a positional
            continue
        key, equals, value = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        flag = by_name.get(key) or by_name.get(name) or by_name.get(_positive(name))
        if flag is None:
            last = ""
            continue
        last, words, count = flag.name, [value] if equals else [], 0 if flag.hint is bool else _count(flag.hint)
        while left and not is_flag(left[0]) and (count is None or len(words) < count):
            words.append(left.pop(0))
        twice |= {last} & {*words_of}
        words_of[last] = words
    return words_of, loose + left[1:], twice


def is_flag(word: str) -> bool:
    """Whether a word is a flag or `--`, and no value: `-1`, `-.5` and `-inf` are numbers."""
    name = word.partition("=")[0]
    number = name[:1] == "-" and name[1:].lower() in ("inf", "infinity", "nan")
    return word == "--" or (name[:1] == "-" and name.lstrip("-")[:1].isalpha() and not number)


def _positive(name: str) -> str:
    """`no_overlap` and `parallel.no_offload` without the `no_`."""
    prefix, dot, last = name.rpartition(".")
    return prefix + dot + last.removeprefix("no_")


def _count(hint: Any) -> int | None:
    """How many words a value takes; None: until the next flag."""
    sizes = {_size(x) for x in members_of(hint)}
    return sizes.pop() if len(sizes) == 1 and 0 not in sizes else None


def members_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, without what `Annotated` adds."""
    if get_origin(hint) is Annotated:
        return members_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(x for inner in get_args(hint) for x in members_of(inner))
    return (hint,)


def _size(hint: Any) -> int:
    """Words of a value of a type without alternatives; 0: any number."""
    (plain,) = members_of(hint)
    origin, inner = get_origin(plain), get_args(plain)
    if origin is tuple and inner[-1] is not ...:
        return len(inner)
    return 0 if origin in (tuple, dict, list, set, Mapping) else 1


def _fits(hint: Any, words: list[str]) -> bool:
    """Whether the words are a value of the type. A type that is not listed here is left to tyro."""
    if len(members_of(hint)) > 1:
        return any(_fits(x, words) for x in members_of(hint))
    (hint,) = members_of(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple and inner[-1] is ...:
        return all(_fits(inner[0], [word]) for word in words)
    if origin is tuple:
        return len(words) == len(inner) and all(_fits(x, [word]) for x, word in zip(inner, words, strict=True))
    if origin is dict:
        size = 1 + _size(inner[1])
        entries = [words[at : at + size] for at in range(0, len(words), size)]
        return all(len(entry) == size and _fits(inner[1], entry[1:]) for entry in entries)
    if hint is bool:
        return not words
    if len(words) != 1:
        return False
    if origin is Literal:
        return words[0] in map(str, inner)
    if hint is NoneType:
        return words == ["None"]
    if hint in (int, float):
        with suppress(ValueError):
            return hint(words[0]) is not None
        return False
    return True


def complaint(hint: Any, words: list[str]) -> str:
    """What is wrong with the words as a value of the type; "" if they are one."""
    expected = _expected(hint)
    pairs = expected == "pairs of a name and a value"
    if pairs and words and all("=" in word for word in words):
        return f"must be {expected} with blanks between them: {' '.join(word.replace('=', ' ', 1) for word in words)}"
    if _fits(hint, words):
        return ""
    if hint is bool:
        off = words[0].lower() in ("false", "0", "no", "off")
        return "takes no value: " + ("for off give its --no- form" if off else f"leave {' '.join(words)!r} out")
    if not words:
        return f"needs {expected}"
    if pairs and len(words) > 2:
        return f"must be {expected}, got {' '.join(words)}: several values are separated by commas, a,b,c"
    if expected in ("whole numbers", "numbers") and any("," in word for word in words):
        return f"must be {expected}, got {' '.join(words)}: several values are separated by blanks"
    if expected == "a value":
        return f"takes one value, got {len(words)}: {' '.join(words)}"
    return f"must be {expected}, got {words[0]!r}" if len(words) == 1 else f"must be {expected}, got {' '.join(words)}"


def _expected(hint: Any) -> str:
    """What a flag of the type takes, in words."""
    members = [x for x in members_of(hint) if x is not NoneType]
    if len(members) != len(members_of(hint)):
        return " or ".join([*dict.fromkeys(map(_expected, members)), "None"])
    if len(members) > 1:
        return " or ".join(dict.fromkeys(map(_expected, members)))
    origin, inner = get_origin(members[0]), get_args(members[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple and inner[-1] is ... and get_origin(inner[0]) is Literal:
        return f"some of {', '.join(map(str, get_args(inner[0])))}"
    if origin is tuple and inner[-1] is ...:
        return {int: "whole numbers", float: "numbers"}.get(members_of(inner[0])[0], "values")
    if origin is tuple:
        return "two numbers" if len(inner) == 2 else f"{len(inner)} numbers"
    if origin is dict:
        return (
            "pairs of a name and a value" if _size(inner[1]) == 1 else f"a name and {_expected(inner[1])} for each flag"
        )
    return {int: "a whole number", float: "a number"}.get(members[0], "a value")


def _choices(hint: Any) -> str:
    return f" ({_expected(hint)})" if get_origin(hint) is Literal else ""


def help_text(kind: type, description: str | None, *, program: str, width: int, words: Sequence[str] = ()) -> str:
    """The text of `--help`, in lines of at most `width` characters: usage, examples, and the flags in groups.

    With `words` only the flags that have one of them in their name or text; ValueError if there are none.
    """
    flags = list(list_flags(kind))
    flags += CONFIG if has_config(flags) else ()
    required = [_usage(flag) for flag in flags if flag.default is MISSING]
    command = [f"-- {_usage(flag)}" for flag in flags if flag.positional and flag.default is not MISSING]
    parts = [_wrapped(" ".join(["usage:", program, *required, "[FLAGS]", *command]), width, "           ")]
    for block in (description or "").strip().split("\n\n"):
        indented = block.startswith("    ")
        parts.append(block if indented else _wrapped(" ".join(block.split()), width))
    docs = help_of(flags)
    chosen = {flag.name for flag in flags if not words or _has(words, f"{flag} {_usage(flag)} {docs[flag.name]}")}
    if not chosen:
        raise ValueError(f"no flag has {' or '.join(words)} in its name or text; {program} --help lists all flags")
    parts = [] if words else parts
    for title, group in grouped(kind, flags):
        rows = [_row(flag, docs[flag.name], flags, width) for flag in group if flag.name in chosen]
        parts += ["\n".join([_wrapped(f"{title}:", width), *rows])] if rows else []
    return "\n\n".join(parts)


def _has(words: Sequence[str], text: str) -> bool:
    plain = text.lower().replace("_", "-")
    return any(word.lower().replace("_", "-") in plain for word in words)


def help_of(flags: Sequence[Flag]) -> dict[str, str]:
    """The help of each flag, by its name."""
    return {flag.name: flag.text or _documented(flag.kind).get(_field(flag), "") + _needs(flag) for flag in flags}


def _field(flag: Flag) -> str:
    return flag.name.rpartition(".")[2]


def _needs(flag: Flag) -> str:
    """The other flags without which this one has no effect, where neither its help nor their defaults have them."""
    text = _documented(flag.kind).get(_field(flag), "").replace("-", "_")
    terms = []
    for name, relation in relations(flag.kind):
        first = getattr(flag.kind, relation.names[0], None)
        holds = first in relation.values if relation.values else first
        said = all(f"`{other}`" in text or f"__{other}" in text for other in relation.names)
        short = relation.kind != "without" and not relation.of and len(relation.values) <= 3
        if name == _field(flag) and short and not (holds or said):
            terms.append(relation.terms)
    return f"; with {' and '.join(terms)}" * bool(terms)


def grouped(kind: type, flags: list[Flag]) -> Iterator[tuple[str, list[Flag]]]:
    """The main flags; then those of each class of settings, in their order, with those of the model and the ranks last.

    A flag of the script itself goes with the settings before it.
    """
    first = [flag for name in MAIN for flag in flags if flag.name == name and flags[0].name == "model"]
    if first:
        yield "Main flags", first
    groups: dict[type, list[Flag]] = {}
    last = kind
    for flag in flags:
        last = last if flag.kind in (kind, object) else flag.kind  # object: --config
        if flag not in first:
            groups.setdefault(last, []).append(flag)
    of_model = first[0].kind if first else None
    for group in sorted(groups, key=lambda group: (group is of_model, "." in groups[group][0].name)):
        text = (group.__doc__ or "Flags.").partition("\n")[0]
        yield ("Flags" if text.startswith(f"{group.__name__}(") else text.rstrip(".")), groups[group]


def _row(flag: Flag, text: str, flags: list[Flag], width: int) -> str:
    """A flag and what it means, side by side where they fit."""
    default = flag.default
    if default is MISSING:
        text += " (required)"
    elif default is True or (default not in (None, False, (), {}, "{}") and not isinstance(default, bool)):
        text += f" (default: {'on' if default is True else default})"
    elif isinstance(default, (int, float)) and not isinstance(default, bool):
        text += f" (default: {default})"  # 0 == False
    names = {other.name for other in flags}
    for name in names:
        text = text.replace(f"`{name}`", f"--{name.replace('_', '-')}")
    indent, head = 28 if width >= 72 else 6, f"  {_usage(flag)}"
    if len(head) > width:  # many choices
        head, text = f"  {flag} NAME", f"{_expected(flag.hint)}; {text.strip()}"
    body = _wrapped(" " * indent + text.strip(), width, " " * indent)
    return head.ljust(indent) + body[indent:] if len(head) < indent - 1 else f"{head}\n{body}"


def _usage(flag: Flag) -> str:
    """The flag and its values: `--steps INT`."""
    if flag.positional:
        return f"{flag.positional} ..." if _count(flag.hint) is None else flag.positional
    if flag.hint is bool:
        prefix, dot, last = str(flag)[2:].rpartition(".")
        return f"--{prefix}{dot}[no-]{last}" if flag.default is True else str(flag)
    kinds = [_metavar(x) for x in members_of(flag.hint) if x is not NoneType]
    return f"{', '.join([*flag.aliases, str(flag)])} {max(dict.fromkeys(kinds), key=len)}"


def _metavar(hint: Any) -> str:
    (hint,) = members_of(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(map(str, inner))
    if origin is tuple:
        return f"{_metavar(inner[0])} ..." if inner[-1] is ... else " ".join(map(_metavar, inner))
    if origin is dict:
        return f"NAME {_metavar(inner[1])} ..."
    return {int: "INT", float: "FLOAT", Path: "PATH"}.get(hint, "TEXT")


def _wrapped(text: str, width: int, indent: str = "") -> str:
    options: dict[str, Any] = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, max(width, 20), **options)


def _documented(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass; nothing where there is no source, as in a notebook."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for node in _classes(getattr(sys.modules.get(base.__module__), "__file__", None)).get(base.__name__, ()):
            for field, text in zip(node.body, node.body[1:]):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=said)):
                        docs[name] = " ".join(str(said).split())
    return docs


@cache
def _classes(file: str | None) -> dict[str, list[ast.ClassDef]]:
    """The top-level classes of a Python file, by name."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8")) if file else ast.Module([], [])
    except (OSError, ValueError, SyntaxError):
        return {}
    return {node.name: [node] for node in tree.body if isinstance(node, ast.ClassDef)}
