"""Settings that travel together: plain data, the same objects in Python and on the command line.

    rollouts = Rollouts(prompts_per_step=16, group_size=8, max_new_tokens=512)
    schedule = Schedule(Path("runs/mine"), steps=200)
    await grpo(model, tokenizer, engine, task, rollouts, schedule, Optim(lr=1e-6), Penalties(kl_coef=0.001))

Every field is a flag of the scripts: `rlkit grpo --prompts-per-step 16 --lr 1e-6`. A field's range is part of its type,
and so are its relations to other fields: `kl_target: Annotated[Positive | None, Needs("kl_coef")]`.
Errors are ValueErrors that name fields in backquotes. This module does not import torch, so that `--help` is fast.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from math import inf
from numbers import Integral, Real
from pathlib import Path
from shutil import which
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class Range(NamedTuple):
    """The values that a field allows: `Annotated[int, Range("at least 1", lambda x: x >= 1)]`.

    In the type of a tuple's or dict's items it is the range of each, around the type of a tuple that of the whole.
    A lambda that calls more than builtins stands outside the annotation, which is evaluated as a string.
    """

    meaning: str
    allows: Callable[[Any], bool]


def named(*names: str) -> Range:
    """One of the names, or a function of the user."""
    return Range(f"one of {', '.join(names)} or FILE.py:FUNCTION", lambda x: x in names or ":" in x)


ASCENDING = Range("from low to high", lambda x: x[0] <= x[1])
POSITIVE = Range("above 0", lambda x: 0 < x < inf)
NOT_NEGATIVE = Range("at least 0", lambda x: 0 <= x < inf)

Count = Annotated[int, Range("at least 1", lambda x: 1 <= x < inf)]
CountOr0 = Annotated[int, NOT_NEGATIVE]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Finite = Annotated[float, Range("a finite number", lambda x: -inf < x < inf)]
Above1 = Annotated[float, Range("above 1", lambda x: 1 < x < inf)]
AtLeast1 = Annotated[float, Range("at least 1, the ratio on-policy (inf: no limit)", lambda x: x >= 1)]
Limit = Annotated[float, Range("above 0 (inf: no limit)", lambda x: x > 0)]
LimitOr0 = Annotated[float, Range("at least 0 (inf: no limit)", lambda x: x >= 0)]
Share = Annotated[float, Range("from 0 to 1", lambda x: 0 <= x <= 1)]
TopP = Annotated[float, Range("above 0 and at most 1", lambda x: 0 < x <= 1)]
Below1 = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]
BelowHalf = Annotated[float, Range("at least 0 and below 0.5", lambda x: 0 <= x < 0.5)]
Seed = Annotated[int, Range("from 0 to 2**63 - 1", lambda x: 0 <= x < 2**63)]
Tracker = Literal["wandb", "mlflow", "tensorboard", "trackio"]  # `rlkit.run.trackers` has each
GroupBaseline = Literal["group_centered", "group_zscore", "leave_one_out", "group_mean_batch_std", "max_rl", "gpg"]
TAKE_MODELS = "wandb", "mlflow", "trackio"
OWN = "FILE.py:FUNCTION"  # among the values of `For`: any function of the user


class Relation(NamedTuple):
    """What a field that is not at its default asks of other fields: made by `Needs`, `For` and `Without`."""

    kind: Literal["needs", "for", "without"]
    names: tuple[str, ...]
    values: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    why: str = ""
    by: str = ""

    @property
    def terms(self) -> str:
        """The other fields in words: "`kl_limit` or `eval_kl`", "`engine` sglang or vllm"."""
        *first, last = self.values or [f"`{name}`" for name in self.names]
        words = f"{', '.join(first)} or {last}" if first else last
        return f"`{self.names[0]}` {words}" if self.values else words

    def refusal(self, others: Mapping[str, Any]) -> str:
        """What is wrong, "" if nothing is; `others` has the settings that hold each field of `names`."""
        values, terms, why = {x: getattr(others[x], x) for x in others}, self.terms, f": {self.why}" * bool(self.why)
        if self.kind == "needs":
            off = {name: _off(type(holder), name) for name, holder in others.items()}
            for name in (name for name in off if off[name] is not None):
                terms = terms.replace(f"`{name}`", f"`{name}` above {off[name]}")
            absent = "" if others else ", which this command does not have"
            is_set = any((values[x] and values[x] != off[x]) or getattr(others[x], self.by, False) for x in others)
            return "" if is_set else f"requires {terms}{absent}{why}"
        if self.kind == "for":
            value = next(iter(values.values()), None)
            held = value if isinstance(value, tuple) else (value,)
            fits = any(x in self.values or (OWN in self.values and ":" in str(x)) for x in held)
            return "" if fits else f"is for {terms}{f', not {value}' * (held == (value,))}{why}"
        both = [x for x in others if not is_default(others[x], x) and (values[x] or getattr(type(others[x]), x))]
        return f"excludes {' and '.join(f'`{x}`' for x in both)}{why}" if both else ""


def Needs(*names: str, of: tuple[str, ...] = (), why: str = "", by: str = "") -> Relation:
    """The field has no effect unless one of the fields `names` is set; with `of`, where it has one of these values.

    `by` is a property of the settings that hold one of them, which says that they are set in another way.
    """
    return Relation("needs", names, of=of, why=why, by=by)


def For(name: str, *values: str, why: str = "") -> Relation:
    """The field is read only where the field `name` has, or holds, one of the values."""
    return Relation("for", (name,), values, why=why)


def Without(*names: str, of: tuple[str, ...] = (), why: str = "drop one") -> Relation:
    """The field excludes the fields `names`; with `of`, where it has one of these values."""
    return Relation("without", names, of=of, why=why)


@cache
def relations(kind: type) -> tuple[tuple[str, Relation], ...]:
    """The relations of each field of a dataclass, with the field's name."""
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in _hints(kind).items()}
    return tuple((name, x) for name in notes for x in notes[name] if isinstance(x, Relation))


