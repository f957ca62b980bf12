"""Rows of other libraries in rlkit's columns: `messages` or `prompt`, `completion`, `chosen`, `rejected`, `label`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from rlkit.data.columns import is_copied, is_empty, truth, without_nulls
from rlkit.data.load import Row, as_messages, column_error, turns_of_text

_MESSAGES = ("messages", "prompt", "completion", "response", "chosen", "rejected")
_ROLES, _TEXTS = ("user", "assistant"), ("input", "output")
CALLS = ("function_call", "tool_call")  # roles of LLaMA-Factory and ms-swift: the turn's text is a call


class Converted(dict[str, Any]):
    """A row with columns of rlkit's beside its own; `own` is the row as it was, `source` the form that it is in."""

    def __init__(self, own: Row, columns: Row, source: Any = None) -> None:
        super().__init__(own)
        self.update(columns)
        self.own, self.source = getattr(own, "own", own), source


def sharegpt(row: Row) -> Row:
    """`{conversations}`, with an optional system message in `system` and KTO label in `kto_tag` (LLaMA-Factory)."""
    found = messages_of(row["conversations"])
    if isinstance(found, list) and [turn.get("role") for turn in mappings(found)][:1] != ["system"]:
        found = [*_system(row), *found]
    return {"messages": found, **_label(row)}


def conversation(row: Row) -> Row:
    """`{conversation}`, of messages, or of turns with an `input` and an `output` (Capybara)."""
    found = messages_of(row["conversation"])
    if all({"input", "output"} <= {*turn} for turn in mappings(found)):
        found = [_message(role, turn[name]) for turn in found for role, name in zip(_ROLES, _TEXTS, strict=True)]
    return {"messages": [*_system(row), *found], **_label(row)}


def alpaca(row: Row) -> Row:
    """`{instruction, input, output}`: the prompt is `instruction` and `input`, on a line each, as in LLaMA-Factory.

    The answer may be called `response`, and the input `context` (Dolly). With `history`, messages or pairs of an
    instruction and a response, the row is a conversation whose turns all train.
    """
    names = [name for name in ("instruction", "input", "context") if not is_empty(row.get(name))]
    for name in names:
        if not isinstance(row[name], str):
            raise ValueError(f"column {name!r} must be a string, got {repr(row[name])[:80]}")
    prompt = "\n".join(row[name] for name in names)
    history = _history(row.get("history"))
    turns = [*_system(row), *history, _message("user", prompt)]
    answer = _completion(row, "output", "response", "completion")
    if history and answer:
        return {"messages": [*turns, _message("assistant", answer["completion"])], **_label(row)}
    context = {"messages": turns} if len(turns) > 1 else {"prompt": prompt}
    return {**context, **answer, **_label(row)}


def llama_factory(row: Row) -> Row:
    """`{prompt, query, response}`: an Alpaca row in the names that LLaMA-Factory's `columns` give it."""
    query = row.get("query") or ""
    if is_copied(query, [row["prompt"]]):
        query = ""  # the question again, beside the prompt that was made of it
    return alpaca({**row, "instruction": row["prompt"], "input": query, "context": None, "output": row.get("response")})


def question(row: Row) -> Row:
    """`{question, answer}`, or with `response` (OpenOrca) or a pair of answers."""
    return {"prompt": row["question"], **_completion(row, "response", "completion", "answer")}


def problem(row: Row) -> Row:
    """`{problem, solution}`; a row with only the final `answer` is a prompt."""
    return {"prompt": row["problem"], **_completion(row, "response", "completion", "solution")}


def openrlhf(row: Row) -> Row:
    """`{input, output}`, or a whole conversation in `input`."""
    name = "prompt" if isinstance(row["input"], str) else "messages"
    return {name: row["input"], **_completion(row, "output")}


def context(row: Row) -> Row:
    """The prompt as messages in `context`, or in `context_messages`; null where `context` holds anything else."""
    messages = messages_of(row.get("context_messages") or row.get("context"))
    return {"messages": messages if all("role" in turn for turn in mappings(messages)) else None}


