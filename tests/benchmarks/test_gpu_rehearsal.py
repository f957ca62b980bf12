"""Every line of the device benchmarks runs without a device, so that no minute of one is spent on a slip in Python."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm

ROOT = Path(__file__).parents[2]


def rehearse(script: str, out: Path, *flags: str, run=warm.run) -> str:
    pytest.importorskip("triton")
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--rehearse", "--out", str(out), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PEAKED = pytest.param(["--only", "tiny", "qwen3-8b 16k, peaked"], marks=pytest.mark.slow)
EVERY = pytest.param([], marks=pytest.mark.slow)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [PEAKED, EVERY], ids=["one shape", "all shapes"])
def test_the_kernel_benchmark_and_its_tables(tmp_path: Path, flags: list[str]) -> None:
    device, best = {"device": "rehearsal on a CPU"}, {"rlkit.kernels.linear_logp.triton.HEIGHT": 77}
    (tmp_path / "tuning.json").write_text(json.dumps({"forward": {"results": {"machine": device, "best": best}}}))
    assert "failed" not in rehearse("gpu_kernels.py", tmp_path, *flags)
    path = tmp_path / "rehearsal_on_a_cpu.json"
    found = json.loads(path.read_text())
    assert found["linear_scan"]["tiny"]["machine"]["constants"] == best
    assert set(found) == {"ceilings", "linear_logp", "logits_logp", "linear_scan"}
    (ceilings,) = found["ceilings"].values()
    assert [row.get("gb_per_s", row.get("tflops")) is None for row in ceilings["results"]] == [False] * 3
    assert len(found["linear_logp"]) == (1 if flags else 3)
    assert found["linear_logp"]["qwen3-8b 16k, peaked"]["peaked"]
    rows = found["linear_logp"]["qwen3-8b 16k, peaked"]["results"]
    assert [row["name"] for row in rows if "error" in row] == []
    assert all(row["median_ms"] > 0 for row in rows)
    for key in ("ratio_to_floor", "ratio_to_fp32_floor"):
        assert all(row[key] > 0 for row in rows if not row["name"].startswith("product"))
    spec = importlib.util.spec_from_file_location("plot_kernels", ROOT / "docs/plot_kernels.py")
    plots = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plots)
    table = plots.gpu_tables([path])
    assert all(f"| {row['name']} | {row['median_ms']} |" in table for row in rows)


def test_a_run_that_breaks_the_device_is_left_out_and_the_rest_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu, kernels = importlib.import_module("_gpu"), importlib.import_module("gpu_kernels")
    monkeypatch.setattr(gpu, "WITHOUT", set())
    monkeypatch.setattr(kernels, "WITHOUT", gpu.WITHOUT)

    def breaks() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def job() -> dict[str, Any]:
        return {"results": list(gpu.time_all({"ours": lambda: None, "theirs": breaks}, seconds=0.1).values())}

    def restart(_: str, command: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", [*command[1:], "--rehearse"])
        raise SystemExit

    jobs = [("heads", "a", dict), ("heads", "b c", job), ("heads", "no row", breaks), ("heads", "d", job)]
    monkeypatch.setattr(kernels, "jobs", lambda cap: jobs)
    monkeypatch.setattr(kernels.os, "execv", restart)
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "--rehearse", "--out", str(tmp_path)])
    for module in (gpu, kernels):
        monkeypatch.setattr(module, "lost", lambda: True)
    for _ in range(2):
        with pytest.raises(SystemExit):
            kernels.main()
    kernels.main()
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())["heads"]
    assert list(found) == ["a", "b c", "d"]
    for name in ("b c", "d"):
        rows = {row["name"]: row for row in found[name]["results"]}
        assert rows["theirs"]["error"] == "left out"
        assert rows["ours"]["ms"]


@pytest.mark.slow
def test_a_slow_first_run_is_broken_off_and_later_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("_gpu")
    monkeypatch.setattr(gpu, "FIRST_RUN_SECONDS", 2.0)  # a collection of garbage counts too
    monkeypatch.setattr(gpu.Budget, "end", time.monotonic() + 60)
    runs = {"slow": lambda: time.sleep(30), "quick": lambda: None}
    rows = gpu.time_all(runs, seconds=0.1)
    assert "broken off" in rows["slow"]["error"]
    assert rows["quick"]["ms"]
    monkeypatch.setattr(gpu.Budget, "end", time.monotonic())
    assert {row["error"] for row in gpu.time_all(runs, seconds=0.1).values()} == {"left out: no time for its first run"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tuning(tmp_path: Path) -> None:
    printed = rehearse("gpu_tune.py", tmp_path, run=subprocess.run)  # it chooses the interpreter before its imports
    assert printed.count("2 ran, 0 failed") == 5
    assert "rlkit.kernels.linear_scan.triton.BLOCK = " in printed.split("best:")[1]
    assert len(json.loads((tmp_path / "tuning.json").read_text())) == 5


def test_what_was_tuned_is_used_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tune = importlib.import_module("gpu_tune")
    home, shipped = tune.triton.__name__, dict(tune.triton.STATS)
    for name in ("STATS", "HEIGHT", "WIDTH"):
        monkeypatch.setattr(tune.triton, name, getattr(tune.triton, name))
    best = {f"{home}.STATS": shipped | {"BLOCK": 77}, f"{home}.HEIGHT": {"not": "an int"}, f"{home}.GONE": 3}
    of = lambda device, constants: {"results": {"machine": {"device": device}, "best": constants}}
    tuned = {"a": of(tune.machine()["device"], best), "b": of("another device", {f"{home}.WIDTH": 99})}
    (tmp_path / "tuning.json").write_text(json.dumps(tuned))
    assert tune.use(tmp_path) == {f"{home}.STATS": shipped | {"BLOCK": 77}}
    assert tune.triton.STATS["BLOCK"] == 77
    assert tune.triton.WIDTH != 99
    assert capsys.readouterr().out.count("is left out") == 2
    assert tune.use(tmp_path / "nothing here") == {}


def test_a_gain_within_the_noise_changes_no_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    best_of = importlib.import_module("gpu_tune").best_of
    shipped, failed = {"set": {"X": 1}, "score": 1.0}, {"set": {"X": 4}, "error": "spilled"}
    assert best_of([shipped, {"set": {"X": 2}, "score": 0.99}, failed]) == {"X": 1}
    assert best_of([shipped, failed, {"set": {"X": 3}, "score": 0.9}, {"set": {"X": 2}, "score": 0.95}]) == {"X": 3}
    assert best_of([failed]) == {}
