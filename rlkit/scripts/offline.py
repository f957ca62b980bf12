"""What the scripts on fixed data share: rows, examples, and the held-out sets on which answers are sampled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlkit._util.ranks import launched
from rlkit.data.drop import NothingLeft
from rlkit.data.load import place_of
from rlkit.data.vocabulary import check_vocabulary
from rlkit.run.console import data_progress
from rlkit.scripts.args import Data, Episodes, Evaluation, Examples, log
from rlkit.scripts.start import Brought, Place, check_flags, image_reader, note_strings, warn_of_repeats
from rlkit.scripts.trial import own_rewards
from rlkit.settings import Optim, SamplingParams, is_default, refuse_if

if TYPE_CHECKING:
    from rlkit.data.order import Part
    from rlkit.scripts import dpo, sft
    from rlkit.scripts.start import Offline

STREAM_HEAD = 1000  # rows of each file that are read at the start of a run that streams


@dataclass(frozen=True)
class Made:
    """Examples, pairs or labelled responses: of training (a list, or as they stream) and of each held-out set.

    `parts` are the size, the weight and the files of each part of the data.
    """

    examples: Any
    parts: list[Part]
    held_out: dict[str, list[Any]]


def bring(args: Offline, *forms: Any) -> Brought:
    """What the user brought, checked before torch is loaded; ValueError for a row that has none of the `forms`."""
    model, lora = check_flags(args)
    if args.examples.stream:
        check_stream(args.examples, args.optim, *forms)
    parts, held_out = args.data.rows(*forms, limit_each=STREAM_HEAD if args.examples.stream else None)
    evaluation = getattr(args, "evaluation", Evaluation())
    evaluation.check_sets(args.data.eval_files())
    refuse_if(evaluation.eval_sampling and not evaluation.eval_reward, "`eval_sampling` requires `eval_reward`")
    refuse_if(
        evaluation.eval_reward and launched(),
        "`eval_reward` samples in one process: drop it, and run rlkit eval on the export",
    )
    rewards = own_rewards(evaluation, Episodes(), asked_sets := questions(evaluation, held_out))
    return Brought(model, lora, args.data.expanded(), parts, held_out, rewards, questions=asked_sets)


def make_examples(
    args: Offline, brought: Brought, place: Place, read: Callable[..., tuple[list[Any], int]], *forms: Any
) -> Made:
    """The examples that `read` makes of the training rows, and of those of each held-out set."""
    data, flags, path = brought.data, args.examples, place.model.model
    every_row = chain(*brought.parts, *brought.held_out.values())
    longest, few = longest_example(flags, *place.configs.values())
    if few and not is_default(flags, "max_example_tokens"):
        log.warning("%s", few.pop())
    render: dict[str, Any] = {"tokenizer": place.tokenizer, "max_example_tokens": longest, **data.rendering()}
    render["images"] = image_reader(path, place.tokenizer, every_row, place.config)
    num_rows = place.num_rows

    def make(rows: Any) -> list[Any]:
        dropped = 0
        try:
            made, dropped = read(rows, **render)
        except NothingLeft:
            dropped = len(rows)
            raise
        finally:
            if dropped and few:
                log.warning("%s", few.pop())
        check_vocabulary(made, rows=rows, tokenizer=place.tokenizer, num_rows=num_rows)
        return made

    with data_progress():
        of_part = [make(part) for part in brought.parts]
    every, sizes = [example for some in of_part for example in some], [*map(len, of_part)]
    if flags.stream:
        every, sizes = _streamed(data, make, *forms, head=every)
        if max(sizes) > STREAM_HEAD:
            log.warning("--stream: what is reported of the data is of the first %d rows of each file", STREAM_HEAD)
    note_strings(data, brought.parts[0])
    warn_of_repeats("--batch-size", flags.batch_size, len(every))
    return Made(every, brought.mixture(sizes), {name: make(part) for name, part in brought.held_out.items()})


def longest_example(flags: Examples, *configs: Any) -> tuple[int, list[str]]:
    """`max_example_tokens`, or the positions of one of the models where it has fewer, and then a line on that."""
    from rlkit.model.positions import check_positions, positions

    longest, few = flags.max_example_tokens, list[str]()
    for config in configs:
        try:
            check_positions(longest, config, setting="--max-example-tokens", fix="longer examples count as too long")
        except ValueError as error:
            few = [str(error)]
            longest = positions(config, packed=True) or longest
    return longest, few


def check_stream(flags: Examples, optim: Optim, *forms: Any) -> None:
    """Refuse (ValueError) `stream` where all examples are needed, or some may not fit a micro-batch."""
    from rlkit.data.turns import LABELLED, PAIR

    refuse_if(LABELLED in forms, "`stream` is for sft, dpo and reward_model: kto counts the labels of all examples")
    num, most = (2 if PAIR in forms else 1) * flags.max_example_tokens, optim.max_tokens
    refuse_if(num > most, f"`stream`: an example may have {num} tokens, and `max_tokens` is {most}: raise it")


def _streamed(data: Data, make: Callable[[Any], Any], *forms: Any, head: list[Any]) -> tuple[Any, list[int]]:
    """The training examples as they stream, and the number of rows of each part of the data."""
    from rlkit.data.load import Rows
    from rlkit.data.streaming import DiskRows, Streamed

    rows = DiskRows(*(files for files, _ in data.parts()), rename=data.rename)
    first = cache(rows.row)  # of a file: it decides the form of the others

    def of_row(index: int) -> Any:
        one, row = first(rows.file_of(index).start), rows.row(index)
        both = Rows([*one, *row], source=row.source, places=[*one.places, *row.places])
        return make(Rows(data.read(both, *forms)[1:], source=row.source, places=row.places))

    return Streamed(rows, of_row, head=head), rows.sizes


def questions(evaluation: Evaluation, held_out: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of the held-out sets that have an `eval_reward`, as questions."""
    from rlkit.data.load import Rows

    sets = {}
    for name in filter(evaluation.reward_of, held_out):
        part = held_out[name][: evaluation.eval_limit]
        sets[name] = Rows(map(asked, part), source="", places=[place_of(held_out[name], i) for i in range(len(part))])
    return sets


