"""What a data file is: its form, what of a row is trained, how long its rows are, and which rows are wrong.

    rlkit data train.jsonl                    forms, and rows that are wrong
    rlkit data train.jsonl --model MODEL      also a rendered row, and lengths
    rlkit data pairs.jsonl --model MODEL --script dpo --row 3
    rlkit data train.jsonl --reward my.py:f   the reward of the gold answer

Trained tokens are green on a terminal, else between « and ».
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from rlkit._util.files import check_model_path
from rlkit._util.text import printable
from rlkit.data.load import some_rows
from rlkit.run.console import data_progress, is_live, say
from rlkit.scripts.args import Data, Episodes
from rlkit.scripts.cli import run
from rlkit.scripts.flags import ChatTemplate
from rlkit.scripts.trial import reward_functions, reward_trials, trial_lines
from rlkit.settings import Count, check, refuse_if

_MOST_WRONG = 20  # rows that are named
_SEEN = 20  # first rows that tell which command a file is for, where each command refuses a row
_BARS, _WIDTH = 10, 40  # lines of the histogram, and characters of its longest bar
_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"

Item = tuple[list[int], list[bool]]  # the ids of an example, and which are trained


@dataclass(frozen=True)
class Args:
    """Flags."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """files, globs, folders or hub ids, as for --data (without weights)"""
    model: str | None = None
    """model whose tokenizer and chat template render the rows; None: rows are not rendered"""
    script: Literal["grpo", "sft", "dpo", "kto", "reward_model"] | None = None
    """command that is to read the rows; None: the first of dpo, kto, sft and grpo that reads most rows; in place
    of grpo sft where a conversation ends with an answer, or dpo or kto where it reads half of them"""
    row: Count = 1
    """row to show, counted from 1"""
    max_tokens: Count | None = None
    """report how many examples are longer; None: no limit"""
    reward: str | tuple[str, ...] | None = None
    """FILE.py:FUNCTION of reward functions, as for grpo: prints what each gives the first gold answer, an empty
    completion and another row's answer"""
    reward_column: str = "data_source"
    """column with the name of a row's source, for --reward NAME=FILE.py:FUNCTION"""
    rename: dict[str, str] = field(default_factory=dict, hash=False)
    """rename columns of the data, old name and new name"""
    prompt: str | None = None
    """the prompt of each row as a format string over its columns, as for grpo"""
    system_prompt: str | None = None
    """system message for conversations that have none"""
    chat_template: ChatTemplate = True
    """file of a chat template; True: the model's own; False: none, strings are plain text (base models)"""
    template_args: str = "{}"
    """JSON object of further arguments of the chat template"""
    continue_answer: bool = False
    """prompts that end with an assistant message begin the answer, whatever it is"""

    def __post_init__(self) -> None:
        check(self, may_be_empty=("files", "system_prompt"))
        refuse_if(not self.files, "no file is given")


def main(args: Args) -> None:
    """Print it; ends with exit code 1 where rows are wrong."""
    logger, said = logging.getLogger("rlkit.data"), set[str]()

    def once(record: logging.LogRecord) -> bool:  # rows are read several times
        new = record.getMessage() not in said
        said.add(record.getMessage())
        return new

    logger.addFilter(once)
    try:
        _main(args)
    finally:
        logger.removeFilter(once)