def _off(kind: type, name: str) -> int | None:
    """The value, 0 or 1, of a number that has an effect above it only: the lowest that the field allows."""
    right = [x for x in (-0.5, 0, 0.5, 1) if not any(_faults(_hints(kind)[name], x))]
    return next((x for x in (0, 1) if x in right and x - 0.5 not in right), None)


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind)}


_NAMES: dict[Any, str] = {
    bool: "True or False", int: "an integer", float: "a number", str: "a string", NoneType: "None", Path: "a path",
    Callable: "a function", Mapping: "a mapping",
}  # fmt: skip


def _allows(hint: Any, x: Any) -> bool:
    """Whether a value has the annotated type. Ints are floats, numpy's numbers are numbers, and a list is a tuple."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _allows(inner[0], x)
    if kind in (Union, UnionType):
        return any(_allows(one, x) for one in inner)
    if kind is Literal:
        return any(type(x) is type(one) and x == one for one in inner)
    if kind in (int, float):
        return isinstance(x, Integral if kind is int else Real) and not isinstance(x, bool)
    if kind is tuple and inner:
        items = inner[:1] * len(x) if isinstance(x, (tuple, list)) and inner[-1] is ... else inner
        return isinstance(x, (tuple, list)) and len(x) == len(items) and all(map(_allows, items, x))
    if kind is Path:
        return isinstance(x, (str, Path))
    return not isinstance(kind, type) or isinstance(x, kind)


def _meaning(hint: Any) -> str:
    """The annotated type in words."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _meaning(inner[0])
    if kind in (Union, UnionType):
        return " or ".join(_meaning(one) for one in inner)
    if kind is Literal:
        return " or ".join(repr(one) for one in inner)
    if kind is tuple and inner:
        return f"a tuple, each {_meaning(inner[0])}"
    return _NAMES.get(kind) or f"a {getattr(kind, '__name__', str(kind))}"


_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


@contextmanager
def collected() -> Iterator[list[str]]:
    """Inside the block, errors of settings are added to the list instead of raised, for a command line to print."""
    messages: list[str] = []
    token = _collected.set(messages)
    try:
        yield messages
    finally:
        _collected.reset(token)


def refuse_if(condition: object, message: str) -> None:
    """Raise ValueError with `message` if `condition` is true; inside `collected`, add the message to its list."""
    if condition:
        if (messages := _collected.get()) is None:
            raise ValueError(message)
        messages.append(message)


def check(settings: Any, *, may_be_empty: tuple[str, ...] = ()) -> None:
    """Refuse values of another type than their field's, numbers outside its range and empty strings.

    ValueError with the field's name. So are relations of the fields to each other (see `check_relations`).
    """
    for f in fields(settings):
        if (value := getattr(settings, f.name)) is not f.default:
            faults = _faults(_hints(settings.__class__)[f.name], value, may_be_empty=f.name in may_be_empty)
            refuse_if(fault := next(faults, ""), f"`{f.name}` {fault}")
    check_relations(settings, every=False)


