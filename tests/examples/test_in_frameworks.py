"""The steps of docs/own-trainer.md in accelerate and Lightning Fabric: one batch of all tokens, in any split."""

from __future__ import annotations

import pytest
import torch
from snippets import blocks

from rlkit.data.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow
SMALL = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
PACKAGES = {"accelerate": "accelerate", "lightning_fabric": "lightning-fabric"}


def start():
    return tiny_model(tiny_tokenizer(), **SMALL)


def rollouts(num):
    """Micro-batches of two ragged rows of up to 7 tokens, 1 to 3 of them a prompt, with a gap of tool output."""
    rng, micros = torch.Generator().manual_seed(0), []
    for i in range(num):
        ends, prompts = torch.tensor([[3 + i % 5], [7]]), torch.tensor([[1], [1 + i % 3]])
        places = torch.arange(7)
        micros.append(
            {
                "input_ids": torch.randint(0, 200, (2, 7), generator=rng),
                "attention_mask": (places < ends).long(),
                "mask": (places >= prompts) & (places < ends) & (places != 4),
                "old_logp": -5.5 + 0.4 * torch.randn(2, 6, generator=rng),
                "advantages": torch.randn(2, generator=rng),
            }
        )
    return micros


def expected(micros):
    """The parameters after one SGD step on the mean over all sampled tokens, token by token from full logits."""
    model, terms = start(), []
    for micro in micros:
        for i in range(2):
            row = micro["input_ids"][i][: int(micro["attention_mask"][i].sum())]
            logp = model(input_ids=row[None]).logits[0].log_softmax(-1)
            for t in micro["mask"][i].nonzero().flatten().tolist():
                ratio = (logp[t - 1, row[t]] - micro["old_logp"][i, t - 1]).exp()
                a = micro["advantages"][i]
                terms.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
    torch.stack(terms).mean().backward()
    return [p.detach() - 0.1 * p.grad for p in model.parameters()]


def trained(package, micros):
    """The parameters after the page's step in that package."""
    model = start()
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    for code in blocks("docs/own-trainer.md"):
        if "def token_loss" in code or f"from {package} import" in code:
            exec(code, names)
    names["train_step"](micros)
    return [p.detach() for p in model.parameters()]


def check(after, micros):
    want = expected(micros)
    moved = max((p - q.detach()).abs().max().item() for p, q in zip(want, start().parameters(), strict=True))
    difference = max((p - q).abs().max().item() for p, q in zip(after, want, strict=True))
    print(f"largest step {moved:.1e}, largest difference of the parameters {difference:.1e}")
    assert moved > 1e-3
    assert difference < 1e-6


ON_TWO_RANKS = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("test", sys.argv[1])
test = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test)
if sys.argv[2] == "accelerate":
    from accelerate import PartialState
    rank = PartialState(cpu=True).process_index
else:
    rank = int(__import__("os").environ["RANK"])
after = test.trained(sys.argv[2], test.rollouts(8)[rank::2])
if rank == 0:
    torch.save(after, sys.argv[3] + "/after.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_the_step_is_that_of_one_batch_of_all_tokens(package, tmp_path, on_two_ranks):
    pytest.importorskip(package, reason=f"pip install {PACKAGES[package]}")
    on_two_ranks(ON_TWO_RANKS, __file__, package, tmp_path)
    check(torch.load(tmp_path / "after.pt"), rollouts(8))
