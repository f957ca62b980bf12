"""Cross-check of advantages, policy losses, KL, weights, value loss and rollout corrections against verl's own code.

Random ragged batches with masked gaps, padded for verl and packed for rlkit from the same tensors. Printed is for each
row the largest difference of the values over all draws, relative to max(1, |value|), and of the gradients where there
are any. A dash stands where nothing is to be compared (no gradient; or a value that verl writes with log_prob where
rlkit has log_ratio, which is another constant with the same gradient). Where a convention differs, the note names it
and the row uses data or arguments on which both agree; the last table shows such differences in numbers.

verl lives in an environment of its own. torch comes first; look at what `pip install --dry-run` would do before you
install the rest, so that torch is not replaced. CPU is enough:

    python -m venv /tmp/verl && /tmp/verl/bin/pip install torch==2.13.0 numpy
    /tmp/verl/bin/pip install omegaconf tensordict transformers codetiming orjson jaxtyping einops
    /tmp/verl/bin/pip install --no-deps verl==0.9.1
    PYTHONPATH=. /tmp/verl/bin/python tests/parity/policy_verl.py

verl's import also asks for ray, of which nothing here runs: where ray is not installed, `verl_standins` puts an empty
stand-in in its place. verl pins older tensordict and transformers; it only imports them here.

Exit status 1 if a difference exceeds its row's tolerance: 1e-9 in fp64, more where the note says why.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from verl_advantages import advantages, differences, traces
from verl_standins import (
    EPS8,
    LONGEST,
    SEQS,
    Draw,
    Row,
    core_algos,
    rollout_corr_helper,
    torch_functional,
    verl_policy,
)

from rlkit import advantages as A
from rlkit import losses as L
from rlkit.segments import broadcast_to_tokens, sum_per_seq

DRAWS = 20


def policy(draw: Draw) -> Iterator[Row]:
    """Policy losses of verl's registry, aggregated as their papers do."""
    flat, leaf = draw.flat, draw.logp
    logp, old = draw.pack(leaf), draw.pack(draw.old_logp)
    x, mask = logp - old, {"mask": flat["mask"]}
    per_token, per_seq = draw.token_advantages, draw.advantages
    adv, seq_adv = draw.pack(per_token), draw.pack(per_seq)
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    token, seq = L.token_mean(flat["mask"]), L.seq_mean(**flat)
    total = L.seq_mean_token_sum(**flat)

    def row(name: str, theirs: Tensor, ours: Tensor, note: str = "", tol: float = 1e-9, value: bool = True) -> Row:
        return Row(name, theirs, ours.sum(), leaf, note, tol, value)

    theirs = verl_policy(draw, "vanilla", per_token, clip_ratio_c=1e9)
    yield row("vanilla, clip_ratio_c inf", theirs, token * L.ppo_clip(x, adv, **clip, **mask))
    theirs = verl_policy(draw, "vanilla", per_token, clip_ratio_c=1.5)
    yield row("vanilla, clip_ratio_c 1.5", theirs, token * L.dual_clip(x, adv, clip_c=1.5, **clip, **mask))
    keep = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.5}
    clipped = L.ppo_clip(x, adv, **clip, **mask) > L.importance_sampling(x, adv, **mask)
    free = {"mask": flat["mask"] & ~clipped}
    selected = L.select_between(L.token_covariance(logp, adv, **mask), low=0.1, high=1.5, fraction=1.0, **free)
    yield row(
        "clip_cov, ratio 1",
        verl_policy(draw, "clip_cov", per_token, policy_loss=keep),
        token * L.clip_cov(x, adv, selected=selected, **clip, **mask),
        "all in (lb, ub), as the choice is random; per batch",
    )
    some = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}
    selected = L.select_top(L.token_covariance(logp, adv, **mask), fraction=0.1, **mask)
    yield row(
        "kl_cov, ratio 0.1",
        verl_policy(draw, "kl_cov", per_token, policy_loss=some),
        token * L.kl_cov(x, adv, selected=selected, kl_coef=0.7, **mask),
    )
    theirs = verl_policy(draw, "gspo", per_seq, agg="seq-mean-token-mean")
    yield row("gspo", theirs, seq * L.gspo(x, seq_adv, **flat, **clip), "per-sequence advantages; eps", EPS8)
    as_token = L.token_gradient(L.seq_log_ratio(x, **flat), x)
    theirs = verl_policy(draw, "gspo", per_token)
    ours = token * L.ppo_clip(as_token, adv, **clip, **mask)
    yield row("gspo, token-mean (GSPO-token)", theirs, ours, "ppo_clip(token_gradient(seq_log_ratio))")
    theirs = verl_policy(draw, "geo_mean", per_seq)
    yield row(
        "geo_mean (GMPO)",
        theirs,
        seq * L.gmpo(x, seq_adv, **flat, **clip),
        "eps; no empty sequence, which verl counts",
        EPS8,
    )
    theirs = verl_policy(draw, "sapo", per_token)
    yield row("sapo", theirs, seq * L.sapo(x, adv, **mask), "eps in the lengths", EPS8)
    theirs = verl_policy(draw, "gpg", per_token)
    yield row("gpg", theirs, token * L.reinforce(logp, adv, **mask))
    ours = token * L.cispo(x, adv, max_weight=1.28, min_weight=0.8, **mask)
    yield row(
        "cispo",
        verl_policy(draw, "cispo", per_token),
        ours,
        "verl's distances 0.2, 0.28 as bounds .8, 1.28",
        value=False,
    )
    theirs = verl_policy(draw, "dro", per_token, policy_loss={"dro_beta": 0.3})
    yield row("dro", theirs, token * L.dro(x, adv, beta=0.3, **mask), value=False)
    for name, loss, low, high in (("dppo_tv", L.dppo, 0.05, 0.03), ("dppo_kl", L.dppo_kl, 0.008, 0.004)):
        theirs = verl_policy(draw, name, per_token, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=1.5)
        ours = token * loss(x, adv, old_logp=old, delta_low=low, delta_high=high, max_weight=1.5, **mask)
        yield row(name, theirs, ours, value=False)

    rejecting = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"}
    kept = L.keep_ratio(x, low=1 / 1.4, high=1 / 0.7, **mask)
    left = L.token_mean(flat["mask"] & (kept > 0))
    theirs = verl_policy(
        draw, "bypass_mode", per_token, correction={"rollout_is": None, "loss_type": "ppo_clip"} | rejecting
    )
    ours = left * L.dual_clip(x, adv, clip_c=3.0, **clip, **mask)
    yield row("bypass_mode ppo_clip, token_k1", theirs, ours, "denominator after rejection, as in verl")
    weighted = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.3}
    theirs = verl_policy(draw, "bypass_mode", per_token, agg="seq-mean-token-sum", correction=weighted)
    ours = total * L.tis(x, max_weight=1.3, **mask) * L.reinforce(logp, adv, **mask)
    yield row("bypass_mode reinforce, token TIS", theirs, ours)
    behaviour = draw.old_logp - draw.ref_logp
    weights = rollout_corr_helper.compute_rollout_correction_weights(behaviour, draw.mask.double(), "token", 1.3)[0]
    theirs = verl_policy(draw, "vanilla", per_token, weights=weights, clip_ratio_c=1e9)
    weights = L.tis(draw.pack(behaviour), max_weight=1.3, **mask)
    ours = token * weights * L.ppo_clip(x, adv, **clip, **mask)
    yield row("vanilla, rollout_is_weights", theirs, ours, "tis * ppo_clip; clip_ratio_c inf")