def _faults(hint: Any, x: Any, *, may_be_empty: bool = False) -> Iterator[str]:
    """What is wrong with a value, or with those in it: another type, an empty string, a value out of range."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if not _allows(hint, x):
        yield f"must be {_meaning(hint)}, got {x!r:.200}"
    elif kind in (Union, UnionType):
        yield from _faults(next(one for one in inner if _allows(one, x)), x, may_be_empty=may_be_empty)
    elif kind is Annotated:
        yield from _faults(inner[0], x, may_be_empty=may_be_empty)
        if outside := [r for r in hint.__metadata__ if isinstance(r, Range) and x is not None and not r.allows(x)]:
            yield f"must be {outside[0].meaning}, got {' '.join(map(str, x)) if isinstance(x, tuple) else str(x):.200}"
    elif kind is tuple and inner:
        for one, item in zip(inner[:1] * len(x) if inner[-1] is ... else inner, x, strict=True):
            yield from _faults(one, item, may_be_empty=may_be_empty)
    elif kind is dict and inner:
        yield from (f"{key} {fault}" for key in x for fault in _faults(inner[1], x[key], may_be_empty=may_be_empty))
    elif x == "" and not may_be_empty:
        yield "is empty: give a value, or leave it out"


def check_relations(*settings: Any, every: bool = True) -> None:
    """Refuse (ValueError) fields whose relations to others of the settings, or of settings within them, do not hold.

    A field at its default is never refused. Where not `every` relation is checked, those to fields that none of the
    settings has are left to the command that has them.
    """
    parts = [part for one in settings for part in (one, *filter(is_dataclass, vars(one).values()))]
    leaves = [{name: part for name, x in vars(part).items() if not is_dataclass(x)} for part in parts]
    anywhere = {name: part for one in reversed(leaves) for name, part in one.items()}
    for part, here in zip(parts, leaves, strict=True):
        for name, relation in relations(part.__class__):
            value, holders = getattr(part, name), anywhere | here
            others = {x: holders[x] for x in relation.names if x in holders}
            acts = not is_default(part, name) and (not relation.of or value in relation.of)
            if acts and (every or len(others) == len(relation.names)):
                refuse_if(fault := relation.refusal(others), f"`{name}`{f' {value}' * bool(relation.of)} {fault}")


def is_default(settings: Any, name: str) -> bool:
    """Whether the field has its class's default."""
    return bool(getattr(settings, name) == getattr(type(settings), name))


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples one completion. Every engine of rlkit takes these and nothing else.

    temperature 0 is greedy decoding; the log-probs are then those of temperature 1.
    `top_k=0`, `top_p=1.0` and `min_p=0.0` mean "off". The completion includes the stop token or the stop string's.
    `seed` fixes the noise of each position, so a request samples the same tokens whatever else the engine is doing,
    up to fp32 rounding of the logits; None draws a fresh seed.
    """

    max_new_tokens: Count = 1024
    temperature: Annotated[float, Range("at least 0 (0: greedy)", lambda x: x >= 0)] = 1.0
    top_p: TopP = 1.0
    top_k: CountOr0 = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_p: Share = 0.0

    def __post_init__(self) -> None:
        check(self, may_be_empty=("stop",))  # an engine names an empty stop string

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Rollouts:
    """What a step samples, and how often it trains on the batch."""

    prompts_per_step: Count = 8
    """prompts per step: one batch"""
    group_size: Count = 8
    """samples per prompt"""
    minibatches: Count = 1
    """optimizer steps per pass over a batch"""
    epochs: Count = 1
    """passes over a batch"""
    max_new_tokens: Count = 1024
    """maximum tokens of a completion (of a turn, in an episode of several)"""
    temperature: Positive = 1.0
    """sampling temperature; all log-probs are computed at it"""
    top_p: TopP = 1.0
    """nucleus sampling; with --engine local log-probs are those of the tokens that were kept (at most 1,024), else, and
    in distill, those of all, weighted by the kept mass. With --overlap or --staleness the engine is local"""
    top_k: Annotated[CountOr0, Without("top_p", why="engines combine them differently; use one")] = 0
    """sample from the k most likely tokens (0: off)"""
    min_p: Annotated[Share, Without("top_p", why="engines combine them differently; use one")] = 0.0
    """sample from tokens with at least this share of the most likely token's probability (0: off)"""
    stop: tuple[str, ...] = ()
    """strings that end a turn, in addition to the model's own stop tokens; a shell writes a line break as $'\\n'"""
    stop_token_ids: tuple[int, ...] = ()
    """token ids that end a turn, in addition to the model's own stop tokens"""
    drop_truncated: bool = False
    """exclude truncated answers from the loss"""
    overlap: bool = False
    """asynchronous: the engine, with its own copy of the weights, samples while the step trains"""
    staleness: Annotated[float, Range("from 0 to 100", lambda x: 0 <= x <= 100)] | None = None
    """with --overlap: steps by which a group may be older than the weights it trains (None: 1).
    Without: each step starts f * prompts_per_step extra groups and pauses them until the next (None: 0)"""
    drop_off_policy: Annotated[bool, Needs("overlap", "staleness", why="else every sample is on-policy")] = False
    """train only on tokens sampled by the newest weights"""
    max_dropped: Annotated[CountOr0 | None, Needs("success_range", why="rlkit grpo replaces groups with it")] = None
    """groups that one step may reject before the run stops; None: 20 * prompts_per_step"""
    journal: bool = False
    """write each completion to disk, so that a killed run does not sample it again (always on with --overlap)"""
    save_rollouts: Annotated[Path | None, Without("from_rollouts")] = None
    """folder for what each step trains on, to look at and to train on again: a file of JSON Lines per step with the
    token ids, masks, log-probs, versions, rewards and rows (docs/rollout.md)"""
    from_rollouts: Annotated[Path | None, Without("journal", "overlap", why="nothing is sampled")] = None
    """train on the steps in a folder of --save-rollouts, without sampling: the same flags give the same weights, bit
    for bit. Data, reward and environment are then those of the held-out prompts only"""
    skip_nan: bool = False
    """drop and count samples with NaN or infinities and optimizer steps with a non-finite gradient norm.
    Off: the first one stops the run. A reward function that returns NaN counts for --reward-max-failed"""
    eval_samples: Annotated[Count, Needs("eval_data")] = 1
    """samples per held-out prompt, for eval/sampled (mean) and eval/best (mean of each prompt's best, pass@n)"""
    print_samples_steps: CountOr0 = 25
    """print a few sampled answers at step 1 and every n-th step; 0: never. `trajectories/` has all of them"""

    def __post_init__(self) -> None:
        check(self)
        groups = f"the {self.prompts_per_step} groups of `prompts_per_step`: groups are not split"
        refuse_if(self.minibatches > self.prompts_per_step, f"`minibatches` {self.minibatches} is more than {groups}")

    @property
    def max_age(self) -> float:
        """`staleness`, or what None stands for."""
        return float(self.overlap) if self.staleness is None else self.staleness

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of each request."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")
        return SamplingParams(**{name: getattr(self, name) for name in names})


