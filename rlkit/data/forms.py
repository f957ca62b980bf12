"""The forms of row that rlkit reads, and one check of a row against a form.

A form is a row of `FORMS`: its name, its columns, and how it is rendered as text. Every reader of rows
(`rl_prompts`, `sft_examples`, `preference_pairs`, `labelled_examples`) checks and renders its rows with `read_rows`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlkit.data.chat import TURN_TEXTS, Message, render_text
from rlkit.data.load import Row, Rows, column_error, place_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

X = TypeVar("X")
ROLES = ("system", "user", "assistant", "tool")  # that every chat template is expected to know

_log = logging.getLogger("rlkit.data")
_STRING, _MESSAGES, _LABEL = "a string", "a list of at least one message", "true or false"
_KINDS: dict[str, Callable[[Any], bool]] = {
    _STRING: lambda value: isinstance(value, str),
    _MESSAGES: lambda value: isinstance(value, list | tuple) and len(value) > 0,
    _LABEL: lambda value: _label(value) is not None,
}
_COLUMNS = {"messages": (_MESSAGES,), "label": (_LABEL,)}  # what a column may hold; other columns: a string or messages
_PROMPT, _RESPONSES = ("messages", "prompt"), ("completion", "response", "messages")
_LABELS = {"true": True, "1": True, "false": False, "0": False}  # a cell of a CSV file is text
_COLUMN_FIX = "check which columns hold the texts: one under another name is renamed with --rename"


class Turn(NamedTuple):
    """The text of a context up to the generation prompt (`prompt`), and the same with the assistant's turn (`whole`).

    A `literal` turn still lacks its end-of-turn token. `blocks` is the mask of the template's `{% generation %}`.
    `empty`: the turn (of a prompt: the prompt) has neither text nor a tool call.
    """

    place: str
    prompt: str
    whole: str = ""
    empty: bool = False
    label: bool | None = None
    literal: bool = True
    blocks: list[int] | None = None


class Form(NamedTuple):
    """A form of row. An entry of `columns` holds the names that one required column may have; `read` renders a row.

    `optional` names a column that `read` may need too.
    """

    name: str
    columns: tuple[tuple[str, ...], ...]
    read: Callable[[Row, str, Template], list[Turn]]
    optional: tuple[str, ...] = ()

    def __str__(self) -> str:
        columns = ", ".join(" or ".join(names) for names in (self.optional, *self.columns) if names)
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name} has {{{columns}}}"

    def missing(self, row: Row) -> list[tuple[str, ...]]:
        """The columns that a row lacks."""
        return [names for names in self.columns if not any(name in row for name in names)]

    def likeness(self, row: Row) -> tuple[int, int]:
        """How many columns of the row are the form's, and, among equals, how few of the form's are missing."""
        names = {name for names in (self.optional, *self.columns) for name in names}
        return len(names & {*row}), -len(self.missing(row))


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template with its arguments; without `apply` texts are taken as they are."""

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None
    apply: bool
    tools: Sequence[Any] | None
    args: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        options = {"system_prompt": self.system_prompt, "tools": self.tools, "template_args": self.args}
        given = [name for name, value in options.items() if value is not None]
        if given and not self.apply:
            raise ValueError(
                f"without the chat template there is no place for {' and '.join(given)}: write it into the prompt"
            )

    @property
    def source(self) -> str:
        """The template's text; "" without a chat template."""
        tokenizer: Any = self.tokenizer
        return tokenizer.get_chat_template(tools=self.tools) if tokenizer.chat_template else ""

    def text(self, messages: Sequence[Message], place: str, *, opened: bool) -> str:
        """The conversation as text, with the generation prompt if `opened`. Errors name the row."""
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

    def blocks(self, messages: Sequence[Message]) -> list[int] | None:
        """The mask of `{% generation %}` blocks; None for a template without any."""
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.source):
            return None
        apply: Any = self.tokenizer.apply_chat_template
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, **(self.args or {})}
        return apply(messages, tools=self.tools, **options)["assistant_masks"]


def read_rows(rows: Sequence[Row], template: Template, *forms: Form, **limit: int) -> list[list[Turn]]:
    """The turns of each row, by the first of `forms` whose columns it has. `limit`: the token limit, to be checked.

    Raises ValueError, with the row (see `place_of`), for a row that fits none of them or holds a bad value.
    """
    ((name, value),) = limit.items()
    if len(rows) == 0:
        raise ValueError("rows is empty: there is nothing to train on")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    found = check_columns(rows, *forms, apply_chat_template=template.apply)
    return [form.read(row, place_of(rows, index), template) for index, (row, form) in enumerate(zip(rows, found))]


