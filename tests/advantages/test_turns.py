"""Credit per turn: against plain loops, the group's own baseline, and by enumeration of small games."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from itertools import product

import pytest
import torch

from rlkit import advantages as A
from rlkit.segments import cumulative, group_count, sum_per_seq

MASK = torch.tensor([1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0], dtype=torch.bool)
CU = torch.tensor([0, 4, 4, 9, 12])  # the second sequence is empty, the third ends with a token of the environment


def close(got, want, tol=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=tol, rtol=tol)


def test_turns_are_runs_of_sampled_tokens_of_a_sequence():
    starts = A.turn_starts(MASK, cu_seqlens=CU)
    assert starts.nonzero().flatten().tolist() == [0, 3, 4, 7, 9]
    lens = A.turn_lens(MASK, cu_seqlens=CU)
    assert lens.tolist() == [2, 1, 1, 1, 2]
    tokens = torch.arange(12.0)
    assert sum_per_seq(tokens[MASK], cu_seqlens=cumulative(lens)).tolist() == [1, 3, 4, 7, 19]
    assert A.turn_lens(torch.zeros(0, dtype=torch.bool), cu_seqlens=torch.tensor([0])).tolist() == []


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([2, 0, 2, 0, 1, 0, 4, 2, 4, 0])  # episode 3 has no step
    return torch.randn(10, generator=generator, dtype=torch.float64), ids, torch.tensor([0, 5, 0, 0, 0])


def test_turn_returns_are_those_of_a_loop():
    rewards, ids, groups = drawn()
    steps = {e: [s for s in range(10) if ids[s] == e] for e in range(5)}
    returns = [0.0] * 10
    for at in steps.values():
        after = 0.0
        for s in reversed(at):
            returns[s] = after = float(rewards[s]) + 0.9 * after
    close(A.step_returns(rewards, step_seq_ids=ids, gamma=0.9), returns)
    want = [0.0] * 10
    for e, at in steps.items():
        for k, s in enumerate(at):
            mates = [steps[j][k] for j in range(5) if groups[j] == groups[e] and len(steps[j]) > k]
            want[s] = returns[s] - sum(returns[m] for m in mates) / len(mates)
    close(A.turn_returns(rewards, group_ids=groups, step_seq_ids=ids, gamma=0.9), want)


@pytest.mark.parametrize("baseline", [A.group_centered, A.group_zscore, A.leave_one_out])
def test_with_one_turn_each_it_is_the_baseline_of_the_group(baseline):
    rewards, _, _ = drawn()
    groups = torch.tensor([0, 0, 3, 0, 3, 3, 0, 7, 0, 3])
    got = A.turn_returns(rewards, group_ids=groups, step_seq_ids=torch.arange(10), gamma=0.5, baseline=baseline)
    assert torch.equal(got, baseline(rewards, group_ids=groups))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    got = A.turn_returns(rewards[order], group_ids=groups, step_seq_ids=order, baseline=baseline)
    assert torch.equal(got, baseline(rewards[order], group_ids=groups[order]))


class Game:
    """A game of a softmax policy with two actions in each state, played to its end in every possible way."""

    def __init__(self, logits, after, start="a"):
        self.logits = {s: torch.tensor(x, dtype=torch.float64, requires_grad=True) for s, x in logits.items()}
        self.after = after  # (state, action): (reward, next state or None)
        self.plays = [*self._plays(start, 4)]

    def _plays(self, state, most):
        for action in (0, 1):
            reward, then = self.after[state, action]
            if then is None or most == 1:
                yield [(state, action, reward)]
            else:
                yield from ([(state, action, reward), *rest] for rest in self._plays(then, most - 1))

    def logp(self, state, action):
        return self.logits[state].log_softmax(0)[action]

    def expectation(self, n, advantages):
        """E of the mean over n episodes of sum_k A_k d log pi(a_k | s_k), for each state's logits."""
        total = 0.0
        for plays in product(self.plays, repeat=n):
            steps = [(i, *step) for i, play in enumerate(plays) for step in play]
            ids = torch.tensor([i for i, *_ in steps])
            a = advantages(torch.tensor([r for *_, r in steps], dtype=torch.float64), ids, [s for _, s, _, _ in steps])
            logps = torch.stack([self.logp(s, action) for _, s, action, _ in steps])
            total = total + logps.sum().exp().detach() * (a.detach() * logps).sum() / n
        return self.gradient(total)

    def exact(self):
        """The gradient of the expected return, for each state's logits."""
        value = sum(
            torch.stack([self.logp(s, a) for s, a, _ in play]).sum().exp() * sum(r for *_, r in play)
            for play in self.plays
        )
        return self.gradient(value)

    def gradient(self, x):
        return dict(zip(self.logits, torch.autograd.grad(x, [*self.logits.values()], retain_graph=True), strict=True))


def by_turn(n, baseline):
    return lambda rewards, ids, _: A.turn_returns(
        rewards, group_ids=torch.zeros(n, dtype=torch.long), step_seq_ids=ids, baseline=baseline
    )


