"""An environment from any program that calls a model over HTTP: the policy is that model.

async def agent(prompt, base_url):
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    ...                                     # any framework, any number of calls
    return 1.0                              # the reward, keywords of Branches.end, or None where `score` gives it

env = agent_env(agent, tokenizer=tokenizer)
env = agent_env(command("python my_agent.py {question}", ...), tokenizer=tokenizer, raise_errors=False)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

from rlkit._util.extras import optional
from rlkit.agents import AgentError, end_of
from rlkit.agents.branches import Branches
from rlkit.agents.demands import BadRequest, unmet
from rlkit.agents.request import Answer, Request, answer_of, others
from rlkit.agents.server import Server
from rlkit.data.episode_images import TEXT_ONLY
from rlkit.data.images import Image, short
from rlkit.data.load import place_of_prompt
from rlkit.rollout.calling import CLOCK, Clock, call, report_once
from rlkit.rollout.envs.call_format import call_parser
from rlkit.rollout.envs.calls import Found, Parse, Schemas
from rlkit.rollout.groups import Env, Prompt, Sampler, all_or_cancel
from rlkit.settings import SamplingParams
from rlkit.types import Completion, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_REFUSED = 1000  # requests of an episode
MAX_IMAGES = 256 << 20  # bytes of the images of an episode
MAX_PIXELS = 16e6  # of an image
_END_S = 10.0  # seconds in which a cancelled program must end
_LOOK_S = 0.1  # how often the clock is read that stands still shortly before the end
_log = logging.getLogger("rlkit.rollout")


def agent_env(
    agent: Callable[[Prompt, str], Any],
    *,
    tokenizer: PreTrainedTokenizerBase,
    parse: Callable[..., Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    address: str = "127.0.0.1",
    tls: SSLContext | None = None,
    params: SamplingParams | None = None,
    refuse_sampling: bool = False,
    raise_errors: bool = True,
) -> Env:
    """An environment from `agent(prompt, base_url)`, a sync or async program that calls a model over HTTP.

    Each episode has its own `base_url`, http://HOST:PORT/SECRET/v1, which serves

        chat/completions         OpenAI's chat completions, `n` choices
        responses                OpenAI's Responses, also with `previous_response_id`
        messages                 Anthropic's Messages (its clients want the URL without /v1), and messages/count_tokens
        models                   one model, "policy"; requests may name any

    with streaming: the engine gives whole turns, so a stream has each text and call in one piece. All episodes share
    the port of `address`, HOST or HOST:PORT; it is open while an episode is. With `tls` (`rlkit.agents.server`
    has `tls_of`) URLs begin with https. The server reads messages, tools, `n`, the
    limit of a turn (which may lower that of the rollout), stop strings and `logprobs`. The run sets the sampling
    parameters: requests that ask for others than `params` (`temperature`, `response_format`, a forced `tool_choice`)
    are answered all the same, which is reported once, or with `refuse_sampling` get status 400. Turns that lack the
    format or the call of their request are returned and trained as sampled, and counted in the metric `agent/unmet`
    (see `rlkit.agents.demands`). docs/environments.md has a table of all fields. Tool calls
    are returned as such: they are read in the format that the chat template writes, or by `parse` (see `tool_env`). If
    nothing reads what the template writes, a request with tools ends the run.

    A conversation that extends an earlier one is continued token by token; any other (a summary, a sub-agent, an edited
    message) is a branch: a further piece of the episode (see `Branches`). If there is no room for another turn, the
    program gets status 400 with code `context_length_exceeded`. Images of the user and of tools are shown to a model
    that reads images; they must be data: URLs or base64. Requests that are malformed, have a damaged image or more than
    32 MiB (413), or that the chat template cannot render, are refused in the format's own way, and the episode goes on.

    The program returns its reward, a number, or keywords of `Branches.end` (`reward`, `info`, ...) in a dict, or None;
    TypeError for anything else. A program that asks for no turn has an episode without tokens: its reward counts in the
    group's baseline, and nothing of it trains.

    An exception of the program ends the run, and so does no end after `timeout_s` (without the time in which a turn
    waits for the end of a pause, while the run trains; a sync function keeps running in
    the background; its URL is closed), or a thousand refused requests. Without `raise_errors` the episode has failed
    instead, also if it asked for no turn: its reward is None and `info["error"]` the reason, which
    `rlkit.rewards.scoring` counts and leaves out of training. There an exception after a limit left no room ends a
    truncated episode, with reward 0. An error of the engine always ends the run.

    Needs aiohttp (the extra `http`).
    """
    optional("aiohttp", "http", "agent_env needs")
    server = Server(address, tls)
    read = _parser(tokenizer, parse, template_args)

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        episode = _Episode(prompt, sample, tokenizer, read, template_args, params, refuse_sampling)
        end = dict[str, Any]()
        failure: Exception | None = None
        async with server.episode(episode) as base_url:
            try:
                returned = await episode.run(call(agent, prompt, base_url), timeout_s)
            except Exception as error:
                if raise_errors or error is episode.error:
                    raise
                failure = error
        if failure is None:
            end = end_of(returned)
        if not (raise_errors or failure or episode.branches.num_turns):
            failure = AgentError("it asked for no turn")
        if failure is not None:
            return episode.failed(failure, end)
        if episode.branches.num_turns:
            try:
                return episode.branches.end(**end)
            except ValueError as error:  # of `turn_rewards`
                if raise_errors:
                    raise
                return episode.failed(AgentError(str(error)), end)
        report_once("an agent", "asked for no turn", f" ({place_of_prompt(prompt)}): such episodes train nothing")
        return [_without_turns(prompt, end)]

    return env


def _parser(tokenizer: Any, parse: Callable[..., Any] | None, template_args: Mapping[str, Any] | None) -> Parse:
    """`call_parser`; a template that it refuses is reported now, and the error raised where an agent gives tools."""
    if parse is not None:
        return call_parser(tokenizer, parse, template_args=template_args)
    try:
        return call_parser(tokenizer, template_args=template_args)
    except ValueError as error:
        problem = str(error)
        _log.warning("agents that give tools end the run: %s", problem)

    def refuse(text: str, tools: Schemas) -> Found:  # noqa: ARG001
        if tools:
            raise ValueError(problem)
        return []

    return refuse


def _without_turns(prompt: Prompt, end: Mapping[str, Any]) -> Trajectory:
    """The episode of a program that asked for no turn, with the reward of its `end` and no token."""
    about = {"messages": [], "finish_reason": "abort", "num_turns": 0, **(end.get("info") or {})}
    empty = Trajectory(list(prompt.ids), [], [], [], [], end.get("reward", 0.0), truncated=True)
    return replace(empty, score=end.get("score"), info=about)


class _Episode:
    """One program's calls of the policy, and the end of the program."""

    def __init__(
        self, prompt: Prompt, sample: Sampler, tokenizer: Any, parse: Parse, template_args: Any,
        params: SamplingParams | None, refuse_sampling: bool,
    ) -> None:  # fmt: skip
        self._prompt, self._sample, self._user_parse, self._tokenizer = prompt, sample, parse, tokenizer
        self._params, self._refuse_sampling, self._num_refused = params, refuse_sampling, 0
        self._clock = Clock()
        self._full = False  # whether a limit left no room for a turn
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None  # that ends the run
        self.branches = Branches(
            prompt, self._sampled, tokenizer=tokenizer, parse=self._parsed, template_args=template_args
        )

    async def run(self, program: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        """What the program returns. Raises its exception, that of the engine, or `AgentError`."""
        CLOCK.set(self._clock)
        task, left = asyncio.ensure_future(program), timeout_s
        try:
            while not (task.done() or self._over.done()) and (left is None or left > 0):
                wait = None if left is None else max(left, _LOOK_S)
                await asyncio.wait({task, self._over}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                left = None if timeout_s is None else timeout_s - self._clock.seconds
            if self.error is not None:
                raise self.error
            if self._over.done():
                raise AgentError(f"more than {MAX_REFUSED} of its requests were refused")
            if not task.done():
                raise AgentError(f"it had not ended after {timeout_s:g} s")
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=_END_S)
            if task.done() and not task.cancelled():
                task.exception()  # it is not missed: the episode has ended for another reason

    def failed(self, error: Exception, end: Mapping[str, Any]) -> list[Trajectory]:
        """The episode of a program that failed; `end` is `end_of` what it returned."""
        reason = str(error) if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"
        if self._full and self.branches.num_turns:
            return self.branches.end(reward=0.0, truncated=True, info={"notes": {"agent": reason}})
        info = {**end.get("info", {}), "error": f"the agent failed: {' '.join(reason.split())[:500]}"}
        if self.branches.num_turns:
            return self.branches.end(truncated=True, info=info)
        return [_without_turns(self._prompt, {"reward": None, "info": info})]

    async def answers(self, request: Request) -> list[Answer]:
        """The policy's turns, for the server; `BadRequest` refuses the request."""
        if names := ", ".join(f"`{name}`" for name in others(request, self._params)):
            if self._refuse_sampling:
                raise BadRequest(f"{names}: the run sets how turns are sampled")
            counted = "; those that lack what it asks are counted in reward/agent/unmet" * bool(request.demands.names)
            report_once("an agent", f"asks for {names}", f", and gets turns sampled as the run says{counted}")
        if request.model not in ("", "policy"):
            report_once("an agent", f"asks for the model {request.model[:80]!r}", ", and gets the policy, which trains")
        images = await self._images(request)
        turns = [self._answer(request, images) for _ in range(request.num)]
        if not (answers := [said for said in await all_or_cancel(turns) if said]):
            self._full = True
            full = "maximum context length: there is no room for another turn"
            raise BadRequest(full, "context_length_exceeded")
        return answers

    async def _answer(self, request: Request, images: Sequence[Image]) -> Answer | None:
        try:
            said = await self.branches.reply(
                request.messages, tools=request.tools, max_new_tokens=request.max_new_tokens, stop=request.stop,
                images=images,
            )  # fmt: skip
        except Exception as error:
            raise self.error or _of_template(error) from error
        if said is None:
            return None
        if request.demands.names:
            lacks = unmet(request.demands, said.whole, said.calls if request.reads_calls else ())
            self.branches.num_unmet = (self.branches.num_unmet or 0) + lacks
        return answer_of(said, self._tokenizer, request)

    async def _images(self, request: Request) -> list[Image]:
        """The images of a request that are new in the episode."""
        seen, reader = self.branches.images, self.branches.images.reader
        if not request.images:
            return []
        if reader is None:
            raise BadRequest(f"the request shows an image, and {TEXT_ONLY}")
        new = [content for digest, content in request.images.items() if digest not in seen]
        if sum(map(len, new)) + sum(len(image.content) for image in seen) > MAX_IMAGES:
            raise BadRequest(f"the images of this episode have more than {MAX_IMAGES >> 20} MiB", status=413)
        try:
            return [await asyncio.to_thread(reader.image, x, max_pixels=MAX_PIXELS) for x in new]
        except Exception as error:  # of Pillow: any, of a damaged file
            raise BadRequest(f"an image cannot be read: {short(error)}") from None

    async def count(self, request: Request) -> int:
        """The number of tokens of a request, for the server."""
        images = await self._images(request)
        try:
            return await self.branches.count(request.messages, tools=request.tools, images=images)
        except Exception as error:
            raise _of_template(error) from error

    def refused(self) -> None:
        """Note that the server has refused a request of the episode."""
        self._num_refused += 1
        if self._num_refused > MAX_REFUSED and not self._over.done():
            self._over.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        if not self._over.done():
            self._over.set_result(None)

    def _parsed(self, text: str, tools: Schemas) -> Found:
        try:
            return self._user_parse(text, tools)
        except Exception as error:
            self._fail(error)
            raise

    async def _sampled(self, prompt_ids: list[int], **limits: Any) -> Completion:
        CLOCK.set(self._clock)  # in the task of a request
        try:
            return await self._sample(prompt_ids, **limits)
        except Exception as error:
            self._fail(error)
            raise


def _of_template(error: Exception) -> BadRequest:
    text = " ".join(str(error).split())[:500]
    return BadRequest(f"the chat template refuses this: {type(error).__name__}: {text}")