def openai_pair(row: Row) -> Row:
    """`{input: {messages, tools}, preferred_output, non_preferred_output}` of OpenAI's preference files."""
    given = row["input"]
    if "messages" not in given:
        raise ValueError(f"'input' must have 'messages', got {sorted(given)}")
    pair = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    return {"messages": given["messages"], "tools": given.get("tools"), **pair}


def one_message(row: Row) -> Row:
    """The columns that hold one message, turns of `from`, or the JSON text of messages, as lists of messages.

    An answer that is JSON text is read if all its objects are messages: a role that is known, and content.
    """
    given = {name: row[name] for name in _MESSAGES if isinstance(row.get(name), Mapping | str | list)}
    new = {}
    for name, value in given.items():
        if isinstance(value, str) and name in ("messages", "prompt"):
            new[name] = turns_of_text(value, any_role=name == "messages")
        elif isinstance(value, str):
            new[name] = _answer(value)
        else:
            new[name] = messages_of(value)
    return {name: value for name, value in new.items() if value is not row[name]}


def _answer(text: str) -> Any:
    """Messages from the JSON text of nothing else; else the text, also where it is Python's."""
    with suppress(ValueError):
        found = turns_of_text(text)
        if isinstance(found, list) and all("content" in turn for turn in found):
            return found
    return text


def messages_of(value: Any) -> Any:
    """Messages from a list of turns, one message, or their JSON text (a CSV file has no lists); else the value."""
    value = as_messages(turns_of_text(value, any_role=True))
    return [value] if isinstance(value, Mapping) and {"role", "from"} & {*value} else value


def turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the nulls of Arrow tables, and with tool calls as chat templates expect them.

    A template expects `tool_calls` with the arguments as an object. OpenAI has them as JSON text, its older files one
    `function_call`, and LLaMA-Factory and ms-swift a turn of its own whose text is the call; several in a row are one
    message.
    """
    found: list[dict[str, Any]] = []
    role = None
    for message in messages:
        new = without_nulls(message)
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
                found[-1]["tool_calls"] += map(_call, calls)
                continue
            new = {"role": "assistant", "content": "", "tool_calls": calls, **more}
        elif role == "assistant":
            new = {**new, "content": new.get("content")}
        calls = json_of(new.get("tool_calls")) or ([new["function_call"]] if new.get("function_call") else [])
        if calls and isinstance(calls, list):
            new = {key: value for key, value in new.items() if key != "function_call"}
            new["tool_calls"] = [*map(_call, calls)]
        found.append(new)
    return found


def json_of(value: Any) -> Any:
    """The value of a JSON text; anything else as it is."""
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    return value


def system_of(row: Row, place: str) -> str | None:
    """The system message in the row's own column `system` or `system_prompt`; ValueError where they differ."""
    found = {name: row[name] for name in ("system", "system_prompt") if not is_empty(row.get(name))}
    for name, value in found.items():
        if not isinstance(value, str):
            what = f"column {name!r} is the system message and must be a string, got {repr(value)[:80]}"
            raise column_error(place, what, row, f"; rename a column of other content with --rename {name} OTHER")
    if len({*found.values()}) > 1:
        fix = "; rename the one that is not meant, e.g. --rename system_prompt OTHER"
        raise column_error(place, "columns 'system' and 'system_prompt' are two system messages", row, fix)
    return next(iter(found.values()), None)


def common_prompt(row: Row) -> Row:
    """The common beginning of two texts `chosen` and `rejected` as `prompt`, up to white space; {} without one.

    Differs: TRL's `extract_prompt` cuts inside a word if the first words that differ have the same first letters.
    """
    texts: list[Any] = [row.get(name) for name in ("chosen", "rejected")]
    if "prompt" in row or "messages" in row or not all(isinstance(text, str) for text in texts):
        return {}
    found = re.match(r"(.*\S)\s", commonprefix(texts), re.DOTALL)  # noqa: RUF071, texts and not paths
    at = found.end(1) if found else 0
    return {"prompt": texts[0][:at], "chosen": texts[0][at:], "rejected": texts[1][at:]} if at else {}


