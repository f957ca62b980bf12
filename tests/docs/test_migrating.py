"""docs/migrating.md: its tables, commands and wrappers, and that its settings have the losses of the others."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib
import inspect
import json
import math
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import tyro
from pyarrow import parquet
from torch import Tensor

from rlkit import advantages, losses
from rlkit.advantages import group_centered, group_zscore
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops import aggregate
from rlkit.loops.grpo import grpo
from rlkit.loops.updates import grpo_update, pack_with_advantages
from rlkit.packing import with_streams
from rlkit.parallel.flags import ParallelArgs
from rlkit.rewards import Sample, score
from rlkit.types import Batch, LogProbs, Trajectory

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
COMMANDS = re.findall(r"examples/(\w+)\.py +(--.*)", PAGE.replace("\\\n", " "))


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def value_of(script: str, flag: str) -> Any:
    """The default of a flag; AttributeError where there is none."""
    args: Any = importlib.import_module(script).Args(model="", data="")
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    for part in name.split("."):
        args = getattr(args, part)
    return args


def table_rows() -> list[tuple[str, list[str], list[str]]]:
    """(script, flags, stated defaults) of every row of every table that names options of ours."""
    rows, where = [], None
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        heads = [re.match(r"here \(`(\w+)\.py`\)", cell) for cell in cells]
        if any(heads):
            at = next(i for i, head in enumerate(heads) if head)
            where = (heads[at][1], at)
        elif not cells:
            where = None
        elif where and not set(line) <= set("|-"):
            script, at = where
            rows.append((script, re.findall(r"`([^`]+)`", cells[at]), [x for x in cells[at + 1].split(", ") if x]))
    return rows


def test_the_flags_and_defaults_of_the_tables_are_those_of_the_scripts() -> None:
    rows = table_rows()
    assert len(rows) > 70
    for script, flags, defaults in rows:
        assert len(flags) == len(defaults), (flags, defaults)
        for flag, stated in zip(flags, defaults, strict=True):
            value = value_of(script, flag)
            if stated == "off":
                assert not value, (flag, value)
            else:
                assert type(value)(stated) == value, (flag, stated, value)


def test_every_other_flag_that_the_page_names_is_theirs_or_exists() -> None:
    """Their options are those of the first column, of the PPO table, and the few that the text sets beside ours."""
    text = re.sub(r"```.*?```|`python -m [^`]*`", "", PAGE, flags=re.DOTALL)
    flag = r"--[a-z][\w.-]*\w"
    ppo = text.index("## PPO")
    cells = [line.split("|") for line in text[:ppo].splitlines() if line.startswith("|")]
    theirs = {found for row in cells for found in re.findall(flag, row[1])}
    theirs |= {found for line in text[ppo:].splitlines() if line[:1] == "|" for found in re.findall(flag, line)}
    beside = {
        "--actor.dual_clip", "--algo.kl.unbiased_gradient", "--model.label_smoothing", "--model.nll_loss_coef",
        "--model.ipo_enable", "--train.batch_size", "--eps-clip-c", "--num-epoch", "--use-unbiased-kl",
        "--normalize-advantages",
        *re.findall(flag, re.findall(r"have the flat names.*?\n\n", text, re.DOTALL)[0]),
    }  # fmt: skip
    found = set(re.findall(flag, text)) - theirs - beside
    assert len(found) > 30
    for name in sorted(found):
        scripts = [script for script in ("grpo", "ppo", "dpo") if exists(script, name)]
        assert scripts, f"{name} is no flag of ours"


def exists(script: str, flag: str) -> bool:
    try:
        value_of(script, flag)
    except AttributeError:
        return False
    return True


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, a data file of each kind, and my_rewards.py: the page's wrappers with functions they wrap."""
    folder = tmp_path_factory.mktemp("migrating")
    tokenizer = tiny_tokenizer()
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
    tiny_model(tokenizer, **sizes).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    turn = [{"role": "user", "content": "2+2?"}]
    kinds: dict[str, dict[str, Any]] = {
        "gsm8k.jsonl": {"question": "2+2?", "answer": "2+2=4\n#### 4"},
        "train.parquet": {
            "data_source": "openai/gsm8k", "prompt": turn, "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 0},
        },
        "train.jsonl": {"messages": turn, "extra_info": {"answer": "4"}},
        "dapo-math-17k.jsonl": {"prompt": turn, "label": "4"},
        "pairs.jsonl": {"chosen": [*turn, {"role": "assistant", "content": "4"}],
                  "rejected": [*turn, {"role": "assistant", "content": "5"}]},
    }  # fmt: skip
    for name, row in kinds.items():
        if name.endswith(".parquet"):
            parquet.write_table(pyarrow.Table.from_pylist([row] * 8), folder / name)
        else:
            (folder / name).write_text((json.dumps(row) + "\n") * 8)
    (wrappers,) = re.findall(r"```python\n(from types.*?)```", PAGE, re.DOTALL)
    (folder / "my_rewards.py").write_text(THEIRS + wrappers + PATIENT)
    return folder


