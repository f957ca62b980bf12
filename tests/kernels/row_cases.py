"""What every Triton kernel over rows must do, as one table: for the interpreter at small sizes, a device at large ones.

`ROW_CASES` maps names to functions of a `Size`, which fail if the kernels are wrong at that size on its device.
`FEW` are the names that together have each value of each argument; of two arguments not every pair, and of cases in
each dtype those in fp16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from itertools import pairwise, product
from typing import Any

import torch
from oracles import Size, assert_three_way, truth, with_grads

from rlkit.kernels.linear_logp import combine, linear_logp, shard_logp
from rlkit.kernels.linear_logp import ops as linear_ops
from rlkit.kernels.linear_logp import partials as linear_partials
from rlkit.kernels.logits_logp import logits_logp, ops, partials
from rlkit.kernels.logits_logp import shard_logp as logits_shard

OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.3}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def from_logits(size: Size, *, dtype: torch.dtype, entropy: bool, inplace: bool, options: dict[str, Any]) -> None:
    (x, w, b), targets = size.problem()
    run = lambda z: logits_logp(z, targets, impl="triton", inplace_backward=inplace, **options)
    assert_three_way(run, targets, [(x @ w.T + b).to(dtype)], size.slopes(entropy), **options)


def from_hidden_states(size: Size, *, dtype: torch.dtype, entropy: bool, options: dict[str, Any]) -> None:
    tensors, targets = size.problem(dtype)
    run = lambda h, w, b: linear_logp(h, w, targets, bias=b, impl="triton", **options)
    assert_three_way(run, targets, tensors, size.slopes(entropy), **options)


def one_entry_is_certain(size: Size, *, options: dict[str, Any]) -> None:
    """Exactly 0, however the logit is scaled: its distance to the maximum is 0 and not what a fused product leaves."""
    tensors, targets = size._replace(vocab=1).problem()
    tensors[0] *= 100
    run = lambda h, w, b: linear_logp(h, w, targets, bias=b, impl="triton", **options)
    for x in with_grads(run, tensors, size.slopes()):
        assert (x == 0).all()
    run = lambda z: logits_logp(z, targets, impl="triton", **options)
    for x in with_grads(run, [tensors[0][:, :1]], size.slopes()):
        assert (x == 0).all()


def fp16_gradients_of_any_size(size: Size, *, scale: float) -> None:
    """A loss divided by a million tokens, or multiplied by a loss scale: fp16 alone would lose or overflow it."""
    (hidden, weight, bias), targets = size.problem(torch.float16)
    upstream = [scale * g for g in size.slopes() if g is not None]
    want = with_grads(truth(targets), [hidden.double(), weight.double(), bias.double()], upstream)
    got = with_grads(lambda b: linear_logp(hidden, weight, targets, bias=b, impl="triton"), [bias.float()], upstream)
    assert (got[2] - want[4]).abs().max() <= 2e-3 * want[4].abs().max()


def large_common_offset_and_peaked_rows(size: Size, *, offset: float, scale: float) -> None:
    (hidden, weight, _), targets = size.problem()
    hidden = torch.cat([hidden * scale, torch.full_like(hidden[:, :1], offset)], 1)
    weight = torch.cat([weight, torch.ones_like(weight[:, :1])], 1)
    targets = torch.where(size.every(2, 0), (hidden @ weight.T).argmax(1), targets)
    run = lambda h, w: linear_logp(h, w, targets, impl="triton")
    assert_three_way(run, targets, [hidden, weight], size.slopes())


def banned_and_very_negative_logits(size: Size) -> None:
    """-inf removes an entry, in logits and in the bias; a shard of banned entries only has no effect."""
    (hidden, weight, _), targets = size.problem()
    entry = torch.arange(size.vocab, device=size.device)
    cut = size.vocab * 3 // 7
    banned = (entry % 5 == 3) | (entry >= cut)
    kept = (~banned).nonzero()[:, 0]
    targets = kept[targets % len(kept)]
    bias = torch.full_like(weight[:, 0], -1e4).masked_fill(banned, -math.inf)
    plain = truth(torch.searchsorted(kept, targets))
    want = with_grads(plain, [hidden.double(), weight[~banned].double()], size.slopes())
    run = lambda h, w: linear_logp(h, w, targets, bias=bias, impl="triton")
    got = with_grads(run, [hidden, weight], size.slopes())
    for x, y in zip(got, want, strict=True):
        x = x[~banned] if x.shape == weight.shape else x
        assert (x.double() - y).abs().max() < 5e-3 * max(1, y.abs().max())  # logits of 1e4 have 1e-3 left
    assert (got[3][banned] == 0).all()
    logits = (hidden @ weight.T).masked_fill(banned, -math.inf)
    from_logits = with_grads(lambda z: logits_logp(z, targets, impl="triton"), [logits], size.slopes())
    for x, y in zip(from_logits[:2], want, strict=False):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    assert (from_logits[2][:, banned] == 0).all()
    halves = [
        partials(z, targets, vocab_start=a, impl="triton") for z, a in ((logits[:, :cut], 0), (logits[:, cut:], cut))
    ]
    torch.testing.assert_close(reduce(combine, halves), partials(logits, targets, impl="triton"))


def statistics_of_unusual_rows(size: Size, *, dtype: torch.dtype, temperature: float) -> None:
    """A maximum in the first or last column, huge logits, only -inf, NaN: against the sums of `Partials` in fp64."""
    x = torch.randn(10, size.vocab, generator=torch.Generator().manual_seed(0)).to(size.device) * 3
    x[0, 0] = x[1, -1] = x[2, -2] = 60.0
    x[3] *= 20
    x[4] = torch.linspace(-40, 40, size.vocab)
    x[5], x[6, :-1], x[7, 1:] = -math.inf, -math.inf, -math.inf
    x[8], x[9, size.vocab // 2] = math.nan, math.nan
    x = x.to(dtype)
    targets = torch.full((10,), size.vocab - 1, device=size.device)
    z = (x.double() / temperature).clamp(min=-1e30)
    top = z.max(1).values
    e = (z - top[:, None]).exp()
    want = [top, e.sum(1), (e * (z - top[:, None])).sum(1), z[:, -1]]
    got = [y.double() for y in partials(x, targets, temperature=temperature, impl="triton")]
    rounding = (
        2.0**-23 * z[3].abs().max().item()
    )  # of z in fp32, so of z - max, so the relative error of an exponential
    for y, w in zip(got, want, strict=True):
        torch.testing.assert_close(y[:8], w[:8], rtol=3e-6 + rounding, atol=3e-6 + rounding)
        rows = [0, 1, 2, 4, 5, 6, 7]
        torch.testing.assert_close(y[rows], w[rows], rtol=3e-6, atol=3e-6)
    assert torch.equal(got[0][:8] == got[3][:8], want[0][:8] == want[3][:8])
    assert got[1][8:].isnan().all()
    assert got[2][8:].isnan().all()
    first = 1 if size.vocab > 1 else 0
    parts = [partials(y, targets, vocab_start=i, temperature=temperature, impl="triton")
             for i, y in ((0, x[:, :first]), (first, x[:, first:first]), (first, x[:, first:]))]  # fmt: skip
    for y, w in zip(reduce(combine, parts), want, strict=True):
        torch.testing.assert_close(y[:8].double(), w[:8], rtol=3e-6, atol=3e-6)


def masked_rows_do_no_harm_and_sick_ones_show(size: Size, *, dtype: torch.dtype) -> None:
    """NaN and foreign targets where the mask is False; the same bits as without. A NaN in a live row is that row's."""
    tensors, targets = size.problem(dtype)
    mask, dead = ~size.every(3, 1), size.every(4, 2)
    poisoned, foreign = tensors[0].clone(), torch.where(mask, targets, -100)
    poisoned[~mask] = math.nan
    upstream = [g.masked_fill(dead, 0.0) for g in size.slopes() if g is not None]
    run = lambda h, w, b: linear_logp(h, w, foreign, bias=b, mask=mask, impl="triton")
    got, want = with_grads(run, [poisoned, *tensors[1:]], upstream), with_grads(run, tensors, upstream)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    assert (got[2][dead | ~mask] == 0).all()
    for inplace in (True, False):
        run = lambda z, i=inplace: logits_logp(z, foreign, mask=mask, inplace_backward=i, impl="triton")
        z = with_grads(run, [poisoned @ tensors[1].T], upstream)
        assert (z[2][dead | ~mask] == 0).all()
        assert all(x.isfinite().all() for x in z)
    sick = tensors[0].clone()
    sick[4] = math.nan
    for x in linear_logp(sick, tensors[1], targets, impl="triton"):
        assert x.isnan().nonzero().tolist() == [[4]]


