"""A completion that was interrupted or replayed from a journal equals the uninterrupted one."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ticking import Ticking

from rlkit.rollout.stream import Journal, Pausable, continue_aborted
from rlkit.types import Completion, SamplingParams

LETTERS = SimpleNamespace(decode=lambda ids, **_: "".join(chr(ord("a") + i) for i in ids))
GOES_ON = {"continued": partial(continue_aborted, tokenizer=LETTERS, positional_noise=True)}  # of `Ticking`
STOPS = st.lists(st.sampled_from(["cd", "efg", "nopq", "vwab"]), max_size=2, unique=True)


def params(seed, stop=(), limit=18):
    return SamplingParams(max_new_tokens=limit, seed=seed, stop=tuple(stop))


async def interrupted(pausable, calls, ticks, *, between=lambda: None):
    """Await `calls` while pausing after each number in `ticks` of event-loop turns."""
    work = asyncio.gather(*calls)
    for n in ticks:
        for _ in range(n):
            await asyncio.sleep(0)
        await pausable.pause()
        assert pausable.num_running == 0
        between()
        pausable.resume()
    return await work


@given(ticks=st.lists(st.integers(0, 7), max_size=6), stop=STOPS, limit=st.integers(1, 18))
def test_pauses_change_nothing(ticks, stop, limit):
    """Including a stop string that a pause cuts in two, which an engine alone would miss."""

    def go(ticks):
        engine = Ticking(length=lambda prompt, seed: 20)
        pausable = Pausable(engine.generate, engine.abort, **GOES_ON)
        calls = [pausable.generate([1] * n, params=params(n, stop, limit)) for n in range(1, 5)]
        return asyncio.run(interrupted(pausable, calls, ticks))

    assert go(ticks) == go([])


class Drawing:
    """An engine whose tokens are `draw(seed)`, one per turn of the event loop; id 25, "z", ends a completion."""

    def __init__(self, draw):
        self.draw, self.aborts = draw, 0

    async def generate(self, prompt_ids, *, params, rid=None):
        out, aborts, next_token = Completion([], [], [], "abort"), self.aborts, self.draw(params.seed)
        while aborts == self.aborts:
            out.ids.append(next_token())
            out.logp.append(0.0)
            out.versions.append(0)
            if out.ids[-1] == 25 or any(s in LETTERS.decode(out.ids) for s in params.stop):
                return replace(out, finish_reason="stop")
            if len(out.ids) == params.max_new_tokens:
                return replace(out, finish_reason="length")
            await asyncio.sleep(0)
        return out

    async def abort(self, rid=None):
        self.aborts += 1


@pytest.mark.parametrize("stop", [(), ("ab",), ("ab", "baa")])
def test_a_pause_keeps_the_distribution(stop):
    """Of an engine that ignores seeds: all sequences of draws of "a", "b", "z", paused after one token and two."""

    async def law(ticks):
        found = Counter()
        for draws in product((0, 1, 25), repeat=4):
            left = iter(draws)
            engine = Drawing(lambda _, left=left: lambda: next(left))
            pausable = Pausable(engine.generate, engine.abort, continued=partial(continue_aborted, tokenizer=LETTERS))
            calls = [pausable.generate([1], params=params(3, stop, limit=4))]
            (out,) = await interrupted(pausable, calls, ticks)
            found[LETTERS.decode(out.ids), out.finish_reason] += 1
        return found

    whole = asyncio.run(law([]))
    assert len(whole) > 10
    assert asyncio.run(law([2])) == whole
    assert asyncio.run(law([2, 2])) == whole


class Late(Drawing):
    """As SGLang's scheduler: a request that is aborted samples one more token, and ends as "abort" whatever that is."""

    async def generate(self, prompt_ids, *, params, rid=None):
        out, aborts, next_token = Completion([], [], [], "abort"), self.aborts, self.draw(params.seed)
        while True:
            out.ids.append(next_token())
            out.logp.append(0.0)
            out.versions.append(0)
            if aborts != self.aborts:
                return out
            if len(out.ids) == params.max_new_tokens:
                return replace(out, finish_reason="length")
            if out.ids[-1] in (24, *params.stop_token_ids) or any(s in LETTERS.decode(out.ids) for s in params.stop):
                return replace(out, finish_reason="stop")
            await asyncio.sleep(0)


