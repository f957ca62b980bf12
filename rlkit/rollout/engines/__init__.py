"""Rollout engines. Their protocol is `rlkit.types.Engine`; docs/engines.md compares them and shows how to write one."""


class EngineError(ConnectionError, RuntimeError):
    """The engine is gone, hangs, or its answers are invalid: the run cannot continue with it."""


class Unreachable(EngineError):
    """Weights do not get through to a server that answers: another try would take as long, and fail again."""
