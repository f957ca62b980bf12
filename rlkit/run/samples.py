"""The samples of a run: one row each in `trajectories/`, and a few of them on the screen.

step 25, row 7 of the data: "What is 12 + 30?"   gold: "42"
  reward advantage  correct   format  answer
   1.100    +0.550    1.000    1.000  "<think>12 + 30 = 42</think> 42"
   0.000    -0.550    0.000    0.000  "I do not know"
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit._util.text import printable
from rlkit.data.prompts import Prompt, question_messages
from rlkit.rewards.text import gold_answer
from rlkit.rollout.groups import totals
from rlkit.rollout.limits import success
from rlkit.rollout.saved import save_step
from rlkit.run.console import line_width
from rlkit.run.folder import Run
from rlkit.settings import Rollouts

if TYPE_CHECKING:
    from rlkit.types import Trajectory

Decode = Callable[[Sequence[int]], str]

_NUM_SHOWN = 3  # samples of one group in a table
_WINDOW = 16  # ids that may wait for the rest of a character, which has four bytes at most


@dataclass
class _Tally:
    """Counts of the groups in one file; `tokens` excludes the first group, which starts the clock."""

    groups: int = 0
    success: float = 0.0
    tokens: int = 0
    start: float = field(default_factory=time.perf_counter)


@dataclass
class Known:
    """What a step knows of the samples that it took.

    `advantages` and `tokens` are of the samples at `places` among all, in this order: the mean advantage of the trained
    tokens, and for some of them, by their number in `places`, numbers per token (see `token_row`).
    """

    places: Sequence[int] = ()
    advantages: Sequence[float] = ()
    tokens: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class Samples:
    """Writes the samples of a run into its folder, and shows the progress of the rollout.

    The numbers of running and queued requests are the engine's `progress`, if it has one. Of `rollouts` it reads the
    steps between two tables of sampled answers on the screen, the first at step 1, and `save_rollouts`; None: neither.
    """

    def __init__(self, run: Run, tokenizer: Any, *, engine: Any, rollouts: Rollouts | None = None) -> None:
        self._run, self._engine = run, engine
        self._print_steps = rollouts.print_samples_steps if rollouts else 0
        self._save = rollouts.save_rollouts if rollouts else None
        self.tokenizer = tokenizer
        self._tallies: dict[tuple[str, int], _Tally] = {}

    def completed(
        self, prompt: Prompt, group: Sequence[Trajectory], *, step: int, kind: str = "train", kept: bool = True
    ) -> None:
        """A group has its rewards: the `on_group` of streams and evaluations.

        `kind` is `train`, `eval_sampled` or `eval_greedy`. A group that was not `kept` is written to
        `dropped_{step}.jsonl`, one of an evaluation to `{kind}_{step}.jsonl`; `trained` writes those that train.
        """
        kind = kind if kept else "dropped"
        if kind != "train" and self._run.active:
            self._run.trajectories(step, self._rows(prompt, group, step=step), kind=kind)
        tally = self._tallies.setdefault((kind, step), _Tally())
        tally.groups += 1
        tally.success += success(group)
        tally.tokens += sum(int(np.count_nonzero(t.mask)) for t in group) if tally.groups > 1 else 0
        self._run.status(_status(kind, tally, getattr(self._engine, "progress", None)))

    @contextmanager
    def training(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Trajectory]], *, step: int
    ) -> Iterator[Known]:
        """The value gets what the block learns of the groups; they are written when it ends, also by an error."""
        record = Known()
        try:
            yield record
        finally:
            self.trained(prompts, groups, record, step=step)

    def trained(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Trajectory]], record: Known, *, step: int
    ) -> None:
        """Write the groups that train in `step` to `train_{step}.jsonl`, and show one group if a table is due.

        A sample without an advantage has null in the file: it was dropped, or the step failed before.
        """
        if not self._run.active:
            return
        if self._save is not None:
            save_step(self._save, step, prompts, groups)
        rows = [self._rows(*of, step=step) for of in zip(prompts, groups, strict=True)]
        advantages = dict(zip(record.places, record.advantages))
        tokens = {record.places[i]: streams for i, streams in record.tokens.items()}
        samples = zip([row for group in rows for row in group], [t for group in groups for t in group], strict=True)
        for place, (row, t) in enumerate(samples):
            row["advantage"] = advantages.get(place)
            if place in tokens:
                row["tokens"] = token_row(t.ids, tokens[place], decode=self._decode)
        self._run.trajectories(step, [row for group in rows for row in group])
        if rows and self._print_steps and (step == 1 or step % self._print_steps == 0):
            index = max(range(len(rows)), key=lambda i: _spread(rows[i]))
            prompt = prompts[index]
            told = {"question": self._question(prompt), "begun": getattr(prompt, "begun", "")}
            for line in table(rows[index], **told, width=line_width()):
                self._run.say(line, whole=True)

    def _rows(self, prompt: Prompt, group: Sequence[Trajectory], *, step: int) -> list[dict[str, Any]]:
        common = {"step": step, "group": prompt.index, "gold": gold_answer(prompt.row)}
        text = self._decode(prompt.ids)  # once: most samples of a group have the same prompt

        def decode(ids: Sequence[int]) -> str:
            return text if list(ids) == list(prompt.ids) else self._decode(ids)

        return [common | row for row in trajectory_rows(group, decode=decode)]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _question(self, prompt: Prompt) -> str:
        """The last message of the prompt before the answer, without the chat template."""
        try:
            content: str = question_messages(prompt.row)[-1]["content"]
            return content
        except (ValueError, KeyError, TypeError):  # made in Python, without a row
            return self._decode(prompt.ids)


def trajectory_rows(group: Sequence[Trajectory], *, decode: Decode) -> list[dict[str, Any]]:
    """`trajectory_row` of each; the `reward` has those of turns, of an episode in pieces up to and with this one's."""
    return [trajectory_row(t, decode=decode) | {"reward": x} for t, x in zip(group, totals(group), strict=True)]


