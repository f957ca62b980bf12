"""torch's varlen attention kernels as documented, in fp64 on the CPU: a stand-in where there is no GPU."""

from __future__ import annotations

import torch


def on_the_cpu(patch) -> None:
    """Replace the forward, which returns lse as `[H, Q]`, and the backward, which takes the `out` and `lse` given."""
    patch.setattr("torch.nn.attention.varlen.varlen_attn", _forward)
    patch.setattr(torch.ops.aten, "_flash_attention_backward", _backward)


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa, return_aux=None):
    assert enable_gqa
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (max_q, max_k)
    outs, lses = [], []
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        z = _scores(q[a:b], k[c:d], window_size, scale)
        outs.append(torch.einsum("hqk,khd->qhd", z.softmax(-1), _heads(v[c:d], q)).to(q.dtype))
        lses.append(z.logsumexp(-1))
    return (torch.cat(outs), torch.cat(lses, 1)) if return_aux else torch.cat(outs)


def _backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, *_, scale, **window):
    assert dropout == 0
    window = window["window_size_left"], window["window_size_right"]
    assert causal == (window == (-1, 0))
    assert lse.is_contiguous()
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    fold = lambda x: x.unflatten(1, (k.shape[1], -1)).sum(2)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        p = (_scores(q[a:b], k[c:d], window, scale) - lse[:, a:b, None]).exp()
        g, o = grad[a:b].double(), out[a:b].double()
        dz = scale * p * (torch.einsum("qhd,khd->hqk", g, _heads(v[c:d], q)) - (g * o).sum(-1).T[..., None])
        dv[c:d] = fold(torch.einsum("hqk,qhd->khd", p, g))
        dq[a:b] = torch.einsum("hqk,khd->qhd", dz, _heads(k[c:d], q))
        dk[c:d] = fold(torch.einsum("hqk,qhd->khd", dz, q[a:b].double()))
    return dq, dk, dv


def _heads(x, q):
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q, k, window_size, scale):
    """Scores `[H, Q, K]`; query i is at the place of key i + K - Q."""
    left, right = window_size
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    hidden = (j > i if right == 0 else j < 0) | (j < i - left if left >= 0 else j < 0)
    return (scale * torch.einsum("qhd,khd->hqk", q.double(), _heads(k, q))).masked_fill(hidden, -torch.inf)
