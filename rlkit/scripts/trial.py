"""Try the user's functions before a model is loaded, so that their mistakes are errors of the command line."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import Any

from rlkit._extras import MissingExtra
from rlkit.ranks import is_first
from rlkit.scripts.args import Episodes

_log = logging.getLogger("rlkit.rewards")
_SLOW_S = 10.0


def try_rewards(functions: Mapping[str, Any], episodes: Episodes, *parts: Any, flag: str) -> None:
    """Call each reward function on a row of each of the `parts` of the data: see `rlkit.rewards.trial.try_reward`.

    ValueError for one that fails, unless `reward_max_failed` lets some samples fail and not all of them did. What gives
    the gold answer no more than other texts is logged.
    """
    for spec, function, trial in reward_trials(functions, episodes, *parts) if is_first() else ():
        from rlkit.rewards.failures import name_of

        for what, error in trial.failures:
            what = f"a batch of {len(trial.tried)} completions" if error.index is None else what
            said = f"{name_of(function)} failed on {trial.place} with {what}: {error.cause}; {error.fix}"
            if not episodes.max_failed or len(trial.failures) == len(trial.tried):
                raise ValueError(f"`{flag}` {spec}: {said}; --no-trial skips this call")
            _log.warning("%s", said)
        if trial.note:
            _log.warning("%s: %s", trial.place, trial.note)


def try_env(args: Any, tokenizer: Any, env: Any, prompts: Sequence[Any], *, ends: Sequence[int]) -> None:
    """Play one step of an episode of `env` or `tools` on the first prompt, with its gold answer and one of the tokens
    `ends` as the policy's turn.

    ValueError for an environment that fails; one that has not come that far after `reward_timeout` is logged. An
    `agent` is not run.
    """
    how = args.episodes
    if not is_first() or not args.evaluation.trial or not prompts or (how.env is None and not how.tools):
        return
    from rlkit.rewards.episodes import any_reward
    from rlkit.rewards.episodes import try_env as play
    from rlkit.rewards.scoring import env_rewards
    from rlkit.rewards.text import gold_answer
    from rlkit.run.sync import run_sync

    flag, given = ("tools", how.tools) if how.env is None else ("env", how.env)
    spec = given if isinstance(given, str) else " ".join(given)
    ids = [*tokenizer.encode(str(gold_answer(prompts[0].row) or "1"), add_special_tokens=False), *ends[:1]]
    score = any_reward if how.reward else env_rewards()
    try:
        came = run_sync(play(env, prompts[0], ids=ids, score=score, timeout_s=how.reward_timeout))
    except MissingExtra:
        raise
    except Exception as error:
        what = " ".join(str(error).split())
        raise ValueError(f"`{flag}` {spec}: {what}; --no-trial skips this step") from error
    if not came:
        said = "--%s %s: the first step of an episode takes more than %g s (--reward-timeout), and the run goes on"
        _log.warning(said, flag, spec, how.reward_timeout)


def reward_trials(functions: Mapping[str, Any], episodes: Episodes, *parts: Any) -> Iterator[tuple[str, Any, Any]]:
    """FILE.py:FUNCTION, the function and its `Trial`, of each function on each part."""
    from rlkit.rewards.trial import try_reward
    from rlkit.run.sync import run_sync

    for (name, (spec, _)), rows in ((one, rows) for one in episodes.rewards().items() for rows in filter(len, parts)):
        with _told_if_slow(spec):
            trial = run_sync(
                try_reward(
                    functions[name], rows, timeout_s=episodes.reward_timeout, one_turn=episodes.one_turn,
                    alone=len(functions) == 1, stop=not episodes.max_failed,
                )
            )  # fmt: skip
        if trial is not None:
            yield spec, functions[name], trial


@contextmanager
def _told_if_slow(spec: str) -> Iterator[None]:
    """Say so where the block takes longer than a person waits without a sign."""
    said = f"{spec} is still being tried on a row of the data; --no-trial skips this call"
    timer = Timer(_SLOW_S, _log.warning, [said])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def trial_lines(trial: Any) -> Sequence[str]:
    """The reward of each text, for `rlkit data`."""
    width = max(len(what) for _, what, _ in trial.tried)
    shown = [
        (what, getattr(result, "reward", None), getattr(result, "cause", ""), getattr(result, "fix", ""))
        for _, what, result in trial.tried
    ]
    return [
        f"  {what:{width}}  {f'{cause}; {fix}' if reward is None else f'{reward:g}'}"
        for what, reward, cause, fix in shown
    ]