def answer_sets(args: sft.Args | dpo.Args, brought: Brought, place: Place, model: Any) -> dict[str, Any]:
    """The held-out sets on which answers are sampled and given the rewards of `eval_reward`; none without that flag."""
    from rlkit.data.chat import stop_token_ids
    from rlkit.data.prompts import rl_prompts
    from rlkit.loops.evaluate import EvalSet
    from rlkit.model.positions import positions

    sets, tokenizer, data = {}, place.tokenizer, brought.data
    longest = min(args.examples.max_example_tokens, (positions(place.config) or sys.maxsize) - 1)
    stops = data.chat_template and brought.questions
    ends = stop_token_ids(tokenizer, model.config, model.generation_config) if stops else ()
    for name, part in brought.questions.items():
        sampling = args.evaluation.sampling_of(name)
        samples = sampling.pop("samples", 1)
        prompts = rl_prompts(
            part, tokenizer=tokenizer, max_prompt_tokens=longest,
            images=image_reader(place.model.model, tokenizer, part, place.config), **data.rendering(),
        )[0]  # fmt: skip
        params = SamplingParams(**sampling, stop_token_ids=tuple(ends))
        sets[name] = EvalSet(prompts, brought.own_rewards[name](tokenizer), params, samples)
    return sets


def asked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of fixed data as a question: its prompt, or its conversation without the last answer.

    Where the row has no gold answer, `answer` is the text of that answer.
    """
    from rlkit.data.schema import ANSWERS, PROMPTS
    from rlkit.data.turns import SYSTEM, prompt_messages
    from rlkit.rewards.text import gold_answer

    answers = [row.get(name) for name in ("chosen", "response", "completion", "messages")]
    answer = next((value for value in answers if value is not None), None)
    question = {name: value for name, value in row.items() if name not in ANSWERS}
    if isinstance(answer, list) and answer and isinstance(answer[-1], dict) and answer[-1].get("role") == "assistant":
        *before, last = answer
        has_prompt = any(question.get(name) is not None for name in PROMPTS)
        if (
            before
            and has_prompt
            and answer is not row.get("messages")
            and before[0].get("role") not in (*SYSTEM, "user")
        ):
            before = prompt_messages(question) + before
        question |= {"messages": before} if before else {}
        answer = last.get("content")
    return question if gold_answer(row) is not None or not isinstance(answer, str) else question | {"answer": answer}
