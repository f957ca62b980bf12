"""Rewards: find a user's function, call it safely, and adapt it to rollouts."""

from rlkit.rewards.adapters import scorer, with_messages
from rlkit.rewards.call import Reward, RewardError, Sample, score
from rlkit.rewards.load import load_function

__all__ = ["Reward", "RewardError", "Sample", "load_function", "score", "scorer", "with_messages"]
