"""LoRA of reward models and critics, its scale and its dropout: what is exported is what was trained."""

from __future__ import annotations

import importlib.util

import pytest
import screens
import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.checkpoint import latest_checkpoint
from rlkit.model.heads import load_value_model
from rlkit.model.lora import add_lora, dropping, lora_config
from rlkit.run.folder import read_metrics
from rlkit.scripts import cli

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
PAIRS = [{"prompt": f"{i}", "chosen": "yes" * (1 + i % 2), "rejected": "no"} for i in range(8)]
REWARD = "def score(completion, row):\n    return len(set(completion)) % 3\n"


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(pairs=PAIRS, prompts=[{"prompt": str(i)} for i in range(8)], reward=REWARD)


@pytest.fixture
def command(task, monkeypatch):
    monkeypatch.chdir(task)
    common = "--model model --device cpu --lr 0.02"
    return lambda script, flags: cli.main([script, *common.split(), *flags.split()])


@pytest.mark.slow
def test_a_reward_model_trains_adapters_and_its_head(command, task, tmp_path):
    """transformers' own forward of the merged export gives the rewards that the last evaluation logged."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    flags = f"--data pairs.jsonl --eval-data pairs.jsonl --batch-size 4 --warmup-steps 0 --output {tmp_path}/run "
    flags += "--eval-steps 4 --save-steps 2 --lora-rank 4 --lora-alpha 4 --lora-targets q_proj down_proj "
    command("reward_model", flags + "--steps 2")
    saved = latest_checkpoint(tmp_path / "run" / "checkpoints")
    command("reward_model", flags + "--steps 4 --resume")
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") != saved
    last = read_metrics(tmp_path / "run")[-1]
    assert last["eval/accuracy"] == 1
    folder = tmp_path / "run" / "model"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rewards = []
    for row in PAIRS:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]
        text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip("\n")
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            rewards.append(float(model(input_ids=ids).logits[0, 0]))
    assert sum(rewards) / len(rewards) == pytest.approx(last["eval/chosen"], abs=1e-4)
    assert model.score.weight.abs().sum() > 0
    base = load_value_model(task / "model").state_dict()
    same = [name for name, x in model.state_dict().items() if torch.equal(x, base[name])]
    changed = {name for name in model.state_dict() if name not in same}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj", "score"}
    assert not (tmp_path / "run" / "adapter").exists(), "a file of peft would lack the head"


@pytest.mark.slow
def test_a_critic_trains_adapters_and_its_head(command, task, tmp_path):
    flags = f"--data prompts.jsonl --reward reward.py:score --max-new-tokens 4 --output {tmp_path}/run "
    flags += "--prompts-per-step 4 --critic-lr 0.05 --lora-rank 2 --critic-lora-rank 3 --lora-targets v_proj "
    command("ppo", flags + "--steps 2 --save-steps 1")
    command("ppo", flags + "--steps 3 --resume")
    critic = load_value_model(tmp_path / "run" / "critic").state_dict()
    base = load_value_model(task / "model").state_dict()
    changed = {name for name, x in critic.items() if not torch.allclose(x, base[name], atol=1e-7)}
    assert {name.split(".")[-2] for name in changed} == {"v_proj", "score"}
    update = critic["model.layers.0.self_attn.v_proj.weight"] - base["model.layers.0.self_attn.v_proj.weight"]
    assert torch.linalg.matrix_rank(update, rtol=1e-3) <= 3


def test_dropout_acts_in_training_only_and_alpha_scales():
    tokens = torch.tensor([[5, 9, 3, 20]])
    model = add_lora(tiny_model(tiny_tokenizer()), rank=4, alpha=12, dropout=0.5)
    assert lora_config(model).lora_alpha == 12
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_() if ".lora_B." in name else None

        def logits():
            return model(input_ids=tokens, use_cache=False).logits

        assert torch.equal(logits(), logits())
        with dropping(model):
            assert not torch.equal(logits(), logits())
        assert torch.equal(logits(), logits())


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_dropout_changes_what_a_step_trains(script, command, tmp_path):
    rows = "pairs.jsonl --rename chosen response" if script == "sft" else "pairs.jsonl"
    flags = f"--data {rows} --batch-size 4 --warmup-steps 0 --lora-rank 4 --steps 3 "
    losses = {}
    for name, more in (("without", ""), ("with", "--lora-dropout 0.5"), ("again", "--lora-dropout 0.5")):
        command(script, f"{flags} {more} --output {tmp_path / name}")
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
    assert losses["without"][-1] != losses["with"][-1] == losses["again"][-1]


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("sft", "--data pairs.jsonl --lora-alpha 4", "--lora-alpha requires --lora-rank"),
        ("sft", "--data pairs.jsonl --lora-base nf4", "--lora-base requires --lora-rank"),
        ("dpo", "--data pairs.jsonl --lora-rank 4 --lora-dropout 1", "--lora-dropout must be at least 0 and below 1"),
        (
            "grpo",
            "--data prompts.jsonl --reward reward.py:score --lora-rank 4 --lora-dropout 0.1",
            "--lora-dropout is for",
        ),
        ("reward_model", "--data pairs.jsonl --lora-rank 999", "--lora-rank 999 is more than the model's width 32"),
    ],
)
def test_lora_that_cannot_be_is_refused(script, flags, message, task, tmp_path, monkeypatch):
    monkeypatch.chdir(task)
    argv = [script, "--model", "model", "--output", str(tmp_path / "run"), *flags.split()]
    assert f"error: {message}" in " ".join(screens.refused(cli.main, argv).split())


@pytest.mark.slow
def test_a_quantized_base_trains_resumes_and_is_exported_with_its_adapter(command, task, tmp_path):
    """The export, a plain model, has the loss that the last evaluation logged."""
    flags = "--data pairs.jsonl --eval-data pairs.jsonl --rename chosen response --batch-size 4 --warmup-steps 0 "
    flags += f"--lora-rank 4 --lora-base nf4 --eval-steps 4 --save-steps 2 --output {tmp_path}/run "
    command("sft", flags + "--steps 2")
    command("sft", flags + "--steps 4 --resume")
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    again = f"--steps 1 --eval-steps 1 --output {tmp_path}/again --model {tmp_path}/run/model"
    command("sft", f"--data pairs.jsonl --eval-data pairs.jsonl --rename chosen response --warmup-steps 0 {again}")
    assert read_metrics(tmp_path / "again")[0]["eval/loss"] == pytest.approx(lines[-1]["eval/loss"], abs=1e-4)
