"""Lets the tests of this folder import its tables by name: pytest's importlib mode leaves the folder off the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