def trajectory_row(trajectory: Trajectory, *, decode: Decode) -> dict[str, Any]:
    """One sample as a JSON row for people: texts with special tokens, reward, length and finish reason.

    `rewards` are the further numbers of the reward function, such as the parts of a sum. `length` is the number of
    sampled tokens, `versions` are the weight versions that sampled them. A row with `continues` is a further piece of
    the episode of the row before it.
    """
    info = {**trajectory.info}
    row = {
        "prompt": decode(trajectory.prompt_ids),
        "completion": decode(trajectory.ids),
        "reward": trajectory.reward,
        "rewards": info.pop("metrics", {}),
        "score": trajectory.score,
        "length": int(np.count_nonzero(trajectory.mask)),
        "versions": np.unique(np.asarray(trajectory.versions)[np.asarray(trajectory.mask, bool)]).tolist(),
        "finish_reason": info.pop("finish_reason", "length" if trajectory.truncated else "stop"),
        "info": info,
    }
    row |= {"role": trajectory.role} if trajectory.role else {}
    return row | ({"continues": True} if trajectory.continues else {})


def token_row(ids: Sequence[int], streams: Mapping[str, Any], *, decode: Decode) -> dict[str, Any]:
    """The `tokens` of a row: `text`, the piece of the completion that each id is, and the streams of numbers.

    Numbers have four significant digits, and a stream of one number throughout is that number. The pieces joined are
    the completion: the ids of one character that needs several have their text at the last of them.
    """
    row: dict[str, Any] = {"text": pieces(ids, decode=decode)}
    for name, values in streams.items():
        short = values and [x if isinstance(x, int) else float(f"{x:.4g}") for x in values]
        row[name] = short[0] if short and short.count(short[0]) == len(short) else short
    return row


