"""Published algorithms as sums of parts: each recipe is the whole loss of one optimizer step in a few lines.

    loss = recipes.dapo(logp, batch)              # logp: [T], the policy's forward on the batch, with gradient

They are meant to be read and copied: a loop writes out the same lines. Group baselines and whitening need the whole
batch. To split it into micro-batches or over ranks, set them before the split, `with_streams(batch, advantages=...)`; a
batch that has `advantages` is taken as it is. The counts (`num_tokens`, `num_seqs`) are then those of the whole step,
and the losses of the parts add up exactly.

In all recipes, other than in the papers:
1. `batch.old_logp` None means one update per rollout: the old policy is the current one, without a second forward
2. tokens that the policy did not sample neither count nor decay anything
3. standard deviations are unbiased, with 1e-6 added; a group of one sample gets advantage 0
4. a sequence without a trainable token is not counted
5. what happens at sampling (dynamic filtering, overlong penalties, group sizes) is not part of a loss
Multiply in `rlkit.losses.tis` or another correction where the sampling engine computes other log-probs.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from rlkit import advantages as adv
from rlkit import losses
from rlkit._tensors import carry_nan, masked
from rlkit.losses.weights import Count
from rlkit.segments import broadcast_to_tokens, seq_sum
from rlkit.types import Batch

Loss = Float[Tensor, ""]


def reinforce_pp(
    logp: Float[Tensor, "T"], batch: Batch, *, num_tokens: Count | None = None, clip: float = 0.2, kl_coef: float = 0.01
) -> Loss:
    """REINFORCE++ (arXiv:2501.03262): reward-to-go with the KL inside, whitened over the batch, PPO's clip.

    1. `kl_coef` is OpenRLHF's default
    2. token mean over the batch
    """
    old, a = _old(logp, batch), batch.advantages
    if a is None:
        rewards = losses.kl_in_reward(batch.token_rewards, old, _ref(batch), kl_coef=kl_coef, mask=batch.mask)
        a = adv.reinforce_pp(rewards, mask=batch.mask, cu_seqlens=batch.cu_seqlens)
    weights = losses.token_mean(batch.mask, num_tokens=num_tokens)
    return (weights * losses.ppo_clip(logp - old, a, clip_low=clip, clip_high=clip, mask=batch.mask)).sum()


def reinforce_pp_baseline(
    logp: Float[Tensor, "T"], batch: Batch, *, num_tokens: Count | None = None, clip: float = 0.2, kl_coef: float = 0.01
) -> Loss:
    """REINFORCE++ with a group baseline (arXiv:2501.03262): centred by group, scaled by the batch, k2 in the loss.

    1. `kl_coef` is OpenRLHF's default
    """
    x, a = logp - _old(logp, batch), batch.advantages
    if a is None:
        a = adv.reinforce_pp_baseline(
            batch.rewards, group_ids=batch.group_ids, mask=batch.mask, cu_seqlens=batch.cu_seqlens
        )
    loss = losses.ppo_clip(x, a, clip_low=clip, clip_high=clip, mask=batch.mask)
    loss = loss + kl_coef * losses.k2(logp, _ref(batch), mask=batch.mask)
    return (losses.token_mean(batch.mask, num_tokens=num_tokens) * loss).sum()


def rloo(logp: Float[Tensor, "T"], batch: Batch, *, num_seqs: Count | None = None, kl_coef: float = 0.05) -> Loss:
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740): the whole answer is one action.

    1. `kl_coef` is TRL's default; the paper sets it per task
    2. strictly on-policy, as in the paper: no ratio, no clip
    """
    a = batch.advantages
    if a is None:
        kl = seq_sum(losses.k1(logp.detach(), _ref(batch), mask=batch.mask), cu_seqlens=batch.cu_seqlens)
        a = _per_token(adv.leave_one_out(batch.rewards - kl_coef * kl, group_ids=batch.group_ids), batch)
    weights = losses.seq_mean_token_sum(batch.mask, cu_seqlens=batch.cu_seqlens, num_seqs=num_seqs)
    return (weights * losses.reinforce(logp, a, mask=batch.mask)).sum()


