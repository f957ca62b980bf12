"""Traces over the tokens of each sequence: rewards and values [T] in, returns or advantages [T] out.

    t'      the next *action* token (mask True) of the sequence after t; masked tokens in between are skipped
    V'      V at t'. After the last action: `bootstrap` of the sequence, by default 0 (terminated)
    G', A'  likewise; each function states the value after the last action

Tool output between two actions, of any length, is not discounted and does not leak. Values at masked positions (also
NaN, also in `values`, `gamma` and `lam`) affect neither results nor gradients; outputs are 0 there. A reward at a
masked position is ignored: put it on the action that earned it.

`gamma` and `lam` are floats or `[T]` tensors in [-1, 1]; gamma_t and lam_t scale what *follows* token t. `cu_seqlens`
is int32 or int64; sequences may be empty. bf16 and fp16 are computed and returned in fp32; fp64 stays fp64.

All functions are differentiable and detach nothing. Call them under `torch.no_grad` for targets and advantages: with
values that require a gradient, the policy loss, which multiplies by the advantages, would train the critic, too. (The
value losses of `rlkit.losses` detach `returns`; the loops of rlkit read values without a gradient.)

All are the recurrence x_t = a_t x_{t+1} + b_t, computed backwards inside each sequence. A masked token is its identity,
(a, b) = (1, 0), so the scan's value *at* a masked token is the value at the next action (or the end value after the
last one).
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import (
    check_bool,
    check_count,
    check_cu_seqlens,
    check_float,
    check_given,
    check_mask,
    check_same_device,
    check_same_shape,
    masked,
    readable,
    upcast,
)
from rlkit.kernels.linear_scan import linear_scan
from rlkit.segments import broadcast_to_tokens, seq_count

__all__ = [
    "Gae",
    "bootstrap_values",
    "discounted_returns",
    "gae",
    "gae_decoupled",
    "length_adaptive_lam",
    "n_step",
    "td_lambda",
]


def prepared(mask: Tensor, cu_seqlens: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    """Check the `[T]` tensors; return them in the order given, in one dtype (fp32 or fp64), 0 where masked."""
    check_given(**tensors)
    check_float(**tensors)
    name, first = next(iter(tensors.items()))
    check_same_shape(**tensors)
    check_mask(mask, **{name: first})
    check_cu_seqlens(cu_seqlens, **{name: first})
    dtype = reduce(torch.promote_types, (upcast(x[:0]).dtype for x in tensors.values()))
    return tuple(masked(x.to(dtype), mask) for x in tensors.values())


def _check_order(rewards: Tensor, values: Tensor) -> None:
    """ValueError where the rewards have a gradient and the values none: they have changed places."""
    if rewards.requires_grad and not values.requires_grad:
        raise ValueError("rewards has a gradient and values has none: the order is (rewards, values)")


def coefficient(mask: Tensor, like: Tensor, **named: float | Tensor) -> Tensor:
    """A float or per-token `gamma` or `lam` as a tensor of `like`'s dtype, in [-1, 1]; 1 where masked."""
    ((name, x),) = named.items()
    if not isinstance(x, Tensor):
        if not -1 <= x <= 1:
            raise ValueError(f"{name} must be in [-1, 1], got {x}")
        return torch.full((), x, dtype=like.dtype, device=like.device)
    check_float(**{name: x})
    check_same_shape(mask=mask, **{name: x})
    x = masked(x.to(like.dtype), mask, fill=1.0)
    if readable(x) and not (x.abs() <= 1).all():
        raise ValueError(f"{name} must be in [-1, 1], got {x[x.abs().argmax()].item()}")
    return x


def end_values(bootstrap: Tensor | None, cu_seqlens: Tensor, like: Tensor) -> Tensor:
    """`bootstrap` [N], checked, in `like`'s dtype; zeros (terminated) for None."""
    num_seqs = cu_seqlens.numel() - 1
    if bootstrap is None:
        return like.new_zeros(num_seqs)
    check_float(bootstrap=bootstrap)
    check_same_device(cu_seqlens=cu_seqlens, bootstrap=bootstrap)
    if bootstrap.shape != (num_seqs,):
        fix = "; use bootstrap.flatten()" * (bootstrap.numel() == num_seqs)
        raise ValueError(f"bootstrap must have one value per sequence, [{num_seqs}], got {list(bootstrap.shape)}{fix}")
    return bootstrap.to(like.dtype)


