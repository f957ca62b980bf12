"""KTO on labelled responses: against a forward of each row alone in fp64, however the batch is cut; and it learns."""

from __future__ import annotations

import json
from functools import cache, partial

import pytest
import torch
from small import call
from transformers import AutoModelForCausalLM

from rlkit import losses
from rlkit.data.examples import Labelled
from rlkit.data.order import batch_indices
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.preference import kto
from rlkit.model.forward import prepare_model
from rlkit.model.lora import add_lora

SIZES = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
END = 258
BETA, DESIRABLE, UNDESIRABLE = 0.3, 1.25, 0.5
LOSS = partial(losses.kto_unpaired, beta=BETA, desirable_weight=DESIRABLE, undesirable_weight=UNDESIRABLE)


@cache
def tokenizer():
    return tiny_tokenizer()


def small_model(seed=0):
    return prepare_model(tiny_model(tokenizer(), **SIZES, seed=seed))


def make_examples(num):
    """Small letters are desirable, digits are not, three of five are; lengths differ."""
    made = []
    for i in range(num):
        start, desirable = (97, True) if i % 5 < 3 else (48, False)
        made.append(
            Labelled([65 + i % 26] * (1 + i % 5), [start + (i + k) % 10 for k in range(1 + i % 7)] + [END], desirable)
        )
    return made


TRAIN, HELD_OUT = make_examples(40), make_examples(50)[41:]


def logp_of(model, prompt, ids):
    """The response's log-prob given the prompt, by a forward of this row alone."""
    row = torch.tensor(prompt + ids)
    table = model(row[None]).logits[0].log_softmax(-1)
    return table[:-1].gather(1, row[1:, None])[len(prompt) - 1 :].sum()


def by_hand(model, reference, examples):
    """TRL's `_compute_loss` in words: kl of the responses moved on by one, then each label's term; one number a row."""
    with torch.no_grad():
        shifted = [examples[-1], *examples[:-1]]
        moved = [
            logp_of(model, e.prompt, s.response) - logp_of(reference, e.prompt, s.response)
            for e, s in zip(examples, shifted, strict=True)
        ]
        kl = max(0.0, float(sum(moved)) / len(moved))
    ratios, terms = [], []
    for e in examples:
        with torch.no_grad():
            before = logp_of(reference, e.prompt, e.response)
        ratio = logp_of(model, e.prompt, e.response) - before
        chosen, rejected = 1 - torch.sigmoid(BETA * (ratio - kl)), 1 - torch.sigmoid(BETA * (kl - ratio))
        terms.append(DESIRABLE * chosen if e.desirable else UNDESIRABLE * rejected)
        ratios.append(float(ratio.detach()))
    return kl, ratios, torch.stack(terms).mean()


def double(seed):
    return tiny_model(tokenizer(), **SIZES, seed=seed).double()


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def run(folder, model=None, **changes):
    options = {"output": folder, "steps": 6, "lr_at": lambda step: 3e-3, "batch_size": 8, "eval_steps": 3}
    options |= {"reference": small_model(), "eval_examples": HELD_OUT}
    call(kto, small_model() if model is None else model, tokenizer(), TRAIN, **options | changes)
    return lines_of(folder)


def mean_of(values, examples, label):
    chosen = [x for x, e in zip(values, examples, strict=True) if e.desirable == label]
    return sum(chosen) / len(chosen)


