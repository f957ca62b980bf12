"""Rewards for trajectories: the `score` argument of `rlkit.rollout.rollout`; reward functions of other libraries."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlkit._numbers import show
from rlkit.data.forms import with_prompt
from rlkit.data.load import column_error, place_of
from rlkit.data.prompts import prompt_messages
from rlkit.rewards.call import (
    Need,
    Reward,
    RewardError,
    Sample,
    WrongResult,
    check_signature,
    needs_of,
    run_reward,
    run_reward_each,
)
from rlkit.rewards.failures import ALARM, name_of, unwrapped
from rlkit.rewards.source import (
    alarm_in,
    chat_header,
    code_of,
    constants,
    line_of_items,
    line_of_messages,
    line_of_texts,
    names_in,
    names_of_kwargs,
    uses,
)
from rlkit.rewards.text import GOLD_COLUMNS, first_value, last_boxed, no_gold_answer
from rlkit.rollout.calling import Watched, is_async, report_absent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlkit.rollout.rollout import Prompt
    from rlkit.types import Trajectory

_log = logging.getLogger("rlkit.rewards")
_RECENT = 100  # samples that `max_failed` is a share of
_NOTE = 500  # characters of a list or dict in the notes
_VARIABLE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_OF_TRL = {"trainer_state", "log_extra", "log_metric", "prompts", "completions", "completion_ids"}  # of its `**kwargs`
_OF_SAMPLES = {"index", "prompt_ids", "completion_ids", "truncated", "finish_reason", "messages"}
_Call = tuple[Any, Callable[[Any], Any]]  # the result of a function, or its coroutine, and how to read it


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
    if not callable(function):
        what = f"function must be a reward function of (completion, row), got {show(function)}"
        raise TypeError(f"{what}; rlkit.rewards.load.load_function reads one from FILE.py:FUNCTION")
    if not callable(getattr(tokenizer, "decode", None)):
        fix = "AutoTokenizer.from_pretrained(PATH) of transformers loads one"
        raise TypeError(f"tokenizer must be the model's tokenizer, got {show(tokenizer)}: {fix}")
    settle, function = _settler(max_failed), adapted(function)
    check_signature(function)  # before anything is sampled

    replaced = False

    async def score_group(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        nonlocal replaced
        if not replaced and any(trajectory.reward for trajectory in group):
            replaced = True
            _log.warning("rewards of the environment are replaced by those of %s", name_of(function))
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

    | parameters                                                           | adapter         |
    |----------------------------------------------------------------------|-----------------|
    | `completions` or `prompts`, without `rows`; `completion_ids` first   | `trl`           |
    | `solution_str`, `ground_truth`; or both in the plural                | `verl`          |
    | `queries`, `prompts`, `labels`                                       | `openrlhf`      |
    | `args`, `sample`; `args`, `samples`                                  | `slime`         |
    | `state`, `action`, and `extra_info` or `answer`                      | `rl2`           |
    | `messages`, `answer`                                                 | `with_messages` |
    | only `**kwargs`, of which it reads `completions` or `solution_str`   | `trl`, `verl`   |

    Any other function is returned unchanged. TypeError for a wrapper of such a function that hides its parameters.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    names, first = {*parameters}, next(iter(parameters), "")
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds <= _VARIABLE:
        read = {constant for constant in constants(code_of(function)) if isinstance(constant, str)}
        ours = {"completions": trl, "prompts": trl, "solution_str": verl}
        if found := [adapter for name, adapter in ours.items() if name in read]:
            return found[0](function)
        for cell in getattr(function, "__closure__", None) or ():
            inner = cell.cell_contents
            if inspect.isfunction(inner) and inner is not function and adapted(inner) is not inner:
                fix = "add @functools.wraps(...) to it in the decorator, so that its parameters are seen"
                raise TypeError(f"{name_of(function)} hides the parameters of {name_of(inner)}, which it calls: {fix}")
        return function
    if names & {"rows", "row"}:
        return function
    if "completions" in names or first == "completion_ids":
        return trl(function)
    for needed, adapter in _ADAPTERS.items():
        if names >= {*needed.split()} and "completion" not in names:
            return adapter(function)
    return trl(function) if "prompts" in names else function


def trl(reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as TRL calls it, by keyword, for the completions of a group at a time:

        reward_func(prompts, completions, completion_ids, log_extra, log_metric, **columns)

    It gets the keywords that it takes; the columns of the data are lists. Prompts and completions are lists of messages
    where the row's prompt is one. `log_extra(name, values)` writes one note per sample to the trajectory dump,
    `log_metric(name, value)` the metric `reward/name`. None is an error, except in a sum of several functions
    (`rlkit.rewards.combine.weighted`). docs/migrating.md has the versions.

    Errors: TypeError for a function that requires `trainer_state` or `environments`, which only TRL has, or `prompt`,
    as AReaL names it. A function that reads `trainer_state` and can do without it is logged as a warning.
    """

    accepted = _acceptor(reward_func)

    def call(completions: list[str], rows: list[dict[str, Any]], completion_ids: Any = None) -> _Call:
        logs, added = _trl_logs(len(rows))
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        prompts = columns.pop("prompt", None) or columns.pop("messages", None) or [*map(prompt_messages, rows)]
        chat = not isinstance(prompts[0], str)
        turns = [ListOfMessages(text) for text in completions]
        given = {"prompts": prompts, "completions": turns if chat else completions, "completion_ids": completion_ids}

        def read(results: Any) -> Any:
            if any(turn.as_text for turn in turns):
                raise WrongResult("read a completion as a text, and it is a list of messages", _TRL_FORM)
            return added(results)

        return reward_func(**accepted({**columns, **given, **logs})), read

    given, asked = {"prompts", "completions", "completion_ids", "log_extra", "log_metric"}, _required(reward_func)
    foreign = [name for name in asked if name in ("trainer_state", "environments", "prompt")]
    reward = _as(reward_func, call, foreign, [name for name in asked if name not in given])
    reward.hint, reward.check_form = _trl_hint, partial(_check_form, reward_func, set())
    texts = constants(code_of(reward_func))
    if "trainer_state" in (*inspect.signature(reward_func).parameters, *texts):
        _log.warning(
            "%s reads trainer_state, which rlkit does not give: it keeps its default, and what depends on its step "
            "does not change during training",
            name_of(reward_func),
        )
    return reward


