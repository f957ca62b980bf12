"""What the flags of the example scripts may be: said by the flag's name, before a model is loaded."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from math import inf
from typing import Any, TypeVar

from rlkit._extras import optional

X = TypeVar("X")

RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "at least 1": (
        lambda x: 1 <= x < inf,
        "batch_size prompts_per_step group_size minibatches epochs max_example_tokens max_prompt_tokens max_new_tokens "
        "max_turns max_total_tokens max_sampled_tokens max_tokens max_batch eval_limit eval_samples keep print_steps "
        "engine_threads replicate cp tp pp ep trials startup_trials",
    ),
    "at least 0": (
        lambda x: 0 <= x < inf,
        "steps sft_steps grpo_steps warmup_steps critic_steps eval_steps save_steps ref_sync_steps lora_rank max_dropped "
        "top_k lr critic_lr weight_decay kl_coef center_coef sft_coef staleness shard engine_cpus desirable_weight "
        "undesirable_weight gamma entropy_target entropy_limit",
    ),
    "above 0": (
        lambda x: 0 < x < inf,
        "temperature kl_target kl_limit kl_horizon limit_rate beta reward_timeout timeout_s",
    ),
    "above 0 (inf: no limit)": (lambda x: x > 0, "max_norm tis_max_weight value_clip"),
    "at least 0 (inf: no limit)": (lambda x: x >= 0, "clip_low clip_high"),
    "from 0 to 1": (lambda x: 0 <= x <= 1, "lam_policy lam_value reward_max_failed label_smoothing"),
    "above 0 and at most 1": (lambda x: 0 < x <= 1, "top_p"),
    "from 0 to 2**63 - 1": (lambda x: 0 <= x < 2**63, "seed"),
    "a finite number": (lambda x: -inf < x < inf, "entropy_coef success_range"),
}


def check_values(args: Any) -> None:
    """Every number of a script's flags is in its range, no text is empty, and there is such a device."""
    for flag, value in flags_of(args):
        name = flag.rpartition(".")[2]
        if isinstance(value, str) and not value and name != "system_prompt":
            raise ValueError(f"--{_spelled(flag)} is empty: give a value, or leave it out")
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        for meaning, (allowed, names) in RANGES.items():
            if name in names.split() and not allowed(value):
                raise ValueError(f"--{_spelled(flag)} must be {meaning}, got {value}")
    if str(getattr(args, "output", "runs")) == ".":  # what an empty text becomes, too
        raise ValueError("--output is empty or the current folder: give the folder of the run a name")
    if getattr(args, "device", None):
        _check_device(args.device)
    if getattr(args, "lora_rank", 0):
        optional("peft", "lora", "--lora-rank needs")
    if getattr(args, "engine", "") == "sglang":
        optional("aiohttp", "http", "--engine sglang needs")
    if hasattr(args, "lr_schedule"):
        _warn_of_steps(args)


def _warn_of_steps(args: Any) -> None:
    """Warn of a run without steps, and of a warm-up, or of steps of the critic alone, that last as long as the run."""
    log = logging.getLogger("rlkit.examples")
    if args.steps == 0 and not args.eval_data:
        log.warning("--steps 0 without --eval-data: nothing is trained or measured, the model is exported as it is")
    if args.eval_data and args.eval_steps == 0:
        log.warning("--eval-data is not used with --eval-steps 0")
    for flag, effect in (
        ("warmup_steps", "the learning rate never reaches --lr"),
        ("critic_steps", "only the critic learns, never the policy"),
    ):
        num = getattr(args, flag, 0)
        if num > args.steps > 0 or (num == args.steps > 0 and flag == "critic_steps"):
            log.warning("--%s %d is not below --steps %d: %s", _spelled(flag), num, args.steps, effect)


def with_device(args: X) -> X:
    """The flags with `device` and `dtype` filled in for this machine: see `rlkit.model.launch.choose_device`."""
    import torch

    from rlkit.model.launch import choose_device

    given: Any = args
    cuda = torch.cuda.is_available()
    bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    device, dtype = choose_device(given.device, given.dtype, cuda=cuda, bf16=bf16)
    return replace(given, device=device, dtype=dtype)