def scan(a: Tensor, b: Tensor, *, mask: Tensor, cu_seqlens: Tensor, end: Tensor, a_max: float = 1.0) -> Tensor:
    """x_t = a_t x' + b_t at actions, x_t = x' at masked tokens; x' after the last token is `end`.

    `a_max` bounds |a|. Above 1 the products in a parallel scan could overflow where x does not, so the loop is used.
    """
    impl = None if a_max <= 1 else "reference"
    return linear_scan(masked(a, mask, fill=1.0), masked(b, mask), cu_seqlens=cu_seqlens, x_end=end, impl=impl)


def following(x: Tensor, *, cu_seqlens: Tensor, end: Tensor) -> Tensor:
    """A result `x` of `scan`, shifted by one token: its value at the next action after t, or `end` after the last."""
    num_tokens = x.shape[0]
    last = torch.where(cu_seqlens.diff() > 0, cu_seqlens[1:] - 1, num_tokens).long()  # empty sequences: a spare entry
    return torch.cat([x[1:], x.new_zeros(min(num_tokens, 1) + 1)]).index_copy(0, last, end)[:num_tokens]


def next_action(x: Tensor, *, mask: Tensor, cu_seqlens: Tensor, end: Tensor) -> Tensor:
    """`x` at the next action token of the sequence, or `end` after the last action."""
    at_or_after = scan(torch.zeros_like(x), x, mask=mask, cu_seqlens=cu_seqlens, end=end)
    return following(at_or_after, cu_seqlens=cu_seqlens, end=end)


class Gae(NamedTuple):
    """Advantages for the policy, returns (value targets) for the critic."""

    advantages: Float[Tensor, "T"]
    returns: Float[Tensor, "T"]


def bootstrap_values(
    values: Float[Tensor, "T"], *, truncated: Bool[Tensor, "N"], cu_seqlens: Int[Tensor, "N1"]
) -> Float[Tensor, "N"]:
    """The `bootstrap` argument of the traces, for batches made by `rlkit.packing.pack`.

        bootstrap_i = V at the last token of sequence i  if truncated_i, else 0

    `pack` appends the last sampled token of a truncated sequence as one more input with mask False; the value there is
    that of the state in which the episode was truncated. An empty sequence gives 0.

    Where the reward judges the text that was cut (a verifier, a reward model), it is the whole return, and a value on
    top of it counts it twice: leave `bootstrap` out, as TRL, verl, OpenRLHF and slime do. It is for rewards that
    the rest of the episode would still have brought.

    Reference: Pardo et al. 2018, https://arxiv.org/abs/1712.00378
    """
    check_float(values=values)
    check_cu_seqlens(cu_seqlens, values=values)
    num_seqs = cu_seqlens.numel() - 1
    check_bool("truncated", truncated, "cut by a limit")
    if truncated.shape != (num_seqs,):
        raise ValueError(f"truncated must have one entry per sequence, [{num_seqs}], got {list(truncated.shape)}")
    if values.shape[0] == 0:
        return upcast(values).new_zeros(num_seqs)
    last = upcast(values)[(cu_seqlens[1:] - 1).clamp(min=0)]
    return masked(last, truncated & (cu_seqlens.diff() > 0))


def discounted_returns(
    rewards: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float | Float[Tensor, "T"] = 1.0,
    bootstrap: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "T"]:
    """Discounted sum of the rewards from each action on.

        G_t = r_t + gamma_t G'          G' after the last action: bootstrap

    Limits:   gamma = 0 gives the rewards; gamma = 1 the sum of the remaining rewards (reward-to-go).
    Differs:  from slime and miles, where a gap of k tokens is discounted by gamma^k, and SkyRL (`reinforce++`), where
              the reward of a masked token counts and cuts the return of the tokens before it.
    Reference: Sutton & Barto, Reinforcement Learning, eq. 3.8; http://incompleteideas.net/book/the-book.html
    """
    (rewards,) = prepared(mask, cu_seqlens, rewards=rewards)
    end = end_values(bootstrap, cu_seqlens, rewards)
    gamma = coefficient(mask, rewards, gamma=gamma)
    return masked(scan(gamma, rewards, mask=mask, cu_seqlens=cu_seqlens, end=end), mask)