def _words(command: str) -> list[str]:
    """The words of a command as a shell reads them; none where a quote is open."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


_COMMAND = Range(
    'a program and its arguments, with {folder} for the checkpoint, as in "rsync -a {folder} host:/runs"',
    lambda x: "{folder}" in x and any(which(program) for program in _words(x)[:1]),
)
_OF_EVALUATION = Range("a metric of held-out data, as eval/greedy", lambda x: x.startswith("eval/"))
_FOLDER = Range("a folder other than the current one", lambda x: str(Path(x)) != ".")


@dataclass(frozen=True)
class Schedule:
    """The run folder, and what happens at which step."""

    output: Annotated[Path, _FOLDER]
    """run folder: metrics, samples, plot, checkpoints, exported model"""
    steps: CountOr0
    """training steps, of one batch each; 0 only evaluates"""
    eval_steps: CountOr0 = 0
    """steps between evaluations, the first before training; 0: none"""
    print_steps: Count = 1
    """print every n-th step and each step with an evaluation; metrics.jsonl has all steps"""
    save_steps: CountOr0 = 0
    """steps between checkpoints; 0: only after the last step"""
    keep: Count = 2
    """newest checkpoints to keep"""
    on_save: Annotated[str | None, _COMMAND] = None
    """command to start after each checkpoint, without a shell: "rsync -a {folder} host:/runs". Training goes on
    meanwhile; what the command prints is added to `on_save.log` in the run folder, and a failure is reported"""
    keep_best: Annotated[str | None, _OF_EVALUATION, Needs("eval_steps"), Needs("eval_data")] = None
    """metric, such as eval/greedy, by which the model of the best evaluation is also exported, to `best/` (of a loss
    the lowest is best). None: only the last model, to `model/`"""
    keep_best_checkpoints: Annotated[CountOr0, Needs("keep_best"), Needs("save_steps")] = 0
    """checkpoints to keep beside the newest: those whose evaluations had the best `keep_best`; 0: none"""
    seed: Seed = 0
    """random seed of data order and sampling"""
    track: tuple[Tracker, ...] = ()
    """trackers that get metrics, arguments, sampled answers, use of the machine and the picture; none: no tracker"""
    track_project: Annotated[str, Needs("track")] = "rlkit"
    """project (wandb, trackio) or experiment (mlflow)"""
    track_model: Annotated[bool, For("track", *TAKE_MODELS)] = False
    """send the exported model to the trackers, too, as a new version (not to tensorboard)"""
    profile_steps: Annotated[tuple[Count, Count] | None, ASCENDING] = None
    """first and last step of a torch.profiler trace (`profile/`), e.g. 10 12: the steps are slower. None: no trace"""
    resume: bool = False
    """continue from the newest checkpoint in `output`"""
    dtype_export: Literal["fp32", "bf16", "fp16"] | None = None
    """dtype of exported models (`model/`, `best/`); checkpoints keep fp32. None: that of the files of `model`"""
    profile_memory: bool = False
    """log the peak memory of each phase of a step (memory/rollout, memory/train ...): of tensors on the GPU, else of
    the process"""

    def __post_init__(self) -> None:
        check(self)
        first, last = self.profile_steps or (0, 0)
        refuse_if(last > self.steps, f"`profile_steps` {first} {last} are not all of the {self.steps} `steps`")
        linux = os.path.exists("/proc/self/clear_refs")
        refuse_if(self.profile_memory and not linux, "`profile_memory` reads /proc/self of Linux: drop it")
        object.__setattr__(self, "output", Path(self.output))


@dataclass(frozen=True)
class Optim:
    """How a step trains: the optimizer, its learning rate, gradient clipping, precision and micro-batches."""

    lr: Share = 1e-6
    """peak learning rate"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning rate after the warm-up: constant, or a decay that would be 0 one step after the last"""
    warmup_steps: CountOr0 = 0
    """linear warm-up steps"""
    weight_decay: NotNegative = 0.0
    """decoupled weight decay, on matrices only"""
    max_norm: Limit = 1.0
    """maximum global gradient norm (inf: no clipping)"""
    max_tokens: Count = 16384
    """packed tokens per micro-batch; where memory runs out in a step of one process, the step is repeated with half"""
    dtype: Literal["fp32", "bf16"] | None = None
    """dtype of matrix products; weights and optimizer states are fp32. None: bf16 on GPUs that have it, else fp32"""
    optimizer: Annotated[str, named("adamw", "muon")] = "adamw"
    """adamw; muon: Muon on matrices of hidden layers, AdamW on embeddings, head, vectors and stacked experts. Or
    FILE.py:FUNCTION, `def make(groups)`, which returns a torch.optim.Optimizer of these parameter groups
    (docs/optimizers.md)"""
    lr_at: Annotated[
        Callable[[int], float] | None, Without("lr", "lr_schedule", "warmup_steps", why="it replaces the schedule")
    ] = None
    """in Python only: the learning rate at each step, instead of `lr`, `lr_schedule` and `warmup_steps`"""
    make_optimizer: Annotated[Callable[[Any], Any] | None, For("optimizer", "adamw", OWN)] = None
    """in Python only: the function of `optimizer` FILE.py:FUNCTION"""

    def __post_init__(self) -> None:
        check(self)


