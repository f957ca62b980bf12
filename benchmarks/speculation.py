"""Speculative decoding in the embedded engine: what n-gram drafts from a group's other samples would save.

    make smollm && python benchmarks/speculation.py

The engine samples groups, and a count over their tokens says what drafts would have done: a draft token is accepted
if it is the token that was sampled there. That is exact, since the noise is a function of (seed, position): the engine
draws the same token with and without drafts. It is accepted with its probability p(draft), as by the rule min(1, p / q)
for a draft that puts all of q on one token (arXiv:2211.17192).

A round is one forward: each row that has tokens left reads its last token and a draft of at most k more, and gains the
accepted ones and the one after them. A draft is the most frequent token after the last 4 tokens, else 3, else 2; then
the same after that one. It is counted from

    own        the row's prompt and its tokens so far (prompt lookup)
    group      the prompt and the tokens so far of all samples of the group
    history    the same, and the other samples from end to end, as if an earlier epoch had sampled them: an upper bound

Printed for each source and k: draft tokens per forward of a row, and the share of them that is accepted; its tokens per
forward (where further positions cost nothing, the speed of a batch that is refilled); rounds of plain decoding over
those with drafts (the same of one that is not; `even`: of rows that all advance as far as the one that accepts least);
and the speed of this machine on one thread, from the time of a forward of N positions with its sampling. That is timed
with N rows at 64 positions of context, and tables and drafts cost nothing: both flatter the drafts.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _cli import run_script
from _models import build
from _timing import interleaved, interval, machine
from transformers import AutoTokenizer

from rlkit._util.files import cache_folder
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.local.decode import Decoder
from rlkit.rollout.sampling import sample, uniforms
from rlkit.types import SamplingParams

LONGEST, SHORTEST = 4, 2  # tokens before a draft token
SOURCES = ("own", "group", "history")
QUESTIONS = (
    "A train travels 60 km in 45 minutes. How far does it travel in 2 hours? Explain step by step.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Why is the sky blue during the day and red in the evening?",
    "Give me a recipe for pancakes for four people.",
)
Table = defaultdict[tuple[int, ...], Counter[int]]


@dataclass
class Args:
    temperatures: tuple[float, ...] = (1.0, 0.3, 0.7)
    """0.3 is near the entropy of a policy that has been trained"""
    sums: int = 4
    """prompts of recipes/sums, with answers of at most 32 tokens"""
    questions: int = 2
    """questions in words, with answers of at most `new_tokens`"""
    new_tokens: int = 256
    group_size: int = 16
    rows: tuple[int, ...] = (16, 64)
    """that are decoded together, at most"""
    drafts: tuple[int, ...] = (3, 5, 8)
    """tokens of a draft, k"""
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """positions of a timed forward; in between, time is interpolated, beyond, extrapolated"""
    repeats: int = 7
    out: Path = Path("benchmarks/results/speculation.json")


class Group(NamedTuple):
    """A prompt and its samples."""

    prompt: list[int]
    samples: list[list[int]]


class Run(NamedTuple):
    """What a batch took: for each round its rows and positions; draft tokens, and those of them accepted."""

    rounds: list[tuple[int, int]]
    drafted: int
    accepted: int


async def sampled(model: Any, prompts: Sequence[list[int]], args: Args, **params: Any) -> list[Group]:
    """Groups of the embedded engine."""
    async with LocalEngine(model) as engine:
        calls = (
            engine.generate(prompt, params=SamplingParams(seed=1000 * i + j, **params))
            for i, prompt in enumerate(prompts)
            for j in range(args.group_size)
        )
        ids = iter([out.ids for out in await asyncio.gather(*calls)])
    return [Group(prompt, [next(ids) for _ in range(args.group_size)]) for prompt in prompts]


def note(table: Table, ids: Sequence[int], start: int = 0) -> None:
    """Count each of `ids[start:]` after the tokens before it."""
    for end in range(max(start, SHORTEST), len(ids)):
        for n in range(SHORTEST, min(LONGEST, end) + 1):
            table[tuple(ids[end - n : end])][ids[end]] += 1


def draft(table: Table, context: Sequence[int], k: int) -> list[int]:
    """At most k tokens after the context."""
    ids = [*context[-LONGEST:]]
    had = len(ids)
    while len(ids) < had + k:
        seen = (table[tail] for n in range(LONGEST, SHORTEST - 1, -1) if (tail := tuple(ids[-n:])) in table)
        votes = next(seen, None)
        if votes is None:
            break
        ids.append(votes.most_common(1)[0][0])
    return ids[had:]


def tables(groups: Sequence[Group], source: str) -> list[Table]:
    """The table that each row drafts from at the start; those of a group are one object where it is shared."""
    made = []
    for prompt, samples in groups:
        shared: Table = defaultdict(Counter)
        note(shared, prompt)
        for i in range(len(samples)):
            table = shared
            if source != "group":
                table = defaultdict(Counter)
                note(table, prompt)
            for other in samples[:i] + samples[i + 1 :] if source == "history" else ():
                note(table, [*prompt, *other], len(prompt))
            made.append(table)
    return made


def decoded(groups: Sequence[Group], source: str, k: int, *, even: bool = False) -> Run:
    """All samples of these groups in one batch, with drafts of at most k tokens."""
    rows = [([*prompt, *ids], len(prompt)) for prompt, samples in groups for ids in samples]
    places, of_row, run = [start for _, start in rows], tables(groups, source), Run([], 0, 0)
    rounds, drafted, accepted = run
    while active := [i for i, (ids, _) in enumerate(rows) if places[i] < len(ids)]:
        gains, positions = {}, 0
        for i in active:
            ids, place = rows[i][0], places[i]
            guess = draft(of_row[i], ids[:place], min(k, len(ids) - place - 1))
            right = next((n for n, x in enumerate(guess) if x != ids[place + n]), len(guess))
            gains[i], positions = right + 1, positions + 1 + len(guess)
            drafted, accepted = drafted + len(guess), accepted + right
        for i in active:
            place, places[i] = places[i], places[i] + (min(gains.values()) if even else gains[i])
            note(of_row[i], rows[i][0][: places[i]], place)
        rounds.append((len(active), positions))
    return Run(rounds, drafted, accepted)


def split(groups: Sequence[Group], rows: int) -> list[list[Group]]:
    """Batches of so many rows: parts of a group one after another, or several groups."""
    size = max(len(group.samples) for group in groups)
    if rows < size:
        parts = range(0, size, rows)
        return [[Group(prompt, samples[i : i + rows])] for prompt, samples in groups for i in parts]
    return [[*groups[i : i + rows // size]] for i in range(0, len(groups), rows // size)]


def plain(groups: Sequence[Group]) -> Run:
    """All samples of these groups in one batch, without drafts."""
    lens = [len(ids) for _, samples in groups for ids in samples]
    return Run([(n := sum(x > i for x in lens), n) for i in range(max(lens))], 0, 0)


def forwards(model: Any, args: Args) -> dict[int, list[float]]:
    """Seconds of each repeat of a forward of N positions with its sampling."""
    most, place = max(args.sizes), 63
    decoder = Decoder(model, max_batch=most, max_len=place + 1)
    decoder.reserve(most, place + 1, keep=0)

    def run(n: int) -> None:
        logits = decoder.decode(torch.arange(n) % 100 + 100, torch.full((n,), place))
        sample(logits, torch.from_numpy(uniforms(np.arange(n, dtype=np.uint64), np.full(n, place + 1))))

    times = interleaved({str(n): lambda n=n: run(n) for n in args.sizes}, repeats=args.repeats)
    return {int(n): [round(x, 5) for x in seconds] for n, seconds in times.items()}


def compared(groups: Sequence[Group], source: str, k: int, rows: int, seconds: dict[int, float]) -> dict[str, float]:
    """Drafts against plain decoding of the same tokens in the same batches."""
    batches = split(groups, rows)
    slow, fast = [plain(batch) for batch in batches], [decoded(batch, source, k) for batch in batches]
    level = [decoded(batch, source, k, even=True) for batch in batches]
    num = [sum(len(run.rounds) for run in runs) for runs in (slow, fast, level)]
    read = [sum(active for run in runs for active, _ in run.rounds) for runs in (slow, fast)]
    time = [sum(cost(positions, seconds) for run in runs for _, positions in run.rounds) for runs in (slow, fast)]
    drafted = sum(run.drafted for run in fast)
    figures = {
        "drafted": drafted / read[1],
        "accepted": sum(run.accepted for run in fast) / max(1, drafted),
        "tokens_per_forward": read[0] / read[1],
        "rounds": num[0] / num[1],
        "even": num[0] / num[2],
        "speed": time[0] / time[1],
    }
    return {name: round(x, 3) for name, x in figures.items()}


def cost(positions: int, seconds: dict[int, float]) -> float:
    """Seconds of a forward of so many positions."""
    sizes = sorted(seconds)
    if positions > sizes[-1]:
        return seconds[sizes[-1]] * positions / sizes[-1]
    return float(np.interp(positions, sizes, [seconds[n] for n in sizes]))


def main(args: Args) -> None:
    """Print and write the tables."""
    torch.set_num_threads(1)
    model, folder = build("smollm"), cache_folder() / "SmolLM2-135M-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    file = Path(__file__).parents[1] / "recipes" / "sums" / "train.jsonl"
    sums = [json.loads(line)["prompt"] for line in file.read_text().splitlines()[: args.sums]]
    tasks = {"sums": (sums, 32), "questions": (QUESTIONS[: args.questions], args.new_tokens)}
    times = forwards(model, args)
    seconds = {n: statistics.median(x) for n, x in times.items()}
    for n, each in times.items():
        low, high = interval([x / y for x, y in zip(each, times[min(times)], strict=True)])
        print(f"forward of {n:4} positions {1e3 * seconds[n]:8.1f} ms, [{low:.2f}, {high:.2f}] of one", flush=True)
    found: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for temperature in args.temperatures:
        for task, (texts, longest) in tasks.items():
            chats = [[{"role": "user", "content": text}] for text in texts]
            ids = [tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=False) for x in chats]
            params = {"temperature": temperature, "max_new_tokens": longest}
            groups = asyncio.run(sampled(model, ids, args, **params)) if ids else []
            for rows in args.rows if groups else ():
                rows = min(rows, len(groups) * args.group_size)
                for source in SOURCES:
                    for k in args.drafts:
                        row = {"task": task, "temperature": temperature, "rows": rows, "source": source, "k": k}
                        told = compared(groups, source, k, rows, seconds)
                        found.append(row | told)
                        figures = ", ".join(f"{name} {x:.2f}" for name, x in told.items())
                        print(f"{task:9} T {temperature:3} rows {rows:2} {source:7} k {k}: {figures}", flush=True)
            result = {"machine": machine(), "args": asdict(args), "seconds": times, "rows": found}
            args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
