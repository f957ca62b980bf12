"""What examples/grpo.py and async_grpo.py share: the flags of training on samples that are compared within a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import sampled_data

CONSTANTS: dict[str, dict[str, float]] = {  # those of the papers, as in docs/recipes.md
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"max_weight": 5.0},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
}
OF_SEQUENCES = ("gspo", "gmpo")
MEAN_OF_EPISODES = ("gspo", "gmpo", "sapo")


@dataclass
class Args(sampled_data.Args):
    loss: Literal["ppo_clip", "dual_clip", "gspo", "gmpo", "cispo", "sapo"] = "ppo_clip"
    """of the ratio and the advantage. They are alike where the ratio is 1: with --minibatches 1 and --epochs 1"""
    clip_low: float | None = None
    """the ratio is clipped below at 1 - clip_low; None: 0.2 (gspo: 3e-4, of the sequence; gmpo: 0.4, of the logarithm)"""
    clip_high: float | None = None
    """the ratio is clipped above at 1 + clip_high; None: 0.28 (gspo: 4e-4; gmpo: 0.4)"""
    aggregate: Literal["token", "episode", "prompt", "length"] | None = None
    """what counts alike: every token, answer (as in the papers of GRPO and GSPO) or prompt; length: an answer's tokens
    add up, over --max-new-tokens (Dr. GRPO). None: episode for gspo, gmpo and sapo, else token"""
    baseline: Literal["group_centered", "group_zscore", "leave_one_out", "group_mean_batch_std", "max_rl", "gpg"] = (
        "group_centered"
    )
    """what makes advantages of rewards (docs/advantages.md); group_zscore divides by the group's standard deviation"""
    success_range: tuple[float, float] | None = None
    """dynamic sampling: replace groups whose mean score is outside, e.g. 0.01 0.99; None: keep all"""
    max_dropped: int | None = None
    """groups that dynamic sampling may replace in a step before it is an error; None: 20 * prompts_per_step"""
    ref_sync_steps: int = 0
    """copy the policy into the reference every so many steps; 0: never"""


def prepared(args: Args) -> tuple[Any, Any, dict[str, Any]]:
    """The model, the tokenizer, and the keywords of a GRPO loop that all of these flags say."""
    from rlkit import advantages
    from rlkit.rollout.limits import success_between

    model, tokenizer, options = sampled_data.prepared(args)
    own = {
        "baseline": getattr(advantages, args.baseline),
        "keep_group": None if args.success_range is None else success_between(*args.success_range),
        "max_dropped": args.max_dropped,
        "ref_sync_steps": args.ref_sync_steps,
    }
    return model, tokenizer, options | own | loss_of(args)


def loss_of(args: Args) -> dict[str, Any]:
    """What is computed of ratio and advantage, and what a token of it weighs."""
    from rlkit import losses
    from rlkit.loops import updates as aggregate

    given = {"clip_low": args.clip_low, "clip_high": args.clip_high}
    constants = CONSTANTS[args.loss] | {name: value for name, value in given.items() if value is not None}
    function = getattr(losses, args.loss)

    def surrogate(log_ratio: Any, batch: Any) -> Any:
        where = {"cu_seqlens": batch.cu_seqlens} if args.loss in OF_SEQUENCES else {}
        return function(log_ratio, batch.advantages, mask=batch.mask, **where, **constants)

    mean = args.aggregate or ("episode" if args.loss in MEAN_OF_EPISODES else "token")
    weigh = getattr(aggregate, f"per_{mean}")
    return {
        "surrogate": surrogate,
        "aggregate": partial(weigh, max_length=args.max_new_tokens) if mean == "length" else weigh,
    }
