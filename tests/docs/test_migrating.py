"""docs/migrating.md: its tables, commands and wrappers. Its losses: test_migrating_losses.py."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import nightly
import pyarrow
import pytest
import screens
import torch
import tyro
from pyarrow import parquet

from rlkit import losses
from rlkit.compat.flags import FLAGS, NO_FLAG, SYSTEMS, answer, key_of
from rlkit.compat.rewards import adapted
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.rewards import Sample, run_reward
from rlkit.rewards.load import load_function
from rlkit.scripts.cli import flags_of, main, module_of, run
from rlkit.scripts.flags import CONFIG
from rlkit.settings import Engines, ParallelArgs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
SCRIPTS = ("grpo", "ppo", "distill", "sft", "dpo", "kto", "reward_model")
COMMANDS = re.findall(r"^(?:torchrun .*?)?rlkit(?:\.scripts\.| )(\w+) +(--.*)", PAGE.replace("\\\n", " "), re.MULTILINE)


def script_module(script: str) -> Any:
    return importlib.import_module(module_of(script))


@cache
def defaults(script: str) -> Any:
    """The flags as parsed from a command line with the required ones only."""
    more = {"grpo": ["--reward", "a:b"], "ppo": ["--reward", "a:b"], "distill": ["--teacher", "t"]}
    needed = ["--model", "m", "--data", "d", *more.get(script, [])]
    return tyro.cli(script_module(script).Args, args=needed)


def value_of(script: str, flag: str) -> Any:
    """The default of a flag; KeyError where there is none. Where it goes with the loss, of the default loss."""
    args = defaults(script)
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    value = dict(flags_of(args))[name]
    if value is None and (script, name) == ("dpo", "beta"):
        return script_module(script).beta_of(args.loss)
    if value is None and name in ("clip_low", "clip_high", "aggregate"):
        module = script_module(script)
        mean = module.policy_loss(args, None).aggregate.__name__
        return mean.removeprefix("per_") if name == "aggregate" else module.CONSTANTS[args.loss.loss][name]
    return value


def table_rows() -> list[tuple[str, list[str], int]]:
    """(script, cells, index of ours) of every row of every table that names options of ours."""
    rows: list[tuple[str, list[str], int]] = []
    where = None
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        heads = [re.match(r"here \(`rlkit (\w+)`\)", cell) for cell in cells]
        if any(heads):
            at = next(i for i, head in enumerate(heads) if head)
            where = (heads[at][1], at)
        elif not cells:
            where = None
        elif where and not set(line) <= set("|-"):
            rows.append((where[0], cells, where[1]))
    return rows


def test_the_flags_and_defaults_of_the_tables_match_the_scripts() -> None:
    rows = table_rows()
    assert len(rows) > 115
    for script, cells, at in rows:
        flags, defaults = re.findall(r"`([^`]+)`", cells[at]), [x for x in cells[at + 1].split(", ") if x]
        assert len(flags) == len(defaults), (flags, defaults)
        for flag, stated in zip(flags, defaults, strict=True):
            value = value_of(script, flag)
            if stated == "off":
                assert not value, (flag, value)
            elif stated == "required":
                assert value == "t", (flag, value)
            else:
                assert type(value)(stated) == value, (flag, stated, value)


def test_every_other_flag_of_the_page_is_another_systems_or_exists() -> None:
    """Their options are those of the first column, of the PPO table, and the few that the text sets beside ours."""
    text = re.sub(r"```.*?```|`rlkit track [^`]*`", "", PAGE, flags=re.DOTALL)
    flag = r"--[a-z][\w.-]*\w"
    ppo = text.index("## PPO")
    cells = [line.split("|") for line in text[:ppo].splitlines() if line.startswith("|")]
    theirs = {found for row in cells for found in re.findall(flag, row[1])}
    theirs |= {found for line in text[ppo:].splitlines() if line[:1] == "|" for found in re.findall(flag, line)}
    beside = {
        "--actor.dual_clip", "--algo.kl.unbiased_gradient", "--model.label_smoothing", "--model.nll_loss_coef",
        "--model.ipo_enable", "--train.batch_size", "--eps-clip-c", "--num-epoch", "--use-unbiased-kl",
        "--normalize-advantages", "--algo", "--reward-type", "--use-opd", "--num_processes", "--nproc-per-node",
        *re.findall(flag, re.findall(r"have the flat names.*?\n\n", text, re.DOTALL)[0]),
    }  # fmt: skip
    found = set(re.findall(flag, text)) - theirs - beside - {str(flag) for flag in CONFIG}
    assert len(found) > 30
    for name in sorted(found):
        scripts = [script for script in SCRIPTS if exists(script, name)]
        assert scripts, f"{name} is no flag of ours"


def exists(script: str, flag: str) -> bool:
    try:
        value_of(script, flag)
    except KeyError:
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
        "train.jsonl": {"messages": turn, "extra_info": {"answer": "4"}, "gt_answer": "4"},
        "conversations.jsonl": {"messages": [*turn, {"role": "assistant", "content": "4"}]},
        "labelled.jsonl": {"prompt": turn, "completion": [{"role": "assistant", "content": "4"}], "label": True},
        "dapo-math-17k.jsonl": {"prompt": turn, "label": "4"},
        "pairs.jsonl": {"chosen": [*turn, {"role": "assistant", "content": "4"}],
                  "rejected": [*turn, {"role": "assistant", "content": "5"}]},
    }  # fmt: skip
    for name, row in kinds.items():
        if name.endswith(".parquet"):
            parquet.write_table(pyarrow.Table.from_pylist([row] * 8), folder / name)
        else:
            (folder / name).write_text((json.dumps(row) + "\n") * 8)
    (folder / "my_rewards.py").write_text(THEIRS + PATIENT)
    return folder


THEIRS = """
def trl_reward(completions, completion_ids, answer, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert "prompts" in columns
    return [float(t == a) + 0.1 * len(i) for t, a, i in zip(texts, answer, completion_ids, strict=True)]

def reward_func(queries, prompts, labels):
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
HUB = {
    "openai/gsm8k:main:train": "gsm8k.jsonl", "trl-lib/ultrafeedback_binarized": "pairs.jsonl",
    "my/conversations": "conversations.jsonl", "my/prompts": "train.jsonl", "trl-lib/kto-mix-14k": "labelled.jsonl",
}  # fmt: skip


@pytest.mark.slow_cases("0-grpo", "10-grpo", "4-reward_model", "6-grpo")
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("script", "flags"), nightly.only(COMMANDS, *COMMANDS[::2]), ids=[f"{i}-{c[0]}" for i, c in enumerate(COMMANDS)]
)
def test_the_commands_run(script: str, flags: str, task: Path, tmp_path: Path) -> None:
    """Parsed as they stand; run with a tiny model, little data and one process."""
    module = script_module(script)
    args = tyro.cli(module.Args, args=shlex.split(flags.split("#")[0]))
    data = str(task / HUB.get(args.data.data, args.data.data))
    model = replace(args.model, model=str(task / "model"), device="cpu", parallel=ParallelArgs())
    rows = replace(args.data, data=data, eval_data=args.data.eval_data and data)
    small = {"model": model, "data": rows, "schedule": replace(args.schedule, output=tmp_path / "run", steps=2)}
    if script == "grpo":
        specs = [args.episodes.reward] if isinstance(args.episodes.reward, str) else args.episodes.reward
        file, name = specs[0].split(":")
        assert file in ("my_rewards.py", "rlkit.rewards.math")
        own = f"{task}/my_rewards.py:{name}"
        how = {"reward": (own, *specs[1:]) if specs[1:] else own, "reward_timeout": 300.0}
        small["episodes"] = replace(args.episodes, max_prompt_tokens=64, **how)
        small["evaluation"] = replace(args.evaluation, eval_limit=2)
        small["rollouts"] = replace(args.rollouts, prompts_per_step=4, max_new_tokens=8)
        small["engine"] = Engines()
        if file == "rlkit.rewards.math":  # a random model never solves the task, and every group would be dropped
            small["loss"] = replace(args.loss, success_range=None)
    elif script == "distill":
        small["loss"] = replace(args.loss, teacher=str(task / "model"))
        small["rollouts"] = replace(args.rollouts, prompts_per_step=4, max_new_tokens=8)
    else:
        small["examples"] = replace(args.examples, batch_size=4)
    exported = module.main(replace(args, **small))
    assert (exported / "config.json").exists()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2


