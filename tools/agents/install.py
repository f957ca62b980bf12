"""Make (or find) an environment with agents and clients from the package index, and print the path of its Python.

python tools/agents/install.py            # a minute and 500 MB the first time, instant afterwards
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cpu_environment import provide  # noqa: E402

CHECK = "import anthropic, minisweagent, openai, smolagents"

if __name__ == "__main__":
    print(provide(HERE, "agents", check=CHECK, pythons={(3, 11)}))
