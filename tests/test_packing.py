import pickle
from array import array
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.packing import (
    from_padded,
    join,
    microbatches,
    pack,
    plan_microbatches,
    select,
    split,
    to_padded,
    unpack,
    with_streams,
)
from rlkit.rollout.groups import compact
from rlkit.types import Trajectory

exact = st.integers(-64, 64).map(lambda x: x / 8)  # floats that fp32 holds exactly
token = st.integers(0, 1000)


@st.composite
def trajectories(draw, prompt):
    n = draw(st.integers(0, 6))
    mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return Trajectory(
        prompt_ids=prompt,
        ids=draw(st.lists(token, min_size=n, max_size=n)),
        mask=mask,
        logp=[-draw(exact.map(abs)) if m else 0.0 for m in mask],
        versions=[draw(st.integers(0, 9)) if m else -1 for m in mask],
        reward=draw(exact),
        token_rewards=[draw(exact) if m else 0.0 for m in mask] if draw(st.booleans()) else None,
        truncated=draw(st.booleans()) if n else True,
    )


@st.composite
def group_lists(draw, max_groups=4):
    prompts = st.lists(token, min_size=1, max_size=5)
    return [
        draw(
            st.lists(
                prompts.flatmap(trajectories) if draw(st.booleans()) else trajectories(draw(prompts)),
                min_size=1,
                max_size=4,
            )
        )
        for _ in range(draw(st.integers(0, max_groups)))
    ]


@given(group_lists())
def test_unpack_inverts_pack(groups):
    expected = [
        [replace(t, token_rewards=t.token_rewards if t.token_rewards and any(t.token_rewards) else None) for t in g]
        for g in groups
    ]
    assert unpack(pack(groups)) == expected


@given(group_lists(), st.booleans())
def test_arrays_pack_as_lists_do(groups, share):
    """All values are exact in fp32, and masked tokens have version -1."""
    of_lists, of_arrays = (pack(x, share_prompts=share) for x in (groups, [compact(group) for group in groups]))
    for f in fields(of_lists):
        a, b = getattr(of_lists, f.name), getattr(of_arrays, f.name)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b, f.name


def test_compact_trajectories_share_their_prompt_and_keep_their_numbers():
    prompt = [5, 6]
    group = [
        Trajectory(prompt, [7, 8], [True, False], [-0.5, 0.0], [3, -1], token_rewards=[0.25, 0.0], info={"a": 1}),
        Trajectory(prompt, [], [], [], [], truncated=True, continues=False),
    ]
    first, second = compact(group)
    assert first.prompt_ids is second.prompt_ids
    assert [list(x) for x in (first.prompt_ids, first.ids, first.mask, first.logp, first.versions)] == [
        [5, 6], [7, 8], [1, 0], [-0.5, 0.0], [3, -1],
    ]  # fmt: skip
    assert list(first.token_rewards) == [0.25, 0.0]
    assert first.info == {"a": 1}
    assert pickle.loads(pickle.dumps(compact(compact(group)))) == [first, second]
    assert len(second.ids) == 0
    assert second.truncated


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ids", [2.5, 3]), ("ids", [2**40, 3]), ("ids", (2, 3)), ("ids", torch.tensor([2, 3])), ("mask", [0.5, 1.0]),
        ("logp", [None, -0.5]), ("logp", ["x", "x"]), ("versions", ["new", 0]), ("prompt_ids", [1.0, 1.0]),
    ],
)  # fmt: skip
def test_what_is_no_such_list_is_left_for_pack_to_refuse(name, values):
    t = replace(Trajectory([1, 4], [2, 3], [True, True], [-0.5, -1.0], [0, 1]), **{name: values})
    (found,) = compact([t])
    assert getattr(found, name) is values


@pytest.mark.parametrize(("name", "code"), [("ids", "f"), ("prompt_ids", "d"), ("versions", "f")])
def test_arrays_of_floats_are_no_ids(name, code):
    t = Trajectory([1], [2], [True], [-0.5], [0])
    with pytest.raises(TypeError, match=rf"groups\[0\]\[0\]: {name}\[0\] must be an integer, got float 1.0"):
        pack([[replace(t, **{name: array(code, [1.0])})]])


