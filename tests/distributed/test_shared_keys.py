"""Documents that begin alike, over context parallel ranks: numbers, gradients, and the bytes of keys that are kept."""

from __future__ import annotations

import pytest
import torch
import varlen

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward, prepare_model
from rlkit.model.parallelize import parallelize
from rlkit.packing import pack
from rlkit.parallel import attention
from rlkit.parallel.forest import forest
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.types import Trajectory

SHAPE = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}


def drawn(n, seed):
    return [(7 * i * i + 3 * i * seed + n) % 263 for i in range(n)]


def answers(groups):
    """`groups`: the lengths of a prompt and of its samples."""
    return [[sample(drawn(p, 0), drawn(n, i)) for i, n in enumerate(lens)] for p, lens in groups]


def sample(prompt, ids):
    return Trajectory(prompt, ids, [True] * len(ids), [-1.0] * len(ids), [0] * len(ids))


def turns():
    """Pieces of two episodes that begin alike: each sample of a turn is continued by the next turn."""
    group = []
    for last in (2, 3):
        context = drawn(20, 0)
        for turn in (1, last, 4, 5):
            group += [sample(context, drawn(7 + turn, seed)) for seed in (turn, turn + 9)]
            context = [*context, *group[-1].ids]
    return [group]


def data(groups, *, share):
    batch = pack(groups, share_prompts=share)
    weights = torch.zeros(batch.num_tokens)
    weights[batch.mask] = torch.sin(torch.arange(int(batch.mask.sum())) + 1.0) / batch.mask.sum()
    return batch, weights


def objective(model, batch, weights):
    """The loss and the log-probs."""
    out = forward(model, batch, temperature=0.7)
    return (weights * (out.logp - 0.1 * out.entropy)).sum(), out.logp[batch.mask].detach()


def small():
    return tiny_model(tiny_tokenizer(), **SHAPE)


PROMPT, ANSWER = 250, 9
GROUPS = {"long": answers([(83, [5, 7, 3, 9, 4, 4]), (1, [4]), (61, [6, 2, 8, 5])]), "turns": turns()}


def on_rank(rank, world, sizes, flash, groups, truth):
    """Errors of log-probs and gradients, the number of attentions with prompts apart, and the rows of all ranks."""
    apart, seen, kernel = [], [], attention._attend_shared
    mesh = make_mesh(Parallel(**sizes))
    model = parallelize(small(), mesh)
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_attend_shared", lambda *args, **more: apart.append(1) or kernel(*args, **more))
        if flash:
            varlen.on_the_cpu(patch)
            patch.setattr("rlkit.model.forward._flash", lambda *_: True)
            patch.setattr(attention, "_parts_agree", lambda *_: True)  # its own calls would be counted
        loss, logp = objective(model, *data(GROUPS[groups], share=True))
        (loss / mesh.dp).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert grads.keys() == truth[1].keys()
    errors = [(x - truth[1][name]).abs().max() / truth[1][name].abs().max() for name, x in grads.items()]
    off = float((logp - truth[0]).abs().max() / truth[0].abs().max())
    return off, float(max(errors)), len(apart), mesh.sizes.cp * seen[0]


@pytest.fixture(scope="module")
def truth():
    """One process, where every sample has its own copy of the prompt from the first layer on."""
    found = {}
    for name, groups in GROUPS.items():
        model = prepare_model(small())
        loss, logp = objective(model, *data(groups, share=False))
        loss.backward()
        found[name] = logp, {name: p.grad for name, p in model.named_parameters()}
    return found


@pytest.mark.slow_cases(
    "sizes1-False-long",
    "sizes1-False-turns",
    "sizes1-True-long",
    "sizes1-True-turns",
    "sizes0-False-long",
    "sizes0-True-long",
    "sizes0-True-turns",
)
@pytest.mark.parametrize("groups", GROUPS)
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
def test_layouts_equal_unshared_prompts_of_one_process(ranks, truth, sizes, flash, groups):
    found = ranks.run(on_rank, sizes, flash, groups, truth[groups])
    assert max(error for logp, grad, *_ in found for error in (logp, grad)) < 1e-5, found
    apart = [calls for *_, calls, _ in found]
    if groups == "long":
        assert SHAPE["layers"] in apart, "some ranks have few samples, others attend to prompts apart"
    else:
        batch, _ = data(GROUPS[groups], share=True)
        num = len(forest(batch).source)
        assert num < 0.6 * (batch.num_tokens + batch.prefix_tokens.numel())
        assert all(num <= rows < num + 8 for *_, rows in found)


def copied_on_rank(rank, world, sizes):
    """Rows of keys and values that a layer copies, with a copy of the prompt for each sample and without."""
    mesh, (batch, _), found = make_mesh(Parallel(**sizes)), data(answers([(PROMPT + 1, [ANSWER] * 16)]), share=True), []
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


@pytest.mark.slow_cases("sizes0-0", "sizes2-647")
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
