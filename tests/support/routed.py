"""For tests of mixtures of experts: a checkpoint, what its routers choose, and a check of what servers report."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlkit.data.tiny import tiny_tokenizer
from rlkit.model.forward import forward, prepare_model
from rlkit.model.routing import Chosen, num_experts, routers
from rlkit.packing import pack
from rlkit.types import SamplingParams, Trajectory


def make_moe(folder: Path) -> Path:
    """A tiny Qwen3-MoE."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=128, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, initializer_range=0.1, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def check_experts(engine: Any, checkpoint: Path) -> None:
    """The experts of the tokens are those of the model's own routers, and the trainer replays them."""
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompts = [[5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 20, 21, 22, 23]]
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


def own_experts(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """[len(ids), layers, k], by the model's own forward."""
    found: list[torch.Tensor] = []

    def noted(own, *args, **options):
        with Chosen(num_experts(model.config)) as chosen:
            out = own(*args, **options)
        found.append(chosen.indices.view(len(ids), -1))
        return out

    before = {router: vars(router).get("forward") for router in routers(model)}
    for router in before:
        router.forward = partial(noted, router.forward)
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for router, wrapped in before.items():
        del router.forward
        if wrapped is not None:
            router.forward = wrapped
    return torch.stack(found, 1).to(torch.int16).numpy()
