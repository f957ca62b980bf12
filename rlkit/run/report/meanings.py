"""The keys of metrics.jsonl: unit, meaning and what is healthy, as docs/metrics.md and the report show them."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import NamedTuple


class Meaning(NamedTuple):
    """One row of metrics.tsv; `healthy` is "" where there is nothing to say."""

    keys: tuple[str, ...]
    unit: str
    meaning: str
    healthy: str = ""


def _read() -> dict[str, list[Meaning]]:
    sections: dict[str, list[Meaning]] = {}
    for line in files("rlkit.run.report").joinpath("assets/metrics.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            rows = sections[line[3:]] = []
        elif not line.startswith("#"):
            keys, *rest = line.split("\t")
            rows.append(Meaning((*keys.split(),), *rest))
    return sections


SECTIONS = _read()  # title in docs/metrics.md -> its rows
_BY_KEY = {key: row for rows in SECTIONS.values() for row in rows for key in row.keys}
KEYS = tuple(_BY_KEY)


def sign_of(key: str) -> int:
    """1 for a metric of which the highest value is best, -1 for a loss."""
    return -1 if key.endswith("loss") else 1


def set_of(key: str) -> str:
    """The name of the held-out set that a metric `eval/NAME/...` is of; "" for one of all of them."""
    match = re.match(r"eval/([^/]+)/", key)
    return "" if match is None or match[0] + "NAME" in _BY_KEY or key in _BY_KEY else match[1]


def meaning_of(key: str) -> Meaning | None:
    """The row of a metric; a reward's own part has that of `reward/NAME`, another unknown key has none.

    A metric of a named held-out set, `eval/NAME/...`, has the row of `eval/...`; `eval/pass@8` that of `eval/pass@K`.
    """
    general = re.sub(r"pass@\d+", "pass@K", key)
    plain = general.replace(f"eval/{set_of(general)}/", "eval/", 1) if set_of(general) else general
    return _BY_KEY.get(general) or _BY_KEY.get(plain) or (_BY_KEY["reward/NAME"] if key.startswith("reward/") else None)