def check_columns(rows: Sequence[Row], *forms: Form, apply_chat_template: bool = True) -> list[Form]:
    """The form of each row: the first of `forms` whose columns it has. Needs no tokenizer.

    Raises ValueError, with the row (see `place_of`), for a row that lacks a column of the last form, or holds a value
    of the wrong type in one.
    """
    found = []
    for index, row in enumerate(rows):
        form = next((form for form in forms if not form.missing(row)), forms[-1])
        for names in form.columns:
            cell(row, names, place_of(rows, index), form=form, plain=not apply_chat_template)
        found.append(form)
    return found


def cell(row: Row, names: Sequence[str], place: str, *, form: Form, plain: bool = False) -> tuple[str, Any]:
    """(name, value) of the first column of `names` that a row has, null last.

    A column holds a string or messages, `messages` only messages, `label` true or false; in a `plain` row (without a
    chat template) all but the label are strings. ValueError, with the columns of the row and the form that it looks
    most like, for a row without any of `names`, or with a value of another type.
    """
    names = [name for name in names if not (plain and name == "messages")]
    there = [name for name in names if name in row]
    if not there:
        near = max(FORMS, key=lambda known: known.likeness(row))
        looks = "" if near.columns == form.columns else f", and the row looks most like a {near.name}"
        lacks = f"no column {names[0]!r}" if len(names) == 1 else f"neither {' nor '.join(map(repr, names))} is there"
        raise column_error(place, lacks, row, f"; {form}{looks}; a column under another name is renamed with --rename")
    name = next((name for name in there if row[name] is not None), there[0])
    value = row[name]
    kinds = [kind for kind in _COLUMNS.get(name, (_STRING, _MESSAGES)) if not (plain and kind == _MESSAGES)]
    if not any(_KINDS[kind](value) for kind in kinds):
        note = " (messages need a chat template)" if plain and isinstance(value, list) else ""
        found = f"column {name!r} must be {' or '.join(kinds)}{note}, got {repr(value)[:80]}"
        raise column_error(place, found, row)
    return name, value


def prompt_messages(row: Row, *, system_prompt: str | None = None, place: str = "the row") -> list[dict[str, Any]]:
    """The conversation of a row: its `messages`, or its `prompt` (a string is one user message), after `system_prompt`.

    A conversation that begins with a system message keeps that one. The content of a message is text: parts
    `{"type": "text", "text": ...}` are joined without a separator, as chat templates join them, and an assistant
    message with neither content nor tool calls holds "". `place` names the row in errors.

    Raises ValueError for a row without `messages` and `prompt`, for a malformed message, and for any other content:
    null, a number, or a part that is not text, such as an image.
    """
    column, value = cell(row, _PROMPT, place, form=PROMPT)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{place}: {column}[{number}] must be an object like {{'role': 'user', 'content': '...'}}, "
                f"got {repr(message)[:80]}"
            )
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return [_with_text(message, f"{place}: {column}[{number}]") for number, message in enumerate(messages)]


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


def drop(
    rows: Sequence[Row],
    items: Sequence[tuple[int, X]],
    bad: Callable[[X], object],
    *,
    what: str,
    why: str,
    fix: str = _COLUMN_FIX,
    keep: bool = False,
    note: Callable[[X], str] = lambda _: "",
) -> list[tuple[int, X]]:
    """`items`, (row index, X), without the `bad` ones, which are logged in one line; ValueError, with `fix`, for all.

    The line has `what` they are, `why` (a verb and its object), and a `note` on each. With `keep` they are only logged.
    """
    found = [(index, item) for index, item in items if bad(item)]
    if not found:
        return [*items]
    source = f"{rows.source}: " if isinstance(rows, Rows) else ""
    if len(found) == len(items) and not keep:
        raise ValueError(f"{source}all {len(items)} {what} {why}; {fix}")
    first = ", ".join(place_of(rows, index, with_source=False) + note(item) for index, item in found[:5])
    _log.warning(
        "%s%s %d of %d %s that %s: %s%s",
        source, "kept" if keep else "dropped", len(found), len(items), what, why, first, ", ..." * (len(found) > 5),
    )  # fmt: skip
    return [*items] if keep else [(index, item) for index, item in items if not bad(item)]


def drop_long(
    rows: Sequence[Row], items: Sequence[tuple[int, X]], length: Callable[[X], int], *, what: str, **limit: int
) -> list[tuple[int, X]]:
    """`drop` of the items with more tokens than the limit."""
    ((name, value),) = limit.items()
    fix = f"the shortest has {min(length(item) for _, item in items)} tokens: raise it, or give shorter ones"
    return drop(
        rows, items, lambda item: length(item) > value, what=what, why=f"are longer than {name}={value}", fix=fix,
        note=lambda item: f" ({length(item)} tokens)",
    )  # fmt: skip


def _label(value: Any) -> bool | None:
    return _LABELS.get(str(value).strip().lower())


