"""From rows to preference pairs: one prompt, a chosen and a rejected response, in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.data.chat import TURN_TEXTS
from rlkit.data.load import Rows, place_of
from rlkit.data.prompts import check_rows, prompt_messages, report_rows, report_too_long
from rlkit.data.sft import Example, tokenized

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
