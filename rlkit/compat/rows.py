"""Rows of other systems as rlkit's own rows, and what to do about rows that are in no known form.

    rows = compat.rows.read(load_rows("alpaca.json"))                  # {instruction, input, output}
    examples, _ = sft_examples(rows, tokenizer=tokenizer, max_example_tokens=2048)

A form is a row of `FOREIGN`: the columns that it needs, and the function that gives rlkit's columns for them.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rlkit.data import columns
from rlkit.data.columns import advised, is_copied, is_empty
from rlkit.data.forms import RENAME, Form, LacksColumn
from rlkit.data.load import PythonText, Row, Rows, column_error, place_of
from rlkit.data.messages import Converted, decoded, json_of, mappings, messages_of
from rlkit.data.packages import reasoning_gym as reasoning_gym
from rlkit.data.prompt_columns import columns_in, count_from_1, filled, letter_of
from rlkit.data.rows import check_dicts, checked
from rlkit.data.schema import ANSWERS, IN_SFT, LABELS, PAIRED, PROMPTS
from rlkit.data.turns import CONVERSATION, LABELLED, PAIR, PROMPT, RESPONSE, SFT, TEXT, ends_with_answer

_log = logging.getLogger("rlkit.data")
_ROLES, _TEXTS = ("user", "assistant"), ("input", "output")
_RESPONSE_LIKE = re.compile("respon|reject|chosen|prefer")
_QUESTIONS = ("question", "problem", "instruction")
_NOT_IN_SFT = {*PAIRED, *LABELS, "input", "history"}  # of rows that lack a column
_CHOICE = re.compile(r"(response|answer|completion|output|human_ref)_?(\d|[ab])", re.IGNORECASE)
_UNREAD = {
    "input_ids": "tokens, which are not read: give the text or the messages, and rlkit tokenizes them",
    "segments": "axolotl's segments with a label each, which are not read: give a prompt and a response",
    "contents": "the turns of Gemini, which are not read: write them as 'messages' of 'role' and 'content'",
}


class Foreign(NamedTuple):
    """A form of another system: `convert` gives rlkit's columns for those of a row.

    `fits`: whether the values of a row with the columns are those of the form, where the names alone do not tell.
    """

    form: Form
    convert: Callable[[Row], Row]
    fits: Callable[[Row], bool] = bool


def read(rows: Sequence[Row], *forms: Form, apply_chat_template: bool = True, prompt: str | None = None) -> list[Row]:
    """The rows in rlkit's columns (`rlkit.data.rows`); those that are so already as they are.

        read([{"question": "1 + 1 =", "answer": "2"}])       [{"prompt": "1 + 1 =", "completion": "2", ...}]

    The first row decides which system's columns are read. A converted row keeps its own columns, and errors name those.
    With `forms` of `rlkit.data.turns` the rows are also checked (see `check_columns`), the error for a row in another
    form says what it looks like and what to do, and of PROMPT only the prompt is converted: rewards see the columns of
    the file, and an answer at the end of `messages` is left out where another column holds it.

    `prompt` is a format string over columns, "{context}\\n\\n{question}", that makes the prompt of each row in place
    of the form's own (`rlkit.data.prompt_columns`).

    Raises ValueError, with the row (see `place_of`), for a row in two forms of different content, for one in another
    form than the first, and for one that cannot be converted.
    """
    check_dicts(rows)
    found, place, plain = list[Row](), partial(place_of, rows), not apply_chat_template
    convert = partial(_converted, plain=plain) if prompt is None else _of_columns(rows, prompt)
    asked = prompt is not None and PROMPT in forms  # whatever else the columns are
    source = foreign_form(_without_null_columns(rows[0], rows), place_of(rows, 0)) if len(rows) and not asked else None

    def each() -> Iterator[Row]:
        for index, row in enumerate(rows):
            if source:
                _check_form(row, source, place(index), place(0))
            found.append(convert(row, source, forms, place(index)))
            yield found[-1]

    try:
        deque(checked(each(), place, forms, plain=plain) if forms else each(), maxlen=0)
    except LacksColumn as error:
        raise column_error(error.place, error.problem, error.row, _hint(error)) from None
    if not isinstance(rows, Rows):
        return found
    return Rows(found, source=rows.source, places=rows.places, sources=rows.sources)


def _without_null_columns(row: Row, rows: Sequence[Row]) -> Row:
    """The row with the first value that another row has in each column where its own is null."""
    found = dict(row)
    for name in [name for name, value in row.items() if value is None]:
        found[name] = next((other[name] for other in rows if other.get(name) is not None), None)
    return found


def foreign_form(row: Row, place: str) -> Foreign | None:
    """The form of another system that a row is in; None for a row with a prompt in rlkit's columns.

    Raises ValueError, with `place`, for a row in two forms of different content, and for Python's text of messages.
    """
    try:
        return _foreign_form(row, place)
    except PythonText as error:
        raise column_error(place, f"cannot be read: {error}", row) from None


def _foreign_form(row: Row, place: str) -> Foreign | None:
    there = {name: value for name, value in row.items() if value is not None}
    fits = [known for known in FOREIGN if not known.form.missing(there) and known.fits(there)]
    if there.keys() & {*PROMPTS}:
        return next((known for known in fits if known.form.columns[0][0] == "prompt"), None)
    names = {id(known): known.form.names & {*there} for known in fits}
    fits = [known for known in fits if not any(names[id(known)] < names[id(other)] for other in fits)]
    said = [str(turn.get("content")) for turn in mappings(messages_of(row.get("conversations")))]
    if said:  # a question that is also a turn of the conversation
        fits = [f for f in fits if not any(str(row.get(f.form.columns[0][0])) in text for text in said)] or fits
    if len({repr(row.get(known.form.columns[0][0])) for known in fits}) > 1:
        both = " and ".join(f"{known.form.title} ({', '.join(sorted(names[id(known)]))})" for known in fits)
        fix = f"; rename what is not meant, e.g. --rename {fits[-1].form.columns[0][0]} OTHER"
        raise column_error(place, f"is both {both}", row, fix)
    return fits[0] if fits else None


def _check_form(row: Row, source: Foreign, place: str, start: str) -> None:
    """ValueError for a row that is not in the form `source` of the first row, or in a form with more columns."""
    form, there = source.form, {name: value for name, value in row.items() if value is not None}
    absent = [" or ".join(map(repr, names)) for names in form.columns if not any(name in row for name in names)]
    wider = (
        form.names & {*there} < other.form.names & {*there} and other.fits(there)
        for other in FOREIGN
        if not other.form.missing(there)
    )
    if absent or any(row.get(name) is not None for name in {*PROMPTS} - {*form.columns[0]}) or any(wider):
        fix = "; write all rows in one form"
        if absent and {*form.columns[0]} & {*row}:
            fix += f"; {' and '.join(absent)} may be null or empty, but must be there"
        raise column_error(place, f"is not {form.title}, as {start} is", row, fix)


def _converted(row: Row, source: Foreign | None, forms: Sequence[Form], place: str, *, plain: bool) -> Row:
    """The row with rlkit's columns beside its own; the row itself if they are the same."""
    if PROMPT in forms:
        asked = _without_answer(row, source, place)
        new = {name: asked[name] for name in PROMPTS if name in asked and asked[name] is not row.get(name)}
        if not plain:
            _refuse_two_prompts(row, new, place)
    else:
        new = _columns(row, source, place)
        if plain and source and "messages" in new and row.get("prompt") is not None:
            more = [name for name in source.form.optional if not is_empty(row.get(name)) and name != "rejected"]
            found = f"{' and '.join(map(repr, more))} beside 'prompt' make a conversation, which needs a chat template"
            fix = "; drop --no-chat-template, give --chat-template FILE, or write all of it into 'prompt'"
            raise column_error(place, found, row, fix)
    return Converted(row, new, source.form if source else None) if new or source else row