@pytest.mark.parametrize("stop", [(), ("ab",)])
def test_an_abort_that_lands_on_an_end_is_that_end(stop):
    """All sequences of draws; "z" ends a completion by the request, "y" by the engine's own end."""
    ends = partial(continue_aborted, tokenizer=LETTERS, ends=(24, None))

    async def law(ticks):
        found = Counter()
        for draws in product((0, 1, 24, 25), repeat=4):
            left = iter(draws)
            engine = Late(lambda _, left=left: lambda: next(left))
            pausable = Pausable(engine.generate, engine.abort, continued=ends)
            asked = replace(params(3, stop, limit=4), stop_token_ids=(25,))
            (out,) = await interrupted(pausable, [pausable.generate([1], params=asked)], ticks)
            found[LETTERS.decode(out.ids), out.finish_reason if len(out.ids) < 4 else ""] += 1
        return found

    whole = asyncio.run(law([]))
    assert len(whole) > 10
    for ticks in ([1], [2], [3], [1, 1], [1, 2]):
        assert asyncio.run(law(ticks)) == whole


def test_a_continuation_has_noise_of_its_own():
    """With one generator per request, as in vLLM's first runner, the second token repeated the first one's noise."""

    async def pairs(n):
        engine = Drawing(lambda seed: partial(random.Random(seed).randrange, 4))
        pausable = Pausable(engine.generate, engine.abort)
        calls = [pausable.generate([1], params=params(i, limit=2)) for i in range(n)]
        return Counter(tuple(out.ids) for out in await interrupted(pausable, calls, [2]))

    found = asyncio.run(pairs(1600))
    assert len(found) == 16
    assert sum((num - 100) ** 2 / 100 for num in found.values()) < 45, "uniform: P(chi2 of 15 > 45) < 1e-4"


