"""Checkpoints: resume is bitwise; after a crash, a full disk or damage, the chosen checkpoint always loads."""

from __future__ import annotations

import binascii
import copy
import json
import os
import random
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import warm
from small_disk import NOT_ALLOWED
from torch import nn

import rlkit
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model import checkpoint
from rlkit.model.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from rlkit.model.forward import prepare_model
from rlkit.model.weights import export_hf


class Net(nn.Module):
    """Tied weights, a buffer that changes, dropout (so a step draws random numbers), and weights that never train."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.to(dtype)

    def forward(self, x):
        self.count += 1
        return self.head(self.inner(self.embed(x)))


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step whose data come from all three random sources, and whose loss tells whether they agree."""
    x = torch.tensor([random.randrange(11), np.random.randint(11), int(torch.randint(11, ()))])
    loss = nn.functional.cross_entropy(net(x).float(), x.flip(0))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def two_groups(net):
    return torch.optim.AdamW(
        [{"params": [net.embed.weight], "lr": 1e-2}, {"params": [*net.inner.parameters(), net.unused]}]
    )


OPTIMIZERS = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
    "adamw fused": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
    "adamw, two groups": two_groups,
    "adamw, lr tensor": lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2)),
    "amsgrad": lambda net: torch.optim.Adam(net.parameters(), lr=1e-2, amsgrad=True),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2),
    "sgd momentum": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9),
    "nadam": lambda net: torch.optim.NAdam(net.parameters(), lr=1e-2),  # a scalar of its own beside `step`
    "adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=1e-2),  # state of other shapes than the weight
}


def same(a, b) -> bool:
    """Equal, bit for bit, through nested containers."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_resume_is_bitwise(tmp_path, make):
    seed_all(1)
    net = Net(1)
    optimizer = make(net)
    for _ in range(3):
        train_step(net, optimizer)
    path = save_checkpoint(tmp_path, step=3, model=net, optimizer=optimizer, state={"position": 17}, keep=2)
    saved_weights, saved_optimizer = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    losses = [train_step(net, optimizer) for _ in range(3)]

    seed_all(99)
    other = Net(2)
    other_optimizer = make(other)
    train_step(other, other_optimizer)  # its state must not survive
    state = load_checkpoint(path, model=other, optimizer=other_optimizer)
    assert state == {"position": 17, "step": 3}
    assert same(other.state_dict(), saved_weights)
    assert same(other_optimizer.state_dict(), saved_optimizer)
    assert other.head.weight is other.embed.weight
    assert [train_step(other, other_optimizer) for _ in range(3)] == losses
    assert same(other.state_dict(), net.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


def test_saving_does_not_change_the_run(tmp_path):
    """Also before the first step, where torch's own optimizer state dict takes a step to create the state."""

    def run(save: bool):
        seed_all(5)
        net = Net(5)
        optimizer = OPTIMIZERS["adamw"](net)
        for step in range(4):
            if save:
                save_checkpoint(tmp_path, step=step, model=net, optimizer=optimizer, state={}, keep=9)
            train_step(net, optimizer)
        return net.state_dict(), optimizer.state_dict(), torch.rand(3), random.random(), np.random.rand()

    assert same(run(True), run(False))
    net = Net(0)
    optimizer = OPTIMIZERS["adamw"](net)
    train_step(net, optimizer)
    load_checkpoint(tmp_path / "step_00000000", model=net, optimizer=optimizer)
    assert not optimizer.state, "an optimizer saved before its first step comes back without state"


def test_fp32_state_of_bf16_weights_stays_fp32(tmp_path):
    net = Net(1, torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    master = torch.randn(8, 8)
    optimizer.state[net.inner[0].weight]["master"] = master
    path = save_checkpoint(tmp_path, step=1, model=net, optimizer=optimizer, state={}, keep=1)
    other = Net(2, torch.bfloat16)
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-2)
    load_checkpoint(path, model=other, optimizer=optimizer)
    assert same(optimizer.state[other.inner[0].weight]["master"], master)


