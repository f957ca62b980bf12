"""LocalEngine: when requests stop, what they return, and that no request or task is lost or left behind."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys

import pytest
import torch
import transformers as hf

from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.local import LocalEngine
from rlkit.types import Progress, SamplingParams

VOCAB = 23
EOS = 0


def build(**changes) -> hf.Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes | changes))


@pytest.fixture(scope="module")
def model():
    return build()


class Counting:
    """A decoder whose greedy continuation counts up from the last token read, modulo the vocabulary."""

    keeps_states = False

    def experts(self, slot, length):
        return None

    def __init__(self):
        self.sizes = list(range(1, 65))
        self.prefilled, self.steps, self.error = [], 0, None

    def reserve(self, rows, length, *, keep):
        pass

    def prefill(self, prompts, slots):
        self.prefilled += [list(p) for p in prompts]

    def copy(self, sources, targets, length):
        pass

    def decode(self, tokens, positions):
        self.steps += 1
        if self.error is not None:
            raise self.error
        return 50.0 * torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()

    def refresh(self):
        pass

    def release(self, *, whole=False):
        pass


class Letters:
    """Token i is the letter a + i."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("a") + i) for i in ids)


def counting(model, **changes) -> LocalEngine:
    engine = LocalEngine(model, **{"tokenizer": Letters(), "eos_token_ids": ()} | changes)
    engine._decoder = Counting()
    return engine


def one(engine: LocalEngine, prompt: list[int], **params):
    return asyncio.run(engine.generate(prompt, params=SamplingParams(temperature=0.0, **params)))


def many(engine: LocalEngine, prompts: list[list[int]], **params):
    async def go():
        calls = (engine.generate(p, params=SamplingParams(seed=i, **params)) for i, p in enumerate(prompts))
        return await asyncio.gather(*calls)

    return asyncio.run(go())


def test_stops_at_max_new_tokens(model):
    out = one(counting(model), [3], max_new_tokens=4)
    assert (out.ids, out.finish_reason, out.versions) == ([4, 5, 6, 7], "length", [0] * 4)
    assert out.logp == pytest.approx([0.0] * 4, abs=1e-6)


def test_stops_at_the_context_limit(model):
    engine = counting(model, max_len=10)
    out = one(engine, [1, 2, 3], max_new_tokens=50)
    assert (out.ids, out.finish_reason) == ([4, 5, 6, 7, 8, 9, 10], "length")
    assert len(one(engine, [1] * 9, max_new_tokens=50).ids) == 1


def test_a_stop_token_is_part_of_the_completion_and_wins_over_length(model):
    out = one(counting(model), [3], max_new_tokens=4, stop_token_ids=(19, 7))
    assert (out.ids, out.finish_reason) == ([4, 5, 6, 7], "stop")
    assert (
        one(counting(model), [3], max_new_tokens=4, stop_token_ids=(3,)).finish_reason == "length"
    )  # the prompt is not


def test_the_models_eos_stops_unless_told_otherwise(model):
    assert one(counting(model, eos_token_ids=None), [20], max_new_tokens=9).ids == [21, 22, EOS]
    assert len(one(counting(model, eos_token_ids=()), [20], max_new_tokens=9).ids) == 9
    assert one(counting(model, eos_token_ids=(5, 2)), [20], max_new_tokens=9).ids == [21, 22, 0, 1, 2]


def test_a_stop_string_ends_the_completion_with_its_tokens(model):
    out = one(counting(model), [3], max_new_tokens=9, stop=("xyz", "gh"))
    assert (out.ids, out.finish_reason) == ([4, 5, 6, 7], "stop")  # e f g h
    assert (
        one(counting(model), [3, 4], max_new_tokens=3, stop=("ef",)).finish_reason == "length"
    )  # begins in the prompt


