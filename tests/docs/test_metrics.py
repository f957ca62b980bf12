"""docs/metrics.md explains exactly the keys that short runs of the scripts write to metrics.jsonl."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from subprocess import DEVNULL

import pytest
import torch
import warm
from pictures import no_pictures

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.losses import diagnostics
from rlkit.rewards import Sample, code, math, run_reward
from rlkit.run.report.meanings import meaning_of
from rlkit.run.report.plot import PANELS
from rlkit.scripts.cli import run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"

REWARD = """
import json, urllib.request

def score(completion, row):
    size = len(completion)
    if size % 8 == 7:
        raise ValueError("cannot be judged")
    return {"reward": size % 3, "score": size % 2, "size": size}

def agent(prompt, base_url):
    messages = [{"role": "user", "content": prompt.row["prompt"]}]
    body = json.dumps({"messages": messages, "response_format": {"type": "json_object"}}).encode()
    urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body)).read()
    return {"reward": 1.0}
"""
REWARD += """
def low(completion, row):
    return sum(ord(c) < 64 for c in completion) / 8
def short(completion, row):
    return -len(completion) / 8
def look(text: str) -> str:
    '''Look up.

    Args:
        text: a word
    '''
    return text
"""
ROWS = {
    "sft": {"prompt": "{i}+1=", "response": "{i}"},
    "pairs": {"prompt": "{i}+1=", "chosen": "{i}", "rejected": "x"},
    "labelled": {"prompt": "{i}+1=", "completion": "{i}"},
    "prompts": {"prompt": "{i}+1="},
}
SAMPLED = (
    "--reward reward.py:score --reward-max-failed 0.9 --skip-nan --prompts-per-step 2 --group-size 2 "
    "--max-new-tokens 4 --eval-samples 2 --kl-coef 0.1 --entropy-coef 0.01"
)
LIMITS = "--kl-target 0.02 --kl-limit 0.01 --entropy-limit 5"
SEVERAL = "--reward reward.py:low reward.py:short --prompts-per-step 2 --group-size 2 --max-new-tokens 4"
RUNS = {  # name -> script, data, flags: together every metric
    "sft": ("sft", "sft", "--batch-size 4 --profile-memory"),
    "dpo": ("dpo", "pairs", "--batch-size 4"),
    "kto": ("kto", "labelled", "--batch-size 4"),
    "reward model": ("reward_model", "pairs", "--batch-size 4"),
    "grpo": ("grpo", "prompts", f"{SAMPLED} {LIMITS}"),
    "grpo, top-p": ("grpo", "prompts", f"{SAMPLED} --top-p 0.9 --profile-memory"),
    "asynchronous grpo": ("grpo", "prompts", f"{SAMPLED} --overlap --profile-memory"),
    "agent": ("grpo", "prompts", "--agent reward.py:agent --prompts-per-step 2 --group-size 2 --max-new-tokens 4"),
    "compaction": ("grpo", "prompts", f"{SEVERAL} --tools reward.py:look --compact-at 999 --max-total-tokens 999"),
    "distill": ("distill", "prompts", f"--teacher FOLDER/model --loss advantage {SEVERAL}"),
    "ppo": ("ppo", "prompts", f"{SAMPLED} --entropy-target 5.5 --value-range 0 3"),
}

ON_GPUS = {"memory/peak", "time/mfu", "engine/tokens_per_forward"}  # and of servers there


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def keys(folder) -> dict[str, set[str]]:
    """What each run logs."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=48).save_pretrained(
        folder / "model"
    )
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    for name, row in ROWS.items():
        label = [{"label": i % 2 == 0} if name == "labelled" else {} for i in range(8)]
        rows = [{k: x.format(i=i) for k, x in row.items()} | label[i] for i in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for name, (script, data, flags) in RUNS.items():
        path = folder / f"{data}.jsonl"
        given = f"--model {folder}/model --data {path} --eval-data {path} --output {folder}/{name.replace(' ', '_')}"
        flags = flags.replace("reward.py", str(folder / "reward.py")).replace("FOLDER", str(folder))
        args = f"{given} --device cpu --steps 2 {flags}".split()
        if "--overlap" in flags:
            command = [sys.executable, "-m", f"rlkit.scripts.{script}", *args]
            warm.run(command, cwd=ROOT, spawns=True, plots=False, check=True, stdout=DEVNULL)
        else:
            module = importlib.import_module(f"rlkit.scripts.{script}")
            with no_pictures():
                run(module.main, module.Args, None, argv=args)
        lines = (folder / name.replace(" ", "_") / "metrics.jsonl").read_text().splitlines()
        found[name] = {key for line in lines for key in json.loads(line)}
    return found


def tables(text: str) -> set[str]:
    """The names in the first column."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


async def numbers_of_rewards() -> set[str]:
    """What the rewards for code and mathematics log besides the reward."""
    program = Sample("```python\ndef one():\n    return 1\n```", {"tests": ["assert one() == 1"]}, 0)
    found = [*await run_reward(code.assert_tests, [program], timeout_s=60)]
    found += await run_reward(math.boxed, [Sample(r"\boxed{1}", {"answer": "1"}, 0)], timeout_s=60)
    assert [reward.reward for reward in found] == [1.0, 1.0]
    return {f"reward/{name}" for reward in found for name in reward.metrics}


@pytest.mark.slow
async def test_the_page_has_the_keys_that_runs_log_and_no_others(keys):
    page = tables(PAGE.read_text().partition("\n## Samples")[0])
    logged = {re.sub(r"@\d+", "@K", key) for key in set().union(*keys.values(), await numbers_of_rewards())}
    parts = {f"{kind}reward/{name}" for kind in ("", "eval/") for name in ("size", "low", "short")}
    assert parts <= logged
    parts |= {key for key in logged if key.startswith("eval/reward/")}
    assert page == logged - parts | {"reward/NAME", "eval/reward/NAME", *ON_GPUS}


def test_the_tables_of_keys_are_those_of_the_report():
    sys.path.insert(0, str(PAGE.parent))
    try:
        make_metrics = importlib.import_module("make_metrics")
    finally:
        sys.path.remove(str(PAGE.parent))
    assert make_metrics.page(PAGE.read_text()) == PAGE.read_text(), "run python docs/make_metrics.py"
    assert meaning_of("entropy").unit == "nats per token"
    assert meaning_of("reward/format").keys == ("reward/NAME",)
    assert meaning_of("no/such") is None
    curves = {curve.key for panel in PANELS for curve in panel.curves}
    assert {key for key in curves if meaning_of(key) is None} == set()


@pytest.mark.slow
def test_the_page_has_the_keys_of_samples_and_no_others(keys, folder):
    samples = PAGE.read_text().partition("\n## Samples")[2].partition("\n## ")[0]
    files = list(folder.glob("*/trajectories/*.jsonl"))
    assert {path.stem.rstrip("0123456789") for path in files} >= {"train_", "eval_sampled_", "eval_greedy_"}
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert tables(samples) == {key for row in rows for key in row} | {"continues", "role"}


def test_each_run_leaves_its_report(keys, folder):
    pages = [folder / name.replace(" ", "_") / "report.html" for name in keys]
    assert [page.exists() for page in pages] == [True] * len(RUNS)


def test_keys_of_some_runs_only(keys):
    groups = {"PPO's critic": {"ppo"}, "Fixed data": {"sft", "dpo", "kto", "reward model"}}
    for title, runs in groups.items():
        section = re.search(rf"^##+ {title}.*?(?=^##)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        assert {name for name, logged in keys.items() if tables(section[0]) & logged} == runs
    assert {name for name, logged in keys.items() if "entropy" not in logged} == {"dpo", "kto", "reward model"}
    assert {name for name, logged in keys.items() if "kept_mass" in logged} == {"grpo, top-p"}
    assert {name for name, logged in keys.items() if logged & {"time/wait", "groups/ready"}} == {"asynchronous grpo"}
    assert {name for name, logged in keys.items() if "groups/dropped" in logged} & {"sft", "kto"} == set()
    assert "margin" not in keys["kto"]


def test_the_page_has_the_keys_of_every_diagnostic():
    x, mask, cu_seqlens = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    found = {
        "ratio_stats": diagnostics.ratio_stats(x, mask=mask),
        "mismatch_stats": diagnostics.mismatch_stats(x, x, mask=mask),
        "weight_stats": diagnostics.weight_stats(x, mask=mask),
        "kl_stats": diagnostics.kl_stats(x, x, mask=mask),
        "seq_kl_stats": diagnostics.seq_kl_stats(x, mask=mask, cu_seqlens=cu_seqlens),
        "policy_stats": diagnostics.policy_stats(x, x, x, mask=mask),
    }
    rows = re.findall(r"^\| `(\w+_stats)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows} == {k: set(m) for k, m in found.items()}
