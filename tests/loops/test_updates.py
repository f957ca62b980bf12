"""What tokens weigh, by counting; and the update under other surrogates and means than PPO's clip over all tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.updates import (
    PolicyLoss,
    clip_shares,
    clipped,
    grpo_update,
    has_gradient_without_advantage,
    per_episode,
    per_length,
    per_prompt,
    per_token,
    with_gradient,
)  # fmt: skip
from rlkit.losses import cispo, dppo, dro, gspo, ratio_stats
from rlkit.metrics import finalize
from rlkit.model.forward import Policy, prepare_model
from rlkit.packing import pack, with_streams
from rlkit.settings import Optim, Rollouts
from rlkit.types import LogProbs, Trajectory


def sample(prompt, n, *, trained=True, **changes):
    ids = [40 + 3 * i + n for i in range(n)]
    return replace(Trajectory(prompt, ids, [trained] * n, [-5.0] * n, [0] * n), **changes)


def groups():
    """Two prompts; of the first one an episode in two pieces, and one that nothing is trained of."""
    first = [sample([5, 6], 1), sample([5, 6], 2), sample([5, 6], 3, continues=True), sample([5, 6], 4, trained=False)]
    return [first, [sample([7], 5)]]


@pytest.mark.parametrize(
    ("weigh", "per_sequence"),
    [
        (per_token, [1 / 11, 1 / 11, 1 / 11, 0, 1 / 11]),
        (per_episode, [1 / 3, 1 / 15, 1 / 15, 0, 1 / 15]),
        (per_prompt, [1 / 12, 1 / 12, 1 / 12, 0, 1 / 10]),
        (partial(per_length, max_length=8), [1 / 24, 1 / 24, 1 / 24, 0, 1 / 24]),
        (partial(per_length, max_length=2), [1 / 6, 1 / 6, 1 / 6, 0, 1 / 6]),  # of a turn
    ],
)
def test_weights_by_counting(weigh, per_sequence):
    batch = pack(groups())
    true = [w for w, n in zip(per_sequence, [1, 2, 3, 4, 5], strict=True) for _ in range(n)]
    assert weigh(batch).tolist() == pytest.approx(true, rel=1e-6)
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    assert weigh(nothing).eq(0).all()


def by_hand(log_ratio, advantages, lens, loss):
    """The mean over sequences of the mean over their tokens, in fp64, token by token."""
    total, end = 0.0, 0
    for n in lens:
        x, a = log_ratio[end : end + n], advantages[end]
        if loss == "gspo":
            s = (sum(x) / n).exp()
            each = [torch.maximum(-a * s, -a * s.clamp(0.9, 1.1))] * n
        elif loss == "dro":
            each = [-a * y + 0.4 * y * y for y in x]
        else:
            each = [-y.detach().exp().clamp(max=1.05) * a * y for y in x]
        total, end = total + sum(each) / n / len(lens), end + n
    return total


SURROGATES = {
    "gspo": lambda x, b: gspo(x, b.advantages, mask=b.mask, cu_seqlens=b.cu_seqlens, clip_low=0.1, clip_high=0.1),
    "cispo": lambda x, b: cispo(x, b.advantages, max_weight=1.05),
    "dro": lambda x, b: dro(x, b.advantages, beta=0.8),  # has a gradient where the advantage is 0, too
}


@pytest.mark.parametrize("max_tokens", [8, 1000])
@pytest.mark.parametrize("loss", SURROGATES)
def test_the_update_takes_any_surrogate_and_mean(loss, max_tokens):
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
    model, lens = prepare_model(tiny_model(tiny_tokenizer(), **sizes)), [3, 1, 5, 2]
    policy = Policy(model)
    batch = pack([[sample([5, 6], n) for n in lens[:2]], [sample([7, 8], n) for n in lens[2:]]])
    advantages = torch.tensor([1.0, -1.0, 0.0, 2.0]).repeat_interleave(torch.tensor(lens))
    logp = policy(batch).logp
    old_logp = logp.detach() - 0.2 * torch.randn(sum(lens), generator=torch.Generator().manual_seed(0))
    batch = with_streams(batch, advantages=advantages, old_logp=old_logp, rollout_logp=old_logp)
    weights = list(model.parameters())
    truth = by_hand((logp.double() - old_logp.double()), advantages.double(), lens, loss)
    true = torch.autograd.grad(truth, weights)
    before = [w.detach().clone() for w in weights]
    metrics = grpo_update(
        batch, policy=policy, optimizer=torch.optim.SGD(weights), loss=PolicyLoss(SURROGATES[loss], per_episode),
        rollouts=Rollouts(), optim=Optim(max_norm=1e9, max_tokens=max_tokens), lr=1.0, kl_coef=0.0, entropy_coef=0.0,
        seed=0,
    )  # fmt: skip
    for old, w, want in zip(before, weights, true, strict=True):
        assert (old - w - want).abs().max() <= 2e-4 * want.abs().max() + 1e-6
    assert finalize(metrics)["loss"] == pytest.approx(truth.item(), rel=1e-5), "in one micro-batch or several"


class Table(torch.nn.Module):
    """A policy of one state: the logits of 8 tokens. `table(batch)` gives the log-probs of the batch's targets."""

    mesh, device = None, torch.device("cpu")

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    @property
    def model(self):
        return self

    def forward(self, batch):
        logp = self.logits.log_softmax(-1)
        return LogProbs(logp[batch.targets], -(logp.exp() * logp).sum().expand(batch.targets.shape))


