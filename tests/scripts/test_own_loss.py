"""`--loss FILE.py:FUNCTION` of GRPO: the same surrogate from a file trains bit for bit like the one with a name."""

from __future__ import annotations

import json
import re

import pytest
import screens

from rlkit.scripts import cli, grpo
from rlkit.scripts.cli import run
from rlkit.scripts.trial import LossError

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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "function", "flags"), [
    ("ppo_clip", "clip", ()), ("gspo", "sequences", ("--aggregate", "episode")),
])  # fmt: skip
def test_a_loss_in_a_file_trains_like_the_same_loss_by_name(task, tmp_path, name, function, flags):
    (tmp_path / "own.py").write_text(OWN)
    named = train(task, tmp_path / "named", "--loss", name)
    assert train(task, tmp_path / "own", "--loss", f"{tmp_path / 'own.py'}:{function}", *flags) == named
    assert any(line["ratio/clip_low"] + line["ratio/clip_high"] > 0 for line in named)


KL = """
from rlkit.losses import k2

def kl(logp, ref_logp):
    return k2(logp, ref_logp)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_kl_estimator_in_a_file_trains_like_the_same_one_by_name(task, tmp_path, place):
    (tmp_path / "own.py").write_text(KL)
    flags = ("--kl-coef", "0.5", "--kl-in", place, "--kl-estimator")
    named = train(task, tmp_path / "named", *flags, "k2")
    assert train(task, tmp_path / "own", *flags, f"{tmp_path / 'own.py'}:kl") == named
    assert named != train(task, tmp_path / "other", *flags, "k3")
    assert json.loads((tmp_path / "named" / "args.json").read_text())["kl_estimator"] == "k2"


WRONG = """
def number(log_ratio, batch):
    return 3

def average(log_ratio, batch):
    return log_ratio.mean()

def detached(log_ratio, batch):
    return -batch.advantages * log_ratio.detach().exp()

def climbs(log_ratio, advantages, *, mask):
    return log_ratio.exp() * advantages * mask

def half(log_ratio, batch):
    return -log_ratio.exp() * batch.advantages / 2

def other(x):
    return x

def nothing(log_ratio, batch):
    return log_ratio * float("nan")
"""


@pytest.mark.slow_cases("climbs-own.py:climbs: at ratio 1 the gradient is +A, expected -A (law on_policy)")
@pytest.mark.parametrize(("name", "message"), [
    ("broken", "own.py:broken failed on a batch of 18 tokens: AttributeError: 'Tensor' object has no"),
    ("number", "it must return a loss for each element, a tensor of shape [18] like its first argument, got int 3"),
    ("average", "it must return a loss for each element, a tensor of shape [18] like its first argument, got shape []"),
    ("detached", "a loss for each element, a tensor of shape [18] like its first argument, and it has no gradient"),
    ("nothing", "own.py:nothing: the loss or its gradient at a sampled token is NaN or infinite (law shape)"),
    ("climbs", "own.py:climbs: at ratio 1 the gradient is +A, expected -A (law on_policy)"),
    ("other", "a policy loss takes (log_ratio, batch) or (log_ratio, advantages), and other does not"),
])  # fmt: skip
def test_a_wrong_loss_is_one_error_before_a_model_or_a_folder(task, tmp_path, name, message):
    (tmp_path / "own.py").write_text(OWN + WRONG)
    spec = f"{tmp_path / 'own.py'}:{name}"
    for where in screens.EVERYWHERE:
        found = screens.said(lambda: train(task, tmp_path / "run", "--loss", spec), where)
        (said,) = screens.errors(found.out + found.err)
        assert said.startswith(f"error: --loss {spec}: ")
        assert message in said
        assert repr(found.error) == "SystemExit(2)"
        assert not (tmp_path / "run").exists()
    if name != "other":
        assert "--loss-unchecked takes it as it is" in said or name == "broken"


@pytest.mark.slow_cases(
    "nothing-must return a loss for each element, a tensor of shape [*] like its first argument, and all of it is",
    "number-must return a loss for each element, a tensor of shape [*] like its first argument, got int 3",
)
@pytest.mark.parametrize(("name", "message"), [
    ("broken", "failed: AttributeError: 'Tensor' object has no attribute 'advantages' (own.py, line 12)"),
    ("number", "must return a loss for each element, a tensor of shape [*] like its first argument, got int 3"),
    ("nothing", "must return a loss for each element, a tensor of shape [*] like its first argument, and all of it is"),
])  # fmt: skip
def test_an_unchecked_loss_that_fails_is_one_error_in_the_run(task, tmp_path, name, message):
    (tmp_path / "own.py").write_text(OWN + WRONG)
    spec = f"{tmp_path / 'own.py'}:{name}"
    found = screens.said(lambda: train(task, tmp_path / "run", "--loss", spec, "--loss-unchecked"), "pipe")
    (said,) = screens.errors(found.out + found.err)
    assert re.match(re.escape(f"error: --loss {spec} {message}").replace(r"\[\*\]", r"\[\d+\]"), said), said
    assert said.endswith("--debug shows the traceback")
    assert repr(found.error) == "SystemExit(1)"
    with pytest.raises(LossError):
        train(task, tmp_path / "debug", "--loss", spec, "--loss-unchecked", "--debug")


@pytest.mark.slow
def test_a_loss_that_climbs_runs_unchecked_and_what_a_loss_may_do_is_named(task, tmp_path, caplog):
    (tmp_path / "own.py").write_text(OWN + WRONG)
    assert train(task, tmp_path / "climbs", "--loss", f"{tmp_path / 'own.py'}:climbs", "--loss-unchecked")
    assert not [record for record in caplog.records if "law" in record.getMessage()]
    train(task, tmp_path / "half", "--loss", f"{tmp_path / 'own.py'}:half")
    (said,) = [record.getMessage() for record in caplog.records if "law" in record.getMessage()]
    assert said.startswith("own.py:half: at ratio 1 the gradient is -0.5 A, expected -A (law on_policy)")


OTHERS = """
import torch

