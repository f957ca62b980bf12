"""Rollout corrections against scalar formulas and loops over sequences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import losses
from rlkit.losses import (
    batch_normalized,
    clipped_is,
    effective_sample_size,
    icepop,
    keep_divergence,
    keep_ratio,
    keep_whole_sequences,
    log_kept_mass,
    log_support_mass,
    opsm,
    seq_log_ratio,
    seq_log_ratio_sum,
    seq_mask_tis,
    tis,
    veto,
)
from rlkit.losses.corrections import kept_support

LENS = [3, 0, 1, 4, 2]
CU = torch.tensor([0, 3, 3, 4, 8, 10])
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 0, 0]).bool()
X = torch.tensor([1.2, 9.0, -0.9, -0.8, 0.002, -0.001, 7.0, 0.001, 4.0, 5.0], dtype=torch.float64)
SEQ = {"mask": MASK, "cu_seqlens": CU}


def per_token(f, x: torch.Tensor = X) -> torch.Tensor:
    return torch.tensor(
        [f(v) if m else 0.0 for v, m in zip(x.tolist(), MASK.tolist(), strict=True)], dtype=torch.float64
    )


def per_seq(f) -> torch.Tensor:
    """f(trainable log-ratios of a sequence) -> one weight per trainable token."""
    out = [0.0] * 10
    for i in range(5):
        at = [t for t in range(CU[i], CU[i + 1]) if MASK[t]]
        for t, w in zip(at, f([X[t].item() for t in at]) if at else [], strict=True):
            out[t] = w
    return torch.tensor(out, dtype=torch.float64)


TOKEN = {
    "tis": (lambda x, m: tis(x, max_weight=2.0, mask=m), lambda v: min(math.exp(v), 2.0)),
    "clipped_is": (lambda x, m: clipped_is(x, low=0.5, high=2, mask=m), lambda v: min(max(math.exp(v), 0.5), 2.0)),
    "icepop": (lambda x, m: icepop(x, high=3.0, mask=m), lambda v: math.exp(v) if 0.5 <= math.exp(v) <= 3 else 0.0),
    "keep_ratio": (lambda x, m: keep_ratio(x, low=0.9, high=1.1, mask=m), lambda v: float(0.9 <= math.exp(v) <= 1.1)),
    "keep_divergence": (
        lambda x, m: keep_divergence(losses.k2(x, torch.zeros_like(x), mask=m), max_divergence=0.4, mask=m),
        lambda v: float(v * v / 2 <= 0.4),
    ),
}


@pytest.mark.parametrize("name", TOKEN)
def test_token_weights(name: str) -> None:
    f, expected = TOKEN[name]
    x = torch.where(MASK, X, torch.nan).requires_grad_()
    weights = f(x, MASK)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, per_token(expected))
    assert f(x.detach().bfloat16(), MASK).dtype == torch.float32
    assert f(torch.tensor([1e4, -1e4]), None).isfinite().all()


def test_icepop_defaults_are_the_published_bounds() -> None:
    x = torch.tensor([0.49, 0.51, 1.0, 4.99, 5.01], dtype=torch.float64).log()
    torch.testing.assert_close(icepop(x), torch.tensor([0, 0.51, 1.0, 4.99, 0], dtype=torch.float64))


def test_the_log_ratio_sets_the_level() -> None:
    whole = tis(seq_log_ratio_sum(X, **SEQ), max_weight=2.0, mask=MASK)
    torch.testing.assert_close(whole, per_seq(lambda xs: [min(math.exp(sum(xs)), 2.0)] * len(xs)))
    geometric = icepop(seq_log_ratio(X, **SEQ), low=0.999, high=1.2, mask=MASK)
    torch.testing.assert_close(
        geometric,
        per_seq(lambda xs: [math.exp(sum(xs) / len(xs)) * (0.999 <= math.exp(sum(xs) / len(xs)) <= 1.2)] * len(xs)),
    )


def test_sequence_masks() -> None:
    got = seq_mask_tis(X, **SEQ)
    torch.testing.assert_close(
        got,
        per_seq(lambda xs: [math.exp(x) * (0.999 <= math.exp(sum(xs) / len(xs)) <= 1.002) for x in xs]),
    )
    assert (got > 0).sum() == 3  # only the fourth sequence, untruncated
    got = veto(X, **SEQ, min_ratio=0.45)
    torch.testing.assert_close(got, per_seq(lambda xs: [float(min(xs) >= math.log(0.45))] * len(xs)))
    assert 0 < got.sum() < 6
    k3 = losses.k3(-X, torch.zeros_like(X))
    got = keep_whole_sequences(keep_divergence(k3, max_divergence=0.3, mask=MASK), **SEQ)
    torch.testing.assert_close(got, per_seq(lambda xs: [float(all(math.exp(x) - 1 - x <= 0.3 for x in xs))] * len(xs)))
    assert 0 < got.sum() < 6


def test_masked_tokens_never_veto() -> None:
    x = torch.tensor([0.0, -50.0, 0.0])
    mask = torch.tensor([True, False, True])
    assert veto(x, mask=mask, cu_seqlens=torch.tensor([0, 3])).tolist() == [1, 0, 1]
    assert veto(x, mask=None, cu_seqlens=torch.tensor([0, 3])).tolist() == [0, 0, 0]


def test_opsm_drops_bad_samples_far_from_the_policy() -> None:
    x = torch.tensor([-0.5, -0.5, -0.5, 0.5, -0.5, float("nan")], dtype=torch.float64)
    a = torch.tensor([-1.0, 1.0, 2.0, -1.0, -1.0, float("nan")], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, True, False])
    got = opsm(x, a, mask=mask, cu_seqlens=torch.tensor([0, 2, 3, 4, 6]), delta=0.4)
    assert got.tolist() == [0, 1, 1, 1, 0, 0]
    assert opsm(x, a, mask=mask, cu_seqlens=torch.tensor([0, 2, 3, 4, 6]), delta=0.6).tolist() == [1, 1, 1, 1, 1, 0]


def test_batch_normalized_has_mean_one() -> None:
    w = torch.tensor([1.0, 3.0, float("nan"), 2.0])
    mask = torch.tensor([True, True, False, True])
    assert batch_normalized(w, mask=mask).tolist() == [0.5, 1.5, 0, 1]
    assert batch_normalized(w, mask=mask, mean=4.0).tolist() == [0.25, 0.75, 0, 0.5]
    assert batch_normalized(torch.zeros(3)).tolist() == [0, 0, 0]
    assert batch_normalized(w, mask=mask & False).tolist() == [0, 0, 0, 0]


@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=9))
def test_effective_sample_size_is_kish(ws: list[float]) -> None:
    w = torch.tensor([*ws, float("nan")], dtype=torch.float64)
    mask = torch.arange(len(w)) < len(ws)
    got = effective_sample_size(w, mask=mask).item()
    assert got == pytest.approx(sum(ws) ** 2 / sum(x * x for x in ws))
    assert 1 - 1e-9 <= got <= len(ws) + 1e-9
    assert effective_sample_size(3 * w, mask=mask).item() == pytest.approx(got)


def test_effective_sample_size_of_equal_and_of_no_weights() -> None:
    assert effective_sample_size(torch.full((7,), 0.3)).item() == pytest.approx(7)
    assert effective_sample_size(torch.zeros(4)).item() == 0
    assert effective_sample_size(torch.tensor([0.0, 1.0])).item() == 1


def kept_by_hand(probs: list[float], top_k: int, top_p: float) -> list[int]:
    """The kept set of one distribution: walk down the sorted tokens until k are taken or p is reached."""
    kept, mass = [], 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i]):
        if kept and (mass >= top_p or len(kept) == (top_k or len(probs))):
            break
        kept.append(i)
        mass += probs[i]
    return kept


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=7, unique=True),
    st.integers(0, 8),
    st.sampled_from([0.05, 0.5, 0.9, 0.97, 1.0]),
)
def test_log_kept_mass_is_the_mass_of_the_kept_set(counts: list[int], top_k: int, top_p: float) -> None:
    probs = [c / sum(counts) for c in counts]
    logits = torch.tensor(probs, dtype=torch.float64).log() + 3.7
    got = log_kept_mass(logits, top_p=top_p - 1e-12 if top_p < 1 else 1.0, top_k=top_k)
    kept = kept_by_hand(probs, top_k, top_p - 1e-12 if top_p < 1 else 2.0)
    assert got.item() == pytest.approx(math.log(sum(probs[i] for i in kept)), abs=1e-12)


def test_kept_mass_of_impossible_tokens_masked_rows_and_no_truncation() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [torch.nan] * 3])
    mask = torch.tensor([True, False])
    assert log_kept_mass(logits, mask=mask).tolist() == [0, 0]
    half = log_kept_mass(logits, top_k=1, mask=mask)
    assert half[0].item() == pytest.approx(math.log(0.5))
    assert half[1].isfinite()
    assert log_kept_mass(torch.tensor([0.5, 0.3, 0.2]).log(), min_p=0.5).item() == pytest.approx(math.log(0.8))


def test_truncated_sampling_is_corrected_in_expectation() -> None:
    """Enumerate: the corrected weights give sum over kept tokens of pi_new f; the uncorrected are off by 1 / S."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    new = torch.tensor([0.4, 0.4, 0.1, 0.1], dtype=torch.float64)
    f = torch.tensor([1.0, -2.0, 3.0, 5.0], dtype=torch.float64)
    log_s = log_kept_mass(p.log(), top_p=0.7)
    assert log_s.exp().item() == pytest.approx(0.8)
    kept = torch.tensor([True, True, False, False])
    q = p * kept / 0.8
    behaviour = p.log() - log_s
    torch.testing.assert_close(behaviour[kept].exp(), q[kept])
    right = (q * tis(new.log() - behaviour, max_weight=100) * f).sum()
    wrong = (q * tis(new.log() - p.log(), max_weight=100) * f).sum()
    assert right.item() == pytest.approx((new * f)[kept].sum().item())
    assert wrong.item() == pytest.approx(right.item() / 0.8)


