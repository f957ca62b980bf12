"""The rows of `gpu_training.py`: models, batches, a training step of each side, decoding, and the arithmetic needed."""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_peers as peers
import torch
from _gpu import CUDA, DEVICE, Row, flush, machine, median_ms
from torch.utils.checkpoint import checkpoint

from rlkit.loops.sft import pack_examples
from rlkit.loops.updates import PolicyLoss, grpo_update, per_token
from rlkit.model.forward import make_policy
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.packing import pack, with_streams
from rlkit.parallel.attention import Segment, segments
from rlkit.parallel.data import rank_microbatches
from rlkit.parallel.mesh import Parallel, make_mesh, start
from rlkit.rollout.engines.local import LocalEngine
from rlkit.settings import Optim, Rollouts
from rlkit.types import Batch, SamplingParams, Trajectory


class Size(NamedTuple):
    """A Qwen3 of random weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool

    @property
    def matrices(self) -> int:
        """Weights of the matrices in all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def weights(self) -> int:
        """All weights, without the norms."""
        return self.matrices + (1 if self.tied else 2) * VOCAB * self.hidden


SIZES = {
    "0.6B": Size(1024, 28, 16, 8, 128, 3072, True),
    "1.7B": Size(2048, 28, 16, 8, 128, 6144, True),
    "8B": Size(4096, 36, 32, 8, 128, 12_288, False),
}
VOCAB, PROMPT, ANSWER, GROUP = (151_936, 1024, 1024, 16) if CUDA else (263, 6, 9, 3)
REQUESTS, READ, NEW = (64, 128, 256) if CUDA else (3, 5, 4)  # decoding: prompts, their tokens, and new tokens of each
MICRO_TOKENS = (32_768, 16_384, 8192, 4096, 2048) if CUDA else (32, 16)  # the first that fits is used
SPARE_BYTES = 12 << 30  # for activations: AdamW needs 16 bytes per weight and this
TIMED_SECONDS, ROUNDS = (5.0, 10) if CUDA else (0.0, 1)  # at least two rounds on a device
PRODUCT = 8192 if CUDA else 64


class Case(NamedTuple):
    """One row. `side`: rlkit, transformers, or transformers with TRL's head."""

    size: str
    task: str
    side: str = "rlkit"
    share: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """As printed and saved."""
        words = [self.size, self.task, self.side, "shared" * self.share, "compiled" * self.compiled]
        return " ".join(filter(None, words))


def measure(case: Case) -> Row:
    """The row of a case; raises what the case raises, except for a lack of memory, which is an `error` of the row."""
    free()
    if case.task == "ceilings":
        return ceilings()
    if case.task == "curve":
        return run_demo(Path(case.side))
    start(device=DEVICE)
    error = ""
    for tokens in MICRO_TOKENS[2 * (case.size == "8B" and CUDA) :]:  # its weights and gradients alone are 66 GB
        try:
            return decoding(case) if case.task == "decode" else training(case, tokens)
        except torch.OutOfMemoryError:
            error = f"out of memory at {tokens} tokens per micro-batch"
        free()  # not in the handler: it holds the frames, and so the model
        if case.task == "decode":
            break
    return {"error": error}


