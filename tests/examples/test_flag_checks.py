"""The flags of every script: a number out of its range, an empty text, a device that is not there are named at once."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from flag_checks import RANGES, check_flags, check_values, json_object

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(p.stem for p in EXAMPLES.glob("*.py") if "tyro.cli(Args" in p.read_text())


def args_of(script: str):
    """The script's flags at their defaults."""
    kind = importlib.import_module(script).Args
    needed = {f.name: "x" for f in fields(kind) if f.default is f.default_factory is MISSING}
    return kind(**needed)


def numbers_of(kind: type, prefix: str = "") -> list[tuple[str, type]]:
    """(name, int or float) of every flag that takes a number."""
    out = []
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            out += numbers_of(hint, f"{prefix}{name}.")
        inner = {hint, *get_args(hint), *(y for x in get_args(hint) for y in get_args(x))}
        out += [(prefix + name, number) for number in (int, float) if number in inner]
    return out


def test_every_number_of_every_script_has_a_range_and_its_default_is_inside():
    assert {"sft", "grpo", "ppo", "async_grpo", "reward_model", "demo", "sweep", "tool_use"} <= {*SCRIPTS}
    ranged = [name for _, names in RANGES.values() for name in names.split()]
    assert len(set(ranged)) == len(ranged), "one range a name"
    flags = {flag for script in SCRIPTS for flag, _ in numbers_of(importlib.import_module(script).Args)}
    drawn = {"range", "log_range"}  # of sweep.py: Optuna's own
    assert {flag.rpartition(".")[2] for flag in flags} - {*ranged} == drawn
    for script in SCRIPTS:
        check_values(args_of(script))


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_takes_a_number_that_is_none(script):
    for flag, number in numbers_of(type(args_of(script))):
        name = flag.rpartition(".")[2]
        if name in ("range", "log_range"):
            continue
        for bad in [math.nan] if number is float else [-1]:
            args = args_of(script)
            *path, last = flag.split(".")
            holder = getattr(args, path[0]) if path else args
            object.__setattr__(holder, last, bad)
            with pytest.raises(ValueError, match=f"^--{flag.replace('_', '-')} must be .*, got {bad}$"):
                check_values(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"weight_decay": -0.1}, "--weight-decay must be at least 0, got -0.1"),
        ({"weight_decay": math.inf}, "--weight-decay must be at least 0, got inf"),
        ({"max_norm": 0.0}, r"--max-norm must be above 0 \(inf: no limit\), got 0.0"),
        ({"temperature": 0.0}, "--temperature must be above 0, got 0.0"),
        ({"top_p": 1.5}, "--top-p must be above 0 and at most 1, got 1.5"),
        ({"success_range": (0.1, math.nan)}, "--success-range must be a finite number, got nan"),
        ({"success_range": (0.9, 0.1)}, "--success-range is from low to high, got 0.9 0.1"),
        ({"seed": 10**30}, r"--seed must be from 0 to 2\*\*63 - 1"),
        ({"group_size": 1}, "--group-size must be at least 2: a sample is compared"),
        ({"eval_data": ""}, "--eval-data is empty: give a value, or leave it out"),
        ({"stop": ("",)}, "--stop is empty"),
        ({"rename": {"prompt": ""}}, "--rename is empty"),
        ({"device": "gpu"}, "--device gpu: this torch .* finds none here"),
        ({"device": "meta"}, "--device meta"),
        ({"engine": "sglang", "compile": True}, "--compile and --max-batch are of --engine local"),
        ({"engine": "sglang", "engine_threads": 2}, "--engine-threads and --engine-cpus are of --engine local"),
        ({"engine_cpus": (0, 10**6)}, "--engine-cpus .* not all of them are here"),
        ({"top_p": 0.9, "top_k": 5, "staleness": 0.0}, "--top-p and --top-k: .* use one"),
        ({"reward": None}, "--reward, --env or both"),
    ],
)
def test_what_is_wrong_is_said_by_the_flag(flags, message):
    args = args_of("async_grpo")
    args.reward = "a:b"
    for name, value in flags.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=message):
        check_flags(args)


def test_what_means_something_is_let_through():
    args = args_of("ppo")
    args.reward, args.system_prompt, args.group_size = "a:b", "", 1
    args.max_norm = args.clip_low = args.clip_high = args.tis_max_weight = args.value_clip = math.inf
    args.lr = args.steps = args.eval_steps = args.save_steps = 0
    args.entropy_coef = -0.1
    check_flags(args)
    args.gamma = 1.5
    with pytest.raises(ValueError, match="--gamma must be from 0 to 1"):
        check_flags(args)


def test_the_demo_deletes_nothing_but_a_demo(tmp_path):
    demo = importlib.import_module("demo")
    mine = tmp_path / "grpo" / "metrics.jsonl"
    mine.parent.mkdir()
    mine.write_text("precious")
    with pytest.raises(FileExistsError, match="holds other things than a demo"):
        demo.make_folder(demo.Args(output=tmp_path))
    assert mine.read_text() == "precious"
    again = demo.Args(output=tmp_path / "demo")
    demo.make_folder(again)
    (again.output / "random").mkdir()
    (again.output / "old").touch()
    demo.make_folder(again)
    assert sorted(p.name for p in again.output.iterdir()) == ["eval.jsonl", "sft.jsonl", "train.jsonl"]


@pytest.mark.parametrize("text", ["", "enable_thinking=false", "[1]", '{"a": }'])
def test_a_flag_of_json_names_itself(text):
    with pytest.raises(ValueError, match="--template-args must be a JSON object"):
        json_object("--template-args", text)
    assert json_object("--template-args", '{"enable_thinking": false}') == {"enable_thinking": False}
