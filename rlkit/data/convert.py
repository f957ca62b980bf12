"""Rows of other libraries in rlkit's columns: `messages` or `prompt`, `completion`, `chosen`, `rejected`, `label`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from rlkit.data.load import Row, as_messages, column_error

LABELS = {"true": True, "1": True, "false": False, "0": False}  # a cell of a CSV file is text
_MESSAGES = ("messages", "prompt", "completion", "response", "chosen", "rejected")
_ROLES = ("user", "assistant")
_UNTRAINED = ("step_loss_mask", "weight")  # of slime, and of OpenAI's fine-tuning files


class Converted(dict[str, Any]):
    """A row with columns of rlkit's beside its own; `own` is the row as it was."""

    def __init__(self, own: Row, columns: Row) -> None:
        super().__init__(own)
        self.update(columns)
        self.own = getattr(own, "own", own)


def sharegpt(row: Row) -> Row:
    """`{conversations}`, with an optional system message in `system` and KTO label in `kto_tag` (LLaMA-Factory)."""
    turns = as_messages(row["conversations"])
    return {"messages": [*_system(row), *turns] if isinstance(turns, list) else turns, **_label(row)}


def alpaca(row: Row) -> Row:
    """`{instruction, input, output}`: the prompt is `instruction` and `input`, on a line each, as in LLaMA-Factory.

    With `history`, pairs of an instruction and a response, the row is a conversation whose turns all train.
    """
    prompt = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    history = [
        _message(role, text) for pair in row.get("history") or () for role, text in zip(_ROLES, pair, strict=True)
    ]
    turns = [*_system(row), *history, _message("user", prompt)]
    if history and row.get("output") is not None:
        return {"messages": [*turns, _message("assistant", row["output"])], **_label(row)}
    context = {"messages": turns} if len(turns) > 1 else {"prompt": prompt}
    return {**context, **_completion(row, "output"), **_label(row)}


def question(row: Row) -> Row:
    """`{question, answer}`."""
    return {"prompt": row["question"], "completion": row["answer"]}


def problem(row: Row) -> Row:
    """`{problem, solution}`; a row with only the final `answer` is a prompt."""
    return {"prompt": row["problem"], **_completion(row, "solution")}


def openrlhf(row: Row) -> Row:
    """`{input, output}`, or a whole conversation in `input`."""
    name = "prompt" if isinstance(row["input"], str) else "messages"
    return {name: row["input"], **_completion(row, "output")}


def one_message(row: Row) -> Row:
    """The columns that hold a message where a list of messages is meant (ColossalAI, LLaMA-Factory), as lists."""
    return {name: as_messages([row[name]]) for name in _MESSAGES if isinstance(row.get(name), Mapping)}


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
    """The JSON schemas in the column `tools`, a list or its JSON text; None where there are none."""
    tools = row.get("tools") or None
    try:
        tools = json.loads(tools or "[]") if isinstance(tools, str) else tools
    except ValueError:
        tools = [tools]
    if tools and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        found = f"column 'tools' must be a list of JSON schemas or its JSON text, got {repr(row['tools'])[:80]}"
        raise column_error(place, found, row, "; rename a column of other content with --rename tools OTHER")
    return tools or None


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
    thinking = LABELS.get(str(thinking).strip().lower(), thinking)
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


def is_trained(message: Mapping[str, Any]) -> bool:
    """False for a message that its row excludes from the loss."""
    return all(message.get(key) is None or bool(message[key]) for key in _UNTRAINED)


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _system(row: Row) -> list[dict[str, Any]]:
    return [_message("system", row["system"])] if row.get("system") else []


def _completion(row: Row, name: str) -> Row:
    return {"completion": row[name]} if row.get(name) is not None else {}


def _label(row: Row) -> Row:
    return {"label": row["kto_tag"]} if row.get("kto_tag") is not None else {}
