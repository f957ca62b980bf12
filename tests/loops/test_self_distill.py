"""A teacher that reads a prompt of its own: rows, values against TRL's SDFT and SDPO, the average, held-out rows."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from small import SIZES, small_model
from test_distill import BETAS, PROMPTS, gradients, groups, of_torch, plain, run, sharp

from rlkit.loops.distill import Distillation, averaged, follow, with_routes, with_teachers
from rlkit.loops.updates import per_token
from rlkit.losses.distillation import forward_kl_rows, reverse_kl_rows
from rlkit.model.forward import Policy
from rlkit.model.teachers import LocalTeacher, as_teachers_read, with_divergence
from rlkit.packing import pack, select
from rlkit.settings import Penalties

HINTS = [[40, 41, 42, 43, 44], [9], [40, 41, 42, 43, 44], [3, 30]]  # of the answers of `groups`; two are the same


def hinted():
    answers = [replace(t, info={"teacher_prompt": h}) for t, h in zip([t for g in groups() for t in g], HINTS)]
    both = [answers[:2], answers[2:]]
    return with_routes(pack(both), both, [""])


def logits(model, prompts):
    """Logits at each sampled token, by transformers' own forward of each sequence alone after `prompts`."""
    rows = []
    for t, prompt in zip([t for g in groups() for t in g], prompts, strict=True):
        ids = torch.tensor([[*prompt, *t.ids]])
        rows.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1][torch.tensor(t.mask)])
    return torch.cat(rows)


def own_prompts():
    return [t.prompt_ids for g in groups() for t in g]


def test_the_teacher_reads_its_prompts_and_the_rows_keep_their_places():
    batch = hinted()
    read = as_teachers_read(batch)
    assert read.targets is batch.targets
    assert read.prefix_cu.numel() - 1 == 3
    for i, hint in enumerate(HINTS):
        prefix, start = int(read.prefix_ids[i]), int(batch.cu_seqlens[i])
        ids = read.prefix_tokens[read.prefix_cu[prefix] : read.prefix_cu[prefix + 1]].tolist()
        assert [*ids, int(read.tokens[start])] == hint
        end = int(batch.cu_seqlens[i + 1])
        assert torch.equal(read.tokens[start + 1 : end], batch.tokens[start + 1 : end])
    part = select(batch, [3, 0])
    assert part.teacher_prompts.tolist() == [[3, 30, -1, -1, -1], HINTS[0]]
    assert as_teachers_read(replace(batch, teacher_prompts=None)).prefix_ids is batch.prefix_ids


def whole(name):
    """Our loss, and logits of student and teacher: the same weights, which read another prompt."""
    student, policy = plain(1), Policy(small_model(1))
    rows, beta = BETAS[name]
    batch = hinted()
    loss = with_divergence(policy, batch, divergence=rows, teachers=[LocalTeacher(policy)])[1]
    with torch.no_grad():
        of_teacher = logits(student, HINTS)
    return policy.model, batch, loss, student, logits(student, own_prompts()), of_teacher, beta


