"""Rollout engines. Their protocol is `rlkit.types.Engine`; docs/engines.md compares them and shows how to write one."""


class EngineError(ConnectionError, RuntimeError):
    """The engine is gone, hangs, or its answers are invalid: the run cannot continue with it."""
