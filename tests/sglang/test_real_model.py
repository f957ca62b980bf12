"""SmolLM2-135M-Instruct on a real server: log-probs and answers of the trainer, before and after new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.sglang import SGLang, launch
from rlkit.types import SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
ASKED = ["What is the capital of France?", "Name a colour.", "What is 2 + 3?"]


@pytest.mark.slow
async def test_log_probs_and_greedy_answers_follow_the_weights(
    smollm: Path, sglang_python: str, forward_logp: Callable[..., list[float]], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": text}] for text in ASKED]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    args = ["--max-total-tokens", "4096"]
    with launch(smollm, device="cpu", python=sglang_python, args=args, log=tmp_path / "log.txt") as server:
        async with SGLang(server.url) as engine:
            for version in range(2):
                if version:  # as an optimizer step would, but large
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(1.02)
                    await engine.update_weights(stream_weights(model), version=version)
                for temperature in (1.0, 0.0):
                    params = SamplingParams(max_new_tokens=16, temperature=temperature)
                    out = await asyncio.gather(*(engine.generate(ids, params=params) for ids in prompts))
                    for ids, one in zip(prompts, out, strict=True):
                        assert set(one.versions) == {version}
                        assert one.logp == pytest.approx(forward_logp(model, ids, one.ids), abs=1e-3)
                        if temperature == 0:
                            with torch.inference_mode():
                                told = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
                            assert one.ids == told[0, len(ids) :].tolist()
