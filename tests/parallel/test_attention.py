"""The attention primitive: windows, softcaps, and the plan for flash kernels, against loops over single queries."""

from __future__ import annotations

import pytest
import torch
import varlen
from hypothesis import given
from hypothesis import strategies as st

from rlkit.parallel import attention
from rlkit.parallel.attention import Segment, as_slice, attend, has_flash, plan, read_rows, reads_of, rows


def loop(q, k, v, spans, *, scale, window=None, softcap=None, sinks=None):
    """One query at a time, in fp64."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    for start, n, ranges in spans:
        rows = [r for s, m in ranges for r in range(s, s + m)]
        for i in range(n):
            seen = rows[: len(rows) - (n - 1 - i)][-(window or len(rows)) :]
            for head in range(q.shape[1]):
                kv = head // (q.shape[1] // k.shape[1])
                z = scale * k[seen, kv] @ q[start + i, head]
                z = z if softcap is None else softcap * torch.tanh(z / softcap)
                total = z.exp().sum() + (0 if sinks is None else sinks[head].exp())
                out[start + i, head] = z.exp() / total @ v[seen, kv]
    return out


@st.composite
def layouts(draw):
    """Segments with one or two ranges of keys each, at least as many keys as queries."""
    spans, start, num_keys = [], 0, 14
    for _ in range(draw(st.integers(1, 5))):
        n = draw(st.integers(1, 6))
        before = draw(st.integers(0, 5))
        spans.append(Segment(start, n, [(draw(st.integers(0, 8)), before), (draw(st.integers(0, num_keys - n)), n)]))
        start += n
    return spans, start, num_keys


def test_grouped_queries_reach_a_fused_kernel_on_a_device(monkeypatch):
    """CUDA has none that takes fewer key heads than query heads under a mask: torch would write out all scores."""
    heads = []

    def sdpa(q, k, v, *, enable_gqa, **_):
        heads.append((q.shape[1], k.shape[1], v.shape[1], enable_gqa))
        return torch.empty_like(q)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", sdpa)
    spans = [Segment(0, 9, [(0, 9)]), Segment(9, 3, [(0, 9), (9, 3)])]
    for device, found in (("cpu", (4, 2, 2, True)), ("meta", (4, 4, 4, False))):  # a device without memory
        q, k, v = (torch.empty(12, h, 8, device=device) for h in (4, 2, 2))
        heads.clear()
        attention.causal_sdpa(*(x.transpose(0, 1)[None] for x in (q, k, v)))
        assert heads == [found]
    heads.clear()
    attend(q, k, v, plan(spans).to("meta"), scale=0.5)
    assert set(heads) == {(4, 4, 4, False)}


def drawn(num_q, num_k, *, values=4):
    """Queries of 4 heads, keys and values of 2, and sinks of 4."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((num_q, 4, 4), (num_k, 2, 4), (num_k, 2, values), (4,))
    return [torch.randn(size, generator=generator).double().requires_grad_() for size in sizes]


@given(layouts(), st.sampled_from([None, 1, 3, 50]), st.sampled_from([None, 0.7]), st.booleans(), st.integers(3, 6))
def test_windows_softcaps_sinks_and_sizes_of_values_against_loops(layout, window, softcap, with_sinks, values):
    spans, num_q, num_k = layout
    q, k, v, sinks = (x.detach() for x in drawn(num_q, num_k, values=values))
    options = {"scale": 0.5, "window": window, "softcap": softcap, "sinks": sinks if with_sinks else None}
    torch.testing.assert_close(attend(q, k, v, plan(spans), **options), loop(q, k, v, spans, **options))


def by_kernel(q, k, v, sinks, made, *, scale, window):
    gathered = rows(q, made.q_index), rows(k, made.k_index), rows(v, made.k_index)
    return rows(attention._Sinks.apply(*gathered, sinks, made, scale, window), made.out_index)


