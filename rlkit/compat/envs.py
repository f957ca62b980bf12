"""Environments written for other systems, each as an environment of rlkit.

    from functools import partial
    from rlkit.compat import envs

    env = partial(envs.rl2, step)        # in my_env.py: `--env my_env.py:env` calls it with the tokenizer

Every adapter takes the foreign object and then the tokenizer. What the policy samples is trained on, as everywhere: it
is never tokenised again, and a context that does not continue the previous one starts a further piece of the episode.
An exception of the foreign code ends the run, with a note that names the row. `adapted` chooses an adapter by the
parameters of a function or the base of a class.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlkit.agents.endpoint import agent_env
from rlkit.compat.recognise import kind_of, takes_prompt
from rlkit.data.prompts import prompt_messages
from rlkit.rollout.calling import call
from rlkit.rollout.envs.chat import Chat, Turn
from rlkit.rollout.envs.gym import Step, gym_env
from rlkit.rollout.groups import Env, Prompt, Sampler
from rlkit.rollout.text import Text
from rlkit.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Make = Callable[[Prompt], Any]
_SEEDING = threading.Lock()  # GEM and TextArena seed, and draw from, Python's global generator


def adapted(foreign: Callable[..., Any], tokenizer: PreTrainedTokenizerBase) -> Env | None:
    """The environment of a foreign function or class, by its `kind_of`; None for an `env` or a `factory`.

    `load_environment` and the constructors of libraries' classes are called without arguments. Any other class is
    called with the prompt if its first argument is required or named `prompt`, else without arguments (see `gym_env`).
    Errors: ValueError for an object that is no environment.
    """
    kind = kind_of(foreign)
    if kind == "object":
        made_alone = isinstance(foreign, type) and not takes_prompt(foreign)
        return gym_env(partial(_of_library, (lambda _: foreign()) if made_alone else foreign), tokenizer=tokenizer)
    if kind == "verifiers":
        return verifiers(foreign(), tokenizer)
    if kind in ("env", "factory"):
        return None
    return _ADAPTERS[kind]((lambda _: foreign()) if kind in _GAMES else foreign, tokenizer)


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

    Its `_prepare_initial_state`, `_run_interaction_loop(env_state, llm, sampling_params)` and `_calculate_rewards` are
    called in a thread; `llm.generate` continues the text that the loop renders. The rollout sets the sampling
    parameters. Rows have `messages` (or `prompt`) and `ground_truth`; its own data set and group size are not used.

    The reward is the environment's transformed reward; those of its reward functions are logged.
    Checked against core/base_env.py and envs/sgl_tool_env.py of rl4llm at commit 0180bd3.
    """

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        text, loop = Text(prompt, sample, tokenizer=tokenizer), asyncio.get_running_loop()

        def generate(prompts: Sequence[str], **_: Any) -> list[dict[str, str]]:
            turn = asyncio.run_coroutine_threadsafe(text.reply(prompts[0]), loop).result()
            return [{"text": turn.text if turn else ""}]

        def play() -> tuple[list[dict[str, str]], float, dict[str, float]]:
            batch = {"messages": [prompt_messages(prompt.row)], "ground_truth": [prompt.row["ground_truth"]]}
            start = mdp_env._prepare_initial_state(batch)
            start.sample_states = start.sample_states[:1]  # of `group_size` copies
            end = mdp_env._run_interaction_loop(start, SimpleNamespace(generate=generate), {})
            total, parts = mdp_env._calculate_rewards(end.sample_states)
            said = [{"role": m.role, "content": m.content} for m in end.sample_states[0].messages]
            return said, float(total[0]), {name: float(values[0]) for name, values in parts.items()}

        said, reward, metrics = await call(play)
        return text.end(reward=reward, info={"messages": said, "metrics": metrics})

    return env


def gymnasium(make: Make, tokenizer: PreTrainedTokenizerBase, *, token_rewards: bool = False) -> Env:
    """Text games with Gymnasium's interface: `make(prompt)` returns a new `gymnasium.Env` for each episode.

        reset(seed, options) -> observation, info
        step(text)           -> observation, reward, terminated, truncated, info

    Observations are text, as user messages; an action is the text of a turn. Wrap an environment with others
    (`gymnasium.wrappers.TransformObservation`, `TransformAction`). The seed is the prompt's index, so the samples of
    a group play one game; `options` is the row. The reward is the sum of the steps' rewards (see `gym_env`, also for
    `token_rewards`). An episode that ends by `truncated` alone is truncated. Checked against gymnasium 1.4.0.
    """
    return gym_env(partial(_Steps, make, nullcontext(), True), tokenizer=tokenizer, token_rewards=token_rewards)


