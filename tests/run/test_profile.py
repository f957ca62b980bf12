"""The trace and the table of --profile-steps."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time

import torch

from rlkit.run.profile import Profile, mark_phase


def take_step():
    mark_phase("between steps")
    time.sleep(0.05)
    mark_phase("rollout")
    worker = threading.Thread(target=lambda: torch.ones(8, 8) @ torch.ones(8, 8))  # as with --overlap
    worker.start()
    worker.join()
    mark_phase("train")


def test_the_table_has_each_phase_and_the_operators_that_it_ran(tmp_path):
    profile = Profile(tmp_path / "profile", 2, 3, start=0)
    for step in (1, 2, 3, 4):
        take_step()
        written = profile.reached(step)
        assert bool(written) == (step == 3)
    text = (tmp_path / "profile" / "steps_2_3.txt").read_text()
    seconds = {name: float(clock) for name, clock in re.findall(r"^(\w[\w ]*?) +([\d.]+) +[\d.]+ +[\d.]+$", text, re.M)}
    assert seconds.keys() == {"between steps", "rollout", "train"}
    assert 0.1 <= seconds["rollout"] < 1
    of = dict(re.findall(r"^(\w+): longest on the CPU\n((?: .*\n)+)", text, re.M))
    assert "aten::mm" in of["train"]
    assert "aten::mm" not in of.get("rollout", "")
    with gzip.open(tmp_path / "profile" / "steps_2_3.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == 2


def test_a_run_that_stops_early_has_its_steps_and_one_that_never_comes_there_has_no_file(tmp_path):
    early, never = (Profile(tmp_path / name, first, 9, start=4) for name, first in (("early", 5), ("never", 6)))
    take_step()
    assert early.close().startswith("profiled steps 5 to 9: ")
    assert never.close() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["early"]


def test_a_full_disk_does_not_end_the_run(tmp_path):
    (tmp_path / "profile").write_text("a file in the way")
    profile = Profile(tmp_path / "profile", 1, 1, start=0)
    assert profile.reached(1).startswith("no profile, training goes on: ")
