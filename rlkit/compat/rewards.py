"""Reward functions of other systems as functions of rlkit: `adapted` recognises them by their parameters.

    reward = adapted(accuracy_reward)         # of TRL; then scorer(reward, ...) or weighted({"accuracy": reward}, ...)

A system is a function here and a row in `_ADAPTERS`; a form that cannot be run is a row in `_REFUSED`.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from numbers import Real
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from rlkit._util.numbers import show
from rlkit.data.markup import opened_by
from rlkit.data.prompts import prompt_messages, question_messages
from rlkit.data.schema import GOLD
from rlkit.data.turns import begins_answer
from rlkit.rewards.call import VARIABLE, Need, WrongResult, check_signature
from rlkit.rewards.failures import name_of, unwrapped
from rlkit.rewards.source import chat_header, code_of, constants, names_in, names_of_kwargs, uses
from rlkit.rewards.text import first_value, last_boxed, no_gold_answer
from rlkit.rollout.calling import Watched, is_async, report_absent

_log = logging.getLogger("rlkit.rewards")
_ONE_CHARACTER = "%s, line %d, reads one character of a completion or prompt: %s"
_NOTE = 500  # characters of a list or dict in the notes
_OF_TRL = {"trainer_state", "log_extra", "log_metric", "prompts", "completions", "completion_ids"}  # of its `**kwargs`
_REFUSED = {  # forms without an adapter: names of parameters, and what to write
    "data return_dict": "verl's reward manager gets a whole batch: give its compute_score function instead",
    "sample item": "for OpenAI's grader: sample['output_text'] is the completion, and item is the row",
    "state action": "for a step of an environment: add extra_info (RL2), or give it as --env",
    "input_ids gt_answer": "for ColossalAI: the completion is a text, not token ids; the answer is row['gt_answer']",
    "completion answer": "for verifiers: the completion is a text, not messages; the answer is row['answer']",
    "response ground_truth": "the ground truth is row['answer'], or whatever column has it",
    "sample": "a step of RL2, env_step(sample), is an environment: give it as --env",
    "reward_dict": "for rl4llm's reward_transform_fn: give each reward its weight, --reward FILE.py:A=0.7 ...",
}
_Call = tuple[Any, Callable[[Any], Any]]  # the result of a function, or its coroutine, and how to read it


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function of TRL, verl, OpenRLHF, slime, RL2, rl4llm or rl-max, as one of ours, by its parameters.

    | parameters                                                           | adapter         |
    |----------------------------------------------------------------------|-----------------|
    | `completions` or `prompts`, without `rows`; `completion_ids` first   | `trl`           |
    | `solution_str`, `ground_truth`; or both in the plural                | `verl`          |
    | `queries`, `prompts`, `labels`                                       | `openrlhf`      |
    | `args`, `sample`; `args`, `samples`                                  | `slime`         |
    | `state`, `action`, and `extra_info` or `answer`                      | `rl2`           |
    | `messages`, and `answer` or `ground_truth`                           | `with_messages` |
    | a class with `normalized_score`                                      | `rl_max`        |
    | only `**kwargs`, of which it reads `completions` or `solution_str`   | `trl`, `verl`   |

    A class that is made without arguments, or whose arguments are given, stands for its object: of rl4llm's rewards,
    or of yours. Any other function is returned unchanged. TypeError for a wrapper of such a function that hides its
    parameters, for a class that cannot be made, and for a form of a known system that has no adapter, with what to
    write.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    names, first = {*parameters}, next(iter(parameters), "")
    if inspect.isclass(kind := unwrapped(function)):
        return _of_class(function, kind)
    kinds = {p.kind for p in parameters.values()}
    if kinds <= VARIABLE and inspect.Parameter.VAR_KEYWORD in kinds:
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
    matching = [form for form in _ADAPTERS if names >= {*form.split()} and "completion" not in names]
    if matching:
        return _ADAPTERS[max(matching, key=lambda form: len(form.split()))](function)
    if "prompts" in names:
        return trl(function)
    _refuse(function, parameters)
    return function


def _of_class(make: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """The reward of an object of the class, where `make`, the class or a partial of it, needs no argument."""
    call, is_score = inspect.getattr_static(kind, "__call__", None), hasattr(kind, "normalized_score")
    if inspect.isfunction(call) and "data" in inspect.signature(call).parameters:
        raise TypeError(f"{name_of(kind)} is a class; {_REFUSED['data return_dict']}")
    if _required(make) or not (inspect.isfunction(call) or is_score):
        return make
    try:
        made = make()
    except Exception as error:
        raise TypeError(f"{name_of(kind)} cannot be made: {type(error).__name__}: {error}") from error
    return rl_max(made) if is_score else adapted(made)


def _refuse(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """TypeError, with what to write, for a form of another system that has no adapter and is not of rlkit."""
    given = {*parameters}
    forms = (({*form.split()}, hint) for form, hint in _REFUSED.items())
    if hint := next((hint for names, hint in forms if names <= given and (len(names) > 1 or names == given)), ""):
        try:
            check_signature(function)
        except TypeError as error:
            text = str(error).removesuffix("; row has all columns of the data")
            raise TypeError(f"{text}; {hint}") from None


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

    accepted, texts, calls = _acceptor(reward_func), constants(code_of(reward_func)), count()
    known = (*inspect.signature(reward_func).parameters, *texts)
    by_ids = "completion_ids" in known  # a completion may only be printed

    def call(completions: list[str], rows: list[dict[str, Any]], completion_ids: Any = None) -> _Call:
        logs, added = _trl_logs(len(rows))
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        if not any(x is not None for x in columns.pop("prompt", ())):
            columns.pop("messages", None)
        own = [first_value(row, "prompt", "messages") for row in rows]
        prompts = [prompt_messages(row) if x is None else x for row, x in zip(rows, own, strict=True)]
        prompts = [x[:-1] if isinstance(x, list) and begins_answer(x) else x for x in prompts]
        chat = not isinstance(prompts[0], str)
        turns = [ListOfMessages(text) for text in completions]
        if not chat and not next(calls):
            prompts, completions = [_Text(str(x)) for x in prompts], [*map(_Text, completions)]
        given = {"prompts": prompts, "completions": turns if chat else completions, "completion_ids": completion_ids}

        def read(results: Any) -> Any:
            if any(x._used or (x._shown and not by_ids) for x in turns if not x._read):
                raise WrongResult("read a completion as a text, and it is a list of messages", _TRL_FORM)
            if lines := [line for x in (*prompts, *completions) if isinstance(x, _Text) for line in x.lone()]:
                _log.warning(_ONE_CHARACTER, name_of(reward_func), lines[0], _TRL_FORM)
            return added(results)

        return reward_func(**accepted({**columns, **given, **logs})), read

    given, asked = {"prompts", "completions", "completion_ids", "log_extra", "log_metric"}, _required(reward_func)
    foreign = [name for name in asked if name in ("trainer_state", "environments", "prompt")]
    reward = _as(reward_func, call, foreign, [name for name in asked if name not in given])
    reward.hint, reward.check_rows = _trl_hint, partial(_check_rows, reward_func, set())
    if "trainer_state" in known:
        _log.warning(
            "%s reads trainer_state, which rlkit does not give: it keeps its default, and what depends on its step "
            "does not change during training",
            name_of(reward_func),
        )
    return reward


class ListOfMessages(list[dict[str, str]]):
    """A completion as TRL gives it where prompts are messages; it notes whether it was used as a text, or only printed
    or formatted, and whether its message was read."""

    def __init__(self, text: str) -> None:
        super().__init__([{"role": "assistant", "content": text}])
        self._used = self._read = self._shown = False


def _noting(method: Any, seen: str, kind: type) -> Callable[..., Any]:
    """A method of a list that sets the attribute `seen`, of arguments of a `kind` only."""

    def noted(self: Any, *arguments: Any) -> Any:
        if all(isinstance(x, kind) for x in arguments):
            vars(self)[seen] = True
        return method(self, *arguments)

    return noted


for _seen, _kind, _names in (
    ("_read", object, ("__getitem__", "__iter__")),
    ("_used", str, ("__len__", "__contains__", "__eq__", "__ne__", "count")),
    ("_shown", object, ("__repr__",)),  # also of str() and format()
):
    for _name in _names:
        setattr(ListOfMessages, _name, _noting(getattr(list, _name), _seen, _kind))


class _Text(str):
    """A completion or prompt where prompts are strings, with the lines that read single characters, by their index."""

    def __init__(self, _: str) -> None:
        self.lines = dict[int, int]()

    def __getitem__(self, index: Any) -> str:
        if isinstance(index, int):
            self.lines[index] = sys._getframe(1).f_lineno
        return super().__getitem__(index)

    def lone(self) -> list[int]:
        """The lines, where only the first or only the last character was read; a loop reads others, too."""
        alone = {*self.lines} == {-1} or ({*self.lines} == {0} and len(self) > 1)
        return [*self.lines.values()] * alone


def _trl_hint(error: BaseException) -> str:
    """The fix of errors that come from what TRL gives a function and we do not, or from the form of a completion."""
    text = str(error)
    if isinstance(error, KeyError) and "trainer_state" in text:
        return "rlkit gives no trainer_state: read it by kwargs.get('trainer_state'), and do without its step"
    if isinstance(error, TypeError | AttributeError) and (
        "string indices must be" in text or "'ListOfMessages'" in text
    ):
        return _TRL_FORM
    if isinstance(error, IndexError) and "string index" in text:
        return f"it reads one character of a completion or prompt: {_TRL_FORM}"
    return ""


_TRL_FORM = (
    "as in TRL, a completion is a string where the row's prompt is a string, and a list with one message where the "
    "prompt is a list of messages: read completion[0]['content'] only in the second case"
)


def _check_rows(function: Callable[..., Any], said: set[str], rows: Sequence[dict[str, Any]]) -> None:
    """Log, unless it is in `said`, the columns that a function in TRL's form reads and no row has: a call shows the
    default that it gets of them, not the name."""
    columns, parameters = set[str]().union(*rows), inspect.signature(unwrapped(function)).parameters
    optional = {name for name, p in parameters.items() if p.default in (None, "", (), [], {})}  # no option has it
    absent = [name for asked in (names_of_kwargs(function), optional) for name in sorted(asked - columns - _OF_TRL)]
    if names := ", ".join(repr(name) for name in absent if name not in rows[0]):
        where = ", ".join(getattr(rows, "sources", ())[:2]) or "the data"
        text = f" reads {names}, of which {where} has no column; columns found: {', '.join(sorted(columns))}"
        if text not in said:
            said.add(text)
            _log.warning("%s%s", name_of(function), text)


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

    infos = _Objects(compute_score, "extra_info", "extra_info")

    def given(completion: str, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "data_source": row.get("data_source"), "solution_str": completion,
            "ground_truth": _gold(row, "reward_model"), "extra_info": infos.of(row),
            **{name: _column(row, name) for name in columns},
        }  # fmt: skip

    def call(completion: str, row: dict[str, Any]) -> _Call:
        return compute_score(**accepted(given(completion, row))), scored

    def call_batched(completions: list[str], rows: list[dict[str, Any]]) -> _Call:
        each = [given(completion, row) for completion, row in zip(completions, rows, strict=True)]
        lists = {name: [one[names.get(name, name)] for one in each] for name in (*names, *columns)}
        return compute_score(**accepted(lists)), partial(_each, scored)

    def scored(result: Any) -> Any:
        infos.report()
        has_score = isinstance(result, dict) and "score" in result
        return _logged({**result, "reward": result["score"]} if has_score else result)

    foreign = [name for name in columns if name in ("reward_router_address", "reward_model_tokenizer")]
    reward = _as(compute_score, call_batched if batched else call, foreign, [GOLD, *columns])

    def check_source(rows: Sequence[dict[str, Any]]) -> None:
        if not any("data_source" in row for row in rows):
            name = name_of(compute_score)
            _log.warning("%s reads data_source, which is None: the data has no such column", name)

    if any(column == "data_source" and uses(compute_score, name) for name, column in names.items()):
        reward.check_rows = check_source
    return reward


class _Objects:
    """The object that each row has in a column; keys that a function asks for and no object has are reported."""

    def __init__(self, function: Callable[..., Any], column: str, called: str) -> None:
        self._function, self._column, self._called = function, column, called
        self._absent, self._found = set[str](), set[str]()

    def of(self, row: dict[str, Any]) -> Watched:
        watched = Watched(row.get(self._column) or {}, self._absent)
        self._found.update(watched)
        return watched

    def report(self) -> None:
        report_absent(name_of(self._function), self._absent, self._found, what=f"{self._called} has no key")


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
        prompt = _prompt_text(row)
        said = completion.removeprefix(opened_by(prompt))  # which the completion repeats where the prompt is plain text
        return reward_func([prompt + said], [prompt], [_gold(row, "label")]), read

    def read(result: Any) -> dict[str, Any]:
        if not isinstance(result, dict):
            return {"reward": _only(result)}
        if "rewards" not in result:
            cause = f"returned a dict without 'rewards' (keys: {sorted(map(str, result))})"
            raise WrongResult(cause, "put a list with one number per query under 'rewards'")
        reward, scores = _only(result["rewards"]), result.get("scores")
        logs = {name: _only(values) for name, values in (result.get("extra_logs") or {}).items()}
        return {**_logged(logs), "reward": reward, "score": reward if scores is None else _only(scores)}

    return _as(reward_func, call, _required(reward_func)[3:], [GOLD])


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

    objects = _Objects(custom_rm, "metadata", "sample.metadata")

    def sample(completion: str, row: dict[str, Any]) -> _Slime:
        label, prompt = first_value(row, "label", *GOLD), first_value(row, "prompt", "messages")
        return _Slime(called="sample", prompt=prompt, response=completion, label=label, metadata=objects.of(row))

    def call(completion: str, row: dict[str, Any]) -> _Call:
        return custom_rm(_Slime(called="args"), sample(completion, row)), scored

    def call_batched(completions: list[str], rows: list[dict[str, Any]]) -> _Call:
        return custom_rm(_Slime(called="args"), [*map(sample, completions, rows)]), partial(_each, scored)

    def scored(result: Any) -> Any:
        objects.report()
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

    return _as(step, call, _required(step)[3:], [GOLD] if with_answer else (), always_async=True)


class Message(dict[str, Any]):
    """A message whose keys are attributes, too, as those of rl4llm's `ChatMessage`: `m["content"]`, `m.content`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"a message has {', '.join(self)}, not {name!r}")
        return self[name]


