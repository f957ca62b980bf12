"""Other systems than Linux, imitated in a process that hides what they do not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "platforms"


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_macos_trains_and_names_what_needs_linux(tmp_path):
    """Rewards, a loop, a checkpoint and its resume, an engine in a process; not the sandbox and SGLang's servers."""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "on_macos.py"), str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=840)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    out = json.loads((tmp_path / "out.json").read_text())
    assert (out["affinity"], out["proc"]) == (False, False), "Linux is not hidden"
    assert out["math"] == [1.0, 1.0, 0.0]
    assert out["steps"] == [1, 2]
    assert out["versions"] == [0, 0, 1, 1]
    assert "the sandbox needs Linux on x86_64 or aarch64, this is Darwin on arm64" in out["code"]
    assert out["pinned"].startswith("ValueError: cpus (0,) (--engine-cpus) needs Linux")
    assert out["served"].startswith("RuntimeError: SGLang servers run on Linux, this is darwin")


@pytest.mark.parametrize(
    "module", ["rlkit.loops.grpo", "rlkit.loops.sft", "rlkit.rollout.engines.process", "rlkit.rewards.math"]
)
def test_windows_is_refused_in_one_sentence_that_names_wsl(module):
    code = (
        "import importlib, types, rlkit._util.platform as p\n"
        "p.sys = types.SimpleNamespace(platform='win32')\n"
        f"try: importlib.import_module({module!r})\n"
        "except ImportError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = ran.stdout.splitlines()
    assert line.startswith(".".join(module.split(".")[:2]))
    assert "does not run on Windows itself: run it in WSL" in line
