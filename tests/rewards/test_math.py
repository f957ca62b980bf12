from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import warm

from rlkit.rewards import RewardError, Sample, math, run_reward
from rlkit.rewards.math import answer_tag, anywhere, boxed, equal
from rlkit.scripts.cli import report_left

# Pairs that math-verify publishes as its own regression tests: https://github.com/huggingface/Math-Verify,
# tests/test_all.py (gold, text with the answer, whether it is right).
PUBLISHED = [
    ("-5", "-5", 1),
    ("7425000", "7,425,000", 1),
    ("1000.99", "the number is not 10 which is 1,000.99€", 1),
    ("2", "AZYUK2A", 0),
    ("10/9", "\\frac{10}{9}", 1),
    ("-10/9", "-\\frac{10}{9}", 1),
    ("$[0,9)$", "$[0,1)$", 0),
    ("$(0,9)$", "$[0,9)$", 0),
    ("$9$", "Answer \\[ \n 9 \n \\]", 1),
    ("$10$", "Answer \\( (9+1) \\)", 1),
    ("$10/9$", "Answer $ \\frac{1}{2} \\$ = \\frac{10}{9} $", 1),
    ("$1/3$", "$\\frac13 $", 1),
    ("$\\sqrt{3}$", "$\\sqrt3 $", 1),
    ("$1/3$", "$\\left( \\frac{1}{3} \\right)$", 1),
    ("$1/3$", "$\\frac{1}{3} \\text{meters}$", 1),
    ("$1/3$", "$k = \\frac{1}{3}$", 1),
    ("$28\\%$", "28 percent", 1),
    ("$0.28$", "28", 0),
    ("$28$", "28/100", 0),
    ("$2-2p$", "If $2-x=p$, then $x=2-p$. Thus $x-p=\\boxed{2-2p}$.", 1),
    ("$\\frac{14}{3}$", "$\\frac{-8}{-4}+\\frac{-5}{-3}=2+\\frac{5}{3}+1=\\boxed{\\frac{14}{3}}$", 1),
    ("$\\text{Evelyn}$", "Therefore, $\\boxed{\\text{Evelyn}}$ is our answer.", 1),
]
# Decided by hand.
PAIRS = [
    ("1/2", "0.5", True),
    ("\\frac{3}{4}", "\\dfrac{6}{8}", True),
    ("(x+1)^2", "x^2 + 2x + 1", True),
    ("(x+1)^2", "x^2 + 1", False),
    ("\\{1, 2\\}", "\\{2, 1\\}", True),
    ("(1, 2)", "(2, 1)", False),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 5 \\end{pmatrix}", False),
    ("x = 5", "5", True),
    ("50\\%", "\\frac{1}{2}", True),
    ("\\sqrt{8}", "2\\sqrt{2}", True),
    ("18", "18.5", False),
    ("So the sum is $9$ and $\\boxed{\\frac{1}{3}}$.", "1/3", True),
    ("She has 48 / 2 = 24 left.\n#### 72", "72", True),
    ("$$7$$", "$7$", True),
]
# Of numbers as JSON writes them, of dates and clock times, and of units and mixed numbers.
WRITTEN = [
    (0.00001, "0.00001", 1), (0.00001, "10^{-5}", 1), (0.00001, "1 \\times 10^{-5}", 1), (0.00001, "0.00002", 0),
    (0.00001, "1", 0), (1e-7, "2e-07", 0), (1e-7, "0.0000002", 0), (1.5e-7, "2.5 \\times 10^{-7}", 0), (1e-12, "0", 0),
    ("3.2e-4", "0.00032", 1), ("3.0e8", "300000000", 1), ("3.0e8", "3 \\cdot 10^8", 1), ("3.0e8", "3.1E8", 0),
    ("6.02e23", "6.02 \\times 10^{23}", 1), ("6.02e23", "6.03e23", 0), (1e16, "10^{16}", 1), ("0.00032", "3.2e-4", 1),
    ("1", "1e-05", 0), ("2e3", "3e2", 0), ("2e-3", "-3 + 2e", 1), ("-3.2e-4", "0.00032", 0),
    ("2024-01-05", "2018", 0), ("2024-01-05", "2024-01-05", 1), ("2024-01-05", "2024-02-04", 0), ("12:00", "3:00", 0),
    ("12:30", "\\text{12:30}", 1), ("09:05", "9:05", 1), ("12:30", "2:05", 0), ("1:16", "\\frac{1}{16}", 1),
    ("75°", "75", 1), ("75°", "75^\\circ", 1), ("75^\\circ", "75°", 1), ("25 °C", "25", 1), ("75°", "76", 0),
    ("75", "7.5°", 0), ("€5", "5", 1), ("£1,200", "1200", 1), ("7", "7 €", 1), ("€5", "6", 0), ("€5", "50", 0),
    ("3 1/2", "3\\frac{1}{2}", 1), ("3 1/2", "7/2", 1), ("3.5", "3\\ 1/2", 1), ("-3 1/2", "-3.5", 1),
    ("3 1/2", "31/2", 0), ("3 1/2", "3/2", 0), ("-3 1/2", "-2.5", 0), ("1", "1/2", 0),
]  # fmt: skip
HANGS = "9999999999!"


