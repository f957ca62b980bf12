"""What a loop says of steps that teach nothing, and of episodes that failed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlkit._util.text import Explained
from rlkit.data.prompts import Prompt
from rlkit.loops.watch import Signal, Watch, report_no_signal
from rlkit.packing import pack
from rlkit.rollout.groups import sample_group
from rlkit.rollout.shared import reached
from rlkit.types import Completion, Trajectory

ONE = Trajectory([1], [2, 3], [True, True], [-1.0, -1.0], [0, 0], 0.0)
FAILED = replace(ONE, mask=[False, False], info={"metrics": {"failed": 1.0}, "error": "no judge"})


def test_a_batch_without_advantages_is_not_judged():
    said: list[str] = []
    now = report_no_signal(SimpleNamespace(say=said.append), pack([[ONE, ONE]]), before=Signal())
    assert now.present
    assert said == []


@pytest.mark.parametrize("pieces", [1, 2])
def test_failures_of_all_episodes_are_counted_once_whatever_their_pieces(pieces):
    first = replace(ONE, mask=[False, False])
    episode = [first] * (pieces - 1) + [replace(FAILED, continues=pieces > 1)]
    watch = Watch(SimpleNamespace(say=lambda _: None), [], None, skip=False)
    with pytest.raises(Explained, match=r"all 2 episodes of step 1 failed, and nothing is trained on: no judge"):
        watch._check_failed([episode, episode], step=1)


def test_a_stop_before_anything_was_taken_has_a_place():
    assert reached({}, num=4, step=3) == reached(None, num=4, step=3) == 12


@pytest.mark.parametrize("reward", [np.int64(1), np.float32(1), 1])
async def test_rewards_are_kept_as_floats(reward):
    async def sample(prompt_ids, **_more):
        return Completion([2, 3], [-1.0, -1.0], [0, 0], "stop")

    async def env(prompt, sample):
        await sample(prompt.ids)
        return replace(ONE, reward=reward, score=reward)

    (one,) = await sample_group(Prompt([1], {}, 0), [sample], env=env)
    assert (type(one.reward), type(one.score)) == (float, float)
