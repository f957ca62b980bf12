"""For tests of real inference servers: their Python, checkpoints of a tiny model, truth, and runs of `rlkit grpo`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rlkit.data.images import ImageReader
from rlkit.data.prompts import Prompt, rl_prompts
from rlkit.data.tiny import tiny_model, tiny_tokenizer, tiny_vision_model
from rlkit.model.forward import forward, load_model
from rlkit.model.pretrained import load_config, load_tokenizer
from rlkit.model.vision import placeholder_ids
from rlkit.model.weights import stream_weights
from rlkit.packing import pack
from rlkit.rollout import rollout
from rlkit.rollout.envs.chat import Chat
from rlkit.types import SamplingParams, Trajectory


def make_checkpoint(folder: Path, *, seed: int, tied: bool = False) -> Path:
    """A tiny model without an end token and with peaked distributions, so that a wrong weight shows."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=64, layers=2, intermediate=128, tie_word_embeddings=tied, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_vision_checkpoint(folder: Path) -> Path:
    """A tiny vision model that gives placeholders no mass, as a trained one does."""
    tiny_vision_model(folder, hidden=64, layers=2)
    model = load_model(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] += 3
        for i in placeholder_ids(model.config):
            model.get_output_embeddings().weight[i] = torch.eye(64)[0] * -20
    model.save_pretrained(folder)
    return folder


async def check_images(engine: Any, checkpoint: Path, folder: Path) -> None:
    """All turns after images, those of later turns included, have the trainer's log-probs, also after an update."""
    model, tokenizer, draw = load_model(checkpoint), load_tokenizer(checkpoint), np.random.default_rng(0)
    for name, size in {"a": (16, 24), "b": (37, 51), "large": (320, 320)}.items():  # b is resized
        Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    reader = ImageReader(str(checkpoint), tokenizer, load_config(checkpoint))

    def prompts(*names: str) -> list[Prompt]:
        rows = [{"prompt": "Hi", "images": [str(folder / f"{x}.png") for x in shown.split()]} for shown in names]
        return rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=4000, images=reader)[0]

    async def env(prompt: Any, sample: Any) -> Any:
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        async for _ in chat:
            if len(chat.messages) > 5:
                break
            later = Image.open(folder / "a.png") if len(chat.messages) == 2 else "again"
            chat.add({"role": "user", "content": later})
        return chat.end(reward=1.0)

    params = SamplingParams(max_new_tokens=8, stop_token_ids=tuple(range(128)))  # most turns end
    for version in (0, 1):
        if version:
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.mul_(1.3 if "visual" in name else 1.05)
        await engine.update_weights(stream_weights(model), version=version)
        made = await rollout(
            prompts("a b", "b", ""), generate=engine.generate, params=params, group_size=4, seed=version, env=env
        )
        assert sum(t.info["num_turns"] for group in made for t in group) > 20
        batch = pack(made)
        assert [len(x) for x in (batch.images or ())[:3]] == [2, 1, 0]
        assert sum(len(x) for x in (batch.images or ())[3:]) > 6  # of later turns
        assert (forward(model, batch).logp - batch.rollout_logp)[batch.mask].abs().max() < 1e-4
        assert {v for group in made for t in group for v in t.versions} == {-1, version}

    config = json.loads((checkpoint / "preprocessor_config.json").read_text())
    shutil.copytree(checkpoint, folder / "other")
    config["size"]["longest_edge"] = 10**6
    (folder / "other" / "preprocessor_config.json").write_text(json.dumps(config))
    reader = ImageReader(str(folder / "other"), tokenizer, load_config(checkpoint))
    (large,) = prompts("large")
    with pytest.raises(ValueError, match=r"has read other tokens than the prompt .* its tokenizer and image processor"):
        await engine.generate(large.ids, params=params, images=large.images)
    with pytest.raises(ValueError, match=r"1 runs of placeholders \(token \d+\) for 2 images"):
        await engine.generate(large.ids, params=params, images=[*large.images, *large.images])


