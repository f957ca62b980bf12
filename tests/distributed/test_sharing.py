"""One or several ranks sample, and every rank gets all groups: the same ones as in one process."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import nightly
import pytest

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.launch import load_policy
from rlkit.model.weights import stream_weights
from rlkit.rollout import rollout
from rlkit.rollout.engines import EngineError
from rlkit.rollout.engines.sglang import FromDisk, SGLang
from rlkit.rollout.shared import Share, SharedEngine, SharedStream, from_first, shared_rollout, state_of
from rlkit.rollout.stream import GroupStream, continue_aborted
from rlkit.settings import ParallelArgs
from rlkit.testing import FakeEngine
from rlkit.types import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from lora_server import LoraServer, serving

PARAMS = SamplingParams(max_new_tokens=5)
OPTIONS = {"params": PARAMS, "group_size": 2, "seed": 3}


def silent(*_, **__):
    """`on_group`."""


def prompt_at(index):
    return Prompt([1 + index % 7, 2 + index], {"question": str(index)}, index)


async def by_place(prompt, group):
    """Every fourth prompt is dropped by `some`."""
    return [replace(t, reward=float(prompt.index)) for t in group]


def some(group):
    return group[0].reward % 4 != 1


def keys(groups):
    """What identifies the groups: each trajectory's context, tokens and versions."""
    return [[(*map(list, (t.prompt_ids, t.ids, t.versions)), t.reward) for t in group] for group in groups]


async def alone(steps, num, **options):
    """What one process takes, and the stream's state after that."""
    engine, taken = FakeEngine(), []
    stream = GroupStream(
        prompt_at, generate=engine.generate, abort=engine.abort, groups_per_step=num, score=by_place,
        continued=partial(continue_aborted, positional_noise=True), **OPTIONS | options,
    )  # fmt: skip
    async with stream:
        for step in range(steps):
            await engine.update_weights(version=step)
            stream.advance(version=step)
            taken.append(keys(await stream.take()))
            state = stream.state
    return taken, state


async def taken_on_rank(rank, samplers, num, steps, on_group, **options):
    engine = SharedEngine(FakeEngine() if rank in samplers else None, samplers=samplers)
    taken = []
    shared = SharedStream(
        prompt_at, engine=engine, groups_per_step=num, on_group=on_group, score=by_place, **OPTIONS | options
    )
    async with shared as stream:
        for step in steps:
            await engine.update_weights([], version=step)
            stream.advance(version=step)
            taken.append(keys(await stream.take()))
        return taken, [p.index for p in stream.prompts], stream.num_dropped, tuple(stream.progress), stream.state


def share_on_rank(rank, world, samplers, num, steps, options):
    written = []
    note = lambda prompt, group, *, step, kept: written.append((prompt.index, kept))
    return *asyncio.run(taken_on_rank(rank, samplers, num, range(steps), note, **options)), written