pytestmark = pytest.mark.usefixtures("new_math_pool")


@pytest.mark.slow_cases("-5--5-1")
@pytest.mark.parametrize(("gold", "text", "right"), PUBLISHED)
async def test_published_pairs(gold, text, right):
    assert (await equal(gold, text, search=True, timeout_s=60)).equal == bool(right)


@pytest.mark.parametrize(("gold", "answer", "right"), PAIRS)
async def test_pairs_decided_by_hand(gold, answer, right):
    verdict = await equal(gold, answer, timeout_s=60)
    assert verdict == (right, True, "" if right else "a wrong answer")


@pytest.mark.parametrize(("gold", "answer", "right"), WRITTEN)
async def test_numbers_dates_times_and_units_as_data_writes_them(gold, answer, right):
    text = f"At 11:59 it is \\boxed{{{answer}}}"
    given = [await reward(text, {"answer": gold}, timeout_s=60) for reward in (boxed, anywhere)]
    assert [one["reward"] for one in given] == [right, right]


async def test_units_and_mixed_numbers_in_prose():
    for text, gold in (("The answer is 3 1/2.", "3.5"), ("It is 75° now.", "75°"), ("It costs 5 €.", "£5")):
        assert (await anywhere(text, {"answer": gold}, timeout_s=60))["reward"] == 1.0
        assert (await anywhere(text, {"answer": "2"}, timeout_s=60))["reward"] == 0.0


async def test_a_number_with_an_exponent_in_prose():
    assert (await anywhere("The answer is 1e-05.", {"answer": 0.00001}, timeout_s=60))["reward"] == 1.0
    assert (await anywhere("The answer is 1e-05.", {"answer": 1}, timeout_s=60))["reward"] == 0.0


AROUND = [
    "7.",
    " 7\\ ",
    "7\\,",
    "7~",
    "\\color{red}7",
    "\\textcolor{red}{7}",
    "\\mathbf{7}",
    "$7$.",
    "7\\text{ kg}.",
    "7.\\ ",
]


@pytest.mark.parametrize("box", AROUND)
async def test_what_stands_around_an_answer_does_not_change_it(box):
    assert (await boxed(f"It is \\boxed{{{box}}}.", {"answer": "7"}))["reward"] == 1.0
    assert (await boxed(f"It is \\boxed{{{box}}}.", {"answer": "70"}))["reward"] == 0.0


@pytest.mark.parametrize(
    "piece", ["\\ ", " ", "\\; ", "~", "\\\\", "\\color{a", "$", "#### ", "1 ", "12", "€ ", "1/2 "]
)
async def test_repetition_around_an_answer_takes_linear_time(piece):
    began = time.process_time()
    for text in (piece * 10_000, piece * 10_000 + "x", "x" + piece * 10_000, "x" + piece * 10_000 + "x"):
        math._plain(math._bare(text))
    assert time.process_time() - began < 2.0


def test_dollar_signs_around_an_answer_are_removed_in_pairs():
    assert [math._bare(text) for text in ("$5$", "$$ 5 $$", "$", "5$")] == ["5", "5", "$", "5$"]


