"""Group-relative policy optimization, on policy or a few updates per rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.advantages import group_centered
from rlkit.controllers import fixed
from rlkit.data.load import batches
from rlkit.loops import verbs
from rlkit.loops.run import open_run, resume_command, stop_on_interrupt
from rlkit.losses import k3, ppo_clip, tis, token_mean
from rlkit.metrics import finalize, merge
from rlkit.packing import microbatches, pack, split, with_streams
from rlkit.parallel.model import forward, with_old_logp, with_ref_logp
from rlkit.parallel.optim import adamw, optimizer_step, set_lr
from rlkit.parallel.weights import stream_weights
from rlkit.rollout.rollout import Env, Prompt, Score, mix, rollout, single_turn
from rlkit.segments import broadcast_to_tokens, seq_sum
from rlkit.types import Controller, SamplingParams


async def grpo(
    model: Any,
    tokenizer: Any,
    engine: Any,
    prompts: Sequence[Prompt],
    *,
    score: Score,
    folder: Path,
    steps: int,
    params: SamplingParams,
    lr_at: Callable[[int], float],
    env: Env = single_turn,
    prompts_per_step: int = 8,
    group_size: int = 8,
    baseline: Callable[..., Tensor] = group_centered,
    num_minibatches: int = 1,
    num_epochs: int = 1,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    max_is_weight: float = 2.0,
    kl_coef: float = 0.0,
    kl_controller: Controller = fixed(),
    reference: Any = None,
    ref_sync_steps: int = 0,
    entropy_coef: float = 0.0,
    weight_decay: float = 0.0,
    max_norm: float = 1.0,
    max_tokens: int = 16384,
    dtype: str = "fp32",
    eval_prompts: Sequence[Prompt] = (),
    eval_steps: int = 0,
    save_steps: int = 0,
    keep: int = 2,
    seed: int = 0,
    resume: bool = False,
) -> Path:
    """Train `model` in place on rewards of its own samples; returns the folder of the exported model.

    Every step samples `group_size` answers to each of `prompts_per_step` prompts, takes `baseline(rewards)` as the
    advantage of all their tokens, and takes `num_minibatches * num_epochs` optimizer steps on the clipped surrogate,
    averaged over all tokens of an optimizer step, at the learning rate `lr_at(step)`. With one update per rollout no
    old-log-prob forward is run.

    Differs from the GRPO paper (arXiv:2402.03300):
    1. advantages are not divided by the group's standard deviation (arXiv:2503.20783); pass `group_zscore` to do so
    2. token mean instead of the mean of sequence means, and `clip_high` 0.28 (both arXiv:2503.14476)
    3. no KL term unless `kl_coef` > 0 (`kl_controller` may then move it); then k3 against `reference`, scaled by the
       ratio so that its gradient is that of KL(policy || reference) also off policy
    4. tokens are weighted by min(pi_old / pi_rollout, `max_is_weight`) for what the engine computes differently
    """
    _check(params, kl_coef, ref_sync_steps, reference)
    policy = partial(forward, model, temperature=params.temperature, dtype=dtype)
    ref_policy = partial(forward, reference, temperature=params.temperature, dtype=dtype) if reference else None
    optimizer = adamw(model, lr=lr_at(0), weight_decay=weight_decay)
    state = verbs.restore(folder, model=model, optimizer=optimizer, reference=reference) if resume else {}
    start, kl_state = state.get("step", -1), kl_controller.init(kl_coef)
    kl_state = type(kl_state)(*state.get("kl", kl_state))
    save = partial(
        verbs.save, model=model, optimizer=optimizer, reference=reference if ref_sync_steps else None, keep=keep
    )
    evaluate = partial(
        verbs.evaluate, eval_prompts, generate=engine.generate, params=params, env=env, score=score, seed=seed,
        policy=policy, reference=ref_policy, max_tokens=max_tokens,
    )  # fmt: skip
    with open_run(folder, steps=steps, start=start, resume=resume) as run, stop_on_interrupt() as stop:
        if start < 0:
            await engine.update_weights(stream_weights(model), version=0)
            if eval_prompts and eval_steps:
                run.log(0, await evaluate(dump=verbs.dump_to(run, 0, tokenizer)))
        order = batches(len(prompts), batch_size=prompts_per_step, seed=seed, start_step=max(start, 0))
        signal = True
        for step, rows in zip(range(max(start, 0), steps), order):
            clock = verbs.Clock()
            groups = await rollout(
                [prompts[i] for i in rows], generate=engine.generate, params=params, group_size=group_size,
                seed=mix(seed, step), env=env, score=score, on_group=verbs.dump_to(run, step + 1, tokenizer),
            )  # fmt: skip
            clock.lap("rollout")

            batch = pack(groups)
            advantages = baseline(batch.rewards, group_ids=batch.group_ids)
            batch = with_streams(batch, advantages=broadcast_to_tokens(advantages, cu_seqlens=batch.cu_seqlens))
            batch = with_ref_logp(ref_policy if kl_coef else None, batch, max_tokens=max_tokens)
            if num_minibatches * num_epochs > 1:
                batch = with_old_logp(policy, batch, max_tokens=max_tokens)
            clock.lap("score")

            metrics = verbs.rollout_metrics(batch, groups)
            set_lr(optimizer, lr_at(step))
            for mini in split(batch, num_minibatches, epochs=num_epochs, seed=mix(seed, step)):
                weights = token_mean(mini.mask, num_tokens=verbs.global_count(mini.mask))
                flat = seq_sum(mini.advantages.abs(), cu_seqlens=mini.cu_seqlens) == 0
                for micro, *rest in microbatches((mini, weights), max_tokens=max_tokens, apart=flat):
                    micro, w = micro.to(model.device), rest[0].to(model.device)
                    learning = bool(kl_coef or entropy_coef or micro.advantages.any())
                    with torch.set_grad_enabled(learning):  # where every advantage is 0, so is the gradient
                        out = policy(micro)
                    old_logp = out.logp.detach() if micro.old_logp is None else micro.old_logp
                    log_ratio = out.logp - old_logp
                    w_policy = w * tis(old_logp - micro.rollout_logp, max_weight=max_is_weight)
                    loss = w_policy * ppo_clip(log_ratio, micro.advantages, clip_low=clip_low, clip_high=clip_high)
                    if kl_coef:
                        loss = loss + kl_state.coef * w * log_ratio.exp() * k3(out.logp, micro.ref_logp)
                    if entropy_coef:
                        loss = loss - entropy_coef * w * out.entropy
                    if learning:
                        loss.sum().backward()
                    new = verbs.policy_metrics(out, old_logp, micro, clip_low=clip_low, clip_high=clip_high)
                    metrics = merge(metrics, new)
                metrics = merge(metrics, optimizer_step(optimizer, max_norm=max_norm))
            clock.lap("train")

            done = step + 1
            await engine.update_weights(stream_weights(model), version=done)
            if ref_sync_steps and done % ref_sync_steps == 0:
                reference.load_state_dict(model.state_dict())
            line = finalize(metrics) | {"lr": lr_at(step)}
            if kl_coef:
                line["kl/coef"] = kl_state.coef
                kl_state = kl_controller.update(kl_state, line["kl/ref"])
            if eval_prompts and eval_steps and (done % eval_steps == 0 or done == steps):
                line |= await evaluate(dump=verbs.dump_to(run, done, tokenizer))
                clock.lap("eval")
            run.log(done, line | clock.times(num_tokens=batch.num_tokens))
            signal = verbs.say_if_no_signal(run, batch, before=signal)
            if stop.requested or done == steps or (save_steps and done % save_steps == 0):
                save(run, done, state={"kl": tuple(kl_state)}, must=stop.requested or done == steps)
            if stop.requested:
                run.say(f"saved after step {done}; go on with: {resume_command('--resume')}")
                break
        run.plot()
        return verbs.export(run, model, tokenizer)


def _check(params: SamplingParams, kl_coef: float, ref_sync_steps: int, reference: Any) -> None:
    if (kl_coef or ref_sync_steps) and reference is None:
        raise ValueError(f"{kl_coef=}, {ref_sync_steps=}: these need a reference model")
    if params.temperature == 0:
        raise ValueError("params.temperature is 0: greedy samples of a group are all alike; use e.g. 1.0")
    if params.top_p < 1 or params.top_k:
        raise ValueError(
            f"params.top_p={params.top_p}, params.top_k={params.top_k}: log-probs are of the untruncated distribution, "
            "so truncated sampling would bias every ratio by the mass it keeps; use top_p=1.0 and top_k=0"
        )
