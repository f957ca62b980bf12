"""The two ways of isolation, for the tests that must hold under both."""

import os
import resource

import pytest

from rlkit.rewards import sandbox
from rlkit.rewards._worker import bubble

ISOLATION = sandbox.isolation


@pytest.fixture
def without(monkeypatch):
    """Replaces the sandbox's server by one of its own in which these ways of isolation fail."""
    broken = {"namespaces": "sandboxd.isolate._NAMESPACES |= 0x10000", "bubblewrap": "sandboxd.bubble.PLACES = ()"}
    server = sandbox._server.__wrapped__(())

    def replace(*ways):
        lines = "; ".join(broken[way] for way in ways)
        server._command[4] = server._command[4].replace("sandboxd.main()", f"{lines}; sandboxd.main()")
        monkeypatch.setattr(sandbox, "_server", lambda _packages: server)
        monkeypatch.setattr(sandbox, "isolation", ISOLATION)
        ISOLATION.cache_clear()

    yield replace
    server.close()
    ISOLATION.cache_clear()


@pytest.fixture
def only_bubblewrap(monkeypatch):
    """Programs run as where this process may not make namespaces, but bubblewrap may."""
    if not any(os.access(place, os.X_OK) for place in bubble.PLACES):
        pytest.skip("bubblewrap is not installed")
    monkeypatch.setattr(sandbox, "isolation", lambda: "bubblewrap")


@pytest.fixture(params=["namespaces", pytest.param("bubblewrap", marks=pytest.mark.slow)])
def isolation(request):
    """Both ways, one after the other."""
    if request.param == "bubblewrap":
        request.getfixturevalue("only_bubblewrap")
    return request.param


@pytest.fixture
def many_open_files():
    """So many that the next ones have numbers beyond what `select` can wait for."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for fd in opened:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
