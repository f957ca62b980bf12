"""Divergences against sums over the vocabulary in plain `math`; top-k, chunks, masks, limits, memory."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import losses as L

FULL = {
    "forward": L.forward_kl,
    "reverse": L.reverse_kl,
    "mixed": partial(L.mixed_kl, forward_weight=0.3),
    "jsd": partial(L.jsd, beta=0.2),
    "uld": L.uld,
}
TOPK = {
    "forward": L.forward_kl_topk,
    "reverse": L.reverse_kl_topk,
    "mixed": partial(L.mixed_kl_topk, forward_weight=0.3),
    "jsd": partial(L.jsd_topk, beta=0.2),
}
full = pytest.mark.parametrize("name", FULL)
topk = pytest.mark.parametrize("name", TOPK)


def softmax(z: list[float], temperature: float = 1.0) -> list[float]:
    e = [math.exp(v / temperature) for v in z]
    return [v / sum(e) for v in e]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q) if a > 0)


def divergence(name: str, q: list[float], p: list[float]) -> float:
    """The definition, of the student's probabilities q and the teacher's p."""
    if name == "mixed":
        return 0.3 * kl(p, q) + 0.7 * kl(q, p)
    if name == "jsd":
        m = [0.2 * a + 0.8 * b for a, b in zip(p, q)]
        return 0.2 * kl(p, m) + 0.8 * kl(q, m)
    if name == "uld":
        return sum(abs(a - b) for a, b in zip(sorted(p), sorted(q)))
    return kl(p, q) if name == "forward" else kl(q, p)


def logits(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2)


def top(teacher: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = teacher.topk(k, -1).indices
    return ids, teacher.log_softmax(-1).gather(-1, ids)


@full
@given(seed=st.integers(0, 999), vocab=st.integers(1, 9), temperature=st.floats(0.3, 3), chunk=st.integers(1, 8))
def test_equals_the_definition_at_any_temperature_and_chunk(
    name: str, seed: int, vocab: int, temperature: float, chunk: int
) -> None:
    student, teacher = logits(2, 3, vocab, seed=seed)
    got = FULL[name](student, teacher, temperature=temperature, chunk_size=chunk)
    assert got.shape == (2, 3)
    for z, w, value in zip(student.flatten(0, 1).tolist(), teacher.flatten(0, 1).tolist(), got.flatten().tolist()):
        want = divergence(name, softmax(z, temperature), softmax(w, temperature))
        assert value == pytest.approx(want, rel=1e-9, abs=1e-10)
        assert value > -1e-12


@topk
@given(seed=st.integers(0, 999), k=st.integers(1, 6), chunk=st.integers(1, 8))
def test_topk_is_the_divergence_of_k_tokens_and_the_tail(name: str, seed: int, k: int, chunk: int) -> None:
    student, teacher = logits(5, 7, seed=seed)
    ids, teacher_logp = top(teacher, k)
    got = TOPK[name](student, ids, teacher_logp, chunk_size=chunk)
    whole = FULL[name](student, teacher)
    for i in range(5):
        q, p = softmax(student[i].tolist()), softmax(teacher[i].tolist())
        lump = [[x[j] for j in ids[i].tolist()] + [1 - sum(x[j] for j in ids[i].tolist())] for x in (q, p)]
        assert got[i].item() == pytest.approx(divergence(name, *lump), rel=1e-6, abs=1e-8)
        assert -1e-12 < got[i].item() <= whole[i].item() + 1e-10


@topk
def test_topk_of_the_whole_vocabulary_is_the_full_divergence(name: str) -> None:
    student, teacher = logits(6, 7)
    ids, teacher_logp = top(teacher / 0.6, 7)
    teacher_logp.requires_grad_()
    got = TOPK[name](student.requires_grad_(), ids, teacher_logp, temperature=0.6)
    want = FULL[name](student, teacher, temperature=0.6)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(x.sum(), student)[0] for x in (got, want)]
    torch.testing.assert_close(*grads)
    assert torch.autograd.grad(got.sum(), teacher_logp, allow_unused=True) == (None,)


def test_topk_keeps_a_tail_too_small_for_a_difference_from_one() -> None:
    """The student's tail of 1e-12 is lost in fp32 as 1 - sum; as a logsumexp it is exact."""
    student = torch.tensor([[0.0, math.log(1e-12)]])
    teacher_logp = torch.tensor([[math.log(0.5)]])
    got = L.forward_kl_topk(student, torch.zeros(1, 1, dtype=torch.int64), teacher_logp)
    assert got.item() == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-12), rel=1e-5)


