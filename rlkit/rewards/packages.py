"""The scorers of packages that make data (`rlkit.data.packages`), as rewards of their rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rlkit._util.text import parse_call
from rlkit.data.packages import gym_task
from rlkit.rewards.text import last_tag


def reasoning_gym(completion: str, row: dict[str, Any]) -> dict[str, Any]:
    """The score of reasoning-gym's own scorer of the row's task, in [0, 1]; `score` (logged) is 1 for a score of 1.

    The answer is the text of the last `<answer>` tag, as in the package; without one, the completion after its last
    `</think>`. Many scorers give a part of 1 to an answer that only contains the right one. Where a scorer raises on an
    answer, that answer is malformed and gets 0, with the exception as `reason`; a scorer that raises on the row's own
    answer, too, is an error.

    The scorers run in this process. Those of countdown, puzzle24 and some others read the answer with sympy, which
    evaluates it as Python: train on them where that is acceptable.
    """
    score, entry = _scorer(row["data_source"]), {name: row[name] for name in ("question", "answer", "metadata")}
    tagged = last_tag(completion)
    answer = completion.rpartition("</think>")[2].strip() if tagged is None else tagged
    try:
        reward, notes = float(score(answer, entry)), {}
    except Exception as error:
        score(entry["answer"], entry)
        reward, notes = 0.0, {"reason": f"{type(error).__name__}: {error}"}
    return {"reward": reward, "score": float(reward >= 1), **notes}


reasoning_gym.needs = ("data_source", "question", "metadata")  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _scorer(data_source: str) -> Any:
    """The scorer of a task with its arguments, which some scorers read."""
    name, arguments = parse_call(f"reasoning_gym:{data_source.removeprefix('reasoning_gym:')}")
    return gym_task(name.partition(":")[2], size=1, seed=0, **arguments).score_answer
