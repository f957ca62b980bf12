"""The user's functions, FILE.py:FUNCTION: loaded, checked, and called before a model is loaded.

Their mistakes are then errors of the command line.
"""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from rlkit._util.extras import MissingExtra
from rlkit._util.ranks import is_first
from rlkit._util.text import Explained
from rlkit.scripts.args import OF_RETURNS, OF_VALUES, Episodes, Evaluation, KlEstimator
from rlkit.settings import Critic, Penalties, is_default, refuse_if

if TYPE_CHECKING:
    from rlkit.scripts import grpo, ppo

_log = logging.getLogger("rlkit.rewards")
_FAR = 50  # times larger: rewards beside which others hardly train
_SLOW_S = 10.0
OfTokenizer = Callable[[Any], Any]  # built from the user's code and a tokenizer


class LossError(Explained):
    """A loss function of the user that failed, or returned something else than a loss per element."""


def function_of(flag: str, spec: str, *, load: Callable[[str], Any] | None = None) -> Any:
    """The function of a flag FILE.py:FUNCTION or MODULE:FUNCTION, or what `load` makes of its text; ValueError, with
    the flag, if it does not exist.
    """
    from rlkit.rewards.load import load_function

    try:
        return (load or load_function)(spec)
    except (AttributeError, TypeError, ValueError, FileNotFoundError) as error:
        raise ValueError(f"`{flag}` {spec}: {error}") from None
    except ImportError as error:
        if load is not None and isinstance(error, MissingExtra):  # which names the flag
            raise
        raise ImportError(f"`{flag}` {spec}: {error}", name=error.name) from None


def tried_function(flag: str, spec: str, trial: Callable[[Any], object]) -> Any:
    """`function_of`, after `trial(function)` has called it; ValueError, with the flag, for one that it refuses."""
    function = function_of(flag, spec)
    try:
        trial(function)
    except (ValueError, TypeError) as error:
        raise ValueError(f"`{flag}` {spec}: {error}") from error
    return function


def trial_of(choose: Callable[[Any], Any], **options: Any) -> Callable[[Any], object]:
    """The function that `choose` takes of `rlkit.loops.trial_losses`, which is imported, with torch, once called."""

    def trial(function: Any) -> None:
        from rlkit.loops import trial_losses

        choose(trial_losses)(function, **options)

    return trial


