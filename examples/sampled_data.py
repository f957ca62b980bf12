"""What examples/grpo.py, async_grpo.py and ppo.py share: flags, prompts and environments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from flag_checks import check_flags, check_lengths, max_len, template_args

from rlkit.settings import ParallelArgs


@dataclass
class Args:
    model: str
    """folder written by save_pretrained, or a hub id"""
    data: str
    """JSON, JSONL, CSV, Parquet or Arrow file, save_to_disk folder or hub id (OWNER/NAME:CONFIG:SPLIT) of the training prompts"""
    rename: dict[str, str] = field(default_factory=dict)
    """columns of the data under other names: `--rename question prompt`"""
    reward: str | None = None
    """FILE.py:FUNCTION or MODULE:FUNCTION that scores a completion; None: the environment's own reward"""
    env: str | None = None
    """FILE.py:FUNCTION of an environment, `async def env(prompt, sample)`, or of a function of the tokenizer that
    returns one; None: one question, one answer"""
    tools: tuple[str, ...] = ()
    """FILE.py:FUNCTION of functions that the model may call; without --env it calls them until a turn calls none"""
    tool_calls: Literal["hermes", "json", "pythonic"] = "hermes"
    """how the model writes a call: <tool_call> with JSON (Qwen), nothing but JSON (Llama 3, Mistral), or [f(x=1)]"""
    output: Path = Path("runs")
    """run folder"""
    eval_data: str | None = None
    """held-out prompts; None: no evaluation"""
    steps: int = 200
    """batches to train on"""
    prompts_per_step: int = 8
    """groups of a batch"""
    group_size: int = 8
    """samples of each prompt"""
    drop_truncated: bool = False
    """do not train on answers that a length limit cut"""
    minibatches: int = 1
    """optimizer steps a batch is split into"""
    epochs: int = 1
    """passes over a batch"""
    max_prompt_tokens: int = 1024
    """longer prompts are dropped, counted and reported"""
    max_new_tokens: int = 1024
    """limit of a completion"""
    max_turns: int | None = None
    """turns of an episode; None: the environment's own limit"""
    max_total_tokens: int | None = None
    """of an episode's context, prompt and all turns; None: max_prompt_tokens + max_new_tokens"""
    max_sampled_tokens: int | None = None
    """of an episode, in all of its turns together; None: no limit but those of turns and context"""
    temperature: float = 1.0
    """of sampling, and of all log-probs"""
    top_p: float = 1.0
    """sample from the most probable tokens that have so much probability together; the loss allows for what is cut"""
    top_k: int = 0
    """sample from so many most probable tokens; 0: all"""
    stop: tuple[str, ...] = ()
    """texts that end a turn, besides the model's own tokens for that"""
    system_prompt: str | None = None
    """put before every conversation that has none"""
    chat_template: bool = True
    """render with the model's chat template; off for base models"""
    template_args: str = "{}"
    """JSON of what else the chat template takes, e.g. {"enable_thinking": false} for Qwen3"""
    lora_rank: int = 0
    """rank of LoRA adapters on all linear layers, which then are all that trains; 0: every weight (needs peft)"""
    lr: float = 1e-6
    """highest learning rate"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up: stay, or fall to 0 at the last step"""
    warmup_steps: int = 0
    """steps until the highest learning rate"""
    weight_decay: float = 0.0
    """of AdamW, on matrices only"""
    max_norm: float = 1.0
    """global gradient norm to clip to; inf: not clipped"""
    correction: Literal["tis", "icepop", "none"] = "tis"
    """for tokens that older weights, or an engine of other numerics, sampled: tis caps a token's weight, icepop drops
    those whose weight is outside [0.5, 5], none gives all the weight 1"""
    tis_max_weight: float = 2.0
    """the cap of tis"""
    kl_coef: float = 0.0
    """weight of the KL to the reference model in the loss; 0 does not load one"""
    reference: str | None = None
    """reference model; None: the initial weights of `model` (with LoRA, `model` without its adapter: no second one)"""
    kl_target: float | None = None
    """move kl_coef so that the KL (mean of k3, nats per token) stays near this; None: kl_coef stays"""
    kl_controller: Literal["fixed", "linear", "exponential", "pid", "decay", "cosine"] | None = None
    """rule that moves kl_coef: linear, exponential (verl's adaptive) and pid hold --kl-target; decay and cosine fall to 0
    at the last step; None: linear with --kl-target, else fixed"""
    kl_horizon: float = 10_000
    """samples in which --kl-controller exponential changes kl_coef by at most a factor of 1.22"""
    kl_limit: float | None = None
    """constraint: a Lagrange multiplier is added to kl_coef while the KL (nats per token) is above this"""
    entropy_coef: float = 0.0
    """weight of an entropy bonus"""
    entropy_target: float | None = None
    """raise entropy_coef by 0.005 a step while the entropy (nats per token) is at or below this, lower it and switch it
    off above (TRL's adaptive entropy); None: entropy_coef stays"""
    entropy_limit: float | None = None
    """constraint: a Lagrange multiplier is added to entropy_coef while the entropy (nats per token) is below this"""
    limit_rate: float = 0.1
    """how fast the multipliers of --kl-limit and --entropy-limit move: per step and nat of violation"""
    skip_nan: bool = False
    """drop samples with NaN or infinities, skip optimizer steps whose gradient norm is not finite, and count both; off:
    the first one stops the run. (A reward function that returns NaN has failed: see reward_max_failed)"""
    max_tokens: int = 16384
    """packed tokens of a micro-batch: lower it when memory is short"""
    dtype: Literal["fp32", "bf16"] | None = None
    """of the matrix products; weights and optimizer states are fp32. None: bf16 on a CUDA GPU, else fp32"""
    device: str | None = None
    """cpu, cuda, or mps (untested). None: cuda where there is a GPU, else cpu; ranks of torchrun take a GPU each"""
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    """how the model is cut over the ranks of torchrun"""
    engine: Literal["local", "sglang"] = "local"
    """local: of this package, for small models; sglang: servers that were started on `model`"""
    engine_urls: tuple[str, ...] = ()
    """of the SGLang servers; none: one is started here, with 0.4 of what is free of the first GPU"""
    max_batch: int = 64
    """sequences the local engine decodes at once"""
    compile: bool = False
    """compile the local engine's decoding: about ten seconds once, then up to 1.5x the tokens/s"""
    eval_steps: int = 25
    """steps between evaluations; 0: none"""
    eval_limit: int = 128
    """held-out prompts to use at most"""
    eval_samples: int = 1
    """samples of each, for `eval/sampled` (their mean) and `eval/best` (the mean of each prompt's best: pass@n)"""
    eval_kl: bool = False
    """report the KL to the reference model on evaluation prompts (loads it)"""
    reward_timeout: float = 30.0
    """seconds one call of the reward function may take"""
    reward_max_failed: float = 0.0
    """share of the last 100 samples whose reward may fail; they do not train. 0: the first failure ends the run"""
    print_steps: int = 1
    """print every n-th step, and those with an evaluation; metrics.jsonl has all of them"""
    save_steps: int = 50
    """steps between checkpoints; 0: only the last"""
    keep: int = 2
    """newest checkpoints to keep"""
    seed: int = 0
    """of data order and sampling"""
    deterministic: bool = False
    """reproducible CUDA kernels: a resumed run on GPUs repeats every bit, more slowly; on CPUs it does so anyway"""
    resume: bool = False
    """go on from the newest checkpoint in `output`"""


