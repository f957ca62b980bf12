"""Exports in programs of others: lm-eval's log-probs, and the GGUF files of llama.cpp's converters.

lm-eval and gguf come from the package index (`make test-exports`); RLKIT_LLAMA_CPP is a clone of llama.cpp.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlkit import load_model
from rlkit.data.tiny import tiny_vision_model
from rlkit.model.lora import add_lora, save_adapter
from rlkit.model.pretrained import load_tokenizer
from rlkit.model.weights import export_hf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROWS = [{"question": "2+3=", "label": 0}, {"question": "The capital of France is", "label": 1}]
CHOICES = ["5", "Paris"]
TASK = """task: two
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: {choices}
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
SIZE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS = {"llama": {"tie_word_embeddings": True}, "qwen3": {}, "qwen3_moe": EXPERTS}
Make = Callable[..., tuple[Any, Path, Path]]


@pytest.fixture(scope="module")
def make(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`make(kind, lora=False)`: a random model of two layers with changed weights or an adapter, its export, its
    adapter's folder. The tokenizer is SmolLM2's: llama.cpp refuses those that it does not know."""
    tokenizer = AutoTokenizer.from_pretrained(smollm)

    def made(kind: str, *, lora: bool = False, targets: Any = "all-linear") -> tuple[Any, Path, Path]:
        folder = tmp_path_factory.mktemp(kind)
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **SIZE, **ends, **KINDS[kind])
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
        model = load_model(folder / "base")
        if lora:
            add_lora(model, rank=4, targets=targets)
        with torch.no_grad():
            for weight in (w for w in model.parameters() if w.requires_grad):
                weight += 0.05 * torch.randn_like(weight)
        export_hf(model, tokenizer, folder / "export")
        return model, folder / "export", save_adapter(model, folder / "adapter") if lora else folder

    return made


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    model.set_attn_implementation("sdpa")  # rlkit's is for packs
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama", None),
        *((kind, form) for kind in ("qwen3", "qwen3_moe") for form in ("merged", "adapter")),
    ],
)
def test_lm_eval_has_the_log_probs_of_the_trained_model(
    make: Make, kind: str, lora: str | None, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="without lm-eval: `make test-exports` installs it")
    model, export, adapter = make(kind, lora=lora is not None)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "two.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl", choices=json.dumps(CHOICES)))
    read = f"pretrained={adapter.parent / 'base'},peft={adapter}" if lora == "adapter" else f"pretrained={export}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    line = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"{read},dtype=float32"]
    line += ["--tasks", "two", "--include_path", str(tmp_path), "--device", "cpu", "--log_samples"]
    subprocess.run([*line, "--output_path", str(tmp_path / "out")], check=True, env=os.environ | offline)
    (samples,) = (tmp_path / "out").rglob("samples_two_*.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(export)
    for sample in map(json.loads, samples.read_text().splitlines()):
        for asked, (told,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            ids, start = tokenizer.encode(asked["arg_0"] + asked["arg_1"]), len(tokenizer.encode(asked["arg_0"]))
            logp = logits_of(model, ids)[start - 1 : -1].log_softmax(-1)
            expected = logp.gather(1, torch.tensor(ids[start:])[:, None]).sum()
            assert float(told[0]) == pytest.approx(expected.item(), abs=1e-3)


def convert(script: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a converter of llama.cpp."""
    if not (folder := os.environ.get("RLKIT_LLAMA_CPP")):
        pytest.skip("without llama.cpp: RLKIT_LLAMA_CPP names a clone of it")
    pytest.importorskip("sentencepiece", reason="without sentencepiece: `make test-exports` installs it")
    line = [sys.executable, str(Path(folder) / script), *map(str, words), "--outtype", "f32"]
    return subprocess.run(line, text=True, capture_output=True)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    gguf = pytest.importorskip("gguf", reason="without gguf: `make test-exports` installs it")
    return {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize(
    ("kind", "lora"), [("llama", False), ("qwen3", True), ("qwen3_moe", False), ("qwen3_moe", True)]
)
def test_transformers_reads_the_gguf_file_of_an_export_as_the_trained_model(make: Make, kind: str, lora: bool) -> None:
    model, export, _ = make(kind, lora=lora)
    found = convert("convert_hf_to_gguf.py", export, "--outfile", export / "model.gguf")
    assert found.returncode == 0, found.stderr
    config = AutoConfig.from_pretrained(export)  # transformers does not read all sizes from a GGUF file
    read = AutoModelForCausalLM.from_pretrained(export, gguf_file="model.gguf", config=config, dtype=torch.float32)
    ids = [5, 77, 900, 1234, 42, 7]
    torch.testing.assert_close(logits_of(read, ids), logits_of(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "targets"), [("qwen3", "all-linear"), ("qwen3_moe", ["q_proj", "v_proj"])])
def test_an_adapter_becomes_a_gguf_file(make: Make, kind: str, targets: Any) -> None:
    _, _, adapter = make(kind, lora=True, targets=targets)
    path = adapter / "adapter.gguf"
    found = convert("convert_lora_to_gguf.py", "--base", adapter.parent / "base", "--outfile", path, adapter)
    assert found.returncode == 0, found.stderr
    saved, read = load_file(adapter / "adapter_model.safetensors"), tensors_of(path)
    assert len(read) == len(saved)
    for name in ("q_proj", "v_proj"):
        for part in "ab":
            layer = f"base_model.model.model.layers.1.self_attn.{name}.lora_{part.upper()}.weight"
            torch.testing.assert_close(read[f"blk.1.attn_{name[0]}.weight.lora_{part}"], saved[layer])


def test_an_adapter_of_fused_experts_is_refused_by_the_converter(make: Make) -> None:
    """docs/models.md says so: the merged export is what llama.cpp gets."""
    _, _, adapter = make("qwen3_moe", lora=True)
    words = ("--base", adapter.parent / "base", "--outfile", adapter / "adapter.gguf", adapter)
    assert "Unprocessed experts" in convert("convert_lora_to_gguf.py", *words).stderr


def test_the_tower_of_a_vision_model_becomes_a_gguf_file(tmp_path: Path) -> None:
    tiny_vision_model(tmp_path / "base")
    export = export_hf(load_model(tmp_path / "base"), load_tokenizer(tmp_path / "base"), tmp_path / "export")
    found = convert("convert_hf_to_gguf.py", export, "--mmproj", "--outfile", tmp_path / "mmproj.gguf")
    assert found.returncode == 0, found.stderr
    saved, read = load_file(export / "model.safetensors"), tensors_of(tmp_path / "mmproj.gguf")
    (name,) = (name for name in saved if name.endswith("blocks.0.attn.qkv.weight"))
    torch.testing.assert_close(read["v.blk.0.attn_qkv.weight"], saved[name])
