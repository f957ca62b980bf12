"""The chat template of a run, with the arguments of a row, and what it must write of a conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlkit.data import convert
from rlkit.data.chat import TURN_TEXTS, Message, render_text
from rlkit.data.load import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")  # that every chat template is expected to know
_OTHER_NAMES = {  # of these, for templates that do not name them
    "developer": "system", "function": "tool", "observation": "tool",
    "tool_response": "tool", "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template with its arguments; without `apply` texts are taken as they are."""

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None
    apply: bool
    tools: Sequence[Any] | None
    args: Mapping[str, Any] | None
    written: set[str] = field(default_factory=set, compare=False)
    """the roles, and "tools", that `refuse_unwritten` has found in the text of a row"""

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

    def of_row(self, row: Row, place: str) -> Template:
        """The template with the row's own arguments, which win, and its tools where none are given."""
        tools = convert.row_tools(row, place) if self.tools is None else self.tools
        if self.tools is not None:
            self.written.add("tools")  # those of the run are checked by the environment
        return replace(self, tools=tools, args={**(self.args or {}), **convert.row_template_args(row, place)})

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

    def refuse_unwritten(self, messages: Sequence[Message], place: str) -> None:
        """ValueError for a tool call, reasoning, role or tools that the template does not write.

        Each is written if a change of it changes the text: of the conversation up to a call or reasoning, since
        templates drop the reasoning of past turns; of a role and of the tools once per file.
        """
        for number, message in enumerate(messages):
            for key in ("tool_calls", *TURN_TEXTS[1:]):
                if message.get(key) and not self._changes(messages[:number], message, key, place):
                    raise ValueError(
                        f"{place}: the chat template does not write {key!r} of messages[{number}], so that the turn "
                        "would be trained or shown without it; write it into 'content' as the model would, drop it, or "
                        "use a model whose template has it"
                    )
            if (role := message["role"]) in ("system", "tool", "developer") and role not in self.written:
                if message["content"] and not self._changes(messages[:number], message, "content", place):
                    raise ValueError(f"{place}: the chat template does not write messages of the role {role!r}")
                self.written.add(role)
        if self.tools and "tools" not in self.written:
            names = [str(tool.get("function", tool).get("name")) for tool in self.tools]
            text = self.text(messages, place, opened=False)
            if not any(name in text for name in names):
                raise ValueError(
                    f"{place}: the chat template does not write the tools of the row; use a model whose template has "
                    "tools, or drop the column, e.g. with --rename tools OTHER"
                )
            self.written.add("tools")

    def _changes(self, before: Sequence[Message], message: Message, key: str, place: str) -> bool:
        """Whether the text of a conversation changes with `message[key]`; True where one of the two is refused."""
        value = message[key]
        call = {"type": "function", "function": {"name": "x", "arguments": {}}}
        other = [call, *value] if key == "tool_calls" else f"{value}x"
        try:
            texts = [self.text([*before, {**message, key: item}], place, opened=False) for item in (value, other)]
        except ValueError:
            return True
        return texts[0] != texts[1]

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def _with_known_role(self, message: Message) -> Message:
        role = message["role"]
        return message if role not in _OTHER_NAMES or self._names(role) else {**message, "role": _OTHER_NAMES[role]}

    def blocks(self, messages: Sequence[Message]) -> list[int] | None:
        """The mask of `{% generation %}` blocks; None for a template without any."""
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.source):
            return None
        apply: Any = self.tokenizer.apply_chat_template
        messages = [self._with_known_role(message) for message in messages]
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, **(self.args or {})}
        return apply(messages, tools=self.tools, **options)["assistant_masks"]
