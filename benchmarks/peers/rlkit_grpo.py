"""rlkit grpo as a user starts it, with one more timer: `time/forward` in metrics.jsonl.

    .venv/bin/python benchmarks/peers/rlkit_grpo.py --model M --data train.jsonl --reward FILE.py:NAME --output RUN ...

The loop times its rollout and its training; this also takes the log-prob forward inside the training apart from the
backward pass, as trl_grpo.py does for TRL. Arguments are those of rlkit grpo.
"""

from __future__ import annotations

import time
from typing import Any

from rlkit.scripts import grpo
from rlkit.scripts.cli import run


def add_forward_timer() -> None:
    """Time every call of the policy's forward, and report the sum with the other times of the step."""
    from rlkit.loops.evaluate import Clock
    from rlkit.model import forward as model

    forward, times = model.forward, Clock.times
    spent = 0.0

    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        out = forward(*args, **kwargs)
        spent += time.perf_counter() - start
        return out

    def with_forward(self: Clock, *, num_tokens: int) -> dict[str, float]:
        nonlocal spent
        line = {**times(self, num_tokens=num_tokens), "time/forward": spent}
        spent = 0.0
        return line

    model.forward, Clock.times = timed_forward, with_forward  # type: ignore[method-assign]


def load_models(*args: Any) -> Any:
    """The script's own, when torch is imported as `rlkit grpo` imports it."""
    add_forward_timer()
    return script_load_models(*args)


if __name__ == "__main__":
    script_load_models, grpo.load_models = grpo.load_models, load_models
    run(grpo.main, grpo.Args, grpo.__doc__)
