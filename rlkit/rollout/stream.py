"""A stream of groups for training: refilled where groups are dropped, bounded in age, interruptible.

The same stream serves the synchronous loop (staleness 0), partial rollout (a step starts a fraction more groups than it
needs and pauses the slow ones until the next) and asynchronous training (sampling continues during training).

Staleness. The trainer takes n groups at a time and calls `advance(version=t)` when the engine has the weights of step
t. A group started at version v is trained on at a step t <= v + ceil(staleness). Two rules guarantee it:

    admission   groups in flight or ready <= n (v + 1 + staleness) - (groups taken so far)      (backpressure)
    order       `take` returns the n oldest ready groups, and waits if the groups it passes over, taken n at a time in
                order of age, would exceed the bound

Under both rules, waiting for the n oldest groups always suffices (earliest deadline first), so no group is discarded
for its age. A group's staleness is that of its oldest token; later tokens come from newer weights.

A turn that an environment samples passes through these, from the environment to the engine:

    rlkit.rewards.episodes.named    tells the engine's errors from those of the user's environment
    rlkit.rollout.limits.limited    bounds turns and tokens of the episode, where a limit is set
    groups.sample_group             warns of an episode that asks for nothing, notes which one names images
    groups.sampler                  adds the seed of the turn, the limit of its tokens and the prompt's images
    Pausable                        waits during a pause, and continues from the tokens sampled before it
    Journal                         replays completions that are on disk, and writes those that are not
    engine.generate                 samples

Differs: AReaL `max_head_offpolicyness` has the admission rule, and takes groups in the order of completion, which
bounds the age on average only; prime-rl `max_off_policy_steps` discards what is too old; verl `staleness_threshold`
counts like the fraction here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import zlib
from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlkit._util import untrusted
from rlkit._util.files import append_file, explain_full_disk, replace_file
from rlkit._util.text import Explained
from rlkit.rollout.calling import CLOCK, Clock
from rlkit.rollout.groups import (
    Env,
    Group,
    Prompt,
    Score,
    cancel_all,
    compact,
    joined_experts,
    joined_support,
    mix,
    seeded_group,
    single_turn,
)
from rlkit.rollout.limits import success, varies
from rlkit.types import Completion, Generate, SamplingParams, Support

Continued = Callable[..., Awaitable[Completion]]  # as `continue_aborted`
NOTHING = Completion([], [], [], "abort")


class NoSignal(Explained):
    """Too many groups were dropped while sampling one step."""


class Pausable:
    """An engine's `generate` and `abort` as one `generate` whose calls survive a pause.

    `pause()` aborts what is in flight and keeps the tokens, with their log-probs and versions. After `resume()` each
    call continues from the prompt and the tokens so far, and returns all of them as one completion. Calls made while it
    is paused wait. A caller of `generate` notices only the delay, so any environment can be interrupted in the middle
    of a turn.

    A pause changes no distribution: no token is sampled a second time, and no noise is used twice, if `continued` is
    `continue_aborted` with the tokenizer. With positional noise, under unchanged weights, a completion is the same with
    or without pauses, up to the rounding of its prefill.

    `abort(None)` ends all requests of the engine, including those of other callers.
    """

    def __init__(
        self, generate: Generate, abort: Callable[..., Awaitable[Any]], *, continued: Continued | None = None
    ) -> None:
        self._generate, self._abort, self._continued = generate, abort, continued or continue_aborted
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._pauses = 0
        self.num_running = 0

    async def generate(
        self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None, **options: Any
    ) -> Completion:
        """See `rlkit.types.Generate`. "abort" is returned only if the call was not aborted by `pause`."""
        pauses = 0

        async def part(context: list[int], left: SamplingParams) -> Completion:
            nonlocal pauses
            if not self._open.is_set():
                with CLOCK.get(Clock()).stopped():
                    while not self._open.is_set():  # the stream may be paused again before this task runs
                        await self._open.wait()
            pauses = self._pauses
            self.num_running += 1
            try:
                return await self._generate(context, params=left, rid=rid, **options)
            finally:
                self.num_running -= 1
                if not self.num_running:
                    self._idle.set()

        return await self._continued(part, prompt_ids, params, again=lambda: pauses != self._pauses)

    async def pause(self) -> None:
        """Abort all calls, and return when the engine runs none; calls that wait keep waiting."""
        self._open.clear()
        self._pauses += 1
        while self.num_running:
            self._idle.clear()
            await self._abort(None)
            try:  # an abort misses requests that have not reached the server yet
                await asyncio.wait_for(self._idle.wait(), timeout=1.0)
            except TimeoutError:
                continue

    def resume(self) -> None:
        """Continue all calls."""
        self._open.set()


async def continue_aborted(
    part: Callable[[list[int], SamplingParams], Awaitable[Completion | None]], prompt_ids: list[int],
    params: SamplingParams, *, again: Callable[[], bool], tokenizer: Any = None, positional_noise: bool = False,
    ends: Collection[int | None] = (),
) -> Completion:  # fmt: skip
    """Sample a completion in parts: `part(context, left)` samples after the prompt and the tokens so far, within the
    rest of `max_new_tokens`.

    The next part follows if one ends as "abort" and `again()` is true. None instead of a part ends the completion with
    the tokens so far. A part that was aborted at its end is no "abort": an engine that tests for one first (SGLang)
    may sample the stop token in the same pass.

    Args:
        tokenizer: finds stop strings that begin in one part and end in the next; an engine searches only what it
            samples itself. Without it, tokens that may begin a stop string are sampled again, which makes stop strings
            too likely unless the noise is positional.
        positional_noise: the engine's noise is a function of a token's seed and position. For other engines the seed
            of a part is mixed with the number of tokens before it, or a generator per request would repeat its noise.
        ends: tokens that end a completion of this engine besides `params.stop_token_ids`.
    """
    done = NOTHING
    while True:
        left, num = params, len(done.ids)
        if num:
            seed = params.seed if positional_noise or params.seed is None else mix(params.seed, num)
            left = replace(params, max_new_tokens=params.max_new_tokens - num, seed=seed)
        if (out := await part([*prompt_ids, *done.ids], left)) is None:
            return done
        done = joined(done, out)
        if num and params.stop and tokenizer is not None:
            done = _stopped(done, num, params.stop, tokenizer)
        if done.finish_reason == "abort":
            done = _ended(done, params, tokenizer, ends)
        if done.finish_reason != "abort" or not again():
            return done
        done = resumable(done, params, tokenizer=tokenizer)


def joined(first: Completion, second: Completion) -> Completion:
    """Concatenate two consecutive completions; the finish reason is that of the second."""
    return Completion(
        first.ids + second.ids, first.logp + second.logp, first.versions + second.versions, second.finish_reason,
        experts=joined_experts(first.experts, second.experts) if first.ids else second.experts,
        support=joined_support(*(x.support for x in (first, second) if x.ids)),
    )  # fmt: skip


def resumable(done: Completion, params: SamplingParams, *, tokenizer: Any = None) -> Completion:
    """The part of an aborted completion to continue from.

    Without `tokenizer`, drops tokens at the end that could begin a stop string (each is at least one byte of it).
    """
    stop = params.stop if tokenizer is None else ()
    return _first(done, max(0, len(done.ids) - max((len(s.encode()) - 1 for s in stop), default=0)))


def _ended(done: Completion, params: SamplingParams, tokenizer: Any, ends: Collection[int | None]) -> Completion:
    """An aborted completion with the finish reason that it has apart from the abort: at its first stop token, or at a
    stop string that its last token completes, "stop"; with `max_new_tokens` "length"."""
    stops = {*params.stop_token_ids, *ends}
    if (end := next((n for n, token in enumerate(done.ids, 1) if token in stops), None)) is not None:
        return replace(_first(done, end), finish_reason="stop")
    if params.stop and tokenizer is not None and done.ids:
        done = _stopped(done, len(done.ids) - 1, params.stop, tokenizer)
    over = done.finish_reason == "abort" and len(done.ids) >= params.max_new_tokens
    return replace(done, finish_reason="length") if over else done


def _stopped(done: Completion, num: int, stop: Sequence[str], tokenizer: Any) -> Completion:
    """`done` up to the token that completes a stop string which begins in its first `num` tokens and ends later."""
    decode, longest = partial(tokenizer.decode, skip_special_tokens=False), max(len(s.encode()) for s in stop)
    first = max(0, num - longest - 8)  # what is before it may begin inside a character, or lose its leading space
    for end in range(num + 1, min(len(done.ids), num + longest) + 1):  # a token is at least one byte
        if any(s in decode(done.ids[first:end]) for s in stop):
            return replace(_first(done, end), finish_reason="stop")
    return done


def _first(done: Completion, num: int) -> Completion:
    gone, experts = len(done.ids) - num, done.experts
    return replace(
        done, ids=done.ids[:num], logp=done.logp[:num], versions=done.versions[:num],
        experts=None if experts is None else experts[: len(experts) - gone],
        support=None if done.support is None else Support(*(x[:num] for x in done.support)),
    )  # fmt: skip


Key = tuple[int, int, int]


class Journal:
    """A `generate` that writes each completion to disk before it returns it, and replays completions it finds there.

    The key of a completion is the seed of its request, its context with its images, and all sampling parameters, so
    each request needs its own seed, as `rlkit.rollout` gives it. An aborted completion is continued from its last
    token, by `continued` (see `Pausable`). An environment that runs again after a crash gets the same turns as long as
    its contexts are the same; from the first different context (a search that returns another result), or under
    parameters that a resume has changed, it is sampled again.

    Files are `{folder}/{version}.jsonl` by the newest weights in a completion. On resume from weights `version`, later
    files are deleted, because those weights are lost; `forget` deletes files that are no longer needed.

    A replayed completion is bit-equal, including its log-probs. Other requests are batched differently than in an
    uninterrupted run, and may differ by rounding.
    """

    def __init__(
        self, folder: Path, generate: Generate, *, version: int = 0, continued: Continued | None = None
    ) -> None:
        self._folder, self._generate, self._continued = folder, generate, continued or continue_aborted
        self._known: dict[Key, Completion] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.jsonl"), key=_version):
            if _version(path) > version:
                path.unlink()
            else:
                self._read(path)

    async def generate(
        self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None, **options: Any
    ) -> Completion:
        """See `rlkit.types.Generate`."""
        images = "".join(image.digest for image in options.get("images", ()))
        replayed = False

        async def part(context: list[int], left: SamplingParams) -> Completion:
            nonlocal replayed
            key = _key(left, context, images)
            completion = self._known.pop(key, None)
            replayed = completion is not None
            if completion is not None:
                return completion
            out = await self._generate(context, params=left, rid=rid, **options)
            if out.ids:
                self._write(key, out)
            return out

        return await self._continued(part, prompt_ids, params, again=lambda: replayed)

    def forget(self, *, before: int) -> None:
        """Delete the files of versions before this one."""
        for path in self._folder.glob("*.jsonl"):
            if _version(path) < before:
                path.unlink()

    def _write(self, key: Key, out: Completion) -> None:
        row = asdict(replace(out, support=None))
        del row["support"]
        if (experts := row.pop("experts")) is not None:
            row["experts"] = _written(experts)
        if out.support is not None:
            row["support"] = [*map(_written, out.support)]
        line = (json.dumps({"key": key, **row}, separators=(",", ":")) + "\n").encode()
        fix = "Free space there and resume: completions that were written are not sampled again."
        with explain_full_disk("a completion", self._folder, needed=len(line), fix=fix):
            append_file(self._folder / f"{max(out.versions)}.jsonl", line)

    def _read(self, path: Path) -> None:
        """Read the completions of a file and remove a last line that a crash cut."""
        untrusted.check_file(path)
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            replace_file(path, whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                key = tuple(row.pop("key"))
                if "experts" in row:
                    row["experts"] = _read_array(row["experts"], np.int16)
                if "support" in row:
                    row["support"] = Support(*map(_read_array, row["support"], (np.int32, np.float32)))
                self._known[key] = Completion(**row)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
                fix = "delete the file, and its completions are sampled again"
                raise ValueError(f"{path}, line {number} is no completion ({error!r}): {fix}") from None


def _written(x: np.ndarray) -> list[Any]:
    return [*x.shape, base64.b64encode(x.tobytes()).decode()]


def _read_array(written: Sequence[Any], dtype: type) -> np.ndarray:
    *shape, data = written
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)


def _key(params: SamplingParams, prompt_ids: list[int], images: str) -> Key:
    if params.seed is None:
        raise ValueError("a journal identifies a request by its seed: set params.seed")
    asked = array("q", prompt_ids).tobytes() + f"{images}{replace(params, seed=None)}".encode()
    return params.seed, len(asked), zlib.crc32(asked)


def _version(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else -1


class Counts(NamedTuple):
    """Groups being sampled, and ready to be taken."""

    running: int
    ready: int


@dataclass(eq=False)
class _Entry:
    """A group started at weights `version` and not taken yet."""

    index: int
    version: int
    task: asyncio.Task[None] | None = None
    group: Group | None = None


class GroupStream:
    """Sample groups for the prompts `prompt_at(0), prompt_at(1), ...` in background tasks; `take` returns them.

        async with GroupStream(prompt_at, generate=engine.generate, abort=engine.abort, ...) as stream:
            for step in range(start, steps):
                stream.advance(version=step)
                groups = await stream.take()
                ...
                await engine.update_weights(..., version=step + 1)

    Dynamic sampling: a group that `keep` rejects is dropped and at once replaced by the next prompt. So with staleness
    0 the result of `take` does not depend on timing: it is the first `groups_per_step` groups that are kept, in the
    order of the prompts, and no further prompt was sampled.

    Args:
        prompt_at: a pure function from an index to a prompt.
        generate, abort: methods of the engine; see `rlkit.types.Engine`.
        groups_per_step: groups that `take` returns.
        seed: with index, sample and turn it fixes the noise of each request.
        staleness: steps by which a group may be older than the weights it trains. 0: sampling and training alternate.
            A fraction f starts `f * groups_per_step` more groups than a step needs.
        keep: whether to train on a group; see `rlkit.rollout.limits.success_between`.
        max_dropped: maximum number of groups dropped in one step (more is an error); None: 20 per group of a step.
        on_group: called with (prompt, group, step, kept) when a group has its rewards. `step` is the step in progress,
            not necessarily the one that trains on the group, so a checkpoint after a step contains no later one.
        journal: folder to which every completion is written at once; see `Journal`.
        continued: `continue_aborted` with what the engine needs; see `Pausable`.
        index_of: the index of the j-th prompt that is started, where several streams share the prompts; None: j.
        skip: whether to skip the prompt of an index; None: no prompt.
        version: version of the engine's current weights, which is also the number of steps taken so far.
        state: the `state` to resume from, of the same version.

    `take` raises the first error of a group; the others are cancelled. Leaving the `async with` pauses the requests in
    flight, so that their tokens reach the journal, and leaves no task behind.
    """

    def __init__(
        self,
        prompt_at: Callable[[int], Prompt],
        *,
        generate: Generate,
        abort: Callable[..., Awaitable[Any]],
        params: SamplingParams,
        group_size: int,
        groups_per_step: int,
        seed: int,
        staleness: float = 0.0,
        env: Env = single_turn,
        score: Score | None = None,
        keep: Callable[[Group], bool] | None = None,
        max_dropped: int | None = None,
        on_group: Callable[..., None] | None = None,
        journal: Path | None = None,
        continued: Continued | None = None,
        index_of: Callable[[int], int] | None = None,
        skip: Callable[[int], bool] | None = None,
        version: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if group_size < 1 or groups_per_step < 1 or not 0 <= staleness < math.inf:
            raise ValueError(f"{group_size=}, {groups_per_step=} must be at least 1 and {staleness=} at least 0")
        self._journal = None if journal is None else Journal(journal, generate, version=version, continued=continued)
        sampled = generate if self._journal is None else self._journal.generate
        self._pausable = Pausable(sampled, abort, continued=continued)
        self._sample = partial(
            seeded_group, generate=self._pausable.generate, params=params, group_size=group_size, env=env, score=score
        )
        self._prompt_at, self._keep, self._on_group = prompt_at, keep, on_group
        self._num, self._seed, self._staleness = groups_per_step, seed, staleness
        self._index_of, self._skip = index_of or (lambda j: j), skip or (lambda index: False)  # noqa: ARG005
        self._max_dropped = 20 * groups_per_step if max_dropped is None else max_dropped
        self._dropped = dict[int, float]()  # index -> success rate
        self.prompts: list[Prompt] = []
        self.outcomes: list[tuple[int, bool]] = []
        self.num_dropped = 0
        self._taken = self._version = version
        state = state or {"next": version * groups_per_step, "waiting": []}
        self._next: int = state["next"]
        self._entries = [_Entry(*waiting) for waiting in state["waiting"]]
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._closed = False

    async def __aenter__(self) -> GroupStream:
        for entry in self._entries:
            self._start(entry)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        try:
            with suppress(Exception):  # a dead or hanging engine has no tokens to save
                await asyncio.wait_for(self._pausable.pause(), timeout=10)
        finally:
            await cancel_all([entry.task for entry in self._entries if entry.task is not None])

    @property
    def state(self) -> dict[str, Any]:
        """The state to checkpoint, as JSON: the number of prompts started; (index, version) of each group not taken
        yet; and the oldest of those versions."""
        waiting = [[e.index, e.version] for e in self._entries]
        oldest = min((e.version for e in self._entries), default=self._taken)
        return {"next": self._next, "waiting": waiting, "oldest": oldest}

    @property
    def progress(self) -> Counts:
        """Current counts, for display."""
        ready = sum(e.group is not None for e in self._entries)
        return Counts(len(self._entries) - ready, ready)

    async def take(self) -> list[Group]:
        """The next `groups_per_step` groups, in the order they were started. A cancelled call loses none.

        Afterwards `prompts` are those of the groups, and `num_dropped` is the number of groups dropped since the last
        call. `outcomes` has the index of each of both, and whether it was kept and its rewards differ.
        """
        while (chosen := self._choice()) is None:
            if self._error is not None:
                raise self._error
            if all(e.group is not None for e in self._entries):
                raise RuntimeError("nothing is being sampled: call advance(version=...) once before each take")
            self._changed.clear()
            await self._changed.wait()
        self._entries = [e for e in self._entries if e not in chosen]
        self._taken += 1
        self.prompts = [self._prompt_at(e.index) for e in chosen]
        self.num_dropped = len(self._dropped)
        self.outcomes = [(e.index, varies(e.group or [])) for e in chosen] + [(i, False) for i in self._dropped]
        self._dropped.clear()
        return [e.group for e in chosen if e.group is not None]

    async def pause(self) -> None:
        """Stop sampling and keep every token until `advance`. The environments' own work is not interrupted."""
        await self._pausable.pause()

    def advance(self, *, version: int) -> None:
        """The engine has the weights of `version` now: end a pause and start the groups that the bound admits."""
        self._version = version
        self._pausable.resume()
        self._admit()

    def saved(self, state: Mapping[str, Any]) -> None:
        """`state` is saved in a checkpoint: delete journal files that a resume from it does not need."""
        if self._journal is not None:
            self._journal.forget(before=state["oldest"])

    def _choice(self) -> list[_Entry] | None:
        """The oldest ready groups, if there are enough and the groups passed over can still meet their bound."""
        chosen = [e for e in self._entries if e.group is not None][: self._num]
        if len(chosen) < self._num:
            return None
        if chosen == self._entries[: self._num]:
            return chosen
        left = [e for e in self._entries if e not in chosen]
        in_time = (
            self._taken + 1 + i // self._num <= e.version + math.ceil(self._staleness) for i, e in enumerate(left)
        )
        return chosen if all(in_time) else None

    def _admit(self) -> None:
        room = math.floor((self._version + 1 + self._staleness) * self._num + 1e-9) - self._taken * self._num
        while not self._closed and self._error is None and len(self._entries) < room:
            while self._skip(index := self._index_of(self._next)):
                self._next += 1
            entry = _Entry(index, self._version)
            self._entries.append(entry)
            self._next += 1
            self._start(entry)

    def _start(self, entry: _Entry) -> None:
        entry.task = asyncio.get_running_loop().create_task(self._run(entry), name=f"rlkit-group-{entry.index}")

    async def _run(self, entry: _Entry) -> None:
        try:
            prompt = self._prompt_at(entry.index)
            self._finish(entry, prompt, await self._sample(prompt, (self._seed, entry.index)))
        except Exception as error:
            self._error = self._error or error
        finally:
            self._changed.set()

    def _finish(self, entry: _Entry, prompt: Prompt, group: Group) -> None:
        if self._closed:  # the last checkpoint has it as waiting
            return
        keep = self._keep is None or self._keep(group)
        if self._on_group is not None:
            self._on_group(prompt, group, step=self._version + 1, kept=keep)
        if keep:
            entry.group = compact(group)
            return
        self._entries.remove(entry)
        self._dropped[entry.index] = success(group)
        if len(self._dropped) > self._max_dropped:
            raise NoSignal(self._explain())
        self._admit()

    def _explain(self) -> str:
        rates = [*self._dropped.values()]
        low, high, mean = min(rates), max(rates), sum(rates) / len(rates)
        return (
            f"{len(rates)} groups were dropped while sampling one step of {self._num} (`max_dropped` "
            f"{self._max_dropped}): their success rates are between {low:g} and {high:g}, {mean:.3g} on average; give "
            "prompts that are neither too hard nor too easy, more samples in a group, a wider range or a higher limit"
        )