OF_KL = Needs("kl_coef", "kl_limit", "eval_kl", by="has_kl")
_HOLDS_KL = ("linear", "exponential", "pid")


@dataclass(frozen=True)
class Penalties:
    """KL penalty and entropy bonus, and the rules that move their coefficients (`rlkit.loops.coefficients`)."""

    kl_coef: NotNegative = 0.0
    """weight of the KL to the reference model, see --kl-in; 0: no reference is loaded"""
    kl_in: Annotated[Literal["loss", "reward", "advantage"] | None, Needs("kl_coef", "kl_limit", by="has_kl")] = None
    """where the KL goes: in the loss of each token, in its reward, or in its advantage. None: loss (PPO: reward)"""
    kl_target: Annotated[Positive | None, Needs("kl_coef")] = None
    """adapt kl_coef to keep the KL (mean of k3, nats per token) near this; None: kl_coef is constant, unless
    --kl-controller decay or cosine lowers it"""
    kl_controller: Annotated[
        Literal["fixed", "linear", "exponential", "pid", "decay", "cosine"] | None,
        Needs("kl_coef"),
        Needs("kl_target", of=_HOLDS_KL),
        Without("kl_target", of=("fixed", "decay", "cosine"), why="drop it, or use linear, exponential or pid"),
    ] = None
    """rule that adapts kl_coef: linear, exponential (verl's adaptive) and pid hold --kl-target.
    decay and cosine fall to 0 at the last step. A resumed run goes on from the coefficient of its checkpoint, whatever
    --kl-coef says. None: linear with --kl-target, else fixed"""
    kl_horizon: Annotated[Positive, For("kl_controller", "exponential")] = 10_000
    """samples over which --kl-controller exponential changes kl_coef by at most a factor of 1.22"""
    kl_limit: Positive | None = None
    """constraint: a Lagrange multiplier is added to kl_coef while the KL (nats per token) is above this"""
    ref_sync_steps: Annotated[CountOr0, OF_KL, Without("lora_rank", why="it copies whole weights")] = 0
    """steps between copies of the policy into the reference model; 0: the reference is frozen"""
    entropy_coef: Finite = 0.0
    """weight of the entropy bonus"""
    entropy_target: Annotated[NotNegative | None, Without("entropy_limit", why="both move `entropy_coef`")] = None
    """raise entropy_coef by 0.005 a step while the entropy (nats per token) is at or below this.
    Above, lower it and switch it off (TRL's adaptive entropy); it stays from 0 to 1. None: entropy_coef is
    constant, unless --entropy-limit adds to it"""
    entropy_limit: NotNegative | None = None
    """constraint: a Lagrange multiplier is added to entropy_coef while the entropy (nats per token) is below this"""
    limit_rate: Annotated[Positive, Needs("kl_limit", "entropy_limit")] = 0.1
    """step size of the multipliers of --kl-limit and --entropy-limit, per step and nat of violation"""
    controllers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """in Python only: your own rules, by name; see `rlkit.loops.coefficients`"""

    def __post_init__(self) -> None:
        check(self)
        rules = {"kl": self.kl_controller or self.kl_target, "kl_limit": self.kl_limit, "entropy": self.entropy_target}
        rules |= {"entropy_limit": self.entropy_limit}
        twice = [name for name in self.controllers if rules.get(name) not in (None, False)]
        refuse_if(twice, f"`controllers` has a rule {', '.join(twice)}, and so do the other fields: drop one")
        refuse_if(
            self.entropy_target is not None and self.entropy_coef < 0,
            "`entropy_target` starts from `entropy_coef`, which must be at least 0",
        )

    @property
    def has_kl(self) -> bool:
        """Whether the KL's coefficient is, or may become, other than 0, so that a reference model is needed."""
        return bool(self.kl_coef) or self.kl_limit is not None or not {"kl", "kl_limit"}.isdisjoint(self.controllers)


