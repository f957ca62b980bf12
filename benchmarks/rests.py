"""What `--max-rest` changes: the demo's task and two harder ones, with and without, alone and with `--success-range`.

    python benchmarks/rests.py OUTPUT [--task demo|hard|beyond] [--seeds 0 1 2] [--steps 100]

256 prompts, so that a run passes over them many times: of six digits (demo), of 5 to 13 digits (hard), or one half of 5
to 9 digits and one of 18, more than the model has seen (beyond; its held-out prompts have 5 to 9). Prints a line per
run and a table: held-out success before, mean over the evaluations and last, the share of groups with equal rewards,
and the groups that were sampled.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import statistics
from pathlib import Path

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.weights import export_hf
from rlkit.run.folder import read_metrics
from rlkit.scripts import grpo, sft
from rlkit.scripts.args import Data, Episodes, Evaluation, Examples, Model
from rlkit.settings import Engines, Optim, Rollouts, Schedule

ARMS = {"plain": {}, "rest": {"max_rest": 8}, "range": {"range": True}, "range, rest": {"range": True, "max_rest": 8}}
PROMPTS, PER_STEP = 256, 16
EXAMPLES = Path(__file__).parents[1] / "examples"
make_demo = runpy.run_path(str(EXAMPLES / "demo.py"))["make_data"]


def make_data(folder: Path, task: str) -> None:
    """sft.jsonl, train.jsonl and eval.jsonl of a task."""
    folder.mkdir(parents=True, exist_ok=True)
    if task == "demo":
        make_demo(folder, seed=0, num_train=PROMPTS)
        return
    parts = {digits: folder / str(digits) for digits in (*range(5, 14), 18)}
    for digits, part in parts.items():
        part.mkdir(exist_ok=True)
        make_demo(part, seed=digits, digits=digits, num_sft=1200, num_train=128, num_eval=29)
    for name in ("sft", "train", "eval"):
        num = dict.fromkeys(range(5, 14), 1200 if name == "sft" else 29)
        if task == "beyond" and name != "sft":
            num = dict.fromkeys(range(5, 10), 26) | ({18: 128} if name == "train" else {})
        found = {k: (parts[k] / f"{name}.jsonl").read_text().splitlines()[:n] for k, n in num.items()}
        lines = [line for part in found.values() for line in part]
        random.Random(0).shuffle(lines)
        kept = lines if name == "sft" else lines[:PROMPTS]
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in kept))


def warm(folder: Path, steps: int) -> Path:
    """The model after SFT on the demo's teacher."""
    if (folder / "sft" / "model" / "config.json").exists():
        return folder / "sft" / "model"
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, heads=4, kv_heads=2, seed=0, hidden=128, layers=4, intermediate=512)
    export_hf(model, tokenizer, folder / "random")
    return sft.main(
        sft.Args(
            model=Model(str(folder / "random")), data=Data(str(folder / "sft.jsonl")), examples=Examples(batch_size=64),
            schedule=Schedule(folder / "sft", steps=steps, print_steps=100),
            optim=Optim(lr=1e-3, lr_schedule="linear", warmup_steps=20),
        )
    )  # fmt: skip


def train(folder: Path, model: Path, arm: str, seed: int, steps: int, held_out: int) -> list[dict[str, float]]:
    """The metrics of one run; an earlier one of this name is read."""
    output, how = folder / f"{arm.replace(', ', '_')}_{seed}", dict(ARMS[arm])
    longest = 24 if folder.name == "beyond" else 16
    loss = grpo.Loss(success_range=(0.01, 0.99) if how.pop("range", False) else None)
    reward = str(EXAMPLES / "sorting_reward.py") + ":score"
    if not (output / "model").exists():
        grpo.main(
            grpo.Args(
                model=Model(str(model)), data=Data(str(folder / "train.jsonl"), eval_data=str(folder / "eval.jsonl")),
                episodes=Episodes(reward=reward, max_prompt_tokens=64), evaluation=Evaluation(eval_limit=held_out),
                rollouts=Rollouts(prompts_per_step=PER_STEP, minibatches=2, max_new_tokens=longest, **how), loss=loss,
                schedule=Schedule(output, steps=steps, eval_steps=20, print_steps=50, seed=seed),
                optim=Optim(lr=1.5e-4, lr_schedule="linear"), engine=Engines(max_batch=128),
            )
        )  # fmt: skip
    return read_metrics(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--task", choices=("demo", "hard", "beyond"), default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=[*ARMS], help="which; those of a range need a trained model"
    )
    parser.add_argument("--sft-steps", type=int, default=300, help="of the model that all start from")
    parser.add_argument("--eval-limit", type=int, default=256, help="held-out prompts")
    args = parser.parse_args()
    folder = args.output / args.task
    make_data(folder, args.task)
    model = warm(folder, args.sft_steps)
    for seed in args.seeds:
        for arm in args.arms:
            found = summary(train(folder, model, arm, seed, args.steps, args.eval_limit))
            print(json.dumps({"arm": arm, "seed": seed} | found), flush=True)
    for arm in args.arms:
        runs = [summary(train(folder, model, arm, seed, args.steps, args.eval_limit)) for seed in args.seeds]
        cells = []
        for name in runs[0]:
            values = [run[name] for run in runs]
            cells.append(f"{statistics.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})")
        print(f"| {arm} | {' | '.join(cells)} |")


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Greedy and sampled success, mean over the evaluations and last; the share of equal groups; groups sampled."""
    evals, steps = [row for row in rows if row.get("eval/greedy") is not None], [row for row in rows if row["step"]]
    out = {}
    for kind in ("greedy", "sampled"):
        values = [row[f"eval/{kind}"] for row in evals]
        out |= {f"{kind} first": values[0], f"{kind} mean": statistics.mean(values[1:]), f"{kind} last": values[-1]}
    out["equal"] = statistics.mean(row["groups/equal"] for row in steps)
    out["groups"] = sum(PER_STEP + row["groups/dropped"] for row in steps)
    return out


if __name__ == "__main__":
    main()