@given(group_lists(), st.booleans())
def test_every_target_follows_its_token(groups, share):
    batch = pack(groups, share_prompts=share)
    tokens, positions = join(batch)
    prefix = [p.tolist() for p in batch.prefix_tokens.split(batch.prefix_cu.diff().tolist())]
    for i, t in enumerate(t for g in groups for t in g):
        places = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
        mine = batch.tokens[places].tolist()
        whole = t.prompt_ids + t.ids
        assert prefix[int(batch.prefix_ids[i])] + mine == (whole if t.truncated else whole[:-1])
        real = len(mine) - t.truncated
        assert batch.targets[places][:real].tolist() == whole[len(whole) - real :]
        start = len(prefix[int(batch.prefix_ids[i])])
        at = positions[batch.prefix_tokens.numel() :][places]
        assert at.tolist() == list(range(start, start + len(mine)))
        total = (t.reward if any(t.mask) else 0) + sum(t.token_rewards or [])
        assert batch.token_rewards[places].sum() == total
    assert tokens.numel() == batch.num_tokens + batch.prefix_tokens.numel()
    for stream in (batch.rollout_logp, batch.token_rewards):
        assert (stream[~batch.mask] == 0).all()


def test_a_group_stores_each_distinct_prompt_once():
    a = Trajectory([1, 2, 3], [4], [True], [0.0], [0])
    b = Trajectory([1, 2, 3, 4, 5], [6], [True], [0.0], [0])
    batch = pack([[a, a, b], [a]])
    assert batch.prefix_tokens.tolist() == [1, 2, 1, 2, 3, 4, 1, 2]
    assert batch.prefix_ids.tolist() == [0, 0, 1, 2]
    assert batch.group_ids.tolist() == [0, 0, 0, 1]


@given(group_lists(), st.integers(16, 60), st.booleans())
def test_microbatches_lose_nothing_and_keep_the_budget(groups, max_tokens, share):
    batch = pack(groups, share_prompts=share)
    rows = torch.arange(batch.num_tokens)
    seen = []
    for micro, places in microbatches((batch, rows), max_tokens=max_tokens):
        assert micro.num_tokens + micro.prefix_tokens.numel() <= max_tokens
        assert torch.equal(micro.tokens, batch.tokens[places])
        assert torch.equal(micro.targets, batch.targets[places])
        seen.append(places)
    assert torch.cat([*seen, rows[:0]]).sort().values.equal(rows)
    plan = plan_microbatches(batch, max_tokens=max_tokens)
    assert plan.bound <= plan.makespan <= max_tokens
    assert sorted(i for b in plan.bins for i in b) == list(range(batch.num_seqs))


@given(group_lists(), st.integers(16, 60), st.data())
def test_flagged_sequences_never_share_a_microbatch_with_others(groups, max_tokens, data):
    batch = pack(groups)
    isolate = torch.tensor([data.draw(st.booleans()) for _ in range(batch.num_seqs)], dtype=torch.bool)
    flag = isolate.repeat_interleave(batch.cu_seqlens.diff())
    rows = torch.arange(batch.num_tokens)
    seen = [rows[:0]]
    for micro, places in microbatches((batch, rows), max_tokens=max_tokens, isolate=isolate):
        assert torch.equal(micro.targets, batch.targets[places])
        assert flag[places].unique().numel() <= 1
        seen.append(places)
    assert torch.cat(seen).sort().values.equal(rows)


def test_groups_stay_whole_where_they_fit():
    def group(n):
        return [Trajectory([1] * 4, [2] * n, [True] * n, [0.0] * n, [0] * n)] * 3

    batch = pack([group(n) for n in (5, 1, 3, 5, 2, 4)])
    plan = plan_microbatches(batch, max_tokens=36)
    assert all(sum(batch.group_ids[i] == g for i in members) in (0, 3) for members in plan.bins for g in range(6))
    # 3 + 3n tokens each: 18 6 12 18 9 15 = 78, so 3 bins of 36, and 18+9, 18+6, 15+12 is what longest-first finds
    assert [plan.makespan, plan.bound, len(plan.bins)] == [27, 26, 3]