def tried(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the user's that the loops do not try again: to them it is one of rlkit."""
    return lambda *args, **options: function(*args, **options)


def own_loss(spec: str, trial: Callable[[Any], object]) -> Any:
    """`tried_function` of `--loss FILE.py:FUNCTION`, a loss per element; None for the name of one of rlkit."""
    return _checked_loss(f"--loss {spec}", spec, tried_function("loss", spec, trial)) if ":" in spec else None


def _checked_loss(flag: str, spec: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The loss function; LossError, with the user's line, where it raises or returns no loss per element."""
    calls = 0

    @wraps(function)
    def checked(x: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        import torch

        from rlkit.loops.trial import wrong_loss

        try:
            loss = function(x, *args, **options)
        except Exception as error:
            file = str(Path(spec.rpartition(":")[0]).expanduser().absolute())
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
            where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
            raise LossError(f"{flag} failed: {type(error).__name__}: {error}{where}") from error
        fault = wrong_loss(loss, x.shape, graded=x.requires_grad and torch.is_grad_enabled())
        calls += 1
        if not fault and calls == 1 and loss.numel() and bool(loss.isnan().all()):
            form = f"a tensor of shape {list(x.shape)} like its first argument"
            fault = f"must return a loss for each element, {form}, and all of it is NaN at the first call"
        if fault:
            raise LossError(f"{flag} {fault.removeprefix('it ')}")
        return loss

    return checked


def own_optimizer(spec: str) -> Any:
    """The function of `--optimizer FILE.py:FUNCTION`, tried on a small matrix; None for the name of one of rlkit."""
    if ":" not in spec:
        return None
    import torch

    from rlkit.model.optim import check_optimizer

    make = function_of("optimizer", spec)
    try:
        check_optimizer(make([{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "weight_decay": 0.0}]))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"--optimizer {spec} failed on a parameter group: {reason}") from error
    return make


def advantage_of(text: str | None, args: grpo.Args | ppo.Args, *, critic: Critic | None = None) -> Any:
    """The estimator of `--advantage`, with those of the numbers of `critic` that it has; None without one and for gae.

    ValueError for one that does not exist, that needs a critic which is not there, that does not read a number of
    `critic` which was changed, or that fails on a small batch (one of rlkit is called if it has arguments).
    """
    if text is None or (critic and text == "gae"):
        return None
    name, values = text.partition("(")[0], critic is not None
    of_user = ":" in name

    def trial(function: Any) -> None:
        from rlkit.loops.trial import lacking, try_advantage

        lacks = lacking(args.rollouts, args.penalties, critic=values, scored=values, estimator=True)
        try_advantage(function, values=values, lacks=lacks, weighs=args.correction.correction != "none")

    source = text if of_user else f"rlkit.loops.estimators:{text}"
    function = tried_function("advantage", source, trial if of_user or "(" in text else callable)
    why, script = ("uses no critic", "grpo") if values else ("needs a critic's values", "ppo")
    wrong = name in (OF_RETURNS if values else OF_VALUES)
    refuse_if(wrong, f"`advantage` {name} {why}: use rlkit {script} --advantage {name}")
    if critic is None:
        return tried(function) if of_user else function
    bound, parameters = getattr(function, "keywords", {}), inspect.signature(function).parameters
    numbers = {key: getattr(critic, key) for key in ("gamma", "lam_policy", "lam_value")}
    for key in (key for key in numbers if not is_default(critic, key)):
        refuse_if(key in bound, f"`{key}` and `advantage` {text} both give {key}: drop one of them")
        refuse_if(key not in parameters, f"`advantage` {text} has no argument `{key}`, so it would not be used")
    taken = partial(function, **{key: x for key, x in numbers.items() if key in parameters and key not in bound})
    return tried(taken) if of_user else taken


def kl_estimator_of(kl: KlEstimator, penalties: Penalties, *, place: str = "loss") -> Any:
    """The function of `--kl-estimator`, or None; `place` is where the script puts the KL by default.

    ValueError for an estimator that does not suit the place, and for one of yours that fails on a few tokens.
    """
    name = kl.kl_estimator
    if name is None:
        return None
    from rlkit import losses
    from rlkit.loops.coefficients import kl_term

    if ":" in name:
        at = penalties.kl_in or place
        function = tried(tried_function("kl_estimator", name, trial_of(lambda trial: trial.try_kl, place=at)))
    else:
        function = getattr(losses, "unbiased_kl" if name == "unbiased" else name)
    return kl_term(penalties, function, default=place).estimator


def own_rewards(evaluation: Evaluation, episodes: Episodes, held_out: Mapping[str, Any]) -> dict[str, OfTokenizer]:
    """`read_reward` of each held-out set that has a reward of its own."""
    specs_of = {name: specs for name in held_out if (specs := evaluation.reward_of(name))}
    plain = replace(episodes, reward=(), combine="sum", ideal=(), reward_column=Episodes.reward_column)
    return {
        name: read_reward(replace(plain, reward=specs), held_out[name], flag="eval_reward", trial=evaluation.trial)
        for name, specs in specs_of.items()
    }


def read_reward(episodes: Episodes, *parts: Any, flag: str = "reward", trial: bool = True) -> OfTokenizer:
    """A function from the tokenizer to the `score` of `rlkit.rollout.rollout`, of the functions of `reward`.

    They are checked against the rows of each of the `parts` of the data, and with `trial` called on a row of each.
    ValueError for a function that does not exist, that cannot be called with what a sample has, that needs a column
    which a row lacks, or that fails. Does not import torch.
    """
    functions = reward_functions(episodes, *parts, flag=flag)
    if trial:
        try_rewards(functions, episodes, *parts, flag=flag)

    def of_tokenizer(tokenizer: Any) -> Any:
        from rlkit.agents.command import scored
        from rlkit.rewards.combine import for_source, scalarized, weighted
        from rlkit.rewards.scoring import env_rewards, scorer

        done = scored if episodes.agent else lambda score: score
        limits = {"timeout_s": episodes.reward_timeout, "max_failed": episodes.max_failed}
        if not functions:
            return done(env_rewards(max_failed=episodes.max_failed))
        weights = {name: weight for name, (_, weight) in episodes.rewards().items()}
        apart: dict[str, Any] = {"column": episodes.reward_column, "timeout_s": episodes.reward_timeout}
        judges = functions | {
            name: for_source(functions[name], source=source, **apart)
            for name, source in episodes.reward_sources().items()
        }
        reward, *_ = judges.values()
        if [*weights.values()] != [None] or judges != functions:
            each = {name: 1.0 if weight is None else weight for name, weight in weights.items()}
            reward = weighted(judges, weights=each, timeout_s=episodes.reward_timeout)
            if episodes.combine != "sum":
                scalarize = combining(episodes)
                reward = scalarized(judges, weights=each, scalarize=scalarize, timeout_s=episodes.reward_timeout)
        return done(scorer(reward, tokenizer=tokenizer, **limits))

    return of_tokenizer


def combining(episodes: Episodes) -> Any:
    """The function of rewards `[N, K]` and weights `[K]` of `combine`."""
    import torch

    from rlkit import objectives

    match episodes.combine:
        case "tchebycheff":
            ideal = torch.tensor(episodes.ideal, dtype=torch.float64)
            return lambda rewards, weights: objectives.tchebycheff(rewards, weights=weights, ideal=ideal)
        case "normalize_then_sum":
            one = lambda rewards: torch.zeros(len(rewards), dtype=torch.long)  # noqa: E731
            return lambda x, weights: objectives.normalize_then_sum(x, group_ids=one(x), weights=weights)
        case _:
            return lambda rewards, weights: objectives.lexicographic(rewards)  # noqa: ARG005


def reward_functions(episodes: Episodes, *parts: Any, flag: str) -> dict[str, Any]:
    """The checked functions of `reward`, by name."""
    from rlkit.compat.rewards import adapted
    from rlkit.data.drop import drop
    from rlkit.rewards.call import ONE_TURN, check_signature
    from rlkit.rewards.rows import check_rows
    from rlkit.rewards.text import gold_answer

    functions = {}
    check_sources(episodes, *parts, flag=flag)
    for name, (spec, _) in episodes.rewards().items():
        function = function_of(flag, spec)
        try:
            functions[name] = function = adapted(function)
            check_signature(function, set(ONE_TURN) if episodes.one_turn else None)
            check_rows(function, *rows_of(name, episodes, *parts))
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{flag}` {spec}: {error}") from None
    for rows in parts if functions else ():
        golds = [(index, gold_answer(row)) for index, row in enumerate(rows)]
        if any(gold is not None for _, gold in golds):
            why = "have no gold answer (missing, null or empty)"
            drop(rows, golds, lambda gold: gold is None, unit="rows", why=why, keep=True)
    return functions


def check_sources(episodes: Episodes, *parts: Any, flag: str) -> None:
    """ValueError for a row of the `parts` that no reward judges; a source that no row has is logged."""
    from rlkit.data.columns import check_names
    from rlkit.data.load import placed

    sources, column = episodes.reward_sources(), episodes.reward_column
    of_all = any(weight != 0 for name, (_, weight) in episodes.rewards().items() if name not in sources)
    for rows in parts if sources and not of_all else ():
        check_names(placed(rows), column, [*dict.fromkeys(sources.values())], kind=f"sources of `{flag}`")
    values = (row.get(column) for rows in parts for row in rows) if sources else ()
    here = {x if isinstance(x, str | None) else repr(x) for x in values}
    for source in {*sources.values()} - here:
        has = f"its {column} is {', '.join(sorted(map(repr, here)))}" if here - {None} else f"no row has {column}"
        _log.warning("--%s %s=...: no row is of that source, %s (--reward-column)", flag.replace("_", "-"), source, has)


def rows_of(name: str, episodes: Episodes, *parts: Any) -> list[Any]:
    """Of each of the `parts` the rows that the reward function of this name judges."""
    from rlkit.data.load import some_rows

    source = episodes.reward_sources().get(name)
    if source is None:
        return [*parts]
    column = episodes.reward_column
    return [some_rows(rows, [i for i, row in enumerate(rows) if row.get(column) == source]) for rows in parts]


def try_rewards(functions: Mapping[str, Any], episodes: Episodes, *parts: Any, flag: str) -> None:
    """Call each reward function on a row of each of the `parts` of the data: see `rlkit.rewards.trial.try_reward`.

    ValueError for one that fails, unless `reward_max_failed` lets some samples fail and not all of them did. What gives
    the gold answer no more than other texts is logged.
    """
    for spec, function, trial in reward_trials(functions, episodes, *parts) if is_first() else ():
        from rlkit.rewards.failures import name_of

        for label, error in trial.failures:
            label = f"a batch of {len(trial.tried)} completions" if error.index is None else label
            said = f"{name_of(function)} failed on {trial.place} with {label}: {error.cause}; {error.fix}"
            if not episodes.max_failed or len(trial.failures) == len(trial.tried):
                raise ValueError(f"`{flag}` {spec}: {said}; --no-trial skips this call")
            _log.warning("%s", said)
        if trial.note:
            _log.warning("%s: %s", trial.place, trial.note)


def try_env(episodes: Episodes, tokenizer: Any, env: Any, prompts: Sequence[Any], *, ends: Sequence[int]) -> None:
    """Play one step of an episode of `env` or `tools` on the first prompt, with its gold answer and one of the tokens
    `ends` as the policy's turn.

    ValueError for an environment that fails; one that has not come that far after `reward_timeout` is logged. An
    `agent` is not run.
    """
    if not is_first() or not prompts or (episodes.env is None and not episodes.tools):
        return
    from rlkit.rewards.episodes import any_reward
    from rlkit.rewards.episodes import try_env as play
    from rlkit.rewards.scoring import env_rewards
    from rlkit.rewards.text import gold_answer
    from rlkit.run.sync import run_sync

    flag, value = ("tools", episodes.tools) if episodes.env is None else ("env", episodes.env)
    spec = value if isinstance(value, str) else " ".join(value)
    ids = [*tokenizer.encode(str(gold_answer(prompts[0].row) or "1"), add_special_tokens=False), *ends[:1]]
    score = any_reward if episodes.reward else env_rewards()
    try:
        came = run_sync(play(env, prompts[0], ids=ids, score=score, timeout_s=episodes.reward_timeout))
    except MissingExtra:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise ValueError(f"`{flag}` {spec}: {text}; --no-trial skips this step") from error
    if not came:
        said = "--%s %s: the first step of an episode takes more than %g s (--reward-timeout), and the run goes on"
        _log.warning(said, flag, spec, episodes.reward_timeout)


def reward_trials(functions: Mapping[str, Any], episodes: Episodes, *parts: Any) -> Iterator[tuple[str, Any, Any]]:
    """FILE.py:FUNCTION, the function and its `Trial`, of each function on each part.

    Functions without weights of which one gives far larger rewards than another are logged at the end.
    """
    from rlkit.rewards.trial import try_reward
    from rlkit.run.sync import run_sync

    given = episodes.rewards()
    sizes: dict[str, float] = {}
    asked = ((one, rows) for one in given.items() for rows in filter(len, rows_of(one[0], episodes, *parts)))
    for (name, (spec, weight)), rows in asked:
        with _told_if_slow(spec):
            trial = run_sync(try_reward(
                functions[name], rows, timeout_s=episodes.reward_timeout, one_turn=episodes.one_turn,
                alone=len(functions) == 1, stop=not episodes.max_failed, weight=weight,
            ))  # fmt: skip
        if trial is not None:
            yield spec, functions[name], trial
            sizes[spec] = max([sizes.get(spec, 0.0), *(abs(x) for x in trial.values if math.isfinite(x))])
    small, *_, large = sorted(filter(sizes.get, sizes), key=lambda spec: sizes[spec]) * 2 or [""] * 2
    equal = episodes.combine == "sum" and all(weight is None for _, weight in given.values())
    equal = equal and not episodes.reward_sources()
    if equal and small != large and sizes[large] >= _FAR * sizes[small]:
        said = "%s gives up to %g and %s up to %g, at equal weight: give weights, as in --reward %s=%g"
        _log.warning(said, large, sizes[large], small, sizes[small], large, sizes[small] / sizes[large])


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
    width = max(len(label) for _, label, _ in trial.tried)
    said = [f"{x.reward:g}" if hasattr(x, "reward") else f"{x.cause}; {x.fix}" for *_, x in trial.tried]
    return [f"  {label:{width}}  {text}" for (_, label, _), text in zip(trial.tried, said, strict=True)]
