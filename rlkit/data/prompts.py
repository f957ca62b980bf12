"""From rows to the tokens of prompts, and what every reader of rows shares."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.data.chat import TURN_TEXTS, render_text
from rlkit.data.load import Rows, place_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")  # that every chat template is expected to know

_log = logging.getLogger("rlkit.data")
_COLUMN_FIX = "check which columns hold the texts: one under another name is renamed with --rename"
_CHUNK = 1024  # texts per tokenizer call: enough for its threads, little to hold at once


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt, the row it came from, and that row's index in the rows given."""

    ids: list[int]
    row: dict[str, Any]
    index: int


def rl_prompts(
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[list[Prompt], int]:
    """`(prompts, num_dropped)` from rows that have `messages` or `prompt`; all columns stay in `row`.

    A string `prompt` is one user message. The chat template writes the conversation and the generation prompt.
    `system_prompt` is put in front of each conversation that has no system message of its own. With
    `apply_chat_template=False` (base models) `prompt` is tokenised as it is, with the tokenizer's own special tokens
    such as a leading bos.

    A prompt of more than `max_prompt_tokens` is dropped, never cut, and so is one without any text: the counts are
    returned as one and logged with the first rows. Raises ValueError, with the row (see `place_of`), for a row without
    `messages` and `prompt`, a conversation that is malformed (see `prompt_messages`), empty or ends with the
    assistant's answer, a role that neither is one of `ROLES` nor stands in the template, and where no prompt is left.

    Differs: verl `rollout.prompt_length` cuts a longer prompt on the left, which trains on questions nobody asked.
    """
    check_rows(rows, max_prompt_tokens=max_prompt_tokens)
    check_plain(apply_chat_template, system_prompt=system_prompt, tools=tools, template_args=template_args)
    template = Template(tokenizer, tools, template_args)
    texts, empty = [], []
    for index, row in enumerate(rows):
        place = place_of(rows, index)
        if not apply_chat_template:
            texts.append(row_text(row, "prompt", place))
            empty += [] if texts[-1].strip() else [index]
            continue
        messages = prompt_messages(row, system_prompt=system_prompt, place=place)
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                f"{place}: the conversation ends with an assistant message, so there is nothing to answer; "
                "drop that message (a known answer belongs in a column of its own)"
            )
        empty += [index] if all(is_empty(message) for message in messages) else []
        texts.append(template.text(messages, place, opened=True))
    report_rows(rows, empty, total=len(rows), what="prompts", why="have no text")
    dropped = set(empty)
    ids = encode_all(tokenizer, texts, add_special_tokens=not apply_chat_template)
    prompts = [Prompt(ids[i], row, i) for i, row in enumerate(rows) if i not in dropped]
    too_long = [(p.index, len(p.ids)) for p in prompts if len(p.ids) > max_prompt_tokens]
    report_too_long(rows, too_long, total=len(prompts), what="prompts", max_prompt_tokens=max_prompt_tokens)
    return [p for p in prompts if len(p.ids) <= max_prompt_tokens], len(empty) + len(too_long)


def prompt_messages(
    row: Mapping[str, Any], *, system_prompt: str | None = None, place: str = "the row"
) -> list[dict[str, Any]]:
    """The conversation of a row: its `messages`, or its `prompt` (a string is one user message), after `system_prompt`.

    A conversation that begins with a system message keeps that one. The content of a message is text: parts
    `{"type": "text", "text": ...}` are joined without anything between them, as chat templates join them, and an
    assistant message with no content and no tool calls holds "". `place` names the row in errors.

    Raises ValueError for a row without `messages` and `prompt`, for what is no message, and for any other content:
    null, a number, or a part that is no text, such as an image.
    """
    column = "messages" if row.get("messages") is not None else "prompt"
    value = row.get(column)
    if value is None:
        raise ValueError(
            f"{place}: neither 'messages' nor 'prompt' is there, or both are null; columns found: {sorted(row)}; one "
            "under another name is renamed with --rename"
        )
    messages = [{"role": "user", "content": value}] if column == "prompt" and isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not messages:
        text = "a string or " if column == "prompt" else ""
        raise ValueError(f"{place}: {column!r} must be {text}a list of at least one message, got {repr(value)[:80]}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{place}: {column}[{number}] must be an object like {{'role': 'user', 'content': '...'}}, "
                f"got {repr(message)[:80]}"
            )
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return [_with_text(message, f"{place}: {column}[{number}]") for number, message in enumerate(messages)]


