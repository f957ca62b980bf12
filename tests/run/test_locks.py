"""A run folder on a filesystem without locks, as some network filesystems are."""

from __future__ import annotations

import errno
import fcntl
import json

import pytest

from rlkit.run.folder import keep_args, open_run


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_filesystem_without_locks_is_no_reason_to_stop(tmp_path, monkeypatch, code):
    def lockf(*_):
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    keep_args(tmp_path / "run", {"lr": 1.0}, script="a.py", resume=False)
    with open_run(tmp_path / "run", steps=1) as run:
        run.log(1, {"loss": 0.5})
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["loss"] == 0.5


@pytest.mark.parametrize("code", [errno.EACCES, errno.EAGAIN])
def test_a_lock_that_another_process_holds_is(tmp_path, monkeypatch, code):
    def lockf(*_):
        raise OSError(code, "held")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(BlockingIOError, match="another process writes to this run folder"):
        keep_args(tmp_path / "run", {"lr": 1.0}, script="a.py", resume=False)
