"""Flags in a YAML file: it gives what the command line gives, is checked as that is, and a run leaves its own."""

from __future__ import annotations

import importlib
import json

import pytest
import screens
import yaml

from rlkit.scripts import cli, grpo
from rlkit.scripts.config import render

SCRIPTS = {name: ["--model", "m", "--data", "d"] for name in ("sft", "dpo", "kto", "reward_model")}
SCRIPTS |= {name: ["--model", "m", "--data", "d", "--reward", "a.py:b"] for name in ("grpo", "ppo")}
SCRIPTS["distill"] = ["--model", "m", "--data", "d", "--teacher", "t"]
GIVEN = [
    "--data", "a b.jsonl", "c#d.jsonl", "--rename", "question", "prompt", "a: b", "{c}", "--system-prompt", "yes",
    "--template-args", '{"x": [1, "y"]}', "--chat-template", "on", "--stop", "\n\n", "</s>", "5", "[x, y]",
    "\u2028", "é'\"",
    "--lr", "1e-6", "--max-norm", "inf", "--entropy-coef", "-0.5", "--success-range", "-1", "0.5", "--overlap",
    "--parallel.no-reshard-after-forward", "--parallel.tp", "2", "--tools", "q:f",
    "--stop-token-ids", "3", "5", "--reference", "null", "--keep", "7", "--no-debug", "--steps", "1_000",
]  # fmt: skip


def flags_of(argv, kind):
    return cli.parsed(cli.with_config(argv, kind).words, kind)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_printed_config_gives_the_flags_again(script, tmp_path, capsys):
    kind = importlib.import_module(f"rlkit.scripts.{script}").Args
    cli.main([script, *SCRIPTS[script], "--lr", "3e-7", "--print-config"])
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    found = flags_of(["--config", str(tmp_path / "run.yaml")], kind)
    assert found == flags_of([*SCRIPTS[script], "--lr", "3e-7"], kind)
    assert found.optim.lr == 3e-7


def test_every_kind_of_value_is_read_as_it_was_written(tmp_path):
    given = flags_of([*SCRIPTS["grpo"], *GIVEN], grpo.Args)
    (tmp_path / "run.yaml").write_text(render(given))
    assert flags_of([f"--config={tmp_path / 'run.yaml'}"], grpo.Args) == given
    plain = yaml.safe_load((tmp_path / "run.yaml").read_text())  # as other programs read it
    assert plain["stop"] == list(given.rollouts.stop)
    assert plain["rename"] == {"question": "prompt", "a: b": "{c}"}
    assert (plain["system_prompt"], plain["chat_template"], plain["max_norm"]) == ("yes", "on", float("inf"))


def test_flags_of_the_command_line_replace_those_of_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: m\ndata: d\nlr: 7\noverlap: true\nchat_template: false\nparallel: {tp: 2, ep: 4}\nstop: [a]\n"
    )
    words = ["--config", str(file), "--lr", "2e-6", "--no-overlap", "--chat-template", "x.jinja", "--stop", "b", "c"]
    assert flags_of([*words[:2], "--reward", "a:b", "--lr", "1"], grpo.Args).data.chat_template is False
    found = flags_of([*words, "--parallel.tp=3", "--reward", "a:b"], grpo.Args)
    assert (found.optim.lr, found.rollouts.overlap, found.data.chat_template) == (2e-6, False, "x.jinja")
    assert (found.model.parallel.tp, found.model.parallel.ep, found.rollouts.stop) == (3, 4, ("b", "c"))


