"""Advantages: from rewards and values to what multiplies the gradient of the log-probability.

Per sequence `[N]` from a group's rewards; per token `[T]` from rewards, values and traces. No function draws on another
rank or keeps state; what needs the whole batch says so.

    groups       baselines from the rewards of a prompt's samples, best of k
    traces       returns, GAE, TD(lambda), n-step
    off_policy   V-trace, Retrace, Q(lambda)
    batch        whitening, REINFORCE++, several rewards, GiGPO
"""

from rlkit.advantages import batch, groups, off_policy, traces
from rlkit.advantages.batch import *
from rlkit.advantages.groups import *
from rlkit.advantages.off_policy import *
from rlkit.advantages.traces import *

__all__ = [*batch.__all__, *groups.__all__, *off_policy.__all__, *traces.__all__]