def test_compiled_and_plain_model_share_checkpoints(tmp_path):
    net = Net(1)
    optimizer = OPTIMIZERS["adamw"](net)
    train_step(net, optimizer)
    path = save_checkpoint(tmp_path, step=1, model=torch.compile(net), optimizer=optimizer, state={}, keep=1)
    other = Net(2)
    load_checkpoint(path, model=other, optimizer=OPTIMIZERS["adamw"](other))
    assert same(other.state_dict(), net.state_dict())


def test_weights_alone_leave_random_states_and_tied_weights_are_stored_once(tmp_path):
    net = nn.ModuleDict({"a": nn.Linear(300, 300, bias=False), "b": nn.Linear(300, 300, bias=False)})
    net["b"].weight = net["a"].weight
    path = save_checkpoint(tmp_path, step=1, model=net, optimizer=None, state={}, keep=1)
    size = sum(f.stat().st_size for f in path.iterdir())
    assert 360_000 < size < 400_000  # 300 * 300 * 4 bytes, once
    before = torch.get_rng_state()
    load_checkpoint(path, model=net, optimizer=None)
    assert torch.equal(torch.get_rng_state(), before)


class PidState(NamedTuple):
    integral: float
    error: float


def test_state_comes_back_exactly(tmp_path):
    state = {
        "kl": PidState(0.1, -1e-300),
        "data": {"epoch": 3, "order": torch.randperm(5), 7: None},
        "seen": [1, (2.5, float("inf")), "text", b"bytes", True],
        "numpy": np.float32(0.1),
        "generator": torch.Generator().get_state(),
    }
    path = save_checkpoint(tmp_path, step=2, model=Net(0), optimizer=None, state=state, keep=1)
    loaded = load_checkpoint(path, model=Net(1), optimizer=None)
    assert PidState(*loaded["kl"]) == state["kl"]
    assert same({**state, "numpy": float(state["numpy"]), "step": 2}, loaded)


@pytest.mark.parametrize("bad", [Path("x"), lambda: 0, object()])
def test_state_that_could_not_be_read_back_is_refused(tmp_path, bad):
    with pytest.raises(TypeError, match=r"state\['config'\]\[1\] is a .* which a checkpoint cannot hold"):
        save_checkpoint(tmp_path, step=1, model=Net(0), optimizer=None, state={"config": [0, bad]}, keep=1)
    assert not list(tmp_path.iterdir())


def save_simple(folder: Path, step: int, *, keep: int = 9) -> Path:
    net = nn.Linear(4, 4)
    nn.init.constant_(net.weight, step)
    return save_checkpoint(folder, step=step, model=net, optimizer=None, state={}, keep=keep)


def loaded_value(path: Path) -> float:
    net = nn.Linear(4, 4)
    load_checkpoint(path, model=net, optimizer=None)
    return net.weight.unique().item()


