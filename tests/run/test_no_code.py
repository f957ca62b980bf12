"""No file of a run folder, checkpoint or model folder runs code, and each that tries is refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import sys
import tarfile
import zlib
from io import BytesIO
from pathlib import Path

import pytest
import torch
import warm
from torch.distributed.checkpoint import filesystem, metadata

sys.path.append(str(Path(__file__).parents[1] / "terminal"))
from screen import Terminal

ROOT = Path(__file__).parents[2]
OLD = Path(__file__).parent / "old" / "runs_0.1.0.tar.xz"  # written by commit 15f3383: model, data, sft, grpo
SFT = [
    "sft", "--model", "model", "--data", "data.jsonl", "--output", "sft", "--steps", "3", "--batch-size", "2",
    "--resume",
]  # fmt: skip
GRPO = [
    "grpo", "--model", "model", "--data", "prompts.jsonl", "--reward", "reward.py:score", "--output", "grpo",
    "--steps", "3", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4", "--kl-coef", "0.1",
    "--ref-sync-steps", "1", "--resume",
]  # fmt: skip
CHAT = ["chat", "sft", "--prompt", "hi", "--temperature", "0", "--max-new-tokens", "4"]


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def folder(tmp_path):
    with tarfile.open(OLD) as saved:
        saved.extractall(tmp_path, filter="data")
    return tmp_path


def rlkit(folder, command):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    start = [sys.executable, "-m", "rlkit.scripts"]
    return warm.run(
        [*start, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=280, plots=command[0] == "plot"
    )


def refused(folder, command, *named):
    """The error, after the command ended with it, in one line that names the file, and without running the payload."""
    done = rlkit(folder, command)
    assert not (folder / "mark").exists(), f"{command[0]} ran the payload"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert len(errors) == 1
    assert done.stderr.rstrip().endswith(errors[0]), "the error is one line, the last"
    for name in named:
        assert name in errors[0]
    return errors[0]


def saved(value):
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def plant(folder, files):
    """Write files into the checkpoint of both runs, with the size and checksum that the manifest should have."""
    for run in ("sft", "grpo"):
        path = folder / run / "checkpoints" / "step_00000002"
        manifest = json.loads((path / "manifest.json").read_text())
        for name, make in files.items():
            data = make(path)
            (path / name).write_bytes(data)
            manifest["files"][name] = {"size": len(data), "crc32": zlib.crc32(data)}
        (path / "manifest.json").write_text(json.dumps(manifest))


def table(path):
    return pickle.loads((path / ".metadata").read_bytes())


def nested(where):
    """A table of tensors with the payload inside an object that is allowed."""

    def make(path, mark):
        found = table(path)
        name, entry = next(iter(found.state_dict_metadata.items()))
        if where == "planner":
            vars(found)["planner_data"] = {"a": [Payload(mark)]}
        elif where == "property":
            entry.properties.requires_grad = Payload(mark)
        elif where == "place":
            found.storage_data[metadata.MetadataIndex(name)] = filesystem._StorageInfo(Payload(mark), 0, 1)
        elif where == "key":
            found.state_dict_metadata[metadata.MetadataIndex(Payload(mark))] = entry
        elif where == "getattr":
            return b"cbuiltins\ngetattr\n(cbuiltins\n__import__\nVsystem\ntR."
        return pickle.dumps(found)

    return make


def test_runs_of_the_first_format_go_on_and_answer(folder):
    answer = rlkit(folder, CHAT)
    assert (answer.returncode, answer.stdout.endswith("\n")) == (0, True), answer.stderr
    for command in (SFT, GRPO):
        done = rlkit(folder, command)
        assert done.returncode == 0, done.stderr
        lines = (folder / command[0] / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines][-3:] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["whole", "planner", "property", "place", "key", "getattr"])
def test_the_table_of_tensors_runs_nothing(folder, where):
    def make(path):
        mark = folder / "mark"
        return pickle.dumps(Payload(mark)) if where == "whole" else nested(where)(path, mark)

    plant(folder, {".metadata": make})
    asked = "builtins.__import__" if where == "getattr" else f"{os.name}.mkdir"
    for command in (SFT, GRPO, CHAT):
        refused(folder, command, "step_00000002/.metadata", f"it asks for {asked}, and rlkit runs no code of a file")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "bytes"])
def test_the_tensors_run_nothing(folder, kind):
    """torch reads what its table calls bytes with weights_only=False."""
    data = saved(Payload(folder / "mark"))

    def make(path):
        found = table(path)
        name = next(name for name in found.state_dict_metadata if name.startswith("model/"))
        for index, place in list(found.storage_data.items()):
            place.offset, place.length = 0, len(data)
            if kind == "bytes" and index.fqn == name:
                found.state_dict_metadata[name] = metadata.BytesStorageMetadata()
                del found.storage_data[index]
                found.storage_data[metadata.MetadataIndex(name)] = place
        return pickle.dumps(found)

    plant(folder, {".metadata": make, "__0_0.distcp": lambda _: data})
    for command in (SFT, GRPO, CHAT):
        refused(folder, command, "__0_0.distcp" if kind == "tensor" else "BytesStorageMetadata", "runs no code")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state.pt", "rank_00000.pt"])
@pytest.mark.parametrize("make", [saved, pickle.dumps])
def test_the_state_runs_nothing(folder, name, make):
    plant(folder, {name: lambda _: make({"format": 2, "state": {"stream": [Payload(folder / "mark")]}})})
    for command in (SFT, GRPO, *([CHAT] if name == "state.pt" else [])):
        refused(folder, command, f"step_00000002/{name}")


@pytest.mark.slow
def test_a_state_of_other_values_is_one_line(folder):
    plant(folder, {"rank_00000.pt": lambda _: saved({"torch": 5})})
    refused(folder, SFT, "rank_00000.pt", "ByteTensor")
    plant(folder, {"state.pt": lambda _: saved([1])})
    refused(folder, SFT, "state.pt", "no `state`")


MODEL = [["chat", "model", "--prompt", "hi"], [*SFT[:-1], "--output", "new"]]


@pytest.mark.slow_cases("model/config.json-commands3", "sft/args.json-commands0")
@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("sft/args.json", [CHAT, SFT]),
        ("sft/metrics.jsonl", [["plot", "sft"]]),
        ("data.jsonl", [[*SFT[:-1], "--output", "new"]]),
        ("model/config.json", MODEL),
        *(
            pytest.param(f"model/{name}.json", MODEL, marks=pytest.mark.slow)
            for name in ("tokenizer", "tokenizer_config", "generation_config")
        ),
    ],
)
def test_text_files_are_never_unpickled(folder, name, commands):
    data = pickle.dumps(Payload(folder / "mark")) + b"\n{}\n"
    (folder / name).write_bytes(data)
    for command in commands:
        refused(folder, command, name.replace("sft/metrics", "metrics"))


@pytest.mark.slow
def test_what_a_run_leaves_besides_is_never_unpickled(folder):
    """Samples, pictures and the journal of completions: not read, or not used."""
    names = ("sft/metrics.png", "sft/trajectories/train_000002.jsonl", "grpo/completions/2.jsonl")
    for name in (*names, "sft/adapter/adapter_model.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(pickle.dumps(Payload(folder / "mark")))
    for command in (SFT, GRPO, CHAT, ["plot", "sft"]):
        rlkit(folder, command)
        assert not (folder / "mark").exists(), command[0]


@pytest.mark.slow
@pytest.mark.parametrize("indexed", [False, True])
def test_weights_in_a_pickle_run_nothing(folder, indexed):
    (folder / "model/model.safetensors").unlink()
    name = "part.bin" if indexed else "pytorch_model.bin"
    (folder / "model" / name).write_bytes(saved({"lm_head.weight": Payload(folder / "mark")}))
    if indexed:
        index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
        (folder / "model/pytorch_model.bin.index.json").write_text(json.dumps(index))
    for command in MODEL:
        refused(folder, command, "model 'model'", name, f"it asks for {os.name}.mkdir, and rlkit runs no code")


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def bring_code(folder):
    """A model type of its own, with its Python beside it."""
    code = f"import os\nos.mkdir({str(folder / 'mark')!r})\nfrom transformers import Qwen3Config as C\n"
    (folder / "model/own.py").write_text(code)


@pytest.mark.slow_cases("tokenizer")
@pytest.mark.parametrize("own", ["config", "tokenizer"])
def test_a_model_in_python_is_refused_without_a_question(folder, own):
    bring_code(folder)
    change(folder / "model/config.json", model_type="own", auto_map={"AutoConfig": "own.C"})
    if own == "tokenizer":
        change(folder / "model/tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": ["own.T", None]})
    chat = [sys.executable, "-m", "rlkit.scripts", "chat", folder / "model", "--prompt", "hi"]
    terminal = Terminal(chat, columns=300)
    terminal.wait_for("error: ", seconds=90)
    assert terminal.process.wait(60) == 2
    text = "\n".join(terminal.lines)
    assert "y/N" not in text
    assert f"model '{folder / 'model'}' has a " in text
    assert "in Python (auto_map), and rlkit runs no code of a model folder" in text
    assert not (folder / "mark").exists()


@pytest.mark.slow
def test_code_beside_a_model_that_transformers_has_is_named_and_not_run(folder):
    bring_code(folder)
    change(folder / "model/config.json", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    done = rlkit(folder, MODEL[0])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("'model' has a model in Python (auto_map), which is not run") == 1
    assert not (folder / "mark").exists()


@pytest.mark.slow
def test_a_kernel_of_the_hub_and_an_adapter_are_refused(folder):
    """With the package `kernels`, transformers would download the first and run it."""
    change(folder / "model/config.json", attn_implementation="someone/kernel")
    for command in MODEL:
        refused(folder, command, "model 'model'", "'someone/kernel'", "no code of the hub")
    change(folder / "model/config.json", attn_implementation=None)
    (folder / "model/adapter_config.json").write_text("{}")
    for command in MODEL:
        refused(folder, command, "model 'model'", "adapter_config.json")


def test_a_template_reaches_no_python(folder):
    (folder / "model/chat_template.jinja").write_text("{{ cycler.__init__.__globals__.os.mkdir('mark') }}")
    for command in MODEL:
        refused(folder, command, "cannot be rendered", "SecurityError")


@pytest.mark.slow
def test_a_reference_that_moves_or_another_script_is_the_named_reason(folder):
    """--ref-sync-steps 0 was reported as another optimizer; a checkpoint of dpo went on in sft without a word."""
    flags = [*GRPO, "--ref-sync-steps", "0"]
    error = refused(folder, flags, "step_00000002 was written with a reference model that moves")
    assert "--ref-sync-steps above 0" in error
    assert "optimizer" not in error
    path = folder / "sft" / "checkpoints" / "step_00000002" / "state.pt"
    state = torch.load(path, weights_only=True)
    state["state"]["script"] = "dpo.py"
    plant(folder, {"state.pt": lambda _: saved(state)})
    refused(folder, SFT, "sft: its checkpoint of step 2 is of a run of dpo.py, not sft.py")


@pytest.mark.slow
def test_a_checkpoint_names_the_script_that_wrote_it(folder):
    assert rlkit(folder, SFT).returncode == 0
    state = torch.load(folder / "sft/checkpoints/step_00000003/state.pt", weights_only=True)
    assert state["state"]["script"] == "sft.py"


@pytest.mark.slow
def test_a_checkpoint_that_was_moved_in_from_another_run_is_named(folder):
    new = [word for word in SFT if word != "--resume"]
    first, second = ([*new[:6], name, "--steps", "1", *new[9:]] for name in ("a", "b"))
    assert rlkit(folder, first).returncode == rlkit(folder, second).returncode == 0
    own = rlkit(folder, [*first, "--resume"])
    assert own.returncode == 0
    assert "another run" not in own.stdout
    (folder / "a" / "checkpoints").rename(folder / "a_checkpoints")
    (folder / "b" / "checkpoints").rename(folder / "a" / "checkpoints")
    moved = rlkit(folder, [*first, "--resume"])
    assert moved.returncode == 0, moved.stderr
    assert "the checkpoint of step 1 was written by another run, and is now part of this one\n" in moved.stdout
