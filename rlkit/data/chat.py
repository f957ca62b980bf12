"""Chat templates in token space: contexts, and the tokens that join one sampled turn to the next.

What the engine sampled is never tokenised again: the next turn is appended as tokens. Where a template cannot be
continued by appending, the result is `None`, and a new sequence starts.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.data.markup import apply_template, encode, encode_after_text, markup_of, refuse_unnamed, without_opened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlkit.data.markup import Markup

Message = Mapping[str, Any]

_log, _progress = logging.getLogger("rlkit.data"), logging.getLogger("rlkit.data.progress")

_MARK = "placeholder of a turn"  # not markup in any template
_CHUNK = 1024  # texts per tokenizer call: enough for its threads, little to hold at once
_OPENER = 64  # characters at the end of a generation prompt that a message may repeat
TURN_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")  # in which templates look for text

_ARGUMENTS = (  # of `apply_chat_template`, which rlkit gives itself
    "messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip


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
    options: dict[str, Any] = {"tools": tools, "template_args": template_args}
    return as_written(tokenizer, messages, add_generation_prompt=add_generation_prompt, **options)[0]


def as_written(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[str, list[Message]]:
    """The text of a conversation, and the messages as the template got them.

    The arguments of tool calls are objects for most templates. A template that joins them to text gets their JSON text.
    The text of a message that is not the assistant's is plain: a zero-width space splits each control token in it (see
    `rlkit.data.markup`), so that a document cannot close its turn and open another. An assistant's text that ends with
    the end of turn does not end twice.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat_template: give one (rlkit.data.template_files.set_template; scripts: "
            "--chat-template FILE), take an instruction-tuned model's tokenizer, or use plain text with "
            "apply_chat_template=False (scripts: --no-chat-template)"
        )
    refuse_unnamed(tokenizer, tools)
    check_arguments(template_args, "`template_args`")
    options: dict[str, Any] = {"opened": add_generation_prompt, "tools": tools, "template_args": template_args}
    markup = markup_of(tokenizer)
    messages = [_own(message, markup) for message in messages]
    arguments = [str(call["function"]["arguments"]) for call in _objects(messages)]
    try:
        text = apply_template(tokenizer, messages, **options)
        if not arguments or not _writes(text, arguments, messages):
            return text, messages
    except Exception:
        if not arguments:
            raise
    messages = [_with_texts(message) for message in messages]
    return apply_template(tokenizer, messages, **options), messages


def _writes(text: str, arguments: Sequence[str], messages: Sequence[Message]) -> bool:
    """Whether a text has one of the `arguments`, as Python writes them, that the messages themselves do not say."""
    said = "\n".join(str(value) for message in messages for key, value in message.items() if key != "tool_calls")
    return any(text.count(written) > said.count(written) for written in arguments if written != "{}")


def _own(message: Message, markup: Markup) -> Message:
    """The message without control tokens; of the assistant's without those around an answer, which the template has."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    if message.get("role") != "assistant":
        return {**message, "content": markup.plain(content)}
    return {**message, "content": markup.without_opener(markup.without_stop(content))}


def opened_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> str:
    """The text up to where the policy goes on: the generation prompt, and the text of a last assistant message.

    Such a message begins the answer (`continue_final_message` of transformers). See `beginning`.
    """
    begun = len(messages) > 1 and messages[-1].get("role") == "assistant"
    before = messages[:-1] if begun else messages
    markup_of(tokenizer).refuse_first(before)
    text = render_text(tokenizer, before, add_generation_prompt=True, tools=tools, template_args=template_args)
    return text + beginning(messages[-1], text) if begun else text


def beginning(message: Message, opened: str) -> str:
    """The text of an assistant message that begins the answer, as it stands after the generation prompt `opened`.

    It is taken literally, as if the policy had sampled it: what a template drops or rewrites in a finished turn stays.
    A tag such as `<think>` with which the generation prompt ends is not written twice.

    Errors: ValueError for calls or reasoning beside the text, and for a tag that is opened again further on.
    """
    if more := [key for key in (*TURN_TEXTS[1:], "tool_calls") if message.get(key)]:
        raise ValueError(f"the last message begins the answer, and holds {more[0]!r}: write it into 'content'")
    text, tag = str(message.get("content") or ""), re.search(r"(<[\w:]+>|\[[A-Z_]+\])(\s*)\Z", opened)
    if not tag or tag[1] not in text:
        return text
    if not text.lstrip().startswith(tag[1]):
        fault = f"the chat template opens {tag[1]}, and the prompt's beginning of the answer, {text[-60:]!r}, does too"
        fix = "drop it there, or, where the template has that argument, --template-args '{\"enable_thinking\": false}'"
        raise ValueError(f"{fault}: {fix}")
    return without_opened(text, tag[1], tag[2])


def check_arguments(args: Mapping[str, Any] | None, place: str) -> None:
    """ValueError for an argument of the chat template that rlkit sets."""
    names = [name for name in _ARGUMENTS if name in (args or {})]
    if names:
        raise ValueError(f"{place}: {', '.join(map(repr, names))} is set by rlkit and cannot be given: drop it")


def _objects(messages: Sequence[Message]) -> list[Any]:
    """The tool calls whose arguments are an object."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return [c for c in calls if isinstance(c, Mapping) and isinstance(c.get("function", {}).get("arguments"), Mapping)]


