"""The columns that rlkit reads: what each may hold, and which part of a row it is.

What reads a column, trains on it or warns of it takes its names from this table. A form (`rlkit.data.turns`) says
which columns a row needs, and `rlkit.compat.rows` gives rlkit's columns for those of other systems.
"""

from __future__ import annotations

from typing import NamedTuple

STRING, MESSAGES, LABEL = "a string", "a list of at least one message", "true or false"
_EITHER = (STRING, MESSAGES)


class Column(NamedTuple):
    """A column: what it may hold, and the part of a row that it is. `gold`: rewards read a gold answer in it."""

    name: str
    part: str
    holds: tuple[str, ...] = _EITHER
    gold: bool = False


TABLE = (
    Column("messages", "prompt", (MESSAGES,)),
    Column("prompt", "prompt"),
    Column("response", "response"),
    Column("completion", "response"),
    Column("chosen", "pair"),
    Column("rejected", "pair"),
    Column("text", "text", (STRING,)),
    # of other systems: the prompt, and the response
    *(Column(name, "question") for name in ("problem", "question", "instruction", "query", "input", "context")),
    *(Column(name, "question", (MESSAGES,)) for name in ("conversations", "conversation", "context_messages")),
    Column("output", "answer"),
    # the gold answer, in the order in which rewards look for it; `label` is also that of a labelled response
    Column("answer", "answer", gold=True),
    Column("ground_truth", "gold", gold=True),
    Column("solution", "answer", gold=True),
    *(Column(f"{which}_answer", "gold", gold=True) for which in ("expected", "final", "correct", "reference")),
    Column("label", "label", (LABEL,), gold=True),
    Column("gt_answer", "gold", gold=True),
    Column("reward_model", "gold", gold=True),
    Column("kto_tag", "label", (LABEL,)),
    *(Column(name, "template") for name in ("system", "system_prompt", "tools", "functions")),
    *(Column(name, "template") for name in ("chat_template_kwargs", "enable_thinking")),
)
HOLDS = {column.name: column.holds for column in TABLE}


def columns_of(*parts: str) -> tuple[str, ...]:
    """The names of the columns that are one of these parts of a row."""
    return tuple(column.name for column in TABLE if column.part in parts)


PROMPTS, RESPONSES, PAIRED, LABELS = map(columns_of, ("prompt", "response", "pair", "label"))
OF_TEMPLATE = columns_of("template")
ANSWERS = columns_of("response", "pair")
IN_SFT = {*columns_of("response", "answer")}
OF_MESSAGES = columns_of("prompt", "response", "pair")
GOLD = tuple(column.name for column in TABLE if column.gold)
FOR_REWARDS = {*GOLD, *columns_of("response", "pair", "answer")}
ASKED = [name for name in columns_of("prompt", "question") if STRING in HOLDS[name]]