LOGITS = {"a": [0.3, -0.4], "b": [0.8, 0.1], "c": [-0.2, 0.5]}
TWO_TURNS = Game(LOGITS, {
    ("a", 0): (0.2, "b"), ("a", 1): (-0.3, "c"),
    ("b", 0): (1.0, None), ("b", 1): (0.1, None), ("c", 0): (0.4, None), ("c", 1): (2.0, None),
})  # fmt: skip
MAY_END = Game({s: LOGITS[s] for s in "ab"}, {
    ("a", 0): (0.7, None), ("a", 1): (0.1, "b"), ("b", 0): (1.0, None), ("b", 1): (-0.5, None),
})  # fmt: skip
RETURNS = Game({s: LOGITS[s] for s in "ab"}, {
    ("a", 0): (0.2, "b"), ("a", 1): (0.9, None), ("b", 0): (0.1, "a"), ("b", 1): (1.0, None),
})  # fmt: skip


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("n", [2, 3])
def test_where_all_episodes_have_two_turns_the_gradient_is_exact(n):
    exact = TWO_TURNS.exact()
    for baseline, scale in ((A.leave_one_out, 1.0), (A.group_centered, (n - 1) / n)):
        for state, got in TWO_TURNS.expectation(n, by_turn(n, baseline)).items():
            close(got, scale * exact[state])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_where_the_policy_ends_episodes_the_bias_is_a_scale_for_each_turn(n):
    exact, p = MAY_END.exact(), float(MAY_END.logp("a", 1).detach().exp())
    scales = {
        A.leave_one_out: (1.0, 1 - (1 - p) ** (n - 1)),
        A.group_centered: ((n - 1) / n, 1 - (1 - (1 - p) ** n) / (n * p)),
    }
    for baseline, (first, second) in scales.items():
        got = MAY_END.expectation(n, by_turn(n, baseline))
        close(got["a"], first * exact["a"])
        close(got["b"], second * exact["b"])
        assert second < first


def of_state(rewards, ids, states, *, baseline, weight=1.0):
    returns, num = A.step_returns(rewards, step_seq_ids=ids), int(ids.max()) + 1
    totals = sum_per_seq(rewards, cu_seqlens=cumulative(torch.bincount(ids, minlength=num)))
    return A.gigpo(
        totals, returns, group_ids=torch.zeros(num, dtype=torch.long), step_seq_ids=ids, step_weight=weight,
        step_group_ids=torch.tensor(["abc".index(s) for s in states]), baseline=baseline,
    )  # fmt: skip


def mean_of_others(rewards, *, group_ids):
    """What `leave_one_out` subtracts; 0 for one alone."""
    alone = group_count(group_ids) == 1
    return torch.where(alone, 0.0, rewards - A.leave_one_out(rewards, group_ids=group_ids))


def test_the_baseline_of_a_state_is_biased_where_an_episode_returns_to_it():
    exact = TWO_TURNS.exact()
    got = TWO_TURNS.expectation(2, partial(of_state, baseline=A.leave_one_out))
    for state, logp in (("a", None), ("b", TWO_TURNS.logp("a", 0)), ("c", TWO_TURNS.logp("a", 1))):
        close(got[state], (1 + (1.0 if logp is None else float(logp.detach().exp()))) * exact[state])
    nothing = TWO_TURNS.expectation(2, partial(of_state, baseline=mean_of_others))
    close(torch.cat([*nothing.values()]), torch.zeros(6))
    episodes = RETURNS.expectation(2, partial(of_state, baseline=mean_of_others, weight=0.0))
    close(torch.cat([*episodes.values()]), torch.zeros(4))
    states = RETURNS.expectation(2, partial(of_state, baseline=mean_of_others))
    assert min(float(x.abs().max()) for x in states.values()) > 0.02


def test_trace_credit_is_that_of_a_loop():
    rewards, ids, _ = drawn()
    logp, outcome = -rewards.abs() - 0.2, torch.tensor([0.5, -1.0, 2.0, 9.0, 0.0], dtype=torch.float64)
    steps = defaultdict(list)
    for s, e in enumerate(ids.tolist()):
        steps[e].append(s)
    want = outcome[ids].tolist()
    for e, at in steps.items():
        value = [math.log((0.1 - float(logp[at[0]])) / (0.1 - float(logp[s]))) for s in at]
        num = len(at) - 1
        for k in range(num):
            m = min(3, num - k)
            credit = sum(0.8**j * (value[k + j + 1] - value[k + j]) for j in range(m)) / sum(0.8**j for j in range(m))
            credit += 2 * 0.8 ** (num - k) * float(outcome[e]) * (num - k <= 3)
            want[at[k]] += 0.2 * credit
    close(A.trace_credit(outcome, logp, step_seq_ids=ids), want)
    close(A.trace_credit(outcome, logp, step_seq_ids=ids, weight=0.0), outcome[ids])
    assert A.trace_credit(outcome, logp[:0], step_seq_ids=ids[:0]).shape == (0,)
    for wrong, match in (({"gap": 0.0}, "gap must be positive"), ({"n": 0}, "n must be")):
        with pytest.raises(ValueError, match=match):
            A.trace_credit(outcome, logp, step_seq_ids=ids, **wrong)
    with pytest.raises(ValueError, match="answer_logp must be log-probs"):
        A.trace_credit(outcome, -logp, step_seq_ids=ids)
    with pytest.raises(ValueError, match="step_seq_ids"):
        A.turn_returns(rewards, group_ids=torch.tensor([0, 0]), step_seq_ids=ids)
