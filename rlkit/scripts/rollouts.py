"""Flags of the reinforcement learning scripts: prompts, environment, reward, rollout correction and engine."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from inspect import isawaitable
from typing import Annotated, Any, Literal

from rlkit._extras import lacks
from rlkit.ranks import is_first
from rlkit.run.console import data_progress
from rlkit.scripts.common import (
    begin,
    check_ranks,
    function_of,
    load_policies,
    load_tokenizer,
    log,
    note_strings,
    template_file,
    warn_of_clip,
    warn_of_repeats,
    warn_of_warmup,
)
from rlkit.settings import Count, Limit, Positive, Rollouts, Share, check, is_default, named, refuse_if

_OF_MESSAGES = ("tools", "interact", "verifiers", "gymnasium", "gem", "textarena")  # kinds of environments


@dataclass(frozen=True)
class Episodes:
    """Prompts, environment and reward."""

    reward: str | tuple[str, ...] | None = None
    """FILE.py:FUNCTION or MODULE:FUNCTION that scores a completion; None: the environment's own reward.
    Several are summed with weights and logged as reward/FUNCTION, e.g. a.py:right b.py:form=0.1 (0: only logged)"""
    env: str | None = None
    """FILE.py:NAME of an environment: `async def env(prompt, sample)`, a function of the tokenizer that returns one, a
    class with reset and step, or one for RL2, OpenRLHF, verifiers, Gymnasium, GEM or TextArena
    (docs/environments.md). None: one question, one answer"""
    tools: tuple[str, ...] = ()
    """FILE.py:FUNCTION of each function that the model may call; the first turn without a call is its answer"""
    tool_calls: Literal["hermes", "json", "pythonic"] = "hermes"
    """syntax of a call: <tool_call> with JSON (Qwen), only JSON (Llama 3, Mistral), or [f(x=1)]"""
    max_prompt_tokens: Count = 1024
    """drop (and report) prompts with more tokens"""
    max_turns: Count | None = None
    """maximum turns of an episode; None: the environment's own limit"""
    max_total_tokens: Count | None = None
    """maximum context of an episode, prompt and all turns; None: max_prompt_tokens + max_new_tokens"""
    max_sampled_tokens: Count | None = None
    """maximum sampled tokens of an episode, all turns together; None: no limit"""
    reward_timeout: Positive = 30.0
    """seconds that one call of the reward function may take"""
    reward_max_failed: Share = 0.0
    """share of the last 100 samples whose reward may fail; failed samples do not train. 0: the first ends the run"""
    eval_limit: Count = 128
    """maximum number of held-out prompts"""
    eval_kl: bool = False
    """measure the KL to the reference model (which is loaded for it) on held-out prompts"""

    def __post_init__(self) -> None:
        check(self)
        one_turn = self.env is None and not self.tools
        self.rewards()
        refuse_if(self.reward_max_failed == 1, "`reward_max_failed` must be below 1: some samples have to train")
        refuse_if(not self.reward and self.env is None, "give `reward`, `env` or both: something has to judge")
        refuse_if(
            self.max_turns is not None and one_turn, "`max_turns` is for `env` or `tools`: else there is one turn"
        )
        refuse_if(
            self.max_sampled_tokens is not None and one_turn,
            "`max_sampled_tokens` is for many turns: give `env` or `tools`, or use `max_new_tokens`",
        )
        refuse_if(
            (self.env is not None or not self.tools) and not is_default(self, "tool_calls"),
            "`tool_calls` says how calls of `tools` are read where there is no `env`",
        )

    def rewards(self) -> dict[str, tuple[str, float | None]]:
        """(FILE.py:FUNCTION, weight or None) of each reward function, by its name: FUNCTION, or FILE.FUNCTION where
        several functions are named FUNCTION.
        """
        from rlkit.rewards.call import RESERVED

        given = [_parsed(text) for text in ((self.reward,) if isinstance(self.reward, str) else self.reward or ())]
        names = [spec.rpartition(":")[2] for spec, *_ in given]
        found: dict[str, tuple[str, float | None]] = {}
        for name, (spec, weight, text) in zip(names, given):
            place = spec.rpartition(":")[0]
            stem = os.path.basename(place)[:-3] if place.endswith(".py") else place.rpartition(".")[2]
            name = f"{stem}.{name}" if names.count(name) > 1 else name
            finite, taken = math.isfinite(weight or 0.0), name in RESERVED and (len(given) > 1 or weight is not None)
            refuse_if(not finite, f"`reward` {text}: the weight must be a finite number, as in {spec}=0.5")
            refuse_if(taken, f"`reward` {text}: reward/{name} is a metric of every run; rename the function")
            both = f"two functions {name}, {found.get(name, [''])[0]} and {spec}, and each is logged as reward/{name}"
            fix = "rename one, or import it under another name in a file of your own"
            refuse_if(name in found, f"`reward` names {both}: {fix}")
            found[name] = spec, weight
        nothing = found and all(weight == 0 for _, weight in found.values())
        refuse_if(nothing, "`reward` has only weights of 0, so nothing would train: give one function another weight")
        return found

    def max_len(self, rollouts: Rollouts) -> int:
        """The longest context of an episode."""
        return self.max_total_tokens or self.max_prompt_tokens + rollouts.max_new_tokens


