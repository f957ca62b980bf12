"""Wrong variants of estimators, baselines, controllers, objectives and kernels."""

from __future__ import annotations

import math

import torch
from mutant import Mutant

from rlkit import advantages as A
from rlkit import controllers as C
from rlkit._util.tensors import masked, upcast
from rlkit.advantages.traces import coefficient, end_values, next_action, prepared, scan
from rlkit.kernels.linear_logp import linear_logp
from rlkit.kernels.linear_scan import linear_scan
from rlkit.segments import first_of_group, group_count, group_mean, group_sum
from rlkit.types import Controller, LogProbs


def delta_and_decay(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap):
    """TD errors and decays of GAE, as they should be."""
    rewards, values = prepared(mask, cu_seqlens, rewards=rewards, values=values)
    end = end_values(bootstrap, cu_seqlens, rewards)
    gamma, lam = coefficient(mask, rewards, gamma=gamma), coefficient(mask, rewards, lam=lam)
    following = next_action(values, mask=mask, cu_seqlens=cu_seqlens, end=end)
    return rewards, values, rewards + gamma * following - values, gamma * lam, end


def gae_of(rewards, values, mask, cu_seqlens, deltas, decay, end):
    a = masked(scan(decay, deltas, mask=mask, cu_seqlens=cu_seqlens, end=end), mask)
    return A.Gae(a, masked(a + values, mask))


def gae_decays_over_gaps(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap):
    rewards, values, deltas, *_ = delta_and_decay(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap)
    decay = torch.nan_to_num(gamma * lam, nan=0.5, posinf=0.5, neginf=0.5).clamp(0, 1)
    a = masked(linear_scan(decay, masked(deltas, mask), cu_seqlens=cu_seqlens), mask)
    return A.Gae(a, masked(a + values, mask))


def gae_without_bootstrap(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap):
    return A.gae(rewards, values, mask=mask, cu_seqlens=cu_seqlens, gamma=gamma, lam=lam)


def gae_bootstraps_twice(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap):
    rewards, values, deltas, decay, end = delta_and_decay(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap)
    return gae_of(rewards, values, mask, cu_seqlens, deltas, decay, end)


def gae_reads_its_own_value(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap):
    rewards, values, _, decay, end = delta_and_decay(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap)
    deltas = rewards + coefficient(mask, rewards, gamma=gamma) * values - values
    return gae_of(rewards, values, mask, cu_seqlens, deltas, decay, end * 0)


def gae_leaks_into_the_segment_before(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap):
    rewards, values, deltas, decay, _ = delta_and_decay(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap)
    whole = torch.tensor([0, values.numel()])
    return gae_of(rewards, values, mask, whole, deltas, decay, values.new_zeros(1))


def gae_without_lambda(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap):
    return A.gae(rewards, values, mask=mask, cu_seqlens=cu_seqlens, gamma=gamma, lam=1.0, bootstrap=bootstrap)


def gae_returns_are_advantages(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap):
    a = A.gae(rewards, values, mask=mask, cu_seqlens=cu_seqlens, gamma=gamma, lam=lam, bootstrap=bootstrap).advantages
    return A.Gae(a, a)


def returns_of_masked_rewards(rewards, mask, cu_seqlens, gamma, bootstrap):
    everything = torch.ones_like(mask)
    out = A.discounted_returns(rewards, mask=everything, cu_seqlens=cu_seqlens, gamma=gamma, bootstrap=bootstrap)
    return masked(out, mask)


def returns_but_the_last(rewards, mask, cu_seqlens, gamma, bootstrap):
    given = {"mask": mask, "cu_seqlens": cu_seqlens}
    left = A.discounted_returns(mask.to(rewards.dtype), **given)  # actions from here to the end
    return A.discounted_returns(rewards * (left > 1), gamma=gamma, bootstrap=bootstrap, **given)


def returns_forwards(rewards, mask, cu_seqlens, gamma, bootstrap):
    gamma = coefficient(mask, masked(rewards, mask), gamma=gamma)
    out = linear_scan(masked(gamma, mask, 1.0), masked(rewards, mask), cu_seqlens=cu_seqlens, reverse=False)
    return masked(out, mask)


def returns_discount_the_reward(rewards, mask, cu_seqlens, gamma, bootstrap):
    given = {"mask": mask, "cu_seqlens": cu_seqlens, "gamma": gamma, "bootstrap": bootstrap}
    return masked(gamma, mask) * A.discounted_returns(rewards, **given)


