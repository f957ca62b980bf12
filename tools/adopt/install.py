"""Make (or find) a folder with the packages of environments that others publish, and print its Python.

python tools/adopt/install.py            # a minute and 300 MB the first time, instant afterwards

The pins lack what rlkit's own environment has: tests/adopt puts the packages before it on the path. A package that two
releases of another need in two versions is in `older.txt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cpu_environment import provide  # noqa: E402

CHECK = "from importlib.metadata import version; [version(x) for x in ('gem-llm', 'textarena', 'verifiers')]"

if __name__ == "__main__":
    print(provide(HERE, "adopt", check=CHECK, pythons={(3, 11)}))
