"""A run in one process on a CPU imports nothing heavy that it does not use; what is used afterwards still works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.model.forward import load_model

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch._dynamo.convert_frame", "torch._inductor", "torch.distributed.tensor", "triton", "pandas", "matplotlib",
    "sympy",
)  # fmt: skip
REWARD = f"""
import gc, json, sys
from pathlib import Path

def score(completion, row):
    assert gc.isenabled() and gc.get_freeze_count(), "a command collects garbage again when it trains"
    with open(Path(__file__).with_name("seen"), "a") as file:
        file.write(json.dumps([name for name in {HEAVY} if name in sys.modules]) + "\\n")
    return len(completion) % 3
"""


def python(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(train=[{"prompt": str(i)} for i in range(4)], reward=REWARD)


@pytest.mark.parametrize("script", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_step_is_taken_without_the_compiler(task, tmp_path, script):
    load_model(task / "model")  # its architecture is checked
    (task / "seen").unlink(missing_ok=True)
    more = ["--critic", str(task / "model")] if script == "ppo" else []
    flags = [
        "--model", str(task / "model"), "--data", str(task / "train.jsonl"), "--reward", f"{task / 'reward.py'}:score",
        "--output", str(tmp_path / "run"), "--steps", "2", "--prompts-per-step", "2", "--group-size", "2",
        "--max-new-tokens", "4", "--eval-steps", "0", "--device", "cpu", *more,
    ]  # fmt: skip
    out = python(
        f"import sys\nfrom rlkit.scripts.{script} import *\nrun(main, Args, None, argv={flags!r})\n"
        "print({'matplotlib', 'datasets'} & sys.modules.keys())"
    )
    assert out.endswith("\nset()\n"), "the plot is drawn in a process of its own"
    assert (tmp_path / "run" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    seen = [json.loads(line) for line in (task / "seen").read_text().splitlines()]
    assert len(seen) == 8, "two steps, so the optimizer ran before the last calls"
    critic = {"sympy"} if script == "ppo" else set()  # transformers builds it on the meta device
    assert not {name for names in seen for name in names} - critic


def test_the_compiler_is_imported_when_something_compiles():
    code = """
import sys
from rlkit.scripts.imports import defer_compiler
defer_compiler()
import torch, torch._dynamo
held = torch._dynamo
assert held.disable(len) is len and held.disable()(len) is len
model = torch.nn.Linear(2, 2)
torch.optim.AdamW(model.parameters()).step()
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model
print("torch._dynamo.convert_frame" in sys.modules)
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", fullgraph=True)
print(compiled(torch.ones(2)).tolist(), "torch._dynamo.convert_frame" in sys.modules)
print(held.utils is torch._dynamo.utils, torch._dynamo.disable is not None, held.disable is torch._dynamo.disable)
print(isinstance(torch.compile(model, backend="eager"), torch._dynamo.eval_frame.OptimizedModule))
"""
    assert python(code).splitlines() == ["False", "[3.0, 3.0] True", "True True True", "True"]


UNCHANGED = """
import os, sys, types
from rlkit.scripts.imports import defer_compiler
def unchanged():
    before = {*sys.modules}, [*sys.meta_path]
    defer_compiler()
    return before == ({*sys.modules}, [*sys.meta_path])
os.environ["RANK"] = "0"
print(unchanged())
del os.environ["RANK"]
sys.modules["torch._dynamo"] = imported = types.ModuleType("torch._dynamo")
print(unchanged(), sys.modules.pop("torch._dynamo") is imported)
"""


@pytest.mark.parametrize(("code", "said"), [
    (UNCHANGED, "True\nTrue True\n"),
    pytest.param(
        f"{UNCHANGED}import torch._dynamo\nprint(unchanged(), type(torch._dynamo).__name__)",
        "True\nTrue True\nTrue module\n", marks=pytest.mark.slow,
    ),
], ids=["the call alone", "with torch"])  # fmt: skip
def test_nothing_is_deferred_after_the_import_or_on_a_rank(code, said):
    assert python(code) == said


NAMES = """
import builtins, sys
read, really_open = set(), open
builtins.open = lambda file, *args, **kwargs: read.add(str(file)) or really_open(file, *args, **kwargs)
if sys.argv[1:]:
    from rlkit.scripts.imports import remember_names
    remember_names()
