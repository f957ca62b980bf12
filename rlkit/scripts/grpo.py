"""GRPO on your model, your prompts and your reward.

    rlkit grpo --model MODEL --data train.jsonl --reward my_rewards.py:score
    rlkit grpo ... --eval-data test.jsonl
    rlkit grpo ... --overlap               asynchronous: sample while training
    torchrun --nproc-per-node 8 -m rlkit.scripts.grpo ... --engine sglang

Rows have `prompt` or `messages`, or the columns of another library (docs/data.md).
The reward is a function, `def score(completion, row) -> float`, or one written for TRL, verl, OpenRLHF, slime or RL2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from rlkit.scripts.args import OF_TURNS, Correction, Data, Episodes, Estimator, Evaluation, KlEstimator, Lora, Model
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.start import open_place
from rlkit.scripts.task import baseline_of, bring, load_models, make_task, with_engine
from rlkit.scripts.trial import advantage_of, kl_estimator_of, own_loss
from rlkit.settings import (
    ASCENDING,
    OF_KL,
    OWN,
    Below1,
    Engines,
    Finite,
    For,
    GroupBaseline,
    LimitOr0,
    Needs,
    Optim,
    Penalties,
    Range,
    Relation,
    Rollouts,
    Schedule,
    check,
    named,
    refuse_if,
)

CONSTANTS: dict[str, dict[str, float]] = {  # of the papers, see docs/recipes.md
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"max_weight": 5.0},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
}
EPISODE_MEAN = ("gspo", "gmpo", "sapo")
_ABOVE_1 = Range("above 1, the ratio on-policy", lambda x: x > 1)


def _of(constant: str) -> Relation:
    return For("loss", *(name for name, constants in CONSTANTS.items() if constant in constants))


@dataclass(frozen=True)
class Loss:
    """The policy loss and the advantages."""

    loss: Annotated[str, named(*CONSTANTS)] = "ppo_clip"
    """ppo_clip, dual_clip, gspo, gmpo, cispo or sapo; on-policy (one minibatch, one epoch) all have one gradient of
    each token, and gspo, gmpo and sapo average over answers (--aggregate). Or FILE.py:FUNCTION, `def loss(log_ratio,
    batch)`, which returns a loss per token"""
    loss_unchecked: Annotated[bool, For("loss", OWN)] = False
    """take a FILE.py:FUNCTION of --loss that is refused before the model is loaded, as one that climbs is"""
    clip_low: Annotated[LimitOr0 | None, _of("clip_low")] = None
    """clip the ratio below at 1 - clip_low; None: 0.2 (gspo: 3e-4, per sequence; gmpo: 0.4, on the log-ratio)"""
    clip_high: Annotated[LimitOr0 | None, _of("clip_high")] = None
    """clip the ratio above at 1 + clip_high; None: 0.28 (gspo: 4e-4; gmpo: 0.4)"""
    clip_c: Annotated[float | None, _ABOVE_1, _of("clip_c")] = None
    """bound of the ratio in the loss of a negative advantage (dual_clip); None: 3"""
    aggregate: Literal["token", "episode", "prompt", "length"] | None = None
    """loss average over tokens, answers (episode: as in the papers of GRPO and GSPO) or prompts.
    length: sum over an answer's tokens, divided by --max-new-tokens (Dr. GRPO).
    None: episode for gspo, gmpo and sapo, else token"""
    max_ratio: Annotated[
        float | None, _ABOVE_1, Needs("minibatches", "epochs", why="with one optimizer step every ratio is 1")
    ] = None
    """leave an answer out of the policy loss (not of its KL and entropy) where a token's ratio exceeds this; None:
    never"""
    baseline: Annotated[
        Literal[GroupBaseline, "role_average", "none"],
        Needs("advantage", of=("none",), why="it compares no rewards; add reinforce_pp, or take another baseline"),
    ] = "group_centered"
    """what a group's rewards are compared with (docs/advantages.md); group_zscore also divides by their standard
    deviation. role_average: the average of earlier steps, of each role of an environment by itself (RAE).
    none, with --advantage only: the rewards as they are"""
    baseline_decay: Annotated[Below1, For("baseline", "role_average")] = 0.95
    """weight of what `--baseline role_average` was before in each step"""
    advantage: Estimator | None = None
    """estimator per token: returns or reinforce_pp, as in "returns(gamma=0.99)", on the baseline's value as the last
    reward. Per turn: turn_returns (the baseline of each turn's return), gigpo (also of turns in the same state).
    Or FILE.py:FUNCTION, `def advantage(batch, bootstrap)`. None: the baseline's value on all tokens"""
    success_range: Annotated[tuple[Finite, Finite] | None, ASCENDING] = None
    """dynamic sampling: replace groups whose mean score is outside this range, e.g. 0.01 0.99; None: keep all"""

    def __post_init__(self) -> None:
        check(self)
        turns = (self.advantage or "").partition("(")[0] in OF_TURNS
        refuse_if(
            turns and self.baseline == "role_average",
            f"`advantage` {self.advantage} compares turns, and `baseline` role_average episodes: use another baseline",
        )


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    episodes: Flat[Episodes]
    evaluation: Flat[Evaluation] = Evaluation()
    rollouts: Flat[Rollouts] = Rollouts()
    schedule: Flat[Schedule] = Schedule(Path("runs/grpo"), steps=200, eval_steps=25, save_steps=50)
    optim: Flat[Optim] = Optim()
    loss: Flat[Loss] = Loss()
    correction: Flat[Correction] = field(default_factory=Correction)
    penalties: Flat[Penalties] = Penalties()
    kl: Flat[KlEstimator] = KlEstimator()
    reference: Annotated[str | None, OF_KL] = None
    """reference model; None: the initial weights of `model` (with LoRA, and no second copy: `model`
    without its adapter, or with `adapter` as it was)"""
    lora: Flat[Lora] = Lora()
    engine: Flat[Engines] = Engines()

    def __post_init__(self) -> None:
        alone = self.rollouts.group_size < 2 and self.loss.baseline not in ("none", "role_average")
        fix = "(or use ppo, or `baseline` role_average, which compares with earlier steps)"
        refuse_if(alone, f"`group_size` must be at least 2: a sample is compared with the others of its prompt {fix}")


def main(args: Args) -> Path:
    """Train, and return the folder of the exported model."""
    custom = own_loss(args.loss.loss, partial(try_loss, args=args))
    advantage = advantage_of(args.loss.advantage, args)
    kl_estimator = kl_estimator_of(args.kl, args.penalties)
    brought = bring(args)
    place = open_place(args, brought)
    task = make_task(args, brought, place, keep_group=keep_group(args.loss))
    from rlkit.loops.grpo import grpo

    model, reference, rollouts = load_models(args, place)
    return with_engine(args, place, model, lambda engine: grpo(
        model, place.tokenizer, engine, task, rollouts, args.schedule, place.optim, args.penalties,
        loss=policy_loss(args, custom), baseline=baseline_of(args.loss), advantage=advantage, kl_estimator=kl_estimator,
        reference=reference,
    ))  # fmt: skip


def keep_group(args: Loss) -> Any:
    """The group filter of dynamic sampling; None keeps all groups."""
    if args.success_range is None:
        return None
    from rlkit.rollout.limits import success_between

    return success_between(*args.success_range)


def try_loss(function: Any, *, args: Args) -> None:
    """Refuse (ValueError) a loss that is no surrogate, that climbs, or that needs what the run's batches lack."""
    from rlkit.loops.trial import lacking, try_surrogate
    from rlkit.loops.updates import as_surrogate

    surrogate, weighs = as_surrogate(function), args.correction.correction != "none"
    if not args.loss.loss_unchecked:
        try_surrogate(function, surrogate, weighs=weighs, lacks=lacking(args.rollouts, args.penalties))


def policy_loss(args: Args, user_loss: Any) -> Any:
    """The `PolicyLoss` of the flags; `user_loss` is the user's surrogate, or None for one of `CONSTANTS`."""
    from rlkit import losses
    from rlkit.loops import updates

    flags = args.loss
    surrogate = user_loss
    if user_loss is None:
        clips = {"clip_low": flags.clip_low, "clip_high": flags.clip_high, "clip_c": flags.clip_c}
        constants = CONSTANTS[flags.loss] | {name: value for name, value in clips.items() if value is not None}
        surrogate = partial(getattr(losses, flags.loss), **constants)
    if flags.max_ratio:
        surrogate = partial(updates.skip_above, surrogate=updates.as_surrogate(surrogate), max_ratio=flags.max_ratio)
    mean = flags.aggregate or ("episode" if flags.loss in EPISODE_MEAN else "token")
    aggregate = getattr(updates, f"per_{mean}")
    if mean == "length":
        aggregate = partial(aggregate, max_length=args.rollouts.max_new_tokens)
    return updates.PolicyLoss(surrogate, aggregate, args.correction.function(), loss_unchecked=True)


if __name__ == "__main__":
    run(main, Args, __doc__)
