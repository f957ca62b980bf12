"""What the source of a reward function says of the form of completions that it reads. Runs nothing."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
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


def chat_header(function: Any) -> str:
    """A text of a chat template that a function, or a text or a function of its file that it names, looks for."""
    inner, code = unwrapped(function), code_of(function)
    doc, places = getattr(inner, "__doc__", None), getattr(inner, "__globals__", {})
    named = [places.get(name) for name in names_in(code)]
    helpers = [(x, getattr(x, "__code__", None)) for x in named]
    values = [*constants(code), *named]
    for helper, of in helpers:
        if getattr(of, "co_filename", "") == code.co_filename:
            values += [text for text in constants(of) if text != helper.__doc__]
    texts = [text for text in values if isinstance(text, str) and text != doc]
    return next((text for text in texts if any(header in text.lower() for header in _HEADERS)), "")


def alarm_in(function: Callable[..., Any]) -> str:
    """The call of a plain function, or of a function or class of its file that it names, which works in the main thread
    only: an alarm or a handler of `signal`, or math-verify's with a timeout. Empty where a process may be what runs it.
    """
    code = code_of(function)
    if code is None or inspect.iscoroutinefunction(unwrapped(function)):
        return ""
    places = getattr(unwrapped(function), "__globals__", {})
    left, seen, names, keywords = [code], set[CodeType](), set[str](), set[str]()
    while left:
        if (part := left.pop()) in seen:
            continue
        seen.add(part)
        names.update(names_in(part))
        keywords.update(word for value in constants(part) if isinstance(value, tuple) for word in value)
        for named in [places[name] for name in names_in(part) if name in places]:
            names.update((str(getattr(named, "__module__", None) or getattr(named, "__name__", "")).split(".")[0],))
            methods = vars(named).values() if inspect.isclass(named) else [unwrapped(named)]
            inner = [method.__code__ for method in methods if hasattr(method, "__code__")]
            left += [of for of in inner if of.co_filename == code.co_filename]
    if names & _PROCESSES:
        return ""
    for name in ("alarm", "setitimer"):
        if names >= {"signal", name}:
            return f"signal.{name}"
    return "math_verify with a timeout" if "math_verify" in names and not keywords & _NO_TIMEOUT else ""


_PROCESSES = {"multiprocessing", "Process", "Pool", "ProcessPool", "ProcessPoolExecutor", "subprocess"}
_NO_TIMEOUT = {"parsing_timeout", "timeout_seconds"}


def names_of_kwargs(function: Callable[..., Any]) -> set[str]:
    """The names that a function reads of its `**kwargs`: by `["NAME"]`, `get`, `pop` or `in`. What it calls is not
    followed."""
    code = code_of(function)
    if code is None:
        return set()
    tree, _ = _tree(function)
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


def uses(function: Callable[..., Any], name: str) -> bool:
    """Whether the function's own source reads the parameter or variable of this name."""
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(_tree(function)[0]))


def line_of_items(function: Callable[..., Any]) -> int | None:
    """The first line that takes one item of a completion or prompt, `c[0]` or `c[-1]`: a message, or a character, which
    is no error. (`c[0]["content"]` of a text is one.)"""
    tree, first = _tree(function)
    are = [_items_of(tree, name) for name in ("completions", "prompts")]
    if _asks_for_types(tree):
        return None
    of_messages = [id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=base, slice=ast.Constant(int()) | ast.UnaryOp()) if any(is_(base) for is_ in are):
                if id(node) not in of_messages:
                    return first + node.lineno - 1
    return None


def _tree(function: Callable[..., Any]) -> tuple[ast.AST, int]:
    """The syntax of a function and its first line; an empty module for what has no source."""
    try:
        lines, first = inspect.getsourcelines(code_of(function))
        return ast.parse(textwrap.dedent("".join(lines))), first
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], []), 1


def _asks_for_types(tree: ast.AST) -> bool:
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(called & {"isinstance", "type", "hasattr"}) or any(isinstance(node, ast.Try) for node in ast.walk(tree))


def _loops(tree: ast.AST) -> Iterator[ast.For | ast.comprehension]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension))


def _items_of(tree: ast.AST, batch: str = "completions") -> Callable[[ast.expr], bool]:
    """Whether an expression is one completion: a name that loops over `completions` alone give, or `completions[i]`."""
    lists, rebound = {batch}, set[str]()
    mine = [*_loops(tree)]
    ones = set[str]().union(*(_elements(node.target, node.iter, lists) for node in mine))
    for node in mine:
        there = {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
        rebound |= there - _elements(node.target, node.iter, lists)
    looped = {id(name) for node in mine for name in ast.walk(node.target)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in looped]
    rebound |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    rebound |= {argument.arg for node in ast.walk(tree) if isinstance(node, ast.Lambda) for argument in node.args.args}

    def is_one(node: ast.expr) -> bool:
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
            return batch not in rebound and _is_list(node.value, lists)
        return isinstance(node, ast.Name) and node.id in ones - rebound

    return is_one if batch not in rebound else lambda _: False


def _is_list(node: ast.expr, lists: set[str]) -> bool:
    """Whether an expression is a known list: by its name, or `kwargs["NAME"]`."""
    match node:
        case ast.Name(of):
            return of in lists
        case ast.Subscript(value=ast.Name(), slice=ast.Constant(of)):
            return of in lists
    return False


def _elements(target: ast.expr, source: ast.expr, lists: set[str]) -> set[str]:
    """The names that a loop gives to elements of what is known: directly, or by zip or enumerate."""
    match target, source:
        case ast.Name(name), _ if _is_list(source, lists):
            return {name}
        case ast.Tuple([_, inner]), ast.Call(ast.Name("enumerate"), [of]):
            return _elements(inner, of, lists)
        case ast.Tuple(inners), ast.Call(ast.Name("zip"), sources):
            return {name for inner, of in zip(inners, sources) for name in _elements(inner, of, lists)}
    return set()