def test_a_sequence_over_the_budget_raises():
    batch = pack([[Trajectory([1, 2], [3] * 10, [True] * 10, [0.0] * 10, [0] * 10)]])
    with pytest.raises(ValueError, match=r"max_tokens=10 is less than sequence 0 with its prompt: 10 \+ 1 tokens"):
        plan_microbatches(batch, max_tokens=10)


@given(group_lists(), st.integers(1, 3), st.integers(1, 2))
def test_split_yields_whole_groups_once_per_epoch(groups, num_minibatches, epochs):
    batch = with_streams(pack(groups), advantages=torch.arange(pack(groups).num_tokens).float())
    if num_minibatches > len(groups):
        if num_minibatches > 1:
            with pytest.raises(ValueError, match="num_minibatches must be in"):
                list(split(batch, num_minibatches))
        return
    minis = list(split(batch, num_minibatches, epochs=epochs, seed=3))
    assert len(minis) == num_minibatches * epochs
    for epoch in range(epochs):
        dealt = [g for m in minis[epoch * num_minibatches :][:num_minibatches] for g in unpack(m)]
        assert sorted(map(repr, dealt)) == sorted(map(repr, unpack(batch)))
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        next(split(batch, 1, epochs=0))
    again = list(split(batch, num_minibatches, epochs=epochs, seed=3))
    assert all(torch.equal(a.advantages, b.advantages) for a, b in zip(minis, again, strict=True))


def test_select_keeps_every_stream():
    t = [Trajectory([7, i], [i, i], [True, True], [-1.0, -2.0], [0, 0], reward=i) for i in range(4)]
    batch = with_streams(pack([t[:2], t[2:]]), values=torch.arange(8.0), ref_logp=-torch.arange(8.0))
    part = select(batch, [3, 0])
    assert part.values.tolist() == [6, 7, 0, 1]
    assert part.ref_logp.tolist() == [-6, -7, 0, -1]
    assert part.rewards.tolist() == [3, 0]
    assert part.group_ids.tolist() == [1, 0]
    assert part.old_logp is None


def test_select_takes_a_mask_and_refuses_what_is_outside():
    batch = pack([[Trajectory([1, 2], [5], [True], [-1.0], [0], reward=float(i)) for i in range(3)]])
    for mask in (torch.tensor([False, True, True]), [False, True, True]):
        assert select(batch, mask).rewards.tolist() == [1.0, 2.0]
    assert select(batch, []).num_seqs == 0
    for index, message in (
        ([0, 3], "index must be below 3, the number of entries they index, got 3"),
        ([-1], "index must be >= 0, got -1"),
        ([0.5], "index must be int32 or int64"),
        ([True, False], r"index must have the shape of group_ids, \[3\], got \[2\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            select(batch, index)


def test_old_log_probs_under_a_gradient_train_as_detached_ones():
    batch = pack([[Trajectory([1, 2], [8, 9], [True] * 2, [-1.0, -2.0], [0, 0])]])
    weight = torch.tensor([-1.0, -2.0], requires_grad=True)
    old_logp = with_streams(batch, old_logp=1.0 * weight).old_logp
    (weight - old_logp).exp().sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0]  # d exp(logp - old) / d logp on-policy; 0 if old moved along
    with pytest.raises(ValueError, match=r"ref_logp must be log-probs, at most 0, got 0\.5"):
        with_streams(batch, ref_logp=torch.tensor([-1.0, 0.5]))


def test_a_fill_that_the_dtype_cannot_hold_is_refused():
    mask = torch.tensor([[True, False]])
    assert to_padded(torch.tensor([3]), padding_mask=mask, fill=-100)[0].tolist() == [[3, -100]]
    for x, fill in (
        (torch.tensor([3]), -1.5),
        (torch.tensor([3], dtype=torch.uint8), -100),
        (torch.tensor([True]), 2),
        (torch.tensor([3], dtype=torch.uint8), 300),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"cannot hold|overflow"):
            to_padded(x, padding_mask=mask, fill=fill)


def test_with_streams_zeroes_masked_positions_and_checks_names():
    batch = pack([[Trajectory([1], [2, 3], [True, False], [-1.0, 0.0], [0, -1])]])
    batch = with_streams(batch, advantages=torch.tensor([2.0, float("nan")]))
    assert batch.advantages.tolist() == [2.0, 0.0]
    with pytest.raises(ValueError, match="tokens is not a per-token float stream"):
        with_streams(batch, tokens=batch.tokens)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_padded_round_trip(mask):
    mask = torch.tensor(mask)
    x, y = torch.randn(len(mask), 5), torch.randint(0, 9, (len(mask), 5, 2))
    packed = from_padded(x, y, padding_mask=mask)
    assert packed.cu_seqlens.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
    back = to_padded(*packed.streams, padding_mask=mask, fill=-7)
    assert torch.equal(back[0], x.where(mask, -7))
    assert torch.equal(back[1], y.where(mask[..., None], -7))


@pytest.mark.parametrize("pad", [0, 9])
@pytest.mark.parametrize("left", [False, True])
def test_a_mask_of_the_padding_is_refused_where_ids_show_it(pad, left):
    ids = torch.tensor([[5, 6, 7, 9], [5, 9, pad, pad], [8, 9, pad, pad]])
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]).bool()
    if left:
        ids, real = ids.flip(1), real.flip(1)
    assert from_padded(ids, ids * 1.0, padding_mask=real).streams[0].tolist() == ids[real].tolist()
    with pytest.raises(ValueError, match=rf"^streams\[1\] is {pad} wherever padding_mask is True, .* inverted"):
        from_padded(ids * 1.0, ids, padding_mask=~real)
    for same in (torch.full_like(ids, 3), ids.masked_fill(real, 3).masked_fill(~real, 0), real):  # versions, labels
        from_padded(same, padding_mask=real)