SETS = torch.tensor([[0, 2, -1], [1, -1, -1], [-1, -1, -1], [3, 1, 0]], dtype=torch.int32)


def test_the_mass_of_a_recorded_set_and_its_gradient() -> None:
    """log S = log sum_{a in S} p_a, and its gradient is the softmax over S less the softmax; padding alone is all."""
    z = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mass = log_support_mass(z, SETS)
    (grad,) = torch.autograd.grad(mass.sum(), z)
    for t, p in enumerate(z.detach().softmax(-1).tolist()):
        inside = [a for a in SETS[t].tolist() if a >= 0] or range(5)
        total = sum(p[a] for a in inside)
        assert mass[t].item() == pytest.approx(math.log(total), abs=1e-12)
        assert grad[t].tolist() == pytest.approx([p[a] / total * (a in inside) - p[a] for a in range(5)], abs=1e-12)
    mask = torch.tensor([True, False, True, True])
    z = z.detach().clone()
    z[1] = torch.nan
    z.requires_grad_()
    part = log_support_mass(z, SETS, mask=mask)
    (part_grad,) = torch.autograd.grad(part.sum(), z)
    torch.testing.assert_close(part, torch.where(mask, mass, 0))
    torch.testing.assert_close(part_grad, torch.where(mask[:, None], grad, 0))
    for wrong in (SETS[:2], SETS.float(), SETS + 2):
        with pytest.raises(ValueError, match=r"^support must "):
            log_support_mass(z, wrong)


