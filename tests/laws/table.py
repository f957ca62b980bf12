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
from rlkit.testing import laws
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
GENERATOR = "it draws from a random generator"
POINTS = "its points are Python floats"
C_LIBRARY = "it selects points by their values, or calls a C library"
LENGTH = "the length of its result depends on the mask's values"
COUNT = "it reads the number of tokens from the mask"
SCATTER = "vmap has no rule for masked_scatter: it loops over the batch, with a warning"
TRANSFORMS: dict[laws.Law, dict[str, str]] = {  # of torch, with the rows that they do not take, and why
    laws.compiles(): {
        "losses.select_between": GENERATOR,
        "losses.select_top": GENERATOR,
        "objectives.hypervolume": C_LIBRARY,
        "objectives.archive_insert": POINTS,
        "objectives.archive_init (see archive_insert)": POINTS,
        "packing.from_padded": LENGTH,
        "packing.to_padded": COUNT,
    },
    laws.func_grad: {"objectives.hypervolume": C_LIBRARY},
    laws.vmaps: {
        "losses.select_between": GENERATOR,
        "losses.select_top": GENERATOR,
        "advantages.turn_lens": "its result has one entry per turn: another length for each mask",
        "objectives.hypervolume": C_LIBRARY,
        "objectives.archive_insert": POINTS,
        "objectives.archive_init (see archive_insert)": POINTS,
        "packing.from_padded": SCATTER,
        "packing.to_padded": SCATTER,
    },
    laws.exports: {
        "objectives.hypervolume": C_LIBRARY,
        "objectives.archive_insert": POINTS,
        "objectives.archive_init (see archive_insert)": POINTS,
        "packing.from_padded": LENGTH,
        "packing.to_padded": COUNT,
    },
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