@pytest.mark.slow_cases("2-samplers0")
@pytest.mark.parametrize("samplers", [(0,), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("num", [2, 6])
def test_samplers_take_together_what_one_process_takes(ranks, samplers, num):
    true, state = asyncio.run(alone(3, num))
    for taken, prompts, num_dropped, progress, ended, written in ranks.run(share_on_rank, samplers, num, 3, {}):
        assert taken == true
        assert (prompts, num_dropped, progress) == ([*range(2 * num, 3 * num)], 0, (0, 0))
        used = min(len(samplers), num)
        shares = [Share.of(k, used, num).size for k in range(used)]
        assert [x["next"] for x in ended.get("samplers", [ended])] == [3 * size for size in shares]
        assert len(samplers) > 1 or ended == state
        assert all(kept for _, kept in written)


def test_each_sampler_replaces_what_it_drops_and_rank_0_hears_of_all(ranks):
    found = ranks.run(share_on_rank, (0, 2), 4, 3, {"keep": some})
    taken, _, _, _, state, written = found[0]
    assert all(other[:5] == found[0][:5] for other in found)
    indices = [int(group[0][3]) for step in taken for group in step]
    assert len(set(indices)) == len(indices) == 12, "no prompt twice"
    assert all(i % 4 != 1 for i in indices)
    dropped = sorted(i for i, kept in written if not kept)
    began = {Share.of(k, 2, 4).place(j) for k in range(2) for j in range(state["samplers"][k]["next"])}
    assert began == {*indices, *dropped}
    assert dropped


def resume_on_rank(rank, world, samplers, num, state, first):
    return asyncio.run(taken_on_rank(rank, samplers, num, [first], silent, version=first, state=state))[0][0]


@pytest.mark.slow_cases("after0-before0", "after1-before0", "after1-before1", "after2-before1")
@pytest.mark.parametrize("before", [(0,), (0, 2)])
@pytest.mark.parametrize("after", [(0,), (0, 2), (0, 1, 3)])
def test_a_run_goes_on_with_another_number_of_samplers(ranks, before, after):
    true, _ = asyncio.run(alone(3, 6))
    state = ranks.run(share_on_rank, before, 6, 2, {})[0][4]
    assert ranks.run(resume_on_rank, after, 6, json.loads(json.dumps(state)), 2) == [true[2]] * 4


@pytest.mark.parametrize("samplers", [1, 2, 3])
def test_resuming_elsewhere_takes_over_the_groups_in_flight(samplers):
    saved = {"samplers": [{"next": 5, "waiting": [[9, 2], [12, 2]]}, {"next": 4, "waiting": [[10, 2]]}]}
    states = [state_of(saved, k=k, samplers=samplers, num=4) for k in range(samplers)]
    waiting = [entry for state in states for entry in state["waiting"]]
    assert sorted(waiting) == [[9, 2], [10, 2], [12, 2]]
    if samplers != 2:  # prompts 0 to 11 were begun by at least one, of three steps
        nexts = [Share.of(k, samplers, 4).place(state["next"]) for k, state in enumerate(states)]
        assert min(nexts) == 12


def fail_on_rank(rank, world, samplers, failing, kind):
    async def score(prompt, group):
        if rank == failing:
            raise EngineError("the engine is gone") if kind == "engine" else ValueError("no more prompts")
        return group

    async def run():
        engine = SharedEngine(FakeEngine() if rank in samplers else None, samplers=samplers)
        stream = SharedStream(prompt_at, engine=engine, groups_per_step=4, on_group=silent, score=score, **OPTIONS)
        async with stream:
            stream.advance(version=0)
            await stream.take()

    try:
        asyncio.run(run())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("kind", "says"), [("engine", "EngineError: the engine is gone"), ("", "no more prompts")])
@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_a_sampler_is_raised_everywhere(ranks, kind, says, failing):
    found = ranks.run(fail_on_rank, (0, 2), failing, kind)
    assert all(says in message for message in found)
    assert all(kind or f"rank {failing}" in message for i, message in enumerate(found) if i != failing)


def rollout_on_rank(rank, world, samplers, prompts):
    reported = []
    engine = SharedEngine(FakeEngine() if rank in samplers else None, samplers=samplers)
    groups = asyncio.run(
        shared_rollout(
            [prompt_at(i) for i in range(prompts)], engine=engine, generate=engine.generate,
            on_group=lambda prompt, group: reported.append(prompt.index), **OPTIONS,
        )
    )  # fmt: skip
    return keys(groups), sorted(reported)


@pytest.mark.parametrize("prompts", [1, 5])
def test_held_out_prompts_are_shared_and_come_back_in_order(ranks, prompts):
    true = rollout([prompt_at(i) for i in range(prompts)], generate=FakeEngine().generate, **OPTIONS)
    true = keys(asyncio.run(true))
    found = ranks.run(rollout_on_rank, (0, 2), prompts)
    assert [groups for groups, _ in found] == [true] * 4
    reported = [indices for _, indices in found]
    assert reported == [[*range(prompts)], [], [*range(1, prompts, 2)], []], (
        "each where it was sampled, and all on rank 0"
    )


class Forgetful(FakeEngine):
    """Loses its weights at the first request after an update to version 1, as a server that was restarted."""

    def __init__(self):
        super().__init__()
        self._lost, self._back = asyncio.Event(), asyncio.Event()
        self.updates = []

    async def generate(self, prompt_ids, **options):
        if self.version == 1 and self.updates == [1]:
            self._lost.set()
            await self._back.wait()
        return await super().generate(prompt_ids, **options)

    async def lost(self):
        await self._lost.wait()

    async def update_weights(self, weights=(), *, version):
        await super().update_weights(version=version)
        self.updates.append(version)
        if self._lost.is_set():
            self._lost.clear()
            self._back.set()


def forget_on_rank(rank, world, samplers, losing):
    async def run():
        real = Forgetful() if rank == losing else FakeEngine() if rank in samplers else None
        engine = SharedEngine(real, samplers=samplers)
        sent = []

        async def send():
            sent.append(1)
            await engine.update_weights(iter([]), version=1)

        stream = SharedStream(
            prompt_at, engine=engine, groups_per_step=4, on_group=silent, score=by_place, version=1, **OPTIONS
        )
        async with stream:
            await send()
            stream.advance(version=1)
            return keys(await stream.take(send)), sent

    return asyncio.run(run())


@pytest.mark.parametrize("losing", [0, 2])
def test_all_ranks_send_the_weights_again_to_a_sampler_that_lost_them(ranks, losing):
    async def true():
        engine = FakeEngine()
        await engine.update_weights(version=1)
        prompts = [prompt_at(i) for i in range(4, 8)]
        return keys(await rollout(prompts, generate=engine.generate, score=by_place, indices=range(4, 8), **OPTIONS))

    expected = asyncio.run(true())
    assert ranks.run(forget_on_rank, (0, 2), losing) == [(expected, [1, 1])] * 4


def first_on_rank(rank, world):
    async def work():
        return f"from rank {rank}"

    return asyncio.run(from_first(work))


def test_the_first_rank_works_for_all(ranks):
    assert ranks.run(first_on_rank) == ["from rank 0"] * 4


WHOLE = ["/pause_generation", "/update_weights_from_disk", "/flush_cache"]
ADAPTER = ["/load_lora_adapter", "/update_weight_version"]
AGAIN = ["/unload_lora_adapter", *ADAPTER]
AGREED = {  # the servers of ranks 0 and 2, and what each of them gets in two updates
    "adapter": ({}, {}, [*ADAPTER, *AGAIN]),
    "base": ({}, {"version": "5"}, [*WHOLE, *ADAPTER, *AGAIN]),
    "merged": ({"version": "5"}, {"rank": 0}, [*WHOLE, *WHOLE]),
}


def adapter_on_rank(rank, world, folder, sizes, fakes):
    """What the server of this rank, if any, was asked, and the bytes that the rank has read, of two updates."""
    model = load_policy(folder, ParallelArgs(**sizes), lora_rank=4)

    async def run():
        fake = LoraServer(str(folder))
        vars(fake).update(fakes.get(rank, {}))
        async with serving(fake) as server:
            transport = FromDisk(folder / f"weights_{rank}")
            real = SGLang(server.url, transport=transport) if rank in fakes else None
            engine, num_bytes = SharedEngine(real, samplers=[*fakes]), []
            for version in (0, 1):
                weights = stream_weights(model)
                await engine.update_weights(weights, version=version)
                num_bytes.append(weights.num_bytes)
            await engine.close()
            return server.seen, num_bytes

    return asyncio.run(run())


@pytest.mark.slow_cases("adapter-sizes1", "base-sizes1")
@pytest.mark.parametrize("sizes", nightly.only([{"shard": 4}, {"pp": 2}], {"pp": 2}))
@pytest.mark.parametrize("form", AGREED)
def test_samplers_send_a_lora_model_in_the_form_that_all_their_servers_take(ranks, tmp_path, form, sizes):
    """And every rank reads all of it: gathering involves all ranks."""
    pytest.importorskip("peft")
    first, second, expected = AGREED[form]
    model = tiny_model(tiny_tokenizer(), hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    model.save_pretrained(tmp_path)
    found = ranks.run(adapter_on_rank, tmp_path, sizes, {0: first, 2: second})
    assert [seen for seen, _ in found] == [expected, [], expected, []]
    whole = sum(x.nbytes for x in model.parameters())
    adapter = 4 * sum(4 * sum(x.shape) for name, x in model.named_parameters() if "proj" in name)
    num = {"adapter": [adapter, adapter], "base": [whole + adapter, adapter], "merged": [whole, whole]}[form]
    assert all(num_bytes == num for _, num_bytes in found)