def _main(args: Args) -> None:
    from rlkit.data.load import load_rows, name_splits

    rendering = {name: getattr(args, name) for name in ("system_prompt", "chat_template", "template_args")}
    data = Data(args.files, rename=args.rename, prompt=args.prompt, **rendering)
    if args.model:
        check_model_path(args.model)
    with data_progress():
        rows = load_rows(args.files, rename=args.rename)
    refuse_if(args.row > len(rows), f"`row` {args.row}: there are {len(rows)} rows")
    say(f"{', '.join(rows.sources[:3])}{' ...' * (len(rows.sources) > 3)}: {len(rows):,} rows")
    say(f"columns: {', '.join(columns_of(rows))}")
    name_splits(rows)
    tokenizer = tokenizer_of(args) if args.model else None
    reading = {name: reading_of(args, data, rows, tokenizer, name) for name in ("grpo", "sft", "dpo")}
    pairs = reading["dpo"].lengths is not None  # which kto reads alike
    reading["kto"] = reading["dpo"] if pairs else reading_of(args, data, rows, tokenizer, "kto")
    for name, title in (("grpo", "grpo, ppo"), ("sft", "sft"), ("dpo", "dpo, reward_model"), ("kto", "kto")):
        say(f"  rlkit {title:18} {verdict_of(reading, name)}")
    reading["reward_model"] = reading["dpo"]
    command: str = args.script or max(("dpo", "kto", "sft", "grpo"), key=lambda name: reading[name].fits)
    if not args.script and (command == "grpo" or not reading[command].fits) and any(map(_is_answered, rows[:_SEEN])):
        command = "sft"  # whose reasons are those to be shown
    elif not reading[command].fits:
        raise SystemExit(1)
    elif not args.script and command == "grpo":  # which takes the prompts of pairs and labels, however wrong
        command = next((name for name in ("dpo", "kto") if reading[name].fits >= 0.5), command)
    chosen = reading[command]
    for record in chosen.said:
        logging.getLogger("rlkit.data").handle(record)
    good, faults = ([*range(len(rows))], {}) if chosen.lengths is not None else checked(rows, chosen.read)
    failed = bool(args.reward and good) and show_rewards(args, data, some_rows(rows, good))
    if args.model and good:
        show_rendered(args, command, chosen, rows, good, tokenizer)
    if faults:
        say(f"wrong: {len(faults)} of {len(rows):,} rows")
        for error in [*faults.values()][:_MOST_WRONG]:
            say(f"  {error}")
        if len(faults) > _MOST_WRONG:
            say(f"  ... and {len(faults) - _MOST_WRONG} more")
    if faults or failed:
        raise SystemExit(1)


def show_rewards(args: Args, data: Data, rows: Any) -> bool:
    """Print what each reward function gives; returns whether one failed."""
    episodes, failed = Episodes(reward=args.reward, reward_column=args.reward_column), False
    read = data.read(rows, *forms_for("grpo"))
    functions = reward_functions(episodes, read, flag="reward")
    for spec, _, trial in reward_trials(functions, episodes, read):
        say(f"{spec} gives, on {trial.place}:")
        for line in [*trial_lines(trial), *[f"  {trial.note}"] * bool(trial.note)]:
            say(line)
        failed = failed or bool(trial.failures)
    return failed


def show_rendered(args: Args, command: str, view: Reading, rows: Any, good: Sequence[int], tokenizer: Any) -> None:
    """Print the row that is asked for, or the first one of which something is trained, and the lengths."""
    for index in [*[i for i in good if i == args.row - 1], *good]:
        with suppress(ValueError):  # it is dropped, or no row alone
            with muted():  # what is said of this row is said of the file
                # alone it does not show whether all begin alike
                items, _ = view.read(some_rows(rows, [index]), sure=True)
            say(f"{rows.places[index]}, as rlkit {command} reads it:")
            sys.stdout.write("".join(f"{shown(tokenizer, *item)}\n" for item in items))
            break
    lengths = view.lengths or [len(ids) for ids, _ in view.read(some_rows(rows, good), sure=True)[0]]
    for line in histogram(lengths, limit=args.max_tokens):
        say(line)


def columns_of(rows: Sequence[Any]) -> list[str]:
    """The columns with the types of their values, and in how many rows a column is where it is not in all."""
    kinds: dict[str, Counter[str]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, Counter())[type(value).__name__] += 1
    columns = []
    for name, counts in kinds.items():
        num = sum(counts.values())
        some = f", in {num:,} rows" if num < len(rows) else ""
        columns.append(f"{name} ({' or '.join(sorted(counts))}{some})")
    return columns


def forms_for(command: str) -> tuple[Any, ...]:
    """The forms that a command reads."""
    from rlkit.data.turns import LABELLED, PAIR, PROMPT, SFT

    return {"grpo": (PROMPT,), "sft": SFT, "kto": (PAIR, LABELLED)}.get(command, (PAIR,))


class Reading(NamedTuple):
    """The file as a command reads it: every row, as the command does before it trains.

    verdict: the form, and what becomes of rows that are not trained; or "no" and why.
    fits: the share of rows that are read; where the command refuses the file, of the first ones.
    lengths: of the examples; None where the command refuses the file.
    said: the warnings.
    read: the examples of some rows (see `renderer`), and how many rows are dropped.
    fix: what the command says to do where the file lacks its columns.
    """

    verdict: str
    fits: float
    lengths: list[int] | None
    said: list[logging.LogRecord]
    read: Callable[..., tuple[list[Item], int]]
    fix: str = ""