def flags_of(args: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every flag with its value, or with each of its values."""
    for name, value in vars(args).items():
        if is_dataclass(value):
            yield from flags_of(value, f"{prefix}{name}.")
            continue
        for one in value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,):
            yield prefix + name, one


def _spelled(flag: str) -> str:
    return flag.replace("_", "-")


def _check_device(device: str) -> None:
    import torch

    try:
        there = torch.get_device_module(torch.device(device).type).is_available()
    except (RuntimeError, AttributeError):
        there = False
    if not there:
        raise ValueError(f"--device {device}: this torch ({torch.__version__}) finds none here; cpu is always there")


def check_flags(args: Any) -> None:
    """`check_values`, and of the scripts that sample: no flag has no effect without another, or fails after hours."""
    check_values(args)
    json_object("--template-args", args.template_args)
    has_reference = args.kl_coef or args.eval_kl or args.kl_limit is not None
    rule = args.kl_controller
    sync, many, groups = getattr(args, "ref_sync_steps", 0), args.minibatches, args.prompts_per_step
    one_turn = args.env is None and not args.tools
    parses = args.env is None and args.tools
    served = args.engine == "sglang"
    low, high = getattr(args, "success_range", None) or (0, 0)
    cpus = getattr(args, "engine_cpus", ())
    needs = [
        (args.reward is None and args.env is None, "give --reward, --env or both: something has to judge"),
        (args.kl_target is not None and not args.kl_coef, "--kl-target moves --kl-coef: give one above 0"),
        (
            rule in ("linear", "exponential", "pid") and args.kl_target is None,
            f"--kl-controller {rule} holds --kl-target: give one",
        ),
        (
            rule in ("fixed", "decay", "cosine") and args.kl_target is not None,
            f"--kl-controller {rule} holds no --kl-target: drop it, or use linear, exponential or pid",
        ),
        (rule and not args.kl_coef, "--kl-controller moves --kl-coef: give one above 0"),
        (
            _given(args, "kl_horizon") and rule != "exponential",
            "--kl-horizon is of --kl-controller exponential: add it, or drop --kl-horizon",
        ),
        (
            rule == "exponential" and 0.2 * groups * args.group_size >= args.kl_horizon,
            f"--kl-horizon must be above {0.2 * groups * args.group_size:g}, a fifth of the samples of a step: raise it",
        ),
        (
            _given(args, "limit_rate") and args.kl_limit is None and args.entropy_limit is None,
            "--limit-rate is of --kl-limit and --entropy-limit: give one of them",
        ),
        (
            args.entropy_target is not None and args.entropy_coef < 0,
            "--entropy-target starts from --entropy-coef: give one of at least 0",
        ),
        (args.reference and not has_reference, "--reference is for --kl-coef, --kl-limit or --eval-kl: give one"),
        (sync and not has_reference, "--ref-sync-steps moves the reference of --kl-coef: give one above 0"),
        (sync and args.lora_rank, "--ref-sync-steps copies whole weights: not with --lora-rank"),
        (args.eval_kl and not args.eval_data, "--eval-kl is measured on --eval-data: give some"),
        (args.engine_urls and not served, "--engine-urls are SGLang servers: add --engine sglang"),
        (served and _given(args, "compile", "max_batch"), "--compile and --max-batch are of --engine local"),
        (
            served and _given(args, "engine_threads", "engine_cpus"),
            "--engine-threads and --engine-cpus are of --engine local",
        ),
        (cpus and not hasattr(os, "sched_getaffinity"), "--engine-cpus needs Linux: drop it"),
        (cpus and not {*cpus} <= _processors(), f"--engine-cpus {cpus}: not all of them are here for us"),
        (args.max_turns is not None and one_turn, "--max-turns is for --env or --tools: else there is one turn"),
        (
            args.max_sampled_tokens is not None and one_turn,
            "--max-sampled-tokens is of many turns: give --env or --tools, or use --max-new-tokens",
        ),
        (
            _given(args, "tool_calls") and not parses,
            "--tool-calls is how calls of --tools are read where there is no --env",
        ),
        (args.correction != "tis" and _given(args, "tis_max_weight"), "--tis-max-weight is of --correction tis"),
        (
            hasattr(args, "success_range") and args.group_size < 2,
            "--group-size must be at least 2: a sample is compared with the others of its prompt (or use ppo.py)",
        ),
        (getattr(args, "gamma", 1) > 1, "--gamma must be from 0 to 1"),
        (low > high, f"--success-range is from low to high, got {low} {high}"),
        (
            _given(args, "max_dropped") and not args.success_range,
            "--max-dropped is a limit on --success-range: give one",
        ),
        (
            _given(args, "drop_off_policy") and not args.staleness,
            "--drop-off-policy is for --staleness above 0: else nothing is off policy",
        ),
        (
            many > groups,
            f"--minibatches {many} is more than the {groups} groups of --prompts-per-step: no group is cut",
        ),
        (
            getattr(args, "loss", "") in ("cispo", "sapo") and _given(args, "clip_low", "clip_high"),
            "--clip-low and --clip-high are not part of cispo and sapo: drop them",
        ),
        (args.eval_samples > 1 and not args.eval_data, "--eval-samples are of --eval-data: give some"),
        (args.top_p < 1 and args.top_k, "--top-p and --top-k: engines differ in what the two keep together; use one"),
        (
            (args.top_p < 1 or args.top_k) and getattr(args, "staleness", 0),
            "--top-p and --top-k are for samples of the weights of now: not with --staleness above 0 (async_grpo.py)",
        ),
    ]
    for wrong, message in needs:
        if wrong:
            raise ValueError(message)


def template_args(args: Any) -> dict[str, Any] | None:
    """The value of --template-args; None where it holds nothing."""
    return json_object("--template-args", args.template_args) or None


def _processors() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def json_object(flag: str, text: str) -> dict[str, Any]:
    """The value of a flag that takes JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f'{flag} must be a JSON object like {{"name": true}}, got {text!r}')
    return value


def _given(args: Any, *names: str) -> bool:
    """Whether one of these flags, where the script has it, is not what it is by default."""
    return any(getattr(args, name, None) != getattr(type(args), name, None) for name in names)


def check_lengths(args: Any, prompts: list[Any], config: Any) -> None:
    """What may be sampled fits the model, and a micro-batch."""
    longest, positions = max_len(args), getattr(config, "max_position_embeddings", None)
    given = "--max-total-tokens" if args.max_total_tokens else "--max-prompt-tokens + --max-new-tokens"
    if positions is not None and longest > positions:
        raise ValueError(f"{given} is {longest}, and the model has {positions} positions: lower it")
    if args.env is None and not args.tools:
        longest = min(longest, max(len(prompt.ids) for prompt in prompts) + args.max_new_tokens)
    if longest > args.max_tokens:
        raise ValueError(
            f"a sample with its prompt may have {longest} tokens, and --max-tokens {args.max_tokens} is what a "
            "micro-batch holds: raise it, or lower --max-new-tokens"
        )


def max_len(args: Any) -> int:
    """The longest context of an episode."""
    return args.max_total_tokens or args.max_prompt_tokens + args.max_new_tokens