def gem(make: Make, tokenizer: PreTrainedTokenizerBase, *, token_rewards: bool = False) -> Env:
    """GEM's environments: `make(prompt)` returns a new one for each episode, e.g. `gem.make(prompt.row["env"])`.

    Its interface is Gymnasium's without `options`; see `gymnasium`. The texts `prefix` and `suffix` of info (a board)
    stand before and after an observation, as its ObservationWrapper writes them. GEM seeds Python's global
    generator: the games of a process are made and reset one after another. Checked against gem-llm 0.1.0.
    """
    return gym_env(partial(_Steps, make, _SEEDING, False), tokenizer=tokenizer, token_rewards=token_rewards)


def _of_library(make: Make, prompt: Prompt) -> Any:
    """What `make` returns; a game of GEM or TextArena as the object that its adapter makes of it."""
    made = make(prompt)
    bases = {base.__module__.partition(".")[0] for base in type(made).__mro__}
    if "gem" in bases:
        return _Steps(lambda _: made, _SEEDING, False, prompt)
    return _Arena(lambda _: made, (), prompt) if "textarena" in bases else made


class _Steps:
    """An environment whose `step` returns five values, as an object for `gym_env`. GEM's has no `options`."""

    def __init__(self, make: Any, lock: Any, takes_options: bool, prompt: Prompt) -> None:
        self._make, self._lock, self._prompt, self._is_gem = make, lock, prompt, not takes_options
        self._env: Any = None
        self._options = {"options": dict(prompt.row)} if takes_options else {}

    def reset(self) -> str:
        with self._lock:
            self._env = self._make(self._prompt)
            return self._shown(*self._env.reset(seed=self._prompt.index, **self._options))

    def step(self, turn: Turn) -> Step:
        observation, reward, terminated, truncated, info = self._env.step(turn.text)
        return Step(self._shown(observation, info), reward, bool(terminated), bool(truncated and not terminated))

    def _shown(self, observation: Any, info: Mapping[str, Any]) -> str:
        text = self._text(observation)
        before, after = (info.get("prefix", ""), info.get("suffix", "")) if self._is_gem else ("", "")
        after = "" if after in text else after  # GEM's own wrapper has written it
        return ("" if before in text else before) + text + "\n" * (bool(after) and not text.endswith("\n")) + after

    def close(self) -> None:
        getattr(self._env, "close", lambda: None)()

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        what = f"{type(self._env).__name__}: an observation must be text, got {observation!r:.80}"
        raise TypeError(f"{what}; fix: wrap the environment in gymnasium.wrappers.TransformObservation")


def textarena(make: Make, tokenizer: PreTrainedTokenizerBase, *, opponents: Sequence[Callable[[str], str]] = ()) -> Env:
    """TextArena's games: `make(prompt)` returns a new one for each episode, e.g. `textarena.make("TicTacToe-v0-raw")`.

        reset(num_players, seed)                 step(action) -> done, info
        get_observation() -> player, messages    close() -> rewards, info

    The policy is player 0 and reads the messages that are new to it, without its own. Each of `opponents` is one of the
    other players, a function from all text so far to its action (TextArena's agents are such). Games must be the raw
    version: the library's text wrapper repeats the whole game every turn. The seed is the prompt's index. The reward
    is the one of player 0 at the end, or 0 if a limit of the episode ends the game. Checked against textarena 0.7.4.
    """
    return gym_env(partial(_Arena, make, opponents), tokenizer=tokenizer)