@full
def test_gradcheck_and_only_the_student_has_a_gradient(name: str) -> None:
    student, teacher = (x.requires_grad_() for x in logits(3, 5))
    assert torch.autograd.gradcheck(lambda s: FULL[name](s, teacher, temperature=0.7, chunk_size=2), student)
    FULL[name](student, teacher).sum().backward()
    assert teacher.grad is None


@topk
def test_topk_gradcheck(name: str) -> None:
    student, teacher = logits(3, 5)
    ids, teacher_logp = top(teacher, 2)
    f = partial(TOPK[name], ids=ids, teacher_logp=teacher_logp, temperature=0.7, chunk_size=2)
    assert torch.autograd.gradcheck(lambda s: f(s), student.requires_grad_())


def test_gradient_of_the_forward_kl_is_student_minus_teacher() -> None:
    student, teacher = logits(4, 6)
    student.requires_grad_()
    L.forward_kl(student, teacher, temperature=2.0).sum().backward()
    want = (student / 2).softmax(-1) - (teacher / 2).softmax(-1)
    torch.testing.assert_close(student.grad, want.detach() / 2)


def test_ends_of_the_jsd() -> None:
    """At beta 0 and 1 the KLs (TRL's convention); next to them loss / beta and loss / (1 - beta) tend to the KLs."""
    student, teacher = logits(4, 6)
    forward, reverse = L.forward_kl(student, teacher), L.reverse_kl(student, teacher)
    torch.testing.assert_close(L.jsd(student, teacher, beta=0.0), forward)
    torch.testing.assert_close(L.jsd(student, teacher, beta=1.0), reverse)
    tiny = 1e-7
    torch.testing.assert_close(L.jsd(student, teacher, beta=tiny) / tiny, forward, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(L.jsd(student, teacher, beta=1 - tiny) / tiny, reverse, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(L.jsd(student, teacher, beta=0.3), L.jsd(teacher, student, beta=0.7))
    torch.testing.assert_close(L.mixed_kl(student, teacher, forward_weight=1.0), forward)
    torch.testing.assert_close(L.mixed_kl(student, teacher, forward_weight=0.0), reverse)


@full
def test_zero_only_if_equal_and_invariant_to_a_shift_of_the_logits(name: str) -> None:
    student, teacher = logits(4, 6)
    torch.testing.assert_close(
        FULL[name](teacher + 5, teacher), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert (FULL[name](student, teacher) > 1e-3).all()
    torch.testing.assert_close(FULL[name](student - 3, teacher + 5), FULL[name](student, teacher))


@full
def test_finite_at_1e4_and_with_an_excluded_vocabulary(name: str) -> None:
    student = torch.tensor([[1e4, -1e4, 0.0, -torch.inf], [0.0, 0.0, 1e4, -torch.inf]], requires_grad=True)
    teacher = torch.tensor([[-1e4, 1e4, 0.0, -torch.inf], [0.0, 0.0, 1e4, -torch.inf]])
    loss = FULL[name](student, teacher)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(student.grad).all()
    assert loss[1] == 0
    far = {"jsd": -0.2 * math.log(0.2) - 0.8 * math.log(0.8), "uld": 0.0}  # disjoint, and equal once sorted
    assert loss[0].item() == pytest.approx(far.get(name, 2e4))


def test_the_gradient_is_finite_where_all_tokens_beside_the_k_are_excluded() -> None:
    """The tail is then -inf; the K parts are the whole distribution."""
    student = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]], requires_grad=True)
    plain = student.detach()[:, :2].clone().requires_grad_()
    ids, teacher = torch.tensor([[0, 1]]), torch.tensor([[0.3, 0.7]]).log()
    L.forward_kl_topk(student, ids, teacher).sum().backward()
    (teacher.exp() * (teacher - plain.log_softmax(-1))).sum().backward()
    torch.testing.assert_close(student.grad[:, :2], plain.grad)
    assert not student.grad[:, 2:].any()


@full
def test_masked_rows_are_zero_and_isolated(name: str) -> None:
    student, teacher = logits(5, 6)
    mask = torch.tensor([True, False, True, False, True])
    bad = [torch.where(mask[:, None], x, float("nan")) for x in (student, teacher)]
    got = FULL[name](bad[0].requires_grad_(), bad[1], mask=mask, chunk_size=2)
    torch.testing.assert_close(got, torch.where(mask, FULL[name](student, teacher), 0.0))
    got.sum().backward()
    assert torch.isfinite(bad[0].grad).all()
    assert (bad[0].grad[~mask] == 0).all()
    assert (bad[0].grad[mask] != 0).any()


