"""Servers that draft tokens: what changes the samples is refused, and acceptance is a metric."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from fake_server import running, vllm_reply
from safetensors.torch import load_file, save_file

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import load_model
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.sglang import FromDisk, SGLang
from rlkit.rollout.engines.vllm import VLLM
from rlkit.rollout.shared import SharedEngine, publish
from rlkit.types import SamplingParams

DOCS = Path(__file__).parents[2] / "docs"
PARAMS = SamplingParams(max_new_tokens=9)
NGRAM = {"speculative_algorithm": "NGRAM", "device": "cuda", "speculative_accept_threshold_single": 1.0}
SINGLE, ACC = "speculative_accept_threshold_single", "speculative_accept_threshold_acc"


@asynccontextmanager
async def server(told: dict[str, Any], verified: tuple[int | None, ...] = ()) -> AsyncIterator[str]:
    """One that reports `told` of itself; completions of 9 tokens, each verified in so many forwards."""
    left = iter(verified)
    config = {"model_config": {"logprobs_mode": "processed_logprobs"}, "parallel_config": {}}

    async def answer(request: web.Request) -> web.Response:
        body: Any = await request.json() if request.can_read_body else {}
        if request.path == "/inference/v1/generate":
            return web.json_response(vllm_reply(body, [7] * 9, [-0.5] * 9))
        if request.path == "/generate":
            meta = {
                "id": body["rid"], "finish_reason": {"type": "stop"}, "prompt_tokens": len(body["input_ids"]),
                "output_token_logprobs": [[-0.5, 7, None]] * 9, "completion_tokens": 9, "spec_verify_ct": next(left),
            }  # fmt: skip
            return web.json_response({"output_ids": [7] * 9, "meta_info": meta})
        return web.json_response(told | {"vllm_config": config | told})

    app = web.Application()
    app.router.add_route("*", "/{page:.*}", answer)
    async with running(app) as url:
        yield url


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"device": "cpu"}, "with --speculative-algorithm NGRAM, and on cpu SGLang then takes the most likely token"),
        ({"device": "xpu"}, "on xpu SGLang then takes the most likely token at every temperature: start it without"),
        ({SINGLE: 0.5}, "NGRAM and --speculative-accept-threshold-single 0.5, which accepts what the model would not"),
        ({ACC: 0.9}, r"--speculative-accept-threshold-acc 0.9, .*: leave it at 1"),
    ],
)
async def test_an_sglang_that_samples_from_another_distribution_is_refused(told: dict[str, Any], said: str) -> None:
    async with server(NGRAM | told) as url:
        with pytest.raises(ValueError, match=said):
            async with SGLang(url):
                pass
    async with server(NGRAM | told | {"speculative_algorithm": None}) as url, SGLang(url):
        pass  # the same without drafts


@pytest.mark.parametrize("rule", ["synthetic", "fly"])
async def test_a_vllm_that_samples_from_another_distribution_is_refused(rule: str) -> None:
    async with server({"speculative_config": {"method": "mtp", "rejection_sample_method": rule}}) as url:
        with pytest.raises(ValueError, match=rf"rejection_sample_method '{rule}', which samples from another distrib"):
            async with VLLM(url):
                pass


@pytest.mark.parametrize("method", ["ngram", "mtp"])
async def test_a_vllm_that_drafts_exactly_is_none_to_refuse(method: str) -> None:
    told = {"speculative_config": {"method": method, "rejection_sample_method": "standard"}}
    async with server(told) as url, VLLM(url, vocab_size=100) as engine:
        assert len((await engine.generate([5, 6], params=PARAMS)).ids) == 9
        assert engine.measured() == {}


async def test_min_p_is_refused_where_sglang_would_ignore_it() -> None:
    smallest = SamplingParams(max_new_tokens=9, min_p=0.1)
    async with server(NGRAM) as url, SGLang(url, vocab_size=100) as engine:
        with pytest.raises(ValueError, match="SGLang ignores min_p with --speculative-algorithm"):
            await engine.generate([5, 6], params=smallest)
    async with server({}, (None,)) as url, SGLang(url, vocab_size=100) as engine:
        await engine.generate([5, 6], params=smallest)


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
@pytest.mark.parametrize(
    ("kind", "told", "lost"),
    [
        (SGLang, NGRAM, False),
        (SGLang, NGRAM | {"speculative_algorithm": "EAGLE"}, True),
        (VLLM, {"speculative_config": {"method": "suffix"}}, False),
        (VLLM, {"speculative_config": {"method": "eagle3"}}, True),
        (VLLM, {"speculative_config": None}, False),
    ],
)
async def test_memory_is_not_freed_where_a_draft_model_would_be_lost(
    kind: Any, told: dict[str, Any], lost: bool, tmp_path: Path
) -> None:
    async with server(told) as url, kind(url, transport=FromDisk(tmp_path), release=True) as engine:
        update = engine.update_weights([("x", torch.zeros(1))], version=1)
        if not lost:
            await update
            return
        with pytest.raises(ValueError, match=r"drafts tokens by weights of their own, .*n-gram drafts, or no `rel"):
            await update


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
@pytest.mark.parametrize("shared", [False, True])
async def test_tokens_per_forward_are_a_metric_of_the_step(shared: bool, tmp_path: Path) -> None:
    """(8 + 8) tokens after the first ones in 4 + 2 forwards; a completion that reports none does not count."""
    model = tiny_model(tiny_tokenizer())
    async with server(NGRAM, (4, 2, None)) as url:
        engine = SGLang(url, vocab_size=100, transport=FromDisk(tmp_path))
        outer = SharedEngine(engine) if shared else engine
        for _ in range(3):
            await outer.generate([5, 6], params=PARAMS)
        first, second = [await publish(outer, lambda: stream_weights(model), version=v) for v in (1, 2)]
        await engine.close()
    assert first.pop("engine/tokens_per_forward") == pytest.approx(16 / 6)
    assert first == second


@pytest.mark.slow
async def test_layers_that_transformers_drops_are_not_missing_from_an_update(tmp_path: Path) -> None:
    """A checkpoint with `mtp.*`, which a server may draft with. Without the model, nothing says that it lacks them."""
    folder = tmp_path / "in"
    tiny_model(tiny_tokenizer()).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(3, 5)}, file, metadata={"format": "pt"})
    model = load_model(folder)
    async with server({"model_path": str(folder)}) as url:
        engine = SGLang(url, transport=FromDisk(tmp_path / "out"))
        await engine.update_weights(stream_weights(model), version=1)
        with pytest.raises(ValueError, match=r"1 tensors that did not come, like mtp.fc.weight"):
            await engine.update_weights(dict(stream_weights(model)).items(), version=2)
        await engine.close()


@pytest.mark.parametrize(("page", "flag"), [("sglang", "--speculative-algorithm"), ("vllm", "--speculative-config")])
def test_the_line_of_the_page_is_one_argument_with_the_servers_flags(page: str, flag: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    line = next(x.strip() for x in text.splitlines() if "--engine-args" in x and flag in x)
    given = next(x for x in shlex.split(line) if x.startswith("--engine-args="))
    args = shlex.split(given.removeprefix("--engine-args="))
    value = args[args.index(flag) + 1]
    assert value == "NGRAM" if page == "sglang" else json.loads(value)["method"] == "ngram"


@pytest.mark.slow_cases("told1-False")
@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
@pytest.mark.parametrize(
    ("told", "refused"), [({"quantization": "fp8"}, True), ({"quantization": "fp8", "load_format": "flash_rl"}, False)]
)
async def test_weights_are_not_sent_to_a_server_that_would_not_quantize_them(told, refused, tmp_path):
    """SGLang quantizes at the start, and copies what comes later into the codes."""
    tiny_model(tiny_tokenizer()).save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model")
    async with server(told) as url, SGLang(url, transport=FromDisk(tmp_path / "weights")) as engine:
        with pytest.raises(ValueError, match="was started with --quantization") if refused else nullcontext():
            await engine.update_weights(stream_weights(model), version=1)
