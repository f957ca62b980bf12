"""The places of the KL and the estimators per token of a batch, against plain loops over tokens and in limits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from rlkit.advantages import group_centered, group_zscore, leave_one_out, max_rl, vtrace, whiten
from rlkit.loops import estimators as E
from rlkit.loops.coefficients import KlTerm, kl_term
from rlkit.loops.estimators import told_below_zero, with_estimates
from rlkit.loops.roles import against
from rlkit.loops.updates import clipped, skip_above
from rlkit.losses import k1, k2, k3, tis, unbiased_kl
from rlkit.model.heads import bootstraps
from rlkit.packing import pack, select, with_streams
from rlkit.settings import Penalties
from rlkit.types import Trajectory


def groups():
    """Masked gaps, token rewards, a truncated answer, an episode in two pieces, a sequence without an action."""
    generator = torch.Generator().manual_seed(0)

    def made(n, reward, *, mask=None, **more):
        mask = mask or [i % 3 != 1 for i in range(n)]
        rewards = [0.1 * i * m for i, m in enumerate(mask)]
        logp = torch.randn(n, generator=generator).sub(3).tolist()
        return Trajectory([5, 6], list(range(n)), mask, logp, [0] * n, reward, rewards, **more)

    first = [made(5, 1.0), made(4, 0.0, truncated=True), made(3, 2.0, mask=[False] * 3)]
    return [first, [made(2, 3.0), made(4, 3.0, continues=True), made(1, 0.5)]]


def batch(*, turns=True):
    """Without `turns` the answers have terminal rewards only, as a baseline alone reads them."""
    packed = pack(groups() if turns else [[replace(x, token_rewards=None) for x in group] for group in groups()])
    generator = torch.Generator().manual_seed(1)
    old, ref, values = (torch.randn(packed.num_tokens, generator=generator) for _ in range(3))
    return with_streams(packed, old_logp=-old.abs(), ref_logp=-ref.abs(), values=values)


def by_episode(x):
    """Baseline of the episodes' rewards: those of the first group are 1, 0, 2 and of the second 3 and 0.5."""
    mean = [1.0, 1.0, 1.0, 1.75, 1.75]
    return torch.tensor([r - m for r, m in zip(x, mean, strict=True)])


OF = torch.tensor([0, 1, 2, 3, 3, 4])  # the episode of each sequence
REWARDS = [1.0, 0.0, 2.0, 3.0, 0.5]


def test_max_rl_names_the_first_negative_group_mean_of_a_run(caplog):
    ids, checked = torch.tensor([0, 0, 1, 1]), told_below_zero(partial(max_rl, eps=0.0))
    for rewards, lines in (([0, 1, 2, 0], 0), ([-1, 1, 0, 0], 0), ([0, 1, -1, -3], 1), ([0, 1, -5, -7], 1)):
        r = torch.tensor(rewards, dtype=torch.float32)
        means = r.view(2, 2).mean(1, keepdim=True)
        expected = torch.where(means == 0, 0.0, r.view(2, 2) / torch.where(means == 0, 1.0, means) - 1).flatten()
        torch.testing.assert_close(checked(r, group_ids=ids), expected)
        assert len(caplog.records) == lines
    assert expected[2] < 0  # of the better answer
    assert "the lowest is -2: in such a group the best answers are pushed down" in caplog.records[0].getMessage()
    assert told_below_zero(group_centered) is group_centered


def tokens(b):
    """(sequence, its action tokens) of each sequence."""
    edges = b.cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(edges)):
        yield i, [t for t in range(start, end) if b.mask[t]]


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_the_kl_in_the_reward_of_an_answer_is_the_sum_over_its_tokens(estimator):
    b = batch(turns=False)
    got = with_estimates(b, baseline=group_centered, kl=KlTerm("reward", estimator), kl_coef=0.3)
    kl = estimator(b.old_logp, b.ref_logp) * b.mask
    total = [0.0] * 5
    for i, at in tokens(b):
        total[OF[i]] += sum(float(kl[t]) for t in at)
    total[2] = (total[0] + total[1]) / 2  # it has no trained token
    rewards = torch.tensor(REWARDS) - 0.3 * torch.tensor(total)
    groups_of = torch.tensor([0, 0, 0, 1, 1])
    want = rewards - torch.stack([rewards[groups_of == g].mean() for g in groups_of])
    for i, at in tokens(b):
        torch.testing.assert_close(got.advantages[at], want[OF[i]].expand(len(at)), atol=1e-5, rtol=1e-5)
    assert (got.rewards == b.rewards).all()


