"""The tables of names that are an expression, in docs/*.md: value and gradient are those of the papers' formulas."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlkit import advantages, losses

DOCS = Path(__file__).parents[2] / "docs"
HEAD = "| name | expression | elsewhere, and notes | paper |\n"
NUMBERS = {"beta": 0.3, "alpha": 0.4, "gamma": 0.6, "coef": 0.01, "sft_coef": 0.5}
LOGPS = ("logp", "prox_logp", "rollout_logp", "chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp",
         "gold_logp", "log_S")  # fmt: skip
REALS = ("log_ratio", "advantages", "entropy", "chosen_log_ratio", "rejected_log_ratio", "rewards", "greedy_rewards",
         "chosen_rewards", "rejected_rewards", "positive_logits", "negative_logits")  # fmt: skip
B, ALPHA = NUMBERS["beta"], NUMBERS["alpha"]


def expressions() -> dict[str, str]:
    """Each name of the pages' tables with its expression."""
    found: dict[str, str] = {}
    for page in sorted(DOCS.glob("*.md")):
        for table in page.read_text().split(HEAD)[1:]:
            for line in table.split("\n\n")[0].splitlines()[1:]:
                name, cell = (c.strip() for c in line.split("|")[1:3])
                (code,) = re.fullmatch(r"`([^`]+)`", cell).groups()  # type: ignore[union-attr]
                assert name not in found
                found[name] = code
    return found


def streams() -> dict[str, Tensor]:
    """Leaves by name: log-probs below 0, others of both signs; ratios on both sides of every clip."""
    rng = torch.Generator().manual_seed(0)
    made = {name: -0.1 - 2 * torch.rand(24, dtype=torch.float64, generator=rng) for name in LOGPS}
    made |= {name: torch.randn(24, dtype=torch.float64, generator=rng) for name in REALS}
    made["entropy"] = made["entropy"].abs()
    return {name: x.requires_grad_() for name, x in made.items()}


GIVEN = {
    "mask": torch.arange(24) % 5 != 2,
    "cu_seqlens": torch.tensor([0, 3, 3, 10, 24]),
    "chosen_lens": torch.arange(24) % 4 + 1,
    "rejected_lens": torch.arange(24) % 7 + 1,
    "labels": torch.linspace(0, 1, 24, dtype=torch.float64),
}


def nll(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(-x))


def clipped(r: Tensor, a: Tensor) -> Tensor:
    return torch.where(a > 0, -a * r.clamp(max=1.2), -a * r.clamp(min=0.8))


def reward(logp: Tensor) -> Tensor:
    return (1 - logp.exp() ** -ALPHA) / ALPHA