class ListOfMessages(list[dict[str, str]]):
    """A completion as TRL gives it where prompts are messages."""

    def __init__(self, text: str) -> None:
        super().__init__([{"role": "assistant", "content": text}])
        self._used = self._read = False

    @property
    def as_text(self) -> bool:
        """Whether it was used as a text only."""
        return self._used and not self._read

    def __getitem__(self, index: Any) -> Any:
        self._read = True
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[dict[str, str]]:
        self._read = True
        return super().__iter__()

    def __len__(self) -> int:
        self._used = True
        return super().__len__()

    def __repr__(self) -> str:  # also of str() and format()
        self._used = True
        return super().__repr__()

    def __contains__(self, item: object) -> bool:
        self._used |= isinstance(item, str)
        return super().__contains__(item)

    def __eq__(self, other: object) -> bool:
        self._used |= isinstance(other, str)
        return super().__eq__(other)

    __hash__ = None


def _trl_hint(error: BaseException) -> str:
    """The fix of errors that come from what TRL gives a function and we do not, or from the form of a completion."""
    text = str(error)
    if isinstance(error, KeyError) and "trainer_state" in text:
        return "rlkit gives no trainer_state: read it by kwargs.get('trainer_state'), and do without its step"
    if isinstance(error, TypeError | AttributeError) and (
        "string indices must be" in text or "'ListOfMessages'" in text
    ):
        return _TRL_FORM
    return ""


_TRL_FORM = (
    "as in TRL, a completion is a string where the row's prompt is a string, and a list with one message where the "
    "prompt is a list of messages: read completion[0]['content'] only in the second case"
)


