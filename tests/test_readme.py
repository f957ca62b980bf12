"""The loops of the README and of docs/distillation.md (in fewer steps) run as they stand, and learn."""

import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import warm

import rlkit

ROOT = Path(__file__).parents[1]


def run_loop(page: Path, folder: Path, start=warm.run, call: str = "main()") -> list[str]:
    """The lines that the page's loop prints."""
    code = next(c for c in re.findall(r"```python\n(.*?)```", page.read_text(), re.S) if "asyncio.run" in c)
    assert len(code.strip().splitlines()) < 60
    assert len(re.findall("^(?:import|from) ", code, re.M)) <= (6 if page.name == "README.md" else 20)
    (folder / "loop.py").write_text(code.replace("asyncio.run(main())", f"asyncio.run({call})"))
    out = start([sys.executable, "loop.py"], cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert out.returncode == 0, out.stderr
    return out.stdout.splitlines()


@pytest.mark.parametrize("start", [warm.run, pytest.param(subprocess.run, marks=pytest.mark.slow)])
def test_the_loop_of_the_readme_raises_its_reward(tmp_path, start):
    rewards = [float(line.split()[1]) for line in run_loop(ROOT / "README.md", tmp_path, start)]
    assert len(rewards) == 20
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


@pytest.mark.parametrize(("call", "steps"), [pytest.param("main()", 30, marks=pytest.mark.slow)])
def test_a_student_comes_close_to_its_teacher(tmp_path, call, steps):
    kl = [float(line.split()[-4]) for line in run_loop(ROOT / "docs/distillation.md", tmp_path, call=call)]
    assert len(kl) == steps
    assert sum(kl[-3:]) < 0.5 * sum(kl[:3])


def test_import_is_light_and_leads_to_everything():
    code = """
        import sys, rlkit
        assert not {"transformers", "torch", "tyro"} & {*sys.modules}
        assert rlkit.losses.ppo_clip is rlkit.ppo_clip
        assert {"losses", "ppo_clip", "__version__"} <= {*dir(rlkit)}
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=100)


def test_the_names_of_the_package_are_those_of_their_modules():
    modules = {name for name in dir(rlkit) if isinstance(getattr(rlkit, name), types.ModuleType)}
    assert modules >= {"losses", "advantages", "types"}
    assert not modules & {*rlkit.__all__}, "a name would hide a submodule"
    for name in rlkit.__all__:
        found = getattr(rlkit, name)
        assert found.__name__ == name
        assert found.__module__.startswith("rlkit.")
    with pytest.raises(AttributeError, match="module 'rlkit' has no attribute 'nothing'"):
        rlkit.nothing  # noqa: B018
