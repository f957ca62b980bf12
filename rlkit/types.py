"""The values that flow between the pieces, and the glossary of their axes.

Axes
    T   trainable stream: all tokens of all sequences of a batch, packed end to end
    N   sequences: one per episode, or one per piece of an episode in several pieces (see `Trajectory.continues`)
    G   groups (the samples of one prompt)
    P   prefix tokens: prompts, each stored once however many sequences share it
    D   hidden size
    V   vocabulary

Shift. Everything on the `[T]` axis is shifted once, when packing: the model reads `tokens[t]`, `targets[t]` is the
action that follows, and `logp[t] values[t] mask[t] rewards[t]` belong to that action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit.settings import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
Tokens = Float[Tensor, "*shape"]  # a number per token, in any shape
Mask = Bool[Tensor, "*shape"] | None  # of the same shape; None: all tokens count


class LogProbs(NamedTuple):
    """Log-probability of each target, and entropy of the distribution at its position, in nats."""

    logp: Tokens
    entropy: Tokens


class Controller(NamedTuple):
    """A pure feedback rule over a NamedTuple of floats: `state = init(coef)`, `state = update(state, measured)`.

    `state.coef` is the coefficient of the next step. All rules share these signatures.
    """

    init: Callable[[float], Any]
    update: Callable[[Any, float], Any]


class Picture(Protocol):
    """An image that a prompt shows. Two with one `digest` are the same image."""

    @property
    def digest(self) -> str:
        """A name of the image's content."""
        ...

    def inputs(self) -> dict[str, Tensor]:
        """What the model reads of it, by the names of its forward's arguments, with the image's rows first:
        `pixel_values`, `image_grid_thw`."""
        ...


def request_ids(prompt_ids: Any, params: Any) -> list[int]:
    """The token ids of a prompt, also of an array or a 1-D tensor.

    TypeError unless they are the ids of one prompt, and `params` are `SamplingParams`.
    """
    ids = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids
    if not isinstance(ids, Sequence) or not all(issubclass(kind, Integral) for kind in {*map(type, ids)}):
        got, fix = f"{prompt_ids!r:.80}", "encode a text with the tokenizer, and call generate once for each prompt"
        raise TypeError(f"prompt_ids must be the token ids of one prompt, [1, 2, 3], got {got}: {fix}")
    if not isinstance(params, SamplingParams):
        fix = "give SamplingParams(max_new_tokens=64)"
        raise TypeError(f"params must be SamplingParams, got {params!r:.80}: {fix}")
    return [*map(int, ids)]


class Support(NamedTuple):
    """The tokens that top-p, top-k or min-p kept where each of n tokens was sampled.

    `ids` are an int32 array [n, K], padded with -1 (a row of -1 alone: the whole vocabulary), `mass` a float32 array
    [n], the probability that the sampling weights gave to them. Memory: 4 (K + 1) bytes a token.
    """

    ids: Any
    mass: Any


@dataclass(frozen=True)
class Completion:
    """The tokens that an engine sampled after a prompt, with the log-prob and the weight version of each.

    `logp` is of the temperature-scaled, untruncated distribution. `finish_reason` is "stop" (a stop token or string),
    "length" (`max_new_tokens` or the context limit) or "abort".

    `experts`, where an engine has them: the experts that each token that was read went to, in each layer of a mixture
    of experts, as an int16 array [prompt + ids - 1, layers, k]; -1: unknown. See `rlkit.model.routing`.

    `support`, where an engine reports it: the tokens that truncated sampling kept, one row per id.
    """

    ids: list[int]
    logp: list[float]
    versions: list[int]
    finish_reason: FinishReason
    experts: Any = field(default=None, compare=False, repr=False)
    support: Support | None = field(default=None, compare=False, repr=False)


class Progress(NamedTuple):
    """Requests running and waiting now, and tokens generated since the engine was made."""

    running: int
    waiting: int
    num_tokens: int