import transformers, transformers.models
from transformers import Qwen3Config
names = sorted(dir(transformers)) + sorted(dir(transformers.models))
print(len([path for path in read if "/transformers/models/" in path]), hash(tuple(names)), len(names))
"""


def names(cache: Path, *argv: str) -> tuple[int, list[str]]:
    """How many model files transformers read, and the names it found; with an argument, as a run imports it."""
    code = f"import sys; sys.argv[1:] = {argv!r}\n{NAMES}"
    num_read, *found = python(code, XDG_CACHE_HOME=str(cache), PYTHONHASHSEED="0").split()
    return int(num_read), found


def test_transformers_reads_its_model_files_once(tmp_path):
    first, second = names(tmp_path, "ours"), names(tmp_path, "ours")
    assert (first[0] > 1000, second[0] < 50) == (True, True)
    assert first[1] == second[1]


@pytest.mark.slow
def test_kept_names_are_those_that_transformers_finds_and_of_this_state(tmp_path):
    cache = tmp_path / "rlkit" / "transformers.json"
    theirs = names(tmp_path)
    assert not cache.exists()
    assert names(tmp_path, "ours") == theirs
    kept = json.loads(cache.read_bytes())
    kept["key"][-1][1] += 1  # a model's folder has changed
    for text in (json.dumps(kept), "[]"):
        cache.write_text(text)
        assert names(tmp_path, "ours") == theirs
        assert json.loads(cache.read_bytes())["key"] != kept["key"]


def test_imports_and_data_are_not_searched_for_garbage():
    code = """
import gc, sys
from rlkit.scripts.imports import no_collections
def inside():
    with no_collections():
        assert not gc.isenabled()
    return gc.get_freeze_count()
assert inside() == 0 and gc.isenabled()
try:
    with no_collections():
        with no_collections():
            import torch
        assert not gc.isenabled() and gc.get_freeze_count()
        raise ValueError
except ValueError:
    frozen = gc.get_freeze_count()
class Cycle: pass
cycle = Cycle(); cycle.self = cycle
assert gc.isenabled() and frozen > 100_000 and inside() <= frozen
del cycle
print(gc.collect() > 0)
"""
    assert python(code) == "True\n"


WRONG = [
    ("--model", "{task}/none", "no folder"),
    ("--model", "{task}/smol.gguf", "is a GGUF file"),
    ("--output", "{task}", "holds a run"),
    ("--data", "{task}/none.jsonl", "no such file"),
    ("--data", "{task}/broken.jsonl", "broken.jsonl, line 2"),
    ("--rename", "answer prompt", "no column 'answer'"),
]


def test_a_mistake_is_answered_before_torch_is_loaded(task, tmp_path):
    (task / "broken.jsonl").write_text('{"prompt": "1"}\n{"prompt": \n')
    (task / "metrics.jsonl").write_text("")
    given = {"--model": f"{task}/model", "--data": f"{task}/train.jsonl", "--output": f"{tmp_path}/run"}
    given["--reward"] = f"{task}/reward.py:score"
    argv = []
    for flag, value, _ in WRONG:
        flags = given | {flag: value.format(task=task)}
        argv.append(["grpo", *(word for name, text in flags.items() for word in (name, *text.split()))])
    code = f"""
import sys
from rlkit.scripts import cli
for argv in {argv!r}:
    try:
        cli.main(argv)
    except SystemExit as ended:
        print(ended.code, {{"torch", "numpy", "transformers"}} & sys.modules.keys(), len(sys.modules) < 500)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.stdout == "2 set() True\n" * len(WRONG), done.stderr
    for line, (flag, _, said) in zip(done.stderr.splitlines(), WRONG, strict=True):
        assert said in line, flag


def test_the_spin_count_is_set_before_torch_is_imported(task, tmp_path):
    flags = ["--model", str(task / "model"), "--data", str(task / "train.jsonl"), "--output", str(tmp_path / "run")]
    flags += ["--reward", f"{task / 'reward.py'}:score"]
    code = f"""
import builtins, os, sys
real = builtins.__import__
def spy(name, *args, **kwargs):
    if name == "torch" and "torch" not in sys.modules:
        print(os.environ.get("GOMP_SPINCOUNT"))
        os._exit(0)
    return real(name, *args, **kwargs)
builtins.__import__ = spy
os.environ.pop("OMP_WAIT_POLICY", None); os.environ.pop("GOMP_SPINCOUNT", None)
from rlkit.scripts.grpo import *
run(main, Args, None, argv={flags!r})
"""
    assert python(code) == "10000\n"
