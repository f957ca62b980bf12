"""A command of another system, pasted into `rlkit`: the error ends with the command to type, which the parser takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nightly
import pytest
import torch
import yaml
from torch import Tensor

from rlkit.rewards.load import load_function
from rlkit.scripts.cli import main, parsed
from rlkit.scripts.flags import flags_of
from rlkit.scripts.grpo import Args, policy_loss

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text().replace("\\\n", " ")
THEIRS = re.compile(
    r"^(?:trl \w+|python3? (?:-m [\w.]+|\w+\.py)|deepspeed --module [\w.]+|torchrun --nproc_per_node=8 -m RL2[\w.]+) +"
    r"([^\n]*)\n(?:torchrun [^\n]*?)?rlkit(?:\.scripts\.| )(\w+) +(--[^\n]*)$",
    re.MULTILINE,
)
PAIRS = [(ours, theirs, flags) for theirs, ours, flags in THEIRS.findall(PAGE)]
DIFFERS = {  # of what the page has, beside what no command of another system says
    "sft": {"batch_size"},  # blocks of 4096 tokens there
    "verl": {"reward", "steps", "parallel.activation_checkpointing"},  # rows are counted
    "openrlhf": {"reward", "steps", "max_total_tokens", "warmup_steps"},
    "--num-rollout": {"model", "max_tokens", "clip_high"},  # 0.28 is the default
    "actor.model_name": {"reward", "env", "steps"},
    "--reward-type": {"steps", "max_prompt_tokens"},
    "trl": {"data"},  # TRL's rows name a configuration in another flag
}
OF_OURS = {"dtype", "device", "engine", "engine_urls", "output"}


@dataclass
class Said:
    """The lines of an error about another system's options, its command, and the notes below it."""

    lines: list[str]
    command: list[str]
    notes: list[str]


