"""Samples that share long prompts, over context parallel ranks: gradients, and the bytes of keys that are kept."""

from __future__ import annotations

import pytest
import torch
import varlen

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward, prepare_model
from rlkit.model.parallelize import parallelize
from rlkit.packing import pack
from rlkit.parallel import attention
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.types import Trajectory

SHAPE = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}


def data(groups, *, share):
    """`groups`: the lengths of a prompt and of its samples."""
    draw = lambda n, seed: [(7 * i * i + 3 * i * seed + n) % 263 for i in range(n)]
    made = []
    for p, lens in groups:
        made.append([Trajectory(draw(p, 0), draw(n, i), [True] * n, [-1.0] * n, [0] * n) for i, n in enumerate(lens)])
    batch = pack(made, share_prompts=share)
    weights = torch.zeros(batch.num_tokens)
    weights[batch.mask] = torch.sin(torch.arange(int(batch.mask.sum())) + 1.0) / batch.mask.sum()
    return batch, weights


def objective(model, batch, weights):
    out = forward(model, batch, temperature=0.7)
    return (weights * (out.logp - 0.1 * out.entropy)).sum()


def small():
    return tiny_model(tiny_tokenizer(), **SHAPE)


PROMPT, ANSWER = 250, 9
LONG = [(83, [5, 7, 3, 9, 4, 4]), (1, [4]), (61, [6, 2, 8, 5])]


def on_rank(rank, world, sizes, flash, truth):
    """Loss and gradients relative to the truth, and in how many attentions prompts were attended to apart."""
    apart, kernel = [], attention._attend_shared
    mesh = make_mesh(Parallel(**sizes))
    model = parallelize(small(), mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_attend_shared", lambda *args, **more: apart.append(1) or kernel(*args, **more))
        if flash:
            varlen.on_the_cpu(patch)
            patch.setattr("rlkit.model.forward._flash", lambda *_: True)
            patch.setattr(attention, "_parts_agree", lambda *_: True)  # its own calls would be counted
        loss = objective(model, *data(LONG, share=True))
        (loss / mesh.dp).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert grads.keys() == truth[1].keys()
    errors = [(x - truth[1][name]).abs().max() / truth[1][name].abs().max() for name, x in grads.items()]
    return abs(loss.item() - truth[0]) / abs(truth[0]), float(max(errors)), len(apart)


@pytest.fixture(scope="module")
def truth():
    """One process, where every sample has its own copy of the prompt from the first layer on."""
    model = prepare_model(small())
    loss = objective(model, *data(LONG, share=False))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"cp": 2},
        {"cp": 2, "tp": 2, "ulysses": True},
        pytest.param({"cp": 4}, marks=pytest.mark.slow),
        pytest.param({"cp": 4, "ulysses": True}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_layouts_equal_unshared_prompts_of_one_process(ranks, truth, sizes, flash):
    found = ranks.run(on_rank, sizes, flash, truth)
    assert max(error for loss, grad, _ in found for error in (loss, grad)) < 1e-5, found
    apart = [calls for *_, calls in found]
    assert SHAPE["layers"] in apart, "some ranks have few samples, others attend to prompts apart"


def copied_on_rank(rank, world, sizes):
    """Rows of keys and values that a layer copies, with a copy of the prompt for each sample and without."""
    mesh, (batch, _), found = make_mesh(Parallel(**sizes)), data([(PROMPT + 1, [ANSWER] * 16)], share=True), []
    model, kv_heads, take = parallelize(small(), mesh), SHAPE["kv_heads"] // mesh.sizes.tp, attention.rows
    if mesh.sizes.ulysses:
        kv_heads //= mesh.sizes.cp
    for copies in (1e9, 2):
        seen = []

        def rows(x, index, seen=seen):
            if x.shape[1:] == (kv_heads, SHAPE["head_dim"]) and not isinstance(index, slice):
                seen.append(len(index))
            return take(x, index)

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            varlen.on_the_cpu(patch)
            patch.setattr("rlkit.model.forward._flash", lambda *_: True)
            patch.setattr(attention, "_parts_agree", lambda *_: True)  # its own calls would be counted
            patch.setattr(attention, "_COPIES", copies)
            patch.setattr(attention, "rows", rows)
            forward(model, batch)
        found.append(sum(seen) // (2 * SHAPE["layers"]))
    return found


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ({"shard": 4}, 0),  # views
        ({"cp": 2}, 3 * PROMPT + 16 * ANSWER + 3),  # by the prompt's rows in both chunks, and by the samples
        ({"cp": 2, "tp": 2, "ulysses": True}, 2 * PROMPT + 16 * ANSWER + 3),  # by the prompt's rows, and by the samples
    ],
)
def test_a_prompt_s_keys_are_copied_once_or_not_at_all(ranks, sizes, most):
    """On a rank that has all samples there were seventeen copies."""
    found = ranks.run(copied_on_rank, sizes)
    assert max(after for _, after in found) <= most
    assert min(before for before, _ in found) > 2 * most
    whole = [before for before, _ in found if before >= PROMPT + 16 * (PROMPT + ANSWER)]
    assert len(whole) == (0 if sizes == {"cp": 2} else 4)
