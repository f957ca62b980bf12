"""Advantages of each token, functions of one signature: `advantage(batch, bootstrap) -> Gae(advantages, returns)`.

The batch has `token_rewards` (the KL is in them where it belongs there), the critic's `values` or None, and log-probs;
`bootstrap` is the value after each sequence, `[N]`. `returns` are the critic's targets. Other options are keywords:
`partial(vapo, alpha=0.1)`, on the command line `--advantage "vapo(alpha=0.1)"`.

With a critic (`rlkit.loops.ppo`): `gae`, `vapo`, `td_lambda`, `n_step`, `vtrace`, `retrace`. Without
(`rlkit.loops.grpo`): `returns`, `reinforce_pp`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit import advantages as library
from rlkit.advantages import Gae, discounted_returns, gae_decoupled, length_adaptive_lam, whiten
from rlkit.loops.coefficients import KlTerm
from rlkit.losses import kl_in_reward
from rlkit.packing import with_advantages, with_streams
from rlkit.rewards.failures import unwrapped
from rlkit.segments import broadcast_to_tokens, episode_advantages, group_mean, group_sum, sum_per_seq
from rlkit.types import Batch

_log = logging.getLogger("rlkit.losses")
Advantage = Callable[[Batch, Tensor], Gae]


def gae(
    batch: Batch,
    bootstrap: Float[Tensor, "N"],
    *,
    gamma: float = 1.0,
    lam_policy: float | Tensor = 0.95,
    lam_value: float = 1.0,
) -> Gae:
    """`rlkit.advantages.gae_decoupled`: GAE with one lambda for the advantages and one for the critic's targets."""
    return gae_decoupled(
        batch.token_rewards, batch.values, lam_policy=lam_policy, lam_value=lam_value, **_where(batch, bootstrap, gamma)
    )


def vapo(
    batch: Batch, bootstrap: Float[Tensor, "N"], *, gamma: float = 1.0, lam_value: float = 1.0, alpha: float = 0.05
) -> Gae:
    """`gae` whose lambda for the advantages grows with the answer's length, 1 - 1 / (alpha length).

    Reference: arXiv:2504.05118 (VAPO).
    """
    lam = length_adaptive_lam(batch.mask, cu_seqlens=batch.cu_seqlens, alpha=alpha)
    return gae(batch, bootstrap, gamma=gamma, lam_policy=lam, lam_value=lam_value)


def td_lambda(batch: Batch, bootstrap: Float[Tensor, "N"], *, gamma: float = 1.0, lam_policy: float = 0.95) -> Gae:
    """`rlkit.advantages.td_lambda` as the critic's target G, and G - V as the advantage: `gae` with one lambda."""
    return _above(
        library.td_lambda(batch.token_rewards, batch.values, lam=lam_policy, **_where(batch, bootstrap, gamma)), batch
    )


def n_step(batch: Batch, bootstrap: Float[Tensor, "N"], *, gamma: float = 1.0, n: int = 16) -> Gae:
    """`rlkit.advantages.n_step` as the critic's target G, and G - V as the advantage."""
    return _above(library.n_step(batch.token_rewards, batch.values, n=n, **_where(batch, bootstrap, gamma)), batch)


def vtrace(
    batch: Batch,
    bootstrap: Float[Tensor, "N"],
    *,
    gamma: float = 1.0,
    lam_policy: float = 0.95,
    rho_max: float = 1.0,
    c_max: float = 1.0,
) -> Gae:
    """`rlkit.advantages.vtrace` of the policy at the start of the step against the policy that sampled.

    Its advantages have the truncated ratio in them: use it without a `PolicyLoss.correction`.
    """
    trace = library.vtrace(
        batch.token_rewards, batch.values, batch.old_logp - batch.rollout_logp, mask=batch.mask, gamma=gamma,
        cu_seqlens=batch.cu_seqlens, lam=lam_policy, rho_max=rho_max, c_max=c_max, bootstrap=bootstrap,
    )  # fmt: skip
    return Gae(trace.advantages, trace.targets)


def retrace(
    batch: Batch, bootstrap: Float[Tensor, "N"], *, gamma: float = 1.0, lam_policy: float = 0.95, c_max: float = 1.0
) -> Gae:
    """`rlkit.advantages.retrace` with V in place of Q as the critic's target G, and G - V as the advantage.

    The ratio is that of `vtrace`.
    """
    target = library.retrace(
        batch.token_rewards, batch.values, batch.values, log_ratio=batch.old_logp - batch.rollout_logp,
        mask=batch.mask, cu_seqlens=batch.cu_seqlens, gamma=gamma, lam=lam_policy, c_max=c_max, bootstrap=bootstrap,
    )  # fmt: skip
    return _above(target, batch)


