"""The calls in a turn's text, in the formats of open models: one function per format.

    parse(text, tools) -> [Call(name, arguments) or BadCall(error), ...]          [] for a turn that is an answer

`text` is a turn with its special tokens, without its stop token. `tools` are the JSON schemas of the functions: formats
that write values as bare text (function tags, arg_key) need them to tell "7" from 7. Calls inside a reasoning block are
ignored. Nothing that a model writes raises. `rlkit.rollout.envs.call_format` chooses the function by the chat template.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.data.messages import is_of_type, parameters_of


class Call(NamedTuple):
    """A parsed call; the tool may not exist. `id` is the model's own, in formats that have one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class BadCall(NamedTuple):
    """A call that could not be parsed, and the error to report to the model."""

    error: str


Found = list[Call | BadCall]
Schemas = Sequence[Any]
Parse = Callable[[str, Schemas], Found]

_REASONING = re.compile(r"</think>|\[/THINK\]|<channel\|>|<\|close\|>think<\|sep\|>")
_MARKED = re.compile(
    r"<\|python_tag\|>|\[TOOL_CALLS\]|<\|tool_call\|>|<TOOLCALL>|<tool_calls>|<\|START_ACTION\|>"
    r"|<\|action_start\|>\s*<\|plugin\|>"
)
_CLOSING = r"(?:[\s;]|<\|[\w/]+\|>|</\w+>|<[|｜]?end[^<>]*>)*"  # between JSON calls, and after the last one
_PYTHON = re.compile(
    r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)|<function_calls>(.*?)(?:</function_calls>|\Z)", re.S
)
_FIRST = re.compile(
    rf"{_MARKED.pattern}|<tool_call>|<function=|<\|tool_call_start\|>|<function_calls>|<\w+:tool_call>|<invoke "
    r"|<｜DSML｜|<\|open\|>(?:tools|call)|<｜tool▁calls?▁begin｜>|<\|tool_calls?(?:_section)?_begin\|>|<\|tool_call>"
    r"|<start_function_call>"
)
_HARMONY = re.compile(  # what begins a message, with its channel
    r"(?:\A[^<]*+|<\|start\|>[^<]*+)?(?:<\|channel\|>(\w*+)[^<]*+)?(?:<\|constrain\|>[^<]*+)?<\|message\|>"
)
_CONSTANTS = {"true": True, "false": False, "null": None}


def hermes_calls(text: str, tools: Schemas = ()) -> Found:  # noqa: ARG001
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, among other text: Hermes, Qwen 2.5 and 3.

    A block that is not closed, or holds no such JSON, is a BadCall.
    """
    calls: Found = []
    for match in re.finditer(r"<tool_call>(.*?)(</tool_call>|\Z)", answer_of(text), re.DOTALL):
        calls.append(_json_call(match[1]) if match[2] else BadCall("<tool_call> is not closed by </tool_call>"))
    return calls


def json_calls(text: str, tools: Schemas = ()) -> Found:  # noqa: ARG001
    """JSON, `{"name": ..., "parameters": {...}}`, several after `;` or in a list.

    After a mark (`<|python_tag|>`, `[TOOL_CALLS]`, `<|tool_call|>`, `<TOOLCALL>`, `<tool_calls>`, `<|START_ACTION|>`),
    or as the whole turn: Llama 3, Mistral, Phi-4, Granite, Nemotron 2, Command. Without a mark, text that is not a JSON
    object with a name is an answer, unless it starts like a call.
    """
    body = answer_of(text).strip()
    marked = _MARKED.search(body)
    body = body[marked.end() :].strip() if marked else body
    if not (marked or re.match(r'\[?\s*\{\s*"(name|type|function)"', body)):
        return []
    values: list[Any] = []
    while body := re.sub(rf"\A{_CLOSING}(?:{_MARKED.pattern})?\s*", "", body):
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except (ValueError, RecursionError) as error:
            return [BadCall(f"the call is not valid JSON: {error}")]
        values += value if isinstance(value, list) else [value]
        body = body[end:]
    return [call_from(value) for value in values] or [BadCall("there is no call after the marker")]


def pythonic_calls(text: str, tools: Schemas = ()) -> Found:
    """A list of Python calls with literal keywords, `[f(a=1), g(b="x")]`.

    The whole turn (Llama 3.2, Llama 4), between `<|tool_call_start|>` and `<|tool_call_end|>` (LFM2), or one call per
    line between `<function_calls>` and `</function_calls>` (OLMo 3). JSON's true, false and null are read as well.
    """
    body = answer_of(text).strip().removeprefix("<|python_tag|>").strip()
    if blocks := [match[1] or match[2] or "" for match in _PYTHON.finditer(body)]:
        return [call for block in blocks for call in _python_calls(block, tools)]
    return _python_calls(body, tools) if re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body) else []


def function_calls(text: str, tools: Schemas = ()) -> Found:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` in `<tool_call>`, or without: Qwen 3.5 and Coder,
    Nemotron 3, Seed-OSS."""
    call = r"<function=(?P<name>[^>\n]*)>(?P<body>.*?)(?P<end></function>|\Z)"
    other = r"<(?:\w+:)?tool_call>(?!\s*<function=)(?P<other>.*?)(?:</(?:\w+:)?tool_call>|\Z)"
    value = r"<parameter=(?P<key>[^>\n]+)>", "</parameter>"
    like = "<function=name><parameter=key>value</parameter></function>"
    return _tagged(text, tools, f"{call}|{other}", value, like)


