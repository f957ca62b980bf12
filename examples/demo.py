"""From nothing to a trained model in a few minutes on a CPU: sort six digits.

    python examples/demo.py
    torchrun --nproc-per-node 4 examples/demo.py --parallel.tp 2

Makes a Qwen3 of one million random weights with its own tokenizer, and JSONL data; warm-starts it by SFT on a teacher that
is right only 45% of the time (30% of its answers are sorted downwards, 25% have two neighbours swapped), and lets GRPO find
out what the reward wants. Both steps are the example scripts, called as you would call them on your own model and data.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rlkit.parallel.flags import ParallelArgs

sys.path.insert(0, str(Path(__file__).parent))


@dataclass
class Args:
    output: Path = Path("runs/demo")
    """where everything goes; an earlier demo there is replaced"""
    sft_steps: int = 300
    """optimizer steps of the warm start"""
    grpo_steps: int = 200
    """rollouts of reinforcement learning"""
    seed: int = 0
    """of the data, the weights and the sampling"""
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    """how the model is cut over the ranks of torchrun"""


def make_data(folder: Path, *, seed: int, num_sft: int = 9600, num_train: int = 4096, num_eval: int = 256) -> None:
    """sft.jsonl {prompt, response} by the noisy teacher; train.jsonl and eval.jsonl {prompt, answer}; nothing overlaps."""
    rng = random.Random(seed)
    questions = [f"{x:06d}" for x in rng.sample(range(10**6), num_sft + num_train + num_eval)]

    def teacher(question: str) -> str:
        digits, luck = sorted(question), rng.random()
        if luck < 0.30:
            digits.reverse()
        elif luck < 0.55:
            i = rng.randrange(5)
            digits[i], digits[i + 1] = digits[i + 1], digits[i]
        return "".join(digits)

    rows = {
        "sft": [{"prompt": q, "response": teacher(q)} for q in questions[:num_sft]],
        "train": [{"prompt": q, "answer": "".join(sorted(q))} for q in questions[num_sft : num_sft + num_train]],
        "eval": [{"prompt": q, "answer": "".join(sorted(q))} for q in questions[num_sft + num_train :]],
    }
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def main(args: Args) -> None:
    import grpo
    import sft
    from flag_checks import check_values

    from rlkit.data.tiny import tiny_model, tiny_tokenizer
    from rlkit.parallel._ranks import first
    from rlkit.parallel.checkpoint import export_hf
    from rlkit.parallel.launch import open_mesh

    check_values(args)
    started = time.perf_counter()
    open_mesh(args.parallel, device="cpu")
    first(lambda: make_folder(args))
    tokenizer = tiny_tokenizer()
    export_hf(tiny_model(tokenizer, seed=args.seed), tokenizer, args.output / "random")

    first(lambda: print("SFT: learning to answer, from a teacher that is right 45% of the time"))
    warm = sft.main(
        sft.Args(
            model=str(args.output / "random"),
            data=str(args.output / "sft.jsonl"),
            output=args.output / "sft",
            steps=args.sft_steps,
            lr=1e-3,
            seed=args.seed,
            parallel=args.parallel,
        )
    )
    first(lambda: print("GRPO: learning what is right, from the reward alone"))
    trained = grpo.main(
        grpo.Args(
            model=str(warm),
            data=str(args.output / "train.jsonl"),
            eval_data=str(args.output / "eval.jsonl"),
            reward=str(Path(__file__).parent / "sorting_reward.py") + ":score",
            output=args.output / "grpo",
            steps=args.grpo_steps,
            max_prompt_tokens=32,
            max_new_tokens=8,
            prompts_per_step=16,
            minibatches=2,
            max_batch=128,
            lr=1.5e-4,
            lr_schedule="linear",
            eval_limit=256,
            eval_kl=True,
            seed=args.seed,
            parallel=args.parallel,
        )
    )
    first(lambda: report(args, trained, time.perf_counter() - started))


def make_folder(args: Args) -> None:
    """An empty folder with the data. Nothing but an earlier demo is deleted for it."""
    if args.output.exists() and any(args.output.iterdir()):
        if not all((args.output / name).exists() for name in ("sft.jsonl", "train.jsonl", "eval.jsonl", "random")):
            raise FileExistsError(f"--output {args.output} holds other things than a demo: give a folder of its own")
        shutil.rmtree(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    make_data(args.output, seed=args.seed)


def report(args: Args, trained: Path, seconds: float) -> None:
    """What was learned, and where everything is."""
    lines = [json.loads(line) for line in (args.output / "grpo" / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    print(f"\naccuracy on held-out prompts, in {seconds:.0f} s:")
    for how in ("sampled", "greedy"):
        print(f"  {how:8} {first[f'eval/{how}']:6.1%} -> {last[f'eval/{how}']:6.1%}")
    print(f"curves       {args.output / 'grpo' / 'metrics.png'}")
    print(f"samples      {args.output / 'grpo' / 'trajectories'}")
    print(f"checkpoint   {trained}   (transformers.AutoModelForCausalLM.from_pretrained loads it)")


if __name__ == "__main__":
    import tyro

    from rlkit.parallel.launch import main_on_ranks

    main_on_ranks(main, tyro.cli(Args, description=__doc__))
