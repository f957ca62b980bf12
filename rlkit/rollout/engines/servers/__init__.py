"""What engines over inference servers share: one client for several servers, their health, their processes, checks.

`rlkit.rollout.engines.sglang` and `rlkit.rollout.engines.vllm` say how their servers are spoken to (`api.Api`) and how
weights reach them.
"""

from rlkit.rollout.engines.http import ReplicaError

__all__ = ["ReplicaError"]
