"""Distillation: loss and gradient against dense formulas and TRL's code, routing, rewards beside it, learning."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from small import SIZES, call, small_model, tokenizer

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model
from rlkit.loops.distill import Distillation, distill, with_teachers
from rlkit.loops.grpo import grpo
from rlkit.loops.updates import per_token
from rlkit.losses.distillation import forward_kl_rows, jsd_rows, reverse_kl_rows, uld_rows
from rlkit.model.forward import Policy, prepare_model
from rlkit.model.teachers import LocalTeacher, with_divergence
from rlkit.packing import pack
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.types import Trajectory

PROMPTS = [Prompt([20 + i, 60], {"teacher": "ab"[i % 2]}, i) for i in range(8)]
BETAS = {"forward": (forward_kl_rows, 0.0), "reverse": (reverse_kl_rows, 1.0), "jsd": (jsd_rows(0.3), 0.3)}


def sharp(seed, **sizes):
    """A teacher whose distributions are far from uniform."""
    model = small_model(seed, **sizes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


def groups():
    """Shared prompts, a masked gap, a truncated answer; answers of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def made(prompt, n, **more):
        ids = torch.randint(3, 200, (n,), generator=generator).tolist()
        mask = [i % 4 != 2 for i in range(n)]
        return Trajectory(prompt, ids, mask, [-1.0] * n, [0] * n, **more)

    return [[made([5, 6, 7], 5), made([5, 6, 7], 9, truncated=True)], [made([8], 3), made([8], 1)]]


def dense(model, temperature=1.0):
    """Log-probs over the vocabulary at each sampled token, by transformers' own forward of each sequence alone."""
    rows = []
    for t in [t for group in groups() for t in group]:
        logits = model(input_ids=torch.tensor([[*t.prompt_ids, *t.ids]])).logits[0, len(t.prompt_ids) - 1 : -1]
        rows.append((logits / temperature).log_softmax(-1)[torch.tensor(t.mask)])
    return torch.cat(rows)


def of_torch(log_q, log_p, beta):
    kl = partial(F.kl_div, reduction="none", log_target=True)
    if beta in (0, 1):
        return (kl(log_q, log_p) if beta == 0 else kl(log_p, log_q)).sum(-1)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return (beta * kl(log_m, log_p) + (1 - beta) * kl(log_m, log_q)).sum(-1)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def plain(seed, **sizes):
    """The same weights in a model that transformers runs."""
    return tiny_model(tokenizer(), **SIZES | sizes, seed=seed).eval()


@pytest.mark.parametrize("name", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient_are_those_of_the_dense_formula(name, temperature):
    rows, beta = BETAS[name]
    teacher = sharp(7, hidden=48, head_dim=24)  # another width
    batch = replace(pack(groups()), teachers=torch.zeros(4, dtype=torch.long))
    student = small_model(1)
    policy = Policy(student, temperature)
    out, loss = with_divergence(policy, batch, divergence=rows, teachers=[LocalTeacher(Policy(teacher, temperature))])
    torch.testing.assert_close(out.logp, policy(batch).logp)
    with torch.no_grad():
        log_p = dense(_plain_of(teacher, hidden=48, head_dim=24), temperature)
    other = plain(1)
    want = of_torch(dense(other, temperature), log_p, beta)
    torch.testing.assert_close(loss[batch.mask], want, rtol=1e-4, atol=1e-5)
    assert (loss[~batch.mask] == 0).all()
    got = gradients(student, (per_token(batch) * loss).sum())
    torch.testing.assert_close(got, gradients(other, want.mean()), rtol=1e-3, atol=1e-6)


def _plain_of(model, **sizes):
    """A model that transformers runs with the weights of a prepared one."""
    other = plain(0, **sizes)
    other.load_state_dict(model.state_dict())
    return other


def test_the_top_k_is_the_divergence_with_one_token_for_the_rest():
    teacher, student, k = sharp(7), small_model(1), 5
    batch = replace(pack(groups()), teachers=torch.zeros(4, dtype=torch.long))
    made = with_teachers(batch, [LocalTeacher(Policy(teacher), 16)], Distillation(forward_kl_rows, top_k=k))
    _, loss = with_divergence(Policy(student), made, divergence=forward_kl_rows, teachers=[])
    twice = replace(made, teacher_ids=made.teacher_ids * 0)
    with pytest.raises(ValueError, match="ids must be distinct in each row"):
        with_divergence(Policy(student), twice, divergence=forward_kl_rows, teachers=[])
    with torch.no_grad():
        p, q = (dense(model).exp() for model in (_plain_of(teacher), plain(1)))
    ids = p.topk(k).indices
    assert (made.teacher_ids[batch.mask] == ids).all()
    p, q = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1) for x in (p, q))
    torch.testing.assert_close(loss[batch.mask], (p * (p / q).log()).sum(1), rtol=1e-4, atol=1e-5)