@given(ticks=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_versions_are_of_the_weights_that_sampled(ticks):
    async def go():
        engine = Ticking(length=lambda prompt, seed: 20)
        pausable = Pausable(engine.generate, engine.abort)
        made = []

        def next_version():
            made.append(engine.num_tokens)
            engine.version += 1

        (out,) = await interrupted(pausable, [pausable.generate([1], params=params(3))], ticks, between=next_version)
        return engine, made, out

    engine, made, out = asyncio.run(go())
    assert out.versions == [sum(i >= m for m in made) for i in range(len(out.ids))]
    assert engine.num_tokens == len(out.ids), "no token is sampled twice"


def test_no_call_runs_between_two_pauses():
    async def go():
        engine = Ticking(length=lambda prompt, seed: 20)
        pausable = Pausable(engine.generate, engine.abort)
        await pausable.pause()
        call = asyncio.create_task(pausable.generate([1], params=params(3)))
        await asyncio.sleep(0)
        pausable.resume()
        await pausable.pause()
        for _ in range(9):
            await asyncio.sleep(0)
        assert engine.calls == []
        pausable.resume()
        return await call

    assert len(asyncio.run(go()).ids) == 18


def test_an_abort_by_another_caller_is_returned():
    async def go():
        engine = Ticking(length=lambda prompt, seed: 20)
        pausable = Pausable(engine.generate, engine.abort)
        call = asyncio.create_task(pausable.generate([1], params=params(3)))
        for _ in range(5):
            await asyncio.sleep(0)
        await engine.abort()
        return await call

    out = asyncio.run(go())
    assert out.finish_reason == "abort"
    assert 0 < len(out.ids) < 18


def test_a_pause_reaches_requests_in_transit():
    """A server has not yet seen a request that was just sent: the abort is repeated until none is left."""

    async def go():
        engine = Ticking(length=lambda prompt, seed: 10**6)

        async def late(prompt_ids, *, params, rid=None):
            await asyncio.sleep(0.05)
            return await engine.generate(prompt_ids, params=params, rid=rid)

        pausable = Pausable(late, engine.abort)
        call = asyncio.create_task(pausable.generate([1], params=params(3, limit=10**6)))
        await asyncio.sleep(0)
        await pausable.pause()
        assert engine.running == 0
        call.cancel()

    asyncio.run(asyncio.wait_for(go(), 240))


@given(ticks=st.integers(0, 40), stop=STOPS)
def test_completions_from_before_a_crash_are_replayed(tmp_path_factory, ticks, stop):
    folder = tmp_path_factory.mktemp("journal")
    shape = {"length": lambda prompt, seed: 20, "delay": lambda prompt: len(prompt) * 4}

    async def all_of(generate):
        return await asyncio.gather(*(generate([1] * n, params=params(n, stop)) for n in range(1, 5)))

    async def crash():
        engine = Ticking(**shape)
        journal = Journal(folder, engine.generate, **GOES_ON)
        pausable = Pausable(journal.generate, engine.abort, **GOES_ON)
        call = asyncio.create_task(all_of(pausable.generate))
        for _ in range(ticks):
            await asyncio.sleep(0)
        await pausable.pause()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return engine.num_tokens

    expected = asyncio.run(all_of(Ticking(**shape).generate))
    before = asyncio.run(crash())
    engine = Ticking(**shape)
    assert asyncio.run(all_of(Journal(folder, engine.generate, **GOES_ON).generate)) == expected
    assert before + engine.num_tokens >= sum(len(c.ids) for c in expected)
    if not stop:
        assert before + engine.num_tokens == sum(len(c.ids) for c in expected), "no token is sampled twice"
    again = Ticking(**shape)
    assert asyncio.run(all_of(Journal(folder, again.generate, **GOES_ON).generate)) == expected
    assert again.calls == [], "now everything is in the journal"


def test_a_journal_replays_only_the_same_request(tmp_path):
    def ask(prompt, seed, *images):
        engine = Ticking(length=lambda prompt, seed: 9)

        async def generate(prompt_ids, *, images=(), **more):
            return await engine.generate(prompt_ids, **more)

        shown = {"images": [SimpleNamespace(digest=x) for x in images]} if images else {}
        out = asyncio.run(Journal(tmp_path, generate).generate(prompt, params=params(seed), **shown))
        return out, bool(engine.calls)

    first, asked = ask([1, 2], 5)
    assert asked
    assert ask([1, 2], 5) == (first, False)
    assert ask([2, 1], 5)[1]
    assert ask([1, 2], 6)[1]
    assert ask([1, 2], 5, "a")[1]
    assert ask([1, 2], 5, "b")[1]
    assert not ask([1, 2], 5, "a")[1]
    with pytest.raises(ValueError, match=r"params\.seed"):
        ask([1], None)


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.7}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"max_new_tokens": 9}, {"stop": ("cd",)},
     {"stop_token_ids": (4,)}],
)  # fmt: skip
def test_a_resume_with_other_sampling_samples_again(tmp_path, change):
    """They were replayed, and trained as samples of the new temperature or limit."""
    shape = {"length": lambda prompt, seed: 30}
    crashed, engine = Ticking(**shape), Ticking(**shape)

    async def crash():
        pausable = Pausable(Journal(tmp_path, crashed.generate, **GOES_ON).generate, crashed.abort, **GOES_ON)
        (out,) = await interrupted(pausable, [pausable.generate([1], params=params(3))], [4, 4])
        assert len(crashed.calls) == 3
        return out

    async def resume(asked):
        return await Journal(tmp_path, engine.generate, **GOES_ON).generate([1], params=asked)

    out = asyncio.run(crash())
    asyncio.run(resume(replace(params(3), **change)))
    assert [call[0] for call in engine.calls] == [(1,)]
    assert asyncio.run(resume(params(3))) == out
    assert len(engine.calls) == 1, "all parts of the completion are replayed, each under its own limit"


def test_completions_of_lost_weights_are_deleted(tmp_path):
    engine = Ticking(length=lambda prompt, seed: 9)
    journal = Journal(tmp_path, engine.generate)
    for engine.version in range(4):
        asyncio.run(journal.generate([engine.version], params=params(1)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl"]
    engine.calls.clear()
    journal = Journal(tmp_path, engine.generate, version=2)
    journal.forget(before=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.jsonl", "2.jsonl"]
    for version in range(4):
        asyncio.run(journal.generate([version], params=params(1)))
    assert [c[0] for c in engine.calls] == [(3,)], "0 had been read before it was deleted"


def test_a_cut_line_is_ignored(tmp_path):
    engine = Ticking(length=lambda prompt, seed: 9)
    journal = Journal(tmp_path, engine.generate)
    for seed in (1, 2):
        asyncio.run(journal.generate([7], params=params(seed)))
    path = tmp_path / "0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    engine.calls.clear()
    journal = Journal(tmp_path, engine.generate)
    for seed in (1, 2):
        asyncio.run(journal.generate([7], params=params(seed)))
    assert [seed for _, seed, _ in engine.calls] == [2]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2
