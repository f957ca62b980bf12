"""What compare_trl.py needs before it can measure: TRL's environment, and a warm-started model with its data."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TRL_ENV = ROOT / ".venv-trl"
ASK_VERSIONS = (
    "import json; from importlib.metadata import version as v; "
    "print(json.dumps({n: v(n) for n in ('torch', 'transformers', 'trl')}))"
)


def make_trl_environment(trl: str) -> Path:
    """The Python of an environment with the project's torch, and TRL on top, made where it is missing."""
    torch = version("torch")
    wanted = f"torch {torch}, trl {trl}\n"
    python, ready = TRL_ENV / "bin" / "python", TRL_ENV / ".ready"
    if not ready.exists() or ready.read_text() != wanted:
        print(f"making {TRL_ENV.name}: {wanted}", end="", flush=True)
        pin = f"torch=={torch.split('+')[0]}"
        subprocess.run([sys.executable, "-m", "venv", "--clear", TRL_ENV], check=True)
        constraints = TRL_ENV / "constraints.txt"
        constraints.write_text(pin + "\n")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", constraints]
        subprocess.run([*pip, pin], check=True)
        subprocess.run([*pip, f"trl=={trl}"], check=True)
        ready.write_text(wanted)
    return python


def versions_of(python: Path) -> dict[str, str]:
    """The versions of torch, transformers and TRL there; both sides of the comparison need one torch."""
    try:
        asked = subprocess.run([python, "-c", ASK_VERSIONS], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"error: --trl-python {python}: {error.strerror}") from None
    if asked.returncode:
        raise SystemExit(f"error: {python} has no torch, transformers and TRL: {asked.stderr.splitlines()[-1]}")
    found: dict[str, str] = json.loads(asked.stdout)
    if found["torch"] != version("torch"):
        raise SystemExit(f"error: {python} has torch {found['torch']}, the project {version('torch')}: use one version")
    return found


def make_task(folder: Path, sft_steps: int) -> dict[str, Any]:
    """The demo's data and its model after SFT, made once per `folder`: {model, data, prompt_tokens}."""
    path = folder / "task.json"
    made = json.loads(path.read_text()) if path.exists() else {}
    if made.get("sft_steps") != sft_steps or "reward" not in made:
        # a process of its own: a child's peak memory starts at its parent's, which must stay small
        process = multiprocessing.get_context("spawn").Process(target=_make_task, args=(folder, sft_steps))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit("the task could not be made, see above")
    return json.loads(path.read_text())


def _make_task(folder: Path, sft_steps: int) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import demo

    from rlkit.data.tiny import tiny_model, tiny_tokenizer
    from rlkit.model.weights import export_hf
    from rlkit.scripts import sft
    from rlkit.scripts.args import Data, Model
    from rlkit.settings import Optim, Schedule

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    demo.make_data(folder, seed=0)
    tokenizer = tiny_tokenizer()
    random = export_hf(tiny_model(tokenizer, seed=0), tokenizer, folder / "random")
    model = sft.main(
        sft.Args(
            Model(str(random)), Data(str(folder / "sft.jsonl")), schedule=Schedule(folder / "sft", steps=sft_steps),
            optim=Optim(lr=1e-3, lr_schedule="linear", warmup_steps=20),
        )
    )  # fmt: skip
    turn = [{"role": "user", "content": "000000"}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=True, add_generation_prompt=True, return_dict=False)
    task = {"model": str(model), "data": str(folder / "train.jsonl"), "prompt_tokens": len(prompt)}
    task["reward"] = f"{ROOT / 'examples' / 'sorting_reward.py'}:score"
    (folder / "task.json").write_text(json.dumps({**task, "sft_steps": sft_steps}))