def invoke_calls(text: str, tools: Schemas = ()) -> Found:
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`: MiniMax M2, DeepSeek V3.2."""
    d = r"(?:｜DSML｜)?"
    call = rf'<{d}invoke name="(?P<name>[^"]*)"\s*>(?P<body>.*?)(?P<end></{d}invoke>|\Z)'
    other = rf"<(?:minimax:tool_call|{d}function_calls)>(?!\s*<{d}invoke )(?P<other>.*?)(?:</|\Z)"
    value = rf'<{d}parameter name="(?P<key>[^"]+)"(?: string="(?P<kind>true|false)")?\s*>', rf"</{d}parameter>"
    like = '<invoke name="name"><parameter name="key">value</parameter></invoke>'
    return _tagged(text, tools, f"{call}|{other}", value, like)


def arg_key_calls(text: str, tools: Schemas = ()) -> Found:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM 4.5 and later."""
    call = r"<tool_call>(?P<name>[^<\n]*)(?P<body>.*?)(?P<end></tool_call>|\Z)"
    value = r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>", "</arg_value>"
    like = "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"
    return _tagged(text, tools, call, value, like)


def xtml_calls(text: str, tools: Schemas = ()) -> Found:
    """`<|open|>call tool="NAME" index="1"<|sep|>` with `<|open|>argument key="KEY" type="string"<|sep|>`: Kimi K3."""
    end = r"<\|close\|>{}<\|sep\|>"
    call = r'<\|open\|>call tool="(?P<name>[^"]*)"[^<]*<\|sep\|>(?P<body>.*?)(?P<end>' + end.format("call") + r"|\Z)"
    other = r"<\|open\|>tools<\|sep\|>(?!\s*<\|open\|>call )(?P<other>.*?)(?:<\|close\|>|\Z)"
    head = r'<\|open\|>argument key="(?P<key>[^"]+)"(?: type="(?P<kind>\w+)")?\s*<\|sep\|>'
    like = '<|open|>call tool="name"<|sep|><|open|>argument key="key" type="string"<|sep|>value<|close|>argument<|sep|>'
    return _tagged(text, tools, f"{call}|{other}", (head, end.format("argument")), like)


def harmony_calls(text: str, tools: Schemas = ()) -> Found:  # noqa: ARG001
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`: gpt-oss."""
    mark = r"(?:\A|<\|start\|>assistant|<\|channel\|>\w+)\s*to="
    head = mark + r"(?:functions\.)?(?P<name>[\w.-]++)(?:\s|\w|<\|constrain\|>|<\|channel\|>)*<\|message\|>"
    return _named(text, mark, head, "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}")


def deepseek_calls(text: str, tools: Schemas = ()) -> Found:  # noqa: ARG001
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` (DeepSeek V3.1), or with
    `function<｜tool▁sep｜>NAME` and the arguments in a block of code (V3, R1)."""
    head = r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^<\n]+?)(?:<｜tool▁sep｜>|\s*```json)\s*"
    return _named(
        text, "<｜tool▁call▁begin｜>", head, "<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>"
    )


def kimi_calls(text: str, tools: Schemas = ()) -> Found:  # noqa: ARG001
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2."""
    identity = r"(?P<id>(?:functions\.)?(?P<name>[^:<\n]+?)(?::\d+)?)"
    head = rf"<\|tool_call_begin\|>\s*{identity}\s*<\|tool_call_argument_begin\|>\s*"
    like = "<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>"
    return _named(text, r"<\|tool_call_begin\|>", head, like)


def mistral_calls(text: str, tools: Schemas = ()) -> Found:  # noqa: ARG001
    """`[TOOL_CALLS]NAME[ARGS]{...}`, any number: Mistral since 2025. (Before, the calls were a list: `json_calls`.)"""
    head = r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]\s*)?(?=\{)"
    return _named(text, r"\[TOOL_CALLS\]", head, "[TOOL_CALLS]name[ARGS]{...}")


def gemma_calls(text: str, tools: Schemas = ()) -> Found:  # noqa: ARG001
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,n:7}<tool_call|>` (Gemma 4), or with `<escape>` around texts
    (FunctionGemma)."""
    body = answer_of(text)
    texts: list[str] = []

    def stashed(match: re.Match[str]) -> str:
        texts.append(match[1] if match[1] is not None else match[2])
        return f'"{len(texts) - 1}"'

    body = re.sub(r'<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>', stashed, body, flags=re.DOTALL)
    quoted = lambda match: f'{match[1]}"{match[2].rstrip()}":'  # noqa: E731
    body = re.sub(r"([{,])\s*([^\s{}\[\]\",:][^{}\[\]\",:]*):", quoted, body)
    mark = r"<\|tool_call>|<start_function_call>"
    like = '<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>'
    calls = _named(body, mark, rf"(?:{mark})\s*call:(?P<name>[\w.-]+)\s*(?=\{{)", like)
    return [Call(c.name, _restored(c.arguments, texts)) if isinstance(c, Call) else c for c in calls]


def wrong_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Describe how the arguments violate a JSON schema (names, required names, types, choices); None if they do not."""
    properties = parameters.get("properties", {})
    if missing := [name for name in parameters.get("required", []) if name not in arguments]:
        return f"missing arguments {missing}; the arguments are {list(properties)}"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no argument {name!r}; the arguments are {list(properties)}"
        schema = properties[name]
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        if value is None and (schema.get("nullable") or "null" in types):
            continue
        if types and not any(is_of_type(value, t) for t in types):
            return f"argument {name!r} must be {' or '.join(types)}, got {json.dumps(value, default=str)[:80]}"
        if "enum" in schema and value not in schema["enum"]:
            return f"argument {name!r} must be one of {schema['enum']}, got {json.dumps(value, default=str)[:80]}"
    return None


def answer_of(text: str) -> str:
    """The text after the reasoning; empty if the reasoning is not closed."""
    if closed := _REASONING.search(text):
        return text[closed.end() :]
    return "" if re.match(r"\s*(?:<think>|\[THINK\]|<\|channel>|<\|open\|>think)", text) else text


def before_calls(text: str) -> str:
    """The reasoning and text before the first call."""
    answer = answer_of(text)
    first = _FIRST.search(answer)
    return text[: len(text) - len(answer)] + (answer[: first.start()] if first else "")


def message_of(text: str, *, calls: bool) -> dict[str, str]:
    """The fields of a turn's message other than its calls, as chat templates take them: `content`, of a turn with
    `calls` up to the first. Harmony's channels are fields: `thinking`, with what else is written before a call."""
    if "<|message|>" not in text:
        return {"content": before_calls(text) if calls else text}
    words: dict[str, list[str]] = {"thinking": [], "content": []}
    heads = [*_HARMONY.finditer(text)]
    for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=True):
        said = re.sub(r"<\|\w+\|>", "", text[head.end() : end]).strip()
        if not (calls and "to=" in head[0]):
            words["thinking" if calls or head[1] == "analysis" else "content"].append(said)
    joined = {key: "\n".join(filter(None, parts)) for key, parts in words.items()}
    return joined if joined["thinking"] else {"content": joined["content"]}