def ppo(
    logp: Float[Tensor, "T"],
    batch: Batch,
    *,
    num_tokens: Count | None = None,
    clip: float = 0.2,
    kl_coef: float = 0.02,
    lam: float = 0.95,
) -> Loss:
    """PPO as in InstructGPT (arXiv:1707.06347, arXiv:2203.02155): KL in the reward, GAE, clipped surrogate.

    1. this is the policy's loss; the critic's is `value_clip(values, batch.values, batch.returns, clip=0.2)`
    2. no pretraining term
    3. a truncated answer ends in its bootstrap value, not in 0
    """
    old, a = _old(logp, batch), batch.advantages
    if a is None:
        rewards = losses.kl_in_reward(batch.token_rewards, old, _ref(batch), kl_coef=kl_coef, mask=batch.mask)
        a = adv.whiten(_gae(rewards, batch, lam).advantages, mask=batch.mask)
    weights = losses.token_mean(batch.mask, num_tokens=num_tokens)
    return (weights * losses.ppo_clip(logp - old, a, clip_low=clip, clip_high=clip, mask=batch.mask)).sum()


def vapo(
    logp: Float[Tensor, "T"],
    batch: Batch,
    *,
    num_tokens: Count | None = None,
    num_correct_tokens: Count | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    nll_coef: float = 0.1,
) -> Loss:
    """VAPO (arXiv:2504.05118): length-adaptive GAE, clip-higher, token mean, and imitation of correct answers.

    1. correct means reward > 0
    2. the critic's targets are `gae_decoupled(..., lam_value=1)`; value pretraining is a matter of the loop
    3. advantages are not whitened
    """
    x, a = logp - _old(logp, batch), batch.advantages
    if a is None:
        lam = adv.length_adaptive_lam(batch.mask, cu_seqlens=batch.cu_seqlens, dtype=logp.dtype)
        a = _gae(batch.token_rewards, batch, lam).advantages
    correct = batch.mask & _per_token(batch.rewards > 0, batch)
    loss = losses.ppo_clip(x, a, clip_low=clip_low, clip_high=clip_high, mask=batch.mask)
    loss = carry_nan(loss, masked(_per_token(batch.rewards, batch), batch.mask))  # a NaN reward is not a wrong answer
    imitation = losses.nll(logp, mask=correct) * losses.token_mean(correct, num_tokens=num_correct_tokens)
    return (losses.token_mean(batch.mask, num_tokens=num_tokens) * loss + nll_coef * imitation).sum()


def grpo(
    logp: Float[Tensor, "T"], batch: Batch, *, num_seqs: Count | None = None, clip: float = 0.2, kl_coef: float = 0.04
) -> Loss:
    """GRPO (arXiv:2402.03300): group z-score, PPO's clip, k3 in the loss, mean over each answer, then over answers.

    1. DeepSeek-R1 (arXiv:2501.12948) is this with clip=10, kl_coef=0.001
    2. the paper gives no clip distance; 0.2 is everybody's
    """
    a = _advantages(batch, adv.group_zscore)
    loss = losses.ppo_clip(logp - _old(logp, batch), a, clip_low=clip, clip_high=clip, mask=batch.mask)
    if kl_coef:
        loss = loss + kl_coef * losses.k3(logp, _ref(batch), mask=batch.mask)
    return (_seq_mean(batch, num_seqs) * loss).sum()