def td_lambda(
    rewards: Float[Tensor, "T"],
    values: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float | Float[Tensor, "T"] = 1.0,
    lam: float | Float[Tensor, "T"] = 1.0,
    bootstrap: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "T"]:
    """The lambda-return: a mixture of all n-step returns, the target of TD(lambda).

        G_t = r_t + gamma_t ((1 - lam_t) V' + lam_t G')          G' after the last action: bootstrap

    Gradient: flows into `values`, unless under `torch.no_grad`.
    Limits:   lam = 1 is `discounted_returns`; lam = 0 is r + gamma V'; for every lam it is V + the advantages of `gae`.
    Reference: Sutton & Barto, chapter 12; https://github.com/google-deepmind/rlax (multistep.py)
    """
    _check_order(rewards, values)
    rewards, values = prepared(mask, cu_seqlens, rewards=rewards, values=values)
    end = end_values(bootstrap, cu_seqlens, rewards)
    gamma, lam = coefficient(mask, rewards, gamma=gamma), coefficient(mask, rewards, lam=lam)
    next_values = next_action(values, mask=mask, cu_seqlens=cu_seqlens, end=end)
    one_step = rewards + gamma * (1 - lam) * next_values
    return masked(scan(gamma * lam, one_step, mask=mask, cu_seqlens=cu_seqlens, end=end), mask)


def gae(
    rewards: Float[Tensor, "T"],
    values: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float | Float[Tensor, "T"] = 1.0,
    lam: float | Float[Tensor, "T"] = 1.0,
    bootstrap: Float[Tensor, "N"] | None = None,
) -> Gae:
    """Generalized advantage estimation over action tokens.

        delta_t = r_t + gamma_t V' - V_t
        A_t = delta_t + gamma_t lam_t A'          A' after the last action: 0
        returns_t = A_t + V_t

    Padded rows `[B, L]`, with `padding_mask` True at real tokens and the mask of the actions:

        (r, v, m), cu_seqlens = from_padded(rewards, values, mask, padding_mask=padding_mask)
        out = gae(r, v, mask=m, cu_seqlens=cu_seqlens)
        advantages, returns = to_padded(*out, padding_mask=padding_mask)

    Gradient: flows into `values`, unless under `torch.no_grad`.
    Limits:   lam = 1 gives `discounted_returns` - V; lam = 0 gives delta; returns are `td_lambda`.
    Differs:  from verl (`gae`) and OpenRLHF: advantages are not whitened (call `whiten`), and truncated episodes have a
              `bootstrap`.
    Reference: Schulman et al. 2015, https://arxiv.org/abs/1506.02438
    """
    values, advantages = _gae(rewards, values, mask, cu_seqlens, gamma, bootstrap, lam=lam)
    return Gae(advantages, advantages + values)


def gae_decoupled(
    rewards: Float[Tensor, "T"],
    values: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    lam_policy: float | Float[Tensor, "T"],
    lam_value: float | Float[Tensor, "T"] = 1.0,
    gamma: float | Float[Tensor, "T"] = 1.0,
    bootstrap: Float[Tensor, "N"] | None = None,
) -> Gae:
    """GAE with one lambda for the policy's advantages and another for the critic's targets (VC-PPO, VAPO).

        advantages = A(lam_policy)          returns = V + A(lam_value)          A: see `gae`

    VAPO uses lam_value = 1 (unbiased targets at any length) and `lam_policy = length_adaptive_lam(mask, ..)`.

    Gradient: flows into `values`, unless under `torch.no_grad`.
    Limits:   lam_policy = lam_value is `gae`.
    Differs:  from NeMo-RL (`gae_lambda_policy`, `gae_lambda_value`): advantages are not whitened.
    Reference: Yuan et al. 2025, https://arxiv.org/abs/2503.01491; Yue et al. 2025, https://arxiv.org/abs/2504.05118
    """
    lams = {"lam_policy": lam_policy, "lam_value": lam_value}
    values, advantages, errors = _gae(rewards, values, mask, cu_seqlens, gamma, bootstrap, **lams)
    return Gae(advantages, errors + values)


