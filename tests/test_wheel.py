"""The wheel, installed into an environment that has the dependencies and no extra: what is in it, and what it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
import screens
from packaging.requirements import Requirement

import rlkit

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "platforms"


def run(*command, cwd, **more):
    """The finished process; nothing of the checkout is on its path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, **more)


def requirements(name: str, extras: tuple[str, ...] = ()) -> set[str]:
    """The distributions that `name[extras]` needs, with those that they need."""
    found: set[str] = set()
    todo = {(name, extra) for extra in ("", *extras)}
    done = set()
    while todo:
        done.add(now := todo.pop())
        for line in distribution(now[0]).requires or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": now[1]}):
                found.add(need.name)
                todo |= {(need.name, extra) for extra in ("", *need.extras)} - done
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources: setuptools leaves a build folder, whose old files the next wheel would have."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "rlkit", folder / "rlkit", ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder)
    built = run(*pip, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("rlkit_lm-*.whl"))


@pytest.fixture(scope="module")
def install(wheel, tmp_path_factory):
    """A function: extras -> the Python of an environment with the wheel, its dependencies and these extras only.

    The dependencies are links to those of this environment, without triton, which some builds of torch need.
    """

    def installed(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        python = folder / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
        done = run(*pip, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        (site,) = folder.glob("lib/python*/site-packages")
        for name in requirements("rlkit-lm", extras) - {"triton"}:
            have = distribution(name)
            tops = {file.parts[0] for file in have.files or ()} - {"..", "__pycache__"}
            for top in tops:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(have.locate_file(top))).resolve())
        return python

    return installed


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    files = {p.relative_to(ROOT).as_posix() for p in (ROOT / "rlkit").rglob("*") if p.is_file()}
    assert names == {name for name in files if "__pycache__" not in name}
    assert {"rlkit/py.typed", "rlkit/rewards/sandbox/_worker/sandboxd.py"} < names


@pytest.mark.slow
def test_the_sdist_has_the_tests_docs_and_tools_too(tmp_path):
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).exists() and not name.startswith(".")}
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    built = run(sys.executable, "-c", build, cwd=tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    with tarfile.open(next(tmp_path.glob("dist/rlkit_lm-*.tar.gz"))) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers() if member.isfile()}
    written = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert names - written == files


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("/METADATA"))).decode()


