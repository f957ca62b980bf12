"""`rlkit plan`: a table of at most 80 columns, flags that `rlkit grpo` takes, and one line where nothing fits."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import screens

from rlkit.scripts import cli, grpo

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 25600, "vocab_size": 151936,
    "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = QWEN3 | {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    return str(tmp_path)


def rows(shown: str) -> dict[str, list[str]]:
    """The cells of each layout."""
    lines = [line for line in shown.splitlines() if line.startswith("shard ")]
    return {line[:26].strip(): line[26:].split() for line in lines}


def test_what_fits_and_the_flags_for_it(model, capsys):
    cli.main(["plan", "--model", model, "--nodes", "2"])
    shown = capsys.readouterr().out
    what = "32.8 B parameters on 2 x 8 GPUs of 80 GiB, 32,768 positions, 16,384 tokens. GiB per GPU"
    assert shown.startswith(f"{model}: {what}")
    assert all(len(line) <= 80 for line in shown.splitlines()[1:] if model not in line)
    found = rows(shown)
    assert found["shard 16"][4] == "no"
    assert found["shard 16 ckpt"][4:6] == ["yes", "0"]
    kept = float(found["shard 16 zero-2"][1]) - float(found["shard 16"][1])
    assert kept == pytest.approx(62 * 2 * 487e6 / 2**30, rel=0.01)  # all but two of the layers, in bf16
    assert float(found["shard 16 ckpt"][0]) == pytest.approx(16 * 32.76e9 / 16 / 2**30, abs=0.05)
    assert float(found["shard 8 tp 2 ckpt"][3]) < float(found["shard 16 ckpt"][3])
    start, given, moved = command(shown)
    assert start == ["torchrun", "--nnodes", "2", "...", "--nproc-per-node", "8"]
    # of 64 layers and the embedding twice, and of the root; bf16 weights of all but a sixteenth, and fp32 gradients
    once = 15 / 16 * 2 * 32.76e9 / 2**30
    assert [x[:2] for x in moved] == [("131", "all-gathers"), ("66", "reduce-scatters")]
    assert [float(x[2]) for x in moved] == pytest.approx([2 * once - 1.36, 2 * once], rel=0.005)
    assert given.model.parallel.activation_checkpointing
    assert given.model.parallel.tp == 1
    assert given.engine.engine_release
    assert given.engine.engine_tp == 2
    assert 0.3 < given.engine.engine_memory < 0.9


def command(shown: str):
    """The start and the flags of the printed command, and count, kind and GiB of each collective."""
    start, rest = shown[shown.index("torchrun") :].replace("\\\n", " ").split("-m rlkit.scripts.grpo")
    flags, said = rest.split("\n\n")
    moved = re.findall(r"(\d+) ([\w-]+) +(\S+) GiB", said)
    return shlex.split(start), cli.parsed(shlex.split(flags), grpo.Args), moved


def test_stages_are_a_layout_like_the_others(model, tmp_path, capsys):
    """The first that fits where tensor parallelism cannot cut the heads, and the gathered head is in the way."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"num_key_value_heads": 1}))
    cli.main(["plan", "--model", model, "--nodes", "4", "--gpu-memory", "27.5", "--max-tokens", "256"])
    shown = capsys.readouterr().out
    found = rows(shown)
    assert [found[f"shard {32 // n} pp {n} ckpt"][4] for n in (2, 4, 8)] == ["yes", "yes", "no"]
    assert found["shard 32 ckpt"][4] == "no"
    assert float(found["shard 16 pp 2 ckpt"][0]) == pytest.approx(16 * 16.6e9 / 16 / 2**30, rel=0.01)  # 33 layers of 64
    _, given, moved = command(shown)
    assert given.model.parallel.pp == 2
    assert "a GPU of stage 1 of 2 receives" in shown
    assert moved == [("68", "all-gathers", "57.9"), ("34", "reduce-scatters", "57.9"), ("1", "send", "0.00244")]


def test_a_small_model_keeps_its_engine_beside_training(model, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    cli.main(["plan", "--model", model, "--gpus", "1", "--gpu-memory", "48", "--max-tokens", "4096"])
    shown = capsys.readouterr().out
    found = rows(shown)
    assert list(found) == ["shard 1", "shard 1 ckpt", "shard 1 ckpt offload"]
    assert found["shard 1"][4] == "yes"
    assert "--engine-release" not in shown[shown.index("torchrun") :]
    assert "--parallel" not in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "1", "--gpu-memory", "16"], "error: no layout fits: take more GPUs, a smaller --max-tokens, or"),
        (["--gpus", "0"], "error: --gpus must be at least 1, got 0"),
        (["--gpu", "4"], "error: --gpu is no flag: perhaps --gpus"),
    ],
)
def test_one_line_for_what_cannot_be(model, flags, message):
    assert screens.refused(cli.main, ["plan", "--model", model, *flags]).startswith(message)


def test_a_model_that_is_not_covered_over_ranks_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    said = screens.refused(cli.main, ["plan", "--model", str(tmp_path)])
    assert said.startswith("error: model type 'gpt2' is not covered by tp, cp, pp and ep, only")