def _check_form(function: Callable[..., Any], said: set[str], rows: Sequence[dict[str, Any]]) -> None:
    """Refuse (ValueError), or warn of, a function in TRL's form that reads completions in another form than they have;
    it warns of what is not in `said`."""

    def warn(text: str) -> None:
        if text not in said:
            said.add(text)
            _log.warning("%s%s", name_of(function), text)

    first = with_prompt(rows[0])  # a column has one type in all rows
    chat = not isinstance(first.get("prompt"), str)
    if line := (line_of_texts if chat else line_of_messages)(function):
        reads, prompt = ("texts", "a list of messages") if chat else ("messages", "a string")
        what = f"{name_of(function)}, line {line}, reads {reads}, and the prompt is {prompt}"
        raise ValueError(f"{place_of(rows, 0)}: {what}: {_TRL_FORM}")
    if not chat and (line := line_of_items(function)):
        warn(f", line {line}, reads one character of a completion or prompt: {_TRL_FORM}")


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
    """A reward function as verl calls it, on rows of its Parquet files; or, if the names are plural, on a group:

        compute_score(data_source, solution_str, ground_truth, extra_info)
        compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos)

    It may be async. The `score` of a dict is the reward. Its other numbers are logged, None is left out, and anything
    else is a note. A row without `reward_model.ground_truth` gives its `gold_answer`.

    Differs: a further parameter without a default gets the column of its name. In verl it comes from the configuration.
    """
    batched = "solution_strs" in inspect.signature(compute_score).parameters
    known = ("data_source", "solution_str", "ground_truth", "extra_info")
    names = {f"{name}s" if batched else name: name for name in known}
    columns, accepted = [name for name in _required(compute_score) if name not in names], _acceptor(compute_score)

    absent, found = set[str](), set[str]()

    def given(completion: str, row: dict[str, Any]) -> dict[str, Any]:
        extra = Watched(row.get("extra_info") or {}, absent)
        found.update(extra)
        return {
            "data_source": row.get("data_source"), "solution_str": completion,
            "ground_truth": _gold(row, "reward_model"), "extra_info": extra,
            **{name: _column(row, name) for name in columns},
        }  # fmt: skip

    def call(completion: str, row: dict[str, Any]) -> _Call:
        return compute_score(**accepted(given(completion, row))), scored

    def call_batched(completions: list[str], rows: list[dict[str, Any]]) -> _Call:
        each = [given(completion, row) for completion, row in zip(completions, rows, strict=True)]
        lists = {name: [one[names.get(name, name)] for one in each] for name in (*names, *columns)}
        return compute_score(**accepted(lists)), partial(_each, scored)

    def scored(result: Any) -> Any:
        report_absent(name_of(compute_score), absent, found, what="extra_info has no key")
        has_score = isinstance(result, dict) and "score" in result
        return _logged({**result, "reward": result["score"]} if has_score else result)

    foreign = [name for name in columns if name in ("reward_router_address", "reward_model_tokenizer")]
    reward = _as(compute_score, call_batched if batched else call, foreign, [GOLD_COLUMNS, *columns])
    reward.reads = [column for name, column in names.items() if uses(compute_score, name)]
    return reward