def rows_without_upstream_gradient_leave(size: Size) -> None:
    tensors, targets = size.problem()
    dead = size.every(4, 2)
    poisoned = tensors[0].clone()
    poisoned[dead] = math.nan
    upstream = [g.masked_fill(dead, 0.0) for g in size.slopes() if g is not None]
    got = with_grads(lambda h, w: linear_logp(h, w, targets, impl="triton"), [poisoned, tensors[1]], upstream)
    rest, alone = [g[~dead] for g in upstream], [tensors[0][~dead], tensors[1]]
    want = with_grads(lambda h, w: linear_logp(h, w, targets[~dead], impl="triton"), alone, rest)
    torch.testing.assert_close(got[3], want[3])
    torch.testing.assert_close(got[2][~dead], want[2])
    assert (got[2][dead] == 0).all()


def the_same_bits_whatever_surrounds_a_row(size: Size, *, dtype: torch.dtype) -> None:
    """Fewer rows, other rows, another order, a second run; the ratio of an unchanged policy is exactly 1."""
    (hidden, weight, _), targets = size.problem(dtype)
    whole = linear_logp(hidden, weight, targets, impl="triton")
    order = torch.randperm(size.rows, device=size.device)
    for rows in (order, order[:1], order[: size.rows // 3], order[5 : size.rows // 2 + 10]):
        part = linear_logp(hidden[rows], weight, targets[rows], impl="triton")
        for x, y in zip(part, whole, strict=True):
            assert torch.equal(x, y[rows])
    run = lambda h, w: linear_logp(h, w, targets, impl="triton")
    runs = [with_grads(run, [hidden, weight], size.slopes()) for _ in range(2)]
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x, y)


def vocabulary_shards(size: Size, *, split: list[float]) -> None:
    """Each shard's values and gradients are those of the whole; the gradients of hidden add up."""
    tensors, targets = size.problem()
    bounds = [0, *(int(size.vocab * x) for x in split), size.vocab]
    options = {"temperature": 0.9, "softcap": 3.0}
    want = with_grads(truth(targets, **options), [x.double() for x in tensors], size.slopes())
    h, w, b = tensors
    shared = {"impl": "triton", **options}
    parts = [linear_partials(h, w[i:j], targets, vocab_start=i, bias=b[i:j], **shared) for i, j in pairwise(bounds)]
    combined, d_hidden, logits = reduce(combine, parts), torch.zeros_like(h).double(), h @ w.T + b
    want_logits = with_grads(truth(targets, **options), [logits.double()], size.slopes())
    for i, j in pairwise(bounds):
        shard = {"combined": combined, "vocab_start": i, **shared}
        run = lambda h, w, b, s=shard: shard_logp(h, w, targets, bias=b, **s)
        got = with_grads(run, [h, w[i:j], b[i:j]], size.slopes())
        d_hidden += got[2].double()
        for x, y in zip([*got[:2], *got[3:]], [*want[:2], want[3][i:j], want[4][i:j]], strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=2e-5)
        got = with_grads(lambda z, s=shard: logits_shard(z, targets, **s), [logits[:, i:j]], size.slopes())
        torch.testing.assert_close(got[2].double(), want_logits[2][:, i:j], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(d_hidden, want[2], rtol=1e-4, atol=2e-5)


def autocast_changes_nothing(size: Size) -> None:
    """The dtypes of the inputs decide, forward and backward."""
    tensors, targets = size.problem()
    runs = []
    for enabled in (False, True):
        with torch.autocast(size.device.split(":")[0], torch.bfloat16, enabled=enabled):
            run = lambda h, w, b: linear_logp(h, w, targets, bias=b, impl="triton")
            runs.append(with_grads(run, tensors, size.slopes()))
            logits = torch.linspace(-3, 3, size.rows * size.vocab, device=size.device).view(size.rows, -1)
            runs[-1] += with_grads(lambda z: logits_logp(z, targets, impl="triton"), [logits], size.slopes())
    for x, y in zip(*runs, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def inputs_that_are_not_in_line(size: Size) -> None:
    """Logits as a transpose, and as a part of wider rows; targets, mask and upstream gradients with gaps between."""
    (x, w, b), targets = size.problem()
    logits, mask = x @ w.T, ~size.every(3, 1)
    gaps = lambda y: torch.stack([y, torch.zeros_like(y)], 1)[:, 0]
    for options in ({}, {"mask": mask}):
        apart = {name: gaps(y) for name, y in options.items()}
        run = lambda z, o=options: logits_logp(z, targets, impl="triton", **o)
        want = with_grads(run, [logits], size.slopes())
        for view in (lambda z: z.T.contiguous().T, lambda z: torch.cat([z, z], 1)[:, : size.vocab]):
            for inplace in (True, False):
                run = lambda z, v=view, i=inplace, o=apart: logits_logp(
                    v(z), gaps(targets), inplace_backward=i, impl="triton", **o
                )
                for a, b_ in zip(with_grads(run, [logits], [gaps(g) for g in size.slopes()]), want, strict=True):
                    assert torch.equal(a, b_)
        run = lambda h, w, b, o=options: linear_logp(h, w, targets, bias=b, impl="triton", **o)
        want = with_grads(run, [x, w, b], size.slopes())
        run = lambda h, w, b, o=apart: linear_logp(h, w, gaps(targets), bias=gaps(b), impl="triton", **o)
        for a, b_ in zip(with_grads(run, [x, w, b], size.slopes()), want, strict=True):
            assert torch.equal(a, b_)


def operators_pass_opcheck(size: Size) -> None:
    tensors, targets = size._replace(rows=6, vocab=20, dim=3).problem()
    h, w, b = [x.requires_grad_() for x in tensors]
    mask = torch.tensor([1, 0, 1, 1, 0, 1], device=size.device).bool()
    args = (targets, b, mask, 0.9, 2.0)
    torch.library.opcheck(linear_ops.logp_op, (h, w, *args, False, "triton"))
    detached = (h.detach(), w.detach(), targets, b.detach(), mask, 0.9, 2.0)
    torch.library.opcheck(linear_ops.partials_op, (*detached, 0, "triton"))
    stats = linear_ops.partials_op(*detached, 0, "triton")
    torch.library.opcheck(linear_ops.shard_op, (h, w, *args, 0, stats, "triton"))
    logits = torch.randn(6, 20, device=size.device, requires_grad=True)
    torch.library.opcheck(ops.partials_op, (logits.detach(), targets, mask, 0.9, 2.0, 0, "triton"))
    torch.library.opcheck(ops.logp_op, (logits, targets, stats, mask, 0.9, 2.0, 0, False, "triton"))


def _table() -> tuple[dict[str, Callable[[Size], None]], set[str]]:
    cases: dict[str, Callable[[Size], None]] = {}
    few: set[str] = set()

    def shown(name: str, value: Any) -> str:
        if isinstance(value, dict):
            return " ".join(f"{k}={v}" for k, v in value.items())
        return str(value).removeprefix("torch.") if name == "dtype" else f"{name}={value}"

    def add(case: Callable[..., None], **values: list[Any]) -> None:
        places = [range(len(x)) for x in values.values()]
        for at in product(*places):
            named = {name: x[i] for (name, x), i in zip(values.items(), at, strict=True)}
            title = " ".join([case.__name__, *map(shown, named, named.values())])
            cases[title] = partial(case, **named)
            chosen = at[0] == len(DTYPES) - 1 if list(values) == ["dtype"] else len(at) < 2
            if chosen or (len(at) > 1 and sum(at) % max(map(len, places)) == 0):
                few.add(title)

    both = [True, False]
    add(from_logits, dtype=DTYPES, entropy=both, inplace=both, options=OPTIONS)
    add(from_hidden_states, dtype=DTYPES, entropy=both, options=OPTIONS)
    add(one_entry_is_certain, options=OPTIONS)
    add(fp16_gradients_of_any_size, scale=[1e-8, 1e4])
    add(large_common_offset_and_peaked_rows, offset=[1000.0, -1000.0], scale=[1.0, 20.0])
    add(banned_and_very_negative_logits)
    add(statistics_of_unusual_rows, dtype=DTYPES, temperature=[1.0, 0.7])
    add(masked_rows_do_no_harm_and_sick_ones_show, dtype=DTYPES)
    add(rows_without_upstream_gradient_leave)
    add(the_same_bits_whatever_surrounds_a_row, dtype=DTYPES)
    add(vocabulary_shards, split=[[], [0.33], [0.01, 0.61], [0.0]])
    add(autocast_changes_nothing)
    add(inputs_that_are_not_in_line)
    add(operators_pass_opcheck)
    return cases, few


ROW_CASES, FEW = _table()