async def test_the_last_box_is_the_answer():
    row = {"answer": "\\frac{1}{2}"}
    assert (await boxed("\\boxed{3}, no: \\boxed{\\frac{2}{4}}. And 3.", row))["reward"] == 1.0
    assert (await boxed("\\boxed{1/2}, no: \\boxed{3}", row))["reward"] == 0.0
    assert await boxed("It is 1/2.", row) == {
        "reward": 0.0, "answered": 0.0, "undecided": 0.0, "reason": "no closed \\boxed{}"
    }  # fmt: skip
    assert (await boxed("\\boxed{}", row))["answered"] == 0.0
    assert (await boxed("\\boxed{5}", {"solution": 5}, column="solution"))["reward"] == 1.0


async def test_the_answer_tag_and_a_search_anywhere():
    row = {"answer": "0.25"}
    assert (await answer_tag("<answer>9</answer> <answer> 1/4 </answer>", row))["reward"] == 1.0
    assert (await answer_tag("<answer>so \\boxed{1/4}</answer>", row))["reward"] == 1.0
    assert (await answer_tag("\\boxed{1/4}", row))["reason"] == "no <answer></answer>"
    assert (await anywhere("<think>3? no</think> The answer is 1/4.", row))["reward"] == 1.0
    assert (await anywhere("<think>The answer is 1/4.</think> It is 3.", row))["reward"] == 0.0


@pytest.mark.parametrize("filler", ["we think and think ", "我们想一想。"])
async def test_an_answer_after_a_long_text_is_found(filler):
    text = filler * 20_000 + "\nThe answer is 1/4."
    assert (await anywhere(text, {"answer": "0.25"}, timeout_s=60))["reward"] == 1.0
    assert (await anywhere(text, {"answer": "0.5"}, timeout_s=60))["reward"] == 0.0


@pytest.mark.slow
async def test_an_answer_that_hangs_is_undecided_and_the_next_is_not():
    verdict = await boxed(f"\\boxed{{{HANGS}}}", {"answer": "1"}, timeout_s=0.5)
    assert verdict == {
        "reward": 0.0, "answered": 1.0, "undecided": 1.0, "reason": "timeout: undecided after 0.5 s"
    }  # fmt: skip
    assert (await equal("1/2", "2/4", timeout_s=60)).equal


@pytest.mark.slow
async def test_an_answer_that_hangs_is_a_zero_before_the_deadline_of_the_reward():
    (found,) = await run_reward(boxed, [Sample(f"\\boxed{{{HANGS}}}", {"answer": "1"}, 0)], timeout_s=2)
    assert (found.reward, found.metrics["undecided"]) == (0.0, 1.0)


@pytest.mark.slow
async def test_a_gold_answer_that_hangs_or_is_empty_is_an_error():
    with pytest.raises(RewardError, match=r"cannot parse the gold answer '\(\(\(.*': timeout: undecided after 0.5 s"):
        await run_reward(boxed_quickly, [Sample("\\boxed{1}", {"answer": "(" * 300}, 3)], timeout_s=60)
    with pytest.raises(RewardError, match="cannot parse the gold answer '': it contains no mathematics"):
        await run_reward(partial(boxed, column="answer"), [Sample("\\boxed{1}", {"answer": ""}, 3)], timeout_s=60)
    with pytest.raises(RewardError, match="the row has no gold answer"):
        await run_reward(boxed, [Sample("\\boxed{1}", {"answer": " "}, 3)], timeout_s=60)
    with pytest.raises(RewardError, match=r"the row has no 'answer'; columns found: \['solution'\]"):
        await run_reward(partial(boxed, column="answer"), [Sample("\\boxed{1}", {"solution": "1"}, 3)], timeout_s=60)
    with pytest.raises(
        RewardError, match=r"no gold answer \(answer, .*reward_model\.ground_truth\); columns .*\['text'\]"
    ):
        await run_reward(boxed, [Sample("\\boxed{1}", {"text": "1"}, 3)], timeout_s=60)
    with pytest.raises(RewardError, match=r"has 2 entries, \['1', '-1'\]: give one text, as '1, -1' for both"):
        await run_reward(boxed, [Sample("\\boxed{1}", {"answer": ["1", "-1"]}, 3)], timeout_s=60)