@dataclass(frozen=True)
class Correction:
    """Importance weights of tokens that older weights, or an engine with other numerics, sampled."""

    correction: Literal["tis", "icepop", "none"] = "tis"
    """weight of tokens sampled by older weights or an engine with other numerics: tis caps it at --tis-max-weight.
    icepop drops tokens whose weight is outside [0.5, 5]; none gives all tokens weight 1"""
    tis_max_weight: Limit = 2.0
    """cap of the weight with --correction tis (inf: no cap)"""

    def __post_init__(self) -> None:
        check(self)
        capped = self.correction == "tis" or is_default(self, "tis_max_weight")
        refuse_if(not capped, "`tis_max_weight` is for `correction` tis")

    def function(self) -> Any:
        """The function from log-ratio to weight."""
        import torch

        from rlkit.losses import icepop, tis

        tis_capped = partial(tis, max_weight=self.tis_max_weight)
        return {"tis": tis_capped, "icepop": icepop, "none": torch.ones_like}[self.correction]


@dataclass(frozen=True)
class Engine:
    """The engine that samples."""

    engine: Annotated[str, named("local", "sglang")] = "local"
    """local: rlkit's own engine, for small models; sglang: SGLang servers. Or FILE.py:FUNCTION, which makes an engine
    of your own from the model's path (docs/engines.md)"""
    engine_urls: tuple[str, ...] = ()
    """URLs of SGLang servers of `model` on this machine, as http://127.0.0.1:30000.
    None: launch one here with 40% of the first GPU's free memory"""
    max_batch: Count = 64
    """sequences that the local engine decodes at once"""
    compile: bool = False
    """torch.compile the local engine's decoding; ten seconds or more at the start"""
    engine_threads: Count = 1
    """CPU threads of the local engine (with --overlap)"""
    engine_cpus: tuple[int, ...] = ()
    """CPUs that the local engine may run on (with --overlap); none: all"""

    def __post_init__(self) -> None:
        check(self)
        served, own_threads = self.engine == "sglang", has_own_threads(self)
        present = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
        refuse_if(served and not find_spec("aiohttp"), lacks("aiohttp", "http", "`engine` sglang needs"))
        refuse_if(self.engine_urls and not served, "`engine_urls` are SGLang servers: add `engine` sglang")
        self._check_urls()
        other = self.engine != "local"
        refuse_if(
            other and not (is_default(self, "compile") and is_default(self, "max_batch")),
            "`compile` and `max_batch` are for `engine` local",
        )
        refuse_if(other and own_threads, "`engine_threads` and `engine_cpus` are for `engine` local")
        refuse_if(self.engine_cpus and not present, "`engine_cpus` needs Linux: drop it")
        refuse_if(
            not {*self.engine_cpus} <= present,
            f"`engine_cpus` {self.engine_cpus}: this process may not use all of them",
        )

    def _check_urls(self) -> None:
        from rlkit.rollout.engines.hosts import refuse_elsewhere

        for url in self.engine_urls:
            try:
                refuse_elsewhere(url, instead="start one here, or drop the flag to launch one (docs/sglang.md)")
            except ValueError as error:
                refuse_if(True, f"`engine_urls` {error}")


def has_own_threads(engine: Engine) -> bool:
    """Whether threads or CPUs of the engine's process are set."""
    return not (is_default(engine, "engine_threads") and is_default(engine, "engine_cpus"))


