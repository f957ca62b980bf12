"""A run in one process on a CPU starts without torch's compiler; what compiles afterwards still works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch._dynamo.convert_frame", "torch._inductor", "torch.distributed.tensor", "triton", "pandas", "matplotlib")
REWARD = f"""
import json, sys
from pathlib import Path

def score(completion, row):
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


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_a_step_is_taken_without_the_compiler(task, tmp_path, script):
    (task / "seen").unlink(missing_ok=True)
    more = ["--critic", str(task / "model")] if script == "ppo" else []
    flags = [
        "--model", str(task / "model"), "--data", str(task / "train.jsonl"), "--reward", f"{task / 'reward.py'}:score",
        "--output", str(tmp_path / "run"), "--steps", "2", "--prompts-per-step", "2", "--group-size", "2",
        "--max-new-tokens", "4", "--eval-steps", "0", "--device", "cpu", *more,
    ]  # fmt: skip
    python(f"from rlkit.scripts.{script} import *; run(main, Args, None, argv={flags!r})")
    seen = [json.loads(line) for line in (task / "seen").read_text().splitlines()]
    assert len(seen) == 8, "two steps, so the optimizer ran before the last calls"
    assert not any(seen)


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
print(isinstance(torch.compile(model), torch._dynamo.eval_frame.OptimizedModule))
"""
    assert python(code).splitlines() == ["False", "[3.0, 3.0] True", "True True True", "True"]


@pytest.mark.parametrize("code", [
    "import torch._dynamo; from rlkit.scripts.imports import defer_compiler; defer_compiler()",
    "from rlkit.scripts.imports import defer_compiler; import os; os.environ['RANK'] = '0'; defer_compiler()",
])  # fmt: skip
def test_nothing_is_deferred_after_the_import_or_on_a_rank(code):
    assert python(f"{code}\nimport torch._dynamo\nprint(type(torch._dynamo).__name__)") == "module\n"


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_waiting_threads_spin_shortly_unless_the_user_says_otherwise(given):
    code = """
import os, sys
from dataclasses import dataclass
from rlkit.scripts.cli import run
@dataclass
class Args:
    pass
run(lambda _: print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules), Args, None, argv=[])
"""
    names = ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"]
    start = f"import os; [os.environ.pop(name, None) for name in {names}]; os.environ.update({given})"
    spins = given.get("GOMP_SPINCOUNT", "None" if given else "1000")
    assert python(f"{start}\n{code}") == f"{spins} False\n"


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
    assert python(code) == "1000\n"
