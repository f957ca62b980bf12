"""The parts of the RL loop: the order of prompts, the thread beside the event loop, dumps, reports, saving."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import screens
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.advantages import group_centered
from rlkit.data.prompts import Prompt
from rlkit.loops.evaluate import mean_advantages, rollout_metrics
from rlkit.loops.task import prompt_order
from rlkit.loops.watch import Signal, report_no_signal
from rlkit.metrics import finalize
from rlkit.model import checkpoint
from rlkit.model.checkpoint import BackgroundSaver, latest_checkpoint, load_checkpoint
from rlkit.packing import pack, with_advantages
from rlkit.run.folder import open_run
from rlkit.run.report.plot import draw
from rlkit.run.saving import Job, open_training, save_if_due
from rlkit.run.signals import Stop
from rlkit.run.sync import run_in_thread
from rlkit.settings import Schedule
from rlkit.types import Trajectory


def sampled(reward=0.0, *, ids=(65, 66), versions=(0, 0), **changes):
    t = Trajectory([60], list(ids), [v >= 0 for v in versions], [-1.0] * len(ids), list(versions), reward=reward)
    return replace(t, **changes)


@given(st.integers(1, 9), st.integers(0, 5))
def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own(n, seed):
    prompts = [Prompt([i], {}, i) for i in range(n)]
    at = prompt_order(prompts, seed=seed)
    drawn = [at(place).index for place in range(3 * n)]
    assert Counter(drawn) == dict.fromkeys(range(n), 3)
    assert all(sorted(drawn[e * n : (e + 1) * n]) == list(range(n)) for e in range(3))
    again = prompt_order(prompts, seed=seed)
    assert [again(place).index for place in reversed(range(3 * n))] == drawn[::-1]


def test_the_event_loop_goes_on_beside_the_thread():
    async def main():
        ticks, done = 0, threading.Event()

        def work(x, *, y):
            assert done.wait(60)
            return x + y

        call = asyncio.create_task(run_in_thread(work, 1, y=2))
        while ticks < 20:
            await asyncio.sleep(0.001)
            ticks += 1
        done.set()
        return await call

    assert asyncio.run(main()) == 3


def test_threads_work_on_the_gpu_of_their_rank(monkeypatch, tmp_path):
    """CUDA's current device belongs to the thread, and is the first one in a new thread."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread())))
    assert asyncio.run(run_in_thread(lambda x: (x, chosen[-1][1] is threading.current_thread()), 5)) == (5, True)
    with BackgroundSaver(tmp_path, keep=1) as saver:
        saver.save(step=1, model=torch.nn.Linear(2, 2), optimizer=None, state={})
    assert [device for device, _ in chosen] == [3, 3]
    assert chosen[1][1].name == "rlkit-checkpoint"


def test_a_cancelled_call_ends_when_the_function_does():
    finished, started, go = [], threading.Event(), threading.Event()

    def work():
        started.set()
        assert go.wait(60)
        finished.append(True)

    async def main():
        call = asyncio.create_task(run_in_thread(work))
        while not started.is_set():
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.sleep(0.02)
        assert not call.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert finished

    asyncio.run(main())


def test_metrics_count_episodes_and_ages_count_tokens():
    group = [
        sampled(1.0, versions=(3, 4)),
        sampled(1.0, versions=(4, 4), continues=True, score=0.5, truncated=True, info={"metrics": {"format": 0.25}}),
        sampled(0.0, ids=(65, 66, 67), versions=(5, -1, 5)),
    ]
    got = finalize(rollout_metrics([group], version=5))
    assert got["reward/mean"] == 0.5, "two episodes, of which one came in two pieces"
    assert got["reward/std"] == 0.5
    assert got["truncated"] == 0.5
    assert (got["score/mean"], got["reward/format"]) == (0.5, 0.25)
    assert (got["length/mean"], got["length/max"]) == (2.0, 2.0)
    assert (got["staleness/mean"], got["staleness/max"]) == ((2 + 1 + 1 + 1 + 0 + 0) / 6, 2)


def test_episodes_whose_reward_failed_are_not_in_the_mean_reward():
    failed = {"metrics": {"failed": 1.0}}
    groups = [[sampled(1.0), sampled(0.5, info={"metrics": {"failed": 0.0}})], [sampled(0.0, info=failed)] * 2]
    got = finalize(rollout_metrics(groups, version=5))
    assert (got["reward/mean"], got["reward/std"], got["reward/failed"]) == (0.75, 0.25, 2 / 3)
    assert "reward/mean" not in finalize(rollout_metrics(groups[1:], version=5))