FILES = ("__0_0.distcp", ".metadata", "state.pt", "rank_00000.pt", "manifest.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_torn_checkpoint_is_never_chosen(tmp_path, name, damage):
    good, torn = save_simple(tmp_path, 1), save_simple(tmp_path, 2)
    assert {f.name for f in torn.iterdir()} == set(FILES)
    file = torn / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    assert latest_checkpoint(tmp_path) == good
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        load_checkpoint(torn, model=nn.Linear(4, 4), optimizer=None)
    again = save_simple(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == again
    assert loaded_value(again) == 2


@pytest.mark.parametrize("name", FILES[:-1])
def test_changed_content_of_the_right_size_is_found_at_load(tmp_path, name):
    path = save_simple(tmp_path, 1)
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    net = nn.Linear(4, 4)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=f"{name} changed after it was written"):
        load_checkpoint(path, model=net, optimizer=None)
    assert same(net.state_dict(), before)


def test_latest_is_found_by_content_and_order_not_by_name(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "step_00000099").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    save_simple(tmp_path, 30)
    back = save_simple(tmp_path, 20)  # the run went back to step 10 and came here again
    assert latest_checkpoint(tmp_path) == back
    renamed = back.rename(tmp_path / "before the change of the reward")
    assert latest_checkpoint(tmp_path) == renamed
    assert loaded_value(renamed) == 20


def test_newest_are_kept_and_leftovers_removed(tmp_path):
    (tmp_path / ".tmp_step_00000001").mkdir(parents=True)
    (tmp_path / ".tmp_step_00000001" / "part").write_text("x")
    for step in range(1, 6):
        save_simple(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]
    assert [loaded_value(p) for p in sorted(tmp_path.iterdir())] == [4, 5]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        save_simple(tmp_path, 6, keep=0)


def test_manifest_lists_every_file_with_its_checksum(tmp_path):
    path = save_simple(tmp_path, 7)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["world_size"]) == (checkpoint.FORMAT, 7, 1)
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        assert entry == {"size": len(data), "crc32": binascii.crc32(data)}