THEIRS = """
def reward_func(queries=None, prompts=None, labels=None, *, completions=None, completion_ids=None, answer=None):
    if queries is None:  # as TRL calls it
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [float(t == a) + 0.1 * len(i) for t, a, i in zip(texts, answer, completion_ids, strict=True)]
    import torch
    (query,), (prompt,), (label,) = queries, prompts, labels
    found = torch.tensor([float(query.removeprefix(prompt) == label)])
    return {"rewards": 2 * found, "scores": found, "extra_logs": {}}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info["index"]) == ("openai/gsm8k", 0)
    return {"score": float(solution_str == ground_truth), "acc": 0.5}

async def custom_rm(args, sample):
    return float(sample.response == sample.label)

async def step(state, action, extra_info):
    reward = (action == extra_info["answer"]) + len(action) % 2 / 2
    return {"next_state": None, "reward": reward, "score": reward / 2, "done": True, "extra_info": extra_info}
"""


PATIENT = """
from functools import partial
from rlkit.rewards import math
anywhere, boxed = (partial(judge, timeout_s=120) for judge in (math.anywhere, math.boxed))
"""
HUB = {"openai/gsm8k:main:train": "gsm8k.jsonl", "trl-lib/ultrafeedback_binarized": "pairs.jsonl"}


@pytest.mark.parametrize(("script", "flags"), COMMANDS, ids=[f"{i}-{c[0]}" for i, c in enumerate(COMMANDS)])
def test_the_commands_run(script: str, flags: str, task: Path, tmp_path: Path) -> None:
    """Parsed as they stand; run with a tiny model, little data and one process."""
    module = importlib.import_module(script)
    args = tyro.cli(module.Args, args=shlex.split(flags.split("#")[0]))
    data = str(task / HUB.get(args.data, args.data))
    small = {
        "model": str(task / "model"),
        "data": data,
        "eval_data": args.eval_data and data,
        "output": tmp_path / "run",
    }
    small |= {"steps": 2, "device": "cpu", "parallel": ParallelArgs()}
    if script == "grpo":
        small |= {"prompts_per_step": 4, "max_new_tokens": 8, "max_prompt_tokens": 64, "eval_limit": 2}
        small |= {"engine": "local", "engine_urls": ()}
        file, name = args.reward.split(":")
        assert file in ("my_rewards.py", "rlkit.rewards.math")
        small |= {"reward": f"{task}/my_rewards.py:{name}", "reward_timeout": 300.0}
    else:
        small |= {"batch_size": 4}
    exported = module.main(dataclasses.replace(args, **small))
    assert (exported / "config.json").exists()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2


def test_the_call_of_the_page_names_arguments_of_the_loop() -> None:
    ((source, functions),) = re.findall(r"```python\n(grpo\((.*?))```", PAGE, re.DOTALL)
    call = ast.parse(source).body[0].value  # type: ignore[attr-defined]
    names = {keyword.arg for keyword in call.keywords} | {"eval_samples"}
    assert len(names) == 4
    assert "`eval_samples`" in PAGE
    assert names <= set(inspect.signature(grpo).parameters)
    for function in ("leave_one_out", "per_episode", "dual_clip"):
        assert function in functions
        assert any(hasattr(module, function) for module in (advantages, aggregate, losses))
    assert "clip_c" in inspect.signature(losses.dual_clip).parameters


def test_there_is_a_command_for_every_system() -> None:
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[2:7]:
        assert re.search(r"examples/grpo\.py +--model", section), section[:20]


VERL_ROW = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 0}}