def verdict_of(reading: dict[str, Reading], command: str) -> str:
    """The verdict of a command, with what to do where none reads the file."""
    return reading[command].verdict + reading[command].fix * (not any(view.fits for view in reading.values()))


def reading_of(args: Args, data: Data, rows: Any, tokenizer: Any, command: str) -> Reading:
    """How `command` reads the rows; nothing is logged."""
    from rlkit.data.columns import truth
    from rlkit.data.drop import NothingLeft, check_begun
    from rlkit.data.examples import name_one_label
    from rlkit.data.forms import Turn
    from rlkit.data.markup import markup_of
    from rlkit.data.messages import mappings
    from rlkit.data.turns import LABELLED, begins_answer

    said = list[logging.LogRecord]()
    logger, render = logging.getLogger("rlkit.data"), None

    def keep(record: logging.LogRecord) -> bool:
        said.append(record)
        return False

    def read(some: Any, *, sure: bool = args.continue_answer) -> tuple[list[Item], int]:
        made, converted = with_forms(data, some, command)
        if command == "kto" and some is rows:
            labels = [bool(truth(row["label"])) for form, row in converted if form is LABELLED]
            name_one_label(" ".join(args.files), labels)
        if render:
            return render(made, continue_answer=sure)
        turns = [mappings(row.get("messages") or row.get("prompt")) for _, row in converted if command == "grpo"]
        begun = [str(messages[-1].get("content")) if begins_answer(messages) else "" for messages in turns]
        check_begun(made, [Turn("", "", begun=text) for text in begun], continue_answer=sure)
        return [], 0

    before, logger.filters = logger.filters, [keep]
    try:
        if tokenizer is not None:
            markup_of(tokenizer).told.intersection_update([] if isinstance(args.chat_template, bool) else ["template"])
            render = renderer(args, data, command, rows, tokenizer)
        items, dropped = read(rows)
        notes = [record.getMessage().removeprefix(f"{rows.source}: ") for record in said if dropped]
        verdict = "; ".join([form_of(data, rows, command), *(note for note in notes if note.startswith("dropped "))])
        return Reading(verdict, 1.0, [len(ids) for ids, _ in items], said, read)
    except ValueError as error:
        few = some_rows(rows, range(min(len(rows), _SEEN)))
        good = [] if isinstance(error, NothingLeft) else checked(few, read)[0]
        why, _, rest = " ".join(str(error).split()).partition("; columns found: ")
        form = f"{form_of(data, few, command, *good)}, but not all rows" if good else "no"
        return Reading(f"{form}: {why}", len(good) / len(few), None, said, read, "".join(rest.partition("; ")[1:]))
    finally:
        logger.filters = before


def with_forms(data: Data, rows: Any, command: str) -> tuple[Any, list[tuple[Any, Any]]]:
    """The rows as a command reads them, and with their forms; ValueError for one in another form."""
    from rlkit.data.rows import check_columns

    read = data.read(rows, *forms_for(command))
    return read, check_columns(read, *forms_for(command), apply_chat_template=bool(data.chat_template))


def form_of(data: Data, rows: Any, command: str, *indices: int) -> str:
    """The name of the form of the first of these rows (of all) that is one alone, and that of the other system."""
    from rlkit.compat.rows import foreign_form

    for index in indices or range(len(rows)):
        with muted(), suppress(ValueError):  # of a null column that other rows have
            ((form, _),) = with_forms(data, some_rows(rows, [index]), command)[1]
            foreign = foreign_form(rows[index], rows.places[index])
            return f"{form.name}{f', from a {foreign.form.name}' if foreign else ''}"
    return "rows"


def _is_answered(row: Any) -> bool:
    """Whether the row is a conversation that ends with the assistant's message."""
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role", last.get("from")) in ("assistant", "gpt")