def rewritten(path: Path, **changes: object) -> None:
    """Change keys of the manifest; None removes one."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps({k: x for k, x in manifest.items() if x is not None}))


@pytest.mark.parametrize("damage", [
    lambda path: (path / "manifest.json").write_text("[" * 10**5), lambda path: rewritten(path, step=-1),
    lambda path: rewritten(path, step=10**30), lambda path: rewritten(path, files={"a\0b": {"size": 1, "crc32": 1}}),
    lambda path: rewritten(path, files={"a" * 300: {"size": 1, "crc32": 1}}),
    lambda path: rewritten(path, files={name: {"size": size} for name, size in sizes(path).items()}),
    lambda path: pipe(path / "manifest.json"), lambda path: (pipe(path / "z"), rewritten(path, files=PIPE)),
])  # fmt: skip
def test_an_edited_manifest_is_skipped_for_the_checkpoint_before(tmp_path, damage):
    save_simple(tmp_path, 1)
    damage(save_simple(tmp_path, 2))
    state, skipped = checkpoint.load_latest(tmp_path, model=nn.Linear(4, 4), optimizer=None)
    assert state["step"] == 1
    assert len(skipped) == 1
    assert str(tmp_path / "step_00000002") in skipped[0]


def sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.iterdir() if file.name != "manifest.json"}


PIPE = {"z": {"size": 0, "crc32": 0}}


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize(("found", "by"), [
    ({"format": 99, "rlkit": "7.1", "order": None, "files": None}, "format 99, written by rlkit 7.1, and"),
    ({"format": None, "rlkit": None}, "format None, written by an rlkit without format numbers, and"),
])  # fmt: skip
def test_another_format_is_refused_with_the_version_that_wrote_it(tmp_path, found, by):
    path = save_simple(tmp_path, 1)
    rewritten(path, **found)
    net = nn.Linear(4, 4)
    before = copy.deepcopy(net.state_dict())
    reads = f"rlkit {rlkit.__version__} reads format {checkpoint.FORMAT}"
    message = rf"^{path} has checkpoint {by} {reads}: resume with the version that wrote it"
    for read in (
        lambda: latest_checkpoint(tmp_path),
        lambda: load_checkpoint(path, model=net, optimizer=None),
        lambda: checkpoint.load_latest(tmp_path, model=net, optimizer=None),
    ):
        with pytest.raises(ValueError, match=message) as error:
            read()
        assert "\n" not in str(error.value)
    assert same(net.state_dict(), before)
    for step in (2, 3):
        save_simple(tmp_path, step, keep=1)
    assert path.exists(), "checkpoints in another format are not deleted"


def test_the_state_file_carries_the_format_too(tmp_path):
    path = save_simple(tmp_path, 1)
    state = torch.load(path / "state.pt", weights_only=True)
    assert state["format"] == checkpoint.FORMAT
    torch.save({**state, "format": 99}, path / "state.pt")
    resum(path)
    with pytest.raises(ValueError, match=r"state\.pt has checkpoint format 99, written by rlkit .*: resume with"):
        load_checkpoint(path, model=nn.Linear(4, 4), optimizer=None)


@pytest.mark.parametrize(("edit", "lacks"), [({"state": 1}, "state"), ({"optimizer": None}, "optimizer")])
def test_a_state_file_edited_with_its_checksum_is_named(tmp_path, edit, lacks):
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    path = save_checkpoint(tmp_path, step=1, model=net, optimizer=optimizer, state={}, keep=1)
    torch.save({**torch.load(path / "state.pt", weights_only=True), **edit}, path / "state.pt")
    resum(path)
    with pytest.raises(ValueError, match=rf"state\.pt is damaged, or no file of a checkpoint: it has no `{lacks}`"):
        load_checkpoint(path, model=net, optimizer=optimizer)


def resum(path: Path) -> None:
    """The manifest has the size and checksum that state.pt has now."""
    data = (path / "state.pt").read_bytes()
    files = json.loads((path / "manifest.json").read_text())["files"]
    rewritten(path, files={**files, "state.pt": {"size": len(data), "crc32": binascii.crc32(data)}})


def test_wrong_model_or_optimizer_is_named_and_nothing_is_changed(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    path = save_checkpoint(tmp_path, step=1, model=net, optimizer=optimizer, state={}, keep=1)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"another model: model/1.weight is \[2, 4\] there, \[3, 4\] here.* \(2 diff"):
        load_checkpoint(path, model=other, optimizer=None)
    assert same(other.state_dict(), before)
    with pytest.raises(ValueError, match=r"model/1.weight is \[2, 4\] there, missing here"):
        load_checkpoint(path, model=nn.Sequential(nn.Linear(4, 4)), optimizer=None)
    with pytest.raises(ValueError, match=r"model/2.weight is missing there, \[2, 2\] here"):
        load_checkpoint(path, model=nn.Sequential(*net, nn.Linear(2, 2)), optimizer=None)
    with pytest.raises(ValueError, match="another optimizer"):
        load_checkpoint(path, model=net, optimizer=torch.optim.AdamW(net[0].parameters()))
    with pytest.raises(ValueError, match=r"holds 2 parameters that are not in the model, the first of shape \[2, 4\]"):
        save_checkpoint(tmp_path, step=2, model=net[0], optimizer=optimizer, state={}, keep=1)


# Crashes: in child processes, forked from one that has torch loaded already.


def run_script(script: str, *args: object) -> list:
    """Run `script` in a new process; its last line of output, read as JSON."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests/support'}"}
    done = warm.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True, text=True, timeout=240, env=env, cwd=root,
    )  # fmt: skip
    if done.returncode == NOT_ALLOWED:
        pytest.skip("this machine does not allow mounting a small filesystem")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


COMMON = """
import errno, json, os, random, shutil, signal, sys, time
from pathlib import Path
import torch, torch.distributed.checkpoint
from torch import nn
from rlkit.model.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
torch.set_num_threads(1)

def make(value, width=64):
    net = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
    for p in net.parameters():
        p.data.fill_(value)
        p.grad = torch.full_like(p, value)
    optimizer.step()
    return net, optimizer

def save(folder, step, keep=2, width=64):
    net, optimizer = make(float(step), width)
    save_checkpoint(folder, step=step, model=net, optimizer=optimizer, state={"step twice": 2 * step}, keep=keep)

def check(folder, width=64):
    '''Load the newest checkpoint; its step, after every number in it was compared with that step.'''
    path = latest_checkpoint(folder)
    if path is None:
        return None
    net, optimizer = make(-1.0, width)
    state = load_checkpoint(path, model=net, optimizer=optimizer)
    step = state["step"]
    truth, truth_optimizer = make(float(step), width)
    assert state["step twice"] == 2 * step
    for a, b in zip(net.parameters(), truth.parameters()):
        assert torch.equal(a, b), (path, step)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[a][key], truth_optimizer.state[b][key]), (path, key)
    return step
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, 15])
def test_killed_at_random_moments(tmp_path, kills):
    script = (
        COMMON
        + """
