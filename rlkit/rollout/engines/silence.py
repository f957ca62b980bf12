"""A watchdog: reports an unresponsive engine in another process, for the screen and for a stop request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

TICK_S = 1.0
ASK_AFTER_S = 5.0
HUNG_AFTER_S = 30.0
_log = logging.getLogger("rlkit.rollout")


class Silence:
    """`seconds` since the last `heard()`, while `watch` runs; `who` names the engine in the log.

    A slow engine is not silent: it answers small questions between two of its steps.
    """

    def __init__(self, who: str) -> None:
        self.seconds, self._who, self._said = 0.0, who, False

    @property
    def hangs(self) -> bool:
        """Whether it has lasted for `HUNG_AFTER_S`."""
        return self.seconds >= HUNG_AFTER_S

    def heard(self) -> None:
        """The engine has answered something."""
        if self._said:
            _log.warning("%s answers again", self._who)
        self.seconds, self._said = 0.0, False

    async def watch(self, ask: Callable[[], object], *, waiting: Callable[[], object]) -> None:
        """Count while `waiting()` is true; `ask()` for an answer each second after `ASK_AFTER_S`; log a hang once."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            # a training step may have held this event loop, with the engine's answers unread
            self.seconds = self.seconds + min(now - last, 2 * TICK_S) if waiting() else 0.0
            last = now
            if self.seconds >= ASK_AFTER_S:
                ask()
            if self.hangs and not self._said:
                self._said = True
                _log.warning(
                    "%s has not answered for %.0f s: it hangs, or one step of it takes long; the run waits for it, and "
                    "one Ctrl-C ends the run",
                    self._who,
                    self.seconds,
                )
