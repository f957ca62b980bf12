"""Validation of rewards: one finite real number within the range of float32, the dtype used in training."""

from __future__ import annotations

from decimal import Decimal
from numbers import Real
from typing import Any

_LARGEST = 3.4028234663852886e38  # of float32


def to_number(value: Any) -> float:
    """Convert a bool, int, float, or a numpy or torch scalar to float.

    >>> to_number(True), to_number(2)
    (1.0, 2.0)

    Raises TypeError for anything else (complex, text, a tensor of several elements), and ValueError for NaN, infinity
    and values beyond +-3.4e38.
    """
    if type(value) is not float:
        if getattr(value, "shape", None) == ():
            value = value.item()
        if not isinstance(value, Real | Decimal):  # a Decimal is no Real
            raise TypeError(f"not a real number: {show(value)}")
    try:
        number = float(value)
    except OverflowError:  # an int or a Fraction beyond float64
        raise ValueError(f"{show(value)}, beyond float64") from None
    if not -_LARGEST <= number <= _LARGEST:  # nan as well
        raise ValueError(str(number))
    return number


def is_number(value: Any) -> bool:
    """Whether `to_number` accepts the value.

    >>> is_number(0.5), is_number(float("nan")), is_number(10**400), is_number(None)
    (True, False, False, False)
    """
    try:
        to_number(value)
    except Exception:  # the conversion of a foreign type may raise anything
        return False
    return True


def as_number(value: Any) -> Any:
    """The value as a float, or unchanged where it is no number, for a later check to report with its place."""
    return to_number(value) if is_number(value) else value


def show(value: Any) -> str:
    """Type and truncated repr of any value, in one line.

    >>> show("0.5")
    "str '0.5'"
    """
    try:
        text = repr(value)
    except Exception as error:  # Python refuses to print an int of more than 4300 digits
        text = f"({error})"
    return f"{type(value).__name__} {' '.join(text.split())[:80]}"
