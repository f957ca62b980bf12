"""The chat template of a run, with the arguments of a row, and what it must write of a conversation."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from rlkit._util.text import excerpt
from rlkit.data import columns
from rlkit.data.chat import TURN_TEXTS, Message, as_written, beginning, check_arguments, render_text
from rlkit.data.images import ImageReader
from rlkit.data.load import Row
from rlkit.data.markup import REASONING, encode, markup_of, mentioned_end, opened_by, reasoned, speaker_of
from rlkit.data.messages import disordered, misfits, name_of, row_template_args, row_tools, untooled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

X = TypeVar("X")
_log = logging.getLogger("rlkit.data")
ROLES = ("system", "user", "assistant", "tool")  # that every chat template is expected to know
_MEANT = {
    "human": "user", "customer": "user", "prompter": "user", "question": "user", "bot": "assistant", "gpt": "assistant",
    "ai": "assistant", "model": "assistant", "chatbot": "assistant", "agent": "assistant", "answer": "assistant",
}  # fmt: skip
_OTHER_NAMES = {  # of these, for templates that do not name them
    "developer": "system", "function": "tool", "observation": "tool",
    "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
_OF_CALLS = ("type", "function", "name", "arguments")
RESULTS = ("tool", *(name for name, role in _OTHER_NAMES.items() if role == "tool"), "ipython")
_CALL = "{'type': 'function', 'function': {'name': 'weather', 'arguments': {'city': 'Rome'}}}"
_THINKS = ("enable_thinking", "thinking")  # arguments that turn reasoning off in the templates of 2026
_WRITTEN = (
    "in their text, which the chat template writes itself (ready-made prompts and responses are read with "
    "--no-chat-template)"
)
_DISORDERED = (
    "as a result in another order than the calls, and the chat template does not write which call a result is of"
)
_NO_TOOLS = "as the tool of a call beside an empty list of tools, so that the model is given none"
_PLAIN = "in messages that are not the assistant's it is read as text, no token"
_STOP_OF_OTHERS = (
    "at the end of an answer, the stop token of another model, which trains as letters: remove it (the chat template "
    "writes the end)"
)
_TURN_OF_OTHERS = (
    "around a text, markup of ready-made prompts (of another model or data set) that is read as letters inside this "
    "chat template: give the bare texts, as messages if there are several"
)
_SPEAKER = {
    "user": "at the end of a prompt, where the chat template writes who speaks next: remove it (and a stop word at the "
    "end of the answers)",
    "assistant": "at the beginning of an answer, where the chat template writes who speaks: remove it",
}
_MENTIONED = (
    "inside a line of an answer that opens no reasoning: the chat template takes the text before it for reasoning"
)
NO_PROMPT = (
    "markup", "",
    "as the text of a user, and train the answer without a prompt (kept: drop them if that is not meant)",
)  # fmt: skip
_TRIES = 16  # rows of a file that may show whether the template reads a key or an argument


def role_fix(roles: Sequence[Any]) -> str:
    """What to write for roles of other systems: "; write the role 'user' for 'human'"."""
    meant = {role: _MEANT[role.lower()] for role in roles if isinstance(role, str) and role.lower() in _MEANT}
    return "; write the role " + ", ".join(f"{ours!r} for {role!r}" for role, ours in meant.items()) if meant else ""


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template with its arguments; without `apply` texts are taken as they are."""

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None
    apply: bool
    tools: Sequence[Any] | None
    args: Mapping[str, Any] | None
    of_run: bool = False
    """whether the tools are those of an RL run: its environment checks them, and a system prompt may list them"""
    seen: dict[Any, Any] = field(default_factory=dict, compare=False)
    """in how many rows a key or argument changed no text, -1 where it changed that of one row"""
    images: ImageReader | None = None
    continue_answer: bool = False
    """whether an assistant message that ends the prompt begins the answer, in any row"""
    lost: dict[Any, None] = field(default_factory=dict, compare=False)
    """keys and arguments of a row that changed none of its texts; markup in them, and calls that do not fit"""

    def __post_init__(self) -> None:
        if not hasattr(self.tokenizer, "decode"):
            fix = "rlkit.model.pretrained.load_tokenizer(path) loads one"
            raise TypeError(f"`tokenizer` must be a tokenizer, got {repr(self.tokenizer)[:80]}: {fix}")
        for name, value, kinds, must in (
            ("system_prompt", self.system_prompt, str, "a string"),
            ("template_args", self.args, Mapping, "a dict like {'enable_thinking': False}"),
            ("tools", self.tools, list | tuple, "a list of functions or JSON schemas"),
        ):
            if value is not None and not isinstance(value, kinds):
                raise TypeError(f"`{name}` must be {must}, got {repr(value)[:80]}")
        options = {"system_prompt": self.system_prompt, "tools": self.tools, "template_args": self.args}
        named = [name for name, value in options.items() if value is not None]
        if named and not self.apply:
            raise ValueError(
                f"without a chat template there is no place for {' and '.join(f'`{name}`' for name in named)}: drop "
                "that, or use a chat template"
            )
        check_arguments(self.args, "`template_args`")

    @property
    def source(self) -> str:
        """The template's text; "" without a chat template."""
        tokenizer: Any = self.tokenizer
        return tokenizer.get_chat_template(tools=self.tools) if tokenizer.chat_template else ""

    def of_row(self, row: Row, place: str) -> Template:
        """The template with the row's own arguments, which win, and its tools where none are given."""
        kwargs = row_template_args(row, place)
        check_arguments(kwargs, f"{place}: chat_template_kwargs")
        tools = row_tools(row, place) if self.tools is None else self.tools
        args = {**(self.args or {}), **kwargs}
        lost: dict[Any, None] = {("markup", name, _NO_TOOLS): None for name in (untooled(row) if tools is None else ())}
        return replace(self, tools=tools, args=args, of_run=self.of_run and self.tools is not None, lost=lost)

    def text(self, messages: Sequence[Message], place: str, *, opened: bool) -> str:
        """The conversation as text, with the generation prompt if `opened`. Errors name the row."""
        if not self.source:
            raise ValueError(
                f"{place}: a chat template is needed, and the tokenizer has none: give one with --chat-template FILE "
                "(in Python: rlkit.data.template_files.set_template), or use an instruction-tuned model; with "
                "--no-chat-template, strings are plain text and, in RL, so are the joined contents of messages"
            )
        messages = [self._with_known_role(message) for message in messages]
        for role in {message["role"] for message in messages}.difference(ROLES):
            if not self._names(role):
                allowed = f"roles are {', '.join(ROLES)}, and others that the chat template names{role_fix([role])}"
                raise ValueError(f"{place}: unknown role {role!r}; {allowed}")
        try:
            markup_of(self.tokenizer).refuse_first(messages)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        try:
            return render_text(
                self.tokenizer, messages, add_generation_prompt=opened, tools=self.tools, template_args=self.args
            )
        except Exception as error:
            fix, null = "", re.search("content|None", str(error))
            if null and any(message.get("tool_calls") and message.get("content") is None for message in messages):
                fix = '; write "content": "" beside \'tool_calls\''
                if "tool_calls" not in self.source:
                    fix = "; the chat template has no tool calls: write them into 'content' as the model would"
                elif not self._writes_calls(messages, place):
                    fix = "; the chat template writes no calls beside a content, nor without one: write them into "
                    fix += "'content' as the model would, or give a template that has them (--chat-template)"
            raise ValueError(f"{place}: cannot be rendered: {type(error).__name__}: {error}{fix}") from error

    def begun_text(self, messages: Sequence[Message], place: str) -> str:
        """The conversation up to the end of its last message, which begins the answer: see `beginning`.

        A template that writes such an answer otherwise once it is finished is named in the log, once.
        """
        opened = self.text(messages[:-1], place, opened=True)
        try:
            begun = opened + beginning(messages[-1], opened)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if "begun" not in self.seen:
            whole = self.text(messages, place, opened=False)
            self.seen["begun"] = same = whole.startswith(begun.rstrip())
            shared = next((i for i, (a, b) in enumerate(zip(begun, whole)) if a != b), len(begun))
            said = "prompts end with the beginning of the answer as it is, %r; the chat template writes a past one %r"
            if not same:
                _log.warning(said, begun[shared:][:60], whole[shared:][:60])
        return begun

    def refuse_unwritten(self, messages: Sequence[Message], place: str) -> None:
        """ValueError for a content, tool call, reasoning or tools that the template does not write.

        Each row is rendered with and without: a content is written if a mark at its end is in the text. Of a call or
        reasoning the text is that of the conversation up to it, since templates drop the reasoning of past turns.
        Keys and arguments that change no text are collected in `lost`.
        """
        for message in messages:
            _check_calls(message, place)
        self.lost.update({("markup", *misfit): None for misfit in misfits(messages, self.tools or ())})
        if (first := disordered(messages)) and not self._tells_results(messages, place):
            self.lost["markup", first, _DISORDERED] = None
        for number, message in enumerate(messages):
            where = f"{place}: the text of the {message['role']}"
            text = str(message.get("content") or "")
            self.refuse_markup(text, where, role=message["role"])
            if message["role"] == "user" and not text.strip():
                self.lost[NO_PROMPT] = None
            if number and message["role"] == "assistant" and (tag := mentioned_end(text)):
                opened, whole = self.turn(messages, number, place)
                if text.strip() not in whole and not opened_by(opened):
                    self.lost["markup", tag, _MENTIONED] = None
            if self.images is not None:
                self.images.refuse_placeholders(text, place)
            for key in ("tool_calls", *TURN_TEXTS[1:]):
                if message.get(key) and not self._changes(messages[:number], message, key, place):
                    fix = "write it into 'content' as the model would, drop it, or use a model whose template has it"
                    if key == "tool_calls" and (named := self._id_with_name(messages[:number], message, place)):
                        fix = f"it writes their ids: give each call one with its function's name, {named!r}, or {fix}"
                    raise _not_written(f"{key!r} of the message {excerpt(dict(message))}", place, fix)
            if lost := self._lost_argument(messages[:number], message, place):
                fix = "write the call into 'content' as the model would, or use a template that writes all arguments"
                raise _not_written(f"the argument {lost} of a call", place, fix)
        unwritten = self._unwritten(messages, place)
        if unwritten is not None:
            fix = "move it into a message that is written, drop it, or use a model whose template has it"
            raise _not_written(f"the content of the message {excerpt(unwritten)}", place, fix)
        if self.tools and not self.of_run and not self._writes_tools(messages, place):
            fix = "use a model whose template has tools, or drop the column, e.g. with --rename tools OTHER"
            raise _not_written("the tools of the row", place, fix)
        self._find_lost(messages, place)

    def refuse_markup(self, text: str, where: str, *, role: str = "assistant") -> None:
        """ValueError for a text that begins with markup that the template writes; elsewhere it goes into `lost`.

        A response may end with the end of its turn. The text of another `role` than the policy's is plain: control
        tokens are read as text in it. Markup of other families of models goes into `lost` too, but for that of a tool.
        """
        markup, plain = markup_of(self.tokenizer), role != "assistant"
        if not plain and (stop := markup.foreign_stop(text)):
            self.lost["markup", stop, _STOP_OF_OTHERS] = None
        if role in ROLES[:3] and (turn := markup.foreign_turn(text)):
            self.lost["markup", turn, _TURN_OF_OTHERS] = None
        elif role in _SPEAKER and (speaker := speaker_of(text, answer=not plain)):
            self.lost["markup", speaker, _SPEAKER[role]] = None
        first = next((token for token in markup.written if text.lstrip().startswith(token)), None)
        end = markup.end_text
        if first is not None and not (first == end and text.strip() == end):
            fix = "ready-made prompts and responses are strings for --no-chat-template"
            raise ValueError(f"{where} begins with {first!r}, which the chat template writes itself; {fix}")
        said = text if plain else markup.without_stop(text)
        if (stop := text[len(said) :].strip().removeprefix(markup.closer.strip()).strip()) and stop != end:
            place = f"at the end of an answer, which ends with {end!r} where the chat template writes it"
            self.lost["markup", stop, place] = None
        inside = [match[0] for match in markup.control.finditer(said)] if markup.control else []
        # what the template has for turns of the assistant alone, such as the start of a call, is the policy's own
        allowed = () if plain else [token for token in inside if token in self.source and token not in markup.written]
        if first := next((token for token in inside if token not in allowed), None):
            place = "in their text" if plain else "in the text of an answer, where it is that token"
            place = _WRITTEN if first in markup.written else place
            self.lost["markup", first, f"{place}; {_PLAIN}" if plain else place] = None

    def turn(self, messages: Sequence[Message], number: int, place: str) -> tuple[str, str]:
        """The texts up to the generation prompt of the assistant's message `number`, and with that message."""
        prompt = self.text(messages[:number], place, opened=True)
        return prompt, self.text(messages[: number + 1], place, opened=False)

    def end_after(self, whole: str, messages: Sequence[Message], number: int, place: str) -> int | None:
        """The token that ends message `number` of the assistant, the last of `whole`; None where that has it."""
        markup = markup_of(self.tokenizer)
        if markup.written_end is not None:
            return None
        role = "tool" if messages[number].get("tool_calls") else "user"
        after = messages[number + 1 : number + 2] or [{"role": role, "content": "x", "name": "x"}]
        (both,) = self._texts(place, [*messages[: number + 1], *after]) or [""]  # a template may refuse what follows
        return markup.end_before(both.removeprefix(whole) if both.startswith(whole) else "")

    def reopened(self, messages: Sequence[Message], number: int, place: str) -> ValueError:
        """The error of an assistant's message whose text does not go on from the generation prompt."""
        prompt, whole = (encode(self.tokenizer, text) for text in self.turn(messages, number, place))
        shared = next((i for i, (a, b) in enumerate(zip(prompt, whole)) if a != b), min(len(prompt), len(whole)))
        opened, said = (excerpt(str(self.tokenizer.decode(ids[shared:])), 60) for ids in (prompt, whole))
        fix = (
            "give the conversation up to that turn as 'prompt' and the turn, reasoning included, as 'response' (taken "
            "literally), or change the chat template"
        )
        for name in (name for name in _THINKS if re.search(rf"\b{name}\b", self.source)):
            args = {**(self.args or {}), name: False}
            with suppress(ValueError):
                without, written = replace(self, args=args).turn(messages, number, place)
                if written.startswith(without):
                    fix = f"where the answers have no reasoning, --template-args '{json.dumps(args)}'; else {fix}"
                    break
        return ValueError(
            f"{place}: the chat template opens a turn with {opened} but writes the assistant's message as {said}, so "
            f"that what is trained is not what would be sampled: {fix}"
        )

    def _changes(self, before: Sequence[Message], message: Message, key: str, place: str) -> bool:
        """Whether the text of a conversation has `message[key]`; True where the marked one is refused.

        Of calls, each one must be there: their names are marked, also within their ids (Kimi K2 writes these alone).
        """
        value = message[key]
        if key == "tool_calls":
            names = [f"{call['function']['name']}_mark_{n}_" for n, call in enumerate(value)]
            other: Any = [_renamed(call, name) for call, name in zip(value, names, strict=True)]
        else:
            names, other = [], f"{value}x"
        told = ([*before, {**message, key: item}] for item in (value, other))
        texts = self._texts(place, *told)
        return texts is None or (texts[0] != texts[1] and all(name in texts[1] for name in names))

    def _lost_argument(self, before: Sequence[Message], message: Message, place: str) -> str:
        """The first argument of the calls that the text does not have, as "name(key)"; "" for none.

        Each is marked in its place. Empty ones do not count: a template may leave them out.
        """
        calls, marks = [], dict[str, str]()
        for call in (*(message.get("tool_calls") or ()),):
            function, given = call["function"], call["function"].get("arguments")
            of = {key: x for key, x in given.items() if not columns.is_empty(x)} if isinstance(given, Mapping) else {}
            named = {key: f"mark_{len(marks) + n}_" for n, key in enumerate(of)}
            marks |= {mark: f"{function['name']}({key})" for key, mark in named.items()}
            calls.append({**call, "function": {**function, "arguments": {**given, **named} if of else given}})
        (text,) = (marks and self._texts(place, [*before, {**message, "tool_calls": calls}])) or [""]
        return next((name for mark, name in marks.items() if text and mark not in text), "")

    def _writes_calls(self, messages: Sequence[Message], place: str) -> bool:
        """Whether the text has the calls of all messages if each has a content."""
        told = [{**message, "content": message.get("content") or ""} for message in messages]
        called = [number for number, message in enumerate(told) if message.get("tool_calls")]
        return all(self._changes(told[:number], told[number], "tool_calls", place) for number in called)

    def _id_with_name(self, before: Sequence[Message], message: Message, place: str) -> str:
        """An id for the first call that has its function's name, where the text then has the calls; "" elsewhere."""
        if not re.search(r"\bid\b", self.source):
            return ""
        ids = [f"functions.{call['function']['name']}:{n}" for n, call in enumerate(message["tool_calls"])]
        calls = [{**call, "id": new} for call, new in zip(message["tool_calls"], ids, strict=True)]
        return ids[0] if self._changes(before, {**message, "tool_calls": calls}, "tool_calls", place) else ""

    def _texts(self, place: str, *conversations: Sequence[Message]) -> list[str] | None:
        """The conversations as texts; None where one is refused."""
        with suppress(ValueError):
            return [self.text(messages, place, opened=False) for messages in conversations]
        return None

    def _unwritten(self, messages: Sequence[Message], place: str) -> Message | None:
        """The first message whose content is not in the text of the conversation; None where all are."""
        marked = [dict(message) for message in messages]
        marks = {n: f" (mark {n} of a message)" for n, m in enumerate(messages) if str(m.get("content") or "").strip()}
        for number, mark in marks.items():
            marked[number]["content"] += mark
        if (texts := self._texts(place, marked)) is None:
            return None
        (text,) = texts
        unwritten = next((dict(messages[number]) for number, mark in marks.items() if mark not in text), None)
        for message in (messages[number] for number in marks if unwritten is None):
            if message["role"] in ("user", "assistant"):
                self.writes(message, text, place, past=True)
        return unwritten

    def writes(self, message: Message, text: str, place: str, *, past: bool = False, literal: bool = False) -> bool:
        """Whether a message stands in the text, white space around it and around its tags of reasoning aside.

        One that does not is named, once for a role. The reasoning alone is not: in `past` turns, of which templates
        drop it, and of a response, which is trained as it stands (`literal`) where the template changes it.
        """
        markup, role, said = markup_of(self.tokenizer), message["role"], str(message.get("content") or "")
        parts, outer = reasoned(markup.without_stop(said) if role == "assistant" else markup.plain(said))
        missing = [part for part in parts if part not in text]
        named = [part for part in missing if part in outer or not (past or literal)]
        if named and f"changed {role}" not in markup.told:
            markup.told.add(f"changed {role}")
            note = "" if past else f" but {text[:60]!r}"
            note = "; a response is trained as it stands" if literal else note
            line = "%s: the chat template changes texts of the %s: it does not write %r as it stands%s"
            _log.warning(line, place, role, named[0][:60], note)
        return not missing

    def name_untrained(self, message: Message, prompt: str, blocks: Sequence[tuple[int, int]], place: str) -> None:
        """Name, once, what of a turn stands outside of the `{% generation %}` blocks: a part of its text, or a call."""
        markup, decode = markup_of(self.tokenizer), self.tokenizer.decode
        if "untrained" in markup.told:
            return
        turn = blocks[len(encode(self.tokenizer, prompt)) :]
        written, trained = (str(decode([i for i, on in turn if on or not only])) for only in (False, True))
        calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        parts = [part for key in TURN_TEXTS for part in reasoned(str(message.get(key) or ""))[0]]
        out = [part for part in (*parts, *calls) if part in written and part not in trained]
        if out and trained:
            markup.told.add("untrained")
            fact = "%s: the {%% generation %%} blocks of the chat template leave out %r, or a part of it, in a turn of "
            _log.warning(fact + "the assistant, which is not trained: move it into the block", place, out[0][:60])

    def name_trimmed(self, message: Message, written: str, place: str) -> None:
        """Name, once, an answer around which the text has less white space: the template trims it."""
        markup = markup_of(self.tokenizer)
        texts = REASONING.split(said := markup.without_stop(str(message.get("content") or "")))
        trimmed = texts[0].rstrip() not in written or texts[-1].lstrip() not in written
        if trimmed and "trimmed" not in markup.told:
            markup.told.add("trimmed")
            line = "%s: the chat template trims white space around an answer, %r: answers train without it"
            _log.warning(line, place, said if len(said) <= 60 else f"{said[:30]}...{said[-30:]}")

    def _writes_tools(self, messages: Sequence[Message], place: str) -> bool:
        """Whether each tool is named more often in the text than in that without tools."""
        names = [name for tool in self.tools or () if (name := name_of(tool))]
        text, bare = self.text(messages, place, opened=False), replace(self, tools=None)._texts(place, messages)
        return bare is None or (text != bare[0] and all(text.count(name) > bare[0].count(name) for name in names))

    def _tells_results(self, messages: Sequence[Message], place: str) -> bool:
        """Whether the text tells which call a result is of, by its id or name."""
        names = ("tool_call_id", "name")
        other = [{key: "x" if key in names and value else value for key, value in m.items()} for m in messages]
        texts = self._texts(place, messages, other)
        return texts is None or texts[0] != texts[1]

    def _find_lost(self, messages: Sequence[Message], place: str) -> None:
        """Collect the keys of messages, and the arguments, that the text does not depend on."""

        def conversation(turns: Sequence[Message]) -> Iterator[str]:
            yield self.text(turns, place, opened=False)

        def arguments(kwargs: Mapping[str, Any]) -> Iterator[str]:
            yield from (replace(self, args=kwargs).text(messages, place, opened=opened) for opened in (True, False))

        for number, message in enumerate(messages):
            for key, less in _without_each(message):
                tails = [messages[number + 1 :], *[[]] * (message["role"] == "assistant")]  # now, or in the past
                name = ("message key", key, message["role"], number == 0)
                for after in tails:
                    both = ([*messages[:number], item, *after] for item in (message, less))
                    self._try(name, conversation, *both)
        args = dict(self.args or {})
        for key, value in args.items():
            others = [{name: item for name, item in args.items() if name != key}]
            others += [{**args, key: not value if isinstance(value, bool) else f"{value}x"}]
            for other in others if re.search(rf"\b{re.escape(key)}\b", self.source) else ():
                self._try(("template argument", key), arguments, args, other)
            self.lost["template argument", key] = None

    def _try(self, name: tuple[Any, ...], texts: Callable[[X], Iterator[str]], value: X, other: X) -> None:
        """Whether one of the texts of `value` and `other` differs, in `seen` and `lost`."""
        self.lost[name] = None
        if 0 <= (tries := self.seen.get(name, 0)) < _TRIES:
            try:
                differs = any(one != two for one, two in zip(texts(value), texts(other), strict=True))
            except ValueError:
                differs = True
            self.seen[name] = -1 if differs else tries + 1

    def not_read(self, names: Sequence[tuple[Any, ...]]) -> dict[tuple[str, str], None]:
        """The (kind, name) of `lost` on which no rendered row depends."""
        return {name[:2]: None for name in names if self.seen.get(name) != -1}

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def _with_known_role(self, message: Message) -> Message:
        role = message["role"]
        return message if role not in _OTHER_NAMES or self._names(role) else {**message, "role": _OTHER_NAMES[role]}

    def blocks(self, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
        """The tokens with the mask of `{% generation %}` blocks; None for a template without any."""
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.source):
            return None
        apply: Any = self.tokenizer.apply_chat_template
        messages = [self._with_known_role(message) for message in messages]
        how: Any = {"tools": self.tools, "template_args": self.args}
        _, messages = as_written(self.tokenizer, messages, add_generation_prompt=False, **how)
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, **(self.args or {})}
        made = apply(messages, tools=self.tools, **options)
        return [*zip(made["input_ids"], made["assistant_masks"], strict=True)]