def dr_grpo(
    logp: Float[Tensor, "T"], batch: Batch, *, num_seqs: Count | None = None, clip: float = 0.2, max_length: int = 3000
) -> Loss:
    """Dr. GRPO (arXiv:2503.20783): GRPO without the two biases, the division by std and by the answer's own length.

    1. no KL, as in the paper's experiments
    """
    a = _advantages(batch, adv.group_centered)
    loss = losses.ppo_clip(logp - _old(logp, batch), a, clip_low=clip, clip_high=clip, mask=batch.mask)
    weights = losses.constant_length(batch.mask, cu_seqlens=batch.cu_seqlens, max_length=max_length, num_seqs=num_seqs)
    return (weights * loss).sum()


def dapo(
    logp: Float[Tensor, "T"],
    batch: Batch,
    *,
    num_tokens: Count | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Loss:
    """DAPO (arXiv:2503.14476): group z-score, clip-higher, token mean, no KL.

    1. dynamic sampling and the soft overlong penalty belong to the rollout and the reward
    """
    a = _advantages(batch, adv.group_zscore)
    loss = losses.ppo_clip(logp - _old(logp, batch), a, clip_low=clip_low, clip_high=clip_high, mask=batch.mask)
    return (losses.token_mean(batch.mask, num_tokens=num_tokens) * loss).sum()


def gpg(logp: Float[Tensor, "T"], batch: Batch, *, num_tokens: Count | None = None) -> Loss:
    """GPG (arXiv:2504.02546): the bare policy gradient of centred rewards, scaled up for groups that teach nothing.

    1. nothing further: no ratio, no clip, no KL
    """
    loss = losses.gpg(logp, _advantages(batch, adv.gpg), mask=batch.mask)
    return (losses.token_mean(batch.mask, num_tokens=num_tokens) * loss).sum()


def gspo(
    logp: Float[Tensor, "T"],
    batch: Batch,
    *,
    num_seqs: Count | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Loss:
    """GSPO (arXiv:2507.18071): group z-score, the clip on the sequence's ratio, mean over answers, no KL.

    1. nothing further
    """
    loss = losses.gspo(
        logp - _old(logp, batch),
        _advantages(batch, adv.group_zscore),
        mask=batch.mask,
        cu_seqlens=batch.cu_seqlens,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return (_seq_mean(batch, num_seqs) * loss).sum()


def luspo(
    logp: Float[Tensor, "T"],
    batch: Batch,
    *,
    num_seqs: Count | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Loss:
    """LUSPO (arXiv:2602.05261): GSPO with each answer's loss scaled by its length.

    1. the clip distances are GSPO's
    """
    loss = losses.luspo(
        logp - _old(logp, batch),
        _advantages(batch, adv.group_zscore),
        mask=batch.mask,
        cu_seqlens=batch.cu_seqlens,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return (_seq_mean(batch, num_seqs) * loss).sum()


def gmpo(logp: Float[Tensor, "T"], batch: Batch, *, num_seqs: Count | None = None, clip: float = 0.4) -> Loss:
    """GMPO (arXiv:2507.20673): group z-score, the geometric mean of token ratios clipped at e^-0.4 and e^0.4, no KL.

    1. nothing further
    """
    loss = losses.gmpo(
        logp - _old(logp, batch),
        _advantages(batch, adv.group_zscore),
        mask=batch.mask,
        cu_seqlens=batch.cu_seqlens,
        clip_low=clip,
        clip_high=clip,
    )
    return (_seq_mean(batch, num_seqs) * loss).sum()


def cispo(logp: Float[Tensor, "T"], batch: Batch, *, num_tokens: Count | None = None, max_weight: float = 5.0) -> Loss:
    """CISPO (arXiv:2506.13585): group z-score, a capped and detached ratio as weight, token mean, no KL.

    1. the cap is ScaleRL's (arXiv:2510.13786); MiniMax-M1 does not publish its own
    """
    loss = losses.cispo(
        logp - _old(logp, batch), _advantages(batch, adv.group_zscore), max_weight=max_weight, mask=batch.mask
    )
    return (losses.token_mean(batch.mask, num_tokens=num_tokens) * loss).sum()


def sapo(
    logp: Float[Tensor, "T"],
    batch: Batch,
    *,
    num_seqs: Count | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Loss:
    """SAPO (arXiv:2511.20347): group z-score, a soft gate in place of the clip, mean over answers, no KL.

    1. nothing further
    """
    a = _advantages(batch, adv.group_zscore)
    loss = losses.sapo(logp - _old(logp, batch), a, tau_pos=tau_pos, tau_neg=tau_neg, mask=batch.mask)
    return (_seq_mean(batch, num_seqs) * loss).sum()


def vespo(logp: Float[Tensor, "T"], batch: Batch, *, num_tokens: Count | None = None) -> Loss:
    """VESPO (arXiv:2602.10693): group z-score, a gamma-shaped weight of the sequence's exact ratio, token mean, no KL.

    1. the ratio is to the policy that sampled, `batch.rollout_logp`, so it also corrects for the engine
    """
    loss = losses.vespo(
        logp - batch.rollout_logp, _advantages(batch, adv.group_zscore), mask=batch.mask, cu_seqlens=batch.cu_seqlens
    )
    return (losses.token_mean(batch.mask, num_tokens=num_tokens) * loss).sum()


def kimi15(logp: Float[Tensor, "T"], batch: Batch, *, num_seqs: Count | None = None, tau: float = 0.1) -> Loss:
    """Kimi k1.5 (arXiv:2501.12599): centred rewards and a quadratic pull on the whole answer's log-ratio.

    1. tau is ROLL's default; the report gives none
    2. the report's length penalty is part of the reward
    """
    loss = losses.kimi15(
        logp - _old(logp, batch),
        _advantages(batch, adv.group_centered),
        mask=batch.mask,
        cu_seqlens=batch.cu_seqlens,
        tau=tau,
    )
    return (losses.seq_mean_token_sum(batch.mask, cu_seqlens=batch.cu_seqlens, num_seqs=num_seqs) * loss).sum()


def max_rl(logp: Float[Tensor, "T"], batch: Batch, *, num_seqs: Count | None = None) -> Loss:
    """MaxRL (arXiv:2602.02710): rewards centred and divided by the group's mean, the gradient of log(success rate).

    1. strictly on-policy; put a clipped surrogate in place of `reinforce` for several updates
    """
    loss = losses.reinforce(logp, _advantages(batch, adv.max_rl), mask=batch.mask)
    return (losses.seq_mean_token_sum(batch.mask, cu_seqlens=batch.cu_seqlens, num_seqs=num_seqs) * loss).sum()


def _old(logp: Tensor, batch: Batch) -> Tensor:
    return logp.detach() if batch.old_logp is None else batch.old_logp


def _ref(batch: Batch) -> Tensor:
    if batch.ref_logp is None:
        raise ValueError("batch.ref_logp is needed for the KL term: score the batch with the reference model")
    return batch.ref_logp


def _per_token(x: Tensor, batch: Batch) -> Tensor:
    return broadcast_to_tokens(x, cu_seqlens=batch.cu_seqlens, num_tokens=batch.num_tokens)


def _advantages(batch: Batch, estimator: Callable[..., Tensor]) -> Tensor:
    if batch.advantages is not None:
        return batch.advantages
    return _per_token(estimator(batch.rewards, group_ids=batch.group_ids), batch)


def _seq_mean(batch: Batch, num_seqs: Count | None) -> Tensor:
    return losses.seq_mean(batch.mask, cu_seqlens=batch.cu_seqlens, num_seqs=num_seqs)


def _gae(rewards: Tensor, batch: Batch, lam: float | Tensor) -> adv.Gae:
    if batch.values is None:
        raise ValueError("batch.values is needed for GAE; score the batch with the critic")
    end = adv.bootstrap_values(batch.values, truncated=batch.truncated, cu_seqlens=batch.cu_seqlens)
    return adv.gae(rewards, batch.values, mask=batch.mask, cu_seqlens=batch.cu_seqlens, lam=lam, bootstrap=end)