LIBRARIES = [  # rows as the libraries' data files have them
    {"question": "48 + 24?", "answer": "48+24 = <<48+24=72>>72\n#### 72"},  # openai/gsm8k
    {"data_source": "openai/gsm8k", "prompt": [], "reward_model": {"style": "rule", "ground_truth": "72"}},  # verl
    {"prompt": [], "solution": "$72$"},  # trl-lib/DeepMath-103K
    {"problem": "48 + 24?", "solution": "It is $\\boxed{72}$."},  # MATH
    {"prompt": "48 + 24?", "label": 72},  # slime, OpenRLHF
    {"messages": [], "gt_answer": "72.0"},  # ColossalAI
    {"question": "48 + 24?", "final_answer": ["72"]},  # OlympiadBench
]


@pytest.mark.parametrize("row", LIBRARIES, ids=range(len(LIBRARIES)))
@pytest.mark.parametrize("reward", [boxed, anywhere])
async def test_the_gold_answer_of_every_librarys_rows(row, reward):
    items = [Sample(text, row, 0) for text in ("so \\boxed{72}", "so \\boxed{27}")]
    assert [r.reward for r in await run_reward(reward, items, timeout_s=120)] == [1.0, 0.0]


async def boxed_quickly(completion, row):
    return await boxed(completion, row, timeout_s=0.5)


@pytest.mark.slow
async def test_a_worker_that_dies_is_reported_and_replaced():
    await equal("1/3", "2/6", timeout_s=60)
    before = {pid: cpu_ticks(pid) for pid in workers()}
    task = asyncio.create_task(equal("1", HANGS, timeout_s=600))
    os.kill(await computing(before), signal.SIGKILL)
    verdict = await task
    assert (verdict.equal, verdict.decided) == (False, False)
    assert verdict.reason.startswith("the worker died (exit code -9")
    assert (await equal("1/3", "2/6", timeout_s=60)).equal
    assert len(workers()) <= max(len(before), 1)


async def test_workers_are_not_named_as_what_a_reward_has_started(capsys):
    await equal("1/3", "2/6", timeout_s=60)
    assert workers()
    threads = set(threading.enumerate())
    report_left(threads)
    assert capsys.readouterr().err == ""
    own = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60], name="of-the-user")
    own.start()
    report_left(threads)
    own.kill()
    own.join()
    assert ": of-the-user (Ctrl-C ends it)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
async def test_idle_workers_that_are_killed_are_replaced():
    await equal("1/3", "2/6", timeout_s=60)
    before = workers()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert await equal("1/3", "2/6", timeout_s=60) == (True, True, "")
    await asyncio.sleep(1.0)  # the pool has noticed
    assert await equal("1/3", "3/9", timeout_s=60) == (True, True, "")
    assert not before & workers()


@pytest.mark.slow
async def test_memory_is_limited(monkeypatch, new_pool):
    monkeypatch.setattr(math, "_MEMORY_BYTES", 300 << 20)
    new_pool()
    assert not (await equal("1", "2^{2^{40}}", timeout_s=60)).equal  # 128 GiB
    assert not (await equal("1", "2", timeout_s=60)).equal
    limits = [Path(f"/proc/{pid}/limits").read_text() for pid in workers()]
    assert any(line.split()[3] == str(300 << 20) for text in limits for line in text.splitlines()[1:] if "addr" in line)
    assert (await equal("1/3", "2/6", timeout_s=60)).equal


async def test_a_cancelled_question_ends_its_worker():
    await equal("1/3", "2/6", timeout_s=60)
    before = {pid: cpu_ticks(pid) for pid in workers()}
    task = asyncio.create_task(equal("1", HANGS, timeout_s=600))
    worker = await computing(before)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(120):
        while worker in workers():
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_question_cancelled_when_it_is_answered_already_spoils_no_other():
    await equal("1/3", "2/6", timeout_s=60)
    num_cancelled = 0
    while num_cancelled < 3:
        task = asyncio.create_task(equal("1/3", f"{num_cancelled + 4}/6", timeout_s=60))
        for _ in range(5):
            await asyncio.sleep(0)  # it asks
        if task.done():  # on a busy machine
            continue
        num_cancelled += 1
        time.sleep(0.3)  # the answer comes while the event loop is busy
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await equal("1/3", "2/6", timeout_s=60) == (True, True, "")


