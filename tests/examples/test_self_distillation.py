"""examples/self_distillation.py: the hint teaches what no sample has."""

from __future__ import annotations

import pytest
import self_distillation


@pytest.mark.slow
def test_the_hint_teaches_what_the_reward_never_pays() -> None:
    found = self_distillation.main(seeds=1)
    assert found["reward"] == [0.0]
    assert found["initial weights"][0] > 0.7
