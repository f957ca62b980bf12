"""Values and rewards, packed with shared prompts, against transformers' own classification models on padded rows."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward
from rlkit.model.heads import (
    bootstraps,
    classified,
    load_reward_model,
    load_reward_parallel,
    load_value_model,
    load_value_parallel,
    pack_whole,
    rewards,
    values,
)  # fmt: skip
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import load_parallel, parallelize
from rlkit.model.weights import export_hf
from rlkit.packing import pack, with_streams
from rlkit.parallel.data import rank_microbatches
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.settings import Bins
from rlkit.types import Trajectory

BINS = Bins((-0.5, 1.5), 9)


def groups():
    draw = lambda n: [(11 * i + n) % 256 for i in range(n)]
    made = []
    for p, lens in [(5, [9, 3]), (1, [4]), (8, [11, 2, 6])]:
        made.append([Trajectory(draw(p), draw(n), [True] * n, [-1.0] * n, [0] * n, truncated=n % 2 == 0) for n in lens])
    return made


def rows():
    return [t.prompt_ids + t.ids for group in groups() for t in group]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    path = tmp_path_factory.mktemp("models")
    tiny_model(tiny_tokenizer(), **sizes).save_pretrained(path / "policy")
    for name, kind in (("critic", AutoModelForTokenClassification), ("judge", AutoModelForSequenceClassification)):
        torch.manual_seed(1)
        kind.from_pretrained(path / "policy", num_labels=1).save_pretrained(path / name)
    return path


@pytest.mark.parametrize("load", [load_value_model, load_reward_model])
def test_a_folder_that_is_not_there_is_said(load, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder; give a folder saved by save_pretrained"):
        load(tmp_path / "judge")


def test_values_are_those_of_token_classification(folder):
    truth = AutoModelForTokenClassification.from_pretrained(folder / "critic").eval()
    batch = pack(groups())
    found, first = values(load_value_model(folder / "critic"), batch), batch.cu_seqlens[:-1].tolist()
    for i, (row, t) in enumerate(zip(rows(), [t for g in groups() for t in g], strict=True)):
        theirs = truth(torch.tensor([row])).logits[0, :, 0]
        mine = found[first[i] : batch.cu_seqlens[i + 1]]
        torch.testing.assert_close(mine, theirs[len(t.prompt_ids) - 1 :][: len(mine)], atol=1e-5, rtol=1e-5)
        end = bootstraps(found, batch)[i]
        assert end == (theirs[-1] if t.truncated else 0) or torch.isclose(end, theirs[-1], atol=1e-5)
        assert len(mine) == len(t.ids) + t.truncated


def test_rewards_are_those_of_sequence_classification(folder):
    truth = AutoModelForSequenceClassification.from_pretrained(folder / "judge").eval()
    theirs = torch.cat([truth(torch.tensor([row])).logits[0] for row in rows()])
    model = load_reward_model(folder / "judge")
    for share in (True, False):
        found = rewards(model, pack_whole(groups(), share_prompts=share))
        torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="pack_whole"):
        rewards(model, pack(groups()))
    coarse = rewards(model, pack_whole(groups()), dtype="bf16")
    assert coarse.dtype == torch.float32
    torch.testing.assert_close(coarse, theirs, atol=0.1, rtol=0.1)


def test_a_new_head_starts_at_zero_and_learns(folder):
    model = load_value_model(folder / "policy")
    batch = pack(groups())
    assert not values(model, batch).any()
    optimizer = adamw(model, lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (values(model, batch) - batch.targets / 256).square().mean()
        loss.backward()
        optimizer_step(optimizer, max_norm=10.0)
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def train_bins(model, mesh):
    optimizer = adamw(model, lr=1e-2, eps=1e-4)
    batch = pack(groups())
    batch = with_streams(batch, returns=batch.targets / 256)
    for _ in range(2):
        for micro, *_ in rank_microbatches((batch,), mesh=mesh, max_tokens=100):
            classified(model, micro)[1].sum().backward()
        optimizer_step(optimizer, max_norm=0.5, model=model)


def train(model, mesh):
    optimizer, losses = adamw(model, lr=1e-2, eps=1e-4), []
    whole = pack_whole(groups())
    for _ in range(2):
        total = torch.zeros(())
        for micro, goal in rank_microbatches((whole, whole.targets / 256), mesh=mesh, max_tokens=100):
            loss = (values(model, micro) - goal).square().sum() + rewards(model, micro).square().sum()
            loss.backward()
            total += loss.detach()
        optimizer_step(optimizer, max_norm=0.5, model=model)
        losses.append(total)
    return losses


def heads_on_rank(rank, world, folder, sizes, options):
    mesh = make_mesh(Parallel(**sizes))
    model = parallelize(load_value_model(folder / "critic"), mesh, **options)
    train(model, mesh)
    export_hf(model, None, folder / "trained")
    binned = load_value_parallel(folder / "policy", mesh, bins=BINS, **options)
    train_bins(binned, mesh)
    return [values(x, pack(groups())).detach() for x in (model, binned)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2, "cp": 2}, {"activation_checkpointing": True}),
        ({"shard": 4}, {}),
        ({"cp": 4, "ulysses": True}, {}),
    ],
)
def test_four_ranks_train_the_same_critic(ranks, folder, sizes, options):
    model = load_value_model(folder / "critic")
    train(model, None)
    truth = values(model, pack(groups())).detach()
    binned = load_value_model(folder / "policy", bins=BINS)
    train_bins(binned, None)
    both = [truth, values(binned, pack(groups())).detach()]
    assert both[1].std() > 0.01
    for found in ranks.run(heads_on_rank, folder, sizes, options):
        torch.testing.assert_close(found, both, atol=1e-4, rtol=1e-4)
    again = load_value_model(folder / "trained")
    torch.testing.assert_close(values(again, pack(groups())).detach(), truth, atol=1e-4, rtol=1e-4)


def whole_tensor(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def read_on_rank(rank, world, folder, sizes):
    """Each kind of model, from files with and without its head: (whole model, shards of the files)."""
    mesh = make_mesh(Parallel(**sizes))
    found = {}
    for name, whole, sharded, numbers in (
        ("critic", load_value_model, load_value_parallel, values),
        ("judge", load_reward_model, load_reward_parallel, rewards),
        ("policy", load_value_model, load_value_parallel, values),
    ):
        batch = pack_whole(groups())
        one, other = parallelize(whole(folder / name), mesh), sharded(folder / name, mesh)
        found[name] = [numbers(x, batch).detach() for x in (one, other)]
        for (key, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
            assert a.dtype == b.dtype == torch.float32
            assert torch.equal(whole_tensor(a), whole_tensor(b)), key
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2, "shard": 2}, {"shard": 4}])
def test_each_rank_reads_its_shards_of_a_critic_and_a_judge(ranks, folder, sizes):
    for found in ranks.run(read_on_rank, folder, sizes):
        for name, (one, other) in found.items():
            assert torch.equal(one, other), name
            assert bool(one.any()) == (name != "policy"), "a new head is 0"


def frozen_on_rank(rank, world, folder, sizes):
    mesh = make_mesh(Parallel(**sizes))
    batch, found = pack(groups()), []
    for frozen in (False, True):
        model = load_parallel(folder / "policy", mesh, dtype=torch.bfloat16, frozen=frozen)
        kinds = {p.dtype for p in model.parameters()}
        assert kinds == {torch.bfloat16 if frozen else torch.float32}
        with torch.no_grad():
            found.append(forward(model, batch))
    newer = load_parallel(folder / "critic_policy", mesh, dtype=torch.bfloat16)
    model.load_state_dict(newer.state_dict())  # as --ref-sync-steps does
    with torch.no_grad():
        found += [forward(model, batch), forward(newer, batch)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2, "shard": 2}, {"cp": 4}])
def test_a_frozen_model_in_bf16_computes_the_same_bits(ranks, folder, sizes):
    torch.manual_seed(7)
    options = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44, "seed": 9}
    tiny_model(tiny_tokenizer(), **options).save_pretrained(folder / "critic_policy")
    for a, b, c, d in ranks.run(frozen_on_rank, folder, sizes):
        assert torch.equal(a.logp, b.logp)
        assert torch.equal(a.entropy, b.entropy)
        assert torch.equal(c.logp, d.logp)
        assert not torch.equal(a.logp, c.logp)
