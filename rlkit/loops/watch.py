"""Checks of a run's steps: NaN and infinities (`rlkit.loops.nans`), and steps without a learning signal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rlkit._util.text import Explained
from rlkit.loops.nans import Finite, X, check_norms, describe_prompt, finite_batch, finite_groups
from rlkit.rollout.groups import Group, Prompt, last_pieces
from rlkit.run.folder import Run
from rlkit.types import Batch

_FAILED = 32  # episodes in a row


class Signal(NamedTuple):
    """Whether the last step had an advantage other than 0, and the range of all rewards so far."""

    present: bool = True
    low: float = math.inf
    high: float = -math.inf
    num_reports: int = 0


class Watch:
    """The checks of one run: stops at the first non-finite number, or with `skip` drops its samples and counts them.

    Episodes may fail (`max_failed` of `rlkit.rewards.scorer`). A step in which all did is reported. It ends the run if
    none has succeeded before, or as the last of `_FAILED` episodes in a row.
    """

    def __init__(self, run: Run, prompts: Sequence[Prompt], tokenizer: Any, *, skip: bool) -> None:
        self._run, self._skip, self._num_dropped = run, skip, 0
        self._signal, self._any_good, self._failed = Signal(), False, 0
        self._describe = partial(describe_prompt, prompts, tokenizer)

    def groups(self, groups: Sequence[Group], *, step: int) -> tuple[list[Group], Sequence[int]]:
        """`finite_groups`, and the places of their samples among those of `groups`."""
        self._check_failed(groups, step=step)
        part = self._report(finite_groups(groups, step=step, describe=self._describe, skip=self._skip))
        return part.finite, part.places

    def batch(self, batch: Batch, *, step: int) -> Batch:
        """`finite_batch`."""
        return self._report(finite_batch(batch, step=step, describe=self._describe, skip=self._skip)).finite

    def update(self, line: Mapping[str, float], *, step: int) -> dict[str, float]:
        """`check_norms`; with `skip`, returns the number of samples dropped in this step as `nan/dropped`."""
        check_norms(line, step=step, skip=self._skip)
        num, self._num_dropped = self._num_dropped, 0
        return {"nan/dropped": float(num)} if self._skip else {}

    def signal(self, batch: Batch) -> None:
        """`report_no_signal`."""
        self._signal = report_no_signal(self._run, batch, before=self._signal)

    def _check_failed(self, groups: Sequence[Group], *, step: int) -> None:
        infos = [end.info for group in groups for end in last_pieces(group)]
        if not all(info.get("metrics", {}).get("failed") for info in infos) or not infos:
            self._any_good, self._failed = True, 0
            return
        self._failed += len(infos)
        said = f"all {len(infos)} episodes of step {step} failed, and nothing is trained on: {infos[-1].get('error')}"
        if not self._any_good or self._failed >= _FAILED:
            raise Explained(said)
        self._run.say(said)

    def _report(self, finite: Finite[X]) -> Finite[X]:
        self._num_dropped += finite.num_dropped
        if finite.note:
            self._run.say(f"{finite.note}; dropped")
        return finite


def report_no_signal(run: Run, batch: Batch, *, before: Signal) -> Signal:
    """Report the first of consecutive steps whose advantages are all 0, unless the cause is success.

    Success: every reward of the step equals the highest one so far, and a lower one was seen before. Returns the state
    for the next step.
    """
    rewards = batch.rewards.tolist()
    low, high = min([before.low, *rewards]), max([before.high, *rewards])
    now = Signal(batch.advantages is None or bool((batch.advantages != 0).any()), low, high, before.num_reports)
    if not before.present or now.present or batch.teachers is not None:  # a teacher's loss needs no advantage
        return now
    if batch.num_tokens == int(batch.truncated.sum()):  # only the last token that a truncated sequence keeps
        run.say("no token of this step is trained on: no episode asked the policy for an answer")
    elif not batch.mask.any():
        run.say("no token of this step is trained on: a limit cut every answer, or all are older than allowed")
    elif min(rewards) < now.high or now.low == now.high:
        low, high = min(rewards), max(rewards)
        values = f"all {low:g}" if low == high else f"between {low:g} and {high:g}"
        never = "compare answers and gold in trajectories/ (the reward may match never, or always); " * (
            now.low == now.high
        )
        critic = batch.values is not None  # which compares with no group
        groups = [0] * len(rewards) if critic else batch.group_ids.tolist()
        differ = len({*zip(groups, rewards)}) > len({*groups})
        fault = f"every advantage is 0 (rewards {values})"
        fault = fault if critic or differ else f"all rewards are equal in every group ({values})"
        larger = "" if critic else "a larger group_size "
        fix = f"{never}easier, harder or more varied prompts, {larger}or a finer reward would help"
        if differ:
            fix = "the rewards differ, so it is the estimator of the advantages that gives 0"
        now = now._replace(num_reports=before.num_reports + 1)
        times = "" if now.num_reports == 1 else f" ({now.num_reports} times so far)"
        if now.num_reports.bit_count() == 1:  # the first, second, fourth, eighth ... time
            run.say(f"{fault}: no learning signal in this step{times}. Training goes on; {fix}")
    return now
