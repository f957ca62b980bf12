"""Programs that call the policy as a model behind HTTP: what `rlkit.agents.endpoint` is made of.

request                              a request and its answer, whatever format they have
demands                              what a request asks of a turn, checked after sampling
completions, responses, messages     the formats: OpenAI's chat completions and Responses, Anthropic's Messages
server                               one address for all episodes, with a secret path for each
branches                             the calls of an episode as a tree of turns, each trained as it was sampled
command, supervise                   a command as the program: its folder, limits, log and end
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlkit._util.numbers import as_number, is_number, show

ENDS = ("info", "reward", "score", "truncated", "turn_rewards")  # keywords of `Branches.end`


class AgentError(Exception):
    """A program failed in its episode, for the reason that is the message."""


def end_of(returned: Any) -> dict[str, Any]:
    """What a program returned, as keywords of `Branches.end`: a number is its reward; TypeError for anything else.

    >>> end_of(1), end_of({"reward": 0.5}), end_of(None)
    ({'reward': 1.0}, {'reward': 0.5}, {})
    """
    if isinstance(returned, float) or is_number(returned):  # NaN is reported with the row, as that of any episode
        return {"reward": as_number(returned)}
    if not (returned is None or (isinstance(returned, Mapping) and {*returned} <= {*ENDS})):
        form = f"return its reward, a number, or a dict with some of {', '.join(ENDS)}"
        raise TypeError(f"the program returned {show(returned)}: {form}")
    end = {name: value for name, value in (returned or {}).items() if value is not None or name == "reward"}
    info = end.get("info", {})
    if not isinstance(info, Mapping) or not isinstance(info.get("metrics", {}), Mapping):
        raise TypeError(f"the program returned info {show(info)}: give a dict, whose `metrics` are one too")
    return end
