"""DPO and reward models on pairs: against a forward of each row alone, however the batch is cut; and they learn."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from small import call
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlkit import losses
from rlkit.data.examples import Example, Pair
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.preference import dpo, with_reference
from rlkit.loops.reward_model import reward_model
from rlkit.loops.sft import sft
from rlkit.model.forward import prepare_model
from rlkit.model.heads import load_reward_model
from rlkit.model.lora import add_lora
from rlkit.segments import mean_per_seq
from rlkit.settings import Optim

SIZES = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
END = 258
BETA = 0.3


@cache
def tokenizer():
    return tiny_tokenizer()


def small_model():
    return prepare_model(tiny_model(tokenizer(), **SIZES))


def make_pairs(num):
    """Prefers small letters, of which there are as many as the pair's number says; some pairs are long."""
    made = []
    for i in range(num):
        prompt, n = [65 + i % 26] * (1 + i % 5), 1 + i % 7
        made.append(
            Pair(
                prompt, [97 + (i + k) % 26 for k in range(n)] + [END], [48 + (i + k) % 10 for k in range(8 - n)] + [END]
            )
        )
    return made


def logps(model, pair):
    """Sums of log-probs of the two responses, by a forward of each row alone."""
    out = []
    for ids in (pair.chosen, pair.rejected):
        row = torch.tensor(pair.prompt + ids)
        with torch.no_grad():
            table = model(row[None]).logits[0].double().log_softmax(-1)
        out.append(table[:-1].gather(1, row[1:, None])[len(pair.prompt) - 1 :, 0])
    return out


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def run(folder, loop=dpo, model=None, **changes):
    options = {"output": folder, "steps": 6, "lr_at": lambda step: 3e-3, "batch_size": 8, "eval_steps": 3}
    model = small_model() if model is None else model
    rows, held_out = make_pairs(40), make_pairs(10)[3:]
    if loop is sft:
        rows, held_out = map(chosen_examples, (rows, held_out))
    evaluated = {"eval_examples" if loop is sft else "eval_pairs": held_out}
    call(loop, model, tokenizer(), rows, **evaluated, **options | changes)
    return lines_of(folder)


def chosen_examples(pairs):
    made = [p.prompt + p.chosen for p in pairs]
    return [Example(ids, [True] * len(ids)) for ids in made]


def test_dpo_is_the_papers_loss_of_the_exported_model(tmp_path):
    untrained, *lines = run(tmp_path, reference=small_model(), loss=partial(losses.dpo, beta=BETA))
    assert lines[0]["loss"] == untrained["eval/loss"] == pytest.approx(math.log(2))
    assert lines[0]["margin"] == untrained["eval/margin"] == 0
    model, before = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tiny_model(tokenizer(), **SIZES)
    found = []
    for pair in make_pairs(10)[3:]:
        chosen, rejected = (float((a - b).sum()) for a, b in zip(logps(model, pair), logps(before, pair), strict=True))
        found.append((math.log1p(math.exp(-BETA * (chosen - rejected))), chosen > rejected, chosen - rejected, chosen))
    for key, column in zip(("loss", "accuracy", "margin", "chosen"), zip(*found, strict=True), strict=True):
        assert lines[-1][f"eval/{key}"] == pytest.approx(sum(column) / 7, rel=1e-4, abs=1e-5)
    assert lines[-1]["eval/accuracy"] == 1


def test_the_margin_of_each_pair_reaches_its_loss(tmp_path):
    """Before training all log-ratios are 0, so the loss of a pair is log(1 + e^margin)."""
    held_out = [replace(pair, margin=m) for pair, m in zip(make_pairs(4), (0.0, 0.5, -1.0, 2.0), strict=True)]
    options = {"reference": small_model(), "loss": partial(losses.dpo, beta=BETA), "steps": 1, "eval_pairs": held_out}
    some = [replace(pair, margin=1.0) for pair in make_pairs(8)]
    call(dpo, small_model(), tokenizer(), some, output=tmp_path, batch_size=8, eval_steps=1, **options)
    untrained, first = lines_of(tmp_path)
    assert first["loss"] == pytest.approx(math.log1p(math.e), rel=1e-6)
    wanted = sum(math.log1p(math.exp(pair.margin)) for pair in held_out) / 4
    assert untrained["eval/loss"] == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ValueError, match="either all pairs have a `margin`, or none has"):
        call(dpo, small_model(), tokenizer(), [*some, *make_pairs(1)], output=tmp_path / "b", batch_size=8, **options)