def test_the_version_is_one(metadata):
    assert f"\nVersion: {rlkit.__version__}\n" in metadata
    assert f"\nversion: {rlkit.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_metadata_name_every_extra_that_messages_and_the_page_do(metadata):
    extras = set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE))
    sources = "".join(p.read_text() for folder in ("rlkit", "examples") for p in (ROOT / folder).rglob("*.py"))
    named = re.findall(r'(?:optional|missing)\((?:error, )?"[\w.]+", "(\w+)"', sources)
    assert len(named) >= 10
    assert {*named, *re.findall(r"rlkit-lm\[(\w+)\]", sources)} <= extras
    table = (ROOT / "docs" / "start.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == extras


USE = """
import asyncio, json, sys
import rlkit
from rlkit.rewards import Sample, code, math, run_reward

async def rewards(function, completions, **row):
    found = await run_reward(function, [Sample(c, row, i) for i, c in enumerate(completions)], timeout_s=60)
    return [reward.reward for reward in found]

programs = [f"```python\\ndef one():\\n    return {x}\\n```" for x in (1, 2)]
print(json.dumps({
    "file": rlkit.__file__,
    "code": asyncio.run(rewards(code.assert_tests, programs, tests=["assert one() == 1"])),
    "math": asyncio.run(rewards(math.boxed, [r"\\boxed{0.5}", r"\\boxed{3}"], answer="1/2")),
}))
"""


@pytest.mark.slow
def test_a_sandboxed_program_and_a_math_reward_run_from_the_wheel(install, tmp_path):
    python = install("math")
    out = run(python, "-c", USE, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    said = json.loads(out.stdout)
    assert Path(said["file"]).is_relative_to(python.parents[1])
    assert (said["code"], said["math"]) == ([1.0, 0.0], [1.0, 0.0])


NAMED = {  # a beginning of modules -> the extra that they need as a whole
    "rlkit.rollout.engines.http": "engines behind HTTP need aiohttp: pip install 'aiohttp>=3.9'",
    "rlkit.rollout.engines.servers": "engines behind HTTP need aiohttp: pip install 'aiohttp>=3.9'",
    "rlkit.rollout.engines.sglang": "engines behind HTTP need aiohttp: pip install 'aiohttp>=3.9'",
    "rlkit.rollout.engines.vllm": "engines behind HTTP need aiohttp: pip install 'aiohttp>=3.9'",
    "rlkit.rewards.math": (
        "rewards for mathematics need math_verify: pip install 'math-verify[antlr4-13-2]>=0.8' 'pebble>=5.1'"
    ),
    "rlkit.testing": "rlkit.testing needs hypothesis: pip install 'hypothesis>=6.100'",
    "rlkit.kernels.decode.triton": "impl='triton' needs triton: pip install triton",
    "rlkit.kernels.linear_logp.triton": "impl='triton' needs triton: pip install triton",
    "rlkit.kernels.linear_scan.triton": "impl='triton' needs triton: pip install triton",
}
USED = {  # what the use of each optional package says without it
    "lora": "error: --lora-rank needs peft: pip install 'peft>=0.21'",
    "sglang": "error: --engine sglang needs aiohttp: pip install 'aiohttp>=3.9'",
    "math": f"error: --reward rlkit.rewards.math:boxed: {NAMED['rlkit.rewards.math']}",
    "math in a file": f"error: --reward {ROOT / 'examples/math_reward.py'}:score: {NAMED['rlkit.rewards.math']}",
    "sweep": "error: sweeps need optuna: pip install 'optuna>=4'",
    "add_lora": "MissingExtra: LoRA needs peft: pip install 'peft>=0.21'",
    "plot": "error: plots need matplotlib: pip install 'matplotlib>=3.8'",
    "tracker": "error: wandb is not installed: pip install wandb (No module named 'wandb')",
    "agent": "MissingExtra: agent_env needs aiohttp: pip install 'aiohttp>=3.9'",
    "search": "error: the search tool needs bm25s: pip install 'bm25s>=0.2'",
    "search_tool": "MissingExtra: the search tool needs bm25s: pip install 'bm25s>=0.2'",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_extras_everything_runs_or_names_its_extra_in_one_line(install, tmp_path):
    python = install()
    out = run(python, PROGRAMS / "without_extras.py", tmp_path, cwd=tmp_path)
    assert out.returncode == 0, out.stdout + out.stderr
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["found"] == [], "the environment has extras"
    assert len(said["imports"]) > 100
    assert {m: line for m, line in said["imports"].items() if line} == {
        m: f"MissingExtra: {line}" for m, line in NAMED.items()
    }
    uses = said["uses"]
    assert {name: uses[name] for name in USED} == USED
    for name in ("parquet", "parquet data", "hub data"):
        assert uses[name].count("\n") == 0
        assert "needs datasets: pip install 'datasets>=4'" in uses[name]
    assert "rewards behind HTTP need aiohttp: pip install 'aiohttp>=3.9'" in uses["judge"]
    for folder in ("sft", "a"):  # they train without any
        assert (tmp_path / folder / "model" / "config.json").exists(), uses
    assert uses["sft"].splitlines()[-3] == f"no plot: {USED['plot'].removeprefix('error: ')}"
    assert uses["sft"].splitlines()[-1] == f"exported {tmp_path / 'sft' / 'model'}"
    for where in screens.EVERYWHERE:
        plot = [python, "-m", "rlkit", "plot", tmp_path / "sft"]
        code, shown, err = screens.run(plot, where, cwd=tmp_path, env={"PYTHONPATH": ""})
        assert (code, screens.errors(shown + err)) == (2, [USED["plot"]])
