"""Advantage estimators against the loops that the field uses, on the same data, in one run.

    python benchmarks/advantages.py --device cpu --out benchmarks/results/advantages_cpu.json

The peers are loops in the way of TRL, verl and OpenRLHF, written here: over the columns of padded [B, L] tensors for
traces, over Python lists of group members for baselines. They are given padded tensors for free (padding is not timed)
and compute the same function as ours, which is checked. Medians of repeated runs, processor time on a CPU; the ratio is
peer / ours.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _cli import run_script
from _timing import machine
from torch import Tensor

from rlkit import advantages as A
from rlkit.segments import cumulative, seq_positions


@dataclass
class Args:
    """Size of the batch and where the result goes."""

    num_tokens: int = 1_000_000
    num_seqs: int = 4096
    group_size: int = 8
    repeats: int = 7
    peer_repeats: int = 3
    threads: int = 1
    device: str = "cpu"
    out: Path | None = None


@dataclass(frozen=True)
class Data:
    """One batch, packed and padded."""

    streams: dict[str, Tensor]
    padded: dict[str, Tensor]
    mask: Tensor
    padded_mask: Tensor
    place: Tensor
    cu_seqlens: Tensor
    rewards: Tensor
    lengths: Tensor
    group_ids: Tensor


def make_data(args: Args) -> Data:
    """Exponential lengths around the mean, a tenth of the tokens masked in gaps."""
    torch.manual_seed(0)
    share = torch.distributions.Exponential(1.0).sample((args.num_seqs,)) + 0.05
    lens = (share / share.sum() * args.num_tokens).long().clamp(min=1)
    lens[-1] += args.num_tokens - lens.sum()
    cu = cumulative(lens)
    total, longest = int(cu[-1]), int(lens.max())
    mask = torch.rand(total) > 0.1
    seq = torch.arange(args.num_seqs).repeat_interleave(lens)
    place = seq * longest + seq_positions(cu, num_tokens=total)
    streams = {name: torch.randn(total) for name in ("rewards", "values")}
    streams["log_ratio"] = 0.1 * torch.randn(total)
    streams["logp"] = -torch.rand(total) - 0.1
    streams["sum_pi_squared"] = streams["logp"].exp().square() + 0.01

    def pad(x: Tensor) -> Tensor:
        return x.new_zeros(args.num_seqs * longest).index_copy(0, place, x).view(args.num_seqs, longest)

    def to(x: Tensor) -> Tensor:
        return x.to(args.device)

    return Data(
        streams={k: to(x) for k, x in streams.items()},
        padded={k: to(pad(x)) for k, x in streams.items()},
        mask=to(mask),
        padded_mask=to(pad(mask)),
        place=to(place),
        cu_seqlens=to(cu),
        rewards=to((torch.rand(args.num_seqs) < 0.4).float()),
        lengths=to(lens),
        group_ids=to(torch.arange(args.num_seqs) // args.group_size),
    )


def loop_returns(d: Data, gamma: float) -> Tensor:
    """Columns from the right; a masked one hands on what follows."""
    r, m = d.padded["rewards"], d.padded_mask
    out, running = torch.zeros_like(r), torch.zeros_like(r[:, 0])
    for t in reversed(range(r.shape[1])):
        running = torch.where(m[:, t], r[:, t] + gamma * running, running)
        out[:, t] = running
    return out * m


def loop_gae(d: Data, gamma: float, lam: float) -> Tensor:
    """verl's GAE: next value and running advantage skip masked columns."""
    r, v, m = d.padded["rewards"], d.padded["values"], d.padded_mask.float()
    next_value = last = torch.zeros_like(r[:, 0])
    columns = []
    for t in reversed(range(r.shape[1])):
        delta = r[:, t] + gamma * next_value - v[:, t]
        new = delta + gamma * lam * last
        next_value = v[:, t] * m[:, t] + (1 - m[:, t]) * next_value
        last = new * m[:, t] + (1 - m[:, t]) * last
        columns.append(last)
    return torch.stack(columns[::-1], 1) * m


def loop_vtrace(d: Data, gamma: float) -> Tensor:
    """The recursion of the paper by columns; targets."""
    r, v, m = d.padded["rewards"], d.padded["values"], d.padded_mask
    rho = d.padded["log_ratio"].exp().clamp(max=1.0)
    next_value = x = torch.zeros_like(r[:, 0])
    columns = []
    for t in reversed(range(r.shape[1])):
        new = rho[:, t] * (r[:, t] + gamma * next_value - v[:, t]) + gamma * rho[:, t] * x
        x, next_value = torch.where(m[:, t], new, x), torch.where(m[:, t], v[:, t], next_value)
        columns.append(v[:, t] + x)
    return torch.stack(columns[::-1], 1) * m


def loop_n_step(d: Data, gamma: float, n: int) -> Tensor:
    """Per sequence over its compacted actions, n shifted additions."""
    out = torch.zeros_like(d.padded["rewards"])
    for i in range(out.shape[0]):
        keep = d.padded_mask[i]
        r, v = d.padded["rewards"][i][keep], d.padded["values"][i][keep]
        g, count = torch.zeros_like(r), r.numel()
        for k in range(min(n, count)):
            g[: count - k] += gamma**k * r[k:]
        if count > n:
            g[: count - n] += gamma**n * v[n:]
        out[i, keep] = g
    return out


