"""Rewards: load a user's function, run it safely, and use it in rollouts.

The reward functions themselves are in `math`, `code` (with its `sandbox`), `text`, `judge` and `combine`. See
docs/rewards.md.
"""

from rlkit._util.elsewhere import elsewhere
from rlkit.rewards.call import Reward, RewardError, Sample, run_reward, run_reward_each
from rlkit.rewards.load import load_function
from rlkit.rewards.scoring import env_rewards, scorer

__all__ = [
    "Reward", "RewardError", "Sample", "env_rewards", "load_function", "run_reward", "run_reward_each", "scorer",
]  # fmt: skip

__getattr__ = elsewhere(__name__)
