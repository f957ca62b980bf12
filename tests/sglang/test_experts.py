"""A mixture of experts on a real SGLang server: the experts that it reports are replayed by the trainer."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from routed import own_experts
from served import check_trained, train
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlkit.data.tiny import tiny_tokenizer
from rlkit.model.forward import forward, prepare_model
from rlkit.packing import pack
from rlkit.rollout.engines.servers.api import ServerLimits
from rlkit.rollout.engines.sglang import SGLang, launch
from rlkit.rollout.engines.sglang.api import SGLangApi
from rlkit.types import SamplingParams, Trajectory

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE."""
    folder, tokenizer = tmp_path_factory.mktemp("moe") / "model", tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=128, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, initializer_range=0.1, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def test_a_server_reports_the_experts_that_its_tokens_went_to(moe: Path, sglang_python: str, tmp_path: Path):
    model = Qwen3MoeForCausalLM.from_pretrained(moe, dtype=torch.float32).eval()
    args = ["--max-total-tokens", "8192", "--enable-return-routed-experts"]
    prompts = [[5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 20, 21, 22, 23]]
    with launch(moe, device="cpu", python=sglang_python, args=args, log=tmp_path / "log.txt") as server:
        async with SGLang(server.url) as engine:
            params = SamplingParams(max_new_tokens=12)
            outs = await asyncio.gather(*(engine.generate(p, params=params) for p in prompts))
    groups = []
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.experts.shape == (len(prompt) + len(out.ids) - 1, 2, 2)
        own = own_experts(model, [*prompt, *out.ids[:-1]])
        assert (np.sort(out.experts, -1) == np.sort(own, -1)).mean() > 0.97  # but for ties
        mask = [True] * len(out.ids)
        groups.append([Trajectory(prompt, out.ids, mask, out.logp, out.versions, experts=out.experts)])
    batch = pack(groups)
    off = forward(prepare_model(model), batch).logp - batch.rollout_logp
    assert off[batch.mask].abs().max() < 1e-3


def test_a_server_that_reports_none_is_not_asked() -> None:
    params = SamplingParams(max_new_tokens=4)
    for experts, asked in ((0, False), (2, True)):
        limits = ServerLimits(math.inf, math.inf, experts)
        assert ("return_routed_experts" in SGLangApi().body([3], params, limits, None)) == asked


@pytest.mark.slow
def test_a_run_starts_its_server_so(moe: Path, sglang_python: str, tmp_path: Path) -> None:
    check_trained(tmp_path, train("sglang", tmp_path, moe, sglang_python))
    (log,) = (tmp_path / "run").glob("sglang_*.log")
    assert "'enable_return_routed_experts': True" in log.read_text()
