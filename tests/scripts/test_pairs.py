"""The scripts on preference pairs and on labelled responses as a user runs them, alone and under torchrun."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from contextlib import nullcontext as ok
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm

from rlkit.model.pretrained import load_config, load_tokenizer
from rlkit.run.folder import read_metrics
from rlkit.scripts import cli, distill, dpo
from rlkit.scripts.args import Data, Episodes, Lora, Model
from rlkit.scripts.start import warn_of_steps
from rlkit.segments import sum_per_seq
from rlkit.settings import Optim, Rollouts

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def task(make_task):
    pairs = [{"prompt": f"{i}+1", "chosen": f"{i + 1}", "rejected": "x" * (1 + i % 6)} for i in range(40)]
    labelled = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if i % 4 else "rejected"], "label": i % 4 > 0}
        for i, pair in enumerate(pairs)
    ]
    return make_task(pairs=pairs, labelled=labelled)


def command(task, script, output, *flags):
    data = str(task / ("labelled.jsonl" if script == "kto" else "pairs.jsonl"))
    given = ["--model", str(task / "model"), "--data", data, "--eval-data", data, "--steps", "4", "--eval-steps", "2"]
    given += ["--batch-size", "8", "--lr", "1e-3", "--max-tokens", "100", "--output", str(output), "--device", "cpu"]
    return [*given, *flags]


def run(task, script, output, *flags, prefix=()):
    line = [sys.executable, *prefix, "-m", f"rlkit.scripts.{script}", *command(task, script, output, *flags)]
    return warm.run(line, env=ENV, plots=False, capture_output=True, text=True, timeout=280, check=False)


def numbers(output):
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(output)]


def without_ties(lines):
    """Without the shares at steps 0 and 1, where the policy still is its reference: rounding decides them."""
    return [{k: v for k, v in line.items() if line["step"] > 1 or not k.endswith("accuracy")} for line in lines]


@pytest.mark.slow_cases("dpo-flags0", "kto-flags4")
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("dpo", []),
        pytest.param(*("dpo", ["--loss", "simpo"]), marks=pytest.mark.slow),
        pytest.param(*("dpo", ["--loss", "ipo", "--lora-rank", "4", "--precompute-reference"]), marks=pytest.mark.slow),
        pytest.param(*("kto", []), marks=pytest.mark.slow),
        ("kto", ["--loss", "apo_zero", "--lora-rank", "4", "--undesirable-weight", "3"]),
        ("reward_model", ["--dtype", "bf16"]),
    ],
)
def test_a_run_writes_a_model_and_its_metrics(task, tmp_path, script, flags):
    done = run(task, script, tmp_path / "run", *flags)
    assert done.returncode == 0, done.stderr
    lines = numbers(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[4]["eval/loss"] < lines[2]["eval/loss"] < lines[0]["eval/loss"]
    assert (tmp_path / "run/model/model.safetensors").exists()
    assert "accuracy" in done.stdout
    hint = "30 desirable and 10 undesirable responses: balance them with --undesirable-weight 3 or"
    assert (hint in done.stderr) == (script == "kto" and not flags)


@pytest.mark.parametrize(
    ("loss", "formula", "free"),
    [
        ("apo_zero", lambda c, r: 1 - torch.sigmoid(c / 2) + torch.sigmoid(r / 2), False),
        ("cpo", lambda c, r: torch.log1p((r / 2 - c / 2).exp()), True),
    ],
)
def test_names_of_papers_are_losses(loss, formula, free):
    c, r = torch.tensor([[-1.0, -0.5, -2.0], [-0.25, -3.0, -1.0]], dtype=torch.float64)
    flags = dpo.Loss(loss=loss, beta=0.5)
    function, reduce = dpo.loss_of(flags, None)
    torch.testing.assert_close(function(c, r), formula(c, r))
    assert (reduce, loss in dpo.NO_REFERENCE) == (sum_per_seq, free)


@pytest.mark.parametrize(("loss", "expected"), [("dpo", 0.1), ("cpo", 0.1), ("simpo", 2.0)])
def test_the_default_beta_is_of_the_loss(loss, expected):
    c, r = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.5])
    function, _ = dpo.loss_of(dpo.Loss(loss=loss), None)
    margin = expected * (c - r) - (0.5 if loss == "simpo" else 0.0)
    torch.testing.assert_close(function(c, r), torch.log1p((-margin).exp()))
    given, _ = dpo.loss_of(dpo.Loss(loss=loss, beta=0.3), None)
    torch.testing.assert_close(given(c, r), torch.log1p((margin - (0.3 - expected) * (r - c)).neg().exp()))


def test_an_own_loss_has_no_beta():
    assert dpo.Loss(loss="own.py:pair").beta is None
    with pytest.raises(ValueError, match=r"`beta` is for `loss` dpo"):
        dpo.Loss(loss="own.py:pair", beta=0.1)


def test_conflicting_flags_are_refused(task, tmp_path, capsys):
    for flags, message in [
        (["--loss", "ipo", "--label-smoothing", "0.1"], "exo_pair, not ipo"),
        (["--loss", "orpo", "--reference", str(task / "model")], "not orpo: the others have no reference"),
        (
            ["--loss", "cpo", "--precompute-reference"],
            "not cpo: the others have no reference",
        ),
        (["--loss", "hinge", "--gamma", "2"], "--gamma is for --loss simpo, not hinge"),
        (["--train-vision"], f"error: --train-vision: {task / 'model'} has no vision tower"),
        (["--reference", str(task / "nothing")], f"error: --reference '{task / 'nothing'}': no folder; give a"),
    ]:
        with pytest.raises(SystemExit) as ended:
            cli.run(dpo.main, dpo.Args, None, argv=command(task, "dpo", tmp_path / "run", *flags))
        assert ended.value.code == 2
        assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_learning_rate_of_0_is_named_once(caplog):
    said = {}
    for lr in (0.0, 1e-6):
        args = dpo.Args(Model("m"), Data("d.jsonl", eval_data="d.jsonl"), optim=Optim(lr=lr))
        warn_of_steps(args)
        said[lr] = [record.getMessage() for record in caplog.records]
        caplog.clear()
    assert said == {0.0: ["--lr 0: no step changes the weights of `model`"], 1e-6: []}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["dpo", "kto", "reward_model"])
def test_two_ranks_log_the_same_numbers(task, tmp_path, script):
    assert run(task, script, tmp_path / "alone").returncode == 0
    for flags in ([], ["--parallel.tp", "2"]):
        output = tmp_path / f"ranks{len(flags)}"
        done = run(task, script, output, *flags, prefix=TORCHRUN)
        assert done.returncode == 0, done.stderr[-4000:]
        for a, b in zip(*(without_ties(numbers(folder)) for folder in (output, tmp_path / "alone")), strict=True):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


OWN = """
import torch
from rlkit import losses

