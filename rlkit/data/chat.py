"""Chat templates in token space: contexts, and the tokens that join one sampled turn to the next.

What the engine sampled is never tokenised again. A turn that follows it is tokens that are appended; where a template
cannot be continued by appending, that is said (`None`), and a new sequence starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

_MARK = "placeholder of a turn"  # text that no template takes for markup


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids of a conversation under the tokenizer's chat template.

    `tools` (functions or JSON schemas) and `template_args` (e.g. `{"enable_thinking": False}` for Qwen3) go to the
    template. No token is added beyond what the template writes. Raises ValueError where there is no chat template.
    """
    text = render_text(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools, template_args=template_args
    )
    return encode(tokenizer, text)


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> str:
    """`render` before tokenisation."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat_template: set tokenizer.chat_template, take an instruction-tuned model's "
            "tokenizer, or give plain text with apply_chat_template=False"
        )
    apply: Any = tokenizer.apply_chat_template
    return apply(
        [dict(message) for message in messages],
        tools=None if tools is None else list(tools),
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **(template_args or {}),
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text as it stands: no special token is added, one that is written out is recognised."""
    return tokenizer.encode(text, add_special_tokens=False)


def turn_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages_so_far: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    sampled_ids: Sequence[int],
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int] | None:
    """Tokens to append after a sampled turn, so that `new_messages` are read and the next assistant turn is open.

        context = render(messages_so_far[:-1], generation prompt) + sampled_ids + turn_tokens(...)

    `messages_so_far` ends with the assistant message that was made of `sampled_ids`; these are only compared with the
    template's closing, never tokenised again. The result is what the template writes after an assistant's content
    (found by rendering a fixed placeholder there) and then the difference between the conversation with and without
    `new_messages`. The part of the closing that was sampled already is left out: nothing where the model was cut off by
    a length limit, `<|im_end|>` where it stopped by itself. (A model that stopped by another token than the template's
    keeps it, and the closing follows.)

    None where appending would not give what the template writes, so that a new sequence has to be started from
    `render(messages_so_far + new_messages)`:
      - the new messages change how earlier ones are written (Qwen3 drops the reasoning of past turns when a user
        message follows; it keeps it when a tool's answer follows);
      - the template does not write the turn's `content` or `reasoning_content` as it is, white space aside (DeepSeek-R1
        drops everything before `</think>`), or closes this turn in another way than a plain one.

    Differs: verl's agent loop and SkyRL subtract a rendered fixed system or user turn, which does not see that history
    was rewritten; OpenRLHF and older TRL tokenise the whole conversation again (the drift of verl issue 3960).
    """
    if not messages_so_far or messages_so_far[-1].get("role") != "assistant":
        roles = [m.get("role") for m in messages_so_far]
        raise ValueError(f"messages_so_far must end with the sampled assistant message, got roles {roles}")
    if not new_messages:
        raise ValueError("new_messages must hold at least one message: a turn of a tool or of the user")

    def text(messages: Sequence[Message], opened: bool = False) -> str:
        return render_text(tokenizer, messages, add_generation_prompt=opened, tools=tools, template_args=template_args)

    last = messages_so_far[-1]
    before = text(messages_so_far)
    after = text([*messages_so_far, *new_messages], opened=True)
    head, found, closing = text([*messages_so_far[:-1], {"role": "assistant", "content": _MARK}]).rpartition(_MARK)
    kept = all(_written(last.get(key), before, head) for key in ("content", "reasoning_content"))
    if not (found and kept and after.startswith(before) and before.endswith(closing)):
        return None
    tail = _encode_after_text(tokenizer, closing + after[len(before) :])
    most = min(len(_encode_after_text(tokenizer, closing)), len(sampled_ids))
    already = (k for k in range(most, 0, -1) if list(sampled_ids[-k:]) == tail[:k])
    return tail[next(already, 0) :]


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends an assistant's turn: the first special token that the template writes after its content.

    `eos_token_id` where there is no chat template or it writes no special token there (None where there is none).
    """
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        closing = render_text(tokenizer, messages, add_generation_prompt=False).rpartition(_MARK)[2]
        special = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
        special.update(tokenizer.all_special_ids)
        for token in _encode_after_text(tokenizer, closing):
            if token in special:
                return token
    return tokenizer.eos_token_id


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, *configs: Any) -> tuple[int, ...]:
    """Every token that ends a turn, sorted, for `SamplingParams.stop_token_ids`.

        stop_token_ids(tokenizer, model.config, model.generation_config)

    The union of the tokenizer's eos, the `eos_token_id` (an int or a list) of each config, and the chat template's end
    of turn. The union matters: base models are often published with an eos that their template never writes, and a
    rollout that misses the template's token runs on to its length limit. Raises ValueError where there is none.
    """
    ids = {end_of_turn_id(tokenizer), tokenizer.eos_token_id}
    for config in configs:
        eos = getattr(config, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list | tuple) else [eos])
    ids.discard(None)
    if not ids:
        raise ValueError(
            "no stop token: neither the tokenizer nor a config has an eos_token_id and the chat template writes no "
            "special token after an assistant's content; set tokenizer.eos_token"
        )
    return tuple(sorted(ids))


def _written(content: Any, text: str, head: str) -> bool:
    """Whether `text` holds `content` once more than what comes before the turn, white space aside.

    An empty content, or one that is not a string (a list of parts), is not compared.
    """
    if not isinstance(content, str) or not content.strip():
        return True
    wanted, where, already = ("".join(x.split()) for x in (content, text, head))
    return where.count(wanted) > already.count(wanted)


def _encode_after_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that follows other text: a tokenizer that marks the start of a text must not mark it here."""
    head = encode(tokenizer, "x")
    both = encode(tokenizer, "x" + text)
    return both[len(head) :] if both[: len(head)] == head else encode(tokenizer, text)
