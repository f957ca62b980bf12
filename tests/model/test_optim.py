"""Optimizers by name and by function: against torch's own, over the right parameters, and resumed bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.sft import sft
from rlkit.model.forward import prepare_model
from rlkit.model.optim import cosine_lr, make_optimizer, muon, optimizer_step, schedule, set_lr
from rlkit.run.folder import read_metrics
from rlkit.settings import Optim, Schedule

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
EXAMPLES = [SimpleNamespace(ids=[i, i + 1, i + 2, i], mask=[True] * 4) for i in range(8)]


def model():
    return prepare_model(tiny_model(tiny_tokenizer(), **SIZES))


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    """Two steps of torch's optimizers on their own parameters give the same bits."""
    ours, theirs = model(), model()
    optimizer = muon(ours, lr=0.01, weight_decay=0.1)
    hidden = {n for n, p in theirs.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n}
    assert len(hidden) == 7
    named = dict(theirs.named_parameters())
    ends = [p for n, p in named.items() if p.ndim == 2 and n not in hidden]
    parts = [
        torch.optim.Muon([named[n] for n in hidden], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(ends, lr=0.01, weight_decay=0.1),
        torch.optim.AdamW([p for p in named.values() if p.ndim < 2], lr=0.01, weight_decay=0.0),
    ]
    for step in range(2):
        for net in (ours, theirs):
            torch.manual_seed(step)
            for p in net.parameters():
                p.grad = torch.randn(p.shape)
        set_lr(optimizer, 0.005)
        optimizer_step(optimizer, max_norm=torch.inf)
        for part in parts:
            set_lr(part, 0.005)
            part.step()
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p, named[name], rtol=1e-6, atol=1e-7)


def sgd(groups):
    return torch.optim.SGD(groups, lr=9.0, momentum=0.9)


def tensor_lr(groups):
    return torch.optim.AdamW(groups, lr=torch.tensor(9.0))


@pytest.mark.parametrize(
    "how",
    [{"optimizer": "muon"}, {"make_optimizer": sgd}, {"make_optimizer": tensor_lr}],
    ids=["muon", "sgd", "tensor"],
)
def test_a_resumed_run_has_the_same_bits(how, tmp_path, no_pictures):
    optim = Optim(lr=0.05, **how)
    lines = {}
    for name, parts in (("whole", [4]), ("parts", [2, 4])):
        for steps in parts:
            schedule = Schedule(tmp_path / name, steps=steps, save_steps=2, resume=steps != parts[0])
            sft(model(), tiny_tokenizer(), EXAMPLES, schedule, optim, batch_size=4)
        lines[name] = [(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name)]
    assert lines["whole"] == lines["parts"]
    assert lines["whole"][-1][0] < lines["whole"][0][0]


def test_a_function_of_the_user_gets_all_parameters_and_the_learning_rate_of_the_run():
    """One step of SGD without momentum: p - lr (g + decay p), with decay on matrices only."""
    net, optim = model(), Optim(weight_decay=0.5, make_optimizer=partial(torch.optim.SGD, lr=9.0))
    before = copy.deepcopy(net)
    optimizer = make_optimizer(net, optim, lr=0.1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer_step(optimizer, max_norm=torch.inf)
    for p, old in zip(net.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, old - 0.1 * (1 + 0.5 * old * (old.ndim > 1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda groups: 3, "the function must return a torch.optim.Optimizer, got int"),
        (lambda groups: torch.optim.SGD(groups[:1], lr=1.0), "lacks 5 trainable parameters, such as model.layers.0"),
    ],
)
def test_what_is_no_optimizer_of_the_model_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_optimizer(model(), Optim(make_optimizer=make), lr=0.1)


def test_weights_that_are_damaged_are_refused_where_they_would_train():
    net = model()
    with torch.no_grad():
        net.model.norm.weight[3] = torch.inf
    with pytest.raises(ValueError, match=r"NaN or infinite: 1 of \d+ tensors, such as model\.norm\.weight; copy or"):
        make_optimizer(net, Optim(), lr=0.1)
    net.model.norm.weight.requires_grad_(False)
    make_optimizer(net, Optim(), lr=0.1)


def test_muon_and_a_function_exclude_each_other():
    with pytest.raises(ValueError, match=r"`make_optimizer` is for `optimizer` adamw or FILE.py:FUNCTION, not muon"):
        replace(Optim(optimizer="muon"), make_optimizer=sgd)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (schedule("constant", lr=2.0, num_steps=8, warmup_steps=2), partial(lr_scheduler.ConstantLR, factor=1.0)),
        (
            schedule("linear", lr=2.0, num_steps=8, warmup_steps=2),
            partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=6),
        ),
        (
            schedule("cosine", lr=2.0, num_steps=8, warmup_steps=2),
            partial(lr_scheduler.CosineAnnealingLR, T_max=6),
        ),
        (
            partial(cosine_lr, lr=2.0, num_steps=8, warmup_steps=2, floor=0.25),
            partial(lr_scheduler.CosineAnnealingLR, T_max=6, eta_min=0.5),
        ),
    ],
)
def test_after_the_warm_up_a_schedule_is_torchs_own(ours, theirs):
    optimizer = torch.optim.SGD([torch.zeros(())], lr=2.0)
    after, want = theirs(optimizer), [1.0, 2.0]
    for _ in range(7):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        after.step()
    assert [ours(step) for step in range(9)] == pytest.approx(want, abs=1e-9)
