"""Losses against the code of TRL and verl, as installed. Each script prints a table and ends with 1 on a difference."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm

FOLDER = Path(__file__).parent


@pytest.mark.slow_cases("trl-preference_trl.py")
@pytest.mark.parametrize(("peer", "script"), [("trl", "preference_trl.py"), ("verl", "policy_verl.py")])
def test_losses_equal_those_of(peer, script):
    if find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")])}
    env["TRL_EXPERIMENTAL_SILENCE"] = "1"
    ran = warm.run(
        [sys.executable, str(FOLDER / script)], env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