def _tagged(text: str, tools: Schemas, calls: str, value: tuple[str, str], like: str) -> Found:
    """Calls whose values are bare text between two tags, typed by the schema, or by the `kind` that the tag states."""
    parsed: Found = []
    for match in re.finditer(calls, answer_of(text), re.DOTALL):
        name = (match["name"] or "").strip()
        if not re.fullmatch(r"[\w.:/-]+", name):
            parsed.append(BadCall(f"a call must be like {like}"))
        elif not match["end"]:
            parsed.append(BadCall(f"the call of {name} is not closed: it must be like {like}"))
        else:
            parsed.append(_with_values(name, match["body"], parameters_of(tools, name), value, like))
    return parsed


def _with_values(name: str, body: str, schema: Mapping[str, Any], value: tuple[str, str], like: str) -> Call | BadCall:
    opening, closing = value
    *parts, rest = re.split(closing, body)  # in linear time, also for a model that repeats the first tag
    arguments: dict[str, Any] = {}
    for part in [*parts, *([rest] if rest.strip() else [])]:
        head = re.match(rf"\s*{opening}", part)
        if head is None or part is rest:
            outside = part.strip()[:60]
            return BadCall(f"the call of {name} must be like {like}, and has {outside!r} outside of its values")
        key, stated = head["key"].strip(), head.groupdict().get("kind")
        kind = {"true": "string", "false": None}.get(str(stated), stated)
        arguments[key] = value_of(re.sub(r"\A\r?\n|\r?\n\Z", "", part[head.end() :]), schema, key, kind)
    return Call(name, arguments)


