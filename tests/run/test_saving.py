"""Checkpoints of a run: what its last one costs."""

import pytest
import torch

from rlkit.model import checkpoint
from rlkit.run.saving import open_training, save_if_due
from rlkit.settings import Schedule


@pytest.mark.usefixtures("no_pictures")
def test_the_last_checkpoint_is_written_without_a_copy_of_the_tensors(tmp_path, monkeypatch):
    """No training waits for it, and the copy would be the run's peak of memory: weights and optimizer once more."""
    monkeypatch.setattr(checkpoint, "copied", None)
    model = torch.nn.Linear(2, 2)
    with open_training(Schedule(tmp_path / "run", steps=2, save_steps=0), start=-1) as job:
        for step in (1, 2):
            assert not save_if_due(job, step, model=model, optimizer=torch.optim.Adam(model.parameters()), state={})
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert folder.name == "step_00000002"
    before, model = model.state_dict(), torch.nn.Linear(2, 2)
    assert checkpoint.load_checkpoint(folder, model=model, optimizer=None)["step"] == 2
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
