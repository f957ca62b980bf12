"""FusedDecoder: the model's log-probs from a copy of its weights, and the engine that samples from it."""

from __future__ import annotations

import asyncio
import logging
import random
import weakref

import pytest
import torch
import transformers as hf

from rlkit.model.lora import add_lora, merged
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.local.backends import CachedForward, Decoder, pick_decoder
from rlkit.rollout.engines.local.fused import FusedDecoder
from rlkit.types import SamplingParams

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.25, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
CASES = {
    "qwen3": hf.Qwen3Config(**SIZES, head_dim=16),
    "qwen3, tied": hf.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen2": hf.Qwen2Config(**SIZES),
    "llama, biases, one key head": hf.LlamaConfig(**SIZES | {"num_key_value_heads": 1}, attention_bias=True),
    "llama, yarn": hf.LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral": hf.MistralConfig(**SIZES, sliding_window=None),
}
PROMPTS = [[5, 6, 7, 8, 9], [1], [5, 6, 7, 8, 9], [2, 3], [5, 6, 7, 8, 9, 10, 11]]


def build(name: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CASES[name])
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))  # biases and norms that show
    return model


def sampled(engine: LocalEngine, prompts=PROMPTS, **params):
    async def go():
        options = {"max_new_tokens": 9} | params
        calls = (engine.generate(p, params=SamplingParams(seed=i, **options)) for i, p in enumerate(prompts))
        return await asyncio.gather(*calls)

    return asyncio.run(go())


