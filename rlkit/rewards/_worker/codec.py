"""Python values as JSON: built-in types exactly, some of the standard library, everything else by reference."""

from __future__ import annotations

import importlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

Refer = Callable[[Any], list[Any]]  # any other object -> a reference
Resolve = Callable[..., Any]  # a reference's parts -> the object, or something that stands for it

_LARGE = 1 << 10_000  # larger ones would hit the limit on converting integers to decimal text
_PLAIN = {type(None), bool, float, str}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "range": lambda a: range(*a),
    "complex": lambda a: complex(*a), "Fraction": lambda a: Fraction(*a), "Decimal": lambda a: Decimal(*a),
    "date": lambda a: date(*a), "datetime": lambda a: datetime(*a), "timedelta": lambda a: timedelta(*a),
}  # fmt: skip
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "defaultdict": dict}
_PARTS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    list: ("list", list),
    tuple: ("tuple", list),
    set: ("set", list),
    frozenset: ("frozenset", list),
    deque: ("deque", list),
    range: ("range", lambda x: [x.start, x.stop, x.step]),
    complex: ("complex", lambda x: [x.real, x.imag]),
    Fraction: ("Fraction", lambda x: [x.numerator, x.denominator]),
    Decimal: ("Decimal", lambda x: [str(x)]),
    date: ("date", lambda x: [x.year, x.month, x.day]),
    timedelta: ("timedelta", lambda x: [x.days, x.seconds, x.microseconds]),
}
# modules whose functions and classes mean the same on both sides, and harm neither
_SHARED = frozenset([
    "abc", "bisect", "builtins", "cmath", "collections", "collections.abc", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "operator",
    "queue", "random", "re", "statistics", "string", "time", "typing", "_bisect", "_collections", "_datetime",
    "_decimal", "_functools", "_heapq", "_operator", "_random",
])  # fmt: skip
_NOT_SHARED = frozenset([
    "eval", "exec", "compile", "open", "input", "print", "__import__", "breakpoint", "getattr", "setattr",
    "delattr", "globals", "locals", "vars", "dir", "id", "memoryview", "super", "object", "type", "exit",
    "quit", "help",
])  # fmt: skip


def encode(value: Any, refer: Refer) -> Any:
    """JSON for a value."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -_LARGE < value < _LARGE else ["int", hex(value)]
    if kind in _PARTS:
        name, parts = _PARTS[kind]
        found = parts(value)
        return [name, found if set(map(type, found)) <= _PLAIN else [encode(x, refer) for x in found]]
    if kind is datetime and value.tzinfo is None:
        return ["datetime", [*value.timetuple()[:6], value.microsecond]]
    if kind in (dict, OrderedDict, defaultdict, Counter):
        return [kind.__name__, [[encode(k, refer), encode(v, refer)] for k, v in value.items()]]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind is types.ModuleType and value.__name__ in _SHARED:
        return ["module", value.__name__]
    if _is_shared(value):
        return ["shared", value.__module__, value.__qualname__]
    return ["ref", *refer(value)]


def decode(data: Any, resolve: Resolve) -> Any:
    """The value again."""
    if not isinstance(data, list):
        return data
    tag, *rest = data
    if tag == "ref":
        return resolve(*rest)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([decode(x, resolve) if isinstance(x, list) else x for x in rest[0]])
    if tag == "Counter":
        return Counter({decode(k, resolve): decode(v, resolve) for k, v in rest[0]})
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]([(decode(k, resolve), decode(v, resolve)) for k, v in rest[0]])
    if tag == "int":
        return int(rest[0], 16)
    if tag in ("bytes", "bytearray"):
        return (bytes if tag == "bytes" else bytearray).fromhex(rest[0])
    if tag == "module" and rest[0] in _SHARED:
        return importlib.import_module(rest[0])
    if tag == "shared":
        found = getattr(sys.modules.get(rest[0]), rest[1], None)
        if _is_shared(found):
            return found
    raise ValueError(f"cannot decode {tag!r}")


def _is_shared(value: Any) -> bool:
    """A function or class of one of the modules, under its own name there."""
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module not in _SHARED or not isinstance(name, str) or name in _NOT_SHARED:
        return False
    return getattr(sys.modules.get(module), name, None) is value


def base_value(value: Any) -> Any:
    """What an object of a subclass of a built-in type is as that type; None for other objects."""
    kinds: tuple[Callable[[Any], Any], ...] = (int, float, str, bytes, tuple, list, dict, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):  # type: ignore[arg-type]
            return kind(value)
    return None


def mutable(value: Any) -> bool:
    """Whether a copied value's content can change."""
    return type(value) in (list, dict, set, bytearray, deque)


def replace_content(old: Any, new: Any) -> None:
    """Make a copied value what it has become on the other side."""
    if new is None or not mutable(old) or old == new:
        return
    if isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    else:
        old[:] = new
