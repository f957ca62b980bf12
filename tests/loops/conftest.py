"""Lets the tests here import `small.py` by name: pytest's importlib mode leaves the folder off the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
