"""Repeated requests: how long the waits are, and what bounds them."""

from __future__ import annotations

import time
from email.utils import formatdate
from types import SimpleNamespace

import pytest

from rlkit._util.retrying import retried, retry_after_s


class Full(Exception):
    retry_after_s = 0.0


class Later(Full):
    retry_after_s = 7.0


async def waits(errors, **options):
    """The waits of a call that raises these errors, and its outcome."""
    left, slept = list(errors), []

    async def attempt():
        if left:
            raise left.pop(0)
        return "done"

    async def sleep(seconds):
        slept.append(seconds)

    try:
        outcome = await retried(attempt, on=Full, sleep=sleep, **options)
    except Exception as error:
        outcome = error
    return slept, outcome


async def test_waits_double_within_their_jitter_up_to_a_minute():
    slept, outcome = await waits([Full() for _ in range(12)], backoff_s=0.5, total_s=1e6)
    assert outcome == "done"
    assert len(slept) == 12
    for n, wait in enumerate(slept):
        mean = min(60, 0.5 * 2**n)
        assert 0.5 * mean <= wait <= 1.5 * mean
    assert len({wait / min(60, 0.5 * 2**n) for n, wait in enumerate(slept)}) > 6


async def test_the_server_is_not_asked_before_its_retry_after():
    slept, outcome = await waits([Later("full"), Full("full")], backoff_s=0.01)
    assert (slept[0], outcome) == (7.0, "done")
    assert slept[1] <= 0.03


async def test_the_total_counts_from_the_first_error(monkeypatch):
    """A generation may take hours until its server is busy."""
    clock = iter([7200.0, 7201.0, 7207.0, 7207.0])
    monkeypatch.setattr("rlkit._util.retrying.time", SimpleNamespace(monotonic=lambda: next(clock)))
    slept, outcome = await waits([Full("full"), Full("full"), Full("full")], total_s=6.0)
    assert (len(slept), str(outcome)) == (1, "full, tried 2 times")


async def test_the_number_of_retries_and_the_total_are_bounds():
    slept, outcome = await waits([Full("full")] * 9, max_retries=3, backoff_s=0.01)
    assert (len(slept), str(outcome)) == (3, "full, tried 4 times")
    slept, outcome = await waits([Later("full")], total_s=6.0)
    assert (slept, str(outcome)) == ([], "full, tried once; the server asks to wait 7 s")


async def test_other_errors_are_not_repeated():
    slept, outcome = await waits([KeyError("x")])
    assert (slept, type(outcome)) == ([], KeyError)


def test_a_retry_after_may_be_a_date():
    assert 80 < retry_after_s(formatdate(time.time() + 90, usegmt=True)) <= 90
    assert retry_after_s(formatdate(time.time() - 90, usegmt=True)) == 0


@pytest.mark.parametrize("header", ["", "soon", "-3", "nan", None, "inf", "1e9", "Thu, 01 Jan 2099 00:00:00 GMT"])
def test_an_unreadable_retry_after_is_ignored(header):
    assert retry_after_s(header) == 0
