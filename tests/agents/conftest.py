"""The helpers of `tests/rollout`, `tests/agents` and `tools`: pytest's importlib mode does not put them on the path."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "rollout"), str(ROOT / "tests" / "agents"), str(ROOT / "tools")]
collect_ignore_glob = ["programs/*"]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> Path:
    """A certificate for 127.0.0.1 with its key, in one file each."""
    if shutil.which("openssl") is None:
        pytest.skip("without openssl")
    folder = tmp_path_factory.mktemp("tls")
    made = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj /CN=policy"
    line = f"openssl req {made} -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(line.split(), cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem"
