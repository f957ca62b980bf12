"""Published numbers with their source; where a system differs, its number from its definition."""

import math
import types

import pytest
import torch

from rlkit import advantages as A


def all_true(num_tokens):
    return torch.ones(num_tokens, dtype=torch.bool)


def rows(tensors):
    """Rows of a batch as one packed stream."""
    x = torch.tensor(tensors, dtype=torch.float64)
    return x.flatten(), torch.arange(0, x.numel() + 1, x.shape[1])


def close(actual, expected, tol):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype).flatten(), rtol=tol, atol=tol)


class TestRlax:
    """github.com/google-deepmind/rlax, rlax/_src/multistep_test.py and vtrace_test.py."""

    rewards, cu = rows([[1.0, 0.0, -1.0, 0.0, 1.0], [0.5, 0.8, -0.7, 0.0, 2.1]])
    discounts, _ = rows([[0.5, 0.9, 1.0, 0.5, 0.8], [0.9, 0.5, 0.3, 0.8, 0.7]])
    next_values = torch.tensor([[3.0, 1.0, 5.0, -5.0, 3.0], [-1.7, 1.2, 2.3, 2.2, 2.7]], dtype=torch.float64)
    values = torch.cat([torch.full((2, 1), 99.0).double(), next_values[:, :-1]], 1).flatten()
    k = types.MappingProxyType(
        {"mask": all_true(10), "cu_seqlens": cu, "gamma": discounts, "bootstrap": next_values[:, -1]}
    )

    def test_lambda_returns(self):
        expected = [[1.6460547, 0.72281253, 0.7375001, 0.6500001, 3.4], [0.7866317, 0.9913063, 0.1101501, 2.834, 3.99]]
        close(A.td_lambda(self.rewards, self.values, lam=0.75, **self.k), expected, 1e-6)

    def test_discounted_returns(self):
        expected = [[1.315, 0.63, 0.7, 1.7, 3.4], [1.33592, 0.9288, 0.2576, 3.192, 3.99]]
        close(A.discounted_returns(self.rewards, **self.k), expected, 1e-6)

    @pytest.mark.parametrize("n", [3, 5, 7])
    def test_n_step(self, n):
        three = [[2.8, -3.15, 0.7, 1.7, 3.4], [1.2155, 0.714, 0.2576, 3.192, 3.99]]
        more = [[1.315, 0.63, 0.7, 1.7, 3.4], [1.33592, 0.9288, 0.2576, 3.192, 3.99]]
        close(A.n_step(self.rewards, self.values, n=n, **self.k), three if n == 3 else more, 1e-6)

    @pytest.mark.parametrize(
        ("lam", "expected"),
        [
            (1.0, [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0, -4.9]]),
            (0.7, [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0, -4.9]]),
            (0.4, [[0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0, -4.9]]),
        ],
    )
    def test_gae(self, lam, expected):
        rewards, cu = rows([[0.0, 0.0, 1.0, 0.0, -0.5], [0.0, 0.0, 0.0, 0.0, 1.0]])
        values, _ = rows([[1.0, 4.0, -3.0, -2.0, -1.0], [-3.0, -2.0, -1.0, 0.0, 5.0]])
        gamma, _ = rows([[0.99] * 5, [0.9, 0.9, 0.9, 0.0, 0.9]])
        end = torch.tensor([-1.0, -1.0], dtype=torch.float64)
        out = A.gae(rewards, values, mask=all_true(10), cu_seqlens=cu, gamma=gamma, lam=lam, bootstrap=end)
        close(out.advantages, expected, 1e-3)

    def test_vtrace(self):
        behaviour = torch.tensor(
            [[[8.9, 0.7], [5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]], [[0.3, -5.0], [1.0, -8.0], [0.3, 1.7], [4.7, 3.3]]]
        ).double()
        target = torch.tensor(
            [[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]], [[1.0, 0.9], [1.0, -1.0], [-4.3, 8.7], [0.8, 0.3]]]
        ).double()
        actions = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]]).unsqueeze(-1)
        log_ratio = (target.log_softmax(-1) - behaviour.log_softmax(-1)).gather(-1, actions).flatten()
        rewards, cu = rows([[-1.3, -1.3, 2.3, 42.0], [1.3, 5.3, -3.3, -5.0]])
        values, _ = rows([[2.1, 1.1, -3.1, 0.0], [3.1, 0.1, -1.1, 7.4]])
        gamma, _ = rows([[0.0, 0.89, 0.85, 0.99], [0.88, 1.0, 0.83, 0.95]])
        end = torch.tensor([8.4, -1.2], dtype=torch.float64)
        out = A.vtrace(rewards, values, log_ratio, mask=all_true(8), cu_seqlens=cu, gamma=gamma, bootstrap=end)
        errors = [[-1.6155143, -3.4973226, 1.8670533, 50.316002], [1.4662437, 3.6116405, -8.3327293e-5, -13.54]]
        close(out.targets - values, errors, 1e-5)
        close(out.advantages, errors, 1e-5)


