"""Columns of rows and keys of messages that no form reads: refused, or named once.

A column or key that could change what is trained is used by a form (`rlkit.data.turns`), or refused here, or reported
in one line per file.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, product
from typing import Any, NamedTuple

from rlkit._util.text import excerpt
from rlkit._util.untrusted import loads
from rlkit.data.load import FromText, Row, Rows, column_error, place_of
from rlkit.data.schema import ASKED, FOR_REWARDS, GOLD, LABELS, OF_MESSAGES, OF_TEMPLATE, PAIRED, RESPONSES

MEDIA = (
    "videos", "video", "audios", "audio", "image_url", "image_urls", "input_audio", "pixel_values", "multi_modal_data",
    "multi_modal_inputs",
)  # fmt: skip
FLAGS = ("step_loss_mask", "weight", "train", "training", "loss", "loss_mask")  # slime, OpenAI, axolotl, ms-swift
_IDENTITY = re.compile(
    r"(.*_)?(id|idx|index|uuid|guid|hash|source|split|license)|(source_|page_)?url|dataset(_name)?|extra_info|"
    r"|__index_level_\d+__|Unnamed: 0|"  # the index of pandas, in its own files without a name
    r"meta(data)?|ability|(created|updated)(_at)?|timestamp"
)  # say where a row is from
SCORES = ("score", "rating", "reward", "avg_rating")
GOOD, BAD = "chosen|preferred|accepted|better|good|winner", "rejected|dispreferred|worse|bad|loser"
_NO = re.compile(rf"{BAD}|incorrect|wrong|fail(ed)?|reject|unsafe|invalid|disapproved", re.IGNORECASE)
_VERDICT = re.compile(rf"{GOOD}|correct|right|pass(ed)?|accept|safe|valid|approved|{_NO.pattern}", re.IGNORECASE)
_YES = re.compile(rf"(is_)?({GOOD}|correct|valid|verified|passed|approved)", re.IGNORECASE)  # a key that is to be true
_CHOICE = re.compile(  # a column that may say which response is better: winner, better_response_id
    rf"({GOOD}|{BAD}|safer|best|preference)(_(response|answer|completion|output|model|choice))?(_(id|idx|index))?"
)
_PAIRS = product(("{}_{}", "{}-{}", "{1}_{0}"), SCORES)
OF_PAIRS = [tuple(form.format(side, score) for side in PAIRED) for form, score in _PAIRS]
_SCORED = {*SCORES, "stars", "grade", "quality", "toxicity", *chain(*OF_PAIRS)}
_SUBJECT = re.compile(r"source|(source_|page_)?url|hash|index|timestamp")  # or what a task is about
_SENTENCE = 6  # words: no name of a source is that long
_FEW = 3  # words: a name may have two
_ASKS = 200  # characters: a shorter prompt has no room for a page that it asks about
_COMPARED = 10_000  # rows of a file whose provenance is compared: all of a large one would fill the memory
_SHARED = 20  # rows: fewer of one prompt may be samples of it
_MEDIA_FILE = re.compile(
    r"\S+\.(jpe?g|png|gif|webp|bmp|tiff?|mp4|avi|mov|mkv|webm|wav|mp3|flac|ogg|pdf)", re.IGNORECASE
)
_COPY = 12  # characters: a shorter value stands in many texts by chance
_TEXTS = {*ASKED, "output", *RESPONSES} - {"context"}
_KNOWN = (
    "role", "content", "from", "value", "tool_calls", "function_call", "tool_call_id", "train_detail",
    "reasoning_content", "reasoning", "thinking",
)  # fmt: skip
_KINDS = re.compile(r"source|split|license|dataset(_name)?|ability")  # columns with few values
_NAMES = re.compile(r".*(title|author|name|date|time)s?")  # texts of several words that say where a row is from
_MOST = 6  # names in a line
_BEFORE = ("context", "passage", "article", "story", "paragraph", "numbers", "nums")  # what a question is about
_AFTER = ("choices", "options", "endings", "answer_choices")
_TOLD = {*ASKED, *OF_TEMPLATE, *_BEFORE, *_AFTER}  # keys of what a model is told

_log = logging.getLogger("rlkit.data")


def truth(value: Any) -> bool | None:
    """True or false, 1 or 0, also as a float or as text (a cell of a CSV file is text); None for anything else."""
    text = str(value).strip().lower()
    return {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(text)


def is_empty(value: Any) -> bool:
    """Whether a value is null or NaN, an empty text, or a list or object of nothing else."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_empty, value.values() if isinstance(value, Mapping) else value))
    return value is None or value == "" or value != value


