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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rlkit._text import printable
from rlkit.files import check_model_path
from rlkit.run.console import data_progress, say
from rlkit.scripts.args import Data, Episodes
from rlkit.scripts.cli import run
from rlkit.scripts.flags import ChatTemplate
from rlkit.scripts.task import reward_functions
from rlkit.scripts.trial import reward_trials, trial_lines
from rlkit.settings import Count, check, refuse_if

_MOST_WRONG = 20  # rows that are named
_BARS, _WIDTH = 10, 40  # lines of the histogram, and characters of its longest bar
_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Args:
    """Flags."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """files, globs, folders or hub ids, as for --data"""
    model: str | None = None
    """model whose tokenizer and chat template render the rows; None: rows are not rendered"""
    script: Literal["grpo", "sft", "dpo", "kto", "reward_model"] | None = None
    """command that is to read the rows; None: the first of dpo, kto, sft and grpo that reads the first row"""
    row: Count = 1
    """row to show, counted from 1"""
    max_tokens: Count | None = None
    """report how many examples are longer; None: no limit"""
    reward: str | tuple[str, ...] | None = None
    """FILE.py:FUNCTION of reward functions, as for grpo: prints what each gives the first row's gold answer, an empty
    completion and another row's answer"""
    rename: dict[str, str] = field(default_factory=dict, hash=False)
    """rename columns of the data, old name and new name"""
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
    from rlkit.data.load import load_rows

    rendering = {name: getattr(args, name) for name in ("system_prompt", "chat_template", "template_args")}
    data = Data(args.files, rename=args.rename, **rendering)
    if args.model:
        check_model_path(args.model)
    with data_progress():
        rows = load_rows(args.files, rename=args.rename)
    refuse_if(args.row > len(rows), f"`row` {args.row}: there are {len(rows)} rows")
    say(f"{', '.join(rows.sources[:3])}{' ...' * (len(rows.sources) > 3)}: {len(rows):,} rows")
    say(f"columns: {', '.join(columns_of(rows))}")
    tokenizer = tokenizer_of(args) if args.model else None
    reading = forms_of(args, data, rows, tokenizer)
    command = args.script or next((name for name in ("dpo", "kto", "sft", "grpo") if reading.get(name)), None)
    if not args.script and command in (None, "grpo") and _is_answered(rows[0]):
        command = "sft"  # whose reasons are those to be shown
    if command is None or (args.script and command not in reading):
        raise SystemExit(1)
    good, wrong = checked(rows, lambda some: read_as(data, some, command))
    failed = bool(args.reward and good) and show_rewards(args, data, _some(rows, good))
    if args.model and good:
        wrong |= show_rendered(args, data, command, _some(rows, good), tokenizer, place=rows.places[args.row - 1])
    if wrong:
        say(f"wrong: {len(wrong)} of {len(rows):,} rows")
        for error in [*wrong.values()][:_MOST_WRONG]:
            say(f"  {error}")
        if len(wrong) > _MOST_WRONG:
            say(f"  ... and {len(wrong) - _MOST_WRONG} more")
    if wrong or failed:
        raise SystemExit(1)


def show_rewards(args: Args, data: Data, rows: Any) -> bool:
    """Print what each reward function gives; returns whether one failed."""
    episodes, failed = Episodes(reward=args.reward), False
    read = data.read(rows, *forms_for("grpo"))
    functions = reward_functions(episodes, read, flag="reward")
    for spec, _, trial in reward_trials(functions, episodes, read):
        say(f"{spec} gives, on {trial.place}:")
        for line in [*trial_lines(trial), *[f"  {trial.note}"] * bool(trial.note)]:
            say(line)
        failed = failed or bool(trial.failures)
    return failed


def show_rendered(args: Args, data: Data, command: str, rows: Any, tokenizer: Any, *, place: str) -> dict[str, str]:
    """Print the row at `place` (the first, if that one is wrong) and the lengths.

    Returns the errors of rows that cannot be rendered, by their places.
    """
    render = renderer(args, data, command, rows, tokenizer)

    sure = args.continue_answer

    def read(some: Any) -> list[tuple[list[int], list[bool]]]:
        return render(data.read(some, *forms_for(command)), continue_answer=sure)

    good, wrong = checked(rows, read)
    if not good:
        return wrong
    sure = True  # a row alone does not show whether all begin the answer alike
    chosen = next((i for i in good if rows.places[i] == place), good[0])
    say(f"{rows.places[chosen]}, as rlkit {command} reads it:")
    sys.stdout.write("".join(f"{shown(tokenizer, *item)}\n" for item in read(_some(rows, [chosen]))))
    for line in histogram([len(ids) for ids, _ in read(_some(rows, good))], limit=args.max_tokens):
        say(line)
    return wrong


def columns_of(rows: Sequence[Any]) -> list[str]:
    """The columns with the types of their values, and in how many rows a column is where it is not in all."""
    kinds: dict[str, Counter[str]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, Counter())[type(value).__name__] += 1
    found = []
    for name, counts in kinds.items():
        num = sum(counts.values())
        some = f", in {num:,} rows" if num < len(rows) else ""
        found.append(f"{name} ({' or '.join(sorted(counts))}{some})")
    return found


