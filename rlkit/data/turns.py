"""The text of a row's turns, up to a generation prompt and with the assistant's turn: a reader for each form of row.

    prompt                  prompt, or messages                                  reinforcement learning
    conversation            messages                                             sft
    prompt with a response  prompt or messages; response or completion           sft
    preference pair         prompt or messages; chosen, rejected                 dpo, kto, reward_model
    labelled response       prompt or messages; response or completion; label    kto
    text                    text                                                 sft

`rlkit.data.rows.read_rows` checks a row before it is read. docs/data.md has the table for users.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlkit._util.text import excerpt
from rlkit.data import columns
from rlkit.data import messages as of_row
from rlkit.data.chat import TURN_TEXTS, Message
from rlkit.data.forms import LABELLED_ANSWERS, RENAME, Form, LacksColumn, Turn, cell, numbered, own_name
from rlkit.data.images import COLUMNS as IMAGE_COLUMNS
from rlkit.data.load import Row, column_error
from rlkit.data.markup import REASONING, encode, markup_of, opened_by, without_opened
from rlkit.data.messages import Converted, decoded, mappings, messages_of
from rlkit.data.schema import PROMPTS, RESPONSES
from rlkit.data.template import ROLES, Template, role_fix

_log = logging.getLogger("rlkit.data")
SYSTEM = ("system", "developer")
FINISHED = "drop that message (a known answer belongs in a column of its own)"


def prompt_messages(row: Row, *, system_prompt: str | None = None, place: str = "the row") -> list[dict[str, Any]]:
    """The conversation of a row: its `messages`, or its `prompt` (a string is one user message), after `system_prompt`.

    The row's own `system` or `system_prompt` comes before the argument.

    A conversation that begins with a system message keeps that one. The content of a message is text: parts
    `{"type": "text", "text": ...}` are joined without a separator, as chat templates join them, and an assistant
    message with neither content nor tool calls holds "". `place` names the row in errors.

    Raises ValueError for a row without `messages` and `prompt`, for a malformed message, and for any other content:
    null, a number, or a part that is not text, such as an image.
    """
    row = row if isinstance(row, Converted) else Converted(row, decoded(row))
    name, value = cell(row, PROMPTS, place, form=PROMPT)
    value = [{"role": "user", "content": value}] if isinstance(value, str) else messages_of(value)
    placed = numbered(row, name, value, place)
    for at, message in placed:
        texts = {message.get(key) for key in ("content", "value") if isinstance(message.get(key), str)} - {""}
        if len(texts) > 1:
            raise ValueError(f"{at} has two texts, under 'content' and under 'value': drop one")
        if "content" not in message and isinstance(message.get("value"), str):
            fix = "beside 'role' the key is 'content', and 'value' goes with 'from'"
            raise ValueError(f"{at} has its text under the key 'value': {fix}")
    try:
        turns = of_row.turns([message for _, message in placed])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    messages = [_with_text(message, at) for message, (at, _) in zip(turns, placed)]
    system, first = of_row.system_of(row, place), messages[0] if messages[0]["role"] in SYSTEM else {}
    if system is not None and first and first["content"] != system:
        name = "system" if row.get("system") == system else "system_prompt"
        fault = f"the messages begin with another system message than that of column {name!r}"
        raise column_error(place, fault, row, f"; rename the one that is not meant, e.g. --rename {name} OTHER")
    if not first and (system_prompt if system is None else system) is not None:
        return [{"role": "system", "content": system_prompt if system is None else system}, *messages]
    return messages


def _with_text(message: Message, place: str) -> dict[str, Any]:
    """The message with text as its content. A template would write anything else as Python does: "None", "[{...}]"."""
    content = message.get("content")
    for name in (*IMAGE_COLUMNS, *columns.MEDIA):
        if not columns.is_empty(message.get(name)):
            raise ValueError(f"{place} holds {name!r}, which is not read: images go into a column 'images' of the row")
    if isinstance(content, str):
        return dict(message)
    if content is None and message["role"] == "assistant":
        return dict(message) if message.get("tool_calls") else {**message, "content": ""}
    if not isinstance(content, list | tuple) or not content:
        keys = ", ".join(message) if "content" not in message and len(message) > 1 else ""
        fix = f"; its keys are {keys}: the text is to be under 'content'" if keys else ""
        raise ValueError(f"{place}.content must be a string, got {excerpt(content)}{fix}")
    return {**message, "content": columns.joined_parts(content, f"{place}.content")}


def _is_empty(message: Message) -> bool:
    """Whether a message of `prompt_messages` holds no text, white space aside, and no tool call."""
    return not message.get("tool_calls") and not any(str(message.get(key) or "").strip() for key in TURN_TEXTS)


def _context(row: Converted, place: str, template: Template, *, check: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """A row's prompt as text, up to the generation prompt, and its messages (none without a chat template)."""
    if not template.apply:
        return cell(row, ("prompt",), place, form=PROMPT, plain=True)[1], []
    messages = prompt_messages(row, system_prompt=template.system_prompt, place=place)
    begun = template.continue_answer and begins_answer(messages)
    if check:
        template.refuse_unwritten(messages[:-1] if begun else messages, place)
    return template.begun_text(messages, place) if begun else template.text(messages, place, opened=True), messages


