"""What engines over inference servers share: one client for several servers, their health, their processes, checks.

The kinds of servers are `rlkit.rollout.engines.sglang` and `rlkit.rollout.engines.vllm`: how they are spoken to
(`api.Api`), started, and given weights; see `kinds.ServerKind`.
"""

from rlkit.rollout.engines.http import ReplicaError

__all__ = ["ReplicaError"]