folder, kills = Path(sys.argv[1]), int(sys.argv[2])
for _ in range(2):
    began = time.perf_counter()
    save(folder.parent / "warm", 1)
one_save = time.perf_counter() - began
random.seed(0)
steps, progress = [], 0
while len(steps) < kills:
    child = os.fork()
    if child == 0:
        for step in range(progress + 1, progress + 1000):
            save(folder, step)
        os._exit(0)
    goal = progress + len(steps) % 3   # after none, one or two saves, and then somewhere inside the next
    while max((p.name for p in folder.glob("step_*")), default="") < f"step_{goal:08d}" * bool(goal):
        time.sleep(0.001)
    time.sleep(2 * one_save * random.random())
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    step = check(folder)
    assert (step or 0) >= progress, "a complete checkpoint was lost"
    progress = step or 0
    steps.append(progress)
save(folder, progress + 1)
print(json.dumps([steps, sorted(p.name for p in folder.iterdir())]))
"""
    )
    steps, names = run_script(script, tmp_path / "run", kills)
    assert len(steps) == kills
    assert steps[-1] >= kills, "the kills fell between several saves"
    assert names == [f"step_{steps[-1] + i:08d}" for i in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "keep"), [(1, 2, 1), (1, 1, 1)], ids=["next step", "same step again"])
def test_crash_before_each_single_file_operation(tmp_path, first, second, keep):
    """Not at random: the process dies just before its k-th change of the file system, for every k there is."""
    script = (
        COMMON
        + """
folder, first, second, keep = Path(sys.argv[1]), *map(int, sys.argv[2:])
save(folder / "first", first, keep)
events = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
found = []
for k in range(1000):
    target = folder / str(k)
    shutil.copytree(folder / "first", target)
    child = os.fork()
    if child == 0:
        seen = 0
        def hook(event, args):
            global seen
            writes = event != "open" or (isinstance(args[1], str) and ("w" in args[1] or "a" in args[1]))
            if event in events and writes:
                seen += 1
                if seen > k:
                    os._exit(9)
        sys.addaudithook(hook)
        save(target, second, keep)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    step = check(target)
    found.append(step)
    if code == 0:
        break
    assert code == 9
    if k % 8 == 0:
        save(target, second + 1, 1)
        assert check(target) == second + 1
        assert [p.name for p in target.iterdir()] == [f"step_{second + 1:08d}"]
    shutil.rmtree(target)
print(json.dumps(found))
"""
    )
    found = run_script(script, tmp_path, first, second, keep)
    assert len(found) > 12
    assert None not in found, "there was a complete checkpoint at every moment"
    assert found == sorted(found)
    assert (found[0], found[-1]) == (first, second)


FULL = (
    COMMON
    + """
from rlkit.model import checkpoint
from rlkit.model.weights import export_hf
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from small_disk import mount_small
folder, width = Path(sys.argv[1]) / "checkpoints", 360  # 130 k weights: 1.6 MB with AdamW
errors = []

def attempt(work):
    try:
        work()
    except OSError as error:
        errors.append([error.errno, str(error)])
    else:
        errors.append(None)

def filled(leave):
    '''Fill the disk up to `leave` bytes.'''
    room = os.statvfs(folder)
    (folder.parent / "filler").write_bytes(b"x" * (room.f_bavail * room.f_frsize - leave))
"""
)


def test_full_disk_keeps_the_old_checkpoint(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    script = (
        FULL
        + """