from rlkit.advantages import Gae

def pairs(chosen, rejected):
    return -torch.nn.functional.logsigmoid(chosen - rejected)

def swapped(chosen, rejected):
    return pairs(rejected, chosen)

def average(chosen, rejected):
    return pairs(chosen, rejected).mean()

def labels(log_ratio, desirable, *, kl, beta, desirable_weight, undesirable_weight):
    return torch.where(desirable, log_ratio, -log_ratio) * beta

def rows(log_q, log_p):
    return -(log_q.exp() * (log_q - log_p)).sum(-1)

def whole(log_q, log_p):
    return log_q.exp() * (log_q - log_p)

def turned(rejected_scores, chosen_scores):
    return pairs(chosen_scores, rejected_scores)

def forward(teacher_logp, student_logp):
    return (teacher_logp.exp() * (teacher_logp - student_logp)).sum(-1)

def off_log_probs(batch, bootstrap):
    return Gae(batch.token_rewards + batch.old_logp, batch.token_rewards)

def leaks(batch, bootstrap):
    x = batch.token_rewards
    return Gae(x - x.mean(), x)

def old(log_ratio, batch):
    return -log_ratio.exp() * batch.advantages + 0 * batch.old_logp

def corrected(log_ratio, batch):
    return -log_ratio.exp() * batch.advantages * (batch.old_logp - batch.rollout_logp).exp().clamp(max=2)

def k1(logp, ref_logp):
    return logp - ref_logp

def advantage(batch, bootstrap):
    return batch.token_rewards

def zeros(batch, bootstrap):
    return Gae(0 * batch.token_rewards, batch.token_rewards)

def falls(batch, bootstrap):
    return Gae(-batch.token_rewards, batch.token_rewards)

