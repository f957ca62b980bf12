"""What the tests of environments of other systems share."""

import pytest
from scripted import prompt_of

from rlkit.data.prompts import Prompt

REAL = pytest.param(True, marks=pytest.mark.slow, id="real")
BOTH = pytest.mark.parametrize("real", [pytest.param(False, id="stand-in"), REAL])


def with_row(tokenizer, row, index=0):
    return Prompt(**{**vars(prompt_of(tokenizer)), "row": row, "index": index, "place": ""})


def user_says(piece):
    return [m["content"] for m in piece.info["messages"] if m["role"] != "assistant"]