class _Arena:
    """A game of TextArena, as an object for `gym_env`."""

    def __init__(self, make: Any, opponents: Sequence[Any], prompt: Prompt) -> None:
        self._make, self._opponents, self._prompt = make, opponents, prompt
        self._heard: dict[int, str] = defaultdict(str)

    def reset(self) -> Any:
        with _SEEDING:
            self._game = self._make(self._prompt)
            self._game.reset(num_players=1 + len(self._opponents), seed=self._prompt.index)
        return self._next(done=False).observation

    def step(self, turn: Turn) -> Step:
        return self._next(done=self._game.step(turn.text)[0])

    def _next(self, *, done: bool) -> Step:
        """Let the opponents play until it is the policy's turn."""
        while not done:
            player, messages = self._game.get_observation()
            if isinstance(messages, str):
                raise TypeError("the game gives its whole history as text: make its raw version, 'NAME-raw'")
            names = {-1: "GAME", **self._game.state.role_mapping}
            said = "\n".join(f"[{names[m[0]]}] {m[1]}" for m in messages if player or m[0] != player)
            if not player:
                return Step(said)
            self._heard[player] += f"\n{said}"
            done = self._game.step(self._opponents[player - 1](self._heard[player]))[0]
        return Step("", self._game.close()[0][0], done=True)


def openenv(
    connect: Make, tokenizer: PreTrainedTokenizerBase, *, act: Callable[[str], Any], show: Callable[[Any], str],
    token_rewards: bool = False,
) -> Env:  # fmt: skip
    """OpenEnv's clients: `connect(prompt)` returns a new `EnvClient`, or its `.sync()`, for each episode.

        reset(seed=...) -> StepResult(observation, reward, done)        step(action) -> StepResult

    `act` makes the action of the environment from the text of a turn, `show` the text of a user message from an
    observation. The seed is the prompt's index. The reward is the sum of the steps' rewards (None counts as 0; see
    `gym_env`, also for `token_rewards`). Checked against openenv-core 0.3.0.
    """

    def game(prompt: Prompt) -> SimpleNamespace:
        client = connect(prompt)

        async def reset() -> str:
            return show((await call(partial(client.reset, seed=prompt.index))).observation)

        async def step(turn: Turn) -> Step:
            result = await call(client.step, act(turn.text))
            return Step(show(result.observation), result.reward or 0.0, result.done)

        return SimpleNamespace(reset=reset, step=step, close=client.close)

    return gym_env(game, tokenizer=tokenizer, token_rewards=token_rewards)


def verifiers(vf_env: Any, tokenizer: PreTrainedTokenizerBase) -> Env:
    """A `vf.Environment` of verifiers 0.1, with tools or without.

    It calls the policy by HTTP (`rlkit.agents.endpoint`, extra `http`). Rows are those of its data set
    (`vf_env.get_dataset()`). The reward is its rubric's, for one rollout at a time, with the metrics logged; a reward
    function that raises counts 0 there. Its errors (`state["error"]`) end the run. Checked against verifiers 0.1.14.
    """

    async def agent(prompt: Prompt, base_url: str) -> dict[str, Any]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=None) as connection:
            state = await vf_env.rollout(deepcopy(prompt.row), OpenAIChatCompletionsClient(connection), "policy")
        if state["error"] is not None:
            raise state["error"]
        await vf_env.rubric.score_rollout(state)
        return {"reward": state["reward"], "info": {"metrics": state["metrics"]}}

    return agent_env(agent, tokenizer=tokenizer)


def verifiers_tasks(
    tasks: Sequence[Any], tokenizer: PreTrainedTokenizerBase, *, config: Mapping[str, Any] | None = None
) -> Env:
    """Tasks of `verifiers.v1` (since 0.2), `tasks[i]` for row i; `config` has further fields of `AgentConfig`.

    The harness calls the policy by HTTP (`rlkit.agents.endpoint`, extra `http`). The reward is the trace's, and
    its metrics are logged. A trace that is not `ok` ends the run. Checked against verifiers 0.4.0.
    """

    async def agent(prompt: Prompt, base_url: str) -> dict[str, Any]:
        from verifiers import v1 as vf

        client = vf.EvalClientConfig(base_url=base_url, api_key_var="NONE")
        trace = await vf.Agent(vf.AgentConfig(model="policy", client=client, **(config or {}))).run(tasks[prompt.index])
        if not trace.ok:
            raise RuntimeError([f"it stopped: {trace.stop_condition}", *(e.message for e in trace.errors)][-1])
        return {"reward": trace.reward, "info": {"metrics": {k: v for k, v in trace.metrics.items() if v is not None}}}

    return agent_env(agent, tokenizer=tokenizer)


_Adapters = dict[str, Callable[..., Env]]
_GAMES: _Adapters = {"gymnasium": gymnasium, "gem": gem, "textarena": textarena}  # classes, made for each episode
_ADAPTERS: _Adapters = {**_GAMES, "rl2": rl2, "interact": interact, "openrlhf": openrlhf}
