from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path

import math_verify
import numpy as np
import pytest
import torch

from rlkit.compat.rewards import adapted
from rlkit.data.load import Rows
from rlkit.rewards import Reward, RewardError, Sample, run_reward, run_reward_each
from rlkit.rewards.call import check_signature
from rlkit.rewards.load import load_function
from rlkit.rewards.trial import try_reward
from rlkit.run.sync import run_sync


def samples(*texts, **extra):
    return [Sample(t, {"answer": t.upper()}, 10 + i, {k: v[i] for k, v in extra.items()}) for i, t in enumerate(texts)]


async def run(function, items, timeout_s=60.0):
    return await run_reward(function, items, timeout_s=timeout_s)


def per_sample(completion, row):
    return len(completion) + (row["answer"] == completion.upper()) / 4


def batched(completions, rows):
    return [per_sample(c, r) for c, r in zip(completions, rows, strict=True)]


async def per_sample_async(completion, row):
    await asyncio.sleep(0.02 / len(completion))  # later samples are done first
    return per_sample(completion, row)


async def batched_async(completions, rows):
    await asyncio.sleep(0)
    return tuple(batched(completions, rows))


class Callable_:
    def __call__(self, completion, row):
        return per_sample(completion, row)


class AsyncCallable:
    async def __call__(self, completion, row):
        return per_sample(completion, row)


@pytest.mark.parametrize(
    "function",
    [
        per_sample,
        batched,
        per_sample_async,
        batched_async,
        Callable_(),
        AsyncCallable(),
        lambda text, example: per_sample(text, example),
        lambda *args: per_sample(*args),
        partial(lambda scale, text, row: per_sample(text, row) * scale, 1.0),
        lambda completions, rows: np.array(batched(completions, rows)),
        lambda completions, rows: torch.tensor(batched(completions, rows)),
    ],
)
async def test_every_form_gives_the_same_rewards_in_order(function):
    got = await run(function, samples("a", "bb", "ccc", "dddd"))
    assert got == [Reward(1.25), Reward(2.25), Reward(3.25), Reward(4.25)]
    assert all(type(r.reward) is float for r in got)


async def test_no_samples_call_nothing():
    assert await run(lambda completion, row: 1 / 0, []) == []


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(2), 2.0),
        (np.int64(3), 3.0),
        (torch.tensor(0.25), 0.25),
        (Fraction(1, 4), 0.25),
        (Decimal("0.25"), 0.25),
    ],
)
async def test_scalars_of_all_libraries_are_numbers(value, number):
    (got,) = await run(lambda completion, row: value, samples("a"))
    assert got == Reward(number)
    assert type(got.reward) is float


async def test_a_dict_gives_reward_score_and_metrics():
    (got,) = await run(lambda c, r: {"reward": 1, "score": np.float32(0.5), "format": True, "len": 3}, samples("a"))
    assert got == Reward(1.0, 0.5, {"format": 1.0, "len": 3.0})


async def test_further_parameters_are_filled_by_name():
    items = samples("a", "b", truncated=[True, False], tag=["x", "y"])

    def one(completion, row, tag, truncated=None, *, absent=7):
        return {"reward": absent, "cut": truncated, "is_x": tag == "x"}

    assert [r.metrics for r in await run(one, items)] == [{"cut": 1.0, "is_x": 1.0}, {"cut": 0.0, "is_x": 0.0}]

    def everything(completion, row, **extra):
        return sorted(extra) == ["tag", "truncated"]

    assert [r.reward for r in await run(everything, items)] == [1.0, 1.0]

    def lists(completions, rows, truncated):
        return truncated

    assert [r.reward for r in await run(lists, items)] == [1.0, 0.0]


async def test_a_form_that_cannot_be_called_is_refused_before_any_call():
    with pytest.raises(TypeError, match=r"must take \(completion, row\) or \(completions, rows\), got \(completion\)"):
        await run(lambda completion: 1, samples("a"))
    with pytest.raises(TypeError, match=r"asks for \['answer'\].* may ask for \['index', 'truncated'\]; columns"):
        await run(lambda completion, row, answer: 1, samples("a", truncated=[True]))
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        await run(per_sample, samples("a"), timeout_s=0)