WRONG = [
    ("learning_rate: 1", "{f}:1: learning_rate is --lr here"),
    ("\nactor_rollout_ref: {rollout: {n: 4}}", "{f}:2: actor_rollout_ref.rollout.n is --group-size here"),
    ("group_siz: 4", "{f}:1: group_siz is no flag: perhaps --group-size"),
    ("critic_lr: 4\nlr: x", "2 keys are wrong {f}:1: critic_lr is for rlkit ppo {f}:2: lr must be a number, got 'x'"),
    ("lr_at: f", "{f}:1: lr_at is set in Python only"),
    ("lr: 3", "--lr must be from 0 to 1, got 3.0 ({f}:1)"),
    ("\ntop_p: 0.5\ntop_k: 3", "--top-k excludes --top-p: engines combine them differently; use one ({f}:3, {f}:2)"),
    ("lr: 1\nlr: 0.5", "{f}:2: lr is given twice: also in {f}:1"),
    ("steps: null", "{f}:1: steps needs a whole number"),
    ("overlap: 1", "{f}:1: overlap must be true or false, got 1"),
    ("stop: [[a]]", "{f}:1: stop must be a value or a list of values"),
    ("stop: ['--x', b]", "{f}:1: stop has '--x' in a list, which would be a flag: give it alone, as stop: '--x'"),
    ("rename: [a, b]", "{f}:1: rename must be a mapping of names"),
    ("lr: {a: 1}", "{f}:1: lr.a is no flag"),
    ("lr: !!python/object/apply:os.system ['exit 3']", "{f}:1: lr has the tag tag:yaml.org,2002:python/object/apply:"
     "os.system: give plain values"),
    ("stop: !!binary aGVsbG8=", "{f}:1: stop has the tag tag:yaml.org,2002:binary: give plain values"),
    ("engine_urls: http://u:***@h", "{f}:1: engine_urls has *** for a password, http://u:***@h: write the password, or "
     "give --engine-urls"),
    ("script: sft.py\nlr: 1", "{f}:1: this file is for sft.py, and this is grpo.py"),
    ("- lr", "{f}: it must hold `flag: value` lines, as --print-config prints them"),
    ("a: [b\nc: d", "{f}:2: this is no YAML: expected ',' or ']', but got ':'"),
    ("a: &x {b: *x}", "{f}:1: a.b is no flag"),
    ("a\x01: b", "{f}: this is no YAML: special characters are not allowed"),
    ("lr: 0.5", "missing --model and --data; --help lists the flags"),
    (None, "--config {f}: No such file or directory"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named_with_its_line(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "f.yaml").write_text(text)
    needed = [] if message.startswith("missing") else SCRIPTS["grpo"]
    said = screens.refused(cli.main, ["grpo", *needed, "--config", "f.yaml"])
    assert said.replace("; --help WORD finds flags by a word", "") == f"error: {message.format(f='f.yaml')}"


def test_a_file_is_needed_once_and_only_by_commands_that_train():
    assert "--config needs a YAML file" in screens.refused(cli.main, ["grpo", "--config"])
    assert "--config is given twice" in screens.refused(cli.main, ["grpo", "--config", "a", "--config=b"])
    assert "--config is no flag" in screens.refused(cli.main, ["plot", "runs/a", "--config", "b"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_the_config_of_a_run_repeats_and_resumes_it(task, tmp_path):
    flags = (
        f"--model {task / 'model'} --data {task / 'rows.jsonl'} --reward {task / 'reward.py'}:score --steps 2 --lr 0.01"
    )
    sizes = "--prompts-per-step 2 --group-size 2 --max-new-tokens 4 --eval-steps 0 --stop"
    first, again = tmp_path / "first", tmp_path / "again"
    cli.main(["grpo", *flags.split(), *sizes.split(), "\n\n", "--output", str(first)])
    config = str(first / "config.yaml")
    cli.main(["grpo", "--config", config, "--output", str(again)])
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (first, again)]
    plain = [[{k: v for k, v in json.loads(x).items() if k[:5] != "time/"} for x in part] for part in lines]
    assert plain[0] == plain[1]
    assert [row["step"] for row in plain[0]] == [1, 2]
    kept = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (first, again)]
    assert kept[0] | {"output": str(again)} == kept[1]
    missing = screens.refused(cli.main, ["grpo", "--resume", "--output", str(first)])
    assert missing == f"error: missing --model and --data; a resumed run takes its flags again: add --config {config}"
    cli.main(["grpo", "--config", config, "--resume", "--steps", "3"])
    assert yaml.safe_load((first / "config.yaml").read_text())["steps"] == 3
    assert len((first / "metrics.jsonl").read_text().splitlines()) == 3
