"""Rewards for trajectories: the `score` argument of `rlkit.rollout.rollout`; reward functions of other libraries."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlkit.data.load import column_error, place_of
from rlkit.data.prompts import prompt_messages
from rlkit.rewards.call import Reward, RewardError, Sample, check_signature, name_of, run_reward, run_reward_each
from rlkit.rewards.text import GOLD_COLUMNS, gold_answer
from rlkit.rollout.calling import is_async

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlkit.rollout.rollout import Prompt
    from rlkit.types import Trajectory

_log = logging.getLogger("rlkit.rewards")
_GOLD = (*GOLD_COLUMNS, "reward_model")
_RECENT = 100  # samples that `max_failed` is a share of


def scorer(
    function: Callable[..., Any], *, tokenizer: PreTrainedTokenizerBase, timeout_s: float, max_failed: float = 0.0
) -> Callable[[Prompt, list[Trajectory]], Awaitable[list[Trajectory]]]:
    """Rewards of a function, as the `score` argument of `rlkit.rollout.rollout`: decode a group, run the function.

    `completion` is the text of the last sampled turn, without special tokens. The function may also ask for
    `prompt_ids`, `completion_ids`, `truncated` and for what the environment left in `Trajectory.info`, such as
    `messages`. A reward that the environment set is overwritten. Further numbers that the function returns go to
    `info["metrics"]`, texts (`reason`) to `info["notes"]`. Reward functions of TRL, verl, OpenRLHF, slime and RL2 run
    unchanged (`adapted`).

    A failed sample raises its `RewardError`, unless at most the share `max_failed` of the last 100 samples failed (a
    judge behind HTTP). Then the trajectory does not train (its mask is False throughout) and gets the mean reward and
    score of the rest of its group (0 if all failed), which leaves a group baseline unchanged; the cause is in
    `info["error"]` and in the log, and the metric `failed` counts it.
    """
    settle, function = _settler(max_failed), adapted(function)
    check_signature(function)  # before anything is sampled

    async def score_group(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        samples = [_sample(tokenizer, prompt, trajectory) for trajectory in group]
        return settle(
            group, await (run_reward_each if max_failed else run_reward)(function, samples, timeout_s=timeout_s)
        )

    return score_group


def env_rewards(*, max_failed: float = 0.0) -> Callable[[Prompt, list[Trajectory]], Awaitable[list[Trajectory]]]:
    """Keep the rewards that the environment set. One that is not a finite number is a failed sample, see `scorer`."""
    settle = _settler(max_failed)

    async def score_group(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        return settle(group, [_env_reward(trajectory, prompt) for trajectory in group])

    return score_group


def _env_reward(trajectory: Trajectory, prompt: Prompt) -> Reward | RewardError:
    """The reward that the environment set, or an error if it is not a finite number."""
    from rlkit.rollout.rollout import wrong_reward  # imports torch, which the workers of `math` do not need

    if wrong := wrong_reward(trajectory):
        what = f"the environment's {wrong}"
        fix = "fix: give a finite number, and decide in the environment what such an episode is worth"
        return RewardError(f"{what} on row {prompt.index + 1}\n  {fix}", index=prompt.index, cause=what)
    known = {name: trajectory.info.get(name, {}) for name in ("metrics", "notes")}
    return Reward(trajectory.reward, trajectory.score, **known)


def _settler(max_failed: float) -> Callable[[list[Trajectory], Sequence[Reward | RewardError]], list[Trajectory]]:
    """A function that fills in the results of a group and masks failed samples, at most the share `max_failed`."""
    if not 0 <= max_failed < 1:
        raise ValueError(f"max_failed must be in [0, 1), got {max_failed}")
    recent: deque[bool] = deque(maxlen=_RECENT)
    not_failed = {"failed": 0.0} if max_failed else {}

    def settle(group: list[Trajectory], results: Sequence[Reward | RewardError]) -> list[Trajectory]:
        errors = [r for r in results if isinstance(r, RewardError)]
        recent.extend(isinstance(r, RewardError) for r in results)
        if errors and sum(recent) > max_failed * _RECENT:
            if max_failed:
                errors[0].add_note(
                    f"{sum(recent)} of the last {len(recent)} samples failed; {max_failed=} of {_RECENT} may"
                )
            raise errors[0]
        rewards = [r for r in results if isinstance(r, Reward)]
        scores = [r.score for r in rewards if r.score is not None]
        mean = Reward(
            fmean(r.reward for r in rewards) if rewards else 0.0, fmean(scores) if scores else None, {"failed": 1.0}
        )
        return [
            _rewarded(_masked(trajectory, result), mean)
            if isinstance(result, RewardError)
            else _rewarded(trajectory, replace(result, metrics={**result.metrics, **not_failed}))
            for trajectory, result in zip(group, results, strict=True)
        ]

    return settle


def _rewarded(trajectory: Trajectory, reward: Reward) -> Trajectory:
    logged = {name: value for name, value in (("metrics", reward.metrics), ("notes", reward.notes)) if value}
    return replace(trajectory, reward=reward.reward, score=reward.score, info={**trajectory.info, **logged})


def _masked(trajectory: Trajectory, error: RewardError) -> Trajectory:
    """The trajectory without anything that trains."""
    _log.warning("a sample does not train: %s", error)
    num = len(trajectory.ids)
    info = {**trajectory.info, "error": error.cause}
    return replace(trajectory, mask=[False] * num, logp=[0.0] * num, versions=[-1] * num, token_rewards=None, info=info)


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function of TRL, verl, OpenRLHF, slime or RL2, recognised by its parameters, as one of ours.

    | parameters                                             | adapter         |
    |--------------------------------------------------------|-----------------|
    | `completions`, without `rows`; `completion_ids` first  | `trl`           |
    | `solution_str`, `ground_truth`                         | `verl`          |
    | `queries`, `prompts`, `labels`                         | `openrlhf`      |
    | `args`, `sample`                                       | `slime`         |
    | `state`, `action`, `extra_info`                        | `rl2`           |
    | `messages`, `answer`                                   | `with_messages` |

    Any other function is returned unchanged.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    names, first = {*parameters}, next(iter(parameters), "")
    if ("completions" in names or first == "completion_ids") and not names & {"rows", "row"}:
        return trl(function)
    for needed, adapter in _ADAPTERS.items():
        if names >= {*needed.split()} and not names & {"rows", "row", "completion"}:
            return adapter(function)
    return function


def trl(reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as TRL calls it, by keyword, for the completions of a group at a time:

        reward_func(prompts, completions, completion_ids, log_extra, log_metric, **columns)

    It gets the keywords that it takes; the columns of the data are lists. Prompts and completions are lists of messages
    where the row's prompt is one. `log_extra(name, values)` writes one note per sample to the trajectory dump,
    `log_metric(name, value)` the metric `reward/name`. None is an error, except in a sum of several functions
    (`rlkit.rewards.combine.weighted`). docs/migrating.md has the versions.

    Errors: TypeError for a function that requires `trainer_state` or `environments`, which only TRL has.
    """

    def call(completions: list[str], rows: list[dict[str, Any]], completion_ids: Any) -> tuple[Callable[..., Any], Any]:
        logs, added = _trl_logs(len(rows))
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        prompts = columns.pop("prompt", None) or columns.pop("messages", None) or [*map(prompt_messages, rows)]
        chat = not isinstance(prompts[0], str)
        texts = [[{"role": "assistant", "content": text}] for text in completions] if chat else completions
        given = {**columns, "prompts": prompts, "completions": texts, "completion_ids": completion_ids, **logs}
        return added, reward_func(**_accepted(reward_func, given))

    def sync_reward(completions: list[str], rows: list[dict[str, Any]], completion_ids: Any = None) -> Any:
        added, result = call(completions, rows, completion_ids)
        return added(result)

    async def async_reward(completions: list[str], rows: list[dict[str, Any]], completion_ids: Any = None) -> Any:
        added, result = call(completions, rows, completion_ids)
        return added(await result)

    given, asked = {"prompts", "completions", "completion_ids", "log_extra", "log_metric"}, _required(reward_func)
    foreign = [name for name in asked if name in ("trainer_state", "environments")]
    columns = [(name,) for name in asked if name not in given]
    return _as(reward_func, async_reward if is_async(reward_func) else sync_reward, foreign, columns)


