"""Every file of benchmarks/, examples/ and recipes/ runs: at its smallest setting, with `--help`, without a server."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nightly
import pytest
import warm

from rlkit.data.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "benchmarks/peers", "examples", "recipes", "recipes/*")

RUNS = {  # its smallest run, with OUT for a folder of the test, and what it prints
    "benchmarks/advantages.py": ("--num-tokens 2000 --num-seqs 32 --repeats 1 --peer-repeats 1", "gae "),
    "benchmarks/context.py": ("", "  131072"),
    "benchmarks/fsdp_overhead.py": ("--num-tokens 32 --hidden 64 --layers 1 --vocab 64 --repeats 1 --out OUT", "ours"),
    "benchmarks/linear_logp_cpu.py": (
        "--rows 16 --dim 8 --vocab 32 --small-rows 8 --small-dim 8 --repeats 1 --no-memory --out OUT/x.json",
        "scoring, linear_logp",
    ),
    "benchmarks/linear_scan_cpu.py": ("--num-tokens 64 --num-seqs 4 --repeats 1 --out OUT/x.json", "4096 tokens"),
    "benchmarks/rewards.py": ("--num 1 --repeats 1 --out OUT/x.json", "ten_asserts"),
    "benchmarks/rollout_host.py": ("--prompts 2 --group-size 2 --tokens 8", '{"tokens": 32, '),
    "examples/demonstrations.py": ("--steps 1 --seeds 1", "luffy              mean reward: "),
    "examples/in_transformers.py": ("--steps 1 --output OUT", "'train_loss'"),
    "examples/own_dpo.py": ("--steps 1", "accuracy"),
    "examples/own_ppo.py": ("--steps 1", "reward"),
    "examples/self_distillation.py": ("--steps 1 --seeds 1 --copy-steps 1", "average  "),
    "examples/compaction.py": ("--sft-steps 1 --steps 1", "summaries masked   right answers: "),
    "examples/turn_credit.py": ("--steps 1 --seeds 1", "turn_returns   share of digits in turn 2"),
    "examples/tic_tac_toe.py": (
        "--sft-steps 2 --eval-games 2 --steps 1 --prompts-per-step 2 --output OUT", "of a perfect player to imitate",
    ),
}  # fmt: skip
SLOW = {
    "benchmarks/gpu_context.py": ("--rehearse --out OUT", ""),
    "benchmarks/gpu_decode.py": ("--rehearse --out OUT", ""),
    "benchmarks/gpu_tune.py": ("--rehearse --groups scan --out OUT", "2 ran, 0 failed"),
    "benchmarks/gpu_grpo.py": ("--side rlkit --rehearse --out OUT", ""),
    "benchmarks/generation.py": (
        "--models nano --prompts 4 --lengths equal --sides engine generate --rounds 1 --out OUT/x.json", "engine / gen",
    ),
    "benchmarks/memory.py": ("", "Qwen3-MoE"),
    "benchmarks/packing.py": (
        "--sequences 4 --median 8 --max-tokens 256 --hidden 32 --layers 1 --repeats 1 --out OUT/x.json", "ranks 64",
    ),
    "benchmarks/training_step.py": (
        "--models nano --prompts 4 --answer 2 --dtypes fp32 --rounds 1 --out OUT/x.json", "nano          4   fp32",
    ),
    "benchmarks/async_loop.py": (
        "--pairs 1 --steps 3 --prompts-per-step 1 --new-tokens 4 --hidden 64 --out OUT/x.json", "asynchronous over",
    ),
    "benchmarks/changed_weights.py": (
        "--lrs 1e-6 --steps 1 --prompts-per-step 1 --group-size 2 --new-tokens 2 --out OUT/x.json", "lr 1e-06 mean",
    ),
    "benchmarks/contention.py": ("--rounds 1 --steps 7 --loops 0 1 --out OUT/x.json", "round 1, 1 loops"),
    "benchmarks/history.py": ("--rounds 1", "first_update_s"),
    "benchmarks/long_run.py": ("--steps 20 --out OUT/x.json", "overlap shm"),
    "benchmarks/history.py --memory": ("", ""),
    "benchmarks/linear_logp_cpu.py --memory": (
        "--rows 16 --dim 8 --vocab 32 --small-rows 8 --small-dim 8 --repeats 1 --out OUT/x.json", "scoring, linear",
    ),
    "benchmarks/peers/compare_trl.py": (
        f"--trl-python {sys.executable} --steps 5 --rounds 1 --sft-steps 3 --prompts 2 --group 2 --max-new-tokens 4 "
        "--prefix 8 --work OUT/work --out OUT/x.json", "log-probs, s",
    ),
    "benchmarks/sharing.py": ("--only answers/nemotron_h tree/qwen3 --rounds 1", "forest (1,031 rows)"),
    "benchmarks/speculation.py": (
        "--temperatures 1 --sums 1 --questions 0 --group-size 2 --rows 2 --drafts 3 --sizes 1 2 --repeats 1 "
        "--out OUT/x.json", "history k 3: drafted",
    ),
    "benchmarks/streaming.py": ("OUT --megabytes 1 --held 1", "1 MB, 1000 rows, held"),
    "examples/in_trl.py": ("--steps 1 --output OUT", "train_loss"),
    "recipes/digits/make_data.py": ("OUT", ""),
}  # fmt: skip
ELSEWHERE = {  # the test that runs it
    "benchmarks/gpu_kernels.py": "tests/benchmarks/test_gpu_rehearsal.py",
    "benchmarks/gpu_training.py": "tests/benchmarks/test_gpu_training.py",
    "benchmarks/gpu_tune.py": "tests/benchmarks/test_gpu_rehearsal.py",
    "examples/code_reward.py": "tests/rewards/test_docs.py",
    "examples/demo.py": "tests/examples/test_demo.py",
    "examples/environments.py": "tests/examples/test_environments.py",
    "examples/http_agent.py": "tests/agents/test_clients.py",
    "examples/harbor_agent.py": "tests/agents/test_harbor.py",
    "examples/in_verl.py": "tests/examples/test_in_verl.py",
    "examples/math_reward.py": "tests/rewards/test_docs.py",
    "examples/quickstart.ipynb": "tests/terminal/test_notebook.py",
    "examples/sorting_reward.py": "tests/test_gpu.py",
    "examples/tool_use.py": "tests/terminal/test_scripts.py",
}
PARTS = {  # the script that imports or starts it
    "benchmarks/gpu_peers.py": "benchmarks/gpu_kernels.py",
    "benchmarks/peers/dense_rewards.py": "benchmarks/peers/compare_trl.py",
    "benchmarks/peers/sglang_bench_client.py": "benchmarks/sglang_client.py",
    "benchmarks/peers/trl_grpo.py": "benchmarks/peers/compare_trl.py",
    "benchmarks/peers/trl_setup.py": "benchmarks/peers/compare_trl.py",
    "benchmarks/peers/trl_table.py": "benchmarks/peers/compare_trl.py",
    "benchmarks/peers/vllm_generate.py": "benchmarks/generation.py",
    "recipes/calculator/tool.py": "recipes/calculator/make_data.py",
}
DATA = ("calculator", "letter_counting", "sums", "word_count")  # recipes whose data is in the repository
MODULES = {  # no command line
    "benchmarks/gpu_peers.py", "benchmarks/peers/dense_rewards.py", "benchmarks/peers/trl_setup.py",
    "benchmarks/peers/trl_table.py", "examples/code_reward.py", "examples/environments.py", "examples/math_reward.py",
    "examples/quickstart.ipynb", "examples/sorting_reward.py", "recipes/calculator/tool.py", "recipes/sums/reward.py",
    "recipes/word_count/reward.py",
}  # fmt: skip
LACKING = {  # without what it needs: its flags, and the error
    "benchmarks/generation.py": ("--models nano --sides engine vllm", "vllm is not installed here"),
    "benchmarks/peers/compare_trl.py": ("--trl-python /no/python", "--trl-python /no/python: No such file"),
    "benchmarks/peers/sglang_bench_client.py": ("", "sglang is not installed here"),
    "benchmarks/peers/vllm_generate.py": ("MODEL 9", "vllm is not installed here"),
    "benchmarks/servers.py": ("", "sglang is not installed here"),
    "benchmarks/sglang_client.py": ("", "sglang is not installed here"),
    "benchmarks/sync_nodes.py": ("--model OUT --url http://127.0.0.1:9", "no SGLang server answers"),
    "examples/http_agent.py": ("1+1", "OPENAI_BASE_URL is not set"),
    "examples/harbor_agent.py": ("TASK harbor-is-not-here", "harbor-is-not-here: No such file or directory"),
    "examples/in_verl.py": ("", "verl is not installed here"),
    "recipes/expected.py": ("OUT/expected.json OUT/no", "No such file or directory"),
    "recipes/letter_counting/make_data.py": ("", "reasoning-gym is not installed here"),
    "recipes/sums/make_data.py": ("", "reasoning-gym is not installed here"),
    "recipes/word_count/make_pairs.py": (
        "OUT/run OUT/a OUT/b",
        "is missing: see --help for the command",
    ),
}
OWN_TESTS = {f"recipes/{name}/make_data.py" for name in DATA} | {
    "recipes/expected.py", "recipes/sums/reward.py", "recipes/word_count/make_pairs.py", "recipes/word_count/reward.py",
}  # fmt: skip
SMALL = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 32}
PACKAGES = {"sglang", "vllm", "verl", "reasoning_gym"}


def files() -> set[str]:
    """Every script and module of the folders, but for those of `benchmarks/` that others import, `_*.py`."""
    found = [path for folder in FOLDERS for end in ("*.py", "*.ipynb") for path in ROOT.glob(f"{folder}/{end}")]
    return {str(path.relative_to(ROOT)) for path in found if not path.name.startswith("_")}


def start(script: str, *flags: str, **env: str):
    given = {k: v for k, v in os.environ.items() if not k.startswith(("RLKIT_SGLANG", "RLKIT_VLLM", "OPENAI_"))}
    given |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | env
    command = [sys.executable, str(ROOT / script), *flags]
    if script == "benchmarks/gpu_tune.py":  # it sets a variable that is read where the kernels are imported
        return subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    return warm.run(command, env=given, capture_output=True, text=True, check=False, spawns=True)


def test_every_file_has_a_test():
    known = {key.split()[0] for key in (*RUNS, *SLOW, *ELSEWHERE, *PARTS, *LACKING)} | OWN_TESTS
    assert files() - known == set(), "add a row to RUNS, or name its test"
    assert known - files() == set(), "there is no such file"
    for script, test in ELSEWHERE.items():
        assert Path(script).stem in (ROOT / test).read_text(), f"{test} does not run {script}"
    for part, script in PARTS.items():
        assert Path(part).stem in (ROOT / script).read_text(), f"{script} does not use {part}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", [*RUNS, *SLOW])
@pytest.mark.slow
def test_its_smallest_run(script, tmp_path, request):
    flags, printed = (RUNS | SLOW)[script]
    if "changed_weights" in script or "speculation" in script:
        request.getfixturevalue("smollm")
    if "trl" in script:
        pytest.importorskip("trl")
    path, *more = script.split()
    done = start(path, *more, *(flag.replace("OUT", str(tmp_path)) for flag in flags.split()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert printed in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow_cases("benchmarks/peers/compare_trl.py")
@pytest.mark.parametrize(
    "script", nightly.only(sorted(files() - MODULES), "benchmarks/peers/compare_trl.py", "examples/demo.py")
)
def test_help(script):
    done = start(script, "--help", COLUMNS="200", TERM="dumb")
    assert done.returncode == 0, done.stderr
    doc = re.search(r'"""(\w+(?:\W+\w+){2})', (ROOT / script).read_text())[1]
    assert doc in done.stdout, "the text of the file is shown"
    assert re.search(r"^usage: ", done.stdout, re.MULTILINE)


