"""Checkpoints on four ranks: bitwise on the layout that wrote them, to 1e-5 on any other, whole after any kill."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model import checkpoint
from rlkit.model.checkpoint import BackgroundSaver, latest_checkpoint, load_checkpoint, save_checkpoint
from rlkit.model.forward import forward
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.packing import pack
from rlkit.parallel.data import rank_microbatches, summed
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.types import Trajectory

STATE = {"position": {"epoch": 1, "row": 17}, "kl": (0.1, 2.5), "seen": torch.arange(3)}


def make(sizes: dict, seed: int, tied: bool = False, **options):
    mesh = make_mesh(Parallel(**sizes))
    shape = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    made = tiny_model(tiny_tokenizer(), seed=seed, tie_word_embeddings=tied, **shape)
    model = parallelize(made, mesh, **options)
    return mesh, model, adamw(model, lr=1e-2, weight_decay=0.1, eps=1e-4)


def step(mesh, model, optimizer) -> float:
    draw = lambda n: [(7 * i + n) % 263 for i in range(n)]
    groups = [[Trajectory(draw(p), draw(n), [True] * n, [-1.0] * n, [0] * n)] for p, n in [(5, 9), (3, 4), (8, 11)]]
    batch = pack(groups)
    weights = batch.mask / batch.mask.sum()
    total = torch.zeros(())
    for micro, w in rank_microbatches((batch, weights), mesh=mesh, max_tokens=64):
        loss = -(w * forward(model, micro).logp).sum()
        loss.backward()
        total += loss.detach()
    optimizer_step(optimizer, max_norm=0.5, model=model)
    return float(summed(total, mesh=mesh))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draws() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def local(model, optimizer) -> list:
    states = [optimizer.state[p] for p in model.parameters()]
    tensors = [*model.parameters(), *(s[key] for s in states for key in ("step", "exp_avg", "exp_avg_sq"))]
    return [(x.to_local() if hasattr(x, "to_local") else x).detach().clone() for x in tensors]


def write_on_rank(rank, world, folder, sizes, options, background):
    """A step, a checkpoint, then what must happen again after it was loaded."""
    mesh, model, optimizer = make(sizes, 0, **options)
    seed_all(rank)
    step(mesh, model, optimizer)
    if background:
        with BackgroundSaver(folder, keep=1) as saver:
            saver.save(step=2, model=model, optimizer=optimizer, state=STATE)
            numbers, losses = draws(), [step(mesh, model, optimizer) for _ in range(2)]  # while it is written
    else:
        save_checkpoint(folder, step=2, model=model, optimizer=optimizer, state=STATE, keep=1)
        numbers, losses = draws(), [step(mesh, model, optimizer) for _ in range(2)]
    return numbers, losses, local(model, optimizer)


def resume_on_rank(rank, world, folder, sizes, options):
    mesh, model, optimizer = make(sizes, 1, **options)
    seed_all(99)
    step(mesh, model, optimizer)  # its state must not survive
    state = load_checkpoint(latest_checkpoint(folder), model=model, optimizer=optimizer)
    assert state.pop("step") == 2
    assert torch.equal(state.pop("seen"), STATE["seen"])
    assert state == {k: v for k, v in STATE.items() if k != "seen"}
    return draws(), [step(mesh, model, optimizer) for _ in range(2)], local(model, optimizer)


WRITERS = {
    "shard": ({"shard": 4}, {}, False),
    "shard, in the background": ({"shard": 4}, {}, True),
    "shard x tp, in the background": ({"tp": 2}, {"activation_checkpointing": True}, True),
    "replicate x shard, offloaded": ({"replicate": 2}, {"offload": True}, False),
    "cp x tp": ({"cp": 2, "tp": 2}, {}, False),
    "pp x shard": ({"pp": 2}, {}, False),
    "pp x tp, in the background": ({"pp": 2, "tp": 2}, {}, True),
    "pp x shard tied, in the background": ({"pp": 2}, {"tied": True}, True),
}
READERS = {  # ranks and sizes; the second and the third writer are in `make test`
    "shard x tp, in the background": [(3, {"shard": 3})],
    "replicate x shard, offloaded": [(4, {"replicate": 4, "shard": 1}), (1, {})],
    "pp x shard tied, in the background": [(2, {"pp": 2}), (4, {"cp": 2, "tp": 2})],
}
OTHERS = [(2, {"shard": 2}), (2, {"tp": 2}), (4, {"shard": 4}), (4, {"tp": 4}), (4, {"pp": 2, "tp": 2})]
ALL_READERS = [reader for some in READERS.values() for reader in some] + OTHERS
CASES = [pytest.param(w, READERS[w], id=f"{w}-some") for w in READERS if "tp" not in w]
CASES += [pytest.param(w, ALL_READERS, id=f"{w}-all", marks=pytest.mark.slow) for w in WRITERS]


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "readers"), CASES)
def test_resume_is_bitwise_on_the_same_layout_and_close_on_others(pool, tmp_path, writer, readers):
    sizes, options, background = WRITERS[writer]
    wrote = pool(4).run(write_on_rank, tmp_path, sizes, options, background)
    found = pool(4).run(resume_on_rank, tmp_path, sizes, options)
    for (numbers, losses, tensors), (numbers_, losses_, tensors_) in zip(wrote, found, strict=True):
        assert numbers == numbers_
        assert losses == losses_
        assert len(tensors) == len(tensors_) > (30 if "pp" in sizes else 60)
        assert all(map(torch.equal, tensors, tensors_))
    assert len({tuple(numbers) for numbers, *_ in wrote}) == 4, "each rank has random states of its own"
    truth = wrote[0][1]
    assert truth[0] > truth[-1] > 0
    tied = {key: x for key, x in options.items() if key == "tied"}
    for world, sizes in readers:
        for _, losses, _ in pool(world).run(resume_on_rank, tmp_path, sizes, tied):
            assert losses == pytest.approx(truth, rel=1e-5), (world, sizes)


def saver_on_rank(rank, world, folder):
    """An error in the background comes out at the next call, on every rank; then the saver goes on."""
    mesh, model, optimizer = make({"shard": 4}, 0)
    step(mesh, model, optimizer)
    real = checkpoint._write_files

    def full(*_):
        raise OSError(28, "full")

    with BackgroundSaver(folder, keep=2) as saver:
        assert saver.wait() is None
        checkpoint._write_files = full if rank == 2 else real
        saver.save(step=1, model=model, optimizer=optimizer, state={})
        with pytest.raises(OSError, match="the checkpoint of step 1"):
            saver.save(step=2, model=model, optimizer=optimizer, state={})
        checkpoint._write_files = real
        assert latest_checkpoint(folder) is None
        saver.save(step=3, model=model, optimizer=optimizer, state={})
        saver.save(step=4, model=model, optimizer=optimizer, state={"live": torch.zeros(2)})
        assert saver.wait() == folder / "step_00000004"
        assert latest_checkpoint(folder) == saver.wait()
    checkpoint._write_files = full if rank == 2 else real
    try:
        with pytest.raises(OSError, match="the checkpoint of step 5"), BackgroundSaver(folder, keep=2) as saver:
            saver.save(step=5, model=model, optimizer=optimizer, state={})
        with pytest.raises(OSError, match="the checkpoint of step 5"):
            save_checkpoint(folder, step=5, model=model, optimizer=optimizer, state={}, keep=2)
        with pytest.raises(KeyError, match="mine"):
            fail_while_saving(folder, model)
    finally:
        checkpoint._write_files = real
    with pytest.raises(TypeError, match=r"state\['reference'\]\['model.embed_tokens.weight'\] is sharded"):
        save_checkpoint(folder, step=7, model=model, optimizer=None, state={"reference": model.state_dict()}, keep=1)


def fail_while_saving(folder, model):
    with BackgroundSaver(folder, keep=2) as saver:
        saver.save(step=6, model=model, optimizer=None, state={})
        raise KeyError("mine")


@pytest.mark.slow
def test_errors_of_the_background_surface(ranks, tmp_path):
    ranks.run(saver_on_rank, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]


def filled(model, optimizer, value: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for entry in optimizer.state.values():
            entry["exp_avg"].fill_(value)
    optimizer.zero_grad()


def killed_on_rank(rank, world, folder, victim, event, background):
    """Check the newest checkpoint, save the next two; `victim` dies before its `event`-th change of the file system."""
    _, model, optimizer = make({}, 0)
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    path, done = latest_checkpoint(folder), 0
    dist.barrier()
    if path is not None:
        done = load_checkpoint(path, model=model, optimizer=optimizer)["step"]
        for p in model.parameters():
            assert (p.to_local() == done).all()
            assert (optimizer.state[p]["exp_avg"].to_local() == done).all()
    for number in (done + 1, done + 2):
        filled(model, optimizer, number)
        if number == done + 2 and rank == victim:
            die_before(folder, event)
        if background:
            with BackgroundSaver(folder, keep=1) as saver:
                saver.save(step=number, model=model, optimizer=optimizer, state={})
                filled(model, optimizer, -1.0)
        else:
            save_checkpoint(folder, step=number, model=model, optimizer=optimizer, state={}, keep=1)
    return done


def die_before(folder: Path, event: int) -> None:
    seen = 0
    kinds = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")

    def hook(kind, args):
        nonlocal seen
        if kind in kinds and str(folder) in str(args[0]):
            writes = kind != "open" or (isinstance(args[1], str) and ("w" in args[1] or "a" in args[1]))
            seen += writes
            if seen >= event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


ALL = [(1, 1), (2, 2), (3, 1), (0, 1), (0, 2), (0, 4), (0, 6), (0, 7), (0, 8), (0, 9), (0, 12)]
KILLS = [  # ranks, whether the save is in the background, and victims with their events
    pytest.param(2, True, [(1, 1), (0, 1), (0, 12)], id="some"),
    pytest.param(4, False, ALL, id="all", marks=pytest.mark.slow),
    pytest.param(4, True, ALL, id="all in the background", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "background", "kills"), KILLS)
def test_kill_of_any_rank_at_any_moment_of_a_save(pool, tmp_path, world, background, kills):
    """Rank 0 has the most to do: folder, metadata, side files, manifest, rename, deleting the old one."""
    done, later = 0, 0
    for victim, event in kills:
        with pytest.raises(pytest.fail.Exception):
            pool(world).run(killed_on_rank, tmp_path, victim, event, background)
        path = latest_checkpoint(tmp_path)
        now = json.loads((path / "manifest.json").read_text())["step"]
        assert now in (done + 1, done + 2), (victim, event)
        later += now == done + 2
        done = now
    assert pool(world).run(killed_on_rank, tmp_path, -1, 0, background) == [done] * world
    assert 0 < later < len(kills), "some kills came before the rename, and some after"
    assert [p.name for p in tmp_path.iterdir()] == [f"step_{done + 2:08d}"]


def test_background_save_does_not_hold_up_the_run(tmp_path, monkeypatch):
    """Alone, without ranks: `save` returns while the disk is busy, and what changes then is not in the checkpoint."""
    net = torch.nn.Linear(4, 4)
    truth = net.weight.detach().clone()
    real, go = checkpoint.write_tensors, threading.Event()

    def slow(*args, **kwargs):
        assert go.wait(60)
        real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_tensors", slow)
    with BackgroundSaver(tmp_path, keep=1) as saver:
        saver.save(step=1, model=net, optimizer=None, state={})
        net.weight.data.zero_()
        assert latest_checkpoint(tmp_path) is None
        go.set()
    load_checkpoint(tmp_path / "step_00000001", model=net, optimizer=None)
    assert torch.equal(net.weight, truth)
