"""What the READMEs of RL2, its fork, rl4llm, ColossalAI's RL and rl-max print runs: two steps of a tiny model each.

RL2 at 9161ede, its fork rl2.0.1 at 1cf8dc2, rl4llm at 0180bd3, ColossalAI at 1330b57 (coati/distributed/README.md),
RL-MAX at 1e60eef. The forms are theirs, the contents ours (`tests/docs/printed`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import warm

pytestmark = pytest.mark.slow
PRINTED, ROOT = Path(__file__).parent / "printed", Path(__file__).parents[2]
ASKED = {"role": "user", "content": "What is the capital of Peru?"}
SAID = {"role": "assistant", "content": "Lima."}
TOLD = {"role": "assistant", "content": "Quito."}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
SUM = {"role": "user", "content": "What is 1 + 2?"}
TEXT = "The capital of Peru is"
ROWS: dict[str, dict[str, Any]] = {
    "prompt_response": {"prompt": TEXT, "response": "Lima."},
    "conversation": {"messages": [ASKED, SAID]},
    "pair": {"prompt": TEXT, "chosen": "Lima.", "rejected": "Quito."},
    "pair_of_conversations": {"chosen": [ASKED, SAID], "rejected": [ASKED, TOLD]},
    "pair_of_messages": {"messages": [ASKED], "chosen": "Lima.", "rejected": "Quito."},  # the fork
    "prompt_info": {"prompt": TEXT, "extra_info": {"answer": "Lima"}},
    "messages_info": {"messages": [ASKED], "extra_info": {"answer": "Lima"}},
    "messages_answer": {"messages": [SYSTEM, ASKED], "answer": "Lima"},  # the fork
    "ground_truth": {"messages": [ASKED], "ground_truth": "Lima"},  # rl4llm
    "math": {"messages": SUM, "gt_answer": "3"},  # ColossalAI
    "code": {"messages": SUM, "test_cases": {"inputs": ["1 2\n"], "outputs": ["3\n"]}},
    "prompts": {"prompt": "What is 1 + 2? Think step by step."},  # rl-max
}
RL = "--prompts-per-step 2 --group-size 4 --max-new-tokens 12 --max-total-tokens 200"
SMALL = "--steps 2 --eval-steps 0 --save-steps 0 --device cpu"
FORMS = {  # the words after `rlkit`, and a metric that shows that the form was used
    "RL2, prompt and response": ("sft --data prompt_response.jsonl --batch-size 2", "loss"),
    "RL2, messages": ("sft --data conversation.jsonl --batch-size 2", "loss"),
    "RL2, pair, RM": ("reward_model --data pair.jsonl --batch-size 2", "loss"),
    "RL2, pair, DPO": ("dpo --data pair.jsonl --batch-size 2", "loss"),
    "RL2, pair of conversations, RM": ("reward_model --data pair_of_conversations.jsonl --batch-size 2", "loss"),
    "RL2, pair of conversations, DPO": ("dpo --data pair_of_conversations.jsonl --batch-size 2", "loss"),
    "RL2, step, prompt": (f"grpo --data prompt_info.jsonl --env rl2_step.py:step {RL}", "reward/mean"),
    "RL2, step, messages": (f"grpo --data messages_info.jsonl --env rl2_step.py:step {RL}", "reward/mean"),
    "fork, messages and pair": ("dpo --data pair_of_messages.jsonl --batch-size 2", "loss"),
    "fork, reward_fn": (f"grpo --data messages_answer.jsonl --reward rl2_first.py:reward_fn {RL}", "reward/mean"),
    "fork, interact": (
        f"grpo --data messages_answer.jsonl --env rl2_first.py:interact --reward rl2_first.py:reward_fn {RL}",
        "reward/mean",
    ),
    "rl4llm, reward, class": (
        f"grpo --data ground_truth.jsonl --reward rl4llm_forms.py:CustomReward {RL}", "reward/mean",
    ),
    "rl4llm, reward, object": (f"grpo --data ground_truth.jsonl --reward rl4llm_forms.py:reward {RL}", "reward/mean"),
    "rl4llm, reward_transform_fn": (
        "grpo --data ground_truth.jsonl --reward rl4llm_forms.py:CustomReward=0.7 rl4llm_forms.py:NumMessages=0.3 "
        f"{RL}",
        "reward/NumMessages",
    ),
    "rl4llm, environment": (
        f"grpo --data ground_truth.jsonl --env rl4llm_forms.py:CustomEnv --reward rl4llm_forms.py:CustomReward {RL}",
        "reward/mean",
    ),
    "rl4llm, environment of two turns": (
        f"grpo --data ground_truth.jsonl --env rl4llm_forms.py:two_turns --reward rl4llm_forms.py:NumMessages {RL}",
        "reward/mean",
    ),
    "ColossalAI, think_answer_tags": (
        f"grpo --data math.jsonl --reward rlkit.rewards.math:answer_tag {RL}", "reward/mean",
    ),
    "ColossalAI, boxed": (f"grpo --data math.jsonl --reward rlkit.rewards.math:boxed {RL}", "reward/mean"),
    "ColossalAI, code": (f"grpo --data code.jsonl --reward rlkit.rewards.code:stdin_tests {RL}", "reward/mean"),
    "rl-max, BaseReward": (f"grpo --data prompts.jsonl --reward rl_max_rewards.py:LengthReward {RL}", "reward/mean"),
    "rl-max, weights": (
        f"grpo --data prompts.jsonl --reward rl_max_rewards.py:LengthReward(weight=2.0) {RL}", "reward/mean",
    ),
}  # fmt: skip


class Theirs(NamedTuple):
    """A script, options as a README prints them, and flags that their translation must have."""

    script: str
    words: str
    ours: str


RL2 = "actor.model_name=model train_data.path=messages_info.jsonl rollout.env_path=rl2_step.py trainer.n_epochs=1"
BATCH = "train_data.prompts_per_rollout=2 train_data.responses_per_prompt=4"
FORK = (
    "actor.model_name=model data.train_data_path=messages_answer.jsonl data.prompts_per_rollout=2 "
    "data.responses_per_prompt=4 actor.rollout.env_path=rl2_first.py rollout.train_sampling_params.max_new_tokens=12"
)
OPTIONS = {
    "RL2": Theirs("grpo", f"{RL2} {BATCH}", "--env rl2_step.py:step --baseline group_centered"),
    "RL2, OpenAI's PPO": Theirs(
        "ppo", f"{RL2} {BATCH} kl.type=reward kl.reward_estimator=k1 adv.estimator=gae kl.coef=0.01",
        "--kl-in reward --kl-coef 0.01 --advantage gae",
    ),
    "RL2, DeepSeek's GRPO": Theirs(
        "grpo",
        f"{RL2} {BATCH} actor.avg_level=sequence kl.type=loss kl.loss_estimator=k3 adv.norm_var=true kl.coef=0.01",
        "--aggregate episode --kl-coef 0.01 --kl-estimator k3 --baseline group_zscore",
    ),
    "RL2, partition and length": Theirs(
        "grpo", f"{RL2} {BATCH} actor.ddp_size=1 actor.tp_size=1 actor.cp_size=1 actor.max_length_per_device=2048",
        "--parallel.replicate 1 --parallel.tp 1 --parallel.cp 1 --max-tokens 2048",
    ),
    "RL2, max_length": Theirs(
        "sft", "actor.model_name=model train_data.path=conversation.jsonl train_data.max_length=64 "
        "train_data.batch_size=2", "--batch-size 2 --max-example-tokens 64",
    ),
    "fork": Theirs("grpo", FORK, "--reward rl2_first.py:reward_fn --max-new-tokens 12"),
    "fork, interact": Theirs(
        "grpo", f"{FORK} rollout.max_turns=3",
        "--env rl2_first.py:interact --reward rl2_first.py:reward_fn --max-turns 3",
    ),
    "fork, without template": Theirs("grpo", f"{FORK} rollout.apply_chat_template=false", "--no-chat-template"),
    "fork, PPO": Theirs("ppo", f"{FORK} adv.estimator=gae", "--advantage gae"),
    "fork, GRPO": Theirs("grpo", f"{FORK} adv.norm_var=true kl.reward_estimator=k3", "--baseline group_zscore"),
    "fork, batch": Theirs(
        "sft", "actor.model_name=model data.path=conversation.jsonl data.batch_size=2", "--batch-size 2"
    ),
    "fork, adaptive KL": Theirs(
        "grpo", f"{FORK} actor.kl.adaptive_kl.enabled=true actor.kl.adaptive_kl.controller_type=exponential "
        "actor.kl.adaptive_kl.target_kl=0.01 multi_objective.enabled=true "
        "multi_objective.objectives=[reward,kl_penalty,entropy] memory_optimization.enabled=true "
        "memory_optimization.enable_gradient_checkpointing=true experiment_tracking.enabled=true",
        "--kl-controller exponential --kl-target 0.01 --kl-coef 0.2 --parallel.activation-checkpointing",
    ),
    "ColossalAI, its table": Theirs(
        "grpo", """--model model --dataset math.jsonl --eval-dataset '{"eval_1":"math.jsonl"}' --project Project1
        --num-episodes 1 --num-trainers 1 --num-inferencer 1 --inference-batch-size 2 --inference-microbatch-size 8
        --train-batch-size 2 --train-minibatch-size 2 --train-microbatch-size 2 --backend vllm --temperature 1.0
        --top-k None --top-p 1.0 --max-new-tokens 12 --max-prompt-tokens 512 --algo GRPO --learning-rate 1e-6
        --system-prompt 'Please reason step by step, and put your final answer within \\boxed{}.' --kl-coeff 0.01
        --reward-type think_answer_tags --eval-interval 10 --save-interval 20 --save-dir ./model_out
        --eval-save-dir ./eval --rollout-save-dir ./rollouts --ray_dir None --master_address None
        --master_port 29506""",
        "--reward rlkit.rewards.math:answer_tag --eval-data eval_1=math.jsonl --lr 1e-6 --kl-coef 0.01",
    ),
    "ColossalAI, one machine": Theirs(
        "grpo", "--dataset math.jsonl --model model -t 4 -i 4 -b vllm -ibs 2 -tbs 4 -tMbs 1 -tmbs 4 -imbs 1 -rt boxed "
        "-g 4 -ibs 1 -tbs 2 -tMbs 1 -tmbs 2 -imbs 1 "
        "-s 'Please reason step by step, and put your final answer within \\boxed{}.' -tMbs 8 -p GRPO-Debug",
        "--reward rlkit.rewards.math:boxed --group-size 4 --prompts-per-step 4",
    ),
    "ColossalAI, several machines": Theirs(
        "grpo", "-m model -d math.jsonl --master_address 10.0.0.3 -t 2 -i 2 -p GRPO-Debug -g 2 -ibs 1 -tbs 2 -tMbs 1 "
        "-tmbs 2 -imbs 1 -b vllm -e 2 -rt boxed -s 'Please reason step by step.'",
        "--reward rlkit.rewards.math:boxed --group-size 2 --prompts-per-step 2",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(make_task: Any) -> Path:
    """A random model, a file of each kind of row, and the functions."""
    made: Path = make_task(**{name: [row] * 4 for name, row in ROWS.items()})
    for file in PRINTED.glob("*.py"):
        (made / file.name).symlink_to(file)
    return made


def rlkit(words: list[str], folder: Path) -> tuple[int, str]:
    """The exit code and what a command says. An installed rl4llm comes before the stand-in."""
    paths = ":".join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(PRINTED / "stand_in")])
    done = warm.run(
        [sys.executable, "-m", "rlkit", *words], cwd=folder, capture_output=True, text=True, timeout=300, plots=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def steps_of(words: list[str], folder: Path, output: Path) -> list[dict[str, Any]]:
    """The metrics of two steps of the command."""
    code, said = rlkit([*words, *shlex.split(SMALL), "--output", str(output)], folder)
    assert code == 0, said[-3000:]
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", FORMS)
def test_a_printed_form_trains(name: str, folder: Path, tmp_path: Path) -> None:
    words, metric = FORMS[name]
    script, *rest = shlex.split(words.replace("(", "'(").replace(")", ")'"))
    found = steps_of([script, "--model", "model", *rest], folder, tmp_path / "run")
    assert sum(metric in step for step in found) == 2, found
    if "rlkit.rewards" not in words and metric != "loss":
        assert all(step["reward/mean"] > 0 for step in found), "lengths are rewarded"


def translated(words: list[str]) -> dict[str, list[str]]:
    """Flags and their values."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            found[name := word] = []
        else:
            found[name].append(word)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_a_printed_option_is_translated_and_trains(name: str, folder: Path, tmp_path: Path) -> None:
    """The command that `rlkit` prints for it trains, on the embedded engine and with short answers."""
    theirs = OPTIONS[name]
    code, said = rlkit([theirs.script, *shlex.split(theirs.words)], folder)
    assert code == 2
    assert "is no flag" not in said
    command = re.split(r"\n  note: ", said.partition(" is here")[2].partition(":\n")[2])[0].replace("\\\n", " ")
    start, script, *words = shlex.split(command)
    assert (start, script) == ("rlkit", theirs.script), said
    flags = translated(words)
    ours = translated(shlex.split(theirs.ours))
    assert {flag: flags.get(flag) for flag in ours} == ours
    small = {"--max-new-tokens": ["12"]} if script in ("grpo", "ppo") else {}
    left = ("--engine", "--track", "--track-project", "--output", "--steps", "--eval-steps", "--save-steps")
    kept = {flag: values for flag, values in {**flags, **small}.items() if flag not in left}
    found = steps_of(
        [script, *(word for flag, values in kept.items() for word in (flag, *values))], folder, tmp_path / "run"
    )
    assert len(found) >= 2
