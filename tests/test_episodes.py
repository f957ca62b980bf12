"""Episodes in several pieces: ids through packing, advantages once per episode, and what weights count."""

import statistics
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.advantages import group_centered, group_zscore, leave_one_out, opo
from rlkit.losses import prompt_mean, seq_mean, token_mean
from rlkit.packing import microbatches, pack, select, split, unpack, with_advantages
from rlkit.segments import episode_advantages, group_sum, is_first_piece, seq_count
from rlkit.types import Batch, Trajectory

eighths = st.integers(-16, 16).map(lambda x: x / 8)


@st.composite
def piece(draw, reward=0.0, continues=False):
    n = draw(st.integers(1, 4))
    return Trajectory(
        prompt_ids=draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        ids=[7] * n,
        mask=draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        logp=[0.0] * n,
        versions=[-1] * n,
        reward=reward,
        continues=continues,
    )


@st.composite
def episode(draw, max_pieces=3):
    reward = draw(eighths)
    return [draw(piece(reward, continues=i > 0)) for i in range(draw(st.integers(1, max_pieces)))]


def group_lists(max_pieces=3):
    """Lists of groups, each a list of episodes, each a list of pieces."""
    return st.lists(st.lists(episode(max_pieces), min_size=1, max_size=4), min_size=1, max_size=4)


def flat(groups):
    return [[piece for episode in group for piece in episode] for group in groups]


def numbers(groups):
    """The episode number of each sequence."""
    episodes = [e for group in groups for e in group]
    return [i for i, pieces in enumerate(episodes) for _ in pieces]


@given(group_lists())
def test_pack_numbers_episodes_and_unpack_returns_the_pieces(groups):
    batch = pack(flat(groups))
    assert batch.episode_ids.tolist() == numbers(groups)
    assert [[t.continues for t in g] for g in unpack(batch)] == [[t.continues for t in g] for g in flat(groups)]
    first = is_first_piece(batch.episode_ids)
    assert batch.rewards[first].tolist() == [e[0].reward for group in groups for e in group]


@given(group_lists(), st.randoms(use_true_random=False))
def test_selecting_sequences_keeps_episodes_together(groups, random):
    """Two selected sequences belong to one episode if and only if they did in the whole batch."""
    batch = pack(flat(groups))
    index = random.sample(range(batch.num_seqs), random.randint(1, batch.num_seqs))
    part = select(batch, index)
    together = part.episode_ids[:, None] == part.episode_ids
    assert torch.equal(together, batch.episode_ids[index][:, None] == batch.episode_ids[index])
    assert sorted(set(part.episode_ids.tolist())) == list(range(len({int(batch.episode_ids[i]) for i in index})))

    names = torch.tensor(numbers(groups))
    minis = list(split(replace(batch, rewards=names.float()), min(2, len(groups))))
    dealt = [set(mini.rewards.tolist()) for mini in minis]
    assert sum(map(len, dealt)) == len(set(names.tolist()))  # whole episodes
    for mini in minis:
        for micro, _ in microbatches((mini, mini.mask), max_tokens=30):
            same = micro.episode_ids[:, None] == micro.episode_ids
            assert torch.equal(same, micro.rewards[:, None] == micro.rewards)


BASELINES = (group_centered, group_zscore, leave_one_out)


@given(group_lists(max_pieces=1), st.sampled_from(BASELINES), st.randoms(use_true_random=False))
def test_with_one_piece_per_episode_nothing_changes(groups, baseline, random):
    """Ids that are absent, dense or shuffled: the same bits as the baseline itself."""
    batch = pack(flat(groups))
    expected = baseline(batch.rewards, group_ids=batch.group_ids)
    assert torch.equal(episode_advantages(baseline, batch), expected)
    assert torch.equal(episode_advantages(baseline, replace(batch, episode_ids=None)), expected)
    order = random.sample(range(batch.num_seqs), batch.num_seqs)
    mixed = select(batch, order)
    again = baseline(mixed.rewards, group_ids=mixed.group_ids)
    assert torch.equal(episode_advantages(baseline, mixed), again)


@given(group_lists(), st.sampled_from(BASELINES))
def test_an_advantage_does_not_depend_on_the_number_of_pieces(groups, baseline):
    whole = pack([[episode[0] for episode in group] for group in groups])
    expected = baseline(whole.rewards, group_ids=whole.group_ids)
    got = episode_advantages(baseline, pack(flat(groups)))
    assert torch.equal(got, expected[numbers(groups)])


