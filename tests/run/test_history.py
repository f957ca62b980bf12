"""What a run's files tell of it: starts with other arguments, rows and tokens seen, the best step, answers."""

from __future__ import annotations

import json

import pytest
import yaml

from rlkit.run import history
from rlkit.run.folder import keep_args, open_run
from rlkit.run.history import best, compare_answers, peak_memory, read_starts, seen, seen_text
from rlkit.run.report import page as report
from rlkit.run.report.card import card
from rlkit.run.report.meanings import set_of
from rlkit.run.trajectories import Group


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluated(step, group, reward, text, **more):
    row = {"step": step, "group": group, "gold": "7", "prompt": f"<u>\nwhat is {group}?<e>\n<a>", "completion": text}
    return row | {"reward": reward, "rewards": {}, "score": None, "length": 3, "versions": [0], **more}


@pytest.fixture
def resumed(tmp_path):
    """A run of 40 rows that was resumed after step 2 with other arguments, by its own files and functions."""
    run = tmp_path / "run"
    for start, steps, changed in ((0, 2, {}), (2, 4, {"lr": 0.1, "group_size": 8})):
        args = {"model": "m", "data": "d.jsonl", "steps": steps, "lr": 0.01, "group_size": 4, "prompts_per_step": 5}
        keep_args(run, args | changed, script="grpo.py", resume=start > 0)
        with open_run(run, steps=steps, start=start, resume=start > 0, active=True) as opened:
            opened.note(rows=40, held_out={"": 3}, process_gib=1.25)
            for step in range(start + 1, steps + 1):
                scores = {"eval/greedy": [0.2, 0.9, 0.9, 0.4][step - 1], "eval/gsm/greedy": 0.5, "eval/reward/a": 1.0}
                clock = {"time/step": 2.0, "time/tokens_per_s": 50.5}
                opened.log(step, {"reward/mean": 1.0, **scores, **clock})
    for step, texts in ((1, "abc"), (4, "xyz")):
        rows = [evaluated(step, i, [0.0, 1.0, 1.0][i] if step == 1 else i % 2, text) for i, text in enumerate(texts)]
        lines(run / f"trajectories/eval_greedy_{step:06d}.jsonl", rows)
        lines(run / f"trajectories/eval_sampled_{step:06d}.jsonl", rows[:1])
    return run


def test_each_start_has_what_changed(resumed):
    first, second = read_starts(resumed)
    assert first["changed"] == {}
    assert second["step"] == 2
    assert second["changed"] == {"steps": [2, 4], "lr": [0.01, 0.1], "group_size": [4, 8]}
    old = [{"step": 0, "command": "a"}, {"step": 3, "command": "b"}]  # of version 0.1, without arguments
    lines(resumed / "starts.jsonl", old)
    assert [start["changed"] for start in read_starts(resumed)] == [{}, {}]


def test_what_was_seen_counts_with_the_arguments_of_each_start(resumed):
    rows, starts = report._metrics(resumed, live=False), read_starts(resumed)
    assert seen({}, rows, starts) == {"prompts": 20, "samples": 2 * 20 + 2 * 40, "tokens": 4 * 101, "passes": 0.5}
    assert seen_text({}, rows, starts) == "20 prompts (0.5 passes over the data), 120 samples, 404 tokens"
    fixed = [{"step": 1, "time/step": 1.0, "time/tokens_per_s": 1234567.0}]
    assert seen_text({"batch_size": 1}, fixed, [{"step": 0, "rows": 1}]) == (
        "1 example (1 pass over the data), 1,234,567 tokens"
    )
    assert seen_text({}, [{"step": 3}], []) == ""
    assert peak_memory(rows, starts) == "1.2 GiB of the process"


def test_the_best_step_is_the_first_of_the_best_and_of_a_loss_the_lowest():
    rows = [{"step": s, "eval/greedy": x, "eval/loss": x} for s, x in ((0, 0.5), (2, 0.9), (4, 0.9), (6, 0.1))]
    assert best({}, rows) == ("eval/greedy", 0.9, 2)
    assert best({"keep_best": "eval/loss"}, rows) == ("eval/loss", 0.1, 6)
    assert best({}, rows[:1]) is None


