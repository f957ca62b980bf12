"""Episodes of several turns in messages, joined token by token with the model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit._util.numbers import show
from rlkit.data.chat import Message
from rlkit.data.episode_images import EpisodeImages, mark_of, parts_of, readable
from rlkit.data.images import PLACE, gathered
from rlkit.data.load import place_of_prompt
from rlkit.data.markup import markup_of, opened_by
from rlkit.data.messages import row_template_args
from rlkit.data.prompts import prompt_messages
from rlkit.data.turns import begins_answer
from rlkit.rollout.envs.calls import answer_of
from rlkit.rollout.envs.compaction import Compaction, current_compaction
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import Prompt, Sampler, images_of
from rlkit.types import FinishReason, Picture, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Turn(NamedTuple):
    """A turn of the policy: its text without the end token, its sampled tokens, and its finish reason.

    The text begins with what the context has opened of it (`<think>` of the generation prompt), where it is a message;
    in plain text (`rlkit.rollout.text`) the context has that.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason


class Chat:
    """One episode in messages. `async for turn in chat` samples turn after turn, with `chat.add(...)` between them.

    The conversation starts from the prompt's row (its tokens must then equal what this template, `tools` and
    `system_prompt` render) or from `messages`; a last assistant message begins the first turn, whose message then has
    both, while `Turn` has what was sampled. The row's own template arguments (docs/data.md) win over
    `template_args`. After a turn, `turn_tokens` joins the new messages to the sampled
    tokens; if the template rewrites history, the conversation is rendered again and the episode gets a further piece.
    Within a piece every token was either sampled in exactly that context or written by the template.

    The assistant's messages hold the text as sampled, reasoning and tool calls included, as templates with
    inline markup expect (ChatML, Qwen, Hermes, Llama 3). An environment may rewrite the last one (say, into
    `reasoning_content` and `tool_calls`) with `chat.messages[-1] = ...` before it adds to it.

    Iteration ends when a turn was cut or a limit leaves no room for another; `end` then returns the episode so far.

    In an episode of `rlkit.rollout.envs.compaction.compacted`, `messages` are those of the context of the last turn.
    """

    def __init__(
        self,
        prompt: Prompt,
        sample: Sampler,
        *,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message] | None = None,
        system_prompt: str | None = None,
        tools: Sequence[Any] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        refuse_vision(tokenizer)
        place = place_of_prompt(prompt)
        self._tokenizer, self._tools = tokenizer, tools
        self._template_args = {**(template_args or {}), **row_template_args(prompt.row, place)}
        self.images = EpisodeImages(tokenizer, images_of(prompt))
        if messages is not None:
            start: dict[str, Any] = {"messages": [self._with_text(message) for message in messages]}
        else:
            start = {**prompt.row, **gathered(prompt.row, place)} if images_of(prompt) else prompt.row
        self.messages: list[dict[str, Any]] = prompt_messages(start, system_prompt=system_prompt, place=place)
        if messages is None and images_of(prompt):
            self.messages = _marked(self.messages, images_of(prompt))
        ids, images = self._render(self.messages)
        if messages is None and ids != list(prompt.ids):
            raise ValueError(f"{place}: {self._difference(list(prompt.ids), ids, system_prompt)}")
        self.turns = Turns(ids, sample, images if images or images_of(prompt) else None)
        self._last: tuple[int, list[int]] | None = None  # index after the last sampled message, and its tokens
        self._compaction = current_compaction()
        self._opening: list[dict[str, Any]] = []  # the messages before the first turn
        self._summaries: list[str] = []

    async def turn(self, *, max_new_tokens: int | None = None) -> Turn | None:
        """Sample the next turn; None if there is no room. `max_new_tokens` may lower its limit."""
        if self.turns.truncated:
            return None
        if self._last is not None:
            await self._join(*self._last)
            if self.turns.truncated:  # a summary was cut
                return None
        if self._compaction is not None:
            limit = self._compaction.max_new_tokens
            max_new_tokens = min(max_new_tokens or limit, limit)
        if (turn := await next_turn(self.turns, self._tokenizer, max_new_tokens=max_new_tokens)) is not None:
            begun = self.messages.pop()["content"] if self._last is None and begins_answer(self.messages) else ""
            self.messages.append({"role": "assistant", "content": begun.removesuffix(opened_by(begun)) + turn.text})
            self._opening = self._opening if self._last else self.messages[:-1]
            self._last = len(self.messages), turn.ids
        return turn

    def __aiter__(self) -> Chat:
        return self

    async def __anext__(self) -> Turn:
        if (turn := await self.turn()) is None:
            raise StopAsyncIteration
        return turn

    def add(self, *messages: str | Message) -> None:
        """Add messages of the environment; a string is a user message.

        The content of a message may be a picture of Pillow, or a list of parts with texts and images. A control token
        in it is read as text, as in all messages that the policy did not sample. Before the first turn the conversation
        is rendered with them.
        """
        plain = markup_of(self._tokenizer).plain
        for told in ({"role": "user", "content": m} if isinstance(m, str) else m for m in messages):
            message = self._with_text(told)
            if message.get("role") == "assistant" and isinstance(message.get("content"), str):
                message["content"] = plain(message["content"])
            self.messages.append(message)
        if self._last is None:
            self.turns.restart(*self._render(self.messages))

    def end(
        self,
        *,
        reward: float | None = None,
        turn_rewards: Sequence[float] | None = None,
        score: float | None = None,
        truncated: bool | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> list[Trajectory]:
        """The episode as `Turns.pieces` gives it, with the conversation in `info["messages"]`."""
        about = {"messages": readable(self.messages), **(info or {})}
        if self._compaction is not None:
            metrics = dict(about.get("metrics", {}))
            if metrics.setdefault("compactions", len(self._summaries)) != len(self._summaries):
                raise ValueError("info['metrics'] has 'compactions', a metric of rlkit's own: give it another name")
            about |= {"summaries": self._summaries, "metrics": metrics}
        return self.turns.pieces(reward=reward, turn_rewards=turn_rewards, score=score, truncated=truncated, info=about)

    async def _join(self, end: int, sampled_ids: list[int]) -> None:
        """Add the messages since the last turn to the context, after a summary where it would be too long."""
        so_far, new = self.messages[:end], self.messages[end:]
        if not new:
            raise ValueError("no message was added since the last turn: call chat.add(...) or end the episode")
        size, join = self._joined(so_far, new, sampled_ids)
        compaction = self._compaction
        if compaction is not None and end - 1 > len(self._opening):  # more than the opening and the last turn
            with_ask, ask = self._joined(so_far, [{"role": "user", "content": compaction.ask}], sampled_ids)
            num_asked = max(0, with_ask - len(self.turns.context))
            if size + num_asked + 2 * compaction.max_new_tokens > compaction.at:
                ask()
                await self._summarize(compaction, so_far[-1], new)
                return
        join()

    def _joined(
        self, so_far: list[dict[str, Any]], new: list[dict[str, Any]], sampled_ids: list[int]
    ) -> tuple[int, Callable[[], None]]:
        """The length of the context with new messages after the last turn, and the function that makes it so."""
        options: dict[str, Any] = {"tools": self._tools, "template_args": self._template_args}
        if (added := self.images.turn_tokens(so_far, new, sampled_ids=sampled_ids, **options)) is None:
            context = self._render([*so_far, *new])
            return len(context[0]), partial(self.turns.restart, *context)
        return len(self.turns.context) + len(added[0]), partial(self.turns.append, *added)

    async def _summarize(self, compaction: Compaction, last: dict[str, Any], new: list[dict[str, Any]]) -> None:
        """Sample a summary, and go on from the opening with it, the last turn and the new messages."""
        context = self.turns.context
        out = await self.turns.sample(max_new_tokens=compaction.max_new_tokens, counted=False)
        if self.turns.truncated:
            return
        self._summaries.append(answer_of(text_of(out.ids, self._tokenizer, context)).strip())
        self.messages[:] = [*compaction.opening(self._opening, self._summaries[-1]), last, *new]
        self.turns.restart(*self._render(self.messages))

    def _difference(self, theirs: list[int], ours: list[int], system_prompt: str | None) -> str:
        """Where the tokens of `rl_prompts` differ from those of the row here, and the fix."""
        at = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), min(len(theirs), len(ours)))
        there, here = (self._tokenizer.decode(ids[at : at + 16]) or "nothing" for ids in (theirs, ours))
        fault = f"rl_prompts rendered {there!r} where the environment renders {here!r}"
        if system_prompt and system_prompt not in self._tokenizer.decode(theirs):
            return f"{fault}: the environment's system_prompt is not that of rl_prompts (--system-prompt)"
        return f"{fault}: give both the same tokenizer, system_prompt, tools, template_args and the chat template"

    def _render(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[Picture]]:
        return self.images.render(messages, tools=self._tools, template_args=self._template_args)

    def _with_text(self, message: Message) -> dict[str, Any]:
        """The message with its parts as one text: most templates would print a list in Python's syntax."""
        if not isinstance(message, Mapping):
            raise TypeError(f"a message must be a string or a dict with role and content, got {show(message)}")
        content = message.get("content")
        if (parts := parts_of(content) or (content if isinstance(content, list | tuple) else None)) is None:
            return dict(message)
        place = f"content of a message of role {message.get('role')!r}"
        return {**message, "content": self.images.text_of(parts, place)}


