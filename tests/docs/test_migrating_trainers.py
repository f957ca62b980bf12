"""The losses that docs/migrating.md states for TRL's SFT, KTO, reward and PPO trainers, against TRL's formulas."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rlkit import losses
from rlkit.advantages import gae_decoupled
from rlkit.data.examples import preference_pairs, sft_examples
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.sft import sft
from rlkit.model.forward import prepare_model
from rlkit.settings import Optim, Schedule

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
TURN = "<|im_end|>"


def trl_labels(tokenizer: Any, messages: list[dict[str, str]], num: int) -> tuple[list[int], list[int]]:
    """Ids and labels of TRL for a prompt of `num` messages and a completion: -100 in the prompt."""

    def render(part: list[dict[str, str]], opened: bool) -> list[int]:
        text = tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=opened)
        return list(tokenizer.encode(text, add_special_tokens=False))

    prompt, whole = render(messages[:num], True), render(messages, False)
    assert whole[: len(prompt)] == prompt
    return whole, [-100] * len(prompt) + whole[len(prompt) :]


CONVERSATIONS = [
    [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": "abc" * (i + 1)}] for i in range(4)
]


def test_the_masks_of_sft_are_trls_but_for_the_text_after_the_end_of_turn() -> None:
    tokenizer = tiny_tokenizer()
    (end,) = tokenizer.encode(TURN)
    rows = [{"messages": c} for c in CONVERSATIONS]
    for messages, ours in zip(
        CONVERSATIONS, sft_examples(rows, tokenizer=tokenizer, max_example_tokens=99)[0], strict=True
    ):
        ids, labels = trl_labels(tokenizer, messages, 1)
        assert ids == [*ours.ids, *tokenizer.encode("\n")]
        assert ours.ids[-1] == end
        assert [i if m else -100 for i, m in zip(ours.ids, ours.mask, strict=True)] == labels[:-1]


def test_the_loss_of_sft_is_trls_token_mean_over_all_micro_batches(tmp_path: Path) -> None:
    """TRL: 2 processes of 2 accumulation steps of one example; each sum over num_items, times 2, averaged by DDP."""
    tokenizer = tiny_tokenizer()
    rows = [{"messages": c} for c in CONVERSATIONS]
    examples, _ = sft_examples(rows, tokenizer=tokenizer, max_example_tokens=99)
    theirs = tiny_model(tokenizer, **SIZES).double()
    num_items = sum(sum(e.mask[1:]) for e in examples)
    processes = []
    for process in (examples[:2], examples[2:]):
        accumulated = torch.zeros((), dtype=torch.float64)
        for e in process:
            labels = torch.tensor([i if m else -100 for i, m in zip(e.ids, e.mask, strict=True)])
            logp = theirs(torch.tensor([e.ids])).logits[0, :-1].log_softmax(-1)
            accumulated = accumulated + F.nll_loss(logp, labels[1:], ignore_index=-100, reduction="sum") / num_items * 2
        processes.append(accumulated)
    loss = torch.stack(processes).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in theirs.parameters() if p.grad is not None]).norm()

    model = prepare_model(tiny_model(tokenizer, **SIZES))
    longest = max(len(e.ids) for e in examples)
    optim = Optim(max_norm=float("inf"), max_tokens=longest)  # several micro-batches
    sft(model, tokenizer, examples, Schedule(tmp_path / "run", steps=1), optim, batch_size=4)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    of_examples = [x.item() for x in processes]
    assert abs(of_examples[0] - of_examples[1]) > 0.1  # lengths differ, so a mean of means would be another number


def their_kto(log_ratio: Tensor, kl_ratio: Tensor, label: Tensor, *, beta: float, des: float, und: float) -> Tensor:
    """One micro-batch of KTOTrainer on one process."""
    kl = kl_ratio.mean().clamp(min=0).detach()
    chosen = 1 - F.sigmoid(beta * (log_ratio[label] - kl))
    rejected = 1 - F.sigmoid(beta * (kl - log_ratio[~label]))
    return torch.cat((des * chosen, und * rejected)).nanmean()


def test_the_loss_of_kto_is_trls_without_accumulation_and_differs_with_it() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = (3 * torch.randn(8, generator=g, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    y = y + 3
    label = torch.tensor([True, False, True, True, False, False, True, False])
    options = {"beta": 0.3, "des": 1.5, "und": 0.7}
    kl = losses.kto_reference_point(y)
    assert kl > 0
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.7}
    ours = losses.kto_unpaired(x, label, beta=0.3, kl=kl, **weights).mean()
    theirs = their_kto(x, y, label, **options)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x)[0] for loss in (ours, theirs)))
    halves = [their_kto(x[i], y[i], label[i], **options) for i in (slice(0, 4), slice(4, 8))]
    assert abs(torch.stack(halves).mean() - ours) > 1e-3
    zero = losses.kto_unpaired(x, label, beta=0.3, **weights).mean()
    apo = torch.cat((1.5 * (1 - F.sigmoid(0.3 * x[label])), 0.7 * F.sigmoid(0.3 * x[~label]))).mean()
    torch.testing.assert_close(zero, apo)


@pytest.mark.parametrize("margin", [None, 0.5])
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_the_loss_of_a_reward_model_is_trls(margin: float | None, center: float) -> None:
    """TRL: the mean over two micro-batches of two pairs."""
    g = torch.Generator().manual_seed(0)
    numbers = (2 * torch.randn(8, generator=g, dtype=torch.float64)).requires_grad_()
    margins = None if margin is None else margin * torch.rand(4, generator=g, dtype=torch.float64)
    theirs = torch.zeros((), dtype=torch.float64)
    for pairs in (slice(0, 2), slice(2, 4)):
        chosen, rejected = numbers[:4][pairs], numbers[4:][pairs]
        gap = chosen - rejected - (0 if margins is None else margins[pairs])
        theirs = theirs + (-F.logsigmoid(gap).mean() + center * torch.mean((chosen + rejected) ** 2)) / 2
    loss = partial(losses.bradley_terry, center_coef=center, **({} if margins is None else {"margin": margins}))
    ours = loss(numbers[:4], numbers[4:]).mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(x, numbers)[0] for x in (ours, theirs)))


def test_the_reward_is_read_at_the_end_of_turn_and_by_trl_after_it() -> None:
    tokenizer = tiny_tokenizer()
    ask = CONVERSATIONS[0][:1]
    row = {side: [*ask, {"role": "assistant", "content": text}] for side, text in (("chosen", "4"), ("rejected", "5"))}
    (pair,), _ = preference_pairs([row], tokenizer=tokenizer, max_example_tokens=99)
    theirs = trl_labels(tokenizer, row["chosen"], 1)[0]
    assert theirs == [*pair.prompt, *pair.chosen, *tokenizer.encode("\n")]
    assert pair.chosen[-1:] == tokenizer.encode(TURN)
    long = row | {"chosen": [*ask, {"role": "assistant", "content": "4" * 99}]}
    assert preference_pairs([row, long], tokenizer=tokenizer, max_example_tokens=99)[1] == 1


@dataclasses.dataclass
class Padded:
    """Three responses of 2, 3 and 4 tokens, padded to the width 4 of TRL's batch."""

    logp: Tensor
    ref_logp: Tensor
    values: Tensor
    scores: Tensor
    lengths: tuple[int, ...] = (2, 3, 4)


