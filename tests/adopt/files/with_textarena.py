"""The other player of a game of TextArena: a function from the text so far to an action."""

import re


async def first(text):
    """The first action that is allowed."""
    allowed = re.findall(r"available actions are: (.*)", text)[-1]
    return re.findall(r"\[\w+\]", allowed)[0]