def _of_columns(rows: Sequence[Row], template: str) -> Callable[[Row, Foreign | None, Sequence[Form], str], Row]:
    """`_converted`, with the prompt that the template makes of the columns of a row."""
    names, there = columns_in(template), dict.fromkeys(name for row in rows for name in row)
    if unknown := [name for name in names if name not in there]:
        raise column_error(place_of(rows, 0), f"no column {unknown[0]!r} for `prompt`", there)
    letters = [letter_of(template, row) for row in rows]
    if lettered := None not in letters:
        _log.warning(
            "the answer %s is the place of a choice, and is read as its letter, %s", rows[0]["answer"], letters[0]
        )
    elif count_from_1(template, rows):
        _log.warning(
            "the answers are 1 to the number of choices, and stay numbers: of places write the letters A, B, ..."
        )

    def convert(row: Row, source: Foreign | None, forms: Sequence[Form], place: str) -> Row:
        if other := [name for name in PROMPTS if name not in names and not is_empty(row.get(name))]:
            fix = f"; write {{{other[0]}}} into it, or --rename {other[0]} OTHER"
            raise column_error(place, f"column {other[0]!r} is a prompt, too, beside that of `prompt`", row, fix)
        more = {"answer": letter_of(template, row)} if lettered else {}
        try:
            more["prompt"] = filled(template, row)
        except (KeyError, ValueError) as error:
            what = f"no column {error} for `prompt`" if isinstance(error, KeyError) else f"`prompt`: {error}"
            raise column_error(place, what, row) from None
        new = {} if PROMPT in forms else _columns({**row, **more}, source, place)
        if source and "messages" in new and not {*ANSWERS} & {*new}:
            raise column_error(place, f"is {source.form.title}, whose answers are turns: drop `prompt`", row)
        read = (*ANSWERS, *(name for name in source.form.names & IN_SFT)) if source else ANSWERS
        form = Form("row with a prompt of columns", (("prompt",),), (*names, *read))
        return Converted(row, {name: new[name] for name in new if name not in PROMPTS} | more, form)

    return convert