@dataclass(frozen=True)
class Critic:
    """PPO's critic and generalized advantage estimation."""

    critic_lr: Share = 1e-5
    """peak learning rate of the critic, on the policy's schedule"""
    critic_steps: CountOr0 = 0
    """steps at the start that train only the critic"""
    gamma: Share = 1.0
    """discount per token"""
    lam_policy: Share = 0.95
    """GAE lambda of the advantages"""
    lam_value: Share = 1.0
    """GAE lambda of the critic's targets"""
    bootstrap: bool = False
    """a truncated answer ends in the critic's value, which comes on top of its reward: where that does not pay for
    what a longer answer would still get. Off: the reward of the answer as it is"""
    value_clip: Limit = 0.5
    """maximum change of a value in one step, in units of the reward (inf: no clipping)"""
    value_huber: Annotated[Positive | None, Without("value_clip")] = None
    """train the critic on the Huber loss, quadratic up to this error, instead of the clipped squared one"""
    critic_lr_at: Annotated[Callable[[int], float] | None, Without("critic_lr")] = None
    """in Python only: the learning rate of the critic at each step, instead of `critic_lr`"""

    def __post_init__(self) -> None:
        check(self)

    def check_bins(self) -> None:
        """Refuse what a critic with bins does not read."""
        unread = self.value_huber or not is_default(self, "value_clip")
        refuse_if(
            unread, "`value_clip` and `value_huber` are not part of `value_range`, whose loss is bounded: drop them"
        )


