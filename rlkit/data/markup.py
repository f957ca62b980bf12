"""What the tokenizer and the chat template of a run write around texts, read once for all roads.

    markup = markup_of(tokenizer)
    markup.bos                     the tokens that begin every text, so that none has them twice
    markup.end, markup.ends        the token that ends an assistant's turn, and all that end a sample
    markup.text_of(ids, context)   a sampled turn as rewards, environments and messages have it
    markup.plain(text)             a text of others, in which no control token is left

The facts come from three renderings of placeholders, and from the `eos_token_id` of the folder that the tokenizer is
from (generation_config.json, else config.json).
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from rlkit._util import untrusted
from rlkit._util.files import model_file

_log = logging.getLogger("rlkit.data")
_ASKED, _SAID = "placeholder of a question", "placeholder of an answer"  # not markup in any template
_TAIL = 48  # tokens at the end of a context, in which what it has opened is looked for
_REASONS = r"[\w:|.-]*(?:think|thought|reason)[\w:|.-]*"
_OPEN = rf"[<\[◁](?!/|\|end){_REASONS}[>\]▷]"
_OPENED = re.compile(rf"{_OPEN}\s*\Z", re.IGNORECASE)
REASONING = re.compile(rf"[<\[◁]/?{_REASONS}[>\]▷]", re.IGNORECASE)
_REASONING_UP = re.compile(rf"{REASONING.pattern}\s*", re.IGNORECASE)  # to the next text
_CLOSES = re.compile(r"./|<\|end")
_BEGINS = re.compile(rf"\s*(?:{_OPEN}\s*{REASONING.pattern}\s*)?({_OPEN})", re.IGNORECASE)  # after an empty reasoning
_WORDS = re.compile(r"<?[\[<]/?[A-Z_]{2,}[\]>]>?")  # [INST], <<SYS>>: markup that is no token
_STOPS = (  # of families of public models
    "</s>", "<eos>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<end_of_turn>",
    "<|end|>", "<｜end▁of▁sentence｜>", "[EOS]", "<EOS>",
)  # fmt: skip
STOP = re.compile(rf"({'|'.join(map(re.escape, _STOPS))})\s*\Z")
_HEADER = re.compile(  # the start of a first turn, after the bos of its model
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>)?\s*(\[INST\](?=.*\[/INST\])|<｜User｜>"
    r"|<\|start_header_id\|>(?=\w+<\|end_header_id\|>)|<start_of_turn>(?=user|model)"
    r"|<\|im_start\|>(?=system|user|assistant)|<\|(?:system|user|assistant)\|>(?=\s)|<\|channel\|>(?=\w+<\|message\|>)"
    r"|\[THINK\](?=.*\[/THINK\])|<\|python_tag\|>|\[TOOL_CALLS\](?=\s*\[?[{\w])|<\|tool_calls_section_begin\|>)",
    re.DOTALL,
)  # fmt: skip
_SECTIONS = (("### Instruction:", "### Response:"), ("### Human:", "### Assistant:"))
_SPEAKERS = (("\n\nHuman:", "\n\nAssistant:"), *_SECTIONS, ("USER:", "ASSISTANT:"))
_TURNS = (
    ("<|im_start|>user", "<|im_start|>assistant"), ("<start_of_turn>user", "<start_of_turn>model"),
    ("<|start_header_id|>user", "<|start_header_id|>assistant"), ("[INST]", "[/INST]"),
    ("<|user|>", "<|assistant|>"), ("<｜User｜>", "<｜Assistant｜>"), ("<|turn>user", "<|turn>model"),
    *_SPEAKERS,
)  # fmt: skip
_NAMES = "(?:### ?)?(?:Assistant|ASSISTANT)|### ?Response|AI|Bot|BOT|Chatbot"
_STARTS = re.compile(rf"\s*((?:{_NAMES}):)")
_ENDS = re.compile(rf"\n\s*((?:{_NAMES}|A):|###)\Z")  # the last is of OpenAI's older completions
_DIALOGUE = re.compile(r"(?:\A|\n)\W*(?:Human|User|USER|Customer|You|Q)\W*:")
_CLOCK = re.compile(r"strftime_now\([^)]*%-?[HIMSTXcrfs][^)]*\)")
_WHOLE = ("\n\n### ", "\n\nBelow is an instruction")
_tried: dict[str, str] = {}  # what each chat template exceeds, "" for nothing
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def markup_of(tokenizer: Any) -> Markup:
    """The markup of a tokenizer with the chat template that it has now."""
    settings = [getattr(tokenizer, name, None) for name in ("chat_template", "eos_token", "bos_token", "name_or_path")]
    known = tuple(x if isinstance(x, str) else repr(x) for x in settings)  # a text keeps its hash
    return _markup_of(tokenizer, known, len(tokenizer) if hasattr(tokenizer, "__len__") else 0)


@lru_cache(maxsize=16)
def _markup_of(tokenizer: Any, _known: tuple[str, ...], _size: int) -> Markup:
    return Markup(tokenizer)


@dataclass(frozen=True, eq=False)
class Markup:
    """The facts of one tokenizer and chat template; each is computed when it is first asked for."""

    tokenizer: Any
    told: set[str] = field(default_factory=set, repr=False)
    """what has been reported"""

    @cached_property
    def bos(self) -> list[int]:
        """The tokens that the tokenizer puts before every text."""
        bare, whole = encode(self.tokenizer, "x"), self.tokenizer.encode("x")
        at = next((k for k in range(len(whole)) if whole[k : k + len(bare)] == bare), 0)
        return [*whole[:at]]

    def begun(self, ids: list[int]) -> list[int]:
        """The tokens of a ready-made text with `bos` before them once, whether or not the text begins with it."""
        num = len(self.bos)
        while num and ids[:num] == self.bos:
            ids = ids[num:]
        return self.bos + ids

    def ready(self, text: str) -> str:
        """A ready-made text without blanks before its own `bos`."""
        bare = text.lstrip()
        return bare if self.bos and bare.startswith(self.tokenizer.decode(self.bos)) else text

    @cached_property
    def _renders(self) -> tuple[str, str, str]:
        """The texts of a question with the generation prompt, of question and answer, and of a question after them.

        ValueError for a template that fails, so that all that is read from them ends a command in one line.
        """
        refuse_unnamed(self.tokenizer)
        asked = [{"role": "user", "content": _ASKED}]
        said = [*asked, {"role": "assistant", "content": _SAID}]
        try:
            first = [apply_template(self.tokenizer, told, opened=told is asked) for told in (asked, said)]
        except untrusted.BadFile:
            raise
        except Exception as error:  # any of the template
            text = " ".join(str(error).split())
            raise ValueError(f"the chat template cannot be rendered: {type(error).__name__}: {text}") from error
        try:
            return first[0], first[1], apply_template(self.tokenizer, [*said, *asked], opened=True)
        except Exception:  # any of the template: it takes one question only
            return first[0], first[1], ""

    @cached_property
    def misopened(self) -> tuple[str, str] | None:
        """The generation prompt, and what is written before an answer, where neither begins the other (without tags of
        reasoning): the role differs, or a blank."""
        first, second = (_REASONING_UP.sub("", text) for text in self._openings)
        return self._openings if any(a != b for a, b in zip(first, second)) else None

    @cached_property
    def _openings(self) -> tuple[str, str]:
        told = self._renders[1].rpartition(_SAID)[0] or _ASKED
        return self._renders[0].rpartition(_ASKED)[2], told.rpartition(_ASKED)[2]

    @cached_property
    def _takes_first(self) -> bool:
        """Whether the template writes the first message as the system's, whatever its role: a lone question stands
        where the system's text would, without the header that the user has after that."""
        told = [{"role": "system", "content": _SAID}, {"role": "user", "content": _ASKED}]
        try:
            alone, both = self._renders[0], apply_template(self.tokenizer, told, opened=True)
        except Exception:  # any of the template: it refuses the system's messages
            return False
        before, _, after = both.partition(_SAID)
        last = [re.findall(r"\w+", text)[-1:] for text in (after.partition(_ASKED)[0], before)]
        return alone.partition(_ASKED)[0] == before and bool(last[0]) and last[0] != last[1]

    def refuse_first(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """ValueError for a first message that the template would write as the system's and that is another's."""
        if messages and messages[0].get("role") != "system" and self._takes_first:
            raise ValueError(
                f"the chat template writes the first message as the system's, and here it is the "
                f"{messages[0].get('role')}'s: put a system message before it (--system-prompt), or change the template"
            )

    @cached_property
    def closing(self) -> str:
        """What the template writes after an answer; "" without a chat template."""
        return self._renders[1].rpartition(_SAID)[2] if getattr(self.tokenizer, "chat_template", None) else ""

    @cached_property
    def written_end(self) -> int | None:
        """The token that ends an assistant's turn in the chat template; None where it writes none after an answer."""
        return next(reversed(self.end_ids), None)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens with which the chat template ends a turn of an answer, the last of them `written_end`.

        Of what stands there whether or not a message follows (Phi-3 writes one more token at the end of a conversation)
        the first token of `eos`, else the last of the first special tokens in a row. Where that has none, the first of
        `eos`, else the first special token. Where there is no special token, those that were added to the vocabulary.
        """
        ids = encode_after_text(self.tokenizer, self.closing) if self.closing else []
        after = encode_after_text(self.tokenizer, self._followed) if ids and self._followed else []
        num_shared = next((k for k, (a, b) in enumerate(zip(ids, after)) if a != b), min(len(ids), len(after)))
        special, added = self._special.union(self.eos), {i for i, token in self._added.items() if _is_markup(token)}
        for of, num in product((special, added), (num_shared, len(ids))):
            if found := [k for k in range(num) if ids[k] in of]:
                row = [k for n, k in enumerate(found) if k == found[0] + n]
                end = next((k for k in found if ids[k] in self.eos), row[-1 if num == num_shared else 0])
                first = next(k for k, i in enumerate(ids) if i in special | added)
                return tuple(ids[first : end + 1])
        return ()

    @cached_property
    def _followed(self) -> str:
        """What the template writes after an answer that a question follows; "" without a chat template."""
        return self._renders[2].rpartition(_SAID)[2] if getattr(self.tokenizer, "chat_template", None) else ""

    @cached_property
    def closers(self) -> tuple[int, ...]:
        """The tokens of `end_ids` before the last: Command's `<|END_RESPONSE|>`, markup as its end is."""
        try:
            return self.end_ids[:-1]
        except ValueError:  # of the template, as in `ends`
            return ()

    @cached_property
    def closer(self) -> str:
        """The text of `closers`."""
        return str(self.tokenizer.decode([*self.closers])) if self.closers else ""

    @cached_property
    def opener(self) -> str:
        """The token before an answer that `closers` close, `<|START_RESPONSE|>`, no reasoning; "" for none."""
        if not self.closers:
            return ""
        first, second = (_REASONING_UP.sub("", text) for text in self._openings)
        token = second.removeprefix(first).strip()
        return token if token in self._added.values() else ""

    @cached_property
    def eos(self) -> tuple[int, ...]:
        """`eos_token_id` of the tokenizer and of its model's folder, the one to be trained first."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        theirs = next((ids for _, ids in _eos_of_folder(self.tokenizer)), [])
        first = [eos] if eos is not None and (eos in theirs or not theirs) else []
        return tuple(dict.fromkeys([*first, *theirs, *([] if eos is None else [eos])]))

    @cached_property
    def end(self) -> int | None:
        """The token that ends an assistant's turn; None where neither the template, tokenizer nor folder has one."""
        if self.written_end is not None:
            return self.written_end
        return self.end_before(self._followed.removeprefix(self.closing))

    @cached_property
    def end_text(self) -> str:
        """The text of `end`; "" where there is none."""
        return "" if self.end is None else str(self.tokenizer.decode([self.end]))

    def end_before(self, text: str) -> int | None:
        """The token that ends a turn where the template writes none, and `text` next.

        The first token of `text` if a sample ends there (GLM-4.5: `<|user|>`, and after a call `<|observation|>`), else
        the first of `eos`.
        """
        after = encode_after_text(self.tokenizer, text)[:1] if text else []
        return next((i for i in (*after, *self.eos) if i in self.eos), None)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens at which a sample ends."""
        try:
            end = self.end
        except ValueError:  # of the template, which then cannot render the prompts either
            end = None
        return frozenset(i for i in (end, *self.eos) if i is not None)

    @cached_property
    def _stops(self) -> str:
        """A regular expression of the texts of `closers`, and of `ends` that are tokens of their own; it matches
        nothing without any."""
        ids = self.ends & self._special.union(self._added)
        texts = [*(str(self.tokenizer.decode([i])) for i in ids), self.closer.strip()]
        texts = sorted(texts, key=len, reverse=True)
        return "|".join(re.escape(text) for text in texts if text.strip()) or r"(?!)"

    def without_stop(self, text: str) -> str:
        """A text without the tokens of `closers` and `ends` at its end, nor blanks after them."""
        return re.sub(rf"(?:(?:{self._stops})\s*)+\Z", "", text)

    def without_opener(self, text: str) -> str:
        """The text of an answer without `opener` at its start, or after its reasoning."""
        start = rf"(\A|{REASONING.pattern})\s*{re.escape(self.opener)}"
        return re.sub(start, r"\1", text, count=1, flags=re.IGNORECASE) if self.opener else text

    def stopped(self, text: str) -> str:
        """A ready-made text without blanks after a token of `ends` at its end."""
        return re.sub(rf"({self._stops})\s+\Z", r"\1", text)

    def text_of(self, ids: Sequence[int], context: Sequence[int] = ()) -> str:
        """The text of a sampled turn, as rewards, environments and messages have it.

        Only the tokens of `ends` at its end are dropped, and those around an answer in its turn (`opener`, `closers`);
        other special tokens (`<think>`, `</tool_call>`) stay. What the `context` has opened of it (`<think>` of the
        generation prompt) is its beginning.
        """
        text: str = self.tokenizer.decode(self.without_end(ids), skip_special_tokens=False)
        return self.without_opener(self.opened_by(context) + text)

    def without_end(self, ids: Sequence[int]) -> list[int]:
        """The tokens of a turn before those that end it."""
        end, num = len(ids), len(self.closers)
        while end and ids[end - 1] in self.ends:
            end -= 1
        closed = num and (*ids[max(0, end - num) : end],) == self.closers
        return [*ids[: end - num if closed else end]]

    def opened_by(self, context: Sequence[int]) -> str:
        """`opened_by` of the text of a context."""
        return opened_by(self.tokenizer.decode([*context[-_TAIL:]], skip_special_tokens=False)) if context else ""

    def report_opened(self, prompt: str) -> None:
        """Name, once, what a prompt opens."""
        opened = opened_by(prompt)
        if opened and opened not in self.told:
            self.told.add(opened)
            _log.warning("prompts end with %r: the completion begins with it for rewards and environments", opened)

    @cached_property
    def _added(self) -> dict[int, str]:
        return {i: str(token) for i, token in getattr(self.tokenizer, "added_tokens_decoder", {}).items()}

    @cached_property
    def cut(self) -> re.Pattern[str] | None:
        """Added tokens that stand for their text alone, wherever it stands: what is before and after is tokenized by
        itself."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        alone = [str(t) for t in added if not (t.normalized or t.lstrip or t.rstrip or t.single_word)]
        return _any_of(alone)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset({i for i, t in added.items() if t.special} | {*getattr(self.tokenizer, "all_special_ids", ())})

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Markup that the chat template writes around messages, longest first: tokens, and words like [INST].

        Not what is the policy's own: what the template writes between the generation prompt and an answer.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return ()
        try:
            question, answered, again = self._renders
        except ValueError:  # it is reported where a row is rendered
            return ()
        text = "\n".join([question, self.closing, again.rpartition(_SAID)[2]] if _SAID in answered else [question])
        text = REASONING.sub("", text)
        tokens = {token for token in self._added.values() if _is_markup(token) and token in text}
        return tuple(sorted({*tokens, *_WORDS.findall(text)}, key=len, reverse=True))

    @cached_property
    def control(self) -> re.Pattern[str] | None:
        """Control tokens: those that are `written`, and special tokens, except tags like <think> and </think>."""
        special = {self._added[i] for i in self._special if i in self._added}
        names = {token.strip("</[]>◁▷") for token in special if token[1:2] == "/"}
        named = {str(getattr(self.tokenizer, name, None)) for name in _NAMED}
        tags = {token for token in special - named if token.strip("</[]>◁▷") in names}
        marks = {token for token in special - tags | {*self.written} if len(token.strip()) > 1}
        return _any_of(marks)

    def plain(self, text: str) -> str:
        """The text with a zero-width space in each control token, so that it is read as text."""
        return self.control.sub(lambda match: f"{match[0][0]}\u200b{match[0][1:]}", text) if self.control else text

    def foreign_stop(self, answer: str) -> str:
        """The stop token of another family of models that ends an answer; "" for none. Not `</s>` that closes <s>."""
        stop = STOP.search(answer)
        if stop is None or self._is_own(stop[1]) or (stop[1] == "</s>" and "<s>" in answer):
            return ""
        return stop[1]

    def foreign_turn(self, text: str) -> str:
        """Markup of another family that begins a turn at the start of a text, or stands around it; "" for none.

        Two names of speakers count where the text ends with the second, or begins as no dialogue in it would.
        """
        if header := _HEADER.match(text):
            own = self._is_own(header[1]) or header[1] in {*self._added.values(), *self.written}
            return "" if own else header[1]
        held = f"\n\n{text.strip()}"
        for first, second in _SPEAKERS:
            whole = held.endswith(second) or held.startswith(_WHOLE) or text.startswith("\n\nHuman:")
            if whole and 0 <= held.find(first) < held.rfind(second):
                return f"{first.strip()} ... {second.strip()}"
        return ""

    def foreign_start(self, text: str) -> str:
        """Markup that begins a first turn at the start of a ready-made text, none of it a token here; "" for none."""
        header, added = _HEADER.match(text), {*self._added.values()}
        if header is None or self._is_own(header[1]) or header[1] in added:
            return ""
        first = "<s>" if header[1] == "[INST]" else header[0].removesuffix(header[1]).strip()  # Llama 2 writes letters
        return "" if first in added else header[1]

    def _is_own(self, token: str) -> bool:
        return self.control is not None and self.control.fullmatch(token) is not None

    def report_no_eos(self) -> None:
        """Name, once, that texts without a chat template have no end."""
        if not self.eos and "eos" not in self.told:
            self.told.add("eos")
            _log.warning("the tokenizer has no eos_token: texts end without a token, and train no stop")

    def report(self, source: str = "the chat template") -> None:
        """Name, once, what the template leaves out, the end of an answer and `bos`, and a wrong generation prompt."""
        if "template" in self.told or not getattr(self.tokenizer, "chat_template", None):
            return
        self.told.add("template")
        try:
            opened = self._renders[0]
        except ValueError:  # it is reported where a row is rendered
            return
        self._report_ordinary_eos()
        self._report_turns(source)
        self._report_clock(source)
        if self.end is None:
            _log.warning(
                "%s: no special token of this tokenizer ends an answer (%r is written there), and there is no "
                "eos_token: answers train no stop, and no sample ends; write an end of turn there",
                source, self.closing,
            )  # fmt: skip
        elif self.written_end is None:
            _log.warning(
                "%s: no special token of this tokenizer ends an answer (%r is written there); %r ends it, in training "
                "and in sampling", source, self.closing, self.end_text,
            )  # fmt: skip
        if self.misopened:
            _log.warning(
                "%s: opens a turn with %r but writes %r before an answer, so that what is trained is not what would be "
                "sampled", source, *self.misopened,
            )  # fmt: skip
        before = self._renders[1].removeprefix(opened).partition(_SAID)[0]
        if self._renders[1].startswith(opened) and re.search(r"\w", REASONING.sub("", before)):
            _log.warning(
                "%s: the generation prompt lacks %r, which is written before an answer (no add_generation_prompt?): it "
                "is sampled and trained as part of the answer", source, before,
            )  # fmt: skip
        if self.bos and encode(self.tokenizer, opened)[: len(self.bos)] != self.bos:
            _log.warning(
                "%s: does not begin with {{ bos_token }} (%r), which this tokenizer puts before every text",
                source, self.tokenizer.decode(self.bos),
            )  # fmt: skip

    def _report_turns(self, source: str) -> None:
        """Name an answer that ends with the token that opens turns, and turns that do not tell whose they are."""
        asked, said, after = self._renders[2].rpartition(_ASKED)[0].rpartition(_SAID)
        opener = after.removeprefix(self.closing)
        if self.written_end not in (None, *self.eos) and self.end_text in opener:
            line = "%s: an answer ends with %r, which opens turns, and %r is not written: is it misspelt?"
            _log.warning(line, source, self.end_text, self.tokenizer.decode([*self.eos[:1]]))
        if said and asked.rpartition(_ASKED)[2] == after:
            line = "%s: turns of the user and the assistant are written alike, with %r between them: add their roles"
            _log.warning(line, source, after)

    def _report_clock(self, source: str) -> None:
        """Name the time of day in prompts; a date, as Llama 3.2's, is the same for a day."""
        if clock := _CLOCK.search(str(self.tokenizer.chat_template)):
            line = "%s: writes the time of day (%s), so that a prompt is another one each time: write a date alone"
            _log.warning(line, source, clock[0])

    def _report_ordinary_eos(self) -> None:
        """Name an `eos_token_id` of the folder that is a token of ordinary text: answers end where they write it."""
        known = self._special.union(self._added, [getattr(self.tokenizer, "eos_token_id", None), self.written_end])
        files = {i: file for file, ids in _eos_of_folder(self.tokenizer) for i in ids if i not in known}
        for i, file in files.items():
            text = str(self.tokenizer.decode([i])) if 0 <= i < len(self.tokenizer) else ""
            if text and not re.fullmatch(r"<.+>|\[.+\]", text.strip()):  # a stop that is not marked as special
                line = "%s: eos_token_id %d is %r, a token of ordinary text: answers end where they write it; "
                _log.warning(line + "correct it", file, i, text)


def speaker_of(text: str, *, answer: bool) -> str:
    """The name of a speaker with which an answer begins, unless it writes a dialogue, or a prompt ends; "" for none.

    "Assistant:", or, of a prompt, the separator "###", in a line of its own.
    """
    if answer:
        speaker = _STARTS.match(text)
        return speaker[1] if speaker and not _DIALOGUE.search(text) else ""
    end = text.rstrip()
    if end.endswith(" Assistant:") and _DIALOGUE.match(end):
        return "Assistant:"
    speaker = _ENDS.search(end[-_TAIL:])
    return speaker[1] if speaker else ""


def _any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    """A pattern of these texts, the longest of those that begin alike; None without any."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


def dialogue_in(text: str) -> str:
    """The markup of a question and of the answer after it in a text, of any family; "" for none."""
    found = next(((a, b) for a, b in _TURNS if 0 <= text.find(a) < text.rfind(b)), ())
    return " ... ".join(found)


def opened_by(text: str) -> str:
    """What the end of a text has opened of reasoning, with blanks: "<think>\\n"; "" for nothing."""
    match = _OPENED.search(text[-4 * _TAIL :])
    return match[0] if match else ""


def reasoned(text: str) -> tuple[list[str], list[str]]:
    """The parts of a text between tags of reasoning, and those of them that are no reasoning."""
    tags, parts = REASONING.findall(text), [part.strip() for part in REASONING.split(text)]
    return parts, [*parts[:1], parts[-1]] if not tags or _OPENED.search(tags[0]) else parts[-1:]


def unfinished(answer: str) -> str:
    """ "open" for an answer that begins with reasoning and never closes it, "alone" for reasoning alone, "" for others.

    The empty reasoning that a template writes before an answer does not count.
    """
    begun = _BEGINS.match(answer)
    if begun is None:
        return ""
    rest = answer[begun.end() :]
    end = next((tag.end() for tag in REASONING.finditer(rest) if tag[0] != begun[1]), None)
    if end is None:
        return "open" if re.fullmatch(r"<[\w:|]+>|\[[A-Z_]+\]|◁\w+▷", begun[1]) else ""
    return "" if rest[end:].strip() else "alone"


def closed_unopened(prompt: str, answer: str) -> bool:
    """Whether an answer closes reasoning that neither it nor the prompt opens, other than in words about the tag."""
    tag = REASONING.search(answer)
    if tag is None or not _CLOSES.match(tag[0]):
        return False
    before, after = answer[max(0, tag.start() - _TAIL) : tag.start()], answer[tag.end() : tag.end() + 1]
    if re.search(r"[`'\"(]\Z", before) or (re.search(r"[^.!?\s][ \t]+\Z", before) and re.match(r"[ \t.,;:)]", after)):
        return False
    return all(_CLOSES.match(match[0]) for match in [*REASONING.finditer(prompt)][-1:])


def mentioned_end(answer: str) -> str:
    """The closing tag of reasoning that stands within a line of an answer, which opens none; "" for none."""
    tag = REASONING.search(answer)
    if tag is None or tag[0][1] != "/":
        return ""
    for match in re.finditer(re.escape(tag[0]), answer):
        stop = answer.find("\n", match.end())
        before = answer[answer.rfind("\n", 0, match.start()) + 1 : match.start()]
        after = answer[match.end() : len(answer) if stop < 0 else stop]
        if before.strip() and after.strip() and (before[-1] in " \t`'\"(" or after[0] in " \t`'\").,;:"):
            return tag[0]
    return ""


def without_opened(text: str, tag: str, blanks: str) -> str:
    """A text without the `tag` at its start, and the blanks after it, which stand before the text already."""
    bare = text.lstrip()
    return bare.removeprefix(tag).removeprefix(blanks) if bare.startswith(tag) else text


def refuse_unnamed(tokenizer: Any, tools: Sequence[Any] | None = None) -> None:
    """ValueError for chat templates by name of which none is to be taken."""
    named = getattr(tokenizer, "chat_template", None)
    if isinstance(named, Mapping) and named and "default" not in named and not (tools and "tool_use" in named):
        first, names = next(iter(named)), ", ".join(map(repr, named))
        fix = (
            f"choose one: tokenizer.chat_template = tokenizer.chat_template[{first!r}] (scripts: --chat-template FILE)"
        )
        raise ValueError(f"the tokenizer's chat templates are {names}, and none is named 'default'; {fix}")


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    opened: bool,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, with the generation prompt if `opened`; errors are the template's."""
    check_template(tokenizer, template_args)
    options = {"tools": None if tools is None else [*tools], "add_generation_prompt": opened}
    told = [dict(message) for message in messages]
    text: str = tokenizer.apply_chat_template(told, **options, tokenize=False, **(template_args or {}))
    return text


def check_template(tokenizer: Any, args: Mapping[str, Any] | None = None) -> None:
    """ValueError for a chat template that does not end, or takes the memory, on a few words.

    Each template is rendered once in a process of its own, with limits; see `template_trial`.
    """
    texts = getattr(tokenizer, "chat_template", None)
    for source in texts.values() if isinstance(texts, Mapping) else [texts] if isinstance(texts, str) else ():
        if source not in _tried:
            _tried[source] = _trial(source, args or {})
        if fault := _tried[source]:
            name = "template_s" if "time" in fault else "template_memory_mib"
            place = f"model {getattr(tokenizer, 'name_or_path', '')!r}"
            raise untrusted.too_much(place, f"its chat template {fault}", name)


def _trial(source: str, args: Mapping[str, Any]) -> str:
    """What a template exceeds when it writes a few words; "" for nothing."""
    import subprocess  # 10 ms, for those who read rows without a template

    seconds, memory = untrusted.limit("template_s"), int(untrusted.limit("template_memory_mib") * 2**20)
    spec = json.dumps({"template": source, "args": dict(args), "seconds": seconds, "memory": memory}, default=str)
    run = [sys.executable, "-I", str(Path(__file__).with_name("template_trial.py"))]
    try:
        ended = subprocess.run(run, input=spec.encode(), capture_output=True, timeout=20 * seconds)
    except subprocess.TimeoutExpired:
        return f"does not end in {seconds:g} s of processor time"
    if ended.returncode < 0:
        return f"does not end in {seconds:g} s of processor time"
    return ended.stdout.decode(errors="replace").strip()


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text: no special token is added, and special tokens written in the text are recognised."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def encode_after_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that follows other text: no start-of-text mark is added."""
    head = encode(tokenizer, "x")
    both = encode(tokenizer, "x" + text)
    return both[len(head) :] if both[: len(head)] == head else encode(tokenizer, text)


def _is_markup(token: str) -> bool:
    """Whether an added token is no word (of a role) and no run of blanks."""
    return len(token.strip()) > 1 and not token.strip()[0].isalnum()


def _eos_of_folder(tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """`eos_token_id` of the generation config, and of the config, beside the tokenizer's files, with their names."""
    path = getattr(tokenizer, "name_or_path", "")
    for name in ("generation_config.json", "config.json") if path else ():
        try:
            file = model_file(path, name, cached=True)
            value = json.loads(file.read_bytes()).get("eos_token_id") if file else None
        except (OSError, ValueError, AttributeError):  # a damaged file is named where the model is loaded
            value = None
        if ids := [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]:
            yield name, ids