def with_messages(reward_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the whole conversation, as in RL2, or an object of rl4llm's `BaseRewardFunction`:

        reward_fn(messages, answer)
        reward_fn(messages, ground_truth, **kwargs)

    `messages` are the environment's, or else the row's conversation and the completion, each a `Message`; `answer` is
    the row's `gold_answer`.
    """

    def call(completion: str, row: dict[str, Any], messages: list[dict[str, Any]] | None = None) -> _Call:
        conversation = messages or [*question_messages(row), {"role": "assistant", "content": completion}]
        return reward_fn([*map(Message, conversation)], _gold(row)), lambda result: result

    return _as(reward_fn, call, _required(reward_fn)[2:], [GOLD])


def rl_max(reward: Any) -> Callable[..., Any]:
    """An object of a subclass of rl-max's `BaseReward`, with the methods and fields of that:

        weight * normalized_score(prompt, completion, metadata)

    The prompt is the text of the row's question, and `metadata` the row.

    Differs: there the prompt is rendered, and `metadata` empty.
    """

    def call(completion: str, row: dict[str, Any]) -> _Call:
        score = reward.normalized_score(_prompt_text(row), completion, row)
        return score, lambda found: found * reward.weight

    return _as(reward.score, call, ())


def _prompt_text(row: dict[str, Any]) -> str:
    """The prompt of the row where it is a text, else its last message."""
    prompt = row.get("prompt")
    return prompt if isinstance(prompt, str) else str(question_messages(row)[-1]["content"])


_ADAPTERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "solution_str ground_truth": verl, "solution_strs ground_truths": verl, "queries prompts labels": openrlhf,
    "args sample": slime, "args samples": slime, "state action extra_info": rl2, "state action answer": rl2,
    "messages answer": with_messages, "messages ground_truth": with_messages,
}  # fmt: skip


def _gold(row: dict[str, Any], *first: str) -> Any:
    """The first column that is not null of `first` and of `gold_answer`; ValueError for a row with none of them."""
    if (found := first_value(row, *first)) is None:
        found = _final(first_value(row, *GOLD))
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


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in VARIABLE]


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