def test_the_advantage_is_the_difference_of_log_probs_plus_that_of_the_reward():
    teacher, student = sharp(7), small_model(1)
    batch = replace(pack(groups()), teachers=torch.zeros(4, dtype=torch.long), advantages=torch.full((19,), 0.25))
    old = Policy(student)(batch).logp.detach()
    made = with_teachers(replace(batch, old_logp=old), [LocalTeacher(Policy(teacher))], Distillation(None, coef=0.5))
    with torch.no_grad():
        log_p, log_q = (dense(model) for model in (_plain_of(teacher), plain(1)))
    sampled = batch.targets[batch.mask][:, None]
    want = 0.25 + 0.5 * (log_p - log_q).gather(1, sampled)[:, 0]
    torch.testing.assert_close(made.advantages[batch.mask], want, rtol=1e-4, atol=1e-4)


def test_each_sequence_has_the_teacher_of_its_row():
    teachers = [sharp(7), sharp(8, hidden=48, head_dim=24)]
    local, rows = [LocalTeacher(Policy(model)) for model in teachers], reverse_kl_rows
    student = Policy(small_model(1))
    batch = replace(pack(groups()), teachers=torch.tensor([0, 1, 1, 0]))
    tokens = batch.teachers.repeat_interleave(batch.cu_seqlens.diff())
    single = [
        with_divergence(student, replace(batch, teachers=batch.teachers * 0), divergence=rows, teachers=[x])[1]
        for x in local
    ]
    want = torch.where(tokens == 0, *single)
    assert not torch.allclose(*single)
    torch.testing.assert_close(with_divergence(student, batch, divergence=rows, teachers=local)[1], want)
    top = with_teachers(batch, local, Distillation(rows, top_k=4))
    alone = [
        with_teachers(replace(batch, teachers=batch.teachers * 0), [x], Distillation(rows, top_k=4)) for x in local
    ]
    assert (top.teacher_ids == torch.where(tokens[:, None] == 0, *(x.teacher_ids for x in alone)))[batch.mask].all()


def test_a_teacher_may_have_no_sequence_of_a_step():
    local = [LocalTeacher(Policy(sharp(seed))) for seed in (7, 8, 9)]
    batch, how = replace(pack(groups()), teachers=torch.ones(4, dtype=torch.long)), Distillation(top_k=4)
    made = with_teachers(batch, local, how)
    alone = with_teachers(replace(batch, teachers=batch.teachers * 0), local[1:2], how)
    assert torch.equal(made.teacher_ids, alone.teacher_ids)
    assert torch.equal(made.teacher_logp, alone.teacher_logp)


def test_rows_for_tokens_that_the_tokenizer_lacks_do_not_count():
    """Qwen2.5's sizes pad one vocabulary to different numbers of rows."""
    student, batch = Policy(small_model(1)), replace(pack(groups()), teachers=torch.zeros(4, dtype=torch.long))
    teacher, wide = sharp(7), sharp(7)
    head = wide.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.cat([head.weight, torch.zeros(16, head.weight.shape[1])]))
    losses = [
        with_divergence(student, batch, divergence=reverse_kl_rows, teachers=[LocalTeacher(Policy(x))])[1]
        for x in (teacher, wide)
    ]
    torch.testing.assert_close(*losses)


