"""Wrong variants of losses, weights, corrections and KL estimators: mistakes seen in the field, and ones like them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mutant import Mutant

from rlkit import losses as L
from rlkit._util.tensors import bounded_exp, masked
from rlkit.metrics import Mean
from rlkit.segments import broadcast_to_tokens, mean_per_seq, seq_count, seq_lens, sum_per_seq

LOW, HIGH = 0.8, 1.28


def ppo(x, a, mask, low=LOW, high=HIGH):
    x, a = masked(x, mask), masked(a, mask)
    return torch.maximum(-a * x.exp(), -a * x.exp().clamp(low, high))


def minimum_for_maximum(log_ratio, advantages, mask, clip_high):
    x, a = masked(log_ratio, mask), masked(advantages, mask)
    return torch.minimum(-a * x.exp(), -a * x.exp().clamp(LOW, HIGH))


def clips_both_ways(log_ratio, advantages, mask, clip_high):
    return -masked(advantages, mask) * masked(log_ratio, mask).exp().clamp(LOW, HIGH)


def mask_multiplied(log_ratio, advantages, mask, clip_high):
    loss = torch.maximum(-advantages * log_ratio.exp(), -advantages * log_ratio.exp().clamp(LOW, HIGH))
    return loss * mask


def masked_mean_inside(log_ratio, advantages, mask, clip_high):
    return ppo(log_ratio, advantages, mask) / mask.sum().clamp(min=1)


def whitens_inside(log_ratio, advantages, mask, clip_high):
    a = masked(advantages, mask)
    return ppo(log_ratio, a - a.sum() / mask.sum().clamp(min=1), mask)


def changes_its_argument(log_ratio, advantages, mask, clip_high):
    advantages.data[~mask] = 0
    return ppo(log_ratio, advantages, mask)


def computes_in_bf16(log_ratio, advantages, mask, clip_high):
    return ppo(log_ratio, advantages, mask)


def adds_noise(log_ratio, advantages, mask, clip_high):
    return ppo(log_ratio, advantages, mask) * (1 + 1e-3 * torch.rand(log_ratio.shape))


def ratio_capped_at_e3(log_ratio, advantages, mask):
    return -masked(advantages, mask) * masked(log_ratio, mask).clamp(max=3).exp()


def ratio_upside_down(log_ratio, advantages, mask, clip_high):
    return ppo(-log_ratio, advantages, mask)


def detached_ratio(log_ratio, advantages, mask, clip_high):
    return ppo(log_ratio.detach(), advantages, mask)


def forgets_the_mask(log_ratio, advantages, mask, clip_high):
    return torch.maximum(-advantages * bounded_exp(log_ratio), -advantages * bounded_exp(log_ratio).clamp(LOW, HIGH))


def reads_its_neighbour(log_ratio, advantages, mask, clip_high):
    return ppo(log_ratio, masked(advantages, mask).roll(1), mask)


def dual_clip_everywhere(log_ratio, advantages, mask, clip_c):
    loss, a = ppo(log_ratio, advantages, mask, 0.8, 1.2), masked(advantages, mask)
    return torch.minimum(loss, -a * clip_c)


def cispo_without_detach(log_ratio, advantages, mask):
    x, a = masked(log_ratio, mask), masked(advantages, mask)
    return -x.exp().clamp(max=5.0) * a * x


def cispo_relative_cap(log_ratio, advantages, mask):
    x, a = masked(log_ratio, mask), masked(advantages, mask)
    return -x.exp().clamp(max=1 + 5.0).detach() * a * x


def sapo_without_scale(log_ratio, advantages, mask):
    x, a = masked(log_ratio, mask), masked(advantages, mask)
    return -a * torch.sigmoid(x.exp() - 1)


def sapo_taus_swapped(log_ratio, advantages, mask):
    return L.sapo(log_ratio, advantages, tau_pos=1.05, tau_neg=1.0, mask=mask)


def topr_sign_swapped(log_ratio, advantages, mask):
    x, a = masked(log_ratio, mask), masked(advantages, mask)
    return -torch.where(a < 0, 1.0, x.exp().clamp(max=1)).detach() * a * x


def dppo_one_sided(log_ratio, advantages, old_logp, mask, max_weight):
    x, a, old = (masked(y, mask) for y in (log_ratio, advantages, old_logp))
    keep = (old + x.detach()).exp() - old.exp() <= 0.2
    return -(x.exp().clamp(max=max_weight) * keep).detach() * a * x


def m2po_drops_both_ways(log_ratio, advantages, mask, cutoff):
    x, a = masked(log_ratio, mask), masked(advantages, mask)
    return torch.where(x.detach().square() > cutoff, 0, -a * x.exp())


def gspo_of_the_sum(log_ratio, advantages, mask, cu_seqlens, clip_low, clip_high):
    s = L.seq_log_ratio_sum(log_ratio, mask=mask, cu_seqlens=cu_seqlens)
    return L.ppo_clip(s, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)


def gspo_counts_masked_tokens(log_ratio, advantages, mask, cu_seqlens, clip_low, clip_high):
    total = sum_per_seq(log_ratio, cu_seqlens=cu_seqlens, mask=mask) / seq_lens(cu_seqlens).clamp(min=1)
    s = broadcast_to_tokens(total, cu_seqlens=cu_seqlens)
    return L.ppo_clip(s, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)


def gspo_over_the_whole_stream(log_ratio, advantages, mask, cu_seqlens, clip_low, clip_high):
    s = (masked(log_ratio, mask).sum() / mask.sum().clamp(min=1)).expand(log_ratio.shape)
    return L.ppo_clip(s, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)


def token_mean_over_all(mask, num_tokens):
    return mask.float() / max(mask.numel(), 1)


def token_mean_of_the_micro_batch(mask, num_tokens):
    return mask.float() / mask.sum().clamp(min=1)


def seq_mean_of_all_tokens(mask, cu_seqlens, num_seqs):
    weights = 1 / (seq_lens(cu_seqlens).clamp(min=1) * max(num_seqs, 1))
    return mask * broadcast_to_tokens(weights.float(), cu_seqlens=cu_seqlens)


def seq_mean_counts_empty(mask, cu_seqlens, num_seqs):
    return L.seq_mean(mask, cu_seqlens=cu_seqlens, num_seqs=max(cu_seqlens.numel() - 1, 1))


def prompt_mean_by_answer(mask, group_ids, cu_seqlens, num_groups):
    return L.seq_mean(mask, cu_seqlens=cu_seqlens, num_seqs=num_groups)


def tis_with_gradient(log_ratio, mask, max_weight):
    return masked(bounded_exp(masked(log_ratio, mask)).clamp(max=max_weight), mask)


def tis_of_the_inverse(log_ratio, mask, max_weight):
    return L.tis(-log_ratio, max_weight=max_weight, mask=mask)


def opsm_whatever_the_advantage(log_ratio, advantages, mask, cu_seqlens):
    return L.opsm(log_ratio, -torch.ones_like(log_ratio), mask=mask, cu_seqlens=cu_seqlens)


def veto_by_token(log_ratio, mask, cu_seqlens, min_ratio):
    return L.keep_ratio(log_ratio, low=min_ratio, high=float("inf"), mask=mask)


def normalised_by_the_micro_batch(weights, mask, mean):
    return L.batch_normalized(weights, mask=mask)


def k3_sign_swapped(logp, ref_logp, mask):
    return L.k3(ref_logp, logp, mask=mask)


def k2_without_half(logp, ref_logp, mask):
    return 2 * L.k2(logp, ref_logp, mask=mask)


def k1_reversed(logp, ref_logp, mask):
    return L.k1(ref_logp, logp, mask=mask)


def straight_through_reversed(logp, ref_logp, mask):
    value, slope = L.k2(logp, ref_logp, mask=mask), L.k3(logp, ref_logp, mask=mask)
    return slope - slope.detach() + value.detach()


def straight_through_with_k3_slope(logp, ref_logp, mask):
    return L.k3(logp, ref_logp, mask=mask)


def unbiased_kl_detached(logp, ref_logp, old_logp, mask):
    x = masked(logp, mask) - masked(old_logp, mask)
    return bounded_exp(x).detach() * L.k3(logp, ref_logp, mask=mask)


def unbiased_kl_without_ratio(logp, ref_logp, old_logp, mask):
    return L.k3(logp, ref_logp, mask=mask)


def kl_in_reward_with_gradient(rewards, logp, ref_logp, mask, kl_coef):
    return masked(rewards, mask) - kl_coef * L.k1(logp, ref_logp, mask=mask)


def value_clip_takes_the_smaller(values, old_values, returns, mask, clip):
    v, o, r = masked(values, mask), masked(old_values.detach(), mask), masked(returns.detach(), mask)
    return 0.5 * torch.minimum((v - r).square(), (v.clamp(o - clip, o + clip) - r).square())


def value_chases_its_target(values, returns, mask):
    return 0.5 * (masked(values, mask) - masked(returns, mask)).square()


def dpo_swapped(chosen_log_ratio, rejected_log_ratio, mask, beta):
    return L.dpo(rejected_log_ratio, chosen_log_ratio, beta=beta, mask=mask)


def dpo_beta_on_one_side(chosen_log_ratio, rejected_log_ratio, mask, beta):
    return masked(-F.logsigmoid(masked(beta * chosen_log_ratio - rejected_log_ratio, mask)), mask)


def masked_pair_costs_ln_2(chosen_log_ratio, rejected_log_ratio, mask, beta):
    return -F.logsigmoid(beta * masked(chosen_log_ratio - rejected_log_ratio, mask))


def teacher_learns(student_logits, teacher_logits, mask, chunk_size):
    keep = mask.unsqueeze(-1)
    q, p = (masked(x, keep).log_softmax(-1) for x in (student_logits, teacher_logits))
    return masked((p.exp() * (p - q)).sum(-1), mask)


def mean_of_means(log_ratio, advantages, mask, clip_low, clip_high):
    stats = L.ratio_stats(log_ratio, mask=mask, clip_low=clip_low, clip_high=clip_high, advantages=advantages)
    count = mask.sum().clamp(min=1)
    return {k: Mean(v.total / count, v.count / count) if isinstance(v, Mean) else v for k, v in stats.items()}


def seq_ratio_over_gaps(log_ratio, mask, cu_seqlens):
    mean = mean_per_seq(masked(log_ratio, mask), cu_seqlens=cu_seqlens)
    return broadcast_to_tokens(mean, cu_seqlens=cu_seqlens)


def length_of_all_tokens(log_ratio, advantages, mask, cu_seqlens, clip_low, clip_high):
    given = {"mask": mask, "cu_seqlens": cu_seqlens}
    loss = L.gspo(log_ratio, advantages, **given, clip_low=clip_low, clip_high=clip_high)
    return loss * broadcast_to_tokens(seq_count(mask, cu_seqlens=cu_seqlens) + 1.0, cu_seqlens=cu_seqlens)


MUTANTS = [
    Mutant("losses.ppo_clip", "on_policy", "wrong sign", lambda **k: -L.ppo_clip(**k)),
    Mutant("losses.ppo_clip", "clipped", "min and max swapped", minimum_for_maximum),
    Mutant("losses.ppo_clip", "clipped", "clips in both directions, without the minimum", clips_both_ways),
    Mutant("losses.ppo_clip", "coefficient", "clip distances swapped",
           lambda log_ratio, advantages, mask, clip_high: ppo(log_ratio, advantages, mask, 0.72, 1.2)),
    Mutant("losses.ppo_clip", "mask_isolation", "mask multiplied after the exponential: 0 * NaN", mask_multiplied),
    Mutant("losses.ppo_clip", "masked_is_zero", "mask omitted", forgets_the_mask),
    Mutant("losses.ppo_clip", "shape", "mean taken inside", lambda **k: L.ppo_clip(**k).mean()),
    Mutant("losses.ppo_clip", "additive", "divided by the micro-batch's own tokens", masked_mean_inside),
    Mutant("losses.ppo_clip", "additive", "advantages centred inside", whitens_inside),
    Mutant("losses.ppo_clip", "permutation", "each token reads its neighbour's advantage", reads_its_neighbour),
    Mutant("losses.ppo_clip", "pure", "advantages modified in place", changes_its_argument),
    Mutant("losses.ppo_clip", "pure", "random noise", adds_noise),
    Mutant("losses.ppo_clip", "dtypes", "computed in bf16", computes_in_bf16),
    Mutant("losses.ppo_clip", "finite", "exponent not capped", computes_in_bf16),
    Mutant("losses.ppo_clip", "descends", "inverted ratio: old over new", ratio_upside_down),
    Mutant("losses.ppo_clip", "differentiable", "log-ratio detached", detached_ratio),
    Mutant("losses.importance_sampling", "coefficient", "ratio capped at e^3", ratio_capped_at_e3),
    Mutant("losses.dual_clip", "coefficient", "the second clip also where A > 0", dual_clip_everywhere),
    Mutant("losses.cispo", "coefficient", "missing detach of the ratio", cispo_without_detach),
    Mutant("losses.cispo", "coefficient", "the cap taken as a distance from 1", cispo_relative_cap),
    Mutant("losses.sapo", "on_policy", "the factor 4 / tau missing", sapo_without_scale),
    Mutant("losses.sapo", "coefficient", "tau_pos and tau_neg swapped", sapo_taus_swapped),
    Mutant("losses.topr", "coefficient", "tapers A > 0 instead of A < 0", topr_sign_swapped),
    Mutant("losses.dppo", "coefficient", "one bound for both signs of A", dppo_one_sided),
    Mutant("losses.m2po", "coefficient", "also drops steps back towards ratio 1", m2po_drops_both_ways),
    Mutant("losses.gspo", "coefficient", "sum of log-ratios instead of the mean", gspo_of_the_sum),
    Mutant("losses.gspo", "padded_is_packed", "mean includes masked tokens", gspo_counts_masked_tokens),
    Mutant("losses.gspo", "segment_isolation", "one ratio for the whole stream", gspo_over_the_whole_stream),
    Mutant("losses.luspo", "coefficient", "length off by one", length_of_all_tokens),
    Mutant("losses.seq_log_ratio", "padded_is_packed", "count includes masked tokens", seq_ratio_over_gaps),
    Mutant("losses.token_mean", "sums_to_one", "denominator counts masked tokens", token_mean_over_all),
    Mutant("losses.token_mean", "additive", "denominator of the micro-batch", token_mean_of_the_micro_batch),
    Mutant("losses.seq_mean", "padded_is_packed", "a sequence's length counts its padding", seq_mean_of_all_tokens),
    Mutant("losses.seq_mean", "sums_to_one", "empty sequences counted", seq_mean_counts_empty),
    Mutant("losses.prompt_mean", "sums_to_one", "no mean over the answers of a prompt", prompt_mean_by_answer),
    Mutant("losses.opsm", "all_count", "treats every sequence as a bad one", opsm_whatever_the_advantage),
    Mutant("losses.tis", "detached", "missing detach", tis_with_gradient),
    Mutant("losses.tis", "limit: max_weight = inf is the ratio", "rollout over old", tis_of_the_inverse),
    Mutant("losses.veto", "equals_loop", "drops the token, not its sequence", veto_by_token),
    Mutant("losses.batch_normalized", "additive", "mean of the micro-batch", normalised_by_the_micro_batch),
    Mutant("losses.k3", "expectation", "sign of the log-ratio swapped", k3_sign_swapped),
    Mutant("losses.k2", "gradient_expectation", "factor 1/2 missing", k2_without_half),
    Mutant("losses.k1", "expectation", "reference minus policy", k1_reversed),
    Mutant("losses.k3_straight_through", "expectation", "value and gradient swapped", straight_through_reversed),
    Mutant("losses.k3_straight_through", "gradient_expectation", "k3's own gradient", straight_through_with_k3_slope),
    Mutant("losses.unbiased_kl", "gradient_expectation", "ratio detached", unbiased_kl_detached),
    Mutant("losses.unbiased_kl", "expectation", "ratio missing off-policy", unbiased_kl_without_ratio),
    Mutant("losses.kl_in_reward", "detached", "the penalty keeps its gradient", kl_in_reward_with_gradient),
    Mutant("losses.value_clip", "equals_loop", "min for max", value_clip_takes_the_smaller),
    Mutant("losses.value_mse", "no_gradient_by", "missing detach of the target", value_chases_its_target),
    Mutant("losses.dpo", "prefers_chosen", "chosen and rejected swapped", dpo_swapped),
    Mutant("losses.dpo", "margin_only", "beta on one side only", dpo_beta_on_one_side),
    Mutant("losses.dpo", "masked_is_zero", "a masked pair costs ln 2", masked_pair_costs_ln_2),
    Mutant("losses.forward_kl", "no_gradient_by", "the teacher gets a gradient", teacher_learns),
    Mutant("losses.ratio_stats", "additive", "mean of means", mean_of_means),
]  # fmt: skip