def kl(draw: Draw) -> Iterator[Row]:
    """KL penalties, per token, and the KL inside the reward."""
    logp, ref, mask = draw.pack(draw.logp), draw.pack(draw.ref_logp), {"mask": draw.flat["mask"]}
    table = {
        "k1": L.k1,
        "abs": L.abs_kl,
        "k2": L.k2,
        "low_var_kl": L.k3,
        "k1+": L.k1_straight_through,
        "k3+": L.k3_straight_through,
    }
    for name, estimator in table.items():
        theirs = draw.at_actions(core_algos.kl_penalty(draw.logp, draw.ref_logp, name))
        note = "below verl's clamp at 10" if "3" in name or "low" in name else ""
        yield Row(f"kl_penalty {name}", theirs, estimator(logp, ref, **mask), draw.logp, note)
    rewards = draw.randn()
    theirs = core_algos.compute_rewards(rewards, draw.logp.detach(), draw.ref_logp, 0.3)
    ours = L.kl_in_reward(draw.pack(rewards), logp.detach(), ref, kl_coef=0.3, **mask)
    yield Row("compute_rewards (k1 in the reward)", draw.at_actions(theirs), ours)


def aggregation(draw: Draw) -> Iterator[Row]:
    """agg_loss against our weight vectors, on batches of which one sequence has no trainable token."""
    padded = draw.mask.clone()
    padded[1] = False
    mask, flat = padded.double(), {"mask": draw.pack(padded), "cu_seqlens": draw.cu_seqlens}
    loss = draw.randn().requires_grad_()
    x = draw.pack(loss)

    def row(mode: str, weights: Tensor, tol: float = 1e-9, note: str = "", **options: float) -> Row:
        name = f"agg_loss {mode}" + "".join(f", {v}" for v in options.values())
        return Row(name, core_algos.agg_loss(loss, mask, mode, **options), (weights * x).sum(), loss, note, tol)

    yield row("token-mean", L.token_mean(flat["mask"]))
    yield row("token-sum", flat["mask"].double())
    yield row("seq-mean-token-sum", L.seq_mean_token_sum(**flat))
    yield row("seq-mean-token-mean", L.seq_mean(**flat), EPS8, "eps in the lengths")
    scaled = L.constant_length(**flat, max_length=50)
    yield row("seq-mean-token-sum-norm", scaled, loss_scale_factor=50)
    wide = L.constant_length(**flat, max_length=LONGEST)
    yield row("seq-mean-token-sum-norm", wide, note="no loss_scale_factor: max_length = the padded width")
    shared = 2 * L.token_mean(flat["mask"], num_tokens=200)
    yield row(
        "token-mean", shared, dp_size=2, batch_num_tokens=200, note="dp_size 2 and the global count: times the ranks"
    )
    shared = 2 * L.seq_mean(**flat, num_seqs=31)
    yield row("seq-mean-token-mean", shared, EPS8, "the same; eps in the lengths", dp_size=2, global_batch_size=31)