class Generate(Protocol):
    """The callable that a rollout samples with, token ids in and out: the `generate` method of an engine.

    An object that only generates serves evaluation and judges; training also needs the other methods of `Engine`.
    """

    async def __call__(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """Sample one completion of `prompt_ids`. Where a prompt shows images there is also `images`, a list of
        `Picture` in the order of their placeholders.

        The model reads exactly `prompt_ids` and the completion holds exactly the ids it sampled: nothing is
        re-tokenised, and the stop token is included. Each id has its log-prob at `params.temperature` before top-p and
        top-k, and the version of the weights that sampled it. There is at least one id unless `finish_reason` is
        "abort".

        Many calls run at once; each returns when its own completion ends. Cancelling a call drops its request and
        disturbs no other. `rid` names the request for `Engine.abort`; None: the engine names it.

        Raises:
            ValueError: the request cannot be served: an empty or too long prompt, parameters it does not support.
            Any other error is a failure of the engine, and ends the run.
        """
        ...


@runtime_checkable
class Engine(Protocol):
    """The object a training loop samples from and publishes weights to. docs/engines.md has a small one.

    Methods are called from one event loop. `rlkit.loops.rl` calls `update_weights` once before the first sample and
    after every step. Overlapping sampling and training needs an engine with its own copy of the weights.
    """

    async def generate(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """See `Generate`. Two requests in flight cannot have the same `rid`: ValueError."""
        ...

    async def abort(self, rid: str | None = None) -> int:
        """End the request `rid` (None: all requests in flight) and return the number of requests ended.

        Their `generate` calls return the tokens so far, possibly none, with finish_reason "abort"; a request that ends
        at the same moment keeps its own finish_reason. The caller may continue it with prompt and tokens so far as the
        next prompt. An engine behind a network may return before those calls do.
        """
        ...

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], /, *, version: int) -> None:
        """Load `weights`, pairs of parameter name and full tensor; every token sampled afterwards is stamped `version`.

        `weights` is an iterator that gathers each tensor as it is read; an engine that shares the trainer's parameters
        leaves it unread. Requests in flight continue with the new weights (their versions never decrease) or end as
        "abort".

        A failed update raises. The engine then serves the old weights under their old version, or `generate` raises
        RuntimeError until an update succeeds. It never samples from mixed weights.
        """
        ...

    @property
    def progress(self) -> Progress:
        """Current counts, for display. Reading it is cheap: it sends no request and does not block."""
        ...

    async def close(self) -> None:
        """End the requests in flight as "abort" and free the engine's caches, connections and own processes.

        Servers that the engine did not start keep running. `generate` then raises RuntimeError; a second `close` does
        nothing.
        """
        ...


@runtime_checkable
class Teacher(Protocol):
    """What distillation asks of a teacher: log-probs of tokens that a student sampled. docs/distillation.md has both of
    rlkit's, a model in this process and a server.

    The batch is packed and holds the student's token ids, so both must have one tokenizer. Log-probs are of the whole
    vocabulary, at the temperature of the rollouts; where the mask is False they may be anything. On many ranks all call
    it together, with the whole batch.
    """

    def logp(self, batch: Batch) -> Float[Tensor, "T"]:
        """The log-prob of each target."""
        ...

    def top_logp(self, batch: Batch, k: int) -> tuple[Int[Tensor, "T K"], Float[Tensor, "T K"]]:
        """The `k` most likely tokens at each position and their log-probs."""
        ...


