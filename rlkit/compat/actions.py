"""Actions and observations of OpenEnv's servers as text, by the JSON schema that a server gives of its actions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rlkit.rollout.envs.calls import answer_of, wrong_arguments


def actions_of(schema: Mapping[str, Any]) -> tuple[Callable[[str], dict[str, Any]], str]:
    """A function from the text of a turn to an action of this JSON schema, and what tells a model how to write one.

    An action of one text field is the text after the reasoning; any other is the last JSON object in it. The function
    raises ValueError, with what is wrong, for a text without a valid one.
    """
    fields = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
    name = next(iter(fields), "")
    only = fields.get(name, {})
    if only.get("type") == "string" and len(fields) == 1:
        about = f": {only['description']}" if only.get("description") else ""
        return (lambda text: {name: answer_of(text).strip()}), f"Your whole answer is the action's {name}{about}"
    parts = {"properties": fields, "required": [one for one in schema.get("required", ()) if one in fields]}
    parts |= {"$defs": schema["$defs"]} if "$defs" in schema else {}
    line = json.dumps(_without_titles(parts), ensure_ascii=False)

    def act(text: str) -> dict[str, Any]:
        action = _last_object(answer_of(text))
        problem = "no JSON object is in the answer" if action is None else wrong_arguments(parts, action)
        if problem is not None or action is None:
            raise ValueError(f"{problem}; an action is one JSON object of {line}")
        return action

    return act, f"Each answer is an action, one JSON object of this schema: {line}"


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {k: _without_titles(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
    return [*map(_without_titles, schema)] if isinstance(schema, list) else schema


def _last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object in a text that is not part of another."""
    start, last, decoder = text.find("{"), None, json.JSONDecoder()
    while start >= 0:
        try:
            last, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        start = text.find("{", end)
    return last


def show_observation(observation: Any) -> str:
    """An observation of OpenEnv's generic client as text: its only text field, or JSON without reward and metadata."""
    fields = {k: v for k, v in observation.items() if k not in ("done", "reward", "metadata") and v is not None}
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return json.dumps(fields, ensure_ascii=False)
