"""An environment from any program that talks to an OpenAI-compatible server: the policy is that server.

async def agent(prompt, base_url):
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    ...                                     # any framework, any number of calls
    return {"reward": 1.0}                  # keywords of Chat.end, or None where `score` gives the reward

env = agent_env(agent, tokenizer=tokenizer)
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rlkit._extras import optional
from rlkit.data.prompts import prompt_messages
from rlkit.rollout.calling import call
from rlkit.rollout.envs.chat import Chat, Turn
from rlkit.rollout.envs.tools import BadCall, Call, before_calls, hermes_calls
from rlkit.rollout.rollout import Env, Prompt, Sampler
from rlkit.types import Trajectory

if TYPE_CHECKING:
    from aiohttp import web
    from transformers import PreTrainedTokenizerBase


class _BadRequest(ValueError):
    """A request that cannot be served; `code` is OpenAI's error code."""

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.code = code


def agent_env(
    agent: Callable[[Prompt, str], Any],
    *,
    tokenizer: PreTrainedTokenizerBase,
    parse: Callable[[str], list[Call | BadCall]] = hermes_calls,
    template_args: Mapping[str, Any] | None = None,
) -> Env:
    """An environment from `agent(prompt, base_url)`, a sync or async program that calls a model over HTTP.

    Each episode has its own `base_url` on this machine, with `POST {base_url}/chat/completions`. The server reads
    messages, tools and `max_tokens` (which may lower the limit of a turn) and ignores other fields: the rollout sets
    the sampling parameters. No streaming, one choice. Tool calls that `parse` finds are returned as `tool_calls`. A
    conversation that extends the previous one is continued token by token (`Chat.reply`); any other (a summary, a
    sub-agent) becomes a further piece of the episode. If there is no room for another turn, the program gets status
    400 with code `context_length_exceeded`.

    The program returns keywords of `Chat.end` (`reward`, `info`, ...) or None. An exception of the program ends the
    run, and so does an error of the engine or the chat template, although the program only sees status 500.

    Needs aiohttp (the extra `http`). Differs: verl's and SkyRL's agent servers tokenise each conversation again.
    """

    optional("aiohttp", "http", "agent_env needs")

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        episode = _Episode(prompt, sample, tokenizer, parse, template_args)
        async with _serving(episode.answer) as base_url:
            try:
                end = await call(agent, prompt, base_url)
            except Exception as error:
                if episode.error is None:
                    raise
                raise episode.error from error
        if episode.error is not None:
            raise episode.error
        return episode.chat.end(**(end or {}))

    return env


class _Episode:
    """One program's conversation with the policy, one request after another."""

    def __init__(self, prompt: Prompt, sample: Sampler, tokenizer: Any, parse: Any, template_args: Any) -> None:
        start = prompt_messages(prompt.row, place=f"row {prompt.index + 1}")
        self.chat = Chat(prompt, sample, tokenizer=tokenizer, messages=start, template_args=template_args)
        self.error: Exception | None = None
        self._parse, self._turn = parse, asyncio.Lock()

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's chat completion for a request's body."""
        if body.get("stream") or body.get("n") not in (None, 1):
            raise _BadRequest("no streaming and no n > 1: ask for one whole answer")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        async with self._turn:
            try:
                messages = [_message(m) for m in body["messages"]]
                turn = await self.chat.reply(messages, tools=body.get("tools"), max_new_tokens=limit)
            except Exception as error:
                self.error = self.error or error
                raise
        if turn is None:
            raise _BadRequest("maximum context length: there is no room for another turn", "context_length_exceeded")
        num_prompt = len(self.chat.turns.context) - len(turn.ids)
        return _completion(turn, self._parse(turn.text), model=body.get("model", ""), num_prompt=num_prompt)


@asynccontextmanager
async def _serving(answer: Callable[[Any], Awaitable[dict[str, Any]]]) -> AsyncIterator[str]:
    """The `base_url` of a server for one episode. Requests left at the end are cancelled.

    Its random name rejects programs that outlive their episode, because the next episode may get the same port.
    """
    from aiohttp import web

    async def respond(request: web.Request) -> web.Response:
        if request.match_info["episode"] != name:
            return _failure(404, "this episode is over", "not_found")
        try:
            return web.json_response(await answer(await request.json()))
        except _BadRequest as error:
            return _failure(400, str(error), error.code)
        except Exception as error:
            return _failure(500, f"{type(error).__name__}: {error}", "server_error")

    name = secrets.token_hex(8)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/{episode}/v1/chat/completions", respond)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/{name}/v1"
    finally:
        await runner.cleanup()


def _failure(status: int, message: str, code: str) -> web.Response:
    from aiohttp import web

    body = {"error": {"message": message, "type": code, "code": code}}
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})


def _completion(turn: Turn, calls: Sequence[Call | BadCall], *, model: str, num_prompt: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    made = [c for c in calls if isinstance(c, Call)]
    reason = "stop" if turn.finish_reason == "stop" else "length"
    if made and len(made) == len(calls) and reason == "stop":
        reason = "tool_calls"
        functions = [{"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)} for c in made]
        ids = (f"call{secrets.token_hex(2)}{i % 10}" for i in range(len(made)))
        message |= {
            "content": before_calls(turn.text),
            "tool_calls": [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions)],
        }
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": len(turn.ids),
        "total_tokens": num_prompt + len(turn.ids),
    }
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    name = f"chatcmpl-{secrets.token_hex(8)}"
    return {"id": name, "object": "chat.completion", "created": 0, "model": model, "choices": [choice], "usage": usage}


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """The message in the form of chat templates: text as one string, arguments as an object, no empty fields."""
    known = ("role", "content", "reasoning_content", "name", "tool_call_id", "tool_calls")
    message = {key: given[key] for key in known if given.get(key) is not None}
    content = message.get("content", "")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    message["content"] = content
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [{**c, "function": _function(c["function"])} for c in calls]
    return message


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = given.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    return {"name": given["name"], "arguments": arguments}