def _not_written(part: str, place: str, fix: str) -> ValueError:
    return ValueError(f"{place}: the chat template does not write {part}; {fix}")


def _renamed(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A call of the function `name`, in its id too where that has the name of its own: "functions.f:0"."""
    old, given = call["function"]["name"], call.get("id")
    renamed = {**call, "function": {**call["function"], "name": name}}
    return {**renamed, "id": given.replace(old, name)} if isinstance(given, str) and old else renamed


def _check_calls(message: Message, place: str) -> None:
    """ValueError for a tool call without the name of a function."""
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{place}: 'tool_calls' must be a list of calls like {_CALL}, got {excerpt(calls)}")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{place}: a call in 'tool_calls' must be like {_CALL}, got {excerpt(call)}")


def _without_each(message: Message) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each unknown key of a message and of its calls ("tool_calls.KEY"), and the message without it."""
    for key, path in [*columns.unknown_keys(message)]:
        yield path, {name: value for name, value in message.items() if name != key}
    calls = message.get("tool_calls") or ()
    every = [columns.unknown_keys(of) for call in calls for of in (call, call["function"])]
    for key in dict.fromkeys(key for key, _ in chain(*every) if key not in _OF_CALLS):
        without = [
            {k: {n: v for n, v in item.items() if n != key} if k == "function" else item for k, item in call.items()}
            for call in ({k: item for k, item in call.items() if k != key} for call in calls)
        ]
        yield f"tool_calls.{key}", {**message, "tool_calls": without}