@given(layouts(), st.sampled_from([None, 3]))
def test_sinks_by_a_kernel_that_returns_the_softmax_denominator(layout, window):
    """The path of CUDA, with the kernel of the CPU: value and gradient against the softmax with one more column."""
    spans, num_q, num_k = layout
    inputs = drawn(num_q, num_k)
    outs = [way(*inputs, plan(spans), scale=0.5, window=window) for way in (by_kernel, plainly)]
    torch.testing.assert_close(*outs)
    weights = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = [torch.autograd.grad((weights * out).sum(), inputs) for out in outs]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def plainly(q, k, v, sinks, made, **options):
    return attend(q, k, v, made, sinks=sinks, **options)


@pytest.mark.parametrize("values", [4, 12])
def test_values_of_another_size_than_keys_reach_kernels_of_one_size(values, monkeypatch):
    varlen.on_the_cpu(monkeypatch)
    spans = [Segment(0, 6, [(0, 6)]), Segment(6, 3, [(0, 6), (6, 3)])]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, h, d, generator=generator).double() for h, d in ((4, 8), (2, 8), (2, values)))
    out = attend(q, k, v, plan(spans, flash=True), scale=0.3)
    torch.testing.assert_close(out, loop(q, k, v, spans, scale=0.3))


@given(layouts(), st.sampled_from([None, 3]), st.booleans())
def test_the_flash_plan_gives_a_varlen_kernel_the_same_segments(layout, window, in_order):
    spans, num_q, num_k = layout
    spans = spans if in_order else spans[::-1]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 4, generator=generator).double() for n, h in ((num_q, 4), (num_k, 2), (num_k, 2)))
    with pytest.MonkeyPatch.context() as patch:
        varlen.on_the_cpu(patch)
        out = attend(q, k, v, plan(spans, flash=True), scale=0.5, window=window)
    torch.testing.assert_close(out, loop(q, k, v, spans, scale=0.5, window=window))


def test_a_flash_plan_takes_rows_that_are_in_order_as_they_are():
    alone = [Segment(0, 3, [(0, 3)]), Segment(3, 2, [(3, 2)])]
    assert plan(alone, flash=True)[:3] == (slice(5), slice(5), slice(5))
    shared = plan([Segment(0, 3, [(0, 3)]), Segment(3, 2, [(0, 3), (3, 2)])], flash=True)
    assert (shared.q_index, shared.out_index) == (slice(5), slice(5))
    assert shared.k_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(("lens", "sizes"), [(range(400, 432, 4), [8]), ([400, 800], [1, 1]), ([1, 2, 9], [3])])
def test_segments_of_like_size_share_a_bucket(lens, sizes):
    """At most a quarter of its query-key pairs is padding, or as many pairs as cost one more call."""
    starts = [sum(lens[:i]) for i in range(len(lens))]
    found = plan([Segment(start, n, [(start, n)]) for start, n in zip(starts, lens, strict=True)])
    assert [bucket.size for bucket in found.buckets] == sizes


def test_gradients_of_a_windowed_bucket_are_finite_and_right():
    torch.manual_seed(0)
    spans = [Segment(0, 5, [(0, 5)]), Segment(5, 3, [(0, 2), (5, 3)]), Segment(8, 4, [(8, 4)])]
    q, k, v = (torch.randn(12, 2, 4, dtype=torch.double, requires_grad=True) for _ in range(3))
    weights = torch.randn(12, 2, 4, dtype=torch.double)
    for options in ({"window": 2}, {"softcap": 0.5}, {"window": 3, "softcap": 0.5}):
        a = torch.autograd.grad((weights * attend(q, k, v, plan(spans), scale=0.5, **options)).sum(), (q, k, v))
        true = torch.autograd.grad((weights * differentiable_loop(q, k, v, spans, **options)).sum(), (q, k, v))
        for x, y in zip(a, true, strict=True):
            torch.testing.assert_close(x, y)