def test_the_kl_in_the_advantage_is_that_of_each_token():
    b = batch(turns=False)
    plain = with_estimates(b, baseline=group_centered)
    got = with_estimates(b, baseline=group_centered, kl=KlTerm("advantage", k1), kl_coef=0.3)
    want = (plain.advantages - 0.3 * (b.old_logp - b.ref_logp)) * b.mask
    torch.testing.assert_close(got.advantages, want)
    in_loss = with_estimates(b, baseline=group_centered, kl=KlTerm(), kl_coef=0.3)
    assert (in_loss.advantages == plain.advantages).all()


def test_a_baseline_alone_refuses_rewards_of_turns():
    with pytest.raises(ValueError, match="rewards of turns, and a baseline alone reads terminal rewards"):
        with_estimates(batch(), baseline=group_centered)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_returns_discount_the_baselines_value_the_token_rewards_and_the_kl(kl_coef):
    b, own = batch(), by_episode(REWARDS)
    advantage = partial(E.returns, gamma=0.9)
    kl = KlTerm("reward", k1)
    got = with_estimates(b, baseline=group_centered, advantage=advantage, kl=kl, kl_coef=kl_coef).advantages
    rewards = [0.1 * i * m for group in groups() for t in group for i, m in enumerate([*t.mask, *[0] * t.truncated])]
    want = torch.zeros(b.num_tokens)
    for i, at in tokens(b):
        after = 0.0
        for t in reversed(at):
            r = rewards[t] + (float(own[OF[i]]) if t == at[-1] else 0.0)
            want[t] = after = r - kl_coef * float(b.old_logp[t] - b.ref_logp[t]) + 0.9 * after
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_reinforce_pp_is_the_whitened_return_of_the_raw_rewards():
    raw = lambda rewards, group_ids: rewards
    b = batch()
    got = with_estimates(b, baseline=raw, advantage=E.reinforce_pp).advantages[b.mask]
    returns = E.returns(b, torch.zeros(6)).advantages[b.mask]
    torch.testing.assert_close(got, (returns - returns.mean()) / (returns.std() + 1e-6))


def turn(ids, reward=0.0, *, observation=()):
    return [*observation], [*ids], reward


def episode(*turns, prompt=(5, 6), final=0.0, **more):
    """A trajectory of turns; `final` is its terminal reward."""
    ids, mask, rewards = [], [], []
    for shown, said, reward in turns:
        ids += [*shown, *said]
        mask += [False] * len(shown) + [True] * len(said)
        rewards += [0.0] * (len(shown) + len(said) - 1) + [reward]
    num = len(ids)
    return Trajectory([*prompt], ids, mask, [-1.0] * num, [0] * num, final, rewards, **more)


def talks():
    """A group of three episodes: of two turns, of two pieces with three turns, and of one turn; and a group of one."""
    pieces = [
        episode(turn([1], 0.5), turn([2, 3], 0.25, observation=[7, 7]), final=2.0),
        episode(turn([4], 1.0, observation=[8]), prompt=(5, 9), final=2.0, continues=True),
    ]
    first = episode(turn([1, 1], 0.1), turn([2], observation=[7, 7]), final=1.0, truncated=True)
    return [[first, *pieces, episode(turn([3], -1.0))], [episode(turn([9]), final=4.0)]]


TURNS = [[0.1, 1.0], [0.5, 0.25, 3.0], [-1.0]]  # of the first group


def per_token(x):
    """Advantages of the first group's turns on the tokens of `talks`."""
    (a, b), (c, d, e), (f,) = x
    return torch.tensor([a, a, 0, 0, b, 0, c, 0, 0, d, d, 0, e, f, 0.0])


