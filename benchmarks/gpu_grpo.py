"""A whole GRPO step on one GPU, rlkit beside TRL: the same model of random weights, prompts and answers of one length.

    PYTHONPATH=. python benchmarks/gpu_grpo.py --side rlkit --size 1.5B --out results
    PYTHONPATH=. python benchmarks/gpu_grpo.py --side trl --size 1.5B --out results          # needs trl and datasets
    PYTHONPATH=. python benchmarks/gpu_grpo.py --side trl --rehearse --out /tmp/x            # tiny, on the CPU

rlkit is what `rlkit grpo` builds on a GPU: fp32 master weights, a bf16 copy that computes, sampling from another bf16
copy. `rlkit-eager` samples from the fp32 weights themselves, without CUDA graphs. TRL has its defaults (bf16 autocast
over fp32, activation checkpointing, Hugging Face `generate`); `trl-liger` uses its Liger loss.

Each run appends a line to `--out`/grpo.jsonl: median seconds of sampling, update and weight transfer of the steps after
the first two, tokens/s, MFU, and the peak of allocated memory. MFU = (6 N T + 2 N S) / (seconds * 989 TFLOP/s), with N
weights, T tokens of prompts and answers without sharing, S sampled tokens; attention is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpu import CUDA, DEVICE, Row, machine, reason

PEAK_FLOPS = 989e12
SIZES = {  # hidden size, layers, heads, key heads, MLP, tied: Qwen2.5
    "0.5B": (896, 24, 14, 2, 4864, True),
    "1.5B": (1536, 28, 12, 2, 8960, True),
    "7B": (3584, 28, 28, 4, 18944, False),
    "tiny": (64, 2, 4, 2, 128, True),
}
WARM_UP = 2  # steps that are left out


def main() -> None:
    """Measure one side."""
    args = parsed()
    row: Row = {"side": args.side, "size": args.size, "machine": machine()}
    names = ("prompts", "group", "prompt_tokens", "new_tokens", "micro", "checkpointing", "compile")
    row |= {name: getattr(args, name) for name in names}
    try:
        steps = trl(args) if args.side.startswith("trl") else rlkit(args)
        row |= summary(steps, args)
    except Exception as error:  # the line says so
        row["error"] = reason(error)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "grpo.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({k: v for k, v in row.items() if k != "machine"}), flush=True)
    sys.exit("error" in row)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=("rlkit", "rlkit-eager", "trl", "trl-liger"), required=True)
    parser.add_argument("--size", choices=list(SIZES), default="1.5B")
    numbers = {"prompts": 16, "group": 16, "prompt-tokens": 256, "new-tokens": 512, "steps": 4, "vocab": 151_936}
    for name, value in (numbers | {"micro": 16_384, "trl-rows": 32}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--checkpointing", action="store_true", help="rlkit: activation checkpointing")
    parser.add_argument("--compile", action="store_true", help="rlkit: compiled layers")
    parser.add_argument("--profile", action="store_true", help="rlkit: two groups by kernel, in profile.txt")
    parser.add_argument("--rehearse", action="store_true", help="without a device: tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, required=True, help="folder of grpo.jsonl")
    args = parser.parse_args()
    if args.rehearse:
        args.size, args.prompts, args.group, args.prompt_tokens, args.new_tokens = "tiny", 2, 4, 8, 6
        args.steps, args.micro, args.trl_rows, args.vocab = 3, 64, 4, 300
    elif not CUDA:
        parser.error("no CUDA device; --rehearse runs every line on the CPU")
    return args


def summary(steps: list[Row], args: argparse.Namespace) -> Row:
    """Medians and rates of the steps after the first ones."""
    late = steps[WARM_UP:] or steps[-1:]
    row: Row = {k: round(statistics.median(s[k] for s in late), 4) for k in ("sample", "update", "weights", "seconds")}
    hidden, layers, heads, kv_heads, mlp, _ = SIZES[args.size]
    weights = layers * (2 * hidden * (hidden + kv_heads * hidden // heads) + 3 * hidden * mlp) + args.vocab * hidden
    answers = args.prompts * args.group
    sampled, trained = answers * args.new_tokens, answers * (args.new_tokens + args.prompt_tokens)
    row |= {"first_step": round(steps[0]["seconds"], 2), "steps": len(steps)}
    row |= {"sampled_tokens_s": round(sampled / row["sample"]), "trained_tokens_s": round(trained / row["update"])}
    row |= {"mfu": round(weights * (6 * trained + 2 * sampled) / row["seconds"] / PEAK_FLOPS, 4)}
    row |= {"peak_gb": max(round(s["peak_gb"], 1) for s in late)}
    return row | {k: late[0][k] for k in ("decoder", "mismatch_k3") if k in late[0]}


def build(args: argparse.Namespace) -> Any:
    """The model in fp32, on the device."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    hidden, layers, heads, kv_heads, mlp, tied = SIZES[args.size]
    config = Qwen2Config(
        vocab_size=args.vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=mlp, tie_word_embeddings=tied, max_position_embeddings=4096,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def now() -> float:
    """Seconds, when the device has finished."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gb() -> float:
    """The peak since the last call."""
    if not CUDA:
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def rlkit(args: argparse.Namespace) -> list[Row]:
    """Steps of rlkit's own functions."""
    from rlkit.loops.updates import PolicyLoss, grpo_update
    from rlkit.metrics import finalize
    from rlkit.model.forward import make_policy, prepare_model
    from rlkit.model.optim import adamw
    from rlkit.model.parallelize import parallelize
    from rlkit.model.weights import stream_weights
    from rlkit.packing import pack, with_streams
    from rlkit.parallel.mesh import Parallel, make_mesh, start
    from rlkit.rollout.engines.local import LocalEngine
    from rlkit.settings import Optim, Rollouts
    from rlkit.types import SamplingParams, Trajectory

    start(device=DEVICE)
    half = torch.bfloat16 if CUDA else torch.float32
    options = {"dtype": half, "activation_checkpointing": args.checkpointing, "compile": args.compile}
    model = parallelize(prepare_model(build(args)), make_mesh(Parallel(), device=DEVICE), **options)
    policy, optimizer = make_policy(model), adamw(model, lr=1e-6)
    sampling = {} if args.side == "rlkit-eager" else {"dtype": torch.bfloat16}
    engine = LocalEngine(model, max_len=args.prompt_tokens + args.new_tokens, eos_token_ids=(), **sampling)
    draw, rows = torch.Generator().manual_seed(1), []

    async def sampled(prompts: list[list[int]], step: int) -> list[Any]:
        seeds = (step * 10**6 + i for i in range(args.prompts * args.group))
        every = [p for p in prompts for _ in range(args.group)]
        calls = [SamplingParams(max_new_tokens=args.new_tokens, seed=seed) for seed in seeds]
        return await asyncio.gather(*(engine.generate(p, params=c) for p, c in zip(every, calls, strict=True)))

    for step in range(args.steps):
        prompts = torch.randint(args.vocab, (args.prompts, args.prompt_tokens), generator=draw).tolist()
        began = now()
        done = asyncio.run(sampled(prompts, step))
        after_sample = now()
        parts = [done[i : i + args.group] for i in range(0, len(done), args.group)]
        groups = [
            [Trajectory(p, c.ids, [True] * len(c.ids), c.logp, c.versions) for c in part]
            for p, part in zip(prompts, parts, strict=True)
        ]
        batch = pack(groups)
        batch = with_streams(batch, advantages=torch.randn(batch.num_tokens, generator=draw))
        update = partial(
            grpo_update, batch, policy=policy, optimizer=optimizer, loss=PolicyLoss(), rollouts=Rollouts(),
            optim=Optim(max_tokens=args.micro), lr=1e-6, kl_coef=0.0, entropy_coef=0.0, seed=step,
        )  # fmt: skip
        metrics = update()
        after_update = now()
        asyncio.run(engine.update_weights(stream_weights(model), version=step + 1))
        end = now()
        row: Row = {
            "sample": after_sample - began,
            "update": after_update - after_sample,
            "weights": end - after_update,
        }
        row |= {"seconds": end - began, "peak_gb": peak_gb(), "decoder": type(engine._decoder).__name__}
        row |= {"mismatch_k3": finalize(metrics).get("mismatch/k3")}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.profile:
        few = pack(groups[:2])
        few = with_streams(few, advantages=torch.randn(few.num_tokens, generator=draw))
        profile(partial(update.func, few, **update.keywords), args.out)
    return rows


def profile(run: Callable[[], Any], out: Path) -> None:
    """Write what one run takes on the host and on the device, the longest first."""
    with torch.profiler.profile() as found:
        began = now()
        run()
        seconds = now() - began
    events = found.key_averages()
    busy = sum(event.self_device_time_total for event in events) / 1e6
    lines = [f"{seconds:.3f} s, device busy {busy:.3f} s"]
    for key in ("self_device_time_total", "self_cpu_time_total"):
        lines += ["", key, events.table(sort_by=key, row_limit=30, max_name_column_width=60)]
    out.mkdir(parents=True, exist_ok=True)
    (out / "profile.txt").write_text("\n".join(lines))
    print(lines[0], flush=True)


def trl(args: argparse.Namespace) -> list[Row]:
    """Steps of TRL's trainer, from its own log."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlkit.data.tiny import tiny_tokenizer

    letters = torch.randint(
        97, 123, (args.prompts * (args.steps + 1), args.prompt_tokens), generator=torch.manual_seed(1)
    )
    texts = ["".join(map(chr, row)) for row in letters.tolist()]
    rows: list[Row] = []
    spent = {"sample": 0.0, "last": 0.0}

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, *inputs: Any, **options: Any) -> Any:
            began = now()
            out = super()._generate_and_score_completions(*inputs, **options)
            spent["sample"] += now() - began
            return out

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            spent["last"] = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            end, sample = now(), spent["sample"]
            row: Row = {"sample": sample, "weights": 0.0, "seconds": end - spent["last"], "peak_gb": peak_gb()}
            rows.append(row | {"update": row["seconds"] - sample})
            print(json.dumps(rows[-1]), flush=True)
            spent.update(sample=0.0, last=end)

    answers = args.prompts * args.group
    rows_each = min(answers, args.trl_rows)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=not CUDA, bf16=CUDA, max_steps=args.steps, learning_rate=1e-6, beta=0.0,
        per_device_train_batch_size=rows_each, gradient_accumulation_steps=answers // rows_each, seed=0,
        num_generations=args.group, max_completion_length=args.new_tokens, temperature=1.0, logging_steps=1000,
        save_strategy="no", report_to="none", disable_tqdm=True, use_liger_kernel=args.side == "trl-liger",
        generation_kwargs={"min_new_tokens": args.new_tokens},
    )  # fmt: skip
    trainer = Timed(
        model=build(args), args=config, train_dataset=Dataset.from_list([{"prompt": t} for t in texts]),
        processing_class=tiny_tokenizer(), callbacks=[Clock()],
        reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return rows


if __name__ == "__main__":
    main()
