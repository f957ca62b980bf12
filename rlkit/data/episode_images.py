"""The images of an episode: shown by its prompt, by tools and environments, or in the requests of an agent.

In the texts of the episode's messages a mark with its digest stands for each image. A chat template writes the mark
like any other text, so images are wherever the template puts their messages. The placeholders of the model take the
place of the marks before the text is tokenised.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any

from rlkit.data.chat import Message, encode, opened_text, turn_tokens
from rlkit.data.columns import joined_parts
from rlkit.data.images import MARK, PARTS, PLACE, reader_of, short, source_of
from rlkit.types import Picture

_log = logging.getLogger("rlkit.data")
TEXT_ONLY = "the model reads text only: take one that reads images (docs/models.md)"
_NAMED = re.compile("\ue000image ([0-9a-f]{64})\ue001")


class EpisodeImages:
    """The images of an episode with one tokenizer, by their digests. `reader` is None for a model of text."""

    def __init__(self, tokenizer: Any, images: Iterable[Picture] = ()) -> None:
        self._tokenizer, self.reader = tokenizer, reader_of(tokenizer)
        self._known = {image.digest: image for image in images}

    def __contains__(self, digest: str) -> bool:
        return digest in self._known

    def __iter__(self) -> Any:
        return iter(self._known.values())

    def with_images(self, images: Iterable[Picture]) -> EpisodeImages:
        """The episode's images with new ones added."""
        both = copy(self)
        both._known = {**self._known, **{image.digest: image for image in images}}
        return both

    def text_of(self, parts: Sequence[Any], place: str) -> str:
        """The text of a content's parts, with marks for their images, which become the episode's.

        ValueError, with the place, for an image that cannot be read, and where the model reads text only.
        """
        texts = []
        for part in parts:
            if not (isinstance(part, Mapping) and part.get("type") in PARTS):
                texts.append(joined_parts([part], place))
                continue
            self.check_reader(place)
            assert self.reader is not None
            try:
                image = self.reader.image(source_of(part))
            except Exception as error:  # of Pillow: any, of a damaged file
                raise ValueError(f"{place}: an image cannot be read: {short(error)}") from None
            self._known[image.digest] = image
            texts.append(mark_of(image.digest))
        return "".join(texts)

    def check_reader(self, place: str) -> None:
        """ValueError where the model reads text only."""
        if self.reader is None:
            raise ValueError(f"{place} shows an image, and {TEXT_ONLY}")

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None, template_args: Mapping[str, Any] | None
    ) -> tuple[list[int], list[Picture]]:
        """The tokens of a conversation up to the policy's turn (see `rlkit.data.chat.render`), and their images.

        Placeholders that the policy has spelled in an earlier turn are split; those of others are an error.
        """
        options: dict[str, Any] = {"tools": tools, "template_args": template_args}
        told = [self._split(message) for message in messages]
        text = opened_text(self._tokenizer, told, **options)
        report_unwritten(messages, text, tools)
        text, pictures = self._placed(text)
        last = max((i for i, message in enumerate(messages, 1) if message.get("role") == "assistant"), default=0)
        self._check_shown(messages[last:], pictures)
        return encode(self._tokenizer, text), pictures

    def turn_tokens(
        self, messages_so_far: Sequence[Message], new_messages: Sequence[Message], **options: Any
    ) -> tuple[list[int], list[Picture]] | None:
        """The tokens to append after a sampled turn (see `rlkit.data.chat.turn_tokens`), and their images."""
        pictures: list[Picture] = []

        def placed(text: str) -> str:
            report_unwritten(new_messages, text)
            text, images = self._placed(text)
            pictures.extend(images)
            return text

        ids = turn_tokens(self._tokenizer, messages_so_far, new_messages, rewrite=placed, **options)
        if ids is None:
            return None
        self._check_shown(new_messages, pictures)
        return ids, pictures

    def _split(self, message: Message) -> Message:
        said, content = message.get("role") == "assistant", message.get("content")
        if self.reader is None or not said or not isinstance(content, str):
            return message
        return {**message, "content": self.reader.split_placeholders(content)}

    def _placed(self, text: str) -> tuple[str, list[Picture]]:
        """The text with placeholders, and their images; ValueError for a text that has placeholders of its own."""
        if self.reader is None:
            return text, []
        pictures: list[Any] = [self._known[digest] for digest in _NAMED.findall(text) if digest in self._known]
        marked = _NAMED.sub(lambda m: PLACE if m[1] in self._known else m[0], text.replace(PLACE, MARK))
        return self.reader.placed(marked, pictures, "the conversation"), pictures

    def _check_shown(self, messages: Sequence[Message], pictures: Iterable[Picture]) -> None:
        lost = {digest for digest in digests_of(messages) if digest in self._known} - {x.digest for x in pictures}
        if lost:
            role = next(m.get("role") for m in messages if lost & {*digests_of([m])})
            raise ValueError(f"the chat template does not write the image of a message of role {role!r}")


def report_unwritten(messages: Sequence[Message], text: str, tools: Sequence[Any] | None = None) -> None:
    """Name, once each, what the chat template leaves out of `text`: messages by role, tools, and calls of the policy.

    A message is looked for by its longest word of ASCII, a tool and a call by their names.
    """
    for message in messages:
        role, calls = message.get("role"), message.get("tool_calls") or ()
        words = re.findall(r"[A-Za-z0-9]+", _NAMED.sub("", str(message.get("content") or "")))
        if role != "assistant" and words and max(words, key=len) not in text:  # reasoning of earlier turns is left out
            _warn_once(f"a message of role {role!r}")
        if not all(call["function"]["name"] in text for call in calls):
            _warn_once("earlier tool calls")
    names = [tool.get("function", tool).get("name") for tool in tools or () if isinstance(tool, Mapping)]
    if not all(name in text for name in names if name):
        _warn_once("the tools")


@cache
def _warn_once(subject: str) -> None:
    _log.warning("the chat template leaves out %s, which the policy does not see", subject)


def mark_of(digest: str) -> str:
    """What stands in a text for the image with this digest."""
    return f"\ue000image {digest}\ue001"


def digests_of(messages: Iterable[Message]) -> list[str]:
    """The digests of the marks in these messages."""
    texts = (message.get("content") for message in messages)
    return [digest for text in texts if isinstance(text, str) for digest in _NAMED.findall(text)]


def readable(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The messages with `<image>` for each mark."""
    texts = ((message, message.get("content")) for message in messages)
    return [{**m, **({"content": _NAMED.sub(MARK, x)} if isinstance(x, str) else {})} for m, x in texts]


def parts_of(result: Any) -> list[Any] | None:
    """The parts of a content with images: a picture of Pillow, or a list of parts; None for anything else."""
    if hasattr(result, "save") and hasattr(result, "convert"):
        return [{"type": "image", "image": result}]
    if not isinstance(result, list | tuple):
        return None
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in result]
    return [*result] if set(PARTS).intersection(kinds) and {"text", *PARTS}.issuperset(kinds) else None
