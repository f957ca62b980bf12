"""examples/own_dpo.py and own_ppo.py: loops of one's own from functions, which learn."""

from __future__ import annotations

import math

import own_dpo
import own_ppo
import pytest
import torch


def test_dpo_prefers_digits() -> None:
    losses = own_dpo.main(steps=8)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # policy and reference are equal
    assert sum(losses[-3:]) / 3 < 0.6


@pytest.mark.slow
def test_ppo_learns_to_write_digits(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = own_ppo.main(steps=14, batch_size=32)
    assert sum(rewards[-2:]) / 2 > 3 * sum(rewards[:2]) / 2
    assert len(capsys.readouterr().out.splitlines()) == 14


def test_gae_on_padded_rows_is_that_of_each_row() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [2.0, 9.0, 9.0], [0.0, 3.0, 9.0]])
    values = torch.tensor([[0.5, 0.2, 0.1], [0.3, 7.0, 7.0], [1.0, 2.0, 7.0]])
    advantages, returns = own_ppo.padded_gae(rewards, values, mask, lam=0.5)
    for row, num in enumerate(mask.sum(1).tolist()):
        after, ahead = 0.0, 0.0
        for t in reversed(range(num)):
            delta = rewards[row, t].item() + ahead - values[row, t].item()
            after, ahead = delta + 0.5 * after, values[row, t].item()
            assert advantages[row, t].item() == pytest.approx(after)
            assert returns[row, t].item() == pytest.approx(after + ahead)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()
