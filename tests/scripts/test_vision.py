"""The scripts on rows with images: a small vision model trains, resumes, exports, and loads in transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from rlkit.data.tiny import tiny_vision_model
from rlkit.model.heads import load_reward_model
from rlkit.scripts import cli


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A model, and rows for every script: the answer is the shade of the picture."""
    folder, draw = tmp_path_factory.mktemp("task"), np.random.default_rng(0)
    tiny_vision_model(folder / "model", hidden=32, layers=2)
    rows = []
    for i in range(12):
        shade = int(draw.integers(0, 10))
        Image.fromarray(np.full((16, 16 + 8 * (i % 2), 3), 25 * shade, np.uint8)).save(folder / f"{i}.png")
        shown = {"images": [f"{i}.png"]} if i % 3 else {}  # some prompts are text
        rows.append({"prompt": "How light?", **shown, "answer": str(shade)})
    (folder / "reward.py").write_text("def score(completion, row):\n    return len(completion) % 2\n")
    kinds: dict[str, Any] = {
        "rl": lambda r: r, "sft": lambda r: {**r, "response": r["answer"]},
        "dpo": lambda r: {**r, "chosen": r["answer"], "rejected": "x"},
        "kto": lambda r: {**r, "completion": r["answer"], "label": True},
    }  # fmt: skip
    for name, made in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(made(row)) + "\n" for row in rows))
    return folder


def train(task: Path, script: str, output: Path, *flags: str) -> list[dict[str, float]]:
    """The metrics of a run."""
    kind = {"grpo": "rl", "ppo": "rl", "reward_model": "dpo"}.get(script, script)
    data = task / f"{kind}.jsonl"
    sizes = ["--batch-size", "4"]
    if script in ("grpo", "ppo"):
        sizes = ["--prompts-per-step", "2", "--group-size", "3", "--max-new-tokens", "6", "--max-prompt-tokens", "64"]
        sizes += ["--reward", f"{task / 'reward.py'}:score"]
    base = [script, "--model", str(task / "model"), "--data", str(data), "--output", str(output), "--device", "cpu"]
    cli.main([*base, *sizes, "--steps", "2", "--lr", "1e-3", *flags])
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def changed(task: Path, output: Path) -> set[str]:
    """The parts of the model that training has changed."""
    before, after = (load_file(x / "model" / "model.safetensors") for x in (task, output))
    assert before.keys() == after.keys()
    return {"tower" if ".visual." in name else "text" for name, x in before.items() if not torch.equal(x, after[name])}


@pytest.mark.slow
def test_grpo_samples_trains_resumes_and_exports(task, tmp_path):
    lines = train(task, "grpo", tmp_path / "run")
    assert all(line["mismatch/abs_max"] < 1e-4 for line in lines)
    assert changed(task, tmp_path / "run") == {"text"}
    exported = tmp_path / "run" / "model"
    model = AutoModelForImageTextToText.from_pretrained(exported)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert AutoImageProcessor.from_pretrained(exported).patch_size == 4
    train(task, "grpo", tmp_path / "cut", "--steps", "1")
    again = train(task, "grpo", tmp_path / "cut", "--resume")
    assert [reproducible(x) for x in again] == [reproducible(x) for x in lines]


def reproducible(line: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in line.items() if not name.startswith("time/")}


@pytest.mark.slow
def test_the_tower_trains_where_it_is_asked_to(task, tmp_path):
    train(task, "sft", tmp_path / "run", "--train-vision")
    assert changed(task, tmp_path / "run") == {"text", "tower"}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["dpo", "kto"])
def test_pairs_and_labels(task, tmp_path, script):
    lines = train(task, script, tmp_path / script)
    assert all(np.isfinite(line["loss"]) for line in lines)


AGENT = """
import json, os, urllib.request
row = json.load(open(os.environ["RLKIT_ROW"]))
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
shown = [{"type": "image_url", "image_url": {"url": x}} for x in row.get("images", ())]
messages = [{"role": "user", "content": [*shown, {"type": "text", "text": row["prompt"]}]}]
for _ in range(2):
    request = urllib.request.Request(url, json.dumps({"messages": messages}).encode())
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [said, {"role": "user", "content": [*shown, {"type": "text", "text": "again"}]}]
"""


@pytest.mark.slow
def test_an_agent_shows_the_images_of_its_row_in_two_turns(task, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "agent.py").write_text(AGENT)
    command = ["--agent", f"{sys.executable} -S {tmp_path / 'agent.py'}", "--max-total-tokens", "256"]
    lines = train(task, "grpo", tmp_path / "run", *command)
    assert all(line["mismatch/abs_max"] < 1e-4 for line in lines)
    assert all(line["reward/failed"] == line["reward/agent/branches"] == 0 for line in lines)
    rows = [json.loads(x) for f in (tmp_path / "run/trajectories").iterdir() for x in f.read_text().splitlines()]
    said = ["".join(m["content"] for m in row["info"]["messages"] if m["role"] == "user") for row in rows]
    assert {text.count("<image>") for text in said} <= {0, 1, 2}
    assert any("<image>How light?<image>again" in text for text in said)


