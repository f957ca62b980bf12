"""The README's loop runs as it stands, and learns."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_loop_of_the_readme_raises_its_reward(tmp_path):
    code = next(c for c in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "asyncio.run" in c)
    assert len(code.strip().splitlines()) < 60
    (tmp_path / "loop.py").write_text(code)
    out = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert out.returncode == 0, out.stderr
    rewards = [float(line.split()[1]) for line in out.stdout.splitlines()]
    assert len(rewards) == 20
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_import_is_light():
    code = "import rlkit, sys; assert 'transformers' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
