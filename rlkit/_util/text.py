"""Text for a terminal and for files that others may read (no control characters, no passwords), and of flags."""

from __future__ import annotations

import ast
import re
from typing import Any

# all but \n and \t: C0, DEL, C1, line separators, overrides of the direction, and halves of a surrogate pair
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_USER = re.compile(r"(\w+://)(?:([^\s/?#:@]*):)?[^\s/?#@]+@")  # of a URL: user:password@, or a token@
_QUERY = re.compile(r"([?&][\w-]*(?:key|token|secret|password|sig|signature)=)[^&\s#'\"]+", re.IGNORECASE)
_CALL = re.compile(r"(.+?:[^()\s]+)\((.*)\)", re.DOTALL)


class Explained(RuntimeError):
    """An error whose message says all: a script prints it without the traceback."""


def printable(text: str) -> str:
    r"""The text with control characters as escapes, \x1b for example, so that a terminal shows and does not obey them.

    Newlines and tabs stay. Text of models, data, files and servers goes through this where it is printed.
    """
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1] if ord(match[0]) < 256 else f"\\u{ord(match[0]):04x}", text)


def excerpt(value: Any, most: int = 80) -> str:
    """The repr of a value; of a long one the first `most` characters and an ellipsis."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def masked(value: Any) -> Any:
    """The value, in lists and dicts too, with *** for the passwords and tokens of its URLs: http://user:***@host."""
    if isinstance(value, str):
        plain = _USER.sub(lambda match: f"{match[1]}{'' if match[2] is None else match[2] + ':'}***@", value)
        return _QUERY.sub(r"\1***", plain)
    if isinstance(value, dict):
        return {key: masked(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(masked, value)) if type(value) in (list, tuple) else value
    return value


def parse_call(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of `PLACE:NAME(n=512, tags=("a", "b"))`; no arguments in a text of another form.

    ValueError, with the whole `spec`, for all but literals with a name.
    """
    called = _CALL.fullmatch(spec)
    if called is None:
        return spec, {}
    try:
        call: Any = ast.parse(f"f({called[2]})", mode="eval").body
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return called[1], {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, AttributeError):
        raise ValueError(
            f"{spec}: arguments are keywords with literal values, as in f(n=512, tags=('a', 'b'))"
        ) from None
