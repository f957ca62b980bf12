"""The rows of `policy_verl` on advantages, and the small examples on which rlkit decided otherwise than verl."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from verl_standins import EPS8, SEQS, Draw, Row, core_algos

from rlkit import advantages as A
from rlkit import losses as L
from rlkit.segments import broadcast_to_tokens, seq_count


def advantages(draw: Draw) -> Iterator[Row]:
    """Group baselines: a reward per sequence in, an advantage per token out."""
    r, ids, flat = draw.scores, {"group_ids": draw.group_ids}, draw.flat

    def tokens(x: Tensor) -> Tensor:
        return torch.where(flat["mask"], broadcast_to_tokens(x, cu_seqlens=draw.cu_seqlens), 0)

    yield Row("grpo", draw.verl("grpo"), tokens(A.group_zscore(r, **ids)))
    centered = tokens(A.group_centered(r, **ids))
    yield Row("grpo, no std (Dr. GRPO)", draw.verl("grpo", norm_adv_by_std_in_grpo=False), centered)
    theirs = draw.verl("grpo_vectorized")
    yield Row("grpo_vectorized", theirs, tokens(A.group_zscore(r, **ids)), note="fp32 statistics in verl", tol=1e-4)
    yield Row("rloo", draw.verl("rloo"), tokens(A.leave_one_out(r, **ids)))
    yield Row("rloo_vectorized", draw.verl("rloo_vectorized"), tokens(A.leave_one_out(r, **ids)))
    lengths = seq_count(flat["mask"], cu_seqlens=draw.cu_seqlens)
    yield Row("opo", draw.verl("opo"), tokens(A.opo(r, lengths=lengths, **ids)))

    best = torch.zeros(SEQS)
    for g in draw.group_ids.unique():
        member = draw.group_ids == g
        size = int(member.sum())
        best[member] = A.max_at_k(r[member], group_ids=torch.zeros(size, dtype=torch.long), k=size) / size
    theirs = draw.verl("grpo_passk", config={"norm_adv_by_std_in_grpo": False})
    yield Row("grpo_passk, no std", theirs, tokens(best), note="max_at_k(k = group size) / k")

    solved = torch.where(draw.group_ids % 2 == 0, r, 0)
    theirs = draw.verl("gpg", rewards=draw.terminal(solved))
    note = "verl counts nonzero rewards: groups here are all 0 or all nonzero"
    yield Row("gpg", theirs, tokens(A.gpg(solved, **ids)), note=note)

    baseline = A.reinforce_pp_baseline(r, **ids, **flat, eps=0.0)
    yield Row("reinforce_plus_plus_baseline", draw.verl("reinforce_plus_plus_baseline"), baseline, note="eps", tol=EPS8)
    two = torch.stack([r, r.roll(1)], 1).float()
    batch = {"prompts": torch.zeros(SEQS, 3), "attention_mask": torch.cat([torch.ones(SEQS, 3), draw.real], 1).long()}
    config = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]}
    columns = {"a": two[:, 0].numpy(), "b": two[:, 1].numpy()}
    theirs = draw.verl("gdpo", config=config, non_tensor_batch=columns, batch=batch)
    ours = A.normalize_then_sum(two.double(), **ids, weights=torch.tensor([1.0, 0.5]))
    note = "fp32 in verl; it whitens over tokens: whiten(normalize_then_sum)"
    yield Row("gdpo", theirs, A.whiten(tokens(ours), mask=flat["mask"], eps=0.0), note=note, tol=1e-4)


def traces(draw: Draw) -> Iterator[Row]:
    """Estimators over tokens, with dense rewards: what stands in the gaps must not matter."""
    flat, mask = draw.flat, draw.mask.double()
    rewards, values = draw.randn(), draw.randn()
    r, v = draw.pack(rewards), draw.pack(values)
    for gamma, lam in ((1.0, 1.0), (0.97, 0.9), (1.0, 0.0)):
        theirs, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        ours = A.gae(r, v, **flat, gamma=gamma, lam=lam)
        name = f"gae gamma {gamma} lam {lam}"
        whitened = A.whiten(ours.advantages, mask=flat["mask"], eps=0.0)
        yield Row(f"{name}: returns", draw.at_actions(returns), ours.returns)
        yield Row(
            f"{name}: whitened advantages", draw.at_actions(theirs), whitened, note="eps inside the root", tol=EPS8
        )
    config = type("Config", (), {"gamma": 0.95})
    theirs = draw.verl("reinforce_plus_plus", rewards=rewards, config=config)
    yield Row("reinforce_plus_plus", theirs, A.reinforce_pp(r, **flat, gamma=0.95, eps=0.0), note="eps", tol=EPS8)
    greedy = torch.randn(SEQS, generator=draw.rng)
    theirs = draw.verl("remax", rewards=rewards, reward_baselines=greedy)
    ours = A.discounted_returns(r, **flat) - broadcast_to_tokens(greedy, cu_seqlens=draw.cu_seqlens)
    note = "token rewards: discounted_returns - greedy; terminal: rewards - greedy"
    yield Row("remax", theirs, torch.where(flat["mask"], ours, 0), note=note)
    theirs = draw.verl("remax", reward_baselines=greedy)
    ours = broadcast_to_tokens(draw.scores - greedy, cu_seqlens=draw.cu_seqlens)
    yield Row("remax, terminal reward", theirs, torch.where(flat["mask"], ours, 0))

    logp, weights = draw.logp.detach(), draw.rand() * 2
    otb = {"old_log_probs": logp, "sum_pi_squared": draw.sum_pi_squared, "handle_zero_tail": False, "epsilon": 0.0}
    args = r, draw.pack(logp), draw.pack(draw.sum_pi_squared)
    for name, options in (("", {}), (", IS weights", {"rollout_is_weights": weights})):
        theirs = draw.verl("tir_optimal_token_baseline", rewards=rewards, **otb, **options)
        is_weights = draw.pack(weights) if options else None
        ours = A.optimal_token_baseline(*args, **flat, group_ids=draw.group_ids, is_weights=is_weights)
        yield Row(f"tir_optimal_token_baseline{name}", theirs, ours, note="handle_zero_tail=False, epsilon=0")
    options = otb | {"index": draw.index, "rollout_is_weights": weights}
    theirs = core_algos.compute_optimal_token_baseline_advantage(rewards, draw.real.double(), **options)[0]
    every = {"mask": torch.ones_like(flat["mask"]), "cu_seqlens": draw.cu_seqlens, "group_ids": draw.group_ids}
    ours = A.optimal_token_baseline(*args, **every, is_weights=draw.pack(weights))
    yield Row("optimal_token_baseline", draw.pack(theirs), ours, note="no gaps: verl compares by position")


def differences() -> list[tuple[str, str, float, float]]:
    """Conventions that differ, on the smallest example: (what, example, verl, ours)."""
    one, ids, index = torch.tensor([[0.7]]), {"group_ids": torch.tensor([0])}, torch.tensor([0]).numpy()
    mask, reward = torch.ones(1, 1), torch.tensor([0.7])
    out = []
    ours = {"grpo": A.group_zscore, "rloo": A.leave_one_out, "rloo_vectorized": A.leave_one_out}
    for name, f in ours.items():
        theirs = core_algos.get_adv_estimator_fn(name)(token_level_rewards=one, response_mask=mask, index=index)[0]
        out.append(("singleton group", f"{name}, reward 0.7", theirs.item(), f(reward, **ids).item()))
    theirs = core_algos.get_adv_estimator_fn("gpg")(
        torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), torch.zeros(2).numpy()
    )[0]
    mine = A.gpg(torch.tensor([1.0, 0.0]), group_ids=torch.zeros(2, dtype=torch.long))
    out.append(("gpg counts groups, not zeros", "rewards 1, 0: A of the first", theirs[0].item(), mine[0].item()))
    d = torch.tensor([-5.0])
    clamped = core_algos.kl_penalty(d, torch.zeros(1), "low_var_kl").item()
    out.append(("k3 is not clamped at 10", "logp - ref_logp = -5", clamped, L.k3(d, torch.zeros(1)).item()))
    mask = torch.tensor([[True, False, True], [True, True, True]])
    rewards, ids = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 3.0]]), {"group_ids": torch.tensor([0, 0])}
    zero, p2 = torch.full((2, 3), -1.0), torch.full((2, 3), 0.3)
    options = {"index": torch.zeros(2).numpy(), "old_log_probs": zero, "sum_pi_squared": p2}
    flat = {"mask": mask.flatten(), "cu_seqlens": torch.tensor([0, 3, 6])}
    mine = A.optimal_token_baseline(rewards.flatten(), zero.flatten(), p2.flatten(), **flat, **ids)
    for name, what, zero_tail in (
        ("optimal_token_baseline", "compares by action", False),
        ("tir_optimal_token_baseline", "a lone tail gets 0", True),
    ):
        theirs = core_algos.get_adv_estimator_fn(name)(rewards, mask.double(), **options, handle_zero_tail=zero_tail)[0]
        out.append(
            (f"{what}", f"{name}, rewards 1 and 3, masks 101 and 111: last A", theirs[1, 2].item(), mine[5].item())
        )
    return out