def pieces(ids: Sequence[int], *, decode: Decode) -> list[str]:
    """The text that each id adds to those before it; "" where its character is not complete yet.

    A window of the last few ids is decoded, so that the time is linear. Reference: the incremental decoding of vLLM.
    """
    out: list[str] = []
    first = read = 0  # the window's ids before `read` are in `out`
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[first:read]), decode(ids[first:end])
        open_character = now.endswith("\ufffd") or len(now) <= len(before)
        if open_character and end < len(ids) and end - read < _WINDOW:
            out.append("")
            continue
        out.append(now[len(before) :])
        first, read = read, end
    return out


def table(rows: Sequence[Mapping[str, Any]], *, question: str, width: int, begun: str = "") -> list[str]:
    """The lines that show a few samples of one group: the highest reward, the lowest, and one between them.

    `begun` is the text with which the prompt begins the answers.
    Texts are quoted as JSON, so that a line stays one line and no control character reaches the terminal.
    """
    order = sorted((row for row in rows if "continues" not in row), key=lambda row: row["reward"], reverse=True)
    chosen = order if len(order) <= _NUM_SHOWN else [order[0], order[len(order) // 2], order[-1]]
    first = chosen[0]
    shown_gold = _quoted(first["gold"], width // 3)
    if isinstance(first["gold"], int | float):  # which no text equals
        shown_gold = f"{first['gold']} (a number)"
    gold = "" if first["gold"] is None else f"   gold: {shown_gold}"
    gold = (f"   begun: {_quoted(begun, width // 3)}" if begun else "") + gold
    title = f"  step {first['step']}, row {first['group'] + 1} of the data: "
    parts = [name for name in first["rewards"] if "/" not in name]
    columns = ["reward", "advantage", *parts]
    cells = []
    for row in chosen:
        numbers = [f"{row['reward']:z.3f}", "-" if row["advantage"] is None else f"{row['advantage']:+z.3f}"]
        cells.append(numbers + [f"{x:z.3f}" if (x := row["rewards"].get(name)) is not None else "-" for name in parts])
    widths = [max(9, *(len(text) + 1 for text in column)) for column in zip(columns, *cells, strict=True)]
    lines = [title + _quoted(question, width - len(title) - len(gold)) + gold]
    lines.append("".join(f"{name:>{w}}" for name, w in zip(columns, widths)) + "  answer")
    for row, texts in zip(chosen, cells, strict=True):
        line = "".join(f"{text:>{w}}" for text, w in zip(texts, widths))
        lines.append(line + "  " + _quoted(row["completion"], width - len(line) - 2))
    return lines


def _quoted(text: Any, width: int) -> str:
    """The text in at most `width` characters (at least 20); of a longer one the start and the end."""
    width = max(20, width)
    quoted = [printable(json.dumps(c, ensure_ascii=False)[1:-1]) for c in str(text)]  # an escape is cut as a whole
    if len("".join(quoted)) + 2 <= width:
        return f'"{"".join(quoted)}"'
    head, end = _fitting(quoted, (width - 7) // 2), _fitting(quoted[::-1], width - 7 - (width - 7) // 2)
    return f'"{"".join(head)} ... {"".join(end[::-1])}"'


def _fitting(pieces: Sequence[str], width: int) -> Sequence[str]:
    """The first pieces that fit into `width` characters."""
    ends = accumulate(map(len, pieces))
    return pieces[: sum(1 for _ in takewhile(lambda end: end <= width, ends))]


def _spread(rows: Sequence[Mapping[str, Any]]) -> float:
    rewards = [row["reward"] for row in rows]
    return max(rewards, default=0.0) - min(rewards, default=0.0)


def _status(kind: str, tally: _Tally, progress: Any) -> str:
    seconds = time.perf_counter() - tally.start
    rate = f", {tally.tokens / seconds:.0f} tok/s" if seconds > 1 else ""  # groups of equal lengths end together
    queue = "" if progress is None else f", {progress.running} running, {progress.waiting} queued"
    return f"{kind}: {tally.groups} groups, reward {tally.success / tally.groups:.3f}{rate}{queue}"
