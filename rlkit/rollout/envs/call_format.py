"""Which function of `rlkit.rollout.envs.calls` reads what a model's own chat template writes.

A call is rendered and read back, with every kind of argument that the tools have. So a run starts only if the policy's
calls, in the syntax it was taught, arrive as they were meant.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rlkit._util.text import excerpt
from rlkit.data.chat import render_text
from rlkit.rollout.calling import accepted, report_once
from rlkit.rollout.envs import calls
from rlkit.rollout.envs.calls import FORMATS, BadCall, Call, Found, Parse, Schemas

_log = logging.getLogger("rlkit.rollout")

_MARKS = {  # by which a template that writes no calls tells the model how to
    "<|tool_call_start|>": "pythonic", "<function=": "function", "<arg_key>": "arg_key", "<tool_call>": "hermes",
    "<|python_tag|>": "json", "<|tool_call|>": "json", "[TOOL_CALLS]": "json", "<TOOLCALL>": "json",
}  # fmt: skip
_TEXTS = "007", 'Zoë\'s "first"\nline'  # a text that looks like a number, and one with what formats must escape
_PROPERTIES = {
    "text": {"type": "string", "description": "text"},
    "count": {"type": "integer", "description": "number"},
    "ratio": {"type": "number", "description": "number"},
    "fresh": {"type": "boolean", "description": "choice"},
    "names": {"type": "array", "items": {"type": "string"}, "description": "list"},
    "more": {"type": "object", "description": "object"},
}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["text"]}
_LOOK_UP = {"name": "look_up", "description": "Look something up.", "parameters": _PARAMETERS}
_ANY_TOOL = {"type": "function", "function": _LOOK_UP}
_FIX = (
    "give a function that does with --tool-calls FILE.py:FUNCTION (in Python: `parse`), def FUNCTION(text) -> "
    "[(name, arguments), ...]"
)


def call_parser(
    tokenizer: Any,
    parse: Callable[..., Any] | None = None,
    *,
    tools: Schemas | None = None,
    template_args: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
) -> Parse:
    """The function that reads the calls of a turn: `parse`, or else the one that reads what the chat template writes.

    A call of each of the `tools` (JSON schemas; None: one with all types of arguments) is rendered and read back: first
    by the tokenizer's own `response_template`, where it has one, then by the functions of `rlkit.rollout.envs.calls`.
    `parse(text)` or `parse(text, tools=...)` may read less than the template writes (a system prompt may ask for
    another syntax), which is reported.

    Where the template writes no calls, it is the one whose mark is in the prompt or the vocabulary, or else
    `hermes_calls`, which is reported. Errors: ValueError, with the rendered call, if none reads it back.
    """
    schemas = tools or [_ANY_TOOL]
    written = [*_written(tokenizer, schemas, template_args)]
    reads = lambda one: all(_reads(one, *each, schemas) for each in written)  # noqa: E731
    of_template = [_of_template(tokenizer)] if getattr(tokenizer, "response_template", None) else []
    parser = next((one for one in [*of_template, *FORMATS.values()] if reads(one)), None) if written else None
    if parse is not None:
        checked = _checked(parse)
        try:
            checked("", schemas)
            fits = reads(checked)
        except Exception as error:
            fault = f"--tool-calls (`parse`), {_name(parse)}: {type(error).__name__}: {error}"
            raise ValueError(f"{fault}; a function that reads calls gets any text, also '' (no call)") from error
        if not fits:
            better = f"; {_name(parser)} does: drop --tool-calls (`parse`)" if parser else ""
            fault = "does not read the call that the chat template writes"
            _log.warning("%s %s, %s%s", _name(parse), fault, excerpt(written[0][0], 400), better)
        return checked
    if parser is None and written:
        fault = "no parser reads back the call that the chat template itself writes"
        raise ValueError(f"{fault}, {excerpt(written[0][0], 400)}: {_FIX}")
    if parser is None:
        name, why = _told(tokenizer, schemas, template_args, system_prompt)
        report = partial(report_once, "the chat template", f"writes no tool calls: they are read as {name}, {why}")
        return _reported(report, FORMATS[name], now=bool(tools))
    return parser


def _written(tokenizer: Any, tools: Schemas, template_args: Mapping[str, Any] | None) -> Iterator[tuple[str, Call]]:
    """The turns that the template writes for calls of the tools, with the calls; none where it writes no calls."""
    for tool in tools:
        function = tool.get("function", tool)
        for text in _TEXTS:
            call = Call(function["name"], _arguments(function.get("parameters") or {}, text))
            identities = "call00000", f"functions.{call.name}:0"  # nine characters, for Mistral; Kimi's has the name
            turns = (_turn(tokenizer, call, identity, tools, template_args) for identity in identities)
            named = re.compile(rf"(?<!\w){re.escape(call.name)}(?!\w)")
            if turn := next((turn for turn in turns if turn and named.search(turn)), None):
                yield turn, call


def _turn(
    tokenizer: Any, call: Call, identity: str, tools: Schemas, template_args: Mapping[str, Any] | None
) -> str | None:
    """A turn with one call as the template writes it, without what opens and closes a turn; None if it is refused."""
    render = partial(render_text, tokenizer, tools=tools, template_args=template_args)
    asked = {"role": "user", "content": "x"}
    function = {"name": call.name, "arguments": call.arguments}
    called = [{"type": "function", "id": identity, "function": function}]
    made = {"role": "assistant", "content": "", "tool_calls": called}
    mark = "placeholder of a turn"
    try:
        whole = render([asked, made], add_generation_prompt=False)
        plain = render([asked, {"role": "assistant", "content": mark}], add_generation_prompt=False)
        before, opened = (render([asked], add_generation_prompt=more) for more in (False, True))
    except Exception:  # whatever a template raises
        return None
    head, _, closing = plain.partition(mark)
    start = next((one for one in (opened, head, before) if whole.startswith(one)), "")
    return whole[len(start) :].removesuffix(closing).rstrip()


def _arguments(parameters: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A value for each argument whose type is plain, and for each required one."""
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    return {
        name: _value(schema, text)
        for name, schema in properties.items()
        if name in required or isinstance(schema.get("type"), str)
    }