def _with_text(message: Message, place: str) -> dict[str, Any]:
    """The message with text as its content. A template would write anything else as Python does: "None", "[{...}]"."""
    content = message.get("content")
    if isinstance(content, str):
        return dict(message)
    if content is None and message["role"] == "assistant":
        return dict(message) if message.get("tool_calls") else {**message, "content": ""}
    if not isinstance(content, list | tuple) or not content:
        raise ValueError(f"{place}.content must be a string, got {repr(content)[:80]}")
    return {**message, "content": joined_parts(content, f"{place}.content")}


def _is_empty(message: Message) -> bool:
    """Whether a message of `prompt_messages` holds no text, white space aside, and no tool call."""
    return not message.get("tool_calls") and not any(str(message.get(key) or "").strip() for key in TURN_TEXTS)


def _context(row: Row, place: str, template: Template) -> tuple[str, list[dict[str, Any]]]:
    """A row's prompt as text, up to the generation prompt, and its messages (none without a chat template)."""
    if not template.apply:
        return cell(row, ("prompt",), place, form=PROMPT, plain=True)[1], []
    messages = prompt_messages(row, system_prompt=template.system_prompt, place=place)
    return template.text(messages, place, opened=True), messages


def _prompt(row: Row, place: str, template: Template) -> list[Turn]:
    text, messages = _context(row, place, template)
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{place}: the conversation ends with an assistant message, so there is nothing to answer; "
            "drop that message (a known answer belongs in a column of its own)"
        )
    return [Turn(place, text, empty=all(map(_is_empty, messages)) if messages else not text.strip())]


def _conversation(row: Row, place: str, template: Template) -> list[Turn]:
    """One turn per assistant message."""
    messages = prompt_messages(row, system_prompt=template.system_prompt, place=place)
    ends = [end for end, message in enumerate(messages) if message["role"] == "assistant"]
    if not ends or ends[0] == 0:
        found = f"needs an assistant message with a message before it, got roles {[m['role'] for m in messages]}"
        raise column_error(place, found, row, "; rows of {prompt, response} need the column 'response'")
    turns = []
    for end in ends:
        prompt = template.text(messages[:end], place, opened=True)
        whole, blocks = template.text(messages[: end + 1], place, opened=False), template.blocks(messages[: end + 1])
        turns.append(Turn(place, prompt, whole, empty=_is_empty(messages[end]), literal=False, blocks=blocks))
    return turns


def _response(
    row: Row, place: str, template: Template, *, names: Sequence[str] = ("response",), label: bool | None = None
) -> list[Turn]:
    """A response (a string, or the last of a list of messages) after the row's prompt or its own earlier messages."""
    column, response = cell(row, names, place, form=RESPONSE, plain=not template.apply)
    if not isinstance(response, str):
        messages = prompt_messages({"messages": response}, place=f"{place}, {column!r}")
        last, whole = messages[-1], column == "messages" or messages[0]["role"] in ("system", "user")
        if last["role"] != "assistant" or (column == "messages" and len(messages) == 1):
            raise ValueError(
                f"{place}: {column!r} must end with an assistant message of text that answers another message, got "
                f"{repr(last)[:80]}"
            )
        if more := [key for key in (*TURN_TEXTS, "tool_calls") if key != "content" and last.get(key)]:
            raise ValueError(
                f"{place}: the last message of {column!r} holds {' and '.join(more)} beside its content, and a "
                "response is text: write all of it into 'content' as the model would"
            )
        before = [] if whole else prompt_messages(row, place=place)
        row, response = {"messages": before + messages[:-1]}, last["content"]
    prompt, _ = _context(row, place, template)
    return [Turn(place, prompt, prompt + response, empty=not response.strip(), label=label)]


def _pair(row: Row, place: str, template: Template) -> list[Turn]:
    """The chosen and the rejected response."""
    chosen, rejected = (_response(row, place, template, names=[name])[0] for name in ("chosen", "rejected"))
    if chosen.prompt != rejected.prompt:
        raise ValueError(
            f"{place}: chosen and rejected differ before their last message; a pair answers one prompt twice"
        )
    return [chosen, rejected]


def _labelled(row: Row, place: str, template: Template) -> list[Turn]:
    return _response(row, place, template, names=_RESPONSES, label=_label(row["label"]))


PROMPT = Form("prompt", (_PROMPT,), _prompt)
CONVERSATION = Form("conversation", (_PROMPT,), _conversation)
RESPONSE = Form("prompt with a response", (_PROMPT, ("response",)), _response)
PAIR = Form("preference pair", (("chosen",), ("rejected",)), _pair, optional=_PROMPT)
LABELLED = Form("labelled response", (_RESPONSES, ("label",)), _labelled, optional=_PROMPT)
FORMS = (PROMPT, CONVERSATION, RESPONSE, PAIR, LABELLED)