@pytest.mark.parametrize(("seed", "positive"), [(0, True), (1, False)])
def test_the_first_step_is_trls_formula_and_its_gradient(tmp_path, seed, positive):
    """Another model as the reference, so that log-ratios are not 0; the other way round their mean is negative."""
    how = {"loss": LOSS, "reference": small_model(1 - seed), "eval_steps": 0, "steps": 1, "max_norm": 1e9}
    line = run(tmp_path, small_model(seed), batch_size=12, **how)[0]
    rows = [TRAIN[i] for i in batch_indices(len(TRAIN), batch_size=12, seed=0, step=0)]
    model = double(seed)
    kl, ratios, loss = by_hand(model, double(1 - seed), rows)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert (kl > 0) == positive
    assert line["kl"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert line["chosen"] == pytest.approx(mean_of(ratios, rows, True), rel=1e-4)
    assert line["rejected"] == pytest.approx(mean_of(ratios, rows, False), rel=1e-4)
    right = [(x > kl) == e.desirable for x, e in zip(ratios, rows, strict=True)]
    assert line["accuracy"] == pytest.approx(sum(right) / 12)


@pytest.mark.slow
def test_the_evaluation_is_of_the_exported_model_and_it_learns(tmp_path):
    lines = run(tmp_path, loss=LOSS, steps=12)
    assert lines[0]["eval/kl"] == 0
    assert lines[0]["eval/loss"] == pytest.approx((DESIRABLE * 5 + UNDESIRABLE * 4) / 2 / 9)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").double()
    kl, ratios, loss = by_hand(model, double(0), HELD_OUT)
    assert lines[-1]["eval/kl"] == pytest.approx(kl, rel=1e-4)
    assert lines[-1]["eval/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert lines[-1]["eval/chosen"] == pytest.approx(mean_of(ratios, HELD_OUT, True), rel=1e-4)
    assert lines[-1]["eval/rejected"] == pytest.approx(mean_of(ratios, HELD_OUT, False), rel=1e-4)
    assert lines[-1]["eval/chosen"] > 1 > -1 > lines[-1]["eval/rejected"]
    assert lines[-1]["eval/logp/chosen"] > lines[0]["eval/logp/chosen"]
    assert lines[-1]["eval/logp/rejected"] < lines[0]["eval/logp/rejected"]
    assert lines[-1]["eval/accuracy"] == 1


@pytest.mark.slow
def test_the_size_of_micro_batches_changes_nothing(tmp_path):
    """Rows of up to 12 tokens in micro-batches of 13, so of one or a few, against all at once."""
    lines = [run(tmp_path / str(n), reference=small_model(1), max_tokens=n) for n in (13, 10_000)]
    assert lines[0][1]["kl"] > 0
    for a, b in zip(*lines, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_without_a_reference_point_kl_is_0_and_one_example_is_a_batch(tmp_path):
    options = {"reference": small_model(1), "reference_point": None, "loss": LOSS, "steps": 1, "eval_steps": 0}
    lines = run(tmp_path / "one", batch_size=1, max_tokens=12, **options)
    row = TRAIN[batch_indices(len(TRAIN), batch_size=1, seed=0, step=0)[0]]
    with torch.no_grad():
        ratio = float(logp_of(double(0), row.prompt, row.response) - logp_of(double(1), row.prompt, row.response))
    sign, weight = (1, DESIRABLE) if row.desirable else (-1, UNDESIRABLE)
    assert lines[0]["kl"] == 0
    assert lines[0]["loss"] == pytest.approx(weight / (1 + torch.tensor(sign * BETA * ratio).exp().item()), rel=1e-4)
    for changes in ({"batch_size": 1}, {"eval_examples": HELD_OUT[:1]}):
        with pytest.raises(ValueError, match="pairs prompts with others' responses, which takes two"):
            run(tmp_path / "refused", **changes)


def test_a_mismatched_response_that_no_micro_batch_holds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the longest prompt with a response that it meets has 12 tokens, and max_tok"):
        run(tmp_path, max_tokens=11)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_an_adapter_leaves_out_what_it_learned_for_its_reference(tmp_path):
    lines = []
    for second in (True, False):
        model = add_lora(small_model(), rank=4)
        lines.append(run(tmp_path / str(second), model, reference=small_model() if second else model))
    assert lines[0] == lines[1]
    assert lines[0][-1]["kl"] > 0


@pytest.mark.slow
def test_resuming_gives_the_same_lines(tmp_path):
    whole = run(tmp_path / "whole")
    run(tmp_path / "run", steps=4)
    again = run(tmp_path / "run", resume=True)
    assert again[5:] == whole[5:]