@dataclass(frozen=True)
class Bins:
    """A critic that classifies: its value is the mean of a distribution over bins (HL-Gauss, arXiv:2403.03950)."""

    value_range: Annotated[
        tuple[Finite, Finite] | None,
        Range("from low to high", lambda x: x[0] < x[1]),
        Without("value_clip", "value_huber", why="the loss of bins is bounded; drop them"),
    ] = None
    """train the critic by HL-Gauss on bins of this range of returns, which must hold them all, e.g. 0 1; a new critic
    starts in its middle. None: one number, and the squared error"""
    value_bins: Annotated[int, Range("at least 2", lambda x: x >= 2), Needs("value_range")] = 51
    """bins of --value-range"""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Parallel:
    """Sizes of the grid of ranks; their product, without `ep`, is the number of ranks."""

    replicate: Count = 1
    """full copies of the sharded model (HSDP: shards inside a node, copies across nodes)"""
    shard: CountOr0 = 0
    """ranks that shard one copy of parameters, gradients and optimizer states (ZeRO-3); 0: all remaining ranks"""
    cp: Count = 1
    """context parallel: ranks that split the tokens of a sequence"""
    tp: Count = 1
    """tensor parallel: ranks that split every matrix"""
    pp: Count = 1
    """pipeline stages"""
    ep: Count = 1
    """expert parallel: ranks that split the experts of a MoE layer, taken out of shard * cp * tp"""
    ulysses: bool = False
    """context parallel by exchanging heads for tokens instead of gathering keys"""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class ParallelArgs(Parallel):
    """How the model is sharded over the ranks of torchrun."""

    activation_checkpointing: bool = False
    """store only each layer's input, and recompute the rest in the backward"""
    reshard_after_forward: bool = True
    """on several ranks free each layer's gathered parameters after its forward and gather them again for its backward
    (ZeRO-3); off: keep them from forward to backward (ZeRO-2), half of the gathers for the memory of all layers in
    `dtype`"""
    offload: bool = False
    """keep parameters, gradients and optimizer states in CPU memory"""
    compile: bool = False
    """compile each layer with torch.compile"""
    timeout_s: Positive = 1800.0
    """seconds that ranks wait for each other (e.g. for the slowest rollout) before the job ends with an error"""


class ServerTraits(NamedTuple):
    """A kind of inference server: its name, and its limits.

    Its key in `SERVERS` is the name of its folder, of its Python package, and of `owned_by` in its /v1/models.

    `one_gpu_ipc`: ipc reaches a single server of a single GPU only. `cpu_from_disk`: on a CPU, only disk does.
    `truncates`: one that is started here samples with `top_p`, `top_k` and `min_p`.
    """

    name: str
    one_gpu_ipc: bool = False
    cpu_from_disk: bool = False
    truncates: bool = True


SERVERS = {  # values of `engine`; `rlkit.rollout.engines.servers.kinds` has the rest of each
    "sglang": ServerTraits("SGLang"),
    "vllm": ServerTraits("vLLM", one_gpu_ipc=True, cpu_from_disk=True, truncates=False),
}


def _may_use(cpu: int) -> bool:
    return hasattr(os, "sched_getaffinity") and cpu in os.sched_getaffinity(0)


_CPU = Range("numbers of CPUs that this process may use, on Linux", _may_use)
_SERVED, _LOCAL = For("engine", *SERVERS), For("engine", "local")
_STARTED_HERE = Without("engine_urls", why="it is for servers that are started here; drop one")