def prompt_text(row: Row, place: str, template: Template) -> str:
    """The text of a row that was read, up to where the answer goes on, without its checks."""
    template = replace(template.of_row(row, place) if template.apply else template, continue_answer=True)
    row = Converted(row, decoded(row))
    asked = "" if template.apply else next(row[name] for name in PROMPTS if row.get(name) is not None)
    if not isinstance(asked, str):
        row = Converted(row, {"prompt": joined_contents(asked, row, place)})
    return _context(row, place, template, check=False)[0]


def joined_contents(messages: Any, row: Row, place: str) -> str:
    """The contents of messages as one text, for a prompt without a chat template; ValueError for more than contents."""
    turns = prompt_messages({"messages": messages}, place=place)
    if lost := [key for turn in turns for key in ("tool_calls", *TURN_TEXTS[1:]) if turn.get(key)]:
        fault = f"a message holds {lost[0]!r}, and --no-chat-template joins the contents of messages only"
        raise column_error(place, fault, row, "; write it into the content, or use a chat template")
    return "".join(turn["content"] for turn in turns)


def is_text(row: Row) -> bool:
    """Whether a row is a text without a prompt."""
    return not TEXT.missing(row) and not any(row.get(name) is not None for name in PROMPTS)


def begins_answer(messages: Sequence[Message]) -> bool:
    """Whether the last message of a prompt is the beginning of the answer."""
    return len(messages) > 1 and messages[-1].get("role") == "assistant"


def ends_with_answer(place: str, fix: str) -> ValueError:
    """The error of a prompt whose last message is the assistant's."""
    return ValueError(f"{place}: the conversation ends with an assistant message, so there is nothing to answer; {fix}")


def question_messages(row: Row) -> list[dict[str, Any]]:
    """`prompt_messages` without a last assistant message, which begins the answer."""
    messages = prompt_messages(row)
    return messages[:-1] if begins_answer(messages) else messages


def opened_once(turn: Turn, template: Template) -> Turn:
    """An answer after a prompt that has opened its reasoning; taken literally, without a second tag at its start.

    One that never closes it is named, once.
    """
    opened = opened_by(turn.prompt) if turn.whole.startswith(turn.prompt) else ""
    tag, answer = opened.strip(), turn.whole.removeprefix(turn.prompt)
    if not re.fullmatch(r"<\w+>|\[\w+\]|◁\w+▷", tag):
        return turn
    answer = without_opened(answer, tag, opened[len(tag) :]) if turn.literal else answer
    closing, told = f"{tag[0]}/{tag[1:]}", markup_of(template.tokenizer).told
    if closing not in answer and closing not in told:
        told.add(closing)
        _log.warning(
            "%s: the chat template opens %s, which the answer %r never closes, so that the answer is trained within "
            "the reasoning: write the reasoning and %s before it, or, where the template has it, --template-args "
            "'{\"enable_thinking\": false}'", turn.place, tag, answer.strip()[:40], closing,
        )  # fmt: skip
    return turn._replace(whole=turn.prompt + answer)


