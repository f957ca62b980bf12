"""Messages, tools and template arguments of a row, from the encodings that files have them in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from rlkit._util.untrusted import BadFile, loads
from rlkit.data.columns import is_empty, joined_parts, truth, without_nulls
from rlkit.data.load import FromText, Row, as_messages, column_error, turns_of_text
from rlkit.data.schema import OF_MESSAGES, PROMPTS

CALLS = ("function_call", "tool_call")  # roles of LLaMA-Factory and ms-swift: the turn's text is a call
ARGUMENTS = ("arguments", "args", "parameters", "input")  # keys of OpenAI, LangChain, Llama 3, Anthropic
_SCHEMAS = ("input_schema", "inputSchema")  # for `parameters`: Anthropic, MCP
_OPEN = ("patternProperties", "anyOf", "oneOf", "allOf", "$ref")  # a schema with more arguments than `properties`
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip
_NOT_RESULTS = ("assistant", "user", "system", "developer")


class Converted(dict[str, Any]):
    """A row in rlkit's columns, and how it stands in the file.

    own: the row as it is there.
    source: the `Form` of another system that it is in there; None if the columns are rlkit's.
    """

    def __init__(self, own: Row, columns: Row, source: Any = None) -> None:
        super().__init__({**own, **columns})
        self.own, self.source = getattr(own, "own", own), getattr(own, "source", source)


def decoded(row: Row) -> Row:
    """The columns that hold one message, turns of `from`, or the JSON text of messages, as lists of messages.

    An answer that is JSON text is read if all its objects are messages: a role that is known, and content.
    """
    columns = {name: row[name] for name in OF_MESSAGES if isinstance(row.get(name), Mapping | str | list)}
    new = {}
    for name, value in columns.items():
        if isinstance(value, str) and name in PROMPTS:
            new[name] = turns_of_text(value, any_role=name == "messages")
        elif isinstance(value, str):
            new[name] = _answer(value)
        else:
            new[name] = messages_of(value)
    return {name: value for name, value in new.items() if value is not row[name]}


def _answer(text: str) -> Any:
    """Messages from the JSON text of nothing else; else the text, also where it is Python's."""
    with suppress(ValueError):
        messages = turns_of_text(text)
        if isinstance(messages, list) and all("content" in turn for turn in messages):
            return messages
    return text


def messages_of(value: Any) -> Any:
    """Messages from a list of turns, one message, or their JSON text (a CSV file has no lists); else the value."""
    value = as_messages(turns_of_text(value, any_role=True))
    return as_messages([value]) if isinstance(value, Mapping) and {"role", "from"} & {*value} else value


def turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the nulls of Arrow tables, and with tool calls as chat templates expect them.

    A template expects `tool_calls` with the arguments as an object. OpenAI has them as JSON text, its older files one
    `function_call`, and LLaMA-Factory and ms-swift a turn of its own whose text is the call; several in a row are one
    message. Nulls in JSON text stay.
    """
    result: list[dict[str, Any]] = []
    role = None
    for message in messages:
        new = {key: without_nulls(value) for key, value in message.items() if value is not None}
        last, role = role, new.get("role")
        if role in CALLS:
            calls = json_of(new.get("content"))
            calls = calls if isinstance(calls, list) else [calls]
            if not all(isinstance(call, Mapping) and "name" in call for call in calls):
                raise ValueError(
                    f"a turn of {role!r} must be the JSON text of a call like "
                    f'{{"name": "weather", "arguments": {{"city": "Rome"}}}}, got {str(new.get("content"))[:80]!r}'
                )
            more = {key: value for key, value in new.items() if key not in ("role", "content")}
            if last in CALLS and not more:
                result[-1]["tool_calls"] += map(_call, calls)
                continue
            new = {"role": "assistant", "content": "", "tool_calls": calls, **more}
        elif role == "assistant":
            new = {**new, "content": new.get("content")}
        older = [new["function_call"]] if new.get("function_call") else []
        calls = json_of(new.get("tool_calls")) or older
        if calls and isinstance(calls, list):
            new = {key: value for key, value in new.items() if key != "function_call"}
            new["tool_calls"] = [*map(_call, calls)]
            both = [[call.get("function") for call in mappings([*map(_call, of)])] for of in (calls, older)]
            if older and both[0] != both[1]:
                raise ValueError("a message has other calls in 'tool_calls' than in 'function_call': drop one of them")
        result.append(new)
    return result


def json_of(value: Any) -> Any:
    """The value of a JSON text; anything else as it is."""
    if isinstance(value, str):
        with suppress(ValueError):
            return loads(value, object_hook=FromText)
    return value


def system_of(row: Row, place: str) -> str | None:
    """The system message in the row's own column `system` or `system_prompt`; ValueError where they differ."""
    texts = {name: row[name] for name in ("system", "system_prompt") if not is_empty(row.get(name))}
    for name, value in texts.items():
        parts = value if isinstance(value, list) and len(mappings(value)) == len(value) else []
        texts[name] = joined_parts(without_nulls(parts), f"{place}: {name}") if parts else value
    for name, value in texts.items():
        if not isinstance(value, str):
            fault = f"column {name!r} is the system message and must be a string, got {repr(value)[:80]}"
            raise column_error(place, fault, row, f"; rename a column of other content with --rename {name} OTHER")
    if len({*texts.values()}) > 1:
        fix = "; rename the one that is not meant, e.g. --rename system_prompt OTHER"
        raise column_error(place, "columns 'system' and 'system_prompt' are two system messages", row, fix)
    return next(iter(texts.values()), None)