@torch.no_grad()
def true_logp(model, prompt, out, temperature=1.0):
    ids = torch.tensor([[*prompt, *out.ids]])
    logp = (model(input_ids=ids).logits.double() / temperature).log_softmax(-1)
    return logp[0, len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


@pytest.mark.parametrize("name", CASES)
def test_in_fp32_it_is_the_model(name):
    model = build(name)
    engine = LocalEngine(model, dtype=torch.float32, max_batch=4)
    assert type(engine._decoder) is FusedDecoder
    for prompt, out in zip(PROMPTS, sampled(engine), strict=True):
        assert out.logp == pytest.approx(true_logp(model, prompt, out), abs=2e-5)
    warm = sampled(engine, temperature=0.7, top_k=5)
    assert warm[0].logp == pytest.approx(true_logp(model, PROMPTS[0], warm[0], 0.7), abs=2e-5)


@pytest.mark.slow_cases("llama, biases, one key head", "qwen3")
@pytest.mark.parametrize("name", CASES)
def test_in_bf16_it_is_within_rounding(name):
    model = build(name)
    engine = LocalEngine(model, dtype=torch.bfloat16)
    assert type(engine._decoder) is FusedDecoder
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for prompt, out in zip(PROMPTS, sampled(engine), strict=True):
        assert out.logp == pytest.approx(true_logp(model, prompt, out), abs=0.1)


def test_the_same_requests_sample_the_same_tokens_as_in_place():
    model = build("qwen3")
    plain, fused = (LocalEngine(model, dtype=dtype) for dtype in (None, torch.float32))
    for params in ({}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_p": 0.8}):
        assert [x.ids for x in sampled(plain, **params)] == [x.ids for x in sampled(fused, **params)]


def test_weights_arrive_by_update_only():
    model = build("qwen2")
    engine = LocalEngine(model, dtype=torch.float32)
    before = sampled(engine)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    assert [x.logp for x in sampled(engine)] == [x.logp for x in before]
    asyncio.run(engine.update_weights(stream_weights(model), version=1))
    for prompt, out in zip(PROMPTS, sampled(engine), strict=True):
        assert out.logp == pytest.approx(true_logp(model, prompt, out), abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_tokens_read_one_step_late_are_those_read_at_once(seed):
    """Requests of other lengths arrive, stop, are aborted, and new weights come between two steps of a launched one."""
    draw = random.Random(seed)
    requests = [
        (draw.randrange(12), [draw.randrange(67) for _ in range(draw.randint(1, 9))], draw.randint(1, 14), i)
        for i in range(16)
    ]
    aborted, updated = draw.sample(range(16), 3), draw.randint(3, 9)
    temperatures = [draw.choice([1.0, 1.0, 0.5, 0.0]) for _ in requests]

    async def run(engine, model):
        async def one(wait, prompt, length, i):
            for _ in range(wait):
                await asyncio.sleep(0)
            params = SamplingParams(max_new_tokens=length, seed=i, temperature=temperatures[i])
            return await engine.generate(prompt, params=params, rid=str(i))

        async def others():
            for step in range(20):
                await asyncio.sleep(0)
                if step == updated:
                    with torch.no_grad():
                        model.lm_head.weight.mul_(1.1)
                    await engine.update_weights(version=1)
                if step == updated + 2:
                    await asyncio.gather(*(engine.abort(str(i)) for i in aborted))

        return (await asyncio.gather(*(one(*request) for request in requests), others()))[:-1]

    done, launched = [], []
    for late in (False, True):
        model = build("qwen3")
        options = {"max_batch": 5, "eos_token_ids": (3, 4, 5), "keep_turns": bool(seed % 2)}
        engine = LocalEngine(model, dtype=torch.float32, **options)
        engine._decoder.reads_late = late
        launch, count = engine._decoder.launch, []
        engine._decoder.launch = lambda read, *args, c=count, f=launch: c.append(read is None) or f(read, *args)
        done.append(asyncio.run(run(engine, model)))
        launched.append(sum(count))
    assert launched[0] == 0
    assert launched[1] > 5
    same = 0
    for (_, prompt, _, i), *outs in zip(requests, *done, strict=True):
        for out in outs:  # the update changes the head only: keys and values are of one version
            with torch.no_grad():
                model.lm_head.weight.copy_(build("qwen3").lm_head.weight)
                truth = [true_logp(model, prompt, out, temperatures[i] or 1.0)]
                model.lm_head.weight.mul_(1.1)
            truth.append(true_logp(model, prompt, out, temperatures[i] or 1.0))
            want = [truth[version][t] for t, version in enumerate(out.versions)]
            assert out.logp == pytest.approx(want, abs=2e-5)
        if outs[0].versions == outs[1].versions:
            same += 1
            assert (outs[0].ids, outs[0].finish_reason) == (outs[1].ids, outs[1].finish_reason)
    assert same > 5
    assert {version for out in done[1] for version in out.versions} == {0, 1}


@pytest.mark.parametrize("late", [False, True])
def test_new_weights_sample_the_next_token_that_is_read(late):
    engine = LocalEngine(build("qwen3"), dtype=torch.float32)
    engine._decoder.reads_late = late

    async def run():
        call = asyncio.ensure_future(engine.generate([1, 2], params=SamplingParams(max_new_tokens=8, seed=0)))
        while engine.progress.num_tokens < 3:
            await asyncio.sleep(0)
        await engine.update_weights(version=1)
        return await call

    assert asyncio.run(run()).versions == [0, 0, 0, 1, 1, 1, 1, 1]


def test_an_adapter_is_merged_into_the_copy():
    model = add_lora(build("qwen3"), rank=2, alpha=4.0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(0, 0.3)
    engine = LocalEngine(model, dtype=torch.float32)
    assert type(engine._decoder) is FusedDecoder
    for prompt, out in zip(PROMPTS, sampled(engine), strict=True):
        assert out.logp == pytest.approx(true_logp(model, prompt, out), abs=5e-5)


def test_adapters_are_merged_layer_by_layer(monkeypatch):
    """Of seven projections a layer, those of the layer that is copied and of the one before are in memory at most."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SIZES | {"num_hidden_layers": 6}))
    model, made, most = add_lora(model, rank=2), [], []

    def counted(*args):
        out = merged(*args)
        made.append(weakref.ref(out))
        most.append(sum(x() is not None for x in made))
        return out

    monkeypatch.setattr("rlkit.rollout.engines.local.decode.merged", counted)
    engine = LocalEngine(model, dtype=torch.bfloat16)
    assert type(engine._decoder) is FusedDecoder
    assert len(made) == 6 * 7
    asyncio.run(engine.update_weights(version=1))
    assert len(made) == 2 * 6 * 7
    assert max(most) <= 2 * 7
    assert not any(x() is not None for x in made)


def test_turns_continue_from_their_keys():
    model = build("llama, yarn")
    engine = LocalEngine(model, dtype=torch.float32, keep_turns=True, eos_token_ids=tuple(range(67)))
    first = sampled(engine, [[1, 2, 3, 4]])[0]
    prompt = [1, 2, 3, 4, *first.ids, 9, 8, 7]
    second = sampled(engine, [prompt])[0]
    assert second.logp == pytest.approx(true_logp(model, prompt, second), abs=2e-5)


def test_requests_wait_where_the_device_has_no_room(monkeypatch):
    model = build("qwen3")
    engine = LocalEngine(model, dtype=torch.float32, max_batch=8)
    most, reserve = [], engine._decoder.reserve

    def counted(rows, length, *, keep):
        most.append((rows, length))
        reserve(rows, length, keep=keep)

    monkeypatch.setattr(engine._decoder, "slots", lambda length: 2 if length > 12 else 8)
    monkeypatch.setattr(engine._decoder, "reserve", counted)
    prompts = [[i + 1, 2] for i in range(9)]
    outs = sampled(engine, prompts, max_new_tokens=20)
    assert max(rows for rows, _ in most) == 2
    assert {length for _, length in most} == {22}
    for prompt, out in zip(prompts, outs, strict=True):
        assert len(out.ids) == 20
        assert out.logp == pytest.approx(true_logp(model, prompt, out), abs=2e-5)


@pytest.mark.parametrize(("before", "after"), [((8, 60), (2, 500)), ((2, 500), (8, 60)), ((4, 60), (2, 90))])
def test_a_cache_is_no_larger_than_the_device_has_room_for(monkeypatch, before, after):
    """The most rows at the longest length would be; where both fit, the layout stays."""
    decoder = LocalEngine(build("qwen3"), dtype=torch.float32, max_batch=8)._decoder
    monkeypatch.setattr(decoder, "slots", lambda length: 2 if length > 128 else 8)
    decoder.reserve(*before, keep=0)
    with torch.inference_mode():
        for block in (x for kv in decoder._cache for x in kv):
            block.normal_()
    first = [[x[:2, :, :50].clone() for x in kv] for kv in decoder._cache]
    decoder.reserve(*after, keep=2)
    rows, length = decoder._cache[0][0].shape[0], decoder._cache[0][0].shape[2]
    assert rows <= decoder.slots(length)
    assert rows >= after[0]
    assert length >= after[1]
    for old, new in zip(first, decoder._cache, strict=True):
        assert all(torch.equal(a, b[:2, :, :50]) for a, b in zip(old, new, strict=True))
    if after == (2, 90):
        assert rows == 4


def test_a_longer_request_joins_and_the_cache_grows():
    model = build("qwen3")
    engine = LocalEngine(model, dtype=torch.float32)

    async def go():
        short = asyncio.create_task(engine.generate([1, 2], params=SamplingParams(max_new_tokens=30, seed=0)))
        for _ in range(5):
            await asyncio.sleep(0)
        long = await engine.generate([3] * 40, params=SamplingParams(max_new_tokens=100, seed=1))
        return await short, long

    for prompt, out in zip(([1, 2], [3] * 40), asyncio.run(go()), strict=True):
        assert out.logp == pytest.approx(true_logp(model, prompt, out), abs=2e-5)


def test_other_models_are_read_in_place():
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=8))
    assert type(LocalEngine(model, dtype=torch.bfloat16)._decoder) is CachedForward


def test_more_rows_are_for_the_decoder_that_counts_its_memory():
    sizes = {"max_batch": 4, "copy_batch": 7, "max_len": 32, "dtype": torch.bfloat16}
    assert pick_decoder(build("qwen3"), **sizes).sizes[-1] == 7
    for config in (hf.LlamaConfig(**SIZES, mlp_bias=True), hf.BloomConfig(vocab_size=67, hidden_size=32, n_head=4)):
        assert pick_decoder(hf.AutoModelForCausalLM.from_config(config), **sizes).sizes[-1] == 4
    defaults = [LocalEngine(build("qwen3"), dtype=dtype).max_batch for dtype in (None, torch.float32)]
    assert defaults == [64, 64]  # on a CPU
    assert LocalEngine(build("qwen3"), dtype=torch.float32, max_batch=3).max_batch == 3


def test_a_copy_that_disagrees_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(FusedDecoder, "_attend", lambda *a, **k: 1 / 0)
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(build("qwen3"), dtype=torch.bfloat16)
    assert type(engine._decoder) is Decoder
    assert "ZeroDivisionError" in caplog.text


def test_full_memory_is_an_error_not_a_reason_to_decode_otherwise(monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(FusedDecoder, "_attend", full)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        LocalEngine(build("qwen3"), dtype=torch.bfloat16)
    monkeypatch.setattr(CachedForward, "attend", full)
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SIZES, mlp_bias=True))
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        LocalEngine(model)
