"""Every law in one place: `laws.mask_isolation(my_loss)` raises with the smallest counterexample, or returns.

Laws with a parameter are made first: `laws.coefficient(lambda case: case.ratio)(my_loss)`.
"""

from rlkit.testing.law import Law, law, near, same
from rlkit.testing.laws_controllers import (
    Rule,
    feedback,
    refuses_nan,
    state_is_plain,
    update_is_pure,
    within_bounds,
)
from rlkit.testing.laws_estimators import centred, equals_loop, limit, rewards_raise, scales, shift_invariant
from rlkit.testing.laws_kl import (
    backward,
    expectation,
    forward,
    gradient_expectation,
    non_negative,
    nothing,
    zero_at_equality,
)
from rlkit.testing.laws_logp import normalised, temperature_is_scale
from rlkit.testing.laws_numerics import (
    compiles,
    detached,
    differentiable,
    dtypes,
    finite,
    gradcheck,
    no_gradient_by,
    pure,
)
from rlkit.testing.laws_objectives import monotone
from rlkit.testing.laws_policy import clipped, coefficient, descends, no_advantage_no_gradient, on_policy
from rlkit.testing.laws_preference import margin_only, prefers_chosen
from rlkit.testing.laws_structure import (
    additive,
    all_count,
    group_isolation,
    group_labels,
    mask_isolation,
    masked_is_zero,
    nothing_to_train_on,
    padded_is_packed,
    permutation,
    segment_isolation,
    shape,
    singleton_is_zero,
    sums_to_one,
)

__all__ = [
    "Law",
    "Rule",
    "additive",
    "all_count",
    "backward",
    "centred",
    "clipped",
    "coefficient",
    "compiles",
    "descends",
    "detached",
    "differentiable",
    "dtypes",
    "equals_loop",
    "expectation",
    "feedback",
    "finite",
    "forward",
    "gradcheck",
    "gradient_expectation",
    "group_isolation",
    "group_labels",
    "law",
    "limit",
    "margin_only",
    "mask_isolation",
    "masked_is_zero",
    "monotone",
    "near",
    "no_advantage_no_gradient",
    "no_gradient_by",
    "non_negative",
    "normalised",
    "nothing",
    "nothing_to_train_on",
    "on_policy",
    "padded_is_packed",
    "permutation",
    "prefers_chosen",
    "pure",
    "refuses_nan",
    "rewards_raise",
    "same",
    "scales",
    "segment_isolation",
    "shape",
    "shift_invariant",
    "singleton_is_zero",
    "state_is_plain",
    "sums_to_one",
    "temperature_is_scale",
    "update_is_pure",
    "within_bounds",
    "zero_at_equality",
]