def _prompt(row: Converted, place: str, template: Template) -> list[Turn]:
    text, messages = _context(row, place, replace(template, continue_answer=True))
    if messages and messages[-1]["role"] == "assistant" and len(messages) == 1:
        raise ends_with_answer(place, FINISHED)
    begun = str(messages[-1].get("content") or "") if begins_answer(messages) else ""
    empty = all(map(_is_empty, messages)) if messages else not text.strip()
    return [Turn(place, text, empty=empty, begun=begun)]


def no_answer(row: Converted, place: str, roles: Sequence[Any]) -> ValueError:
    """The error of a conversation without an answer to train on."""
    if "assistant" in roles:
        return column_error(place, f"needs an assistant message with a message before it, got roles {roles}", row)
    if unknown := [role for role in roles if role not in (*ROLES, *SYSTEM)]:
        fix = role_fix(roles)
        return ValueError(
            f"{place}: unknown role {unknown[0]!r}, and no message of the role 'assistant' to train on{fix}"
        )
    lacks = "no response to train on: needs the column 'completion' or 'response', or an assistant message"
    lacks += "".join(f" (column {name!r} is null)" for name in RESPONSES if name in row and row[name] is None)
    return LacksColumn(place, lacks, row, RESPONSE, near=CONVERSATION, fix=RENAME)


def _conversation(row: Converted, place: str, template: Template) -> list[Turn]:
    """One turn per assistant message, but for those that the row excludes from the loss."""
    messages = prompt_messages(row, system_prompt=template.system_prompt, place=place)
    ends = [end for end, message in enumerate(messages) if message["role"] == "assistant" and end > 0]
    if not ends:
        raise no_answer(row, place, [m["role"] for m in messages])
    return _turns(messages, ends, place, template)


def _turns(messages: list[dict[str, Any]], ends: Sequence[int], place: str, template: Template) -> list[Turn]:
    """The turns of the assistant messages at `ends`, each after all messages before it."""
    template.refuse_unwritten(messages[: ends[-1] + 1], place)
    blocks, turns = template.blocks(messages[: ends[-1] + 1]) if len(ends) > 1 else None, []
    for end in ends:
        if not columns.is_trained(messages[end], place):
            continue
        if (turn := _as_in(blocks, _turn(messages, end, place, template), template)) is None:
            continue
        if turn.blocks is None and not turn.whole.startswith(turn.prompt):
            raise template.reopened(messages, end, place)
        written = turn.whole.removeprefix(turn.prompt)
        if template.writes(messages[end], written, place):
            template.name_trimmed(messages[end], written, place)
        first, unanswered = messages[0]["role"] == "assistant", ends[-1] + 1 < len(messages)
        turns.append(turn._replace(untrained=first, unanswered=unanswered))
    if not turns:
        raise ValueError(f"{place}: every assistant message is excluded from the loss: drop the row")
    return turns


def _as_in(whole: Sequence[tuple[int, int]] | None, turn: Turn, template: Template) -> Turn | None:
    """The turn with the mask that the blocks of the whole conversation give it; None where they leave it out."""
    if whole is None or turn.blocks is None:
        return turn
    num = next(
        (t for t, (a, b) in enumerate(zip(turn.blocks, whole)) if a[0] != b[0]), min(len(turn.blocks), len(whole))
    )
    if any(on for _, on in turn.blocks[num:]):  # the template rewrites it
        return turn
    start, markup = len(encode(template.tokenizer, turn.prompt)), markup_of(template.tokenizer)
    left_out = any(on for _, on in turn.blocks[start:]) and not any(on for _, on in whole[start:num])
    if left_out and "blocks" not in markup.told:
        markup.told.add("blocks")
        _log.warning(
            "%s: over the whole conversation, the {%% generation %%} blocks of the chat template leave out the "
            "assistant's turn %r: such turns are not trained", turn.place, turn.whole[len(turn.prompt) :][:60],
        )  # fmt: skip
    return None if left_out else turn._replace(blocks=[*whole[:num], *turn.blocks[num:]])