def td_lambda_without_one_minus(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap):
    rewards, values, _, decay, end = delta_and_decay(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap)
    following = next_action(values, mask=mask, cu_seqlens=cu_seqlens, end=end)
    b = rewards + coefficient(mask, rewards, gamma=gamma) * following
    return masked(scan(decay, b, mask=mask, cu_seqlens=cu_seqlens, end=end), mask)


def one_step_more(rewards, values, mask, cu_seqlens, gamma, bootstrap, n):
    return A.n_step(rewards, values, n=n + 1, mask=mask, cu_seqlens=cu_seqlens, gamma=gamma, bootstrap=bootstrap)


def vtrace_without_rho(rewards, values, log_ratio, rho_max, c_max, **given):
    return A.vtrace(rewards, values, log_ratio, rho_max=math.inf, c_max=c_max, **given)


def vtrace_from_values(rewards, values, log_ratio, mask, cu_seqlens, gamma, lam, bootstrap, rho_max, c_max):
    given = {"mask": mask, "cu_seqlens": cu_seqlens, "gamma": gamma, "bootstrap": bootstrap}
    targets = A.vtrace(rewards, values, log_ratio, lam=lam, rho_max=rho_max, c_max=c_max, **given).targets
    rho = masked(log_ratio, mask).exp().clamp(max=rho_max)
    return A.VTrace(masked(rho * (A.n_step(rewards, values, n=1, **given) - masked(values, mask)), mask), targets)


def retrace_cut_by_its_own_action(rewards, q_values, values, log_ratio, mask, cu_seqlens, gamma, lam, bootstrap, c_max):
    c = masked(lam, mask) * masked(log_ratio, mask).exp().clamp(max=c_max)
    one_step = A.n_step(rewards, values, n=1, mask=mask, cu_seqlens=cu_seqlens, gamma=gamma, bootstrap=bootstrap)
    q, gamma = masked(q_values, mask), coefficient(mask, one_step, gamma=gamma)
    end = torch.zeros(cu_seqlens.numel() - 1, dtype=q.dtype)
    return masked(q + scan(gamma * c, one_step - q, mask=mask, cu_seqlens=cu_seqlens, end=end), mask)


def clipped_is_of_the_next_ratio(rewards, log_ratio, mask, cu_seqlens, gamma, bootstrap, rho_max):
    shifted = torch.cat([masked(log_ratio, mask)[1:], log_ratio.new_zeros(min(1, log_ratio.numel()))])
    given = {"mask": mask, "cu_seqlens": cu_seqlens, "gamma": gamma, "bootstrap": bootstrap}
    return A.clipped_is_returns(rewards, shifted, rho_max=rho_max, **given)


def biased_std(rewards, group_ids, eps):
    centred = rewards - group_mean(rewards, group_ids=group_ids)
    std = group_mean(centred.square(), group_ids=group_ids).sqrt()
    return torch.where(std > 0, centred / (std + eps), 0)


def std_of_the_batch(rewards, group_ids, eps):
    centred = A.group_centered(rewards, group_ids=group_ids)
    return centred / (centred.std() + 1e-6) if rewards.numel() > 1 else centred * 0


def large_eps(rewards, group_ids, eps):
    return A.group_zscore(rewards, group_ids=group_ids, eps=0.1)


def divided_by_the_variance(rewards, group_ids, eps):
    centred = A.group_centered(rewards, group_ids=group_ids)
    squares = group_mean(centred**2, group_ids=group_ids)[group_ids]
    return torch.where(squares > 0, centred / squares, 0)


def half_as_large(rewards, group_ids, eps):
    return A.group_zscore(rewards, group_ids=group_ids, eps=eps) / 2


def keeps_the_singleton(rewards, group_ids):
    centred = A.group_centered(rewards, group_ids=group_ids)
    return torch.where(group_count(group_ids) == 1, rewards, centred)


def centred_before_the_upcast(rewards, group_ids):
    shifted = rewards - rewards[first_of_group(group_ids)]
    return upcast(shifted) - group_mean(shifted, group_ids=group_ids)


def centred_on_the_batch(rewards, group_ids):
    return rewards - rewards.mean() if rewards.numel() else rewards


def groups_by_place(rewards, group_ids):
    """Takes neighbours for a group, as a reshape to [prompts, samples] does."""
    pairs = torch.arange(rewards.numel()) // 2
    return A.group_centered(rewards, group_ids=pairs)


def leave_none_out(rewards, group_ids):
    total = group_sum(rewards, group_ids=group_ids)
    return rewards - (total - rewards) / group_count(group_ids)


