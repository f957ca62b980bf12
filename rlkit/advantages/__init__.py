"""Advantages: from rewards and values to what multiplies the gradient of the log-probability."""

from rlkit.advantages.outcome import group_centered, group_zscore, leave_one_out

__all__ = ["group_centered", "group_zscore", "leave_one_out"]
