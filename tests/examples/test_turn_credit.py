"""examples/turn_credit.py: the log-probs of the gold answer before each turn, and a game that turns learn."""

from __future__ import annotations

import pytest
import torch
import turn_credit

from rlkit import Trajectory, pack
from rlkit.advantages import trace_credit
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import make_policy, prepare_model


def test_the_answer_is_scored_in_the_context_before_each_turn() -> None:
    plain, model = (tiny_model(tiny_tokenizer(), hidden=32, layers=1, heads=2, kv_heads=1, seed=3) for _ in range(2))
    policy = make_policy(prepare_model(model))

    def talk(prompt: list[int], ids: list[int], mask: list[int], **more: bool) -> Trajectory:
        return Trajectory(prompt, ids, [bool(x) for x in mask], [-1.0] * len(ids), [0] * len(ids), **more)

    two, one = talk([5, 6, 7], [1, 2, 3, 4, 9], [1, 1, 0, 0, 1]), talk([8], [3, 4], [1, 1], truncated=True)
    batch, answers = pack([[two, two], [one]]), [[11, 12, 13], [14]]
    got = turn_credit.answer_logp(policy, batch, answers)
    want = []
    for context, answer in [([5, 6, 7], 0), ([5, 6, 7, 1, 2, 3, 4], 0)] * 2 + [([8], 1)]:
        ids = torch.tensor([[*context, *answers[answer]]])
        with torch.no_grad():
            logp = plain.eval()(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        want.append(logp.gather(1, ids[0, len(context) :, None]).mean())
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-4, atol=1e-5)
    credit = trace_credit(torch.zeros(3), got, step_seq_ids=torch.tensor([0, 0, 1, 1, 2]))
    assert credit[[1, 3, 4]].tolist() == [0, 0, 0]
    assert credit[0] == credit[2] != 0


@pytest.mark.slow
def test_turns_learn_what_the_reward_of_the_episode_hides() -> None:
    found = turn_credit.main(seeds=1)
    assert found["episode"][0] < 0.2
    assert found["turn_returns"][0] > 0.7
