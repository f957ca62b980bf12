"""`--on-save`: a command after each checkpoint, whose failure is a line."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from rlkit.run import on_save
from rlkit.run.saving import open_training, report_commands, save_if_due
from rlkit.settings import Schedule

FOLDER = "a; touch $(b) 'c"


def test_the_command_gets_the_folder_as_one_word_and_no_shell_reads_it(tmp_path):
    script = tmp_path / "show.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(len(sys.argv) - 2)")
    folder, log, said = tmp_path / FOLDER, tmp_path / "log", []
    command = f'"{sys.executable}" {script} to={{folder}}/x "two words" $HOME'
    commands = on_save.start(command, folder, log=log, say=said.append)
    on_save.report(commands, log=log, say=said.append, wait=True)
    assert commands == []
    assert log.read_text() == f"{[f'to={folder}/x', 'two words', '$HOME']}\n"
    assert said == [f"on_save failed for {FOLDER} with exit code 2, training goes on: see {log}"]
    assert on_save.start("no/such/program {folder}", folder, log=log, say=said.append) == []
    assert said[1].startswith(f"on_save did not start for {FOLDER}, training goes on: ")


def test_each_checkpoint_has_its_command_and_a_failure_does_not_end_the_run(tmp_path, capsys):
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "state": {}}
    schedule = Schedule(tmp_path / "run", steps=3, save_steps=1, keep=1, on_save="ls -d {folder} none")
    with open_training(schedule, start=-1) as job:
        for step in (1, 2, 3):
            assert not save_if_due(job, step, **state)
            while job.commands:
                report_commands(job)
                time.sleep(0.01)
    printed = (tmp_path / "run" / "on_save.log").read_text().splitlines()
    kept = [Path(line).name for line in printed if "step_" in line]
    assert kept == [f"step_{i:08d}" for i in (1, 2, 3)]
    out = capsys.readouterr().out
    assert out.count("on_save failed for step_0000000") == 3


def test_a_command_without_the_folder_or_a_program_is_refused(tmp_path):
    for wrong in ("ls", "ls '{folder}", "no-such-program {folder}"):
        with pytest.raises(ValueError, match=r"`on_save` must be a program and its arguments, with {folder}"):
            Schedule(tmp_path / "x", steps=1, on_save=wrong)