class Letters:
    """A tokenizer of one token for each of the given texts, the longest first."""

    all_special_ids, eos_token_id = (0,), 0

    def __init__(self, *texts):
        self.texts = ["<end>", *texts]

    def decode(self, ids, **_options):
        return "".join(self.texts[i] for i in ids)

    def encode(self, text, **_options):
        ids = []
        while text:
            ids.append(
                max((i for i, x in enumerate(self.texts) if text.startswith(x)), key=lambda i: len(self.texts[i]))
            )
            text = text[len(self.texts[ids[-1]]) :]
        return ids


def test_rows_of_two_tokenizers_meet_where_their_tokens_begin_at_one_character():
    from rlkit.model.alignment import aligned

    ours, theirs = Letters("a", "b", "ab", "c"), Letters("a", "b", "c", "bc")
    answer = [3, 4, 1, 2, 0]  # ab c a b <end>
    sample = Trajectory([1, 4], answer, [True] * 5, [-1.0] * 5, [0] * 5)
    batch = pack([[sample, replace(sample, ids=[1, 3, 4], mask=[True] * 3, logp=[-1.0] * 3, versions=[0] * 3)]])
    own, rows = aligned(batch, ours, theirs)
    assert own.targets[:4].tolist() == [1, 4, 1, 2]  # a bc a b
    assert rows[:5].tolist() == [0, -1, 2, 3, 4]  # c begins inside bc; the last row predicts the end
    start = int(own.cu_seqlens[1])
    assert rows[5:].tolist() == [start, start + 1, -1]  # a ab c against a a bc


def test_uld_takes_a_teacher_of_another_vocabulary():
    teacher = prepare_model(plain(7))
    batch = replace(pack(groups()), teachers=torch.zeros(4, dtype=torch.long))
    same = LocalTeacher(Policy(teacher), tokenizers=(tokenizer(), tokenizer()))
    student = Policy(small_model(1))
    loss = with_divergence(student, batch, divergence=uld_rows, teachers=[same])[1]
    whole = with_divergence(student, batch, divergence=uld_rows, teachers=[LocalTeacher(Policy(teacher))])[1]
    assert (loss != 0).sum() >= 3
    assert loss.max() <= 2
    assert (loss[~batch.mask] == 0).all()
    first = batch.cu_seqlens[:-1]  # the same text so far, in the same tokens
    torch.testing.assert_close(loss[first], whole[first], rtol=1e-4, atol=1e-5)


def run(folder, teachers, student=None, loop=distill, steps=12, **flat):
    student = student or small_model(1)
    flat = {
        "steps": steps, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 6, "max_tokens": 256, "lr": 0.02,
        "prompts": PROMPTS, "score": None, "output": folder, **flat,
    }  # fmt: skip
    models = (student,) if loop is grpo else (student, teachers)
    asyncio.run(call(loop, *models, tokenizer(), LocalEngine(student, max_len=64), **flat))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