def differentiable_loop(q, k, v, spans, *, window=None, softcap=None):
    rows = {}
    for start, n, ranges in spans:
        keys = [r for s, m in ranges for r in range(s, s + m)]
        for i in range(n):
            seen = keys[: len(keys) - (n - 1 - i)][-(window or len(keys)) :]
            z = 0.5 * torch.einsum("shd,hd->sh", k[seen], q[start + i])
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            rows[start + i] = torch.einsum("sh,shd->hd", z.softmax(0), v[seen])
    return torch.stack([rows[i] for i in range(q.shape[0])])


def test_flash_is_for_half_precision_on_cuda_and_heads_that_it_takes(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    cuda, half = torch.device("cuda"), torch.bfloat16
    assert has_flash(cuda, half, head_dim=128, softcap=False)
    assert not has_flash(torch.device("cpu"), half, head_dim=128, softcap=False)
    assert not has_flash(cuda, torch.float32, head_dim=128, softcap=False)
    assert not has_flash(cuda, half, head_dim=20, softcap=False)
    assert not has_flash(cuda, half, head_dim=512, softcap=False)


def test_flash_casts_to_the_values_dtype(monkeypatch):
    seen = {}

    def kernel(q, k, v, *_, **__):
        seen.update(q=q.dtype, k=k.dtype)
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    q = torch.zeros(2, 1, 4)
    attention.attend(q, q, q.bfloat16(), plan([Segment(0, 2, [(0, 2)])], flash=True), scale=1.0)
    assert seen == {"q": torch.bfloat16, "k": torch.bfloat16}


def shared_group(prompt, lens, *, alone=0):
    """A prompt of so many tokens and samples that share it; `alone`: a sequence without a prompt before them."""
    spans = [Segment(0, prompt, [(0, prompt)])] + [Segment(prompt, alone, [(prompt, alone)])] * bool(alone)
    start = prompt + alone
    for n in lens:
        spans.append(Segment(start, n, [(0, prompt), (start, n)]))
        start += n
    return spans, start


@given(layouts(), st.booleans())
def test_keys_that_samples_share_give_the_same_values_and_gradients(layout, flash):
    """The two parts against all keys at once, on the CPU's kernels and on a stand-in for the varlen kernels."""
    spans, num_q, num_k = layout
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 4).double().requires_grad_() for n, h in ((num_q, 4), (num_k, 2), (num_k, 2)))
    weights = torch.randn(num_q, 4, 4, dtype=torch.double)
    want = attend(q, k, v, plan(spans)._replace(shared=None), scale=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_COPIES", -1)
        made = plan(spans, flash=flash)
        assert (made.shared is not None) == any(s.keys[0][1] for s in spans)
        if flash:
            varlen.on_the_cpu(patch)
        got = attend(q, k, v, made, scale=0.5)
        grads = [torch.autograd.grad((weights * x).sum(), (q, k, v)) for x in (got, want)]
    torch.testing.assert_close(got, want)
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y)