def forward_logp(model: torch.nn.Module, prompt: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of `ids` after `prompt`."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def python_of(package: str) -> str:
    """The interpreter that has `package`: $RLKIT_PACKAGE_PYTHON, or that of an environment which is made."""
    if given := os.environ.get(f"RLKIT_{package.upper()}_PYTHON"):
        return given
    install = Path(__file__).parents[2] / "tools" / f"{package}_cpu" / "install.py"
    made = subprocess.run([sys.executable, str(install)], check=True, stdout=subprocess.PIPE, text=True)
    return made.stdout.strip()


STEPS = (
    "--steps 2 --prompts-per-step 2 --group-size 4 --max-new-tokens 12 --max-prompt-tokens 32 --eval-steps 0 --lr 3e-3"
)
REWARD = "def score(completion, row):\n    return len(completion) % 3\n"


def train(
    package: str, folder: Path, checkpoint: Path, python: str, *flags: str, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """`rlkit grpo --engine PACKAGE` in a process of its own, or in two of torchrun."""
    command, env = _training(package, folder, checkpoint, python, *flags, ranks=ranks)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def kill_a_server(package: str, folder: Path, checkpoint: Path, python: str, *flags: str) -> None:
    """Train with one server, kill it after step 3 of 8: it is started again, and every step samples from the weights
    that the step before left."""
    steps = ["--steps", "8", "--max-new-tokens", "200", "--journal"]
    command, env = _training(package, folder, checkpoint, python, *steps, *flags)
    metrics, log, killed = folder / "run" / "metrics.jsonl", folder / "run" / f"{package}_0_0.log", 0
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        while run.poll() is None and not killed:
            if metrics.exists() and len(metrics.read_text().splitlines()) >= 3:
                killed = server_of(run.pid)
                os.kill(killed, signal.SIGKILL)
            time.sleep(0.1)
        said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said
    assert "has ended: it is started again" in said
    assert f"status {-signal.SIGKILL}" in log.read_text(), "the guard saw it die"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert max(line["mismatch/abs_max"] for line in lines) < 1e-3
    assert max(line["staleness/max"] for line in lines) == 0


def server_of(trainer: int) -> int:
    """The process of the server that the trainer started: the child of its guard."""
    parents = {}
    for x in _processes():
        with suppress(OSError):  # of one that has ended since
            parents[int(x)] = int(Path(f"/proc/{x}/stat").read_text().rpartition(")")[2].split()[1])
    guards = [x for x, parent in parents.items() if parent == trainer and "guard.py" in _command(x)]
    (server,) = [x for x, parent in parents.items() if parent in guards]
    return server


def _processes() -> list[str]:
    return [x for x in os.listdir("/proc") if x.isdigit() and _command(int(x))]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _training(
    package: str, folder: Path, checkpoint: Path, python: str, *flags: str, ranks: int = 1
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a short run."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": chr(97 + i)}) + "\n" for i in range(8)))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*(start if ranks > 1 else [sys.executable]), "-m", "rlkit.scripts.grpo", "--device", "cpu"]
    command += ["--model", str(checkpoint), "--data", str(folder / "rows.jsonl"), "--output", str(folder / "run")]
    command += ["--reward", f"{folder / 'reward.py'}:score", *STEPS.split(), "--engine", package, *flags]
    return command, {**os.environ, f"RLKIT_{package.upper()}_PYTHON": python, "OMP_NUM_THREADS": "1"}


def check_trained(folder: Path, done: subprocess.CompletedProcess[str], *, steps: int = 2) -> None:
    """Every step samples from the weights that the step before left."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, steps + 1)]
    assert max(line["mismatch/abs_max"] for line in lines) < 1e-3
    assert max(line["staleness/max"] for line in lines) == 0
    assert min(line["grad_norm"] for line in lines) > 0


def check_teacher(teacher: Any, model: torch.nn.Module) -> None:
    """A teacher of the fresh server has the log-probs of the checkpoint that it serves, and the tokenizer."""
    teacher.check(tiny_tokenizer(), k=4)
    prompt, answers = [5, 6, 7], [[9, 8, 7, 40], [4], [50, 51]]
    made = [Trajectory(prompt, ids, [True] * len(ids), [-1.0] * len(ids), [0] * len(ids)) for ids in answers]
    batch = pack([[made[0], replace(made[1], truncated=True)], [made[2]]])
    logp, (ids, top) = teacher.logp(batch), teacher.top_logp(batch, 4)
    wanted = [x for answer in answers for x in forward_logp(model, prompt, answer)]
    torch.testing.assert_close(logp[batch.mask], torch.tensor(wanted), rtol=1e-3, atol=1e-3)
    at = 0
    for answer in answers:
        for i in range(len(answer)):
            with torch.no_grad():
                whole = model(torch.tensor([prompt + answer[:i]])).logits[0, -1].log_softmax(-1)
            row = ids[batch.mask][at]
            torch.testing.assert_close(top[batch.mask][at], whole[row], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(whole[row], whole.topk(4).values, rtol=1e-3, atol=1e-3)
            at += 1
