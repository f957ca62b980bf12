"""The code of docs/own-trainer.md runs in order, and gives what a loop over tokens gives."""

import math
import re
from pathlib import Path

import pytest
import torch

from rlkit import losses

PAGE = (Path(__file__).parents[2] / "docs" / "own-trainer.md").read_text()
LENS = [3, 1, 2, 3]
REWARDS = [1.0, 0.0, 0.5, 1.0]


@pytest.fixture(scope="module")
def scope():
    """Without the blocks inside of a trainer, which tests/examples runs."""
    names, page = {}, re.sub(r"## TRL\n.*(?=## torch.compile)", "", PAGE, flags=re.DOTALL)
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    return names


def test_grpo_on_a_padded_batch(scope):
    expected = 0.0
    for i, length in enumerate(LENS):
        a, b = REWARDS[i // 2 * 2 : i // 2 * 2 + 2]
        advantage = (REWARDS[i] - (a + b) / 2) / (abs(a - b) / math.sqrt(2) + 1e-6)
        ratio = math.exp(0.1)
        expected += length * -min(advantage * ratio, advantage * min(max(ratio, 0.8), 1.2)) / 9
    assert scope["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert scope["logp"].grad[~scope["mask"]].abs().max() == 0
    assert scope["logp"].grad[scope["mask"]].abs().min() > 0


def test_gae_by_way_of_packed_streams(scope):
    for i, length in enumerate(LENS):
        later, value_after = 0.0, 0.0
        for t in reversed(range(length)):
            later = (REWARDS[i] if t == length - 1 else 0.0) + value_after - 0.5 + 0.95 * later
            value_after = 0.5
            assert scope["padded_advantages"][i, t].item() == pytest.approx(later, rel=1e-5)
            assert scope["returns"][i, t].item() == pytest.approx(later + 0.5, rel=1e-5)
        assert scope["padded_advantages"][i, length:].tolist() == [0.0] * (3 - length)


def test_sft_loss_from_hidden_states(scope):
    terms = []
    for i, row in enumerate(scope["labels"].tolist()):
        for t, label in enumerate(row):
            if label != -100:
                logits = scope["weight"].double() @ scope["hidden"][i, t - 1].double()
                terms.append((logits.exp().sum().log() - logits[label]).item())
    assert len(terms) == 5
    assert scope["sft_loss"].item() == pytest.approx(sum(terms) / 5, rel=1e-5)


def test_gradients_of_each_sample(scope):
    for i in range(2):
        weight = scope["weight"].clone().requires_grad_()
        logits = scope["hidden"][i, :-1] @ weight.T
        logp = logits.log_softmax(-1)[torch.arange(3), scope["targets"][i]]
        (want,) = torch.autograd.grad(-logp[scope["trainable"][i]].sum(), weight)
        torch.testing.assert_close(scope["per_sample"][i], want, rtol=1e-4, atol=1e-5)


def test_the_derivative_by_lambda(scope):
    """A_0 = d_0 + lam d_1 + lam^2 d_2 of the first row, of three tokens with V = 0.5 and reward 1 at the end."""
    deltas = [0.0, 0.0, 0.5]
    for lam, got in zip([0.0, 0.5, 0.95], scope["by_lambda"].tolist(), strict=True):
        assert got == pytest.approx(deltas[1] + 2 * lam * deltas[2], abs=1e-6)


def test_the_error_on_the_page_is_the_one_that_is_raised():
    shown = " ".join(re.search(r"    advantages must have the shape.*?\n\n", PAGE, re.DOTALL)[0].split())
    with pytest.raises(ValueError, match=re.escape(shown)):
        losses.ppo_clip(torch.zeros(4, 4), torch.zeros(4))
