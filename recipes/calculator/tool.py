"""A calculator for the model."""

import re


def calculate(expression: str) -> str:
    """Calculate with whole numbers.

    Args:
        expression: numbers with +, - and *, such as 12 * 34 + 5
    """
    if not re.fullmatch(r"\d{1,6}( ?[-+*] ?\d{1,6}){0,4}", expression.strip()):
        raise ValueError("only whole numbers with +, - and *")
    return str(eval(expression))  # nothing but what the line above lets through
