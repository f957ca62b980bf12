"""Checkpoints of the best evaluations stay beside the newest ones."""

import pytest
import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.run import saving
from rlkit.run.saving import open_training, save_if_due
from rlkit.settings import Schedule

REWARDS = {0: 9.0, 1: 0.2, 2: 0.9, 3: 0.1, 4: 0.9, 5: 0.3, 6: 0.4}


def run(folder, monkeypatch, **settings):
    """The steps whose checkpoints a run of six steps leaves, with an evaluation before the first and after each."""
    model, tokenizer = tiny_model(tiny_tokenizer(), hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(saving, "keep_best", lambda *_, **__: None)  # the export of the model is tested elsewhere
    schedule = Schedule(folder, steps=6, eval_steps=1, save_steps=1, **settings)
    with open_training(schedule, start=-1) as job:
        for step, reward in REWARDS.items():
            saving.log(job, step, {"eval/greedy": reward, "eval/loss": reward}, model=model, tokenizer=tokenizer)
            save_if_due(job, step, model=model, optimizer=optimizer, state={})
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"keep": 2}, [5, 6]),
        ({"keep": 1, "keep_best": "eval/greedy", "keep_best_checkpoints": 1}, [4, 6]),  # of two equal ones the later
        ({"keep": 1, "keep_best": "eval/greedy", "keep_best_checkpoints": 3}, [2, 4, 6]),
        ({"keep": 2, "keep_best": "eval/loss", "keep_best_checkpoints": 2}, [1, 3, 5, 6]),  # the lowest is best
    ],
)
def test_checkpoints_of_the_best_evaluations_stay(settings, steps, tmp_path, monkeypatch):
    assert run(tmp_path / "run", monkeypatch, **settings) == steps


def test_it_needs_a_metric():
    with pytest.raises(ValueError, match="`keep_best_checkpoints` requires `keep_best`"):
        Schedule("runs/x", steps=3, save_steps=1, keep_best_checkpoints=1)


def test_an_evaluation_without_a_number_is_not_the_best(tmp_path):
    lines = [f'{{"step": {step}, "eval/greedy": {value}}}' for step, value in enumerate(("NaN", "NaN", "0.5", "0.4"))]
    for step, best in enumerate((False, False, True, False)):
        (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[: step + 1], ""]))
        assert saving._is_best(tmp_path, step, "eval/greedy") is best
