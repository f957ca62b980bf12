"""Rewards: find a user's function, call it safely, and adapt it to rollouts; and the functions that most runs need.

What most runs need lies in modules of its own: `math`, `code` (in a `sandbox`), `text`, `judge` and `combine`. See
docs/rewards.md.
"""

from rlkit.rewards.adapters import own_scorer, scorer, with_messages
from rlkit.rewards.call import Reward, RewardError, Sample, score, score_each
from rlkit.rewards.load import load_function

__all__ = [
    "Reward",
    "RewardError",
    "Sample",
    "load_function",
    "own_scorer",
    "score",
    "score_each",
    "scorer",
    "with_messages",
]
