"""Every engine keeps the contract of `rlkit.types`; real servers do so in tests/sglang and tests/vllm."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nightly
import numpy as np
import pytest
import torch
from contract import Subject, check_engine, check_generate
from fake_server import serving, vllm_answers

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.process import launch
from rlkit.rollout.engines.vllm import VLLM
from rlkit.rollout.shared import SharedEngine
from rlkit.testing import FakeEngine
from rlkit.types import SamplingParams

pytestmark = pytest.mark.usefixtures("forked_engines")
ENGINES = ["fake", "local", "process", "shared", "docs"]


@pytest.fixture(scope="module")
def model():
    tokenizer = tiny_tokenizer()
    return tiny_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64).eval()


@asynccontextmanager
async def engine_of(name: str, model, tmp_path: Path) -> AsyncIterator[Subject]:
    if name == "process":
        model.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        async with await launch(tmp_path, max_len=1100, eos_token_ids=()) as engine:
            yield Subject(engine, weights=lambda: stream_weights(model))
    elif name == "vllm":
        async with serving(vllm_answers()) as (url, _):
            engine = VLLM(url)
            yield Subject(engine)
            await engine.close()
    else:
        local = LocalEngine(model, max_len=1100, eos_token_ids=())
        engines = {
            "fake": FakeEngine(),
            "local": local,
            "shared": SharedEngine(local),
            "docs": engine_of_the_docs(model),
        }
        yield Subject(engines[name], weights=lambda: stream_weights(model))


def engine_of_the_docs(model):
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    [code] = re.findall(r"## An engine of your own.*?```python\n(.*?)```", page, re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    return scope["Naive"](model)


@pytest.mark.slow_cases("docs", "local", "shared")
@pytest.mark.parametrize("name", nightly.only([*ENGINES, "vllm"], "fake", "local", "shared", "docs", "vllm"))
async def test_generate(name, model, tmp_path):
    async with engine_of(name, model, tmp_path) as subject:
        await check_generate(subject)
        if name != "docs":
            await what_is_no_request_is_refused(subject)


async def what_is_no_request_is_refused(subject):
    sampling = SamplingParams(max_new_tokens=2)
    for prompt in ("text", [[1, 2]], ["a"], [1.5], None, 5, {"input_ids": [1]}, torch.tensor([[1, 2]])):
        line = rf"\Aprompt_ids must be the token ids of one prompt, .* got {re.escape(repr(prompt))}: encode .*\Z"
        with pytest.raises(TypeError, match=line):
            await subject.engine.generate(prompt, params=sampling)
    for params in ({}, {"max_new_tokens": 2}, None, 2):
        with pytest.raises(TypeError, match=re.escape(f"params must be SamplingParams, got {params!r}: give")):
            await subject.engine.generate([1, 2], params=params)
    greedy = SamplingParams(max_new_tokens=2, temperature=0.0)
    expected = await subject.engine.generate([1, 2], params=greedy)
    for prompt in ((1, 2), [np.int64(1), np.int32(2)], np.array([1, 2]), torch.tensor([1, 2])):
        assert (await subject.engine.generate(prompt, params=greedy)).ids == expected.ids


@pytest.mark.slow_cases("process", "shared")
@pytest.mark.parametrize("name", nightly.only(ENGINES, "fake", "local", "process", "shared"))
async def test_engine(name, model, tmp_path):
    async with engine_of(name, model, tmp_path) as subject:
        await check_engine(subject)


def test_a_fake_engine_repeats_its_script_and_knows_the_log_probs_of_its_seeded_tokens():
    async def go(engine, **params):
        return await asyncio.gather(*(engine.generate([1, i], params=SamplingParams(**params)) for i in range(3)))

    outs = asyncio.run(go(FakeEngine([[5, 6, 7], [8]]), max_new_tokens=2))
    assert [(o.ids, o.finish_reason) for o in outs] == [([5, 6], "length"), ([8], "stop"), ([5, 6], "length")]
    (out, *_) = asyncio.run(go(FakeEngine(vocab_size=4), max_new_tokens=4000, seed=1))
    assert out.logp[0] == pytest.approx(-1.3862944)
    counts = [out.ids.count(i) for i in range(4)]
    assert sum((n - 1000) ** 2 / 1000 for n in counts) < 16.3  # chi-square with 3 degrees of freedom, p = 0.001
