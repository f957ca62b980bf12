"""What a script does with a model, a micro-batch and a GPU that do not fit together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

from rlkit.scripts.cli import on_ranks, parsed
from rlkit.scripts.grpo import Args
from rlkit.scripts.start import Place, within_memory

GIB = 1 << 30


@pytest.fixture
def place(tmp_path):
    """0.6 B weights: 8.9 GiB of states, 1.1 for the copy that computes, 1.1 for the engine's."""
    sizes = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, vocab_size=151_936, tie_word_embeddings=True, **sizes
    )
    config.save_pretrained(tmp_path)
    flags = ["--model", str(tmp_path), "--data", str(tmp_path / "x.jsonl"), "--reward", "x.py:f"]
    args = parsed([*flags, "--output", str(tmp_path / "run")], Args)
    return Place(args.model, args.lora, args.optim, True, None, {args.model.model: config})


@pytest.mark.parametrize(
    ("gib", "checkpointing", "tokens", "line"),
    [
        (140, False, 16_384, ""),
        (40, True, 16_384, "memory: 0.6 B parameters on 40 GiB: activation checkpointing is on\n"),
        (15, True, 8192, "activation checkpointing is on, --max-tokens is 8192 instead of 16384\n"),
    ],
)
def test_the_flags_follow_the_memory(place, capsys, gib, checkpointing, tokens, line):
    fitted = within_memory(place, gib * GIB, samples=True)
    assert fitted.model.parallel.activation_checkpointing is checkpointing
    assert fitted.optim.max_tokens == tokens
    assert capsys.readouterr().out.endswith(line)
    rest = replace(fitted, optim=place.optim, model=place.model)
    assert rest == place


def test_a_training_that_no_micro_batch_saves_is_refused(place):
    with pytest.raises(
        ValueError, match=r"all weights of 0\.6 B parameters on 8 GiB does not fit: give `lora_rank` 32"
    ):
        within_memory(place, 8 * GIB, samples=True)


def test_running_out_of_memory_names_the_flags(capsys):
    def script(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    with pytest.raises(SystemExit) as stopped:
        on_ranks(script, None)
    assert stopped.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("error: CUDA out of memory: lower --max-tokens (of a micro-batch)")
    assert "--parallel.activation-checkpointing" in said


def test_a_sequence_that_fits_no_micro_batch_is_told(capsys):
    def script(_):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        error.add_note("the micro-batch was one sequence of 5000 tokens: no --max-tokens makes it smaller")
        raise error

    with pytest.raises(SystemExit):
        on_ranks(script, None)
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("the micro-batch was one sequence of 5000 tokens: no --max-tokens makes it smaller")
