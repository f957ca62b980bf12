"""From rows to supervised examples: token ids, and which of them are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.data.chat import encode, end_of_turn_id
from rlkit.data.load import place_of
from rlkit.data.prompts import (
    Template,
    check_plain,
    check_rows,
    encode_all,
    is_empty,
    prompt_messages,
    report_rows,
    report_too_long,
    row_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """A token sequence and which of its tokens are trained: `mask[t]` says that `ids[t]` is a target (not shifted)."""

    ids: list[int]
    mask: list[bool]


def sft_examples(
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_example_tokens: int,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[list[Example], int]:
    """`(examples, num_dropped)` from rows of `{prompt, response}` or `{messages}`; only assistant tokens are trained.

    `{prompt, response}` (or `{messages, response}`): the prompt as `rl_prompts` writes it, then the response as it is,
    then the end of turn. What is trained is what a rollout would sample after that prompt; the template never sees the
    response. With `apply_chat_template=False` both are plain text, and `eos_token` is the end.

    `{messages}`: the template writes everything. For each assistant turn i, in tokens,

        ids = render(messages[:i + 1])      trained from len(render(messages[:i], add_generation_prompt=True))

    up to and with the turn's end-of-turn token (the model must learn to stop), not the newline after it. A turn that
    extends the sequence of the turn before joins it in one example. Where the template rewrites history (Qwen3 drops
    the reasoning of past turns) it does not: it becomes an example of its own, in the context that it really has.
    The mask of a template with `{% generation %}` blocks is used as it is, and the end of turn right after a block is
    added. Where generation prompt and content would share a token, the content is tokenised apart, as in generation.
    An example ends with its last trained token.

    An example of more than `max_example_tokens` is dropped, never cut, and so is a row whose every assistant turn is
    empty (neither text nor a tool call); rows with an empty turn among others are kept. Each is counted and logged, and
    the number dropped is returned. ValueError, with the row (see `place_of`), for malformed rows, for a conversation
    without an assistant turn, where the template does not write the generation prompt before an assistant's turn (so
    that no mask is right), and where no example is left.

    Differs: TRL's `assistant_only_loss` needs `{% generation %}` and adds it to the templates of known families; verl
    renders message by message. Neither splits a conversation whose history is rewritten.
    """
    check_rows(rows, max_example_tokens=max_example_tokens)
    examples = tokenized(
        rows, tokenizer=tokenizer, system_prompt=system_prompt, apply_chat_template=apply_chat_template, tools=tools,
        template_args=template_args,
    )  # fmt: skip
    turns = [_empty_turns(row, plain=not apply_chat_template) for row in rows]
    empty = [index for index, of_row in enumerate(turns) if all(of_row)]
    some = [index for index, of_row in enumerate(turns) if any(of_row) and not all(of_row)]
    report_rows(rows, empty, total=len(rows), what="rows", why="have an empty response")
    report_rows(rows, some, total=len(rows), what="rows", why="have an empty assistant turn", kept=True)
    dropped = set(empty)
    examples = [(index, example) for index, example in examples if index not in dropped]
    too_long = [(index, len(example.ids)) for index, example in examples if len(example.ids) > max_example_tokens]
    report_too_long(rows, too_long, total=len(examples), what="examples", max_example_tokens=max_example_tokens)
    kept = [example for _, example in examples if len(example.ids) <= max_example_tokens]
    return kept, len(empty) + len(too_long)


def tokenized(
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    apply_chat_template: bool,
    tools: Sequence[Any] | None,
    template_args: Mapping[str, Any] | None,
) -> list[tuple[int, Example]]:
    """The examples of `sft_examples` with the index of their row, before any is dropped."""
    check_plain(apply_chat_template, system_prompt=system_prompt, tools=tools, template_args=template_args)
    template = Template(tokenizer, tools, template_args)
    turns: list[_Turn] = []
    for index, row in enumerate(rows):
        place = place_of(rows, index)
        if not apply_chat_template:
            prompt = row_text(row, "prompt", place)
            turns.append(_Turn(index, place, prompt, prompt + row_text(row, "response", place), literal=True))
            continue
        messages = prompt_messages(row, system_prompt=system_prompt, place=place)
        if "response" in row:
            prompt = template.text(messages, place, opened=True)
            turns.append(_Turn(index, place, prompt, prompt + row_text(row, "response", place), literal=True))
        else:
            turns += _turns(template, messages, index, place)
    end = end_of_turn_id(tokenizer) if apply_chat_template else tokenizer.eos_token_id
    return list(_joined(_masked(tokenizer, turns, end=end, add_special_tokens=not apply_chat_template)))


def _empty_turns(row: Mapping[str, Any], *, plain: bool) -> list[bool]:
    """Whether each assistant turn of a row is without text and tool calls."""
    if plain or "response" in row:
        return [not row["response"].strip()]
    return [is_empty(message) for message in prompt_messages(row) if message["role"] == "assistant"]


class _Turn(NamedTuple):
    """One assistant turn as text: its context up to the generation prompt, and the same with the turn.

    A `literal` turn still lacks its end-of-turn token. `blocks` is the mask of the template's `{% generation %}`.
    """

    row: int
    place: str
    prompt: str
    whole: str
    literal: bool
    blocks: list[int] | None = None


def _turns(template: Template, messages: list[dict[str, Any]], index: int, place: str) -> Iterator[_Turn]:
    """One `_Turn` per assistant message."""
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not ends or ends[0] == 0:
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"{place}: needs an assistant message with a message before it, got roles {roles}; "
            "rows of {prompt, response} need the column 'response'"
        )
    has_blocks = _has_blocks(template)
    for end in ends:
        context, turn = messages[:end], messages[: end + 1]
        prompt, whole = template.text(context, place, opened=True), template.text(turn, place, opened=False)
        blocks = _blocks(template, turn) if has_blocks else None
        yield _Turn(index, place, prompt, whole, literal=False, blocks=blocks)


def _has_blocks(template: Template) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template.source) is not None


def _blocks(template: Template, messages: list[dict[str, Any]]) -> list[int]:
    apply: Any = template.tokenizer.apply_chat_template
    rendered = apply(
        messages,
        tools=template.tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **(template.args or {}),
    )
    return rendered["assistant_masks"]


def _masked(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[_Turn], *, end: int | None, add_special_tokens: bool
) -> Iterator[tuple[int, Example]]:
    """Each turn with its own tokens trained and nothing else, under the index of its row. `end`: the end of turn."""
    prompts = encode_all(tokenizer, [turn.prompt for turn in turns], add_special_tokens=add_special_tokens)
    wholes = encode_all(tokenizer, [turn.whole for turn in turns], add_special_tokens=add_special_tokens)
    for turn, prompt, whole in zip(turns, prompts, wholes, strict=True):
        if turn.blocks is not None:
            start = _num_shared(prompt, whole)
            mask = [bool(on) and t >= start for t, on in enumerate(turn.blocks)]
            mask = _to_end_of_turn(whole, mask, end)
        else:
            whole = _continued(tokenizer, turn, prompt, whole)
            if turn.literal and end is not None and whole[-1:] != [end]:
                whole = [*whole, end]
            mask = _to_end_of_turn(whole, [t >= len(prompt) for t in range(len(whole))], end)
        if not any(mask):
            raise ValueError(f"{turn.place}: no token of an assistant turn is trained: ...{turn.whole[-80:]!r}")
        yield turn.row, Example(whole, mask)


def _continued(tokenizer: PreTrainedTokenizerBase, turn: _Turn, prompt: list[int], whole: list[int]) -> list[int]:
    """`whole` such that it begins with the tokens of `prompt`."""
    if whole[: len(prompt)] == prompt:
        return whole
    if turn.whole.startswith(turn.prompt):
        return prompt + encode(tokenizer, turn.whole[len(turn.prompt) :])
    shared = _num_shared(turn.prompt, turn.whole)
    opened, written = turn.prompt[shared:][:60], turn.whole[shared:][:60]
    raise ValueError(
        f"{turn.place}: the chat template opens a turn with {opened!r} but writes the assistant's message as "
        f"{written!r}, so that what is trained is not what would be sampled; give the conversation up to that turn as "
        "'prompt' and the turn, reasoning included, as 'response' (taken literally), or change tokenizer.chat_template"
    )


def _num_shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _to_end_of_turn(ids: list[int], mask: list[bool], end: int | None) -> list[bool]:
    """Add an end-of-turn token right after the mask; drop what follows the last end-of-turn token in the mask."""
    last = max((t for t, on in enumerate(mask) if on), default=len(ids))
    if last + 1 < len(ids) and ids[last + 1] == end:
        mask = [on or t == last + 1 for t, on in enumerate(mask)]
    stop = max((t for t, on in enumerate(mask) if on and ids[t] == end), default=len(ids))
    return [on and t <= stop for t, on in enumerate(mask)]


def _joined(turns: Iterator[tuple[int, Example]]) -> Iterator[tuple[int, Example]]:
    """Turns of one row of which each extends the tokens of the one before, as one example."""
    index, example = next(turns)
    for next_index, turn in turns:
        num = len(example.ids)
        if next_index == index and turn.ids[:num] == example.ids:
            mask = [a or b for a, b in zip(example.mask, turn.mask)] + turn.mask[num:]
            example = Example(turn.ids, mask)
        else:
            yield index, _ended(example)
            index, example = next_index, turn
    yield index, _ended(example)


def _ended(example: Example) -> Example:
    """Without the tokens after the last trained one."""
    num = max(t for t, on in enumerate(example.mask) if on) + 1
    return Example(example.ids[:num], example.mask[:num])