mount_small(folder.parent, "4m")
save(folder, 1, width=width)
filled(leave=1_000_000)
attempt(lambda: save(folder, 2, width=width))                    # foreseen
checkpoint._files.require_room = lambda *a, **k: None
attempt(lambda: save(folder, 2, width=width))                    # while writing
after = [check(folder, width), [p.name for p in folder.iterdir()]]
model, tokenizer = tiny_model(tiny_tokenizer()), tiny_tokenizer()
attempt(lambda: export_hf(model, tokenizer, folder.parent / "model"))
left = [p.name for p in folder.parent.iterdir()]
(folder.parent / "filler").unlink()
save(folder, 2, keep=1, width=width)
print(json.dumps([errors, after, left, check(folder, width)]))
"""
    )
    errors, after, left, then = run_script(script, mount)
    assert after == [1, ["step_00000001"]]
    assert sorted(left) == ["checkpoints", "filler"]
    assert then == 2
    for code, message in errors:
        assert code == 28
        assert "disk is full" in message
    for _, message in errors[:2]:
        assert "the checkpoint of step 2" in message
        assert re.search(r"it needs 1\.[67] MB, (1\.0|0\.9) MB are free", message)
        assert "Earlier checkpoints are untouched" in message
        assert str(mount / "checkpoints") in message
    assert "cannot save the model" in errors[2][1]


def test_file_size_limit_keeps_the_old_checkpoint(tmp_path):
    script = (
        FULL
        + """
import resource
save(folder, 1, width=width)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))
attempt(lambda: save(folder, 2, width=width))
after = [check(folder, width), [p.name for p in folder.iterdir()]]
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
save(folder, 2, width=width)
print(json.dumps([errors, after, check(folder, width)]))
"""
    )
    ((code, message),), after, then = run_script(script, tmp_path)
    assert code == 27
    assert "file size limit (ulimit -f)" in message
    assert (after, then) == ([1, ["step_00000001"]], 2)


def test_a_folder_that_the_nodes_do_not_share_is_refused(tmp_path, monkeypatch):
    """Each node would keep its own ranks' files, and no checkpoint could ever be loaded."""
    there = {"__8_0.distcp": {"size": 1, "crc32": 0}}
    monkeypatch.setattr(checkpoint, "on_all_ranks", lambda work, *, group=None: [work(), there])
    with pytest.raises(ValueError, match=r"rank 0 does not see __8_0\.distcp, which rank 1 wrote"):
        save_simple(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_the_random_state_of_a_gpu_is_skipped_on_a_cpu():
    states = checkpoint._random_states() | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    drawn = torch.rand(3)
    checkpoint._set_random_states(states)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(("nbytes", "is_cuda", "free", "room"), [
    (5, False, 6.0, True), (5, True, 6.0, False), (5, True, 9.0, True), (4, True, 5.0, True), (0, True, 1.0, True),
])  # fmt: skip
def test_a_copy_from_a_gpu_needs_room_for_what_torch_pins(monkeypatch, nbytes, is_cuda, free, room):
    """Pinned memory comes in powers of two, and a host that runs out of memory kills the run."""
    monkeypatch.setattr(checkpoint, "_free_memory", lambda: free)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert checkpoint._has_room({"x": SimpleNamespace(nbytes=nbytes, is_cuda=is_cuda)}) == room


def test_a_save_without_a_copy_is_on_the_disk_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "copied", None)
    net = nn.Linear(4, 4)
    with checkpoint.BackgroundSaver(tmp_path, keep=1) as saver:
        saver.save(step=3, model=net, optimizer=None, state={}, copy=False)
        before = copy.deepcopy(net.state_dict())
        with torch.no_grad():
            net.weight.zero_()
        load_checkpoint(latest_checkpoint(tmp_path), model=net, optimizer=None)
    assert same(net.state_dict(), before)


