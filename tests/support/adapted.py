"""Checks of LoRA adapters on a real server, which SGLang's and vLLM's tests share."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from served import forward_logp
from transformers import AutoModelForCausalLM

from rlkit.model.forward import load_model
from rlkit.model.lora import adapter_weights, adapters, add_lora
from rlkit.model.weights import stream_weights
from rlkit.types import SamplingParams

PROMPT = list(b"sphinx of black quartz, judge my vow")
RANK = 4


class Adapted:
    """Trained adapters on one checkpoint, and the models into which transformers' own product merges them."""

    def __init__(self, checkpoint: Path, num: int = 3) -> None:
        self.models = [self._trained(checkpoint, seed) for seed in range(num)]
        self.merged = [self._merge(checkpoint, model) for model in self.models]

    def _trained(self, checkpoint: Path, seed: int) -> Any:
        model = add_lora(load_model(checkpoint), rank=RANK, alpha=2 * RANK, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for adapter in adapters(model).values():
                adapter.b.normal_(std=0.3, generator=generator)
        return model

    def _merge(self, checkpoint: Path, model: Any) -> Any:
        plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        weights = dict(plain.named_parameters())
        with torch.no_grad():
            for name, adapter in adapters(model).items():
                weights[name].add_(2 * adapter.b @ adapter.a)
        return plain


async def check_each_update(kind: Any, url: str, options: Any, adapted: Adapted) -> None:
    """Only the adapter travels, and the log-probs of the same prompts are those of the merged model, in any order; a
    client that does not know which weights the server has sends the base weights once."""
    adapter = sum(x.nbytes for _, x in adapter_weights(adapted.models[0]))
    whole = sum(x.nbytes for _, x in stream_weights(adapted.merged[0]))
    for first, versions in enumerate(((0, 1, 2, 1), (2, 0))):
        async with kind(url, **options) as engine:
            for i, version in enumerate(versions):
                weights = stream_weights(adapted.models[version])
                await engine.update_weights(weights, version=10 * first + version)
                assert weights.num_bytes == adapter + (whole if first and not i else 0)
                await check_log_probs(engine, adapted.merged[version], version=10 * first + version)


async def check_log_probs(engine: Any, merged: Any, *, version: int) -> None:
    """Of several requests at once."""
    params = SamplingParams(max_new_tokens=24)
    outs = await asyncio.gather(*(engine.generate([*PROMPT, i], params=params) for i in range(4)))
    for i, out in enumerate(outs):
        assert out.versions == [version] * 24
        assert out.logp == pytest.approx(forward_logp(merged, [*PROMPT, i], out.ids), abs=1e-4)


async def check_in_the_middle(engine: Any, adapted: Adapted, *, tokens: int, pause: str) -> None:
    """Each token has the version, and the log-prob, of the adapter that sampled it: keys are computed again."""
    await engine.update_weights(stream_weights(adapted.models[0]), version=0)
    params = SamplingParams(max_new_tokens=tokens)
    calls = [asyncio.create_task(engine.generate([*PROMPT, i], params=params)) for i in range(3)]
    await asyncio.sleep(1.0)
    await engine.update_weights(stream_weights(adapted.models[1]), version=3)
    outs = await asyncio.gather(*calls)
    for i, out in enumerate(outs):
        old = out.versions.count(0)
        assert 0 < old < tokens
        assert out.versions == [0] * old + [3] * (len(out.ids) - old)
        assert (len(out.ids), out.finish_reason) == ((old, "abort") if pause == "abort" else (tokens, "length"))
        expected = forward_logp(adapted.merged[0], [*PROMPT, i], out.ids)[:old]
        expected += forward_logp(adapted.merged[1], [*PROMPT, i], out.ids)[old:]
        assert out.logp == pytest.approx(expected, abs=2e-4)
    await check_log_probs(engine, adapted.merged[1], version=3)


def check_bytes(folder: Path, checkpoint: Path, *, merged: bool) -> None:
    """Of every step of a run, in its log."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    model = load_model(checkpoint)
    whole = sum(x.nbytes for _, x in stream_weights(model))
    adapter = sum(x.nbytes for _, x in adapter_weights(add_lora(model, rank=RANK)))
    assert [line["sync/bytes"] for line in lines] == [whole if merged else adapter] * len(lines)