def value_of(text: str, parameters: Mapping[str, Any], key: str, kind: str | None = None) -> Any:
    """The value that `text` stands for, of the type in the schema (a string stays text), or else of the stated `kind`.

    JSON and Python's literals are read. Text that is of no type of the schema is returned as it is.
    """
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kinds = _kinds(schema, parameters) or ([kind] if kind else [])
    if kinds == ["string"]:
        return text
    try:
        value = _literal(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    fits = not isinstance(value, str) and (not kinds or any(is_of_type(value, kind) for kind in kinds))
    return value if fits else text


def _literal(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = ast.literal_eval(text.strip())
    return _as_json(value)


def _as_json(value: Any) -> Any:
    """The value as JSON has it, with lists for tuples. ValueError or TypeError for what JSON or UTF-8 has not: `...`, a
    set, bytes, half of a surrogate pair."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode())


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[str]:
    """The JSON types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return []
    if isinstance(ref := schema.get("$ref"), str):
        where = root.get("$defs") or root.get("definitions") or {}
        return _kinds(where.get(ref.rpartition("/")[2]), root, depth + 1) if isinstance(where, Mapping) else []
    types = schema.get("type") or []
    kinds = [types] if isinstance(types, str) else [kind for kind in types if isinstance(kind, str)]
    for union in ("anyOf", "oneOf", "allOf"):
        kinds += [kind for choice in schema.get(union) or [] for kind in _kinds(choice, root, depth + 1)]
    if not kinds and schema.get("enum") and all(isinstance(choice, str) for choice in schema["enum"]):
        kinds = ["string"]
    return [*dict.fromkeys(kinds), *(["null"] if kinds and schema.get("nullable") else [])]


def _named(text: str, mark: str, head: str, like: str) -> Found:
    """Calls of a name, then the arguments as JSON: `head` ends where those begin."""
    body, parsed = answer_of(text), Found()
    for start in re.finditer(mark, body):
        if not (match := re.compile(head).match(body, start.start())):
            parsed.append(BadCall(f"a call must be like {like}"))
            continue
        try:
            arguments, _ = json.JSONDecoder().raw_decode(body, match.end())
        except (ValueError, RecursionError) as error:
            parsed.append(BadCall(f"the arguments of {match['name']} are not valid JSON: {error}"))
            continue
        call = call_from({"name": match["name"], "arguments": arguments})
        parsed.append(call._replace(id=match.groupdict().get("id")) if isinstance(call, Call) else call)
    return parsed


def _restored(value: Any, texts: Sequence[str]) -> Any:
    """The value with each string, which is a number of one of the `texts`, as that text."""
    if isinstance(value, dict):
        return {key: _restored(part, texts) for key, part in value.items()}
    if isinstance(value, list):
        return [_restored(part, texts) for part in value]
    return texts[int(value)] if isinstance(value, str) and value.isdecimal() and int(value) < len(texts) else value


def _json_call(payload: str) -> Call | BadCall:
    try:
        return call_from(json.loads(payload))
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is not valid JSON: {error}")


def call_from(value: Any) -> Call | BadCall:
    """A call from JSON, also in OpenAI's form, with `function` around it or arguments as a string, and Cohere's."""
    inner = value.get("function") if isinstance(value, dict) else None
    value = inner if isinstance(inner, dict) else {**value, "name": inner} if isinstance(inner, str) else value
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(name, str):
        return BadCall('a call must be like {"name": "...", "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {name} must be an object, with a name for each")
    try:
        return Call(*_as_json([name, arguments]))
    except (ValueError, RecursionError):
        return BadCall("the call has half of a surrogate pair (\\ud83d without its second half)")


def _python_calls(text: str, tools: Schemas) -> Found:
    """Calls in a list, or one after the other."""
    try:
        nodes = list(_elements(ast.parse(text.strip())))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        loose = _loose_call(text.strip(), tools)
        return [loose or BadCall(f"the calls are not valid Python: {error}")]
    return [_python_call(node) for node in nodes]


def _elements(tree: ast.Module) -> Iterator[ast.expr]:
    for line in tree.body:
        node = line.value if isinstance(line, ast.Expr) else ast.Constant(None)
        yield from node.elts if isinstance(node, ast.List) else [node]


def _python_call(node: ast.expr) -> Call | BadCall:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        return BadCall("a call must be like name(argument=value), every argument by its name")
    for name in [n for n in ast.walk(node) if isinstance(n, ast.Dict | ast.List | ast.keyword)]:
        _read_constants(name)
    try:
        return Call(ast.unparse(node.func), _as_json({str(k.arg): ast.literal_eval(k.value) for k in node.keywords}))
    except (ValueError, TypeError, RecursionError):
        return BadCall("arguments must be literals: numbers, strings, lists, dicts, True, False, None")


def _read_constants(node: ast.Dict | ast.List | ast.keyword) -> None:
    """Put the values of JSON's true, false and null in the place of their names."""
    read = lambda x: ast.Constant(_CONSTANTS[x.id]) if isinstance(x, ast.Name) and x.id in _CONSTANTS else x  # noqa: E731
    if isinstance(node, ast.keyword):
        node.value = read(node.value)
    elif isinstance(node, ast.Dict):
        node.values = [read(value) for value in node.values]
    else:
        node.elts = [read(value) for value in node.elts]


def _loose_call(text: str, tools: Schemas) -> Call | None:
    """One call whose strings have quotes or line breaks that are not escaped, as LFM2.5's template writes them: a value
    ends where the next argument of the tool begins. None where that leaves more than one reading."""
    match = re.fullmatch(r"\[?\s*(?P<name>[A-Za-z_][\w.]*)\((?P<body>.*)\)\s*\]?", text, re.DOTALL)
    schema = parameters_of(tools, match["name"]) if match else {}
    if not match or not schema.get("properties") or re.search(r"\)\s*,\s*[A-Za-z_][\w.]*\(", match["body"]):
        return None
    keys = "|".join(map(re.escape, schema["properties"]))
    first, *parts = re.split(rf"(?:\A|,)\s*({keys})\s*=\s*", match["body"])
    values: dict[str, Any] = {}
    for key, value in zip(parts[::2], map(str.strip, parts[1::2]), strict=True):
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            values[key] = value[1:-1]
        elif isinstance(read := value_of(value, schema, key), str) or key in values:
            return None
        else:
            values[key] = read
    return None if first.strip() else Call(match["name"], values)


_FUNCTIONS = (
    hermes_calls, function_calls, arg_key_calls, json_calls, pythonic_calls, harmony_calls, mistral_calls,
    deepseek_calls, kimi_calls, xtml_calls, invoke_calls, gemma_calls,
)  # fmt: skip
FORMATS: Mapping[str, Callable[..., Found]] = {f.__name__.removesuffix("_calls"): f for f in _FUNCTIONS}