def _columns(row: Row, source: Foreign | None, place: str) -> Row:
    """rlkit's columns of a row in the form `source`, and those that are encoded otherwise."""
    try:
        new = decoded(row)
        answers = {name: new[name] for name in ANSWERS if name in new}
        return new | (source.convert({**row, **answers}) if source else {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"cannot be read{f' as {source.form.title}' if source else ''}: {error}"
        raise column_error(place, what, row) from None


def _with_prompt(row: Row, source: Foreign | None, place: str) -> Row:
    """The row unchanged, with its prompt as `prompt` or `messages` where it has neither, or has JSON text there."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    new = _columns(row if source else texts, source, place)
    return {**row, **{name: new[name] for name in PROMPTS if name in new}} if new else row


def _without_answer(row: Row, source: Foreign | None, place: str) -> Row:
    """A row without the answer that ends `messages`, where another column holds that, or the question alone.

    Such rows have `prompt` or `problem` beside a whole conversation, or are an Alpaca row with its history.
    """
    new = _with_prompt(row, source, place)
    messages = mappings(new.get("messages"))
    if len(messages) > 1 and messages[-1].get("role") == "assistant":
        asked = _asked_elsewhere(row, place).get("prompt")
        known = messages[-1].get("content") in [row[name] for name in (*_OUTPUT, *IN_SFT) if row.get(name)]
        if known or [asked] == [message.get("content") for message in messages if message.get("role") == "user"]:
            return {**new, "messages": messages[:-1]}
    return new


def _asked_elsewhere(row: Row, place: str) -> Row:
    """The row without its `messages`, with the prompt of its other columns."""
    others = {name: value for name, value in row.items() if name != "messages"}
    return _with_prompt(others, foreign_form(others, place), place)


def _refuse_two_prompts(row: Row, new: Row, place: str) -> None:
    """ValueError for `messages` that end with an answer, in a row that has a prompt in other columns too."""
    messages = mappings(new.get("messages", row.get("messages")))
    answered = "messages" in row and messages and messages[-1].get("role") == "assistant"
    if answered and {*PROMPTS} & {*_asked_elsewhere(row, place)}:
        fix = "drop that message, or read the prompt from the other columns with --rename messages OTHER"
        raise ends_with_answer(place, fix)


def _likeness(form: Form, row: Row) -> tuple[int, int]:
    """How many columns of the row are the form's, and, among equals, how few of the form's are missing."""
    return len(form.names & {*row}), -len(form.missing(row))


def _hint(error: LacksColumn) -> str:
    """The first that applies: the form of the first row, what to do about the columns, or what reads the row."""
    looks, own = _looks(error.row, error.near, error.first), getattr(error.row, "own", error.row)
    flag = advised(own, own) if error.form is PROMPT else ""
    advice = [f"; write the prompt of its columns, as in {flag}" if flag else _instead(own, error.form), looks]
    if error.first or error.near is not error.form:
        advice.reverse()
    return advice[0] or advice[1] or error.fix


def _looks(row: Row, form: Form, first: str = "") -> str:
    """What a row looks like that is not in the `form`, and what reads it; of a form only with all of its columns."""
    own = getattr(row, "own", row)
    half = {*PAIRED} if not {*PAIRED} <= {*own} else {}
    rest = {name: value for name, value in own.items() if name not in half}
    answered = [m.get("role") for m in mappings(rest.get("messages"))][-1:] == ["assistant"]
    whole = [known for known in _OWN if not known.missing(rest) and not (known is PROMPT and answered)]
    read = [known for known in FOREIGN if known.form.columns[0][0] == "prompt" or not {*PROMPTS} & {*own}]
    whole += [known.form for known in read if not known.form.missing(rest) and known.fits(rest)]
    near = max(whole, key=lambda known: _likeness(known, own), default=form)
    choice = near is PROMPT and any(_RESPONSE_LIKE.search(name) for name in own)
    if near.columns == form.columns or (choice and not first):
        return ""
    hint = f"{first}, and all rows must be in one form" if first else near.hint.replace(form.hint or "-", "")
    return f"; the row looks most like {near.title}; {hint}" if hint else ""


def _instead(row: Row, form: Form) -> str:
    """What to do about a row without the columns of `form`, if the columns that it has tell; else ""."""
    own = getattr(row, "own", row)
    if unread := next((name for name in _UNREAD if name in own), None):
        return f"; column {unread!r} holds {_UNREAD[unread]}"
    if form is PAIR and {"messages", "rejected_response"} <= {*own}:  # of ms-swift
        return "; write the last assistant message of 'messages' as 'chosen', and 'rejected_response' as 'rejected'"
    names = _named_otherwise(own, form)
    sft = form in SFT and form.missing(own)[:1] == [PROMPTS] and not (names or _looks(row, form))
    near = _lacks_one(own) if sft else None
    lacks = [name for name in near.missing(own)[0] if name not in _NOT_IN_SFT] if near else []
    wanted = [*(name for either in form.missing(own) for name in either), *lacks]
    if names := _with_likely(names, own, wanted, () if near else _QUESTIONS):
        return "; rename columns, e.g. --rename " + " ".join(f"{old} {new}" for old, new in names.items())
    if form is PAIR and len(choices := [name for name in own if _CHOICE.fullmatch(name)]) > 1:
        return f"; write the better of {', '.join(choices)} as 'chosen' and the worse as 'rejected'"
    if any(not re.match(r"[^\W\d]|$", name) or name.endswith(("?", ".")) for name in own):
        return f"{RENAME} (line 1 of a CSV file is its header)"
    if near:
        has = sorted(near.names & {*own} - _NOT_IN_SFT)
        return f"; of {near.title} it has {', '.join(map(repr, has))} and lacks {' or '.join(map(repr, lacks))}{RENAME}"
    if form is PROMPT and not any(isinstance(value, str) for value in own.values()):
        return f"; no column holds a text: write one round them, --prompt '... {{{'} {'.join([*own][:3])}}}'"
    return ""


def _named_otherwise(own: Row, form: Form) -> dict[str, str]:
    """Columns in other letters, and those of ms-swift and of two other forms, with rlkit's names for them."""
    every = set[str]().union(*(known.names for known in (*_OWN, *(other.form for other in FOREIGN))))
    names = {name: name.lower() for name in own if name not in every and name.lower() in every}
    for better, worse in ("messages", "rejected_messages"), ("response", "rejected_response"):
        if form is PAIR and {better, worse} <= {*own}:
            query = {"query": "prompt"} if better == "response" and "query" in own else {}
            names |= {better: "chosen", worse: "rejected"} | query
    for asked, answered in () if form is PAIR or {*PROMPTS} & {*own} else (("user", "assistant"), ("source", "target")):
        if {asked, answered} <= {*own}:
            names |= {asked: "prompt"} | ({} if form is PROMPT else {answered: "response"})
    return names


def _lacks_one(own: Row) -> Form | None:
    """The form of another system of which the row lacks a single column, the likest of them."""
    read = {name: value for name, value in own.items() if name not in _NOT_IN_SFT}
    theirs = [known.form for known in FOREIGN if known.form.names & {*read} and len(known.form.missing(own)) == 1]
    return max(theirs, key=lambda known: _likeness(known, read), default=None)


def _with_likely(names: dict[str, str], own: Row, wanted: Sequence[str], questions: Sequence[str]) -> dict[str, str]:
    """`names` with the columns that are likely the `wanted` ones, by their values or a part of their name."""
    labels = [name for name in own if columns.truth(own[name]) is not None]
    names = names | ({labels[0]: "label"} if "label" in wanted and len(labels) == 1 else {})
    for name in wanted:
        like = [c for c in own if c != name and re.fullmatch(f"{name}(_.*|Key)|.*_{name}", c) and not names.get(c)]
        names |= {like[0]: name} if len(like) == 1 and name not in names.values() else {}
    asked = [name for name in ("query", *questions) if name in own]
    answered = [name for name in own if name in IN_SFT and own[name] is not None]
    for wish, there in ("prompt", asked), ("response", answered):
        if wish in wanted and there and not names:
            names[there[0]] = wish
    return names


def sharegpt(row: Row) -> Row:
    """`{conversations}`, with an optional system message in `system` and KTO label in `kto_tag` (LLaMA-Factory)."""
    found = messages_of(row["conversations"])
    if isinstance(found, list) and [turn.get("role") for turn in mappings(found)][:1] != ["system"]:
        found = [*_system(row), *found]
    return {"messages": found, **_label(row)}


def conversation(row: Row) -> Row:
    """`{conversation}`, of messages, or of turns with an `input` and an `output` (Capybara)."""
    found = messages_of(row["conversation"])
    if all({"input", "output"} <= {*turn} for turn in mappings(found)):
        found = [_message(role, turn[name]) for turn in found for role, name in zip(_ROLES, _TEXTS, strict=True)]
    return {"messages": [*_system(row), *found], **_label(row)}


def alpaca(row: Row) -> Row:
    """`{instruction, input, output}`: the prompt is `instruction` and `input`, on a line each, as in LLaMA-Factory.

    The answer may be called `response`, and the input `context` (Dolly). With `history`, messages or pairs of an
    instruction and a response, the row is a conversation whose turns all train.
    """
    names = [name for name in ("instruction", "input", "context") if not is_empty(row.get(name))]
    for name in names:
        if not isinstance(row[name], str):
            raise ValueError(f"column {name!r} must be a string, got {row[name]!r:.80}")
    prompt = "\n".join(row[name] for name in names)
    history = _history(row.get("history"))
    turns = [*_system(row), *history, _message("user", prompt)]
    answer = _completion(row, "output", "response", "completion")
    if history and answer:
        return {"messages": [*turns, _message("assistant", answer["completion"])], **_label(row)}
    context = {"messages": turns} if len(turns) > 1 else {"prompt": prompt}
    return {**context, **answer, **_label(row)}


def llama_factory(row: Row) -> Row:
    """`{prompt, query, response}`: an Alpaca row in the names that LLaMA-Factory's `columns` give it."""
    query = row.get("query") or ""
    if is_copied(query, [row["prompt"]]):
        query = ""  # the question again, beside the prompt that was made of it
    return alpaca({**row, "instruction": row["prompt"], "input": query, "context": None, "output": row.get("response")})


def question(row: Row) -> Row:
    """`{question, answer}`, or with `response` (OpenOrca) or a pair of answers."""
    return {"prompt": row["question"], **_completion(row, "response", "completion", "answer")}


def problem(row: Row) -> Row:
    """`{problem, solution}`; a row with only the final `answer` is a prompt."""
    return {"prompt": row["problem"], **_completion(row, "response", "completion", "solution")}


def openrlhf(row: Row) -> Row:
    """`{input, output}`, or a whole conversation in `input`."""
    name = "prompt" if isinstance(row["input"], str) else "messages"
    return {name: row["input"], **_completion(row, "output")}


def context(row: Row) -> Row:
    """The prompt as messages in `context`, or in `context_messages`; null where `context` holds anything else."""
    messages = messages_of(row.get("context_messages") or row.get("context"))
    return {"messages": messages if all("role" in turn for turn in mappings(messages)) else None}


def openai_pair(row: Row) -> Row:
    """`{input: {messages, tools}, preferred_output, non_preferred_output}` of OpenAI's preference files."""
    given = row["input"]
    if "messages" not in given:
        raise ValueError(f"'input' must have 'messages', got {sorted(given)}")
    pair = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    if other := [name for name, value in pair.items() if row.get(name) not in (None, value)]:
        raise ValueError(f"column {other[0]!r} is another answer: --rename {other[0]} OTHER leaves it out")
    return {"messages": given["messages"], "tools": given.get("tools"), **pair}


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _system(row: Row) -> list[dict[str, Any]]:
    return [_message("system", row["system"])] if row.get("system") else []


def _history(value: Any) -> list[dict[str, Any]]:
    """Earlier turns: messages, or pairs of an instruction and a response, or the JSON text of either."""
    value = () if is_empty(value) else messages_of(json_of(value))
    if isinstance(value, list | tuple):
        if all(isinstance(turn, Mapping) and "role" in turn for turn in value):
            return [dict(turn) for turn in value]
        if all(isinstance(pair, list | tuple) and len(pair) == len(_ROLES) for pair in value):
            return [_message(role, text) for pair in value for role, text in zip(_ROLES, pair, strict=True)]
    raise ValueError(
        "column 'history' must be a list of messages or of pairs [instruction, response], or its JSON text, got "
        f"{value!r:.80}"
    )


def _completion(row: Row, *names: str) -> Row:
    """The first of the columns that the row has, as `completion`."""
    name = next((name for name in names if row.get(name) is not None), None)
    return {new: row[name] for new in ("completion", "response") if new in {*row, "completion"}} if name else {}


def _label(row: Row) -> Row:
    return {"label": row["kto_tag"]} if row.get("kto_tag") is not None else {}


_SFT, _RL_SFT, _PAIRS = CONVERSATION.hint, "rlkit grpo, ppo and sft read it", PAIR.hint
_OUTPUT = ("output", "response", "completion", "chosen")
_MORE = ("system", "kto_tag", "label", "history", "rejected")
_ANSWER = (*_OUTPUT[1:3], "answer", "chosen")
_STEPWISE = Form(
    "row of stepwise supervision", (PROMPTS, ("completions",), ("labels",)), (),
    "no rlkit script trains on labels of steps, and reward_model learns one reward per response",
)  # fmt: skip
_OWN = (PROMPT, CONVERSATION, RESPONSE, PAIR, LABELLED, TEXT, _STEPWISE)
FOREIGN = (
    # LLaMA-Factory data/README.md; TRL trl/data_utils.py, maybe_convert_to_chatml
    Foreign(Form("ShareGPT conversation", (("conversations",),), _MORE[:2], _SFT), sharegpt),
    # LLaMA-Factory data/README.md; databricks/databricks-dolly-15k
    Foreign(Form("Alpaca row", (("instruction",), (*_OUTPUT, "input")), ("input", "context", *_MORE)), alpaca),
    # LLaMA-Factory data/README.md, with the names of its own columns: prompt, query, response
    Foreign(
        Form(
            "row of LLaMA-Factory", (("prompt",), ("query", "history"), ("response", "chosen")), ("query", *_MORE), _SFT
        ),
        llama_factory, lambda row: isinstance(row["prompt"], str),
    ),
    # hub data sets openai/gsm8k, Open-Orca/OpenOrca and Intel/orca_dpo_pairs
    Foreign(Form("question with an answer", (("question",), _ANSWER), (), _RL_SFT), question),
    # hub data set HuggingFaceH4/MATH-500
    Foreign(
        Form("problem with a solution", (("problem",), (*_OUTPUT[1:3], "solution", *_ANSWER[2:])), (), _RL_SFT),
        problem,
    ),
    # OpenRLHF openrlhf/cli/train_*.py, --data.input_key; slime slime/utils/arguments.py, --input-key
    Foreign(
        Form("row of OpenRLHF or slime", (("input",),), ("output", "label"), _RL_SFT), openrlhf,
        lambda row: not isinstance(row["input"], dict),
    ),
    # ColossalAI applications/ColossalChat/examples/data_preparation_scripts; OpenRLHF openrlhf/datasets
    Foreign(
        Form("row with a context of messages", (("context_messages", "context"),), (), _PAIRS), context,
        lambda row: bool(mappings(context(row)["messages"])),
    ),
    # hub data sets LDJnr/Capybara (input and output of each turn) and lmsys/lmsys-chat-1m (messages)
    Foreign(
        Form("row with a conversation", (("conversation",),), ("system", "kto_tag"), _SFT),
        conversation, lambda row: bool(mappings(messages_of(row["conversation"]))),
    ),
    # OpenAI's preference fine-tuning
    Foreign(
        Form(
            "preference row of OpenAI", (("preferred_output",), ("non_preferred_output",)), ("input",), _PAIRS,
            question=("input",),
        ),
        openai_pair, lambda row: isinstance(row.get("input"), dict),
    ),
)  # fmt: skip
