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

__all__ = [
    "Law",
    "law",
    "near",
    "same",
    *laws_controllers.__all__,
    *laws_estimators.__all__,
    *laws_kl.__all__,
    *laws_logp.__all__,
    *laws_numerics.__all__,
    *laws_objectives.__all__,
    *laws_policy.__all__,
    *laws_preference.__all__,
    *laws_structure.__all__,
    *laws_transforms.__all__,
]
