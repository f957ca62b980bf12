"""From rows to the tokens of prompts."""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from string import punctuation, whitespace
from typing import TYPE_CHECKING, Any

from rlkit.data.chat import encode_all
from rlkit.data.columns import joined_parts
from rlkit.data.drop import TooLong, check_begun, drop, shorten
from rlkit.data.images import COLUMNS, ImageReader
from rlkit.data.load import Row, place_of, place_of_prompt
from rlkit.data.messages import decoded
from rlkit.data.odd_texts import SOME
from rlkit.data.prompt_columns import columns_in, filled
from rlkit.data.rows import read_rows
from rlkit.data.schema import OF_TEMPLATE, PROMPTS
from rlkit.data.template import Template
from rlkit.data.turns import PROMPT, prompt_messages, prompt_text, question_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlkit.types import Picture

__all__ = ["Prompt", "joined_parts", "prompt_messages", "question_messages", "reworded", "rl_prompts", "shared"]

_log = logging.getLogger("rlkit.data")


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt, the row it came from, the index of that row, and the images that the prompt shows.

    `begun` is the text with which the prompt begins the answer: a reward reads it before what was sampled. `place` says
    where the row is, as `rlkit.data.load.place_of`.
    """

    ids: list[int]
    row: dict[str, Any]
    index: int
    images: tuple[Picture, ...] = ()
    begun: str = ""
    place: str = field(default="", compare=False)


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
    continue_answer: bool = False,
) -> tuple[list[Prompt], int]:
    """`(prompts, num_dropped)` from rows that have `messages` or `prompt`; all columns stay in `row`.

    `rlkit.compat.rows.read(rows, PROMPT)` makes such rows of those of other systems (docs/data.md). A string `prompt`
    is one user message. The chat template writes the conversation and the generation prompt. `system_prompt` is put
    before each conversation that has no system message of its own. With `apply_chat_template=False` (base models)
    `prompt` is tokenised as it is, after the tokenizer's bos (which it may begin with); of messages, the contents are
    joined without a separator. A row's `tools` (JSON schemas) go to the template unless `tools` is given.

    An assistant message that ends the conversation begins the answer: its text stands literally after the generation
    prompt, sampling goes on after it, and it is in `Prompt.begun`. It is the same in all rows, of which there are
    several: texts that differ may be finished answers, which only `continue_answer` continues.

    `images` reads the images of rows for a vision model (`rlkit.data.images`); without it they are refused. A prompt
    with images is never cut.

    A prompt of more than `max_prompt_tokens` is dropped, and so is one without any text; `too_long` "cut-left" keeps
    the end of the text of its last user message (of a string, of its text) instead, "cut-right" the start, as much as
    fits once it is rendered again, also in `row`, and "error" raises. It is logged with the first rows, and the number
    dropped is returned.

    Raises ValueError, with the row (see `place_of`), for a row without `messages` and `prompt`, a conversation that is
    malformed (see `prompt_messages`), empty or seems to end with the answer, a role that is neither in `ROLES` nor in
    the template, and where no prompt is left.

    Differs: verl `rollout.prompt_length` cuts the tokens of a longer prompt, bos, system message and headers too.
    """
    template = Template(tokenizer, system_prompt, apply_chat_template, tools, template_args, of_run=True, images=images)
    turns = read_rows(rows, template, PROMPT, max_prompt_tokens=max_prompt_tokens)
    check_begun(rows, [turn for (turn,) in turns], continue_answer=continue_answer)
    left = drop(
        rows, [(i, turn) for i, (turn,) in enumerate(turns)], lambda t: t.empty, unit="prompts", why="have no text"
    )
    encoded = encode_all(tokenizer, [turn.prompt for _, turn in left], ready_made=not apply_chat_template)
    prompts = [
        (i, Prompt(ids, row_given(rows[i]), i, t.images, t.begun, t.place))
        for (i, t), ids in zip(left, encoded, strict=True)
    ]
    as_they_are = not apply_chat_template and all(isinstance(row.get("prompt"), str) for row in rows)
    lose = "their {side} tokens" if as_they_are else "the {side} tokens of the last user message"
    limits: dict[str, Any] = {"too_long": too_long, "lose": lose, "max_prompt_tokens": max_prompt_tokens}
    cut = partial(_cut, rows, template)
    prompts = shorten(rows, prompts, lambda p: len(p.ids), cut, unit="prompts", **limits)
    _note_identical([prompt for _, prompt in prompts])
    return [prompt for _, prompt in prompts], len(rows) - len(prompts)


def _note_identical(prompts: Sequence[Prompt]) -> None:
    """Log that at least half of the prompts repeat others, or a third of them one."""
    times = Counter(tuple(prompt.ids) for prompt in prompts if not prompt.images)
    num, most, whole = len(times), max(times.values(), default=0), times.total()
    if whole < len(prompts) or not whole:
        return
    fact = f"the {whole} prompts are {'all the same text' if num == 1 else f'{num} different texts'}"
    if num > whole / 2:
        fact = f"{most} of the {whole} prompts are the same text" if most >= max(SOME, whole / 3) else ""
    if fact:
        _log.warning("%s: a column with the rest of the question may be left out", fact)


def _cut(rows: Sequence[dict[str, Any]], template: Template, prompt: Prompt, limit: int, left: bool) -> Prompt | None:
    """The prompt with as much of the text of its last user message (of a string, of its text) as fits, rendered again.
    None where no character of it fits, and for images. The row has the text that is left.
    """
    if prompt.images or (last := _last_user(prompt.row)) is None:
        return None
    text, with_text = last

    def cut(size: int) -> Prompt:
        shorter = with_text(text[len(text) - size :] if left else text[:size])
        return replace(prompt, ids=_tokens(shorter, place_of(rows, prompt.index), template), row=shorter)

    (whole,) = encode_all(template.tokenizer, [text])
    room = len(template.tokenizer.decode(whole[-limit:] if left else whole[:limit])) + 16  # no more characters fit
    size = bisect_right(range(1, min(len(text), room)), limit, key=lambda size: len(cut(size).ids))
    while size and len((short := cut(size)).ids) > limit:  # the number of tokens may fall as characters are added
        size -= 1
    return short if size else None


def _last_user(row: Row) -> tuple[str, Callable[[str], Row]] | None:
    """The text of a prompt's last user message, or the whole text of one, and the row with another in its place."""
    column = next(name for name in PROMPTS if row.get(name) is not None)
    if isinstance(row[column], str):
        return row[column], lambda text: {**row, column: text}
    messages = prompt_messages(row)
    place = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if place is None:
        return None
    head, user, tail = messages[:place], messages[place], messages[place + 1 :]
    return user["content"], lambda text: {**row, column: [*head, {**user, "content": text}, *tail]}


