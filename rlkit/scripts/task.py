"""The task of a reinforcement learning script: prompts, reward and environment, from the flags.

`open_task` reads the user's files and checks them before torch is loaded: the rows, the reward functions against the
rows, the environment. Then it loads the tokenizer and makes of them what the loops take.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from rlkit.data.load import place_of
from rlkit.data.vocabulary import check_vocabulary
from rlkit.ranks import launched
from rlkit.run.console import data_progress
from rlkit.scripts.args import Episodes, log
from rlkit.scripts.engines import check_engine, server_kind
from rlkit.scripts.start import (
    begin,
    check_ranks,
    check_resize,
    function_of,
    image_reader,
    load_policies,
    load_tokenizer,
    mixture,
    note_strings,
    rows_of,
    template_file,
    warn_of_clip,
    warn_of_repeats,
    warn_of_warmup,
    with_adapter,
)
from rlkit.scripts.trial import try_env, try_rewards
from rlkit.settings import SERVERS, Rollouts, SamplingParams, check_relations, refuse_if

_OF_MESSAGES = ("tools", "interact", "verifiers", "gymnasium", "gem", "textarena")  # kinds of environments
OfTokenizer = Callable[[Any], Any]  # what a run needs of the user's code, once there is a tokenizer


def open_task(args: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The flags (see `begin`), the tokenizer and the `Task`; `options` are further fields of the task."""
    args = with_adapter(args)
    check_rl(args)
    check_engine(args)
    from rlkit.data.rows import PROMPT

    parts, held_out = args.data.rows(PROMPT, limit=args.evaluation.eval_limit)
    own = own_rewards(args, held_out)
    make_env = read_env(args, *parts, *held_out.values())
    unnamed = (held_out[x] for x in held_out if x not in own)
    make_score = read_reward(args.episodes, *parts, *unnamed, trial=args.evaluation.trial)
    args = begin(args)
    from rlkit.data.chat import stop_token_ids
    from rlkit.loops.rl import Task
    from rlkit.model.pretrained import load_config

    others = args.reference, getattr(args, "critic", None)
    tokenizer = load_tokenizer(args.model.tokenizer, *others, chat_template=template_file(args))
    env, score = make_env(tokenizer), make_score(tokenizer)
    with data_progress():
        rendered = [render(args, tokenizer, part) for part in parts]
        sets = eval_sets(args, tokenizer, held_out, own)
    note_strings(args.data, parts[0])
    starts = accumulate(map(len, parts), initial=0)  # a prompt's index is its place among all rows
    prompts = [replace(x, index=x.index + start) for part, start in zip(rendered, starts) for x in part]
    known = {"tokenizer": tokenizer, "num_rows": rows_of(args.model, tokenizer, *others)}
    for some, of in [*zip(rendered, parts), *((one.prompts, held_out[name]) for name, one in sets.items())]:
        check_vocabulary(some, rows=of, **known)
    note_unknown(args.episodes, tokenizer, known["num_rows"])
    mixed = mixture(args.data, map(len, rendered))
    config = load_config(args.model.model)
    if any(prompt.images for one in (prompts, *(x.prompts for x in sets.values())) for prompt in one):
        check_images(args, config)
    warn_of_repeats("--prompts-per-step", args.rollouts.prompts_per_step, len(prompts))
    config = config.get_text_config()
    models = [config, *(load_config(path) for path in others if path)]
    check_lengths(args, prompts + [prompt for one in sets.values() for prompt in one.prompts], *models)
    beyond = [i for i in args.rollouts.stop_token_ids if not 0 <= i < known["num_rows"]]
    refuse_if(beyond, f"`stop_token_ids` {beyond}: the model's token ids are 0 to {known['num_rows'] - 1}")
    ends = stop_token_ids(tokenizer, config) if args.data.chat_template else ()
    try_env(args, tokenizer, env, prompts, ends=ends)
    sets = sets if args.schedule.eval_steps else {}
    objectives = tuple(name for name, (_, weight) in args.episodes.rewards().items() if weight != 0)
    options |= {"objectives": objectives if len(objectives) > 1 else ()}
    return args, tokenizer, Task(prompts, score, env=env, eval_sets=sets, parts=mixed, **options)


