"""Let the tests import the helpers of this folder: pytest's importlib mode does not put it on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
