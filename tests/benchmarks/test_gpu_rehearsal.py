"""Every line of the device benchmarks runs without a device, so that no minute of one is spent on a slip in Python."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rehearse(script: str, out: Path, **env: str) -> str:
    pytest.importorskip("triton")
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--rehearse", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_the_kernel_benchmark_and_its_tables(tmp_path: Path) -> None:
    assert "failed" not in rehearse("gpu_kernels.py", tmp_path)
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert set(found) == {"linear_logp", "logits_logp", "linear_scan"}
    rows = found["linear_logp"]["qwen3-8b 16k"]["results"]
    assert [row["name"] for row in rows if "error" in row] == []
    assert all(row["median_ms"] > 0 and row["ratio_to_floor"] > 0 for row in rows)
    spec = importlib.util.spec_from_file_location("plot_kernels", ROOT / "docs/plot_kernels.py")
    plots = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plots)
    table = plots.gpu_tables([path])
    assert all(f"| {row['name']} | {row['median_ms']} |" in table for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tuning(tmp_path: Path) -> None:
    printed = rehearse("gpu_tune.py", tmp_path, TRITON_INTERPRET="1")
    assert printed.count("2 ran, 0 failed") == 6
    assert "rlkit.kernels.linear_scan.triton.BLOCK = " in printed.split("best:")[1]
    assert len(json.loads((tmp_path / "tuning.json").read_text())) == 6