def common_prompt(row: Row) -> Row:
    """The common beginning of two texts `chosen` and `rejected` as `prompt`, up to white space; {} without one.

    Differs: TRL's `extract_prompt` cuts inside a word if the first words that differ have the same first letters.
    """
    texts: list[Any] = [row.get(name) for name in ("chosen", "rejected")]
    if "prompt" in row or "messages" in row or not all(isinstance(text, str) for text in texts):
        return {}
    match = re.match(r"(.*\S)\s", commonprefix(texts), re.DOTALL)  # noqa: RUF071, texts and not paths
    at = match.end(1) if match else 0
    return {"prompt": texts[0][:at], "chosen": texts[0][at:], "rejected": texts[1][at:]} if at else {}


def row_tools(row: Row, place: str) -> Sequence[Any] | None:
    """The JSON schemas in the column `tools`, a list or its JSON text; None where there are none.

    OpenAI's older column `functions` holds the same without `{"type": "function"}` around each.
    """
    name = "tools" if not is_empty(row.get("tools")) else "functions"
    older = {} if name == "functions" or is_empty(row.get("functions")) else {**row, "tools": None}
    if older and row_tools(older, place) != row_tools({**row, "functions": None}, place):
        fix = "; rename the one that is not meant, e.g. --rename functions OTHER"
        raise column_error(place, "columns 'tools' and 'functions' hold different tools", row, fix)
    tools = json_of(row.get(name) or [])
    if isinstance(tools, list | tuple) and all(isinstance(tool, str) for tool in tools):
        tools = [*map(json_of, tools)]
    if None in [
        value for tool in mappings(tools) for value in _properties_of([tool], name_of(tool)).values()
    ]:  # a table filled the text
        tools = json.loads(json.dumps(tools))
    if tools and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        fault = f"column {name!r} must be a list of JSON schemas or its JSON text, got {repr(row[name])[:80]}"
        raise column_error(place, fault, row, f"; rename a column of other content with --rename {name} OTHER")
    schemas = [*map(_with_parameters, without_nulls(tools))] or None
    return [{"type": "function", "function": tool} for tool in schemas] if schemas and name == "functions" else schemas


def _with_parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with its schema as `parameters`, in OpenAI's form, where it has another name."""
    function = tool.get("function", tool)
    key = next((key for key in _SCHEMAS if isinstance(function, Mapping) and key in function), None)
    if key is None or "parameters" in function:
        return tool
    renamed = {"parameters" if name == key else name: value for name, value in function.items() if name != "type"}
    return {**(tool if "function" in tool else {}), "type": "function", "function": renamed}


def name_of(tool: Any) -> str | None:
    """The name in a tool's schema, or of a function; None if it has none."""
    if not isinstance(tool, Mapping):
        return getattr(tool, "__name__", None)
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def parameters_of(tools: Sequence[Any], name: str) -> Mapping[str, Any]:
    """The JSON schema of the arguments of a tool; empty where there is none."""
    tool = next((tool for tool in tools if isinstance(tool, Mapping) and name_of(tool) == name), {})
    schema = tool.get("function", tool).get("parameters")
    return schema if isinstance(schema, Mapping) else {}