@given(group_lists())
def test_each_trained_token_gets_the_advantage_of_its_episode(groups):
    """The README's two lines from groups to advantages, with episodes of several pieces."""
    page = (Path(__file__).parents[1] / "README.md").read_text()
    lines = [line.strip() for line in page.split("await rollout(")[1].split("with_old_logp(")[0].splitlines()[1:-1]]
    imports = [line for line in page.splitlines() if line.startswith("from rlkit")]
    names = {"groups": flat(groups)}
    exec("\n".join([*imports, *lines]), names)
    want = []
    for group in groups:
        baseline = statistics.fmean(e[0].reward for e in group)
        for piece in (p for e in group for p in e):
            want += [(piece.reward - baseline) * m for m in piece.mask]
    torch.testing.assert_close(names["batch"].advantages.tolist(), want, rtol=1e-6, atol=1e-6)


@given(group_lists(), st.randoms(use_true_random=False))
def test_advantages_of_shuffled_pieces_against_a_loop(groups, random):
    batch = pack(flat(groups))
    order = random.sample(range(batch.num_seqs), batch.num_seqs)
    got = episode_advantages(group_centered, select(batch, order))
    truth = [
        episode[0].reward - statistics.fmean(e[0].reward for e in group)
        for group in groups
        for episode in group
        for _ in episode
    ]
    torch.testing.assert_close(got.double(), torch.tensor(truth).double()[order], atol=1e-6, rtol=0)


def two_pieces():
    """One group: an episode of two pieces (3 and 1 sampled tokens), and one of 2 tokens."""
    make = partial(Trajectory, prompt_ids=[1])
    a1 = make(ids=[2] * 3, mask=[True] * 3, logp=[0.0] * 3, versions=[0] * 3, reward=1.0)
    a2 = make(ids=[2], mask=[True], logp=[0.0], versions=[0], reward=1.0, continues=True)
    b = make(ids=[2] * 2, mask=[True] * 2, logp=[0.0] * 2, versions=[0] * 2, reward=0.0)
    return pack([[a1, a2, b]])


def test_opo_takes_the_length_of_all_pieces():
    batch = two_pieces()
    lengths = group_sum(seq_count(batch.mask, cu_seqlens=batch.cu_seqlens).float(), group_ids=batch.episode_ids)
    got = episode_advantages(partial(opo, lengths=lengths[is_first_piece(batch.episode_ids)]), batch)
    torch.testing.assert_close(got, torch.tensor([1 - 4 / 6, 1 - 4 / 6, -4 / 6]))


def test_what_weights_count():
    batch = two_pieces()
    torch.testing.assert_close(token_mean(batch.mask), torch.full((6,), 1 / 6))
    by_sequence = seq_mean(batch.mask, cu_seqlens=batch.cu_seqlens)
    torch.testing.assert_close(by_sequence, torch.tensor([1 / 9] * 3 + [1 / 3] + [1 / 6] * 2))
    by_episode = prompt_mean(batch.mask, group_ids=batch.episode_ids, cu_seqlens=batch.cu_seqlens)
    torch.testing.assert_close(by_episode, torch.tensor([1 / 8] * 4 + [1 / 4] * 2))


def test_a_batch_made_by_hand_has_an_episode_for_each_sequence():
    batch = two_pieces()
    given_ = {f.name: getattr(batch, f.name) for f in fields(Batch) if f.name != "episode_ids"}
    assert Batch(**given_).episode_ids.tolist() == [0, 1, 2]
    assert batch.to("cpu").episode_ids.tolist() == [0, 0, 1]


def test_errors_name_the_bad_piece():
    good = Trajectory([1], [2], [True], [0.0], [0], reward=1.0)
    with pytest.raises(ValueError, match=r"groups\[1\]\[0\]: continues is True, but it is the first"):
        pack([[good], [replace(good, continues=True)]])
    with pytest.raises(ValueError, match=r"groups\[0\]\[1\]: continues an episode of reward 1.0, but has reward 2.0"):
        pack([[good, replace(good, continues=True, reward=2.0)]])


def test_a_baseline_of_another_length_raises():
    """One advantage per sequence, although an episode has two pieces: they would go to the wrong episodes."""
    shared = {"prompt_ids": [1], "ids": [7], "mask": [True], "logp": [0.0], "versions": [0]}
    first = Trajectory(**shared, reward=1.0)
    batch = pack([[first, replace(first, continues=True), Trajectory(**shared, reward=0.0)]])
    for wrong, found in (
        (lambda r, group_ids: batch.rewards, r"shape \[3\]"),
        (lambda r, group_ids: [0.0, 1.0], "list"),
    ):
        with pytest.raises(ValueError, match=rf"one advantage per episode, a tensor \[2\], got {found}"):
            with_advantages(batch, wrong)