def _tokens(row: Row, place: str, template: Template) -> list[int]:
    (ids,) = encode_all(template.tokenizer, [prompt_text(row, place, template)], ready_made=not template.apply)
    return ids


def reworded(prompt: Prompt, text: str, template: Template, values: Mapping[str, Any] | None = None) -> list[int]:
    """Token ids of the prompt with the format string `text` as its last user message (of a string, as the whole).

    `{prompt}` is the text that it replaces; other names are columns of the row, and `values`, which win. "\\n" is a
    line break. Errors: ValueError, with the row, for a name that is neither or is null, and a prompt without a user.
    """
    place = place_of_prompt(prompt)
    if (last := _last_user(prompt.row)) is None:
        raise ValueError(f"{place}: no message is the user's, so there is none to write anew")
    columns = {**prompt.row, **(values or {}), "prompt": last[0]}
    missing = [name for name in columns_in(text, flag="teacher_prompt") if columns.get(name) is None]
    if missing:
        raise ValueError(
            f"{place}: there is no {missing[0]!r} to write into {text!r}: name a column that every row has"
        )
    return _tokens(last[1](filled(text.replace("\\n", "\n"), columns)), place, template)


def row_given(row: dict[str, Any]) -> dict[str, Any]:
    """The row as rewards and environments get it: with messages where their JSON text is."""
    return {**row, **decoded({name: row[name] for name in ("prompt", "messages") if isinstance(row.get(name), str)})}


def shared(held_out: Sequence[Sequence[Row]], train: Sequence[Sequence[Row]], *, whole: bool = False) -> list[str]:
    """Of each held-out set, in rlkit's columns, how many of its rows ask what a row of `train` asks, and where; "" for
    none. Prompts may differ in case, blanks and marks. With `whole`, all columns are compared as they are."""
    key, bare, plain = ((lambda row: repr(sorted(row.items()))), str, str) if whole else (_asked, _bare, _plain)
    sets = [[key(row) for row in rows] for rows in held_out]
    wanted = {bare(text) for asked in sets for text in asked}
    like = (text for rows in train for text in map(key, rows) if bare(text) in wanted)
    seen = {hash(x) for text in like for x in (text, plain(text))}
    lines = []
    for rows, asked in zip(held_out, sets, strict=True):
        common = [i for i, text in enumerate(asked) if hash(plain(text)) in seen]
        places = ", ".join(place_of(rows, i, with_source=i == common[0]) for i in common[:_FIRST])
        fact = f"{'' if whole else 'the prompts of '}{len(common)} of {len(rows)} rows are also in --data"
        fact += ", but for case, blanks and marks" * any(hash(asked[i]) not in seen for i in common)
        lines.append(f"{fact}: {places}{', ...' * (len(common) > _FIRST)}" if common else "")
    return lines


def _asked(row: Row) -> str:
    """What a row asks: its conversation up to the last answer, with tools and images; or its text."""
    said: Any = next((row[name] for name in (*PROMPTS, "chosen", "text") if row.get(name) is not None), None)
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    if isinstance(said, list | tuple) and all(isinstance(message, Mapping) for message in said):
        while said and said[-1].get("role") == "assistant":
            said = said[:-1]
        said = [(m.get("role"), str(m.get("content")).strip(), m.get("tool_calls")) for m in said]
    return repr((said, [row.get(name) for name in (*OF_TEMPLATE, *COLUMNS)]))


def _bare(text: str) -> str:
    """The letters and digits of a text of `_asked`, in small letters: alike where `_plain` is, and made much faster."""
    return text.casefold().replace("\\n", "").translate(_MARKS)


def _plain(text: str) -> str:
    """A text of `_asked` in small letters with single blanks, without the quotes round it and marks that end words."""
    marks = r"""(?<![^(\[,\s])['"]|['"](?=[,)\]])|[.?:;]+(?=['")\s,]|\\n)|(?<=[a-z]{2})!+"""
    return re.sub(r"(?:[\s,]|\\n)+", " ", re.sub(marks, "", text.casefold())).replace(" )", ")")


_FIRST = 5  # places in a line
_MARKS = str.maketrans("", "", punctuation + whitespace)
