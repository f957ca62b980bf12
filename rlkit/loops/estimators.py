"""Advantages of each token, functions of one signature: `advantage(batch, bootstrap) -> Gae(advantages, returns)`.

The batch has `token_rewards` (the KL is in them where it belongs there), the critic's `values` or None, and log-probs;
`bootstrap` is the value after each sequence, `[N]`. `returns` are the critic's targets. Other options are keywords:
`partial(vapo, alpha=0.1)`, on the command line `--advantage "vapo(alpha=0.1)"`.

With a critic (`rlkit.loops.ppo`): `gae`, `vapo`, `td_lambda`, `n_step`, `vtrace`, `retrace`. Without
(`rlkit.loops.grpo`): `returns`, `reinforce_pp`, and per turn `turn_returns`, `gigpo`.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit import advantages as library
from rlkit import segments
from rlkit.advantages import Gae, discounted_returns, gae_decoupled, length_adaptive_lam, whiten
from rlkit.advantages.groups import TURNED
from rlkit.loops.coefficients import KlTerm
from rlkit.losses import kl_in_reward
from rlkit.packing import with_advantages, with_streams
from rlkit.rewards.failures import unwrapped
from rlkit.types import Batch

_log = logging.getLogger("rlkit.losses")
Advantage = Callable[..., Gae]  # (batch, bootstrap); of turns also baseline=


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

    The advantages are r + gamma targets' - V, without the truncated ratio of IMPALA: whitening would subtract a mean
    from the product and train on the ratio itself. `PolicyLoss.correction` multiplies by it afterwards
    (`tis(max_weight=rho_max)`).
    """
    trace = library.vtrace(
        batch.token_rewards, batch.values, batch.old_logp - batch.rollout_logp, mask=batch.mask, gamma=gamma,
        cu_seqlens=batch.cu_seqlens, lam=lam_policy, rho_max=rho_max, c_max=c_max, bootstrap=bootstrap,
    )  # fmt: skip
    one_step = library.td_lambda(batch.token_rewards, trace.targets, lam=0.0, **_where(batch, bootstrap, gamma))
    return Gae(_above(one_step, batch).advantages, trace.targets)


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


class _Turns(NamedTuple):
    """The turns [S] of a batch: first token, sampled tokens, sequence, episode, reward; groups and rewards of its
    episodes [E]."""

    starts: Tensor
    lens: Tensor
    seq_ids: Tensor
    episode_ids: Tensor
    rewards: Tensor
    group_ids: Tensor
    episode_rewards: Tensor

    def on_tokens(self, advantages: Tensor, batch: Batch) -> Gae:
        """The advantage of each turn on its tokens."""
        per_token = advantages.to(batch.token_rewards).repeat_interleave(self.lens)
        spread = torch.zeros_like(batch.token_rewards).masked_scatter(batch.mask, per_token)
        return Gae(spread, spread)


def _turns(batch: Batch) -> _Turns:
    """The terminal reward, which `pack` puts on the last action of each piece, counts at an episode's last turn."""
    lens = library.turn_lens(batch.mask, cu_seqlens=batch.cu_seqlens)
    starts = library.turn_starts(batch.mask, cu_seqlens=batch.cu_seqlens).nonzero().flatten()
    seq = segments.seq_ids(batch.cu_seqlens, num_tokens=batch.num_tokens)[starts]
    first, episodes = segments.is_first_piece(batch.episode_ids), batch.episode_ids.unique(return_inverse=True)[1]
    groups = segments.compared_ids(batch)
    order = batch.episode_ids[first].argsort()
    ends_piece, ends_episode = (segments.is_first_piece(x.flip(0)).flip(0) for x in (seq, episodes[seq]))
    rewards = segments.sum_per_seq(batch.token_rewards[batch.mask], cu_seqlens=segments.cumulative(lens))
    rewards = rewards - batch.rewards[seq].where(ends_piece & ~ends_episode, 0.0)
    acts = segments.seq_count(batch.mask, cu_seqlens=batch.cu_seqlens) > 0
    of_turns = segments.sum_per_seq(batch.token_rewards, cu_seqlens=batch.cu_seqlens) - batch.rewards.where(acts, 0.0)
    totals = batch.rewards + segments.group_sum(of_turns, group_ids=batch.episode_ids)
    return _Turns(starts, lens, seq, episodes[seq], rewards, groups[first][order], totals[first][order])