def loop_groups(d: Data, baseline: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """verl's outcome baselines: rewards gathered in Python lists by group, one small tensor per group."""
    members = defaultdict(list)
    for i, g in enumerate(d.group_ids.tolist()):
        members[g].append(i)
    out = torch.zeros_like(d.rewards)
    for index in members.values():
        out[index] = baseline(torch.stack([d.rewards[i] for i in index]), torch.stack([d.lengths[i] for i in index]))
    return out


def loop_token_baseline(d: Data) -> Tensor:
    """verl's tir_optimal_token_baseline: compact each row, then one weighted mean per group and column."""
    m, rows, longest = d.padded_mask, d.padded_mask.shape[0], int(d.padded_mask.sum(1).max())
    returns = (d.padded["rewards"] * m).flip(1).cumsum(1).flip(1)
    energy = ((1 - 2 * d.padded["logp"].exp() + d.padded["sum_pi_squared"]) * m).cumsum(1)
    w, g = returns.new_zeros(rows, longest), returns.new_zeros(rows, longest)
    counts = m.sum(1).tolist()
    for i in range(rows):
        w[i, : counts[i]], g[i, : counts[i]] = energy[i, m[i]], returns[i, m[i]]
    out, advantages = torch.zeros_like(returns), torch.zeros_like(g)
    for group in d.group_ids.unique().tolist():
        index = (d.group_ids == group).nonzero().flatten()
        advantages[index] = g[index] - (g[index] * w[index]).sum(0) / (w[index].sum(0) + 1e-8)
    for i in range(rows):
        out[i, m[i]] = advantages[i, : counts[i]]
    return out


def cases(d: Data) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Name -> (ours, peer). Traces come back as [T] and [B, L], baselines as [N]."""
    s, k = d.streams, {"mask": d.mask, "cu_seqlens": d.cu_seqlens}
    r, v, ids = s["rewards"], s["values"], {"group_ids": d.group_ids}
    return {
        "discounted_returns": (lambda: A.discounted_returns(r, gamma=0.99, **k), lambda: loop_returns(d, 0.99)),
        "gae": (lambda: A.gae(r, v, gamma=0.99, lam=0.95, **k).advantages, lambda: loop_gae(d, 0.99, 0.95)),
        "vtrace": (lambda: A.vtrace(r, v, s["log_ratio"], gamma=0.99, **k).targets, lambda: loop_vtrace(d, 0.99)),
        "n_step_16": (lambda: A.n_step(r, v, n=16, gamma=0.99, **k), lambda: loop_n_step(d, 0.99, 16)),
        "optimal_token_baseline": (
            lambda: A.optimal_token_baseline(r, s["logp"], s["sum_pi_squared"], **ids, **k),
            lambda: loop_token_baseline(d),
        ),
        "group_zscore": (
            lambda: A.group_zscore(d.rewards, **ids),
            lambda: loop_groups(d, lambda x, _: (x - x.mean()) / (x.std() + 1e-6)),
        ),
        "leave_one_out": (
            lambda: A.leave_one_out(d.rewards, **ids),
            lambda: loop_groups(d, lambda x, _: (x - x.mean()) * len(x) / (len(x) - 1)),
        ),
        "opo": (
            lambda: A.opo(d.rewards, lengths=d.lengths, **ids),
            lambda: loop_groups(d, lambda x, l: x - (x * l).sum() / l.sum()),
        ),
    }


def median_ms(f: Callable[[], Tensor], repeats: int, device: str) -> float:
    """Median time: on the CPU this process's processor time (fair on a busy machine), on a GPU wall time to the end."""
    gpu = device.startswith("cuda")
    clock = time.perf_counter if gpu else time.process_time
    f()
    times = []
    for _ in range(repeats):
        if gpu:
            torch.cuda.synchronize()
        start = clock()
        f()
        if gpu:
            torch.cuda.synchronize()
        times.append(clock() - start)
    return 1e3 * statistics.median(times)


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    d = make_data(args)
    rows: list[dict[str, Any]] = []
    print(f"{'':24}{'ours ms':>10}{'peer ms':>10}{'ratio':>8}{'max difference':>16}")
    for name, (ours, peer) in cases(d).items():
        x, y = ours(), peer()
        y = y.flatten()[d.place] if y.ndim == 2 else y
        difference = (x - y).abs().max().item()
        assert difference < 1e-3, (name, difference)
        mine, theirs = median_ms(ours, args.repeats, args.device), median_ms(peer, args.peer_repeats, args.device)
        rows.append(
            {"name": name, "ours_ms": mine, "peer_ms": theirs, "ratio": theirs / mine, "difference": difference}
        )
        print(f"{name:24}{mine:10.2f}{theirs:10.1f}{theirs / mine:8.1f}{difference:16.1e}")
    if args.out is not None:
        shape = {"longest": d.padded_mask.shape[1]} | {k: v for k, v in vars(args).items() if k != "out"}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine(), "args": shape, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