def paste(script: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> Said:
    with pytest.raises(SystemExit) as ended:
        main([script, *words])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    lines, _, rest = err.partition("  The command of ")
    command, *notes = rest.split("\n  note: ")
    return Said(lines.splitlines(), shlex.split(command.partition(":\n")[2].replace("\\\n", " ")), notes)


def flags_of_command(script: str, words: list[str]) -> dict[str, Any]:
    module = __import__(f"rlkit.scripts.{script}", fromlist=["Args"])
    return dict(flags_of(parsed(words, module.Args)))


def ours_of(script: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The flags of the command that the error prints, parsed, where they differ from the defaults."""
    command = paste(script, words, capsys).command
    needed = {"grpo": [], "ppo": [], "distill": ["--teacher", "t"]}.get(script, [])
    bare = flags_of_command(script, ["--model", "m", "--data", "d", *needed])
    found = flags_of_command(script, [*command[2:], *(["--model", "m"] if "--model" not in command else []),
                                      *(["--data", "d"] if "--data" not in command else [])])  # fmt: skip
    return {name: value for name, value in found.items() if value != bare[name]}


def test_every_option_of_colossalais_script_has_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of rl_example.py, at commit 0271d36, and the fields of its grpo_config."""
    words = shlex.split("""
        --model m --dataset d.jsonl --eval-dataset e.jsonl --project p --num-episodes 1 --num-trainers 4
        --num-inferencer 2 --num-generations 8 --inference-batch-size 64 --inference-microbatch-size 8
        --train-batch-size 32 --train-minibatch-size 8 --train-microbatch-size 2 --ray_dir r --master_address h
        --master_port 29506 --backend vllm --temperature 1 --top-k 50 --top-p 1 --system-prompt s
        --max-new-tokens 3584 --max-prompt-tokens 512 --algo DAPO --learning-rate 1e-6 --kl-coeff 0.01
        --reward-type boxed --eval-interval 100 --save-interval 100 --save-dir d --eval-save-dir e
        --rollout-save-dir r --tensor-parallel-size 1 --pipeline-parallel-size 1 --zero-stage 0
        --producer-tensor-parallel-size 1 --dynamic_batching True --cache_length 100 --reward_fn_type boxed
        --response_format_tags x --soft_over_length_punishment True
    """)
    said = paste("grpo", words, capsys)
    assert not [line for line in said.lines if "is no flag" in line]
    rewards = flags_of_command("grpo", said.command[2:])["reward"]
    assert any("soft_overlong(max_tokens=3584,cache_tokens=100)" in spec for spec in rewards)


@pytest.mark.slow_cases("7-grpo", "9-grpo")
@pytest.mark.parametrize(("script", "theirs", "ours"), PAIRS, ids=[f"{i}-{p[0]}" for i, p in enumerate(PAIRS)])
def test_the_commands_of_the_page_become_the_ones_beside_them(
    script: str, theirs: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = paste(script, shlex.split(theirs, comments=True), capsys)
    assert not [line for line in said.lines if "is no flag" in line]
    assert said.command[:2] == ["rlkit", script]
    found = flags_of_command(script, said.command[2:])
    page = flags_of_command(script, shlex.split(ours, comments=True))
    allowed = OF_OURS | {x for word, names in DIFFERS.items() if word in theirs + script for x in names}
    allowed |= DIFFERS["openrlhf"] if "--data.apply_chat_template" in theirs else set()
    allowed |= DIFFERS["verl"] if "actor_rollout_ref" in theirs else set()
    allowed |= DIFFERS["trl"] if "my/gsm8k" in theirs else set()
    assert {name: (found[name], page[name]) for name in page if found[name] != page[name] and name not in allowed} == {}


def test_the_page_has_a_command_of_each_system() -> None:
    assert len(PAIRS) == 12
    assert {script for script, _, _ in PAIRS} == {"grpo", "dpo", "sft", "kto", "reward_model", "distill"}


TRL = "--model_name_or_path m --dataset_name d --reward_funcs my_trl.score"
OPENRLHF = "--pretrain m --prompt_data d --remote_rm_url f.py"
VERL = "actor_rollout_ref.model.path=m data.train_files=d custom_reward_function.path=f.py"
SLIME = "--hf-checkpoint m --prompt-data d --custom-rm-path f.score"
RL2 = "actor.model_name=m rollout.env_path=envs/e.py"
SUMS = [  # completions, prompts and samples: (script, their words, ours)
    ("grpo", f"{TRL} --per_device_train_batch_size 8 --num_generations 8", {"prompts_per_step": 1}),
    ("grpo", f"{TRL} --per_device_train_batch_size 4 --gradient_accumulation_steps 6 --num_generations 4",
     {"prompts_per_step": 6, "group_size": 4}),
    ("grpo", f"{TRL} --generation_batch_size 64 --per_device_train_batch_size 8 --gradient_accumulation_steps 2",
     {"minibatches": 4}),
    ("grpo", f"{TRL} --steps_per_generation 8 --gradient_accumulation_steps 2 --max_steps 400 --num_iterations 2",
     {"minibatches": 4, "steps": 50, "epochs": 2}),
    ("sft", "--model_name_or_path m --dataset_name d --per_device_train_batch_size 2 --gradient_accumulation_steps 8",
     {"batch_size": 16}),
    ("ppo", f"{TRL} --per_device_train_batch_size 16 --gradient_accumulation_steps 2 --total_episodes 3200",
     {"prompts_per_step": 32, "steps": 100}),
    ("grpo", f"{OPENRLHF} --train_batch_size 128 --rollout_batch_size 1024",
     {"prompts_per_step": 1024, "minibatches": 8}),
    ("grpo", f"{OPENRLHF} --train_batch_size 256 --rollout_batch_size 128 --n_samples_per_prompt 8",
     {"prompts_per_step": 128, "minibatches": 4}),
    ("dpo", "--pretrain m --dataset d --train_batch_size 256 --max_epochs 1", {"batch_size": 256}),
    ("grpo", f"{VERL} data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=128",
     {"prompts_per_step": 1024, "minibatches": 8}),
    ("grpo", f"{SLIME} --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64 --num-rollout 5",
     {"prompts_per_step": 32, "minibatches": 4, "steps": 5}),
    ("grpo", f"{RL2} train_data.path=d rollout.train_prompts_per_rollout=64 actor.update_per_rollout=2",
     {"prompts_per_step": 64, "minibatches": 2, "env": "envs/e.py:step"}),
    ("grpo", f"{RL2} rollout.train.path=d rollout.train.prompts_per_rollout=16 trainer.total_steps=512",
     {"prompts_per_step": 16, "steps": 512}),
    ("grpo", "--model m --dataset d --inference-batch-size 32 --num-inferencer 4 --train-batch-size 16 --algo GRPO "
     "--num-generations 16", {"prompts_per_step": 128, "minibatches": 4, "group_size": 16, "aggregate": "episode"}),
    ("grpo", "-m m -d d -g 16 -ibs 32 -i 4 -tbs 16 -t 2 -rt boxed -mnt 9 -topk None",
     {"prompts_per_step": 128, "minibatches": 4, "group_size": 16, "max_new_tokens": 9, "top_k": None,
      "reward": "rlkit.rewards.math:boxed"}),
    ("grpo", '-m m -d d -rt boxed -ed {"a":"x.jsonl","b":"y.jsonl"}', {"eval_data": ("a=x.jsonl", "b=y.jsonl")}),
    ("sft", "actor.model_name=m data.path=x data.batch_size=2", {"data": "x", "batch_size": 2}),
    ("dpo", "actor.model_name=m data.train.path=x data.train.batch_size=32", {"data": "x", "batch_size": 32}),
    ("ppo", f"{RL2} data.train_data_path=x data.test_data_path=e kl.type=reward kl.reward_estimator=k3 kl.coef=0.1",
     {"data": "x", "eval_data": "e", "kl_coef": 0.1, "kl_estimator": "k3"}),
    ("grpo", f"{RL2} data.train_data_path=d rollout.apply_chat_template=false actor.kl.adaptive_kl.enabled=true "
     "actor.kl.adaptive_kl.controller_type=pid actor.kl.adaptive_kl.target_kl=0.03",
     {"chat_template": False, "kl_controller": "pid", "kl_target": 0.03, "kl_coef": 0.2}),
    ("grpo", f"{RL2} data.train_data_path=d actor.kl.adaptive_kl.enabled=false "
     "actor.kl.adaptive_kl.controller_type=pid", {"kl_controller": None, "kl_coef": None}),
]  # fmt: skip


PROCESSES = [  # accelerate's and torchrun's, in whose number TRL's sizes are
    (f"--num_processes 4 train.py {TRL}", "torchrun --nproc-per-node 4 -m", 32),
    (f"accelerate launch --num_processes 8 --num_machines 2 --mixed_precision bf16 train.py {TRL}",
     "torchrun --nnodes 2 --nproc-per-node 4 -m", 64),
    (f"--nproc_per_node=4 train.py {TRL}", "torchrun --nproc-per-node 4 -m", 32),
    (f"--num_processes 1 train.py {TRL}", "rlkit grpo", 8),
]  # fmt: skip


@pytest.mark.parametrize(("words", "launcher", "completions"), nightly.only(PROCESSES, *PROCESSES[::3]))
def test_the_processes_of_a_launcher_are_torchruns(
    words: str, launcher: str, completions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    said = paste("grpo", words.split(), capsys)
    start = launcher.split() + ([] if "rlkit" in launcher else ["rlkit.scripts.grpo"])
    assert said.command[: len(start)] == start
    found = flags_of_command("grpo", said.command[len(start) :])
    assert found["prompts_per_step"] == completions // 8
    assert found["dtype"] == ("bf16" if "mixed" in words else None)


DPO = "--model_name_or_path m --dataset_name d --max_steps 50"
VERL_SFT = "data.train_files=d model.partial_pretrain=m optim.lr=1e-4 trainer.total_training_steps=25"
FIXED = [  # of fixed data: (script, their words, ours)
    ("dpo", f"{DPO} --loss_type sigmoid sft --loss_weights 1.0 0.2", {"loss": "dpo", "sft_coef": 0.2}),
    ("dpo", f"{DPO} --loss_type [ipo,sft]", {"loss": "ipo", "sft_coef": 1.0}),
    ("dpo", f"{DPO} --loss_type sft sigmoid --loss_weights 0.4 0.8", {"loss": "dpo", "sft_coef": 0.5}),
    ("dpo", f"{DPO} --loss_type robust --label_smoothing 0.1", {"loss": "robust_dpo", "sft_coef": 0.0}),
    ("dpo", f"{DPO} --warmup_ratio 0.11", {"warmup_steps": 6}),  # rounded up, as transformers does
    ("dpo", f"{DPO} --warmup_steps 0.1", {"warmup_steps": 5}),  # transformers 5: a share below 1
    ("dpo", f"{DPO} --warmup_steps 7 --warmup_ratio 0.1", {"warmup_steps": 7}),
    ("dpo", f"{DPO}", {"warmup_steps": 0}),
    ("sft", VERL_SFT, {"model": "m", "data": "d", "lr": 1e-4, "steps": 25, "batch_size": 256, "warmup_steps": 2,
                       "max_example_tokens": 1024, "lr_schedule": "cosine", "weight_decay": 0.01}),
    ("sft", f"{VERL_SFT} data.max_length=4096 data.train_batch_size=64 data.micro_batch_size=4 model.lora_rank=32 "
     "model.target_modules=all-linear optim.lr_warmup_steps_ratio=0.3 optim.clip_grad=2 trainer.logger=console "
     "ulysses_sequence_parallel_size=2 use_remove_padding=true data.prompt_key=question data.response_key=target",
     {"max_example_tokens": 4096, "batch_size": 64, "lora_rank": 32, "lora_targets": (), "warmup_steps": 7,
      "max_norm": 2.0, "parallel.cp": 2, "rename": {"target": "response"}, "track": (), "data": "d"}),
]  # fmt: skip


@pytest.mark.slow_cases("sft-words9-expected9")
@pytest.mark.parametrize(("script", "words", "expected"), nightly.only(FIXED, *FIXED[::3]))
def test_options_of_fixed_data_are_translated(
    script: str, words: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    said = paste(script, words.split(), capsys)
    assert not [line for line in said.lines if "is no flag" in line]
    found = flags_of_command(script, said.command[2:])
    assert {name: found[name] for name in expected} == expected


def test_a_share_of_unknown_steps_is_left_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    said = paste(
        "dpo", f"{DPO.rpartition(' --')[0]} --warmup_ratio 0.1 --loss_type sigmoid bco_pair sft".split(), capsys
    )
    assert not {"--warmup-steps", "--loss", "--sft-coef"} & {*said.command}
    assert {"add --warmup-steps: 0.1 * steps", "add --steps: 3 * rows / 8"} < {note.strip() for note in said.notes}
    assert any(note.startswith("loss_type sigmoid bco_pair sft: --loss is one of them") for note in said.notes)


def surrogate(words: str, capsys: pytest.CaptureFixture[str]) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss per token of the command that stands for the words of another system."""
    loss = policy_loss(parsed(paste("grpo", words.split(), capsys).command[2:], Args), None).surrogate
    return lambda log_ratio, advantages: loss(
        log_ratio, SimpleNamespace(advantages=advantages, mask=torch.ones_like(advantages, dtype=torch.bool))
    )


@pytest.mark.slow_cases("10.0")
@pytest.mark.parametrize("bound", [2.5, 10.0])
def test_the_bound_of_the_ratio_is_that_of_the_other_system(bound: float, capsys: pytest.CaptureFixture[str]) -> None:
    log_ratio = torch.linspace(-2, 4, 61, dtype=torch.float64).repeat(2)
    advantages = torch.tensor([1.3, -0.7], dtype=torch.float64).repeat_interleave(61)
    ratio = log_ratio.exp()
    # trl/trainer/grpo_trainer.py, _compute_loss
    bounded = ratio.clamp(max=bound)
    trl = -torch.min(bounded * advantages, ratio.clamp(1 - 0.2, 1 + 0.3) * advantages)
    found = surrogate(f"{TRL} --delta {bound} --epsilon_high 0.3 --loss_type dr_grpo", capsys)
    torch.testing.assert_close(found(log_ratio, advantages), trl)
    # verl/trainer/ppo/core_algos.py, compute_policy_loss_vanilla
    first = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - 0.2, 1 + 0.2))
    verl = torch.where(advantages < 0, torch.min(-advantages * bound, first), first)
    for words in (
        f"{VERL} actor_rollout_ref.actor.clip_ratio_c={bound}",
        f"{OPENRLHF} --actor.dual_clip {bound}",
        f"{SLIME} --eps-clip-c {bound}",
    ):
        torch.testing.assert_close(surrogate(words, capsys)(log_ratio, advantages), verl)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (f"{TRL} --delta 1.1", "delta 1.1 is at most 1 + epsilon_high"),
        (f"{TRL} --delta 4 --loss_type cispo", "delta 4 is not part of --loss cispo"),
        (f"{TRL} --delta 4 --importance_sampling_level sequence", "delta 4 is not part of --loss gspo"),
        (f"{VERL} actor_rollout_ref.actor.clip_ratio_c=5 actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
         "clip_ratio_c 5 is not part of --loss gspo"),
    ],
)  # fmt: skip
def test_a_bound_that_is_not_of_the_loss_is_named(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = paste("grpo", words.split(), capsys)
    assert any(note.startswith(why) for note in said.notes)
    assert "--clip-c" not in said.command


BUFFER = "reward_model.overlong_buffer.enable={} reward_model.overlong_buffer.len=40"
NEWER = "+reward_model.reward_kwargs.overlong_buffer_cfg.{}"


@pytest.mark.parametrize(
    "words",
    [
        f"{VERL} {BUFFER.format(True)} reward_model.overlong_buffer.penalty_factor=0.5 data.max_response_length=100",
        f"{VERL} {NEWER.format('enable=True')} {NEWER.format('len=40')} {NEWER.format('penalty_factor=0.5')} "
        "data.max_response_length=100 reward_model.reward_manager=dapo",
        f"{OPENRLHF} --reward.overlong_buffer_len 40 --reward.overlong_penalty_factor 0.5 --rollout.max_new_tokens 100",
    ],
)
def test_a_buffer_of_long_answers_is_a_reward(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = paste("grpo", words.split(), capsys)
    assert not [line for line in said.lines if "is no flag" in line]
    first, spec = flags_of_command("grpo", said.command[2:])["reward"]
    assert re.fullmatch(r"f\.py:\w+=1", first)
    path, _, weight = spec.rpartition("=")
    reward = load_function(path)
    for num in (1, 60, 61, 80, 100):  # verl/workers/reward_manager/dapo.py
        theirs = min(-(num - (100 - 40)) / 40 * 0.5, 0)
        assert reward("", {}, completion_ids=[0] * num) * float(weight) == pytest.approx(theirs)


def test_a_buffer_that_is_off_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    found = flags_of_command("grpo", paste("grpo", f"{VERL} {BUFFER.format(False)}".split(), capsys).command[2:])
    assert found["reward"] == "f.py:compute_score"


@pytest.mark.parametrize(("script", "words", "expected"), nightly.only(SUMS, *SUMS[::3]))
def test_batch_sizes_are_those_of_the_other_system(
    script: str, words: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = ours_of(script, words.split(), capsys)
    assert {name: found.get(name, 8 if name == "group_size" else None) for name in expected} == expected


VALUES = [  # (their words, ours)
    (f"{TRL} --scale_rewards batch", {"baseline": "group_mean_batch_std"}),
    (f"{TRL} --scale_rewards False", {}),
    (f"{TRL} --loss_type dr_grpo", {"aggregate": "length"}),
    (f"{TRL} --report_to wandb --bf16 true", {"track": ("wandb",), "dtype": "bf16"}),
    (f"{TRL} --use_peft --lora_alpha 32 --lora_target_modules all-linear", {"lora_rank": 16, "lora_alpha": 32.0}),
    (f"{TRL} --dataset_config main --dataset_train_split train", {"data": "d:main:train"}),
    (f"{TRL} --eval_strategy no --save_strategy steps --save_steps 7", {"eval_steps": 0, "save_steps": 7}),
    (f"{TRL} --reward_funcs accuracy_reward a.b --reward_weights 1.0 0.5",
     {"reward": ("rlkit.rewards.math:anywhere=1.0", "a.py:b=0.5")}),
    (f"{OPENRLHF} --init_kl_coef 0.02", {"kl_coef": 0.02, "kl_in": "reward", "reward": "f.py:reward_func"}),
    (f"{OPENRLHF} --init_kl_coef 0.02 --use_kl_loss --kl_estimator k2", {"kl_coef": 0.02, "kl_estimator": "k2"}),
    (f"{OPENRLHF} --eps_clip_low_high 0.2 0.27", {"clip_low": 0.2, "clip_high": 0.27}),
    (f"{OPENRLHF} --advantage_estimator rloo", {"baseline": "leave_one_out"}),
    (f"{OPENRLHF} --advantage_estimator reinforce", {"baseline": "none", "advantage": "reinforce_pp"}),
    (f"{VERL} algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01", {"kl_coef": 0.01, "kl_in": "reward"}),
    (f"{VERL} actor_rollout_ref.actor.kl_loss_coef=0.1", {}),  # use_kl_loss is off
    (f"{VERL} trainer.logger=['console','wandb'] trainer.save_freq=-1", {"track": ("wandb",), "save_steps": 0}),
    (f"{VERL} custom_reward_function.name=g", {"reward": "f.py:g"}),
    (f"{VERL} data.val_files=['a.parquet','b.parquet'] data.prompt_key=text",
     {"eval_data": ("a.parquet", "b.parquet"), "rename": {"text": "prompt"}}),
    (f"{VERL} actor_rollout_ref.rollout.val_kwargs.temperature=0.6", {"eval_sampling": ("temperature:0.6",)}),
    (f"{SLIME} --eval-prompt-data aime a.jsonl", {"eval_data": "aime=a.jsonl", "reward": "f.py:score"}),
    (f"{SLIME} --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl", {"kl_coef": 0.01, "kl_estimator": "k3"}),
    (f"{SLIME} --kl-coef 0.1", {"kl_coef": 0.1, "kl_in": "reward"}),
    (f"{SLIME} --disable-grpo-std-normalization --advantage-estimator grpo", {"aggregate": "episode"}),
    (f"{RL2} train_data.path=train@a/b adv.norm_var=true rollout.test_sampling_params.temperature=0.5",
     {"data": "a/b::train", "baseline": "group_zscore", "eval_sampling": ("temperature:0.5",)}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), nightly.only(VALUES, *VALUES[::3]))
def test_values_are_translated(words: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = ours_of("grpo", shlex.split(words.replace("'", "")), capsys)
    watched = {"baseline", "aggregate", "kl_coef", "kl_in", "kl_estimator", "track", "save_steps", "eval_steps"}
    ours_by_default = {"baseline": "group_zscore", "aggregate": "episode" if SLIME in words else None}
    ours_by_default |= {"kl_coef": 0.01, "kl_in": "reward"} if OPENRLHF in words and "kl" not in words else {}
    unsaid = {name: found.get(name) for name in watched - {*expected}}
    assert {name: found.get(name) for name in expected} == expected
    assert all(value in (None, ours_by_default.get(name)) for name, value in unsaid.items()), unsaid


@pytest.mark.parametrize("rows", [21, 7])
def test_passes_over_a_file_become_steps(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").with_suffix(".jsonl").write_text('{"prompt": "x"}\n' * rows)
    words = "--model_name_or_path m --dataset_name d.jsonl --reward_funcs a.b --num_train_epochs 4 --num_generations 4"
    found = ours_of("grpo", words.split(), capsys)
    assert (found["prompts_per_step"], found["steps"]) == (2, rows // 2 * 4)


def test_what_has_no_translation_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = paste("grpo", f"{TRL} --num_train_epochs 2 --optim adafactor --nothing 3".split(), capsys)
    assert [line.split() for line in said.lines if "--nothing" in line] == [["--nothing", "is", "no", "flag"]]
    assert any(note.startswith("add --steps: 2 * rows / 1") for note in said.notes)
    assert "--nothing" not in said.command
    said = paste("grpo", [*VERL.split()[:2], "trainer.total_epochs=2"], capsys)
    assert any("add --reward" in note for note in said.notes)


def test_the_names_of_one_script_stay_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["grpo", "--model", "m", "--data", "d", "--stepps", "3"])
    assert "The command of" not in capsys.readouterr().err


FILE = """
model_name_or_path: m
dataset_name: d.jsonl
reward_funcs: [my_trl.score]
num_generations: 4
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
max_steps: 20
learning_rate: 2.0e-6
gradient_checkpointing_kwargs: {use_reentrant: false}
log_completions: true
"""


@pytest.mark.slow
def test_a_file_of_trl_is_written_with_our_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trl.yaml").write_text(FILE)
    with pytest.raises(SystemExit):
        main(["grpo", "--config", f"{tmp_path}/trl.yaml"])
    assert f"rlkit grpo --config {tmp_path}/trl.yaml --print-config > run.yaml" in capsys.readouterr().err
    main(["grpo", "--config", f"{tmp_path}/trl.yaml", "--print-config", "--group-size", "2"])
    text = capsys.readouterr().out
    assert f"{tmp_path}/trl.yaml:11: log_completions has no flag here" in text
    assert f"{tmp_path}/trl.yaml:10: gradient_checkpointing_kwargs.use_reentrant is no flag" in text
    ours = yaml.safe_load(text)
    wanted = {"model": "m", "data": "d.jsonl", "prompts_per_step": 2, "steps": 20, "lr": 2e-6, "group_size": 2}
    assert {name: ours[name] for name in wanted} == wanted
    assert (ours["reward"], ours["max_new_tokens"], ours["baseline"]) == ("my_trl.py:score", 512, "group_zscore")
    (tmp_path / "run.yaml").write_text(text)
    main(["grpo", "--config", f"{tmp_path}/run.yaml", "--print-config"])
    assert yaml.safe_load(capsys.readouterr().out) == ours


def test_the_defaults_named_beside_the_command_are_not_ours() -> None:
    from rlkit.compat.flags import DEFAULTS

    for (system, script), words in DEFAULTS.items():
        needed = ["--model", "m", "--data", "d", *(["--teacher", "t"] if script == "distill" else [])]
        extra = ["--kl-coef", "0.1"] if "--kl-in" in words else []
        bare, given = (flags_of_command(script, [*needed, *extra, *more]) for more in ([], words.split()))
        changed = sum(bare[name] != given[name] for name in bare)
        assert changed == words.count("--"), (system, script)
    assert Args.__module__ == "rlkit.scripts.grpo"


AS_FOUND = {  # scripts as their repositories have them, shortened
    "RL2 grpo": "train_data.path=train@a/Countdown train_data.experience.responses_per_prompt=4 actor.model_name=m "
    "train_data.experience.max_new_tokens=1024 test_data.path=test@a/Countdown actor.max_length_per_device=8192 "
    "rollout.train_prompts_per_rollout=128 rollout.train_sampling_params.stop=['</answer>'] trainer.save_freq=32 "
    "rollout.env_path=envs/countdown.py trainer.project=Countdown trainer.experiment_name=e trainer.total_steps=512",
    "OpenRLHF ppo": "--ref.num_nodes 1 --critic.num_gpus_per_node 4 --actor.num_nodes 1 --vllm.num_engines 4 "
    "--vllm.tensor_parallel_size 2 --train.colocate_actor_ref --actor.model_name_or_path m --ckpt.output_dir o "
    "--reward.model_name_or_path r --train.batch_size 128 --rollout.batch_size 1024 --data.max_samples 100 "
    "--ds.zero_stage 3 --ds.param_dtype bf16 --critic.adam.lr 9e-6 --data.prompt_dataset d --ds.packing_samples "
    "--reward.normalize_enable --ds.adam_offload --vllm.sync_backend nccl --actor.gradient_checkpointing_enable",
    "verl grpo": "algorithm.adv_estimator=grpo data.train_files=d data.truncation=error trainer.critic_warmup=0 "
    "actor_rollout_ref.model.path=m actor_rollout_ref.model.use_remove_padding=True trainer.nnodes=1 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.actor.fsdp_config.optimizer_offload=False "
    "actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.logger=[console] trainer.project_name=p",
    "verl ppo": "algorithm.adv_estimator=gae data.train_files=d actor_rollout_ref.model.path=m critic.optim.lr=1e-5 "
    "critic.model.path=c critic.ppo_micro_batch_size_per_gpu=4 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console",
    "slime grpo": "--actor-num-nodes 1 --colocate --hf-checkpoint m --load l --save o --save-interval 20 "
    "--prompt-data d --rm-type deepscaler --num-rollout 3 --rollout-batch-size 32 --balance-data --sequence-parallel "
    "--eval-prompt-data aime a.jsonl --eval-max-response-len 16384 --eval-top-p 0.7 --recompute-granularity full "
    "--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --optimizer adam --adam-beta2 0.98 "
    "--pipeline-model-parallel-size 1 --rollout-num-gpus-per-engine 2 --attention-backend flash",
}  # fmt: skip
OURS = {
    "RL2 grpo": {"eval_data": "a/Countdown::test", "stop": ("</answer>",), "track": ("wandb",)},
    "OpenRLHF ppo": {"critic_lr": 9e-6, "engine": "vllm", "parallel.offload": True, "kl_coef": 0.01, "reward": None},
    "verl grpo": {"engine_memory": 0.6, "too_long": "error", "kl_coef": 0.0, "parallel.offload": False, "track": ()},
    "verl ppo": {"critic": "c", "advantage": "gae", "kl_coef": 0.0, "lam_policy": 1.0},
    "slime grpo": {"eval_sampling": ("max_new_tokens:16384,top_p:0.7",), "kl_estimator": None, "engine_tp": 2},
}


@pytest.mark.slow_cases("OpenRLHF ppo", "slime grpo")
@pytest.mark.parametrize("name", AS_FOUND)
def test_whole_scripts_take_two_attempts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first is refused with each option answered, the second parsed; what is left to give is named in the notes."""
    script = name.split()[1]
    said = paste(script, AS_FOUND[name].replace("'", "").split(), capsys)
    assert not [line for line in said.lines if "is no flag" in line]
    found = flags_of_command(script, said.command[2:])
    assert {key: found[key] for key in OURS[name]} == OURS[name]
    assert all(note.startswith(("add --", "kl_loss_coef")) for note in said.notes), said.notes


def test_what_submits_a_job_is_not_part_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["python3", "-m", "openrlhf.cli.train_ppo_ray", "--pretrain", "m", "--prompt_data", "d"]
    ray = ["ray", "job", "submit", "--address=http://127.0.0.1:8265", "--runtime-env-json={}", "--"]
    assert paste("grpo", [*ray, *command], capsys) == paste("grpo", command, capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{TRL} --epsilon 0.1", {"clip_low": 0.1, "clip_high": 0.1}),
        (f"{TRL} --epsilon 0.1 --epsilon_high 0.3", {"clip_low": 0.1, "clip_high": 0.3}),
        (f"{TRL} --importance_sampling_level sequence", {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2}),
        (f"{TRL} --loss_type cispo --epsilon 0.1", {"loss": "cispo", "clip_low": None, "clip_high": None}),
        (f"{TRL} --loss_type sapo", {"loss": "sapo", "clip_low": None, "clip_high": None}),
        (f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
         {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2}),
        (f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean actor_rollout_ref.actor.clip_ratio_high=0.4",
         {"loss": "gmpo", "clip_low": 0.2, "clip_high": 0.4}),
        (f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.clip_ratio_low=3e-4",
         {"loss": "gspo", "clip_low": 3e-4, "clip_high": 0.2}),
        (f"{SLIME} --advantage-estimator gspo --eps-clip 3e-4", {"loss": "gspo", "clip_low": 3e-4, "clip_high": 3e-4}),
    ],
)  # fmt: skip
def test_the_clip_is_that_of_the_other_system(
    words: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = parsed(paste("grpo", words.split(), capsys).command[2:], Args)
    assert {name: getattr(args.loss, name) for name in expected} == expected


@pytest.mark.parametrize("words", [f"{VERL} algorithm.lam=0.9", "--model_name_or_path m --dataset_name d --lam 0.9"])
def test_the_lambda_of_ppo_is_that_of_policy_and_critic(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = paste("ppo", words.split(), capsys).command
    assert [command[command.index(f"--lam-{name}") + 1] for name in ("policy", "value")] == ["0.9", "0.9"]


@pytest.mark.parametrize("scale", ["none", "False", "false"])
def test_rewards_that_are_not_scaled_are_centered(scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model_name_or_path",
        "m",
        "--dataset_name",
        "d.jsonl",
        "--reward_funcs",
        "r.f",
        "--scale_rewards",
        scale,
    ]
    said = paste("grpo", words, capsys)
    assert said.command[said.command.index("--baseline") + 1] == "group_centered"
    assert not [note for note in said.notes if "baseline" in note]