def _turn(messages: list[dict[str, Any]], end: int, place: str, template: Template, prompt: str | None = None) -> Turn:
    """The turn of message `end` as the template writes it; `prompt` is the text before it, where it is known."""
    prompt = template.text(messages[:end], place, opened=True) if prompt is None else prompt
    whole, blocks = template.text(messages[: end + 1], place, opened=False), template.blocks(messages[: end + 1])
    if blocks is not None:
        template.name_untrained(messages[end], prompt, blocks, place)
    markup, said = markup_of(template.tokenizer), str(messages[end].get("content") or "")
    if (stop := template.end_after(whole, messages, end, place)) is not None:
        whole = whole.removesuffix(markup.closing)
    empty = _is_empty({**messages[end], "content": markup.without_stop(said)})
    return Turn(place, prompt, whole, empty, literal=False, blocks=blocks, end=stop)


def _answered(
    messages: list[dict[str, Any]], response: str, place: str, template: Template, prompt: str
) -> Turn | None:
    """The turn of a response as the template writes it after the `messages`, whose text is `prompt`.

    None, for a literal turn, where the template does not go on from its generation prompt, changes the text, or adds
    reasoning to that of the response.
    """
    message = {"role": "assistant", "content": response}
    try:
        turn = _turn([*messages, message], len(messages), place, template, prompt)
    except ValueError:
        return None
    written = turn.whole.removeprefix(turn.prompt)
    tags, opened = REASONING.findall(response), REASONING.findall(opened_by(turn.prompt))
    as_said = tags in ([], REASONING.findall(written), opened + REASONING.findall(written))
    same = template.writes(message, written, place, literal=True) and turn.whole.startswith(turn.prompt)
    if not (same and as_said):
        return None
    template.name_trimmed(message, written, place)
    return turn


def _response(row: Converted, place: str, template: Template, *, names: Sequence[str] = RESPONSES) -> list[Turn]:
    """A response (a string, or the last of a list of messages) after the row's prompt or its own earlier messages.

    Of a `completion` in sft, every assistant message is a turn.
    """
    column, response = cell(row, names, place, form=RESPONSE, plain=not template.apply)
    name, label = own_name(row, column), columns.truth(row["label"]) if names is LABELLED_ANSWERS else None
    if not template.apply:
        prompt, _ = _context(row, place, template)
        return [Turn(place, prompt, prompt + response, empty=not response.strip(), label=label)]
    messages = [{"role": "assistant", "content": response}]
    if not isinstance(response, str):
        messages = prompt_messages(Converted({name: response}, {"messages": response}), place=place)
    ends = [end for end, message in enumerate(messages) if message["role"] == "assistant"]
    several = names is RESPONSES and len(ends) > 1
    response = "" if several else _last(messages, name, place)["content"]
    before = [] if column == "messages" else _before(row, column, messages, place, template.continue_answer)
    row = Converted(row, {"prompt": None, "messages": before + messages})
    if several:
        context = prompt_messages(row, system_prompt=template.system_prompt, place=place)
        start = len(context) - len(messages)
        return _turns(context, [start + end for end in ends if start + end], place, template)
    unknown = columns.unknown_keys(messages[-1])
    template.lost.update({("message key", path, "response"): None for _, path in unknown})
    prompt, asked = _context(Converted(row, {"messages": row["messages"][:-1]}), place, template)
    template.refuse_markup(response, f"{place}: a response")
    turn = None if begins_answer(asked) else _answered(asked, response, place, template, prompt)
    markup = markup_of(template.tokenizer)
    turn = turn or Turn(place, prompt, prompt + markup.stopped(response))
    empty = not markup.without_stop(response).strip()
    blocks = turn.blocks if names is RESPONSES else None  # of a pair and a label all after the prompt is the response
    more = names is LABELLED_ANSWERS and any(columns.is_trained(messages[end], place) for end in ends[:-1])
    return [turn._replace(empty=empty, label=label, untrained=more, blocks=blocks)]


def _last(messages: Sequence[Message], column: str, place: str) -> Message:
    """The last of the messages, which is a response of text."""
    last = messages[-1]
    if last["role"] != "assistant" or (column == "messages" and len(messages) == 1):
        raise ValueError(
            f"{place}: {column!r} must end with an assistant message of text that answers another message, got "
            f"{excerpt(last)}"
        )
    if more := [key for key in (*TURN_TEXTS, "tool_calls") if key != "content" and last.get(key)]:
        raise ValueError(
            f"{place}: the last message of {column!r} holds {' and '.join(more)} beside its content, and a "
            "response is text: write all of it into 'content' as the model would"
        )
    if not columns.is_trained(last, place):
        raise ValueError(f"{place}: the last message of {column!r} is excluded from the loss: drop the row")
    return last