def test_a_loss_without_reference_reads_mean_log_probs_and_adds_the_likelihood(tmp_path):
    loss = partial(losses.orpo, beta=BETA)
    lines = run(tmp_path, loss=loss, reduce=mean_per_seq, sft_coef=0.7)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = []
    for pair in make_pairs(10)[3:]:
        c, r = (float(x.mean()) for x in logps(model, pair))
        odds = (c - math.log1p(-math.exp(c))) - (r - math.log1p(-math.exp(r)))
        found.append(BETA * math.log1p(math.exp(-odds)) - 0.7 * c)
    assert lines[-1]["eval/loss"] == pytest.approx(sum(found) / 7, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [dpo, reward_model])
def test_the_size_of_micro_batches_changes_nothing(tmp_path, loop):
    """Pairs of up to 19 tokens in micro-batches of 20, so of one or two, against all at once."""
    lines = []
    for max_tokens in (20, 10_000):
        model, options = small_model(), {}
        if loop is reward_model:
            small_model().save_pretrained(tmp_path / "policy")
            model = load_reward_model(tmp_path / "policy")
        else:
            options["reference"] = small_model()
        lines.append(run(tmp_path / str(max_tokens), loop, model, max_tokens=max_tokens, **options))
    for a, b in zip(*lines, strict=True):
        for key in b.keys() - {k for k in b if k.startswith("time/")}:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key


@pytest.mark.slow
def test_an_adapter_leaves_out_what_it_learned_for_its_reference(tmp_path):
    """The lines are those of a second model as the reference; `adapter/` over the first model is what `model/` is."""
    import peft

    lines = []
    for second in (True, False):
        model = add_lora(small_model(), rank=4)
        reference = small_model() if second else model
        lines.append(run(tmp_path / str(second), dpo, model, reference=reference))
    clock = {k for k in lines[0][-1] if k.startswith("time/")}
    for a, b in zip(*lines, strict=True):
        assert {k: v for k, v in a.items() if k not in clock} == {k: v for k, v in b.items() if k not in clock}
    assert lines[0][-1]["margin"] != 0
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "False/model")
    adapted = peft.PeftModel.from_pretrained(tiny_model(tokenizer(), **SIZES), tmp_path / "False/adapter")
    ids = torch.arange(20, 40)[None]
    torch.testing.assert_close(adapted(ids).logits, whole(ids).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="reference is the model that trains"):
        run(tmp_path / "same", dpo, whole, reference=whole)


@pytest.mark.slow
def test_log_probs_of_the_reference_that_were_computed_once_give_the_same_lines(tmp_path, monkeypatch):
    """Over two epochs, with evaluation and a resumed run; the model before training is its own reference."""
    import rlkit.loops.preference as module

    monkeypatch.setattr(module, "_AT_ONCE", 7)
    whole = run(tmp_path / "whole", reference=small_model(), steps=9)
    for steps, resume in ((4, False), (9, True)):
        model = small_model()
        scored = [with_reference(pairs, model, Optim(max_tokens=25)) for pairs in (make_pairs(40), make_pairs(10)[3:])]
        options = {"output": tmp_path / "run", "batch_size": 8, "eval_steps": 3, "steps": steps, "resume": resume}
        call(dpo, model, tokenizer(), scored[0], eval_pairs=scored[1], lr_at=lambda step: 3e-3, **options)
    for a, b in zip(lines_of(tmp_path / "run"), whole, strict=True):
        ties = {"accuracy", "eval/accuracy"} if b["step"] <= 1 else set()  # before a step: equal up to rounding
        for key in b.keys() - {k for k in b if k.startswith("time/")} - ties:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key
    assert whole[-1]["margin"] > 1
    other = {"output": tmp_path / "other", "steps": 1, "lr_at": lambda step: 0.0}
    for rows, options in [(scored[0], {"reference": small_model()}), (scored[0], {"eval_pairs": make_pairs(3)})]:
        with pytest.raises(ValueError, match=r"either all pairs have reference log-probs .* or none has"):
            call(dpo, small_model(), tokenizer(), rows, **other, **options)