def test_the_call_of_the_page_names_arguments_of_the_loop() -> None:
    ((source, functions),) = re.findall(r"```python\n(grpo\((.*?))```", PAGE, re.DOTALL)
    call = ast.parse(source).body[0].value  # type: ignore[attr-defined]
    assert [keyword.arg for keyword in call.keywords] == ["loss"]
    assert "loss" in inspect.signature(grpo).parameters
    assert "partial(dual_clip, clip_c=4.0, clip_high=0.28)" in functions
    losses.dual_clip(torch.zeros(1), torch.ones(1), clip_c=4.0, clip_high=0.28)


def test_there_is_a_command_for_every_script_of_trl() -> None:
    """PPO's is the section of all systems."""
    section = PAGE[PAGE.index("## TRL") : PAGE.index("## verl")]
    for script in SCRIPTS:
        assert f"here (`rlkit {script}`)" in section
        assert script == "ppo" or re.search(rf"^rlkit {script} --model", section, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_of_trl_are_answered_by_flags_of_the_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer names a flag that the script has, or says why none is needed; never a flag that the script has."""
    module, answered = script_module(script), set()
    names = {name for name, _ in flags_of(module.Args)}
    for foreign in sorted({*FLAGS, *NO_FLAG} - names):
        with pytest.raises(SystemExit):
            run(module.main, module.Args, None, argv=[f"--{foreign}", "1"])
        line = capsys.readouterr().err
        if " is no flag" not in line and " is for rlkit " not in line:
            answered.add(foreign)
            assert line.count("\n") == 1
            found = re.findall(r"--([a-z][\w.-]*)", line.partition(foreign)[2].partition("; --help")[0])
            assert all(flag == "config" or exists(script, f"--{flag}") for flag in found) or foreign in NO_FLAG, line
            assert found or foreign in NO_FLAG, line
    usual = {"dataset_name", "learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size", "packing"}
    usual |= {"model_name_or_path", "output_dir", "eos_token", "max_length", "gradient_accumulation_steps", "use_peft"}
    assert usual - names - answered == set()
    own = {"sft": {"completion_only_loss"}, "reward_model": {"center_rewards_coefficient"}}
    own |= {"dpo": {"loss_type", "precompute_ref_log_probs"}, "kto": {"loss_type"}}
    own |= {"distill": {"teacher_model_name_or_path"}}
    own |= {"grpo": {"num_iterations", "scale_rewards"}, "ppo": {"cliprange", "num_ppo_epochs", "response_length"}}
    assert own[script] <= answered


def test_the_longest_name_counts_in_every_system() -> None:
    """`ref.model_name_or_path` of OpenRLHF is not TRL's `model_name_or_path`, though both have one name in common."""
    for system, table in {"": {}, **SYSTEMS}.items():
        for name in {*FLAGS, *table}:
            assert key_of(name, system) == name
        assert answer("ref.model_name_or_path", {"model", "reference"}, system) == "is --reference here"
        assert answer("critic.cliprange_value", {"critic", "value_clip"}, system) == "is --value-clip here"


NOT_ONE_TO_ONE = {
    "gradient_accumulation_steps", "train_batch_size",  # in a product; also another system's name for prompts
    "sigmoid", "sft",  # values of `loss_type`
    "reward_model_path",  # where TRL's critic starts; the reward is a function here
}  # fmt: skip


def options_of(cell: str) -> list[str]:
    """The names in a cell of another system, as the command line looks them up: no dashes, no values."""
    quoted = [text.split("=")[0] for text in re.findall(r"`([^`]+)`", cell)]
    return [word.lstrip("-").replace("-", "_") for text in quoted for word in re.findall(r"[A-Za-z-][\w.-]*", text)]


def pairs_of_the_page() -> dict[tuple[str, str], set[str]]:
    """(script, option of another system): the flags beside it, of all rows that have it."""
    found: dict[tuple[str, str], set[str]] = {}
    for script, cells, at in table_rows():
        ours = {flag.replace("--no-", "--") for flag in re.findall(r"`(--[^`]+)`", cells[at])}
        for option in options_of(cells[0]) if at else ():
            found.setdefault((script, option), set()).update(ours)
    return found


def test_the_command_line_translates_the_options_of_the_tables_as_the_page_does() -> None:
    pairs = pairs_of_the_page()
    assert len(pairs) > 150
    wrong = {}
    for (script, option), ours in pairs.items():
        names = {name for name, _ in flags_of(script_module(script).Args)}
        if option not in NOT_ONE_TO_ONE and option not in names and ours:
            said = answer(option, names) or ""
            if not ours & {*re.findall(r"--[a-z][\w.-]*\w", said)}:
                wrong[script, option] = (ours, said)
    assert not wrong


def test_the_command_of_rl2_is_answered_word_by_word() -> None:
    (line,) = re.findall(r"-m RL2\.trainer\.ppo (.*?) +#", PAGE.replace("\\\n", " "))
    said = screens.refused(main, ["grpo", *shlex.split(line)])
    assert dict(re.findall(r"([\w.]+) is (--[\w-]+)", said)) == {
        "train_data.path": "--data", "train_data.prompts_per_rollout": "--prompts-per-step",
        "train_data.responses_per_prompt": "--group-size", "actor.model_name": "--model",
        "rollout.train_sampling_params.max_new_tokens": "--max-new-tokens", "rollout.env_path": "--env",
        "actor.max_length_per_device": "--max-tokens", "test_data.path": "--eval-data",
        "trainer.test_freq": "--eval-steps",
    }  # fmt: skip


def test_there_is_a_command_for_every_system() -> None:
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[2:8]:
        assert re.search(r"rlkit(?:\.scripts\.| )grpo +--model", section), section[:20]


VERL_ROW = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 0}}


