"""Compare two checkouts of rlkit: do the same runs give the same metrics, samples and weights, bit for bit?

    python tools/golden.py OTHER_CHECKOUT [WORDS ...]          compare this checkout with another one;
                                                               WORDS: only runs whose names have one of them

Every run starts from the same small model, on the CPU with one thread. KEYS lists the keys of metrics.jsonl
that were renamed since the other checkout. Only times (`time/...`) may differ; exit code 1 if anything else does.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEYS: dict[str, str] = {}  # key in the other checkout -> key here
_ERRORS = {"eval/sampled_se", "eval/greedy_se"}
NEW = {"ppo": {"groups/dropped", *_ERRORS}, "grpo": _ERRORS}  # by script: keys that the other checkout lacks
SAMPLED = "--prompts-per-step 4 --group-size 4 --max-new-tokens 8 --max-prompt-tokens 32 --eval-steps 2 --eval-limit 8"
RUNS = {  # name: (script, flags, how)
    "grpo": ("grpo", "", ""),
    "grpo kl": ("grpo", "--kl-coef 0.1 --eval-kl --kl-target 0.01", ""),
    "grpo top-p": ("grpo", "--top-p 0.8", ""),
    "grpo top-k, dr-grpo weights": ("grpo", "--top-k 7 --minibatches 2 --epochs 2", ""),
    "grpo partial rollout": ("grpo", "--staleness 0.5", ""),
    "grpo lora": ("grpo", "--lora-rank 4", ""),
    "grpo entropy": ("grpo", "--entropy-coef 0.01 --kl-limit 0.01", ""),
    "grpo two ranks": ("grpo", "", "ranks"),
    "grpo killed and resumed": ("grpo", "--save-steps 1 --kl-coef 0.1", "killed"),
    "ppo": ("ppo", "", ""),
    "ppo kl": ("ppo", "--kl-coef 0.1", ""),
    "ppo top-p": ("ppo", "--top-p 0.8", ""),
    "ppo lora": ("ppo", "--lora-rank 4", ""),
    "ppo two ranks": ("ppo", "", "ranks"),
    "ppo killed and resumed": ("ppo", "--save-steps 1", "killed"),
    "sft": ("sft", "", ""),
    "sft two ranks": ("sft", "", "ranks"),
    "sft killed and resumed": ("sft", "--save-steps 1", "killed"),
    "dpo": ("dpo", "", ""),
    "kto": ("kto", "", ""),
    "reward_model": ("reward_model", "", ""),
}
MAKE = """
import json, sys
from rlkit.data.tiny import tiny_model, tiny_tokenizer
folder, tokenizer = sys.argv[1], tiny_tokenizer()
model = tiny_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=48)
model.save_pretrained(folder + "/model"); tokenizer.save_pretrained(folder + "/model")
for name in ("grpo", "ppo", "sft", "dpo", "kto", "reward_model"):
    with open(f"{folder}/{name}.jsonl", "w") as file:
        for i in range(24):
            right, wrong = str(i + 1), "x" * (1 + i % 3)
            row = {"prompt": f"{i}+1=", "chosen": right, "rejected": wrong}
            row = {"prompt": f"{i}+1=", "response": right, "label": i % 2 == 0} if name == "kto" else row
            row = {"prompt": f"{i}+1=", "response": right} if name == "sft" else row
            row = {"prompt": f"{i}+1=", "answer": right} if name in ("grpo", "ppo") else row
            file.write(json.dumps(row) + chr(10))
"""
REWARD = "def score(completion, row):\n    return len(set(completion)) / 8 + (row['answer'] in completion)\n"


def script(checkout: Path, name: str) -> list[str]:
    """The script's file, or its module where scripts are part of the package."""
    file = checkout / "examples" / f"{name}.py"
    return [str(file)] if file.exists() else ["-m", f"rlkit.scripts.{name}"]


def train(checkout: Path, task: Path, output: Path, name: str) -> dict[str, Any]:
    """Train the run `name` with the code of `checkout`; returns its results and its peak memory."""
    kind, flags, how = RUNS[name]
    own = f"{SAMPLED} --reward {task}/reward.py:score" if kind in ("grpo", "ppo") else "--batch-size 8 --eval-steps 2"
    data = task / f"{kind}.jsonl"
    rows = f"--model {task}/model --data {data} --eval-data {data} --output {output}"
    common = f"{rows} --steps 5 --lr 1e-3 --seed 3 --device cpu {own} {flags}".split()
    start = [sys.executable]
    if how == "ranks":
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, *script(checkout, kind), *common]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    kept: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": checkout}
    if how == "killed":
        with subprocess.Popen(command, env=env, **kept) as process:
            log = output / "metrics.jsonl"
            while process.poll() is None and not (log.exists() and '"step": 3,' in log.read_text()):
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        command.append("--resume")
    done = subprocess.run(command, env=env, check=False, **kept)
    if done.returncode:
        raise SystemExit(f"{name} in {checkout}: exit code {done.returncode}\n{done.stdout}")
    return left_in(output)


def left_in(output: Path) -> dict[str, Any]:
    """Metrics without times, samples, and hashes of weights."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    left: dict[str, Any] = {
        f"step {line['step']}": {k: v for k, v in line.items() if not k.startswith("time/")} for line in lines
    }
    for path in sorted((output / "trajectories").glob("*.jsonl")):
        left[path.name] = path.read_text()
    for path in sorted(output.rglob("*.safetensors")):
        left[str(path.relative_to(output))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return left


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences, in words; keys of metrics are translated by KEYS first."""
    out = [f"{name} is only in one" for name in sorted(old.keys() ^ new.keys())]
    for name in sorted(old.keys() & new.keys()):
        a, b = old[name], new[name]
        if isinstance(a, dict):
            a = {KEYS.get(key, key): value for key, value in a.items()}
            keys = sorted(k for k in a.keys() | b.keys() if repr(a.get(k)) != repr(b.get(k)))
            out += [f"{name}: {key} {a.get(key)} -> {b.get(key)}" for key in keys]
        elif a != b:
            out.append(f"{name} differs")
    return out


def is_new(run: str, line: str) -> bool:
    """Whether a difference is an added key."""
    return any(f": {key} None -> " in line for key in NEW.get(RUNS[run][0], ()))


def main(other: Path, words: list[str]) -> int:
    """The number of runs that differ."""
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        task = Path(name)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", MAKE, str(task)], env=env, check=True, capture_output=True)
        (task / "reward.py").write_text(REWARD)
        for i, run in enumerate(RUNS):
            if words and not any(word in run for word in words):
                continue
            old, new = (train(c, task, task / f"{side}{i}", run) for side, c in (("old", other), ("new", ROOT)))
            found = [line for line in differences(old, new) if not is_new(run, line)]
            wrong += bool(found)
            print(f"{run:32} {'differs' if found else f'equal in {len(new)} files and steps'}", flush=True)
            for line in found[:5]:
                print("   ", line)
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(Path(sys.argv[1]).resolve(), sys.argv[2:])))