TRIES_FOR_LONG = pytest.param("benchmarks/sync_nodes.py", marks=pytest.mark.slow)


@pytest.mark.parametrize("script", [TRIES_FOR_LONG if "sync_nodes" in x else x for x in LACKING])
def test_what_is_missing_is_named_in_one_line(script, tmp_path):
    """No server, no package, no Python of that name: `error: ...`, without a traceback."""
    if script == "benchmarks/sync_nodes.py":
        tiny_model(tiny_tokenizer(), **SMALL).save_pretrained(tmp_path)
    if any(find_spec(name) for name in PACKAGES if name in LACKING[script][1].replace("-", "_")):
        pytest.skip("the package is installed")
    flags, error = LACKING[script]
    done = start(script, *flags.replace("OUT", str(tmp_path)).split())
    assert done.returncode == 1
    assert error in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


def test_the_agent_without_a_server_is_one_line():
    done = start("examples/http_agent.py", "1+1", OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: OPENAI_BASE_URL http://127.0.0.1:9/v1: ")
    done = start("examples/http_agent.py")
    assert done.returncode == 2
    assert "question" in done.stderr


@pytest.mark.slow
def test_tuning_without_the_interpreter_is_refused(tmp_path):
    pytest.importorskip("triton")
    done = start("benchmarks/gpu_tune.py", "--rehearse", "--out", str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("set TRITON_INTERPRET=1")


@pytest.mark.parametrize("name", DATA)
def test_a_recipes_data_is_what_its_script_writes(name, tmp_path):
    if name in ("letter_counting", "sums"):
        pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym==0.1.25")
    shutil.copytree(ROOT / "recipes" / name, tmp_path / name)
    written = [*(tmp_path / name).glob("*.jsonl")]
    before = {path.name: path.read_text() for path in written}
    for path in written:
        path.unlink()
    done = start(str(tmp_path / name / "make_data.py"))
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_text() for path in (tmp_path / name).glob("*.jsonl")} == before


@pytest.mark.slow
def test_pairs_and_expected_figures_of_runs(make_task, tmp_path):
    """The commands of make_pairs.py and expected.py, on a tiny model."""
    recipe = ROOT / "recipes" / "word_count"
    rows, reward = str(recipe / "train.jsonl"), f"{recipe / 'reward.py'}:close"
    flags = ["--model", str(make_task() / "model"), "--data", rows, "--eval-data", rows, "--reward", reward]
    more = "--eval-limit 4 --eval-samples 2 --max-new-tokens 4 --eval-kl --prompts-per-step 2 --group-size 2"
    for steps, output in ((0, "samples"), (1, "trained")):
        command = [sys.executable, "-m", "rlkit.scripts", "grpo", *flags, *more.split(), "--steps", str(steps)]
        done = warm.run([*command, "--output", tmp_path / output], capture_output=True, text=True, plots=False)
        assert done.returncode == 0, done.stderr
    given = (str(tmp_path / name) for name in ("samples", "pairs.jsonl", "best.jsonl"))
    done = start("recipes/word_count/make_pairs.py", *given)
    assert done.stdout == "0 of 4 prompts\n", done.stderr
    done = start("recipes/expected.py", str(tmp_path / "expected.json"), str(tmp_path / "trained"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "expected.json").read_text())
    assert (found["runs"][0]["steps"], found["range"]["greedy_after"]) == (1, [0.0, 0.0])


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.name)
def test_nothing_of_rlkit_is_replaced(path):
    """A figure is of the library as it is: no attribute of what is imported from rlkit is assigned."""
    tree = ast.parse(path.read_text())
    imports = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and (x.module or "").startswith("rlkit")]
    ours = {alias.asname or alias.name for x in imports for alias in x.names} | {"rlkit"}
    stored = [x for x in ast.walk(tree) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
    assert [ast.unparse(x) for x in stored if ast.unparse(x).partition(".")[0] in ours] == []
