"""What must run on macOS, and what must say that it needs Linux: run by test_platforms.py with Linux hidden."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.model.forward import prepare_model
from rlkit.model.weights import stream_weights
from rlkit.rewards import Sample, code, math, run_reward, scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.process import launch
from rlkit.rollout.engines.sglang import launch as launch_sglang
from rlkit.settings import Optim, Rollouts, Schedule
from rlkit.types import SamplingParams

sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None  # type: ignore[assignment]  # no pictures
SIZES = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
PROMPTS = [Prompt([20 + i, 60], {}, i) for i in range(8)]
TOKENIZER = tiny_tokenizer()


def ascii_share(completion: str, row: dict) -> float:
    return sum(map(str.isascii, completion)) / max(1, len(completion))


async def refused(call) -> str:
    """What a call that needs Linux says."""
    try:
        await call
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it ran"


async def grade(answers: list[str]) -> list[float]:
    samples = [Sample(rf"\boxed{{{answer}}}", {"answer": "1/2"}, i) for i, answer in enumerate(answers)]
    return [reward.reward for reward in await run_reward(math.boxed, samples, timeout_s=120)]


async def train(folder: Path, *, steps: int, resume: bool) -> None:
    model = prepare_model(tiny_model(TOKENIZER, **SIZES))
    await grpo(
        model, TOKENIZER, LocalEngine(model, max_len=64),
        Task(PROMPTS, scorer(ascii_share, tokenizer=TOKENIZER, timeout_s=60)),
        Rollouts(prompts_per_step=2, group_size=2, max_new_tokens=4),
        Schedule(folder, steps=steps, save_steps=1, resume=resume),
        Optim(lr=1e-3),
    )  # fmt: skip


async def in_a_process(folder: Path) -> list[int]:
    """The versions of what an engine in a process of its own samples, before and after new weights."""
    params = SamplingParams(max_new_tokens=2)
    async with await launch(folder, max_len=32) as engine:
        before = await engine.generate([5, 6], params=params)
        await engine.update_weights(stream_weights(prepare_model(tiny_model(TOKENIZER, seed=1, **SIZES))), version=1)
        after = await engine.generate([5, 6], params=params)
    return [*before.versions, *after.versions]


async def main(folder: Path) -> None:
    out: dict = {"affinity": hasattr(os, "sched_getaffinity"), "proc": Path("/proc/self/stat").exists()}
    out["math"] = await grade(["0.5", "2/4", "3"])
    await train(folder / "run", steps=1, resume=False)
    await train(folder / "run", steps=2, resume=True)
    out["steps"] = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    out["versions"] = await in_a_process(folder / "run" / "model")
    sample = Sample("```python\none = 1\n```", {"tests": ["assert one == 1"]}, 0)
    out["code"] = await refused(run_reward(code.assert_tests, [sample], timeout_s=60))
    out["pinned"] = await refused(launch(folder / "run" / "model", cpus=[0]))
    out["served"] = await refused(asyncio.to_thread(launch_sglang, folder / "run" / "model", device="cpu"))
    (folder / "out.json").write_text(json.dumps(out))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
