"""The plain laws that `PolicyLoss` and `--loss` check at once: what they refuse; no shipped loss is refused."""

from __future__ import annotations

import logging
from functools import partial

import mutants_losses
import pytest
import rows_surrogates
import torch
import torch.nn.functional as F

from rlkit import losses as L
from rlkit.advantages import Gae, discounted_returns, group_centered, group_zscore, max_rl, turn_lens, whiten
from rlkit.loops import estimators
from rlkit.loops.coefficients import kl_term
from rlkit.loops.trial import broken_laws, lacking, try_advantage, try_surrogate
from rlkit.loops.trial_losses import try_divergence, try_kl, try_label_loss, try_pair_loss
from rlkit.loops.updates import PolicyLoss, as_surrogate, clipped, skip_above
from rlkit.losses import kl
from rlkit.losses.distillation import jsd_rows, uld_rows
from rlkit.scripts.grpo import CONSTANTS
from rlkit.segments import broadcast_to_tokens, cumulative, group_mean, mean_per_seq, sum_per_seq
from rlkit.settings import Penalties, Rollouts
from rlkit.testing import Case, laws

ROWS = {row.subject.name: row.subject for row in rows_surrogates.ROWS if laws.on_policy in row.laws}


def of_subject(s):
    """The function of a row as a surrogate of a batch."""

    def surrogate(x, batch):
        have = {
            "log_ratio": x, "logp": batch.old_logp + x, "advantages": batch.advantages, "old_logp": batch.old_logp,
            "rollout_logp": batch.rollout_logp, "behavior_log_ratio": batch.old_logp - batch.rollout_logp + x,
        }  # fmt: skip
        other = {name: (0.3 + 0.1 * torch.sin(batch.targets.float())).where(batch.mask, 0.0) for name in s.streams}
        other |= {name: batch.mask for name in s.streams if s.streams[name].dtype == torch.bool}
        tokens = {name: have.get(name, other[name]) for name in s.streams if s.streams[name].axis == "T"}
        return s(Case(tokens, {}, batch.mask, batch.cu_seqlens, batch.group_ids, 0))

    return surrogate


@pytest.mark.parametrize("name", ROWS)
def test_no_loss_of_the_table_is_refused(name):
    s = ROWS[name]
    assert [x for x in broken_laws(of_subject(s)) if x.refused] == []


SHIPPED = {
    "gspo": partial(L.gspo, clip_low=3e-4, clip_high=4e-4), "cispo": partial(L.cispo, max_weight=5.0),
    "ppo_clip": L.ppo_clip, "dual_clip": partial(L.dual_clip, clip_c=3.0),
    "gmpo": partial(L.gmpo, clip_low=0.4, clip_high=0.4),
    "sapo": partial(L.sapo, tau_pos=1.0, tau_neg=1.05), "clipped": clipped,
    "skip_above": partial(skip_above, surrogate=clipped, max_ratio=20.0),
}  # fmt: skip


def test_every_loss_of_the_flag_is_tried_here():
    assert SHIPPED.keys() >= CONSTANTS.keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_the_losses_of_the_flag_break_no_law(name):
    assert [*broken_laws(as_surrogate(SHIPPED[name]))] == []


def right(log_ratio, batch):
    return -log_ratio.exp() * batch.advantages


def with_sums(log_ratio, batch):  # a sequence ratio without the mask, whose streams are 0 there
    num = sum_per_seq(batch.mask.float(), cu_seqlens=batch.cu_seqlens)
    each = sum_per_seq(log_ratio, cu_seqlens=batch.cu_seqlens) / num
    return -broadcast_to_tokens(each.exp(), cu_seqlens=batch.cu_seqlens) * batch.advantages


