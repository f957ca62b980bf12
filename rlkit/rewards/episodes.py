"""An exception in an environment, as an error that names its file, function and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlkit._extras import MissingExtra
from rlkit.rewards.call import RewardError
from rlkit.rewards.failures import fix_of, name_of, place_in
from rlkit.rollout.groups import Env, Prompt, Sampler, pieces_of
from rlkit.types import Completion, Trajectory


class EpisodeError(RewardError):
    """An environment of the user failed. `__cause__` is the exception."""


def named(env: Env, foreign: Any) -> Env:
    """The environment, whose exceptions and wrong results are an `EpisodeError` with the name of `foreign`.

    `foreign` is what the user wrote: the function, class or factory. Errors of the engine are raised as they are.
    """

    async def of_user(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        sampling: list[BaseException] = []

        async def sampled(prompt_ids: list[int], **limits: Any) -> Completion:
            try:
                return await sample(prompt_ids, **limits)
            except Exception as error:
                sampling.append(error)
                raise

        try:
            return pieces_of(await env(prompt, sampled))
        except Exception as error:
            if any(found in sampling for found in (error, error.__cause__, error.__context__)):
                raise
            raise _failed(foreign, error, prompt) from error

    return of_user


def _failed(foreign: Any, error: Exception, prompt: Prompt) -> EpisodeError:
    place, text = place_in(foreign, error), " ".join(str(error).split())
    cause = f"{type(error).__name__}: {text}{place}" if place else text  # without a place, it is our own sentence
    fix = fix_of(foreign, error, prompt.row) or "correct it, or handle it there: return an episode with a reward"
    if isinstance(error, AttributeError) and "NoneType" in text and getattr(error, "name", "") in _OF_TURN:
        fix = "a turn is None where there is no room for another one: write `if turn is None: break` before this line"
    lines = [
        f"environment {name_of(foreign)} failed on row {prompt.index + 1}: {cause}",
        *[f"  fix: {fix}"] * bool(place),
    ]
    return EpisodeError("\n".join(lines), index=prompt.index, cause=cause)


_OF_TURN = ("text", "ids", "finish_reason")  # of `rlkit.rollout.envs.chat.Turn`


def made(make: Callable[[], Env], foreign: Any, spec: str) -> Env:
    """`make()`, which calls the user's factory or constructor; ValueError with file, line and fix if that fails."""
    try:
        return named(make(), foreign)
    except MissingExtra:
        raise
    except Exception as error:
        if not (place := place_in(foreign, error)):
            raise
        fix = fix_of(foreign, error, None) or "correct it"
        raise ValueError(f"`env` {spec}: {type(error).__name__}: {error}{place}; {fix}") from error
