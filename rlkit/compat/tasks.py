"""Environments of OpenEnv, verifiers and aviary, each as an environment of rlkit: an adapter for each library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlkit.agents.endpoint import agent_env
from rlkit.rollout.calling import call, report_once
from rlkit.rollout.envs.calls import BadCall, Call
from rlkit.rollout.envs.chat import Chat, Turn
from rlkit.rollout.envs.gym import Step, gym_env, seed_of
from rlkit.rollout.envs.tools import call_reader, wants_structure, with_calls
from rlkit.rollout.groups import Env, Prompt, Sampler
from rlkit.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ON_THIS_MACHINE: dict[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
_NO_SESSION = (
    "the server had no free session for {:g} s (CAPACITY_REACHED): raise max_concurrent_envs there, or play fewer "
    "episodes at once: openenv:URL(at_once=4)"
)
_PAUSE_S = 0.2  # between two tries of a server without a free session


def openenv(
    connect: Callable[[Prompt], Any], tokenizer: PreTrainedTokenizerBase, *, act: Callable[[str], Any],
    show: Callable[[Any], str], hint: str = "", wait_s: float = 600.0, token_rewards: bool = False,
) -> Env:  # fmt: skip
    """OpenEnv's clients: `connect(prompt)` returns a new `EnvClient`, or its `.sync()`, for each episode.

        reset(seed=...) -> StepResult(observation, reward, done)        step(action) -> StepResult

    `act` makes the action of the environment from the text of a turn, `show` the text of a user message from an
    observation; `hint` follows the first one. An action that cannot be made (`act` raises ValueError) or that the
    server finds invalid is answered by "Error: ...", with reward 0, and the episode goes on. A server without a free
    session (CAPACITY_REACHED) is tried again for `wait_s` seconds, then TimeoutError.

    The seed is `seed_of` the prompt. The reward is the sum of the steps' rewards (None counts
    as 0; see `gym_env`, also for `token_rewards`). Checked against openenv-core 0.3.0.
    """

    def game(prompt: Prompt) -> SimpleNamespace:
        held = SimpleNamespace(client=None)

        async def reset() -> str:
            try:
                async with asyncio.timeout(wait_s):
                    while (result := await opened(seed_of(prompt))) is None:
                        await asyncio.sleep(_PAUSE_S)
            except TimeoutError:
                raise TimeoutError(_NO_SESSION.format(wait_s)) from None
            return "\n\n".join(filter(None, (show(result.observation), hint)))

        async def opened(seed: int) -> Any:
            """The first observation; None where the server has no free session."""
            held.client = connect(prompt)
            try:
                return await call(partial(held.client.reset, seed=seed))
            except Exception as error:
                closed = type(error).__name__.startswith("ConnectionClosed")  # before the error could be read
                if not (closed or "CAPACITY_REACHED" in str(error)):
                    raise
                await close()
                report_once("the server", "has no free session", ": episodes wait (CAPACITY_REACHED)")
                return None

        async def step(turn: Turn) -> Step:
            try:
                action = act(turn.text)
            except ValueError as error:
                return Step(f"Error: {error}")
            try:
                result = await call(held.client.step, action)
            except RuntimeError as error:
                if "VALIDATION_ERROR" not in str(error):
                    raise
                return Step(f"Error: {error}")
            return Step(show(result.observation), result.reward or 0.0, result.done)

        async def close() -> None:
            client, held.client = held.client, None
            if client is not None:
                await call(client.close)

        return SimpleNamespace(reset=reset, step=step, close=close)

    return gym_env(game, tokenizer=tokenizer, token_rewards=token_rewards)


def aviary(
    make: Callable[[Prompt], Any], tokenizer: PreTrainedTokenizerBase, *, parse: Callable[..., Any] | None = None
) -> Env:
    """aviary's environments: `make(prompt)` returns a new `Environment` for each episode.

        async reset() -> messages, tools         async step(ToolRequestMessage) -> messages, reward, done, truncated

    The chat template shows the tools, and the calls of a turn are read as those of `tool_env` (also for `parse`). A
    call that cannot be read has the name INVALID, as in aviary; a turn without a call is a plain `Message`. The reward
    is the sum of the steps' rewards; `num_calls` and `num_bad_calls` are in info. Checked against fhaviary 0.37.0.
    """

    @cache
    def reader(schemas: str) -> Any:
        return call_reader(tokenizer, json.loads(schemas), parse)

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        game = make(prompt)
        try:
            opening, tools = await call(game.reset)
            schemas = [tool.model_dump(mode="json", exclude_none=True, by_alias=True) for tool in tools]
            messages = [_plain(message) for message in opening]
            chat = Chat(prompt, sample, tokenizer=tokenizer, messages=messages, tools=schemas or None)
            read = reader(json.dumps(schemas)) if schemas else lambda _text, _tools: []
            rewrites = bool(schemas) and wants_structure(chat.messages, tokenizer, schemas)
            return await _with_tools(game, chat, partial(read, tools=schemas), rewrites)
        finally:
            await call(game.close)

    return env


def _plain(message: Any) -> dict[str, Any]:
    """A message of aviary as one of a chat template."""
    return {name: value for name, value in message.model_dump(exclude_none=True).items() if name in _OF_MESSAGE}


_OF_MESSAGE = ("role", "content", "name", "tool_call_id", "tool_calls")


async def _with_tools(game: Any, chat: Chat, read: Callable[[str], Any], rewrites: bool) -> list[Trajectory]:
    """Play a game of aviary."""
    from aviary.core import Message, ToolRequestMessage

    rewards, cut, num_calls, num_bad = list[float](), None, 0, 0
    async for turn in chat:
        calls = read(turn.text) if turn.finish_reason == "stop" else []
        num_bad += sum(isinstance(one, BadCall) for one in calls)
        calls = [Call("INVALID", {}) if isinstance(one, BadCall) else one for one in calls]
        message, _ = with_calls(turn.text, calls, [""] * len(calls), start=num_calls)
        num_calls += len(calls)
        request = ToolRequestMessage(**message) if calls else Message(role="assistant", content=turn.text)
        answers, reward, done, truncated = await call(game.step, request)
        rewards.append(float(reward))
        if done or truncated:
            cut = bool(truncated and not done) or None
            break
        if rewrites and calls:
            chat.messages[-1] = message
        chat.add(*map(_plain, answers))
    counts = {"num_calls": num_calls, "num_bad_calls": num_bad, "turn_rewards": rewards}
    return chat.end(reward=sum(rewards), truncated=cut, info=counts)


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

    Without a `config` the chat loop of verifiers runs in a process of this machine (its harness `null`), by uv.

    The harness calls the policy by HTTP (`rlkit.agents.endpoint`, extra `http`). The reward is the trace's; its metrics
    and the score of each reward are logged. A trace that is not `ok` ends the run. Checked against verifiers 0.4.0.
    """

    async def agent(prompt: Prompt, base_url: str) -> dict[str, Any]:
        from verifiers import v1 as vf

        client = vf.EvalClientConfig(base_url=base_url, api_key_var="NONE")
        fields = _ON_THIS_MACHINE if config is None else config
        trace = await vf.Agent(vf.AgentConfig(model="policy", client=client, **fields)).run(tasks[prompt.index])
        if not trace.ok:
            raise RuntimeError([f"it stopped: {trace.stop_condition}", *(e.message for e in trace.errors)][-1])
        scores = {name: one and one.score for name, one in getattr(trace, "rewards", {}).items()}
        measured = {name: value for name, value in {**trace.metrics, **scores}.items() if value is not None}
        return {"reward": trace.reward, "info": {"metrics": measured}}

    return agent_env(agent, tokenizer=tokenizer)
