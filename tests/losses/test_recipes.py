"""The code of docs/recipes.md against the papers' objectives, written as loops over samples in fp64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit import advantages, losses
from rlkit.packing import microbatches, pack, select, with_advantages, with_streams
from rlkit.types import Batch, Trajectory

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
IMPORTS, NAMES = (re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0] for text in (PAGE, SECTIONS["The others"]))
CODE = {
    name: re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    for name, text in SECTIONS.items()
    if "```python" in text
}
del CODE["The others"]
TABLE = {
    cells[0]: [cell.strip("`") for cell in cells[1:3]]
    for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in SECTIONS["The others"].splitlines())
    if cells and cells[0] != "name" and not set(cells[0]) <= {"-"}
}


def sample(ids: list[int], reward: float, *, mask: list[bool] | None = None, truncated: bool = False) -> Trajectory:
    n = len(ids)
    mask = mask or [True] * n
    return Trajectory(
        [7, 8], ids, mask, [-1.0 if m else 0.0 for m in mask], [0] * n, reward=reward, truncated=truncated
    )


def make_batch() -> tuple[Batch, Tensor]:
    """Three groups: one of two samples, a singleton, and one of three with a tool call and a truncation."""
    groups = [
        [sample([1, 2, 3], 1.0), sample([4], 0.0)],
        [sample([5, 6], 1.0)],
        [
            sample([1, 2, 3, 4], 2.0, mask=[True, False, False, True]),
            sample([5], -1.0, truncated=True),
            sample([9, 9], 0.5),
        ],
    ]
    batch = pack(groups)
    g = torch.Generator().manual_seed(3)
    noise = torch.randn(4, batch.num_tokens, dtype=torch.float64, generator=g)
    where = lambda x: torch.where(batch.mask, x, 0)
    batch = replace(
        batch,
        rewards=batch.rewards.double(),
        token_rewards=batch.token_rewards.double(),
        rollout_logp=where(-1 + 0.3 * noise[0]),
        old_logp=where(-1 + 0.3 * noise[1]),
        ref_logp=where(-1.2 + 0.3 * noise[2]),
        values=0.3 * noise[3],
    )
    logp = where(-1 + 0.4 * torch.randn(batch.num_tokens, dtype=torch.float64, generator=g))
    return batch, logp.requires_grad_()


BATCH, LOGP = make_batch()


class Seq:
    """One sample as plain lists over its action tokens."""

    def __init__(self, i: int) -> None:
        at = [t for t in range(BATCH.cu_seqlens[i], BATCH.cu_seqlens[i + 1]) if BATCH.mask[t]]
        self.reward = BATCH.rewards[i].item()
        self.group = BATCH.group_ids[i].item()
        self.logp = [LOGP[t] for t in at]
        self.x = [LOGP[t] - BATCH.old_logp[t] for t in at]
        self.roll = [LOGP[t] - BATCH.rollout_logp[t] for t in at]
        self.ref = [LOGP[t] - BATCH.ref_logp[t] for t in at]
        self.old_ref = [(BATCH.old_logp[t] - BATCH.ref_logp[t]).item() for t in at]
        self.values = [BATCH.values[t].item() for t in at]
        self.rewards = [BATCH.token_rewards[t].item() for t in at]
        end = BATCH.cu_seqlens[i + 1] - 1
        self.bootstrap = BATCH.values[end].item() if BATCH.truncated[i] else 0.0


SEQS = [Seq(i) for i in range(BATCH.num_seqs)]
NUM_TOKENS = sum(len(s.x) for s in SEQS)


def peers(s: Seq) -> list[float]:
    return [o.reward for o in SEQS if o.group == s.group]


def mean(x: list[float]) -> float:
    return sum(x) / len(x)


def centered(s: Seq) -> float:
    return s.reward - mean(peers(s)) if len(peers(s)) > 1 else 0.0


def zscore(s: Seq) -> float:
    r = peers(s)
    if len(r) == 1:
        return 0.0
    std = math.sqrt(sum((v - mean(r)) ** 2 for v in r) / (len(r) - 1))
    return (s.reward - mean(r)) / (std + 1e-6)


def clipped(x: Tensor, a: float, low: float, high: float) -> Tensor:
    r = x.exp()
    return -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def k3(d: Tensor) -> Tensor:
    return (-d).exp() - 1 + d


def over_tokens(f: Callable[[Seq, int], Tensor]) -> Tensor:
    return sum(f(s, t) for s in SEQS for t in range(len(s.x))) / NUM_TOKENS


def over_seqs(f: Callable[[Seq], Tensor]) -> Tensor:
    return sum(f(s) for s in SEQS) / len(SEQS)


def whitened(values: list[list[float]]) -> list[list[float]]:
    flat = [v for vs in values for v in vs]
    m = mean(flat)
    std = math.sqrt(sum((v - m) ** 2 for v in flat) / (len(flat) - 1))
    return [[(v - m) / (std + 1e-6) for v in vs] for vs in values]


def gae(s: Seq, rewards: list[float], lam: float) -> list[float]:
    out, next_value, running = [], s.bootstrap, 0.0
    for r, v in zip(reversed(rewards), reversed(s.values), strict=True):
        running = r + next_value - v + lam * running
        next_value = v
        out.append(running)
    return out[::-1]


def with_kl(s: Seq, coef: float) -> list[float]:
    return [r - coef * d for r, d in zip(s.rewards, s.old_ref, strict=True)]


def grpo() -> Tensor:
    return over_seqs(
        lambda s: (
            sum(clipped(x, zscore(s), 0.2, 0.2) + 0.04 * k3(d) for x, d in zip(s.x, s.ref, strict=True)) / len(s.x)
        )
    )


def per_token_advantages(a: list[list[float]], low: float, high: float) -> Tensor:
    return over_tokens(lambda s, t: clipped(s.x[t], a[SEQS.index(s)][t], low, high))


def reinforce_pp() -> Tensor:
    to_go = [[sum(with_kl(s, 0.01)[t:]) for t in range(len(s.x))] for s in SEQS]
    return per_token_advantages(whitened(to_go), 0.2, 0.2)


def reinforce_pp_baseline() -> Tensor:
    a = whitened([[centered(s)] * len(s.x) for s in SEQS])
    return per_token_advantages(a, 0.2, 0.2) + over_tokens(lambda s, t: 0.01 * s.ref[t] ** 2 / 2)


def rloo() -> Tensor:
    def loss(s: Seq) -> Tensor:
        score = lambda o: o.reward - 0.05 * sum(o.old_ref)
        others = [score(o) for o in SEQS if o.group == s.group and o is not s]
        return -((score(s) - mean(others)) if others else 0.0) * sum(s.logp)

    return over_seqs(loss)


def ppo() -> Tensor:
    return per_token_advantages(whitened([gae(s, with_kl(s, 0.02), 0.95) for s in SEQS]), 0.2, 0.2)


def vapo() -> Tensor:
    a = [gae(s, s.rewards, max(0.0, 1 - 1 / (0.05 * len(s.x)))) for s in SEQS]
    good = [s for s in SEQS if s.reward > 0]
    nll = -sum(sum(s.logp) for s in good) / sum(len(s.x) for s in good)
    return per_token_advantages(a, 0.2, 0.28) + 0.1 * nll


def gpg() -> Tensor:
    alive = sum(len(set(peers(s))) > 1 for s in SEQS)
    return over_tokens(lambda s, t: -centered(s) * len(SEQS) / alive * s.logp[t])


def gmpo() -> Tensor:
    def loss(s: Seq) -> Tensor:
        a = zscore(s)
        inner = [x.clamp(max=0.4) if a > 0 else x.clamp(min=-0.4) for x in s.x]
        return -a * (sum(inner) / len(inner)).exp()

    return over_seqs(loss)


def sapo() -> Tensor:
    def loss(s: Seq) -> Tensor:
        tau = 1.0 if zscore(s) > 0 else 1.05
        return -zscore(s) * sum(4 / tau * torch.sigmoid(tau * (x.exp() - 1)) for x in s.x) / len(s.x)

    return over_seqs(loss)


def vespo() -> Tensor:
    def loss(s: Seq, t: int) -> Tensor:
        a, w = zscore(s), sum(s.roll).detach().exp()
        k, lam = (2, 3) if a >= 0 else (3, 2)
        return -(w**k * math.e**lam * (-lam * w).exp()) * a * s.roll[t]

    return over_tokens(loss)


def max_rl() -> Tensor:
    return over_seqs(lambda s: -(centered(s) / (mean(peers(s)) + 1e-6)) * sum(s.logp))


ROWS: dict[str, Callable[[], Tensor]] = {
    "GRPO": grpo,
    "Dr. GRPO": lambda: over_seqs(lambda s: sum(clipped(x, centered(s), 0.2, 0.2) for x in s.x) / 3000),
    "DAPO": lambda: over_tokens(lambda s, t: clipped(s.x[t], zscore(s), 0.2, 0.28)),
    "GSPO": lambda: over_seqs(lambda s: clipped(sum(s.x) / len(s.x), zscore(s), 3e-4, 4e-4)),
    "CISPO": lambda: over_tokens(lambda s, t: -s.x[t].exp().clamp(max=5).detach() * zscore(s) * s.x[t]),
    "RLOO": rloo,
    "REINFORCE++": reinforce_pp,
    "REINFORCE++-baseline": reinforce_pp_baseline,
    "PPO": ppo,
    "VAPO": vapo,
    "GPG": gpg,
    "LUSPO": lambda: over_seqs(lambda s: len(s.x) * clipped(sum(s.x) / len(s.x), zscore(s), 3e-4, 4e-4)),
    "GMPO": gmpo,
    "SAPO": sapo,
    "VESPO": vespo,
    "Kimi k1.5": lambda: over_seqs(lambda s: -centered(s) * sum(s.x) + 0.05 * sum(s.x) ** 2),
    "MaxRL": max_rl,
}


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(IMPORTS + code, names)
    return names


def of_the_page(name: str, batch: Batch = BATCH) -> Tensor:
    """The loss that the page's code gives, or for a row of its table the two cells."""
    if name in CODE:
        return run(CODE[name], logp=LOGP, batch=batch, num_tokens=None, num_seqs=None)["loss"]
    stream, loss = TABLE[name]
    public = {n: getattr(room, n) for room in (advantages, losses) for n in room.__all__}
    names = run(NAMES, logp=LOGP, **{f.name: getattr(batch, f.name) for f in fields(batch)}, **public)
    found = eval(stream, names)
    batch = with_advantages(batch, found) if callable(found) else with_streams(batch, advantages=found)
    return eval(loss, names | {"A": batch.advantages})