def values_and_entropy(draw: Draw) -> Iterator[Row]:
    """The critic's loss, entropy from logits, whitening."""
    flat, mask = draw.flat, draw.mask.double()
    now, old, returns = draw.randn().requires_grad_(), draw.randn(), draw.randn()
    theirs = core_algos.compute_value_loss(now, returns, old, mask, 0.5)[0]
    ours = L.token_mean(flat["mask"]) * L.value_clip(*map(draw.pack, (now, old, returns)), clip=0.5, mask=flat["mask"])
    yield Row("compute_value_loss, clip 0.5", theirs, ours.sum(), now)
    theirs = core_algos.compute_value_loss(now, returns, old, mask, 1e9)[0]
    ours = L.token_mean(flat["mask"]) * L.value_mse(draw.pack(now), draw.pack(returns), mask=flat["mask"])
    yield Row("compute_value_loss, clip inf", theirs, ours.sum(), now)
    entropy = L.entropy_from_logits(draw.pack(draw.logits), mask=flat["mask"])
    theirs = draw.at_actions(torch_functional.entropy_from_logits(draw.logits))
    yield Row("entropy_from_logits", theirs, entropy, draw.logits)
    theirs = core_algos.compute_entropy_loss(draw.logits, mask)
    yield Row("compute_entropy_loss", theirs, (L.token_mean(flat["mask"]) * entropy).sum(), draw.logits)
    theirs = draw.at_actions(torch_functional.masked_whiten(old, mask))
    ours = A.whiten(draw.pack(old), mask=flat["mask"], eps=0.0)
    yield Row("masked_whiten", theirs, ours, note="eps inside the root", tol=EPS8)