def test_each_request_of_a_batch_has_its_own_stop_rule(model):
    async def go(engine):
        rules = [
            {"max_new_tokens": 3},
            {"stop_token_ids": (9,)},
            {"stop": ("fg",)},
            {"stop_token_ids": (6, 30), "stop": ("hi",)},
            {"max_new_tokens": 1},
        ]
        params = [SamplingParams(**{"temperature": 0.0, "max_new_tokens": 40} | r) for r in rules]
        return await asyncio.gather(*(engine.generate([3], params=p) for p in params))

    for max_batch in (1, 2, 5):
        out = asyncio.run(go(counting(model, max_batch=max_batch)))
        assert [c.ids[-1] for c in out] == [6, 9, 6, 6, 4]
        assert [c.finish_reason for c in out] == ["length", "stop", "stop", "stop", "length"]
        assert all(c.ids == list(range(4, 4 + len(c.ids))) for c in out)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt_ids must hold 1 to 63 tokens .* got 0"),
        ([1] * 64, {}, "prompt_ids must hold 1 to 63 tokens .* got 64: shorten it or raise max_len"),
        ([1], {"stop": ("a",)}, "stop strings need .*tokenizer"),
    ],
)
def test_invalid_requests_are_refused(model, prompt, params, message):
    engine = LocalEngine(model)
    with pytest.raises(ValueError, match=message):
        one(engine, prompt, **params)
    assert engine.progress == Progress(0, 0, 0)


@pytest.mark.parametrize(("max_len", "why"), [(1, "must be at least 2"), (65, "and the model has 64 positions")])
def test_a_max_len_that_the_model_cannot_serve_is_refused(model, max_len, why):
    with pytest.raises(ValueError, match=f"max_len .*{why}"):
        LocalEngine(model, max_len=max_len)


def test_a_request_samples_the_same_tokens_alone_and_among_others(model):
    prompts = [[1 + i % 7] * (1 + i % 11) for i in range(40)]
    params = {"max_new_tokens": 20, "temperature": 1.3, "top_p": 0.95}
    crowd = many(LocalEngine(model, max_batch=16), prompts, **params)
    for i in range(0, 40, 3):
        alone = asyncio.run(
            LocalEngine(model, max_batch=16).generate(prompts[i], params=SamplingParams(seed=i, **params))
        )
        assert alone.ids == crowd[i].ids
        assert alone.logp == pytest.approx(crowd[i].logp, abs=2e-5)


def test_two_runs_give_the_same_bits(model):
    def run():
        engine = LocalEngine(model, max_batch=8, seed=5)

        async def go():
            params = [SamplingParams(max_new_tokens=3 + i % 13, seed=i if i % 2 else None) for i in range(30)]
            return await asyncio.gather(*(engine.generate([1, 2, i % 5], params=p) for i, p in enumerate(params)))

        return asyncio.run(go())

    assert run() == run()


def test_requests_without_a_seed_differ_and_follow_the_engines_seed(model):
    params = SamplingParams(max_new_tokens=12)

    def run(seed):
        engine = LocalEngine(model, seed=seed, eos_token_ids=())

        async def go():
            return await asyncio.gather(*(engine.generate([1], params=params) for _ in range(3)))

        return [c.ids for c in asyncio.run(go())]

    assert len({tuple(ids) for ids in run(0)}) == 3
    assert run(0) == run(0) != run(1)


def test_sampled_frequencies_are_the_models_probabilities(model):
    engine = LocalEngine(model, max_batch=256, eos_token_ids=())
    n = 4096
    out = many(engine, [[4, 2]] * n, max_new_tokens=1, temperature=0.9)
    with torch.no_grad():
        p = (model(input_ids=torch.tensor([[4, 2]])).logits[0, -1].double() / 0.9).softmax(-1)
    counts = torch.bincount(torch.tensor([c.ids[0] for c in out]), minlength=VOCAB)
    chi2 = float(((counts - n * p) ** 2 / (n * p)).sum())
    assert chi2 < VOCAB - 1 + 5 * (2 * (VOCAB - 1)) ** 0.5


