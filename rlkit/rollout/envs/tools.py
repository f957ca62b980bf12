"""Tools as plain Python functions: the chat template lists them, the model calls them, messages return the results.

    def calculate(expression: str) -> float:
        '''Evaluate an arithmetic expression.

        Args:
            expression: numbers, + - * / and parentheses
        '''
        ...

    prompts, _ = rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=1024, tools=[calculate])
    env = limited(tool_env([calculate], tokenizer=tokenizer), max_turns=4, max_total_tokens=4096)
    await rollout(prompts, generate=engine.generate, env=env, score=scorer(reward, ...), ...)

A function's name, type hints and docstring are its schema. Nothing that a model writes raises: a call that cannot be
parsed, a wrong argument, an exception and a timeout are reported to the model in the tool's message.

The calls in a turn's text are read in the format that the chat template itself writes: see
`rlkit.rollout.envs.call_format`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rlkit.data.chat import render_text
from rlkit.data.episode_images import EpisodeImages, parts_of
from rlkit.rollout.calling import call, report_once
from rlkit.rollout.envs.call_format import call_parser
from rlkit.rollout.envs.calls import (
    BadCall,
    Call,
    Parse,
    hermes_calls,
    json_calls,
    message_of,
    pythonic_calls,
    wrong_arguments,
)
from rlkit.rollout.envs.chat import Chat
from rlkit.rollout.groups import Env, Prompt, Sampler
from rlkit.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["BadCall", "Call", "Tools", "hermes_calls", "json_calls", "pythonic_calls", "tool_env", "tool_schemas"]

Tools = Sequence[Callable[..., Any]]


def tool_env(
    tools: Tools | Callable[[Prompt], Tools],
    *,
    tokenizer: PreTrainedTokenizerBase,
    parse: Callable[..., Any] | None = None,
    timeout_s: float = 30.0,
    max_result_chars: int = 8192,
    system_prompt: str | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> Env:
    """An environment in which the policy may call tools; the first turn without a call is its answer.

    `tools` are functions, or a function from the prompt to them, for tools that need its row or keep state between the
    calls of one episode; their schemas must then not depend on the prompt, and equal those given to `rl_prompts`.
    The calls of one turn run concurrently: async functions are awaited, each sync one runs in its own thread. A string
    result is used unchanged, any other as JSON; longer results than `max_result_chars` are cut, with a note. A result
    may show images, to a model that reads them: a picture of Pillow, or a list of parts as in messages,
    `[{"type": "image", "image": picture}, {"type": "text", "text": "..."}]`.

    The calls of a turn are read by the function of `rlkit.rollout.envs.calls` that reads back a call of these tools as
    the chat template writes it; ValueError, with that call, if none does. Another is `parse(text)` or `parse(text,
    tools=schemas)`, which returns a list of (name, arguments), empty for an answer.

    The reward comes from `score`, whose function gets the final turn as `completion` and may ask for `messages`,
    `num_calls`, `num_bad_calls` (could not be parsed, unknown tool, wrong arguments) and `num_failed_calls` (raised or
    timed out). Calls of a truncated turn are not run. The number of turns is not limited here: see `limited`.

    A control token (`<|im_end|>`) in a tool's result is read as text, so that a document cannot close the tool's turn
    and open another (see `rlkit.data.chat.render_text`).

    Differs: nothing from TRL `tools`; in verl, tools are subclasses of verl `BaseTool`, and return a `ToolResponse`.
    """
    fixed = None if callable(tools) else tool_schemas(tools)

    @cache
    def parser(schemas: str) -> Parse:
        return call_reader(tokenizer, json.loads(schemas), parse, template_args, system_prompt)

    if fixed:
        parser(json.dumps(fixed))

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        of_row = tools(prompt) if callable(tools) else tools
        box = _Toolbox(of_row, fixed or tool_schemas(of_row), timeout_s, max_result_chars)
        chat = Chat(
            prompt, sample, tokenizer=tokenizer, system_prompt=system_prompt, tools=box.schemas,
            template_args=template_args,
        )  # fmt: skip
        structured = wants_structure(chat.messages, tokenizer, box.schemas)
        read = parser(json.dumps(box.schemas))
        async for turn in chat:
            if not (calls := read(turn.text, box.schemas) if turn.finish_reason == "stop" else []):
                break
            results = await asyncio.gather(*(box.answer(wanted, chat.images) for wanted in calls))
            if structured:
                chat.messages[-1], answers = with_calls(turn.text, calls, results, start=box.num_calls)
            else:
                answers = [_tool_message(c, r) for c, r in zip(calls, results, strict=True)]
            box.num_calls += len(calls)
            chat.add(*answers)
        return chat.end(reward=0.0, info=box.counts())

    return env


def call_reader(
    tokenizer: Any,
    schemas: Sequence[Any],
    parse: Callable[..., Any] | None = None,
    template_args: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
) -> Parse:
    """`call_parser` for these tools; ValueError also where the chat template leaves out what a tool returns."""
    _check_results(tokenizer, schemas, template_args)
    return call_parser(tokenizer, parse, tools=schemas, template_args=template_args, system_prompt=system_prompt)


def tool_schemas(tools: Tools) -> list[dict[str, Any]]:
    """JSON schemas of functions for chat templates, from their type hints and Google-style docstrings.

    Errors: ValueError, naming the function, if an argument has no type hint or no line under `Args:`, or if two
    functions have the same name.
    """
    from transformers.utils import get_json_schema

    if not isinstance(tools, list | tuple):
        fault = "tools must be a list of functions"
        raise TypeError(f"{fault}, or a function of the prompt that returns one, got {tools!r}")
    schemas = []
    for function in tools:
        if inspect.isclass(function):
            raise ValueError(f"tool {function.__name__} is a class: give functions, such as the methods of an object")
        try:
            schemas.append(get_json_schema(function))
        except Exception as error:
            name = getattr(function, "__name__", function)
            problem = f"tool {name} has no schema: {error}"
            raise ValueError(f"{problem}; give every argument a type hint and a line under `Args:`") from error
    names = [s["function"]["name"] for s in schemas]
    if len(set(names)) < len(names):
        raise ValueError(f"tools must have different names, got {names}")
    return schemas


class _Toolbox:
    """The tools of one episode, and counts of its calls."""

    def __init__(self, tools: Tools, schemas: list[dict[str, Any]], timeout_s: float, max_chars: int) -> None:
        self.schemas = schemas
        names = [s["function"]["name"] for s in schemas]
        self._functions = dict(zip(names, tools, strict=True))
        self._parameters = dict(zip(names, (s["function"]["parameters"] for s in schemas), strict=True))
        self._timeout_s, self._max_chars = timeout_s, max_chars
        self.num_calls = self._bad = self._failed = 0

    def counts(self) -> dict[str, int]:
        return {"num_calls": self.num_calls, "num_bad_calls": self._bad, "num_failed_calls": self._failed}

    async def answer(self, wanted: Call | BadCall, images: EpisodeImages) -> str:
        """The text of the tool's message, with marks for its images, which are added to those of the episode."""
        if (error := wanted.error if isinstance(wanted, BadCall) else self._wrong(wanted)) is not None:
            self._bad += 1
            return self._cut(f"Error: {error}")
        assert isinstance(wanted, Call)
        try:
            function = partial(self._functions[wanted.name], **wanted.arguments)
            result = await call(function, timeout_s=self._timeout_s)
            if (parts := parts_of(result)) and images.reader is not None:
                texts = ({"text": self._cut(p["text"])} if isinstance(p.get("text"), str) else {} for p in parts)
                parts = [{**part, **text} for part, text in zip(parts, texts)]
                return await asyncio.to_thread(images.text_of, parts, "the result")
            declared = inspect.signature(function.func).return_annotation if result is None else None
            if declared not in (None, "None"):
                _report_empty(wanted.name, result, "null")
            written = partial(_as_text, wanted.name)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=written)
        except Exception as raised:
            self._failed += 1
            report_once(f"tool {wanted.name}", f"raised {type(raised).__name__}", f": {raised} (the model is told so)")
            late = isinstance(raised, TimeoutError) and not raised.args
            failure = f"no result after {self._timeout_s:g} s" if late else f"{type(raised).__name__}: {raised}"
            text, parts = f"Error: {failure}", None
        if parts:
            images.check_reader(f"the result of tool {wanted.name}")
        return self._cut(text)

    def _wrong(self, wanted: Call) -> str | None:
        if wanted.name not in self._functions:
            return f"there is no tool {wanted.name!r}; the tools are {', '.join(self._functions)}"
        return wrong_arguments(self._parameters[wanted.name], wanted.arguments)

    def _cut(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # half of a surrogate pair is a question mark
        cut = len(text) - self._max_chars
        return f"{text[: self._max_chars]} ... ({cut} more characters cut)" if cut > 0 else text


def _as_text(name: str, value: Any) -> str:
    """The text of what JSON does not have; reported where it is Python's text of an object of unknown form."""
    if re.search(" at 0x[0-9a-f]+>$", text := str(value)):
        _report_empty(name, value, text.partition(" at 0x")[0] + " ...>")
    return text


def _report_empty(name: str, value: Any, text: str) -> None:
    fact = f"returned {type(value).__name__}, which the model reads as {text[:80]}"
    report_once(f"tool {name}", fact, ": return the text that it is to read")


def _tool_message(wanted: Call | BadCall, result: str) -> dict[str, Any]:
    about: dict[str, Any] = {} if isinstance(wanted, BadCall) else {"name": wanted.name}
    about |= {"tool_call_id": wanted.id} if isinstance(wanted, Call) and wanted.id else {}
    return {"role": "tool", **about, "content": result}


def with_calls(
    text: str, calls: list[Call | BadCall], results: list[str], *, start: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The assistant's message with `tool_calls`, and the answers by their ids (nine characters, as Mistral requires).

    The error of a call that could not be parsed is reported in a user message.
    """
    made, answers, complaints = [], [], []
    for number, (wanted, result) in enumerate(zip(calls, results, strict=True), start):
        if isinstance(wanted, BadCall):
            complaints.append({"role": "user", "content": result})
            continue
        function, identity = {"name": wanted.name, "arguments": wanted.arguments}, wanted.id or f"call{number:05d}"
        made.append({"id": identity, "type": "function", "function": function})
        answers.append({**_tool_message(wanted, result), "tool_call_id": identity})
    message: dict[str, Any] = {"role": "assistant", **message_of(text, calls=bool(made))}
    return {**message, **({"tool_calls": made} if made else {})}, [*answers, *complaints]


def wants_structure(messages: Sequence[Mapping[str, Any]], tokenizer: Any, schemas: Sequence[Any]) -> bool:
    """Whether the template refuses or omits a tool's message after a turn without `tool_calls`.

    ValueError if the model is not told of the tools.
    """
    plain = [*messages, *_answered("x", structured=False)]
    text, refused = partial(render_text, tokenizer, add_generation_prompt=True), False
    try:
        told = text(plain, tools=schemas)
        listed, refused = told != text(plain), _RESULT not in told
    except Exception:  # whatever a template raises
        refused, listed = True, text(messages, tools=schemas) != text(messages)
    names = [s["function"]["name"] for s in schemas]
    if not listed and not all(_is_told(name, messages) for name in names):
        fault = f"the chat template does not list the tools {names}, so the model cannot know them: describe them"
        raise ValueError(f"{fault} and how to call one in system_prompt, or use a template that lists `tools`")
    return refused


_RESULT = "result of a tool"


def _answered(name: str, *, structured: bool) -> list[dict[str, Any]]:
    """A turn with a call as text or in `tool_calls`, and the tool's answer."""
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {}}}
    said: dict[str, Any] = {"content": "", "tool_calls": [call]} if structured else {"content": "x"}
    answer = {"role": "tool", "name": name, "content": _RESULT, **({"tool_call_id": call["id"]} if structured else {})}
    return [{"role": "assistant", **said}, answer]


def _check_results(tokenizer: Any, schemas: Sequence[Any], template_args: Mapping[str, Any] | None) -> None:
    """ValueError where the chat template leaves out what a tool returns."""
    asked, name = {"role": "user", "content": "x"}, schemas[0]["function"]["name"]
    for structured in (False, True):
        messages = [asked, *_answered(name, structured=structured)]
        try:
            text = render_text(
                tokenizer, messages, add_generation_prompt=True, tools=schemas, template_args=template_args
            )
        except Exception:  # the template wants other messages
            if not structured:
                continue
            return
        if _RESULT in text:
            return
    raise ValueError(
        "the chat template leaves out the messages of role 'tool', so the model would not see what a tool returns: use "
        "a template that writes them (--chat-template FILE), or an environment that returns them as the user"
    )


def _is_told(name: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a system message has the name, or another one has it as code: `name`, "name", name(...) or name: ..."""
    word = rf"(?<!\w){re.escape(name)}"
    ends = [r"(?!\w)" if m["role"] == "system" else "[\"'`(:]" for m in messages]
    return any(re.search(word + end, str(m.get("content"))) for m, end in zip(messages, ends, strict=True))