def _trl_logs(num: int) -> tuple[dict[str, Callable[..., Any]], Callable[[Any], Any]]:
    """TRL's `log_extra` and `log_metric`, and a function that adds what they got to the results of `num` samples."""
    notes, metrics = defaultdict[str, list[Any]](list), defaultdict[str, list[float]](list)

    def added(results: Any) -> Any:
        if not (notes or metrics) or len(results) != num:
            return results
        if uneven := [name for name, values in notes.items() if len(values) != num]:
            raise ValueError(f"log_extra({uneven[0]!r}) got {len(notes[uneven[0]])} values for {num} completions")
        if taken := {"reward", "score"} & {*notes, *metrics}:
            raise ValueError(f"log_extra and log_metric cannot log {sorted(taken)}: choose another name")
        means = {name: fmean(map(float, values)) for name, values in metrics.items()}
        texts = [{name: str(values[i]) for name, values in notes.items()} for i in range(num)]
        return [{**means, **text, "reward": reward} for text, reward in zip(texts, results)]

    return {
        "log_extra": lambda column, values: notes[column].extend(values),
        "log_metric": lambda name, value: metrics[name].append(value),
    }, added


def verl(compute_score: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as verl calls it, on rows of its Parquet files:

        compute_score(data_source, solution_str, ground_truth, extra_info)

    The `score` of a dict is the reward; its other numbers are logged. A row without `reward_model` gives its
    `gold_answer`.
    """

    def reward(completion: str, row: dict[str, Any]) -> Any:
        given = {
            "data_source": row.get("data_source"), "solution_str": completion,
            "ground_truth": _gold(row, "reward_model"), "extra_info": row.get("extra_info"),
        }  # fmt: skip
        result = compute_score(**_accepted(compute_score, given))
        return {**result, "reward": result["score"]} if isinstance(result, dict) else result

    given = {"data_source", "solution_str", "ground_truth", "extra_info"}
    return _as(compute_score, reward, [name for name in _required(compute_score) if name not in given], [_GOLD])


def openrlhf(reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as OpenRLHF calls it, with lists of one. The label is the row's `label` or its `gold_answer`:

        reward_func(queries, prompts, labels)

    Differs: there the queries have special tokens and a rendered prompt; here a query is the two texts, joined.
    """

    def reward(completion: str, row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"] if isinstance(row.get("prompt"), str) else prompt_messages(row)[-1]["content"]
        result = reward_func([prompt + completion], [prompt], [_gold(row, "label")])
        if not isinstance(result, dict):
            return {"reward": result[0]}
        rewards, scores = result["rewards"], result.get("scores")
        return {"reward": rewards[0], "score": (rewards if scores is None else scores)[0]}

    return _as(reward_func, reward, _required(reward_func)[3:], [_GOLD])


def slime(custom_rm: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as slime calls it:

        async custom_rm(args, sample)

    The first argument is None; the second has prompt, response, label and metadata. The label is the row's `label` or
    its `gold_answer`; it is None, as in slime, in a row without one.
    """

    async def reward(completion: str, row: dict[str, Any]) -> Any:
        prompt = row.get("prompt", row.get("messages"))
        sample = SimpleNamespace(prompt=prompt, response=completion, metadata=row.get("metadata"))
        sample.label = _gold(row, "label", required=False)
        return await custom_rm(None, sample)

    return _as(custom_rm, reward, _required(custom_rm)[2:])


def rl2(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of a one-turn environment as RL2 calls it:

    async step(state, action, extra_info)

    """

    async def reward(completion: str, row: dict[str, Any]) -> dict[str, Any]:
        result = await step(row.get("prompt", ""), completion, row.get("extra_info", row))
        return {"reward": result["reward"], "score": result["score"]}

    return _as(step, reward, _required(step)[3:])


def with_messages(reward_fn: Callable[[list[dict[str, Any]], Any], Any]) -> Callable[..., Any]:
    """A sync `reward_fn(messages, answer)`, as in RL2, as a reward function.

    `messages` are the environment's, or else the row's conversation and the completion; `answer` is the row's
    `gold_answer`.
    """

    def reward(completion: str, row: dict[str, Any], messages: list[dict[str, Any]] | None = None) -> Any:
        conversation = messages or [*prompt_messages(row), {"role": "assistant", "content": completion}]
        return reward_fn(conversation, _gold(row))

    return _as(reward_fn, reward, _required(reward_fn)[2:], [_GOLD])


_ADAPTERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "solution_str ground_truth": verl,
    "queries prompts labels": openrlhf,
    "args sample": slime,
    "state action extra_info": rl2,
    "messages answer": with_messages,
}


def check_rows(function: Callable[..., Any], rows: Sequence[dict[str, Any]]) -> None:
    """Check that the rows have the columns that an `adapted` function needs.

    Raises ValueError for the first row that lacks one, with its place (`rlkit.data.load.place_of`) and its columns.
    """
    for index, row in enumerate(rows):
        for names in getattr(function, "needs", ()):
            if not any(name in row for name in names):
                problem = f"{name_of(function)} needs the column {' or '.join(map(repr, names))}"
                raise column_error(place_of(rows, index), problem, row, "; rename one with --rename")


def _gold(row: dict[str, Any], *first: str, required: bool = True) -> Any:
    """The first column that is not null of `first` and of `gold_answer`; ValueError for a row with none of them."""
    if required and not any(name in row for name in _GOLD):
        raise ValueError(f"the row has no gold answer ({', '.join(_GOLD)}); columns found: {sorted(row)}")
    found = gold_answer({name: row.get(name) for name in first})
    return gold_answer(row) if found is None else found


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters without a default."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _as(
    function: Callable[..., Any], reward: Any, foreign: Sequence[str], needs: Sequence[tuple[str, ...]] = ()
) -> Callable[..., Any]:
    """`reward`, which calls the user's `function`, with its name in errors and the columns that it `needs`.

    TypeError for a function that requires parameters that only its own library has, or that is async where `reward`
    does not await it.
    """
    if foreign:
        fix = "give the parameter a default, or write (completion, row)"
        raise TypeError(f"{name_of(function)} requires {foreign}, which only its own library has: {fix}")
    if is_async(function) and not is_async(reward):
        raise TypeError(f"{name_of(function)} with these parameters must be a plain `def`, not `async def`")
    reward.__wrapped__, reward.__signature__, reward.needs = function, inspect.signature(reward), needs
    return reward


def _accepted(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The keywords that the function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    return given if takes_all else {name: value for name, value in given.items() if name in parameters}


def _sample(tokenizer: Any, prompt: Prompt, trajectory: Trajectory) -> Sample:
    mask = trajectory.mask
    end = len(mask) - mask[::-1].index(True) if True in mask else 0  # of the last run of sampled tokens
    start = end - mask[:end][::-1].index(False) if False in mask[:end] else 0
    text = tokenizer.decode(trajectory.ids[start:end], skip_special_tokens=True)
    tokens = {"prompt_ids": trajectory.prompt_ids, "completion_ids": trajectory.ids, "truncated": trajectory.truncated}
    return Sample(text, prompt.row, prompt.index, {**trajectory.info, **tokens})
