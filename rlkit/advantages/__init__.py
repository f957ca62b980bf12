"""Advantage estimators.

Group baselines map rewards `[N]` to one advantage per sequence `[N]`; traces map per-token rewards and values `[T]` to
one advantage per token `[T]`. All functions are stateless and local to the rank. Functions that need statistics of the
whole batch say so.

    groups       baselines from the rewards of one prompt's samples; best of k
    traces       returns, GAE, TD(lambda), n-step
    off_policy   V-trace, Retrace, Q(lambda)
    batch        whitening, REINFORCE++, multiple rewards
    turns        returns per turn, GiGPO, TRACE
"""

from rlkit._util.elsewhere import elsewhere
from rlkit.advantages import batch, groups, off_policy, traces, turns
from rlkit.advantages.batch import *
from rlkit.advantages.groups import *
from rlkit.advantages.off_policy import *
from rlkit.advantages.traces import *
from rlkit.advantages.turns import *

__all__ = [*batch.__all__, *groups.__all__, *off_policy.__all__, *traces.__all__, *turns.__all__]

__getattr__ = elsewhere(__name__)