def turn_returns(
    batch: Batch,
    bootstrap: Float[Tensor, "N"],  # noqa: ARG001
    *,
    gamma: float = 1.0,
    baseline: Callable[..., Tensor] | None = None,
) -> Gae:
    """`rlkit.advantages.turn_returns`: the return from each turn on, compared with the k-th turns of the group.

    `baseline` is the loop's; outside of a loop `group_centered`. The pieces of an episode are one sequence of turns.
    """
    turns = _turns(batch)
    advantages = library.turn_returns(
        turns.rewards, group_ids=turns.group_ids, step_seq_ids=turns.episode_ids, gamma=gamma,
        baseline=baseline or library.group_centered,
    )  # fmt: skip
    return turns.on_tokens(advantages, batch)


def gigpo(
    batch: Batch,
    bootstrap: Float[Tensor, "N"],  # noqa: ARG001
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    baseline: Callable[..., Tensor] | None = None,
) -> Gae:
    """`rlkit.advantages.gigpo`: episodes of a group, and turns of a group that start in the same state.

    The state is what the policy was shown last: the tokens between its turns, before the first turn of a piece its
    prompt. `baseline` is that of both levels: the loop's; outside of a loop `group_centered`.
    Errors: ValueError for pictures that are shown in later turns, which are not compared.
    """
    turns = _turns(batch)
    advantages = library.gigpo(
        turns.episode_rewards,
        library.step_returns(turns.rewards, step_seq_ids=turns.episode_ids, gamma=gamma),
        group_ids=turns.group_ids, step_seq_ids=turns.episode_ids, step_group_ids=_states(batch, turns),
        step_weight=step_weight, baseline=baseline or library.group_centered,
    )  # fmt: skip
    return turns.on_tokens(advantages, batch)