def _value(schema: Any, text: str) -> Any:
    """A value of the schema's first type."""
    if not isinstance(schema, Mapping):
        return text
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    nested = {"key": text, "list": [1, True, None]}
    items = [_value(schema.get("items"), text)] if kind == "array" else []
    plain = {"integer": 7, "number": 2.5, "boolean": True, "object": nested, "array": items, "null": None}
    return plain.get(str(kind[0] if isinstance(kind, list) and kind else kind), text)


def _reads(parse: Callable[..., Any], turn: str, call: Call, tools: Schemas) -> bool:
    """Whether the function finds just this call; 1, 1.0 and True differ."""
    same = partial(json.dumps, sort_keys=True, default=str)
    calls = parse(turn, tools)
    return len(calls) == 1 and isinstance(calls[0], Call) and same(calls[0][:2]) == same(call[:2])


def _of_template(tokenizer: Any) -> Parse:
    """The calls that transformers finds by the tokenizer's `response_template`."""

    def response_template(text: str, tools: Schemas) -> Found:
        try:
            message = tokenizer.parse_response(calls.answer_of(text), prefix="", tools=list(tools))
            return [calls.call_from(call) for call in message.get("tool_calls") or ()]
        except Exception as error:  # whatever a foreign template raises on what a model writes
            return [BadCall(f"the call cannot be read: {' '.join(str(error).split())[:200]}")]

    return response_template


def _reported(report: Callable[[], None], parse: Callable[..., Found], *, now: bool) -> Parse:
    """`parse`, after `report` at once, or else when there are tools: those of an agent come with its requests."""
    if now:
        report()

    def read(text: str, tools: Schemas) -> Found:
        if tools:
            report()
        return parse(text, tools)

    return read


def _checked(parse: Callable[..., Any]) -> Parse:
    """The user's function with what it returns as calls; TypeError, naming it, for anything else."""

    def read(text: str, tools: Schemas) -> Found:
        calls = parse(text, **accepted(parse, {"tools": tools}))
        if not isinstance(calls, list | tuple):
            raise TypeError(f"{_name(parse)} must return a list of (name, arguments), got {calls!r:.80}")
        return [_as_call(one) for one in calls]

    def _as_call(one: Any) -> Call | BadCall:
        if isinstance(one, Call | BadCall):
            return one
        if isinstance(one, tuple | list) and len(one) == 2:
            one = {"name": one[0], "arguments": one[1]}
        made = calls.call_from(one)
        if isinstance(made, BadCall):
            raise TypeError(f"{_name(parse)} must return a list of (name, arguments), got {one!r:.80} in it")
        return made

    return read


def _told(
    tokenizer: Any, tools: Schemas, template_args: Mapping[str, Any] | None, system_prompt: str | None
) -> tuple[str, str]:
    """The format that the prompt, or else the vocabulary, tells, and why."""
    try:
        prompt = render_text(
            tokenizer, [{"role": "user", "content": "x"}], add_generation_prompt=True, tools=tools,
            template_args=template_args,
        )  # fmt: skip
    except Exception:  # whatever a template raises
        prompt = ""
    tokens = "".join(t.content for t in getattr(tokenizer, "added_tokens_decoder", {}).values())
    for text, source in ((prompt + (system_prompt or ""), "the prompt"), (tokens, "the vocabulary")):
        if mark := next((mark for mark in _MARKS if mark in text), None):
            return _MARKS[mark], f"since {source} has {mark}"
    return "hermes", "<tool_call> with JSON; --tool-calls (`parse`) names another format"


def _name(parse: Any) -> str:
    return getattr(parse, "__name__", repr(parse))
