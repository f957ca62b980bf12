"""SmolLM2-135M-Instruct on a real server: log-probs of the trainer, before and after new weights, the tied head's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from served import forward_logp
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.vllm import VLLM, FromDisk, launch
from rlkit.types import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
ASKED = ["What is the capital of France?", "Name a colour.", "What is 2 + 3?"]


async def test_log_probs_follow_the_weights(smollm: Path, vllm_python: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": text}] for text in ASKED]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    args = ["--max-model-len", "1024"]
    changes = [[], model.model.layers.parameters(), [model.model.embed_tokens.weight], [model.model.norm.weight]]
    with launch(smollm, device="cpu", python=vllm_python, args=args, log=tmp_path / "log.txt") as server:
        async with VLLM(server.url, transport=FromDisk(tmp_path / "weights")) as engine:
            for version, changed in enumerate(changes):
                if version:  # as an optimizer step would, but large
                    with torch.no_grad():
                        for parameter in changed:
                            parameter.mul_(1.02)
                    await engine.update_weights(stream_weights(model), version=version)
                params = SamplingParams(max_new_tokens=16)
                out = await asyncio.gather(*(engine.generate(ids, params=params) for ids in prompts))
                for ids, one in zip(prompts, out, strict=True):
                    assert set(one.versions) == {version}
                    assert one.logp == pytest.approx(forward_logp(model, ids, one.ids), abs=1e-3)
