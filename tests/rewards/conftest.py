"""What several of these files need."""

import os
import resource

import pytest

from rlkit.rewards import math


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


@pytest.fixture(scope="module")
def new_math_pool():
    """Replaces the pool for mathematics, by one with one worker: each that starts imports sympy."""

    def replace():
        old = math._pool
        math._new_pool()
        old.stop()
        old.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math, "_NUM_WORKERS", 1)
        replace()
        yield replace
    replace()