def _before(
    row: Converted, column: str, response: Sequence[Message], place: str, continue_answer: bool
) -> list[dict[str, Any]]:
    """The messages of the row's prompt that stand before a response; none where the response repeats them.

    An assistant message that ends the prompt is left out where it is the response too (of a pair: `chosen`). A prompt
    that ends otherwise than with a user's message is continued by a response that begins with one, as in TRL. With
    `continue_answer` the response goes on after an assistant message that ends the prompt.
    """
    name = next((name for name in PROMPTS if row.get(name) is not None), "")
    begins = response[0]["role"] in (*SYSTEM, "user")
    if begins and not name:
        return []
    prompt = prompt_messages(row, place=place)
    chosen = row.get("chosen")
    first = [{"content": chosen}] if isinstance(chosen, str) else mappings(messages_of(chosen))
    pairs = [response, first or response]
    answers = [messages[-1 if begins else 0].get("content") for messages in pairs]
    closes = prompt[-1]["role"] == "assistant" and len(prompt) > 1 and not prompt[-1].get("tool_calls")
    if closes and prompt[-1]["content"] in answers and response[0]["role"] != "tool":
        prompt = prompt[:-1]
    if begins:
        said = [str(message["content"]) for message in response[:-1]]
        asked = [str(message["content"]) for message in prompt]
        if all(text.strip() in "".join(said) for text in asked):
            return []
        if response[0]["role"] == "user" and prompt[-1]["role"] in ("assistant", *SYSTEM) and said[0] not in asked:
            return prompt
        name, column = own_name(row, name), own_name(row, column)
        fault = f"{column!r} begins with a {response[0]['role']} message, and column {name!r} is not part of it"
        fix = f"; --rename {name} system for a system prompt, --rename {name} OTHER to leave it out, or write it into "
        raise column_error(place, fault, row, f"{fix}{column!r}")
    if prompt[-1]["role"] != "assistant" or response[0]["role"] != "assistant":
        return prompt
    if continue_answer and len(response) == 1:
        return prompt
    raise ValueError(
        f"{place}: column {own_name(row, name)!r} ends with an assistant message, and {own_name(row, column)!r} is "
        "another answer; drop one of them, or --continue-answer, where the response goes on after the prompt's"
    )


def _pair(row: Converted, place: str, template: Template) -> list[Turn]:
    """The chosen and the rejected response."""
    chosen, rejected = (_response(row, place, template, names=[name])[0] for name in ("chosen", "rejected"))
    if chosen.prompt != rejected.prompt:
        raise ValueError(
            f"{place}: chosen and rejected differ before their last message; a pair answers one prompt twice"
        )
    return [chosen, rejected]


def _text(row: Converted, place: str, _template: Template) -> list[Turn]:
    """A text whose tokens all train."""
    return [Turn(place, "", row["text"], empty=not row["text"].strip())]


_SFT, _PAIRS = "rlkit sft reads it", "rlkit dpo, kto and reward_model read it"
PROMPT = Form("prompt", (PROMPTS,), (), "rlkit grpo and ppo read it", read=_prompt)
CONVERSATION = Form("conversation", (PROMPTS,), (), _SFT, read=_conversation)
RESPONSE = Form("prompt with a response", (PROMPTS, RESPONSES), (), _SFT, read=_response)
PAIR = Form("preference pair", (("chosen",), ("rejected",)), PROMPTS, _PAIRS, question=PROMPTS, read=_pair)
LABELLED = Form(
    "labelled response", (LABELLED_ANSWERS, ("label",)), PROMPTS, "rlkit kto reads it",
    read=partial(_response, names=LABELLED_ANSWERS),
)  # fmt: skip
TEXT = Form("text", (("text",),), (), _SFT, read=_text)
SFT = (RESPONSE, CONVERSATION, TEXT)