@pytest.mark.parametrize("name", BETAS)
def test_the_model_is_its_own_teacher_without_a_gradient_of_the_teacher(name):
    model, batch, loss, student, q, p, beta = whole(name)
    want = of_torch(q.log_softmax(-1), p.log_softmax(-1), beta)
    torch.testing.assert_close(loss[batch.mask], want, rtol=1e-4, atol=1e-6)
    assert want.max() > 1e-3
    got = gradients(model, (per_token(batch) * loss).sum())
    torch.testing.assert_close(got, gradients(student, want.mean()), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("package", ["sdft", "sdpo"])
def test_the_values_are_those_of_trl(package, monkeypatch):
    """TRL 1.16.0, trl/experimental/sdft/loss_utils.py and sdpo/loss_utils.py: whole vocabulary, and sampled token."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from importlib import import_module

    theirs = import_module(f"trl.experimental.{package}.loss_utils")
    for name in BETAS:
        model, batch, loss, student, q, p, beta = whole(name)
        want = theirs.compute_full_logit_self_distillation_loss(q, p, distillation_alpha=beta)
        torch.testing.assert_close(loss[batch.mask], want, rtol=1e-4, atol=1e-6)
        got = gradients(model, (per_token(batch) * loss).sum())
        torch.testing.assert_close(got, gradients(student, want.mean()), rtol=1e-3, atol=1e-6)
    model, batch, _, student, q, p, _ = whole("reverse")
    ids = batch.targets[batch.mask]
    want = theirs.compute_sampled_token_self_distillation_loss(q, p, ids, distillation_alpha=1.0)
    policy = Policy(model)
    batch = replace(batch, old_logp=policy(batch).logp.detach(), advantages=torch.zeros(batch.num_tokens))
    made = with_teachers(batch, [LocalTeacher(policy)], Distillation(None))
    ours = -(made.advantages * policy(batch).logp)  # the gradient of ppo_clip on policy
    got = gradients(model, (per_token(batch) * ours).sum())
    torch.testing.assert_close(got, gradients(student, want.mean()), rtol=1e-3, atol=1e-6)


def test_the_top_tokens_are_those_of_the_hinted_teacher():
    teacher, batch = sharp(7), hinted()
    made = with_teachers(batch, [LocalTeacher(Policy(teacher), 32)], Distillation(forward_kl_rows, top_k=3))
    other = plain(7)
    other.get_output_embeddings().weight.data.mul_(20)
    with torch.no_grad():
        want = logits(other, HINTS).log_softmax(-1).topk(3)
    assert torch.equal(made.teacher_ids[batch.mask], want.indices)
    torch.testing.assert_close(made.teacher_logp[batch.mask], want.values, rtol=1e-4, atol=1e-4)


def test_the_average_follows_and_is_refused_where_it_cannot():
    model, copy = small_model(1), small_model(1)
    start = [p.detach().clone() for p in copy.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    follow(copy, model, rate=0.25)
    follow(copy, model, rate=0.25)
    for p, before in zip(copy.parameters(), start):
        torch.testing.assert_close(p.detach(), before + 1 - 0.75**2)
    teacher, ema = LocalTeacher(Policy(copy)), Distillation(ema=0.1)
    assert averaged(ema, {"": teacher}, model) is copy
    assert averaged(Distillation(), {"": teacher}, model) is None
    for teachers in ({"": LocalTeacher(Policy(model))}, {"a": teacher, "b": teacher}, {"": object()}):
        with pytest.raises(ValueError, match="`ema` needs one teacher in this process: a second copy"):
            averaged(ema, teachers, model)
    with pytest.raises(ValueError, match="second copy"):
        averaged(ema, {"": LocalTeacher(Policy(small_model(1, hidden=SIZES["hidden"] * 2)))}, model)
    with pytest.raises(ValueError, match=r"`ema` must be in \[0, 1\], got 2"):
        averaged(Distillation(ema=2.0), {"": teacher}, model)
    with pytest.raises(ValueError, match="a checkpoint holds one of them"):
        averaged(ema, {"": teacher}, model, Penalties(kl_coef=0.1, ref_sync_steps=1))


@pytest.mark.slow
def test_a_run_with_an_average_resumes_with_it(tmp_path):
    """The hint is what a verifier said of the answer; held-out rows get none."""

    def length(completion, row):
        return {"score": float(len(completion)), "info": {"said": len(completion)}}

    seen = []

    def prompt(prompt, answer):
        seen.append(prompt.index)
        return [*prompt.ids, 30 + len(answer.ids)]

    def go(folder, **flat):
        student = sharp(1)
        teacher = LocalTeacher(Policy(sharp(1)), 256)
        how = Distillation(reverse_kl_rows, prompt=prompt, ema=0.5)
        more = {"prompts": PROMPTS[:6], "eval_prompts": PROMPTS[6:], "eval_steps": 1, "save_steps": 2, **flat}
        return run(folder, teacher, student, distillation=how, prompts_per_step=4, **more)

    through = go(tmp_path / "a", steps=4)
    assert set(seen) <= set(range(6))
    go(tmp_path / "b", steps=2)
    assert go(tmp_path / "b", steps=4, resume=True) == through
