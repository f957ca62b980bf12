"""What of the texts of a row is trained as it is and seldom meant: notes, in the order of the lines of `OF_TEXTS`."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise, permutations
from string import ascii_uppercase, punctuation

from rlkit.data import columns
from rlkit.data.load import Row
from rlkit.data.messages import Converted, json_of, mappings, null_arguments
from rlkit.data.prompt_columns import is_texts
from rlkit.data.schema import GOLD, LABELS

REPEATED = 12  # characters: a response may begin with a shorter prompt by chance ("hi")
_LONG, _MANY = 50, 200  # characters: shorter texts may be of one length, or without a full stop, by chance
FEW, SOME = 4, 10  # rows: fewer may be the same, or have the same prompt or answer, by chance
_MISSING = {  # of pandas, SQL, JSON, JavaScript, spreadsheets, Reddit and Self-Instruct
    "nan", "NaN", "NAN", "None", "NaT", "<NA>", "null", "NULL", "N/A", "n/a", "#N/A", "#REF!", "undefined",
    "[deleted]", "[removed]", "<noinput>", "<nooutput>", "TODO", "TBD", "FIXME", "PLACEHOLDER",
}  # fmt: skip
_MAY_BE_GOLD = {"N/A", "n/a", "undefined", "<noinput>", "<nooutput>", "PLACEHOLDER"}
_NO_GOLD = _MISSING - _MAY_BE_GOLD | {"proof", "notfound"}  # of NuminaMath
_SELDOM_GOLD = {"None", "null", "NULL", "proof"}  # of one row
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|`[^`]*`|(?<!\w)\'[^\']*\'(?!\w)')  # JSON and code escape within quotes
_ESCAPED = re.compile(  # \n is no command of LaTeX
    r"(?<!\\)\\(u[0-9a-fA-F]{4}|n(?!(u|eq?|i|abla|ot(in)?|eg|mid|[lg]eq?|exists|ewline|onumber|atural|[ew]arrow|cong|oindent|"
    r"su[bp]\w*|orm\w*|olimits|parallel|prec\w*|succ\w*|sim|ewcommand|ewpage|less|gtr|(left|right)arrow)(?![a-z])))"
)
_ENTITY = re.compile(r"&(lt|gt|amp|quot|apos|nbsp|#\d{2,5}|#x[0-9a-fA-F]{2,4});")
_PLACE = re.compile(  # not \boxed{answer}, x_{ij}, nor a first token of markup
    r"(?<![\\\w^}])(?:\{\{ ?(\w+) ?\}\}|\{ ?(\w+) ?\}|%\((\w+)\)s|(?!\A<\|\w+\|>\s*\S)<\|(\w+)\|>)|"
    r"<(image|video|audio)>"
)
_PLACES = {  # what a template calls a text that is asked, and one that is answered
    "question", "text", "prompt", "input", "context", "instruction", "query", "problem", "passage", "document",
    "article", "content", "sentence", "user_input", "question_text", "image", "video", "audio", "name", "user_name",
    "username", "first_name", "last_name", "customer_name", "company", "company_name", "topic", "date", "city",
    "format", "output_format", "language", "style", "tone",
}  # fmt: skip
# where {name} is a variable
_CODE = re.compile(r"```|\b[rR]?[fF][\"']|\.format\(|`[^`\n]*\$\{|(?m:^\s*(def|return|const|import) )")
_SLOT = re.compile(  # a text in brackets that is to be replaced, as its words say, and no link or speaker
    r"\[(?:(?:Your|Insert|Enter|Company|Customer|Client|Recipient(?:'s)?|User|First|Last|Full)(?: [A-Z][\w']*){1,3}|"
    r"(?:YOUR|INSERT|ENTER)[ _][A-Z][A-Z_ ]*|(?i:insert|your|enter) [\w' ]{2,40} here)\](?![(:])|"
    r"<(?:INSERT|YOUR|ENTER)[ _][\w '-]{1,60}>|\{\{ ?[A-Z]\w*(?: [\w']+){1,3} ?\}\}"
)
_ABOUT_SLOTS = re.compile(rf"(?i:template|placeholder|bracket|\bfill)|{_SLOT.pattern}")  # in a prompt
_ASKS_FOR = re.compile(r"template|format|answer|respon[ds]|reply|output|\bfill", re.IGNORECASE)  # [YOUR ANSWER]
# a gold answer's end
_FINAL = re.compile(r"(?:.*(?:####|\\boxed\{))?\s*(-?\d[\d,]*|\b[A-J])(?:\.0)?\}?[\s.$]*", re.DOTALL)
_BOXED = re.compile(r".*\\boxed\{(.+)\}[\s.$]*", re.DOTALL)  # the last box, at the end
_NUMBER = re.compile(r"(-?)(?:\\[dt]?frac\{(\d{1,30})\}\{(\d{1,30})\}|(\d{1,30})(?:/(\d{1,30})|(\.\d{1,30})?))")
_WORDS = re.compile(r"[^\W\d_]{2,}(?: [^\W\d_]+){0,3}")
_SAID_PLACES = {"answer", "response", "output", "completion", "solution", "label"}
_VALUE = re.compile(r"\s*(b['\"]|[\[{])")  # Python's text of bytes, a list or an object
_FURTHER = re.compile(  # roles alone: a template's, whose tokens were skipped in decoding
    r"\S\n(?:\n((?:### )?(?:Human|User|Utilisateur|Benutzer|Nutzer|Usuario|Utente|Пользователь|用户)\s?[:\uff1a]|"
    r"### Instruction:)|(user)\n).*"
    r"\n(?:\n((?:### )?(?:Assistant|Assistent|Asistente|Assistente|Ассистент|助手)\s?[:\uff1a]|### Response:)|"
    r"(assistant|model)\n)",
    re.DOTALL,
)
_SCENE = re.compile("dialog|conversation|conversaci|conversazion|gespr|диалог|对话|對話", re.IGNORECASE)  # is asked for
_ROLES = re.compile(  # not a list of them
    r"\s*(?:(system|developer|user)\n+(?!(?:(?:system|user|tool)\n)*(?:assistant|model))\S.*?"
    r"(?:\n(assistant|model)(?=\n|\Z)|(?<=\S)(assistant)(?=\n\n|\Z))|(assistant)\n+\S)",
    re.DOTALL,
)
_RESULT = re.compile(  # of a tool, after its call in one text
    r"</(?:tool_calls?|function_calls?|tool|search|code|python)>\s*<((?:tool|function)_(?:response|results?|output)|observation|"
    r"information|result|output|interpreter)>|"
    r"(?:\A|\n)Thought:[^\n]*\n(?:[^\n]*\n){0,20}?Action:[^\n]*\n(?:[^\n]*\n){0,20}?(Observation):[ \t]*\S"
)
_API_ERROR = re.compile(  # at the beginning of an answer
    r"\s*(Error code: \d{3} - |Error: (Error code|Rate limit|429|50\d)\b|Rate limit (reached|exceeded)|"
    r"(openai|anthropic|litellm|httpx|requests)\.[\w.]*(Error|Timeout)\b|Internal Server Error\b|Request timed out\b|"
    r"(HTTP(Error)? |Error )?(429|50[0234])[: ]+(Too Many|Bad Gateway|Service Unavail|Gateway Time|Internal Server)|"
    r"(I'm |I am )?sorry, (but )?(an error|something went wrong)|An error occurred while (processing|generating)|"
    r"\{['\"]error['\"]: ?\{|Traceback \(most recent call last\):)",
    re.IGNORECASE,
)  # fmt: skip
_OF_ERRORS = re.compile(  # in a prompt that such an answer may fit
    r"\b(errors?|rate.?limit\w*|traceback|exceptions?|bugs?|logs?|api|json|code|python|outputs?|print|import|apolog\w+)\b",
    re.IGNORECASE,
)
_OF_API = {"choices": "choices[0].message.content", "output": "output[0].content[0].text", "content": "content[0].text"}
_OF_PAGE = re.compile(  # round an answer that was copied from one
    r"(?m)(\A(?:ChatGPT|You) said:|^[a-z+#]*Copy code$|^ChatGPT can make mistakes\.|:contentReference\[oaicite:\d+\]|"
    r"\u3010\d+(?::\d+)?\u2020[^\u3011\n]*\u3011)"
)
_STATED = re.compile(r"\banswer(?: is|:| =)[ :]*([^\s:].*)", re.IGNORECASE)
_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_SHEET = re.compile(rf"\d{{1,2}}-({_MONTHS})|({_MONTHS})-\d\d|\d(\.\d+)?E\+\d\d")  # 1/2, 5/99, 1230000000000
_REASONED_TWICE = re.compile(r"</(think|thinking|thought|reasoning)>\s*<\1>\s*</\1>")
_REASONING = re.compile(r"\s*<(think|thinking|thought|reasoning|reflection|scratchpad)>")
_SHORTENED = re.compile(r"(\.\.\.|\u2026)\Z")  # as a table is shown
_WITHIN = re.compile(r"([^\W\d]|[ ,])(\.\.\.|\u2026)?\Z")
_UNENDED = re.compile(r"[.!?] [^\n.!?:]{2,}[^\W\d]\s*\Z")  # prose, after a sentence of the same line
_SENTENCE = re.compile(r"[.!?\n。！？]+")
_UNSEEN = {"\ufeff": "U+FEFF", "\u200b": "U+200B", "\u2060": "U+2060"}  # at the start of a text
_MISREAD = re.compile(  # UTF-8 that was read as Latin-1 or cp1252: pairs that are seldom text in any language
    "\u00e2\u20ac.?|\u00e2\u0080[\u0080-\u00bf]|\u00f0\u0178|\u00f0\u009f|\u00c2[\u00a3\u00a7\u00a9\u00b0\u00b1\u00b7\u00bd]"
    "|\u00c3[\u00a1-\u00aa\u00ac-\u00ba\u00bc-\u00bf]|\u00d0[\u00b0-\u00ba\u00bc-\u00bf]|\u00d1[\u00b0-\u00ba\u00bc-\u00bf]"
)
_SECOND = re.escape(bytes(range(0x80, 0xC0)).decode("cp1251", "ignore"))
_MISREAD_1251 = re.compile(rf"(?:[\u0420\u0421][{_SECOND}]){{3}}|\u0432\u0402[{_SECOND}]")  # as cp1251
_UNESCAPED = re.compile(  # \frac, \boxed, \times, \right: the first letter was read as that of an escape
    r"\f(?:rac|orall)|\x08(?:oxed|eta|egin|inom|ar\{)|\t(?:imes|heta|herefore|(?:ext(?:bf|it|rm)?|frac|ilde)\{)|\r(?:ight|ho\b)"
)
_OPTION = re.compile(r"^\s*\(?([A-J])[.):]\s+(.+?)\s*$", re.MULTILINE)
_PICTURE = re.compile(r"!\[[^\]\n]*\]\([^)\s]+\.(?:png|jpe?g|gif|webp)\)", re.IGNORECASE)
_VOCABULARY = re.compile(  # of tokenizers: a blank and a line break. Maltese begins words with both letters
    r"(?<=[a-z\d,])\u0120(?=\w)|(?<=[a-z\d.,:;!?])\u010a|(?<=\w)\u2581(?=\w)"
)


def _mostly(notes: Sequence[str], least: float = 0.5) -> Sequence[str]:
    """The notes on what is meant in a few rows, and seldom in half of them; none for few."""
    num = sum(map(bool, notes))  # code may be a few lists
    return notes if num == len(notes) or num >= max(FEW, least * len(notes)) else []


def _of_most(notes: Sequence[str]) -> Sequence[str]:
    """What the notes of all rows, of which there are several, or of half of many, have in common."""
    num = Counter(part for note in notes for part in note.split(", "))
    least = min(len(notes), max(FEW, len(notes) / 2)) if len(notes) > 1 else math.inf
    return [", ".join(part for part in note.split(", ") if num[part] >= least) for note in notes]


def _cut(texts: Sequence[str]) -> Sequence[str]:
    """The length that most of the texts have, which is the longest, if they are not alike: a pattern was not cut."""
    size = max(map(len, texts))
    longest = [text for text in texts if len(text) == size]
    alike = [sum(a == b for a, b in zip(*pair)) / size for pair in pairwise(longest[:20]) if size]
    most = 0.9 if all(map(_SHORTENED.search, longest)) else 0.5
    if not alike or len(longest) < max(FEW, len(texts) / 2) or sum(alike) > most * len(alike):
        return []
    return [f"{size} characters" * (len(text) == size) for text in texts]


def _differing(tags: Sequence[str]) -> Sequence[str]:
    """The rarer of several tags."""
    num = Counter(filter(None, tags))
    return [tag * (num[tag] < max(num.values())) for tag in tags] if len(num) > 1 else []


def _given_away(golds: Sequence[str]) -> Sequence[str]:
    """The golds where nearly all are there: the last choice of a question ("yes or no?") is the right one at times."""
    return _mostly(golds, 0.8) if len({*golds} - {""}) >= FEW - 1 else []


def _missing_golds(golds: Sequence[str]) -> Sequence[str]:
    """The golds that stand for a missing value. Those that may be right, where the others differ (one of a few may be a
    class): some of them, or any beside another kind."""
    others, kinds = [gold for gold in golds if gold and gold not in _NO_GOLD], {*golds} & _NO_GOLD
    differ = 2 * len({*others}) > len(others)
    if differ and len(kinds) > 1:
        kinds |= _MISSING | {"NA"}
    elif not (kinds := kinds - _SELDOM_GOLD):
        notes = [repr(gold) * (gold in _NO_GOLD and differ) for gold in golds]
        return _mostly(notes, 0.01) if len(golds) >= SOME else []
    return [repr(gold) * (gold in kinds) for gold in golds]


def odd_texts(row: Converted, used: Iterable[str], asked: Sequence[str], answers: Sequence[str]) -> Sequence[str]:
    """The notes on what is read of a row, its columns `used` and texts: in the order of the lines of
    `OF_TEXTS`. Of a text that is all trained, `answers` is `asked`."""
    cells = [value for name in used if isinstance(value := row.own.get(name), str)]
    texts = dict.fromkeys([*cells, *asked, *answers])
    short = [text for text in texts if len(text) < REPEATED and text.strip() in _MISSING]
    said = [] if answers is asked else answers
    missing = [repr(x.strip()) for x in short if x not in said or not any(x.strip() in y != x for y in asked[-1:])]
    odd = [note for text in texts for note in _characters(text)]
    odd += ["\\r\\n"] * any("\r\n" in text for text in answers)
    turns, results = (_parts(pattern.search, said) for pattern in (_FURTHER, _RESULT))
    turns = [] if turns and any(map(_SCENE.search, asked[-1:])) else turns
    values = [repr(text[:30]) for text in said if _is_value(text)]
    escapes = [match[0] for text in texts if "\\" in text and (match := _escape(text))]
    entities = [match[0] for text in texts if "&" in text and (match := _entity(text))]
    names = {*map(str.lower, row.own)} - _SAID_PLACES | _PLACES
    names -= {"image"} if row.get("images") else set()
    places = [place for text in asked for place in _places(text, names) if answers is not asked or place[0] != "<"]
    places += [place for text in said for place in _places(text, names | _SAID_PLACES)]
    places += ["![...](...)"] * (answers is not asked and not row.get("images") and any(map(_PICTURE.search, asked)))
    golds = golds_of(row)
    damaged = [text for text in (*said, *golds) if _is_damaged(text, asked)]
    errors = [repr(text[:30]) for text in said if _API_ERROR.match(text) and not any(map(_OF_ERRORS.search, asked))]
    reasoned = [f"<{match[1]}>" for text in said if "<" in text and (match := _REASONED_TWICE.search(text))]
    loops = [repr(loop[:30]) for text in said if (loop := _repeated(text)) and not any(loop in x for x in asked)]
    longest = max(said, key=len, default="")
    unended = [longest] * bool(len(longest) >= _LONG and _WITHIN.search(longest))
    cut = [x for x in asked[-1:] if answers is not asked and len(x) >= _LONG and _WITHIN.search(x)]
    broken = [longest[-30:]] * bool(len(longest) >= _MANY and _UNENDED.search(longest[-_MANY:]))
    asks = [asked[0], asked[-1]] if asked and not answers else []  # a system message, and the question
    given = [text[:30] for text in said if asked and _ends_with(asked[-1], text)]
    given += [gold for gold in golds[:1] if any(_ends_with(text, gold) or _states(text, gold) for text in asks)]
    plain = [] if any(map(_OF_ERRORS.search, asks)) else golds[:1] * bool(asks)  # a program may print None
    differing = [*(_two_golds(row) or _two_values(row)), *_two_choices(row)] * bool(asks)
    no_choice = [note for gold in golds[:1] for text in asks[-1:] if (note := _no_choice(text, gold))]
    bodies = [path for x in said if (path := _in_response(x)) and not any(map(_OF_ERRORS.search, asked))]
    every = (
        *(missing, odd, _parts(_ROLES.match, texts), results, turns, errors, damaged, reasoned, _bare_calls(row, said)),
        *(values, escapes, entities, null_arguments(row), sorted(places), _slots(asked, said)),
        *(unended, loops, given, plain, differing, no_choice, bodies, _parts(_OF_PAGE.search, said)),
        *(cut, [repr(x) for x in broken], _parts(_REASONING.match, said)[:1]),
    )
    return [", ".join(dict.fromkeys(notes)) for notes in every]


def _parts(find: Callable[[str], re.Match[str] | None], texts: Iterable[str]) -> list[str]:
    """The groups of what is found in texts, as "first ... last"."""
    return [" ... ".join(filter(None, match.groups())) for text in texts if (match := find(text))]


def golds_of(row: Converted, *names: str) -> list[str]:
    """The gold answers of a row that are texts or numbers, as texts, in the order of their columns."""
    return _as_texts(map(row.own.get, names or GOLD))


def _as_texts(cells: Iterable[object]) -> list[str]:
    """The texts of those cells that are texts or numbers, or hold one as a `ground_truth`."""
    inner = [x.get("ground_truth") if isinstance(x, Mapping) else x for x in cells]
    return [text for cell in inner if isinstance(cell, str | int | float) and (text := str(cell).strip())]


def _two_golds(row: Converted) -> list[str]:
    """The gold answers of a row that end with different whole numbers, or letters."""
    texts = [text for _, text in _golds_beside(row)]
    ends = {m[1].replace(",", "").lstrip("0") for x in texts if (m := _FINAL.fullmatch(x))}
    kinds = ({x for x in ends if x.isalpha() is letter} for letter in (False, True))
    return [" and ".join(sorted(some)) for some in kinds if len(some) > 1]


def _two_values(row: Converted) -> Iterable[str]:
    """The gold answers of a row that are different numbers (over 1% apart), or words; of a solution its box."""
    found = [(name, text, _BOXED.fullmatch(text)) for name, text in _golds_beside(row)]
    ends = [(box[1] if box else text, name == "solution" and not box) for name, text, box in found]
    plain = [(text.rpartition("####")[2].strip("$ \n").rstrip("."), prose) for text, prose in ends]
    numbers = {text: value for text, _ in plain if (value := _value(text)) is not None}
    values = sorted(numbers.values())
    if values and values[-1] - values[0] > max(map(abs, values)) / 100:
        yield " and ".join(numbers)
    words = {" ".join(text.casefold().split()): text for text, prose in plain if _WORDS.fullmatch(text) and not prose}
    if len(words) > 1 and not any(a in b for a, b in permutations(words, 2)):
        yield " and ".join(words.values())


def _golds_beside(row: Converted) -> list[tuple[str, str]]:
    """The gold answers of a row and its objects with their names, without labels; a whole number may be a place."""
    cells = [(name, of.get(name)) for of in columns.objects_in(row.own) for name in GOLD if name not in LABELS]
    cells = [(name, x) for name, x in cells if not (isinstance(x, int | float) and float(x).is_integer())]
    return [(name, text) for name, cell in cells for text in _as_texts([cell])]


def _value(text: str) -> Fraction | None:
    """The number that a text is, also as a fraction; else None."""
    match = _NUMBER.fullmatch(re.sub(r",(?=\d{3}\b)", "", text))
    sign, *parts = match.groups("") if match else ("",)
    below = int("".join(parts[1:4:2]) or 1)
    return Fraction(sign + "".join(parts[::2])) / below if match and below else None


def _two_choices(row: Converted) -> Iterable[str]:
    """The text of the choice that the gold answer names by its letter or place, where a column has another choice."""
    lists, gold = [x for x in row.own.values() if is_texts(x)], row.own.get("answer")
    at = ascii_uppercase.find(gold) if isinstance(gold, str) and len(gold) == 1 else gold if type(gold) is int else -1
    for name in ("answer_text", "correct_answer", "correct_option", "correct_choice") if len(lists) == 1 else ():
        other = row.own.get(name)
        if 0 <= at < len(lists[0]) and isinstance(other, str) and other in lists[0] and other != lists[0][at]:
            yield f"{lists[0][at][:30]!r} and {other[:30]!r}"


def _no_choice(prompt: str, gold: str) -> str:
    """A gold answer that is none of the letters of the choices that a prompt has on lines of their own; "" for none.

    A text counts where it is that of a choice, and a digit as a place, if the prompt asks for a letter.
    """
    options = dict(_OPTION.findall(prompt))
    letters = "".join(options)
    if len(options) < 2 or not ascii_uppercase.startswith(letters) or gold in letters:
        return ""
    letter = gold in ascii_uppercase[:SOME] and not re.search(rf"\b{gold}[.):]", prompt)
    is_choice = gold in options.values() or (len(gold) == 1 and gold.isdecimal())
    text = is_choice and re.search(r"\bletter\b", prompt) is not None
    return f"{gold[:30]!r} of A to {letters[-1]}" if letter or text else ""


def _ends_with(prompt: str, gold: str) -> bool:
    """Whether a prompt ends with a word, or words, apart from the marks after them."""
    prompt, gold = (text.rstrip(f"{punctuation} \n\t") for text in (prompt, gold))
    before = prompt.removesuffix(gold)
    return "" != before != prompt and not before[-1].isalnum()


def _states(prompt: str, gold: str) -> bool:
    """Whether a prompt says that the answer is this one, and names no other (as examples do)."""
    said = _STATED.findall(prompt)
    return bool(said) and all(re.match(rf"{re.escape(gold)}(?![\w%]|[.,/]\w)", text) for text in said)


def _is_damaged(text: str, asked: Sequence[str]) -> bool:
    """Whether a text is a date or number as a spreadsheet shows others, and the prompt has nothing like it."""
    match = _SHEET.fullmatch(text.strip()) if len(text) < REPEATED else None
    part = next(filter(None, (match[1], match[2], r"E\+|10\^|scientific")), "") if match else ""
    return match is not None and not any(re.search(part, prompt) for prompt in asked)


def _repeated(text: str) -> str:
    """The sentence, or line, that is at least half of a text and stands there five times; empty for none."""
    parts = Counter(part.strip() for part in _SENTENCE.split(text) if part.strip()) if len(text) > _LONG else Counter()
    sentence, num = parts.most_common(1)[0] if parts else ("", 0)
    return sentence if num > FEW and 2 * num >= parts.total() and len(sentence) >= REPEATED else ""


def _bare_calls(row: Row, texts: Sequence[str]) -> Iterable[str]:
    """The names of the row's tools that texts call in JSON."""
    tools = str(row.get("tools") or row.get("functions") or "")
    for text in texts if tools else ():
        value = json_of(text) if text.lstrip()[:1] in ("{", "[") else None
        for call in mappings(value if isinstance(value, list) else [value]):
            if "arguments" in call and isinstance(name := call.get("name"), str) and name in tools:
                yield name


