"""The values that flow between the pieces, and the glossary of their axes.

Axes
    T   trainable stream: all tokens of all sequences of a batch, packed end to end
    N   sequences: one for each episode, or several where an episode came in pieces (see `Trajectory.continues`)
    G   groups (the samples of one prompt)
    P   prefix tokens: prompts, each stored once however many sequences share it
    D   hidden size
    V   vocabulary

Shift. Everything on the `[T]` axis is shifted once, when packing: `tokens[t]` is read, `targets[t]` is the action that
follows it, and `logp[t] values[t] mask[t] rewards[t]` all speak of that action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit.settings import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class LogProbs(NamedTuple):
    """Log-probability of the target and entropy of the distribution it came from, in nats, one per token."""

    logp: Float[Tensor, "*shape"]
    entropy: Float[Tensor, "*shape"]


class Controller(NamedTuple):
    """A pure feedback rule over a NamedTuple of floats: `state = init(coef)`, `state = update(state, measured)`.

    `state.coef` is the coefficient of the next step. All rules have these signatures, so any fits any loop.
    """

    init: Callable[[float], Any]
    update: Callable[[Any, float], Any]


@dataclass(frozen=True)
class Completion:
    """What an engine sampled after a prompt: token ids, and for each its log-prob and the weight version that made it.

    `logp` is of the temperature-scaled, untruncated distribution. `finish_reason` is "stop" (a stop token or string),
    "length" (`max_new_tokens` or the context limit) or "abort".
    """

    ids: list[int]
    logp: list[float]
    versions: list[int]
    finish_reason: FinishReason


class Generate(Protocol):
    """The whole contract of a rollout engine: tokens in, tokens out."""

    async def __call__(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """Sample one completion of `prompt_ids`. `rid` names the request, so that it can be aborted."""
        ...


@dataclass(frozen=True)
class Trajectory:
    """One sampled sequence: a prompt, then tokens of which some (`mask`) were sampled by the policy.

    In a single turn every token of `ids` was sampled. In several turns the tool's or user's tokens are in `ids` with
    mask False, logp 0 and version -1. `reward` is the terminal reward that trains; `token_rewards`, where given, is
    added on top, one per token of `ids`. `score` is only logged. `truncated` says that the episode was cut by a length
    limit and did not end by itself. `info` is free and goes to the trajectory dump, not into training.

    `continues`: this is a further piece of the episode of the trajectory before it in the group. An episode has several
    pieces where a chat template rewrote history between two turns, so that the second turn was sampled from another
    context than the first one left. Its pieces share `reward` and `truncated`, which speak of the whole episode.
    """

    prompt_ids: list[int]
    ids: list[int]
    mask: list[bool]
    logp: list[float]
    versions: list[int]
    reward: float = 0.0
    token_rewards: list[float] | None = None
    truncated: bool = False
    score: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    continues: bool = False


@dataclass(frozen=True)
class Batch:
    """Packed sequences that share prompts. See `rlkit.packing.pack`, which makes it.

    A sequence's tokens are `[last prompt token, s_1 .. s_{n-1}]` with targets `s_1 .. s_n`; the rest of its prompt is
    the prefix `prefix_ids[i]`, which gives keys and values only. A truncated sequence ends with one more token, `s_n`,
    whose mask is False: its place holds the bootstrap value. Unshared packing is the same type with empty prefixes.

    `episode_ids` are equal for the pieces of one episode; left out, every sequence is an episode of its own. Where they
    matter (baselines, means over sequences) see `rlkit.segments`. The six streams after `versions` are None until
    something fills them in; `kept_mass` only where sampling was truncated (see `with_kept_mass`).
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

    def __post_init__(self) -> None:
        if self.episode_ids is None:
            own = torch.arange(self.num_seqs, device=self.cu_seqlens.device)
            object.__setattr__(self, "episode_ids", own)

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
        ahead = torch.device(device).type != "cpu"  # a copy to the host could be read before it has arrived
        return replace(self, **{k: v.to(device, non_blocking=ahead) for k, v in moved.items() if v is not None})