LEARNS = {
    "reverse": Distillation(reverse_kl_rows), "forward": Distillation(forward_kl_rows),
    "jsd": Distillation(jsd_rows(0.5), coef=4), "top k": Distillation(reverse_kl_rows, top_k=16),
    "advantage": Distillation(None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_the_student_comes_nearer_to_its_teachers(name, tmp_path, capsys):
    """A student that is sure of its tokens, and two teachers that are less so."""
    teachers = {key: LocalTeacher(Policy(small_model(seed)), 256) for key, seed in (("a", 7), ("b", 8))}
    losses = [x["teacher/loss"] for x in run(tmp_path, teachers, sharp(1), distillation=LEARNS[name])]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert "no learning signal" not in capsys.readouterr().out


def length_and_digits(completion, row):
    return float(sum(map(ord, completion)) % 7)


@pytest.mark.slow
def test_without_a_teacher_it_is_grpo_and_both_train_at_once(tmp_path):
    score = scorer(length_and_digits, tokenizer=tokenizer(), timeout_s=60)
    teacher = LocalTeacher(Policy(sharp(7)), 128)
    both = {"score": score, "steps": 3, "minibatches": 2}
    off = run(tmp_path / "off", teacher, distillation=Distillation(coef=0.0), **both)
    of_grpo = run(tmp_path / "grpo", None, loop=grpo, **both)
    assert [{k: v for k, v in line.items() if k != "teacher/loss"} for line in off] == of_grpo
    on = run(tmp_path / "on", teacher, **both)
    assert on[0]["grad_norm"] != of_grpo[0]["grad_norm"]
    assert on[0]["reward/mean"] == of_grpo[0]["reward/mean"]


class Sampled:
    """A teacher that only gives log-probs of the sampled tokens and of its top k."""

    def logp(self, batch):
        return torch.full((batch.num_tokens,), -1.0)

    def top_logp(self, batch, k):
        return batch.targets[:, None], torch.full((batch.num_tokens, 1), -1.0)


@pytest.mark.parametrize(
    ("teachers", "flat", "message"),
    [
        (Sampled(), {}, r"the teacher Sampled gives log-probs of some tokens only: give Distillation\(top_k=16\)"),
        ({"x": Sampled()}, {"distillation": Distillation(None)}, "row 1: 'teacher' is 'a', and the teachers are x"),
        ({"a": Sampled()}, {"distillation": Distillation(None, column="z")}, "row 1: there is no column 'z'"),
        (Sampled(), {"distillation": Distillation(top_k=2)}, r"ids of shape \[\d+, 1\] for \d+ tokens and k = 2"),
        (
            LocalTeacher(Policy(small_model(7)), tokenizers=(1, 2)), {"distillation": Distillation(None)},
            "has another tokenizer: only a divergence such as uld_rows suits it",
        ),
    ],
)  # fmt: skip
def test_a_teacher_that_cannot_do_it_is_refused(teachers, flat, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", teachers, **flat)


def test_a_divergence_of_the_user_gives_a_loss_per_row():
    batch = replace(pack(groups()), teachers=torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"the divergence must return a loss per row, \[\d+\], got \[\]"):
        with_divergence(
            Policy(small_model(1)),
            batch,
            divergence=lambda q, p: (q - p).mean(),
            teachers=[LocalTeacher(Policy(sharp(7)))],
        )


@pytest.mark.slow_cases("forward")
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("name", BETAS)
def test_it_is_the_loss_of_trls_trainers(name, monkeypatch):
    """Value and gradient of every parameter, on the same padded batch, by the code of GKDTrainer and of the stable
    DistillationTrainer."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    rows, beta = BETAS[name]
    samples = [t for group in groups() for t in group]
    longest = max(len(t.prompt_ids) + len(t.ids) for t in samples)
    ids, labels = (torch.full((len(samples), longest), fill) for fill in (0, -100))
    for i, t in enumerate(samples):
        whole = [*t.prompt_ids, *t.ids]
        ids[i, : len(whole)] = torch.tensor(whole)
        labels[i, : len(whole)] = torch.tensor(
            [*[-100] * len(t.prompt_ids), *(x if m else -100 for x, m in zip(t.ids, t.mask))]
        )
    padding = {
        "attention_mask": (
            torch.arange(longest) < torch.tensor([[len(t.prompt_ids) + len(t.ids)] for t in samples])
        ).long()
    }
    teacher, ours, gkd, stable = sharp(7), small_model(1), plain(1), plain(1)
    batch = replace(pack(groups()), teachers=torch.zeros(4, dtype=torch.long))
    loss = (
        per_token(batch)
        * with_divergence(Policy(ours), batch, divergence=rows, teachers=[LocalTeacher(Policy(teacher))])[1]
    ).sum()
    other = _plain_of(teacher)
    with torch.no_grad():
        logits, hidden = other(input_ids=ids, **padding).logits, other.model(input_ids=ids, **padding).last_hidden_state
    of_gkd = GKDTrainer.generalized_jsd_loss(
        gkd(input_ids=ids, **padding).logits[:, :-1], logits[:, :-1], labels[:, 1:], beta
    )
    of_stable, _, _ = _chunked_divergence_loss(
        stable.model(input_ids=ids, **padding).last_hidden_state[:, :-1], hidden[:, :-1], stable.lm_head.weight,
        other.lm_head.weight, (labels[:, 1:] != -100).long(), beta,
    )  # fmt: skip
    got = gradients(ours, loss)
    assert math.isfinite(float(loss))
    for value, model in ((of_gkd, gkd), (of_stable, stable)):
        torch.testing.assert_close(loss, value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got, gradients(model, value), rtol=1e-3, atol=2e-6)