def _in_response(text: str) -> str:
    """Where the answer is in a text that is the whole response of an API; "" for others."""
    value = json_of(text) if text.lstrip()[:1] == "{" else text.startswith("ChatCompletion(id=")
    if not isinstance(value, Mapping):
        return _OF_API["choices"] * (value is True)
    kinds = {str(value.get(name)) for name in ("object", "type")} & {"chat.completion", "response", "message"}
    kinds |= {"message" for choice in mappings(value.get("choices"))[:1] if "message" in choice}
    return next((path for name, path in _OF_API.items() if kinds and mappings(value.get(name))), "")


def _escape(text: str) -> re.Match[str] | None:
    """The first escape of a line break or character outside quotes, of a text without line breaks."""
    text = text.strip()
    text = text[1:-1] if text[:1] == '"' and isinstance(whole := json_of(text), str) and whole != text else text
    return None if "\n" in text else _ESCAPED.search(_QUOTED.sub("", text))


def _entity(text: str) -> re.Match[str] | None:
    """The first entity of a text that has been escaped for HTML: it has no bare < > or &."""
    return None if re.search("[<>]", text) or "&" in _ENTITY.sub("", text) else _ENTITY.search(text)


def _places(text: str, names: set[str]) -> Iterable[str]:
    """The placeholders of these names, as they stand in a text."""
    for match in _PLACE.finditer(text) if any(x in text for x in ("{", "<", "%(")) and not _CODE.search(text) else ():
        if {*map(str.lower, filter(None, match.groups()))} <= names:
            yield match[0]