@topk
def test_topk_masked_rows_are_zero_and_isolated(name: str) -> None:
    student, teacher = logits(4, 6)
    mask = torch.tensor([False, True, True, False])
    ids, teacher_logp = top(teacher, 3)
    want = TOPK[name](student, ids, teacher_logp)
    bad = torch.where(mask[:, None], student, float("nan")).requires_grad_()
    padding = torch.tensor([-1, -100, 1000])
    given = torch.where(mask[:, None], ids, padding), torch.where(mask[:, None], teacher_logp, float("nan"))
    got = TOPK[name](bad, *given, mask=mask)
    torch.testing.assert_close(got, torch.where(mask, want, 0.0))
    got.sum().backward()
    assert torch.isfinite(bad.grad).all()
    assert (bad.grad[~mask] == 0).all()


@full
def test_no_rows_one_row_and_low_precision(name: str) -> None:
    f = FULL[name]
    empty = torch.zeros(0, 4, requires_grad=True)
    f(empty, empty).sum().backward()
    assert f(empty, empty).shape == (0,)
    student, teacher = logits(3, 6)
    torch.testing.assert_close(f(student[1], teacher[1]), f(student, teacher)[1])
    low = f(student.bfloat16(), teacher.bfloat16())
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, f(student.bfloat16().float(), teacher.bfloat16().float()))


def test_uld_takes_vocabularies_of_different_sizes() -> None:
    student, teacher = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    assert L.uld(student, teacher).item() == pytest.approx(0.25 + 0.05 + 0.2)
    assert L.uld(teacher, student).item() == pytest.approx(0.25 + 0.05 + 0.2)


def test_no_tensor_of_the_logits_size_is_kept_for_the_backward() -> None:
    student, teacher = (x.float() for x in logits(64, 100))
    student.requires_grad_()
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = L.jsd(student, teacher, chunk_size=8).sum()
    inputs = {x.untyped_storage().data_ptr() for x in (student, teacher)}
    assert sum(size for ptr, size in kept.items() if ptr not in inputs) < student.nbytes // 20
    loss.backward()
    assert student.grad.abs().sum() > 0


IDS = torch.tensor([[0, 3], [1, 2]])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s, t: L.forward_kl(s, t[:, :3]), "teacher_logits must have the shape of student_logits"),
        (lambda s, t: L.uld(s, t[:1]), "teacher_logits"),
        (lambda s, t: L.jsd(s, t, beta=1.2), "beta must be in"),
        (lambda s, t: L.mixed_kl(s, t, forward_weight=-0.1), "forward_weight"),
        (lambda s, t: L.reverse_kl(s, t, temperature=0.0), "temperature must be positive"),
        (lambda s, t: L.reverse_kl(s, t, chunk_size=0), "chunk_size"),
        (lambda s, t: L.forward_kl_topk(s, torch.zeros(2, 2, dtype=torch.int64), t[:, :3]), "teacher_logp"),
        (lambda s, t: L.forward_kl_topk(s, torch.zeros(1, 2, dtype=torch.int64), t[:1, :2]), "ids must have the rows"),
        (lambda s, t: L.forward_kl_topk(s, IDS * 0, t.log_softmax(-1)[:, :2]), r"ids must be distinct .* \[0, 0\]"),
        (
            lambda s, t: L.reverse_kl_topk(s, IDS - 1, t.log_softmax(-1)[:, :2]),
            r"ids must be in \[0, 4\) .* got -1 to 2",
        ),
        (lambda s, t: L.jsd_topk(s, IDS + 1, t.log_softmax(-1)[:, :2]), r"ids must be in \[0, 4\) .* got 1 to 4"),
        (lambda s, t: L.mixed_kl_topk(s, IDS, t[:, :2] * 0), "teacher_logp must be log-probs, .* got 2: normalise"),
    ],
)
def test_errors_name_the_argument(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(*logits(2, 4))


def test_log_probs_rounded_to_bf16_are_log_probs() -> None:
    """The widest rounding: a uniform distribution, of which every log-prob is rounded up."""
    size = max(range(2000, 4000), key=lambda v: float(torch.tensor(-math.log(v)).bfloat16()) + math.log(v))
    teacher_logp = torch.full((1, size), -math.log(size)).bfloat16()
    assert teacher_logp.double().exp().sum() > 1.01
    assert L.forward_kl_topk(torch.zeros(1, size + 1), torch.arange(size)[None], teacher_logp).isfinite()


def test_ids_must_be_int64() -> None:
    student, teacher = logits(2, 4)
    with pytest.raises(TypeError, match="ids must be int64"):
        L.forward_kl_topk(student, torch.zeros(2, 2, dtype=torch.int32), teacher[:, :2])
