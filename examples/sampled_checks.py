"""Which flags of examples/grpo.py, async_grpo.py and ppo.py do not go together, said before anything runs."""

from __future__ import annotations

from typing import Any


def check_flags(args: Any) -> None:
    """Flags that would have no effect without another one, or would fail after hours, are refused."""
    has_reference = args.kl_coef or args.eval_kl
    sync, many, groups = getattr(args, "ref_sync_steps", 0), args.minibatches, args.prompts_per_step
    one_turn = args.env is None and not args.tools
    parses = args.env is None and args.tools
    needs = [
        (args.kl_target is not None and not args.kl_coef, "--kl-target moves --kl-coef: give one above 0"),
        (args.reference and not has_reference, "--reference is for --kl-coef or --eval-kl: give one"),
        (sync and not has_reference, "--ref-sync-steps moves the reference of --kl-coef: give one above 0"),
        (sync and args.lora_rank, "--ref-sync-steps copies whole weights: not with --lora-rank"),
        (args.eval_kl and not args.eval_data, "--eval-kl is measured on --eval-data: give some"),
        (args.engine_urls and args.engine == "local", "--engine-urls are SGLang servers: add --engine sglang"),
        (args.max_turns is not None and one_turn, "--max-turns is for --env or --tools: else there is one turn"),
        (
            args.max_sampled_tokens is not None and one_turn,
            "--max-sampled-tokens is of many turns: give --env or --tools, or use --max-new-tokens",
        ),
        (
            args.tool_calls != type(args).tool_calls and not parses,
            "--tool-calls is how calls of --tools are read where there is no --env",
        ),
        (
            args.correction != "tis" and args.tis_max_weight != type(args).tis_max_weight,
            "--tis-max-weight is of --correction tis",
        ),
        (
            getattr(args, "max_dropped", None) is not None and not getattr(args, "success_range", None),
            "--max-dropped is a limit on --success-range: give one",
        ),
        (
            getattr(args, "drop_off_policy", False) and not getattr(args, "staleness", 0),
            "--drop-off-policy is for --staleness above 0: else nothing is off policy",
        ),
        (
            many > groups,
            f"--minibatches {many} is more than the {groups} groups of --prompts-per-step: no group is cut",
        ),
        (
            (args.top_p < 1 or args.top_k) and getattr(args, "staleness", 0),
            "--top-p and --top-k are for samples of the weights of now: not with --staleness above 0 (async_grpo.py)",
        ),
        (args.epochs < 1, f"--epochs must be at least 1, got {args.epochs}"),
    ]
    for wrong, message in needs:
        if wrong:
            raise ValueError(message)


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