def test_padded_errors_name_the_stream():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"streams\[0\] must be \[B, L, ...\] like padding_mask"):
        from_padded(torch.zeros(2, 4), padding_mask=mask)
    with pytest.raises(ValueError, match=r"streams\[0\] must hold one row per True in padding_mask, 6, got 5"):
        to_padded(torch.zeros(5), padding_mask=mask)


good = Trajectory([1], [2, 3], [True, True], [-1.0, -1.0], [0, 0])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(good, prompt_ids=[]), "prompt_ids is empty"),
        (replace(good, mask=[True]), "mask has 1 entries for 2 ids"),
        (replace(good, logp=[-1.0, float("nan")]), r"logp\[1\] is nan at a trained token"),
        (replace(good, reward=float("inf")), "reward is inf"),
        (replace(good, ids=[], mask=[], logp=[], versions=[]), "no tokens and not truncated"),
        (replace(good, mask=[True, False], token_rewards=[0.0, 1.0]), "token_rewards must be 0"),
        (replace(good, mask=[False, True], versions=[0, -1]), "mask is inverted"),
    ],
)
def test_errors_name_the_bad_trajectory(bad, message):
    with pytest.raises(ValueError, match=rf"groups\[1\]\[1\]: .*{message}"):
        pack([[good], [good, bad]])


def test_samples_that_all_hold_their_prompt_again_are_refused():
    """What `generate` of transformers returns: the prompt and the answer."""
    prompt = [*range(5, 37)]
    whole = Trajectory(prompt, [*prompt, 1, 2], [True] * 34, [-1.0] * 34, [0] * 34)
    with pytest.raises(ValueError, match=r"begin with their prompt_ids: .* ids\[len\(prompt_ids\):\]"):
        pack([[whole], [whole]])
    fixed, one = replace(whole, versions=[-1] * 34), replace(whole, ids=[1, *prompt, 2])
    for groups in ([[fixed, fixed]], [[whole, one]], [[whole]]):
        assert pack(groups).mask.sum() == 34 * len(groups[0])
    short = replace(good, prompt_ids=[2, 3])
    assert pack([[short, short]]).mask.all()  # which copies


def test_bad_calls_raise():
    sample = Trajectory(prompt_ids=[1], ids=[2, 3], mask=[True, True], logp=[-1.0, -1.0], versions=[0, 0])
    batch = pack([[sample, sample]])
    with pytest.raises(TypeError, match=r"groups\[0\] must be a list of trajectories"):
        pack([sample])
    with pytest.raises(ValueError, match=r"streams\[1\] must have first axis T = 4, got \[2\]"):
        next(microbatches((batch, torch.ones(2)), max_tokens=100))