def test_the_page_has_these_recipes() -> None:
    assert [*CODE, *TABLE] == [*ROWS]


@pytest.mark.parametrize("name", ROWS)
def test_loss_and_gradient_are_those_of_the_paper(name: str) -> None:
    got, expected = of_the_page(name), ROWS[name]()
    grads = [torch.autograd.grad(x, LOGP, retain_graph=True)[0] for x in (got, expected)]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-9)
    assert (grads[0] != 0).any()


@pytest.mark.parametrize("name", CODE)
def test_micro_batches_add_up_exactly(name: str) -> None:
    """The lines above the blank one run on the whole batch; those below it give its loss in any split."""
    once, each = CODE[name].split("\n\n")
    counts = {"num_tokens": NUM_TOKENS, "num_seqs": len(SEQS)}
    whole = run(CODE[name], logp=LOGP, batch=BATCH, **counts)["loss"]
    made = run(once, logp=LOGP, batch=BATCH, **counts)
    batch, weights = made["batch"], made["weights"]
    total = 0.0
    for index in ([0, 3], [5, 1], [2], [4]):
        at = torch.cat([torch.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in index])
        total = total + run(each, logp=LOGP[at], batch=select(batch, index), weights=weights[at])["loss"]
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(x, LOGP, retain_graph=True)[0] for x in (total, whole)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-18)
    micro = microbatches((batch, weights, LOGP), max_tokens=6)
    parts = [run(each, logp=lp, batch=mb, weights=w)["loss"] for mb, w, lp in micro]
    assert len(parts) > 1
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)


def test_on_policy_it_is_the_policy_gradient() -> None:
    """With one update per rollout the ratio is 1."""
    (grad,) = torch.autograd.grad(of_the_page("DAPO", replace(BATCH, old_logp=LOGP.detach())), LOGP)
    expected = over_tokens(lambda s, t: -zscore(s) * s.logp[t])
    torch.testing.assert_close(grad, torch.autograd.grad(expected, LOGP)[0], rtol=1e-6, atol=1e-9)
