"""From rows to labelled responses: a prompt, one response, and whether it is desirable, in tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.data.pairs import as_response, preference_pairs
from rlkit.data.prompts import report_dropped
from rlkit.data.sft import sft_examples

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
    cut; the count (of rows) is returned and logged.

    Raises ValueError, with the row's index (from 0), for a row without the columns, a label that is none, a response
    that is no text, data of which only some rows are pairs, and where every example is too long.

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
    labels = [_label(row, index) for index, row in enumerate(rows)]
    columns = [next(column for column in _RESPONSES if column in row) for row in rows]
    named = [
        as_response(row, column, index, apply_chat_template=apply_chat_template)
        for index, (row, column) in enumerate(zip(rows, columns, strict=True))
    ]
    examples = sft_examples(named, max_example_tokens=sys.maxsize, **options)[0]
    too_long = [(index, len(e.ids)) for index, e in enumerate(examples) if len(e.ids) > max_example_tokens]
    report_dropped(too_long, total=len(examples), what="examples", max_example_tokens=max_example_tokens)
    starts = [example.mask.index(True) for example in examples]
    found = [Labelled(e.ids[:n], e.ids[n:], label) for e, n, label in zip(examples, starts, labels, strict=True)]
    return [e for e in found if len(e.prompt) + len(e.response) <= max_example_tokens], len(too_long)


def _label(row: Mapping[str, Any], index: int) -> bool:
    has_response = any(column in row for column in _RESPONSES)
    if not has_response or "label" not in row:
        missing = "'label'" if has_response else "'completion' or 'response'"
        raise ValueError(
            f"row {index}: no column {missing}; columns found: {sorted(row)}; one under another name can be renamed "
            "when the data is loaded"
        )
    label = _LABELS.get(str(row["label"]).strip().lower())
    if label is None:
        raise ValueError(f"row {index}: column 'label' must be true or false, got {repr(row['label'])[:80]}")
    return label