def fails_at_b(value):
    """Rewards 1 for all but the completion b."""

    def function(completion, row):
        if completion != "b":
            return 1.0
        if isinstance(value, BaseException):
            raise value
        return value

    return function


BAD = [
    (
        ZeroDivisionError("by zero"),
        r"ZeroDivisionError: by zero \(test_call\.py, line \d+\)",
        "return what such an answer",
    ),
    (SystemExit(3), r"SystemExit: 3 \(test_call\.py", "return what such"),
    (TimeoutError("mine"), r"TimeoutError: mine \(test_call\.py", "return what such"),
    (None, "returned NoneType None", "without `return`"),
    (float("nan"), "returned nan", "division or logarithm"),
    (np.float32("inf"), "returned inf", "division or logarithm"),
    ("0.5", "returned str '0.5'", "return a finite number"),
    ([1.0], r"returned list \[1.0\]", "return a finite number"),
    (np.ones(1), r"returned ndarray array\(\[1.\]\)", "return a finite number"),
    (1j, "returned complex 1j", "return a finite number"),
    (10**400, "returned int 1000", "decide what such an answer is worth"),
    (10**5000, "returned int .*4300 digits", "decide what such an answer is worth"),  # Python refuses to print it
    (Fraction(10**400), r"returned Fraction Fraction\(1000", "decide what such an answer is worth"),
    (Decimal("1e400"), "returned inf", "decide what such an answer is worth"),
    (-1e39, r"returned -1e\+39", "at most 3.4e38"),  # infinite in float32
    (torch.ones(2), r"returned Tensor tensor\(\[1., 1.\]\)", "return a finite number"),
    (torch.tensor(1 + 0j), "returned Tensor", "return a finite number"),
    (np.complex128(1 + 2j), "returned complex128", "return a finite number"),
    (np.array("1.5"), "returned ndarray", "return a finite number"),
    ({"reward": 1, "acc": 10**400}, "returned int 1000.* under 'acc'", "decide what such an answer is worth"),
    ({"score": 1}, r"returned a dict without 'reward' \(keys: \['score'\]\)", "under 'reward'"),
    ({"reward": None}, "returned NoneType None under 'reward'", "without `return`"),
    ({"reward": 1, "acc": float("nan")}, "returned nan under 'acc'", "division or logarithm"),
    ({"reward": 1, "why": ["x"]}, r"returned list \['x'\] under 'why'", "dict of finite numbers"),
]


@pytest.mark.parametrize("form", ["sync", "async", "batched"])
@pytest.mark.parametrize(("value", "cause", "fix"), BAD, ids=[cause for _, cause, _ in BAD])
async def test_whatever_goes_wrong_names_function_row_completion_cause_and_fix(value, cause, fix, form):
    sync = fails_at_b(value)

    async def asynchronous(completion, row):
        return sync(completion, row)

    def whole(completions, rows):
        return [sync(c, r) for c, r in zip(completions, rows)]

    function = {"sync": sync, "async": asynchronous, "batched": whole}[form]
    if form == "async" and isinstance(value, SystemExit):
        pytest.skip("asyncio itself ends the event loop on SystemExit")
    with pytest.raises(RewardError, match=cause) as caught:
        await run(function, samples("a", "b", "b"))
    message = str(caught.value)
    assert fix in message.split("\n  fix: ")[1]
    assert "test_call.py:" in message.split(" failed on ")[0]
    if form == "batched" and isinstance(value, BaseException):
        assert caught.value.index is None
        assert " failed on a batch: " in message
    else:
        assert caught.value.index == 11
        assert " failed on row 12: " in message
        assert "\n  completion (1 characters): 'b'\n" in message
    if isinstance(value, BaseException):
        assert caught.value.__cause__ is value


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ([1.0], "returned 1 results for 2 completions"),
        ([1.0] * 3, "returned 3 results for 2 completions"),
        (1.0, "returned float 1.0 for a batch"),
        (None, "returned NoneType None for a batch"),
        ("ab", "returned str 'ab' for a batch"),
        ({"reward": 1, "score": 2}, "returned dict"),
        (torch.tensor(1.0), "returned Tensor"),
    ],
)
async def test_a_batch_must_give_one_result_each(value, cause):
    with pytest.raises(RewardError, match=cause) as caught:
        await run(lambda completions, rows: value, samples("a", "b"))
    assert "return a list of 2 numbers or dicts" in str(caught.value)