def forms_for(command: str) -> tuple[Any, ...]:
    """The forms that a command reads."""
    from rlkit.data import rows as forms

    pairs = (forms.PAIR,)
    return {"grpo": (forms.PROMPT,), "sft": forms.SFT, "kto": (*pairs, forms.LABELLED)}.get(command, pairs)


def forms_of(args: Args, data: Data, rows: Any, tokenizer: Any) -> dict[str, bool]:
    """The commands whose form the first row has, and whether they read it; prints each, with the form or why not."""
    from rlkit.compat.rows import source_of
    from rlkit.data.rows import check_columns

    found: dict[str, bool] = {}
    for command, title in (("grpo", "grpo, ppo"), ("sft", "sft"), ("dpo", "dpo, reward_model"), ("kto", "kto")):
        try:
            whole = command == "grpo" and _is_answered(rows[0])  # whether all rows begin their answer alike
            read = data.read(rows if whole else _some(rows, [0]), *forms_for(command))
            form, _ = check_columns(read, *forms_for(command), apply_chat_template=bool(data.chat_template))[0]
            foreign = source_of(rows[0], rows.places[0])
            name = f"{form.name}{f', from a {foreign.form.name}' if foreign else ''}"
            found[command] = tokenizer is None
            if tokenizer is not None:
                renderer(args, data, command, rows, tokenizer)(read, continue_answer=args.continue_answer)
                found[command] = True
        except ValueError as error:
            name = f"no: {' '.join(str(error).split())}".partition("; columns found")[0]
        say(f"  rlkit {title:18} {name}")
    return found | ({"reward_model": found["dpo"]} if "dpo" in found else {})


def read_as(data: Data, rows: Any, command: str) -> Any:
    """The rows as a command reads them; ValueError for one in another form."""
    from rlkit.data.rows import check_columns

    read = data.read(rows, *forms_for(command))
    check_columns(read, *forms_for(command), apply_chat_template=bool(data.chat_template))
    return read


def _is_answered(row: Any) -> bool:
    """Whether the row is a conversation that ends with the assistant's message."""
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role", last.get("from")) in ("assistant", "gpt")


def _some(rows: Any, indices: Sequence[int]) -> Any:
    from rlkit.data.load import Rows

    return Rows((rows[i] for i in indices), source=rows.source, places=[rows.places[i] for i in indices])


def checked(rows: Any, read: Callable[[Any], Any]) -> tuple[list[int], dict[str, str]]:
    """The indices of the rows that `read` takes, and the errors of the others by their places.

    Where it does not take all, each is read by itself, after the first row, which decides the form.
    """
    try:
        read(rows)
        return [*range(len(rows))], {}
    except ValueError:
        pass
    good, wrong = list[int](), dict[str, str]()
    logging.disable(logging.WARNING)  # of each row alone
    try:
        for index in range(len(rows)):
            try:
                read(_some(rows, [0, index] if index and 0 in good else [index]))
                good.append(index)
            except ValueError as error:
                wrong[rows.places[index]] = " ".join(str(error).split())
    finally:
        logging.disable(logging.NOTSET)
    return good, wrong


def tokenizer_of(args: Args) -> Any:
    """The tokenizer of the model, with the chat template."""
    from rlkit.scripts.start import load_tokenizer

    file = None if isinstance(args.chat_template, bool) else Path(args.chat_template)
    return load_tokenizer(args.model or "", chat_template=file)


def renderer(
    args: Args, data: Data, command: str, rows: Any, tokenizer: Any
) -> Callable[..., list[tuple[list[int], list[bool]]]]:
    """A function from rows to the ids and the mask of their examples."""
    from rlkit.data import examples
    from rlkit.data.prompts import rl_prompts
    from rlkit.data.vocabulary import check_vocabulary
    from rlkit.model.pretrained import load_config
    from rlkit.scripts.start import image_reader

    size = load_config(args.model or "").get_text_config().vocab_size
    known: dict[str, Any] = {"tokenizer": tokenizer, "num_rows": size}
    how: dict[str, Any] = {"system_prompt": data.system_prompt, "apply_chat_template": bool(data.chat_template)}
    how |= {"tokenizer": tokenizer, "template_args": data.template() or None}
    how["images"] = image_reader(args.model or "", tokenizer, rows)

    def render(rows: Any, *, continue_answer: bool) -> list[tuple[list[int], list[bool]]]:
        how["continue_answer"] = continue_answer
        if command == "grpo":
            prompts = rl_prompts(rows, max_prompt_tokens=sys.maxsize, **how)[0]
            check_vocabulary(prompts, rows=rows, **known)
            return [(p.ids, [False] * len(p.ids)) for p in prompts]
        make: Any = {"sft": examples.sft_examples, "kto": examples.labelled_examples}.get(
            command, examples.preference_pairs
        )
        made = make(rows, max_example_tokens=sys.maxsize, **how)[0]
        check_vocabulary(made, rows=rows, **known)
        if command == "sft":
            return [(example.ids, example.mask) for example in made]
        if command == "kto":
            answers = [(x.prompt, x.response) for x in made]
        else:
            answers = [(x.prompt, ids) for x in made for ids in (x.chosen, x.rejected)]
        return [(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for prompt, ids in answers]

    return render


def shown(tokenizer: Any, ids: list[int], mask: list[bool]) -> str:
    """The text, with the trained tokens marked."""
    colour = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "NO_COLOR" not in os.environ
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
