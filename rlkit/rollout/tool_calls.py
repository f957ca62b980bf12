"""Read the tool calls in a turn's text, in the forms that open models write them, and check their arguments."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call that could be read; whether there is such a tool is another matter."""

    name: str
    arguments: dict[str, Any]


class BadCall(NamedTuple):
    """The attempt of a call, and what the model is told about it."""

    error: str


def hermes_calls(text: str) -> list[Call | BadCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, among other text: Hermes, Qwen 2.5 and 3.

    What stands inside a reasoning block is not called. A block that is not closed, or holds no such JSON, is a BadCall.
    """
    found: list[Call | BadCall] = []
    for match in re.finditer(r"<tool_call>(.*?)(</tool_call>|\Z)", answer_of(text), re.DOTALL):
        found.append(_json_call(match[1]) if match[2] else BadCall("<tool_call> is not closed by </tool_call>"))
    return found


def json_calls(text: str) -> list[Call | BadCall]:
    """The whole turn is JSON: `{"name": ..., "parameters": {...}}`, several after `;` or in a list: Llama 3, Mistral.

    A leading `<|python_tag|>` or `[TOOL_CALLS]` says that a call follows. Without it, text that is no JSON object with
    a name is an answer, unless it starts like a call.
    """
    body = answer_of(text).strip()
    marked = re.match(r"<\|python_tag\|>|\[TOOL_CALLS\]", body)
    body = body[marked.end() :].strip() if marked else body
    attempt = marked or re.match(r'\[?\s*\{\s*"(name|type|function)"', body)
    if not attempt:
        return []
    values: list[Any] = []
    while body:
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except (ValueError, RecursionError) as error:
            return [BadCall(f"the call is not valid JSON: {error}")]
        values += value if isinstance(value, list) else [value]
        body = body[end:].lstrip(" \n;")
    return [_call(value) for value in values] or [BadCall("no call after the mark of one")]


def pythonic_calls(text: str) -> list[Call | BadCall]:
    """The whole turn is a list of Python calls with literal keywords, `[f(a=1), g(b="x")]`: Llama 3.2, Llama 4."""
    body = answer_of(text).strip().removeprefix("<|python_tag|>").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body):
        return []
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return [BadCall(f"the calls are not valid Python: {error}")]
    return [_python_call(node) for node in tree.elts] if isinstance(tree, ast.List) else []


def wrong_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments under a JSON schema (names, required ones, types, choices), or None."""
    properties = parameters.get("properties", {})
    missing = [name for name in parameters.get("required", []) if name not in arguments]
    if missing:
        return f"missing arguments {missing}; the arguments are {list(properties)}"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no argument {name!r}; the arguments are {list(properties)}"
        schema = properties[name]
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        if value is None and (schema.get("nullable") or "null" in types):
            continue
        if types and not any(_is_of_type(value, t) for t in types):
            return f"argument {name!r} must be {' or '.join(types)}, got {json.dumps(value, default=str)[:80]}"
        if "enum" in schema and value not in schema["enum"]:
            return f"argument {name!r} must be one of {schema['enum']}, got {json.dumps(value, default=str)[:80]}"
    return None


def answer_of(text: str) -> str:
    """What follows the reasoning; nothing where the reasoning is not closed."""
    head, closed, tail = text.partition("</think>")
    if closed:
        return tail
    return "" if head.lstrip().startswith("<think>") else head


def before_calls(text: str) -> str:
    """Reasoning and words before the first call; of a turn that is all calls, the reasoning."""
    answer = answer_of(text)
    words, *call = re.split(r"<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]", answer, maxsplit=1)
    return text[: len(text) - len(answer)] + (words if call else "")


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return name not in _TYPES
    return isinstance(value, _TYPES.get(name, (object,)))


def _json_call(payload: str) -> Call | BadCall:
    try:
        return _call(json.loads(payload))
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is not valid JSON: {error}")


def _call(value: Any) -> Call | BadCall:
    """A call from JSON, also in OpenAI's form, with `function` around it or arguments as a string."""
    inner = value.get("function") if isinstance(value, dict) else None
    value = inner if isinstance(inner, dict) else {**value, "name": inner} if isinstance(inner, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a call must be like {"name": "...", "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {value['name']} must be an object, with a name for each")
    return Call(value["name"], arguments)


def _python_call(node: ast.expr) -> Call | BadCall:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        return BadCall("a call must be like name(argument=value), every argument by its name")
    try:
        return Call(ast.unparse(node.func), {str(k.arg): ast.literal_eval(k.value) for k in node.keywords})
    except (ValueError, RecursionError):
        return BadCall("arguments must be literals: numbers, strings, lists, dicts, True, False, None")
