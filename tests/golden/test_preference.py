"""Published or hand-derivable numbers of the preference, reward-model and distillation losses, each with its source."""

from __future__ import annotations

import math

import pytest
import torch

from rlkit import losses as L

LN2 = math.log(2)
ZERO = torch.zeros(1, dtype=torch.float64)
MARGIN = torch.full((1,), 5.0, dtype=torch.float64)  # with beta = 0.1: beta delta = 0.5


@pytest.mark.parametrize(
    ("loss", "want"),
    [
        # DPO (arXiv:2305.18290, equation 7) at zero margin; its smoothed form has the same value there
        (L.dpo(ZERO, ZERO, beta=0.1), LN2),
        (L.dpo(ZERO, ZERO, beta=0.1, label_smoothing=0.1), LN2),
        (L.robust_dpo(ZERO, ZERO, beta=0.1, label_smoothing=0.1), LN2),
        # beta delta = 0.5, from TRL's formulas: sigmoid, cDPO (https://ericmitchell.ai/cdpo.pdf), robust (2403.00409)
        (L.dpo(MARGIN, ZERO, beta=0.1), 0.474077),
        (L.dpo(MARGIN, ZERO, beta=0.1, label_smoothing=0.1), 0.524077),
        (L.robust_dpo(MARGIN, ZERO, beta=0.1, label_smoothing=0.1), 0.411577),
        # IPO (arXiv:2310.12036, equation 17): (0 - 1 / (2 * 0.1))^2, and 0 at its target margin of 5
        (L.ipo(ZERO, ZERO, beta=0.1), 25.0),
        (L.ipo(MARGIN, ZERO, beta=0.1), 0.0),
        # hinge: 1 - 0.5
        (L.hinge(MARGIN, ZERO, beta=0.1), 0.5),
        # EXO (arXiv:2402.00856, equation 16) at zero margin: KL((1/2, 1/2) || (1 - e, e)) = -ln 2 - ln(e (1 - e)) / 2
        (L.exo_pair(ZERO, ZERO, beta=0.1), -LN2 - math.log(1e-3 * 0.999) / 2),
        # KTO (arXiv:2402.01306, equation 7) and APO-zero (arXiv:2408.06266, equation 7): 1 - 1/2 + 1 - 1/2
        (L.kto(ZERO, ZERO, beta=0.1), 1.0),
        # APO-down (equation 8): 1/2 + 1 - 1/2
        (L.apo_down(ZERO, ZERO, beta=0.1), 1.0),
        # NCA and BCO (TRL dpo_trainer.py) at zero: 2 ln 2 each
        (L.nca_pair(ZERO, ZERO, beta=0.1), 2 * LN2),
        (L.bco_pair(ZERO, ZERO, beta=0.1), 2 * LN2),
        # SPPO (arXiv:2405.00675, equation 4.7): 5^2 + 5^2
        (L.sppo_hard(ZERO, ZERO, beta=0.1), 50.0),
        # DiscoPOP (arXiv:2406.08414, equation 5) at zero margin: (ln 2 + 1) / 2
        (L.discopop(ZERO, ZERO, beta=0.1), (LN2 + 1) / 2),
        # SimPO (arXiv:2405.14734) at equal likelihoods: -log sigmoid(-gamma)
        (L.simpo(ZERO, ZERO, beta=2.0, gamma=0.5), math.log1p(math.exp(0.5))),
        # ORPO (arXiv:2403.07691) at p = 3/4 and 1/4: odds 3 and 1/3, log sigmoid(log 9) = log 0.9
        (L.orpo((ZERO + 0.75).log(), (ZERO + 0.25).log(), beta=0.1), -0.1 * math.log(0.9)),
        # f-DPO (arXiv:2309.16240): forward KL with u = 2 and 1/2, beta = 1: sigmoid(2 - 1/2)
        (L.dpo(*(L.alpha_score((ZERO + u).log(), alpha=1.0) for u in (2, 0.5)), beta=1.0), math.log1p(math.exp(-1.5))),
        # Jensen-Shannon with u = 3 and 1: log(2*3/4) - log(2*1/2) = log 1.5, sigmoid(log 1.5) = 0.6
        (L.dpo(L.js_score((ZERO + 3).log()), L.js_score(ZERO), beta=1.0), -math.log(0.6)),
        # alpha = 1/2 with u = 4 and 1: (1 - 1/2) / 0.5 - 0 = 1
        (L.dpo(*(L.alpha_score((ZERO + u).log(), alpha=0.5) for u in (4, 1)), beta=1.0), math.log1p(math.exp(-1.0))),
        # Bradley-Terry with margin 1 and centring 0.01 (TRL reward_trainer.py): r = 2, 1
        (L.bradley_terry(ZERO + 2, ZERO + 1, margin=1.0, center_coef=0.01), LN2 + 0.09),
        # OpenRLHF LogExpLoss: log(1 + e^(1 - 2))
        (L.bradley_terry(ZERO + 2, ZERO + 1), math.log1p(math.exp(-1.0))),
    ],
)
def test_values(loss: torch.Tensor, want: float) -> None:
    assert loss.item() == pytest.approx(want, abs=1e-6)


def test_iw_opd_prefix_weights() -> None:
    """TRL, test_iw_opd_prefix_weights_and_loss: advantages [.2, -.3, .5], gamma .5 give weights [1.5, 1.4, 1.25]."""
    advantages = torch.tensor([0.2, -0.3, 0.5])
    mask, cu_seqlens = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])
    weights = L.iw_opd_weights(advantages, mask=mask, cu_seqlens=cu_seqlens, gamma=0.5)
    torch.testing.assert_close(weights, torch.tensor([1.5, 1.4, 1.25]))


def test_divergences_of_two_coins() -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2): KL(p||q) = 3/4 ln 3 - ln 2, KL(q||p) = ln 2 - ln 3 / 2; mixture (5/8, 3/8)."""
    teacher = torch.tensor([0.75, 0.25], dtype=torch.float64).log()
    student = torch.zeros(2, dtype=torch.float64)
    assert L.forward_kl(student, teacher).item() == pytest.approx(0.75 * math.log(3) - LN2)
    assert L.reverse_kl(student, teacher).item() == pytest.approx(LN2 - 0.5 * math.log(3))
    to_mixture = 0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 5) + 0.5 * math.log(4 / 3)
    assert L.jsd(student, teacher).item() == pytest.approx(to_mixture / 2)
    assert L.uld(student, teacher).item() == pytest.approx(0.5)


def test_disjoint_distributions_reach_the_bound_of_jsd() -> None:
    """JSD(beta) of distributions that share no token is the entropy of (beta, 1 - beta), ln 2 at beta = 1/2."""
    student, teacher = torch.tensor([[50.0, -50.0]]), torch.tensor([[-50.0, 50.0]])
    assert L.jsd(student, teacher).item() == pytest.approx(LN2)
    assert L.jsd(student, teacher, beta=0.1).item() == pytest.approx(-0.1 * math.log(0.1) - 0.9 * math.log(0.9))