def opo_without_lengths(rewards, lengths, group_ids):
    return A.group_centered(rewards, group_ids=group_ids)


def max_at_k_without_baseline(rewards, group_ids, k):
    return A.max_at_k(rewards, group_ids=group_ids, k=k) + rewards


def whitened_over_padding(advantages, mask, eps):
    x = masked(advantages, mask)
    centred = masked(x - x.mean(), mask) if x.numel() else x
    std = centred.square().mean().sqrt() if x.numel() else x.sum()
    return torch.where(std > 0, centred / torch.where(std > 0, std, 1), 0)


def scan_forwards(a, b, cu_seqlens, x_end):
    return linear_scan(a, b, cu_seqlens=cu_seqlens, x_end=x_end, reverse=False)


def scan_without_segments(a, b, cu_seqlens, x_end):
    return linear_scan(a, b)


def scan_ends_twice(a, b, cu_seqlens, x_end):
    return linear_scan(a, b, cu_seqlens=cu_seqlens, x_end=2 * x_end)


def logp_without_temperature(hidden, weight, targets, mask, cu_seqlens, temperature, impl):
    return linear_logp(hidden, weight, targets, mask=mask)


def logp_of_logits(hidden, weight, targets, mask, cu_seqlens, temperature, impl):
    z = masked(hidden, mask.unsqueeze(1)) @ weight.T / temperature
    logp = z.gather(1, targets.unsqueeze(1)).squeeze(1)
    return LogProbs(masked(logp, mask), masked(torch.distributions.Categorical(logits=z).entropy(), mask))


def entropy_sign(hidden, weight, targets, mask, cu_seqlens, temperature, impl):
    out = linear_logp(hidden, weight, targets, mask=mask, temperature=temperature)
    return LogProbs(out.logp, -out.entropy)


def distance_upside_down(rewards, weights, ideal, slope):
    distance = weights * (rewards - ideal)
    return -distance.amax(1)


def front_of_the_dominated(points):
    better = (points[:, None] <= points).all(-1) & (points[:, None] < points).any(-1)
    return better.sum(0) == 0


def boxes_added_up(points, reference):
    return (points.detach() - reference).clamp(min=0).prod(1).sum()


def remembers_between_calls() -> Controller:
    calls: list[float] = []

    def update(state: C.Coef, measured: float) -> C.Coef:
        calls.append(measured)
        return C.Coef(state.coef + 0.01 * len(calls))

    return Controller(lambda coef: C.Coef(coef), update)


def pushes_away() -> Controller:
    def update(state: C.Coef, measured: float) -> C.Coef:
        return C.Coef(state.coef * (1 - 0.1 * min(max(measured - 1, -0.2), 0.2)))

    return Controller(lambda coef: C.Coef(coef), update)


def takes_nan() -> Controller:
    def update(state: C.Coef, measured: float) -> C.Coef:
        return C.Coef(state.coef * (1 + 0.1 * min(max(measured - 1, -0.2), 0.2)))

    return Controller(lambda coef: C.Coef(coef), update)


def falls_below_zero() -> Controller:
    def update(state: C.Coef, measured: float) -> C.Coef:
        return C.Coef(state.coef + 0.25 * (measured - 1))

    return Controller(lambda coef: C.Coef(coef), update)


def keeps_a_tensor() -> Controller:
    def update(state: C.Coef, measured: float) -> C.Coef:
        return C.Coef(torch.tensor(state.coef + 0.25 * (measured - 1)))

    return Controller(lambda coef: C.Coef(coef), update)


def zscore_by_a_comparison(rewards, group_ids, eps):
    centered = A.group_centered(rewards, group_ids=group_ids)
    var = group_sum(centered.square(), group_ids=group_ids) / (group_count(group_ids) - 1).clamp(min=1)
    return torch.where(var > 0, centered / (torch.where(var > 0, var, 1).sqrt() + eps), 0)


