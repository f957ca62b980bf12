"""TRL's GRPOTrainer on a model, a data file and a reward, with timers. Runs in TRL's own environment.

    .venv-trl/bin/python benchmarks/peers/trl_grpo.py --model M --data train.jsonl --reward FILE.py:NAME --output RUN

Started by compare_trl.py. Writes RUN/metrics.jsonl with the fields of an rlkit run, as far as both have them:
`step`, `reward/mean`, `length/mean` (sampled tokens), seconds of the step in `time/rollout` (prompts in, rewards and
advantages out; `time/generate` is the part inside HF generate), `time/forward` (log-probs of the samples, with their
graph), and `time/unix` (when the step's line was written). The final model goes to RUN/model.

TRL's settings are its own except what makes it faster here: fp32 without activation checkpointing (its defaults, bf16
and checkpointing, take 2.7 times as long a step on a CPU without bf16 products; `--defaults` keeps them), nothing saved
or reported on the way, no progress bar, no pinned memory, and prompts rendered with the chat template beforehand, as
ours are, instead of in every step. Tried and left out, as a step took the same time within 3%: a static cache, eager
attention, the unfused optimizer, torch_compile.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "reward", "output"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (
        ("steps", 60),
        ("prompts-per-step", 8),
        ("group-size", 8),
        ("max-new-tokens", 8),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where it trains and generates")
    parser.add_argument("--defaults", action="store_true", help="TRL's own: bf16 and activation checkpointing")
    return parser.parse_args()


def load_reward(spec: str) -> Callable[..., list[float]]:
    """Our `score(completion, row)` as a reward function of TRL."""
    path, name = spec.rsplit(":", 1)
    module_spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    score = getattr(module, name)

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [score(text, {"answer": right}) for text, right in zip(completions, answer, strict=True)]

    return reward


def timed_trainer(base: type, output: Path) -> type:
    """GRPOTrainer with timers around its own methods, and its log as lines of metrics.jsonl."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return wrapper

    class Timed(base):  # type: ignore[misc]
        _generate_and_score_completions = timed("time/rollout", base._generate_and_score_completions)
        _get_per_token_logps_and_entropies = timed("time/forward", base._get_per_token_logps_and_entropies)

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.model.generate = timed("time/generate", self.model.generate)

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log(logs, *args, **kwargs)
            if "reward" in logs:  # not the summary at the end
                line = {
                    "step": self.state.global_step,
                    "reward/mean": logs["reward"],
                    "length/mean": logs["completions/mean_length"],
                    **spent,
                    "time/unix": time.time(),
                }
                with (output / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                spent.clear()

    return Timed


def main() -> None:
    args = parse_args()
    if find_spec("trl") is None:
        raise SystemExit("error: TRL is not installed here: compare_trl.py makes an environment for this file")
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    output = Path(args.output)
    output.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
    for row in rows if tokenizer.chat_template else ():
        turn = [{"role": "user", "content": row["prompt"]}]
        row["prompt"] = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    config = GRPOConfig(
        output_dir=str(output / "trl"),
        use_cpu=args.device == "cpu",
        bf16=args.defaults,
        gradient_checkpointing=args.defaults,
        per_device_train_batch_size=args.prompts_per_step * args.group_size,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        temperature=1.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=args.device != "cpu",
        model_init_kwargs=None if args.defaults else {"dtype": "float32"},
        seed=args.seed,
    )
    trainer = timed_trainer(GRPOTrainer, output)(
        model=args.model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=load_reward(args.reward),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(output / "model"))


if __name__ == "__main__":
    main()
