"""Rollout engines. Their protocol is `rlkit.types.Engine`; docs/engines.md compares them and shows how to write one."""
