"""What a call of a reward function does not show: the names and texts that its source reads. Runs nothing."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any

from rlkit.rewards.failures import unwrapped

_HEADERS = ("<|", "assistant", "[/inst]", "<start_of_turn>")  # of chat templates, before an answer


def code_of(function: Any) -> Any:
    """The code of a function, of a partial's, or of the `__call__` of an object; None without one."""
    inner = unwrapped(function)
    call = inspect.getattr_static(type(inner), "__call__", None)
    return getattr(inner, "__code__", None) or getattr(call, "__code__", None)


def constants(code: Any) -> list[Any]:
    """The constants of a function's code and of the comprehensions and functions within; none without code."""
    values = [*getattr(code, "co_consts", ())]
    return values + [value for constant in values if isinstance(constant, CodeType) for value in constants(constant)]


def names_in(code: Any) -> list[str]:
    """The globals and attributes that a function's code and the code within it use; none without code."""
    return [name for part in (code, *constants(code)) for name in getattr(part, "co_names", ())]


def codes(function: Any) -> list[Any]:
    """The code of a function, and of the functions of its file that it names."""
    code, places = code_of(function), getattr(unwrapped(function), "__globals__", {})
    named = [getattr(places.get(name), "__code__", None) for name in names_in(code)]
    return [code, *(x for x in named if x is not None and x.co_filename == code.co_filename)]


def texts_in(function: Any) -> list[Any]:
    """The texts and regular expressions of a function and of the functions of its file that it names: constants and
    globals, no docstrings."""
    inner = unwrapped(function)
    places, values = getattr(inner, "__globals__", {}), list[Any]()
    for code in codes(function):
        values += [*constants(code), *map(places.get, names_in(code))]
    docs = [getattr(x, "__doc__", None) for x in (inner, *values)]
    return [x for x in values if isinstance(x, str | re.Pattern) and x not in docs]


def chat_header(function: Any) -> str:
    """A text of a chat template that a function, or a text or a function of its file that it names, looks for."""
    texts = [text for text in texts_in(function) if isinstance(text, str)]
    return next((text for text in texts if any(header in text.lower() for header in _HEADERS)), "")


def names_of_kwargs(function: Callable[..., Any]) -> set[str]:
    """The names that a function reads of its `**kwargs`: by `["NAME"]`, `get`, `pop` or `in`. What it calls is not
    followed."""
    if code_of(function) is None:
        return set()
    tree = _tree(function)
    names = {node.kwarg.arg for node in ast.walk(tree) if isinstance(node, ast.arguments) and node.kwarg}
    arguments = [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = {name for name in names - stored if arguments.count(name) == 1}
    read, added = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name(of), "get" | "pop"), [ast.Constant(str() as name), *_]) if of in names:
                read.add(name)
            case ast.Subscript(ast.Name(of), ast.Constant(str() as name)) if of in names:
                (read if isinstance(node.ctx, ast.Load) else added).add(name)
            case ast.Compare(ast.Constant(str() as name), [ast.In() | ast.NotIn()], [ast.Name(of)]) if of in names:
                read.add(name)
    return read - added


def constant_operand(function: Callable[..., Any]) -> str:
    """A text that stands alone as an operand of `and` or `or`, where it is always true; empty for none.

    The last one may be a value (`x or "none"`), but for the test of a condition.
    """
    tree = _tree(function)
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.While)]
    pairs = [node for node in ast.walk(tree) if isinstance(node, ast.BoolOp)]
    parts = [part for node in pairs for part in (node.values if node in tests else node.values[:-1])]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return next(iter(texts), "")


def uses(function: Callable[..., Any], name: str) -> bool:
    """Whether the function's own source reads the parameter or variable of this name."""
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(_tree(function)))


def _tree(function: Callable[..., Any]) -> ast.AST:
    """The syntax of a function; an empty module for what has no source."""
    try:
        return ast.parse(textwrap.dedent("".join(inspect.getsourcelines(code_of(function))[0])))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])
