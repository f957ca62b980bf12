"""The calls of an agent as a tree of turns, each trained as it was sampled.

A program sends a whole conversation with each call. One that extends an earlier one, with the policy's turns as they
were returned, is continued token by token after them. Any other (a summary, a sub-agent, an edited message) begins a
branch after the longest conversation that it extends, or a new one. Each branch is a piece of the episode; what it
shares with others is its prompt, so that a turn trains once, and `rlkit.parallel.forest` forwards it once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlkit.data.chat import Message
from rlkit.data.episode_images import EpisodeImages, readable
from rlkit.data.load import place_of_prompt
from rlkit.data.markup import markup_of, opened_by
from rlkit.data.messages import row_template_args
from rlkit.data.turns import begins_answer
from rlkit.rollout.envs.calls import Call, Parse, message_of
from rlkit.rollout.envs.chat import Turn, refuse_vision, text_of
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import Prompt, Sampler, images_of
from rlkit.types import FinishReason, Picture, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

X = TypeVar("X")
_LARGE = 200_000  # characters of a conversation, tools and messages with 1,000 each, that take about 0.1 s


class Said(NamedTuple):
    """A sampled turn with the calls in its text (none if one of them is broken), the length of its context, the
    log-probs of its tokens, the stop string of the request that ended it, and the text that began it with its own."""

    turn: Turn
    calls: list[Call]
    num_prompt: int
    logp: list[float]
    stop: str | None
    whole: str


class _Node(NamedTuple):
    """A turn in the tree: its branch, the length of the context with it, the tokens sampled, the images so far, a name
    for the conversation that ends with it, and the forms of its text."""

    turns: Turns
    end: int
    ids: list[int]
    images: list[Picture]
    name: bytes
    texts: set[str]


class _Ready(NamedTuple):
    """What a turn is sampled from: the messages with their names, the turn that it follows (None: no turn),
    whether a turn of the policy is rendered, what is appended after `node`, and the whole context with its images."""

    messages: Sequence[Message]
    names: list[bytes]
    node: _Node | None
    rerendered: bool
    added: tuple[list[int], list[Picture]] | None
    context: list[int]
    images: list[Picture]


class Branches:
    """One episode of a program. `await branches.reply(messages)` samples the next turn of a conversation.

    Two conversations are equal if their texts are, but for ids of calls, and white space and the form of the policy's
    turns: reasoning in `<think>` or in `reasoning_content`, calls in the text or in `tool_calls`. Calls may run at
    once. `num_rerendered` counts calls whose conversation has a turn of the policy as text of the program or of the
    template, in place of the tokens that were sampled; such text is context, and never trained.

    Messages have texts only, in which the marks of `rlkit.data.episode_images` stand for images. Each branch has those
    of its own contexts, whatever the prompt shows.
    """

    def __init__(
        self,
        prompt: Prompt,
        sample: Sampler,
        *,
        tokenizer: PreTrainedTokenizerBase,
        parse: Parse,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        refuse_vision(tokenizer)
        self._sample, self._tokenizer, self._parse = sample, tokenizer, parse
        self.images = EpisodeImages(tokenizer)
        self._names_images = bool(images_of(prompt))  # without any, `sample` is not told of images
        self._template_args = {**(template_args or {}), **row_template_args(prompt.row, place_of_prompt(prompt))}
        self._has_developer = "developer" in str(getattr(tokenizer, "chat_template", None))
        self._nodes: dict[bytes, list[_Node]] = {}  # by the conversation that ends with the turns, and its tools
        self._contexts: set[bytes] = set()  # conversations after which a turn was sampled
        self._keys: set[str] = set()  # of the sampled turns
        self._order: dict[int, Turns] = {}  # the branch of each turn, by the number of its call; the first ended first
        self._num_calls = 0
        self._last: tuple[list[dict[str, Any]], FinishReason] | None = None
        self.num_rerendered = 0
        self.num_unmet: int | None = None  # turns that lack what was asked of them; None: nothing was asked

    @property
    def num_turns(self) -> int:
        """Turns sampled so far."""
        return len(self._order)

    async def reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        images: Sequence[Picture] = (),
    ) -> Said | None:
        """The policy's turn after a conversation; None if a limit leaves no room. A last assistant message begins it.

        `max_new_tokens` may lower the limit of the turn, `stop` are further strings at which it ends: its tokens
        include them, its text does not. If the template refuses the conversation, its error is raised. `images` are
        those of its marks that are new.
        """
        number = self._num_calls = self._num_calls + 1
        seen, messages = self.images.with_images(images), self._in_roles(messages)
        ready = await _off_loop(messages, tools, partial(self._context_of, seen, messages, tools))
        messages, names, node, rerendered, added, context, pictures = ready
        more: dict[str, Any] = {"images": pictures} if pictures or self._names_images else {}
        more |= {"stop": stop} if stop else {}
        out = await self._sample(context, max_new_tokens=max_new_tokens, **more)
        self._last = self._last and (self._last[0], out.finish_reason)
        if not out.ids:
            return None
        self.num_rerendered += rerendered
        self.images = self.images.with_images(pictures)
        if node is not None and added is not None and node.end == len(node.turns.context):
            node.turns.append(*added)
            turns = node.turns
        else:
            turns = Turns(context, self._sample, pictures)
        turns.take(out)
        text, with_stop, found_stop = _cut(text_of(out.ids, self._tokenizer, context), stop)
        turn = Turn(text, out.ids, out.finish_reason)
        begun = messages[-1].get("content") or "" if begins_answer(messages) else ""
        begun, continues = begun.removesuffix(opened_by(begun)), bool(begun)
        before = names[-2] if continues else names[-1]  # a client sends both back as one message
        messages = messages[:-1] if continues else messages
        whole = {"role": "assistant", "content": begun + text}
        said = Said(turn, self._calls(turn, tools), len(context), out.logp, found_stop, begun + text)
        name = _hash(before + self._key(whole, tools).encode() + str(number).encode())
        shown_as = (text, with_stop, *(message_of(text, calls=calls)["content"] for calls in (True, False)))
        texts = {begun + form for form in shown_as}
        again = self._key(whole | {"content": begun + with_stop}, tools)  # some clients add it
        for key in {self._key(whole, tools), again}:
            same = self._nodes.setdefault(_hash(before + key.encode()), [])
            same.append(_Node(turns, len(turns.context), out.ids, pictures, name, texts))
            self._keys.add(key)
        self._contexts.add(before)
        self._order[number] = turns
        self._last = [*map(dict, messages), whole], out.finish_reason
        return said

    async def count(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None, images: Sequence[Picture] = ()
    ) -> int:
        """The number of tokens of a conversation, up to the policy's turn."""
        seen, messages = self.images.with_images(images), self._in_roles(messages)
        render = partial(seen.render, messages, tools=tools, template_args=self._template_args)
        return len((await _off_loop(messages, tools, render))[0])

    def _context_of(self, seen: EpisodeImages, messages: Sequence[Message], tools: Sequence[Any] | None) -> _Ready:
        """What a turn after a conversation is sampled from. It changes nothing, so that a thread may do it."""
        keys = [self._key(message, tools) for message in messages]
        names, nodes = self._walk(messages, keys, tools)
        size = max((i for i in nodes if i < len(messages)), default=0)
        node = nodes[size] if size else None
        rerendered = any(
            message["role"] == "assistant" and (names[i] in self._contexts or keys[i] in self._keys)
            for i, message in enumerate(messages)
            if i >= size
        )
        options: dict[str, Any] = {"tools": tools, "template_args": self._template_args}
        messages = [self._told(message, key) for message, key in zip(messages, keys, strict=True)]
        added = node and seen.turn_tokens(messages[:size], messages[size:], sampled_ids=node.ids, **options)
        if node is None or added is None:
            context, pictures = seen.render(messages, **options)
            return _Ready(messages, names, None, rerendered or node is not None, None, context, pictures)
        context, pictures = [*node.turns.context[: node.end], *added[0]], [*node.images, *added[1]]
        return _Ready(messages, names, node, rerendered, added, context, pictures)

    def end(
        self,
        *,
        reward: float | None = None,
        turn_rewards: Sequence[float] | None = None,
        score: float | None = None,
        truncated: bool | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> list[Trajectory]:
        """The episode as `Turns.pieces` gives it: a piece per branch, the one with the last turn at the end.

        `info` gets the conversation of the last turn as `messages`, and the `metrics` `agent/branches` (pieces after
        the first), `agent/rerendered` (`num_rerendered`) and, where something was asked, `agent/unmet` (`num_unmet`).
        `turn_rewards` are in the order in which turns were asked for, those of the choices of a request in theirs.
        """
        if self._last is None:
            raise ValueError("the episode ends before its first turn was sampled")
        if turn_rewards is not None and len(turn_rewards) != self.num_turns:
            raise ValueError(f"turn_rewards must have one entry per turn, {self.num_turns}, got {len(turn_rewards)}")
        messages, reason = self._last
        branches = [*reversed(dict.fromkeys(reversed(self._order.values())))]  # by their last turns
        metrics = {"agent/branches": len(branches) - 1, "agent/rerendered": self.num_rerendered}
        metrics |= {} if self.num_unmet is None else {"agent/unmet": self.num_unmet}
        about = {"messages": readable(messages), "finish_reason": reason, "num_turns": self.num_turns, **(info or {})}
        if taken := sorted({*about.get("metrics", {})} & {"failed", *metrics}):
            raise ValueError(f"info['metrics'] has {taken[0]!r}, a metric of rlkit's own: give it another name")
        about["metrics"] = {**metrics, **about.get("metrics", {})}
        asked = [self._order[number] for number in sorted(self._order)]
        pieces = []
        for i, turns in enumerate(branches):
            rewards = turn_rewards and [r for r, of in zip(turn_rewards, asked, strict=True) if of is turns]
            cut = reason != "stop" if truncated is None else truncated
            (piece,) = turns.pieces(reward=reward, turn_rewards=rewards, truncated=cut)
            pieces.append(replace(piece, continues=i > 0, info={}))
        return [*pieces[:-1], replace(pieces[-1], score=score, info=about)]

    def _told(self, message: Message, key: str) -> Message:
        """The message; a turn that the policy did not sample has no control tokens."""
        if message["role"] != "assistant" or key in self._keys or not isinstance(message.get("content"), str):
            return message
        return {**message, "content": markup_of(self._tokenizer).plain(message["content"])}

    def _in_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with OpenAI's role `developer` as `system`, for a template that does not know it."""
        if self._has_developer:
            return messages
        return [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]

    def _walk(
        self, messages: Sequence[Message], keys: Sequence[str], tools: Sequence[Any] | None
    ) -> tuple[list[bytes], dict[int, _Node]]:
        """Names of the first 0, 1, 2, ... messages with the tools, and the sampled turns with which some of them end.

        Of several turns that differ in white space alone, the one with the text of the message, or else the last.
        """
        names, nodes = [_hash(json.dumps(tools or None, sort_keys=True).encode())], dict[int, _Node]()
        for i, (message, key) in enumerate(zip(messages, keys, strict=True), 1):
            name = _hash(names[-1] + key.encode())
            if same := self._nodes.get(name):
                text = message.get("content") or ""
                nodes[i] = next((node for node in reversed(same) if text in node.texts), same[-1])
                name = nodes[i].name
            names.append(name)
        return names, nodes

    def _calls(self, turn: Turn, tools: Sequence[Any] | None) -> list[Call]:
        calls = self._parse(turn.text, tools or ()) if turn.finish_reason == "stop" else []
        made = [c for c in calls if isinstance(c, Call)]
        return made if len(made) == len(calls) else []

    def _key(self, message: Message, tools: Sequence[Any] | None) -> str:
        """What must be equal for two messages to be one."""
        role, text = message["role"], message.get("content") or ""
        if role != "assistant":
            return json.dumps([role, message.get("name"), text])
        text = (message.get("reasoning_content") or "") + text
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        if not calls and (parsed := self._parse(text, tools or ())) and all(isinstance(c, Call) for c in parsed):
            calls = [(c.name, c.arguments) for c in parsed if isinstance(c, Call)]
            text = message_of(text, calls=True)["content"]
        else:
            text = message_of(text, calls=False)["content"]
        squeezed = "".join(text.replace("<think>", "").replace("</think>", "").split())
        return json.dumps([role, squeezed, calls], sort_keys=True)


async def _off_loop(messages: Sequence[Message], tools: Sequence[Any] | None, work: Callable[[], X]) -> X:
    """`work()`, for a large conversation in one of two threads, so that other episodes go on meanwhile."""
    size = sum(len(str(message.get("content") or "")) for message in messages)
    if size + 1000 * (len(tools or ()) + len(messages)) < _LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(), work)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "rlkit-agents")


def _hash(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _cut(text: str, stop: Sequence[str]) -> tuple[str, str, str | None]:
    """The text before the first stop string, with it, and that string; None without one."""
    at, found = min(((at, s) for s in stop if (at := text.find(s)) >= 0), default=(len(text), None))
    return text[:at], text[:at] + (found or ""), found
