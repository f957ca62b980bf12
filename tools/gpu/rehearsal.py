"""Rehearse the GPU programmes on a CPU, in an environment with the versions and the gaps of a GPU machine.

    python tools/gpu/rehearsal.py                      # makes the environment the first time, then runs A and B
    python tools/gpu/rehearsal.py A --python some/bin/python
    python tools/gpu/rehearsal.py --results /tmp/results

The environment is in `$XDG_CACHE_HOME/rlkit/gpu-rehearsal` (default ~/.cache). Its torch, triton and transformers are
the oldest that rlkit supports, and what a GPU machine often lacks (`ABSENT`) is left out. Shapes are tiny and times
mean nothing: every line runs, that is all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROGRAMMES = ("A", "B")  # C's scripts need what is left out
TORCH = "2.11.0"
PINS = (
    "triton==3.6.0", "transformers==5.17.0", "numpy<2.4",  # triton 3.6's interpreter fails with a newer numpy
    "accelerate", "aiohttp", "einops", "hypothesis", "jaxtyping", "matplotlib", "peft", "psutil", "pytest",
    "pytest-timeout", "pytest-xdist", "rich",
)  # fmt: skip
ABSENT = ("tyro", "datasets", "flash_attn", "pytest_asyncio", "math_verify", "optuna")


def main() -> None:
    """Run the programmes, and exit with the first failure's code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "programmes", nargs="*", metavar="programme", help=f"of {', '.join(PROGRAMMES)}; all if not given"
    )
    parser.add_argument("--python", type=Path, help="of an environment that exists")
    parser.add_argument("--results", type=Path, help="folder of the results; a temporary one if not given")
    args = parser.parse_args()
    if wrong := [p for p in args.programmes if p not in PROGRAMMES]:
        parser.error(f"programme {wrong[0]!r} is none of {', '.join(PROGRAMMES)}")
    python = args.python or environment()
    check(python)
    results = args.results or Path(tempfile.mkdtemp(prefix="rlkit-gpu-rehearsal-"))
    codes = [run(name, python, results / name) for name in args.programmes or PROGRAMMES]
    sys.exit(next(filter(None, codes), 0))


def environment() -> Path:
    """The environment's Python; made if it does not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "rlkit" / "gpu-rehearsal"
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    cpu = [*pip, f"torch=={TORCH}+cpu", "--index-url", CPU_INDEX]
    if subprocess.run(cpu, check=False).returncode:
        print("no CPU build of torch found: taking that for CUDA, several GB", flush=True)
        subprocess.run([*pip, f"torch=={TORCH}"], check=True)
    subprocess.run([*pip, *PINS], check=True)
    (folder / ".ready").touch()
    return python


def check(python: Path) -> None:
    """Refuse an environment of another torch, or one that has what the machine lacks."""
    program = (
        "import importlib.util as u, torch, transformers, triton\n"
        "print('torch', torch.__version__, 'transformers', transformers.__version__, 'triton', triton.__version__)\n"
        f"assert torch.__version__.startswith({TORCH!r}), torch.__version__\n"
        f"found = [name for name in {ABSENT!r} if u.find_spec(name)]\n"
        "assert not found, f'uninstall {found}'"
    )
    if subprocess.run([str(python), "-c", program], check=False).returncode:
        sys.exit(f"{python} is no environment for the rehearsal: leave --python out, and one is made")


def run(programme: str, python: Path, results: Path) -> int:
    """Rehearse one programme."""
    print(f"programme {programme}, results in {results}", flush=True)
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command = [str(python), "tools/gpu/programme.py", programme, "--rehearse", "--out", str(results)]
    code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    print(f"programme {programme}: exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    main()
