"""The model card, and the model of the best evaluation."""

from __future__ import annotations

import json

import pytest
import screens
import yaml
from transformers import AutoModelForCausalLM

from rlkit.run.report.card import card
from rlkit.scripts import cli


def front_of(text):
    _, front, _ = text.split("---\n", 2)
    return yaml.safe_load(front)


def run_of(folder, args, rows, **start):
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "starts.jsonl").write_text(json.dumps({"step": 0, "ranks": 1, **start}) + "\n")
    return folder


GRPO = {
    "script": "grpo.py", "model": "Qwen/Qwen3-0.6B", "data": ["openai/gsm8k:main:train", "my.jsonl"], "loss": "cispo",
    "baseline": "max_rl", "reward": "my_rewards.py:score", "lr": 1e-6, "group_size": 8,
}  # fmt: skip
ROWS = [{"step": 0, "eval/greedy": 0.25, "eval/greedy_se": 0.1}, {"step": 1}, {"step": 2, "eval/greedy": 0.75}]


def test_the_card_says_what_trained_and_how(tmp_path):
    machine = {"gpus": ["NVIDIA H100"] * 8}
    run = run_of(
        tmp_path / "sums", GRPO, ROWS, command="rlkit grpo --lr 1e-6", machine=machine, versions={"torch": "2.13"}
    )
    text = card(run)
    assert front_of(text) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["rlkit", "grpo"],
        "base_model": "Qwen/Qwen3-0.6B", "datasets": ["openai/gsm8k"],
    }  # fmt: skip
    assert "| `eval/greedy` (score) | 0.25 ± 0.2 | 0.75 |" in text
    assert "    A_i = (r_i - mean(r)) / (mean(r) + eps)" in text
    assert "    loss = -sg(clip(r, min_weight, max_weight)) A log_ratio" in text
    assert "`openai/gsm8k:main:train`, `my.jsonl`" in text
    assert "\n    rlkit grpo --lr 1e-6\n" in text
    assert "On 8 x NVIDIA H100, with torch 2.13." in text
    assert "trained for 2 steps of GRPO" in text
    assert "trained for 1 steps of GRPO" in card(run, step=1)


@pytest.mark.parametrize("script", ["ppo", "sft", "dpo", "kto", "reward_model", "distill"])
def test_every_algorithm_has_its_equation(script, tmp_path):
    loss = {"ppo": "ppo_clip", "dpo": "apo_zero", "distill": "jsd"}.get(script, "kto")
    run = run_of(tmp_path / "run", {"script": f"{script}.py", "model": "m", "data": "d", "loss": loss}, [{"step": 1}])
    assert "    loss = " in card(run)
    assert "base_model" not in front_of(card(run))  # a folder is no id of the hub


def test_what_the_user_wrote_is_no_markup_and_has_no_password(tmp_path):
    args = {"script": "grpo.py", "model": "https://u:secret@h/m`", "data": "a`](x)\n# b", "loss": "my.py:f"}
    text = card(run_of(tmp_path / "run", args, ROWS, command="rlkit \x1b[31m"))
    assert "secret" not in text
    assert "\n# b" not in text
    assert "`a'](x) # b`" in text
    assert "\x1b" not in text
    assert "The loss is a function of the user, `my.py:f`." in text


def test_a_run_of_another_loop_has_a_card_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    assert "trained for 3 steps of a loop of its own" in card(tmp_path)


def flags(task, output, *more):
    rows, reward = task / "rows.jsonl", f"{task / 'reward.py'}:score"
    sizes = "--prompts-per-step 2 --group-size 4 --max-new-tokens 6 --eval-steps 1 --lr 0.3 --eval-samples 4"
    given = ["grpo", "--model", task / "model", "--data", rows, "--eval-data", rows, "--reward", reward]
    return [*map(str, given), *sizes.split(), "--output", str(output), *more]


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.slow
def test_the_best_model_is_that_of_the_best_evaluation_also_after_a_resume(task, tmp_path):
    cli.main(flags(task, tmp_path / "run", "--steps", "4", "--keep-best", "eval/sampled"))
    cli.main(flags(task, tmp_path / "two", "--steps", "2", "--keep-best", "eval/sampled"))
    cli.main(flags(task, tmp_path / "two", "--steps", "4", "--keep-best", "eval/sampled", "--resume"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = max(rows[1:], key=lambda row: row["eval/sampled"])
    assert best["eval/sampled"] > rows[0]["eval/sampled"], "choose another seed: nothing was better than the start"
    text = (tmp_path / "run" / "best" / "README.md").read_text()
    assert f"trained for {best['step']} steps" in text
    cli.main(flags(task, tmp_path / "short", "--steps", str(best["step"])))
    found = [weights(tmp_path / name) for name in ("run/best", "two/best", "short/model")]
    assert all(x.equal(found[other][name]) for other in (1, 2) for name, x in found[0].items())
    assert (tmp_path / "run" / "model" / "curves.png").read_bytes() == (tmp_path / "run" / "metrics.png").read_bytes()


@pytest.mark.slow
def test_a_wrong_metric_is_named_at_the_latest_by_the_first_evaluation(task, tmp_path, capsys):
    words = flags(task, tmp_path / "a", "--keep-best", "eval/greedy")
    for name in ("--eval-data", "--eval-samples"):
        del words[words.index(name) : words.index(name) + 2]
    said = screens.refused(cli.main, words)
    assert said == "error: --keep-best requires --eval-data"
    said = screens.refused(cli.main, flags(task, tmp_path / "a", "--keep-best", "eval/gredy"))
    assert said == "error: --keep-best eval/gredy is no metric: perhaps eval/greedy"
    with pytest.raises(SystemExit, match="1"):
        cli.main(flags(task, tmp_path / "a", "--keep-best", "eval/loss"))
    said = " ".join(capsys.readouterr().err.split())
    there = "the evaluation has eval/sampled"
    assert f"error: --keep-best eval/loss is not measured: {there}" in said
