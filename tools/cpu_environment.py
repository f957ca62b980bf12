"""Make (or find) the environment of a CPU-only inference server outside the clone, from pinned packages.

The folder is `$XDG_CACHE_HOME/rlkit/NAME-<hash>` (default ~/.cache); the hash covers the pins, the stand-ins and the
Python version. The environment is built under another name and renamed once it works, under a lock: a partial one is
never used, and concurrent callers build it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def provide(here: Path, name: str, *, check: str, pythons: set[tuple[int, int]]) -> Path:
    """The environment's Python; it is built first if it does not exist.

    here: a folder with `pins.txt` and perhaps `stand_ins`, which are copied beside the packages, and `older.txt`, whose
    packages are put into the environment's folder `older`. check: Python code that the new environment must run.
    pythons: versions that the pins are for.
    """
    if sys.version_info[:2] not in pythons or sys.platform != "linux":
        wanted = " or ".join(f"{major}.{minor}" for major, minor in sorted(pythons))
        sys.exit(f"tools/{here.name} is pinned for Linux and Python {wanted}, not {sys.platform} {sys.version}")
    folder = cache_folder(here, name)
    python = folder / "bin" / "python"
    if not python.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not python.exists():
                make(folder, here, check)
    return python


def cache_folder(here: Path, name: str) -> Path:
    """The folder of the environment for these pins."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in (here / "pins.txt", *here.glob("older.txt"), *sorted((here / "stand_ins").rglob("*.py"))):
        digest.update(str(path.relative_to(here)).encode() + b"\0" + path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rlkit" / f"{name}-{digest.hexdigest()[:16]}"


def make(folder: Path, here: Path, check: str) -> None:
    """Install into a temporary folder, check that it works, and rename it to `folder`."""
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.draft-", dir=folder.parent))
    try:
        note(here, f"making {folder}: about 5 minutes")
        run(sys.executable, "-m", "venv", str(draft))
        python = str(draft / "bin" / "python")
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile")
        pip = (*pip, "-r", str(here / "pins.txt"))
        try:
            run(*pip)
        except subprocess.CalledProcessError:
            note(here, "the configured index has no CPU build of torch; trying PyTorch's own")
            run(*pip, "--extra-index-url", CPU_INDEX)
        if (older := here / "older.txt").exists():
            run(*pip[:-2], "--target", str(draft / "older"), "-r", str(older))
        site = next((draft / "lib").glob("python3*/site-packages"))
        stand_ins = here / "stand_ins"
        for item in stand_ins.iterdir() if stand_ins.is_dir() else ():
            (shutil.copytree if item.is_dir() else shutil.copy)(item, site / item.name)
            if item.suffix == ".py":
                (site / f"{item.stem}.pth").write_text(f"import {item.stem}\n")
        compiled = ("-m", "compileall", "-q", "-j", "0", str(draft / "lib"))  # on all cores, where pip takes one
        subprocess.run((python, *compiled), stdout=subprocess.DEVNULL, check=False)  # some files are of other Pythons
        run(python, "-c", check, env={**os.environ, "PYTHONWARNINGS": "ignore"})
        draft.rename(folder)
    except subprocess.CalledProcessError as error:
        sys.exit(f"tools/{here.name}: {error}")
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def run(*command: str, env: dict[str, str] | None = None) -> None:
    """Run a step with its output on stderr: stdout carries the result."""
    subprocess.run(command, check=True, env=env, stdout=sys.stderr.fileno())


def note(here: Path, text: str) -> None:
    """Report progress on stderr."""
    print(f"tools/{here.name}: {text}", file=sys.stderr, flush=True)