def openrlhf(reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as OpenRLHF 0.11 calls it, with lists of one. The label is the row's `label` or `gold_answer`:

        reward_func(queries, prompts, labels)

    It returns a list, or a dict with `rewards` and optionally `scores` and `extra_logs`, which are logged.

    Differs: there the queries have special tokens and a rendered prompt; here a query is the two texts, joined.
    """

    if header := chat_header(reward_func):
        _log.warning(
            "%s looks for %r, which a query does not have here: it is the prompt's text and the completion, joined; "
            "the completion is query.removeprefix(prompt)",
            name_of(reward_func),
            header[:40],
        )

    if found := sorted({*names_in(code_of(reward_func))} & _OF_BATCHES):
        _log.warning(
            "%s uses %s, and gets one query per call, as in OpenRLHF 0.11: to compare the answers of a group, write "
            "(completions, rows)",
            name_of(reward_func),
            ", ".join(found),
        )

    def call(completion: str, row: dict[str, Any]) -> _Call:
        prompt = row["prompt"] if isinstance(row.get("prompt"), str) else prompt_messages(row)[-1]["content"]
        return reward_func([prompt + completion], [prompt], [_gold(row, "label")]), read

    def read(result: Any) -> dict[str, Any]:
        if not isinstance(result, dict):
            return {"reward": _only(result)}
        if "rewards" not in result:
            cause = f"returned a dict without 'rewards' (keys: {sorted(map(str, result))})"
            raise WrongResult(cause, "put a list with one number per query under 'rewards'")
        reward, scores = _only(result["rewards"]), result.get("scores")
        logs = {name: _only(values) for name, values in (result.get("extra_logs") or {}).items()}
        return {**_logged(logs), "reward": reward, "score": reward if scores is None else _only(scores)}

    return _as(reward_func, call, _required(reward_func)[3:], [GOLD_COLUMNS])


_OF_BATCHES = {"mean", "std", "fmean", "stdev", "pstdev", "median", "argsort", "unique", "Counter", "most_common"}


def _only(values: Any) -> Any:
    """The value of a list or tensor of one; a number is returned unchanged."""
    if not hasattr(values, "__len__") or getattr(values, "shape", None) == ():
        return values
    if len(values) != 1 or isinstance(values, str | dict):
        found = f"{len(values)} values" if not isinstance(values, str | dict) else show(values)
        raise WrongResult(f"returned {found} for 1 query", "return one number per query, as a list or a tensor")
    return values[0]


class _Slime(SimpleNamespace):
    """The two arguments of a reward function of slime, with the fields that there are."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"slime's {vars(self).get('called')}.{name} is not here")


def _slime_hint(error: BaseException) -> str:
    if "slime's sample." in str(error):
        return (
            "a sample has prompt, response, label and metadata; for its tokens write (completion, row, completion_ids)"
        )
    return "set the value in the function, or by functools.partial" if "slime's args." in str(error) else ""


def slime(custom_rm: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as slime calls it, or for a group:

        async custom_rm(args, sample)
        async custom_rm(args, samples)

    `args` has no attributes, and reading one is an error that names it. A sample has prompt, response, label and
    metadata. The label is the row's `label` or its `gold_answer`; it is None, as in slime, in a row without one. The
    `reward` of a dict is the reward, or else its `score` (`--reward-key score`). Its other numbers are logged, None is
    left out, and anything else is a note.
    """

    absent, found = set[str](), set[str]()

    def sample(completion: str, row: dict[str, Any]) -> _Slime:
        label, metadata = first_value(row, "label", *GOLD_COLUMNS), Watched(row.get("metadata") or {}, absent)
        found.update(metadata)
        prompt = row.get("prompt", row.get("messages"))
        return _Slime(called="sample", prompt=prompt, response=completion, label=label, metadata=metadata)

    def call(completion: str, row: dict[str, Any]) -> _Call:
        return custom_rm(_Slime(called="args"), sample(completion, row)), scored

    def call_batched(completions: list[str], rows: list[dict[str, Any]]) -> _Call:
        return custom_rm(_Slime(called="args"), [*map(sample, completions, rows)]), partial(_each, scored)

    def scored(result: Any) -> Any:
        report_absent(name_of(custom_rm), absent, found, what="sample.metadata has no key")
        has_score = isinstance(result, dict) and "score" in result
        return _logged({"reward": result["score"], **result} if has_score else result)

    batched = "samples" in inspect.signature(custom_rm).parameters
    reward = _as(custom_rm, call_batched if batched else call, _required(custom_rm)[2:], always_async=True)
    reward.hint = _slime_hint
    return reward


def rl2(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of a one-turn environment as RL2 calls it, now or in its older form:

    async step(state, action, extra_info)
    async env_step(state, action, answer)

    The state is the row's `prompt`, `extra_info` the column of that name or the row, `answer` the row's `gold_answer`.
    """
    with_answer = "answer" in inspect.signature(step).parameters

    def call(completion: str, row: dict[str, Any]) -> _Call:
        third = _gold(row) if with_answer else row.get("extra_info", row)
        return step(row.get("prompt", ""), completion, third), read

    def read(result: Any) -> Any:
        return {k: v for k, v in result.items() if k in ("reward", "score")} if isinstance(result, dict) else result

    return _as(step, call, _required(step)[3:], [GOLD_COLUMNS] if with_answer else (), always_async=True)


def with_messages(reward_fn: Callable[[list[dict[str, Any]], Any], Any]) -> Callable[..., Any]:
    """A `reward_fn(messages, answer)`, as in RL2, as a reward function.

    `messages` are the environment's, or else the row's conversation and the completion; `answer` is the row's
    `gold_answer`.
    """

    def call(completion: str, row: dict[str, Any], messages: list[dict[str, Any]] | None = None) -> _Call:
        conversation = messages or [*prompt_messages(row), {"role": "assistant", "content": completion}]
        return reward_fn(conversation, _gold(row)), _unchanged

    return _as(reward_fn, call, _required(reward_fn)[2:], [GOLD_COLUMNS])


_ADAPTERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "solution_str ground_truth": verl,
    "solution_strs ground_truths": verl,
    "queries prompts labels": openrlhf,
    "args sample": slime,
    "args samples": slime,
    "state action extra_info": rl2,
    "state action answer": rl2,
    "messages answer": with_messages,
}


def check_rows(function: Callable[..., Any], *parts: Sequence[dict[str, Any]]) -> None:
    """Check that the rows of each part have the columns that an `adapted` function, or one of this package, needs.

    A gold answer or tests must not be null, under one of their names. A column that a function names must be there, and
    may be null.

    Raises ValueError for the first row that lacks one, with its place (`rlkit.data.load.place_of`) and its columns; and
    for a function in TRL's form that reads completions as messages (`completion[0]["content"]`) where prompts are
    strings, or as texts where prompts are messages. What is not seen in its source is logged as a warning, and so are
    columns that it reads and that no row of a part has: they give its default, or an error when it is called; and an
    alarm, which raises an error in the thread that runs it.
    """
    said = list[str]()
    if alarm := alarm_in(function):
        _log.warning("%s uses %s: %s", name_of(function), alarm, ALARM)
    for rows in filter(len, parts):
        _check_needs(function, rows)
        columns, is_trl = set[str]().union(*rows), hasattr(function, "check_form")
        if "data_source" in getattr(function, "reads", ()) and "data_source" not in columns:
            _log.warning("%s reads data_source, which is None: the data has no such column", name_of(function))
        asked = names_of_kwargs(function)
        if not is_trl:
            _refuse_columns(function, asked, columns)
            continue
        read = sorted(asked - columns - _OF_TRL)
        parameters = inspect.signature(unwrapped(function)).parameters
        empty = {name for name, p in parameters.items() if p.default in (None, "", (), [], {})}  # no option has it
        read += sorted(empty - columns - _OF_TRL)
        absent = [name for name in read if name not in with_prompt(rows[0])]
        if absent and absent != said:
            names, said = ", ".join(map(repr, absent)), absent
            found = f"columns found: {', '.join(sorted(columns))}"
            where = ", ".join(getattr(rows, "sources", ())[:2]) or "the data"
            _log.warning("%s reads %s, of which %s has no column; %s", name_of(function), names, where, found)


def _refuse_columns(function: Callable[..., Any], asked: set[str], columns: set[str]) -> None:
    """TypeError for a function of ours that asks for a column as a parameter with a default, or in its `**kwargs`."""
    if hasattr(function, "needs"):  # of another library, or of this package
        return
    bound = function.keywords if isinstance(function, partial) else ()
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind not in _VARIABLE][2:]
    named = {p.name for p in parameters if p.name not in bound} | asked
    if found := sorted((named & columns) - _OF_SAMPLES):
        fix = f"read row[{found[0]!r}]" if len(found) == 1 else f"read row[{found[0]!r}], row[{found[1]!r}], ..."
        raise TypeError(f"{name_of(function)} asks for {', '.join(found)}, and columns of the data are in `row`: {fix}")


