"""The policy update of the RL loops: its loss, the weight of each token, and its metrics.

`per_token`, `per_episode`, `per_prompt` and `per_length` are values of `PolicyLoss.aggregate`: functions of the whole
batch of an optimizer step, which every rank holds before it is split. An episode in several pieces counts once (see
`rlkit.segments`). An episode or prompt without a trainable token is not counted.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit import losses
from rlkit._util.numbers import show
from rlkit._util.tensors import FILLED_BY
from rlkit.loops.out_of_memory import retry_smaller
from rlkit.loops.trial import lacking, log_ratio, refuse_needed, try_advantage, try_surrogate, weighs
from rlkit.metrics import Mean, Metrics, largest, mean, merge
from rlkit.model.forward import Policy
from rlkit.model.optim import optimizer_step, set_lr
from rlkit.packing import split
from rlkit.parallel.data import any_ranks, rank_microbatches, reduce_metrics
from rlkit.parallel.pipeline import pipelined
from rlkit.rewards.failures import is_ours
from rlkit.segments import seq_count, sum_per_seq
from rlkit.settings import Optim, Penalties, Rollouts
from rlkit.types import Batch, LogProbs


def per_token(batch: Batch) -> Float[Tensor, "T"]:
    """Equal weight per token: `token_mean` (DAPO)."""
    return losses.token_mean(batch.mask, num_tokens=int(batch.mask.sum()))


def per_episode(batch: Batch) -> Float[Tensor, "T"]:
    """Equal weight per episode, shared by its tokens: `seq_mean` where an episode is one sequence (GRPO's paper)."""
    return _mean_of(batch, batch.episode_ids)


def per_prompt(batch: Batch) -> Float[Tensor, "T"]:
    """Equal weight per prompt, shared by the tokens of its samples: `prompt_mean`."""
    return _mean_of(batch, batch.group_ids)


def per_length(batch: Batch, *, max_length: int) -> Float[Tensor, "T"]:
    """The sum over an episode's tokens, divided by a constant: `constant_length`, without length bias (Dr. GRPO).

    The constant may be the limit of one turn: an episode of several turns may have more tokens.
    """
    num_seqs = _count(batch, batch.episode_ids)
    return losses.seq_mean_token_sum(batch.mask, cu_seqlens=batch.cu_seqlens, num_seqs=num_seqs) / max_length


def _mean_of(batch: Batch, ids: Int[Tensor, "N"]) -> Tensor:
    return losses.prompt_mean(batch.mask, group_ids=ids, cu_seqlens=batch.cu_seqlens, num_groups=_count(batch, ids))


def _count(batch: Batch, ids: Int[Tensor, "N"]) -> int:
    """Number of different ids with a trainable token."""
    return ids[seq_count(batch.mask, cu_seqlens=batch.cu_seqlens) > 0].unique().numel()


UNTRAINED: Metrics = {"grad_norm": mean(0.0), "skipped_step": mean(0.0)}
Surrogate = Callable[[Tensor, Batch], Tensor]  # log_ratio [T], its micro-batch -> a loss per token
TeacherLoss = Callable[[Batch], tuple[LogProbs, Tensor]]
Aggregate = Callable[[Batch], Tensor]  # the batch of an optimizer step -> a weight per token


def clipped(log_ratio: Tensor, batch: Batch, *, clip_low: float = 0.2, clip_high: float = 0.28) -> Tensor:
    """PPO's clip with DAPO's upper bound, as a `PolicyLoss.surrogate`."""
    return losses.ppo_clip(log_ratio, batch.advantages, clip_low=clip_low, clip_high=clip_high)


def skip_above(log_ratio: Tensor, batch: Batch, *, surrogate: Surrogate, max_ratio: float) -> Tensor:
    """The surrogate, and 0 on all tokens of a sequence in which one token's ratio exceeds `max_ratio`.

    Differs: ColossalAI's `skip_threshold` (20) skips a whole micro-batch whose mean ratio exceeds it.
    """
    where = {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens}
    keep = losses.keep_whole_sequences(losses.keep_ratio(log_ratio, low=0.0, high=max_ratio, mask=batch.mask), **where)
    return keep * surrogate(log_ratio, batch)


@dataclass(frozen=True)
class PolicyLoss:
    """The policy term of the loss, in three functions.

        PolicyLoss(partial(ppo_clip, clip_high=0.2))
        PolicyLoss(partial(gspo, clip_low=3e-4, clip_high=4e-4), per_episode)
        PolicyLoss(lambda log_ratio, batch: ...)

    Args:
        surrogate: a loss per token of a micro-batch: `surrogate(log_ratio, batch)`, or a loss as in `rlkit.losses`,
            `surrogate(log_ratio, advantages)`, which is given `mask` and `cu_seqlens` if it takes them.
        aggregate: the weight of each token of an optimizer step's batch (`per_token`, `per_episode`, ...).
        correction: `correction(old_logp - rollout_logp)`, an importance weight of the surrogate's tokens against the
            engine's numerics and older weights. It does not scale KL and entropy.
        loss_unchecked: take a surrogate of your own without calling it on a small batch (`rlkit.loops.trial`), which
            refuses one that climbs.
    """

    surrogate: Surrogate = clipped
    aggregate: Aggregate = per_token
    correction: Callable[[Tensor], Tensor] = field(default=partial(losses.tis, max_weight=2.0))
    loss_unchecked: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        function = self.surrogate
        object.__setattr__(self, "surrogate", as_surrogate(function))
        if not (self.loss_unchecked or is_ours(function)):
            try_surrogate(function, self.surrogate, weighs=weighs(self.correction))


def check_functions(
    loss: PolicyLoss,
    advantage: Callable[..., object] | None,
    rollouts: Rollouts,
    penalties: Penalties,
    *,
    critic: bool = False,
    scored: bool = False,
) -> None:
    """Refuse a bare loss function, or its name (TypeError), and what needs a stream that the run's batches lack.

    An estimator of yours is tried on a small batch (`rlkit.loops.trial.try_advantage`). Batches of a run that is
    `scored` have `old_logp` in any case.
    """
    if not isinstance(loss, PolicyLoss):
        name = getattr(loss, "__name__", None)
        fix = f"PolicyLoss({name})" if name else "PolicyLoss(ppo_clip)"
        raise TypeError(f"loss must be a PolicyLoss, e.g. {fix}, got {show(loss)}")
    lacks, early = (
        lacking(rollouts, penalties, critic=critic, scored=scored or (critic and advantage is not None), estimator=x)
        for x in (False, True)
    )
    if not loss.loss_unchecked:
        refuse_needed("the loss", lambda batch: loss.surrogate(log_ratio(batch), batch), lacks)
    if advantage is not None and not is_ours(advantage):
        try_advantage(advantage, values=critic, lacks=early, weighs=weighs(loss.correction))


def as_surrogate(function: Callable[..., Tensor]) -> Surrogate:
    """`f(log_ratio, batch)` as it is, or `f(log_ratio, advantages, *, mask, cu_seqlens)` with the fields of a batch.

    Errors: ValueError for a function that takes less, or needs more, or whose first parameter has the name of a ratio
    or of a log-prob: it would get neither.
    """
    if not callable(function):
        raise TypeError(f"surrogate must be a function of (log_ratio, batch), e.g. ppo_clip, got {show(function)}")
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    fields = [p.name for p in parameters if p.name in ("mask", "cu_seqlens")]
    missing = [p.name for p in parameters[2:] if p.default is p.empty and p.name not in fields]
    name = getattr(function, "__name__", "the loss")
    if len(parameters) < 2 or parameters[1].kind == parameters[1].KEYWORD_ONLY:
        raise ValueError(f"a policy loss takes (log_ratio, batch) or (log_ratio, advantages), and {name} does not")
    first = parameters[0].name
    if meant := _other_meaning(first):
        raise ValueError(f"{name} would get log_ratio = logp - old_logp as `{first}`: name it log_ratio, {meant}")
    if missing:
        fix = "give a value by functools.partial, or a default"
        if streams := [x for x in missing if x in Batch.__dataclass_fields__]:
            given = ", ".join(f"{x}=batch.{x}" for x in streams)
            fix = f"take it from the batch, as lambda log_ratio, batch: {name}(log_ratio, batch.advantages, {given})"
        raise ValueError(f"{name} needs {', '.join(missing)}, too: {fix}")
    if parameters[1].name != "advantages":
        return function
    return lambda x, batch: function(x, batch.advantages, **{name: getattr(batch, name) for name in fields})


def _other_meaning(first: str) -> str:
    """The fix for a surrogate whose first parameter is named like a ratio or a log-prob; empty for any other name."""
    words = {*first.lower().split("_")}
    if words & {"ratio", "ratios", "weight", "weights"} and not words & {"log", "logp"}:
        return f"and write {first} = log_ratio.exp()"
    if re.fullmatch(r"((new|cur|current|policy|pi|old|ref)_)?(logp|log_?prob)s?", first.lower()):
        return "and take (log_ratio, batch) if you need batch.old_logp"
    return ""


def grpo_update(
    batch: Batch,
    *,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    loss: PolicyLoss,
    rollouts: Rollouts,
    optim: Optim,
    lr: float,
    kl_coef: float,
    entropy_coef: float,
    seed: int,
    kl: Callable[[Tensor, Tensor, Tensor], Tensor] = losses.unbiased_kl,
    teacher: TeacherLoss | None = None,
    teacher_coef: float = 1.0,
) -> Metrics:
    """`rollouts.minibatches * rollouts.epochs` optimizer steps on one batch.

        loss = sum_t w_t (correction_t * surrogate_t + kl_coef * KL_t - entropy_coef * entropy_t
                          + teacher_coef * teacher_t)
        w    = loss.aggregate(batch of the optimizer step)

    It is logged as `loss`, averaged over the optimizer steps.
    KL is `kl(logp, ref_logp, sampler_logp)`, see `sampler_logp`. `teacher(micro)` gives, from one forward,
    `policy(micro)` and a further loss per token (`rlkit.model.teachers.with_divergence`).

    Truncated sampling draws a token from p / S, not from p, so `kept_mass` (S) scales surrogate and KL, unless
    all log-probs are renormalised over the recorded `support`: they are then those of what was sampled. A batch for one
    optimizer step needs no `old_logp`: the current log-probs take its place, without another forward. On a model cut by
    `parallelize` every rank passes the whole batch and computes its share. `time/forward` of the metrics is wall time
    in seconds, on a GPU that of queueing the forward. Where memory runs out, the micro-batches become smaller
    (`rlkit.loops.out_of_memory`).

    Errors: ValueError for a batch without a stream that the settings need: `advantages`, `ref_logp` for `kl_coef`,
    `kept_mass` for truncated sampling, `old_logp` for more than one optimizer step, in which every ratio would be 1.
    """
    minibatches = min(rollouts.minibatches, len(batch.group_ids.unique()))
    _check_update(batch, rollouts, kl_coef=kl_coef, num_steps=minibatches * rollouts.epochs)
    set_lr(optimizer, lr)
    metrics: Metrics = {}
    forward_s = 0.0
    mesh, device, surrogate = policy.mesh, policy.model.device, loss.surrogate

    def gradients(mini: Batch, max_tokens: int) -> tuple[Metrics, bool]:
        nonlocal forward_s
        weights, num_tokens, new = loss.aggregate(mini), max(1, int(mini.mask.sum())), metrics
        no_advantage = sum_per_seq(mini.advantages.abs(), cu_seqlens=mini.cu_seqlens) == 0
        micros = list(rank_microbatches((mini, weights), mesh=mesh, max_tokens=max_tokens, isolate=no_advantage))
        always = bool(kl_coef or entropy_coef) or teacher is not None or has_gradient_without_advantage(surrogate, mini)
        needed = any_ranks([always or bool(micro.advantages.any()) for micro, *_ in micros])
        with pipelined(mesh) as backward:
            for (micro, *rest), needs_grad in zip(micros, needed, strict=True):
                with torch.set_grad_enabled(needs_grad):
                    # still on the host, where its segments are read without waiting for the GPU
                    start = time.perf_counter()
                    out, divergence = (policy(micro), None) if teacher is None else teacher(micro)
                    forward_s += time.perf_counter() - start
                micro, w = micro.to(device), rest[0].to(device, non_blocking=True)
                old_logp = out.logp.detach() if micro.old_logp is None else micro.old_logp
                log_ratio = out.logp - old_logp
                w_kept = w if micro.kept_mass is None or micro.support is not None else w * micro.kept_mass
                token_loss, slope = with_gradient(surrogate, log_ratio, micro)
                total = w_kept * loss.correction(old_logp - micro.rollout_logp) * token_loss
                if kl_coef:
                    sampler = sampler_logp(micro, old_logp, rollouts)
                    total = total + kl_coef * w_kept * kl(out.logp, micro.ref_logp, sampler)
                if entropy_coef:
                    total = total - entropy_coef * w * out.entropy
                if divergence is not None:
                    total = total + teacher_coef * w * divergence
                    new = merge(new, {"teacher/loss": mean(divergence.detach(), mask=micro.mask)})
                if needs_grad:
                    backward(total.sum())
                share = micro.mask.sum().double() / num_tokens  # each optimizer step counts once
                new = merge(new, policy_metrics(out, old_logp, micro) | clip_shares(slope, micro))
                new = merge(new, {"loss": Mean(total.detach().sum().double(), share)})
        return new, any(needed)  # on every rank: `needed` is shared

    for mini in split(batch, minibatches, epochs=rollouts.epochs, seed=seed):
        step = partial(gradients, mini)
        metrics, trains = retry_smaller(step, mini, model=policy.model, max_tokens=optim.max_tokens)
        stepped = optimizer_step(optimizer, max_norm=optim.max_norm, model=policy.model) if trains else UNTRAINED
        metrics = merge(metrics, stepped)
    return reduce_metrics(metrics | {"time/forward": mean(forward_s)}, mesh=mesh)


def _check_update(batch: Batch, rollouts: Rollouts, *, kl_coef: float, num_steps: int) -> None:
    """Refuse (ValueError) a batch without a stream that the settings of `grpo_update` need."""
    several = {"old_logp": f"{num_steps} optimizer steps on a batch"}
    check_streams(
        batch, advantages="the policy loss", **(several if num_steps > 1 else {}),
        **({"ref_logp": f"kl_coef {kl_coef:g}"} if kl_coef else {}),
        **({"kept_mass": "truncated sampling (top_p, top_k, min_p)"} if rollouts.params.truncates else {}),
    )  # fmt: skip


def sampler_logp(batch: Batch, old_logp: Float[Tensor, "T"], rollouts: Rollouts) -> Float[Tensor, "T"]:
    """Log-probs of the policy that sampled, for the ratio of `unbiased_kl`.

    `old_logp`, of the same weights without the engine's rounding, where each trained token is sampled by the weights of
    the step's start; `rollout_logp`, with it, where `rollouts` allow samples of older weights.
    """
    return batch.rollout_logp if rollouts.max_age > 0 and not rollouts.drop_off_policy else old_logp


def check_streams(batch: Batch, **needed_by: str) -> None:
    """Refuse a batch that lacks one of the streams: ValueError with what needs it and the function that fills it."""
    for name, consumer in needed_by.items():
        if getattr(batch, name) is None:
            raise ValueError(f"{consumer} needs `{name}`, and the batch has none: batch = {FILLED_BY[name]}")


def has_gradient_without_advantage(surrogate: Surrogate, batch: Batch) -> bool:
    """Whether a token whose advantage is 0 has a gradient (`dro`, `kimi15`).

    Evaluated at some log-ratios of both signs (a penalty may begin outside a band), and for each optimizer step, since
    a surrogate may also read the batch.
    """
    neutral = replace(batch, advantages=torch.zeros_like(batch.advantages))
    apart = batch.advantages.new_tensor([0.1, -0.1, 1.0, -1.0, 3.0, -3.0])
    x = apart.repeat(batch.num_tokens // len(apart) + 1)[: batch.num_tokens]
    return any(bool(with_gradient(surrogate, x, neutral)[1].any()) for x in (x, -x))


def policy_metrics(out: LogProbs, old_logp: Float[Tensor, "T"], batch: Batch) -> Metrics:
    """Importance-ratio (`ratio/`), engine-mismatch (`mismatch/`) and reference-KL (`kl/`) statistics.

    mismatch/k3 and mismatch/abs_mean compare old_logp with rollout_logp: 0 up to rounding for an exact engine.
    """
    logp, mask = out.logp.detach(), batch.mask
    stats = losses.ratio_stats(logp - old_logp, mask=mask)
    gap = old_logp - batch.rollout_logp
    metrics: Metrics = {f"ratio/{name}": value for name, value in stats.items()}
    metrics |= {
        "entropy": mean(out.entropy, mask=mask),
        "mismatch/abs_mean": mean(gap.abs(), mask=mask),
        "mismatch/abs_max": largest(gap.abs(), mask=mask),
        "mismatch/k3": mean(losses.k3(batch.rollout_logp, old_logp), mask=mask),
    }
    if batch.kept_mass is not None:
        metrics["kept_mass"] = mean(batch.kept_mass, mask=mask)
    if batch.ref_logp is not None:
        metrics["kl/ref"] = mean(losses.k3(logp, batch.ref_logp), mask=mask)
    return metrics


def clip_shares(slope: Float[Tensor, "T"], batch: Batch) -> Metrics:
    """Shares of tokens with an advantage but no gradient: `ratio/clip_low` of A < 0, `ratio/clip_high` of A > 0.

    These are the clipped tokens, whatever the surrogate. `slope` is the surrogate's gradient with respect to log_ratio.
    Differs: verl and TRL count the clip of sequence ratios in sequences.
    """
    signs = {"clip_low": batch.advantages < 0, "clip_high": batch.advantages > 0}
    return {f"ratio/{name}": mean((slope == 0) & sign, mask=batch.mask) for name, sign in signs.items()}


def with_gradient(surrogate: Surrogate, log_ratio: Float[Tensor, "T"], batch: Batch) -> tuple[Tensor, Tensor]:
    """The surrogate's loss per token, and the gradient of its sum with respect to log_ratio, from one call."""
    with torch.enable_grad():
        x = log_ratio if log_ratio.requires_grad else log_ratio.detach().requires_grad_()
        token_loss = surrogate(x, batch)
        if not isinstance(token_loss, Tensor) or token_loss.shape != x.shape:
            got = tuple(token_loss.shape) if isinstance(token_loss, Tensor) else repr(token_loss)
            fault = f"the surrogate must return a loss per token, {tuple(x.shape)} as log_ratio, got {got}"
            raise ValueError(f"{fault}: averaging belongs in `aggregate`")
        if not token_loss.requires_grad:
            raise ValueError("the surrogate's loss has no gradient with respect to log_ratio: is it detached?")
        return token_loss, torch.autograd.grad(token_loss.sum(), x, retain_graph=True)[0]
