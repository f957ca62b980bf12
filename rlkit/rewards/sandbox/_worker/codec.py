"""Python values as JSON: built-in types exactly, some of the standard library and numpy, others by reference."""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from operator import methodcaller
from typing import Any

Refer = Callable[[Any], list[Any]]  # any other object -> a reference
Resolve = Callable[..., Any]  # a reference's parts -> the object, or something that stands for it

_LARGE = 1 << 10_000  # larger ones would hit the limit on converting integers to decimal text
_PLAIN = {type(None), bool, float, str}  # as JSON has them
_items = methodcaller("items")
# a type: (value -> parts, parts -> value), where the parts are values again
_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
    list: (list, list),
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    deque: (list, deque),
    dict: (_items, dict),
    OrderedDict: (_items, OrderedDict),
    defaultdict: (_items, dict),
    Counter: (_items, lambda items: Counter(dict(items))),
    int: (lambda x: [hex(x)], lambda parts: int(parts[0], 16)),  # a large one
    range: (lambda x: [x.start, x.stop, x.step], lambda parts: range(*parts)),
    complex: (lambda x: [x.real, x.imag], lambda parts: complex(*parts)),
    bytes: (lambda x: [x.hex()], lambda parts: bytes.fromhex(parts[0])),
    bytearray: (lambda x: [x.hex()], lambda parts: bytearray.fromhex(parts[0])),
    Fraction: (lambda x: [x.numerator, x.denominator], lambda parts: Fraction(*parts)),
    Decimal: (lambda x: [str(x)], lambda parts: Decimal(*parts)),
    date: (lambda x: [x.isoformat()], lambda parts: date.fromisoformat(*parts)),
    datetime: (lambda x: [x.isoformat()], lambda parts: datetime.fromisoformat(*parts)),
    timedelta: (lambda x: [x.days, x.seconds, x.microseconds], lambda parts: timedelta(*parts)),
}
_NUMBERS_AND_TEXT = "biufcSU"  # kinds of numpy's types that hold no objects
_BUILDERS = {kind.__name__: build for kind, (_, build) in _KINDS.items()}
COPIED = frozenset(_KINDS)
"""The types whose values are copied, in addition to JSON's and numpy's."""
# modules whose functions and classes are the same on both sides and safe to name
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
    if kind in _PLAIN or (kind is int and -_LARGE < value < _LARGE):
        return value
    if kind in _KINDS:
        parts = list(_KINDS[kind][0](value))
        return [kind.__name__, parts if set(map(type, parts)) <= _PLAIN else [encode(x, refer) for x in parts]]
    numpy: Any = sys.modules.get("numpy")  # a package that the caller named
    if numpy and issubclass(kind, numpy.ndarray | numpy.generic) and value.dtype.kind in _NUMBERS_AND_TEXT:
        return ["numpy", value.dtype.str, value.shape, value.tobytes().hex(), issubclass(kind, numpy.generic)]
    if _is_shared(value):
        return ["shared", value.__module__, value.__qualname__]
    return ["ref", *refer(value)]


def decode(data: Any, resolve: Resolve) -> Any:
    """The inverse of `encode`."""
    if not isinstance(data, list):
        return data
    tag, *rest = data
    if tag == "ref":
        return resolve(*rest)
    if tag in _BUILDERS:
        return _BUILDERS[tag]([decode(x, resolve) if isinstance(x, list) else x for x in rest[0]])
    if tag == "numpy":
        return _array(*rest)
    if tag == "shared":
        value = getattr(sys.modules.get(rest[0]), rest[1], None)
        if _is_shared(value):
            return value
    raise ValueError(f"cannot decode {tag!r}")


def _array(dtype: Any, shape: Any, data: str, is_scalar: bool) -> Any:
    """An array in memory of its own: the other side only chooses its numbers."""
    numpy = importlib.import_module("numpy")
    if not isinstance(dtype, str) or (kind := numpy.dtype(dtype)).kind not in _NUMBERS_AND_TEXT:
        raise ValueError(f"cannot decode an array of {dtype!r}")
    content = bytearray.fromhex(data)
    sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not sizes or len(content) != math.prod(shape) * kind.itemsize or (is_scalar and shape):
        raise ValueError(f"cannot decode an array of shape {shape!r} from {len(content)} bytes")
    if kind.kind == "b":  # a bool that is neither 0 nor 1 compares wrongly
        content = bytearray(map(bool, content))
    array = numpy.frombuffer(content, kind).reshape(shape) if content else numpy.zeros(shape, kind)
    return array[()] if is_scalar else array


def _is_shared(value: Any) -> bool:
    """Whether this is a function or class of a shared module, under its own name there."""
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module not in _SHARED or not isinstance(name, str) or name in _NOT_SHARED:
        return False
    return getattr(sys.modules.get(module), name, None) is value


def base_value(value: Any) -> Any:
    """An instance of a subclass of a built-in type, converted to that type; None for other objects."""
    kinds: tuple[Callable[[Any], Any], ...] = (int, float, str, bytes, tuple, list, dict, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):  # type: ignore[arg-type]
            return kind(value)
    return None


def mutable(value: Any) -> bool:
    """Whether the content of a copied value can change."""
    return type(value) in (list, dict, set, bytearray, deque)


def replace_content(old: Any, new: Any) -> None:
    """Apply the changes that the other side made to its copy of a value."""
    if new is None or not mutable(old):
        return
    with suppress(ValueError):  # of arrays inside, whose comparison is no truth value
        if old == new:
            return
    old.clear()
    (old.update if isinstance(old, dict | set) else old.extend)(new)
