"""A served teacher gives the log-probs of the served model's own forward."""

import asyncio

import pytest
from served import check_teacher

from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.servers.teacher import ServedTeacher
from rlkit.rollout.engines.sglang import SGLang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


@pytest.mark.slow
def test_log_probs_of_given_tokens_and_of_the_most_likely_ones(server, models):
    async def load() -> None:  # other tests leave other weights
        async with SGLang(server.url) as engine:
            await engine.update_weights(stream_weights(models[0]), version=0)

    asyncio.run(load())
    check_teacher(ServedTeacher(server.url), models[0])
