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
import logging
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
from rlkit.types import Completion, Trajectory

if TYPE_CHECKING:
    from aiohttp import web
    from transformers import PreTrainedTokenizerBase


MAX_BODY = 32 << 20  # bytes of a request: a million tokens of text are about 5 MiB
MAX_DEPTH = 64  # of nested lists and objects; templates recurse
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_log = logging.getLogger("rlkit.rollout")


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

    A request that OpenAI's server would refuse (no messages, parts that are not text, wrong types, an unknown role), or
    that the chat template cannot render, gets status 400, one of more than 32 MiB status 413, and the episode goes on.

    The program returns keywords of `Chat.end` (`reward`, `info`, ...) or None. A program that asks for no turn has an
    episode without tokens: its reward counts in the group's baseline, and nothing of it trains. An exception of the
    program ends the run, and so does an error of the engine, although the program only sees status 500.

    Needs aiohttp (the extra `http`).
    """

    optional("aiohttp", "http", "agent_env needs")

    warned = False

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        nonlocal warned
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
        if not isinstance(end, Mapping | None):
            what = "the program must return keywords of Chat.end as a dict, or None"
            raise TypeError(f"{what}, got {type(end).__name__}")
        if episode.asked:
            return episode.chat.end(**(end or {}))
        if not warned:
            warned = True
            _log.warning("an agent asked for no turn (row %d): such episodes train nothing", prompt.index + 1)
        return [_without_turns(prompt, **(end or {}))]

    return env


def _without_turns(
    prompt: Prompt,
    *,
    reward: float = 0.0,
    score: float | None = None,
    info: Mapping[str, Any] | None = None,
    **_: Any,
) -> Trajectory:
    """The episode of a program that asked for no turn, with its reward and no token."""
    about = {"messages": [], "finish_reason": "abort", "num_turns": 0, **(info or {})}
    return Trajectory(list(prompt.ids), [], [], [], [], reward, truncated=True, score=score, info=about)


class _Episode:
    """One program's conversation with the policy, one request after another."""

    def __init__(self, prompt: Prompt, sample: Sampler, tokenizer: Any, parse: Any, template_args: Any) -> None:
        start = prompt_messages(prompt.row, place=f"row {prompt.index + 1}")
        self._sample, self._parse, self._turn = sample, parse, asyncio.Lock()
        self.chat = Chat(prompt, self._sampled, tokenizer=tokenizer, messages=start, template_args=template_args)
        self.error: Exception | None = None
        self.asked = False

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's chat completion for a request's body."""
        messages, tools, limit = _read(body)
        async with self._turn:
            try:
                turn = await self.chat.reply(messages, tools=tools, max_new_tokens=limit)
            except Exception as error:
                if self.error is not None:
                    raise
                what = " ".join(str(error).split())[:500]
                raise _BadRequest(f"the chat template refuses this: {type(error).__name__}: {what}") from error
            if turn is None:
                full = "maximum context length: there is no room for another turn"
                raise _BadRequest(full, "context_length_exceeded")
            num_prompt = len(self.chat.turns.context) - len(turn.ids)
        try:
            calls = self._parse(turn.text)
        except Exception as error:
            self.error = self.error or error
            raise
        return _completion(turn, calls, model=body.get("model") or "", num_prompt=num_prompt)

    async def _sampled(self, prompt_ids: list[int], *, max_new_tokens: int | None = None) -> Completion:
        self.asked = True
        try:
            return await self._sample(prompt_ids, max_new_tokens=max_new_tokens)
        except Exception as error:
            self.error = self.error or error
            raise


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
            return web.json_response(await answer(_parsed(await request.read())))
        except web.HTTPRequestEntityTooLarge:
            return _failure(413, f"the request has more than {MAX_BODY >> 20} MiB", "invalid_request_error")
        except _BadRequest as error:
            return _failure(400, str(error), error.code)
        except Exception as error:
            return _failure(500, f"{type(error).__name__}: {error}", "server_error")

    name = secrets.token_hex(8)
    app = web.Application(client_max_size=MAX_BODY)
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
    made = [c for c in calls if isinstance(c, Call) and _depth_is_fine(c.arguments)]
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


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _BadRequest(f"the body is not JSON: {type(error).__name__}: {str(error)[:200]}") from None
    _need(isinstance(body, dict), "the body must be an object")
    return body


def _read(body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any] | None, int | None]:
    """Messages in the form of chat templates, tools, and the limit of the turn; `_BadRequest` where OpenAI has 400."""
    _need(_depth_is_fine(body), f"lists and objects are nested more than {MAX_DEPTH} deep")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeEncodeError, ValueError):
        raise _BadRequest("a string has half of a surrogate pair, or a number has too many digits") from None
    one = body.get("n") is None or body["n"] == 1
    _need(not body.get("stream") and one, "no streaming and no n > 1: ask for one whole answer")
    _need(isinstance(body.get("model"), str | None), "`model` must be a string")
    limit = body.get("max_tokens") if body.get("max_completion_tokens") is None else body["max_completion_tokens"]
    _need(limit is None or (type(limit) is int and limit > 0), "`max_tokens` must be an integer of at least 1")
    messages, tools = body.get("messages"), body.get("tools")
    _need(isinstance(messages, list) and messages, "`messages` must be a list of at least one message")
    _need(
        tools is None or (isinstance(tools, list) and all(map(_is_tool, tools))), "`tools` must be a list of functions"
    )
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages or ())], tools, limit


def _message(given: Any, place: str) -> dict[str, Any]:
    """The message in the form of chat templates: text as one string, arguments as an object, no empty fields."""
    _need(isinstance(given, dict), f"{place} must be an object")
    _need(given.get("role") in ROLES, f"{place}: `role` must be one of {', '.join(ROLES)}")
    texts = ("reasoning_content", "name", "tool_call_id")
    message = {key: given[key] for key in ("role", *texts) if given.get(key) is not None}
    for key in texts:
        _need(isinstance(message.get(key, ""), str), f"{place}: `{key}` must be a string")
    message["content"] = _text(given.get("content"), place)
    calls = given.get("tool_calls")
    _need(isinstance(calls, list | None), f"{place}: `tool_calls` must be a list")
    if calls:
        message["tool_calls"] = [_call(c, f"{place}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return message


def _text(content: Any, place: str) -> str:
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        all_text = all(k == "text" and isinstance(p.get("text"), str) for k, p in zip(kinds, content, strict=True))
        _need(all_text, f"{place}: `content` must be a string or parts of type text, with a string as `text`")
        return "".join(part["text"] for part in content)
    _need(isinstance(content, str | None), f"{place}: `content` must be a string or parts of type text")
    return content or ""


def _call(given: Any, place: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    _need(isinstance(function, dict) and isinstance(function.get("name"), str), f"{place} must have a function's name")
    assert isinstance(function, dict)
    _need(isinstance(given.get("id"), str | None), f"{place}: `id` must be a string")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except RecursionError:
            arguments = None
        except ValueError:
            arguments = {"arguments": arguments}
    fine = arguments is not None and _depth_is_fine(arguments)
    _need(fine, f"{place}: the arguments are nested more than {MAX_DEPTH} deep")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return call if given.get("id") is None else {"id": given["id"], **call}


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _depth_is_fine(value: Any) -> bool:
    """Whether lists and objects are nested at most `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            x
            for inside in level
            if isinstance(inside, list | dict)
            for x in (inside.values() if isinstance(inside, dict) else inside)
        ]
        if not level:
            return True
    return False


def _need(right: Any, otherwise: str) -> None:
    if not right:
        raise _BadRequest(otherwise)