def without_nulls(value: Any) -> Any:
    """The value without the null entries of its objects, at any depth.

    Arrow tables fill the keys that an object lacks with null, and a template would write them.
    Nulls in lists stay, and those of JSON text. TRL removes the same.
    """
    if isinstance(value, FromText):
        return value
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(without_nulls, value)] if isinstance(value, list | tuple) else value


def refuse_media(row: Row, place: str) -> None:
    """ValueError for a row with audio or video, or with images in a column that is not read."""
    for name in MEDIA:
        if not is_empty(row.get(name)) and row[name] is not False:
            fault = f"column {name!r} holds media, and rlkit trains on text and on images in a column 'images'"
            raise column_error(place, fault, row, f"; drop the row, or train on its text with --rename {name} OTHER")


def check_names(rows: Iterable[tuple[str, Row]], column: str, names: Sequence[str], *, kind: str) -> None:
    """ValueError for one of the (place, row) whose `column` names none of several."""
    for place, row in rows:
        if (name := row.get(column)) not in names:
            has = f"{column!r} is {name!r}" if column in row else f"there is no column {column!r}"
            raise ValueError(f"{place}: {has}, and the {kind} are {', '.join(names)}")


def joined_parts(parts: Sequence[Any], place: str) -> str:
    """The text of `[{"type": "text", "text": ...}, ...]`, in Bedrock's form without the type.

    ValueError for a part that is not text, such as an image.
    """
    for number, part in enumerate(parts):
        kind = part.get("type", "text" if [*part] == ["text"] else None) if isinstance(part, Mapping) else part
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{place}[{number}] is {repr(kind)[:80]}: rlkit reads text only, as a string or as parts "
                "{'type': 'text', 'text': '...'}; drop the row or the part"
            )
    return "".join(part["text"] for part in parts)


def refuse_surrogates(value: Any, place: str, name: str) -> None:
    """ValueError for a text with half of a UTF-16 pair, which no tokenizer reads."""
    if isinstance(value, str):
        half = None if value.isascii() else re.search("[\ud800-\udfff]", value)
        if half:
            raise ValueError(
                f"{place}: column {name!r} holds {half[0]!r}, half of a surrogate pair, which is no character: "
                f"...{value[max(0, half.start() - 20) : half.end() + 20]!r}...; repair or drop the row"
            )
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            refuse_surrogates(item, place, name)


def is_trained(message: Mapping[str, Any], place: str) -> bool:
    """False for a turn that its row excludes from the loss; ValueError for a turn that is to be trained in part."""
    said = excerpt(dict(message))
    if not is_empty(message.get("train_detail")):
        fix = "split the turn or drop the key"
        raise ValueError(f"{place}: a message has 'train_detail', and rlkit trains whole turns: {fix}: {said}")
    flags = {key: truth(message[key]) for key in FLAGS if message.get(key) is not None}
    for key, flag in flags.items():
        if flag is None:
            raise ValueError(
                f"{place}: {key!r} must be 0 or 1, false or true (a turn is trained or not), got {message[key]!r} in "
                f"the message {said}"
            )
    return all(flags.values())


def refuse_flags(row: Row, place: str) -> None:
    """ValueError for a row with a flag of a turn (`FLAGS`) in a column of its own that excludes it, or parts of it."""
    for name in FLAGS:
        value = row.get(name)
        listed = [*map(truth, value)] if isinstance(value, list | tuple) else [truth(value)]
        if False in listed:
            fault = f"column {name!r} is {repr(value)[:60]}, which excludes a row or a turn from the loss"
            fix = f"drop the row, write {name!r} into the messages that are not to be trained, or train on the row with"
            raise column_error(place, fault, row, f"; {fix} --rename {name} OTHER")