def test_renormalised_log_probs_are_unbiased_on_policy_and_off_policy_over_the_old_support() -> None:
    """Enumerate what a nucleus of old weights can sample. At those weights the expectation of A grad log pi_S is the
    gradient of sum_S pi_S A, for any constant that a baseline adds to A. At newer weights the ratio of renormalised
    log-probs gives sum_S pi_S f: the newer policy on the old set, and nothing of the tokens outside it."""
    g = torch.Generator().manual_seed(1)
    old, new = torch.randn(2, 6, dtype=torch.float64, generator=g)
    kept = kept_support(old.softmax(-1)[None], top_p=torch.tensor([0.7], dtype=torch.float64))[0]
    ids = kept.nonzero().flatten()
    support = ids.int().expand(len(ids), -1)
    drawn = old[ids].softmax(-1)
    values = torch.randn(len(ids), dtype=torch.float64, generator=g)

    def renormalised(z: torch.Tensor) -> torch.Tensor:
        return z.log_softmax(-1)[ids] - log_support_mass(z.expand(len(ids), -1), support)

    torch.testing.assert_close(renormalised(old).exp(), drawn)
    z = old.clone().requires_grad_()
    (truth,) = torch.autograd.grad((z[ids].softmax(-1) * values).sum(), z)
    for baseline in (0.0, 5.0):
        (found,) = torch.autograd.grad((drawn * (values - baseline) * renormalised(z)).sum(), z)
        torch.testing.assert_close(found, truth)
    ratio = (renormalised(new) - renormalised(old)).exp()
    torch.testing.assert_close((drawn * ratio * values).sum(), (new[ids].softmax(-1) * values).sum())
    untruncated = (new.log_softmax(-1) - old.log_softmax(-1))[ids].exp()
    assert abs((drawn * untruncated).sum() - 1) > 0.05 > abs((drawn * ratio).sum() - 1)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="max_weight bounds the ratio"):
        tis(torch.zeros(2), max_weight=0.0)
    for low, high in ((2.0, 1.0), (1.1, 3.0), (0.2, 0.8), (float("nan"), 2.0), (0.5, float("nan"))):
        for f in (icepop, keep_ratio):
            with pytest.raises(ValueError, match=f"0 <= low <= 1 <= high, got low={low:g}, high={high:g}$"):
                f(torch.zeros(2), low=low, high=high)
    with pytest.raises(ValueError, match=r"log-ratio give low=exp\(-0.2\), high=exp\(0.2\)$"):
        icepop(torch.zeros(2), low=-0.2, high=0.2)
    with pytest.raises(ValueError, match="top_p must be in"):
        log_kept_mass(torch.zeros(2, 3), top_p=0.0)
    with pytest.raises(TypeError, match="mask must be bool"):
        icepop(torch.zeros(2), mask=torch.ones(2))


@pytest.mark.parametrize("name", TOKEN)
def test_compiles_without_graph_break(name: str) -> None:
    f, _ = TOKEN[name]
    torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(X, MASK), f(X, MASK))


def test_kept_mass_of_a_large_vocabulary_under_transforms() -> None:
    """Outside of them it ranks a few tokens first, and reads whether they are enough."""
    logits = torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(0))
    f = lambda x: log_kept_mass(x, top_p=0.95)
    assert (f(logits) < 0).all()
    torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(logits), f(logits))
    torch.testing.assert_close(torch.func.vmap(f)(logits), f(logits))
