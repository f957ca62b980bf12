"""The engine of docs/engines.md trains as the page says, in turn and overlapped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.model.forward import prepare_model
from rlkit.settings import Optim, Rollouts, Schedule

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


async def share_of_small_bytes(prompt, group):
    return [replace(t, reward=sum(i < 128 for i in t.ids) / len(t.ids)) for t in group]


@pytest.mark.slow_cases("True")
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("overlap", [False, True])
async def test_the_engine_of_the_page_trains(tmp_path, overlap):
    [code] = re.findall(r"## An engine of your own.*?```python\n(.*?)```", PAGE, re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    tokenizer = tiny_tokenizer()
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 32}
    model = prepare_model(tiny_model(tokenizer, **sizes))
    task = Task([Prompt([20 + i, 60], {}, i) for i in range(20)], share_of_small_bytes)
    rollouts = Rollouts(prompts_per_step=2, group_size=4, max_new_tokens=4, overlap=overlap)
    engine = scope["Naive"](model)
    await grpo(model, tokenizer, engine, task, rollouts, Schedule(tmp_path / "run", steps=3), Optim(lr=1e-2))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert engine.version == 3
    if not overlap:
        assert all(line["mismatch/abs_max"] < 1e-4 for line in lines), "it samples with the weights that train"
