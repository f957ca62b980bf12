"""The helpers of `tests/rollout` and `tools`: pytest's importlib mode does not put them on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "rollout"), str(ROOT / "tools")]
collect_ignore_glob = ["programs/*"]