def _check_needs(function: Callable[..., Any], rows: Sequence[dict[str, Any]]) -> None:
    """Check the rows of one part."""
    needs = needs_of(function)
    if check := getattr(function, "check_form", None):
        check(rows)
    for index, row in enumerate(rows):
        for need in needs:
            if need in row if isinstance(need, str) else first_value(row, *need) is not None:
                continue
            names = (need,) if isinstance(need, str) else need
            problem = f"{name_of(function)} needs the column {' or '.join(map(repr, names))}"
            if null := [f"{name}.ground_truth" if name == "reward_model" else name for name in names if name in row]:
                problem += f" with a value ({' and '.join(null)} {'is' if len(null) == 1 else 'are'} null)"
            raise column_error(place_of(rows, index), problem, row, "; rename one with --rename")


def _gold(row: dict[str, Any], *first: str) -> Any:
    """The first column that is not null of `first` and of `gold_answer`; ValueError for a row with none of them."""
    found = first_value(row, *first)
    if found is None:
        found = _final(first_value(row, *GOLD_COLUMNS))
    if found is None:
        raise no_gold_answer(row)
    return found


def _final(gold: Any) -> Any:
    """The final answer of a solution in the form of GSM8K (`#### 1,072`: 1072) or MATH (the last box), as verl and
    OpenRLHF prepare their rows; anything else as it is."""
    if not isinstance(gold, str):
        return gold
    _, marked, last = gold.rpartition("####")
    return last.strip().replace(",", "") if marked else last_boxed(gold) or gold