def corrections(draw: Draw) -> Iterator[Row]:
    """Importance weights and rejection masks for the rollout engine's mismatch."""
    flat, padded = draw.flat, draw.mask.double()
    mask = {"mask": flat["mask"]}
    ratio = 0.3 * draw.randn()
    x = draw.pack(ratio)
    sums, means = L.seq_log_ratio_sum(x, **flat), L.seq_log_ratio(x, **flat)
    for level, of in (("token", x), ("sequence", sums)):
        verl = rollout_corr_helper.compute_rollout_correction_weights
        tis, icepop = L.tis(of, max_weight=1.2, **mask), L.icepop(of, low=0.7, high=1.2, **mask)
        yield Row(f"rollout_is {level}, 1.2 (TIS)", draw.at_actions(verl(ratio, padded, level, 1.2)[0]), tis)
        yield Row(
            f"rollout_is {level}, 0.7_1.2 (IcePop)", draw.at_actions(verl(ratio, padded, level, "0.7_1.2")[0]), icepop
        )
        ends = flat["cu_seqlens"][1:]
        mean = None if level == "token" else L.tis(of, max_weight=1.2)[ends - 1].mean()
        normalized = L.batch_normalized(tis, mean=mean, **mask)
        theirs = draw.at_actions(verl(ratio, padded, level, 1.2, True)[0])
        yield Row(f"rollout_is {level}, batch normalised", theirs, normalized, note="eps in the count", tol=EPS8)

    zero = torch.zeros_like(x)
    k2, k3 = L.k2(zero, x, **mask), L.k3(zero, x, **mask)
    kept = {f"{name}_k1": (of, None) for name, of in (("token", x), ("seq_sum", sums), ("seq_mean", means))}
    for name, k in (("k2", k2), ("k3", k3)):
        kept[f"token_{name}"] = kept[f"seq_max_{name}"] = k, 0.06
        total = broadcast_to_tokens(sum_per_seq(k, **flat), cu_seqlens=draw.cu_seqlens)
        kept[f"seq_sum_{name}"] = total, 0.2
        kept[f"seq_mean_{name}"] = L.seq_log_ratio(k, **flat), 0.04
    for option, (of, limit) in kept.items():
        spec = "0.8_1.2" if limit is None else limit
        theirs = rollout_corr_helper.compute_rollout_rejection_mask(ratio, padded, option, spec)[0]
        if limit is None:
            ours = L.keep_ratio(of, low=1 / 1.2, high=1 / 0.8, **mask)
        else:
            ours = L.keep_divergence(of, max_divergence=limit, **mask)
        if "max" in option:
            ours = L.keep_whole_sequences(ours, **flat)
        yield Row(f"rollout_rs {option}", draw.at_actions(theirs), ours, note="bounds 1 / r" if limit is None else "")


def main() -> int:
    """Print both tables; 1 if a row differs by more than its tolerance."""
    torch.set_default_dtype(torch.float64)
    worst: dict[str, tuple[float, float | None, Row]] = {}
    for seed in range(DRAWS):
        for table in (advantages, traces, policy, kl, aggregation, values_and_entropy, corrections):
            for row in table(Draw(seed)):
                key = f"{table.__name__}: {row.name}"
                value, grad, _ = worst.get(key, (0.0, None, row))
                new = _gradient_gap(row)
                grad = new if grad is None or new is None else max(grad, new)
                worst[key] = max(value, _gap(row.verl, row.ours)) if row.value else -1.0, grad, row
    print(f"verl {importlib.metadata.version('verl')}, torch {torch.__version__}, {DRAWS} draws of {SEQS} sequences\n")
    width = max(map(len, worst))
    print(f"{'verl':{width}s} {'max difference':>15s} {'of the gradient':>16s}  note")
    failed = False
    for key, (value, grad, row) in worst.items():
        bad = not max(value, grad or 0.0) <= row.tol
        failed |= bad
        cells = f"{value:15.1e}" if row.value else f"{'-':>15s}", f"{'-':>16s}" if grad is None else f"{grad:16.1e}"
        print(f"{key:{width}s} {cells[0]} {cells[1]}  {'DIFFERS ' if bad else ''}{row.note}")
    print(f"\n{'decided otherwise':30s} {'example':76s} {'verl':>10s} {'rlkit':>10s}")
    for what, example, theirs, ours in differences():
        print(f"{what:30s} {example:76s} {theirs:10.4f} {ours:10.4f}")
    return int(failed)


def _gradient_gap(row: Row) -> float | None:
    """Largest difference of the gradients with respect to the leaf, of a fixed combination of the entries."""
    if row.leaf is None:
        return None
    mix = torch.cos(torch.arange(row.verl.numel())).view_as(row.verl)
    pair = (torch.autograd.grad((mix * x).sum(), row.leaf, retain_graph=True)[0] for x in (row.verl, row.ours))
    return _gap(*pair)


def _gap(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry where that exceeds 1."""
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    gap = ((a - b).abs().max() / a.abs().max().clamp(min=1)).item()
    return gap if gap == gap else float("inf")


if __name__ == "__main__":
    sys.exit(main())