def test_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    save_simple(tmp_path, 1)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_simple(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


RANKS = """
import copy, os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from datetime import timedelta
from pathlib import Path
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from rlkit.model import checkpoint
from rlkit.model.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

def make(seed, shard):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    if shard:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)

def step(net, optimizer):
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x

def work(rank, world, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=60))
    net, optimizer = make(0, True)
    for _ in range(2):
        step(net, optimizer)
    torch.manual_seed(100 + rank)
    path = save_checkpoint(folder / "c", step=2, model=net, optimizer=optimizer, state={"x": 1.5}, keep=1)
    draws, losses = torch.rand(2), [step(net, optimizer) for _ in range(2)]

    other, other_optimizer = make(1, True)
    state = load_checkpoint(latest_checkpoint(folder / "c"), model=other, optimizer=other_optimizer)
    assert state == {"x": 1.5, "step": 2}
    assert torch.equal(torch.rand(2), draws), "each rank has its own random state back"
    assert [step(other, other_optimizer) for _ in range(2)] == losses
    for a, b in zip(net.parameters(), other.parameters()):
        assert torch.equal(a.to_local(), b.to_local())
    torch.save([losses, [whole(p.detach()) for p in net.parameters()]], folder / f"after_{rank}.pt")

    real = checkpoint._write_files
    checkpoint._write_files = lambda *a: (_ for _ in ()).throw(OSError(28, "full")) if rank == 1 else real(*a)
    try:
        save_checkpoint(folder / "c", step=3, model=net, optimizer=optimizer, state={}, keep=1)
    except OSError as error:
        assert error.errno == 28 and "the checkpoint of step 3" in str(error)
    else:
        raise AssertionError("a failure on rank 1 must be raised on every rank")
    dist.barrier()
    assert [p.name for p in (folder / "c").iterdir()] == ["step_00000002"]
    dist.destroy_process_group()
    os._exit(0)
"""


@pytest.mark.slow
def test_two_ranks_save_and_one_loads(tmp_path):
    """FSDP2 on two gloo ranks: bitwise on the same layout, resharded to one process, a failing rank stops both."""
    script = (
        RANKS
        + """
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                work(rank, 2, folder)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0], codes
    net, optimizer = make(3, False)
    load_checkpoint(folder / "c" / "step_00000002", model=net, optimizer=optimizer)
    losses = [step(net, optimizer) for _ in range(2)]
    theirs, weights = torch.load(folder / "after_0.pt")
    gap = max((a - b).abs().max().item() for a, b in zip(net.parameters(), weights))
    print([list(losses), list(theirs), gap])
"""
    )
    losses, theirs, gap = run_script(script, tmp_path)
    assert losses == pytest.approx(theirs, rel=1e-6)
    assert gap < 1e-6


def test_export_loads_with_transformers(tmp_path, capfd):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64, seed=3)
    chat = [{"role": "user", "content": "394215"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    logits = model(input_ids=torch.tensor([ids])).logits
    capfd.readouterr()
    path = export_hf(prepare_model(model), tokenizer, tmp_path / "model")
    assert capfd.readouterr() == ("", ""), "no progress bars of other libraries in a run's output"
    assert (path / "model.safetensors").exists()
    assert "rlkit" not in (path / "config.json").read_text()
    loaded, loaded_tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert loaded_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == ids
    assert torch.equal(loaded(input_ids=torch.tensor([ids])).logits, logits)
    assert (loaded_tokenizer.eos_token_id, loaded_tokenizer.pad_token_id) == (258, 256)

    nn.init.zeros_(model.model.norm.weight)
    assert export_hf(model, tokenizer, path, dtype=torch.bfloat16) == path, "an earlier export is replaced"
    again = AutoModelForCausalLM.from_pretrained(path)
    assert again.dtype == torch.bfloat16
    assert not again.model.norm.weight.any()
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.bfloat16())
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_export_refuses_a_folder_with_other_things(tmp_path):
    (tmp_path / "thesis.tex").write_text("irreplaceable")
    tokenizer = tiny_tokenizer()
    with pytest.raises(FileExistsError, match="not a Hugging Face model folder"):
        export_hf(tiny_model(tokenizer), tokenizer, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "irreplaceable"