WRONG = {
    "climbs": (lambda x, batch: x.exp() * batch.advantages * batch.mask, "on_policy", "is +A, expected -A"),
    "upside down": (lambda x, batch: -(-x).exp() * batch.advantages, "on_policy", "the gradient is +A, expected -A"),
    "double": (lambda x, batch: 2 * x * batch.advantages, "on_policy", "is +2 A, expected -A"),
    "a mean": (lambda x, batch: -(x.exp() * batch.advantages).mean(), "shape", "got shape []: do not average it"),
    "a number": (lambda x, batch: 3.0, "shape", "got float 3.0"),
    "a list": (lambda x, batch: [*x], "shape", "got list"),
    "detached": (lambda x, batch: -(x.exp() * batch.advantages).detach(), "shape", "it has no gradient"),
    "falling weights": (
        lambda x, batch: -x * (-batch.advantages).exp() * batch.mask, "on_policy", "is -2.72 where A = -1"),
    "nan": (lambda x, batch: right(x, batch) * float("nan"), "shape", "is NaN or infinite"),
    "0 / 0": (lambda x, batch: -batch.advantages * x / x.abs(), "mask_isolation", "where all streams are 0"),
    "all tokens count": (lambda x, batch: right(x, batch) / len(x), "mask_isolation", "change the loss of those"),
    "a mean of all": (
        lambda x, batch: -(x - x.mean()).exp() * batch.advantages, "mask_isolation", "change the loss of those"),
}  # fmt: skip
BARE = "clipped(clip_low=.., clip_high=..)"
NAMED = {
    "half": (lambda x, batch: right(x, batch) / 2, {"on_policy": "is -0.5 A, expected -A"}),
    "nothing": (lambda x, batch: 0 * right(x, batch), {"on_policy": "is 0, expected -A"}),
    "signs": (lambda x, batch: -x.exp() * batch.advantages.abs(), {"on_policy": "-1 where A = -1", "descends": "sign"}),
    "a mean of the batch": (
        lambda x, batch: -x.exp() * (batch.advantages - batch.advantages[batch.mask].mean() + 0.1),
        {"on_policy": "", "additive": "what else is in its micro-batch"}),
    "pulled": (lambda x, batch: right(x, batch) + 5 * x**2, {"descends": "has the sign of its advantage"}),
    "CISPO without detach": (  # -A w (1 + x), in which the weight should have been detached
        lambda x, batch: -x.exp().clamp(max=5) * batch.advantages * x,
        {"descends": "at ratio 0.0498 the gradient 0.0996 has the sign of its advantage 1"}),
    "a bare clip": (
        lambda x, batch: -x.exp().clamp(0.8, 1.2) * batch.advantages, {BARE: "a clip without max(-A r, -A clip(r))"}),
    "a bare clip of the log-ratio": (
        lambda x, batch: -x.clamp(-0.2, 0.2) * batch.advantages, {BARE: "(0.37 for A > 0, 2.7 for A < 0)"}),
    "rewards": (
        lambda x, batch: -x.exp() * broadcast_to_tokens(batch.rewards, cu_seqlens=batch.cu_seqlens) * batch.mask,
        {"on_policy": "the gradient does not depend on `batch.advantages`"}),
    "rewards and advantages": (
        lambda x, batch: right(x, batch) * broadcast_to_tokens(batch.rewards.abs(), cu_seqlens=batch.cu_seqlens),
        {"on_policy": "-1.5 where A = 1"}),
    "likelihood": (lambda x, batch: -x * batch.mask, {"on_policy": "does not depend on `batch.advantages`"}),
    "weights that push down": (
        lambda x, batch: -x * (batch.advantages.exp() - 1) * batch.mask, {"on_policy": "-1.72 where A = 1"}),
    "AWR without detach": (
        lambda x, batch: -x.exp() * x * batch.advantages.exp() * batch.mask,
        {"on_policy": "-2.72 where A = 1", "descends": ""}),
    "entropy that is minimized": (
        lambda x, batch: (right(x, batch) - 0.1 * x.exp() * (batch.old_logp + x)) * batch.mask,
        {"on_policy": "", "descends": ""}),
    "a constant in the place of entropy": (
        lambda x, batch: right(x, batch) + 0.1 * (batch.old_logp + x) * batch.mask,
        {"on_policy": "-0.9 where A = 1", "descends": ""}),
    "pulled too soon": (  # in proportion to A, but also where the ratio moved against it
        lambda x, batch: right(x, batch) + 8 * batch.advantages * x**2, {"descends": "has the sign of its advantage"}),
    "drifts": (
        lambda x, batch: right(x, batch) - 0.01 * x**2,
        {"descends": "where the advantage is 0, the gradient at ratios 0.37 and 2.7 pushes the ratio further away"}),
}  # fmt: skip


def to_reference(x, batch):
    return batch.old_logp + x, batch.ref_logp


def ratio_of_turns(x, batch):
    """GSPO's ratio, of each turn: it depends on where turns end, and on no token between them."""
    lens = turn_lens(batch.mask, cu_seqlens=batch.cu_seqlens)
    means = mean_per_seq(x[batch.mask], cu_seqlens=cumulative(lens)).repeat_interleave(lens)
    return L.ppo_clip(torch.zeros_like(x).masked_scatter(batch.mask, means), batch.advantages, mask=batch.mask)