def to_go(rewards, gamma):
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def test_turn_returns_are_compared_by_turn_also_over_pieces():
    b = pack(talks())
    g = [to_go(x, 0.5) for x in TURNS]
    at = [[x[k] for x in g if len(x) > k] for k in range(3)]
    want = per_token([[x[k] - sum(at[k]) / len(at[k]) for k in range(len(x))] for x in g])
    got = with_estimates(b, baseline=group_centered, advantage=partial(E.turn_returns, gamma=0.5))
    torch.testing.assert_close(got.advantages, want, atol=1e-6, rtol=1e-6)
    none = lambda rewards, group_ids: rewards
    raw = with_estimates(b, baseline=none, advantage=E.turn_returns)
    want = per_token([to_go(x, 1.0) for x in TURNS])
    want[-1] = 4.0
    torch.testing.assert_close(raw.advantages, want)
    own = E.turn_returns(b, torch.zeros(5), baseline=none)
    torch.testing.assert_close(own.advantages, want)
    reordered = select(b, [4, 3, 2, 0, 1])  # the second piece is before the first episode, after its own first piece
    assert with_estimates(reordered, baseline=leave_one_out, advantage=E.turn_returns).advantages.isfinite().all()


def test_gigpo_compares_turns_before_which_the_same_tokens_were_shown():
    b = pack(talks())
    g = [to_go(x, 0.5) for x in TURNS]
    same = [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1)], [(1, 2)]]  # the prompt; 7 7; another prompt
    totals = [sum(x) for x in TURNS]
    want = [[total - sum(totals) / 3 for _ in x] for x, total in zip(TURNS, totals)]
    for members in same:
        mean = sum(g[e][k] for e, k in members) / len(members)
        for e, k in members:
            want[e][k] += 2.0 * (g[e][k] - mean)
    estimator = partial(E.gigpo, gamma=0.5, step_weight=2.0)
    for packed in (b, pack(talks(), share_prompts=False)):
        got = with_estimates(packed, baseline=group_centered, advantage=estimator).advantages
        torch.testing.assert_close(got[packed.mask], per_token(want)[b.mask], atol=1e-6, rtol=1e-6)
    shown = replace(b, images=(*[()] * (b.prefix_cu.numel() - 1), (object(),), *[()] * 4))
    with pytest.raises(ValueError, match="these show pictures: use turn_returns"):
        with_estimates(shown, baseline=group_centered, advantage=estimator)


@pytest.mark.parametrize("baseline", [group_centered, leave_one_out, group_zscore])
def test_with_one_turn_each_both_are_the_groups_own_baseline(baseline):
    b = pack([[episode(turn([1, 2]), final=r) for r in (1.0, 0.0, 2.5)], [episode(turn([3]), final=1.0)]])
    own = with_estimates(b, baseline=baseline).advantages
    for estimator in (E.turn_returns, partial(E.gigpo, step_weight=0.0)):
        assert torch.equal(with_estimates(b, baseline=baseline, advantage=estimator).advantages, own)
    assert torch.equal(with_estimates(b, baseline=baseline, advantage=E.gigpo).advantages, 2 * own)  # one state, too
    alike = replace(b, roles=torch.tensor([0, 1, 0, 0]))
    got = with_estimates(alike, baseline=baseline, advantage=E.turn_returns).advantages
    assert torch.equal(got, with_estimates(alike, baseline=baseline).advantages)


def test_an_average_of_roles_refuses_turns():
    groups = talks()
    with pytest.raises(ValueError, match="suits episodes, not turns"):
        with_estimates(pack(groups), baseline=against({"": 0.5}, groups), advantage=E.turn_returns)