def checked(rows: Any, read: Callable[[Any], Any]) -> tuple[list[int], dict[str, str]]:
    """The indices of the rows that `read` takes, and the errors of the others by their places.

    Where it does not take all, each is read by itself, after the first row, which decides the form. A row that is
    dropped is one that it takes.
    """
    from rlkit.data.drop import NothingLeft

    good, faults = list[int](), dict[str, str]()
    with muted():
        with suppress(ValueError):
            read(rows)
            return [*range(len(rows))], {}
        for index in range(len(rows)):
            try:
                with suppress(NothingLeft):
                    read(some_rows(rows, [0, index] if index and 0 in good else [index]))
                good.append(index)
            except ValueError as error:
                faults[rows.places[index]] = " ".join(str(error).split())
    return good, faults


@contextmanager
def muted() -> Iterator[None]:
    """Without the warnings of single rows."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def tokenizer_of(args: Args) -> Any:
    """The tokenizer of the model, with the chat template."""
    from rlkit.scripts.start import load_tokenizer

    file = None if isinstance(args.chat_template, bool) else Path(args.chat_template)
    return load_tokenizer(args.model or "", chat_template=file)


def renderer(args: Args, data: Data, command: str, rows: Any, tokenizer: Any) -> Callable[..., tuple[list[Item], int]]:
    """A function from rows to the ids and the mask of their examples, and how many rows are dropped."""
    from rlkit.data import examples
    from rlkit.data.prompts import rl_prompts
    from rlkit.data.vocabulary import check_vocabulary
    from rlkit.model.pretrained import load_config
    from rlkit.scripts.start import image_reader

    size = load_config(args.model or "").get_text_config().vocab_size
    vocabulary: dict[str, Any] = {"tokenizer": tokenizer, "num_rows": size}
    options: dict[str, Any] = {"system_prompt": data.system_prompt, "apply_chat_template": bool(data.chat_template)}
    options |= {"tokenizer": tokenizer, "template_args": data.template() or None}
    options["images"] = image_reader(args.model or "", tokenizer, rows)

    def render(rows: Any, *, continue_answer: bool) -> tuple[list[Item], int]:
        options["continue_answer"] = continue_answer
        if command == "grpo":
            prompts, dropped = rl_prompts(rows, max_prompt_tokens=sys.maxsize, **options)
            check_vocabulary(prompts, rows=rows, **vocabulary)
            return [(p.ids, [False] * len(p.ids)) for p in prompts], dropped
        make: Any = {"sft": examples.sft_examples, "kto": examples.labelled_examples}.get(
            command, examples.preference_pairs
        )
        made, dropped = make(rows, max_example_tokens=sys.maxsize, **options)
        check_vocabulary(made, rows=rows, **vocabulary)
        if command == "sft":
            return [(example.ids, example.mask) for example in made], dropped
        if command == "kto":
            answers = [(x.prompt, x.response) for x in made]
        else:
            answers = [(x.prompt, ids) for x in made for ids in (x.chosen, x.rejected)]
        return [(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for prompt, ids in answers], dropped

    return render


def shown(tokenizer: Any, ids: list[int], mask: list[bool]) -> str:
    """The text, with the trained tokens marked."""
    colour = is_live(sys.stdout) and "NO_COLOR" not in os.environ
    before, after, other = (_GREEN, _PLAIN, _DIM) if colour else ("«", "»", "")
    text, start = "", 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            part = printable(tokenizer.decode(ids[start:end], skip_special_tokens=False))
            text += f"{before}{part}{after}" if mask[start] else f"{other}{part}{_PLAIN if other else ''}"
            start = end
    return text


def histogram(lengths: Sequence[int], *, limit: int | None) -> list[str]:
    """Lines with the numbers of lengths in equal ranges, and the longest."""
    if not lengths:
        return []
    ordered = sorted(lengths)
    middle, most = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
    lines = [f"tokens of {len(lengths):,} examples: median {middle}, 95% at most {most}, longest {ordered[-1]}"]
    if limit:
        lines.append(f"longer than {limit}: {sum(x > limit for x in lengths):,}")
    width = -(-(ordered[-1] + 1 - ordered[0]) // _BARS)
    counts = Counter((x - ordered[0]) // width for x in lengths)
    for bar in range(max(counts) + 1):
        low = ordered[0] + bar * width
        num = counts[bar]
        lines.append(
            f"  {low:>6} - {low + width - 1:<6} {num:>8,} {'#' * math.ceil(_WIDTH * num / max(counts.values()))}"
        )
    return lines


if __name__ == "__main__":
    run(main, Args, __doc__)
