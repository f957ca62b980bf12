"""Rollouts as files: what is read back, who else reads them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
from datasets import load_dataset

from rlkit.data.prompts import Prompt
from rlkit.rollout.groups import compact
from rlkit.rollout.saved import load_step, save_step
from rlkit.types import Picture, Support, Trajectory

PROMPTS = [Prompt([5, 6], {"question": "2+2?", "answer": "4"}, 7), Prompt([9], {"prompt": "é\ud800", "x": None}, 2)]


def groups():
    """Two groups with every field of a trajectory."""
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    support = Support(np.array([[1, -1], [3, 4]], np.int32), np.array([0.3, 1.0], np.float32))
    first = Trajectory(
        [5, 6], [7, 8], [True, True], [-0.1, -1 / 3], [0, 1], reward=1 / 3, score=0.1, truncated=True,
        info={"metrics": {"right": 1.0}, "messages": [{"role": "user", "content": "2+2?"}]}, temperature=0.7,
        experts=experts, support=support,
    )  # fmt: skip
    pieces = [
        Trajectory([9], [1, 2, 3], [True, False, True], [-2.0, 0.0, -1e-7], [3, -1, 4], reward=-1.5, role="black",
                   token_rewards=[0.1, 0.0, 1 / 7]),
        Trajectory([9, 1], [2], [True], [-30.5], [4], reward=-1.5, continues=True),
    ]  # fmt: skip
    return [[first, Trajectory([5, 6], [8], [True], [-5.0], [0])], pieces]


def equal(x, y):
    if isinstance(x, tuple):
        return len(x) == len(y) and all(map(equal, x, y))
    return np.array_equal(x, y) and getattr(x, "dtype", None) == getattr(y, "dtype", None)


def test_groups_come_back_bit_for_bit(tmp_path):
    save_step(tmp_path, 3, PROMPTS, groups())
    prompts, back = load_step(tmp_path, 3)
    true = [compact(group) for group in groups()]
    assert [len(group) for group in back] == [2, 2]
    for group, other in zip(true, back, strict=True):
        for a, b in zip(group, other, strict=True):
            different = [f.name for f in fields(Trajectory) if not equal(getattr(a, f.name), getattr(b, f.name))]
            assert different == []
    assert [(p.ids, p.row, p.index) for p in prompts] == [(p.ids, p.row, p.index) for p in PROMPTS]
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003.jsonl"]


def test_pandas_and_datasets_read_the_files(tmp_path):
    pandas = pytest.importorskip("pandas")
    for step in (1, 2):
        save_step(tmp_path, step, PROMPTS, groups())
    frame = pandas.read_json(tmp_path / "step_000002.jsonl", lines=True)
    assert frame.reward.tolist() == pytest.approx([1 / 3, 0.0, -1.5, -1.5])
    assert frame.group.tolist() == [0, 0, 1, 1]
    rows = load_dataset("json", data_files=f"{tmp_path}/step_*.jsonl", split="train", cache_dir=f"{tmp_path}/cache")
    assert len(rows) == 8
    assert rows["step"][:] == [1] * 4 + [2] * 4
    assert rows[2]["logp"] == pytest.approx([-2.0, 0.0, -1e-7])
    assert json.loads(rows[0]["row"]) == PROMPTS[0].row


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda lines: ["{"], "line 1"),
        (lambda lines: ["[]"], "line 1 is no saved sample"),
        (lambda lines: [lines[0].replace('"ids"', '"id"')], "line 1 is no saved sample .KeyError: 'ids'"),
        (lambda lines: [lines[0], lines[2].replace('"group": 1', '"group": 2')], "line 2 is no saved sample .*group 2"),
        (lambda lines: [lines[0].replace("int16", "object")], "line 1 is no saved sample .KeyError: 'object'"),
    ],
)
def test_a_damaged_line_is_named(change, fault, tmp_path):
    save_step(tmp_path, 1, PROMPTS, groups())
    path = tmp_path / "step_000001.jsonl"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match=fault):
        load_step(tmp_path, 1)


def test_images_are_refused(tmp_path):
    picture = Picture.__new__(Picture)
    group = [Trajectory([5], [6], [True], [-1.0], [0], images=(picture,))]
    with pytest.raises(ValueError, match="row 8: `save_rollouts` does not hold images"):
        save_step(tmp_path, 1, PROMPTS[:1], [group])