def test_reinforce_pp_over_a_gap():
    """slime and miles: mask [1, 0, 0, 1], kl 1, kl_coef 1, gamma .9 is -1.729 with the gap masked but discounted,
    -3.439 where its KL leaks. Here the gap costs nothing: -1 - .9. Theirs is ours with the gap declared actions."""
    cu, k = torch.tensor([0, 4]), {"gamma": 0.9}
    mask = torch.tensor([True, False, False, True])
    kl = torch.ones(4, dtype=torch.float64)
    ours = A.discounted_returns(-kl, mask=mask, cu_seqlens=cu, **k)
    close(ours, [-1.9, 0.0, 0.0, -1.0], 1e-12)
    theirs = A.discounted_returns(-kl * mask, mask=all_true(4), cu_seqlens=cu, **k)
    close(theirs[:1], [-1.729], 1e-12)
    leak = A.discounted_returns(-kl, mask=all_true(4), cu_seqlens=cu, **k)
    close(leak[:1], [-3.439], 1e-12)


def test_skyrl_masks():
    """SkyRL's own tests: a masked token's reward counts. GAE, mask [1, 0, 1], rewards 1 2 3, values 0: [6, 5, 3];
    REINFORCE++, mask [1, 1, 0]: [3, 2, 3]. Here it does not: [4, 0, 3] and [3, 2, 0]."""
    r, zero, cu = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3), torch.tensor([0, 3])
    mask = torch.tensor([True, False, True])
    close(A.gae(r, zero, mask=mask, cu_seqlens=cu).returns, [4.0, 0.0, 3.0], 0)
    close(A.gae(r, zero, mask=all_true(3), cu_seqlens=cu).returns, [6.0, 5.0, 3.0], 0)
    mask = torch.tensor([True, True, False])
    close(A.discounted_returns(r, mask=mask, cu_seqlens=cu), [3.0, 2.0, 0.0], 0)
    two = A.discounted_returns(r, mask=all_true(3), cu_seqlens=torch.tensor([0, 2, 3]))
    close(two, [3.0, 2.0, 3.0], 0)


def test_length_adaptive_gae():
    """SAO on slime: 10 tokens, alpha 1.5, terminal reward 1, values 0: .53744124."""
    mask, cu, rewards = all_true(10), torch.tensor([0, 10]), torch.zeros(10)
    rewards[-1] = 1.0
    lam = A.length_adaptive_lam(mask, cu_seqlens=cu, alpha=1.5)
    out = A.gae_decoupled(rewards, torch.zeros(10), mask=mask, cu_seqlens=cu, lam_policy=lam, lam_value=lam)
    close(out.advantages[:1], [0.53744124], 1e-6)
    close(out.returns[:1], [0.53744124], 1e-6)


def test_length_adaptive_lambda_is_clamped():
    """NeMo-RL, test_gae_length_adaptive_lambda: alpha .05, lengths 3 and 8 give 0."""
    mask, cu = all_true(11), torch.tensor([0, 3, 11])
    assert torch.equal(A.length_adaptive_lam(mask, cu_seqlens=cu, alpha=0.05), torch.zeros(11))


def test_singletons():
    """verl `rloo`, `grpo` and `opo` give a singleton its raw reward, `rloo_vectorized` 0. Here 0 everywhere."""
    r, ids = torch.tensor([0.7]), torch.tensor([0])
    for f in (A.group_centered, A.group_zscore, A.leave_one_out, A.max_rl):
        assert f(r, group_ids=ids).item() == 0.0
    assert A.opo(r, lengths=torch.tensor([5]), group_ids=ids).item() == 0.0


def test_grpo_epsilons():
    """std ddof 1 in TRL and verl; eps 1e-4 in TRL, 1e-6 in verl and here. Rewards 1 0 0 0: std 1/2."""
    r, ids = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    close(A.group_zscore(r, group_ids=ids)[:2], [0.75 / (0.5 + 1e-6), -0.25 / (0.5 + 1e-6)], 1e-12)
    close(A.group_zscore(r, group_ids=ids, eps=1e-4)[:2], [0.75 / 0.5001, -0.25 / 0.5001], 1e-12)


def test_verl_grpo_passk():
    """verl `grpo_passk` (arXiv:2503.19595): the best gets its lead over the second, others 0; here times n, k = n."""
    r, ids = torch.tensor([0.2, 0.9, 0.4, 0.1], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    close(A.max_at_k(r, group_ids=ids, k=4) / 4, [0.0, 0.5, 0.0, 0.0], 1e-12)


def test_max_rl_weight():
    """arXiv:2602.02710: with success rate p a solved sample's weight is (1 - p) / p, an unsolved one's -1."""
    r, ids = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]), torch.zeros(8, dtype=torch.int64)
    close(A.max_rl(r, group_ids=ids), [7.0] + [-1.0] * 7, 1e-4)
    assert math.isclose(A.max_rl(r, group_ids=ids, eps=0.0)[0].item(), 7.0)
