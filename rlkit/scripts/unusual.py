"""Values of flags that are allowed and hardly ever meant: percents, another scale, a bound that never binds."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import inf, log
from typing import Any, NamedTuple

from rlkit._util.text import parse_call
from rlkit.data.schema import ASKED
from rlkit.settings import Rollouts, is_default

_log = logging.getLogger("rlkit.scripts")


class Unusual(NamedTuple):
    """A flag, where its value `x` (of several the first) is unusual among the flags `f`, and the line, which may name
    them and `uniform`."""

    flag: str
    where: Callable[[Any, Mapping[str, Any]], bool]
    says: str


def _never_overlong(flags: Mapping[str, Any]) -> bool:
    """Whether a penalty of `rlkit.rewards.text.soft_overlong` begins above what the answer of one turn may have."""
    specs, most = flags["reward"], flags.get("max_new_tokens") or inf
    calls = [parse_call(spec[: spec.rfind(")") + 1]) for spec in ([specs] if isinstance(specs, str) else specs)]
    given = [(x.get("max_tokens"), x.get("cache_tokens")) for name, x in calls if name.endswith(":soft_overlong")]
    never = any(type(limit) is type(cache) is int and limit - cache >= most for limit, cache in given)
    return never and not any(flags.get(name) for name in ("env", "agent", "tools"))


_GSPO = "gspo clips the ratio of a whole answer, per token, and hardly one is that far from 1; 3e-4 and 4e-4 are usual"
_ENTROPY = "no policy has that entropy: the uniform one has ln V = {uniform:.3g} nats per token"
UNUSUAL = (
    Unusual("clip_low", lambda x, f: 1 <= x < inf and f.get("loss") != "gmpo",
            "a distance from 1, so the ratio is never clipped below; 0.2 is 20%, and inf clips nothing"),
    Unusual("clip_high", lambda x, _: 10 <= x < inf,
            "a distance from 1, so only ratios above {above:g} are clipped; 0.2 is 20%, and inf clips nothing"),
    Unusual("clip_low", lambda x, f: 0.7 <= x < 1 and f.get("loss") != "gmpo",
            "a distance from 1, so only ratios below {off:.3g} are clipped; if it is the bound, give {off:.3g}"),
    Unusual("clip_high", lambda x, f: 1 < x <= 1.5 and f.get("loss") != "gmpo",
            "a distance from 1, so only ratios above {above:g} are clipped; if it is the bound, give {off:.3g}"),
    Unusual("clip_low", lambda x, f: f.get("loss") == "gspo" and (f["clip_high"] or 0) < 0.05 <= x < 0.7, _GSPO),
    Unusual("clip_high", lambda x, f: f.get("loss") == "gspo" and 0.05 <= x <= 1, _GSPO),
    Unusual("success_range", lambda x, f: 1 <= x < 10 < f["success_range"][1] <= 100,
            "bounds of the mean score itself; if percents are meant of scores between 0 and 1, give shares: 0.01 0.99"),
    Unusual("temperature", lambda x, _: x > 5, "samples are close to random tokens; 0.6 to 1.2 is usual"),
    Unusual("top_k", lambda x, f: x == 1 and f.get("group_size", 1) > 1,
            "always the most likely token, so that all samples of a group are the same and nothing trains"),
    Unusual("entropy_target", lambda x, f: x > f["uniform"], _ENTROPY),
    Unusual("entropy_limit", lambda x, f: x > f["uniform"], _ENTROPY),
    Unusual("entropy_coef", lambda x, _: x < 0, "a negative bonus lowers the entropy; a positive one raises it"),
    Unusual("lr", lambda x, f: x > 0.01 and f.get("optimizer") == "adamw" and not (f.get("lora_rank") or f["adapter"]),
            "a step of AdamW changes each weight by about that much; 1e-6 to 1e-4 is usual for all weights"),
    Unusual("engine_quantization", lambda _, f: f.get("correction") == "none",
            "nothing weighs tokens for what their log-probs differ by (`mismatch`); --correction tis does"),
    Unusual("reward", lambda _, f: _never_overlong(f),
            "it begins above max_tokens - cache_tokens, which --max-new-tokens {max_new_tokens} never exceeds"),
    Unusual("staleness", lambda x, _: x > 16,
            "groups train up to that many steps late, or each step starts as many times its prompts; 1 is usual"),
)  # fmt: skip


def warn_of_unusual(flags: Mapping[str, Any], *, num_rows: int | None = None) -> None:
    """Log a line for each value that is hardly ever meant; `num_rows` is the size V of the vocabulary, if known."""
    warnings.filterwarnings("ignore", "clip_.*: of a distance from 1", UserWarning)  # of the loss: said here
    values = {"adapter": None, **flags, "uniform": inf if num_rows is None else log(num_rows)}
    for flag, where, says in UNUSUAL:
        given = values.get(flag)
        x, *more = given if isinstance(given, tuple) else (given,)
        if x is not None and where(x, values):
            number = 0 if isinstance(x, str) else x
            said = says.format(above=1 + number, off=abs(1 - number), **values)
            text = " ".join(format(part, "" if isinstance(part, str) else "g") for part in (x, *more))
            _log.warning("--%s %s: %s", flag.replace("_", "-"), text, said)


def warn_of_teacher_prompt(names: Sequence[str]) -> None:
    """Log a prompt of the teacher whose columns are none that asks."""
    if not {"prompt", *ASKED} & {*names}:
        _log.warning(
            "--teacher-prompt reads %s and no {prompt}: the teacher does not see the question", ", ".join(names)
        )


def warn_of_clip(loss: Any, rollouts: Rollouts) -> None:
    """Log clip distances that cannot act: with one optimizer step on a batch every ratio is 1."""
    flags = [f"--{x.replace('_', '-')}" for x in ("clip_low", "clip_high") if not is_default(loss, x)]
    if flags and rollouts.minibatches * rollouts.epochs == 1:
        _log.warning(
            "%s: nothing is clipped with one optimizer step on a batch, where every ratio is 1; use --minibatches or "
            "--epochs above 1", " and ".join(flags),
        )  # fmt: skip
