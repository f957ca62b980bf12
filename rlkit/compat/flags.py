"""Flags and values of TRL, transformers, verl, OpenRLHF, slime, RL2 and ColossalAI, and what stands here for them.

Names are without dashes and prefixes: `actor_rollout_ref.rollout.n` and `--rollout.n` are `n`. A name with several
meanings has a prefix, and the longest that fits counts: `train_data.path`, else `path`. docs/migrating.md compares
defaults and meanings, and a test compares the two.
"""

from __future__ import annotations

FLAGS = {  # the flag here: the first of several ("a | b") that the script has, and what to give it
    # TRL and transformers
    "beta": "kl_coef", "bf16": "dtype bf16", "center_rewards_coefficient": "center_coef",
    "chat_template_kwargs": "template_args", "chat_template_path": "chat_template FILE",
    "cliprange": "clip_low and --clip-high", "cliprange_value": "value_clip",
    "dataset_config": "data OWNER/NAME:CONFIG:SPLIT", "dataset_name": "data", "dataset_streaming": "stream",
    "dataset_test_split": "eval_data OWNER/NAME:CONFIG:SPLIT", "dataset_train_split": "data OWNER/NAME:CONFIG:SPLIT",
    "epsilon": "clip_low", "epsilon_high": "clip_high", "eval_strategy": "eval_steps",
    "gradient_accumulation_steps": "max_tokens (it bounds a micro-batch)",
    "gradient_checkpointing": "parallel.activation_checkpointing", "lam": "lam_policy", "learning_rate": "lr",
    "load_in_4bit": "lora_base nf4", "load_in_8bit": "lora_base int8", "bnb_4bit_quant_type": "lora_base nf4",
    "quantization_bit": "lora_base nf4 (4) or int8 (8)",
    "logging_dir": "output", "logging_steps": "print_steps", "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets", "loss_type": "loss",
    "lr_scheduler_type": "lr_schedule", "max_completion_length": "max_new_tokens", "max_grad_norm": "max_norm",
    "max_length": "max_example_tokens | max_total_tokens", "max_prompt_length": "max_prompt_tokens",
    "max_seq_length": "max_example_tokens | max_total_tokens", "max_steps": "steps", "model_name_or_path": "model",
    "num_generations": "group_size", "num_iterations": "epochs", "num_mini_batches": "minibatches",
    "num_ppo_epochs": "epochs", "num_train_epochs": "steps (epochs * rows / rows of a step)", "output_dir": "output",
    "per_device_eval_batch_size": "max_tokens (it bounds a micro-batch)",
    "per_device_train_batch_size": "batch_size (of all devices) | prompts_per_step (of all devices)",
    "precompute_ref_log_probs": "precompute_reference", "ref_model": "reference",
    "ref_model_sync_steps": "ref_sync_steps", "response_length": "max_new_tokens", "resume_from_checkpoint": "resume",
    "reward_funcs": "reward", "reward_weights": "reward FILE.py:FUNCTION=WEIGHT",
    "reward_model_path": "reward FILE.py:FUNCTION, with rlkit.rewards.judge.remote_reward_model", "run_name": "output",
    "save_strategy": "save_steps", "save_total_limit": "keep", "scale_rewards": "baseline", "sft_model_path": "model",
    "torch_dtype": "dtype", "total_episodes": "steps (episodes / prompts of a step)", "use_peft": "lora_rank",
    "vllm_gpu_memory_utilization": "engine_memory", "vllm_tensor_parallel_size": "engine_tp",
    "vllm_enable_sleep_mode": "engine_release",
    "use_vllm": "engine vllm", "vllm_mode": "engine vllm", "vllm_server_base_url": "engine_urls",
    "warmup_ratio": "warmup_steps (ratio * steps)", "optim": "optimizer", "optimizer_name": "optimizer",
    "multi_objective_aggregation": "combine",
    "teacher_model_name_or_path": "teacher", "teacher_server_urls": "teacher NAME=URL ...",
    # verl
    "adv_estimator": "baseline", "clip_ratio": "clip_low and --clip-high", "clip_ratio_c": "loss dual_clip",
    "clip_ratio_high": "clip_high", "clip_ratio_low": "clip_low", "default_local_dir": "output",
    "enable_gradient_checkpointing": "parallel.activation_checkpointing", "entropy_coeff": "entropy_coef",
    "experiment_name": "output", "kl_loss_coef": "kl_coef", "loss_agg_mode": "aggregate", "loss_mode": "loss",
    "lr_warmup_steps": "warmup_steps", "max_response_length": "max_new_tokens", "n": "group_size",
    "param_offload": "parallel.offload", "path": "model", "ppo_epochs": "epochs",
    "reshard_after_forward": "parallel.reshard_after_forward",
    "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "ppo_max_token_len_per_gpu": "max_tokens", "ppo_micro_batch_size": "max_tokens (it bounds a micro-batch)",
    "ppo_micro_batch_size_per_gpu": "max_tokens (it bounds a micro-batch)",
    "ppo_mini_batch_size": "minibatches (train_batch_size / ppo_mini_batch_size)", "resume_mode": "resume",
    "rollout_is": "correction", "rollout_is_threshold": "tis_max_weight", "save_freq": "save_steps",
    "free_cache_engine": "engine_release",
    "gpu_memory_utilization": "engine_memory", "rollout.tensor_model_parallel_size": "engine_tp",
    "tensor_model_parallel_size": "parallel.tp", "test_freq": "eval_steps",
    "total_epochs": "steps (epochs * rows / prompts of a step)", "total_training_steps": "steps",
    "train_batch_size": "batch_size | prompts_per_step", "train_files": "data",
    "ulysses_sequence_parallel_size": "parallel.cp and --parallel.ulysses", "use_kl_loss": "kl_coef",
    "truncation": "too_long", "truncation_mode": "too_long cut-right (keep_start) or cut-left (keep_end)",
    "val_files": "eval_data", "val_kwargs.n": "eval_samples", "val_kwargs.temperature": "eval_sampling temperature:T",
    "val_kwargs.top_p": "eval_sampling top_p:P", "val_kwargs.top_k": "eval_sampling top_k:K",
    "critic_warmup": "critic_steps", "use_kl_in_reward": "kl_in reward",
    "kl_penalty": "kl_estimator",
    "custom_chat_template": "chat_template FILE",
    # SPIRAL
    "use_role_baseline": "baseline role_average", "role_baseline_ema_gamma": "baseline_decay",
    # OpenRLHF
    "vllm_enable_sleep": "engine_release", "input_template": "chat_template FILE (Jinja, not a format string)",
    "actor_learning_rate": "lr", "adam_offload": "parallel.offload", "advantage_estimator": "baseline",
    "critic_learning_rate": "critic_lr", "critic_pretrain": "critic",
    "dataset": "data", "prompt_data_probs": "data FILE=WEIGHT", "dataset_probs": "data FILE=WEIGHT",
    "eps_clip": "clip_low", "eps_clip_low_high": "clip_low and --clip-high",
    "eval_dataset": "eval_data (NAME=FILE for each of several)",
    "generate_max_len": "max_new_tokens", "init_kl_coef": "kl_coef",
    "l2": "weight_decay", "load_checkpoint": "resume", "lr_warmup_ratio": "warmup_steps (ratio * steps)",
    "max_epochs": "epochs | steps (epochs * rows / rows of a step)", "max_len": "max_example_tokens | max_total_tokens",
    "micro_train_batch_size": "max_tokens (it bounds a micro-batch)", "n_samples_per_prompt": "group_size",
    "num_episodes": "steps (episodes * rows / prompts of a step)", "pretrain": "model", "prompt_data": "data",
    "prompt_max_len": "max_prompt_tokens", "remote_rm_url": "reward", "rollout_batch_size": "prompts_per_step",
    "save_path": "output", "ckpt_path": "output",
    # slime
    "context_parallel_size": "parallel.cp", "custom_rm_path": "reward", "eps_clip_high": "clip_high",
    "eval_interval": "eval_steps", "eval_prompt_data": "eval_data NAME=FILE",
    "eval_temperature": "eval_sampling temperature:T", "eval_top_p": "eval_sampling top_p:P",
    "eval_top_k": "eval_sampling top_k:K", "eval_max_response_len": "eval_sampling max_new_tokens:N",
    "global_batch_size": "batch_size | minibatches (samples of a step / global batch)", "hf_checkpoint": "model",
    "max_tokens_per_gpu": "max_tokens", "n_samples_per_eval_prompt": "eval_samples", "num_rollout": "steps",
    "num_steps_per_rollout": "minibatches", "rm_type": "reward rlkit.rewards.math:boxed or another",
    "rollout_max_response_len": "max_new_tokens", "rollout_temperature": "temperature", "save_interval": "save_steps",
    "offload_rollout": "engine_release",
    "rollout_num_gpus_per_engine": "engine_tp", "sglang_mem_fraction_static": "engine_memory",
    "tis_clip": "tis_max_weight", "use_tis": "correction tis", "ref_update_interval": "ref_sync_steps",
    "clip_grad": "max_norm", "calculate_per_token_loss": "aggregate token",
    "disable_grpo_std_normalization": "baseline group_centered",
    "kl_loss_type": "kl_estimator",
    "dynamic_sampling_filter_path": "success_range", "partial_rollout": "staleness (or --overlap)",
    "over_sampling_batch_size": "staleness (extra groups / groups of a step)",
    "mask_offpolicy_in_partial_rollout": "drop_off_policy", "expert_model_parallel_size": "parallel.ep",
    "freeze_vision_tower": "train_vision (else the tower is frozen)",
    # what several others call them
    "load_best_model_at_end": "keep_best METRIC (in RUN/best)", "metric_for_best_model": "keep_best eval/...",
    "report_to": "track", "logger": "track", "loggers": "track", "use_wandb": "track wandb",
    "use_tensorboard": "track tensorboard", "project_name": "track_project", "project": "track_project",
    "wandb_project": "track_project",
    "eval_every": "eval_steps", "eval_freq": "eval_steps", "save_every": "save_steps", "log_every": "print_steps",
    "log_interval": "print_steps", "print_every": "print_steps", "checkpoint_every": "save_steps",
    # of rlkit chat and plot
    "max_tokens": "max_new_tokens", "message": "prompt", "system": "system_prompt", "output": "out", "save": "out",
    # TRL, verl and OpenRLHF: what their tables in docs/migrating.md have besides
    "generation_batch_size": "prompts_per_step (completions / num_generations)",
    "steps_per_generation": "minibatches", "use_bias_correction_kl": "kl_coef (with this correction, always)",
    "mask_truncated_completions": "drop_truncated", "sync_ref_model": "ref_sync_steps",
    "vllm_importance_sampling_mode": "correction", "vllm_importance_sampling_clip_max": "tis_max_weight",
    "importance_sampling_level": "loss gspo", "loss_weights": "sft_coef (of the chosen response's NLL)",
    "norm_adv_by_std_in_grpo": "baseline group_zscore",
    "filter_groups.enable": "success_range 0.01 0.99", "rollout.batch_size": "prompts_per_step",
    "train.batch_size": "batch_size | minibatches (samples of a step / batch size)",
    "advantage.estimator": "baseline", "kl.init_coef": "kl_coef", "kl.use_loss": "kl_coef",
    "is_correction_level": "correction", "dynamic_filtering_enable": "success_range",
    "dynamic_filtering_range": "success_range", "partial_rollout_enable": "staleness (or --overlap)",
    "actor.lr_scheduler": "lr_schedule", "critic.model_name_or_path": "critic",
    # RL2
    "train_data.path": "data", "test_data.path": "eval_data", "actor.model_name": "model",
    "critic.model_name": "critic", "ref_actor.model_name": "reference",
    "rollout.env_path": "env (or --reward FILE.py:step, for one turn)",
    "prompts_per_rollout": "prompts_per_step", "responses_per_prompt": "group_size",
    "trainer.n_epochs": "steps (epochs * rows / rows of a step)", "trainer.total_steps": "steps",
    "max_length_per_device": "max_tokens", "max_inference_length_per_device": "max_tokens", "load_ckpt_from": "resume",
    "trainer.save_dir": "output", "ddp_size": "parallel.replicate", "tp_size": "parallel.tp", "cp_size": "parallel.cp",
    "sp_size": "parallel.cp", "update_per_rollout": "minibatches", "avg_level": "aggregate",
    "adv.estimator": "baseline (gae: rlkit ppo)", "adv.norm_var": "baseline group_zscore",
    "actor.clip": "clip_low and --clip-high",
    "kl.coef": "kl_coef", "kl.type": "kl_in",
    "tis_coef": "tis_max_weight",
    "dynamic_filtering": "success_range 0.01 0.99", "adv.lamda": "lam_policy", "critic.clip": "value_clip",
    "freeze_steps": "critic_steps",
    # ColossalAI
    "inference_batch_size": "prompts_per_step (times num_inferencer)",
    "num_inferencer": "prompts_per_step (inference_batch_size * num_inferencer)", "kl_coeff": "kl_coef",
    "algo": "baseline", "clip_eps_low": "clip_low", "clip_eps_high": "clip_high", "loss_variation": "aggregate",
    "filter_range": "success_range", "skip_threshold": "max_ratio", "filter_truncated_response": "drop_truncated",
}  # fmt: skip
_MESSAGES = "rows have their usual columns (docs/data.md); others are renamed with --rename"
_PACKED = "examples are packed without padding, always"
_RANKS = "the ranks are those of torchrun"
NO_FLAG = {  # what needs no flag here, or has none
    "apply_chat_template": "the model's chat template renders prompts, always; --no-chat-template takes raw text",
    "assistant_only_loss": "only assistant turns are trained on, always",
    "attn_implementation": "attention over packed sequences is chosen by the device",
    "completion_only_loss": "only responses are trained on, always",
    "deepspeed": "several ranks are FSDP2 (--parallel)",
    "zero_stage": "several ranks are FSDP2 (--parallel): stage 3, or 2 with --parallel.no-reshard-after-forward",
    "eos_token": "the chat template's end of turn and the tokenizer's eos_token end a response",
    "eval_on_start": "--eval-data is measured before the first step, always",
    "filter_overlong_prompts": "prompts that are too long are dropped and counted, always",
    "image_key": "images are read from columns images and image; another one is renamed with --rename",
    "input_key": _MESSAGES, "label_key": _MESSAGES, "prompt_key": _MESSAGES,
    "log_completions": "trajectories/ has every sample; --print-samples-steps shows some",
    "missing_eos_penalty": "subtract it in your reward, which may take `truncated`",
    "n_gpus_per_node": _RANKS, "nnodes": _RANKS, "num_gpus_per_node": _RANKS,
    "packing": f"{_PACKED}, and do not see each other", "packing_samples": _PACKED, "padding_free": _PACKED,
    "push_to_hub": "`hf upload` sends model/ to the hub",
    "use_rollout_routing_replay": "the engine's experts are replayed where it reports them, always",
    "enable_rollout_routing_replay": "the engine's experts are replayed where it reports them, always",
    "use_dynamic_bsz": f"{_PACKED}: --max-tokens bounds a micro-batch",
    "use_opd": "on-policy distillation is rlkit distill --loss advantage",
    "val_before_train": "--eval-data is measured before the first step, always",
    "overlong_buffer_len": "--reward has rlkit.rewards.text:soft_overlong(max_tokens=L,cache_tokens=C)",
    "soft_over_length_punishment": "--reward has rlkit.rewards.text:soft_overlong(max_tokens=L,cache_tokens=C)",
    "train_sampling_strategy": "rows are shuffled in every pass", "whiten_rewards": "advantages are whitened, always",
    "vf_coef": "the critic has its own optimizer: --critic-lr",
}  # fmt: skip
VALUES = {  # of a flag here
    "loss": {
        "bnpo": "ppo_clip", "dapo": "ppo_clip", "dr_grpo": "ppo_clip with --aggregate length", "gpg": "ppo_clip",
        "grpo": "ppo_clip with --aggregate episode", "sigmoid": "dpo", "vanilla": "dual_clip", "robust": "robust_dpo",
    },
    "aggregate": {
        "dr_grpo": "length", "seq-mean-token-mean": "episode", "seq-mean-token-sum-norm": "length",
        "token-mean": "token",
    },
    "baseline": {
        "dr_grpo": "group_centered", "gae": "rlkit ppo", "group": "group_zscore", "group_norm": "group_zscore",
        "grpo": "group_zscore", "rloo": "leave_one_out", "reinforce_plus_plus": "none, with --advantage reinforce_pp",
        "reinforce_plus_plus_baseline": "group_centered, with --advantage reinforce_pp",
        "reinforce": "none, with --advantage reinforce_pp",
        "reinforce_baseline": "group_centered, with --advantage reinforce_pp", "opo": "group_centered (opo in Python)",
    },
    "lr_schedule": {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant, with --warmup-steps"},
    "dtype": {"bfloat16": "bf16", "float32": "fp32", "auto": "the default: leave it out"},
    "engine": {"hf": "local"},
    "optimizer": {
        "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adam": "adamw", "AdamW": "adamw",
        "adamw_torch_8bit": "FILE.py:FUNCTION (docs/optimizers.md)", "adamw_bnb_8bit": "FILE.py:FUNCTION",
    },
    "too_long": {"left": "cut-left", "right": "cut-right", "keep_start": "cut-right", "keep_end": "cut-left"},
}  # fmt: skip
OF_RUN = (  # what chat, plot and track take as a word of its own
    "checkpoint", "checkpoint_dir", "folder", "input", "log_dir", "logdir", "model", "model_name_or_path", "model_path",
    "path", "run", "run_dir",
)  # fmt: skip
COMMANDS = {"reward": "reward_model", "rm": "reward_model", "train": "sft or grpo", "evaluate": "eval"}
PREFIXES = (
    "actor",
    "actor_rollout_ref",
    "adv",
    "algorithm",
    "critic",
    "data",
    "ref_actor",
    "rollout",
    "test_data",
    "train_data",
    "trainer",
)


def answer(name: str, flags: set[str]) -> str | None:
    """What stands for a flag of another system in a script with the `flags`; None for an unknown name."""
    parts = name.split(".")
    last = parts[-1]
    longest = (".".join(parts[at:]) for at in range(len(parts)))
    known = next((key for key in longest if key in FLAGS or (key in NO_FLAG and key not in flags)), "")
    if known in NO_FLAG and known not in flags:
        return f"has no flag here: {NO_FLAG[known]}"
    same = last in flags and len(parts) > 1 and "." not in known
    for choice in [last] if same else FLAGS.get(known, "").split(" | "):
        flag, *rest = choice.split(" ", 1)
        if flag in flags:
            return " ".join([f"is --{flag.replace('_', '-')}", *rest, "here"])
    return "is for rlkit ppo: there is no critic here" if parts[0] == "critic" and "critic" not in flags else None