def _with_text(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The message with text as its content. A template would write anything else as Python does: "None", "[{...}]"."""
    content = message.get("content")
    if isinstance(content, str):
        return dict(message)
    if content is None and message["role"] == "assistant":
        return dict(message) if message.get("tool_calls") else {**message, "content": ""}
    if not isinstance(content, list | tuple) or not content:
        raise ValueError(f"{place}.content must be a string, got {repr(content)[:80]}")
    return {**message, "content": joined_parts(content, f"{place}.content")}


def joined_parts(parts: Sequence[Any], place: str) -> str:
    """The text of `[{"type": "text", "text": ...}, ...]`; ValueError for a part that is no text, such as an image."""
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = repr(part.get("type") if isinstance(part, Mapping) else part)[:80]
            raise ValueError(
                f"{place}[{number}] is {kind}: rlkit reads text only, as a string or as parts "
                "{'type': 'text', 'text': '...'}; drop the row or the part"
            )
    return "".join(part["text"] for part in parts)


def is_empty(message: Mapping[str, Any]) -> bool:
    """Whether a message of `prompt_messages` holds no text, white space aside, and no tool call."""
    return not message.get("tool_calls") and not any(str(message.get(key) or "").strip() for key in TURN_TEXTS)


class Template(NamedTuple):
    """A tokenizer's chat template with its arguments; errors name the row."""

    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Any] | None
    args: Mapping[str, Any] | None

    @property
    def source(self) -> str:
        """The template's own text; "" where there is none."""
        tokenizer: Any = self.tokenizer
        return tokenizer.get_chat_template(tools=self.tools) if tokenizer.chat_template else ""

    def text(self, messages: Sequence[Mapping[str, Any]], place: str, *, opened: bool) -> str:
        """The conversation as text, with the generation prompt if `opened`."""
        for role in {message["role"] for message in messages}.difference(ROLES):
            if f"'{role}'" not in self.source and f'"{role}"' not in self.source:
                raise ValueError(
                    f"{place}: unknown role {role!r}; roles are {', '.join(ROLES)}, and others that the chat template "
                    "names"
                )
        try:
            return render_text(
                self.tokenizer, messages, add_generation_prompt=opened, tools=self.tools, template_args=self.args
            )
        except Exception as error:
            raise ValueError(f"{place}: cannot be rendered: {type(error).__name__}: {error}") from error


def row_text(row: Mapping[str, Any], column: str, place: str) -> str:
    """A column that must be a string."""
    if column not in row:
        raise ValueError(f"{place}: no column {column!r}; columns found: {sorted(row)}")
    if not isinstance(row[column], str):
        raise ValueError(f"{place}: column {column!r} must be a string, got {repr(row[column])[:80]}")
    return row[column]


def encode_all(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = False
) -> list[list[int]]:
    """Token ids of many texts: one tokenizer call per thousand, which a fast tokenizer spreads over its threads."""
    call: Any = tokenizer
    chunks = [list(texts[start : start + _CHUNK]) for start in range(0, len(texts), _CHUNK)]
    return [ids for chunk in chunks for ids in call(chunk, add_special_tokens=add_special_tokens)["input_ids"]]


def check_rows(rows: Sequence[Any], **limit: int) -> None:
    """There are rows, and the token limit is positive."""
    ((name, value),) = limit.items()
    if len(rows) == 0:
        raise ValueError("rows is empty: there is nothing to train on")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_plain(apply_chat_template: bool, **template_only: Any) -> None:
    """What only a chat template can use is not given without one."""
    given = [name for name, value in template_only.items() if value is not None]
    if given and not apply_chat_template:
        raise ValueError(
            f"without the chat template there is no place for {' and '.join(given)}: write it into the prompt"
        )


def report_rows(
    rows: Sequence[Any],
    found: Sequence[int],
    *,
    total: int,
    what: str,
    why: str,
    fix: str = _COLUMN_FIX,
    kept: bool = False,
    notes: Sequence[str] = (),
) -> None:
    """Log in one line which rows are dropped (`found`, their indices); ValueError, with the `fix`, where all are.

    The line has `what` they are, `why` (a verb and its object), and a note on each. `kept` rows are logged only.
    """
    if not found:
        return
    source = f"{rows.source}: " if isinstance(rows, Rows) else ""
    if len(found) == total and not kept:
        raise ValueError(f"{source}all {total} {what} {why}; {fix}")
    places = [place_of(rows, index, with_source=False) for index in found[:5]]
    first = ", ".join(map("".join, zip_longest(places, notes[:5], fillvalue="")))
    _log.warning(
        "%s%s %d of %d %s that %s: %s%s",
        source, "kept" if kept else "dropped", len(found), total, what, why, first, ", ..." if len(found) > 5 else "",
    )  # fmt: skip


def report_too_long(
    rows: Sequence[Any], found: Sequence[tuple[int, int]], *, total: int, what: str, **limit: int
) -> None:
    """`report_rows` of (row index, number of tokens) above the limit."""
    if not found:
        return
    ((name, value),) = limit.items()
    fix = f"the shortest has {min(num for _, num in found)} tokens: raise it, or give shorter ones"
    why, notes = f"are longer than {name}={value}", [f" ({num} tokens)" for _, num in found]
    report_rows(rows, [index for index, _ in found], total=total, what=what, why=why, fix=fix, notes=notes)
