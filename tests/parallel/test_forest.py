"""A forest of segments: common beginnings are forwarded once, with values and gradients of separate documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward, prepare_model
from rlkit.packing import join, pack
from rlkit.parallel.attention import plan, segments
from rlkit.parallel.forest import forest
from rlkit.parallel.padded import by_segment
from rlkit.types import Trajectory

SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48}


def trajectory(prompt, ids, mask=None):
    n = len(ids)
    return Trajectory(list(prompt), list(ids), mask or [True] * n, [0.0] * n, [0] * n)


def tree(turns, branches, size, rng, vocab=60):
    """An agent's episode as pieces: each turn extends the context, and `branches` samples continue each."""
    context, group = rng.integers(3, vocab, size).tolist(), []
    for _ in range(turns):
        for _ in range(branches):
            group.append(trajectory(context, rng.integers(3, vocab, size).tolist()))
        context = [*context, *group[-1].ids]
    return [group]


@st.composite
def documents(draw):
    """Groups of a small alphabet, so that documents of all groups begin alike, contain each other and repeat."""
    few = st.lists(st.integers(3, 5), min_size=1, max_size=6)
    return [
        [trajectory(prompt, draw(few)) for _ in range(draw(st.integers(1, 3)))]
        for prompt in draw(st.lists(few, min_size=1, max_size=4))
    ]


@given(documents(), st.sampled_from([None, 0, 3]))
def test_every_token_has_the_row_of_its_beginning(groups, toll):
    batch = pack(groups)
    found = forest(batch, toll=toll)
    if found is None:
        return
    ids, positions = (x[found.source].tolist() for x in join(batch))
    docs = [[*t.prompt_ids, *t.ids[:-1]] for group in groups for t in group]
    beginnings = {tuple(doc[: n + 1]) for doc in docs for n in range(len(doc))}
    assert len(ids) == len(beginnings) if toll is None else len(ids) >= len(beginnings)  # one row each
    assert sorted(r for s in found.spans for r in range(s.start, s.start + s.length)) == list(range(len(ids)))
    seen = {}
    for start, length, keys in found.spans:
        rows = [r for a, n in keys for r in range(a, a + n)]
        assert rows[-length:] == list(range(start, start + length))
        for i in range(length):
            path = rows[: len(rows) - length + i + 1]
            assert [positions[r] for r in path] == list(range(len(path)))
            seen[path[-1]] = tuple(ids[r] for r in path)
    assert set(seen.values()) == beginnings
    starts = batch.cu_seqlens.tolist()
    for doc, a, b in zip(docs, starts, starts[1:], strict=False):
        for offset, row in enumerate(found.tokens[a:b].tolist()):
            assert seen[row] == tuple(doc[: len(doc) - (b - a) + offset + 1])
    plan(found.spans)


def read(padded, ids):
    """What a recurrent layer has read at each row of a forward: padding spoils a state, but not that of nothing."""
    finals, found = [], []
    for rows, real, after, parents in padded.blocks:
        before = [state for i in after for state in finals[i]]
        finals.append([])
        for i, row in enumerate(rows.tolist()):
            state = () if parents is None else before[parents[i]]
            for r, is_real in zip(row, real[i].tolist() if real is not None else [True] * len(row), strict=True):
                state = (*state, ids[r]) if is_real else state and (*state, None)
                found.append(state)
            finals[-1].append(state)
    return [found[i] for i in padded.back.tolist()]


@given(documents(), st.sampled_from([None, 0, 3]))
def test_a_layer_that_reads_in_order_has_read_the_beginning_of_each_row(groups, toll):
    batch = pack(groups)
    tree = None if toll is None else forest(batch, toll=toll)
    ids = join(batch)[0]
    ids = (ids if tree is None else ids[tree.source]).tolist()
    spans = segments(batch) if tree is None else tree.spans
    seen = read(by_segment(spans), ids)
    for start, length, keys in spans:
        path = [ids[r] for a, n in keys for r in range(a, a + n)]
        for i in range(length):
            assert seen[start + i] == tuple(path[: len(path) - length + i + 1])