def check_rl(args: Any) -> None:
    """Refuse combinations of flags of several settings that have no effect or fail late (ValueError)."""
    check_ranks(args.model.parallel)
    penalties, rollouts = args.penalties, args.rollouts
    moves, has_reference = penalties.ref_sync_steps, needs_reference(args)
    refuse_if(args.reference and not has_reference, "`reference` requires `kl_coef`, `kl_limit` or `eval_kl`")
    refuse_if(moves and not has_reference, "`ref_sync_steps` requires `kl_coef` above 0")
    refuse_if(moves and args.lora.lora_rank, "`ref_sync_steps` copies whole weights: not with `lora_rank`")
    refuse_if(args.episodes.eval_kl and not args.data.eval_data, "`eval_kl` requires `eval_data`")
    refuse_if(rollouts.eval_samples > 1 and not args.data.eval_data, "`eval_samples` requires `eval_data`")
    refuse_if(
        has_own_threads(args.engine) and not rollouts.overlap, "`engine_threads` and `engine_cpus` are for `overlap`"
    )
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


def check_servers(urls: Sequence[str]) -> None:
    """ValueError if none of the addresses takes a connection: before a model is loaded."""
    from urllib.parse import urlsplit

    said = []
    for url in urls:
        parts = urlsplit(url)
        try:
            socket.create_connection((parts.hostname, parts.port or 80), timeout=5).close()
        except OSError as error:
            said.append(f"{url} ({error.strerror or error})")
        else:
            return
    refuse_if(
        said,
        f"`engine_urls`: no SGLang server answers at {', '.join(said)}: start one with `python -m sglang.launch_server "
        "--model-path MODEL --port 30000`, or drop the flag to launch one here",
    )


def needs_reference(args: Any) -> bool:
    """Whether the run needs a reference model."""
    return args.penalties.has_kl or args.episodes.eval_kl


