"""Models of a script's flags."""

from __future__ import annotations

import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.packing import pack
from rlkit.parallel.flags import ParallelArgs
from rlkit.parallel.launch import load_policy
from rlkit.parallel.model import forward
from rlkit.types import Trajectory


def test_with_a_lora_rank_adapters_are_all_that_trains_and_change_nothing_at_first(tmp_path):
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
    tiny_model(tiny_tokenizer(), **sizes).save_pretrained(tmp_path)
    plain, model = (load_policy(tmp_path, ParallelArgs(), lora_rank=rank) for rank in (0, 3))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2
    assert all("lora_" in name and 3 in p.shape for name, p in trained.items())
    assert all(p.requires_grad for p in plain.parameters())
    batch = pack([[Trajectory([1, 2, 3], [4, 5], [True, True], [-1.0, -1.0], [0, 0])]])
    torch.testing.assert_close(forward(model, batch).logp, forward(plain, batch).logp)