@pytest.mark.slow
def test_equal_prompts_are_read_once_and_change_nothing(model):
    engine = LocalEngine(model, max_batch=6, eos_token_ids=())
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6]]
    calls, prefill = [], engine._decoder.prefill
    engine._decoder.prefill = lambda p, slots: (calls.extend(map(tuple, p)), prefill(p, slots))
    params = [SamplingParams(seed=i, max_new_tokens=6 + i % 4) for i in range(12)]

    async def go():
        return await asyncio.gather(*(engine.generate(prompts[i // 4], params=p) for i, p in enumerate(params)))

    together = asyncio.run(go())
    assert sorted(calls) == [(3, 1, 4, 1), (9,)]  # the last token of a prompt is read by the first step
    for i, completion in enumerate(together):
        alone = LocalEngine(model, max_batch=6, eos_token_ids=())
        single = asyncio.run(alone.generate(prompts[i // 4], params=params[i]))
        assert single.ids == completion.ids
        assert single.logp == pytest.approx(completion.logp, abs=1e-5)


def test_the_first_token_of_a_group_takes_one_row_of_each_prompt(model):
    engine = counting(model, max_batch=12)
    sizes, decode = [], engine._decoder.decode
    engine._decoder.decode = lambda tokens, positions: (sizes.append(len(tokens)), decode(tokens, positions))[1]
    out = many(engine, [[3, 4], [7], [9, 2, 1]] * 4, max_new_tokens=3)
    assert sizes == [3, 12, 12]
    assert [c.ids for c in out] == [[5, 6, 7], [8, 9, 10], [2, 3, 4]] * 4


def test_a_later_equal_prompt_shares_the_running_cache_but_not_across_an_update(model):
    async def go(engine, update):
        params = SamplingParams(max_new_tokens=20, temperature=0.0)
        first = asyncio.create_task(engine.generate([3, 4, 5], params=params))
        for _ in range(6):
            await asyncio.sleep(0)
        if update:
            await engine.update_weights(version=1)
        second = await engine.generate([3, 4, 5], params=params)
        return await first, second

    for update, reads in ((False, 1), (True, 2)):
        engine = counting(model)
        first, second = asyncio.run(go(engine, update))
        assert first.ids == second.ids
        assert engine._decoder.prefilled == [[3, 4]] * reads


def test_versions_are_stamped_per_token(model):
    async def go(engine):
        params = SamplingParams(max_new_tokens=10, temperature=0.0)
        running = asyncio.create_task(engine.generate([3], params=params, rid="a"))
        waiting = asyncio.create_task(engine.generate([3], params=params))
        for version in (4, 7):
            while len(engine._rows) == 0 or len(engine._rows.requests[0].ids) < version - 2:
                await asyncio.sleep(0)
            await engine.update_weights(version=version)
        return await running, await waiting

    running, waiting = asyncio.run(go(counting(model, max_batch=1)))
    assert running.versions == [0] * 2 + [4] * 3 + [7] * 5
    assert waiting.versions == [7] * 10


def test_abort_returns_the_tokens_so_far_and_a_continuation_draws_the_same_noise(model):
    params = SamplingParams(max_new_tokens=30, seed=11, temperature=1.2)
    whole = asyncio.run(LocalEngine(model, eos_token_ids=()).generate([1, 2], params=params))

    async def go(engine):
        task = asyncio.create_task(engine.generate([1, 2], params=params, rid="x"))
        others = [asyncio.create_task(engine.generate([5], params=SamplingParams(max_new_tokens=30, seed=1)))]
        while engine.progress.num_tokens < 20:
            await asyncio.sleep(0)
        assert await engine.abort("nobody") == 0
        assert await engine.abort("x") == 1
        part = await task
        rest = await engine.generate(
            [1, 2, *part.ids], params=SamplingParams(max_new_tokens=30 - len(part.ids), seed=11, temperature=1.2)
        )
        return part, rest, await others[0]

    part, rest, other = asyncio.run(go(LocalEngine(model, eos_token_ids=())))
    assert part.finish_reason == "abort"
    assert 0 < len(part.ids) == len(part.logp) == len(part.versions) < 30
    assert part.ids + rest.ids == whole.ids
    assert len(other.ids) == 30


def test_abort_of_everything_reaches_waiting_requests_too(model):
    async def go(engine):
        params = SamplingParams(max_new_tokens=50, temperature=0.0)
        tasks = [asyncio.create_task(engine.generate([i], params=params)) for i in range(5)]
        for _ in range(4):
            await asyncio.sleep(0)
        assert engine.progress[:2] == (2, 3)
        assert await engine.abort() == 5
        assert engine.progress[:2] == (0, 0)
        return await asyncio.gather(*tasks)

    out = asyncio.run(go(counting(model, max_batch=2)))
    assert [c.finish_reason for c in out] == ["abort"] * 5
    assert [bool(c.ids) for c in out] == [True] * 2 + [False] * 3
    assert all(c.ids == c.logp == c.versions == [] for c in out[2:])


def test_a_cancelled_caller_frees_its_row_and_disturbs_nobody(model):
    async def go(engine):
        params = SamplingParams(max_new_tokens=12, temperature=0.0)
        tasks = [asyncio.create_task(engine.generate([i], params=params)) for i in range(4)]
        for _ in range(5):
            await asyncio.sleep(0)
        tasks[0].cancel()  # running
        tasks[3].cancel()  # waiting
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.progress[:2] == (0, 0)
        return done

    out = asyncio.run(go(counting(model, max_batch=2)))
    assert [isinstance(c, asyncio.CancelledError) for c in out] == [True, False, False, True]
    assert [c.ids for c in out[1:3]] == [list(range(i + 1, i + 13)) for i in (1, 2)]


def test_an_error_in_a_step_reaches_every_caller_and_the_engine_recovers(model):
    async def go(engine):
        params = SamplingParams(max_new_tokens=5, temperature=0.0)
        engine._decoder.error = RuntimeError("out of memory")
        out = await asyncio.gather(*(engine.generate([i], params=params) for i in range(5)), return_exceptions=True)
        assert [str(e) for e in out] == ["out of memory"] * 5
        assert engine.progress == Progress(0, 0, 0)
        engine._decoder.error = None
        return await engine.generate([3], params=params)

    assert asyncio.run(go(counting(model, max_batch=2))).ids == [4, 5, 6, 7, 8]


def test_non_finite_logits_are_an_error():
    model = build()
    engine = LocalEngine(model)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        one(engine, [1], max_new_tokens=3)
    with torch.no_grad():
        model.lm_head.weight[3] = 0.0
    assert len(one(LocalEngine(model, eos_token_ids=()), [1], max_new_tokens=3).ids) == 3


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_error_leaves_nothing_that_is_not_finite_in_the_cache(dtype):
    model = build()
    engine = LocalEngine(model, dtype=dtype, eos_token_ids=())
    first = one(engine, [1] * 30, max_new_tokens=3, seed=1)
    weight = model.model.layers[0].self_attn.v_proj.weight
    right = weight.detach().clone()
    for value in (torch.full_like(right, torch.nan), right):
        weight.data.copy_(value)
        asyncio.run(engine.update_weights(stream_weights(model), version=1))
        if value is not right:
            with pytest.raises(FloatingPointError, match="not finite"):
                one(engine, [1] * 30, max_new_tokens=3)
    assert one(engine, [2] * 5, max_new_tokens=3, seed=1).ids
    assert one(engine, [1] * 30, max_new_tokens=3, seed=1).ids == first.ids


def test_one_engine_serves_one_event_loop_after_another(model):
    engine = LocalEngine(model, max_batch=4, eos_token_ids=())
    prompts = [[1], [2, 3], [1], [4] * 7, [5]]
    first = many(engine, prompts, max_new_tokens=7)

    async def interrupted():
        tasks = [asyncio.create_task(engine.generate(p, params=SamplingParams(max_new_tokens=50))) for p in prompts]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == len(tasks) + 2  # the callers, the driver and this one

    asyncio.run(interrupted())  # ends with requests in flight
    assert engine.progress[:2] == (0, 0)

    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.generate([1], params=SamplingParams(max_new_tokens=50)))
    loop.run_until_complete(asyncio.sleep(0))
    assert not task.done()
    assert sum(engine.progress[:2]) == 1
    abandoned = asyncio.all_tasks(loop)  # the loop is left without being closed
    assert many(engine, prompts, max_new_tokens=7) == first
    for task in abandoned:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*abandoned, return_exceptions=True))
    loop.close()
    assert many(engine, prompts, max_new_tokens=7) == first


def test_an_idle_engine_has_no_task(model):
    async def go(engine):
        await engine.generate([3], params=SamplingParams(max_new_tokens=2, temperature=0.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return engine._decoder.steps

    assert asyncio.run(go(counting(model))) == 2


def test_progress_counts_running_waiting_and_tokens(model):
    async def go(engine):
        params = SamplingParams(max_new_tokens=4, temperature=0.0)
        tasks = [asyncio.create_task(engine.generate([i], params=params)) for i in range(3)]
        seen = {engine.progress}
        while not all(t.done() for t in tasks):
            await asyncio.sleep(0)
            seen.add(engine.progress)
        return seen

    seen = asyncio.run(go(counting(model, max_batch=2)))
    assert {(0, 0, 0), (0, 3, 0), (2, 1, 2), (2, 1, 4), (2, 1, 6), (0, 1, 8), (1, 0, 9), (0, 0, 12)} <= seen


@pytest.mark.slow
def test_many_admissions_into_few_slots_lose_nothing(model):
    g = torch.Generator().manual_seed(0)
    lens = torch.randint(1, 40, (120,), generator=g).tolist()

    async def go(engine):
        params = [SamplingParams(max_new_tokens=n, temperature=0.0) for n in lens]
        return await asyncio.gather(*(engine.generate([i % VOCAB], params=p) for i, p in enumerate(params)))

    for max_batch in (1, 7, 64):
        out = asyncio.run(go(counting(model, max_batch=max_batch)))
        assert [c.ids for c in out] == [[(i + 1 + j) % VOCAB for j in range(n)] for i, n in enumerate(lens)]


def test_a_short_prompt_that_comes_late_leaves_a_long_completion_its_cache(model):
    """The log-probs are those of a forward over the whole sequence."""

    async def go():
        async with LocalEngine(model, max_len=64, eos_token_ids=()) as engine:
            long = asyncio.ensure_future(engine.generate([3, 1, 4], params=SamplingParams(max_new_tokens=60, seed=1)))
            while engine.progress.num_tokens < 45:
                await asyncio.sleep(0)
            await engine.generate([5], params=SamplingParams(max_new_tokens=2, seed=2))
            return await long

    out = asyncio.run(go())
    with torch.no_grad():
        logits = model(torch.tensor([[3, 1, 4, *out.ids]])).logits[0, 2:-1].float()
    truth = logits.log_softmax(-1).gather(1, torch.tensor(out.ids)[:, None])[:, 0]
    assert out.logp == pytest.approx(truth.tolist(), abs=1e-4)


@pytest.mark.slow
def test_importing_the_engine_does_not_import_transformers():
    code = "import sys, rlkit.rollout.engines.local; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_that_does_not_change_between_updates_is_named_once(model, caplog):
    """As a copy of the one that trains does not; weights in place change it, also the smallest step."""
    own, copied = copy.deepcopy(model), copy.deepcopy(model)

    async def updates(engine):
        for version in range(6):
            await engine.update_weights(version=version)
            with torch.no_grad():
                next(own.parameters()).add_(0.0)

    asyncio.run(updates(LocalEngine(own)))
    assert not caplog.messages
    asyncio.run(updates(LocalEngine(copied)))
    (line,) = caplog.messages
    assert "the engine's model has not changed in two updates: give LocalEngine the model that trains" in line
