"""From nothing to a trained model in a few minutes on a CPU: sort six digits.

    python examples/demo.py
    torchrun --nproc-per-node 4 examples/demo.py --parallel.tp 2

Makes a Qwen3 of one million random weights with its own tokenizer, and JSONL data. SFT imitates a teacher that is usually
wrong: it sorts 65% of its answers downwards and swaps two neighbours (sometimes equal ones) in 10%, so 28% are right.
The model's most likely answer is then wrong as well. GRPO learns from the reward alone: 1 for the right answer, else 0.
Both phases run the scripts `rlkit sft` and `rlkit grpo` on generated data. No held-out prompt is trained on.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlkit.scripts import grpo, sft
from rlkit.scripts.args import Data, Episodes, Evaluation, Examples, Model
from rlkit.scripts.cli import run
from rlkit.settings import Count, CountOr0, Engines, Optim, ParallelArgs, Rollouts, Schedule, Seed, check, refuse_if


@dataclass(frozen=True)
class Args:
    output: Path = Path("runs/demo")
    """where everything goes; an earlier demo there is replaced"""
    sft_steps: CountOr0 = 300
    """optimizer steps of the warm start"""
    grpo_steps: CountOr0 = 200
    """rollouts of reinforcement learning"""
    eval_limit: Count = 256
    """held-out prompts"""
    seed: Seed = 0
    """of the data, the weights and the sampling"""
    digits: Count = 6
    """of a question, at least 5"""
    hidden: Count = 128
    """width of the model, in heads of 32, two for each key-value head; the learning rates are inverse to it"""
    layers: Count = 4
    """of the model; `hidden` 768 and 12 layers are 107 M parameters, for a GPU"""
    device: str = "cpu"
    """cpu or cuda"""
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    """how the model is cut over the ranks of torchrun"""
    resume: bool = False
    """continue an interrupted demo in `output`"""

    def __post_init__(self) -> None:
        check(self)
        refuse_if(self.digits < 5, f"`digits` must be at least 5, or there are too few questions, got {self.digits}")
        refuse_if(self.hidden % 64, f"`hidden` must be a multiple of 64, got {self.hidden}")


def make_data(
    folder: Path, *, seed: int, digits: int = 6, num_sft: int = 9600, num_train: int = 4096, num_eval: int = 256
) -> None:
    """Write sft.jsonl {prompt, response} of the teacher, train.jsonl and eval.jsonl {prompt, answer}; prompts are unique."""
    rng = random.Random(seed)
    questions = [f"{x:0{digits}d}" for x in rng.sample(range(10**digits), num_sft + num_train + num_eval)]

    def teacher(question: str) -> str:
        answer, luck = sorted(question), rng.random()
        if luck < 0.65:
            answer.reverse()
        elif luck < 0.75:
            i = rng.randrange(digits - 1)
            answer[i], answer[i + 1] = answer[i + 1], answer[i]
        return "".join(answer)

    rows = {
        "sft": [{"prompt": q, "response": teacher(q)} for q in questions[:num_sft]],
        "train": [{"prompt": q, "answer": "".join(sorted(q))} for q in questions[num_sft : num_sft + num_train]],
        "eval": [{"prompt": q, "answer": "".join(sorted(q))} for q in questions[num_sft + num_train :]],
    }
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def main(args: Args) -> None:
    from rlkit.data.tiny import tiny_model, tiny_tokenizer
    from rlkit.model.launch import open_mesh
    from rlkit.model.weights import export_hf
    from rlkit.parallel import on_rank0

    started = time.perf_counter()
    open_mesh(args.parallel, device=args.device)
    if not args.resume:
        on_rank0(lambda: make_folder(args))
        tokenizer = tiny_tokenizer()
        heads, size = args.hidden // 32, {"hidden": args.hidden, "layers": args.layers, "intermediate": 4 * args.hidden}
        model = tiny_model(tokenizer, heads=heads, kv_heads=heads // 2, seed=args.seed, **size)
        export_hf(model, tokenizer, args.output / "random")

    on_rank0(lambda: print("SFT: imitate a teacher that sorts 65% of its answers downwards (28% are right)"))
    common = {"seed": args.seed, "resume": args.resume}
    warm = sft.main(
        sft.Args(
            model=Model(str(args.output / "random"), device=args.device, parallel=args.parallel),
            data=Data(str(args.output / "sft.jsonl")),
            examples=Examples(batch_size=64),
            schedule=Schedule(args.output / "sft", steps=args.sft_steps, print_steps=50, save_steps=100, **common),
            optim=Optim(lr=1e-3 * 128 / args.hidden, lr_schedule="linear", warmup_steps=20),
        )
    )
    on_rank0(lambda: print("GRPO: learn what is right from the reward alone"))
    reward = str(Path(__file__).with_name("sorting_reward.py")) + ":score"
    trained = grpo.main(
        grpo.Args(
            model=Model(str(warm), device=args.device, parallel=args.parallel),
            data=Data(str(args.output / "train.jsonl"), eval_data=str(args.output / "eval.jsonl")),
            episodes=Episodes(reward=reward, max_prompt_tokens=args.digits + 26, eval_kl=True),
            evaluation=Evaluation(eval_limit=args.eval_limit),
            rollouts=Rollouts(
                prompts_per_step=16, minibatches=2, max_new_tokens=args.digits + 2, print_samples_steps=100
            ),
            schedule=Schedule(
                args.output / "grpo", steps=args.grpo_steps, eval_steps=25, print_steps=10, save_steps=50, **common
            ),
            optim=Optim(lr=1.5e-4 * 128 / args.hidden, lr_schedule="linear"),
            engine=Engines(max_batch=128),
        )
    )
    on_rank0(lambda: report(args, trained, time.perf_counter() - started))


def make_folder(args: Args) -> None:
    """Make an empty folder with the data. Only an earlier demo is deleted."""
    if args.output.exists() and any(args.output.iterdir()):
        if not all((args.output / name).exists() for name in ("sft.jsonl", "train.jsonl", "eval.jsonl", "random")):
            raise FileExistsError(f"--output {args.output} holds other things than a demo: give a folder of its own")
        shutil.rmtree(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    make_data(args.output, seed=args.seed, digits=args.digits)


def report(args: Args, trained: Path, seconds: float) -> None:
    """Print the result, three answers before and after GRPO, and the paths; use the result as the title of the plot."""
    from rlkit.run.folder import read_metrics
    from rlkit.run.report.plot import plot_run

    run = args.output / "grpo"
    evaluations = [row for row in read_metrics(run) if "eval/greedy" in row]
    first, last = evaluations[0], evaluations[-1]
    before, after = (greedy_answers(args.output, row["step"]) for row in (first, last))
    headline = (
        f"greedy {first['eval/greedy']:.1%} -> {last['eval/greedy']:.1%} on {len(after)} held-out prompts, "
        f"{last['step']} GRPO steps" + ("" if args.resume else f", {seconds:.0f} s")
    )
    print(f"\n{headline}")
    print(f"sampled {first['eval/sampled']:.1%} -> {last['eval/sampled']:.1%}\n")
    print(f"{'prompt':8} {'before GRPO':16} after GRPO")
    for index in sorted(after)[:3]:
        old, new = before[index], after[index]
        print(f"{old.question:8} {old.text:8} {old.verdict:7} {new.text:8} {new.verdict}")
    print()
    picture = run / "metrics.png"
    if picture.exists():
        plot_run(run, title=headline)
        print(f"curves   {picture}")
    print(f"report   {run / 'report.html'}")
    print(f"samples  {run / 'trajectories'}")
    print(f"model    {trained}  (transformers' from_pretrained loads it)")


class Answer(NamedTuple):
    """A question, the model's answer, and whether it is right."""

    question: str
    text: str
    verdict: str


def greedy_answers(output: Path, step: int) -> dict[int, Answer]:
    """The greedy answers of the evaluation after `step`, by the index of the held-out prompt."""
    rows = [json.loads(line) for line in (output / "eval.jsonl").read_text().splitlines()]
    out = {}
    for line in (output / "grpo" / "trajectories" / f"eval_greedy_{step:06d}.jsonl").read_text().splitlines():
        sample = json.loads(line)
        text = sample["completion"].removesuffix("<|im_end|>").encode("unicode_escape").decode()
        verdict = "right" if sample["reward"] == 1.0 else "wrong"
        out[sample["group"]] = Answer(rows[sample["group"]]["prompt"], text, verdict)
    return out


if __name__ == "__main__":
    run(main, Args, __doc__)