def unknown_keys(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys of a message that neither every template nor rlkit reads, and whose values could matter.

    With each its name, or the name of what matters in its object: ("metadata", "metadata.train").
    """
    about = str(message.get("content")) if message.get("role") == "user" else ""
    for key, value in message.items():
        name, url = str(key), str(key).endswith("url")
        if key in _KNOWN or key in FLAGS or is_empty(value):
            continue
        if not _IDENTITY.fullmatch(name) or (url and str(value) not in about and _is_about(name, about)):
            yield key, name
        else:
            yield from ((key, path) for path, leaf in _leaves(value, name) if _matters(path, leaf))


class _Note(NamedTuple):
    """A value that says where a row is from. `text`: of several words, or of a kind. Of one that a task may be about:
    the row's prompt and answer, as hashes, whether the answer is short, and the prompt about a value of this name."""

    value: int
    text: bool
    asked: int = 0
    answer: int = 0
    short: bool = False
    about: bool = False


class Unused:
    """Collects what the rows of a file have and no form reads, for one line each."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._found: dict[tuple[str, str], dict[tuple[Any, ...], None]] = {}  # (file, kind) -> names
        self._notes: dict[tuple[str, str], list[_Note]] = {}  # (file, column) -> its values
        self._inner: dict[tuple[str, str], set[str]] = {}  # (file, key in a column) -> verdicts and scores
        self._marked: dict[tuple[str, str], list[tuple[int, str]]] = {}  # (file, how) -> rows with control tokens
        self._verdicts: dict[str, Counter[str]] = {}  # column -> how often each value is there

    def add(
        self, index: int, row: Row, used: Iterable[str], asked: Sequence[str], answers: Sequence[str],
        lost: Iterable[Any],
    ) -> None:  # fmt: skip
        """Look at a row with the texts `asked` and `answers`, where `lost` are its keys and arguments in no text.

        Columns contained in the prompt are not reported; of an answer a column must be all, or an answer by name.
        """
        raw, used, file = getattr(row, "own", row), {*used}, self._file(index)
        columns = self._found.setdefault((file, "column"), {})
        bad = bool(answers) and any(truth(raw.get(name)) is False for name in LABELS)
        prompt = "" if bad or row.get("images") else "\n".join(asked)
        said = answers or [str(gold) for gold in map(raw.get, GOLD) if not is_empty(gold)][:1]
        for name, value in raw.items():
            chooses = _CHOICE.fullmatch(name) is not None and len(str(value)) < _COPY
            if chooses or _is_verdict(value) or (name in LABELS and isinstance(value, str) and len(value) < _COPY):
                self._verdicts.setdefault(name, Counter())[str(value).lower()] += 1
            if ("column", name) in columns or name in used or is_empty(value):
                continue
            if _IDENTITY.fullmatch(name) and not chooses:
                for path, leaf in _leaves(value, name):
                    if not (is_copied(leaf, asked, 1) or is_copied(leaf, answers)):
                        self._note(file, path, leaf, prompt, said)
                continue
            shortest = 1 if name in _TEXTS else _COPY
            same = name not in ASKED and len(str(value)) >= _COPY and str(value).strip() in map(str.strip, answers)
            answered = name in FOR_REWARDS and is_copied(value, answers, 1)
            if not (same or answered or is_copied(value, asked, shortest)):
                columns["column", name] = None
        for name in lost:
            if name[0] == "markup":
                self._marked.setdefault((file, name[2]), []).append((index, name[1]))
            else:
                self._found.setdefault((file, name[0]), {})[name] = None
        for message in _messages(row):
            if (role := message.get("role")) != "assistant":
                flags = [f"{role} ({key!r}: true)" for key in FLAGS if truth(message.get(key))]
                self._found.setdefault((file, "role"), {}).update({("role", flag): None for flag in flags})

    def _file(self, index: int) -> str:
        if not isinstance(self._rows, Rows):
            return ""
        return self._rows.source or self._rows.places[index].rpartition(", ")[0]

    def _note(self, file: str, path: str, value: Any, prompt: str, answers: Sequence[str]) -> None:
        """Note a value of a column that says where a row is from, or of a key in it (`path`: "metadata.accepted")."""
        key, verdict = path.rpartition(".")[2] if "." in path else "", _is_verdict(value)
        if verdict and key:  # `add` counts those of a column
            self._verdicts.setdefault(path, Counter())[str(value).lower()] += 1
        if _matters(path, value):
            self._found[file, "column"]["column", path] = None
        elif verdict or key in _SCORED:
            self._inner.setdefault((file, path), set()).add(str(value))
        elif len(notes := self._notes.setdefault((file, path), [])) < _COMPARED:
            notes.append(_noted(path, value, prompt, answers))

    def _report_markup(self) -> None:
        for (file, place), pairs in self._marked.items():
            places = ", ".join(place_of(self._rows, i, with_source=False) for i in [*dict(pairs)][:5])
            source = f"{file}: " if isinstance(self._rows, Rows) and self._rows.source else ""
            tokens = _short([*dict.fromkeys(repr(token) for _, token in pairs)])
            _log.warning(
                "%s%d of the rows hold %s %s: %s%s",
                source, len(dict(pairs)), tokens, place, places, ", ..." * (len(dict(pairs)) > 5),
            )  # fmt: skip

    def report(self, not_read: Callable[[Sequence[Any]], Iterable[tuple[str, str]]], *, where: str) -> None:
        """Log one line for the columns, and one for each kind of key. `not_read`: those of `lost` to be named.

        `where` says what a column that is reported is not part of.
        """
        self._report_markup()
        named = [*(place for place, notes in self._notes.items() if _is_subject(notes))]
        for file, name in [*named, *(place for place, values in self._inner.items() if len(values) > 1)]:
            self._found.setdefault((file, "column"), {})["column", name] = None
        for noun, fact in (
            ("column", f"not part of {where}"),
            ("message key", "not written by the chat template"),
            ("template argument", "not read by the chat template"),
            ("role", "not trained: assistant turns are"),
        ):
            files: dict[tuple[str, ...], list[str]] = {}
            for (file, kind), lost in self._found.items():
                names = tuple(name for _, name in not_read([*lost])) if kind == noun else ()
                if names:
                    files.setdefault(names, []).append(file)
            for names, of in files.items():
                source = f"{_short(of)}: " if of != [""] else ""
                flag = advised(getattr(self._rows[0], "own", self._rows[0]), names) if noun == "column" else ""
                more = f"; to include: {flag}" * bool(flag) + "".join(map(self._verdict, names)) * (noun == "column")
                _log.warning("%s%s %s%s", source, _listed(noun, self._first(names)), fact, more)

    def _first(self, names: Sequence[str]) -> list[str]:
        """The names with those first that a model is told, or that differ as verdicts: a line has six."""
        matter = {*_TOLD, *(name for name, found in self._verdicts.items() if len(found) > 1)}
        return sorted(names, key=lambda name: matter.isdisjoint((name, name.rpartition(".")[2])))

    def _verdict(self, name: str) -> str:
        """That rows differ in a column of yes and no, or of a few labels, and train alike."""
        found = self._verdicts.get(name, Counter[str]()).most_common(_MOST)
        shown = " and ".join(f"{value} in {num}" for value, num in found)
        return f"; {name} is {shown} rows, and all of them train" if 1 < len(found) < _MOST else ""


def advised(row: Row, lost: Iterable[str]) -> str:
    """The flag that writes the columns `lost` into the prompt, where the row's question is a text; else ""."""
    question = next((name for name in ASKED if isinstance(row.get(name), str) and name not in _BEFORE), None)
    lost = [*lost]
    before, after = ([name for name in names if name in lost] for names in (_BEFORE, _AFTER))
    if question is None or not before + after:
        return ""
    text = "".join(f"{{{name}}}\\n\\n" for name in before) + f"{{{question}}}" + "".join(f"\\n{{{x}}}" for x in after)
    return f"--prompt '{text}'"


def _is_verdict(value: Any) -> bool:
    return type(value) is bool or (isinstance(value, str) and _VERDICT.fullmatch(value) is not None)


def _is_content(value: Any) -> bool:
    """Whether a value is a sentence or a file of media, and no name or number."""
    if not isinstance(value, str):
        return False
    return len(value.split()) >= _SENTENCE or _MEDIA_FILE.fullmatch(value.strip()) is not None


def _matters(path: str, value: Any) -> bool:
    """Whether a value is a text or medium, in an object also what a model is told, or says that a row is no good."""
    column, _, key = path.rpartition(".")
    if not column or not isinstance(value, str):
        refused = (key in FLAGS and truth(value) is False) or (value is False and _YES.fullmatch(key))
        return _is_content(value) or bool(column and refused)
    told = key in _TOLD and not re.fullmatch(r"[\w.:/-]*", value)
    return _is_content(value) or told or _NO.fullmatch(value) is not None


def _noted(path: str, value: Any, prompt: str, answers: Sequence[str]) -> _Note:
    """What is noted of a value of a column, or of a key in it. `prompt`: "" for one that is not to be compared."""
    column, _, key = path.rpartition(".")
    text = value.strip() if isinstance(value, str) else ""
    if column:
        named = _IDENTITY.fullmatch(key) or _NAMES.fullmatch(key) or re.search(r"\d", text)
        return _Note(hash(text), not named and len(re.findall(r"[^\W\d_]{2,}", text)) >= _FEW)
    several = " " in text or (_KINDS.fullmatch(path) is not None and text.rstrip(".!?…").isalpha())
    if not _SUBJECT.fullmatch(path) or not prompt or is_copied(str(value), [prompt], 1):
        return _Note(hash(text), several)
    short = all(len(answer.split()) < _SENTENCE for answer in answers)
    about = path != "source" and _is_about(path, prompt)
    return _Note(hash(str(value)), several, hash(prompt) if answers else 0, hash((*answers,)), short, about)


def _is_subject(notes: Sequence[_Note]) -> bool:
    """Whether most values of a column differ, and are texts, or what the tasks of their rows are about.

    They are where most prompts name such a value, or one prompt has several answers and values; but not where these
    answers are long, and may be samples, unless many rows have that prompt.
    """
    most = max(1.0, len(notes) / 2)
    if len({note.value for note in notes if note.text}) > most:
        return True
    if len({note.value for note in notes if note.asked or note.about}) <= most:
        return False
    groups: dict[int, list[_Note]] = {}
    for note in notes:
        groups.setdefault(note.asked, []).append(note)
    groups.pop(0, None)
    several = [of for of in groups.values() if len({n.value for n in of}) > 1 < len({n.answer for n in of})]
    shared = sum(len(of) for of in several if len(of) >= _SHARED or all(note.short for note in of))
    return shared > most or sum(note.about for note in notes) > most


def _is_about(name: str, prompt: str) -> bool:
    """Whether a prompt, a short one, asks about a value of this name."""
    word = r"urls?|this (page|link|site|website|article)" if name.endswith("url") else f"{name}(s|es)?"
    return len(prompt) < _ASKS and re.search(rf"\b({word})\b", prompt, re.IGNORECASE) is not None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The value, or those in its lists and objects and in JSON text, but for answers by name, with the keys to each."""
    value = _object_of(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in FOR_REWARDS:
                yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, path)
    elif not is_empty(value):
        yield path, value


def objects_in(row: Row) -> list[Mapping[str, Any]]:
    """The row, and the objects, or their JSON text, in its columns that are neither a prompt nor an answer."""
    inner = [_object_of(value) for name, value in row.items() if name not in FOR_REWARDS and name not in ASKED]
    return [row, *(value for value in inner if isinstance(value, Mapping))]


def _object_of(value: Any) -> Any:
    """The object of a JSON text; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        with suppress(ValueError):
            return loads(value)
    return value


def is_copied(value: Any, texts: Sequence[str], shortest: int = _COPY) -> bool:
    """Whether the value, of at least `shortest` characters, or a list, stands in one of the texts, as whole words."""
    text = value.strip() if isinstance(value, str) else ""
    if isinstance(value, list) and len(value) > 1:
        text, shortest = str(value), 1  # as Python writes it: [3, 5, 7]
    words = rf"(?<!\w){re.escape(text)}(?!\w)"
    return len(text) >= shortest and any(text in whole and re.search(words, whole) for whole in texts)


def _messages(row: Row) -> Iterator[Mapping[str, Any]]:
    for name in OF_MESSAGES:
        value = row.get(name)
        yield from (m for m in value if isinstance(m, Mapping)) if isinstance(value, list | tuple) else ()


def _short(names: Sequence[str]) -> str:
    """ "a", "a, b and 4 more"."""
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _listed(noun: str, names: Sequence[str]) -> str:
    """ "column a is", "columns a, b and 4 more are"."""
    return f"{noun}{'s' * (len(names) > 1)} {_short(names)} {'are' if len(names) > 1 else 'is'}"
