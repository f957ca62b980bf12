"""The table: every public loss, estimator, controller and objective is a row."""

from __future__ import annotations

import inspect

import rows_advantages
import rows_losses
import rows_other
import rows_preference
import rows_surrogates
from row import Row

from rlkit import advantages, controllers, losses, objectives
from rlkit.types import Controller

SECTIONS = {
    "Surrogates": rows_surrogates.ROWS,
    "Ratios": rows_losses.RATIOS,
    "Weights": rows_losses.WEIGHTS,
    "Corrections": rows_losses.CORRECTIONS,
    "KL": rows_losses.KLS,
    "Entropy": rows_losses.ENTROPY,
    "Values": rows_losses.VALUES,
    "Reward models": rows_losses.REWARD_MODELS,
    "Preference": [*rows_preference.MARGINS, *rows_preference.ANCHORED, *rows_preference.OTHERS],
    "Distillation": rows_preference.DISTILLATION,
    "Diagnostics": rows_losses.DIAGNOSTICS,
    "Traces": rows_advantages.TRACES,
    "Group baselines": rows_advantages.OUTCOME,
    "Batch and token baselines": rows_advantages.OTHERS,
    "Controllers": rows_other.CONTROLLERS,
    "Objectives": rows_other.OBJECTIVES,
    "Segments and packing": rows_other.SEGMENTS,
    "Kernels": rows_other.KERNELS,
}
NOT_COMPILED = {
    "losses.select_between": "a random generator cannot be traced",
    "losses.select_top": "a random generator cannot be traced",
    "objectives.hypervolume": "it loops over the points' values, or calls a C library",
    "objectives.archive_insert": "its points are Python floats",
    "objectives.archive_init (see archive_insert)": "its points are Python floats",
    "packing.from_padded": "the length of its result depends on the mask's values",
    "packing.to_padded": "it reads the number of tokens from the mask",
    "kernels.linear_logp (reference)": "it selects rows by the mask's values; the other implementations are operators",
}
ROWS: list[Row] = [row for rows in SECTIONS.values() for row in rows]


def public() -> dict[str, object]:
    """Every public function that must have a row, by qualified name; types (NamedTuples of results) need none."""
    found = {}
    for module in (losses, advantages, objectives):
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    found |= {f"{controllers.__name__}.{name}": f for name, f in vars(controllers).items() if _makes_controller(f)}
    return {name: f for name, f in found.items() if not inspect.isclass(f)}


def _makes_controller(f: object) -> bool:
    if not inspect.isfunction(f) or f.__name__.startswith("_"):
        return False
    return inspect.signature(f, eval_str=True).return_annotation is Controller
