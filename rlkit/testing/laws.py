"""All laws: `laws.mask_isolation(my_loss)` raises with the smallest counterexample, or returns.

Laws with parameters are functions that return a law: `laws.coefficient(lambda case: case.ratio)(my_loss)`.
"""

from rlkit.testing import (
    laws_controllers,
    laws_estimators,
    laws_kl,
    laws_logp,
    laws_numerics,
    laws_objectives,
    laws_policy,
    laws_preference,
    laws_structure,
    laws_transforms,
)
from rlkit.testing.law import Law, law, near, same
from rlkit.testing.laws_controllers import *
from rlkit.testing.laws_estimators import *
from rlkit.testing.laws_kl import *
from rlkit.testing.laws_logp import *
from rlkit.testing.laws_numerics import *
from rlkit.testing.laws_objectives import *
from rlkit.testing.laws_policy import *
from rlkit.testing.laws_preference import *
from rlkit.testing.laws_structure import *
from rlkit.testing.laws_transforms import *

_FILES = (
    laws_controllers, laws_estimators, laws_kl, laws_logp, laws_numerics, laws_objectives, laws_policy, laws_preference,
    laws_structure, laws_transforms,
)  # fmt: skip
__all__ = ["Law", "law", "near", "same", *(name for file in _FILES for name in file.__all__)]
