"""The loss of supervised fine-tuning."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from small import small_model, tokenizer

from rlkit.loops.sft import sft
from rlkit.losses import dft
from rlkit.run.folder import read_metrics
from rlkit.settings import Optim, Schedule


def test_the_gradient_of_dft_is_that_of_the_nll_times_the_tokens_probability(tmp_path, no_pictures):
    """With one trained token; the logged loss is the NLL in both runs."""
    ids = tokenizer().encode("abcd")
    example = SimpleNamespace(ids=ids, mask=[i == 2 for i in range(len(ids))])
    logged = []
    for name, loss in (("nll", None), ("dft", dft)):
        sft(small_model(), tokenizer(), [example], Schedule(tmp_path / name, steps=1), Optim(), loss=loss, batch_size=1)
        logged += read_metrics(tmp_path / name)
    nll, weighted = logged
    assert weighted["loss"] == nll["loss"] > 0.1
    assert weighted["grad_norm"] / nll["grad_norm"] == pytest.approx(math.exp(-nll["loss"]), rel=1e-4)
