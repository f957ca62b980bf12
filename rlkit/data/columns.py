"""Columns of rows and keys of messages that no form reads: refused, or named once.

A column or key that could change what is trained is used by a form (`rlkit.data.forms`), or refused here, or reported
in one line per file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlkit.data.load import Row, Rows, column_error

MEDIA = (
    "images", "image", "videos", "video", "audios", "audio", "image_url", "image_urls", "input_audio", "pixel_values",
    "multi_modal_data", "multi_modal_inputs",
)  # fmt: skip
FLAGS = ("step_loss_mask", "weight", "train", "training", "loss", "loss_mask")  # slime, OpenAI, axolotl, ms-swift
ROW_ARGS = ("system", "system_prompt", "tools", "functions", "chat_template_kwargs", "enable_thinking")
FOR_REWARDS = (
    "answer", "ground_truth", "solution", "label", "gt_answer", "reward_model", "response", "completion", "output",
    "chosen", "rejected",
)  # fmt: skip
_IDENTITY = re.compile(
    r"(.*_)?(id|idx|index|uuid|guid|hash|source|url|split|license)|dataset(_name)?|extra_info|meta(data)?|ability|"
    r"lang(uage)?|(created|updated)(_at)?|timestamp"
)  # say where a row is from
_KNOWN = (
    "role", "content", "from", "value", "tool_calls", "function_call", "tool_call_id", "train_detail", "prefix",
    "reasoning_content", "reasoning", "thinking",
)  # fmt: skip
_MOST = 6  # names in a line

_log = logging.getLogger("rlkit.data")


def truth(value: Any) -> bool | None:
    """True or false, 1 or 0, also as a float or as text (a cell of a CSV file is text); None for anything else."""
    text = str(value).strip().lower()
    return {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(text)


def is_empty(value: Any) -> bool:
    """Whether a value is null or NaN, an empty text, or a list or object of nothing else."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_empty, value.values() if isinstance(value, Mapping) else value))
    return value is None or value == "" or value != value


def without_nulls(value: Any) -> Any:
    """The value without the null entries of its objects, at any depth.

    Arrow tables fill the keys that an object lacks with null, and a template would write them.
    Nulls in lists stay. TRL removes the same.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(without_nulls, value)] if isinstance(value, list | tuple) else value


def refuse_media(row: Row, place: str) -> None:
    """ValueError for a row, or a message, with images, audio or video."""
    for name in MEDIA:
        if not is_empty(row.get(name)) and row[name] is not False:
            found = f"column {name!r} holds media, and rlkit trains on text only"
            raise column_error(place, found, row, f"; drop the row, or train on its text with --rename {name} OTHER")


def joined_parts(parts: Sequence[Any], place: str) -> str:
    """The text of `[{"type": "text", "text": ...}, ...]`; ValueError for a part that is not text, such as an image."""
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = repr(part.get("type") if isinstance(part, Mapping) else part)[:80]
            raise ValueError(
                f"{place}[{number}] is {kind}: rlkit reads text only, as a string or as parts "
                "{'type': 'text', 'text': '...'}; drop the row or the part"
            )
    return "".join(part["text"] for part in parts)


def refuse_surrogates(value: Any, place: str, name: str) -> None:
    """ValueError for a text with half of a UTF-16 pair, which no tokenizer reads."""
    if isinstance(value, str):
        found = None if value.isascii() else re.search("[\ud800-\udfff]", value)
        if found:
            raise ValueError(
                f"{place}: column {name!r} holds {found[0]!r}, half of a surrogate pair, which is no character: "
                f"...{value[max(0, found.start() - 20) : found.end() + 20]!r}...; repair or drop the row"
            )
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            refuse_surrogates(item, place, name)


def is_trained(message: Mapping[str, Any], place: str) -> bool:
    """False for a turn that its row excludes from the loss; ValueError for a turn that is to be trained in part."""
    if not is_empty(message.get("train_detail")):
        raise ValueError(f"{place} has 'train_detail', and rlkit trains whole turns: split the turn or drop the key")
    flags = {key: truth(message[key]) for key in FLAGS if message.get(key) is not None}
    for key, flag in flags.items():
        if flag is None:
            raise ValueError(
                f"{place}: {key!r} must be 0 or 1, false or true (a turn is trained or not), got {message[key]!r}"
            )
    return all(flags.values())


class Unused:
    """Collects what the rows of a file have and no form reads, for one line each."""

    def __init__(self, template: str) -> None:
        """`template`: the text of the chat template; "" without one."""
        self._template = template
        self._columns: dict[str, None] = {}
        self._keys: dict[str, None] = {}
        self._arguments: dict[str, None] = {}
        self._roles: dict[str, None] = {}

    def add(self, row: Row, used: Iterable[str], texts: Sequence[str], args: Iterable[str]) -> None:
        """Look at a row that is rendered as `texts` with the template's arguments `args`."""
        own, used = getattr(row, "own", row), {*used}
        for name, value in own.items():
            unread = name not in self._columns and name not in used and not _IDENTITY.fullmatch(name)
            if unread and not is_empty(value) and not _is_copied(value, texts):
                self._columns[name] = None
        if self._template:
            self._arguments |= dict.fromkeys(name for name in args if not self._writes(name))
            for message in _messages(row):
                self._look_at(message)

    def _look_at(self, message: Mapping[str, Any]) -> None:
        if message.get("role") != "assistant" and any(truth(message.get(key)) for key in ("train", "training")):
            self._roles[str(message.get("role"))] = None
        for key, value in message.items():
            known = key in _KNOWN or key in FLAGS or key in self._keys or _IDENTITY.fullmatch(str(key))
            if not known and not is_empty(value) and not self._writes(key):
                self._keys[key] = None

    def _writes(self, key: str) -> bool:
        return re.search(rf"\b{re.escape(key)}\b", self._template) is not None

    def report(self, rows: Sequence[Row], *, rl: bool) -> None:
        """Log one line for the columns, and one for each kind of key."""
        source = f"{rows.source}: " if isinstance(rows, Rows) and rows.source else ""
        where = "the prompt (rewards see all columns)" if rl else "the prompt or the response"
        for names, what, fact in (
            (self._columns, "column", f"not part of {where}"),
            (self._keys, "message key", "not written by the chat template"),
            (self._arguments, "template argument", "not read by the chat template"),
            (self._roles, "role", "not trained, though its turns have 'train': true: assistant turns are"),
        ):
            if names:
                _log.warning("%s%s %s", source, _listed(what, [*names]), fact)


def _is_copied(value: Any, texts: Sequence[str]) -> bool:
    """Whether the value stands in one of the texts, as whole words."""
    text = value.strip() if isinstance(value, str) else ""
    words = rf"(?<!\w){re.escape(text)}(?!\w)"
    return text != "" and any(text in whole and re.search(words, whole) for whole in texts)


def _messages(row: Row) -> Iterator[Mapping[str, Any]]:
    for name in ("messages", "prompt", "completion", "response", "chosen", "rejected"):
        value = row.get(name)
        yield from (m for m in value if isinstance(m, Mapping)) if isinstance(value, list | tuple) else ()


def _listed(what: str, names: Sequence[str]) -> str:
    """ "column a is", "columns a, b and 4 more are"."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{what}{'s' * (len(names) > 1)} {', '.join(names[:_MOST])}{more} {'are' if len(names) > 1 else 'is'}"
