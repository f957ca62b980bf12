"""`tools` on the path, which pytest's importlib mode does not put there; the files are for commands."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
collect_ignore_glob = ["files/*"]
