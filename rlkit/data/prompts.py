"""From rows to the tokens of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlkit.data.chat import encode_all
from rlkit.data.columns import joined_parts
from rlkit.data.images import ImageReader
from rlkit.data.messages import decoded
from rlkit.data.rows import PROMPT, Template, TooLong, drop, prompt_messages, read_rows, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlkit.types import Picture

__all__ = ["Prompt", "joined_parts", "prompt_messages", "rl_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt, the row it came from, the index of that row, and the images that the prompt shows."""

    ids: list[int]
    row: dict[str, Any]
    index: int
    images: tuple[Picture, ...] = ()


def rl_prompts(
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
    too_long: TooLong = "drop",
) -> tuple[list[Prompt], int]:
    """`(prompts, num_dropped)` from rows that have `messages` or `prompt`; all columns stay in `row`.

    `rlkit.compat.rows.read(rows, PROMPT)` makes such rows of those of other systems (docs/data.md). A string `prompt`
    is one user message. The chat template writes the conversation and the generation prompt. `system_prompt` is put
    before each conversation that has no system message of its own. With `apply_chat_template=False` (base models)
    `prompt` is tokenised as it is, with the tokenizer's own special tokens such as a leading bos; of messages, the
    contents are joined without a separator. A row's `tools` (JSON schemas) go to the template unless `tools` is given.

    `images` reads the images of rows for a vision model (`rlkit.data.images`); without it they are refused. A prompt
    with images is never cut.

    A prompt of more than `max_prompt_tokens` is dropped, and so is one without any text; `too_long` "cut-left" keeps
    its last tokens instead, "cut-right" the first, and "error" raises. It is logged with the first rows, and the number
    dropped is returned. Raises ValueError, with the row (see `place_of`), for a row without `messages` and `prompt`, a
    conversation that is malformed (see `prompt_messages`), empty or ends with the assistant's answer, a role that is
    neither in `ROLES` nor in the template, and where no prompt is left.

    Differs: verl `rollout.prompt_length` cuts a longer prompt on the left, as `too_long` "cut-left".
    """
    template = Template(tokenizer, system_prompt, apply_chat_template, tools, template_args, of_run=True, images=images)
    turns = read_rows(rows, template, PROMPT, max_prompt_tokens=max_prompt_tokens)
    left = drop(
        rows, [(i, turn) for i, (turn,) in enumerate(turns)], lambda t: t.empty, what="prompts", why="have no text"
    )
    encoded = encode_all(tokenizer, [turn.prompt for _, turn in left], add_special_tokens=not apply_chat_template)
    prompts = [(i, Prompt(ids, _row(rows[i]), i, t.images)) for (i, t), ids in zip(left, encoded, strict=True)]
    prompts = shorten(
        rows,
        prompts,
        lambda p: len(p.ids),
        _cut,
        what="prompts",
        too_long=too_long,
        max_prompt_tokens=max_prompt_tokens,
    )
    return [prompt for _, prompt in prompts], len(rows) - len(prompts)


def _cut(prompt: Prompt, limit: int, left: bool) -> Prompt | None:
    return None if prompt.images else replace(prompt, ids=prompt.ids[-limit:] if left else prompt.ids[:limit])


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with messages where their JSON text is."""
    return {**row, **decoded({name: row[name] for name in ("prompt", "messages") if isinstance(row.get(name), str)})}
