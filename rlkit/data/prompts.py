"""From rows to the tokens of prompts, and what every reader of rows shares."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.data.chat import render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("rlkit.data")
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

    A prompt of more than `max_prompt_tokens` is dropped, never cut: the count is returned and logged with the first
    indices. Raises ValueError, with the row's index (from 0), for a row without `messages` and `prompt`, a conversation
    that is malformed, empty or ends with the assistant's answer, and where every prompt is too long.

    Differs: verl can also cut a long prompt to fit (`truncation`), which trains on questions nobody asked.
    """
    check_rows(rows, max_prompt_tokens=max_prompt_tokens)
    check_plain(apply_chat_template, system_prompt=system_prompt, tools=tools, template_args=template_args)
    template = Template(tokenizer, tools, template_args)
    texts = []
    for index, row in enumerate(rows):
        if not apply_chat_template:
            texts.append(row_text(row, "prompt", index))
            continue
        messages = prompt_messages(row, system_prompt=system_prompt, index=index)
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                f"row {index}: the conversation ends with an assistant message, so there is nothing to answer; "
                "drop that message (a known answer belongs in a column of its own)"
            )
        texts.append(template.text(messages, index, opened=True))
    ids = encode_all(tokenizer, texts, add_special_tokens=not apply_chat_template)
    prompts = [Prompt(ids[i], row, i) for i, row in enumerate(rows)]
    too_long = [(p.index, len(p.ids)) for p in prompts if len(p.ids) > max_prompt_tokens]
    report_dropped(too_long, total=len(prompts), what="prompts", max_prompt_tokens=max_prompt_tokens)
    return [p for p in prompts if len(p.ids) <= max_prompt_tokens], len(too_long)


def prompt_messages(
    row: Mapping[str, Any], *, system_prompt: str | None = None, index: int | None = None
) -> list[dict[str, Any]]:
    """The conversation of a row: its `messages`, or its `prompt` (a string is one user message), after `system_prompt`.

    A conversation that begins with a system message keeps that one. `index` names the row in errors.
    """
    place = "the row" if index is None else f"row {index}"
    column = "messages" if row.get("messages") is not None else "prompt"
    value = row.get(column)
    if value is None:
        raise ValueError(
            f"{place}: neither 'messages' nor 'prompt' is there, or both are null; columns found: {sorted(row)}; one "
            "under another name can be renamed when the data is loaded"
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
    return [dict(message) for message in messages]


class Template(NamedTuple):
    """A tokenizer's chat template with its arguments; errors name the row."""

    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Any] | None
    args: Mapping[str, Any] | None

    def text(self, messages: Sequence[Mapping[str, Any]], index: int, *, opened: bool) -> str:
        """The conversation as text, with the generation prompt if `opened`."""
        try:
            return render_text(
                self.tokenizer, messages, add_generation_prompt=opened, tools=self.tools, template_args=self.args
            )
        except Exception as error:
            raise ValueError(f"row {index}: cannot be rendered: {type(error).__name__}: {error}") from error


def row_text(row: Mapping[str, Any], column: str, index: int) -> str:
    """A column that must be a string."""
    if column not in row:
        raise ValueError(f"row {index}: no column {column!r}; columns found: {sorted(row)}")
    if not isinstance(row[column], str):
        raise ValueError(f"row {index}: column {column!r} must be a string, got {repr(row[column])[:80]}")
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


def report_dropped(too_long: Sequence[tuple[int, int]], *, total: int, what: str, **limit: int) -> None:
    """One log line with what was dropped (row index, tokens); an error where nothing is left."""
    if not too_long:
        return
    ((name, value),) = limit.items()
    shortest = min(num for _, num in too_long)
    if len(too_long) == total:
        raise ValueError(f"all {total} {what} are longer than {name}={value} tokens (the shortest has {shortest})")
    first = ", ".join(f"{index} ({num} tokens)" for index, num in too_long[:5])
    more = ", ..." if len(too_long) > 5 else ""
    _log.warning(
        "dropped %d of %d %s longer than %s=%d: rows %s%s", len(too_long), total, what, name, value, first, more
    )