@pytest.mark.parametrize(
    ("name", "row", "right"),
    [
        ("trl", {"prompt": "q", "answer": "4"}, (1.3, None)),
        ("trl", {"prompt": [{"role": "user", "content": "q"}], "answer": "4"}, (1.3, None)),
        ("verl", VERL_ROW, (1, 1)),
        ("openrlhf", {"prompt": "q", "answer": "4"}, (2, 1)),
        ("slime", {"prompt": "q", "label": "4"}, (1, None)),
        ("rl2", {"extra_info": {"answer": "4"}}, (1.5, 0.75)),
    ],
)  # fmt: skip
def test_functions_of_others_judge_as_they_did(name: str, row: dict[str, Any], right: Any, task: Path) -> None:
    names: dict[str, Any] = {}
    exec((task / "my_rewards.py").read_text(), names)
    samples = [Sample(text, row, 0, {"completion_ids": [1, 2, 3]}) for text in ("4", "55")]
    found, other = asyncio.run(score(names[name], samples, timeout_s=120))
    assert (found.reward, found.score) == (pytest.approx(right[0]), right[1])
    assert other.reward == pytest.approx(0.3 if name == "trl" else 0)


# ---- the losses: a policy of one table of logits, updated by the loop's own function and by a loop over samples ----

V = 6


def logp_of(theta: Tensor, state: int, action: int) -> Tensor:
    row = theta[state]
    return row[action] - row.exp().sum().log()


def policy(theta: Tensor, batch: Batch) -> LogProbs:
    logits = theta[batch.tokens]
    logp = logits.log_softmax(-1)
    chosen = logp.gather(-1, batch.targets[:, None])[:, 0]
    return LogProbs(torch.where(batch.mask, chosen, 0), torch.where(batch.mask, -(logp.exp() * logp).sum(-1), 0))


ANSWERS = [[(1, 2, 3), (4,), (5, 5, 0, 1), (2, 2)], [(0, 1), (3, 4, 5), (1,), (2, 0, 3, 3, 3)]]
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, -1.0, 0.25, 2.0]]


def batch_of(theta: Tensor, ref: Tensor, baseline: Any) -> Batch:
    """Two groups of four; the engine's log-probs are those of the table, as the embedded one's are the model's."""
    groups = []
    for answers, rewards in zip(ANSWERS, REWARDS, strict=True):
        group = []
        for ids, reward in zip(answers, rewards, strict=True):
            logp = [float(logp_of(theta, a, b)) for a, b in zip((0, *ids[:-1]), ids, strict=True)]
            group.append(Trajectory([5, 0], list(ids), [True] * len(ids), logp, [0] * len(ids), reward=reward))
        groups.append(group)
    batch = pack_with_advantages(groups, baseline=baseline)
    old = policy(theta.detach(), batch).logp
    batch = dataclasses.replace(batch, rollout_logp=old, advantages=batch.advantages.double())
    return with_streams(batch, old_logp=old, ref_logp=policy(ref, batch).logp)


def their_loss(
    theta: Tensor,
    old: Tensor,
    ref: Tensor,
    *,
    eps: float = math.nan,
    beta: float = 0.0,
    mean: str = "tokens",
    clip_c: float = math.inf,
) -> Tensor:
    """The loss as TRL 1.16 adds up `loss_type="dapo"` and "grpo", over 2 processes of 2 micro-batches of 2 completions.

    "tokens": a micro-batch's sum is divided by the generation batch's tokens over the number of processes. "sequences":
    its sequence means are averaged, over the number of micro-batches. Micro-batches add up, processes average.
    `eps` nan: advantages are not divided by the standard deviation. `clip_c`: verl's bound where A < 0.
    """
    samples = []
    for answers, rewards in zip(ANSWERS, REWARDS, strict=True):
        center = sum(rewards) / 4
        std = (sum((r - center) ** 2 for r in rewards) / 3) ** 0.5
        scale = 1 if math.isnan(eps) else std + eps
        samples += [(ids, (r - center) / scale) for ids, r in zip(answers, rewards, strict=True)]
    num_items = sum(len(ids) for ids, _ in samples)
    processes = []
    for process in (samples[:4], samples[4:]):
        accumulated = torch.zeros((), dtype=torch.float64)
        for micro in (process[:2], process[2:]):
            for ids, advantage in micro:
                for state, action in zip((0, *ids[:-1]), ids, strict=True):
                    logp = logp_of(theta, state, action)
                    ratio = (logp - logp_of(old, state, action)).exp()
                    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    if advantage < 0:
                        loss = loss.clamp(max=-advantage * clip_c)
                    d = logp_of(ref, state, action) - logp
                    loss = loss + beta * (d.exp() - d - 1) * ratio
                    accumulated = accumulated + loss / (num_items / 2 if mean == "tokens" else len(ids) * 2 * 2)
        processes.append(accumulated)
    return sum(processes) / 2  # type: ignore[return-value]


