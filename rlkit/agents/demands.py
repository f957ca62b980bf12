"""What a request asks of a turn that no sampling can promise: JSON, a call, a single call. It is checked, not enforced.

A grammar would sample from another distribution than the run's, and so would a hidden retry until a turn y fits:

    p(y | fits) = p(y) / P(fits),        grad log p(y | fits) = grad log p(y) - grad log P(fits)

The log-probs that are trained are those of p: they lack the last term, and turns that do not fit, which are what should
become rare, would never be trained. So each turn is returned and trained as it was sampled, and those that do not fit
are counted. A program that asks again samples a further turn, which is trained as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rlkit._util.untrusted import depth_is_fine
from rlkit.rollout.calling import report_once
from rlkit.rollout.envs.calls import Call, answer_of

MAX_DEPTH = 64  # of nested lists and objects; templates recurse
FORMATS = ("text", "json_object", "json_schema")


class BadRequest(ValueError):
    """A request that cannot be served. `code` is OpenAI's error code, `status` that of HTTP."""

    def __init__(self, message: str, code: str = "invalid_request_error", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def need(right: Any, otherwise: str) -> None:
    """Refuse the request unless `right`."""
    if not right:
        raise BadRequest(otherwise)


class Demands(NamedTuple):
    """`schema` is the JSON schema of the text; `call` the name of the function to call, "" for any; `strict` are the
    schemas of functions whose arguments must fit, by name. None: not asked."""

    schema: Mapping[str, Any] | None = None
    call: str | None = None
    parallel: bool = True
    strict: Mapping[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """The fields that are asked for."""
        asked = {
            "response_format": self.schema is not None, "tool_choice": self.call is not None,
            "parallel_tool_calls": not self.parallel, "strict": bool(self.strict),
        }  # fmt: skip
        return [name for name, is_asked in asked.items() if is_asked]


def read(choice: Any, form: Any, parallel: Any, tools: Sequence[Any] | None) -> tuple[Demands, bool]:
    """The demands of a request, and whether calls are read at all: `tool_choice` "none" leaves them in the text.

    `choice` is "auto", "none", "required" (Anthropic's "any") or an object with the name of a function, `form` a format
    of the text with its `schema`, each as some format of requests has it.
    """
    need(isinstance(parallel, bool | None), "`parallel_tool_calls` must be true or false")
    functions = {t["function"]["name"]: t["function"] for t in tools or ()}
    strict = {name: f.get("parameters") or {} for name, f in functions.items() if f.get("strict") is True}
    for schema in strict.values():
        _check(schema)
    name = _name(choice)
    need(name is None or functions, "`tool_choice` asks for a call, and `tools` has no function")
    need(not name or name in functions, f"`tool_choice` names {str(name)[:80]!r}, which is not among `tools`")
    return Demands(_schema(form), name, parallel is not False, strict or None), choice != "none"


def unmet(demands: Demands, text: str, calls: Sequence[Call]) -> bool:
    """Whether a turn lacks what was asked. A turn with calls needs no JSON; reasoning is not part of the text."""
    if demands.call is not None and (not calls or any(demands.call not in ("", call.name) for call in calls)):
        return True
    if len(calls) > 1 and not demands.parallel:
        return True
    if calls:
        schemas = demands.strict or {}
        return not all(_fits(call.arguments, schemas[call.name]) for call in calls if call.name in schemas)
    return demands.schema is not None and not _is_json(answer_of(text), demands.schema)


def _name(choice: Any) -> str | None:
    if choice in (None, "auto", "none"):
        return None
    if choice in ("required", "any"):
        return ""
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    need(isinstance(name, str) and name, "`tool_choice` must be auto, none, required or a function with its name")
    return name


def _schema(form: Any) -> Mapping[str, Any] | None:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    need(kind in FORMATS, f"`response_format` must have as `type` one of {', '.join(FORMATS)}")
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    schema = form["json_schema"].get("schema") if isinstance(form.get("json_schema"), Mapping) else form.get("schema")
    need(isinstance(schema, Mapping), "`response_format` of type json_schema must have a `schema`, an object")
    _check(schema)
    return schema


def _is_json(text: str, schema: Mapping[str, Any]) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return depth_is_fine(value, MAX_DEPTH) and _fits(value, schema)


def _check(schema: Any) -> None:
    try:
        _validator(json.dumps(schema))
    except Exception as error:  # of jsonschema: SchemaError, or what a keyword of a wrong type raises in it
        raise BadRequest(f"the JSON schema is not valid: {str(error).splitlines()[0][:200]}") from None


def _fits(value: Any, schema: Any) -> bool:
    validator = _validator(json.dumps(schema))
    try:
        return validator is None or validator.is_valid(value)
    except Exception as error:  # a pattern that is no regular expression, a reference to nothing or to a file elsewhere
        raise BadRequest(f"the JSON schema cannot be checked: {type(error).__name__}: {str(error)[:200]}") from None


@lru_cache(256)
def _validator(schema: str) -> Any:
    """The validator of a schema, which reads nothing from elsewhere; None without jsonschema."""
    try:
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing import Registry
    except ImportError:
        report_once("an agent", "gives a JSON schema", ", which is not checked: pip install 'jsonschema>=4.18'")
        return None
    given = json.loads(schema)
    kind = validator_for(given, default=Draft202012Validator)
    kind.check_schema(given)
    return kind(given, registry=Registry())