async def test_a_coroutine_from_a_plain_function_is_explained():
    with pytest.raises(
        RewardError, match=r"returned coroutine .*\n.*\n  fix: declare the function itself with `async def`"
    ):
        await run(lambda completion, row: per_sample_async(completion, row), samples("a"))

    async def forgets(completion, row):
        return per_sample_async(completion, row)

    with pytest.raises(RewardError, match=r"returned coroutine .*\n.*\n  fix: await it"):
        await run(forgets, samples("a"))


async def test_a_missing_file_is_no_answers_fault():
    with pytest.raises(RewardError, match=r"fix: make the file, or correct its path: a relative one starts at /"):
        await run(lambda completion, row: len(Path("no_such_file").read_text()), samples("a"))


async def test_a_long_completion_is_shown_by_its_ends():
    with pytest.raises(RewardError) as caught:
        await run(lambda c, r: None, samples("x" * 500 + "tail"))
    assert f"completion (504 characters): '{'x' * 120}' ... '{'x' * 116}tail'" in str(caught.value)


async def test_an_alarm_off_the_main_thread_is_explained():
    def alarmed(completion, row):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    with pytest.raises(RewardError, match=r"signal only works in main thread.*\n.*\n  fix: turn its own alarm off"):
        await run(alarmed, samples("a"))


ALARMED = {  # functions whose own errors nobody sees, and what is said of them; nothing where none is raised
    """
def reward(solution_str, ground_truth):
    try:
        signal.alarm(3)
        return 1.0
    except ValueError:
        return 0.0""": "signal.alarm",
    """
class limit:
    def __enter__(self):
        signal.setitimer(signal.ITIMER_REAL, 3)
    def __exit__(self, *_):
        pass
def reward(completion, row):
    with limit():
        return 1.0""": "signal.setitimer",
    """
@contextmanager
def limit():
    signal.alarm(3)
    yield
def score(text):
    with limit():
        return 1.0
def reward(completion, row):
    return score(completion)""": "signal.alarm",
    """
def reward(completions, answer, **kwargs):
    return [float(verify(parse(a), parse(c))) for a, c in zip(answer, completions)]""": "signal.signal",
    """
def reward(completion, row):
    from math_verify import parse
    return len(parse(completion))""": "signal.signal",
    """
def reward(completion, row):
    return len(parse(completion, parsing_timeout=None))""": "",
    """
async def reward(completion, row):
    signal.alarm(3)
    return 1.0""": "",
    """
def work(text):
    signal.alarm(3)
def reward(completion, row):
    multiprocessing.Process(target=work).start()
    return 1.0""": "",
    """
def reward(completion, row):
    return float("alarm" in row.get("signal", ""))""": "",
}


@pytest.mark.slow_cases("source7")
@pytest.mark.parametrize("source", ALARMED)
def test_an_alarm_is_named_before_the_run(source, tmp_path, caplog):
    imports = (
        "import multiprocessing, signal\nfrom contextlib import contextmanager\nfrom math_verify import parse, verify"
    )
    path = tmp_path / f"alarming_{list(ALARMED).index(source)}.py"
    path.write_text(f"{imports}{source}\n")
    rows = Rows([{"prompt": "q", "answer": "1", "signal": ""}], source="rows.jsonl", places=(1,))
    try:
        run_sync(try_reward(adapted(load_function(f"{path}:reward")), rows, timeout_s=5))
    finally:
        signal.alarm(0)
    said = [record.getMessage() for record in caplog.records if "main thread" in record.getMessage()]
    assert len(said) == bool(ALARMED[source])
    assert not said or (f"{path.name}:reward uses {ALARMED[source]}" in said[0] and "--reward-timeout" in said[0])