TRL = partial(group_zscore, eps=1e-4)
DUAL = lambda x, b: losses.dual_clip(x, b.advantages, clip_low=0.2, clip_high=0.2, clip_c=1.01)


@pytest.mark.parametrize(
    ("baseline", "options", "theirs"),
    [
        pytest.param(TRL, {}, {"eps": 1e-4}, id="TRL"),
        pytest.param(TRL, {"kl_coef": 0.3}, {"eps": 1e-4, "beta": 0.3}, id="TRL with beta"),
        pytest.param(group_zscore, {}, {"eps": 1e-6}, id="verl but for its dual clip, OpenRLHF group_norm"),
        pytest.param(group_zscore, {"surrogate": DUAL}, {"eps": 1e-6, "clip_c": 1.01}, id="verl with its dual clip"),
        pytest.param(
            group_zscore, {"aggregate": aggregate.per_episode}, {"eps": 1e-6, "mean": "sequences"}, id="slime"
        ),
        pytest.param(group_centered, {}, {}, id="RL2, OpenRLHF dr_grpo"),
    ],
)
def test_the_update_has_the_loss_that_the_page_says(
    baseline: Any, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Three updates per rollout, so that ratios leave 1 and the clip takes part; the same parameters in fp64."""
    g = torch.Generator().manual_seed(0)
    start, ref = (torch.randn(V, V, dtype=torch.float64, generator=g) for _ in range(2))
    theta, lr = torch.nn.Parameter(start.clone()), 2.0
    options = {"kl_coef": 0.0, **options}
    grpo_update(
        batch_of(start, ref, baseline), policy=partial(policy, theta), optimizer=torch.optim.SGD([theta], lr=lr), lr=lr,
        num_minibatches=1, num_epochs=3, clip_low=0.2, clip_high=0.2, correction=partial(losses.tis, max_weight=2.0),
        entropy_coef=0.0, max_norm=float("inf"), max_tokens=8, device="cpu", seed=0, **options,
    )  # fmt: skip
    found = three_updates(start, ref, lr=lr, **theirs)
    tokens = [(s, a) for answers in ANSWERS for ids in answers for s, a in zip((0, *ids[:-1]), ids, strict=True)]
    ratios = [float((logp_of(found, s, a) - logp_of(start, s, a)).exp()) for s, a in tokens]
    assert sum(not 0.8 < ratio < 1.2 for ratio in ratios) >= 3
    for option in theirs.items() - {("eps", 1e-6)}:  # each changes what comes out
        without = three_updates(start, ref, lr=lr, **dict(theirs.items() - {option}))
        assert (without - found).abs().max() > 1e-5, option
    torch.testing.assert_close(theta.detach(), found, rtol=0, atol=1e-7)


def three_updates(start: Tensor, ref: Tensor, *, lr: float, **theirs: Any) -> Tensor:
    theta = start.clone()
    for _ in range(3):
        theta.requires_grad_()
        (grad,) = torch.autograd.grad(their_loss(theta, start, ref, **theirs), theta)
        theta = (theta - lr * grad).detach()
    return theta


def test_the_share_that_the_std_of_trl_differs_by_is_that_of_the_page() -> None:
    (low, high) = (float(x) / 100 for x in re.findall(r"1e-6 here: ([\d.]+)% to ([\d.]+)%", PAGE)[0])
    for right in range(1, 8):
        rewards = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64)
        ids = torch.zeros(8, dtype=torch.long)
        ours, theirs = group_zscore(rewards, group_ids=ids), group_zscore(rewards, group_ids=ids, eps=1e-4)
        assert low - 5e-5 < float((ours / theirs - 1).abs().max()) < high + 5e-5


def test_the_number_of_rollouts_is_that_of_the_page() -> None:
    """15 epochs of GSM8K's 7473 rows in batches of 1024, one in batches of 128: the last, smaller batch is dropped."""
    assert int(re.findall(r"--minibatches 4 --steps (105)", PAGE)[0]) == 7473 // 1024 * 15
    assert int(re.findall(r"--minibatches 4 --steps (58)", PAGE)[0]) == 7473 // 128