@dataclass(frozen=True)
class Engines:
    """The engines that sample, and how weights reach them."""

    engine: Annotated[str, named("local", *SERVERS)] = "local"
    """local: rlkit's own engine, for small models; sglang, vllm: their servers. Or FILE.py:FUNCTION, which makes an
    engine of your own from the model's path (docs/engines.md)"""
    engine_urls: Annotated[tuple[str, ...], _SERVED] = ()
    """URLs of running servers of `model`, as http://127.0.0.1:30000. None: start servers on every node"""
    engine_router: Annotated[str | None, _SERVED, Needs("engine_urls", why="the weights go to them")] = None
    """URL of a router in front of `engine_urls`, which then distributes the requests"""
    engine_gpus: Annotated[tuple[CountOr0, ...], _SERVED, _STARTED_HERE] = ()
    """numbers of the GPUs of each node for servers that are started here; none: all, which then also train"""
    engine_tp: Annotated[Count, _SERVED, _STARTED_HERE] = 1
    """GPUs of each server that is started here (tensor parallel)"""
    engine_memory: Annotated[float, Range("above 0 and below 1", lambda x: 0 < x < 1), _SERVED, _STARTED_HERE] = 0.4
    """share of its GPU's memory that a server started here takes (SGLang: of what is free, vLLM: of all)"""
    engine_release: Annotated[bool, _SERVED] = False
    """free the servers' GPU memory, weights and KV cache, during updates (SGLang's memory saver, vLLM's sleep mode)"""
    engine_args: Annotated[str, _SERVED, _STARTED_HERE] = ""
    """further arguments of servers started here, in one string: --engine-args="--kv-cache-dtype fp8_e5m2\""""
    engine_quantization: Annotated[Literal["fp8"] | None, _SERVED, _STARTED_HERE] = None
    """servers started here compute their layers in 8-bit floats, and quantize them anew at every update, with a scale a
    row (SGLang: Qwen2 and Qwen3). The trainer does not: see `mismatch`, for which --correction weighs"""
    engine_pause: Annotated[Literal["retract", "in_place", "abort"], _SERVED] = "retract"
    """requests in flight on servers when new weights come: retract computes their keys and values again; in_place keeps
    those of the old weights (faster, less exact); abort ends them"""
    weight_sync: Annotated[
        Literal["auto", "ipc", "group", "disk", "changes"],
        _SERVED,
        Needs("engine_urls", of=("changes",), why="it is for servers on other machines"),
        Needs("weight_sync_folder", of=("changes",), why="it is for servers on other machines"),
    ] = "auto"
    """how weights go to servers: ipc (memory of this machine), group (NCCL or gloo), disk, changes (the
    values that a step changes, to machines that run `rlkit patch`). auto: ipc where all servers
    are on this machine (vLLM: where there is one, of one GPU, else disk), else disk if there is a folder, else group"""
    weight_sync_folder: Annotated[Path | None, _SERVED, For("weight_sync", "auto", "disk", "changes")] = None
    """folder for --weight-sync disk, which trainer and servers see under the same name (none: OUTPUT/weights), or for
    changes; auto uses it where weights do not go by ipc"""
    weight_sync_lora: Annotated[
        Literal["auto", "adapter", "merged"],
        _SERVED,
        Needs("lora_rank", of=("adapter",)),
        Without("engine_release", "engine_router", of=("adapter",), why="use merged"),
        Without("lora_base", of=("adapter",), why="servers need the weights that the adapter was trained on"),
    ] = "auto"
    """what a LoRA run sends to servers: adapter, the adapter alone, which they add; merged, all weights with the
    adapter added. auto: the adapter where the servers take one, else merged"""
    max_batch: Annotated[Count | None, _LOCAL] = None
    """sequences that the local engine decodes at once; none: 64, from a copy on a GPU 256 (fewer if memory is short)"""
    compile: Annotated[bool, _LOCAL] = False
    """torch.compile the local engine's decoding in fp32, of models that its own decoder takes; ten seconds or more at
    the start. Not in 16 bits, the default on a GPU"""
    engine_threads: Annotated[Count, _LOCAL, Needs("overlap")] = 1
    """CPU threads of the local engine (with --overlap; in a run of several ranks it has 1)"""
    engine_cpus: Annotated[tuple[Annotated[int, _CPU], ...], _LOCAL, Needs("overlap")] = ()
    """CPUs that the local engine may run on (with --overlap); none: all"""

    def __post_init__(self) -> None:
        check(self, may_be_empty=("engine_args",))
        refuse_if(
            len(self.engine_gpus) % self.engine_tp,
            f"`engine_gpus` are {len(self.engine_gpus)}: give a multiple of `engine_tp` {self.engine_tp}",
        )

    @property
    def is_local(self) -> bool:
        """Whether rlkit's own engine samples."""
        return self.engine == "local"

    @property
    def serves(self) -> bool:
        """Whether servers sample."""
        return self.engine in SERVERS
