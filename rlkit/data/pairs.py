"""From rows to preference pairs: one prompt, a chosen and a rejected response, in tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.data.prompts import prompt_messages, report_dropped
from rlkit.data.sft import Example, sft_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    A pair of which prompt and one response exceed `max_example_tokens` is dropped as a whole, never cut; the count is
    returned and logged. Raises ValueError, with the row's index (from 0), for a row without the columns, two
    conversations that differ before their last message, a response that is no text, and where every pair is too long.

    Differs: TRL cuts long pairs (`max_length`), and renders prompt and responses through the template and takes their
    common prefix for the prompt.
    """
    sides = {
        side: [as_response(row, side, index, apply_chat_template=apply_chat_template) for index, row in enumerate(rows)]
        for side in ("chosen", "rejected")
    }
    for index, (a, b) in enumerate(zip(sides["chosen"], sides["rejected"], strict=True)):
        if {**a, "response": ""} != {**b, "response": ""}:
            raise ValueError(
                f"row {index}: chosen and rejected differ before their last message; a pair answers one prompt twice"
            )
    chosen, rejected = (
        sft_examples(
            side, tokenizer=tokenizer, max_example_tokens=sys.maxsize, system_prompt=system_prompt,
            apply_chat_template=apply_chat_template, tools=tools, template_args=template_args,
        )[0]
        for side in sides.values()
    )  # fmt: skip
    pairs = [_pair(a, b) for a, b in zip(chosen, rejected, strict=True)]
    lens = [len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    too_long = [(index, num) for index, num in enumerate(lens) if num > max_example_tokens]
    report_dropped(too_long, total=len(pairs), what="pairs", max_example_tokens=max_example_tokens)
    return [pair for pair, num in zip(pairs, lens, strict=True) if num <= max_example_tokens], len(too_long)


def as_response(row: Mapping[str, Any], side: str, index: int, *, apply_chat_template: bool) -> dict[str, Any]:
    """The row as `sft_examples` takes it: prompt or messages, and a response."""
    answer = row.get(side)
    if isinstance(answer, str):
        context = {key: row[key] for key in ("prompt", "messages") if row.get(key) is not None}
        return {**context, "response": answer}
    if not isinstance(answer, list | tuple) or not answer or not apply_chat_template:
        raise ValueError(
            f"row {index}: {side!r} must be a string, or with a chat template a list of messages, got "
            f"{repr(answer)[:80]}; columns found: {sorted(row)}"
        )
    messages = prompt_messages({"messages": answer}, index=index)
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        raise ValueError(f"row {index}: {side!r} must end with an assistant message of text, got {repr(last)[:80]}")
    whole = messages[0]["role"] in ("system", "user")
    before = messages[:-1] if whole else prompt_messages(row, index=index) + messages[:-1]
    return {"messages": before, "response": last["content"]}


def _pair(chosen: Example, rejected: Example) -> Pair:
    num = chosen.mask.index(True)
    return Pair(chosen.ids[:num], chosen.ids[num:], rejected.ids[num:])