CHAT = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("trl_reward", {"prompt": "q", "answer": "4"}, (1.3, None), 0.3),
        ("trl_reward", {"prompt": CHAT, "answer": "4"}, (1.3, None), 0.3),
        ("trl_reward", {"messages": CHAT, "answer": "4"}, (1.3, None), 0.3),
        ("compute_score", VERL_ROW, (1, 1), 0),
        ("reward_func", {"prompt": "q", "answer": "4"}, (2, 1), 0),
        ("reward_func", {"messages": CHAT, "label": "4"}, (2, 1), 0),
        ("custom_rm", {"prompt": "q", "label": "4"}, (1, None), 0),
        ("step", {"extra_info": {"answer": "4"}}, (1.5, 0.75), 0),
    ],
)
def test_reward_functions_of_other_systems_run_as_they_are(
    name: str, row: dict[str, Any], right: Any, wrong: float, task: Path
) -> None:
    function = adapted(load_function(f"{task / 'my_rewards.py'}:{name}"))
    samples = [Sample(text, row, 0, {"completion_ids": [1, 2, 3]}) for text in ("4", "55")]
    found, other = asyncio.run(run_reward(function, samples, timeout_s=120))
    assert (found.reward, found.score) == (pytest.approx(right[0]), right[1])
    assert other.reward == pytest.approx(wrong)


def test_the_number_of_rollouts_matches_the_page() -> None:
    """15 epochs of GSM8K's 7473 rows in batches of 1024, one in batches of 128: the last, smaller batch is dropped."""
    assert int(re.findall(r"--minibatches 4 --steps (105)", PAGE)[0]) == 7473 // 1024 * 15
    assert int(re.findall(r"--minibatches 4 --steps (58)", PAGE)[0]) == 7473 // 128
