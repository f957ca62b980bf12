"""What the scripts of reinforcement learning share: prompts, reward, environment, models and engine, from the flags.

`bring` reads the user's files and checks them before torch is loaded: the rows, the reward functions against the rows,
the environment. `make_task` makes of them, with the tokenizer, what the loops take.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.data.columns import check_names
from rlkit.data.load import placed
from rlkit.data.vocabulary import check_vocabulary
from rlkit.run.console import data_progress
from rlkit.scripts.args import Correction, Data, Episodes, Lora, Model, log
from rlkit.scripts.engines import EngineSpec, check_engine, check_images, check_truncation, open_engine
from rlkit.scripts.start import Brought, check_flags, image_reader, load_policies, note_strings, warn_of_repeats
from rlkit.scripts.trial import OfTokenizer, function_of, own_rewards, read_reward, try_env
from rlkit.scripts.unusual import warn_of_clip
from rlkit.settings import Rollouts, refuse_if

if TYPE_CHECKING:
    from rlkit.loops.task import Task
    from rlkit.loops.updates import PolicyLoss
    from rlkit.scripts import distill, grpo, ppo
    from rlkit.scripts.start import Place, Sampled


def bring(args: Sampled) -> Brought:
    """What the user brought: rows, rewards and environment, checked before torch is loaded."""
    from rlkit.data.turns import PROMPT

    model, lora, episodes = check_rl(args)
    check_engine(args.engine, device=model.device, overlap=args.rollouts.overlap)
    check_truncation(args.engine, args.rollouts, args.evaluation)
    limit, whole = args.evaluation.eval_limit, not args.episodes.one_turn  # an environment may read any column
    parts, held_out = args.data.rows(PROMPT, limit=limit, whole=whole)
    rewards = own_rewards(args.evaluation, args.episodes, held_out)
    output, unnamed = args.schedule.output, (held_out[x] for x in held_out if x not in rewards)
    env = read_env(args.episodes, args.data, args.rollouts, *parts, *held_out.values(), output=output)
    reward = read_reward(episodes, *parts, *unnamed, trial=args.evaluation.trial)
    return Brought(model, lora, args.data.expanded(), parts, held_out, rewards, env, reward)


def make_task(args: Sampled, brought: Brought, place: Place, **options: Any) -> Task:
    """The prompts, tokenized, with their reward and environment; `options` are further fields of the `Task`."""
    from rlkit.data.chat import stop_token_ids
    from rlkit.loops.rl import Task

    assert brought.env is not None
    assert brought.reward is not None
    tokenizer, parts, episodes = place.tokenizer, brought.parts, args.episodes
    env, score = brought.env(tokenizer), brought.reward(tokenizer)
    configs = place.config, place.config.get_text_config()
    ends = stop_token_ids(tokenizer, *configs) if place.template else ()
    with data_progress():
        rendered = [render(args, tokenizer, place.config, part) for part in parts]
        sets = eval_sets(args, tokenizer, place.config, brought.held_out, brought.own_rewards, ends=ends)
    note_strings(brought.data, parts[0])
    starts = accumulate(map(len, parts), initial=0)  # a prompt's index is its place among all rows
    prompts = [replace(x, index=x.index + start) for part, start in zip(rendered, starts) for x in part]
    for some, of in [*zip(rendered, parts), *((one.prompts, brought.held_out[name]) for name, one in sets.items())]:
        check_vocabulary(some, rows=of, tokenizer=tokenizer, num_rows=place.num_rows)
    note_unknown(episodes, tokenizer, place.num_rows)
    every = prompts + [prompt for one in sets.values() for prompt in one.prompts]
    if any(prompt.images for prompt in every):
        check_images(args.engine, place.config, train_vision=place.model.train_vision)
    warn_of_repeats("--prompts-per-step", args.rollouts.prompts_per_step, len(prompts))
    check_lengths(args, every, *place.configs.values(), max_tokens=place.optim.max_tokens)
    beyond = [i for i in args.rollouts.stop_token_ids if not 0 <= i < place.num_rows]
    refuse_if(beyond, f"`stop_token_ids` {beyond}: the model's token ids are 0 to {place.num_rows - 1}")
    if args.evaluation.trial:
        try_env(episodes, tokenizer, env, prompts, ends=ends)
    rewards, sources = episodes.rewards(), episodes.reward_sources()
    names = tuple(name for name, (_, weight) in rewards.items() if weight != 0 and name not in sources)
    return Task(
        prompts, score, env=env, eval_sets=sets if args.schedule.eval_steps else {},
        parts=brought.mixture(map(len, rendered)), objectives=names if len(names) > 1 else (), **options,
    )  # fmt: skip


def note_unknown(episodes: Episodes, tokenizer: Any, num_rows: int) -> None:
    """Log tokens that the model has no rows for, where an environment's text may have them in some later turn."""
    more = [token for token, i in tokenizer.get_vocab().items() if i >= num_rows]
    if more and not episodes.one_turn:
        said = "the tokenizer has %d tokens without a row in the model's embedding (%s): a turn with one would fail; "
        log.warning(said + "--resize-embeddings adds their rows", len(more), ", ".join(sorted(more)[:3]))