def _gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float | Tensor,
    bootstrap: Tensor | None,
    **lams: float | Tensor,
) -> list[Tensor]:
    """The prepared values, then the advantages for each lambda."""
    _check_order(rewards, values)
    rewards, values = prepared(mask, cu_seqlens, rewards=rewards, values=values)
    end = end_values(bootstrap, cu_seqlens, rewards)
    gamma = coefficient(mask, rewards, gamma=gamma)
    delta = rewards + gamma * next_action(values, mask=mask, cu_seqlens=cu_seqlens, end=end) - values
    decays = [gamma * coefficient(mask, rewards, **{name: lam}) for name, lam in lams.items()]
    zero = torch.zeros_like(end)
    return [values, *(masked(scan(a, delta, mask=mask, cu_seqlens=cu_seqlens, end=zero), mask) for a in decays)]


def length_adaptive_lam(
    mask: Bool[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"], alpha: float = 0.05, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "T"]:
    """VAPO's lambda for each token, from the number l of action tokens of its sequence.

        lam = max(0, 1 - 1 / (alpha l))

    The sum of the weights lam^k over a long sequence is then proportional to its length: 1 / (1 - lam) = alpha l.

    Limits:   l <= 1 / alpha gives 0 (20 tokens at the paper's alpha); l -> infinity gives 1.
    Reference: Yue et al. 2025, https://arxiv.org/abs/2504.05118, section 4.2
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    check_mask(mask, values=mask)
    length = seq_count(mask, cu_seqlens=cu_seqlens).to(dtype).clamp(min=1)
    lam = (1 - 1 / (alpha * length)).clamp(min=0)
    return masked(broadcast_to_tokens(lam, cu_seqlens=cu_seqlens, num_tokens=mask.shape[0]), mask)


def n_step(
    rewards: Float[Tensor, "T"],
    values: Float[Tensor, "T"],
    *,
    n: int,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float | Float[Tensor, "T"] = 1.0,
    bootstrap: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "T"]:
    """The n-step return over action tokens: the discounted sum of n rewards, then the value.

        G_t = r_0 + gamma_0 r_1 + ... + (gamma_0 .. gamma_{n-2}) r_{n-1} + (gamma_0 .. gamma_{n-1}) V_n

    where 0, 1, .. n count actions from t. If fewer than n actions remain, all of them are summed and `bootstrap`
    replaces V_n.

    One step is the map x -> gamma_t x + r_t; n of them compose along the next-action index in log2(n) doublings.

    Gradient: flows into `values`, unless under `torch.no_grad`.
    Limits:   n = 1 is r + gamma V'; n >= the number of actions is `discounted_returns`.
    Reference: Sutton & Barto, eq. 7.1
    """
    check_count(n=n)
    rewards, values = prepared(mask, cu_seqlens, rewards=rewards, values=values)
    end = end_values(bootstrap, cu_seqlens, rewards)
    gamma = coefficient(mask, rewards, gamma=gamma)
    if n >= rewards.shape[0]:
        return masked(scan(gamma, rewards, mask=mask, cu_seqlens=cu_seqlens, end=end), mask)

    # One more node per sequence, its end: value `bootstrap`, the identity map, itself as the next node.
    node_values = torch.cat([values, end])
    step = _next_action_node(mask, cu_seqlens)
    a = torch.cat([gamma.expand_as(rewards), torch.ones_like(end)])
    b = torch.cat([rewards, torch.zeros_like(end)])
    total_a, total_b, node = torch.ones_like(a), torch.zeros_like(b), torch.arange(a.numel(), device=a.device)
    while True:
        if n & 1:
            total_a, total_b, node = total_a * a[node], total_b + total_a * b[node], step[node]
        n >>= 1
        if n == 0:
            break
        a, b, step = a * a[step], b + a * b[step], step[step]
    return masked((total_b + total_a * node_values[node])[: rewards.shape[0]], mask)


def _next_action_node(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The next action after each token, or T + i if sequence i has none; node T + i points to itself."""
    num_tokens, num_seqs = mask.shape[0], cu_seqlens.numel() - 1
    tokens = torch.arange(num_tokens, device=mask.device)
    ends = torch.arange(num_seqs, device=mask.device) + num_tokens
    at_or_after = torch.where(mask, tokens, num_tokens).flip(0).cummin(0).values.flip(0)
    after = torch.cat([at_or_after[1:], at_or_after.new_full((1,), num_tokens)])
    stop = broadcast_to_tokens(cu_seqlens[1:], cu_seqlens=cu_seqlens, num_tokens=num_tokens)
    seq_end = broadcast_to_tokens(ends, cu_seqlens=cu_seqlens, num_tokens=num_tokens)
    return torch.cat([torch.where(after < stop, after, seq_end), ends])