def row_tools(row: Row, place: str) -> Sequence[Any] | None:
    """The JSON schemas in the column `tools`, a list or its JSON text; None where there are none.

    OpenAI's older column `functions` holds the same without `{"type": "function"}` around each.
    """
    name = "tools" if not is_empty(row.get("tools")) else "functions"
    tools = json_of(row.get(name) or [])
    if isinstance(tools, list | tuple) and all(isinstance(tool, str) for tool in tools):
        tools = [*map(json_of, tools)]
    if tools and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        found = f"column {name!r} must be a list of JSON schemas or its JSON text, got {repr(row[name])[:80]}"
        raise column_error(place, found, row, f"; rename a column of other content with --rename {name} OTHER")
    schemas = without_nulls(tools) or None
    return [{"type": "function", "function": tool} for tool in schemas] if schemas and name == "functions" else schemas


def row_template_args(row: Row, place: str) -> Row:
    """The row's own arguments of the chat template: its `chat_template_kwargs` (TRL) and `enable_thinking` (verl).

    `chat_template_kwargs` is an object or its JSON text and wins over `enable_thinking`, which is true or false. Null
    is absent, also inside the object: Arrow tables fill absent keys with null.
    """
    own: Any = row.get("chat_template_kwargs")
    thinking = row.get("enable_thinking")
    if isinstance(own, str):
        with suppress(ValueError):
            own = json.loads(own or "{}")
    thinking = thinking if truth(thinking) is None else truth(thinking)
    for name, value, kind, must in (
        ("chat_template_kwargs", own, Mapping, "an object like {'enable_thinking': False}"),
        ("enable_thinking", thinking, bool, "true or false"),
    ):
        if value is not None and not isinstance(value, kind):
            found = f"column {name!r} must be {must}, got {repr(value)[:80]}"
            raise column_error(place, found, row, "; rename a column of other content with --rename")
    given = {"enable_thinking": thinking, **(own or {})}
    return {name: value for name, value in given.items() if value is not None}


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The objects in a list; of anything else, none."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _system(row: Row) -> list[dict[str, Any]]:
    return [_message("system", row["system"])] if row.get("system") else []


def _history(value: Any) -> list[dict[str, Any]]:
    """Earlier turns: messages, or pairs of an instruction and a response, or the JSON text of either."""
    value = () if is_empty(value) else messages_of(json_of(value))
    if isinstance(value, list | tuple):
        if all(isinstance(turn, Mapping) and "role" in turn for turn in value):
            return [dict(turn) for turn in value]
        if all(isinstance(pair, list | tuple) and len(pair) == len(_ROLES) for pair in value):
            return [_message(role, text) for pair in value for role, text in zip(_ROLES, pair, strict=True)]
    raise ValueError(
        "column 'history' must be a list of messages or of pairs [instruction, response], or its JSON text, got "
        f"{repr(value)[:80]}"
    )


def _call(given: Any) -> Any:
    """A tool call with its arguments as an object."""
    if not isinstance(given, Mapping):
        return given
    function = given.get("function", given)
    if not isinstance(function, Mapping) or "name" not in function:
        return given
    given = given if "function" in given else {"type": "function"}
    arguments = json_of(function.get("arguments", {}))
    arguments = without_nulls(arguments) if isinstance(arguments, Mapping) else function.get("arguments")
    return {**given, "function": {**function, "arguments": arguments}}


def _completion(row: Row, *names: str) -> Row:
    """The first of the columns that the row has, as `completion`."""
    name = next((name for name in names if row.get(name) is not None), None)
    return {new: row[name] for new in ("completion", "response") if new in {*row, "completion"}} if name else {}


def _label(row: Row) -> Row:
    return {"label": row["kto_tag"]} if row.get("kto_tag") is not None else {}