def their_advantages(p: Padded, *, kl_coef: float, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Steps 4 and 6 of PPOTrainer: rewards, advantages before whitening, and returns, [3, 4]."""
    last = torch.tensor(p.lengths) - 1
    at = torch.arange(4)[None]
    log_ratio = torch.where(at > last[:, None], 0.0, p.ref_logp - p.logp)
    values = torch.where(at > last[:, None] + 1, 0.0, p.values)
    rewards = kl_coef * log_ratio
    rewards[torch.arange(3), torch.where(last + 1 < 4, last + 1, last)] += p.scores
    running, out = torch.zeros(3, dtype=torch.float64), []
    for t in reversed(range(4)):
        following = values[:, t + 1] if t < 3 else 0.0
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        out.append(running)
    advantages = torch.stack(out[::-1], 1)
    return advantages, advantages + values


def test_the_advantages_of_ppo_are_trls_at_lam_1_and_differ_below() -> None:
    g = torch.Generator().manual_seed(0)
    padded = Padded(*(torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(3)), torch.randn(3).double())
    mask = torch.arange(4)[None] < torch.tensor(padded.lengths)[:, None]
    logp, ref, values = (x[mask] for x in (padded.logp, padded.ref_logp, padded.values))
    ends = torch.tensor([0, *padded.lengths]).cumsum(0)
    rewards = torch.zeros(9, dtype=torch.float64)
    rewards[ends[1:] - 1] = padded.scores
    all_true = torch.ones(9, dtype=torch.bool)
    rewards = losses.kl_in_reward(rewards, logp, ref, kl_coef=0.05, mask=all_true)
    for lam in (1.0, 0.95):
        ours = gae_decoupled(
            rewards, values, mask=all_true, cu_seqlens=ends, gamma=1.0, lam_policy=lam, lam_value=lam
        )  # fmt: skip
        advantages, returns = (x[mask] for x in their_advantages(padded, kl_coef=0.05, gamma=1.0, lam=lam))
        same = slice(None) if lam == 1 else slice(5, 9)  # the response of full length
        torch.testing.assert_close(ours.advantages[same], advantages[same])
        torch.testing.assert_close(ours.returns[same], returns[same])
        if lam < 1:
            assert ((ours.advantages - advantages)[:5].abs() > 1e-4).all()


def test_the_page_states_what_is_tested_here() -> None:
    text = " ".join(PAGE.split())
    for claim in (
        "theirs also trains what the template writes after the end of turn (in ChatML a newline)",
        "over the number of trained tokens of the optimizer step, on all GPUs and in all accumulation steps",
        "The loss is equal on one GPU without gradient accumulation.",
        "the same penalty",
        "there what the template writes after the end of turn (in ChatML a newline), here the end of turn",
        "with `lam` 1 and `--lam-policy 1`, and differ below 1",
    ):
        assert claim in text, claim