def test_answers_before_and_after_are_those_of_the_same_prompts(resumed):
    found = compare_answers(resumed, most=2)
    assert (found.kind, found.steps) == ("eval_greedy", (1, 4)), "greedy, where both are there"
    assert (found.better, found.worse, found.equal) == (0, 1, 2)
    assert [(x.before["completion"], x.after["completion"]) for x in found.answers] == [("a", "x"), ("b", "y")]
    assert [x["prompt"] for x in report._answers(resumed)["answers"]] == ["what is 0?", "what is 1?", "what is 2?"]
    (resumed / "trajectories/eval_greedy_000004.jsonl").unlink()
    assert compare_answers(resumed, most=2).kind == "eval_sampled"
    (resumed / "trajectories/eval_sampled_000004.jsonl").unlink()
    assert compare_answers(resumed, most=2) is None


def test_the_card_has_starts_data_answers_and_a_table_of_sets(resumed):
    text = card(resumed, curves=True)
    changed = "`steps` `2` -> `4`, `lr` `0.01` -> `0.1`, `group_size` `4` -> `8`"
    assert f"Resumed after step 2 with {changed}." in text
    assert "A dashed line in the curves" in text
    assert "40 rows. Seen: 20 prompts" in text
    assert "Best `eval/greedy`: 0.9, after step 2." in text
    assert "0 have a higher reward after the training (greedy), 1 a lower one, 2 the same" in text
    assert "    before, reward 0.0: a\n    after, reward 0: x\n" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0] == "| set | held-out data | step 1 | step 4 |"
    assert {line.split(" | ")[0] + " " + line.split(" | ")[1].split()[0] for line in table[2:]} == {
        "| all `eval/greedy`", "| all `eval/reward/a`", "| `gsm` `eval/greedy`",
    }  # fmt: skip
    early = card(resumed, step=2)
    assert "Resumed" not in early
    assert "before, reward" not in early, "those answers are of another step"


def test_the_set_of_a_metric():
    assert [set_of(f"eval/{x}") for x in ("greedy", "reward/a", "logp/chosen")] == [""] * 3
    assert [set_of(f"eval/gsm/{x}") for x in ("greedy", "greedy_se", "reward/a", "logp/chosen")] == ["gsm"] * 4


@pytest.mark.parametrize("listed", [False, True])
def test_a_base_on_the_disk_gives_the_card_its_license_and_its_own_base(tmp_path, listed):
    base = tmp_path / "base"
    base.mkdir()
    own = "base_model:\n- org/first" if listed else 'base_model: "org/first"'
    (base / "README.md").write_text(f"---\nlicense: apache-2.0\n{own}\n---\n# Text\nlicense: not this\n")
    lines(tmp_path / "run" / "metrics.jsonl", [{"step": 1}])
    (tmp_path / "run" / "args.json").write_text(json.dumps({"model": str(base), "script": "sft.py"}))
    front = yaml.safe_load(card(tmp_path / "run").split("---\n")[1])
    assert (front["license"], front["base_model"]) == ("apache-2.0", "org/first")
    (base / "README.md").unlink()
    assert "license" not in yaml.safe_load(card(tmp_path / "run").split("---\n")[1])
    cached = tmp_path / "models--org--small" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (tmp_path / "run" / "args.json").write_text(json.dumps({"model": str(cached), "script": "sft.py"}))
    assert yaml.safe_load(card(tmp_path / "run").split("---\n")[1])["base_model"] == "org/small"


def test_the_page_has_starts_and_answers_and_compares_what_both_runs_have(resumed, tmp_path):
    other = tmp_path / "other"
    lines(other / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    (other / "args.json").write_text(json.dumps({"script": "own.py", "lr": 0.5}))
    run = report._run(resumed, "run", {}, [{"step": 1}], report.read_trajectories(resumed), [])
    ((step, changed),) = [(start["step"], start["changed"]) for start in run["starts"]]
    assert (step, changed[1]) == (2, ["lr", "0.01", "0.1"])
    assert len(run["answers"]["answers"]) == 3
    differing = report._differences([report.read_args(resumed), report.read_args(other)])
    assert differing == {"lr": ["0.1", "0.5"]}, "of the others one run knows nothing"


def test_the_mean_of_a_prompt_is_over_episodes():
    rows = [{"reward": 0.0}, {"reward": 0.0, "continues": True}, {"reward": 0.0, "continues": True}, {"reward": 1.0}]
    assert history._mean(Group("eval_greedy", 1, 0, rows)) == 0.5
