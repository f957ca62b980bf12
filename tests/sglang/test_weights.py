"""Log-probs of a real server equal the trainer's forward, before and after every way of sending weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlkit.parallel.weights import stream_weights
from rlkit.rollout.sglang import FromDisk, FromGroup, FromTensors, Server, SGLang, connect
from rlkit.types import SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
PROMPT = list(b"the quick brown fox jumps over the lazy dog")
NO_EOS = SamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module")
def models(checkpoints: list[Path]) -> list[torch.nn.Module]:
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in checkpoints]


def forward_logp(model: torch.nn.Module, prompt: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


async def assert_equal_forward(engine: SGLang, model: torch.nn.Module, version: int) -> None:
    out = await asyncio.gather(*(engine.generate([*PROMPT, i], params=NO_EOS) for i in range(4)))
    for i, one in enumerate(out):
        assert one.versions == [version] * len(one.ids)
        assert one.logp == pytest.approx(forward_logp(model, [*PROMPT, i], one.ids), abs=1e-4)


@pytest.mark.parametrize("kind", ["tensors", "small buckets", "disk", "group"])
async def test_every_transport_gives_the_trainer_s_log_probs(
    kind: str, server: Server, models: list[torch.nn.Module], tmp_path: Path
) -> None:
    transport = {
        "tensors": lambda: FromTensors(),
        "small buckets": lambda: FromTensors(bucket_bytes=10_000),
        "disk": lambda: FromDisk(tmp_path),
        "group": lambda: FromGroup(backend="gloo", bucket_bytes=100_000),
    }[kind]()
    async with connect(server.url, transport=transport) as engine:
        for version, model in [(1, models[1]), (2, models[2]), (3, models[0])]:
            await engine.update_weights(stream_weights(model), version=version)
            await assert_equal_forward(engine, model, version)