def prepared(args: Args) -> tuple[Any, Any, dict[str, Any]]:
    """The model, the tokenizer, and the keywords of a loop that all of these flags say; the run folder is made."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from rlkit.data.chat import check_same_tokens, stop_token_ids
    from rlkit.model.forward import check_path
    from rlkit.model.launch import load_policy, make_deterministic, reference_of, report_model
    from rlkit.model.optim import schedule
    from rlkit.run.folder import keep_args
    from rlkit.types import SamplingParams

    check_flags(args)
    check_path(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for other in (args.reference, getattr(args, "critic", None)):
        if other:
            check_same_tokens(tokenizer, other)
    keep_args(args.output, args, resume=args.resume)
    torch.manual_seed(args.seed)
    if args.deterministic:
        make_deterministic(args.seed)
    env, score = environment(args, tokenizer)
    prompts, eval_prompts = load_prompts(args, tokenizer)
    load = partial(load_policy, args=args.parallel, device=args.device, dtype=args.dtype)
    check_lengths(args, prompts + eval_prompts, AutoConfig.from_pretrained(args.model).get_text_config())
    model = load(args.model, lora_rank=args.lora_rank)
    report_model(model, dtype=args.dtype)
    ends = stop_token_ids(tokenizer, model.config, model.generation_config) if args.chat_template else ()
    has_reference = args.kl_coef or args.eval_kl or args.kl_limit is not None
    return (
        model,
        tokenizer,
        {
            "prompts": prompts,
            "score": score,
            "env": env,
            "folder": args.output,
            "steps": args.steps,
            "params": SamplingParams(
                max_new_tokens=args.max_new_tokens,
                temperature=args.temperature,
                top_p=args.top_p,
                top_k=args.top_k,
                stop=args.stop,
                stop_token_ids=ends,
            ),
            "prompts_per_step": args.prompts_per_step,
            "group_size": args.group_size,
            "drop_truncated": args.drop_truncated,
            "num_minibatches": args.minibatches,
            "num_epochs": args.epochs,
            "reference": reference_of(model, args.reference, path=args.model, load=load) if has_reference else None,
            "kl_coef": args.kl_coef,
            "entropy_coef": args.entropy_coef,
            "controllers": controllers(args),
            "skip_nan": args.skip_nan,
            "lr_at": schedule(args.lr_schedule, lr=args.lr, num_steps=args.steps, warmup_steps=args.warmup_steps),
            "weight_decay": args.weight_decay,
            "max_norm": args.max_norm,
            "max_tokens": args.max_tokens,
            "dtype": args.dtype,
            "eval_prompts": eval_prompts,
            "eval_steps": args.eval_steps,
            "eval_samples": args.eval_samples,
            "print_steps": args.print_steps,
            "save_steps": args.save_steps,
            "keep": args.keep,
            "seed": args.seed,
            "resume": args.resume,
            **algorithm(args),
        },
    )


def algorithm(args: Args) -> dict[str, Any]:
    """The keywords of a loop whose values are functions."""
    import torch

    from rlkit.losses import icepop, tis

    corrections = {"tis": partial(tis, max_weight=args.tis_max_weight), "icepop": icepop, "none": torch.ones_like}
    return {"correction": corrections[args.correction]}


def controllers(args: Args) -> dict[str, Any]:
    """The controllers of a loop (`rlkit.loops.coefficients`) that the flags name."""
    from rlkit import controllers as rules

    target, coef, num_samples = args.kl_target, args.kl_coef, args.prompts_per_step * args.group_size
    falling = {"end": 0.0, "num_updates": max(1, args.steps - 1)}  # the last step has 0
    out: dict[str, Any] = {}
    match args.kl_controller or ("fixed" if target is None else "linear"):
        case "linear":
            out["kl"] = rules.kl_linear(target=target or 0.0, rate=coef)
        case "exponential":
            out["kl"] = rules.kl_exponential(target=target or 0.0, horizon=args.kl_horizon, num_samples=num_samples)
        case "pid":  # a KL of twice its target adds kl_coef at once, and a tenth of it in each step that it lasts
            gain = coef / (target or 1.0)
            out["kl"] = rules.kl_pid(target=target or 0.0, kp=gain, ki=0.1 * gain)
        case "decay":
            out["kl"] = rules.schedule_linear(**falling)
        case "cosine":
            out["kl"] = rules.schedule_cosine(**falling)
    if args.kl_limit is not None:
        out["kl_limit"] = rules.lagrange_at_most(bound=args.kl_limit, rate=args.limit_rate)
    if args.entropy_target is not None:
        out["entropy"] = rules.target_entropy(target=args.entropy_target)
    if args.entropy_limit is not None:
        out["entropy_limit"] = rules.lagrange_at_least(bound=args.entropy_limit, rate=args.limit_rate)
    return out


def load_prompts(args: Args, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """The rendered prompts of the training data and of the evaluation data, if any."""
    from rlkit.data.load import load_rows
    from rlkit.data.prompts import rl_prompts

    rows = load_rows(args.data, rename=args.rename)
    eval_rows = load_rows(args.eval_data, rename=args.rename, limit=args.eval_limit) if args.eval_data else []
    render = {
        "tokenizer": tokenizer,
        "max_prompt_tokens": min(args.max_prompt_tokens, max_len(args) - 1),  # one token of an answer
        "system_prompt": args.system_prompt,
        "apply_chat_template": args.chat_template,
        "tools": load_tools(args) or None,
        "template_args": template_args(args),
    }
    return rl_prompts(rows, **render)[0], rl_prompts(eval_rows, **render)[0] if eval_rows else []


def load_tools(args: Args) -> list[Any]:
    """The functions that the model may call."""
    return [function_of("--tools", spec) for spec in args.tools]


def function_of(flag: str, spec: str) -> Any:
    """The function that a flag names; ValueError, with the flag, where there is none of that name."""
    from rlkit.rewards.load import load_function

    try:
        return load_function(spec)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{flag} {spec}: {error}") from None


def environment(args: Args, tokenizer: Any) -> tuple[Any, Any]:
    """The `env` and the `score` of a rollout, by their names on the command line."""
    from rlkit.rewards.adapters import env_rewards, scorer
    from rlkit.rollout.calling import is_async
    from rlkit.rollout.envs import tools as tool_calls
    from rlkit.rollout.envs.tools import tool_env
    from rlkit.rollout.limits import limited
    from rlkit.rollout.rollout import single_turn

    env: Any = single_turn
    if args.env is not None:
        env = function_of("--env", args.env)
        env = env if is_async(env) else _made(env, tokenizer, spec=args.env)
    elif args.tools:
        parse = getattr(tool_calls, f"{args.tool_calls}_calls")
        chat: Any = {"system_prompt": args.system_prompt, "template_args": template_args(args)}
        env = tool_env(load_tools(args), tokenizer=tokenizer, parse=parse, **chat)
    if env is not single_turn:
        bounds = {"max_total_tokens": max_len(args), "max_sampled_tokens": args.max_sampled_tokens}
        env = limited(env, max_turns=args.max_turns, **bounds)
    if args.reward is None:
        return env, env_rewards(max_failed=args.reward_max_failed)
    reward = function_of("--reward", args.reward)
    how = {"timeout_s": args.reward_timeout, "max_failed": args.reward_max_failed}
    try:
        return env, scorer(reward, tokenizer=tokenizer, **how)
    except TypeError as error:
        raise ValueError(f"--reward {args.reward}: {error}") from None


def _made(function: Any, tokenizer: Any, *, spec: str) -> Any:
    """The environment that a function of the tokenizer returns."""
    try:
        inspect.signature(function).bind(tokenizer)
    except TypeError as error:
        what = "must be `async def env(prompt, sample)`, or a function of the tokenizer that returns one"
        raise ValueError(f"--env {spec}: {what} ({error})") from None
    return function(tokenizer)
