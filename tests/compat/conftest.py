"""The helpers of this folder and of the rollouts' tests: pytest's importlib mode puts no folder on the path."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rollout")]