def test_states_are_kept_where_they_save_more_rows_than_the_toll():
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(3, 60, n).tolist()
    for size, num_states in ((32, 7), (16, 3)):  # beside that of the first prompt
        spans = forest(pack(tree(8, 4, size, rng, vocab=2**40)), toll=64).spans
        parents = {sum(s.keys[-2]) for s in spans if len(s.keys) > 1}
        assert sum(s.start + s.length in parents for s in spans if s.start) == num_states
    assert forest(pack(tree(8, 4, 2, rng, vocab=2**40)), toll=64) is None
    begin, groups = draw(30), []
    for _ in range(3):
        prompt = [*begin, *draw(40)]
        groups.append([trajectory(prompt, [*prompt[:9], *draw(40)]) for _ in range(3)])
    every, few = (forest(pack(groups), toll=toll) for toll in (None, 64))
    assert (len(every.source), len(few.source)) == (30 + 3 * 49 + 9 * 39, 3 * 79 + 9 * 39)
    assert sum(len(s.keys) == 1 for s in few.spans) == 3, "prompts keep no state of the 30 tokens that they share"


@pytest.mark.parametrize("case", ["tree", "alike", "contained"])
def test_log_probs_and_gradients_are_those_of_separate_documents(case):
    rng = np.random.default_rng(0)
    begin = rng.integers(3, 60, 9).tolist()
    groups = {
        "tree": tree(4, 3, 5, rng),
        "alike": [[trajectory(begin[:4], [*begin[4:], *rng.integers(3, 60, n)]) for n in (1, 7, 2, 9)]],
        "contained": [[trajectory(begin[:2], begin[2:n]) for n in (4, 9, 6, 9)], [trajectory(begin, [7, 8])]],
    }[case]
    groups = [[replace(t, ids=[*map(int, t.ids)]) for t in group] for group in groups]
    found = []
    for share in (True, False):
        model, batch = prepare_model(tiny_model(tiny_tokenizer(), **SIZES)), pack(groups, share_prompts=share)
        assert (forest(batch) is not None) == share
        out = forward(model, batch)
        logp, entropy = out.logp[batch.mask], out.entropy[batch.mask]
        weights = torch.sin(torch.arange(len(logp)) + 1.0)
        (weights * (logp - 0.1 * entropy)).sum().backward()
        found.append((logp, [p.grad for p in model.parameters()]))
    (one, grads), (two, true) = found
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    for a, b in zip(grads, true, strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max().clamp(min=1e-3)


def test_a_tree_of_turns_forwards_each_of_them_once():
    """8 turns x 4 branches of 32 tokens: 1,030 rows, where shared prompts leave 2,168, and separate documents 5,600."""
    groups = tree(8, 4, 32, np.random.default_rng(0))
    shared, separate = pack(groups), pack(groups, share_prompts=False)
    counts = len(forest(shared).source), shared.num_tokens + shared.prefix_tokens.numel(), separate.num_tokens
    assert counts == (1030, 2168, 5600)


def test_equal_tokens_with_other_experts_are_other_rows():
    groups = tree(3, 2, 8, np.random.default_rng(0))
    flat = forest(pack(groups))
    rows = [np.full((len(t.prompt_ids) + len(t.ids) - 1, 1, 2), i % 2, np.int16) for i, t in enumerate(groups[0])]
    mixed = forest(pack([[replace(t, experts=x) for t, x in zip(groups[0], rows, strict=True)]]))
    same = forest(pack([[replace(t, experts=np.zeros_like(x)) for t, x in zip(groups[0], rows, strict=True)]]))
    assert len(same.source) == len(flat.source)
    assert mixed is None or len(mixed.source) > len(flat.source)


@pytest.mark.parametrize(("other", "shared"), [(slice(0), 14), (5, 4), (6, 4), (9, 9)])
def test_an_image_is_one_or_two_whole_as_the_model_reads_it(other, shared):
    """Rows 4 to 7 are an image; two prompts of 14 tokens have other experts from one row on."""
    prompts = [list(range(3, 17)), list(range(3, 17))]
    groups = [[trajectory(prompt, [20 + i, *range(30, 50)])] for i, prompt in enumerate(prompts)]
    rows = [np.zeros((34, 1, 2), np.int16) for _ in groups]
    rows[1][other] = 1
    batch = pack([[replace(t, experts=x)] for (t,), x in zip(groups, rows, strict=True)])
    images = torch.full((batch.prefix_tokens.numel() + batch.num_tokens,), -1)
    for start in batch.prefix_cu[:-1].tolist():
        images[start + 4 : start + 8] = 0
    assert forest(batch, images=images).spans[0].length == shared


def test_a_group_of_samples_that_differ_is_left_to_its_prompt():
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 60, 9).tolist()
    assert forest(pack([[trajectory(prompt, [i, *rng.integers(3, 60, 8).tolist()]) for i in range(10, 14)]])) is None