def test_estimators_of_a_critic_meet_in_their_limits():
    b = batch()
    b = with_streams(b, rollout_logp=b.old_logp)  # on-policy
    ends = torch.linspace(-1, 1, 6)
    for lam in (0.0, 0.7, 1.0):
        want = E.gae(b, ends, gamma=0.9, lam_policy=lam, lam_value=lam)
        for other in (E.td_lambda, E.retrace):
            got = other(b, ends, gamma=0.9, lam_policy=lam)
            torch.testing.assert_close(got.advantages, want.advantages)
            torch.testing.assert_close(got.returns[b.mask], want.returns[b.mask])
    traced = E.vtrace(b, ends, gamma=0.9, lam_policy=1.0)
    torch.testing.assert_close(traced.advantages, want.advantages)
    torch.testing.assert_close(traced.returns[b.mask], want.returns[b.mask])
    torch.testing.assert_close(E.n_step(b, ends, gamma=0.9, n=99).advantages, want.advantages)
    one = E.gae(b, ends, gamma=0.9, lam_policy=0.0)
    torch.testing.assert_close(E.n_step(b, ends, gamma=0.9, n=1).advantages, one.advantages)
    short = E.vapo(b, ends, gamma=0.9, alpha=0.01)  # answers below 100 tokens
    torch.testing.assert_close(short.advantages, one.advantages)
    torch.testing.assert_close(short.returns, E.gae(b, ends, gamma=0.9).returns)
    away = replace(b, rollout_logp=b.old_logp + 2.0)  # the sampling policy was surer of each token
    for other in (E.vtrace, E.retrace):
        assert not torch.allclose(other(away, ends).advantages, other(b, ends).advantages)


def test_an_answer_with_a_ratio_above_the_limit_is_left_out():
    b = with_estimates(batch(turns=False), baseline=group_centered)
    log_ratio = torch.zeros(b.num_tokens)
    edges = b.cu_seqlens.tolist()
    log_ratio[edges[3]] = 3.01  # e^3.01 > 20, in the fourth sequence
    log_ratio[edges[1] + 1] = 9.0  # masked
    log_ratio.requires_grad_()
    got = skip_above(log_ratio, b, surrogate=clipped, max_ratio=20.0)
    want = clipped(log_ratio, b)
    outside = (torch.arange(b.num_tokens) < edges[3]) | (torch.arange(b.num_tokens) >= edges[4])
    assert (got[~outside] == 0).all()
    torch.testing.assert_close(got[outside & b.mask], want[outside & b.mask])


def own_kl(logp, ref_logp):
    return 2 * k2(logp, ref_logp)


@pytest.mark.parametrize(
    ("kl_in", "estimator", "default", "term"),
    [
        (None, None, "loss", ("loss", unbiased_kl)), (None, None, "reward", ("reward", k1)),
        ("loss", None, "reward", ("loss", unbiased_kl)), (None, unbiased_kl, "loss", ("loss", unbiased_kl)),
        (None, k3, "loss", ("loss", k3)), ("advantage", None, "loss", ("advantage", k1)),
        ("reward", k3, "loss", ("reward", k3)), (None, own_kl, "loss", ("loss", own_kl)),
    ],
)  # fmt: skip
def test_the_settings_name_the_place_and_the_keyword_the_estimator(kl_in, estimator, default, term):
    assert kl_term(Penalties(kl_coef=0.1, kl_in=kl_in), estimator, default=default) == term


@pytest.mark.parametrize(
    ("given", "estimator", "message"),
    [
        ({"kl_coef": 0.1}, k1, "`kl_estimator` k1 in the loss has gradient 0 on average"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, unbiased_kl, "`kl_estimator` unbiased is for `kl_in` loss"),
        ({"kl_in": "reward"}, None, "`kl_in` requires `kl_coef` above 0 or `kl_limit`"),
        ({}, k2, "`kl_estimator` requires `kl_coef` above 0, or `kl_limit`"),
    ],
)
def test_a_place_or_estimator_without_effect_is_refused(given, estimator, message):
    with pytest.raises(ValueError, match=message):
        kl_term(Penalties(**given), estimator)