def _slots(asked: Sequence[str], said: Sequence[str]) -> Iterable[str]:
    """What is to be replaced in texts that ask for no such form, and in answers to those that have none."""
    asks_for, about = (any(map(of.search, asked)) for of in (_ASKS_FOR, _ABOUT_SLOTS))
    texts = [*([] if asks_for else asked), *([] if about else said)]
    return [match[0] for text in texts if (match := _SLOT.search(text))]


def _is_value(text: str) -> bool:
    """Whether a text is what Python writes of bytes, an object or a list of one text, and no JSON."""
    if not _VALUE.match(text) or not isinstance(json_of(text), str):
        return False
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(text.strip())
        return isinstance(value, bytes | dict) or (isinstance(value, list) and [*map(type, value)] == [str])
    return False


def _characters(text: str) -> Iterable[str]:
    """The characters of a text that are seldom meant."""
    if command := _UNESCAPED.search(text):
        yield f"{command[0]!r} of LaTeX in JSON, where a backslash is written twice"
    if "\0" in text:
        yield "NUL"
    if "<0x0A>" in text:
        yield "<0x0A>"
    if text.isascii():
        return
    if "\ufffd" in text:
        yield "U+FFFD"
    if first := _UNSEEN.get(text.lstrip()[:1]):
        yield f"{first} at the start"
    for match in filter(None, (x.search(text) for x in (_MISREAD, _MISREAD_1251, _VOCABULARY))):
        yield repr(match[0])


