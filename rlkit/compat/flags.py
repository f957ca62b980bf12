"""Flags and values of TRL, transformers, verl, OpenRLHF, slime, RL2 and ColossalAI, and what stands here for them.

Names are without dashes and prefixes: `actor_rollout_ref.rollout.n` and `--rollout.n` are `n`. A name with several
meanings has a prefix, and the longest that fits counts: `train_data.path`, else `path`. A row is the flag here, the
first of several ("a | b") that the script has, and what to give it; without a word after it the value stays as it is.
What follows in brackets explains a value that depends on others: `rlkit.compat.commands` computes it.
docs/migrating.md compares defaults and meanings, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Collection

_MICRO = "max_tokens (it bounds a micro-batch)"
_SHARE = "warmup_steps (ratio * steps)"
_PASSES = "steps (epochs * rows / rows of a step)"
_SERVED = "reward (FILE.py:FUNCTION, with rlkit.rewards.judge.remote_reward_model)"
_EVAL = {
    "temperature": "eval_sampling temperature:T", "top_p": "eval_sampling top_p:P", "top_k": "eval_sampling top_k:K",
    "max_new_tokens": "eval_sampling max_new_tokens:N",
}  # fmt: skip
TRL = {  # and transformers
    "beta": "kl_coef", "bf16": "dtype bf16", "center_rewards_coefficient": "center_coef",
    "chat_template_kwargs": "template_args", "chat_template_path": "chat_template FILE",
    "cliprange": "clip_low and --clip-high", "cliprange_value": "value_clip",
    "dataset_config": "data (OWNER/NAME:CONFIG:SPLIT)", "dataset_name": "data", "dataset_streaming": "stream",
    "dataset_test_split": "eval_data (OWNER/NAME:CONFIG:SPLIT)",
    "dataset_train_split": "data (OWNER/NAME:CONFIG:SPLIT)",
    "delta": "clip_c (with --loss dual_clip)",
    "epsilon": "clip_low", "epsilon_high": "clip_high", "eval_strategy": "eval_steps (0: no)",
    "generation_batch_size": "prompts_per_step (completions / num_generations)",
    "gradient_accumulation_steps": "batch_size (multiplied by it) | prompts_per_step (multiplied by it)",
    "gradient_checkpointing": "parallel.activation_checkpointing",
    "importance_sampling_level": "loss (sequence: gspo)", "lam": "lam_policy and --lam-value", "learning_rate": "lr",
    "load_in_4bit": "lora_base nf4", "load_in_8bit": "lora_base int8", "bnb_4bit_quant_type": "lora_base nf4",
    "logging_dir": "output (metrics are in the run folder)", "logging_steps": "print_steps", "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets", "loss_type": "loss",
    "loss_weights": "sft_coef (of the chosen response's NLL)",
    "lr_scheduler_type": "lr_schedule", "mask_truncated_completions": "drop_truncated",
    "max_completion_length": "max_new_tokens", "max_grad_norm": "max_norm",
    "max_length": "max_example_tokens | max_total_tokens", "max_prompt_length": "max_prompt_tokens",
    "max_seq_length": "max_example_tokens | max_total_tokens",
    "max_steps": "steps (theirs counts optimizer steps)", "mixed_precision": "dtype", "model_name_or_path": "model",
    "multi_objective_aggregation": "combine",
    "num_generations": "group_size", "num_iterations": "epochs", "num_mini_batches": "minibatches",
    "num_ppo_epochs": "epochs", "num_train_epochs": _PASSES, "optim": "optimizer", "output_dir": "output",
    "per_device_eval_batch_size": _MICRO,
    "per_device_train_batch_size": "batch_size (per device * GPUs * accumulation)"
        " | prompts_per_step (per device * GPUs * accumulation, in grpo / num_generations)",
    "precompute_ref_log_probs": "precompute_reference", "ref_model": "reference",
    "ref_model_sync_steps": "ref_sync_steps", "report_to": "track", "response_length": "max_new_tokens",
    "resume_from_checkpoint": "resume", "reward_funcs": "reward",
    "reward_model_path": _SERVED,
    "reward_weights": "reward (FILE.py:FUNCTION=WEIGHT)", "run_name": "output (the run folder)",
    "save_strategy": "save_steps (0: no)", "save_total_limit": "keep", "scale_rewards": "baseline",
    "sft_model_path": "model", "steps_per_generation": "minibatches (steps_per_generation / accumulation)",
    "sync_ref_model": "ref_sync_steps (ref_model_sync_steps)", "teacher_model_name_or_path": "teacher",
    "teacher_server_urls": "teacher NAME=URL ...", "torch_dtype": "dtype",
    "total_episodes": "steps (episodes / prompts of a step)", "truncation_mode": "too_long",
    "use_bias_correction_kl": "kl_coef (with this correction, always)", "use_peft": "lora_rank (lora_r, else 16)",
    "use_vllm": "engine vllm", "vllm_enable_sleep_mode": "engine_release",
    "vllm_gpu_memory_utilization": "engine_memory",
    "vllm_importance_sampling_clip_max": "tis_max_weight", "vllm_importance_sampling_mode": "correction",
    "vllm_mode": "engine vllm", "vllm_server_base_url": "engine_urls", "vllm_tensor_parallel_size": "engine_tp",
    "warmup_ratio": _SHARE,
}  # fmt: skip
VERL = {
    "adv_estimator": "baseline | advantage", "clip_ratio": "clip_low and --clip-high",
    "clip_ratio_c": "clip_c (with --loss dual_clip)",
    "clip_ratio_high": "clip_high", "clip_ratio_low": "clip_low", "critic.model.path": "critic",
    "critic.optim.lr": "critic_lr", "critic.cliprange_value": "value_clip", "critic_warmup": "critic_steps",
    "custom_chat_template": "chat_template FILE", "custom_reward_function.path": "reward (FILE.py:FUNCTION)",
    "custom_reward_function.name": "reward (FILE.py:FUNCTION)", "default_local_dir": "output",
    "enable_gradient_checkpointing": "parallel.activation_checkpointing", "entropy_coeff": "entropy_coef",
    "experiment_name": "output (the run folder)", "filter_groups.enable": "success_range 0.01 0.99",
    "free_cache_engine": "engine_release", "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "gpu_memory_utilization": "engine_memory", "kl_ctrl.kl_coef": "kl_coef (with use_kl_in_reward)",
    "kl_loss_coef": "kl_coef (with use_kl_loss)", "kl_loss_type": "kl_estimator",
    "kl_penalty": "kl_estimator", "logger": "track", "loss_agg_mode": "aggregate", "loss_mode": "loss",
    "lr_warmup_steps": "warmup_steps", "lr_warmup_steps_ratio": _SHARE, "max_response_length": "max_new_tokens",
    "micro_batch_size": _MICRO, "micro_batch_size_per_gpu": _MICRO, "model.partial_pretrain": "model",
    "model.path": "model", "n": "group_size", "norm_adv_by_std_in_grpo": "baseline (True: group_zscore)",
    "optimizer_offload": "parallel.offload", "param_offload": "parallel.offload", "ppo_epochs": "epochs",
    "ppo_max_token_len_per_gpu": "max_tokens",
    "ppo_micro_batch_size": _MICRO, "ppo_micro_batch_size_per_gpu": _MICRO,
    "ppo_mini_batch_size": "minibatches (train_batch_size / ppo_mini_batch_size)", "project_name": "track_project",
    "reshard_after_forward": "parallel.reshard_after_forward", "resume_mode": "resume (not disable)",
    "reward_model.path": _SERVED, "reward_model.model.path": _SERVED, "rollout.name": "engine",
    "rollout.quantization": "engine_quantization", "rollout.tensor_model_parallel_size": "engine_tp",
    "rollout_is": "correction", "rollout_is_threshold": "tis_max_weight", "save_freq": "save_steps",
    "target_modules": "lora_targets", "tensor_model_parallel_size": "parallel.tp", "test_freq": "eval_steps",
    "total_epochs": "steps (epochs * rows / prompts of a step)", "total_training_steps": "steps",
    "train_batch_size": "batch_size | prompts_per_step", "train_files": "data", "truncation": "too_long",
    "ulysses_sequence_parallel_size": "parallel.cp and --parallel.ulysses", "use_kl_in_reward": "kl_in reward",
    "use_kl_loss": "kl_coef (kl_loss_coef)", "val_files": "eval_data", "val_kwargs.n": "eval_samples",
    "val_kwargs.temperature": _EVAL["temperature"], "val_kwargs.top_p": _EVAL["top_p"],
    "val_kwargs.top_k": _EVAL["top_k"],
    # SPIRAL
    "use_role_baseline": "baseline role_average", "role_baseline_ema_gamma": "baseline_decay",
}  # fmt: skip
OPENRLHF = {
    "actor.lr_scheduler": "lr_schedule", "actor_learning_rate": "lr", "adam_offload": "parallel.offload",
    "advantage.estimator": "baseline | advantage", "advantage_estimator": "baseline | advantage",
    "ckpt.output_dir": "output",
    "ckpt_path": "output (checkpoints are in the run folder)",
    "ckpt.path": "output (checkpoints are in the run folder)",
    "ckpt.save_steps": "save_steps", "ckpt.max_num": "keep", "critic.adam.lr": "critic_lr",
    "critic.freezing_steps": "critic_steps", "critic.model_name_or_path": "critic",
    "critic.value_clip": "value_clip", "critic_learning_rate": "critic_lr", "critic_pretrain": "critic",
    "dataset": "data",
    "dataset_probs": "data FILE=WEIGHT", "prompt_dataset": "data",
    "dual_clip": "clip_c (with --loss dual_clip)",
    "dynamic_filtering": "success_range 0.01 0.99", "dynamic_filtering_enable": "success_range",
    "dynamic_filtering_range": "success_range", "dynamic_filtering_reward_range": "success_range",
    "eps_clip": "clip_low and --clip-high", "eps_clip_low_high": "clip_low and --clip-high",
    "eval.dataset": "eval_data", "eval.steps": "eval_steps",
    "eval_dataset": "eval_data (NAME=FILE for each of several)",
    "flash_attn": "dtype bf16", "generate_max_len": "max_new_tokens",
    "gradient_checkpointing": "parallel.activation_checkpointing",
    "gradient_checkpointing_enable": "parallel.activation_checkpointing", "init_kl_coef": "kl_coef",
    "input_template": "chat_template FILE (Jinja, not a format string)", "is_correction_level": "correction",
    "kl.estimator": "kl_estimator", "kl.init_coef": "kl_coef", "kl.use_loss": "kl_coef (init_coef)",
    "kl_estimator": "kl_estimator", "l2": "weight_decay", "lambd": "lam_policy and --lam-value",
    "load_checkpoint": "resume", "logger.wandb.key": "track wandb", "logger.wandb.project": "track_project",
    "logging_steps": "print_steps", "lr_scheduler": "lr_schedule", "lr_warmup_ratio": _SHARE,
    "max_ckpt_num": "keep", "max_epochs": f"epochs | {_PASSES}", "max_len": "max_example_tokens | max_total_tokens",
    "micro_train_batch_size": _MICRO, "micro_rollout_batch_size": _MICRO, "micro_batch_size": _MICRO,
    "n_samples_per_prompt": "group_size", "nll_loss_coef": "sft_coef",
    "num_episodes": "steps (episodes * rows / prompts of a step)",
    "param_dtype": "dtype", "partial_rollout_enable": "staleness (or --overlap)", "pretrain": "model",
    "prompt_data": "data", "prompt_data_probs": "data FILE=WEIGHT", "prompt_max_len": "max_prompt_tokens",
    "remote_rm_url": "reward", "ref.model_name_or_path": "reference",
    "reward.model_name_or_path": _SERVED, "reward_pretrain": _SERVED, "remote_url": "reward",
    "rollout.batch_size": "prompts_per_step", "rollout_batch_size": "prompts_per_step", "save_path": "output",
    "save_steps": "save_steps",
    "train.batch_size": "batch_size | minibatches (samples of a step / batch size)",
    "train.learning_rate": "lr", "train_batch_size": "batch_size | minibatches (samples of a step / batch size)",
    "use_kl_loss": "kl_coef (init_kl_coef)", "use_wandb": "track wandb", "vllm.enable_sleep": "engine_release",
    "vllm.gpu_memory_utilization": "engine_memory", "vllm.tensor_parallel_size": "engine_tp",
    "vllm_enable_sleep": "engine_release", "vllm_gpu_memory_utilization": "engine_memory",
    "vllm_tensor_parallel_size": "engine_tp", "wandb_project": "track_project",
}  # fmt: skip
SLIME = {
    "advantage_estimator": "baseline | advantage",
    "calculate_per_token_loss": "aggregate token", "clip_grad": "max_norm",
    "context_parallel_size": "parallel.cp", "custom_rm_path": "reward",
    "disable_grpo_std_normalization": "baseline group_centered",
    "dynamic_sampling_filter_path": "success_range 0.01 0.99",
    "eps_clip": "clip_low", "eps_clip_c": "clip_c (with --loss dual_clip)", "eps_clip_high": "clip_high",
    "eval_interval": "eval_steps", "eval_max_response_len": _EVAL["max_new_tokens"],
    "eval_prompt_data": "eval_data (NAME=FILE)", "eval_temperature": _EVAL["temperature"],
    "eval_top_k": _EVAL["top_k"], "eval_top_p": _EVAL["top_p"], "expert_model_parallel_size": "parallel.ep",
    "freeze_vision_tower": "train_vision (else the tower is frozen)",
    "global_batch_size": "batch_size | minibatches (samples of a step / global batch)", "hf_checkpoint": "model",
    "kl_loss_coef": "kl_coef (with use_kl_loss)", "kl_loss_type": "kl_estimator",
    "lambd": "lam_policy and --lam-value", "load_debug_rollout_data": "from_rollouts (a folder of --save-rollouts)",
    "lr_decay_style": "lr_schedule",
    "mask_offpolicy_in_partial_rollout": "drop_off_policy", "max_tokens_per_gpu": "max_tokens",
    "n_samples_per_eval_prompt": "eval_samples", "n_samples_per_prompt": "group_size",
    "num_critic_only_steps": "critic_steps", "num_epoch": "steps (epochs * rows / prompts of a step)",
    "num_rollout": "steps", "num_steps_per_rollout": "minibatches", "offload_rollout": "engine_release",
    "over_sampling_batch_size": "staleness (extra groups / groups of a step)",
    "partial_rollout": "staleness (or --overlap)", "pipeline_model_parallel_size": "parallel.pp",
    "prompt_data": "data", "recompute_granularity": "parallel.activation_checkpointing",
    "ref_update_interval": "ref_sync_steps",
    "rm_type": "reward", "rollout_batch_size": "prompts_per_step", "rollout_max_response_len": "max_new_tokens",
    "rollout_max_prompt_len": "max_prompt_tokens", "rollout_num_gpus_per_engine": "engine_tp",
    "rollout_temperature": "temperature", "rollout_top_k": "top_k", "rollout_top_p": "top_p",
    "save": "output | out", "save_debug_rollout_data": "save_rollouts (a folder)", "save_interval": "save_steps",
    "sglang_mem_fraction_static": "engine_memory",
    "tensor_model_parallel_size": "parallel.tp", "tis_clip": "tis_max_weight",
    "use_kl_loss": "kl_coef (kl_loss_coef)", "use_tis": "correction tis", "use_unbiased_kl": "kl_estimator unbiased",
    "use_wandb": "track wandb", "wandb_project": "track_project",
}  # fmt: skip
RL2 = {  # and its fork with adaptive_kl, multi_objective, memory_optimization and experiment_tracking
    "adaptive_kl.controller_type": "kl_controller (where adaptive_kl.enabled)",
    "adaptive_kl.enabled": "kl_controller (controller_type)",
    "adaptive_kl.initial_coef": "kl_coef (where adaptive_kl.enabled)",
    "adaptive_kl.target_kl": "kl_target (where adaptive_kl.enabled)",
    "enable_mlflow": "track mlflow", "enable_wandb": "track wandb",
    "memory_optimization.enable_gradient_checkpointing": "parallel.activation_checkpointing",
    "memory_optimization.enable_cpu_offload": "parallel.offload", "data.path": "data",
    "data.train.path": "data",
    "multi_objective.pareto_method": "combine (with a weight for each --reward)",
    "test_data_path": "eval_data", "train_data_path": "data",
    "actor.clip": "clip_low and --clip-high", "actor.freeze_steps": "critic_steps", "actor.model_name": "model",
    "adv.estimator": "baseline | advantage", "adv.lamda": "lam_policy and --lam-value",
    "adv.norm_var": "baseline group_zscore",
    "avg_level": "aggregate", "cp_size": "parallel.cp", "critic.clip": "value_clip", "critic.lr": "critic_lr",
    "critic.model_name": "critic", "ddp_size": "parallel.replicate", "dynamic_filtering": "success_range 0.01 0.99",
    "entropy.coef": "entropy_coef", "experiment_name": "output (the run folder)", "freeze_steps": "critic_steps",
    "gradient_checkpointing": "parallel.activation_checkpointing", "kl.coef": "kl_coef",
    "kl.loss_estimator": "kl_estimator (where kl.type is loss)",
    "kl.reward_estimator": "kl_estimator (where kl.type is reward)", "kl.type": "kl_in",
    "load_ckpt_from": "resume", "max_inference_length_per_device": "max_tokens", "max_length_per_device": "max_tokens",
    "partial_rollout": "staleness (or --overlap)", "prompts_per_rollout": "prompts_per_step",
    "ref_actor.model_name": "reference",
    "responses_per_prompt": "group_size", "rollout.env_path": "env (or --reward FILE.py:step, for one turn)",
    "rollout.server_args.mem_fraction_static": "engine_memory", "rollout.server_args.tp_size": "engine_tp",
    "rollout.test.path": "eval_data", "rollout.train.path": "data", "save_freq": "save_steps", "sp_size": "parallel.cp",
    "test_data.experience.max_new_tokens": _EVAL["max_new_tokens"],
    "test_data.experience.responses_per_prompt": "eval_samples", "test_data.path": "eval_data",
    "test_data.responses_per_prompt": "eval_samples", "rollout.test.responses_per_prompt": "eval_samples",
    "test_sampling_params.max_new_tokens": _EVAL["max_new_tokens"],
    "test_sampling_params.temperature": _EVAL["temperature"],
    "test_sampling_params.top_k": _EVAL["top_k"], "test_sampling_params.top_p": _EVAL["top_p"],
    "rollout.test.sampling_params.max_new_tokens": _EVAL["max_new_tokens"],
    "rollout.test.sampling_params.temperature": _EVAL["temperature"],
    "test_freq": "eval_steps", "tis_coef": "tis_max_weight", "tp_size": "parallel.tp", "train_data.path": "data",
    "train_prompts_per_rollout": "prompts_per_step", "trainer.n_epochs": _PASSES, "trainer.project": "track_project",
    "trainer.save_dir": "output", "trainer.total_steps": "steps", "trainer.use_wandb": "track wandb",
    "update_per_rollout": "minibatches", "warmup_ratio": _SHARE,
}  # fmt: skip
COLOSSALAI = {
    "algo": "baseline", "backend": "engine", "clip_eps_high": "clip_high", "clip_eps_low": "clip_low",
    "dataset": "data", "eval_dataset": "eval_data (NAME=FILE for each of several)", "eval_interval": "eval_steps",
    "eval_save_dir": "output (trajectories are in the run folder)",
    "filter_range": "success_range", "filter_truncated_response": "drop_truncated",
    "inference_batch_size": "prompts_per_step (times num_inferencer)",
    "inference_microbatch_size": "max_batch (of the embedded engine)", "kl_coeff": "kl_coef", "learning_rate": "lr",
    "loss_variation": "aggregate", "num_episodes": "steps (episodes * rows / prompts of a step)",
    "num_generations": "group_size", "num_inferencer": "prompts_per_step (inference_batch_size * num_inferencer)",
    "pipeline_parallel_size": "parallel.pp", "producer_tensor_parallel_size": "engine_tp",
    "project": "track_project",
    "reward_fn_type": "reward", "reward_type": "reward",
    "rollout_save_dir": "output (trajectories are in the run folder)", "save_dir": "output",
    "save_interval": "save_steps",
    "skip_threshold": "max_ratio (per answer; there the mean ratio of a micro-batch, which is far looser)",
    "tensor_parallel_size": "parallel.tp",
    "train_batch_size": "minibatches (prompts of a step / train_batch_size / trainers)",
    "train_microbatch_size": _MICRO, "train_minibatch_size": _MICRO,
}  # fmt: skip
SYSTEMS = {"TRL": TRL, "verl": VERL, "OpenRLHF": OPENRLHF, "slime": SLIME, "RL2": RL2, "ColossalAI": COLOSSALAI}
OTHERS = {  # what several others call them, and rlkit chat and plot
    "checkpoint_every": "save_steps", "eval_every": "eval_steps", "eval_freq": "eval_steps",
    "load_best_model_at_end": "keep_best METRIC (in RUN/best; keep_best_checkpoints)", "log_every": "print_steps",
    "log_interval": "print_steps", "loggers": "track", "metric_for_best_model": "keep_best eval/...",
    "optimizer_name": "optimizer", "print_every": "print_steps", "project": "track_project",
    "quantization_bit": "lora_base nf4 (4) or int8 (8)", "save_every": "save_steps",
    "use_tensorboard": "track tensorboard", "max_tokens": "max_new_tokens", "message": "prompt",
    "system": "system_prompt", "output": "out",
    # rl4llm
    "config_file": "config (of accelerate: the ranks are those of torchrun)", "use_infer_server": "engine sglang",
    "infer_host": "engine_urls (http://HOST:PORT)", "infer_port": "engine_urls (http://HOST:PORT)",
    "infer_cohost_mode": "engine_release", "pretrained_model": "model",
}  # fmt: skip
SHORT = {  # options of ColossalAI's rl_example.py with one dash
    "a": "algo", "b": "backend", "d": "dataset", "e": "num_episodes", "ed": "eval_dataset", "ei": "eval_interval",
    "esd": "eval_save_dir", "g": "num_generations", "i": "num_inferencer", "ibs": "inference_batch_size",
    "imbs": "inference_microbatch_size", "kl": "kl_coeff", "lr": "learning_rate", "m": "model",
    "mnt": "max_new_tokens", "mpt": "max_prompt_tokens", "p": "project", "pp": "pipeline_parallel_size",
    "ptp": "producer_tensor_parallel_size", "rsd": "rollout_save_dir", "rt": "reward_type", "s": "system_prompt",
    "sd": "save_dir", "si": "save_interval", "t": "num_trainers", "tMbs": "train_minibatch_size",
    "tbs": "train_batch_size", "temp": "temperature", "tmbs": "train_microbatch_size", "topk": "top_k",
    "topp": "top_p", "tp": "tensor_parallel_size", "zero": "zero_stage",
}  # fmt: skip
FLAGS = {name: row for table in (OTHERS, *reversed(SYSTEMS.values())) for name, row in table.items()}
_NO_FLAG = {  # what there is in place of flags that need none here, or have none: their names
    "examples are packed without padding, always: --max-tokens bounds a micro-batch":
        "adaptive_batch_sizing.enabled dynamic_batching use_dynamic_batch_size use_dynamic_bsz",
    "each is a --reward FILE.py:FUNCTION=WEIGHT; the KL is --kl-coef, the entropy --entropy-coef":
        "multi_objective.enabled multi_objective.objectives multi_objective.objective_weights",
    "what it has are flags of their own: --parallel.activation-checkpointing and others": "memory_optimization.enabled",
    "what it has are flags of their own: --track mlflow wandb": "experiment_tracking.enabled",
    "--parallel.offload keeps the trainer's states on the CPU":
        "offload_optimizer.device offload_param.device enable_sleep",
    "the ranks are those of torchrun":
        "num_gpus machine_rank main_process_ip main_process_port multi_gpu num_machines nproc_per_node standalone "
        "rollout_num_gpus num_nodes num_processes master_address master_port num_trainers ray_dir actor_num_nodes "
        "actor_num_gpus_per_node n_gpus_per_node nnodes num_gpus_per_node",
    "the model's chat template renders prompts, always; --no-chat-template takes raw text": "apply_chat_template",
    "only assistant turns are trained on, always": "assistant_only_loss",
    "attention over packed sequences is chosen by the device": "attn_implementation",
    "only responses are trained on, always": "completion_only_loss",
    "one process halves --max-tokens where a step runs out of memory, always": "auto_find_batch_size",
    "--rename COLUMN data_source, or --reward-column COLUMN with --reward NAME=FILE.py:FUNCTION": "reward_fn_key",
    "trajectories/ has every sample, always; --save-rollouts FOLDER has what can train again": "rollout_data_dir",
    "several ranks are FSDP2 (--parallel)": "deepspeed strategy use_deepspeed use_fsdp",
    "AdamW's betas are 0.9 and 0.999; others by --optimizer FILE.py:FUNCTION (docs/optimizers.md)":
        "betas adam_beta1 adam_beta2",
    "rows have their usual columns (docs/data.md); others are renamed with --rename":
        "multiturn.enable messages_key prompt_dict_keys response_dict_keys response_key input_key label_key "
        "prompt_key",
    "--reward is called for each answer, always": "reward_manager",
    "--dtype is fp32 or bf16": "fp16",
    "the engine's own command starts a server with it (docs/engines.md)":
        "load_format enforce_eager sync_backend num_engines",
    "--reward has rlkit.rewards.text:soft_overlong(max_tokens=L,cache_tokens=C)=FACTOR":
        "cache_length overlong_buffer_len overlong_penalty_factor soft_over_length_punishment overlong_buffer.enable "
        "overlong_buffer.len overlong_buffer.penalty_factor overlong_buffer_cfg.enable overlong_buffer_cfg.len "
        "overlong_buffer_cfg.penalty_factor overlong_buffer.log overlong_buffer_cfg.log max_resp_len",
    "the reward reads them: rlkit.rewards.math:answer_tag, rlkit.rewards.text:think_tags": "response_format_tags",
    "the embedded engine shares the GPUs, --engine-release frees a server's memory":
        "colocate colocate_all colocate_actor_ref colocate_all_models colocate_critic_reward",
    "the reference is a copy of the model, or --reference; nothing is converted": "ref_load",
    "checkpoints are in the run folder: --resume --output RUN": "load",
    "nothing is converted": "megatron_to_hf_mode",
    "rows are shuffled in every pass, always": "rollout_shuffle shuffle train_sampling_strategy",
    "--seed is that of the data's order, too": "data_seed",
    "examples are packed without padding, always": "use_remove_padding packing_samples padding_free",
    "--max-tokens bounds a micro-batch, of log-probs too":
        "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu",
    "the exported model is a Hugging Face folder, always": "save_hf",
    "give a shorter file: all rows of --data are used": "max_samples",
    "all rows of --data are used": "samples",
    "rewards are not normalised while they run: --baseline compares those of a group":
        "normalize_enable normalize_reward",
    "rlkit ppo whitens advantages, always; in grpo --baseline does what there is": "normalize_advantages",
    "--engine-release frees the engine's memory; --parallel.offload that of the optimizer": "offload_model",
    "rewards see all columns, always": "remove_unused_columns",
    "code of a model is never run": "trust_remote_code",
    "an old run in --output is never overwritten": "overwrite_output_dir",
    "log-probs are computed by a fused kernel, always": "use_liger_kernel",
    "micro-batches are balanced over the ranks, always": "balance_data",
    "it is an option of Megatron's, which is not used here":
        "sequence_parallel expert_tensor_parallel_size attention_dropout hidden_dropout "
        "accumulate_allreduce_grads_in_fp32 recompute_method recompute_num_layers attention_softmax_in_fp32 "
        "attention_backend",
    "several ranks are FSDP2 (--parallel): stage 3, or 2 with --parallel.no-reshard-after-forward": "zero_stage",
    "the chat template's end of turn and the tokenizer's eos_token end a response": "eos_token",
    "--eval-data is measured before the first step, always": "eval_on_start val_before_train",
    "prompts that are too long are dropped and counted, always": "filter_overlong_prompts",
    "images are read from columns images and image; another one is renamed with --rename": "image_key",
    "trajectories/ has every sample; --print-samples-steps shows some": "log_completions",
    "subtract it in your reward, which may take `truncated`": "missing_eos_penalty",
    "examples are packed without padding, always, and do not see each other": "packing",
    "`hf upload` sends model/ to the hub": "push_to_hub",
    "the engine's experts are replayed where it reports them, always":
        "use_rollout_routing_replay enable_rollout_routing_replay",
    "on-policy distillation is rlkit distill --loss advantage": "use_opd",
    "advantages are whitened, always": "whiten_rewards",
    "the critic has its own optimizer: --critic-lr": "vf_coef",
}  # fmt: skip
NO_FLAG = {name: text for text, names in _NO_FLAG.items() for name in names.split()}
VALUES = {  # of a flag here
    "loss": {
        "bnpo": "ppo_clip", "dapo": "ppo_clip", "dr_grpo": "ppo_clip with --aggregate length", "gpg": "ppo_clip",
        "grpo": "ppo_clip with --aggregate episode", "sequence": "gspo",
        "geo_mean": "gmpo", "sigmoid": "dpo", "vanilla": "dual_clip", "robust": "robust_dpo",
    },
    "advantage": {
        "reinforce": "reinforce_pp", "reinforce_plus_plus": "reinforce_pp", "reinforce_baseline": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp",
    },
    "aggregate": {
        "sequence": "episode", "sample_level": "episode", "token_level": "token",
        "dr_grpo": "length", "seq-mean-token-mean": "episode", "seq-mean-token-sum-norm": "length",
        "token-mean": "token",
    },
    "baseline": {
        "DAPO": "group_zscore", "GRPO": "group_zscore", "RLOO": "leave_one_out", "True": "group_zscore",
        "False": "group_centered", "batch": "group_mean_batch_std", "gspo": "group_zscore, with --loss gspo",
        "dr_grpo": "group_centered", "gae": "rlkit ppo", "group": "group_zscore", "group_norm": "group_zscore",
        "grpo": "group_zscore", "rloo": "leave_one_out", "reinforce_plus_plus": "none, with --advantage reinforce_pp",
        "reinforce_plus_plus_baseline": "group_centered, with --advantage reinforce_pp",
        "reinforce": "none, with --advantage reinforce_pp", "gigpo": "group_zscore, with --advantage gigpo",
        "reinforce_baseline": "group_centered, with --advantage reinforce_pp", "opo": "group_centered (opo in Python)",
    },
    "lr_schedule": {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant, with --warmup-steps"},
    "correction": {"token_truncate": "tis", "token": "tis"},
    "dtype": {"bfloat16": "bf16", "float32": "fp32", "no": "fp32", "auto": "the default: leave it out"},
    "engine": {"hf": "local", "transformers": "local"},
    "kl_controller": {"schedule": "cosine"},
    "kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
    "reward": {  # without FILE.py
        "accuracy_reward": "rlkit.rewards.math:anywhere", "boxed": "rlkit.rewards.math:boxed",
        "code": "rlkit.rewards.code:stdin_tests", "deepscaler": "rlkit.rewards.math:boxed",
        "f1": "rlkit.rewards.text:f1", "math": "rlkit.rewards.math:boxed",
        "math_verify": "rlkit.rewards.math:anywhere", "think_answer_tags": "rlkit.rewards.math:answer_tag",
        "think_format_reward": "rlkit.rewards.text:think_tags",
    },
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
# --config and Hydra's words: what stands before the first dot of `algorithm.adv_estimator=grpo`
PREFIXES = (
    "actor", "actor_rollout_ref", "adaptive_batch_sizing", "adv", "algo", "algorithm", "critic",
    "custom_reward_function", "data", "experiment_tracking", "kl", "memory_optimization", "model",
    "multi_objective", "optim", "ref_actor", "reward", "reward_model", "rollout", "test_data", "train_data",
    "trainer",
)  # fmt: skip
BARE = ("ulysses_sequence_parallel_size", "use_remove_padding")  # Hydra's words without a dot  # fmt: skip
DEFAULTS = {  # of a system and a script, where ours train something else
    ("TRL", "grpo"): "--max-new-tokens 512 --lr-schedule linear --clip-high 0.2 --baseline group_zscore",
    ("TRL", "distill"): "--max-new-tokens 512 --lr-schedule linear",
    ("TRL", "ppo"): "--epochs 4 --max-new-tokens 53 --temperature 0.7 --lr 3e-6 --lr-schedule linear --value-clip 0.2"
    " --lam-value 0.95 --kl-coef 0.05",
    ("TRL", "sft"): "--max-example-tokens 1024 --lr 2e-5 --warmup-steps 0",
    ("TRL", "dpo"): "--max-example-tokens 1024 --warmup-steps 0",
    ("TRL", "kto"): "--max-example-tokens 1024 --warmup-steps 0",
    ("TRL", "reward_model"): "--max-example-tokens 1024 --lr 1e-4 --warmup-steps 0 --center-coef 0",
    ("verl", "grpo"): "--max-prompt-tokens 512 --max-new-tokens 512 --weight-decay 0.01"
    " --loss dual_clip --clip-high 0.2",
    ("verl", "sft"): "--max-example-tokens 1024 --lr-schedule cosine --weight-decay 0.01",
    ("verl", "ppo"): "--max-prompt-tokens 512 --max-new-tokens 512 --weight-decay 0.01 --lam-policy 1",
    ("OpenRLHF", "grpo"): "--max-total-tokens 2048 --lr-schedule cosine --clip-high 0.2",
    ("OpenRLHF", "ppo"): "--max-total-tokens 2048 --lr-schedule cosine --lam-policy 1 --critic-lr 9e-6",
    ("OpenRLHF", "dpo"): "--lr-schedule cosine",
    ("slime", "grpo"): "--clip-high 0.2 --aggregate episode --baseline group_zscore",
    ("RL2", "grpo"): "--weight-decay 0.01 --clip-high 0.2 --success-range 0.01 0.99",
    ("RL2", "ppo"): "--weight-decay 0.01 --lam-policy 1 --critic-lr 5e-6",
    ("ColossalAI", "grpo"): "--max-prompt-tokens 512 --max-new-tokens 3584 --baseline group_zscore",
}  # fmt: skip
_OF = {"critic": "critic", "ref": "reference", "ref_actor": "reference", "reference": "reference"}


def key_of(name: str, system: str | None = None) -> str:
    """The row of a name, the longest that fits, in the table of the system if it has one; "" for an unknown name."""
    parts = name.split(".")
    longest = [".".join(parts[at:]) for at in range(len(parts))]
    first = SYSTEMS.get(system or "", {})
    return next((key for key in longest for table in (first, FLAGS, NO_FLAG) if key in table), "")


def system_of(names: Collection[str]) -> str | None:
    """The system with most of the names; None if none has any."""
    counts = {
        system: sum(any(name == key or name.endswith(f".{key}") for key in table) for name in names)
        for system, table in SYSTEMS.items()
    }
    if any(name.startswith("actor_rollout_ref.") for name in names):
        return "verl"
    best = max(counts, key=lambda system: counts[system])
    return best if counts[best] else None


def row_of(name: str, flags: Collection[str], system: str | None = None) -> tuple[str, str] | None:
    """The flag, of a script with the `flags`, that stands for a name of a system, and how its value is made."""
    parts, known = name.split("."), key_of(name, system)
    own = _owner(name)
    if own and not known.startswith(f"{parts[0]}."):
        return None
    row = SYSTEMS.get(system or "", {}).get(known) or FLAGS.get(known, "")
    same = parts[-1] in flags and len(parts) > 1 and "." not in known
    for choice in [parts[-1]] if same else row.split(" | "):
        flag, _, how = choice.partition(" ")
        if flag in flags:
            return flag, how
    return None


def answer(name: str, flags: Collection[str], system: str | None = None) -> str | None:
    """What stands for a flag of a system in a script with the `flags`; None for an unknown name."""
    if found := row_of(name, flags, system):
        return " ".join([f"is --{found[0].replace('_', '-')}", *filter(None, found[1:]), "here"])
    if (own := _owner(name)) and own not in flags and own == "critic":
        return "is for rlkit ppo: there is no critic here"
    known = key_of(name, system)
    if own and not known.startswith(name.partition(".")[0]):
        return f"has no flag of its own: the {own} is as the policy"
    return f"has no flag here: {NO_FLAG[known]}" if known in NO_FLAG and known not in flags else None


def our_name(name: str, system: str | None = None) -> str:
    """The flag that stands for a name in some command of rlkit, be it another one; "" for none."""
    key = key_of(name, system)
    return (SYSTEMS.get(system or "", {}).get(key) or FLAGS.get(key, "")).partition(" ")[0]


def _owner(name: str) -> str:
    """The model whose options begin as the name does, where it is not the policy."""
    first = name.removeprefix("actor_rollout_ref.").partition(".")
    return _OF.get(first[0], "") if first[1] else ""