def _properties_of(tools: Sequence[Any], name: str | None) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by their names; empty where there are none."""
    properties = parameters_of(tools, name or "").get("properties")
    return properties if isinstance(properties, Mapping) else {}


def null_arguments(row: Row) -> Iterator[str]:
    """The arguments of calls in JSON text, as "name(key)", that are null and may not be by the schemas of the tools."""
    for column in OF_MESSAGES:
        said = mappings(row.get(column))
        if not any(message.get("role") in CALLS or {"tool_calls", "function_call"} & {*message} for message in said):
            continue
        for call in (call for message in turns(said) for call in mappings(message.get("tool_calls"))):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if isinstance(arguments, FromText) and None in arguments.values():
                properties = _properties_of(row_tools(row, "the row") or (), name)
                for key in (key for key, value in arguments.items() if value is None):
                    if not properties or "null" not in json.dumps(properties.get(key, "null")):
                        yield f"{name}({key})"


def misfits(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """What of the calls does not fit the tools and the results, as (name, what it is).

    A result without the id of a call answers all calls before it, and so may a user's message.
    """
    names, last, waiting = [*map(name_of, tools)], 0, list[tuple[int, Any, str]]()
    for number, message in enumerate([*messages, {"role": "user"}]):
        role, calls, call_id = message["role"], message.get("tool_calls") or (), message.get("tool_call_id")
        last = number if role == "assistant" else last
        if role == "user" or (role == "assistant" and not calls):
            for turn, _, name in waiting:
                if turn < last:
                    yield name, "as the tool of a call that no result answers before the assistant goes on"
            waiting = []
        elif role not in _NOT_RESULTS:
            waiting = [call for call in waiting if call_id in [other[1] for other in waiting] and call[1] != call_id]
        for call in calls:
            name, arguments = call["function"]["name"], call["function"].get("arguments")
            waiting.append((number, call.get("id"), name))
            if names and None not in names and name not in names:
                yield name, "as the tool of a call, and not among the tools that the model is given"
            for key, fault in _misfit(arguments if isinstance(arguments, Mapping) else {}, parameters_of(tools, name)):
                yield f"{name}({key})", f"in a call, {fault}"


def _misfit(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The arguments of a call that do not fit a schema, and what is wrong. An empty schema takes all of them."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):  # Salesforce's xLAM gives them without an object around
        properties = schema if all(isinstance(value, Mapping) for value in schema.values()) else {}
    if schema and schema.get("additionalProperties", False) is False and not {*_OPEN} & {*schema}:
        for key in (key for key in arguments if key not in properties):
            yield key, "an argument that the schema of the tool does not have"
    for key in required if isinstance(required, list | tuple) else ():
        if key not in arguments:
            yield key, "which lacks this argument that the schema of the tool requires"
    for key, value in arguments.items():
        part = properties.get(key)
        types = part.get("type") if isinstance(part, Mapping) else None
        types = [types] if isinstance(types, str) else types or []
        value = int(value) if isinstance(value, float) and value.is_integer() else value  # as tables have them
        if value is not None and types and not any(is_of_type(value, str(kind)) for kind in types):
            yield key, "an argument of another type than the schema of the tool has"
        elif isinstance(part, Mapping) and isinstance(part.get("enum"), list) and value not in [*part["enum"], None]:
            yield key, "an argument that is none of the choices in the schema of the tool"


def is_of_type(value: Any, name: str) -> bool:
    """Whether a value is of a type of JSON schemas; True for a type that they do not have."""
    if isinstance(value, bool) and name != "boolean":
        return name not in _TYPES
    return isinstance(value, _TYPES.get(name, (object,)))


def untooled(row: Row) -> Iterator[str]:
    """The functions that a row calls beside an empty list of tools, and that no text before them names."""
    given = [json_of(row[name]) for name in ("tools", "functions") if row.get(name) is not None]
    said = mappings(row.get("messages") or row.get("prompt")) if [] in given and not any(given) else []
    asked = [str(message.get("content")) for message in said if message.get("role") != "assistant"]
    for message in turns(said):
        for call in mappings(message.get("tool_calls")):
            name = str(name_of(call))
            if not any(name in text for text in asked):
                yield name


def disordered(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The id of the first result that stands after that of a later call of the same message."""
    ids, at = [], 0
    for message in messages:
        if message["role"] == "assistant":
            ids, at = [call.get("id") for call in message.get("tool_calls") or ()], 0
        elif (call_id := message.get("tool_call_id")) is not None and call_id in ids:
            if ids.index(call_id) < at:
                return str(call_id)
            at = ids.index(call_id)
    return None