def eval_sets(
    args: Sampled, tokenizer: Any, config: Any, held_out: Mapping[str, Any], scores: Mapping[str, OfTokenizer],
    *, ends: Sequence[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """The held-out sets of the flags, tokenized for the model of this `config`; `ends` are its stop tokens."""
    from rlkit.loops.evaluate import EvalSet

    sets = {}
    for name, rows in held_out.items():
        options = args.evaluation.sampling_of(name)
        samples = options.pop("samples", None)
        own = args.rollouts.params
        params = replace(own, stop_token_ids=(*ends, *own.stop_token_ids), **options) if options else None
        score = scores[name](tokenizer) if name in scores else None
        sets[name] = EvalSet(render(args, tokenizer, config, rows), score, params, samples)
    return sets


def needs_reference(args: Sampled) -> bool:
    """Whether the run needs a reference model."""
    return args.penalties.has_kl or args.episodes.eval_kl


def judged(episodes: Episodes, files: Sequence[str]) -> Episodes:
    """The episodes, where nothing judges with the scorer of the package that makes all data of `files`; ValueError
    where there is none."""
    from rlkit.data.packages import package_of

    if episodes.has_judge:
        return episodes
    scorers = {package.reward if package else "" for package in map(package_of, files)}
    lacking = scorers == {""} or len(scorers) != 1
    refuse_if(lacking, "give `reward`, `env` or `agent`: something has to judge")
    (scorer,) = scorers
    log.warning("the reward is the package's own scorer of each task, %s (--reward names another)", scorer)
    return replace(episodes, reward=scorer)


def check_rl(args: Sampled) -> tuple[Model, Lora, Episodes]:
    """`check_flags`, also for what scripts that sample have alone, and the episodes with what judges them."""
    model, lora = check_flags(args)
    files = [spec for specs, _ in args.data.parts() for spec in specs]
    episodes = args.episodes if hasattr(args.loss, "teacher") else judged(args.episodes, files)
    fix = "the tokens that train are those that were sampled without it: drop it"
    refuse_if(args.lora.lora_dropout, f"`lora_dropout` is for training on fixed data; {fix}")
    args.evaluation.check_sets(args.data.eval_files())
    warn_of_clip(args.loss, args.rollouts)
    warn_of_escapes(args.rollouts.stop)
    return model, lora, episodes


def warn_of_escapes(stop: Sequence[str]) -> None:
    """Warn of a stop string with the two characters that stand for a line break elsewhere: a shell keeps them."""
    for text in stop:
        if match := re.search(r"\\[nrt](?![a-z])", text):
            name = {"n": "line break", "r": "carriage return", "t": "tab"}[match[0][1]]
            said = "--stop '%s' has a backslash and the letter %s; for a %s write --stop $'%s'"
            log.warning(said, text, match[0][1], name, text)


def read_env(episodes: Episodes, data: Data, rollouts: Rollouts, *parts: Any, output: Path) -> OfTokenizer:
    """A function from the tokenizer to the environment of `env`, `agent` or `tools`, with the limits of an episode.

    Of several environments that of the row's column; ValueError for a row of the `parts` that names none.

    Refuses (ValueError) what is no environment, one without any reward, one that works on messages where there is
    no chat template, and a command that does not fit the rows of the `parts` of the data. Does not import torch.
    """
    if len(envs := episodes.envs()) > 1:
        for rows in parts:
            check_names(placed(rows), episodes.env_column, [*envs], kind="environments")
        each = {
            name: read_env(replace(episodes, env=spec, env_column="env"), data, rollouts, output=output)
            for name, spec in envs.items()
        }
        return partial(_chosen, each, episodes.env_column)
    check_compaction(episodes, rollouts)
    make_agent = read_agent(episodes, data, rollouts, *parts, logs=output / "agents") if episodes.agent else None
    foreign, tools, parse = _foreign_env(episodes), load_tools(episodes), read_calls(episodes)
    _check_reward_and_template(episodes, foreign, has_template=bool(data.chat_template))

    def of_tokenizer(tokenizer: Any) -> Any:
        from rlkit.compat.envs import adapted
        from rlkit.rewards.episodes import made
        from rlkit.rollout.envs.compaction import compacted
        from rlkit.rollout.envs.tools import tool_env
        from rlkit.rollout.groups import single_turn
        from rlkit.rollout.limits import limited

        if foreign is not None:
            make = lambda: adapted(foreign, tokenizer) or _of_factory(foreign, tokenizer, spec=str(episodes.env))  # noqa: E731
            env = made(make, getattr(foreign, "source", foreign), str(episodes.env))
        elif make_agent is not None:
            env = make_agent(tokenizer)
        elif tools:
            chat: Any = {"system_prompt": data.system_prompt, "template_args": data.template() or None}
            env = tool_env(tools, tokenizer=tokenizer, parse=parse, **chat)
        elif episodes.max_total_tokens is None:
            return single_turn
        else:
            env = single_turn  # a server's context may be longer
        if episodes.compact_at is not None:
            env = compacted(env, at=episodes.compact_at, max_new_tokens=rollouts.max_new_tokens)
        bounds = {"max_total_tokens": episodes.max_len(rollouts), "max_sampled_tokens": episodes.max_sampled_tokens}
        return limited(env, max_turns=episodes.max_turns, **bounds)

    return of_tokenizer


def check_compaction(episodes: Episodes, rollouts: Rollouts) -> None:
    """ValueError for a `compact_at` that leaves no room, or that no context reaches."""
    at, room, longest = episodes.compact_at, 2 * rollouts.max_new_tokens, episodes.max_len(rollouts)
    fault = f"`compact_at` {at} must be above {room}, two times `max_new_tokens` (a turn and a summary), and at most"
    refuse_if(at is not None and not room < at <= longest, f"{fault} {longest}, the context of `max_total_tokens`")


def read_agent(episodes: Episodes, data: Data, rollouts: Rollouts, *parts: Any, logs: Path) -> OfTokenizer:
    """A function from the tokenizer to the environment of `agent`; ValueError for one that cannot start."""
    from rlkit.agents.command import check_command, command
    from rlkit.agents.server import check_address, tls_of
    from rlkit.rollout.calling import takes

    assert episodes.agent is not None
    parse, is_function = read_calls(episodes), re.fullmatch(r"\S+\.py:\w+", episodes.agent)
    if is_function:
        agent = function_of("agent", episodes.agent)
        callable_so = takes(agent, "prompt", "base_url")
        refuse_if(not callable_so, f"`agent` {episodes.agent}: it must be a function of (prompt, base_url)")
    else:
        try:
            check_command(episodes.agent, *parts)
        except ValueError as error:
            raise ValueError(f"`agent` {episodes.agent}: {error}") from None
        agent = command(
            episodes.agent, logs=logs, timeout_s=episodes.agent_timeout, memory_gib=episodes.agent_memory,
            needs_reward=not episodes.reward,
        )  # fmt: skip
    why = "a function runs in this process" if is_function else "it is measured on Linux only"
    measured = sys.platform == "linux" and not is_function
    refuse_if(episodes.agent_memory is not None and not measured, f"`agent_memory` is for commands on Linux: {why}")
    try:
        check_address(episodes.agent_address)
    except ValueError as error:
        raise ValueError(f"`agent_address`: {error}") from None
    try:
        tls = tls_of(episodes.agent_certificate, episodes.agent_key) if episodes.agent_certificate else None
    except ValueError as error:
        raise ValueError(f"`agent_certificate`: {error}") from None

    def of_tokenizer(tokenizer: Any) -> Any:
        from rlkit.agents.endpoint import agent_env
        from rlkit.rewards.episodes import named

        made = agent_env(
            agent, tokenizer=tokenizer, parse=parse, template_args=data.template() or None,
            timeout_s=episodes.agent_timeout if is_function else None, address=episodes.agent_address, tls=tls,
            params=rollouts.params, refuse_sampling=episodes.agent_sampling == "refuse", raise_errors=False,
        )  # fmt: skip
        return named(made, agent, "agent") if is_function else made

    return of_tokenizer


def _chosen(each: dict[str, OfTokenizer], column: str, tokenizer: Any) -> Any:
    """The environment that plays each prompt in the one that its row names."""
    made = {name: make(tokenizer) for name, make in each.items()}

    async def env(prompt: Any, sample: Any) -> Any:
        return await made[prompt.row[column]](prompt, sample)

    return env


def _foreign_env(episodes: Episodes) -> Any:
    """What `env` names, or None; ValueError for what is no environment."""
    from rlkit.compat.libraries import environment_of, with_opponent
    from rlkit.compat.recognise import kind_of

    spec = next(iter(episodes.envs().values()), None)
    if spec is None:
        return None
    foreign = function_of("env", spec, load=environment_of)
    try:
        foreign = with_opponent(foreign, episodes.opponent)
        kind_of(foreign)
    except (AttributeError, FileNotFoundError, TypeError, ValueError) as error:
        raise ValueError(f"`env` {spec}: {error}") from None
    return foreign


def _check_reward_and_template(episodes: Episodes, foreign: Any, *, has_template: bool) -> None:
    """Refuse (ValueError) an `env` without any reward, and messages without a chat template."""
    from rlkit.compat.recognise import OF_MESSAGES, UNJUDGED, kind_of

    kind = kind_of(foreign) if foreign is not None else "tools" if episodes.tools or episodes.agent else ""
    unjudged = UNJUDGED.get(kind) if callable(foreign) else None
    refuse_if(bool(unjudged) and not episodes.reward, f"`env` {episodes.env}: {unjudged} as `reward`")
    if has_template or kind not in (*OF_MESSAGES, "object"):
        return
    if kind == "object":  # whose reset may give token ids
        log.warning("--env %s: texts of reset and step are messages for the chat template all the same", episodes.env)
        return
    flag = f"`env` {episodes.env}" if foreign is not None else "`tools`" if episodes.tools else "`agent`"
    why = "works on messages for the chat template"
    fix = "drop --no-chat-template; a base model needs a tokenizer.chat_template that writes only the contents"
    raise ValueError(f"{flag} {why}: {fix}")


def _of_factory(function: Any, tokenizer: Any, *, spec: str) -> Any:
    """An async function as it is, and of a function of the tokenizer the environment that it returns."""
    from rlkit.rollout.calling import is_async, takes

    if is_async(function):
        return function
    env = function(tokenizer)
    if not callable(env) or not takes(env, "prompt", "sample"):
        game = hasattr(env, "reset") and hasattr(env, "step")
        fix = "; a function that makes such objects has one argument with the name prompt" if game else ""
        fault = f"a function of the tokenizer must return `async def env(prompt, sample)`, got {type(env).__name__}"
        raise ValueError(f"`env` {spec}: {fault}{fix}")
    return env


def load_tools(episodes: Episodes) -> list[Any]:
    """The functions that the model may call."""
    return [function_of("tools", spec) for spec in episodes.tools]


def read_calls(episodes: Episodes) -> Callable[..., Any] | None:
    """The function that reads calls; None for the one that the chat template's own calls choose."""
    from rlkit.rollout.envs.calls import FORMATS

    spec = episodes.tool_calls
    return function_of("tool_calls", spec) if spec and ":" in spec else FORMATS[spec] if spec else None


def render(args: Sampled, tokenizer: Any, config: Any, rows: list[Any]) -> list[Any]:
    """The prompts of the rows, tokenized."""
    from rlkit.data.prompts import rl_prompts

    if not rows:
        return []
    longest, total = args.episodes.max_prompt_tokens, args.episodes.max_len(args.rollouts) - 1  # room for one token
    try:
        return rl_prompts(
            rows, tokenizer=tokenizer, max_prompt_tokens=min(longest, total), tools=load_tools(args.episodes) or None,
            images=image_reader(args.model.model, tokenizer, rows, config), **args.data.rendering(),
        )[0]  # fmt: skip
    except ValueError as error:
        if total >= longest:
            raise
        limit = f"the {total} tokens that `max_total_tokens` {total + 1} leaves for a prompt"
        raise ValueError(str(error).replace(f"`max_prompt_tokens` {total}", limit)) from None


def check_context(args: Sampled, config: Any, *, packed: bool = True) -> None:
    """ValueError if an episode, of training or held out, may be longer than the model of this config has positions."""
    from rlkit.model.positions import check_positions

    episodes, longest = args.episodes, args.evaluation.longest(args.rollouts)
    held_out = " of `eval_sampling`" * (longest.max_new_tokens > args.rollouts.max_new_tokens)
    setting = "`max_total_tokens`" if episodes.max_total_tokens else f"`max_prompt_tokens` + `max_new_tokens`{held_out}"
    check_positions(episodes.max_len(longest), config, setting=setting, packed=packed)


def check_lengths(args: Sampled, prompts: list[Any], *configs: Any, max_tokens: int) -> None:
    """ValueError if a sample may be longer than a model or a micro-batch allows."""
    episodes, rollouts = args.episodes, args.rollouts
    for config in configs:
        check_context(args, config)
    longest = episodes.max_len(rollouts)
    if episodes.one_turn:
        longest = min(longest, max(len(prompt.ids) for prompt in prompts) + rollouts.max_new_tokens)
    if longest > max_tokens:
        raise ValueError(
            f"a sample with its prompt may have {longest} tokens, and a micro-batch holds `max_tokens` {max_tokens}: "
            "raise it, or lower `max_new_tokens`"
        )


def load_models(args: Sampled, place: Place) -> tuple[Any, Any, Rollouts]:
    """The model, the reference model (None without a KL), and the rollouts with the model's own stop tokens."""
    from rlkit.data.chat import stop_token_ids

    model, reference = load_policies(place, has_reference=needs_reference(args), reference=args.reference)
    ends = stop_token_ids(place.tokenizer, model.config, model.generation_config) if place.template else ()
    return model, reference, replace(args.rollouts, stop_token_ids=(*ends, *args.rollouts.stop_token_ids))


def baseline_of(loss: grpo.Loss | distill.Loss) -> Any:
    """The function, or the moving average, that a group's rewards are compared with."""
    from rlkit import advantages
    from rlkit.controllers import moving_average

    if loss.baseline == "role_average":
        return moving_average(decay=loss.baseline_decay)
    return getattr(advantages, loss.baseline, lambda rewards, group_ids: rewards)  # noqa: ARG005


def clipped_loss(loss: ppo.Loss | distill.Loss, correction: Correction, aggregate: str = "token") -> PolicyLoss:
    """PPO's clipped surrogate."""
    from rlkit.loops import updates

    surrogate = partial(updates.clipped, clip_low=loss.clip_low, clip_high=loss.clip_high)
    return updates.PolicyLoss(surrogate, getattr(updates, f"per_{aggregate}"), correction.function())


def engine_of(args: Sampled, model: Model, output: Path, *, dtype: str | None = None) -> EngineSpec:
    """What the engine of the flags is opened with; `model` has the device."""
    episodes, rollouts = args.episodes, args.rollouts
    options = {"overlap": rollouts.overlap, "one_turn": episodes.one_turn}
    max_len = episodes.max_len(args.evaluation.longest(rollouts))
    return EngineSpec(args.engine, model, output, max_len=max_len, dtype=dtype, **options)


def with_engine(args: Sampled, place: Place, model: Any, train: Callable[[Any], Coroutine[Any, Any, Path]]) -> Path:
    """Returns `train(engine)`, with the engine of the flags."""
    from rlkit.run.sync import run_sync

    spec = engine_of(args, place.model, args.schedule.output, dtype=place.optim.dtype)

    async def run() -> Path:
        async with open_engine(spec, model, place.tokenizer) as engine:
            return await train(engine)

    return run_sync(run())