def test_samples_of_one_prompt_take_its_keys_by_a_view():
    """Sixteen samples of a thousand tokens of prompt: no key is copied, where each sample had a copy of the prompt."""
    spans, end = shared_group(1000, [40] * 16)
    made = plan(spans, flash=True)
    assert len(made.k_index) == 17 * 1000 + 16 * 40
    assert made.shared.tails.k_index == made.shared.tails.q_index == slice(end)
    assert made.shared.prompts.k_index == slice(1000)
    assert made.shared.prompts.q_index == slice(1000, end)
    two = [Segment(0, 500, [(0, 500)]), Segment(500, 500, [(500, 500)])]
    for i in range(16):  # two prompts
        two.append(Segment(1000 + 40 * i, 40, [(500 * (i // 8), 500), (1000 + 40 * i, 40)]))
    assert plan(two, flash=True).shared.prompts.k_index == slice(1000)


def test_few_copies_are_cheaper_than_a_second_pass():
    assert plan(shared_group(100, [200] * 8)[0]).shared is None  # 7 copies of 100 keys, beside 1,700
    assert plan(shared_group(1000, [10] * 4)[0]).shared is not None
    assert plan(shared_group(1000, [10])[0]).shared is None  # one copy, which nobody shares
    crossing = [Segment(0, 99, [(0, 99)])] + [Segment(99 + i, 2, [(0, 99), (0, 1)]) for i in range(0, 20, 2)]
    assert plan(crossing).shared is None  # a query that does not see the whole prompt


@pytest.mark.parametrize(
    ("options", "in_parts"), [({}, 1), ({"window": 60}, 1), ({"window": 59}, 0), ({"softcap": 2.0}, 0)]
)
def test_windows_and_softcaps_take_copies(monkeypatch, options, in_parts):
    spans, end = shared_group(50, [4, 10, 3, 2, 1], alone=7)
    calls, kernel = [], attention._with_lse
    monkeypatch.setattr(attention, "_with_lse", lambda *args, **more: calls.append(1) or kernel(*args, **more))
    q, k, v = (torch.randn(end, h, 4, dtype=torch.double) for h in (4, 2, 2))
    out = attend(q, k, v, plan(spans), scale=0.5, **options)
    assert len(calls) == 2 * in_parts
    torch.testing.assert_close(out, loop(q, k, v, spans, scale=0.5, **options))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.sampled_from([torch.float64, torch.bfloat16]))
def test_rows_that_are_read_several_times_sum_their_gradients(index, dtype):
    x = torch.randn(8, 2, 3, dtype=torch.float64).to(dtype).requires_grad_()
    places, grad = torch.tensor(index), torch.randn(len(index), 2, 3, dtype=torch.float64).to(dtype)
    reads = reads_of(places.numpy())
    assert (reads is None) is (len(set(index)) == len(index))
    out = read_rows(x, places, reads)
    assert torch.equal(out, x[places])
    (got,) = torch.autograd.grad(out, x, grad)
    want = torch.zeros(8, 2, 3, dtype=torch.float64)
    for place, row in enumerate(index):
        want[row] += grad[place].double()
    torch.testing.assert_close(got, want.to(dtype))  # rounded once


def test_a_group_reads_its_prompt_several_times_only_for_flash_kernels():
    spans = [Segment(0, 3, [(0, 3)]), Segment(3, 2, [(0, 3), (3, 2)]), Segment(5, 2, [(0, 3), (5, 2)])]
    made = plan(spans, flash=True)
    assert made.reads is not None
    assert made.reads.often.tolist() == [0, 1, 2]
    assert made.reads.counted.sum(1).tolist() == [3, 3, 3]
    assert plan(spans).reads is None


def test_a_slice_is_for_consecutive_rows():
    assert as_slice(torch.arange(3, 9)) == slice(3, 9)
    assert as_slice(torch.arange(4)) == slice(4)
    assert as_slice(torch.tensor([3, 5, 4])).tolist() == [3, 5, 4]


@pytest.mark.parametrize("broken", ["", "backward", "missing"])
def test_two_parts_are_used_only_where_they_agree_with_one(monkeypatch, broken):
    """On a device with varlen kernels; a wrong gradient there would show nowhere else."""
    varlen.on_the_cpu(monkeypatch)
    right = torch.ops.aten._flash_attention_backward
    if broken == "backward":
        wrong = lambda *args, **options: tuple(1.1 * x for x in right(*args, **options))
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", wrong)
    if broken == "missing":

        def missing(*_, **__):
            raise RuntimeError("no such operator")

        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", missing)
    agree = attention._parts_agree.__wrapped__
    if not broken:
        assert agree("cpu", torch.bfloat16, 4, 2, 16)
        return
    said = "no such operator" if broken == "missing" else "its numbers differ by 0.1"
    with pytest.warns(UserWarning, match=f"each sample gets a copy of its prompt's keys on cpu: .*{said}"):
        assert not agree("cpu", torch.bfloat16, 4, 2, 16)
