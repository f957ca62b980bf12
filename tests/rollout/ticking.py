"""An engine with tokens, speed and weights set by a test, and a model small enough to sample from in a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache

import torch

from rlkit.data.prompts import Prompt
from rlkit.types import Completion


class Ticking:
    """Token k of a request is `(seed + position) % 23`, one per turn of the event loop, after `delay(prompt)` turns.

    It ends where prompt and completion have `length(prompt, seed)` tokens, or at a stop string (token i is the letter
    a + i), which it looks for in what it samples itself, as real engines do.
    """

    def __init__(self, *, delay: Callable = lambda prompt: 0, length: Callable = lambda prompt, seed: 5):
        self.delay, self.length, self.version = delay, length, 0
        self.aborts, self.running, self.most, self.num_tokens, self.calls = 0, 0, 0, 0, []

    async def generate(self, prompt_ids, *, params, rid=None):
        self.calls.append((tuple(prompt_ids), params.seed, params.max_new_tokens))
        self.running += 1
        self.most = max(self.most, self.running)
        aborts, out = self.aborts, Completion([], [], [], "abort")
        try:
            for _ in range(self.delay(prompt_ids)):
                await asyncio.sleep(0)
                if aborts != self.aborts:
                    return out
            while aborts == self.aborts:
                position = len(prompt_ids) + len(out.ids)
                out.ids.append((params.seed + position) % 23)
                out.logp.append(-0.125 * out.ids[-1])
                out.versions.append(self.version)
                self.num_tokens += 1
                text = "".join(chr(ord("a") + i) for i in out.ids)
                if position + 1 >= self.length(prompt_ids, params.seed) or any(s in text for s in params.stop):
                    return Completion(out.ids, out.logp, out.versions, "stop")
                if len(out.ids) == params.max_new_tokens:
                    return Completion(out.ids, out.logp, out.versions, "length")
                await asyncio.sleep(0)
            return out
        finally:
            self.running -= 1

    async def abort(self, rid=None):
        self.aborts += 1


def prompt_at(place: int) -> Prompt:
    """The token `place`, then 1."""
    return Prompt([place, 1], {"place": place}, place)


@cache
def small_model():
    """A random Qwen3 of 97 tokens whose distributions are peaked enough for greedy decoding to be stable."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3, eos_token_id=0,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()
