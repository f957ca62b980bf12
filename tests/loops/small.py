"""What the tests of the RL loops share: a tiny model, and an engine with weights of its own."""

from __future__ import annotations

from functools import cache, partial

import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.model.forward import prepare
from rlkit.rollout.engines.local import LocalEngine

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}

async_grpo = partial(grpo, overlap=True, journal=True, staleness=1.0)


@cache
def tokenizer():
    return tiny_tokenizer()


def small_model(seed=0, **sizes):
    return prepare(tiny_model(tokenizer(), **SIZES | sizes, seed=seed))


class CopyEngine(LocalEngine):
    """A LocalEngine whose model is nobody else's: new weights are copied into it, between two of its steps."""

    def __init__(self, sizes=SIZES, **options):
        super().__init__(tiny_model(tokenizer(), **sizes), max_len=64, **options)

    async def update_weights(self, weights=None, *, version):
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)
        await super().update_weights(version=version)
