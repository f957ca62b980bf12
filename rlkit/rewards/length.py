"""Rewards and penalties that depend on the length of a completion, in tokens. Lengths are those of `completion_ids`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def soft_overlong(
    _completion: str, _row: dict[str, Any], completion_ids: Sequence[int], *, max_tokens: int, cache_tokens: int
) -> float:
    """DAPO's soft punishment of over-long answers, to be added to the reward; `max_tokens` is the generation limit.

        r(n) = 0                                  n <= L - c          L = max_tokens, c = cache_tokens
               (L - c - n) / c              L - c < n <= L
               -1                               L < n

    Limits:    continuous; c -> 0 is a step at L. The paper: L = 20480, c = 4096.
    Differs:   verl (`overlong_buffer`): the same times `penalty_factor` (put a weight on it), without the floor of -1
               beyond L, which a completion cannot reach. ColossalAI: c = min(1024, L / 4).
    Reference: https://arxiv.org/abs/2503.14476, eq. 13
    """
    _positive(max_tokens=max_tokens, cache_tokens=cache_tokens)
    if cache_tokens > max_tokens:
        raise ValueError(f"cache_tokens must be at most max_tokens, got {cache_tokens} > {max_tokens}")
    return max(-1.0, min(0.0, (max_tokens - cache_tokens - len(completion_ids)) / cache_tokens))


def length_target(
    _completion: str, _row: dict[str, Any], completion_ids: Sequence[int], *, target: int, scale: float
) -> float:
    """A penalty for missing a length, to be added to the reward (L1's exact form).

        r(n) = -scale |target - n|

    Reference: https://arxiv.org/abs/2503.04697, eq. 1 (scale 0.0003)
    """
    _positive(target=target, scale=scale)
    return -scale * abs(target - len(completion_ids))


def short_relative(
    completions: list[str],  # noqa: ARG001 - its name asks for a whole group
    _rows: list[dict[str, Any]],
    completion_ids: list[Sequence[int]],
    correct: list[bool],
) -> list[float]:
    """Kimi k1.5's length reward: the shortest of a group's answers gains, the longest loses; wrong ones never gain.

        lambda_i = 1/2 - (n_i - min n) / (max n - min n)      r_i = lambda_i if correct, else min(0, lambda_i)

    `correct` must be known when this is called (an environment leaves it in `Trajectory.info`); all samples of a call
    are one group, as in `scorer`. Equal lengths give 0.

    Reference: https://arxiv.org/abs/2501.12599, section 2.3.3
    """
    lengths = [len(ids) for ids in completion_ids]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    gains = [0.5 - (n - shortest) / (longest - shortest) for n in lengths]
    return [gain if good else min(0.0, gain) for gain, good in zip(gains, correct, strict=True)]


def cosine(
    num_tokens: int,
    *,
    correct: bool,
    max_tokens: int,
    correct_range: tuple[float, float],
    wrong_range: tuple[float, float],
    exceeded: float,
) -> float:
    """The cosine reward: a correct answer is worth more when short, a wrong one costs less when long.

        r(n) = b + (a - b) (1 + cos(pi n / L)) / 2        (a, b) = the range: the values at n = 0 and n = L
        r(n) = exceeded                                   n >= L = max_tokens

    Not a reward function by itself: call it in yours, which knows whether the answer is correct.

    Differs:   open-r1's `get_cosine_scaled_reward` has the ranges as four values, and no `exceeded`.
    Reference: https://arxiv.org/abs/2502.03373, section 4
    """
    _positive(max_tokens=max_tokens)
    if num_tokens >= max_tokens:
        return exceeded
    start, end = correct_range if correct else wrong_range
    return end + (start - end) * (1.0 + math.cos(math.pi * num_tokens / max_tokens)) / 2.0


def no_truncation(_completion: str, _row: dict[str, Any], truncated: bool) -> float:
    """-1 for a completion that was cut by the length limit, else 0: a penalty to be added."""
    return -float(truncated)


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
