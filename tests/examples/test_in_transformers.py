"""examples/in_transformers.py: the losses equal those from full logits, for any split of a step into batches."""

import importlib
from functools import partial

import pytest
import torch
from snippets import blocks, run

from rlkit.data.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("accelerate", reason="pip install accelerate")
TOKENIZER = tiny_tokenizer()
SMALL = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}


@pytest.fixture(scope="module")
def example():
    return importlib.import_module("in_transformers")


def arguments(folder, **settings):
    from transformers import TrainingArguments

    base = {"use_cpu": True, "report_to": "none", "remove_unused_columns": False, "max_grad_norm": 0.0, "max_steps": 1,
            "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "save_strategy": "no"}  # fmt: skip
    return TrainingArguments(str(folder), **(base | settings))


def rows(example):
    """Eight rows with 2 to 9 labelled tokens."""
    return [example.row(TOKENIZER, "ab" * (i % 3 + 1), "x" * (i + 1)) for i in range(8)]


def full_logits_mean(model, examples):
    """The mean over all labelled tokens, from full logits, row by row and token by token."""
    terms = []
    for row in examples:
        logp = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        for t, label in enumerate(row["labels"]):
            if label != -100:
                terms.append(-logp[t - 1, label])
    return torch.stack(terms).mean()


def trained(example, folder, *, kind=None, **settings):
    """The parameters after one SGD step of `kind` (default: the SFT trainer) on the eight rows, and the logged loss."""
    model = tiny_model(TOKENIZER, **SMALL)
    pad = example.DataCollatorForSeq2Seq(TOKENIZER)
    trainer = (kind or example.SFT)(model, arguments(folder, logging_steps=1, **settings), pad, rows(example))
    trainer.train()
    return [p.detach() for p in model.parameters()], trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize(
    ("batch", "accumulated"),
    [(8, 1), (1, 8), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(2, 4, marks=pytest.mark.slow)],
)
def test_sft_is_the_mean_over_all_tokens_of_the_step(example, tmp_path, batch, accumulated):
    model = tiny_model(TOKENIZER, **SMALL)
    loss = full_logits_mean(model, rows(example))
    loss.backward()
    split = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
    after, logged = trained(example, tmp_path, **split)
    assert logged == pytest.approx(loss.item(), rel=1e-4)  # the log rounds to 4 digits
    difference = max(
        (p - (q - 0.1 * q.grad)).abs().max().item() for p, q in zip(after, model.parameters(), strict=True)
    )
    print(f"{accumulated} x {batch}: largest difference of the parameters {difference:.1e}")
    assert difference < 1e-6


def test_sft_equals_the_trainers_own_loss(example, tmp_path):
    """transformers' Trainer with the model's loss, from full logits, on the same uneven split."""
    from transformers import Trainer

    assert Trainer.loss_is_scaled_for_ga is None, "the attribute that the example sets"
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    ours, our_loss = trained(example, tmp_path, **split)
    theirs, their_loss = trained(example, tmp_path, kind=Trainer, **split)
    difference = max((p - q).abs().max().item() for p, q in zip(ours, theirs, strict=True))
    print(f"loss {our_loss}, Trainer {their_loss}; largest difference of the parameters {difference:.1e}")
    assert our_loss == pytest.approx(their_loss, rel=1e-4)
    assert difference < 1e-6


def test_a_loss_without_a_subclass(example, tmp_path):
    """docs/own-trainer.md: -p log p, p detached, of each label, over all labels of the step."""
    from transformers import Trainer

    (code,) = [code for code in blocks("docs/own-trainer.md") if "num_items_in_batch=None" in code]
    model, terms = tiny_model(TOKENIZER, **SMALL), []
    for row in rows(example):
        logp = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        terms += [-logp[t - 1, x].detach().exp() * logp[t - 1, x] for t, x in enumerate(row["labels"]) if x != -100]
    torch.stack(terms).mean().backward()
    kind = partial(Trainer, compute_loss_func=run(code, {})["dft_loss"])
    after, _ = trained(
        example, tmp_path, kind=kind, per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=10.0
    )
    for p, q, start in zip(after, model.parameters(), tiny_model(TOKENIZER, **SMALL).parameters(), strict=True):
        torch.testing.assert_close(p, q.detach() - 10 * q.grad, rtol=1e-4, atol=1e-6)
        assert q.grad.any() == (p != start).any()


ON_TWO_RANKS = """
import importlib.util, sys, torch, in_transformers
spec = importlib.util.spec_from_file_location("test", sys.argv[1])
test = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test)
settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
after, loss = test.trained(in_transformers, sys.argv[2], **settings)
if torch.distributed.get_rank() == 0:
    torch.save((after, loss), sys.argv[2] + "/after.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_sft_on_two_ranks_is_the_mean_over_all_tokens_of_the_step(example, tmp_path, on_two_ranks):
    on_two_ranks(ON_TWO_RANKS, __file__, tmp_path)
    after, _ = torch.load(tmp_path / "after.pt")
    expected, _ = trained(example, tmp_path, per_device_train_batch_size=8)
    difference = max((p - q).abs().max().item() for p, q in zip(after, expected, strict=True))
    print(f"two ranks: largest difference of the parameters {difference:.1e}")
    assert difference < 1e-6


def test_dpo_is_the_formula(example, tmp_path):
    model = tiny_model(TOKENIZER, **SMALL)
    pad = example.DataCollatorForSeq2Seq(TOKENIZER)
    pairs = [[example.row(TOKENIZER, "a", text) for text in ("yes" * (i + 1), "no")] for i in range(3)]
    trainer = example.DPO(model, arguments(tmp_path), pad, pairs, beta=0.3)
    reference = tiny_model(TOKENIZER, **SMALL)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    batch = pad([pair[i] for i in (0, 1) for pair in pairs])

    def total(m, row):
        return -full_logits_mean(m, [row]) * sum(label != -100 for label in row["labels"])

    margins = [
        total(model, good) - total(reference, good) - total(model, bad) + total(reference, bad) for good, bad in pairs
    ]
    expected = torch.stack([torch.log1p(torch.exp(-0.3 * margin)) for margin in margins]).mean()
    loss, _ = trainer.compute_loss(model, batch, return_outputs=True)
    assert abs(loss.item() - 0.6931) > 1e-3
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(x, model.lm_head.weight, retain_graph=True)[0] for x in (loss, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_evaluation_is_the_mean_over_its_tokens(example, tmp_path):
    model = tiny_model(TOKENIZER, **SMALL)
    pad = example.DataCollatorForSeq2Seq(TOKENIZER)
    trainer = example.SFT(model, arguments(tmp_path), pad, rows(example), rows(example))
    assert trainer.model_accepts_loss_kwargs, "evaluation counts labels too"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(full_logits_mean(model, rows(example)).item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "first", "last"), [("sft", 3.0, 2.2), ("dpo", 0.6, 0.55)])
def test_it_trains(example, tmp_path, task, first, last):
    trainer = example.main(task, output=str(tmp_path), use_cpu=True, save_strategy="no")
    curve = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(task, curve)
    assert curve[0] > first
    assert curve[-1] < last
