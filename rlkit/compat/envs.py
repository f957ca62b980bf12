"""Environments written for other systems, each as an environment of rlkit.

    from functools import partial
    from rlkit.compat import envs

    env = partial(envs.rl2, step)        # in my_env.py: `--env my_env.py:env` calls it with the tokenizer

Every adapter takes the foreign object and then the tokenizer. What the policy samples is trained on, as everywhere: it
is never tokenised again, and a context that does not continue the previous one starts a further piece of the episode.
An exception of the foreign code ends the run, with a note that names the row. `adapted` chooses an adapter by the
parameters of a function, or by the library of a class or an object.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlkit.compat.games import gem, gymnasium, textarena
from rlkit.compat.libraries import Published, library_of, resolved, wrapper_for
from rlkit.compat.recognise import GAME_LIBRARIES, kind_of
from rlkit.compat.tasks import aviary, openenv, verifiers, verifiers_tasks
from rlkit.data.prompts import prompt_messages
from rlkit.rewards.failures import unwrapped
from rlkit.rewards.text import gold_answer, no_gold_answer
from rlkit.rollout.calling import call
from rlkit.rollout.envs.chat import Chat
from rlkit.rollout.envs.gym import gym_env
from rlkit.rollout.groups import Env, Prompt, Sampler, pieces_of
from rlkit.rollout.text import Text
from rlkit.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def adapted(foreign: Any, tokenizer: PreTrainedTokenizerBase) -> Env | None:
    """The environment of a foreign function, class or object, by its `kind_of`; None for an `env` or a `factory`.

    What `resolved` finds is made by its library's adapter, at most `at_once` episodes at a time. A class is called
    with the prompt if its first argument is required or named `prompt`, else without arguments (see `gym_env`).
    Errors: ValueError for what is no environment.
    """
    foreign = resolved(foreign)
    kind = kind_of(foreign)
    if isinstance(foreign, Published):
        env = _ADAPTERS[kind](foreign.made, tokenizer, **foreign.options)
        return env if foreign.at_once is None else _few_at_once(env, foreign.at_once)
    return None if kind in ("env", "factory") else _ADAPTERS[kind](foreign, tokenizer)


def of_prompt(make: Callable[[Prompt], Any], tokenizer: PreTrainedTokenizerBase) -> Env:
    """An environment of what `make(prompt)` returns: a game or environment of a library, or any object of `gym_env`."""

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        made = make(prompt)
        library = library_of(made)
        if library in GAME_LIBRARIES:
            return pieces_of(await _ADAPTERS[library](lambda _: made, tokenizer)(prompt, sample))
        if paste := wrapper_for(made):
            raise ValueError(paste)
        return pieces_of(await gym_env(lambda _: made, tokenizer=tokenizer)(prompt, sample))

    return env


def _few_at_once(env: Env, limit: int) -> Env:
    """The environment, of which at most `limit` episodes are played at a time."""
    gate = asyncio.Semaphore(limit)

    async def gated(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        async with gate:
            return pieces_of(await env(prompt, sample))

    return gated


def rl2(
    step: Callable[..., Any], tokenizer: PreTrainedTokenizerBase, *, reset: Callable[[Any], Any] | None = None,
    token_rewards: bool = False,
) -> Env:  # fmt: skip
    """RL2's environments, in plain text. Both forms of its step return a dict:

        async step(state, action, extra_info)    next_state, reward, score, done, extra_info
        async env_step(sample)                   next_state, reward, done
        async reset(extra_info)                  the pair (state, extra_info); optional

    The first state is the prompt, with its template, or the one of `reset`. A `next_state` that begins with
    `state + action` continues the sequence; any other starts a new one. `extra_info` is the row's column of that name,
    or else the row. A `sample` has `sample` (the row), `state_text`, `action_text`, `turn` and `metrics`, whose means
    are logged.

    The reward is the sum of the `reward`s, the score the sum of the `score`s (without them, of the rewards). With
    `token_rewards` each reward is at the end of its turn, as in RL2, and the terminal reward is 0.
    Checked against rl-square 0.0.2 (`step`, `reset`) and envs/searchr1.py of RL2 at commit 9161ede (`env_step`).
    """
    by_sample = "extra_info" not in inspect.signature(step).parameters

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        text, rewards, scores = Text(prompt, sample, tokenizer=tokenizer), list[float](), list[float]()
        row = deepcopy(prompt.row)  # the samples of a group share it, and steps write to it
        state, extra_info = text.start, row.get("extra_info", row)
        if reset is not None:
            opening = await call(reset, extra_info)
            if not (isinstance(opening, tuple | list) and len(opening) == 2):
                raise TypeError(f"reset must return the pair (state, extra_info), got {opening!r:.80}")
            state, extra_info = opening
        now = SimpleNamespace(sample=row, turn=0, metrics=defaultdict(list))
        while (turn := await text.reply(state)) is not None:
            now.state_text, now.action_text, now.turn = state, turn.text, now.turn + 1
            answer = await (call(step, now) if by_sample else call(step, state, turn.text, extra_info))
            _need(answer, "step", "reward", "done")
            rewards.append(answer["reward"])
            scores.append(answer.get("score", answer["reward"]))
            if answer["done"]:
                break
            if not isinstance(_need(answer, "step", "next_state")["next_state"], str):
                raise TypeError(f"next_state must be text where done is false, got {answer['next_state']!r:.80}")
            state, extra_info = answer["next_state"], answer.get("extra_info", extra_info)
        info = {"metrics": {name: sum(values) / len(values) for name, values in now.metrics.items() if values}}
        given: Any = {"turn_rewards": rewards} if token_rewards else {"reward": sum(rewards)}
        return text.end(**given, score=sum(scores), info=info)

    return env


def _need(answer: Any, method: str, *keys: str) -> dict[str, Any]:
    """The dict that a method returned; ValueError, with what to return, where a key is missing."""
    found = f"a dict with the keys {sorted(answer)}" if isinstance(answer, Mapping) else f"{answer!r:.80}"
    if not isinstance(answer, Mapping) or not {*keys} <= {*answer}:
        raise ValueError(f"{method} must return a dict with {', '.join(keys)}, got {found}")
    return dict(answer)


def interact(interact: Callable[[list[dict[str, Any]]], Any], tokenizer: PreTrainedTokenizerBase) -> Env:
    """RL2's first interface, `interact(messages)`: it returns the messages to add, or none, which ends the episode.

    The prompt is the row's conversation. The reward is 0 here: `reward_fn(messages, answer)` of the same file judges
    the whole conversation as the reward function (`--reward FILE.py:reward_fn`, or `scorer(reward_fn, ...)`).
    Checked against envs/searchr1.py of RL2 at commit 71efce7.
    """

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        async for _ in chat:
            if not (answers := await call(interact, chat.messages)):
                break
            if not isinstance(answers, list | tuple) or not all(isinstance(answer, dict | str) for answer in answers):
                raise ValueError(f"interact must return a list of messages to add, got {answers!r:.80}")
            chat.add(*answers)
        return chat.end(reward=0.0)

    return env


def openrlhf(make: Callable[[], Any], tokenizer: PreTrainedTokenizerBase) -> Env:
    """OpenRLHF's agent classes, in plain text: `make()` (the class itself) returns a new one for each episode.

        async reset(states) -> observation                             states: observation, label
        async step(states)  -> rewards, environment_feedback, done     states: observation_text, action_text, label

    All four are dicts. The first observation is the prompt with its template, and `label` the row's column of that
    name (none for a row without it). An action ends with its end-of-turn token, and the feedback follows it as it
    is. The reward is the sum of the `rewards`, the score the last `scores` (without one, the sum so far), and the last
    `extra_logs` are logged. Returned `sampling_params` are ignored: the rollout sets them. Follows
    openrlhf/utils/agent.py at commit 04655bc.
    """

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        agent, text = make(), Text(prompt, sample, tokenizer=tokenizer)
        label = {name: value for name, value in prompt.row.items() if name == "label"}
        total, score, logs = 0.0, 0.0, dict[str, Any]()
        opening = await call(agent.reset, {"observation": text.start} | label)
        observation = _need(opening, "reset", "observation")["observation"]
        while (turn := await text.reply(observation)) is not None:
            action = tokenizer.decode(turn.ids, skip_special_tokens=False)
            states = {"observation_text": observation, "action_text": action, "sampling_params": None}
            answer = _need(await call(agent.step, states | label), "step", "rewards", "environment_feedback", "done")
            total += float(answer["rewards"])
            score, logs = float(answer.get("scores", total)), answer.get("extra_logs") or {}
            if answer["done"]:
                break
            observation += f"{action}{answer['environment_feedback']}"
        metrics = {name: float(value) for name, value in logs.items()}
        return text.end(reward=total, score=score, info={"metrics": metrics})

    return env


def rl4llm(mdp_env: Any, tokenizer: PreTrainedTokenizerBase) -> Env:
    """An object of a subclass of rl4llm's `BaseMDPEnv`: its interaction loop plays one sample, and samples from here.

    Or the class, or a partial of it, whose other arguments are set here. Its episodes have no reward of their own:
    `--reward` judges their messages.

    Its `_prepare_initial_state`, `_run_interaction_loop(env_state, llm, sampling_params)` and `_calculate_rewards` are
    called in a thread; `llm.generate` continues the text that the loop renders. The rollout sets the sampling
    parameters. Rows have `messages` (or `prompt`) and `ground_truth`; its own data set and group size are not used.

    The reward of an object is its transformed reward; those of its reward functions are logged.
    Checked against core/base_env.py and envs/sgl_tool_env.py of rl4llm at commit 0180bd3.
    """

    judged = not callable(mdp_env)
    mdp_env = mdp_env if judged else _of_rl4llm(mdp_env, tokenizer)

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        text, loop = Text(prompt, sample, tokenizer=tokenizer), asyncio.get_running_loop()

        def generate(prompts: Sequence[str], **_: Any) -> list[dict[str, str]]:
            turn = asyncio.run_coroutine_threadsafe(text.reply(prompts[0]), loop).result()
            return [{"text": turn.text if turn else ""}]

        def play() -> tuple[list[dict[str, str]], float, dict[str, float]]:
            if (truth := gold_answer(prompt.row)) is None:
                raise no_gold_answer(prompt.row)
            batch = {"messages": [prompt_messages(prompt.row)], "ground_truth": [truth]}
            start = mdp_env._prepare_initial_state(batch)
            start.sample_states = start.sample_states[:1]  # of `group_size` copies
            end = mdp_env._run_interaction_loop(start, SimpleNamespace(generate=generate), {})
            total, parts = mdp_env._calculate_rewards(end.sample_states) if judged else ([0.0], {})
            said = [{"role": m.role, "content": m.content} for m in end.sample_states[0].messages]
            return said, float(total[0]), {name: float(values[0]) for name, values in parts.items()}

        said, reward, metrics = await call(play)
        return text.end(reward=reward, info={"messages": said, "metrics": metrics})

    return env


def _of_rl4llm(make: Callable[..., Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    """An environment of the class, with a row and a reward function that nothing here asks."""
    from datasets import Dataset

    base = next(one for one in unwrapped(make).__mro__ if one.__name__ == "BaseMDPEnv")
    part = type("Unasked", (sys.modules[base.__module__].BaseRewardFunction,), {"__call__": lambda *_, **__: 0.0})
    row = {"messages": [{"role": "user", "content": "-"}], "ground_truth": "-"}
    given = {"dataset": Dataset.from_list([row]), "reward_functions": [part("unasked")]}
    return make(tokenizer=tokenizer, batch_size=1, group_size=1, **given)


_ADAPTERS: dict[str, Callable[..., Env]] = {
    "gymnasium": gymnasium, "gem": gem, "textarena": textarena, "aviary": aviary, "openenv": openenv,
    "verifiers": verifiers, "verifiers_tasks": verifiers_tasks, "rl2": rl2, "interact": interact,
    "openrlhf": openrlhf, "rl4llm": rl4llm, "object": of_prompt,
}  # fmt: skip