def note_unknown(how: Episodes, tokenizer: Any, num_rows: int) -> None:
    """Log tokens that the model has no rows for, where an environment's text may have them in some later turn."""
    more = [token for token, i in tokenizer.get_vocab().items() if i >= num_rows]
    if more and not how.one_turn:
        said = "the tokenizer has %d tokens without a row in the model's embedding (%s): a turn with one would fail; "
        log.warning(said + "--resize-embeddings adds their rows", len(more), ", ".join(sorted(more)[:3]))


def check_images(args: Any, config: Any) -> None:
    """Refuse what would not show the prompts' images, and warn of what would show old features of them."""
    how = args.engine
    what = f"`engine` {how.engine}: the prompts show images, which only local, {' and '.join(SERVERS)} are given"
    refuse_if(":" in how.engine, what)
    what = f"`engine` {how.engine}: servers write other tokens around the images of {config.model_type}: use local"
    refuse_if(how.serves and config.model_type == "gemma3", what)
    if args.model.train_vision and how.engine_urls and (env := server_kind(how).api().vision_env):
        said = " ".join(f"{name}={value}" for name, value in env.items())
        log.warning("start the servers of `engine_urls` with %s: they keep features of images", said)


def own_rewards(args: Any, held_out: Mapping[str, Any]) -> dict[str, OfTokenizer]:
    """`read_reward` of each held-out set that has a reward of its own."""
    given = {name: args.evaluation.reward_of(name) for name in held_out}
    return {
        name: read_reward(
            replace(args.episodes, reward=specs), held_out[name], flag="eval_reward", trial=args.evaluation.trial
        )
        for name, specs in given.items() if specs
    }  # fmt: skip


def eval_sets(args: Any, tokenizer: Any, held_out: Mapping[str, Any], own: Mapping[str, OfTokenizer]) -> dict[str, Any]:
    """The held-out sets of the flags, tokenized."""
    from rlkit.loops.evaluate import EvalSet

    found = {}
    for name, rows in held_out.items():
        how = args.evaluation.sampling_of(name)
        samples = how.pop("samples", None)
        params = replace(args.rollouts.params, **how) if how else None
        score = own[name](tokenizer) if name in own else None
        found[name] = EvalSet(render(args, tokenizer, rows), score, params, samples)
    return found


def offline_sets(args: Any, held_out: Mapping[str, Any]) -> Callable[[Any, Any], dict[str, Any]]:
    """Of a script on fixed data, a function from tokenizer and model to the held-out sets on which answers are sampled
    and given the rewards of `eval_reward`; none without that flag. Checks them before torch is loaded."""
    from rlkit.data.load import Rows

    how = args.evaluation
    how.check_sets(args.data.eval_files())
    refuse_if(how.eval_sampling and not how.eval_reward, "`eval_sampling` requires `eval_reward`")
    refuse_if(
        how.eval_reward and launched(),
        "`eval_reward` samples in one process: drop it, and run rlkit eval on the export",
    )
    rows, own = {}, {}
    for name in held_out if how.eval_reward else ():
        if specs := how.reward_of(name):
            part = held_out[name][: how.eval_limit]
            rows[name] = Rows(
                map(asked, part), source="", places=[place_of(held_out[name], i) for i in range(len(part))]
            )
            own[name] = read_reward(Episodes(reward=specs), rows[name], flag="eval_reward", trial=how.trial)

    def sets(tokenizer: Any, model: Any) -> dict[str, Any]:
        from rlkit.data.chat import stop_token_ids
        from rlkit.data.prompts import rl_prompts
        from rlkit.loops.evaluate import EvalSet
        from rlkit.model.positions import positions

        found: dict[str, Any] = {}
        if not rows:
            return found
        ends = stop_token_ids(tokenizer, model.config, model.generation_config) if args.data.chat_template else ()
        longest = min(args.examples.max_example_tokens, (positions(model.config) or sys.maxsize) - 1)
        for name, part in rows.items():
            sampling = how.sampling_of(name)
            samples = sampling.pop("samples", 1)
            prompts = rl_prompts(
                part, tokenizer=tokenizer, max_prompt_tokens=longest,
                images=image_reader(args.model.model, tokenizer, part), **args.data.rendering(),
            )[0]  # fmt: skip
            params = SamplingParams(**sampling, stop_token_ids=tuple(ends))
            found[name] = EvalSet(prompts, own[name](tokenizer), params, samples)
        return found

    return sets


