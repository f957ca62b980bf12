"""Micro-batches that do not fit: a module of the model raises torch.OutOfMemoryError above a number of tokens."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from small import small_model, tokenizer

from rlkit.advantages import group_centered
from rlkit.data.examples import preference_pairs, sft_examples
from rlkit.loops.out_of_memory import retry_smaller
from rlkit.loops.ppo import value_update
from rlkit.loops.preference import dpo
from rlkit.loops.sft import sft
from rlkit.loops.updates import PolicyLoss, grpo_update
from rlkit.model.forward import Policy
from rlkit.model.heads import load_value_model
from rlkit.model.optim import adamw
from rlkit.packing import pack, with_advantages, with_streams
from rlkit.packing.balancing import largest_piece, plan_microbatches
from rlkit.settings import Critic, Optim, Rollouts, Schedule
from rlkit.types import Trajectory


def made(num_groups=4, lens=(3, 9, 5, 14), seed=0):
    """Groups of four answers of other lengths to prompts of 3 to 6 tokens, with everything that an update reads."""
    generator = torch.Generator().manual_seed(seed)
    groups = [
        [
            Trajectory([7] * (3 + g), ids, [True] * n, [-5.0] * n, [0] * n, reward=float(i % 2))
            for i, n in enumerate(lens)
            for ids in [torch.randint(20, 200, (n,), generator=generator).tolist()]
        ]
        for g in range(num_groups)
    ]
    batch = with_advantages(pack(groups), group_centered)
    noise = torch.rand(batch.num_tokens, generator=generator)
    return with_streams(batch, old_logp=-5 - noise, values=noise, returns=1 - noise)


def limited(model, tokens, *, backward=False):
    """The model, whose embedding fails in the forward, or in the backward, of more than `tokens` tokens."""
    sizes = []

    def check(size):
        sizes.append(size)
        if size > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def check_gradient(_module, _ids, out):
        if out.requires_grad:  # last of all: by then those of the layers and the head have been added
            out.register_hook(lambda gradient: check(gradient[..., 0].numel()))

    embedding = model.get_input_embeddings()
    if backward:
        embedding.register_forward_hook(check_gradient)
    else:
        embedding.register_forward_pre_hook(lambda _module, ids: check(ids[0].numel()))
    return model, sizes


def policy_step(model, batch, max_tokens):
    """Two optimizer steps on a policy."""
    return grpo_update(
        batch, policy=Policy(model), optimizer=adamw(model, lr=1e-2), loss=PolicyLoss(), lr=1e-2, kl_coef=0.0, seed=0,
        rollouts=Rollouts(prompts_per_step=4, minibatches=2), optim=Optim(max_tokens=max_tokens), entropy_coef=0.01,
    )  # fmt: skip


def critic_step(model, batch, max_tokens):
    """Two optimizer steps of a critic."""
    return value_update(
        batch, values=Policy(model), optimizer=adamw(model, lr=1e-2), lr=1e-2, critic=Critic(value_clip=0.5), seed=0,
        rollouts=Rollouts(prompts_per_step=4, minibatches=2), optim=Optim(max_tokens=max_tokens),
    )  # fmt: skip


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("step", [policy_step, critic_step])
def test_an_update_has_the_bits_of_smaller_micro_batches(step, backward, tmp_path, caplog):
    batch = made()
    small_model().save_pretrained(tmp_path)
    begin = small_model if step is policy_step else lambda: load_value_model(tmp_path)
    model, sizes = limited(begin(), 60, backward=backward)
    metrics = step(model, batch, 1000)
    (line,) = [record.getMessage() for record in caplog.records]
    match = re.match(r"out of memory at (\d+) tokens per micro-batch: .* with at most (\d+) \(--max-tokens \2, ", line)
    tokens, smaller = int(match[1]), int(match[2])
    assert 60 < tokens < 75  # of one mini-batch
    assert smaller == tokens // 2
    reference = begin()
    true = step(reference, batch, smaller)
    assert same_weights(model, reference)
    assert not same_weights(model, begin())
    assert metrics.keys() == true.keys()
    assert all(metrics[name] == true[name] for name in true if name != "time/forward")
    assert sum(size > 60 for size in sizes) == 1  # the second step begins with the smaller ones


def test_a_longer_sequence_of_a_later_step_still_fits(caplog):
    model, sizes = limited(small_model(), 20)
    policy_step(model, made(lens=(3, 4, 5)), 1000)
    (line,) = [record.getMessage() for record in caplog.records]
    assert int(re.search(r"--max-tokens (\d+)", line)[1]) < 18
    policy_step(model, made(lens=(12, 12)), 1000)  # up to 12 + 5 tokens, with the prompt
    assert sum(size > 20 for size in sizes) == 1
    assert len(caplog.records) == 1
    with pytest.raises(torch.OutOfMemoryError) as error:
        policy_step(model, made(1, lens=(12, 40)), 1000)
    assert error.value.__notes__ == ["the micro-batch was one sequence of 42 tokens: no --max-tokens makes it smaller"]


def test_gradients_of_before_are_not_lost():
    model, _ = limited(small_model(), 40)
    weight = model.get_input_embeddings().weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(torch.OutOfMemoryError) as error:
        policy_step(model, made(), 1000)
    assert "the parameters had gradients before" in error.value.__notes__[0]
    assert weight.grad.eq(1).all()


def test_one_rank_retries_and_several_are_told_the_flag(tmp_path, monkeypatch, caplog):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:  # as training on one GPU has it
        policy_step(limited(small_model(), 60)[0], made(), 1000)
    finally:
        dist.destroy_process_group()
    assert "out of memory at" in caplog.text
    monkeypatch.setattr("rlkit.loops.out_of_memory.world_size", lambda: 2)
    with pytest.raises(torch.OutOfMemoryError) as error:
        policy_step(limited(small_model(), 60)[0], made(), 1000)
    assert "not made smaller on several ranks" in error.value.__notes__[0]
    assert error.value.__notes__[0].endswith("lower --max-tokens")


@pytest.mark.slow_cases("dpo")
@pytest.mark.parametrize("loop", [sft, dpo])
def test_examples_and_pairs_train_as_with_smaller_micro_batches(loop, tmp_path, caplog):
    """Those of a pair stay together."""
    texts = ["a few words", "some more words that follow", "x", "an answer of many words, as some are"]
    rows = [{"prompt": f"say {i}", "response": text} for i, text in enumerate(texts)]
    pairs = [{"prompt": f"say {i}", "chosen": text, "rejected": text[::-1]} for i, text in enumerate(texts)]
    read, rows = (sft_examples, rows) if loop is sft else (preference_pairs, pairs)
    examples, _ = read(rows, tokenizer=tokenizer(), max_example_tokens=200)

    def trained(limit, max_tokens):
        model, sizes = limited(small_model(), limit)
        schedule = Schedule(tmp_path / f"{limit}_{max_tokens}", steps=2)
        loop(model, tokenizer(), examples, schedule, Optim(lr=1e-2, max_tokens=max_tokens), batch_size=4)
        return model, max(sizes)

    whole = trained(1000, 1000)[1]
    model, _ = trained(whole - 1, 1000)
    lines = [record.getMessage() for record in caplog.records if record.name == "rlkit.loops"]
    reference, most = trained(whole - 1, int(re.search(r"--max-tokens (\d+)", lines[-1])[1]))
    assert len(lines) == 1
    assert most < whole
    assert same_weights(model, reference)


def test_the_least_micro_batch_by_counting():
    batch = made(2, (3, 9))
    assert largest_piece(batch) == 9 + 3  # a prompt of 4 has 3 tokens before the one that the answer follows
    assert largest_piece(batch, whole_groups=True) == 3 + 9 + 3
    for whole, least in ((False, 12), (True, 15)):
        assert plan_microbatches(batch, max_tokens=least, whole_groups=whole).makespan <= least
        with pytest.raises(ValueError, match="max_tokens"):
            plan_microbatches(batch, max_tokens=least - 1, whole_groups=whole)
    assert retry_smaller(lambda tokens: tokens, batch, model=small_model(), max_tokens=7) == 7