def kl_gradient(drift, rollouts):
    """The gradient that a step takes, summed over all 8 tokens by their probability under the sampler, and the true one
    of KL(policy || reference). The sampler is older by `drift`."""
    logits, ref, off = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table, sampled = Table(logits.clone()), (logits + drift * off).log_softmax(-1)
    batch = pack([[Trajectory([5], [i], [True], [-1.0], [0]) for i in range(8)]])
    zero = torch.zeros_like(sampled)
    batch = replace(batch, rollout_logp=sampled, ref_logp=ref.log_softmax(-1), advantages=zero, token_rewards=zero)
    grpo_update(
        batch, policy=table, optimizer=torch.optim.SGD(table.parameters()), rollouts=rollouts, lr=1.0, seed=0,
        optim=Optim(max_norm=1e9), loss=PolicyLoss(clipped, lambda b: b.rollout_logp.exp()), kl_coef=1.0,
        entropy_coef=0.0,
    )  # fmt: skip
    p, gap = logits.softmax(-1), logits.log_softmax(-1) - ref.log_softmax(-1)
    return logits - table.logits.detach(), p * (gap - (p * gap).sum())


@pytest.mark.parametrize("rollouts", [Rollouts(overlap=True), Rollouts(staleness=0.5)])
@pytest.mark.parametrize("drift", [0.0, 0.1, 1.0])
def test_the_kl_of_stale_samples_has_the_gradient_of_the_kl(drift, rollouts):
    got, want = kl_gradient(drift, rollouts)
    assert (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("rollouts", [Rollouts(), Rollouts(overlap=True, drop_off_policy=True)])
def test_samples_of_the_current_weights_are_not_weighted_by_the_engines_rounding(rollouts):
    """`old_logp` stands for the sampler: right where the weights are equal, and not for older ones."""
    got, want = kl_gradient(0.0, rollouts)
    assert (got - want).abs().max() < 1e-12
    got, want = kl_gradient(1.0, rollouts)
    assert (got - want).norm() > 0.2 * want.norm()


class SlowForward(Policy):
    def __call__(self, batch):
        time.sleep(0.02)
        return super().__call__(batch)


def test_the_time_of_the_forward_is_logged():
    model = prepare_model(tiny_model(tiny_tokenizer(), hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16))
    batch = pack([[sample([5, 6], n) for n in (3, 1)], [sample([7, 8], n) for n in (5, 2)]])
    batch = with_streams(batch, advantages=torch.ones(11))
    start = time.perf_counter()
    metrics = grpo_update(
        batch, policy=SlowForward(model), optimizer=torch.optim.SGD(model.parameters()), loss=PolicyLoss(),
        rollouts=Rollouts(), optim=Optim(max_tokens=8), lr=0.0, kl_coef=0.0, entropy_coef=0.0, seed=0,
    )  # fmt: skip
    most = time.perf_counter() - start
    assert 2 * 0.02 < finalize(metrics)["time/forward"] < most, "of two micro-batches or more, summed"


@pytest.mark.parametrize(
    ("penalty", "found"),
    [
        (torch.zeros_like, False), (lambda x: torch.relu(x.abs() - 0.2).square(), True),
        (lambda x: torch.relu(-x - 2.0), True), (lambda x: torch.relu(x - 2.0), True),
    ],
    ids=["none", "a band", "far below", "far above"],
)  # fmt: skip
def test_a_penalty_beside_the_advantage_is_found(penalty, found):
    batch = pack([[sample([5, 6], 3), sample([7, 8], 4)]])
    batch = with_streams(batch, advantages=torch.ones(7))
    surrogate = lambda x, b: clipped(x, b) + penalty(x)
    assert has_gradient_without_advantage(surrogate, batch) is found


def test_the_share_that_is_clipped_is_that_of_the_surrogate():
    lens = [3, 1, 5, 2]
    batch = pack([[sample([5, 6], n) for n in lens[:2]], [sample([7, 8], n) for n in lens[2:]]])
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0]).repeat_interleave(torch.tensor(lens))
    batch = with_streams(batch, advantages=advantages)
    x = torch.tensor([0.5, 0.5, 0.5, -0.5, 0.5, -0.5, 0.5, -0.5, 0.0, 0.5, 0.5])

    def shares_of(surrogate):
        found = finalize(clip_shares(with_gradient(surrogate, x, batch)[1], batch))
        return {name.removeprefix("ratio/"): share for name, share in found.items()}

    shares = {name: shares_of(surrogate) for name, surrogate in SURROGATES.items()}
    assert shares["gspo"] == pytest.approx({"clip_high": 3 / 11, "clip_low": 1 / 11}), "two sequences of three whole"
    assert shares["cispo"] == shares["dro"] == {"clip_high": 0.0, "clip_low": 0.0}
    counted = finalize(ratio_stats(x, mask=batch.mask, clip_low=0.2, clip_high=0.28, advantages=advantages))
    own = shares_of(clipped)
    assert own == {name: counted[name] for name in own}
    assert own["clip_high"] == pytest.approx(5 / 11)