def test_a_pair_that_no_micro_batch_holds_is_refused(tmp_path):
    sizes = [len(p.prompt) + len(p.chosen) + len(p.rejected) - 1 for p in make_pairs(40)]
    with pytest.raises(ValueError, match=f"the longest pair has {max(sizes)} tokens, and max_tokens=12 is"):
        run(tmp_path, reference=small_model(), max_tokens=12)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_at_step_0_only_the_untrained_model_is_evaluated(tmp_path, capsys):
    model = tiny_model(tokenizer(), **SIZES)
    (line,) = run(tmp_path / "none", sft, steps=0)
    assert "eval: loss/accuracy\n     0  5." in capsys.readouterr().out
    with torch.no_grad():
        rows = [torch.tensor(p.prompt + p.chosen) for p in make_pairs(10)[3:]]
        tables = [model(row[None]).logits[0].double().log_softmax(-1) for row in rows]
    nll = torch.cat([-table[:-1].gather(1, row[1:, None])[:, 0] for table, row in zip(tables, rows, strict=True)])
    assert line["eval/loss"] == pytest.approx(nll.mean().item(), rel=1e-5)
    assert [line["step"] for line in run(tmp_path / "some", sft, steps=4)] == [0, 1, 2, 3, 4]
    assert not (tmp_path / "none" / "model").exists()
    shutil.rmtree(tmp_path / "some" / "model")
    run(tmp_path / "some", sft, steps=4, resume=True)  # killed before its export
    assert (tmp_path / "some" / "model" / "config.json").exists()
    lines = run(tmp_path / "some", sft, steps=6, resume=True)
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 3, 4, 6]
    assert [line["step"] for line in run(tmp_path / "never", sft, eval_steps=0, steps=2)] == [1, 2]


def test_a_norm_of_0_that_would_train_nothing_is_refused(tmp_path):
    for max_norm in (0.0, math.nan):
        with pytest.raises(ValueError, match=r"`max_norm` must be above 0 \(inf: no limit\), got"):
            run(tmp_path / str(max_norm), sft, max_norm=max_norm)
    free, tight = (run(tmp_path / str(norm), sft, max_norm=norm, steps=2) for norm in (math.inf, 1e-9))
    assert free[1]["grad_norm"] == tight[1]["grad_norm"] > 0.1
    assert free[2]["loss"] < tight[2]["loss"]


def test_an_example_that_no_micro_batch_holds_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the longest example has \d+ tokens, and max_tokens=8 is what"):
        run(tmp_path, sft, max_tokens=8)


def test_a_reward_model_learns_and_transformers_reads_the_same_rewards(tmp_path):
    small_model().save_pretrained(tmp_path / "policy")
    lines = run(tmp_path / "run", reward_model, load_reward_model(tmp_path / "policy"), steps=12)
    assert lines[1]["loss"] == pytest.approx(math.log(2))
    assert lines[-1]["eval/accuracy"] == 1
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model").eval()
    found = []
    for pair in make_pairs(10)[3:]:
        with torch.no_grad():
            found.append(
                [float(model(torch.tensor([pair.prompt + ids])).logits) for ids in (pair.chosen, pair.rejected)]
            )
    chosen, rejected = zip(*found, strict=True)
    assert lines[-1]["eval/chosen"] == pytest.approx(sum(chosen) / 7, rel=1e-4)
    assert lines[-1]["eval/rejected"] == pytest.approx(sum(rejected) / 7, rel=1e-4)


def test_padding_that_ends_the_responses_is_taken_out_of_the_export(tmp_path):
    small_model().save_pretrained(tmp_path / "policy")
    model = load_reward_model(tmp_path / "policy")
    model.config.pad_token_id = END
    run(tmp_path / "run", reward_model, model, steps=1)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model").config.pad_token_id is None


@pytest.mark.slow
def test_resuming_gives_the_same_lines(tmp_path):
    whole = run(tmp_path / "whole", reference=small_model())
    run(tmp_path / "run", reference=small_model(), steps=4)
    again = run(tmp_path / "run", reference=small_model(), resume=True)
    strip = lambda lines: [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
    assert strip(again)[5:] == strip(whole)[5:]
