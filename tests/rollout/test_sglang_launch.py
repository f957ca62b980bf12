"""How a server is started; a stand-in writes its environment to a file."""

import json
import socket
import sys
import time
from pathlib import Path

import pytest

from rlkit._util.extras import MissingExtra
from rlkit.rollout.engines.servers import process as server
from rlkit.rollout.engines.sglang import launch
from rlkit.rollout.engines.vllm import launch as launch_vllm

STAND_IN = f"""#!{sys.executable}
import json, os, sys, time
folder = sys.argv[sys.argv.index("--model-path") + 1]
with open(folder + "/part", "w") as file:
    json.dump(dict(os.environ), file)
os.rename(folder + "/part", folder + "/environment")
time.sleep(3600)
"""


def test_a_server_does_not_inherit_the_variables_of_torchrun(tmp_path, monkeypatch):
    """With TORCHELASTIC_USE_AGENT_STORE, torch.distributed connects to the store of torchrun and waits."""
    ranks = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in (ranks | {"RANKING": "1"}).items():
        monkeypatch.setenv(name, value)
    python, written = tmp_path / "python", tmp_path / "environment"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    with launch(tmp_path, python=str(python), log=tmp_path / "log", env={"GIVEN": "2"}, wait=False) as server:
        end = time.monotonic() + 120
        while not written.exists():
            assert server.alive
            assert time.monotonic() < end
            time.sleep(0.05)
    found = json.loads(written.read_text())
    assert not ranks.keys() & found.keys()
    assert (found["RANKING"], found["GIVEN"]) == ("1", "2")


@pytest.mark.parametrize(("kind", "package"), [(launch, "sglang"), (launch_vllm, "vllm")])
def test_a_package_that_is_not_installed_is_named_at_once(tmp_path, monkeypatch, kind, package):
    monkeypatch.delenv(f"RLKIT_{package.upper()}_PYTHON", raising=False)
    said = rf"^{package} is not installed here: `pip install {package}`, .* in \$RLKIT_{package.upper()}_PYTHON$"
    with pytest.raises(MissingExtra, match=said):
        kind(tmp_path)


def test_the_port_is_below_the_ephemeral_range():
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {server._free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 10
    assert all(1024 < port < first for port in ports) or first < 4096 + 1024
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_the_cause_of_a_death_is_the_end_of_the_message(tmp_path):
    """Not the guard's own line, which it writes after the server has ended."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nraise SystemExit('no such model')\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"no such model$"):
        launch(tmp_path, python=str(python), log=tmp_path / "log")
    assert "guard: server status 1" in (tmp_path / "log").read_text()


def test_a_taken_port_is_refused_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="is taken"):
        launch(tmp_path, port=taken.getsockname()[1])


def test_a_server_that_cannot_bind_its_port_is_an_error_at_once(tmp_path):
    """SGLang does not exit: it waits for its own warm-up."""
    python = tmp_path / "python"
    said = "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use"
    python.write_text(f"#!{sys.executable}\nimport time\nprint({said!r}, flush=True)\ntime.sleep(3600)\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="address already in use"):
        launch(tmp_path, python=str(python), log=tmp_path / "log")