SILENT = {
    "CISPO": lambda x, batch: -x.exp().clamp(max=5).detach() * batch.advantages * x,
    "weights clipped on both sides": lambda x, batch: -x.exp().clamp(0.5, 2).detach() * batch.advantages * x,
    "a penalty": lambda x, batch: right(x, batch) + 0.05 * x**2,
    "k3 to the reference": lambda x, batch: right(x, batch) + 1e-3 * L.k3(*to_reference(x, batch), mask=batch.mask),
    "the unbiased KL": lambda x, batch: (
        right(x, batch) + 1e-3 * x.exp() * L.k1(*to_reference(x, batch), mask=batch.mask)),
    "dropped on both sides": lambda x, batch: right(x, batch) * (x.detach().abs() < 0.5),
    "DRO": lambda x, batch: -x * batch.advantages + 0.05 * x**2,
    "AWR": lambda x, batch: -x * (batch.advantages / 0.5).exp().clamp(max=20) * batch.mask,
    "AWR off-policy": lambda x, batch: -x.exp() * batch.advantages.exp() * batch.mask,
    "RAFT": lambda x, batch: -x * (batch.advantages > 0) * batch.mask,
    "RAFT by rewards": lambda x, batch: (
        -x * (broadcast_to_tokens(batch.rewards, cu_seqlens=batch.cu_seqlens) > 0) * batch.mask),
    "SPO": lambda x, batch: right(x, batch) + batch.advantages.abs() / 0.4 * (x.exp() - 1) ** 2,
    "entropy": lambda x, batch: (right(x, batch) + 0.01 * x.exp() * (batch.old_logp + x)) * batch.mask,
    "entropy in the advantage": lambda x, batch: (
        -x.exp() * (batch.advantages - 0.01 * (batch.old_logp + x).detach()) * batch.mask),
    "a ratio for each turn": ratio_of_turns,
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_a_legitimate_loss_is_silent(name):
    broken = [*broken_laws(SILENT[name])]
    assert [x for x in broken if x.law != "on_policy"] == []
    assert bool(broken) == ("KL" in name or "k3" in name)  # their gradient at ratio 1 is not 0


OPEN = {  # what others clip, mask and bound: none has its clip on the wrong side
    "TRL's delta": lambda r, a: -torch.minimum(r.clamp(max=3.0) * a, r.clamp(0.8, 1.2) * a),
    "dual clip without a lower clip": lambda r, a: -a * torch.where(a < 0, r.clamp(max=2.0), r),
    "dropped above 2": lambda r, a: -a * r * (r.detach() < 2),
    "dropped below 1/2": lambda r, a: -a * r * (r.detach() > 0.5),
    "dropped on both sides": lambda r, a: -a * r * ((r.detach() - 1).abs() < 0.5),
    "clamped from below": lambda r, a: -a * r.clamp(min=0.8),
    "clamped from above": lambda r, a: -a * r.clamp(max=1.28),
    "DeepSeek's mask of A < 0": lambda r, a: -a * r * ~((a < 0) & (r.detach() < 0.5)),
    "A > 0 alone": lambda r, a: -a.clamp(min=0) * r,
    "a soft clip": lambda r, a: -a * torch.tanh(r - 1),
    "a quadratic penalty": lambda r, a: -a * r + a.abs() / 0.4 * (r - 1) ** 2,
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_a_legitimate_bound_is_not_on_the_wrong_side(name):
    broken = broken_laws(lambda x, batch: OPEN[name](x.exp(), batch.advantages))
    assert not [law for law, *_ in broken if law.startswith("clipped")]


@pytest.mark.parametrize("bounds", [(0.8, 1.2), (0.8, 1.28), (0.9997, 1.0004), (0.1, 10.0)])
def test_a_clip_on_the_wrong_side_is_named(bounds, caplog):
    def token(r, a):
        return torch.minimum(-a * r, -a * r.clamp(*bounds))

    def of_sequences(log_ratio, batch):
        where = {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens}
        return token(L.seq_log_ratio(log_ratio, **where).exp(), batch.advantages)

    def detached(log_ratio, advantages):
        r = log_ratio.detach().exp()
        keep = torch.where(advantages > 0, r >= bounds[0], r <= bounds[1])
        return -r * keep * advantages * log_ratio

    for loss in (lambda log_ratio, advantages: token(log_ratio.exp(), advantages), of_sequences, detached):
        PolicyLoss(loss)
        (said,) = [record.getMessage() for record in caplog.records]
        assert "the clip is on the wrong side: the gradient is 0 where the ratio moved against the advantage" in said
        assert "(law clipped(clip_low=.., clip_high=..))" in said
        caplog.clear()


@pytest.mark.parametrize("name", ["ratio", "importance_weights", "Ratios", "logp", "log_probs", "new_logp"])
def test_a_first_argument_that_is_named_as_something_else_is_refused(name):
    for loss in (eval(f"lambda {name}, batch: -{name}"), partial(eval(f"lambda {name}, advantages: -{name}"))):
        with pytest.raises(ValueError, match=f"would get log_ratio = logp - old_logp as `{name}`: name it log_ratio"):
            PolicyLoss(loss, loss_unchecked=True)


def test_other_names_of_the_log_ratio_are_taken():
    for name in ("log_ratio", "log_ratios", "x", "delta", "log_w", "logratio", "log_weights", "logp_ratio"):
        as_surrogate(eval(f"lambda {name}, batch: {name}"))


@pytest.mark.parametrize("name", WRONG)
def test_what_trains_on_something_else_is_refused(name):
    function, law, how = WRONG[name]
    with pytest.raises(ValueError, match=f"law {law}") as refused:
        PolicyLoss(function)
    said = str(refused.value)
    assert how in said
    assert said.startswith("test_trial.py:<lambda>: ")
    assert "`rlkit.testing.check_loss` has the counterexample; `loss_unchecked` takes it as it is" in said
    assert PolicyLoss(function, loss_unchecked=True).surrogate is function


@pytest.mark.parametrize("name", NAMED)
def test_what_a_loss_may_do_is_named(name, caplog):
    function, laws = NAMED[name]
    with caplog.at_level(logging.WARNING):
        PolicyLoss(function)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(laws), said
    for line, (law, how) in zip(said, laws.items(), strict=True):
        assert line.startswith("test_trial.py:<lambda>: ")
        assert how in line
        assert f"(law {law})" in line


def test_the_seeds_of_gpus_stay_the_users(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    PolicyLoss(right)
    assert seeds == []


def test_right_losses_pass(caplog):
    for function in (right, with_sums, lambda log_ratio, advantages, *, mask: -log_ratio.exp() * advantages * mask):
        PolicyLoss(function)
    assert not caplog.records


def test_an_exception_names_the_line_of_the_loss():
    def broken(log_ratio, batch):
        return log_ratio.advantages

    with pytest.raises(ValueError, match=r"broken failed on a batch of 18 tokens: AttributeError: .*py, line"):
        PolicyLoss(broken)


def test_a_random_loss_is_not_compared_with_itself(caplog):
    def dropped(log_ratio, batch):
        return right(log_ratio, batch) * (torch.rand_like(log_ratio) > 0.5) * 2

    before = torch.random.get_rng_state()
    PolicyLoss(dropped)
    assert torch.equal(torch.random.get_rng_state(), before)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "two calls on one batch give different losses (it is random, or keeps a state)" in said
    assert "(law pure)" in said


MUTANTS = [m for m in mutants_losses.MUTANTS if m.original == "losses.ppo_clip"]
NOT_AT_ONCE = {  # in one batch of 18 tokens, and in streams that are 0 where the mask is False
    "coefficient", "mask_isolation", "masked_is_zero", "pure", "dtypes", "finite",
}  # fmt: skip


FOUND = [m for m in MUTANTS if not {m.law, m.mistake} & NOT_AT_ONCE]


@pytest.mark.parametrize("mutant", FOUND, ids=lambda m: m.mistake)
def test_known_mistakes_are_found_at_once(mutant):
    def surrogate(x, batch):
        return mutant.fn(log_ratio=x, advantages=batch.advantages, mask=batch.mask, clip_high=0.28)

    assert [*broken_laws(surrogate)]


ESTIMATORS = {
    True: ["gae", "vapo", "td_lambda", "n_step", "vtrace", "retrace"],
    False: ["returns", "reinforce_pp", "turn_returns", "gigpo"],
}  # fmt: skip


@pytest.mark.parametrize(("values", "name"), [(v, name) for v, names in ESTIMATORS.items() for name in names])
def test_no_estimator_of_the_flag_is_refused_or_named(values, name, caplog):
    try_advantage(getattr(estimators, name), values=values)
    assert not caplog.records


def test_wrong_estimators_are_refused_or_named(caplog):
    def of(function):
        try:
            try_advantage(function, values=False)
        except ValueError as error:
            return str(error)
        return [record.getMessage() for record in caplog.records][-1]

    one = estimators.returns
    assert "must return rlkit.advantages.Gae" in of(lambda batch, bootstrap: one(batch, bootstrap).advantages)
    assert "got [7]" in of(lambda batch, bootstrap: Gae(batch.rewards, batch.rewards))
    zeros = lambda batch, bootstrap: Gae(batch.token_rewards / batch.token_rewards, None)
    assert "are NaN or infinite" in of(zeros)
    assert "failed on a batch of 18 tokens: AttributeError" in of(lambda batch, bootstrap: batch.rewads)
    ordered = lambda batch, bootstrap: Gae(batch.token_rewards + torch.arange(batch.num_tokens), None)
    assert "depends on the order of the groups" in of(ordered)


def centred(batch, bootstrap):
    own = broadcast_to_tokens(group_centered(batch.rewards, group_ids=batch.group_ids), cu_seqlens=batch.cu_seqlens)
    return Gae(own.where(batch.mask, 0.0), own)


def at_even_places(batch, bootstrap):  # .mean(0) instead of .mean(1, keepdim=True)
    n = len(batch.rewards)
    r = torch.nn.functional.pad(batch.rewards, (0, n % 2)).view(-1, 2)
    own = broadcast_to_tokens((r - r.mean(0)).flatten()[:n], cu_seqlens=batch.cu_seqlens)
    return Gae(own, own)


def relative(batch, bootstrap):  # the same for R and -R, where rewards are not 0 or 1
    own = broadcast_to_tokens(max_rl(batch.rewards, group_ids=batch.group_ids), cu_seqlens=batch.cu_seqlens)
    return Gae(own, own)


def of_episodes(baseline):
    def estimator(batch, bootstrap):
        own = broadcast_to_tokens(baseline(batch.rewards, group_ids=batch.group_ids), cu_seqlens=batch.cu_seqlens)
        return Gae(own.where(batch.mask, 0.0), own)

    return estimator


def reward_to_go(batch, *, gamma=1.0, all_tokens=False):
    mask = torch.ones_like(batch.mask) if all_tokens else batch.mask
    return discounted_returns(
        batch.token_rewards, mask=mask, cu_seqlens=batch.cu_seqlens, gamma=0.9 if all_tokens else gamma
    )


def shifted(batch, by):
    """The advantages of each answer's sampled tokens, one place later or earlier."""
    out = torch.zeros_like(batch.token_rewards)
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        at = start + batch.mask[start:end].nonzero().flatten()
        given = torch.full_like(out[at], float(batch.rewards[batch.cu_seqlens[:-1].tolist().index(start)]))
        out[at] = torch.cat([torch.zeros(1), given[:-1]] if by > 0 else [given[1:], torch.zeros(1)])
    return out


SIGNS = {
    "centred": (centred, ""),
    "relative": (relative, ""),
    "a mean over the wrong axis": (at_even_places, "depends on the order of the groups in the batch (law permutation)"),
    "squares": (lambda *x: Gae(centred(*x)[0] ** 2, centred(*x)[1]), "the same for rewards R and -R, and never neg"),
    "sizes": (lambda *x: Gae(centred(*x)[0].abs(), centred(*x)[1]), "the same for rewards R and -R, and never neg"),
    "a positive part": (lambda *x: Gae(centred(*x)[0].clamp(min=0), centred(*x)[1]), ""),
    "large groups alone": (
        lambda batch, _: Gae(centred(batch, _)[0] * (batch.group_ids == 0).all(), centred(batch, _)[1]), ""),
    "the teacher's log-probs": (lambda batch, _: Gae(batch.ref_logp - batch.old_logp, batch.ref_logp * 1), ""),
    "falls": (lambda *x: Gae(-centred(*x)[0], centred(*x)[1]), "fall where the rewards rise (law rewards_r"),
    "falls, of tokens": (lambda batch, _: Gae(-batch.token_rewards, -batch.token_rewards), "fall where"),
    "zeros": (lambda batch, _: Gae(batch.token_rewards * 0, batch.token_rewards * 1), "its advantages are 0"),
    "ones": (lambda batch, _: Gae(torch.ones_like(batch.token_rewards), batch.token_rewards * 1), "not depend on the"),
    "surprise": (lambda batch, _: Gae(-batch.rollout_logp, batch.token_rewards * 1), "do not depend on the rewards"),
    "the baseline": (of_episodes(group_mean), "its advantages are equal for all answers to a prompt"),
    "its negative": (of_episodes(lambda r, **ids: 3 - group_mean(r, **ids)), "its advantages fall where the rewards"),
    "z-scores": (of_episodes(group_zscore), ""),
    "over the batch": (of_episodes(lambda r, group_ids: r - r.mean()), ""),
    "best and worst alone": (
        of_episodes(lambda r, group_ids: torch.where((r == r.max()) | (r == r.min()), r - r.median(), 0.0)), ""),
    "tokens of low probability alone": (
        lambda *x: Gae(centred(*x)[0] * (x[0].rollout_logp < -0.8), centred(*x)[1]), ""),
    "shifted": (lambda batch, _: Gae(shifted(batch, 1), batch.token_rewards * 1), "the first sampled token of every"),
    "shifted back": (lambda batch, _: Gae(shifted(batch, -1), batch.token_rewards * 1), "the last sampled token of"),
    "whitened": (
        lambda batch, _: Gae(whiten(reward_to_go(batch), mask=batch.mask), batch.token_rewards * 1), ""),
    "a discount": (lambda batch, _: Gae(reward_to_go(batch, gamma=0.9), batch.token_rewards * 1), ""),
    "a discount of all tokens": (
        lambda batch, _: Gae(reward_to_go(batch, all_tokens=True), batch.token_rewards * 1), "tokens that the policy"),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNS)
@pytest.mark.parametrize("values", [True, False])
def test_advantages_that_fall_with_the_rewards_or_are_zeros_are_named(name, values, caplog):
    function, expected = SIGNS[name]
    try_advantage(function, values=values)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(expected), said
    assert expected in "".join(said)


def of_gae(change):
    """An estimator of the advantages, returns and values of GAE."""
    return lambda batch, bootstrap: Gae(*change(*estimators.gae(batch, bootstrap), batch.values))


CRITIC = {  # what a critic is taught
    "exchanged": (of_gae(lambda a, g, v: (g, a)), "its returns fall where the critic's values rise"),
    "the advantage twice": (of_gae(lambda a, g, v: (a, a)), "its returns fall where the critic's values rise"),
    "the critic itself": (of_gae(lambda a, g, v: (a, v)), "its returns do not depend on the rewards"),
    "a value added": (of_gae(lambda a, g, v: (g + v, g)), "its advantages rise with the critic's values"),
    "no baseline": (of_gae(lambda a, g, v: (g, g)), ""),
    "halved": (of_gae(lambda a, g, v: (a / 2, g)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CRITIC)
def test_returns_and_advantages_of_a_critic_are_named_by_what_is_wrong(name, caplog):
    function, expected = CRITIC[name]
    try_advantage(function, values=True)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(expected), said
    assert expected in "".join(said)


def test_the_first_token_alone_is_named(caplog):
    def first(batch, _):
        advantages = torch.zeros_like(batch.token_rewards)
        advantages[batch.cu_seqlens[:-1]] = batch.rewards
        return Gae(advantages.where(batch.mask, 0.0), None)

    try_advantage(first, values=False)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the advantage of an answer's first sampled token only" in said


CREDIT = {  # without a critic; with one, GAE with lambda 0 is such an estimator
    "the reward of each token": lambda batch, _: Gae(batch.token_rewards * 1, None),
    "a forward sum": lambda batch, _: Gae(forward_sums(batch), None),
    "the reward of each token, whitened": lambda batch, _: Gae(whiten(batch.token_rewards, mask=batch.mask), None),
    "a forward sum, whitened": lambda batch, _: Gae(whiten(forward_sums(batch), mask=batch.mask), None),
    "the final reward alone, whitened": lambda batch, _: Gae(whiten(final_rewards(batch), mask=batch.mask), None),
}


def final_rewards(batch):
    out = torch.zeros_like(batch.token_rewards)
    for i, (start, end) in enumerate(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)):
        out[start + int(batch.mask[start:end].nonzero().max())] = batch.rewards[i]
    return out


def forward_sums(batch):
    pieces = [x.cumsum(0) for x in batch.token_rewards.split(batch.cu_seqlens.diff().tolist())]
    return torch.cat(pieces)


@pytest.mark.parametrize("name", CREDIT)
def test_a_final_reward_that_earlier_tokens_do_not_get_is_named(name, caplog):
    try_advantage(CREDIT[name], values=False)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the final reward changes the advantage of an answer's last token only" in said
    caplog.clear()
    try_advantage(partial(estimators.gae, lam_policy=0.0, gamma=0.5), values=True)
    assert not caplog.records


LEAKS = {
    "whitened over all tokens": lambda x, batch: (x - x.mean()) / (x.std() + 1e-6),
    "over the number of all tokens": lambda x, batch: x / batch.num_tokens,
    "over the length with all tokens": lambda x, batch: x / broadcast_to_tokens(
        batch.cu_seqlens.diff().float(), cu_seqlens=batch.cu_seqlens),
    "at the last token of a sequence": lambda x, batch: torch.zeros_like(x).index_copy(
        0, batch.cu_seqlens[1:].long() - 1, batch.rewards),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAKS)
def test_an_estimator_that_reads_tokens_of_the_environment_is_refused(name, caplog):
    def estimator(batch, bootstrap):
        return Gae(LEAKS[name](centred(batch, bootstrap)[0], batch), batch.token_rewards * 1)

    with pytest.raises(ValueError, match=r"tokens at the end of an answer .*\(law mask_isolation\)"):
        try_advantage(estimator, values=False)
    assert not caplog.records


def test_an_estimator_that_is_random_is_not_compared_with_itself(caplog):
    before = torch.random.get_rng_state()
    noisy = lambda batch, bootstrap: Gae(centred(batch, bootstrap)[0] + torch.randn(batch.num_tokens), None)
    try_advantage(noisy, values=False)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "two calls on one batch give different advantages" in said
    assert torch.equal(torch.random.get_rng_state(), before)


def test_advantages_with_a_gradient_are_refused():
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(
        ValueError, match=r"its advantages have a gradient, which nothing trains: return advantages\.det"
    ):
        try_advantage(lambda *x: Gae(scale * centred(*x)[0], None), values=False)


def corrected(log_ratio, batch):
    return (batch.old_logp - batch.rollout_logp).exp().clamp(max=2) * right(log_ratio, batch)


def against_the_engine(log_ratio, batch):
    return -(log_ratio + batch.old_logp - batch.rollout_logp).exp() * batch.advantages


@pytest.mark.parametrize("loss", [corrected, against_the_engine])
def test_a_correction_that_the_run_makes_as_well_is_named(loss, caplog):
    PolicyLoss(loss)
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        "the loss depends on `batch.rollout_logp`, and the run weighs tokens by old_logp over rollout_logp as" in said
    )
    caplog.clear()
    PolicyLoss(loss, correction=torch.ones_like)
    PolicyLoss(right)
    assert not caplog.records


def test_advantages_of_the_engines_ratio_are_named_where_the_run_weighs_by_it(caplog):
    traced = lambda batch, bootstrap: estimators.vtrace(batch, bootstrap, rho_max=2.0)
    try_advantage(traced, values=True, weighs=False)
    try_advantage(lambda *x: Gae(centred(*x)[0] * (x[0].rollout_logp < -0.8), None), values=False, weighs=True)
    assert not caplog.records
    try_advantage(traced, values=True, weighs=True)
    assert "the advantages depend on `batch.rollout_logp`" in caplog.records[-1].getMessage()


MINI, KL = Rollouts(minibatches=2), Penalties(kl_coef=0.1)
LACKS = {  # (rollouts, penalties, of a critic's run, of its estimator): the streams that are there
    "grpo": ((Rollouts(), Penalties(), False, False), {"advantages"}),
    "grpo, several updates": ((MINI, Penalties(), False, False), {"advantages", "old_logp"}),
    "grpo, KL in the loss": ((Rollouts(), KL, False, False), {"advantages", "ref_logp"}),
    "grpo, KL in the reward": (
        (Rollouts(), Penalties(kl_coef=0.1, kl_in="reward"), False, True), {"old_logp", "ref_logp"}),
    "grpo, top-p": ((Rollouts(top_p=0.9), Penalties(), False, False), {"advantages", "kept_mass"}),
    "grpo's estimator, top-p": ((Rollouts(top_p=0.9), Penalties(), False, True), set()),
    "ppo": ((Rollouts(), Penalties(), True, False), {"advantages", "values", "returns", "old_logp"}),
    "ppo's estimator": ((Rollouts(), Penalties(), True, True), {"values", "old_logp"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKS)
def test_a_stream_that_the_run_does_not_have_is_refused_with_what_gives_it(name):
    (rollouts, penalties, critic, estimator), there = LACKS[name]
    lacks = lacking(rollouts, penalties, critic=critic, scored=critic, estimator=estimator)
    streams = {"old_logp", "ref_logp", "kept_mass", "values", "returns", "advantages"}
    assert streams - lacks == there
    for stream in streams - {"advantages"}:

        def loss(log_ratio, batch, stream=stream):
            return right(log_ratio, batch) + 0 * getattr(batch, stream)

        def advantage(batch, bootstrap, stream=stream):
            x = centred(batch, bootstrap)[0] + 0 * getattr(batch, stream)
            return Gae(x, batch.token_rewards * 1)

        run = partial(try_advantage, advantage, values=critic) if estimator else partial(try_surrogate, loss, loss)
        if stream in there:
            run(lacks=lacks)
            continue
        with pytest.raises(ValueError, match=f"needs `batch.{stream}`, which this run does not have: it requires "):
            run(lacks=lacks)


def test_a_stream_that_is_read_where_it_is_there_is_not_needed():
    def loss(log_ratio, batch):
        return right(log_ratio, batch) * (1 if batch.old_logp is None else batch.old_logp.exp())

    try_surrogate(loss, loss, lacks={"old_logp"})


@pytest.mark.parametrize("change", ["neg_", "zero_", "abs_"])
def test_a_function_that_changes_what_it_is_given_is_refused(change):
    def loss(log_ratio, advantages, mask):
        getattr(advantages, change)()
        return -log_ratio.exp() * advantages * mask

    def hides(log_ratio, batch):
        batch.mask[:] = False
        return -log_ratio.exp() * batch.advantages

    def estimator(batch, bootstrap):
        getattr(batch.rewards, change)()
        return Gae(batch.rewards * 1, batch.rewards * 1)

    with pytest.raises(ValueError, match="it changes `advantages` in place, which others read: work on a copy"):
        PolicyLoss(loss)
    with pytest.raises(ValueError, match="it changes `mask` in place"):
        PolicyLoss(hides)
    with pytest.raises(ValueError, match="it changes `rewards` in place"):
        try_advantage(estimator, values=True)


def test_advantages_are_floats():
    with pytest.raises(ValueError, match=r"a float per token \[18\] each, got \[18\] of torch.int64"):
        try_advantage(lambda batch, _: Gae(batch.targets * 1, batch.targets * 1), values=True)


KL_NAMES = [x for x in kl.__all__ if x not in ("kl_from_logits", "kl_in_reward", "unbiased_kl")]  # of the two log-probs
KL_SILENT = {"loss": [x for x in KL_NAMES if x != "k1"], "reward": KL_NAMES}  # k1 has no gradient on average
OWN_KL = {  # (refused or named in the loss, in the reward)
    "k1": (lambda p, q: p - q, "in the loss has gradient 0 on average", ""),
    "k1 in bits": (lambda p, q: (p - q) / 0.6931, "in the loss has gradient 0 on average", ""),
    "k1 upside down": (lambda p, q: q - p, "in the loss has gradient 0", "has a negative mean over samples"),
    "k3 of detached log-probs": (lambda p, q: L.k3(p.detach(), q) + 0 * p, "has gradient 0 on average", ""),
    "k3 that is detached": (lambda p, q: L.k3(p, q).detach(), "it has no gradient with respect to that", ""),
    "away": (lambda p, q: 2 * L.k3(p, q).detach() - L.k3(p, q), "pushes the policy away from the reference", ""),
    "exchanged": (lambda p, q: (p - q).exp() - 1 - (p - q), *["with logp and ref_logp exchanged"] * 2),
    "exchanged in k3": (lambda p, q: L.k3(q, p), *["ref_logp has a gradient and logp has none: the order"] * 2),
    "kl_div": (lambda p, q: F.kl_div(p, q, log_target=True, reduction="none"), *["weighs each token by its proba"] * 2),
    "kl_div, exchanged": (
        lambda p, q: F.kl_div(q, p, log_target=True, reduction="none"), *["weighs each token by its probability"] * 2),
    "both, weighted": (lambda p, q: (p.exp() - q.exp()) * (p - q), *["weighs each token by its probability"] * 2),
    "mean 0": (lambda p, q: (q - p).exp() - 1, "", "has mean 0 over samples of the policy"),  # the slope is that of k3
    "normalised": (lambda p, q: (p - q) / (p - q).abs().sum().clamp(min=1e-6), *["depends on the other tokens"] * 2),
    "centred": (lambda p, q: L.k3(p, q) - L.k3(p, q).mean(), *["depends on the other tokens of the batch"] * 2),
    "in place": (lambda p, q: q.sub_(p.detach()).neg() + 0 * p, *["changes its arguments in place"] * 2),
    "0 / 0": (lambda p, q: (p - q) ** 2 / (p - q).abs(), *["its loss is NaN or infinite"] * 2),  # as a run begins
    "twice k2": (lambda p, q: (p - q) ** 2, "", ""),
    "unbiased": (lambda p, q: (p - p.detach()).exp() * (p - q), "", ""),
    "unbiased, of k3": (lambda p, q: (p - p.detach()).exp() * L.k3(p, q), "", ""),
    "probabilities in k3": (
        lambda p, q: L.k3(p.exp(), q.exp()), *["depends on the difference of the probabilities"] * 2),
    "probabilities in k2": (
        lambda p, q: L.k2(p.exp(), q.exp()), *["depends on the difference of the probabilities"] * 2),
    "the ratio of probabilities": (lambda p, q: q.exp() / p.exp() - 1 - (q - p), "", ""),
    "the other direction": (lambda p, q: (q - p).exp().detach() * (q - p), "", ""),
    "the positive part": (lambda p, q: (p - q).clamp(min=0), "", ""),
    "clamped": (lambda p, q: L.k3(p, q).clamp(max=10), "", ""),
}  # fmt: skip


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in KL_SILENT.items() for name in names])
def test_no_kl_estimator_of_the_library_is_named_at_its_place(place, name, caplog):
    try_kl(getattr(L, name), place=place)
    assert not caplog.records


@pytest.mark.parametrize("name", OWN_KL)
@pytest.mark.parametrize("place", ["loss", "reward", "advantage"])
def test_kl_estimators_that_measure_something_else_are_refused_or_named(name, place, caplog):
    function, in_loss, elsewhere = OWN_KL[name]
    expected, refused = in_loss if place == "loss" else elsewhere, ""
    try:
        try_kl(function, place=place)
    except ValueError as error:
        refused = str(error)
    said = [refused] * bool(refused) + [record.getMessage() for record in caplog.records]
    assert len(said) == bool(expected), said
    assert expected in "".join(said)
    must = ("gradient", "away", "in place", "NaN")
    assert bool(refused) == any(x in expected for x in must)


def test_a_kl_estimator_is_tried_by_the_loops(caplog):
    with pytest.raises(ValueError, match="in the loss has gradient 0 on average, as k1 does"):
        kl_term(KL, lambda logp, ref_logp: logp - ref_logp)
    kl_term(Penalties(kl_coef=0.1, kl_in="reward"), lambda logp, ref_logp: logp - ref_logp)
    assert not caplog.records


def test_losses_that_change_their_arguments_are_refused():
    def swapped(chosen, rejected):
        rejected.detach().neg_()
        return -F.logsigmoid(chosen - rejected)

    for run in (try_pair_loss, try_divergence):
        with pytest.raises(ValueError, match="it changes its arguments in place"):
            run(swapped if run is try_pair_loss else lambda q, p: (p.neg_() * q).sum(-1))


DIVERGENCES = {
    "reverse": (lambda q, p: (q.exp() * (q - p)).sum(-1), ""),
    "forward": (lambda q, p: (p.exp() * (p - q)).sum(-1), ""),
    "jsd": (jsd_rows(0.3), ""), "uld": (uld_rows, ""), "squares": (lambda q, p: ((q - p) ** 2).sum(-1), ""),
    "total variation": (lambda q, p: (q.exp() - p.exp()).abs().sum(-1) / 2, ""),
    "reverse, a mean": (lambda q, p: (q.exp() * (q - p)).mean(-1), "averages over the vocabulary"),
    "kl_div, a mean": (
        lambda q, p: F.kl_div(q, p, log_target=True, reduction="none").mean(-1), "averages over the vocabulary"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_that_is_averaged_over_the_vocabulary_is_named(name, caplog):
    function, expected = DIVERGENCES[name]
    try_divergence(function)
    assert len(caplog.messages) == bool(expected)
    assert expected in "".join(caplog.messages)


PAIRS = {
    "dpo": L.dpo, "ipo": L.ipo, "hinge": L.hinge, "exo_pair": L.exo_pair, "kto": L.kto, "bco_pair": L.bco_pair,
    "nca_pair": L.nca_pair, "sppo_hard": L.sppo_hard, "apo_down": L.apo_down, "simpo": L.simpo, "aot": L.aot,
    "discopop": L.discopop, "smoothed": partial(L.dpo, label_smoothing=0.3),
    "robust_dpo": partial(L.robust_dpo, label_smoothing=0.3),
    "DPO-positive": lambda c, r, *, beta: L.dpo(c - 5 * torch.relu(-c), r, beta=beta),
    "Jensen-Shannon": lambda c, r, *, beta: L.dpo(L.js_score(c), L.js_score(r), beta=beta),
    "bradley_terry": lambda c, r, *, beta: L.bradley_terry(c, r, center_coef=beta),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0, 10.0])
def test_no_pair_loss_of_the_library_is_named(name, beta, caplog):
    try_pair_loss(partial(PAIRS[name], beta=beta))
    assert not caplog.records or (name, beta) == ("discopop", 0.01)  # whose bump is 5 nats wide then


def test_pair_losses_that_do_not_fall_with_the_margin_are_named(caplog):
    logistic = torch.nn.functional.logsigmoid
    for loss, expected in (
        (lambda chosen, rejected: logistic(chosen - rejected), "rises with the log-ratio of the chosen response less"),
        (
            lambda chosen, rejected: -logistic(chosen.detach() - rejected),
            "no gradient with respect to the log-ratio of t",
        ),
        (lambda chosen, rejected: -logistic(chosen - rejected.detach()), "log-ratio of the rejected response"),
        (lambda chosen, rejected: -chosen - rejected, "falls as the log-ratio of the rejected response rises"),
        (lambda chosen, rejected: (chosen - rejected).abs(), "does not fall with the log-ratio of the chosen"),
        (lambda chosen, rejected: 0 * (chosen - rejected), "does not fall with the log-ratio of the chosen"),
    ):
        try_pair_loss(loss)
        (said,) = [record.getMessage() for record in caplog.records]
        assert expected in said
        caplog.clear()


def test_losses_of_labels_that_ignore_the_label_are_named(caplog):
    def bco(x, d, *, kl, beta, desirable_weight, undesirable_weight):
        return -torch.nn.functional.logsigmoid(torch.where(d, beta * x - kl, kl - beta * x))

    options = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
    for beta in (0.01, 0.1, 1.0, 10.0):
        for loss in (L.kto_unpaired, bco):
            try_label_loss(loss, beta=beta, **options)
        try_label_loss(L.kto_unpaired, beta=beta, desirable_weight=1.0, undesirable_weight=0.0)
        try_label_loss(lambda x, d, *, beta, **_: 1 - torch.sigmoid(torch.where(d, x, -x) * beta), beta=beta)
    assert not caplog.records
    for given, expected in (
        (lambda x, d, **_: -x, "it ignores `desirable`"),
        (lambda x, d, *, beta, kl, **_: 1 - torch.sigmoid(beta * (x - kl)), "it ignores `desirable`"),
        (lambda x, d, **_: torch.where(d, -x, -2 * x), "rises with the log-ratio of desirable responses"),
        (
            lambda x, d, **_: torch.where(d, -2 * x, -x),
            "falls as the log-ratio of responses that are not desirable rises",
        ),
        (lambda x, d, **_: torch.where(d, x, -x), "rises with the log-ratio of desirable responses"),
        (
            lambda x, d, *, kl, beta, **_: 1 - torch.sigmoid(torch.where(d, x + kl, -kl - x) * beta),
            "it adds `kl`, which is to be subtracted",
        ),
        (
            lambda x, d, *, kl, beta, **_: 1 - torch.sigmoid(torch.where(d, x - kl, -kl - x) * beta),
            "it adds `kl`, which is to be subtracted",
        ),
    ):
        try_label_loss(given, beta=0.1, **options)
        (said,) = [record.getMessage() for record in caplog.records]
        assert expected in said
        caplog.clear()