def test_an_own_estimator_is_the_kl_in_the_loss_and_in_the_reward():
    b = batch(turns=False)
    term = kl_term(Penalties(kl_coef=0.1), own_kl)
    torch.testing.assert_close(term.in_loss(b.old_logp, b.ref_logp, b.old_logp), own_kl(b.old_logp, b.ref_logp))
    in_reward = kl_term(Penalties(kl_coef=0.3, kl_in="reward"), own_kl)
    got, twice = (
        with_estimates(b, baseline=group_centered, kl=kl, kl_coef=coef).advantages
        for kl, coef in ((in_reward, 0.3), (KlTerm("reward", k2), 0.6))
    )
    torch.testing.assert_close(got, twice)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda logp: logp, r"kl_estimator is called as kl_estimator\(logp, ref_logp\), which <lambda> does not take"),
        ("k3", r"kl_estimator must be a function, called as kl_estimator\(logp, ref_logp\), got str 'k3'"),
    ],
)
def test_what_is_no_estimator_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        kl_term(Penalties(kl_coef=0.1), given)


def test_vtrace_leaves_its_ratio_to_the_correction():
    """With the ratio it is IMPALA's advantage; without, equal rewards have no advantage after the whitening."""
    b = batch(turns=False)
    b = replace(b, rollout_logp=b.old_logp + torch.linspace(-1, 1, b.num_tokens))
    ends = torch.linspace(-1, 1, 6)
    got = E.vtrace(b, ends, gamma=0.9, lam_policy=0.7, rho_max=1.5)
    theirs = vtrace(
        b.token_rewards, b.values, b.old_logp - b.rollout_logp, mask=b.mask, cu_seqlens=b.cu_seqlens, gamma=0.9,
        lam=0.7, rho_max=1.5, bootstrap=ends,
    )  # fmt: skip
    ratio = tis(b.old_logp - b.rollout_logp, max_weight=1.5)
    torch.testing.assert_close(ratio * got.advantages, theirs.advantages)
    torch.testing.assert_close(got.returns, theirs.targets)

    one = Trajectory([5], [7], [True], [-0.7], [0], 1.0, [1.0])
    equal = pack([[one] * 8])
    equal = with_streams(equal, old_logp=torch.linspace(-2, -0.1, 8), values=torch.zeros(8))
    assert not whiten(E.vtrace(equal, torch.zeros(8)).advantages, mask=equal.mask).any()


def test_the_pieces_of_a_truncated_episode_share_its_bootstrap():
    """A perfect critic, V = R + V(end) before the reward and V(end) after it: no advantage, and targets that stay."""
    piece = Trajectory([5], [7, 8], [True, True], [-1.0, -1.0], [0, 0], 1.0, truncated=True)
    b = pack([[piece, replace(piece, continues=True), replace(piece, truncated=False)]])
    v = torch.tensor([1.5, 1.5, 1.5, 1.5, 1.5, 0.5, 1.0, 1.0])  # the third: of the state in which the first piece ends
    ends = bootstraps(v, b)
    assert ends.tolist() == [0.5, 0.5, 0.0]
    got = E.gae(with_streams(b, values=v), ends, lam_policy=1.0)
    assert not got.advantages.any()
    torch.testing.assert_close(got.returns[b.mask], v[b.mask])


def test_a_kl_in_the_reward_does_not_favour_answers_that_do_not_train():
    """Equal rewards and a KL of 1 nat each: no answer is better, whichever of them are masked."""
    made = [Trajectory([5], [7, 8], [on, on], [-1.0, -1.0], [0, 0], 0.5) for on in (True, False, True, False)]
    b = pack([made, made[1:2] * 2])
    b = with_streams(b, old_logp=torch.full((b.num_tokens,), -1.0), ref_logp=torch.full((b.num_tokens,), -1.5))
    assert not with_estimates(b, baseline=group_centered, kl=KlTerm("reward", k1), kl_coef=1.0).advantages.any()
    other = Trajectory([5], [7], [True], [-1.0], [0], 0.5)  # half the KL
    b = pack([[made[0], made[1], other]])
    b = with_streams(b, old_logp=torch.full((b.num_tokens,), -1.0), ref_logp=torch.full((b.num_tokens,), -1.5))
    got = with_estimates(b, baseline=group_centered, kl=KlTerm("reward", k1), kl_coef=1.0).advantages
    torch.testing.assert_close(got, torch.tensor([-0.25, -0.25, 0.0, 0.0, 0.25]))