@pytest.mark.slow
def test_a_critic_and_a_reward_model_read_images(task, tmp_path):
    lines = train(task, "ppo", tmp_path / "ppo")
    assert all(line["value/grad_norm"] > 0 for line in lines)
    lines = train(task, "reward_model", tmp_path / "rm")
    assert lines[1]["loss"] < lines[0]["loss"]
    assert load_reward_model(tmp_path / "rm" / "model").score.weight.abs().max() > 0


GAME = """
from PIL import Image
from rlkit.rollout.envs.gym import Step

class Game:
    def __init__(self, prompt):
        self.dark, self.turns = prompt.index % 2, 0

    def reset(self):
        return "?"

    def step(self, turn):
        self.turns += 1
        if self.turns == 1:
            return Step(Image.new("RGB", (16, 16), (20,) * 3 if self.dark else (230,) * 3))
        return Step("", float(turn.ids[0] % 2 == self.dark), done=True)
"""


@pytest.mark.slow
def test_the_reward_rises_where_an_image_after_the_first_turn_tells_the_answer(task, tmp_path):
    """Turns are one token, and the second must be odd where the picture before it is dark."""
    (tmp_path / "game.py").write_text(GAME)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(64)))
    how = ["--env", f"{tmp_path / 'game.py'}:Game", "--stop-token-ids", *map(str, range(258)), "--eval-steps", "0"]
    sizes = ["--prompts-per-step", "8", "--group-size", "8", "--max-new-tokens", "2", "--max-total-tokens", "128"]
    run = ["--model", str(task / "model"), "--data", str(rows), "--output", str(tmp_path / "run"), "--device", "cpu"]
    cli.main(["grpo", *run, *how, *sizes, "--steps", "40", "--lr", "3e-3", "--train-vision"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (np.mean([line["reward/mean"] for line in some]) for some in (lines[:5], lines[-10:]))
    assert first < 0.6 < 0.7 < last


@pytest.mark.slow
def test_an_engine_process_and_lora(task, tmp_path):
    pytest.importorskip("peft")
    lines = train(task, "grpo", tmp_path / "run", "--overlap", "--lora-rank", "4")
    assert lines[0]["mismatch/abs_max"] < 1e-4  # later ones are of older weights
    assert changed(task, tmp_path / "run") == {"text"}


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(task, tmp_path):
    one = train(task, "grpo", tmp_path / "one", "--prompts-per-step", "4", "--train-vision")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    sizes = ["--prompts-per-step", "4", "--group-size", "3", "--max-new-tokens", "6", "--max-prompt-tokens", "64"]
    command = [
        *start, "rlkit.scripts.grpo", "--model", str(task / "model"), "--data", str(task / "rl.jsonl"), *sizes,
        "--reward", f"{task / 'reward.py'}:score", "--output", str(tmp_path / "two"), "--device", "cpu", "--steps", "2",
        "--lr", "1e-3", "--train-vision", "--parallel.shard", "2",
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    two = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(one, two, strict=True):
        assert {name: b[name] for name in a if not name.startswith("time/")} == pytest.approx(
            {name: x for name, x in a.items() if not name.startswith("time/")}, rel=1e-3, abs=1e-4
        )


def refused(capsys, *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command])
    assert ended.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_a_placeholder_in_data_without_images_is_refused(task, tmp_path, capsys, script):
    rows = [{"prompt": "<image>", "response": "b"}, {"prompt": "<|image_pad|>?", "response": "b"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", str(task / "model"), "--data", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "run")]
    flags += ["--reward", f"{task / 'reward.py'}:score"] if script == "grpo" else []
    said = refused(capsys, script, *flags, "--device", "cpu")
    assert "rows.jsonl, line 2: the text holds '<|image_pad|>', which stands for an image or a video: drop it" in said


def test_an_engine_of_the_user_is_not_given_images(task, tmp_path, capsys):
    (tmp_path / "own.py").write_text("def make(model):\n    pass\n")
    flags = ["--model", str(task / "model"), "--data", str(task / "rl.jsonl"), "--output", str(tmp_path / "run")]
    flags += ["--reward", f"{task / 'reward.py'}:score", "--engine", f"{tmp_path / 'own.py'}:make", "--device", "cpu"]
    assert "the prompts show images, which only local, sglang and vllm are given" in refused(capsys, "grpo", *flags)
