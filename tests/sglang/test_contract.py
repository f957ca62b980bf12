"""A real server keeps the contract of `rlkit.types`, as every other engine does in tests/rollout."""

from __future__ import annotations

import pytest
import torch
from contract import Subject, check_engine, check_generate

from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.sglang import Server, SGLang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


async def test_a_server_is_an_engine(server: Server, models: list[torch.nn.Module]) -> None:
    async with SGLang(server.url) as engine:
        subject = Subject(engine, weights=lambda: stream_weights(models[0]), seeded=False)  # a CPU server ignores seeds
        await engine.update_weights(subject.weights(), version=0)
        await check_generate(subject)
        await check_engine(subject)