def pair(chosen, rejected):
    return losses.dpo(chosen, rejected, beta=0.1)

def single(log_ratio, desirable, **options):
    return losses.kto_unpaired(log_ratio, desirable, **options)

def ranked(chosen, rejected):
    return losses.bradley_terry(chosen, rejected, center_coef=0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "name"), [("dpo", "pair"), ("kto", "single"), ("reward_model", "ranked")])
def test_a_loss_in_a_file_trains_like_the_same_loss_by_name(task, tmp_path, script, name):
    (tmp_path / "own.py").write_text(OWN)
    module = importlib.import_module(f"rlkit.scripts.{script}")
    for output, flags in (("named", []), ("own", ["--loss", f"{tmp_path / 'own.py'}:{name}"])):
        given = command(task, script, tmp_path / output, "--steps", "2", *flags)
        cli.run(module.main, module.Args, None, argv=given)
    assert numbers(tmp_path / "own") == numbers(tmp_path / "named")


def test_more_tokens_of_a_teacher_than_there_are_are_refused_before_it_loads(task):
    path, tokenizer = str(task / "model"), load_tokenizer(task / "model")
    num_rows = load_config(path).vocab_size
    for k in (num_rows, num_rows + 1):
        args = distill.Args(Model(path), Data("d"), distill.Loss(path, teacher_top_k=k))
        place = SimpleNamespace(tokenizer=tokenizer, num_rows=num_rows)
        with pytest.raises(ValueError, match=f"{k} is more than the {num_rows} tokens") if k > num_rows else ok():
            distill.checked_teacher(args, place, path, has_images=False)


def test_a_teacher_that_is_the_student_is_named(task, tmp_path, caplog):
    path, link = str(task / "model"), tmp_path / "link"
    link.symlink_to(path)
    tokenizer, of_model = load_tokenizer(path), Model(path)
    place, asked = SimpleNamespace(tokenizer=tokenizer, num_rows=load_config(path).vocab_size), SimpleNamespace
    (tmp_path / "copy").symlink_to(shutil.copytree(path, tmp_path / "other"))
    for teachers, more, named in (
        (path, {}, True), (f"{link}/", {}, True), ((f"a={path}", f"b={link}"), {}, True),
        (str(tmp_path / "copy"), {}, False), ((f"a={path}", f"b={tmp_path / 'other'}"), {}, False),
        (path, {"episodes": Episodes(reward=("r.py:f",)), "rollouts": Rollouts(group_size=2)}, False),
        (path, {"lora": Lora(lora_rank=4)}, True), (path, {"lora": Lora(lora_rank=4, lora_base="nf4")}, False),
    ):  # fmt: skip
        args = distill.Args(of_model, Data("d"), distill.Loss(teachers), **more)
        prompt = asked(images=(), index=0, row={"teacher": "a"})
        distill.checked_teachers(args, place, asked(prompts=[prompt], eval_sets={}))
        assert ["--teacher is --model itself" in x for x in caplog.messages] == [True] * named, (teachers, more)
        caplog.clear()
