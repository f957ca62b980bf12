"""`--loss FILE.py:FUNCTION` of GRPO: the same surrogate from a file trains bit for bit like the one with a name."""

from __future__ import annotations

import json
import re

import pytest
import screens

from rlkit.scripts import grpo
from rlkit.scripts.cli import LossError, run

OWN = """
from rlkit.losses import gspo, ppo_clip

def clip(log_ratio, batch):
    return ppo_clip(log_ratio, batch.advantages, mask=batch.mask, clip_low=0.2, clip_high=0.28)

def sequences(log_ratio, batch):
    where = {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens}
    return gspo(log_ratio, batch.advantages, clip_low=3e-4, clip_high=4e-4, **where)

def broken(log_ratio, batch):
    return log_ratio.advantages
"""
FLAGS = "--steps 2 --prompts-per-step 4 --group-size 4 --max-new-tokens 6 --minibatches 2 --lr 1e-2 --device cpu"


def train(task, output, *flags):
    given = ["--model", str(task / "model"), "--data", str(task / "rows.jsonl"), "--output", str(output)]
    run(grpo.main, grpo.Args, None, argv=[*given, "--reward", f"{task / 'reward.py'}:score", *FLAGS.split(), *flags])
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.parametrize(("name", "function", "flags"), [
    ("ppo_clip", "clip", ()), ("gspo", "sequences", ("--aggregate", "episode")),
])  # fmt: skip
def test_a_loss_in_a_file_trains_like_the_same_loss_by_name(task, tmp_path, name, function, flags):
    (tmp_path / "own.py").write_text(OWN)
    named = train(task, tmp_path / "named", "--loss", name)
    assert train(task, tmp_path / "own", "--loss", f"{tmp_path / 'own.py'}:{function}", *flags) == named
    assert named[-1]["ratio/clip_low"] + named[-1]["ratio/clip_high"] > 0


WRONG = """
def number(log_ratio, batch):
    return 3

def average(log_ratio, batch):
    return log_ratio.mean()

def detached(log_ratio, batch):
    return -batch.advantages * log_ratio.detach().exp()

def nothing(log_ratio, batch):
    return log_ratio * float("nan")
"""


@pytest.mark.parametrize(("name", "message"), [
    ("broken", "failed: AttributeError: 'Tensor' object has no attribute 'advantages' (own.py, line 12)"),
    ("number", "must return a loss for each element, a tensor of shape [*] like its first argument, got int 3"),
    ("average", "must return a loss for each element, a tensor of shape [*] like its first argument, got shape []: do"),
    ("detached", "must return a loss for each element, a tensor of shape [*] like its first argument, and it has no g"),
    ("nothing", "must return a loss for each element, a tensor of shape [*] like its first argument, and all of it is"),
])  # fmt: skip
def test_a_loss_that_fails_or_returns_no_loss_is_one_error(task, tmp_path, name, message):
    (tmp_path / "own.py").write_text(OWN + WRONG)
    spec = f"{tmp_path / 'own.py'}:{name}"
    runs = iter(range(9))

    def call():
        train(task, tmp_path / f"run{next(runs)}", "--loss", spec)

    pattern = re.escape(f"error: --loss {spec} {message}").replace(r"\[\*\]", r"\[\d+\]")
    for where in screens.EVERYWHERE:
        found = screens.said(call, where)
        (said,) = screens.errors(found.out + found.err)
        assert re.match(pattern, said), said
        assert said.endswith("--debug shows the traceback")
        assert repr(found.error) == "SystemExit(1)"
    with pytest.raises(LossError):
        train(task, tmp_path / "debug", "--loss", spec, "--debug")
