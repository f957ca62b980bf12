"""From rows to token ids: supervised examples, preference pairs, labelled responses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.data.chat import TURN_TEXTS, encode, end_of_turn_id
from rlkit.data.load import Rows, place_of
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


@dataclass(frozen=True)
class Pair:
    """The tokens of a prompt and of its two responses, end of turn included.

    `ref_logp` are a reference's log-probs of the two, where they were computed beforehand.
    """

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    ref_logp: tuple[Sequence[float], Sequence[float]] | None = None


def preference_pairs(
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_example_tokens: int,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[list[Pair], int]:
    """`(pairs, num_dropped)` from rows of `{prompt or messages, chosen, rejected}`; responses are strings or messages.

        {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
        {"messages": [...], "chosen": [{"role": "assistant", ...}], "rejected": [{"role": "assistant", ...}]}
        {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}     whole conversations

    The prompt is rendered as `rl_prompts` does, a response follows as it is, then the end of turn: what a rollout would
    sample. Of a list of messages the last one is the response; those before it belong to the prompt, and must be the
    same on both sides. A whole conversation (it begins with a system or user message) stands in place of the prompt.

    A pair is dropped as a whole, never cut, where prompt and one response exceed `max_example_tokens`, where the chosen
    response is empty (which would teach the model to say nothing), and where the two responses are the same tokens,
    which no loss can tell apart. Pairs with an empty rejected response are kept. Each is counted and logged, and the
    number dropped is returned. Raises ValueError, with the row (see `place_of`), for a row without the columns, two
    conversations that differ before their last message, a response that is no text or holds tool calls or reasoning of
    its own, and where no pair is left.

    Differs: TRL cuts long pairs (`max_length`), and renders prompt and responses through the template and takes their
    common prefix for the prompt.
    """
    check_rows(rows, max_example_tokens=max_example_tokens)
    plain = not apply_chat_template
    sides = {
        side: [as_response(row, side, place_of(rows, index), plain=plain) for index, row in enumerate(rows)]
        for side in ("chosen", "rejected")
    }
    for index, (a, b) in enumerate(zip(*sides.values(), strict=True)):
        if {**a, "response": ""} != {**b, "response": ""}:
            raise ValueError(
                f"{place_of(rows, index)}: chosen and rejected differ before their last message; a pair answers one "
                "prompt twice"
            )
    chosen, rejected = (
        tokenized(
            Rows.like(rows, side), tokenizer=tokenizer, system_prompt=system_prompt,
            apply_chat_template=apply_chat_template, tools=tools, template_args=template_args,
        )
        for side in sides.values()
    )  # fmt: skip
    pairs = {index: _pair(a, b) for (index, a), (_, b) in zip(chosen, rejected, strict=True)}
    empty = {side: {i for i in pairs if not sides[side][i]["response"].strip()} for side in sides}
    same = {i for i, pair in pairs.items() if pair.chosen == pair.rejected}
    for found, why, kept in (
        (empty["chosen"], "have an empty chosen response", False),
        (same, "have the same chosen and rejected response", False),
        (empty["rejected"], "have an empty rejected response", True),
    ):
        here = [i for i in pairs if i in found]
        kept = kept and len(here) < len(pairs)
        report_rows(rows, here, total=len(pairs), what="pairs", why=why, kept=kept)
        pairs = pairs if kept else {i: pair for i, pair in pairs.items() if i not in found}
    lens = {i: len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for i, pair in pairs.items()}
    too_long = [(i, num) for i, num in lens.items() if num > max_example_tokens]
    report_too_long(rows, too_long, total=len(pairs), what="pairs", max_example_tokens=max_example_tokens)
    left = [pair for i, pair in pairs.items() if lens[i] <= max_example_tokens]
    return left, len(rows) - len(left)


def as_response(row: Mapping[str, Any], side: str, place: str, *, plain: bool) -> dict[str, Any]:
    """The row as `sft_examples` takes it: prompt or messages, and a response."""
    answer = row.get(side)
    if isinstance(answer, str):
        context = {key: row[key] for key in ("prompt", "messages") if row.get(key) is not None}
        return {**context, "response": answer}
    if not isinstance(answer, list | tuple) or not answer or plain:
        raise ValueError(
            f"{place}: {side!r} must be a string, or with a chat template a list of messages, got "
            f"{repr(answer)[:80]}; columns found: {sorted(row)}"
        )
    messages = prompt_messages({"messages": answer}, place=f"{place}, {side!r}")
    last = messages[-1]
    if last["role"] != "assistant":
        raise ValueError(f"{place}: {side!r} must end with an assistant message of text, got {repr(last)[:80]}")
    if more := [key for key in (*TURN_TEXTS, "tool_calls") if key != "content" and last.get(key)]:
        raise ValueError(
            f"{place}: the last message of {side!r} holds {' and '.join(more)} beside its content, and a response is "
            "text: write all of it into 'content' as the model would"
        )
    whole = messages[0]["role"] in ("system", "user")
    before = messages[:-1] if whole else prompt_messages(row, place=place) + messages[:-1]
    return {"messages": before, "response": last["content"]}


def _pair(chosen: Example, rejected: Example) -> Pair:
    num = chosen.mask.index(True)
    return Pair(chosen.ids[:num], chosen.ids[num:], rejected.ids[num:])


_RESPONSES = ("completion", "response", "messages")  # the first that a row has holds its response
_LABELS = {"true": True, "1": True, "false": False, "0": False}  # a cell of a CSV file is text


@dataclass(frozen=True)
class Labelled:
    """The tokens of a prompt and of a response to it, end of turn included, and the label of the response."""

    prompt: list[int]
    response: list[int]
    desirable: bool


def labelled_examples(
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_example_tokens: int,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[list[Labelled], int]:
    """`(examples, num_dropped)` from rows of `{prompt or messages, completion or response, label}`, or from pairs.

        {"prompt": "2+2?", "completion": "4", "label": true}
        {"messages": [...], "response": [{"role": "assistant", ...}], "label": false}
        {"messages": [..., {"role": "assistant", ...}], "label": false}         a whole conversation
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"}                      two examples, the first desirable

    A label is true or false, 1 or 0, also as text. Prompt and response are rendered as `preference_pairs` does, and
    rows that are pairs are read by it. An example of more than `max_example_tokens` is dropped (of two, both), never
    cut, and so is a desirable response that is empty; undesirable ones are kept. Each is counted (in rows) and logged,
    and the number dropped is returned.

    Raises ValueError, with the row (see `place_of`), for a row without the columns, a label that is neither, a response
    that is no text, data of which only some rows are pairs, and where no example is left.

    Differs: TRL cuts long examples, and takes the columns `prompt`, `completion` and `label` only.
    """
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "system_prompt": system_prompt,
        "apply_chat_template": apply_chat_template,
        "tools": tools,
        "template_args": template_args,
    }
    if rows and "chosen" in rows[0]:
        pairs, num_dropped = preference_pairs(rows, max_example_tokens=max_example_tokens, **options)
        both = [(Labelled(p.prompt, p.chosen, True), Labelled(p.prompt, p.rejected, False)) for p in pairs]
        return [example for two in both for example in two], num_dropped
    check_rows(rows, max_example_tokens=max_example_tokens)
    labels = [_label(row, place_of(rows, index)) for index, row in enumerate(rows)]
    columns = [next(column for column in _RESPONSES if column in row) for row in rows]
    named = [
        as_response(row, column, place_of(rows, index), plain=not apply_chat_template)
        for index, (row, column) in enumerate(zip(rows, columns, strict=True))
    ]
    examples = dict(tokenized(Rows.like(rows, named), **options))
    empty = [i for i, row in enumerate(named) if not row["response"].strip()]
    desirable, others = ([i for i in empty if labels[i] is label] for label in (True, False))
    if len(empty) == len(rows):
        report_rows(rows, empty, total=len(rows), what="examples", why="have an empty response")
    why = "have an empty response and are {}desirable".format
    report_rows(rows, desirable, total=len(rows), what="examples", why=why(""))
    report_rows(rows, others, total=len(rows), what="examples", why=why("un"), kept=True)
    for i in desirable:
        del examples[i]
    too_long = [(i, len(e.ids)) for i, e in examples.items() if len(e.ids) > max_example_tokens]
    report_too_long(rows, too_long, total=len(examples), what="examples", max_example_tokens=max_example_tokens)
    left = [(i, e, e.mask.index(True)) for i, e in examples.items() if len(e.ids) <= max_example_tokens]
    return [Labelled(e.ids[:n], e.ids[n:], labels[i]) for i, e, n in left], len(rows) - len(left)


def _label(row: Mapping[str, Any], place: str) -> bool:
    has_response = any(column in row for column in _RESPONSES)
    if not has_response or "label" not in row:
        missing = "'label'" if has_response else "'completion' or 'response'"
        raise ValueError(
            f"{place}: no column {missing}; columns found: {sorted(row)}; one under another name is renamed with "
            "--rename"
        )
    label = _LABELS.get(str(row["label"]).strip().lower())
    if label is None:
        raise ValueError(f"{place}: column 'label' must be true or false, got {repr(row['label'])[:80]}")
    return label
