"""A training step on a CPU: rlkit's packed step against the padded one of a transformers trainer, in turns.

    python benchmarks/training_step.py
    python benchmarks/training_step.py --models micro --prompts 256 --dtypes bf16

One optimizer step of GRPO on 8 prompts with 8 answers each, with SmolLM2-135M-Instruct and random Qwen3 models of 1.0 M
(nano), 9.5 M (micro) and 44 M (mid) parameters (`_models.py`). Forward, loss, backward, AdamW with clipping:

    padded        each answer with its prompt, padded to one length, through the model's own forward with sdpa; logits,
                  log-softmax and loss at the answers (what trainers over transformers do); eight answers a micro-batch
                  where all together do not fit 2 GB of logits and activations
    packed        `grpo_update` with each prompt forwarded once, over the model's own layers

Both train on the same tokens; the gradient norms of the first step must agree. A ratio is padded / that side,
within a round.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _cli import run_script
from _models import build
from _timing import machine, say
from torch import Tensor

from rlkit import Trajectory, group_centered, pack, with_advantages
from rlkit.loops.updates import PolicyLoss, grpo_update
from rlkit.metrics import finalize
from rlkit.model.forward import make_policy, prepare_model
from rlkit.model.optim import adamw
from rlkit.settings import Optim, Rollouts

LONGEST = {
    "mid": 256,
    "smollm": 256,
    "gemma": 256,
    "wide": 256,
}  # prompt; with 1,024 tokens one padded step takes a minute
GROUPS, GROUP = 8, 8


@dataclass
class Args:
    models: tuple[str, ...] = ("smollm", "nano", "micro", "mid")
    """which of smollm, gemma, wide, mid (prompts up to 256), nano, micro"""
    prompts: tuple[int, ...] = (16, 256, 1024)
    """tokens of a prompt"""
    answer: int = 32
    """tokens of an answer"""
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    """of the products"""
    rounds: int = 9
    """counted rounds"""
    seconds: float = 60.0
    """time limit of a row; at least three rounds are counted"""
    threads: int = 2
    """of torch"""
    out: Path = Path("benchmarks/results/training_step_cpu.json")
    """where the figures go"""


def make_groups(prompt: int, answer: int, vocab: int) -> list[list[Trajectory]]:
    draw = torch.Generator().manual_seed(0)
    groups = []
    for _ in range(GROUPS):
        ids = torch.randint(0, vocab, (prompt,), generator=draw).tolist()
        answers = torch.randint(0, vocab, (GROUP, answer), generator=draw).tolist()
        mask, logp, versions = [True] * answer, [-5.0] * answer, [0] * answer
        groups.append([Trajectory(ids, a, mask, logp, versions, reward=float(i % 2)) for i, a in enumerate(answers)])
    return groups


def padded_step(model: Any, optimizer: Any, ids: Tensor, advantages: Tensor, prompt: int, dtype: str) -> float:
    """On policy: the ratio is exp(logp - logp.detach()). Returns the gradient norm."""
    rows = max(GROUP, (8 << 20) // (ids.shape[1] * model.config.hidden_size))
    low = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()
    for part, advantage in zip(ids.split(rows), advantages.split(rows), strict=True):
        with low:
            hidden = model.model(part, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
            logits = model.lm_head(hidden).float()
        logp = -F.cross_entropy(logits.flatten(0, 1), part[:, prompt:].flatten(), reduction="none").view(len(part), -1)
        ratio = (logp - logp.detach()).exp()
        loss = -torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.28) * advantage[:, None])
        (loss.sum() / advantages.numel() / logp.shape[1]).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def measure(name: str, prompt: int, dtype: str, args: Args) -> dict[str, Any]:
    """Seconds of a step of each side, round by round."""
    groups = make_groups(prompt, args.answer, build(name).config.vocab_size)
    batch = with_advantages(pack(groups), group_centered)
    ids = torch.tensor([[*t.prompt_ids, *t.ids] for group in groups for t in group])
    advantages = batch.advantages[batch.cu_seqlens[:-1]]
    plain, model = build(name), prepare_model(build(name))
    optimizers = adamw(plain, lr=0.0), adamw(model, lr=0.0)  # every step has the same gradient
    policy, optim = make_policy(model, dtype=dtype), Optim(lr=1e-5, max_tokens=16384)
    loss = PolicyLoss(correction=torch.ones_like)  # the log-probs of the engine are made up

    def packed() -> float:
        metrics = grpo_update(
            batch, policy=policy, optimizer=optimizers[1], loss=loss, rollouts=Rollouts(), optim=optim,
            lr=0.0, kl_coef=0.0, entropy_coef=0.0, seed=0,
        )  # fmt: skip
        return finalize(metrics)["grad_norm"]

    sides = {
        "padded": lambda: padded_step(plain, optimizers[0], ids, advantages, prompt, dtype),
        "packed": packed,
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    begin = time.perf_counter()
    for number in range(args.rounds + 1):
        if number > 3 and time.perf_counter() - begin > args.seconds:
            break
        for side, run in sides.items():
            say(f"{name}, prompt {prompt}, {dtype}: round {number}/{args.rounds}, {side}")
            start = time.perf_counter()
            norm = run()
            if number:
                times[side].append(time.perf_counter() - start)
            elif side == "padded":
                truth = norm
            elif abs(norm / truth - 1) > (1e-2 if dtype == "fp32" else 0.1):
                raise ValueError(f"{name}, prompt {prompt}, {dtype}: gradient norm {norm} of {side}, {truth} of padded")
    row: dict[str, Any] = {"model": name, "prompt": prompt, "dtype": dtype, "rounds": len(times["padded"])}
    for side, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(times["padded"], seconds, strict=True))
        row[side] = {"seconds": statistics.median(seconds), "ratio": [statistics.median(ratios), ratios[0], ratios[-1]]}
    return row


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    rows = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{'model':8}{'prompt':>7}{'dtype':>7}{'padded ms':>11}   packed, times as fast", flush=True)
    for name in args.models:
        for prompt in (n for n in args.prompts if n <= LONGEST.get(name, n)):
            for dtype in args.dtypes:
                row = measure(name, prompt, dtype, args)
                ratio = "{:8.2f} ({:.2f}-{:.2f})".format(*row["packed"]["ratio"])
                print(f"{name:8}{prompt:7}{dtype:>7}{1e3 * row['padded']['seconds']:11.0f}   {ratio}", flush=True)
                rows.append(row)
                args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