def asked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of fixed data as a question: its prompt, or its conversation without the last answer.

    Where the row has no gold answer, `answer` is the text of that answer.
    """
    from rlkit.rewards.text import gold_answer

    given = [row.get(name) for name in ("chosen", "response", "completion", "messages")]
    answer = next((value for value in given if value is not None), None)
    question = {
        name: value for name, value in row.items() if name not in ("chosen", "rejected", "response", "completion")
    }
    if isinstance(answer, list) and answer and isinstance(answer[-1], dict) and answer[-1].get("role") == "assistant":
        if len(answer) > 1:
            question["messages"] = answer[:-1]
        answer = answer[-1].get("content")
    return question if gold_answer(row) is not None or not isinstance(answer, str) else question | {"answer": answer}


def needs_reference(args: Any) -> bool:
    """Whether the run needs a reference model."""
    return args.penalties.has_kl or args.episodes.eval_kl


def check_judged(how: Episodes) -> None:
    """Refuse (ValueError) episodes that nothing gives a reward."""
    judged = how.reward or how.env is not None or how.agent is not None
    refuse_if(not judged, "give `reward`, `env` or `agent`: something has to judge")


def check_rl(args: Any) -> None:
    """Refuse combinations of flags of several settings that have no effect or fail late (ValueError)."""
    check_ranks(args.model.parallel)
    check_relations(args)
    check_resize(args)
    penalties, rollouts = args.penalties, args.rollouts
    moves, has_reference, how = penalties.ref_sync_steps, needs_reference(args), args.episodes
    if not hasattr(args.loss, "teacher"):
        check_judged(how)
    refuse_if(args.reference and not has_reference, "`reference` requires `kl_coef`, `kl_limit` or `eval_kl`")
    refuse_if(moves and not has_reference, "`ref_sync_steps` requires `kl_coef` above 0")
    fix = "the tokens that train are those that were sampled without it: drop it"
    refuse_if(args.lora.lora_dropout, f"`lora_dropout` is for training on fixed data; {fix}")
    args.evaluation.check_sets(args.data.eval_files())
    warn_of_clip(args)
    warn_of_warmup(args)
    warn_of_escapes(rollouts.stop)


def warn_of_escapes(stop: Sequence[str]) -> None:
    """Warn of a stop string with the two characters that stand for a line break elsewhere: a shell keeps them."""
    for text in stop:
        if found := re.search(r"\\[nrt](?![a-z])", text):
            what = {"n": "line break", "r": "carriage return", "t": "tab"}[found[0][1]]
            said = "--stop '%s' has a backslash and the letter %s; for a %s write --stop $'%s'"
            log.warning(said, text, found[0][1], what, text)


def read_reward(episodes: Episodes, *parts: Any, flag: str = "reward", trial: bool = True) -> OfTokenizer:
    """A function from the tokenizer to the `score` of `rlkit.rollout.rollout`, of the functions of `reward`.

    They are checked against the rows of each of the `parts` of the data, and with `trial` called on a row of each.
    ValueError for a function that does not exist, that cannot be called with what a sample has, that needs a column
    which a row lacks, or that fails. Does not import torch.
    """
    found = reward_functions(episodes, *parts, flag=flag)
    if trial:
        try_rewards(found, episodes, *parts, flag=flag)

    def of_tokenizer(tokenizer: Any) -> Any:
        from rlkit.rewards.combine import scalarized, weighted
        from rlkit.rewards.scoring import env_rewards, scorer
        from rlkit.rollout.agents.command import scored

        done = scored if episodes.agent else lambda score: score
        limits = {"timeout_s": episodes.reward_timeout, "max_failed": episodes.max_failed}
        if not found:
            return done(env_rewards(max_failed=episodes.max_failed))
        weights = {name: weight for name, (_, weight) in episodes.rewards().items()}
        reward, *_ = found.values()
        if [*weights.values()] != [None]:
            each = {name: 1.0 if weight is None else weight for name, weight in weights.items()}
            reward = weighted(found, weights=each, timeout_s=episodes.reward_timeout)
            if episodes.combine != "sum":
                how = combining(episodes)
                reward = scalarized(found, weights=each, scalarize=how, timeout_s=episodes.reward_timeout)
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
    from rlkit.data.rows import drop
    from rlkit.rewards.call import ONE_TURN, check_signature
    from rlkit.rewards.rows import check_rows
    from rlkit.rewards.text import gold_answer

    found = {}
    for name, (spec, _) in episodes.rewards().items():
        function = function_of(flag, spec)
        try:
            found[name] = function = adapted(function)
            check_signature(function, set(ONE_TURN) if episodes.one_turn else None)
            check_rows(function, *parts)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{flag}` {spec}: {error}") from None
    for rows in parts if found else ():
        golds = [(index, gold_answer(row)) for index, row in enumerate(rows)]
        if any(gold is not None for _, gold in golds):
            why = "have no gold answer (missing or null)"
            drop(rows, golds, lambda gold: gold is None, what="rows", why=why, keep=True)
    return found


def read_env(args: Any, *parts: Any) -> OfTokenizer:
    """A function from the tokenizer to the environment of `env`, `agent` or `tools`, with the limits of an episode.

    Of several environments that of the row's column; ValueError for a row of the `parts` that names none.

    Refuses (ValueError) what is no environment, one without any reward, one that works on messages where there is
    no chat template, and a command that does not fit the rows of the `parts` of the data. Does not import torch.
    """
    how = args.episodes
    if len(envs := how.envs()) > 1:
        for rows in parts:
            check_column(rows, how.env_column, [*envs], what="environments")
        each = {
            name: read_env(replace(args, episodes=replace(how, env=spec, env_column="env")))
            for name, spec in envs.items()
        }
        return partial(_chosen, each, how.env_column)
    make_agent = read_agent(args, *parts) if how.agent else None
    foreign, tools, parse = _foreign_env(how), load_tools(how), read_calls(how)
    _check_reward_and_template(args, foreign)

    def of_tokenizer(tokenizer: Any) -> Any:
        from rlkit.compat.envs import adapted
        from rlkit.rewards.episodes import made
        from rlkit.rollout.envs.tools import tool_env
        from rlkit.rollout.groups import single_turn
        from rlkit.rollout.limits import limited

        if foreign is not None:
            make = lambda: adapted(foreign, tokenizer) or _of_factory(foreign, tokenizer, spec=how.env)  # noqa: E731
            env = made(make, foreign, how.env)
        elif make_agent is not None:
            env = make_agent(tokenizer)
        elif tools:
            chat: Any = {"system_prompt": args.data.system_prompt, "template_args": args.data.template() or None}
            env = tool_env(tools, tokenizer=tokenizer, parse=parse, **chat)
        else:
            return single_turn
        bounds = {"max_total_tokens": how.max_len(args.rollouts), "max_sampled_tokens": how.max_sampled_tokens}
        return limited(env, max_turns=how.max_turns, **bounds)

    return of_tokenizer


def read_agent(args: Any, *parts: Any) -> OfTokenizer:
    """A function from the tokenizer to the environment of `agent`; ValueError for one that cannot start."""
    from rlkit.rollout.agents.command import check_command, command
    from rlkit.rollout.agents.server import check_address, tls_of
    from rlkit.rollout.calling import takes

    how, parse = args.episodes, read_calls(args.episodes)
    is_function = re.fullmatch(r"\S+\.py:\w+", how.agent)
    if is_function:
        agent = function_of("agent", how.agent)
        wrong = not takes(agent, "prompt", "base_url")
        refuse_if(wrong, f"`agent` {how.agent}: it must be a function of (prompt, base_url)")
        refuse_if(how.agent_memory is not None, "`agent_memory` is for commands: a function runs in this process")
    else:
        elsewhere = sys.platform != "linux" and how.agent_memory is not None
        refuse_if(elsewhere, "`agent_memory` is measured on Linux only: drop it")
        try:
            check_command(how.agent, next((row for rows in parts for row in rows), {}))
        except ValueError as error:
            raise ValueError(f"`agent` {how.agent}: {error}") from None
        agent = command(
            how.agent, logs=args.schedule.output / "agents", timeout_s=how.agent_timeout, memory_gib=how.agent_memory,
            needs_reward=not how.reward,
        )  # fmt: skip
    refuse_if(args.data.system_prompt is not None, "`system_prompt` has no place: an `agent` writes its own messages")
    try:
        check_address(how.agent_address)
    except ValueError as error:
        raise ValueError(f"`agent_address`: {error}") from None
    try:
        tls = tls_of(how.agent_certificate, how.agent_key) if how.agent_certificate else None
    except ValueError as error:
        raise ValueError(f"`agent_certificate`: {error}") from None

    def of_tokenizer(tokenizer: Any) -> Any:
        from rlkit.rollout.envs.endpoint import agent_env

        return agent_env(
            agent, tokenizer=tokenizer, parse=parse,
            template_args=args.data.template() or None, timeout_s=how.agent_timeout if is_function else None,
            address=how.agent_address, tls=tls, params=args.rollouts.params,
            refuse_sampling=how.agent_sampling == "refuse", raise_errors=False,
        )  # fmt: skip

    return of_tokenizer


def _chosen(each: dict[str, OfTokenizer], column: str, tokenizer: Any) -> Any:
    """The environment that plays each prompt in the one that its row names."""
    made = {name: make(tokenizer) for name, make in each.items()}

    async def env(prompt: Any, sample: Any) -> Any:
        return await made[prompt.row[column]](prompt, sample)

    return env


def check_column(rows: Any, column: str, names: Sequence[str], *, what: str) -> None:
    """Refuse (ValueError) a row whose `column` names none of several."""
    for index, row in enumerate(rows):
        if (name := row.get(column)) not in names:
            has = f"{column!r} is {name!r}" if column in row else f"there is no column {column!r}"
            raise ValueError(f"row {index + 1}: {has}, and the {what} are {', '.join(names)}")


def _foreign_env(episodes: Episodes) -> Any:
    """The object that `env` names, or None; ValueError for one that is no environment."""
    from rlkit.compat.recognise import kind_of

    spec = next(iter(episodes.envs().values()), None)
    if spec is None:
        return None
    foreign = function_of("env", spec)
    try:
        kind_of(foreign)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`env` {episodes.env}: {error}") from None
    return foreign


def _check_reward_and_template(args: Any, foreign: Any) -> None:
    """Refuse (ValueError) an `env` without any reward, and messages without a chat template."""
    from rlkit.compat.recognise import kind_of

    how, kind = args.episodes, "tools" if args.episodes.tools or args.episodes.agent else ""
    kind = kind_of(foreign) if foreign is not None else kind
    refuse_if(
        kind == "interact" and not how.reward,
        f"`env` {how.env}: interact(messages) gives no reward: add its reward_fn(messages, answer) as `reward`",
    )
    if args.data.chat_template or kind not in (*_OF_MESSAGES, "object"):
        return
    if kind == "object":  # whose reset may give token ids
        log.warning("--env %s: texts of reset and step are messages for the chat template all the same", how.env)
        return
    what = f"`env` {how.env}" if foreign is not None else "`tools`" if how.tools else "`agent`"
    why = "works on messages for the chat template"
    fix = "drop --no-chat-template; a base model needs a tokenizer.chat_template that writes only the contents"
    raise ValueError(f"{what} {why}: {fix}")


def _of_factory(function: Any, tokenizer: Any, *, spec: str) -> Any:
    """An async function as it is, and of a function of the tokenizer the environment that it returns."""
    from rlkit.rollout.calling import is_async, takes

    if is_async(function):
        return function
    env = function(tokenizer)
    if not callable(env) or not takes(env, "prompt", "sample"):
        game = hasattr(env, "reset") and hasattr(env, "step")
        fix = "; a function that makes such objects has one argument with the name prompt" if game else ""
        what = f"a function of the tokenizer must return `async def env(prompt, sample)`, got {type(env).__name__}"
        raise ValueError(f"`env` {spec}: {what}{fix}")
    return env


def load_tools(episodes: Episodes) -> list[Any]:
    """The functions that the model may call."""
    return [function_of("tools", spec) for spec in episodes.tools]


def read_calls(episodes: Episodes) -> Callable[..., Any] | None:
    """The function that reads calls; None for the one that the chat template's own calls choose."""
    from rlkit.rollout.envs.calls import FORMATS

    spec = episodes.tool_calls
    return function_of("tool_calls", spec) if spec and ":" in spec else FORMATS[spec] if spec else None


