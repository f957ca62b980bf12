"""A request to the policy and the answer to it, whatever format they have."""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from rlkit._util.untrusted import depth_is_fine
from rlkit.agents.branches import Said
from rlkit.agents.demands import MAX_DEPTH, BadRequest, Demands, need
from rlkit.agents.demands import read as read_demands
from rlkit.data.episode_images import mark_of
from rlkit.data.images import PARTS
from rlkit.data.messages import object_of
from rlkit.rollout.envs.calls import message_of
from rlkit.settings import SamplingParams

MAX_TOOLS = 1000  # of a request; OpenAI's server takes 128
MAX_NUM = 128  # choices of one request
_SAMPLING: Mapping[str, Any] = {  # fields that change what is sampled, with the value that does not
    "temperature": None, "top_p": 1, "top_k": None, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0,
    "repetition_penalty": 1, "logit_bias": {}, "seed": None, "reasoning": {}, "reasoning_effort": None,
    "thinking": {"type": "disabled"}, "chat_template_kwargs": {}, "min_tokens": 0, "ignore_eos": False,
    "output_config": {}, "context_management": None, "truncation": "disabled",
    "structured_outputs": None, "guided_json": None, "guided_regex": None, "guided_choice": None,
    "guided_grammar": None, "regex": None, "ebnf": None, "json_schema": None,
}  # fmt: skip
_RANGES = {"temperature": (0, 2), "top_p": (0, 1), "frequency_penalty": (-2, 2), "presence_penalty": (-2, 2)}
_REFUSED = {  # fields of what the policy is not, with the way out
    "functions": "it is the older form of `tools`", "function_call": "it is the older form of `tool_choice`",
    "audio": "the policy writes text", "web_search_options": "no server runs tools here: give the search as a function",
    "mcp_servers": "no server runs tools here: give them as functions", "container": "no server runs tools here",
    "background": "the reply has the answer", "conversation": "give `previous_response_id`",
    "prompt": "no prompts are stored: give the messages",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """`messages` are in the form of chat templates: text as one string, arguments as an object, no empty fields.

    `sampling` are its fields that may ask for another distribution than the run's (see `others`). `images` are the
    files of its images, by the digests that are in the marks of the texts. `logprobs`: the answer has those of the
    sampled tokens. `thinking`: it has the reasoning apart. Without `reads_calls` its calls are text.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    max_new_tokens: int | None = None
    num: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, bytes] = field(default_factory=dict)
    demands: Demands = field(default_factory=Demands)
    reads_calls: bool = True
    logprobs: bool = False
    thinking: bool = False


class ToolCall(NamedTuple):
    """A call of the policy; `arguments` are JSON."""

    id: str
    name: str
    arguments: str


class Answer(NamedTuple):
    """A turn of the policy as a client gets it: `text` is what stands before the calls, `stop` the stop string of the
    request that ended it, `tokens` the texts and log-probs of what was sampled, the end included."""

    text: str
    calls: list[ToolCall]
    reason: Literal["stop", "tool_calls", "length"]
    num_prompt: int
    num_sampled: int
    stop: str | None = None
    tokens: Sequence[tuple[str, float]] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message of chat templates."""
        return self.written(json.loads)

    def written(self, arguments: Callable[[str], Any] = str) -> dict[str, Any]:
        """The turn as a message, with what `arguments` makes of the JSON of each call."""
        functions = [{"name": c.name, "arguments": arguments(c.arguments)} for c in self.calls]
        made = [{"id": c.id, "type": "function", "function": f} for c, f in zip(self.calls, functions, strict=True)]
        return {"role": "assistant", "content": self.text, **({"tool_calls": made} if made else {})}


def answer_of(said: Said, tokenizer: Any, request: Request) -> Answer:
    """The answer for a sampled turn. Calls nested too deep stay text."""
    fine = request.reads_calls and bool(said.calls) and all(depth_is_fine(c.arguments, MAX_DEPTH) for c in said.calls)
    start = secrets.token_hex(2)  # nine characters in all, as Mistral's template requires
    calls = [
        ToolCall(c.id or f"c{start}{i:04x}", c.name, json.dumps(c.arguments, ensure_ascii=False))
        for i, c in enumerate(said.calls if fine else ())
    ]
    at_end = said.stop is not None or said.turn.finish_reason == "stop"
    ended: Literal["stop", "length"] = "stop" if at_end else "length"
    num = said.num_prompt, len(said.turn.ids)
    text = message_of(said.turn.text, calls=bool(calls))["content"]
    tokens = [*zip(_texts(tokenizer, said.turn.ids), said.logp, strict=True)] if request.logprobs else ()
    return Answer(text, calls, "tool_calls" if calls else ended, *num, said.stop, tokens)


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, with a space before it that a tokenizer drops at the start of a text."""
    texts = []
    for i, token in enumerate(ids):
        before, both = (tokenizer.decode(ids[max(i - 1, 0) : end], skip_special_tokens=False) for end in (i, i + 1))
        whole = both.startswith(before) and "\ufffd" not in both
        texts.append(both[len(before) :] if whole else tokenizer.decode([token], skip_special_tokens=False))
    return texts


def log_probs(answer: Answer) -> list[dict[str, Any]]:
    """The log-probs of the sampled tokens, as OpenAI has them. A part of a character has no text, so no bytes."""
    return [
        {"token": t, "logprob": x, "bytes": None if "\ufffd" in t else [*t.encode()], "top_logprobs": []}
        for t, x in answer.tokens
    ]


def reasoned(text: str) -> tuple[str, str]:
    """The reasoning at the start of a turn, without its tags, and the rest; none where it has no `<think>`."""
    found = re.match(r"\s*<think>(.*?)(?:</think>\s*|\Z)", text, re.DOTALL)
    return (found[1].strip(), text[found.end() :]) if found else ("", text)


def parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request's body."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {type(error).__name__}: {str(error)[:200]}") from None
    need(isinstance(body, dict), "the body must be an object")
    tools = body.get("tools")
    need(not isinstance(tools, list) or len(tools) <= MAX_TOOLS, f"`tools` has more than {MAX_TOOLS}")
    need(depth_is_fine(body, MAX_DEPTH), f"lists and objects are nested more than {MAX_DEPTH} deep")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeEncodeError, ValueError):
        raise BadRequest("a string has half of a surrogate pair, or a number has too many digits") from None
    need(isinstance(body.get("model"), str | None), "`model` must be a string")
    need(isinstance(body.get("stream"), bool | None), "`stream` must be true or false")
    return body


def options(
    body: Mapping[str, Any], tools: Sequence[Any] | None, *, limit: Sequence[str], stop: str | None = "stop"
) -> dict[str, Any]:
    """The fields of a `Request` that formats share; `limit` are names of the limit of a turn, the first one wins."""
    _refuse(body)
    name = next((name for name in limit if body.get(name) is not None), limit[0])
    most, stops = body.get(name), (body.get(stop) if stop else None) or ()
    need(most is None or (type(most) is int and most > 0), f"`{name}` must be an integer of at least 1")
    stops = (stops,) if isinstance(stops, str) else stops
    fine = isinstance(stops, list | tuple) and len(stops) <= 16 and all(isinstance(s, str) and s for s in stops)
    need(fine, f"`{stop}` must be a string or a list of at most 16 strings")
    num = 1 if body.get("n") is None else body["n"]
    need(type(num) is int and 1 <= num <= MAX_NUM, f"`n` must be an integer from 1 to {MAX_NUM}")
    sampling = {name: value for name in _SAMPLING if (value := body.get(name)) is not None}
    choice, form, parallel = (body.get(name) for name in ("tool_choice", "response_format", "parallel_tool_calls"))
    asked, reads_calls = read_demands(choice, form, parallel, tools)
    return {
        "max_new_tokens": most, "num": num, "stop": tuple(stops), "stream": bool(body.get("stream")),
        "model": body.get("model") or "", "sampling": sampling, "demands": asked, "reads_calls": reads_calls,
    }  # fmt: skip


def _refuse(body: Mapping[str, Any]) -> None:
    """Refuse fields that ask for what the policy is not, and numbers out of their range."""
    for name, fix in _REFUSED.items():
        need(not body.get(name), f"`{name}` is not supported: {fix}")
    need(body.get("modalities") in (None, [], ["text"]), '`modalities` must be ["text"]: the policy writes text')
    for name, (low, high) in _RANGES.items():
        value = body.get(name)
        fine = value is None or (type(value) in (int, float) and low <= value <= high)
        need(fine, f"`{name}` must be a number from {low} to {high}")
    need(isinstance(body.get("seed"), int | None), "`seed` must be an integer")
    top = body.get("top_logprobs") or 0
    need(type(top) is int, "`top_logprobs` must be an integer")
    need(not top, "`top_logprobs` must be 0: the engine gives the log-probs of the sampled tokens (`logprobs`) only")


def others(request: Request, params: SamplingParams | None) -> list[str]:
    """The fields that ask for another distribution than that of `params`, or where they are None, than the model's."""
    sampling = request.sampling
    names = ("temperature", "top_p", "top_k", "min_p")
    of_params = {name: getattr(params, name) for name in names} if params else {}
    return [*(name for name, x in sampling.items() if x != {**_SAMPLING, **of_params}[name]), *request.demands.names]


def objects(value: Any, subject: str) -> list[dict[str, Any]]:
    """A list of objects; none for null."""
    need(isinstance(value, list | None) and all(isinstance(x, dict) for x in value or ()), f"{subject} must be objects")
    return value or []


def text_of(
    content: Any, place: str, *, kinds: Sequence[str] = ("text",), images: dict[str, bytes] | None = None
) -> str:
    """Text, or the joined text of parts. Images are collected in `images`, and have marks in the text; without it, they
    are refused."""
    if not isinstance(content, list):
        need(isinstance(content, str | None), f"{place} must be a string or parts of type text")
        return content or ""
    fault = f"{place} must be a string or parts of type {' or '.join(kinds)}, with a string as `text`"
    fault += "" if images is None else ", or images"
    texts = []
    for part in content:
        need(isinstance(part, dict), fault)
        if images is not None and part.get("type") in PARTS:
            image = _image(part, place)
            digest = sha256(image).hexdigest()
            images[digest] = image
            texts.append(mark_of(digest))
        else:
            need(part.get("type") in kinds and isinstance(part.get("text"), str), fault)
            texts.append(part["text"])
    return "".join(texts)


def _image(part: Mapping[str, Any], place: str) -> bytes:
    """The file of an image: `image_url` with a data: URL (OpenAI), or a base64 `source` (Anthropic)."""
    url = part.get("image_url", part.get("source"))
    if isinstance(url, dict):
        url = f"data:;base64,{url.get('data')}" if url.get("type") == "base64" else url.get("url")
    need(isinstance(url, str), f"{place}: an image must have a data: URL or a base64 `source`: no files are stored")
    head, comma, data = url.partition(",")
    fault = f"{place}: an image must be a data: URL with base64, not {url[:40]!r}: nothing is fetched from a network"
    need(comma and head.startswith("data:") and head.endswith(";base64"), fault)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except ValueError as error:
        raise BadRequest(f"{place}: an image is not base64: {error}") from None


def call_of(name: Any, arguments: Any, identity: Any, place: str) -> dict[str, Any]:
    """A call of the history in the form of chat templates; arguments that are no object stay as they are in one."""
    need(isinstance(name, str), f"{place} must have a function's name")
    need(isinstance(identity, str | None), f"{place}: the id must be a string")
    try:
        fields = object_of(arguments or {})
        arguments = {"arguments": arguments} if fields is None else fields
    except ValueError:
        arguments = None
    fine = arguments is not None and depth_is_fine(arguments, MAX_DEPTH)
    need(fine, f"{place}: the arguments are nested more than {MAX_DEPTH} deep")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if identity is None else {"id": identity, **call}


def tools_of(body: Mapping[str, Any], types: Sequence[str | None], schema: str) -> list[dict[str, Any]] | None:
    """The tools of a body, of one of these types, in the form of chat templates; `schema` is the field of their
    parameters. None without any."""
    tools = []
    for tool in objects(body.get("tools"), "`tools`"):
        name = tool.get("name") if tool.get("type") in types else None
        need(isinstance(name, str), "`tools` must be functions with a name: tools that a server runs are not here")
        need(isinstance(tool.get("description"), str | None), f"tool {name}: `description` must be a string")
        function = {"name": name, "description": tool.get("description"), "parameters": tool.get(schema)}
        function |= {"strict": True} if tool.get("strict") is True else {}
        fields = {key: value for key, value in function.items() if value is not None}
        tools.append({"type": "function", "function": fields})
    return tools or None


def joined_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, in which what formats split of one turn of the policy is one message again."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if turns and message["role"] == turns[-1]["role"] == "assistant":
            calls = [*turns[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
            text = turns[-1]["content"] + message["content"]
            turns[-1] = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        else:
            turns.append(message)
    return turns


def identity(prefix: str) -> str:
    """A new id, such as `chatcmpl-4f1d...`."""
    return f"{prefix}{secrets.token_hex(12)}"


Event = tuple[str | None, dict[str, Any] | str]  # the name of a server-sent event, and its data


def event_stream(events: Sequence[Event]) -> str:
    """The events as `text/event-stream`."""
    lines = []
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        lines.append((f"event: {name}\n" if name else "") + f"data: {text}\n\n")
    return "".join(lines)
