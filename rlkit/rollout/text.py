"""Episodes in plain text, for environments that keep the whole context as one string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit._util.numbers import show
from rlkit.data.markup import encode, encode_after_text, markup_of
from rlkit.rollout.envs.chat import Turn, next_turn
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import Prompt, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Text:
    """One episode in text: `await text.reply(context)` samples after a context, `text.end(...)` is `Turns.pieces`.

    A context that starts with the previous context and the text sampled after it (with or without surrounding white
    space) continues the piece: only the rest is tokenised, without an end-of-turn token that was already sampled. Any
    other context starts a new piece, with the tokenizer's bos before it where the prompt has it. `start` is the prompt
    as text.

    Reference: RL2's `step(state, action, extra_info)` has this rule; rl4llm tokenises the whole conversation again.
    """

    def __init__(self, prompt: Prompt, sample: Sampler, *, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._markup = tokenizer, markup_of(tokenizer)
        self._begun = self._markup.begun if self._markup.begun([*prompt.ids]) == [*prompt.ids] else list
        self.start = str(tokenizer.decode(prompt.ids, skip_special_tokens=False))
        self.turns = Turns(prompt.ids, sample)
        self._context, self._sampled, self._ids = self.start, "", list[int]()
        self.end = self.turns.pieces

    async def reply(self, context: str) -> Turn | None:
        """Sample a turn after `context`; None if the last one was truncated or there is no room."""
        if not isinstance(context, str):
            raise TypeError(f"what the policy reads must be text, got {show(context)}")
        if self.turns.truncated:
            return None
        if (rest := self._rest(context)) is None:
            self.turns.restart(self._begun(encode(self._tokenizer, context)))
        else:
            self.turns.append(self._not_sampled(encode_after_text(self._tokenizer, rest) if rest else []))
        if (turn := await next_turn(self.turns, self._tokenizer, as_message=False)) is not None:
            self._context, self._sampled, self._ids = context, turn.text, turn.ids
        return turn

    def _rest(self, context: str) -> str | None:
        if context.startswith(self._context):
            after = context[len(self._context) :]
            for sampled in (self._sampled, self._sampled.strip()):
                if after.startswith(sampled):
                    return after[len(sampled) :]
        return None

    def _not_sampled(self, ids: list[int]) -> list[int]:
        ends = len(self._ids) - len(self._markup.without_end(self._ids))
        already = (k for k in range(min(ends, len(ids)), 0, -1) if self._ids[-k:] == ids[:k])
        return ids[next(already, 0) :]
