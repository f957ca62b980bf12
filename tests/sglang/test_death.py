"""One of two servers is killed in the middle of a rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from rlkit.rollout import rollout
from rlkit.rollout.engines.sglang import Server, SGLang
from rlkit.types import SamplingParams, Trajectory

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
PARAMS = SamplingParams(max_new_tokens=150)


@dataclass
class Question:
    ids: list[int]
    index: int
    row: dict = field(default_factory=dict)


QUESTIONS = [Question(list(b"question %02d:" % i), i) for i in range(12)]


@pytest.mark.slow
async def test_one_of_two_dies_and_every_group_completes_once(
    pair: list[Server], kill: Callable[[Server], None]
) -> None:
    done: Counter[int] = Counter()

    def on_group(question: Question, group: list[Trajectory]) -> None:
        done[question.index] += 1
        if len(done) == 1:
            kill(pair[0])

    async with SGLang([server.url for server in pair]) as engine:
        groups = await rollout(
            QUESTIONS, generate=engine.generate, params=PARAMS, group_size=8, seed=0, on_group=on_group
        )
        assert done == {question.index: 1 for question in QUESTIONS}
        assert [len(group) for group in groups] == [8] * 12
        for question, group in zip(QUESTIONS, groups, strict=True):
            for t in group:
                assert t.prompt_ids == question.ids
                assert len(t.ids) == len(t.logp) == len(t.versions) == 150
        assert pair[0]._process.wait(240)  # a killed process is still there for a moment
        assert pair[1].alive
        await engine.generate([1, 2, 3], params=SamplingParams(max_new_tokens=2))