def test_the_advantage_of_a_sample_is_the_mean_over_its_trained_tokens():
    groups = [[sampled(1.0, ids=(65, 66, 67), versions=(0, -1, 0)), sampled(0.0)], [sampled(2.0)]]
    batch = with_advantages(pack(groups), group_centered)
    assert mean_advantages(batch, num_samples=3) == [0.5, -0.5, 0.0]
    steps = torch.arange(batch.mask.numel(), dtype=torch.float32)
    got = mean_advantages(replace(batch, advantages=steps), num_samples=3)
    starts = batch.cu_seqlens.tolist()
    for mean, a, b in zip(got, starts, starts[1:], strict=False):
        trained = [float(x) for x, on in zip(steps[a:b], batch.mask[a:b]) if on]
        assert mean == pytest.approx(sum(trained) / len(trained))
    assert mean_advantages(pack(groups), num_samples=3) == []
    assert mean_advantages(batch, num_samples=2) == []


def test_a_folder_with_completions_in_it_is_refused_unless_resumed(tmp_path):
    (tmp_path / "completions").mkdir()
    with pytest.raises(FileExistsError, match="already holds a run"), open_run(tmp_path, steps=1):
        pass


class Stream:
    """What a loop saves of a stream; `cut` are the states that were said to be on the disk."""

    def __init__(self):
        self.state, self.cut = {}, []

    def saved(self, state):
        self.cut.append(state)


@pytest.fixture
def saving(tmp_path):
    """`due(step)`: the end of a step of a run that saves every second of 8 steps; and what it works on."""
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    stream, said, stop, schedule = Stream(), [], Stop(), Schedule(tmp_path / "run", steps=8, save_steps=2)
    with open_run(tmp_path / "run", steps=8) as run, BackgroundSaver(run.checkpoints, keep=2) as saver:
        run.say = lambda text, **_: said.append(text)

        def due(step, *, wait=False):
            stream.state = {"at": step}
            net.weight.data.fill_(step)
            job = Job(run, stop, saver, schedule, start=-1)
            out = save_if_due(job, step, model=net, optimizer=optimizer, state={"mine": step}, stream=stream)
            while wait and not saver.idle:
                time.sleep(0.001)
            return out

        yield SimpleNamespace(due=due, net=net, optimizer=optimizer, stream=stream, said=said, stop=stop, run=run)


def test_a_step_waits_for_the_copy_and_the_journal_for_the_disk(saving, monkeypatch):
    real, go = checkpoint.write_tensors, threading.Event()
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *a, **k: (go.wait(60), real(*a, **k)))
    for step in (1, 2, 3):
        assert not saving.due(step)
        assert latest_checkpoint(saving.run.checkpoints) is None
        assert saving.stream.cut == []
    go.set()
    while latest_checkpoint(saving.run.checkpoints) is None:
        time.sleep(0.001)
    assert saving.stream.cut == [], "only a later step looks"
    saving.due(4)
    assert saving.stream.cut == [{"at": 2}]
    state = load_checkpoint(saving.run.checkpoints / "step_00000002", model=saving.net, optimizer=saving.optimizer)
    assert state == {"mine": 2, "stream": {"at": 2}, "step": 2}
    assert (saving.net.weight == 2).all(), "not what the weights were when the disk got to them"


def test_a_full_disk_is_said_and_the_last_save_is_waited_for(saving, monkeypatch):
    def full(*_):
        raise OSError(28, "full")

    real = checkpoint._write_files
    monkeypatch.setattr(checkpoint, "_write_files", full)
    saving.due(2, wait=True)
    assert saving.said == []
    saving.due(3)
    assert len(saving.said) == 1
    assert "training goes on" in saving.said[0]
    assert "checkpoint of step 2" in saving.said[0]
    monkeypatch.setattr(checkpoint, "_write_files", real)
    saving.due(4, wait=True)
    monkeypatch.setattr(checkpoint, "_write_files", full)
    with pytest.raises(OSError, match="checkpoint of step 8"):
        saving.due(8)
    assert saving.stream.cut == [{"at": 4}]
    assert latest_checkpoint(saving.run.checkpoints).name == "step_00000004"
    monkeypatch.setattr(checkpoint, "_write_files", real)
    saving.due(8)
    assert latest_checkpoint(saving.run.checkpoints).name == "step_00000008"
    assert saving.stream.cut == [{"at": 4}, {"at": 8}]


def test_a_stopped_run_is_on_the_disk_before_it_says_so(saving):
    saving.stop.requested = True
    assert saving.due(5)
    assert latest_checkpoint(saving.run.checkpoints).name == "step_00000005"
    assert "saved after step 5; go on with" in saving.said[-1]


def test_where_a_copy_has_no_room_the_run_waits_for_the_disk(saving, monkeypatch):
    monkeypatch.setattr(checkpoint, "_free_memory", lambda: 40.0)
    saving.due(2)
    assert latest_checkpoint(saving.run.checkpoints).name == "step_00000002"
    monkeypatch.undo()
    assert checkpoint._free_memory() > 2**20