def free() -> None:
    """Release what the last case used."""
    flush.cache_clear()
    torch.compiler.reset()
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def ceilings() -> Row:
    """Rates of a bf16 product of random data and of a copy on this device."""
    x, y = (torch.randn(PRODUCT, PRODUCT, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = median_ms(lambda: x @ y)
    source = torch.empty(1 << 30 if CUDA else 1 << 10, dtype=torch.bfloat16, device=DEVICE).normal_()
    target = torch.empty_like(source)
    copy = median_ms(lambda: target.copy_(source))
    return {
        "machine": machine(),
        "product_tflops": round(2e-9 * PRODUCT**3 / product, 1),
        "copy_tb_s": round(2e-9 * source.nbytes / copy, 3),
    }


def build(size: Size, dtype: torch.dtype = torch.float32) -> Any:
    """The model on the device."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    size = size if CUDA else Size(32, 2, 4, 2, 8, 64, size.tied)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.head_dim, intermediate_size=size.mlp,
        tie_word_embeddings=size.tied, max_position_embeddings=4096, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def training(case: Case, max_tokens: int) -> Row:
    """Median time of a step, its rates, and the peak of allocated memory, weights and optimizer included."""
    size, ids = SIZES[case.size], torch.randint(VOCAB, (GROUP, PROMPT + ANSWER), generator=torch.manual_seed(1))
    whole = packed(case._replace(share=False), ids)
    batch = packed(case, ids) if case.side == "rlkit" else whole
    make = rlkit_step if case.side == "rlkit" else bare_step
    step, optimizer = make(case, build(size), batch if case.side == "rlkit" else ids, max_tokens)
    step()
    times: list[float] = []
    end = time.monotonic() + TIMED_SECONDS
    while len(times) < min(2, ROUNDS) or (len(times) < ROUNDS and time.monotonic() < end):
        times.append(seconds(step))
    median, micros = statistics.median(times), rank_microbatches((batch,), mesh=None, max_tokens=max_tokens)
    processed = [span for micro, *_ in micros for span in segments(micro)]
    trained = int(whole.mask.sum())
    return {
        "seconds": round(median, 4), "slowest": round(max(times), 4), "runs": len(times),
        "processed_tokens_s": round(sum(s.length for s in processed) / median),
        "tokens_s": round(whole.num_tokens / median),
        "tflops": round(1e-12 * flops(size, processed, trained) / median, 2),
        "unshared_tflops": round(1e-12 * flops(size, segments(whole), trained) / median, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1) if CUDA else 0.0,
        "micro_tokens": max_tokens, "optimizer": optimizer,
    }  # fmt: skip


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one run, until the device has finished."""
    wait = torch.cuda.synchronize if CUDA else lambda: None
    wait()
    before = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - before


def flops(size: Size, spans: Sequence[Segment], trained: int) -> float:
    """Those that a forward and a backward need: see `gpu_training.py`."""
    tokens = sum(s.length for s in spans)
    pairs = sum(s.length * s.num_keys - s.length * (s.length - 1) // 2 for s in spans)
    attention = 12 * size.layers * size.heads * size.head_dim * pairs
    return 6 * size.matrices * tokens + attention + 6 * VOCAB * size.hidden * trained


class Example(NamedTuple):
    """A row of SFT."""

    ids: list[int]
    mask: list[bool]


def packed(case: Case, ids: torch.Tensor) -> Batch:
    """The batch of a step: answers to one prompt (GRPO), or as many examples of prompt and answer (SFT)."""
    if case.task == "sft":
        return pack_examples([Example(row, [False] * PROMPT + [True] * ANSWER) for row in ids.tolist()])
    prompt, trains, logp = ids[0, :PROMPT].tolist(), [True] * ANSWER, [-12.0] * ANSWER
    group = [Trajectory(prompt, row, trains, logp, [0] * ANSWER) for row in ids[:, PROMPT:].tolist()]
    batch = pack([group], share_prompts=case.share)
    return with_streams(batch, advantages=torch.randn(batch.num_tokens))


def rlkit_step(case: Case, model: Any, batch: Batch, max_tokens: int) -> tuple[Callable[[], Any], str]:
    """A step as rlkit's loops take it, from the packed batch on the host to the optimizer."""
    mesh = make_mesh(Parallel(), device=DEVICE)
    options = {"dtype": torch.bfloat16, "activation_checkpointing": True, "compile": case.compiled}
    model = parallelize(model, mesh, **options)
    policy, optimizer = make_policy(model, dtype="bf16"), chosen_optimizer(case, model)

    def sft() -> None:
        for micro, w in rank_microbatches((batch, per_token(batch)), mesh=mesh, max_tokens=max_tokens):
            (-w.to(DEVICE, non_blocking=CUDA) * policy(micro).logp).sum().backward()
        optimizer_step(optimizer, max_norm=1.0)

    grpo = partial(
        grpo_update, batch, policy=policy, optimizer=optimizer, loss=PolicyLoss(), rollouts=Rollouts(),
        optim=Optim(max_tokens=max_tokens), lr=1e-6, kl_coef=0.0, entropy_coef=0.0, seed=0,
    )  # fmt: skip
    return sft if case.task == "sft" else grpo, type(optimizer).__name__


def chosen_optimizer(case: Case, model: Any) -> torch.optim.Optimizer:
    """AdamW, or SGD without states where fp32 weights, gradients and AdamW's states do not fit into the memory."""
    total = torch.cuda.get_device_properties(0).total_memory if CUDA else 1 << 60
    if 16 * SIZES[case.size].weights + SPARE_BYTES <= total:
        return adamw(model, lr=1e-6)
    return torch.optim.SGD(model.parameters(), lr=1e-6)


def bare_step(case: Case, model: Any, ids: torch.Tensor, max_tokens: int) -> tuple[Callable[[], Any], str]:
    """The same step on the model's own forward: FSDP2 and checkpointing per layer, rows of equal length, all logits."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    unit = partial(fully_shard, mesh=make_mesh(Parallel(), device=DEVICE).fsdp, mp_policy=policy)
    for layer in model.model.layers:
        if case.compiled:
            layer.forward = torch.compile(layer.forward)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        unit(layer)
    if case.side != "transformers":
        model.forward = partial(_log_probs_of, _head("TRL, chunked"), model)
    unit(model)
    optimizer, log_probs = chosen_optimizer(case, model), bare_log_probs(case, model)
    rows, advantages = max(1, max_tokens // ids.shape[1]), torch.randn(GROUP, 1, device=DEVICE)

    def step() -> None:
        for part, a in zip(ids.to(DEVICE).split(rows), advantages.split(rows), strict=True):
            logp = log_probs(part)
            ratio = (logp - logp.detach()).exp()
            gain = logp if case.task == "sft" else torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
            (-gain.sum() / (GROUP * ANSWER)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, type(optimizer).__name__


def bare_log_probs(case: Case, model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """`[B, S]` tokens -> log-probs of the answers. SFT asks for all logits, GRPO for those of the answer."""
    if case.side != "transformers":
        return model  # type: ignore[no-any-return]
    keep = 0 if case.task == "sft" else ANSWER + 1

    def run(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[:, :-1].float()
        targets = ids[:, -logits.shape[1] :].clone()
        if case.task == "sft":
            targets[:, : PROMPT - 1] = -100
            return -torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]

    return run


def _head(name: str) -> peers.Head:
    head = peers.heads()[name]
    if isinstance(head, str):
        raise RuntimeError(head)
    return head


def _log_probs_of(head: peers.Head, model: Any, ids: torch.Tensor) -> torch.Tensor:
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]
    weight = model.lm_head.weight
    return head(hidden.flatten(0, 1).to(weight.dtype), weight, ids[:, PROMPT:].flatten())[0].view(-1, ANSWER).clone()


def decoding(case: Case) -> Row:
    """New tokens per second of all requests together, weights in bf16; the engine also returns log-probs.

    As `rlkit grpo` builds it: fp32 weights and the engine's copy of them; `generate` has a model in bf16.
    """
    model = build(SIZES[case.size], torch.float32 if case.side == "rlkit" else torch.bfloat16).eval()
    prompts = torch.randint(VOCAB, (REQUESTS, READ), generator=torch.manual_seed(1))
    engine = None
    if case.side == "rlkit":
        options = {"compile": True} if case.compiled else {"dtype": torch.bfloat16}
        engine = LocalEngine(model, eos_token_ids=(), max_batch=REQUESTS, max_len=READ + NEW, **options)

    async def ours() -> None:
        every = [SamplingParams(max_new_tokens=NEW, seed=i) for i in range(REQUESTS)]
        await asyncio.gather(*(engine.generate(p, params=s) for p, s in zip(prompts.tolist(), every, strict=True)))

    def theirs() -> None:
        ids = prompts.to(DEVICE)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, max_new_tokens=NEW,
            min_new_tokens=NEW, pad_token_id=0,
        )  # fmt: skip

    run = (lambda: asyncio.run(ours())) if engine else theirs
    run()
    times = [seconds(run) for _ in range(min(2, ROUNDS))]
    row: Row = {"seconds": round(min(times), 4), "slowest": round(max(times), 4), "runs": len(times)}
    row |= {"tokens_s": round(REQUESTS * NEW / min(times))}
    row |= {"peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1) if CUDA else 0.0}
    return row | ({"backend": type(engine._decoder).__name__} if engine else {})


def run_demo(folder: Path) -> Row:
    """The task of examples/demo.py on a model of 107 M weights; `curve` reads what it leaves in `folder`."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import demo

    size = {"hidden": 768, "layers": 12, "digits": 10} if CUDA else {"sft_steps": 2, "grpo_steps": 2, "eval_limit": 4}
    demo.main(demo.Args(folder, device=DEVICE, **size))
    return {}


def curve(folder: Path) -> Row:
    """Evaluations of a run that has ended or was stopped: step, and shares of right answers, greedy and sampled."""
    path = folder / "grpo" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    points = [(x["step"], x["eval/greedy"], x["eval/sampled"]) for x in lines if "eval/greedy" in x]
    return {"steps": lines[-1]["step"] if lines else 0, "curve": points}
