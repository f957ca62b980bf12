"""A LoRA adapter as --model, on every road: training goes on in it, the reference is the model with it as it was."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil

import pytest
import screens
import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import load_model
from rlkit.model.lora import add_lora, merge_adapter, save_adapter
from rlkit.model.weights import export_hf
from rlkit.run.folder import read_args, read_metrics
from rlkit.scripts import cli
from rlkit.scripts.args import Lora, Model
from rlkit.scripts.start import with_adapter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
REWARD = "def score(completion, row):\n    return len(set(completion)) % 3\n"
PAIRS = [{"prompt": f"{i}", "chosen": "yes" * (1 + i % 2), "rejected": "no"} for i in range(8)]
RL = "--data prompts.jsonl --max-new-tokens 4 --prompts-per-step 4 "
ROADS = {
    "grpo": f"{RL} --reward reward.py:score --group-size 2 --kl-coef 0.1",
    "ppo": f"{RL} --reward reward.py:score --kl-coef 0.1",
    "distill": f"{RL} --teacher adapter --kl-coef 0.1",
    "sft": "--data pairs.jsonl --rename chosen response --batch-size 4 --warmup-steps 0",
    "dpo": "--data pairs.jsonl --batch-size 4 --warmup-steps 0",
    "kto": "--data pairs.jsonl --batch-size 4 --warmup-steps 0",
    "reward_model": "--data pairs.jsonl --batch-size 4 --warmup-steps 0",
}


@pytest.fixture(scope="module")
def task(make_task):
    """A model, and an adapter of it whose numbers change every answer; the model alone is another reference."""
    folder = make_task(pairs=PAIRS, prompts=[{"prompt": str(i)} for i in range(8)], reward=REWARD)
    torch.manual_seed(3)
    model = add_lora(
        tiny_model(tiny_tokenizer()).from_pretrained(folder / "model"), rank=3, alpha=5, targets=["v_proj"]
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.5) if ".lora_B." in name else None
    save_adapter(model, folder / "adapter", tokenizer=tiny_tokenizer())
    return folder


@pytest.fixture
def command(task, monkeypatch):
    monkeypatch.chdir(task)
    return lambda text: cli.main(f"{text} --device cpu".split())


def adapter_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", ROADS)
def test_training_goes_on_in_the_adapter(script, command, task, tmp_path, capsys):
    command(f"{script} --model adapter {ROADS[script]} --steps 1 --lr 0.01 --output {tmp_path}/run")
    said = capsys.readouterr().out
    assert "trains LoRA of rank 3 on" in said
    assert "adapter: adapter trains on; a reference is the model with the adapter as it is now" in said
    kept = read_args(tmp_path / "run")
    assert (kept["model"], kept["adapter"]) == (str(task / "model"), "adapter")
    assert (kept["lora_rank"], kept["lora_alpha"]) == (3, 5)
    first = read_metrics(tmp_path / "run")[0]
    for name in ("kl", "distill/kl"):  # at step 1 the policy is its reference, and its teacher
        assert abs(first.get(name, 0.0)) < 1e-6, name
    if script == "dpo":
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    if script == "reward_model":
        return
    out = adapter_of(tmp_path / "run/adapter")
    assert (out["r"], out["lora_alpha"], out["target_modules"]) == (3, 5, ["v_proj"])
    assert out["base_model_name_or_path"] == str(task / "model")


@pytest.mark.parametrize("script", ["grpo", "sft"])
@pytest.mark.slow
def test_lora_rank_0_merges_it_and_trains_all_weights(script, command, task, tmp_path, capsys):
    command(f"{script} --model adapter {ROADS[script]} --lora-rank 0 --steps 1 --lr 0.01 --output {tmp_path}/run")
    said = capsys.readouterr().out
    assert "; trains all weights" in said
    assert "adapter: adapter is merged into the weights, which all train" in said
    assert abs(read_metrics(tmp_path / "run")[0].get("kl", 0.0)) < 1e-6
    assert not (tmp_path / "run/adapter").exists()


@pytest.mark.slow
def test_a_run_goes_on_where_another_ended_and_resumes(command, task, tmp_path):
    """From RUN/adapter, its base given, also resumed: the reference stays the adapter that the run began with."""
    flags = "--data pairs.jsonl --eval-data pairs.jsonl --eval-steps 2 --batch-size 4 --warmup-steps 0 --lr 0.01 "
    flags += f"--lr-schedule constant --model model --adapter {tmp_path}/first/adapter --output {tmp_path}"
    command(f"sft --model adapter {ROADS['sft']} --steps 1 --output {tmp_path}/first")
    command(f"dpo {flags}/whole --steps 4 --save-steps 2")
    command(f"dpo {flags}/parts --steps 2 --save-steps 2")
    command(f"dpo {flags}/parts --steps 4 --save-steps 2 --resume")
    whole, parts = (read_metrics(tmp_path / name)[-1] for name in ("whole", "parts"))
    assert parts["eval/loss"] == pytest.approx(whole["eval/loss"], abs=1e-6)
    assert whole["eval/loss"] != pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.slow
def test_eval_and_chat_answer_as_the_merged_model(command, task, tmp_path, capsys):
    export_hf(merge_adapter(load_model(task / "model"), task / "adapter"), tiny_tokenizer(), tmp_path / "merged")
    found = []
    for model in ("adapter", f"{tmp_path}/merged", "model"):
        command(f"eval {model} --eval-data prompts.jsonl --reward reward.py:score --max-new-tokens 8")
        table = capsys.readouterr().out
        command(f"chat {model} --prompt 12 --temperature 0 --max-new-tokens 8")
        found.append((table, capsys.readouterr().out))
    assert found[0] == found[1] != found[2]


def test_servers_that_have_the_base_model_are_not_measured_as_the_adapter(task, monkeypatch):
    monkeypatch.chdir(task)
    argv = (
        "eval adapter --eval-data prompts.jsonl --reward reward.py:score --engine vllm --engine-urls http://127.0.0.1:9"
    )
    said = " ".join(screens.refused(cli.main, argv.split()).split())
    assert "error: --engine vllm has no adapter adapter: use local, or give the merged model" in said


@pytest.mark.slow
def test_chat_talks_to_the_checkpoint_of_a_run_that_trains_an_adapter_on(command, task, tmp_path, capsys):
    command(f"sft --model adapter {ROADS['sft']} --steps 1 --lr 0.01 --output {tmp_path}/run")
    capsys.readouterr()
    found = []
    for _ in range(2):
        command(f"chat {tmp_path}/run --prompt 12 --temperature 0 --max-new-tokens 8")
        found.append(capsys.readouterr().out)
        shutil.rmtree(tmp_path / "run/model", ignore_errors=True)
    assert found[0] == found[1]


@pytest.mark.slow
def test_an_engine_of_its_own_gets_the_adapter(command, task, tmp_path):
    """With --overlap a process samples from the base model until it is sent the weights: no sample is of it."""
    command(f"grpo --model adapter {ROADS['grpo']} --overlap --steps 2 --output {tmp_path}/run")
    assert all(abs(line["mismatch/abs_mean"]) < 1e-4 for line in read_metrics(tmp_path / "run") if "loss" in line)


@pytest.mark.slow_cases(
    "--model adapter --adapter adapter2---model adapter is an adapter too: give one, or its base model",
    "--model adapter --lora-rank 3 --lora-alpha 9---lora-alpha 9.0: the adapter adapter has alpha 5: drop",
    "--model adapter --lora-rank 3 --lora-targets q_proj---lora-targets q_proj: the adapter adapter has targets v",
    "--model lost-the adapter 'lost' is of the base model '/gone', which is not there: give it: --model BASE",
    "--model model --adapter model-the adapter 'model' is not a folder with adapter_config.json",
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model adapter --lora-rank 8", "--lora-rank 8: the adapter adapter has rank 3: drop the flag to train"),
        ("--model adapter --lora-rank 3 --lora-alpha 9", "--lora-alpha 9.0: the adapter adapter has alpha 5: drop"),
        (
            "--model adapter --lora-rank 3 --lora-targets q_proj",
            "--lora-targets q_proj: the adapter adapter has targets v",
        ),
        ("--model adapter --adapter adapter2", "--model adapter is an adapter too: give one, or its base model"),
        ("--model model --adapter model", "the adapter 'model' is not a folder with adapter_config.json"),
        ("--model lost", "the adapter 'lost' is of the base model '/gone', which is not there: give it: --model BASE"),
    ],
)
def test_what_contradicts_the_adapter_is_refused(flags, message, task, tmp_path, monkeypatch):
    monkeypatch.chdir(task)
    (task / "lost").mkdir(exist_ok=True)
    (task / "lost/adapter_config.json").write_text(
        json.dumps(adapter_of(task / "adapter") | {"base_model_name_or_path": "/gone"})
    )
    argv = ["grpo", *f"{flags} {ROADS['grpo']} --output {tmp_path}/run".split()]
    assert f"error: {message}" in " ".join(screens.refused(cli.main, argv).split())


@pytest.mark.parametrize(
    ("dropout", "lora", "named"),
    [
        (0.1, {}, True),
        (0.1, {"lora_rank": 3, "lora_dropout": 0.2}, False),
        (0.1, {"lora_rank": 0}, False),
        (0, {}, False),
    ],
)
def test_a_dropout_of_the_adapter_that_does_not_go_on_is_named(dropout, lora, named, task, tmp_path, caplog):
    folder = shutil.copytree(task / "adapter", tmp_path / "adapter")
    (folder / "adapter_config.json").write_text(json.dumps(adapter_of(folder) | {"lora_dropout": dropout}))
    with_adapter(Model(model=str(folder)), Lora(**lora))
    line = f"the adapter {folder} has lora_dropout 0.1, and trains on without dropout, as its export says: "
    assert caplog.messages == [f"{line}--lora-rank 3 --lora-dropout 0.1 keeps it in training on fixed data"] * named


def test_the_base_of_an_adapter_that_lost_it_is_given(command, task, tmp_path):
    (task / "moved").mkdir()
    for name in ("adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (task / "moved" / name).write_bytes((task / "adapter" / name).read_bytes())
    config = adapter_of(task / "adapter") | {"base_model_name_or_path": "/gone"}
    (task / "moved/adapter_config.json").write_text(json.dumps(config))
    command(f"sft --model model --adapter moved {ROADS['sft']} --steps 1 --output {tmp_path}/run")
    assert adapter_of(tmp_path / "run/adapter")["base_model_name_or_path"] == str(task / "model")


@pytest.mark.slow
def test_the_tokenizer_of_an_adapter_wins(command, task, tmp_path):
    """SFT of a base model writes its chat template beside the adapter."""
    file = task / "adapter/chat_template.jinja"
    before = file.read_text()
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}[assistant]")
    try:
        command(f"sft --model adapter {ROADS['sft']} --steps 1 --output {tmp_path}/run")
        assert "[assistant]" in (tmp_path / "run/model/chat_template.jinja").read_text()
    finally:
        file.write_text(before)
