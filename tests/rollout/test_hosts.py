"""Addresses of servers: refused in one line before the model is loaded, unless their host is this machine."""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
import warm
from fake_server import serving

from rlkit._util import ranks
from rlkit._util.ranks import interfaces, name_interface, own_address
from rlkit.rollout.engines import hosts
from rlkit.rollout.engines.sglang import ReplicaError, SGLang
from rlkit.rollout.engines.sglang.weights import _store

ELSEWHERE = "192.0.2.1"  # reserved for documentation: no machine has it


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "127.9.9.9"])
def test_this_machine_by_other_names(host):
    assert hosts.is_here(f"http://{host}:30000")


def test_an_address_of_an_interface_is_this_machine():
    """The one from which packets to elsewhere would leave; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))
        except OSError:
            pytest.skip("no network")
        assert hosts.is_here(f"http://{probe.getsockname()[0]}:30000")
    assert not hosts.is_here(f"http://{ELSEWHERE}:30000")


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://:9", "http://x:99999", "ftp://x", "x", ""])
def test_what_is_no_address_is_named(url):
    with pytest.raises(ValueError, match=r"it must begin with http://, as in http://127\.0\.0\.1:30000") as caught:
        SGLang(url) if url else SGLang([url])
    assert "router" not in str(caught.value)


@pytest.mark.slow_cases(
    "127.0.0.1:9-'127.0.0.1:9' is no address of a server: it must begin with http://",
    "http://192.0.2.1:30000-192.0.2.1:30000 is another machine: weights go to SGLang",
)
@pytest.mark.parametrize(("url", "said"), [
    (f"http://{ELSEWHERE}:30000", f"{ELSEWHERE}:30000 is another machine: weights go to SGLang"),
    ("http://no-such-host.invalid:1", "the host 'no-such-host.invalid' has no address"),
    ("127.0.0.1:9", "'127.0.0.1:9' is no address of a server: it must begin with http://"),
])  # fmt: skip
def test_the_command_refuses_them_before_it_reads_a_file(tmp_path, url, said):
    done = warm.run(
        [sys.executable, "-m", "rlkit.scripts.grpo", "--model", tmp_path / "none", "--data", tmp_path / "none.jsonl",
         "--reward", "none.py:f", "--engine", "sglang", "--weight-sync", "ipc", "--engine-urls", url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --engine-urls ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


async def test_a_server_that_is_not_there_at_the_start_is_no_run_to_resume():
    with pytest.raises(ReplicaError, match=r"^no SGLang server answers: start one with") as caught:
        async with SGLang("http://127.0.0.1:9"):
            pass
    assert "resume" not in str(caught.value)


async def test_an_update_to_another_machine_names_the_transports_that_reach_it(monkeypatch):
    async with serving(lambda *_: {}) as (url, seen):
        monkeypatch.setattr(hosts, "is_here", lambda url: False)
        engine = SGLang(url)
        with pytest.raises(ValueError, match=r"is another machine: .*FromGroup.* or FromDisk"):
            await engine.update_weights([("x", torch.zeros(1))], version=1)
        await engine.close()
    assert not seen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_rendezvous_of_weights_listens_at_its_own_address_only(host):
    store = _store(host, 0, 2, timeout=timedelta(seconds=5))
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == store.port] in (["127.0.0.1"], ["::1"])
    other = dist.TCPStore(host, store.port, 2, is_master=False, timeout=timedelta(seconds=5))
    other.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("first", ["", "127.0.0.1", "localhost", "192.0.2.9"])
def test_the_own_address_is_one_of_this_machine(monkeypatch, first):
    monkeypatch.setenv("MASTER_ADDR", first)
    assert hosts.is_here(f"http://{own_address()}:30000")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_interfaces_of_this_machine_are_the_systems():
    found = interfaces()
    addresses = {n: [a.address for a in of if a.family == socket.AF_INET] for n, of in psutil.net_if_addrs().items()}
    assert found == {name: of[0] for name, of in addresses.items() if of}
    assert found["lo"] == "127.0.0.1"


class Probe:
    """A socket without a way to other machines, as on the first node of a network of its own."""

    def connect(self, _target):
        raise OSError("Network is unreachable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_the_own_address_without_a_way_to_other_networks_is_an_interface(monkeypatch):
    monkeypatch.setattr(ranks.socket, "socket", lambda *_: Probe())
    monkeypatch.setattr(ranks, "interfaces", lambda: {"lo": "127.0.0.1", "ib0": "10.77.0.1", "docker0": "172.17.0.1"})
    assert own_address() == "10.77.0.1"
    monkeypatch.setattr(ranks, "interfaces", lambda: {"lo": "127.0.0.1"})
    assert own_address() == "127.0.0.1"


@pytest.mark.parametrize(("host", "size", "given", "expected"), [
    ("localhost", "4", None, "ib0"),  # Debian's 127.0.1.1
    ("no-such-host.invalid", "4", None, "ib0"),
    ("localhost", "4", "eth7", "eth7"),
    ("localhost", "2", None, None),  # one machine
    ("10.77.0.9", "4", None, None),  # a name that others can reach
])  # fmt: skip
def test_gloo_gets_the_interface_of_a_machine_whose_name_is_loopback(monkeypatch, host, size, given, expected):
    monkeypatch.setattr(ranks, "own_address", lambda: "10.77.0.1")
    monkeypatch.setattr(ranks, "interfaces", lambda: {"lo": "127.0.0.1", "ib0": "10.77.0.1"})
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    for name, value in {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    name_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