OF_SHEET = "have an answer that a spreadsheet wrote for another text (02-Jan for 2/1, 1.23E+12 for 1230000000000)"
OF_TEXTS: tuple[tuple[str, Callable[[Sequence[str]], Sequence[str]]], ...] = (
    ("have a text that stands for a missing value", list),
    ("hold characters that are seldom meant (of another encoding, of Windows, or of a tokenizer's vocabulary)", list),
    ("hold the roles of a chat template without its tokens, as decoding with skip_special_tokens leaves them", list),
    ("have the result of a tool inside an answer, which trains as its text: give it as a message of the tool", list),
    ("have further turns inside an answer, which train as its text: give them as messages, or cut them off", list),
    ("have the error of a server or program for an answer", list),
    (OF_SHEET, list),
    ("have a second, empty reasoning after an answer's reasoning", list),
    ("hold a call of a tool as the text of an answer, which trains as text: write it into tool_calls", list),
    ("have an answer that is Python's text of a value, and train on its quotes and brackets", _mostly),
    ("hold the text of escapes and no line break: the text was escaped twice, e.g. by two json.dumps", _mostly),
    ("hold a text that is escaped for HTML, and train on its entities: apply html.unescape", _mostly),
    ("hold calls in JSON text with arguments that are null, as a table fills them: drop those", _mostly),
    ("hold the same placeholder, which nothing has filled", _of_most),
    ("hold a text that is to be replaced, as its brackets say", _mostly),
    ("have an answer that ends within a sentence at the same length, as if it was cut", _cut),
    ("have an answer that repeats one sentence", _mostly),
    ("have a prompt that ends with its own answer, or states it", _given_away),
    ("have a gold answer that stands for a missing value", _missing_golds),
    (f"have gold answers that differ, also in objects, of which rewards read the first ({', '.join(GOLD)})", list),
    ("have a gold answer that is none of the letters of the choices in the prompt", list),
    ("have the whole response of an API for an answer, which is a part of it", list),
    ("have what a web page shows round an answer in the answer, and train on it", list),
    ("have a prompt that ends within a sentence at the same length, as if it was cut", _cut),
    ("have a long answer that ends within a sentence, as if it was cut", _mostly),
    ("begin an answer with another tag of reasoning than most answers", _differing),
)