def row_template_args(row: Row, place: str) -> Row:
    """The row's own arguments of the chat template: its `chat_template_kwargs` (TRL) and `enable_thinking` (verl).

    `chat_template_kwargs` is an object or its JSON text and wins over `enable_thinking`, which is true or false. Null
    is absent, also inside the object: Arrow tables fill absent keys with null.
    """
    kwargs: Any = row.get("chat_template_kwargs")
    thinking = row.get("enable_thinking")
    if isinstance(kwargs, str):
        with suppress(ValueError):
            kwargs = loads(kwargs or "{}")
    thinking = thinking if truth(thinking) is None else truth(thinking)
    for name, value, kind, must in (
        ("chat_template_kwargs", kwargs, Mapping, "an object like {'enable_thinking': False}"),
        ("enable_thinking", thinking, bool, "true or false"),
    ):
        if value is not None and not isinstance(value, kind):
            fault = f"column {name!r} must be {must}, got {repr(value)[:80]}"
            raise column_error(place, fault, row, "; rename a column of other content with --rename")
    args = {"enable_thinking": thinking, **(kwargs or {})}
    return {name: value for name, value in args.items() if value is not None}


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The objects in a list; of anything else, none."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def object_of(arguments: Any) -> Mapping[str, Any] | None:
    """The object that the arguments of a call are, or that is in their JSON text; None for anything else.

    Text may be encoded twice. Null and an empty text are no arguments. ValueError for text that is nested too deep.
    """
    try:
        while isinstance(arguments, str):
            arguments = loads(arguments, object_hook=FromText) if arguments.strip() else {}
    except BadFile:
        raise ValueError("the arguments of a call are nested too deep") from None
    except ValueError:
        return None
    return {} if arguments is None else arguments if isinstance(arguments, Mapping) else None


def _call(call: Any) -> Any:
    """A tool call in OpenAI's form, with its arguments as an object."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function", call)
    if not isinstance(function, Mapping) or "name" not in function:
        return call
    written = [(key, part[key]) for part in (function, call) for key in ARGUMENTS if part.get(key) is not None]
    read = [(key, object_of(value)) for key, value in written]
    for (key, arguments), (_, value) in zip(read, written, strict=True):
        if arguments is None:
            fault = f"the {key!r} of a call of {function['name']!r} must be a JSON object like {{'city': 'Rome'}}"
            raise ValueError(f"{fault}, got {repr(value)[:80]}: write them with json.dumps, or drop the row")
        if arguments != read[0][1]:
            raise ValueError(f"a call of {function['name']!r} has other {key!r} than {read[0][0]!r}: drop one of them")
    flat = function is call
    moved = (*ARGUMENTS, "name") if flat else ARGUMENTS
    inner = {key: value for key, value in function.items() if value is not None and (not flat or key in moved)}
    inner = {"arguments" if key in ARGUMENTS else key: value for key, value in inner.items()}
    outer = {key: value for key, value in call.items() if value is not None and key not in moved}
    outer |= {"type": "function"} if flat else {}
    return {**outer, "function": {**inner, "arguments": read[0][1] if read else {}}}


def seed_row(name: str, seed: int) -> dict[str, Any]:
    """A row of a game that has no data: its prompt only names it, and the opening is what `reset` returns."""
    return {"messages": [{"role": "user", "content": f"{name}, seed {seed}"}], "seed": seed}


def is_seed_row(row: Mapping[str, Any]) -> bool:
    """Whether `seed_row` made a row."""
    seed, texts = row.get("seed"), [str(message.get("content")) for message in mappings(row.get("messages"))]
    return len(texts) == 1 and row == seed_row(texts[0].removesuffix(f", seed {seed}"), seed)  # type: ignore[arg-type]
