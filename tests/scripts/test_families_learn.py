"""A hybrid, a mixture of experts and latent attention learn a task by `rlkit grpo`, resume bit for bit, and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlkit.data.tiny import tiny_tokenizer
from rlkit.model.forward import compute_log_probs, load_model, make_policy
from rlkit.packing import pack
from rlkit.scripts import cli
from rlkit.types import Trajectory

pytestmark = pytest.mark.slow
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "layers_block_type": ["mamba", "mlp", "mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 16, "n_groups": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, **EXPERTS,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA, "nemotron_h": MAMBA, "qwen3_moe": {"num_experts": 8, **EXPERTS}, "deepseek_v3": LATENT,
}  # fmt: skip


def make_model(folder: Path, model_type: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(model_type, **{**SIZES, **MODELS[model_type], **ids, "bos_token_id": None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def lines(output: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [{name: x for name, x in row.items() if not name.startswith("time/")} for row in rows]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model_type", MODELS)
def test_it_learns_resumes_and_loads_elsewhere(model_type, tmp_path):
    make_model(tmp_path / "model", model_type)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i} in letters?"}) + "\n" for i in range(40)))
    (tmp_path / "reward.py").write_text(
        "def score(completion, row):\n    return sum(c in 'abcdefghijklmnopqrstuvwxyz' for c in completion) / 8\n"
    )

    def train(output: str, *more: str) -> list[dict[str, float]]:
        cli.main([
            "grpo", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "rows.jsonl"),
            "--reward", f"{tmp_path / 'reward.py'}:score", "--output", str(tmp_path / output), "--device", "cpu",
            "--steps", "40", "--save-steps", "20", "--prompts-per-step", "8", "--group-size", "8",
            "--max-prompt-tokens", "64", "--max-new-tokens", "8", "--lr", "3e-3", *more,
        ])  # fmt: skip
        return lines(tmp_path / output)

    rewards = [row["reward/mean"] for row in train("run")[-40:]]
    assert rewards[0] < 0.4, "letters of the control tokens count, too"
    assert sum(rewards[-5:]) / 5 > 0.8, rewards
    train("cut", "--steps", "20")
    assert train("cut", "--steps", "40", "--resume")[-20:] == lines(tmp_path / "run")[-20:]

    exported = tmp_path / "run" / "model"
    prompt, *ids = AutoTokenizer.from_pretrained(exported)("7 in letters?").input_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(exported)(torch.tensor([[prompt, *ids]])).logits[0]
    theirs = logits.log_softmax(-1)[range(len(ids)), ids]
    n = len(ids)
    batch = pack([[Trajectory([prompt], ids, [True] * n, [0.0] * n, [0] * n)]])
    ours = compute_log_probs(make_policy(load_model(str(exported))), batch, max_tokens=100)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