def _where(batch: Batch, bootstrap: Tensor, gamma: float) -> dict[str, Any]:
    return {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens, "gamma": gamma, "bootstrap": bootstrap}


def _above(target: Tensor, batch: Batch) -> Gae:
    return Gae((target - batch.values).where(batch.mask, 0.0), target)


def returns(batch: Batch, bootstrap: Float[Tensor, "N"], *, gamma: float = 1.0) -> Gae:
    """`rlkit.advantages.discounted_returns`: no critic. With gamma 1 and no token rewards, the terminal reward."""
    values = discounted_returns(
        batch.token_rewards, mask=batch.mask, cu_seqlens=batch.cu_seqlens, gamma=gamma, bootstrap=bootstrap
    )
    return Gae(values, values)


def reinforce_pp(batch: Batch, bootstrap: Float[Tensor, "N"], *, gamma: float = 1.0) -> Gae:
    """`returns`, whitened over the tokens of the batch: REINFORCE++ (arXiv:2501.03262).

    With a baseline of group means it is REINFORCE++-baseline.
    """
    plain = returns(batch, bootstrap, gamma=gamma)
    return plain._replace(advantages=whiten(plain.advantages, mask=batch.mask))


def with_estimates(
    batch: Batch,
    *,
    baseline: Callable[..., Tensor],
    advantage: Advantage | None = None,
    kl: KlTerm = KlTerm(),
    kl_coef: float = 0.0,
) -> Batch:
    """The batch with `advantages` of a group baseline, and of a per-token estimator on top of it.

        A_t = baseline(R)[episode of t]                        R: terminal rewards, with the episode's KL in `kl.place`
        A   = advantage(r)                                     r_t: token rewards, baseline(R) at the last action

    A KL in the reward or the advantage is `kl_coef * kl.estimator(old_logp, ref_logp)` at each token.
    """
    penalty = torch.zeros_like(batch.token_rewards)
    if kl_coef and kl.place != "loss":
        penalty = -kl_in_reward(
            penalty, batch.old_logp, batch.ref_logp, kl_coef=kl_coef, mask=batch.mask, estimator=kl.estimator
        )
    in_reward = penalty if kl.place == "reward" else torch.zeros_like(penalty)
    if advantage is None:
        _refuse_turn_rewards(batch)
        per_episode = group_sum(sum_per_seq(in_reward, cu_seqlens=batch.cu_seqlens), group_ids=batch.episode_ids)
        rewards = batch.rewards
        batch = with_advantages(replace(batch, rewards=rewards - per_episode), baseline)
        batch = replace(batch, rewards=rewards)
    else:
        shift = episode_advantages(baseline, batch) - batch.rewards
        at_end = broadcast_to_tokens(shift, cu_seqlens=batch.cu_seqlens).where(last_actions(batch), 0.0)
        scored = replace(batch, token_rewards=batch.token_rewards + at_end - in_reward)
        batch = with_streams(batch, advantages=advantage(scored, torch.zeros_like(batch.rewards)).advantages)
    return with_streams(batch, advantages=batch.advantages - penalty) if kl.place == "advantage" else batch


def _refuse_turn_rewards(batch: Batch) -> None:
    """ValueError for rewards of turns, which a baseline of terminal rewards leaves out."""
    terminal = broadcast_to_tokens(batch.rewards, cu_seqlens=batch.cu_seqlens).where(last_actions(batch), 0.0)
    if not torch.allclose(batch.token_rewards, terminal.to(batch.token_rewards.dtype)):
        raise ValueError(
            "the episodes have rewards of turns, and a baseline alone reads terminal rewards: use `advantage` returns, "
            "or end an episode with reward=sum(turn_rewards)"
        )


def told_below_zero(baseline: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`max_rl` that logs the first batch with a group of negative mean, which it divides by; others as they are."""
    if unwrapped(baseline) is not library.max_rl:
        return baseline
    told = False

    def checked(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
        nonlocal told
        means = group_mean(rewards, group_ids=group_ids)
        if not told and bool((means < 0).any()):
            told = True
            _log.warning(
                "max_rl divides by a group's mean reward, and the lowest is %g: in such a group the best answers are "
                "pushed down; use rewards of at least 0 (and no KL in them), or another baseline", float(means.min())
            )  # fmt: skip
        return baseline(rewards, group_ids=group_ids)

    return checked


def last_actions(batch: Batch) -> Tensor:
    """`[T]`, True at the last token of each sequence that the policy sampled, where `pack` puts the reward."""
    left = batch.mask.flip(0).cumsum(0).flip(0)  # actions from here to the end of the batch
    after = torch.cat([left, left.new_zeros(1)])[batch.cu_seqlens[1:]]
    return batch.mask & (left - broadcast_to_tokens(after, cu_seqlens=batch.cu_seqlens) == 1)
