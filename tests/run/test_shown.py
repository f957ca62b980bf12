"""What a model, a file or a URL brings to a terminal, and what a run folder keeps of it."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest
import screens
import torch
from safetensors.torch import load_file, save_file

from rlkit.rollout.engines.http import ReplicaError
from rlkit.run.folder import keep_args, open_run, read_args
from rlkit.run.samples import table

sys.path.append(str(Path(__file__).parents[1] / "terminal"))
from screen import Terminal

OLD = Path(__file__).parent / "old" / "runs_0.1.0.tar.xz"


@pytest.fixture
def folder(tmp_path):
    with tarfile.open(OLD) as saved:
        saved.extractall(tmp_path, filter="data")
    return tmp_path


def chat(folder, *flags):
    start = [sys.executable, "-m", "rlkit.scripts", "chat", folder, "--prompt", "hi", *flags]
    terminal = Terminal(start, columns=200)
    code = terminal.process.wait(120)
    terminal.wait_for(r"\S", seconds=5)
    return code, terminal


def test_control_characters_of_a_model_are_shown_and_not_obeyed(folder):
    """A model whose every token is ESC: the terminal gets its escape."""
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights = {name: torch.zeros_like(x) if "layernorm" in name or "norm" in name else x for name, x in weights.items()}
    save_file(weights, path, metadata={"format": "pt"})
    tokenizer = folder / "model" / "tokenizer.json"
    found = json.loads(tokenizer.read_text())
    vocab = found["model"]["vocab"]
    first, escape = next(t for t, i in vocab.items() if i == 0), next(t for t, i in vocab.items() if i == 27)
    vocab[first], vocab[escape] = 27, 0  # with logits of 0 the first token is the likeliest
    tokenizer.write_text(json.dumps(found))
    code, terminal = chat(folder / "model", "--temperature", "0", "--max-new-tokens", "3")
    assert code == 0, terminal.lines[:30]
    assert rb"\x1b\x1b\x1b" in terminal.raw
    assert b"\x1b\x1b" not in terminal.raw


@pytest.mark.slow_cases("[1]", "text4", "{", '{"stop": 5}', '{"stop_token_ids": ["a"]}')
@pytest.mark.parametrize("text", ['{"stop": 5}', "[1]", "null", '{"stop_token_ids": ["a"]}', "[" * 100_000, "{"])
def test_a_damaged_args_json_is_named(folder, text):
    (folder / "sft" / "args.json").write_text(text)
    code, terminal = chat(folder / "sft")
    assert code == 2
    shown = "".join(terminal.lines)
    assert f"error: {folder / 'sft' / 'args.json'} is damaged" in shown
    assert "Traceback" not in shown


def test_passwords_are_in_no_file_and_no_message(tmp_path, capsys):
    flags = {
        "engine_urls": ("http://me:SECRET@host:1", "http://TOKEN@host"),
        "data": "x",
        "judge": {"a": "h://u:SECRET@x"},
    }
    keep_args(tmp_path, flags, script="grpo.py", resume=False)
    text = (tmp_path / "args.json").read_text()
    assert '"http://me:***@host:1"' in text
    assert "SECRET" not in text
    assert "TOKEN" not in text
    keep_args(tmp_path, flags, script="grpo.py", resume=True)
    assert capsys.readouterr().out == "", "the same flags"
    (tmp_path / "args.json").write_text(text.replace("***", "SECRET"))  # as version 0.1.0 wrote it
    assert "SECRET" not in str(read_args(tmp_path))
    keep_args(tmp_path, flags, script="grpo.py", resume=True)
    with open_run(tmp_path, steps=1, start=-1, resume=True):
        pass
    assert "SECRET" not in (tmp_path / "args.json").read_text() + capsys.readouterr().out
    assert (
        str(ReplicaError("http://me:SECRET@host:1/generate: status 500")) == "http://me:***@host:1/generate: status 500"
    )


def test_a_sample_table_has_no_control_characters():
    row = {"step": 1, "group": 0, "gold": "\x9b1m", "rewards": {}, "reward": 1.0, "advantage": None}
    lines = "\n".join(table([row | {"completion": "\x1b]0;x\x07\u202e\x85"}], question="\x7f", width=120))
    assert r'"\u001b]0;x\u0007\u202e\x85"' in lines
    assert r'"\x7f"   gold: "\x9b1m"' in lines


RAISES = r"""
from rlkit.scripts.cli import on_ranks
def main():
    raise KeyError("\x1b]0;of a model\x07 at http://me:SECRET@host")
on_ranks(main)
"""

RAISES_ELSEWHERE = r"""
import asyncio, threading
from dataclasses import dataclass
from rlkit.scripts.cli import run
@dataclass(frozen=True)
class Args:
    pass
def fail(where):
    raise KeyError(f"\x1b]0;of a {where}\x07 at http://me:SECRET@host")
async def task():
    asyncio.get_running_loop().call_soon(fail, "callback")
    await asyncio.sleep(0.01)
def main(args):
    thread = threading.Thread(target=fail, args=("thread",), name="mine")
    thread.start()
    thread.join()
    asyncio.run(task())
run(main, Args, None, argv=[])
"""


def test_errors_of_threads_and_callbacks_have_no_control_characters_and_no_passwords():
    code, out, err = screens.run([sys.executable, "-c", RAISES_ELSEWHERE], "pipe")
    assert code == 0, out + err
    for where in ("thread", "callback"):
        assert rf"]0;of a {where}\x07 at http://me:***@host" in err
    assert "in thread mine" in err
    assert "\x1b" not in err
    assert "SECRET" not in out + err


@pytest.mark.slow_cases("terminal")
@pytest.mark.parametrize("where", ["terminal", "pipe"])
def test_a_traceback_has_no_control_characters_and_no_passwords(where):
    code, out, err = screens.run([sys.executable, "-c", RAISES], where)
    assert code == 1
    assert "Traceback (most recent call last):" in out + err
    assert r"]0;of a model\x07 at http://me:***@host" in out + err
    assert "\x1b" not in err
    assert "SECRET" not in out + err