def _with_texts(message: Message) -> dict[str, Any]:
    """The message with the arguments of its tool calls as JSON text."""
    new = dict(message)
    for number, call in enumerate(message.get("tool_calls") or ()):
        if call in _objects([message]):
            function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
            new["tool_calls"] = [*new["tool_calls"]]
            new["tool_calls"][number] = {**call, "function": function}
    return new


def encode_all(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, ready_made: bool = False, silent: bool = False
) -> list[list[int]]:
    """Token ids of many texts: one tokenizer call per thousand, which a fast tokenizer spreads over its threads.

    Texts that are `ready_made` (no chat template has written them) begin with the tokenizer's bos, once. Progress is
    logged, unless `silent`.
    """
    call: Any = tokenizer
    begun = markup_of(tokenizer).begun if ready_made else list
    texts = [markup_of(tokenizer).ready(text) for text in texts] if ready_made else texts
    ids: list[list[int]] = []
    for start in range(0, len(texts), _CHUNK):
        ids += map(begun, call(list(texts[start : start + _CHUNK]), add_special_tokens=False)["input_ids"])
        if not silent:
            _progress.info("tokenizing: %d of %d texts", len(ids), len(texts))
    return ids


def encode_growing(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """`encode_all` of each conversation's texts, of which one mostly goes on from the one before, in linear time.

    A text is cut before each token of `Markup.cut`, and each piece is tokenized once. A conversation whose longest text
    has other tokens as a whole is tokenized as it is.
    """
    cut, encode_them = markup_of(tokenizer).cut, partial(encode_all, tokenizer, silent=True)
    many = [texts if cut and len(texts) > 2 else () for texts in conversations]
    pieces = [_pieces(texts, cut) for texts in many]
    unique = [*dict.fromkeys(piece for texts in pieces for text in texts for piece in text)]
    of = dict(zip(unique, encode_them(unique), strict=True))
    made = [[[i for piece in text for i in of[piece]] for text in texts] for texts in pieces]
    longest = [max(range(len(texts)), key=[*map(len, texts)].__getitem__, default=0) for texts in many]
    wholes = iter(encode_them([texts[at] for texts, at in zip(many, longest) if texts]))
    same = [bool(ids) and next(wholes) == ids[at] for ids, at in zip(made, longest, strict=True)]
    others = iter(encode_them([text for texts, ok in zip(conversations, same) if not ok for text in texts]))
    return [ids if ok else [next(others) for _ in texts] for texts, ids, ok in zip(conversations, made, same)]


def _pieces(texts: Sequence[str], cut: Any) -> list[list[str]]:
    """Each text, cut before the matches of `cut`."""
    made, before = list[list[str]](), ""
    for text in texts:
        kept = made[-1][:-1] if before and text.startswith(before) else []
        start = sum(map(len, kept))
        ends = [start, *(match.start() for match in cut.finditer(text, start) if match.start() > start), len(text)]
        made.append([*kept, *(text[a:b] for a, b in pairwise(ends))])
        before = text
    return made


def turn_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages_so_far: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    sampled_ids: Sequence[int],
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
    rewrite: Callable[[str], str] | None = None,
) -> list[int] | None:
    """Tokens to append after a sampled turn: `new_messages`, then the opening of the next assistant turn.

        context = render(messages_so_far[:-1], add_generation_prompt=True) + sampled_ids + turn_tokens(...)

    `messages_so_far` ends with the assistant message decoded from `sampled_ids`, reasoning included; the ids are
    only compared with the template's closing, never tokenised again. The result is what the template writes after an
    assistant's content up to the next generation prompt, found by rendering a fixed placeholder as the content. The
    part of the closing that was already sampled is omitted: nothing where the model was cut off by a length limit,
    `<|im_end|>` where it stopped on its own. (A stop token other than the template's is kept, and the closing follows.)
    `rewrite` changes the text before it is tokenised: it puts placeholders in the places of images.

    None where the template does not continue what was sampled. Then a new sequence has to be started from
    `render(messages_so_far + new_messages, add_generation_prompt=True)`:
      - the new messages change the text before the turn, generation prompt included (DeepSeek-R1 opens a turn with
        `<think>` and writes past turns without it; Qwen3 with `enable_thinking=False` does the same);
      - the turn's `content` or reasoning is not written verbatim, white space aside (Qwen3 drops the reasoning of past
        turns when a user message follows, and keeps it when a tool's answer follows);
      - the turn is closed differently from a turn of plain text, or the template refuses plain text there (tool calls).

    Differs: verl and SkyRL render new messages after a fixed base conversation and remove that prefix, which does not
    detect a rewritten history; tokenising the whole conversation again drifts from the sample (verl issue 3960).
    """
    if not messages_so_far or messages_so_far[-1].get("role") != "assistant":
        roles = [m.get("role") for m in messages_so_far]
        raise ValueError(f"messages_so_far must end with the sampled assistant message, got roles {roles}")
    if not new_messages:
        raise ValueError("new_messages must hold at least one message, of a tool or of the user")

    def text(messages: Sequence[Message], opened: bool = True) -> str:
        return render_text(tokenizer, messages, add_generation_prompt=opened, tools=tools, template_args=template_args)

    *before, last = messages_so_far
    placed = [*before, {"role": "assistant", "content": _MARK}]
    context, whole = text(before), text([*messages_so_far, *new_messages])
    try:
        _, mark, tail = text([*placed, *new_messages]).rpartition(_MARK)
        closing = text(placed, opened=False).rpartition(_MARK)[2]
    except Exception:  # any error of the template: with the real turn, the conversation was rendered above
        return None
    markup = markup_of(tokenizer)
    if markup.closer and [*sampled_ids[-1:]] == [markup.end]:  # a turn of calls is closed by others
        tail = tail.removeprefix(markup.closer)
    turn = _squeeze(whole[len(context) : len(whole) - len(tail)])
    opener = _squeeze(context[-_OPENER:])
    written = all(_without_overlap(_squeeze(last.get(key)), opener) in turn for key in TURN_TEXTS)
    if not (mark and written and whole.startswith(context) and whole.endswith(tail)):
        return None
    ids = encode_after_text(tokenizer, rewrite(tail) if rewrite else tail)
    most = min(len(encode_after_text(tokenizer, closing)), len(sampled_ids))
    if markup.written_end is None and [*sampled_ids[-1:]] == ids[:1] and ids[0] in markup.ends:
        most = max(most, 1)  # the role of the next message ends the turn
    already = (k for k in range(most, 0, -1) if list(sampled_ids[-k:]) == ids[:k])
    return ids[next(already, 0) :]


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends an assistant's turn: the eos that the template writes after its content, else the last of the
    special tokens that begin there (`Markup.end_ids`).

    Where it writes none, and without a chat template, the token of `eos_token_id` (of the tokenizer, or of the
    generation config beside it) that begins the next message, else the first of them; None where there is none.
    """
    return markup_of(tokenizer).end


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, *configs: Any) -> tuple[int, ...]:
    """Every token that ends a turn, sorted, for `SamplingParams.stop_token_ids`.

        stop_token_ids(tokenizer, model.config, model.generation_config)

    The union of the tokenizer's eos, the `eos_token_id` (an int or a list) of each config and of the generation config
    beside the tokenizer, the placeholders of a vision model's images, and the chat template's end of turn. The union
    matters: base models are often published with an eos that their template never writes, and a rollout without the
    template's token samples up to its length limit. Raises ValueError if the union is empty.
    """
    from rlkit.model.vision import placeholder_ids

    ids: set[Any] = {end_of_turn_id(tokenizer), *markup_of(tokenizer).ends}
    for config in configs:
        eos = getattr(config, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list | tuple) else [eos])
        ids.update(placeholder_ids(config) if hasattr(config, "model_type") else ())
    ids.discard(None)
    if not ids:
        raise ValueError(
            "no stop token: neither the tokenizer nor a config has an eos_token_id and the chat template writes no "
            "special token after an assistant's content; set tokenizer.eos_token"
        )
    return tuple(sorted(ids))


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raises ValueError where a token has a different id in the model at `path` (a reference, a critic).

    An id that is another token there, of words that only one vocabulary has, is named in a warning; what only one has
    besides is ignored. A folder without a tokenizer is not checked. FileNotFoundError for a folder that holds no model.
    """
    from rlkit._util.files import check_model_path
    from rlkit.model.pretrained import load_tokenizer

    check_model_path(path)
    if Path(path).is_dir() and not (Path(path) / "tokenizer_config.json").is_file():
        return
    theirs = load_tokenizer(path).get_vocab()
    at, others = {i: token for token, i in theirs.items()}, []
    for token, i in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):  # one message for one mistake
        if theirs.get(token, i) != i:
            raise ValueError(
                f"model {path!r} has other tokens: {token!r} is {theirs[token]} there and {i} in the trained model"
                "; choose a model with the same tokenizer"
            )
        if at.get(i, token) != token:
            others.append(f"{i} is {at[i]!r} there and {token!r} in the trained model")
    if others:
        more = f", and {len(others) - 1} more" if len(others) > 1 else ""
        _log.warning("model %r reads these ids as other tokens: %s%s", path, others[0], more)


def _squeeze(text: Any) -> str:
    """Text without white space; "" for other values (None, a list of parts), which are not compared."""
    return "".join(text.split()) if isinstance(text, str) else ""


def _without_overlap(text: str, before: str) -> str:
    """`text` without the longest prefix that ends `before`: a message may repeat the `<think>` that opened its turn."""
    lengths = range(min(len(text), len(before)), 0, -1)
    return text[next((k for k in lengths if before.endswith(text[:k])), 0) :]
