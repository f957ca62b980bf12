"""From rows to token ids: supervised examples, preference pairs, labelled responses."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar
from unicodedata import normalize

from rlkit._util.numbers import is_number, show, to_number
from rlkit.data.chat import encode_all, encode_growing
from rlkit.data.drop import TooLong, drop, shorten
from rlkit.data.forms import Turn
from rlkit.data.images import ImageReader
from rlkit.data.load import place_of
from rlkit.data.markup import closed_unopened, encode, markup_of, opened_by, unfinished
from rlkit.data.rows import check_dicts, read_rows
from rlkit.data.template import Template
from rlkit.data.turns import LABELLED, PAIR, SFT, is_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlkit.types import Picture


_log, _progress = logging.getLogger("rlkit.data"), logging.getLogger("rlkit.data.progress")
_AT_ONCE = 256  # turns that are tokenized in one call


@dataclass(frozen=True)
class Example:
    """A token sequence and which of its tokens are trained: `mask[t]` says that `ids[t]` is a target (not shifted)."""

    ids: list[int]
    mask: list[bool]
    images: tuple[Picture, ...] = ()


def sft_examples(
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_example_tokens: int,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
    too_long: TooLong = "drop",
    continue_answer: bool = False,
) -> tuple[list[Example], int]:
    """`(examples, num_dropped)` from rows of `{prompt, response}` or `{messages}`; only assistant tokens are trained.

    `rlkit.compat.rows.read` makes such rows of those of other systems. A `completion` is a response.

    `{prompt, response}` (or `{messages, response}`): the prompt as `rl_prompts` renders it, then the turn with this
    response as the template writes it, as in `{messages}`: what it writes before the answer (Qwen3's empty `<think>`, a
    blank) trains with it. The response is verbatim, with the end of turn, where the template does not go on from its
    generation prompt, changes the text, or adds reasoning to that of the response. With `apply_chat_template=False`
    both are plain text, and `eos_token` is the end, unless the text has a stop token. A response may also
    be a list of messages, as in `preference_pairs`. With `continue_answer` the response goes on after an assistant
    message that ends the prompt, here and in the other readers.

    `{messages}`: the template writes everything. For each assistant turn i, in tokens,

        ids = render(messages[:i + 1])      trained from len(render(messages[:i], add_generation_prompt=True))

    up to and with the turn's end-of-turn token (the model must learn to stop), not the newline after it. A turn that
    extends the sequence of the turn before joins it in one example. Where the template rewrites history (Qwen3 drops
    the reasoning of past turns), the turn becomes a separate example, in the context that it really has.
    The mask of a template with `{% generation %}` blocks over the whole conversation is used unchanged, plus an end of
    turn right after a block. A past turn that it leaves out is not trained, which is logged once; where the template
    rewrites a past turn, the mask is that of the conversation up to it.
    Where generation prompt and content would share a token, the content is tokenised separately, as in generation.
    An example ends with its last trained token. A row's `tools` go to the template unless `tools` is given. A message
    with slime's `step_loss_mask`, OpenAI's `weight`, axolotl's `train` or `training`, or ms-swift's `loss` at 0 or
    false is context and not trained, and so is an assistant's message that nothing precedes.

    `{text}`: language modelling. Every token is trained, and `eos_token` after them; the chat template has no part.

    An example of more than `max_example_tokens` is dropped (with `too_long` "cut-right" it keeps its first tokens, with
    "cut-left" its last; "error" raises), and so is a row in which every assistant turn is empty (neither text nor a
    tool call); rows with some empty turns are kept. Each is counted and logged, and the number dropped is returned.
    ValueError, with the row (see `place_of`), for malformed rows, for a conversation without an assistant turn, where
    the template does not write the generation prompt before an assistant's turn (so that no mask is right), and where
    no example is left.

    Differs: TRL's `assistant_only_loss` needs `{% generation %}` and adds it to the templates of known families; verl
    renders message by message. Neither splits a conversation whose history is rewritten.
    """
    check_dicts(rows)
    template = Template(tokenizer, system_prompt, apply_chat_template, tools, template_args, images=images)
    template = replace(template, continue_answer=continue_answer)
    text = len(rows) > 0 and is_text(rows[0])
    if text:
        template = replace(template, apply=False)
    turns = list(enumerate(read_rows(rows, template, *SFT, max_example_tokens=max_example_tokens)))
    why = "have no text" if text else "have an empty response"
    left = drop(rows, turns, lambda ts: all(t.empty for t in ts), unit="rows", why=why)
    report = partial(drop, rows, unit="rows", keep=True)
    report(turns, lambda ts: 0 < sum(t.empty for t in ts) < len(ts), why="have an empty assistant turn")
    report(turns, lambda ts: ts[0].untrained, why="begin with an assistant turn, which is not trained")
    report(left, lambda ts: ts[-1].unanswered, why="go on after the last assistant turn: what follows it is left out")
    if not text:
        _name_unfinished(rows, left, template, unit="rows")
    tokens = _tokenized([of_row for _, of_row in left], template)
    _note_split(rows, left, tokens, _closing(template))
    every = [(i, example) for (i, _), of_row in zip(left, tokens, strict=True) for example in of_row]
    limits: dict[str, Any] = {"too_long": too_long, "max_example_tokens": max_example_tokens}
    fitted = shorten(rows, every, lambda e: len(e.ids), _cut_example, unit="examples", **limits)
    return [example for _, example in fitted], len(turns) - len(left) + len(every) - len(fitted)


def _note_split(
    rows: Sequence[Any], turns: Sequence[tuple[int, Sequence[Turn]]], tokens: Sequence[list[Any]], closing: str
) -> None:
    """Log how many conversations become several examples, and why."""
    splits: dict[str, list[tuple[int, int]]] = {
        "the chat template rewrites past turns": [],
        "the chat template ends a past turn otherwise than the last": [],
        "the chat template writes no end of turn": [],
        "the tokenizer merges the opening of a turn with its text": [],
    }
    for (i, of_row), examples in zip(turns, tokens, strict=True):
        extends = all(b.whole.startswith(a.whole) for a, b in pairwise(of_row))
        same = extends or all(b.whole.startswith(a.whole.removesuffix(closing)) for a, b in pairwise(of_row))
        ended = of_row[0].end is not None
        of_why = [not same, same and not extends, extends and ended, extends and not ended]
        for split, is_why in zip(splits.values(), of_why, strict=True):
            split.append((i, len(examples) if is_why else 1))
    for why, split in splits.items():
        num = sum(n for _, n in split if n > 1)
        why = f"become {num} examples, since {why}"
        drop(rows, split, lambda n: n > 1, unit="conversations", why=why, keep=True)


def _closing(template: Template) -> str:
    """What the chat template writes after an answer; "" without one."""
    return markup_of(template.tokenizer).closing if template.apply else ""


def _name_unfinished(
    rows: Sequence[Any], turns: Sequence[tuple[int, Sequence[Turn]]], template: Template, *, unit: str
) -> None:
    """Log how many rows train an answer that never closes its reasoning, or that is nothing else."""
    markup = markup_of(template.tokenizer)

    def kind(turn: Turn) -> str:
        opened, answer = opened_by(turn.prompt), turn.whole[len(turn.prompt) :]
        if turn.empty or not turn.whole.startswith(turn.prompt):
            return ""
        answer = answer.removesuffix(markup.closing) if template.apply and not turn.literal else answer
        state = unfinished(opened + markup.without_stop(answer))
        state = state or ("closed" if closed_unopened(turn.prompt, answer) else "")
        return "" if opened and state == "open" else state  # named as what the template opens

    per_row = [(i, {*map(kind, of_row)}) for i, of_row in turns]
    for name, why in (
        ("open", "never close the reasoning that begins an answer (cut off?): the end of turn trains inside it"),
        ("alone", "have reasoning without an answer after it: the end of turn trains there"),
        ("closed", "close reasoning that nothing opens (servers drop a tag that the template opens): write it before"),
    ):  # fmt: skip
        drop(rows, [(i, name in kinds) for i, kinds in per_row], bool, unit=unit, why=why, keep=True)


@dataclass(frozen=True)
class Pair:
    """The tokens of a prompt and of its two responses, end of turn included.

    `ref_logp`: the reference model's log-probs of both responses, if precomputed. `margin`: by how much the chosen one
    is better, for losses that read it; None: not known.
    """

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    ref_logp: tuple[Sequence[float], Sequence[float]] | None = None
    images: tuple[Picture, ...] = ()
    margin: float | None = None


def preference_pairs(
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_example_tokens: int,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
    too_long: TooLong = "drop",
    continue_answer: bool = False,
    margin_column: str | None = None,
) -> tuple[list[Pair], int]:
    """`(pairs, num_dropped)` from rows of `{prompt or messages, chosen, rejected}`; responses are strings or messages.

        {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
        {"messages": [...], "chosen": [{"role": "assistant", ...}], "rejected": [{"role": "assistant", ...}]}
        {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}     whole conversations
        {"chosen": "The sky is blue.", "rejected": "The sky is green."}     apply_chat_template=False: whole texts

    The prompt is rendered as by `rl_prompts`, then come the responses with their ends, as in `sft_examples`. In a list
    of messages the last one is the response; the earlier ones belong to the prompt, which must be the same on both
    sides. A whole conversation (it begins with a system or user message) replaces the prompt. The prompt of two whole
    texts is their common beginning, up to white space.

    A pair is dropped as a whole where prompt and one response exceed `max_example_tokens` (`too_long` "cut-right" cuts
    the ends of the responses, "cut-left" the start of the prompt, "error" raises), where the chosen
    response is empty (which would teach the model to say nothing), and where the two responses are the same tokens,
    which no loss can distinguish. Pairs with an empty rejected response are kept. Each is counted and logged, and the
    number dropped is returned. Raises ValueError, with the row (see `place_of`), for a row without the columns, two
    conversations that differ before their last message, a response that is not text or has separate tool calls or
    reasoning, and where no pair is left; with a `margin_column`, whose numbers are the pairs' `margin`, also for a row
    without a number there.

    Differs: TRL cuts long pairs (`max_length`), and renders prompt and responses through the template and takes their
    common prefix for the prompt.
    """
    template = Template(tokenizer, system_prompt, apply_chat_template, tools, template_args, images=images)
    template = replace(template, continue_answer=continue_answer)
    return _pairs(rows, template, max_example_tokens, too_long, margin_column)


def _margin(rows: Sequence[dict[str, Any]], index: int, column: str | None) -> float | None:
    value = None if column is None else rows[index].get(column)
    if column is not None and not is_number(value):
        what = f"column {column!r} of --margin-column must hold a number, got {show(value)}"
        raise ValueError(f"{place_of(rows, index)}: {what}")
    return None if value is None else to_number(value)


def _pairs(
    rows: Sequence[dict[str, Any]], template: Template, max_example_tokens: int, too_long: TooLong,
    margin_column: str | None = None,
) -> tuple[list[Pair], int]:  # fmt: skip
    also = () if margin_column is None else (margin_column,)
    turns = read_rows(rows, template, PAIR, also=also, max_example_tokens=max_example_tokens)
    margins = [_margin(rows, i, margin_column) for i in range(len(rows))]
    tokens = _tokenized([[turn] for of_row in turns for turn in of_row], template)
    _name_unfinished(rows, [*enumerate(turns)], template, unit="pairs")
    pairs = [
        (i, (Pair(*_split(a), _split(b)[1], images=chosen.images, margin=margins[i]), chosen.empty, rejected.empty))
        for i, ((chosen, rejected), (a,), (b,)) in enumerate(zip(turns, tokens[::2], tokens[1::2], strict=True))
    ]
    pairs = drop(rows, pairs, lambda p: p[1], unit="pairs", why="have an empty chosen response")
    why = "have the same chosen and rejected response"
    pairs = drop(rows, pairs, lambda p: p[0].chosen == p[0].rejected, unit="pairs", why=why)
    _name_alike(rows, [(i, turns[i]) for i, _ in pairs], _closing(template))
    some = len(pairs) == 1 or not all(p[2] for _, p in pairs)  # one streamed row is one of many
    drop(rows, pairs, lambda p: p[2], unit="pairs", why="have an empty rejected response", keep=some)
    limits: dict[str, Any] = {"too_long": too_long, "max_example_tokens": max_example_tokens}
    left = shorten(rows, [(i, p[0]) for i, p in pairs], _length, _cut_response, unit="pairs", **limits)
    return [pair for _, pair in left], len(rows) - len(left)


def _name_alike(rows: Sequence[Any], turns: Sequence[tuple[int, Sequence[Turn]]], closing: str) -> None:
    """Log how many pairs stand in the data with the other choice too, and how many hardly differ."""

    def key(first: Turn, second: Turn) -> int:
        return hash((first.prompt, first.whole, second.whole))

    def plain(turn: Turn) -> str:
        text = turn.whole.removeprefix(turn.prompt).removesuffix(closing).strip()
        return text if text.isascii() else normalize("NFC", text)

    there = {key(*of_row) for _, of_row in turns}
    why = "are in the data with chosen and rejected swapped too"
    of_text = [(i, of_row) for i, of_row in turns if not of_row[0].images]
    drop(rows, of_text, lambda ts: key(*reversed(ts)) in there, unit="pairs", why=why, keep=True)
    why = "have responses that differ only in blanks around them, or in how Unicode writes the same characters"
    drop(rows, turns, lambda ts: plain(ts[0]) == plain(ts[1]), unit="pairs", why=why, keep=True)


@dataclass(frozen=True)
class Labelled:
    """The tokens of a prompt and of a response to it, end of turn included, and the label of the response."""

    prompt: list[int]
    response: list[int]
    desirable: bool
    images: tuple[Picture, ...] = ()


def labelled_examples(
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_example_tokens: int,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    tools: Sequence[Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
    too_long: TooLong = "drop",
    continue_answer: bool = False,
) -> tuple[list[Labelled], int]:
    """`(examples, num_dropped)` from rows of `{prompt or messages, response or completion, label}`, or from pairs.

        {"prompt": "2+2?", "completion": "4", "label": true}
        {"messages": [...], "response": [{"role": "assistant", ...}], "label": false}
        {"messages": [..., {"role": "assistant", ...}], "label": false}         a whole conversation
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"}                      two examples, the first desirable

    A label is true or false, 1 or 0, also as text. Prompt and response are rendered as by `preference_pairs`, which
    also reads rows that are pairs. Of several assistant messages the last is trained, and the row is logged. An example
    of more than `max_example_tokens` is dropped (of a pair, both; `too_long`: see `preference_pairs`), and so is a
    desirable response that is empty; undesirable ones are kept. Each is counted (in rows) and logged, and the number
    dropped is returned.

    Raises ValueError, with the row (see `place_of`), for a row without the columns, a label that is not a boolean, a
    response that is not text, data in which only some rows are pairs, and where no example is left.

    Differs: TRL cuts long examples, and takes the columns `prompt`, `completion` and `label` only.
    """
    check_dicts(rows)
    template = Template(tokenizer, system_prompt, apply_chat_template, tools, template_args, images=images)
    template = replace(template, continue_answer=continue_answer)
    if rows and rows[0].get("chosen") is not None:
        pairs, num_dropped = _pairs(rows, template, max_example_tokens, too_long)
        two = [Labelled(p.prompt, x, x is p.chosen, p.images) for p in pairs for x in (p.chosen, p.rejected)]
        return two, num_dropped
    read = read_rows(rows, template, LABELLED, max_example_tokens=max_example_tokens)
    turns, why = [(i, turn) for i, (turn,) in enumerate(read)], "have an empty response"
    if all(turn.empty for _, turn in turns):
        drop(rows, turns, lambda t: t.empty, unit="examples", why=why)
    left = drop(rows, turns, lambda t: t.empty and t.label, unit="examples", why=f"{why} and are desirable")
    drop(rows, turns, lambda t: t.empty and not t.label, unit="examples", why=f"{why} and are undesirable", keep=True)
    why = "hold several assistant messages, of which only the last is trained"
    drop(rows, left, lambda t: t.untrained, unit="examples", why=why, keep=True)
    _name_unfinished(rows, [(i, [turn]) for i, turn in left], template, unit="examples")
    tokens = _tokenized([[turn] for _, turn in left], template)
    made = zip(left, tokens, strict=True)
    examples = [(i, Labelled(*_split(e), bool(turn.label), turn.images)) for (i, turn), (e,) in made]
    _name_both_labels(rows, examples)
    limits: dict[str, Any] = {"too_long": too_long, "max_example_tokens": max_example_tokens}
    examples = shorten(rows, examples, _length, _cut_response, unit="examples", **limits)
    return [example for _, example in examples], len(rows) - len(examples)


def name_one_label(source: str, labels: Sequence[bool]) -> None:
    """Log that all of the responses of the files `source` have the same label."""
    if len({*labels}) == 1:
        _log.warning(
            "%s: all %d responses are %s: KTO learns from the contrast, so add some of the other label",
            source, len(labels), "desirable" if labels[0] else "undesirable",
        )  # fmt: skip


def _name_both_labels(rows: Sequence[Any], examples: Sequence[tuple[int, Labelled]]) -> None:
    """Log how many examples have a response that is labelled true and false after the same prompt."""

    def key(example: Labelled) -> int:
        return hash((*example.prompt, -1, *example.response))

    good, bad = ({key(e) for _, e in examples if e.desirable is is_good} for is_good in (True, False))
    both = good & bad
    why = "have a response that is labelled true and false"
    drop(rows, examples, lambda e: not e.images and key(e) in both, unit="examples", why=why, keep=True)


P = TypeVar("P", Pair, Labelled)


def _length(item: Pair | Labelled) -> int:
    responses = (item.chosen, item.rejected) if isinstance(item, Pair) else (item.response,)
    return len(item.prompt) + max(map(len, responses))


def _cut_example(example: Example, limit: int, left: bool) -> Example | None:
    """The first or last tokens; an example trains on a token after its first."""
    if example.images:
        return None
    part = slice(-limit, None) if left else slice(limit)
    ids, mask = example.ids[part], example.mask[part]
    if not any(mask[1:]):
        return None
    end = max(t for t, on in enumerate(mask) if on) + 1
    return Example(ids[:end], mask[:end])


def _cut_response(item: P, limit: int, left: bool) -> P | None:
    """On the left the prompt is cut, on the right the responses."""
    names = ("chosen", "rejected") if isinstance(item, Pair) else ("response",)
    longest = max(len(getattr(item, name)) for name in names)
    room = limit - (longest if left else len(item.prompt))
    if room < 1 or (left and item.images):
        return None
    if left:
        return replace(item, prompt=item.prompt[-room:])
    shorter = replace(item, **{name: getattr(item, name)[:room] for name in names})
    return None if isinstance(shorter, Pair) and shorter.chosen == shorter.rejected else shorter


def _split(example: Example) -> tuple[list[int], list[int]]:
    """The tokens before the first trained one, and the rest."""
    num = example.mask.index(True)
    return example.ids[:num], example.ids[num:]


def _tokenized(turns: Sequence[Sequence[Turn]], template: Template) -> list[list[Example]]:
    """The examples of each row's turns."""
    tokenizer, plain = template.tokenizer, not template.apply
    markup = markup_of(tokenizer)
    end = next(iter(markup.eos), None) if plain else markup.end
    if plain:
        markup.report_no_eos()
    examples, done, num = list[list[Example]](), 0, sum(map(len, turns))
    for rows in _few_at_once(turns):
        flat = [turn for of_row in rows for turn in of_row]
        if plain:
            flat = [turn._replace(whole=markup.stopped(turn.whole)) for turn in flat]
            both = [text for turn in flat for text in (turn.prompt, turn.whole)]
            ids = encode_all(tokenizer, both, ready_made=True, silent=True)
        else:
            texts = [[text for turn in of_row for text in (turn.prompt, turn.whole)] for of_row in rows]
            ids = [*chain.from_iterable(encode_growing(tokenizer, texts))]
        masked = (_masked(tokenizer, *of_turn, end=end) for of_turn in zip(flat, ids[::2], ids[1::2], strict=True))
        examples += [_joined([*islice(masked, len(of_row))]) for of_row in rows]
        done += len(flat)
        _progress.info("tokenizing: %d of %d texts", done, num)
    return examples


def _few_at_once(turns: Sequence[Sequence[Turn]]) -> Iterator[list[Sequence[Turn]]]:
    """The rows, as many as have `_AT_ONCE` turns together: the tokens of a long conversation's turns, each with all
    before it, take far more memory than its example."""
    rows, num = list[Sequence[Turn]](), 0
    for of_row in turns:
        rows.append(of_row)
        num += len(of_row)
        if num >= _AT_ONCE:
            yield rows
            rows, num = [], 0
    if rows:
        yield rows


def _masked(
    tokenizer: PreTrainedTokenizerBase, turn: Turn, prompt: list[int], whole: list[int], *, end: int | None
) -> Example:
    """The turn with its own tokens trained and nothing else. `end`: the end-of-turn token."""
    ended = turn.end if turn.end is not None else end if turn.literal else None
    if turn.literal and len(whole) > len(prompt) and whole[-1] in markup_of(tokenizer).ends:
        ended = whole[-1]  # the text brings its own
    if turn.blocks is not None:
        start = _num_shared(prompt, whole)
        mask = [bool(on) and t >= start for t, (_, on) in enumerate(turn.blocks)]
        if ended is not None:
            whole = whole[: _num_to_last(mask) or len(whole)]
            mask = mask[: len(whole)]
    else:
        whole = _continued(tokenizer, turn, prompt, whole)
        mask = [False] * len(prompt) + [True] * (len(whole) - len(prompt))
    if ended is not None and whole[-1:] != [ended]:
        whole, mask = [*whole, ended], [*mask, True]
    ends = markup_of(tokenizer).end_ids if ended is None else ()
    mask = _to_end_of_turn(whole, mask, ends or (end if ended is None else ended,))
    if not any(mask):
        raise ValueError(f"{turn.place}: no token of an assistant turn is trained: ...{turn.whole[-80:]!r}")
    return Example(whole, mask, turn.images)


def _continued(tokenizer: PreTrainedTokenizerBase, turn: Turn, prompt: list[int], whole: list[int]) -> list[int]:
    """`whole` such that it begins with the tokens of `prompt`, as its text does."""
    return whole if whole[: len(prompt)] == prompt else prompt + encode(tokenizer, turn.whole[len(turn.prompt) :])


def _num_shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _to_end_of_turn(ids: list[int], mask: list[bool], ends: Sequence[int | None]) -> list[bool]:
    """Add the tokens that end a turn right after the mask, or the rest of them; drop what follows the last in it."""
    last = _num_to_last(mask) or len(ids) + 1
    for more in range(len(ends), 0, -1):
        if ids[last : last + more] == [*ends[-more:]]:
            mask = [*mask[:last], *[True] * more, *mask[last + more :]]
            break
    backwards = range(min(len(ids), len(mask)) - 1, -1, -1)
    stop = next((t + 1 for t in backwards if mask[t] and ids[t] == ends[-1]), len(ids))
    return mask[:stop] + [False] * (len(mask) - stop)


def _num_to_last(mask: list[bool]) -> int:
    """How many tokens there are up to the last trained one; 0 where none is."""
    return len(mask) - mask[::-1].index(True) if True in mask else 0


def _joined(turns: Sequence[Example]) -> list[Example]:
    """The turns of one row: one that extends the tokens of the turn before joins it. Each ends with a trained token."""
    joined: list[Example] = []
    for turn in map(_to_last_trained, turns):
        if joined and turn.ids[: len(joined[-1].ids)] == joined[-1].ids:
            before = joined.pop().mask
            turn = replace(turn, mask=[*map(or_, before, turn.mask), *turn.mask[len(before) :]])
        joined.append(turn)
    return joined


def _to_last_trained(example: Example) -> Example:
    """The example without what follows its last trained token: what only the last turn of a conversation has."""
    end = _num_to_last(example.mask)
    return replace(example, ids=example.ids[:end], mask=example.mask[:end])