@dataclass(frozen=True)
class Trajectory:
    """One sampled sequence: a prompt, and tokens of which the policy sampled those with `mask` True.

    In a single turn the policy sampled every token of `ids`. In several turns `ids` also holds the tokens of tools and
    users, with mask False, logp 0 and version -1. `reward` is the terminal reward that trains; `token_rewards`, one per
    token of `ids`, are added to it. `score` is only logged. `truncated`: a length limit cut the episode before its end.
    `info` goes to the trajectory dump, not into training.

    `continues`: this is the next piece of the episode of the trajectory before it in the group. An episode has several
    pieces where a chat template rewrites history between two turns, so that the second turn was sampled from another
    context than the first one left. All pieces have the `reward` and `truncated` of the whole episode.

    `role` names the player of an environment of several roles: the pieces of one role are an episode of their own, with
    its own reward, compared with those of the same role in its group.

    `temperature` is that of the distribution of which `logp` are the log-probs, as `rollout` records it; None: unknown.

    `experts` are those of `Completion`, of all tokens but the last; `support` is that of `Completion`, one row per id.

    `images` are the pictures that the prompt shows, in the order of their placeholders in `prompt_ids`, and
    `later_images` those of `ids`, which tools, environments and agents have shown in later turns.

    The streams are lists, or after `rlkit.rollout.groups.compact` arrays (of Python's `array`, an eighth of the
    memory): the loops' `prepare` gets those. Both are indexed, sliced and iterated alike; `list(t.ids)` is a list.
    """

    prompt_ids: MutableSequence[int]
    ids: MutableSequence[int]
    mask: MutableSequence[bool]
    logp: MutableSequence[float]
    versions: MutableSequence[int]
    reward: float = 0.0
    token_rewards: MutableSequence[float] | None = None
    truncated: bool = False
    score: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    continues: bool = False
    role: str = ""
    temperature: float | None = None
    experts: Any = field(default=None, compare=False, repr=False)
    images: tuple[Picture, ...] = ()
    later_images: tuple[Picture, ...] = ()
    support: Support | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Batch:
    """Packed sequences that share prompts. See `rlkit.packing.pack`, which makes it.

    A sequence's tokens are `[last prompt token, s_1 .. s_{n-1}]` with targets `s_1 .. s_n`; the rest of its prompt is
    the prefix `prefix_ids[i]`, which gives keys and values only. A truncated sequence ends with one more token, `s_n`,
    whose mask is False: `values` there is the bootstrap value. Unshared packing is the same type with empty prefixes.

    `episode_ids` are equal for the pieces of one episode; by default every sequence is one episode. For where they
    matter (baselines, means over sequences) see `rlkit.segments`. The six streams after `versions` are None until they
    are filled in; `kept_mass` only in truncated sampling (see `with_kept_mass`). `temperature` is that of
    `rollout_logp` (None: unknown); a policy with another temperature refuses the batch. `experts` and `prefix_experts`
    are the experts that the engine chose for each token (`Completion.experts`; -1: unknown), or None. `images` are the
    pictures of each prefix, then of each sequence, in the order of their placeholders; None: there are none.

    `support` are the tokens that truncated sampling kept at each position, where the engine reports them (`Support`,
    -1: padding). `kept_mass` is then its mass under the weights that sampled, and `rollout_logp` and the policy's
    log-probs of the batch are renormalised over it.

    `roles` numbers the roles of the sequences (`Trajectory.role`); None: there is one. Of a distillation: `teachers` is
    the index of each sequence's teacher, `teacher_ids` are K tokens at each position and `teacher_logp` the teacher's
    log-probs of them; `teacher_prompts` are the tokens that the teacher reads in place of each sequence's prompt, then
    -1 (None: it reads the student's).
    """

    tokens: Int[Tensor, "T"]
    targets: Int[Tensor, "T"]
    mask: Bool[Tensor, "T"]
    cu_seqlens: Int[Tensor, "N1"]
    prefix_tokens: Int[Tensor, "P"]
    prefix_cu: Int[Tensor, "G1"]
    prefix_ids: Int[Tensor, "N"]
    group_ids: Int[Tensor, "N"]
    rewards: Float[Tensor, "N"]
    truncated: Bool[Tensor, "N"]
    token_rewards: Float[Tensor, "T"]
    rollout_logp: Float[Tensor, "T"]
    versions: Int[Tensor, "T"]
    old_logp: Float[Tensor, "T"] = None  # type: ignore[assignment]
    ref_logp: Float[Tensor, "T"] = None  # type: ignore[assignment]
    kept_mass: Float[Tensor, "T"] = None  # type: ignore[assignment]
    advantages: Float[Tensor, "T"] = None  # type: ignore[assignment]
    values: Float[Tensor, "T"] = None  # type: ignore[assignment]
    returns: Float[Tensor, "T"] = None  # type: ignore[assignment]
    episode_ids: Int[Tensor, "N"] = None  # type: ignore[assignment]
    temperature: float | None = None
    experts: Int[Tensor, "T layers k"] | None = None
    prefix_experts: Int[Tensor, "P layers k"] | None = None
    images: tuple[tuple[Picture, ...], ...] | None = None
    roles: Int[Tensor, "N"] = None  # type: ignore[assignment]
    teachers: Int[Tensor, "N"] = None  # type: ignore[assignment]
    teacher_ids: Int[Tensor, "T K"] = None  # type: ignore[assignment]
    teacher_logp: Float[Tensor, "T K"] = None  # type: ignore[assignment]
    teacher_prompts: Int[Tensor, "N L"] | None = None
    support: Int[Tensor, "T K"] | None = None

    def __post_init__(self) -> None:
        if self.episode_ids is None:
            object.__setattr__(self, "episode_ids", torch.arange(self.num_seqs, device=self.cu_seqlens.device))

    @property
    def num_tokens(self) -> int:
        """Length of the `[T]` axis (prefix tokens not counted)."""
        return self.tokens.numel()

    @property
    def num_seqs(self) -> int:
        """Number of sequences N."""
        return self.cu_seqlens.numel() - 1

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with every tensor on `device`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        ahead = torch.device(device).type != "cpu"  # an asynchronous copy to the host could be read too early
        tensors: dict[str, Any] = {
            k: v.to(device, non_blocking=ahead) for k, v in moved.items() if isinstance(v, Tensor)
        }
        return replace(self, **tensors)
