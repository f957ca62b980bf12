"""Text for a terminal and for files that others may read: no control characters, no passwords."""

from __future__ import annotations

import re
from string import Formatter
from typing import Any

# all but \n and \t: C0, DEL, C1, line separators, overrides of the direction, and halves of a surrogate pair
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_USER = re.compile(r"(\w+://)(?:([^\s/?#:@]*):)?[^\s/?#@]+@")  # of a URL: user:password@, or a token@
_QUERY = re.compile(r"([?&][\w-]*(?:key|token|secret|password|sig|signature)=)[^&\s#'\"]+", re.IGNORECASE)


class Explained(RuntimeError):
    """An error whose message says all: a script prints it without the traceback."""


def printable(text: str) -> str:
    r"""The text with control characters as escapes, \x1b for example, so that a terminal shows and does not obey them.

    Newlines and tabs stay. Text of models, data, files and servers goes through this where it is printed.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1] if ord(found[0]) < 256 else f"\\u{ord(found[0]):04x}", text)


def masked(value: Any) -> Any:
    """The value, in lists and dicts too, with *** for the passwords and tokens of its URLs: http://user:***@host."""
    if isinstance(value, str):
        plain = _USER.sub(lambda found: f"{found[1]}{'' if found[2] is None else found[2] + ':'}***@", value)
        return _QUERY.sub(r"\1***", plain)
    if isinstance(value, dict):
        return {key: masked(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(masked, value)) if type(value) in (list, tuple) else value
    return value


def format_names(text: str) -> list[str]:
    """The names in braces of a format string; ValueError for one that is malformed, or has a place without a name."""
    try:
        fields = [field for _, field, _, _ in Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise ValueError(f"{text!r} is no format string ({error}): write {{{{ and }}}} for braces") from None
    names = [re.split(r"[.\[]", field)[0] for field in fields]
    if not all(name.isidentifier() for name in names):
        raise ValueError(f"{text!r}: each place in braces names a column, as in {{answer}}; write {{{{ for a brace")
    return names