def test_a_surrogate_takes_the_batch_or_the_advantages():
    batch = with_streams(pack([[sample([5, 6], 3), sample([5, 6], 2)]]), advantages=torch.tensor([1.0, -1, 2, 0.5, 3]))
    x = torch.tensor([0.3, -0.4, 0.1, 0.0, 0.5])

    def plain(log_ratio, advantages):
        return -advantages * log_ratio

    def whole(log_ratio, batch):
        return -batch.advantages * log_ratio

    for function, expected in (
        (plain, plain(x, batch.advantages)),
        (whole, plain(x, batch.advantages)),
        (partial(clipped, clip_high=0.1), clipped(x, batch, clip_high=0.1)),
        (gspo, gspo(x, batch.advantages, mask=batch.mask, cu_seqlens=batch.cu_seqlens)),
        (partial(cispo, max_weight=1.1), cispo(x, batch.advantages, mask=batch.mask, max_weight=1.1)),
    ):
        torch.testing.assert_close(PolicyLoss(function).surrogate(x, batch), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda log_ratio: log_ratio,
            r"takes \(log_ratio, batch\) or \(log_ratio, advantages\), and <lambda> does not",
        ),
        (lambda log_ratio, *, advantages: log_ratio, "does not"),
        (
            lambda log_ratio, advantages, *, beta: log_ratio,
            "<lambda> needs beta, too: give a value by functools.partial",
        ),
        (dppo, r"lambda log_ratio, batch: dppo\(log_ratio, batch.advantages, old_logp=batch.old_logp\)"),
    ],
)
def test_a_function_that_is_no_surrogate_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoss(function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x, b: (b.advantages * x).mean(),
            r"a loss per token, \(3,\) as log_ratio, got \(\): averaging belongs",
        ),
        (lambda x, b: None, "a loss per token, .* got None"),
        (lambda x, b: (b.advantages * x).detach(), "no gradient with respect to log_ratio: is it detached"),
    ],
)
def test_a_loss_that_is_none_per_token_is_refused(function, message):
    batch = with_streams(pack([[sample([5, 6], 3)]]), advantages=torch.ones(3))
    with pytest.raises(ValueError, match=message):
        with_gradient(function, torch.zeros(3), batch)