def kl(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2

def detached_kl(logp, ref_logp):
    return kl(logp, ref_logp).detach()

def reversed_kl(ref_logp, logp):
    return logp - ref_logp

def negative_kl(logp, ref_logp):
    return ref_logp - logp

def ratio(logp, ref_logp):
    return torch.exp(ref_logp - logp)
"""


@pytest.mark.parametrize(("command", "flags", "error", "line"), [
    ("dpo", "--loss own.py:average", "own.py:average: it must return a loss for each element, a tensor", ""),
    ("dpo", "--loss own.py:swapped", "", "own.py:swapped rises with the log-ratio of the chosen"),
    ("dpo", "--loss own.py:pairs", "", ""),
    ("dpo", "--loss own.py:turned", "own.py:turned gets (chosen, rejected) in this order, and names them ['rejec", ""),
    ("distill", "--loss own.py:forward --teacher t", "own.py:forward gets (student, teacher) in this order", ""),
    ("reward_model", "--loss own.py:swapped", "", "own.py:swapped rises with the log-ratio of the chosen"),
    ("kto", "--loss own.py:labels", "", "own.py:labels rises with the log-ratio of desirable responses"),
    ("kto", "--loss own.py:pairs", "own.py:pairs failed: TypeError: pairs() got an unexpected keyword", ""),
    ("distill", "--loss own.py:whole --teacher t", "own.py:whole: it must return a loss for each element", ""),
    ("distill", "--loss own.py:rows --teacher t", "", "own.py:rows is larger where the student is the teacher"),
    ("grpo", "--advantage own.py:advantage --reward r.py:f", "own.py:advantage must return rlkit.advantages.Gae", ""),
    ("grpo", "--advantage own.py:leaks --reward r.py:f", "own.py:leaks: tokens at the end of an answer that", ""),
    ("grpo", "--advantage own.py:off_log_probs --reward r.py:f", "own.py:off_log_probs needs `batch.old_logp`, wh", ""),
    ("grpo", "--advantage own.py:off_log_probs --epochs 2 --reward r.py:f", "", "own.py:off_log_probs: the final"),
    ("grpo", "--loss own.py:old --reward r.py:f", "own.py:old needs `batch.old_logp`, which this run does not", ""),
    ("grpo", "--loss own.py:old --reward r.py:f --minibatches 2", "", ""),
    ("grpo", "--loss own.py:corrected --reward r.py:f --epochs 2", "", "own.py:corrected: the loss depends on `bat"),
    ("grpo", "--loss own.py:corrected --reward r.py:f --epochs 2 --correction none", "", ""),
    ("grpo", "--loss rlkit.losses:value_mse --reward r.py:f", "values.py:value_mse failed on a batch of 18 tokens", ""),
    ("grpo", "--loss rlkit.losses:opsm --reward r.py:f", "corrections.py:opsm: it must return a loss for each ele", ""),
    ("grpo", "--loss rlkit.losses:ppo_clip --reward r.py:f", "", ""),
    ("grpo", "--kl-estimator own.py:k1 --kl-coef 1 --reward r.py:f", "own.py:k1 in the loss has gradient 0 on", ""),
    ("grpo", "--kl-estimator own.py:k1 --kl-coef 1 --kl-in reward --reward r.py:f", "", ""),
    ("grpo", "--advantage own.py:zeros --reward r.py:f", "", "own.py:zeros: all its advantages are 0"),
    ("ppo", "--advantage own.py:falls --reward r.py:f", "", "own.py:falls: its advantages fall where the rewards rise"),
    ("ppo", "--advantage own.py:advantage --reward r.py:f", "own.py:advantage must return rlkit.advantages.Gae", ""),
    ("grpo", "--kl-estimator own.py:kl --kl-coef 1 --reward r.py:f", "", ""),
    ("grpo", "--kl-estimator own.py:detached_kl --kl-coef 1 --reward r.py:f", "own.py:detached_kl: it must return", ""),
    ("ppo", "--kl-estimator own.py:reversed_kl --kl-coef 1 --reward r.py:f", "own.py:reversed_kl gets (policy,", ""),
    ("ppo", "--kl-estimator own.py:negative_kl --kl-coef 1 --reward r.py:f", "", "own.py:negative_kl has a neg"),
    ("distill", "--kl-estimator own.py:ratio --kl-coef 1 --teacher t", "", "own.py:ratio is not 0 where policy"),
])  # fmt: skip
def test_losses_and_estimators_of_every_command_are_tried(tmp_path, monkeypatch, caplog, command, flags, error, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OTHERS)
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    ask = [command, "--model", "none", "--data", "rows.jsonl", *flags.split()]
    found = screens.said(lambda: cli.main(ask), "pipe")
    (said,) = screens.errors(found.err)
    assert (error or "model 'none': no folder") in said or "r.py" in said
    assert [line] * bool(line) == [x.getMessage()[: len(line)] for x in caplog.records if "own.py" in x.getMessage()]
    assert repr(found.error) == "SystemExit(2)"