def open_task(args: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The flags (see `begin`), the tokenizer and the `Task`; `options` are further fields of the task."""
    check_rl(args)
    own_engine(args.engine)
    if is_first():
        check_servers(args.engine.engine_urls)
    from rlkit.data.rows import PROMPT

    rows = args.data.rows(PROMPT, limit=args.episodes.eval_limit)  # before torch is loaded
    rewards, foreign = reward_functions(args.episodes, *rows), load_env(args.episodes)
    check_env(args, foreign)
    args = begin(args)
    from rlkit.loops.rl import Task
    from rlkit.model.pretrained import load_config

    others = args.reference, getattr(args, "critic", None)
    tokenizer = load_tokenizer(args.model.model, *others, chat_template=template_file(args))
    env, score = environment(args, tokenizer, rewards, foreign)
    with data_progress():
        prompts, held_out = (render(args, tokenizer, part) for part in rows)
    note_strings(args.data, rows[0])
    warn_of_repeats("--prompts-per-step", args.rollouts.prompts_per_step, len(prompts))
    config = load_config(args.model.model).get_text_config()
    check_lengths(args, prompts + held_out, config)
    beyond = [i for i in args.rollouts.stop_token_ids if not 0 <= i < config.vocab_size]
    refuse_if(beyond, f"`stop_token_ids` {beyond}: the model's token ids are 0 to {config.vocab_size - 1}")
    held_out = held_out if args.schedule.eval_steps else []
    return args, tokenizer, Task(prompts, score, env=env, eval_prompts=held_out, **options)


def render(args: Any, tokenizer: Any, rows: list[Any]) -> list[Any]:
    """The prompts of the rows, tokenized."""
    from rlkit.data.prompts import rl_prompts

    if not rows:
        return []
    longest, total = args.episodes.max_prompt_tokens, args.episodes.max_len(args.rollouts) - 1  # room for one token
    try:
        return rl_prompts(
            rows, tokenizer=tokenizer, max_prompt_tokens=min(longest, total), system_prompt=args.data.system_prompt,
            apply_chat_template=bool(args.data.chat_template), tools=load_tools(args.episodes) or None,
            template_args=args.data.template() or None,
        )[0]  # fmt: skip
    except ValueError as error:
        if total >= longest:
            raise
        given = f"the {total} tokens that `max_total_tokens` {total + 1} leaves for a prompt"
        raise ValueError(str(error).replace(f"`max_prompt_tokens` {total}", given)) from None


def load_tools(episodes: Episodes) -> list[Any]:
    """The functions that the model may call."""
    return [function_of("tools", spec) for spec in episodes.tools]


def reward_functions(episodes: Episodes, *parts: Any) -> dict[str, Any]:
    """The reward functions of the flags, by name, checked against the rows of each of the `parts` of the data.

    ValueError for a function that does not exist, that cannot be called with what a sample has, or that needs a column
    which a row lacks. Does not import torch.
    """
    from rlkit.compat.rewards import adapted
    from rlkit.data.rows import drop
    from rlkit.rewards.call import ONE_TURN, check_signature
    from rlkit.rewards.rows import check_rows
    from rlkit.rewards.text import gold_answer

    one_turn = episodes.env is None and not episodes.tools
    found = {}
    for name, (spec, _) in episodes.rewards().items():
        function = function_of("reward", spec)
        try:
            found[name] = function = adapted(function)
            check_signature(function, set(ONE_TURN) if one_turn else None)
            check_rows(function, *parts)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`reward` {spec}: {error}") from None
    for rows in parts if found else ():
        golds = [(index, gold_answer(row)) for index, row in enumerate(rows)]
        if any(gold is not None for _, gold in golds):
            why = "have no gold answer (missing or null)"
            drop(rows, golds, lambda gold: gold is None, what="rows", why=why, keep=True)
    return found


def load_env(episodes: Episodes) -> Any:
    """The object that `env` names, or None; ValueError for one that is no environment. Does not import torch."""
    from rlkit.compat.recognise import kind_of

    if episodes.env is None:
        return None
    foreign = function_of("env", episodes.env)
    try:
        kind_of(foreign)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`env` {episodes.env}: {error}") from None
    return foreign


def check_env(args: Any, foreign: Any) -> None:
    """Refuse (ValueError) an `env` without any reward, and messages without a chat template. Does not import torch."""
    from rlkit.compat.recognise import kind_of

    how, kind = args.episodes, kind_of(foreign) if foreign is not None else "tools" if args.episodes.tools else ""
    refuse_if(
        kind == "interact" and not how.reward,
        f"`env` {how.env}: interact(messages) gives no reward: add its reward_fn(messages, answer) as `reward`",
    )
    if args.data.chat_template or kind not in (*_OF_MESSAGES, "object"):
        return
    if kind == "object":  # whose reset may give token ids
        log.warning("--env %s: texts of reset and step are messages for the chat template all the same", how.env)
        return
    what, why = f"`env` {how.env}" if foreign is not None else "`tools`", "works on messages for the chat template"
    fix = "drop --no-chat-template; a base model needs a tokenizer.chat_template that writes only the contents"
    raise ValueError(f"{what} {why}: {fix}")


def environment(
    args: Any, tokenizer: Any, rewards: dict[str, Any] | None = None, foreign: Any = None
) -> tuple[Any, Any]:
    """The `env` and the `score` of `rlkit.rollout.rollout`.

    `rewards` are the `reward_functions` and `foreign` is the object of `load_env`, if loaded already.
    """
    from rlkit.compat.envs import adapted
    from rlkit.rewards.combine import weighted
    from rlkit.rewards.episodes import made
    from rlkit.rewards.scoring import env_rewards, scorer
    from rlkit.rollout.envs import tools
    from rlkit.rollout.limits import limited
    from rlkit.rollout.rollout import single_turn

    how = args.episodes
    env: Any = single_turn
    if how.env is not None:
        foreign = foreign or load_env(how)
        spec = how.env
        env = made(lambda: adapted(foreign, tokenizer) or _make_env(foreign, tokenizer, spec=spec), foreign, spec)
    elif how.tools:
        chat: Any = {"system_prompt": args.data.system_prompt, "template_args": args.data.template() or None}
        parse = getattr(tools, f"{how.tool_calls}_calls")
        env = tools.tool_env(load_tools(how), tokenizer=tokenizer, parse=parse, **chat)
    if env is not single_turn:
        bounds = {"max_total_tokens": how.max_len(args.rollouts), "max_sampled_tokens": how.max_sampled_tokens}
        env = limited(env, max_turns=how.max_turns, **bounds)
    if not how.reward:
        return env, env_rewards(max_failed=how.reward_max_failed)
    functions = rewards or reward_functions(how)
    weights = {name: weight for name, (_, weight) in how.rewards().items()}
    reward, *_ = functions.values()
    if [*weights.values()] != [None]:
        weights = {name: 1.0 if weight is None else weight for name, weight in weights.items()}
        reward = weighted(functions, weights=weights, timeout_s=how.reward_timeout)
    return env, scorer(reward, tokenizer=tokenizer, timeout_s=how.reward_timeout, max_failed=how.reward_max_failed)


def _parsed(text: str) -> tuple[str, float | None, str]:
    """FILE.py:FUNCTION, the weight after `=` (None without one, NaN for what is no number), and the text itself."""
    _, equals, number = text.rpartition(":")[2].partition("=")
    try:
        weight = float(number) if equals else None
    except ValueError:
        weight = math.nan
    return text.removesuffix(equals + number), weight, text


def _make_env(function: Any, tokenizer: Any, *, spec: str) -> Any:
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


def check_lengths(args: Any, prompts: list[Any], config: Any) -> None:
    """ValueError if a sample may be longer than the model or a micro-batch allows."""
    how, max_tokens = args.episodes, args.optim.max_tokens
    longest, positions = how.max_len(args.rollouts), getattr(config, "max_position_embeddings", None)
    given = "`max_total_tokens`" if how.max_total_tokens else "`max_prompt_tokens` + `max_new_tokens`"
    if positions is not None and longest > positions:
        raise ValueError(f"{given} is {longest}, and the model has {positions} positions: lower it")
    if how.env is None and not how.tools:
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


@asynccontextmanager
async def open_engine(args: Any, model: Any, tokenizer: Any) -> AsyncIterator[Any]:
    """The engine of the flags: the training model itself where possible, else one with its own weights on rank 0."""
    from rlkit.model.sharding import mesh_of
    from rlkit.ranks import rank, world_size

    max_len = args.episodes.max_len(args.rollouts)
    if args.engine.engine == "local" and mesh_of(model) is None and not args.rollouts.overlap:
        from rlkit.rollout.engines.local import LocalEngine

        options = _local_options(args, max_len)
        yield LocalEngine(model, tokenizer=tokenizer, **options)
        return
    if world_size() == 1:
        async with _own_engine(args, max_len) as engine:
            yield engine
        return
    from rlkit.rollout.shared import SharedEngine

    async with _own_engine(args, max_len) if rank() == 0 else nullcontext() as engine:
        yield SharedEngine(engine)


def own_engine(engine: Engine) -> Any:
    """The function of `--engine FILE.py:FUNCTION`; None for an engine of rlkit."""
    return function_of("engine", engine.engine) if ":" in engine.engine else None


@asynccontextmanager
async def _engine_of_user(args: Any, max_len: int) -> AsyncIterator[Any]:
    """The engine that the function of `--engine` makes; ValueError for an object that is none."""
    from rlkit.rollout.calling import accepted

    make, spec = own_engine(args.engine), args.engine.engine
    engine = make(args.model.model, **accepted(make, {"device": args.model.device, "max_len": max_len}))
    engine = await engine if isawaitable(engine) else engine
    members = ("generate", "abort", "update_weights", "progress", "close")
    if missing := [name for name in members if not hasattr(engine, name)]:
        what = f"must return an engine (rlkit.types.Engine), got {type(engine).__name__} without {', '.join(missing)}"
        raise ValueError(f"`engine` {spec} {what}")
    try:
        yield engine
    finally:
        await engine.close()


def _local_options(args: Any, max_len: int) -> dict[str, Any]:
    """Arguments of a `LocalEngine` from the flags."""
    how, several_turns = args.engine, bool(args.episodes.env or args.episodes.tools)
    return {"max_batch": how.max_batch, "max_len": max_len, "compile": how.compile, "keep_turns": several_turns}


@asynccontextmanager
async def _own_engine(args: Any, max_len: int) -> AsyncIterator[Any]:
    """A local engine in its own process, or SGLang; a server launched here ends with it."""
    how, model = args.engine, args.model
    if ":" in how.engine:
        async with _engine_of_user(args, max_len) as engine:
            yield engine
        return
    if how.engine == "local":
        from rlkit.rollout.engines.process import launch as launch_process

        options = {**_local_options(args, max_len), "device": model.device}
        threads = {"num_threads": how.engine_threads, "cpus": how.engine_cpus}
        async with await launch_process(model.model, **options, **threads) as engine:
            yield engine
        return
    from rlkit.model.pretrained import load_config
    from rlkit.rollout.engines.sglang import SGLang, launch

    with ExitStack() as stack:
        shared = () if model.device == "cpu" else ("--mem-fraction-static", "0.4")  # the GPU also trains
        if model.deterministic and model.device != "cpu":
            shared = (*shared, "--enable-deterministic-inference")
        urls = how.engine_urls or [stack.enter_context(launch(model.model, device=model.device, args=shared)).url]
        size = load_config(model.model).get_text_config().vocab_size
        async with SGLang(list(urls), vocab_size=size) as engine:
            yield engine