def _states(batch: Batch, turns: _Turns) -> Tensor:
    """Equal ids for the turns of a group before which the same tokens were shown."""
    if batch.images is not None and any(batch.images[batch.prefix_cu.numel() - 1 :]):
        raise ValueError("gigpo compares the tokens of observations, and these show pictures: use turn_returns")
    targets, bounds = batch.targets.cpu().numpy(), batch.cu_seqlens.tolist()
    states: dict[tuple[int, int, int, bytes], int] = {}
    ids, after = [], -1
    for start, n, i, e in zip(*(x.tolist() for x in (turns.starts, turns.lens, turns.seq_ids, turns.episode_ids))):
        first = after <= bounds[i]
        before = targets[max(after, bounds[i]) : start].tobytes()
        prompt = (int(batch.prefix_ids[i]), int(batch.tokens[bounds[i]])) if first else (-1, -1)
        ids.append(states.setdefault((int(turns.group_ids[e]), *prompt, before), len(states)))
        after = start + n
    return torch.tensor(ids, dtype=torch.long, device=batch.targets.device)


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
        A   = advantage(r, baseline=baseline)                  r_t: token rewards, R at the last action

    The last is that of an estimator with an argument `baseline` that is None: of turns, which it compares itself.
    A KL in the reward or the advantage is `kl_coef * kl.estimator(old_logp, ref_logp)` at each token. An episode
    without a trained token (cut, failed), whose tokens have none, counts with the mean KL of the others of its group.
    """
    penalty = torch.zeros_like(batch.token_rewards)
    if kl_coef and kl.place != "loss":
        penalty = -kl_in_reward(
            penalty, batch.old_logp, batch.ref_logp, kl_coef=kl_coef, mask=batch.mask, estimator=kl.estimator
        )
    in_reward = penalty if kl.place == "reward" else torch.zeros_like(penalty)
    if advantage is None:
        _refuse_turn_rewards(batch)
        of_seq = segments.sum_per_seq(in_reward, cu_seqlens=batch.cu_seqlens)
        per_episode = _of_trained(segments.group_sum(of_seq, group_ids=batch.episode_ids), batch)
        rewards = batch.rewards
        batch = with_advantages(replace(batch, rewards=rewards - per_episode), baseline)
        batch = replace(batch, rewards=rewards)
    else:
        scored = replace(batch, token_rewards=batch.token_rewards - in_reward)
        if compares_turns(advantage):
            advantage = partial(advantage, baseline=baseline)
        else:
            shift = segments.episode_advantages(baseline, batch) - batch.rewards
            at_end = segments.broadcast_to_tokens(shift, cu_seqlens=batch.cu_seqlens).where(last_actions(batch), 0.0)
            scored = replace(scored, token_rewards=scored.token_rewards + at_end)
        batch = with_streams(batch, advantages=advantage(scored, torch.zeros_like(batch.rewards)).advantages)
    return with_streams(batch, advantages=batch.advantages - penalty) if kl.place == "advantage" else batch


def _of_trained(per_episode: Tensor, batch: Batch) -> Tensor:
    """`[N]` with the mean of the trained episodes of the same group at episodes without a trained token."""
    counts = segments.seq_count(batch.mask, cu_seqlens=batch.cu_seqlens).to(per_episode)
    trained = segments.group_sum(counts, group_ids=batch.episode_ids) > 0
    once = (trained & segments.is_first_piece(batch.episode_ids)).to(per_episode)
    total, num = (segments.group_sum(x, group_ids=segments.compared_ids(batch)) for x in (per_episode * once, once))
    return per_episode.where(trained, total / num.clamp(min=1))


def compares_turns(advantage: Advantage) -> bool:
    """Whether an estimator asks for the loop's baseline, by an argument `baseline` that is None."""
    parameter = inspect.signature(advantage).parameters.get("baseline")
    return parameter is not None and parameter.default is None


def _refuse_turn_rewards(batch: Batch) -> None:
    """ValueError for rewards of turns, which a baseline of terminal rewards leaves out."""
    terminal = segments.broadcast_to_tokens(batch.rewards, cu_seqlens=batch.cu_seqlens).where(last_actions(batch), 0.0)
    if not torch.allclose(batch.token_rewards, terminal.to(batch.token_rewards.dtype)):
        fix = "use `advantage` returns or turn_returns, or end an episode with reward=sum(turn_rewards)"
        raise ValueError(f"the episodes have rewards of turns, and a baseline alone reads terminal rewards: {fix}")


def told_below_zero(baseline: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`max_rl` that logs the first batch with a group of negative mean, which it divides by; others as they are."""
    if unwrapped(baseline) is not library.max_rl:
        return baseline
    told = False

    def checked(rewards: Tensor, *, group_ids: Tensor) -> Tensor:
        nonlocal told
        means = segments.group_mean(rewards, group_ids=group_ids)
        if not bool((means < 0).any()):
            return baseline(rewards, group_ids=group_ids)
        if not told:
            told = True
            _log.warning(TURNED, float(means.min()))
        with warnings.catch_warnings(action="ignore"):  # which the function says of values on the CPU
            return baseline(rewards, group_ids=group_ids)

    return checked


def last_actions(batch: Batch) -> Tensor:
    """`[T]`, True at the last token of each sequence that the policy sampled, where `pack` puts the reward."""
    left = batch.mask.flip(0).cumsum(0).flip(0)  # actions from here to the end of the batch
    after = torch.cat([left, left.new_zeros(1)])[batch.cu_seqlens[1:]]
    return batch.mask & (left - segments.broadcast_to_tokens(after, cu_seqlens=batch.cu_seqlens) == 1)