@pytest.mark.usefixtures("many_open_files")
async def test_a_process_with_many_open_files_can_ask(new_math_pool):
    new_math_pool()
    assert await equal("1/3", "2/6", timeout_s=60) == (True, True, "")


@pytest.mark.slow
async def test_off_the_main_thread_and_many_at_once(monkeypatch, new_pool):
    monkeypatch.setattr(math, "_NUM_WORKERS", 2)
    new_pool()
    found = []

    async def many():
        return await asyncio.gather(*(equal(f"{i}/7", f"\\frac{{{2 * i}}}{{14}}", timeout_s=60) for i in range(1, 30)))

    thread = threading.Thread(target=lambda: found.extend(asyncio.run(many())))
    thread.start()
    here = await many()
    await asyncio.to_thread(thread.join, 60)
    assert [v.equal for v in here + found] == [True] * 58
    rewards = await run_reward(
        boxed, [Sample(f"\\boxed{{{i}/2}}", {"answer": "1.5"}, i) for i in range(6)], timeout_s=60
    )
    assert [r.reward for r in rewards] == [0, 0, 0, 1, 0, 0]
    assert rewards[0].metrics == {"answered": 1.0, "undecided": 0.0}


SCRIPT = """
import asyncio, multiprocessing, sys, torch
print("started", flush=True)
from rlkit.rewards import math
from rlkit.rewards.math import equal
math._NUM_WORKERS = 1
math._new_pool()
print(asyncio.run(equal("1/3", "2/6", timeout_s=60)).equal, flush=True)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
if len(sys.argv) > 1:
    asyncio.run(equal("1", "9999999999!", timeout_s=600))
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_workers_do_not_run_the_script_or_load_torch_and_end_with_it(tmp_path, killed):
    script = tmp_path / "script.py"  # without `if __name__ == "__main__"`
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *(["hang"] if killed else [])]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        assert process.stdout.readline() == "True\n"
        (worker,) = started = [int(pid) for pid in process.stdout.readline().split()]
        if killed:
            idle = cpu_ticks(worker)
            while cpu_ticks(worker) < idle + 20:
                time.sleep(0.05)
            assert "torch" not in Path(f"/proc/{worker}/maps").read_text()
            process.kill()
        assert process.stdout.read() == ""
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and state(pid) != "Z" for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_forked_process_has_workers_of_its_own():
    assert asyncio.run(equal("1/3", "2/6", timeout_s=60)).equal
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, str(asyncio.run(equal("1/3", "2/6", timeout_s=60))).encode())
        os._exit(0)
    os.close(write)
    assert os.read(read, 1000) == b"Verdict(equal=True, decided=True, reason='')"
    os.close(read)
    assert os.waitpid(pid, 0)[1] == 0
    assert asyncio.run(equal("1/3", "3/9", timeout_s=60)).equal


async def test_a_broken_math_verify_is_one_line_that_names_the_extra(monkeypatch, tmp_path, new_pool):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr')")
    monkeypatch.syspath_prepend(tmp_path)
    new_pool()
    with pytest.raises(ImportError, match=r"need math_verify: pip install 'math-verify\S+' \S+ \(no antlr\)$"):
        await equal("1", "2", timeout_s=60)


@pytest.fixture
def new_pool(new_math_pool):
    """Replace the pool, for workers with other settings; and again at the end."""
    yield new_math_pool
    new_math_pool()


async def computing(before):
    """The worker that computes now, one of those that had answered before."""
    while True:
        for pid in workers():
            if pid in before and cpu_ticks(pid) > before[pid] + 20:
                return pid
        await asyncio.sleep(0.02)


def workers():
    return {child.pid for child in multiprocessing.active_children() if child.name == "pebble_pool_worker"}


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def cpu_ticks(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