async def test_a_timeout_of_math_verify_is_explained():
    with pytest.raises(
        RewardError, match=r"threaded environment(.|\n)*  fix: turn its own alarm off \(math_verify: parse"
    ):
        await run(lambda completion, row: len(math_verify.parse(completion)), samples("a"))


@pytest.mark.parametrize("form", ["sync", "async", "batched"])
async def test_a_hanging_call_is_timed_out_alone(form):
    release = threading.Event()
    calls = []

    def slow(completion, row):
        calls.append(completion)
        if completion == "hang":
            release.wait(1000)
        return 1.0

    async def slow_async(completion, row):
        await asyncio.sleep(1000 if completion == "hang" else 0)
        return 1.0

    def whole(completions, rows):
        return [slow(c, r) for c, r in zip(completions, rows)]

    function = {"sync": slow, "async": slow_async, "batched": whole}[form]
    try:
        with pytest.raises(RewardError, match=r"no result after 0\.5 s") as caught:
            await run(function, samples("a", "b", "c", "hang", "d"), timeout_s=0.5)
    finally:
        release.set()
    assert caught.value.index == (None if form == "batched" else 13)
    assert ("continues in its thread" in str(caught.value)) == (form != "async")
    if form == "sync":
        assert await run(slow, samples("a", "b"), timeout_s=60) == [Reward(1.0), Reward(1.0)]
        assert "d" not in calls  # nothing more is called after the failure


async def test_the_timeout_is_per_call_and_not_per_batch():
    def slow(completion, row):
        time.sleep(0.1)
        return 1.0

    assert len(await run(slow, samples(*"abcdefg"), timeout_s=0.6)) == 7


async def test_sync_batches_take_turns_and_async_calls_run_together():
    active, most = 0, 0

    def sync(completion, row):
        nonlocal active, most
        active += 1
        most = max(most, active)
        time.sleep(0.002)
        active -= 1
        return len(completion)

    batches = [samples(*("x" * (i + 1) for _ in range(3))) for i in range(4)]
    results = await asyncio.gather(*(run(sync, b, timeout_s=60) for b in batches))
    assert [[r.reward for r in rs] for rs in results] == [[i + 1.0] * 3 for i in range(4)]
    assert most == 1

    barrier = asyncio.Event()
    waiting = 0

    async def together(completion, row):
        nonlocal waiting
        waiting += 1
        if waiting == 5:
            barrier.set()
        await barrier.wait()
        return 1

    assert len(await run(together, samples(*"abcde"), timeout_s=60)) == 5


