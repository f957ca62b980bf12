"""Make (or find) a CPU-only SGLang environment outside the clone, and print the path of its Python.

    python tools/sglang_cpu/install.py            # about 5 minutes and 2.3 GB the first time, instant afterwards

The folder is `$XDG_CACHE_HOME/rlkit/sglang-cpu-<hash>` (default ~/.cache); the hash covers the pins, the stand-ins and
the Python version. The environment is built under another name and renamed once it works, under a lock: a partial one
is never used, and concurrent callers build it once.
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

HERE = Path(__file__).resolve().parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CHECK = """
import torch, torchvision, sgl_kernel, sglang.launch_server
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build"
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
"""


def main() -> None:
    """Print the path of the environment's Python; build the environment if it does not exist."""
    if sys.version_info[:2] not in {(3, 11), (3, 12)} or sys.platform != "linux":
        sys.exit(f"tools/sglang_cpu is pinned for Linux and Python 3.11 or 3.12, not {sys.platform} {sys.version}")
    folder = cache_folder()
    python = folder / "bin" / "python"
    if not python.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not python.exists():
                make(folder)
    print(python)


def cache_folder() -> Path:
    """The folder of the environment for these pins."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in (HERE / "pins.txt", *sorted((HERE / "stand_ins").rglob("*.py"))):
        digest.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rlkit" / f"sglang-cpu-{digest.hexdigest()[:16]}"


def make(folder: Path) -> None:
    """Install into a temporary folder, check that it works, and rename it to `folder`."""
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.draft-", dir=folder.parent))
    try:
        note(f"making {folder}: about 5 minutes")
        run(sys.executable, "-m", "venv", str(draft))
        python = str(draft / "bin" / "python")
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
        pip = (*pip, "-r", str(HERE / "pins.txt"))
        try:
            run(*pip)
        except subprocess.CalledProcessError:
            note("the configured index has no CPU build of torch; trying PyTorch's own")
            run(*pip, "--extra-index-url", CPU_INDEX)
        site = next((draft / "lib").glob("python3*/site-packages"))
        for item in (HERE / "stand_ins").iterdir():
            (shutil.copytree if item.is_dir() else shutil.copy)(item, site / item.name)
        (site / "rlkit_sglang_cpu.pth").write_text("import rlkit_sglang_cpu\n")
        run(python, "-c", CHECK, env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONWARNINGS": "ignore"})
        draft.rename(folder)
    except subprocess.CalledProcessError as error:
        sys.exit(f"tools/sglang_cpu: {error}")
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def run(*command: str, env: dict[str, str] | None = None) -> None:
    """Run a step with its output on stderr: stdout carries the result."""
    subprocess.run(command, check=True, env=env, stdout=sys.stderr.fileno())


def note(text: str) -> None:
    """Report progress on stderr."""
    print(f"tools/sglang_cpu: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
