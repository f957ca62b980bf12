"""A name that stands elsewhere says where: of another module, or of another system."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from rlkit._util.elsewhere import other_systems

PACKAGES = ("rlkit", "rlkit.losses", "rlkit.advantages", "rlkit.rollout", "rlkit.rewards", "rlkit.data", "rlkit.model",
            "rlkit.loops", "rlkit.kernels")  # fmt: skip
HOMES = {
    "cispo": "rlkit.losses", "ipo": "rlkit.losses", "gdpo": "rlkit.advantages", "sum_per_seq": "rlkit.segments",
    "prepare_model": "rlkit.model.forward", "Turns": "rlkit.rollout.envs.turns", "boxed": "rlkit.rewards.math",
    "SGLang": "rlkit.rollout.engines.sglang", "check_rows": "rlkit.rewards.rows",
}  # fmt: skip


def refused(module: str, name: str) -> str:
    with pytest.raises(ImportError) as found:
        exec(f"from {module} import {name}", {})
    return str(found.value)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", HOMES)
def test_a_name_of_another_module_says_where_it_is(package: str, name: str) -> None:
    if name in vars(importlib.import_module(package)):
        assert HOMES[name] == package
        return
    assert refused(package, name) == f"{name} is in {HOMES[name]}, not in {package}"
    assert hasattr(importlib.import_module(HOMES[name]), name)


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_nobody_are_missing_as_ever(package: str) -> None:
    found = importlib.import_module(package)
    assert not hasattr(found, "nobody_has_this")
    assert not hasattr(found, "__wrapped__")
    assert refused(package, "nobody_has_this").startswith(f"cannot import name 'nobody_has_this' from '{package}'")


@pytest.mark.slow
def test_submodules_are_imported_though_a_function_has_their_name() -> None:
    """In a new process, where none of them is loaded before its own line."""
    code = """
import sys
for name in "rlkit.rollout.stream", "rlkit.loops.sft", "rlkit.loops.grpo":
    package, _, last = name.rpartition(".")
    loaded = name in sys.modules
    exec(f"from {package} import {last} as module")
    print(loaded, module.__name__)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert out.splitlines() == [f"False {x}" for x in ("rlkit.rollout.stream", "rlkit.loops.sft", "rlkit.loops.grpo")]


@pytest.mark.parametrize(("name", "here"), other_systems())
def test_names_of_other_systems_say_what_stands_here(name: str, here: str) -> None:
    assert here in refused("rlkit.losses" if name != "grpo" else "rlkit.advantages", name)
    for names, module in re.findall(r"((?:\w+(?:, | or | and others)?)+) in (rlkit[\w.]+)", here):
        for ours in re.findall(r"\w+", names):
            if ours not in ("or", "and", "others", "of"):
                assert hasattr(importlib.import_module(module), ours), (ours, module)
    for module in re.findall(r"rlkit\.[\w.]*\w", here):
        importlib.import_module(module)


def test_every_function_of_another_system_on_the_pages_has_an_answer() -> None:

    rows = [
        line.split("\t") for line in (Path(__file__).parents[1] / "docs" / "peers.tsv").read_text().splitlines()[1:]
    ]
    functions = {
        row[0] for row in rows if re.match(r"(compute|get|calculate|masked)_\w+$|\w+(Trainer|Loss|LossFn)$", row[0])
    }
    known = {name for name, _ in other_systems()}
    without = {
        "get_gamma_weights",
        "TPOTrainer",
    }  # no function here: weights of a token's place, and a loss by its name
    assert functions - known - without == set()


def test_rollout_is_the_function_and_rlkit_rollout_the_package() -> None:
    from rlkit.rollout import rollout
    from rlkit.rollout.groups import rollout as same

    assert rollout is same
    assert inspect.iscoroutinefunction(rollout)
    assert inspect.ismodule(rlkit.rollout)
    code = "import rlkit.rollout, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_each_name_of_the_package_is_defined_where_its_table_says():
    for name, home in rlkit._HOMES.items():
        assert f"{getattr(rlkit, name).__module__}.".startswith(f"rlkit.{home}."), name