async def test_cancelling_stops_the_worker_and_frees_the_next():
    calls = []
    began, release = threading.Event(), threading.Event()

    def slow(completion, row):
        calls.append((completion, threading.get_native_id()))
        began.set()
        release.wait(60)
        return 1.0

    task = asyncio.create_task(run(slow, samples(*"abcdefghij"), timeout_s=60))
    await asyncio.to_thread(began.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await run(lambda c, r: 2.0, samples("z"), timeout_s=60) == [Reward(2.0)]
    release.set()
    ((_, worker),) = calls
    async with asyncio.timeout(60):
        while os.path.exists(f"/proc/self/task/{worker}"):
            await asyncio.sleep(0.02)
    assert len(calls) == 1


def gated(*names):
    """A sync function that waits at the gates of some completions, those gates, and a list of its calls."""
    gates, calls = {name: threading.Event() for name in names}, []

    def function(completion, row):
        calls.append(completion)
        if completion in gates:
            gates[completion].wait(60)
        return 1.0

    return function, gates, calls


async def called(calls, *expected):
    """Wait until the calls are those, and see that no other follows."""
    async with asyncio.timeout(30):
        while len(calls) < len(expected):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert calls == [*expected]


async def test_batches_behind_a_hanging_one_are_judged_one_at_a_time():
    function, gates, calls = gated("hang", "slow")
    limits = {"hang": 0.5, "slow": 60, "a": 60}
    first, second, third = (asyncio.create_task(run(function, samples(c), timeout_s=t)) for c, t in limits.items())
    with pytest.raises(RewardError, match="no result"):
        await first
    await called(calls, "hang", "slow")
    gates["hang"].set()  # its thread takes no other batch
    await called(calls, "hang", "slow")
    gates["slow"].set()
    assert await second == await third == [Reward(1.0)]


async def test_a_cancelled_batch_that_has_not_begun_is_left_out():
    function, gates, calls = gated("slow")
    first, second = (asyncio.create_task(run(function, samples(c), timeout_s=60)) for c in ("slow", "a"))
    await called(calls, "slow")
    third = asyncio.create_task(run(function, samples("b"), timeout_s=60))
    await called(calls, "slow")
    second.cancel()
    await called(calls, "slow")
    gates["slow"].set()
    assert await first == await third == [Reward(1.0)]
    assert calls == ["slow", "b"]


async def test_a_sync_function_inside_an_async_one_has_its_own_deadline():
    async def outer(completion, row):
        (reward,) = await run(lambda c, r: time.sleep(0.6) or 2.0, samples("a"), timeout_s=60)
        return reward.reward

    assert await run(outer, samples("x"), timeout_s=0.5) == [Reward(2.0)]


def test_one_function_serves_several_event_loops():
    for _ in range(2):
        assert asyncio.run(run(per_sample, samples("a"))) == [Reward(1.25)]


def test_a_hanging_function_does_not_keep_the_process_alive():
    code = """
import asyncio, time
from rlkit.rewards import RewardError, Sample, run_reward
try:
    asyncio.run(run_reward(lambda c, r: time.sleep(1000), [Sample("a", {}, 0)], timeout_s=0.1))
except RewardError as error:
    print("timed out:", error.index)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.stdout, done.stderr) == ("timed out: 0\n", "")


async def test_64_cheap_calls_take_one_thread():
    used = set[int]()

    def reward(completion, row, truncated):
        used.add(threading.get_ident())
        return 1.0

    await run(reward, samples(*(str(i) for i in range(64)), truncated=[False] * 64))
    assert len(used) == 1


async def test_texts_are_notes_and_never_numbers():
    (reward,) = await run(lambda completion, row: {"reward": 0, "score": 1, "n": 2, "reason": "late"}, samples("a"))
    assert (reward.reward, reward.score, reward.metrics, reward.notes) == (0.0, 1.0, {"n": 2.0}, {"reason": "late"})
    for key in ("reward", "score"):
        with pytest.raises(RewardError, match=f"returned str '1' under '{key}'"):
            await run(lambda completion, row, key=key: {"reward": 1, "score": 1, key: "1"}, samples("a"))


async def test_the_index_of_the_row_may_be_asked_for():
    items = [Sample("a", {}, 7), Sample("b", {}, 9)]
    assert [r.reward for r in await run(lambda completion, row, index: index, items)] == [7.0, 9.0]
    assert [r.reward for r in await run(lambda completions, rows, index: index, items)] == [7.0, 9.0]


@pytest.mark.parametrize("form", ["sync", "async", "batched"])
async def test_each_sample_has_its_own_reward_or_error(form):
    def one(completion, row):
        if completion == "b":
            raise KeyError("lost")
        return None if completion == "d" else 1.0

    async def asynchronous(completion, row):
        return one(completion, row)

    def whole(completions, rows):
        results = []
        for completion, row in zip(completions, rows):
            try:
                results.append(one(completion, row))
            except KeyError as error:
                results.append(error)
        return results

    function = {"sync": one, "async": asynchronous, "batched": whole}[form]
    results = await run_reward_each(function, samples("a", "b", "c", "d"), timeout_s=60)
    assert [getattr(r, "reward", None) for r in results] == [1.0, None, 1.0, None]
    assert [r.index for r in results[1::2]] == [samples("a", "b")[1].index, samples(*"abcd")[3].index]
    assert "KeyError: 'lost'" in results[1].cause
    assert isinstance(results[1].__cause__, KeyError)
    assert "NoneType" in results[3].cause


async def test_after_a_hanging_sync_call_the_others_are_still_judged():
    gate = threading.Event()

    def hangs_at_b(completion, row):
        if completion == "b":
            gate.wait(60)
        return 1.0

    results = await run_reward_each(hangs_at_b, samples("a", "b", "c"), timeout_s=0.5)
    gate.set()
    assert [isinstance(r, RewardError) for r in results] == [False, True, False]
    assert "no result after 0.5 s" in results[1].cause


async def test_the_wait_for_a_turn_is_off_the_clock():
    from rlkit.rewards.timeouts import off_the_clock

    async def waits(completion, row):
        async with off_the_clock():
            await asyncio.sleep(0.6)
        await asyncio.sleep(float(completion))
        return 1.0

    results = await run_reward_each(waits, samples("0", "60"), timeout_s=0.5)
    assert [isinstance(r, RewardError) for r in results] == [False, True]


@pytest.mark.parametrize(
    "parameters",
    ["prompts, completions, **columns", "row, completion", "completion, answer", "queries, prompts, labels",
     "data_source, solution_str, ground_truth"],
)  # fmt: skip
def test_parameters_in_another_order_or_form_are_refused_by_name(parameters):
    function = eval(f"lambda {parameters}: 0.0")
    with pytest.raises(TypeError, match=r"would get a completion and its row, and names them \['\w+', '\w+'\]: write"):
        check_signature(function)


def test_other_names_of_the_two_are_no_reason_to_refuse():
    for parameters in ("text, sample", "completions, rows", "answer_text, _", "completion, row, prompt=None"):
        check_signature(eval(f"lambda {parameters}: 0.0"))


@pytest.mark.parametrize("key", ["mean", "std", "failed"])
async def test_a_key_that_is_a_metric_of_every_run_is_refused(key):
    with pytest.raises(RewardError, match=f"returned the key '{key}'.*\n.*\n?.*rename it: reward/{key} is a metric of"):
        await run(lambda completion, row: {"reward": 1.0, key: 2.0}, samples("a"))


async def test_a_decorator_without_wraps_gets_the_completion_and_the_row_only():
    def timed(function):
        def call(*args, **kwargs):
            return function(*args, **kwargs)

        return call

    @timed
    def reward(completion, row):
        return float(len(completion))

    assert [r.reward for r in await run(reward, samples("abc", truncated=[False]))] == [3.0]


async def test_an_option_that_a_partial_sets_is_not_overwritten():
    def reward(completion, row, truncated=False):
        return float(truncated)

    for function, expected in ((reward, 0.0), (partial(reward, truncated=True), 1.0)):
        assert [r.reward for r in await run(function, samples("a", truncated=[False]))] == [expected]


async def test_results_without_the_order_of_the_completions_are_refused():
    class Series(list):  # as pandas has it
        iloc = None
        index = (1, 0)

    for results, message in (({0.0, 1.0}, "returned set"), (Series([0.0, 1.0]), "a Series in another order")):
        with pytest.raises(RewardError, match=message):
            await run(lambda completions, rows, results=results: results, samples("a", "b"))


async def test_a_reward_that_changes_the_working_folder_is_named(tmp_path, caplog):
    here = os.getcwd()

    def reward_that_moves(completion, row):
        os.chdir(tmp_path)
        return 1.0

    await run(reward_that_moves, samples("a"))
    assert os.getcwd() == here
    assert "changes the working folder, which is changed back: use absolute paths" in caplog.text


async def test_a_wrong_row_or_option_of_this_package_is_not_the_answers_fault():
    from rlkit.rewards.text import exact_match, soft_overlong

    empty = [Sample("a", {"answer": None}, 0)]
    option = [Sample("a", {}, 0, {"completion_ids": [1]})]
    for function, items in ((exact_match, empty), (partial(soft_overlong, max_tokens=2, cache_tokens=9), option)):
        with pytest.raises(RewardError, match="fix: correct the row, or the option of the reward"):
            await run(function, items)