MUTANTS = [
    Mutant("advantages.group_zscore", "nan_shows", "NaN makes the group's advantages 0", zscore_by_a_comparison),
    Mutant("advantages.gae", "padded_is_packed", "decays over tool output", gae_decays_over_gaps),
    Mutant("advantages.gae", "all_count", "missing bootstrap", gae_without_bootstrap),
    Mutant("advantages.discounted_returns", "all_count", "the last action's reward omitted", returns_but_the_last),
    Mutant("advantages.group_centered", "rewards_raise", "mean minus reward", lambda **k: -A.group_centered(**k)),
    Mutant("advantages.gae", "equals_loop", "bootstrap counted twice", gae_bootstraps_twice),
    Mutant("advantages.gae", "equals_loop", "off by one: V instead of V'", gae_reads_its_own_value),
    Mutant("advantages.gae", "segment_isolation", "the next sequence leaks into it", gae_leaks_into_the_segment_before),
    Mutant("advantages.gae", "equals_loop", "lambda omitted", gae_without_lambda),
    Mutant("advantages.gae", "limit: lam = 1 is the return minus the value", "returns without the value",
           gae_returns_are_advantages),
    Mutant("advantages.discounted_returns", "mask_isolation", "masked rewards leak", returns_of_masked_rewards),
    Mutant("advantages.discounted_returns", "equals_loop", "summed forwards", returns_forwards),
    Mutant("advantages.discounted_returns", "equals_loop", "one discount too many", returns_discount_the_reward),
    Mutant("advantages.td_lambda", "limit: lam = 1 is discounted_returns", "factor 1 - lambda missing",
           td_lambda_without_one_minus),
    Mutant("advantages.n_step", "equals_loop", "one step too many", one_step_more),
    Mutant("advantages.vtrace", "equals_loop", "ratio of the TD error not truncated", vtrace_without_rho),
    Mutant("advantages.vtrace", "equals_loop", "advantages from V' instead of the targets", vtrace_from_values),
    Mutant("advantages.retrace", "equals_loop", "trace cut by its own action", retrace_cut_by_its_own_action),
    Mutant("advantages.clipped_is_returns", "equals_loop", "the next token's ratio", clipped_is_of_the_next_ratio),
    Mutant("advantages.group_zscore", "equals_loop", "biased standard deviation", biased_std),
    Mutant("advantages.group_zscore", "group_isolation", "standard deviation of the batch", std_of_the_batch),
    Mutant("advantages.group_zscore", "stated_scale", "divided by the variance", divided_by_the_variance),
    Mutant("advantages.group_zscore", "stated_scale", "scaled by 1/2", half_as_large),
    Mutant("advantages.group_zscore", "scales", "eps as large as the rewards", large_eps),
    Mutant("advantages.group_centered", "singleton_is_zero", "a singleton keeps its reward", keeps_the_singleton),
    Mutant("advantages.group_centered", "dtypes", "differences of rewards in bf16", centred_before_the_upcast),
    Mutant("advantages.group_centered", "shift_invariant", "mean of the batch", centred_on_the_batch),
    Mutant("advantages.group_centered", "permutation", "groups by reshape", groups_by_place),
    Mutant("advantages.leave_one_out", "equals_loop", "divided by n instead of n - 1", leave_none_out),
    Mutant("advantages.opo", "equals_loop", "lengths not used", opo_without_lengths),
    Mutant("advantages.max_at_k", "shift_invariant", "baseline missing", max_at_k_without_baseline),
    Mutant("advantages.whiten", "padded_is_packed", "mean over padding", whitened_over_padding),
    Mutant("kernels.linear_scan", "equals_loop", "wrong direction", scan_forwards),
    Mutant("kernels.linear_scan", "segment_isolation", "segments ignored", scan_without_segments),
    Mutant("kernels.linear_scan", "equals_loop", "end value counted twice", scan_ends_twice),
    Mutant("kernels.linear_logp (reference)", "temperature_is_scale", "temperature missing", logp_without_temperature),
    Mutant("kernels.linear_logp (reference)", "normalised", "logits not normalised", logp_of_logits),
    Mutant("kernels.linear_logp (reference)", "normalised", "sign of the entropy", entropy_sign),
    Mutant("objectives.tchebycheff", "monotone", "wrong sign of the distance", distance_upside_down),
    Mutant("objectives.pareto_mask", "limit: it is the definition, in Python", "the front of the worst points",
           front_of_the_dominated),
    Mutant("objectives.hypervolume", "limit: it is inclusion and exclusion of boxes", "overlaps counted twice",
           boxes_added_up),
    Mutant("controllers.kl_exponential", "update_is_pure", "counts its calls in a closure", remembers_between_calls),
    Mutant("controllers.kl_exponential", "feedback", "wrong direction", pushes_away),
    Mutant("controllers.kl_exponential", "refuses_nan", "NaN stays in the state", takes_nan),
    Mutant("controllers.kl_linear", "within_bounds", "the coefficient becomes negative", falls_below_zero),
    Mutant("controllers.kl_linear", "state_is_plain", "the state holds a tensor", keeps_a_tensor),
]  # fmt: skip