def gspo_token(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """sg(s) pi / sg(pi), s the geometric mean of the sequence's ratios, in a loop over its trainable tokens."""
    out = [torch.zeros((), dtype=torch.float64)] * 24
    for start, stop in ((0, 3), (3, 10), (10, 24)):
        places = [t for t in range(start, stop) if t % 5 != 2]
        s = (sum(log_ratio[t].item() for t in places) / torch.tensor(float(len(places)), dtype=torch.float64)).exp()
        for t in places:
            out[t] = clipped(s * (log_ratio[t] - log_ratio[t].item()).exp(), advantages[t])
    return torch.stack(out)


def paired_aot(
    chosen_logp: Tensor, rejected_logp: Tensor, ref_chosen_logp: Tensor, ref_rejected_logp: Tensor
) -> Tensor:
    margins = (chosen_logp - rejected_logp, ref_chosen_logp - ref_rejected_logp)
    ours, theirs = ([m[i] for i in sorted(range(24), key=lambda i, m=m: m[i].item())] for m in margins)
    return torch.stack([nll(B * (a - b)) for a, b in zip(ours, theirs, strict=True)])


def two_tokens(positive_logits: Tensor, negative_logits: Tensor) -> Tensor:
    p = positive_logits.exp() / (positive_logits.exp() + negative_logits.exp())
    return -GIVEN["labels"] * p.log() - (1 - GIVEN["labels"]) * (1 - p).log()


def double_sided(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    r = log_ratio.detach().exp()
    return torch.where((r < 0.8) | (r > 1.3), 0, -r * advantages * log_ratio)


def odds(logp: Tensor) -> Tensor:
    return logp.exp() / (1 - logp.exp())


# name: the paper's formula of the streams that its parameters name
FORMULAS: dict[str, Callable[..., Tensor]] = {
    "GPG": lambda log_ratio, advantages: -advantages * log_ratio,
    "two-sided clip": lambda log_ratio, advantages: torch.maximum(
        -advantages * log_ratio.exp().clamp(max=4.0), -advantages * log_ratio.exp().clamp(0.8, 1.2)
    ),
    "decoupled PPO": lambda prox_logp, rollout_logp, logp, advantages: (
        (prox_logp - rollout_logp).detach().exp().clamp(max=2.0) * clipped((logp - prox_logp).exp(), advantages)
    ),
    "double-sided IS": double_sided,
    "GSPO-token": gspo_token,
    "NLL, SFT": lambda logp: -torch.log(logp.exp()),
    "DFT": lambda logp: -logp.exp().detach() * torch.log(logp.exp()),
    "NLL of the chosen response": lambda chosen_logp: -torch.log(chosen_logp.exp()),
    "entropy bonus": lambda entropy: entropy * -0.01,
    "token sum": lambda: torch.tensor([float(t % 5 != 2) for t in range(24)]),
    "truncated log-prob": lambda rollout_logp, log_S: (rollout_logp.exp() / log_S.exp()).log(),
    "ReMax": lambda rewards, greedy_rewards: rewards + -1 * greedy_rewards,
    "length-normalised DPO": lambda chosen_log_ratio, rejected_log_ratio: nll(
        B * chosen_log_ratio / GIVEN["chosen_lens"] - B * rejected_log_ratio / GIVEN["rejected_lens"]
    ),
    "APO-zero": lambda chosen_log_ratio, rejected_log_ratio: (
        1 - torch.sigmoid(B * chosen_log_ratio) + torch.sigmoid(B * rejected_log_ratio)
    ),
    "AOT, paired": paired_aot,
    "DPO, forward KL": lambda chosen_log_ratio, rejected_log_ratio: nll(
        B * (1 / rejected_log_ratio.exp() - 1 / chosen_log_ratio.exp())
    ),
    "DPO, Jensen-Shannon": lambda chosen_log_ratio, rejected_log_ratio: nll(
        B * ((1 + rejected_log_ratio.exp()) / (1 + chosen_log_ratio.exp())).log()
        + B * (chosen_log_ratio - rejected_log_ratio)
    ),
    "DPO, alpha divergence": lambda chosen_log_ratio, rejected_log_ratio: nll(
        B / ALPHA * (rejected_log_ratio.exp() ** -ALPHA - chosen_log_ratio.exp() ** -ALPHA)
    ),
    "AlphaPO": lambda chosen_logp, rejected_logp: nll(B * (reward(chosen_logp) - reward(rejected_logp)) - 0.6),
    "CPO, its preference term": lambda chosen_logp, rejected_logp: nll(B * (chosen_logp - rejected_logp)),
    "CPO": lambda chosen_logp, rejected_logp: nll(B * (chosen_logp - rejected_logp)) - chosen_logp,
    "ORPO": lambda chosen_logp, rejected_logp: B * nll((odds(chosen_logp) / odds(rejected_logp)).log()) - chosen_logp,
    "RPO": lambda chosen_log_ratio, rejected_log_ratio, chosen_logp: (
        nll(B * (chosen_log_ratio - rejected_log_ratio)) - 0.5 * chosen_logp
    ),
    "TPO": lambda chosen_logp, rejected_logp, gold_logp: nll(B * (chosen_logp - rejected_logp)) - ALPHA * gold_logp,
    "MPO": lambda chosen_log_ratio, rejected_log_ratio, chosen_logp: (
        0.8 * nll(B * (chosen_log_ratio - rejected_log_ratio))
        + 0.2 * (nll(B * chosen_log_ratio) + nll(-B * rejected_log_ratio))
        - chosen_logp
    ),
    "log-exp": lambda chosen_rewards, rejected_rewards: torch.log(1 + (rejected_rewards - chosen_rewards).exp()),
    "PRM of two tokens": two_tokens,
}


def test_every_row_has_a_formula() -> None:
    assert set(expressions()) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_equal_the_formula(name: str) -> None:
    code, formula, leaves = expressions()[name], FORMULAS[name], streams()
    public = {n: getattr(room, n) for room in (advantages, losses) for n in room.__all__}
    took = formula.__code__.co_varnames[: formula.__code__.co_argcount]
    expected = formula(**{n: leaves[n] for n in took})
    got = eval(code, public | NUMBERS | GIVEN | leaves)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, check_dtype=False)
    assert got.unique().numel() > 1
    if expected.requires_grad:
        weights = torch.linspace(0.5, 2, 24, dtype=torch.float64)
        grads = [
            torch.autograd.grad((x * weights).sum(), [*leaves.values()], materialize_grads=True)
            for x in (got, expected)
        ]
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    else:
        assert not got.requires_grad