def refuse_vision(*parts: Any) -> None:
    """Raise ValueError, naming it, for a processor or model that reads images, audio or video, in place of its
    tokenizer."""
    for part in parts:
        config = getattr(part, "config", part)
        if media := [name for name in _MEDIA if getattr(part, name, None) or getattr(config, name, None)]:
            fault = f"{type(part).__name__} is of a vision or audio model (it has {media[0]})"
            raise ValueError(f"{fault}: environments take the tokenizer of a model")


_MEDIA = ("image_processor", "video_processor", "feature_extractor", "vision_config", "audio_config")


async def next_turn(
    turns: Turns, tokenizer: Any, *, max_new_tokens: int | None = None, as_message: bool = True
) -> Turn | None:
    """Sample the next turn; None if there is no room."""
    context = turns.context if as_message else []
    out = await turns.sample(max_new_tokens=max_new_tokens)
    return Turn(text_of(out.ids, tokenizer, context), out.ids, out.finish_reason) if out.ids else None


def text_of(ids: Sequence[int], tokenizer: Any, context: Sequence[int] = ()) -> str:
    """The text of a sampled turn without the token that ends it, see `rlkit.data.markup`."""
    return markup_of(tokenizer).text_of(ids, context)


def _marked(messages: Sequence[Message], images: Sequence[Picture]) -> list[dict[str, Any]]:
    """The messages of a row with the marks of its images in their places."""
    marks = iter([mark_of(image.digest) for image in images])
    texts = [re.sub(PLACE, lambda _: next(marks), m["content"]) for m in messages]
    return [{**m, "content": text} for m, text in zip(messages, texts, strict=True)]