def test_what_a_run_cannot_do_is_said_before_it_starts(tmp_path, capsys):
    for wrong in ({"steps": -1}, {"keep": 0}, {"print_steps": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Schedule(tmp_path, **{"steps": 3} | wrong)
    (tmp_path / "args.json").write_text("{}")
    with open_training(Schedule(tmp_path, steps=3, resume=True), start=3) as job:
        kept = "nothing to train: the newest checkpoint is of step 3, and steps is 3; args.json stays as it was"
        assert kept in capsys.readouterr().out
        assert draw(job.run) is None
    assert capsys.readouterr().out == ""


ONE, ZERO, MIXED = [[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]
APART, HALF, ABOVE = [[1.0, 1.0], [0.0, 0.0]], [[0.5, 0.5], [0.5, 0.5]], [[2.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([ZERO, ZERO], ["all 0", ""]),
        ([ONE, ONE], ["all 1", ""]),  # nothing tells yet that 1 is the most there is
        ([MIXED, ONE, ONE, MIXED, ONE], [""] * 5),
        ([ZERO, MIXED, ONE, MIXED], ["all 0", "", "", ""]),
        ([MIXED, ONE, MIXED, ZERO, ONE], ["", "", "", "all 0", ""]),
        ([MIXED, APART, APART, MIXED, APART], ["", "between 0 and 1", "", "", "between 0 and 1"]),
        ([MIXED, HALF], ["", "all 0.5"]),
        ([ABOVE, ONE], ["", "all 1"]),
    ],
)
def test_no_signal_is_reported_once_unless_all_answers_are_the_best_so_far(tmp_path, capsys, steps, said):
    got, signal = [], Signal()
    with open_run(tmp_path / "run", steps=9) as run:
        for rewards in steps:
            groups = [[sampled(r) for r in group] for group in rewards]
            batch = with_advantages(pack(groups), group_centered)
            signal = report_no_signal(run, batch, before=signal)
            got.append(capsys.readouterr().out)
    assert ["no learning signal" in line for line in got] == [bool(s) for s in said]
    assert all(f"({s})" in line for s, line in zip(said, got, strict=True) if s)
    so_far = [{r for rewards in steps[: i + 1] for group in rewards for r in group} for i in range(len(steps))]
    same = [bool(s) and len(values) == 1 for s, values in zip(said, so_far, strict=True)]
    assert ["compare answers and gold in trajectories/" in line for line in got] == same


@pytest.mark.parametrize("critic", [False, True])
def test_advantages_of_0_for_unequal_rewards_are_the_estimators(tmp_path, capsys, critic):
    groups = [[sampled(0.0), sampled(1.0)], [sampled(1.0), sampled(1.0)]]
    batch = with_advantages(pack(groups), lambda rewards, group_ids: 0 * rewards)
    batch = replace(batch, values=torch.zeros_like(batch.rollout_logp)) if critic else batch
    with open_run(tmp_path / "run", steps=9) as run:
        report_no_signal(run, batch, before=Signal())
    said = " ".join(capsys.readouterr().out.split())
    assert "every advantage is 0 (rewards between 0 and 1): no learning signal in this step" in said
    assert "the rewards differ, so it is the estimator of the advantages that gives 0" in said
    assert not {"equal", "prompts"} & {*said.split()}


def test_a_critic_has_no_group_to_be_larger(tmp_path, capsys):
    with open_run(tmp_path / "run", steps=9) as run:
        batch = with_advantages(pack([[sampled(0.0)], [sampled(0.0)]]), group_centered)
        batch = replace(batch, values=torch.zeros_like(batch.rollout_logp))
        report_no_signal(run, batch, before=Signal())
    said = capsys.readouterr().out
    assert "every advantage is 0 (rewards all 0): no learning signal in this step" in said
    assert "group" not in said


@pytest.mark.parametrize("where", ["terminal", "narrow", "pipe"])
def test_what_a_step_says_is_broken_between_words_and_a_command_to_copy_is_not(tmp_path, where):
    def steps():
        with open_run(tmp_path / "run", steps=9, active=True) as run:
            for episode in (sampled(0.0), sampled(0.0, ids=(), versions=(), truncated=True)):
                report_no_signal(run, with_advantages(pack([[episode] * 2]), group_centered), before=Signal())
            run.say("go on with: rlkit " + " ".join(["x"] * 40), whole=True)

    shown = screens.said(steps, where)
    assert shown.error is None
    text = " ".join(shown.out.split())
    assert "all rewards are equal in every group (all 0): no learning signal in this step. Training goes on;" in text
    assert "no token of this step is trained on: no episode asked the policy for an answer" in text
    assert "a limit cut" not in text
    assert "rlkit " + " ".join(["x"] * 40) in shown.out