def render(args: Any, tokenizer: Any, rows: list[Any]) -> list[Any]:
    """The prompts of the rows, tokenized."""
    from rlkit.data.prompts import rl_prompts

    if not rows:
        return []
    longest, total = args.episodes.max_prompt_tokens, args.episodes.max_len(args.rollouts) - 1  # room for one token
    try:
        return rl_prompts(
            rows, tokenizer=tokenizer, max_prompt_tokens=min(longest, total), tools=load_tools(args.episodes) or None,
            images=image_reader(args.model.model, tokenizer, rows), **args.data.rendering(),
        )[0]  # fmt: skip
    except ValueError as error:
        if total >= longest:
            raise
        given = f"the {total} tokens that `max_total_tokens` {total + 1} leaves for a prompt"
        raise ValueError(str(error).replace(f"`max_prompt_tokens` {total}", given)) from None


def check_context(args: Any, config: Any, *, packed: bool = True) -> None:
    """ValueError if an episode may be longer than the model of this config has positions."""
    from rlkit.model.positions import check_positions

    how = args.episodes
    given = "`max_total_tokens`" if how.max_total_tokens else "`max_prompt_tokens` + `max_new_tokens`"
    check_positions(how.max_len(args.rollouts), config, what=given, packed=packed)


def check_lengths(args: Any, prompts: list[Any], *configs: Any) -> None:
    """ValueError if a sample may be longer than a model or a micro-batch allows."""
    how, max_tokens = args.episodes, args.optim.max_tokens
    for config in configs:
        check_context(args, config)
    longest = how.max_len(args.rollouts)
    if how.one_turn:
        longest = min(longest, max(len(prompt.ids) for prompt in prompts) + args.rollouts.max_new_tokens)
    if longest > max_tokens:
        raise ValueError(
            f"a sample with its prompt may have {longest} tokens, and a micro-batch holds `max_tokens` {max_tokens}: "
            "raise it, or lower `max_new_tokens`"
        )


def load_models(args: Any, tokenizer: Any) -> tuple[Any, Any, Rollouts]:
    """The model, the reference model (None without a KL), and the rollouts with the model's own stop tokens."""
    from rlkit.data.chat import stop_token_ids

    model, reference = load_policies(args, has_reference=needs_reference(args))
    ends = stop_token_ids(tokenizer, model.config, model.generation_config) if args.data.chat_template else ()
    return model, reference, replace(args.rollouts, stop_token_ids=(*ends, *args.rollouts.stop_token_ids))