def _column(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"the row has no column {name!r}; columns found: {sorted(row)}")
    return row[name]


def _logged(result: Any) -> Any:
    """The dict of another library's function as one of ours: None is left out, and lists and dicts become notes."""
    if not isinstance(result, dict):
        return result
    kept = {k: v for k, v in result.items() if v is not None or k == "reward"}
    return {k: v if k in ("reward", "score") or _is_plain(v) else repr(v)[:_NOTE] for k, v in kept.items()}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | Real) or getattr(value, "shape", None) == ()


def _each(read: Callable[[Any], Any], results: Any) -> Any:
    return [*map(read, results)] if isinstance(results, list | tuple) else results


def _unchanged(result: Any) -> Any:
    return result


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters without a default."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _as(
    function: Callable[..., Any],
    call: Callable[..., _Call],
    foreign: Sequence[str],
    needs: Sequence[Need] = (),
    *,
    always_async: bool = False,
) -> Any:
    """A reward function that calls the user's `function`, with its name in errors and the columns that it `needs`.

    `call` gives the function's result, a coroutine if it is async, and a function that reads that result. A function
    that is `always_async` in its library may be a plain `def` that returns a coroutine.

    TypeError for a function that requires parameters that only its own library has.
    """
    if foreign:
        fix = "give the parameter a default, or write (completion, row)"
        raise TypeError(f"{name_of(function)} requires {foreign}, which only its own library has: {fix}")

    def sync_reward(*args: Any, **extra: Any) -> Any:
        result, read = call(*args, **extra)
        return read(result)

    async def async_reward(*args: Any, **extra: Any) -> Any:
        result, read = call(*args, **extra)
        return read(await result if inspect.isawaitable(result) else result)

    reward: Any = async_reward if always_async or is_async(function) else sync_reward
    reward.__wrapped__, reward.__signature__, reward.needs = function, inspect.signature(call), needs
    return reward


def _acceptor(function: Callable[..., Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that keeps the keywords that `function` takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    return lambda given: given if takes_all else {name: value for name, value in given.items() if name in parameters}


def _sample(tokenizer: Any, prompt: Prompt, trajectory: Trajectory) -> Sample:
    mask = trajectory.mask
    end = len(mask) - mask[::-1].index(True) if True in mask else 0  # of the last run of sampled tokens
    start = end - mask[:end][::-1].index(False) if False in mask[:end] else 0
    text = tokenizer.decode(trajectory.ids[start:end], skip_special_tokens=True)
    tokens = {"prompt_ids": trajectory.prompt_ids, "completion_ids": trajectory.ids, "truncated": trajectory.truncated}
    return Sample(text, prompt.row, prompt.index, {**trajectory.info, **tokens})
