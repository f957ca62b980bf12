"""From rows to labelled responses: a prompt, one response, and whether it is desirable, in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.data.load import Rows, place_of
from rlkit.data.pairs import as_response, preference_pairs
from rlkit.data.prompts import check_rows, report_rows, report_too_long
from rlkit.data.sft import tokenized

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
