"""What several options of another system's command give together: batch sizes, steps, the KL, rewards, data.

`compute` takes the options by their rows in `rlkit.compat.flags`, and returns flags of rlkit. Defaults are those of the
versions in docs/migrating.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rlkit.compat.flags import VALUES
from rlkit.data.schema import GOLD, columns_of
from rlkit.rewards.load import functions_in

Given = Mapping[str, list[str]]  # the row of each option, and its values
OFFLINE = ("sft", "dpo", "kto", "reward_model")
OFF = {"", "0", "false", "no", "none", "null", "off", "disable"}
_PROMPTS = {"prompt", "messages", "question", "problem", "instruction", "conversations", "context_messages"}
_RESPONSES = {*columns_of("response", "answer")}
_NOT_DUAL = {"gspo", "gmpo", "geo_mean", "cispo", "sapo", "gpg", "vespo", "clip_cov", "kl_cov"}


class Size(NamedTuple):
    """A step: its size in prompts (examples of fixed data), updates, and their rollouts or passes over the data."""

    size: float
    updates: float = 1
    steps: float = 0  # 0: by passes
    passes: float = 0


def compute(
    system: str, script: str, given: Given, *, count_rows: Callable[[str], int | None], ranks: int
) -> tuple[dict[str, list[str]], list[str]]:
    """Flags of `script` with their values, and what a reader must know of them.

    `count_rows(data)` is the number of rows of a file, None where it is not known. `ranks` multiplies
    TRL's sizes, which are per device.
    """
    found, notes = dict[str, list[str]](), list[str]()
    number = partial(_number, given)
    ranks = math.prod(machines(given)) if {"num_processes", "nproc_per_node"} & {*given} else ranks
    step, offline = _SIZES[system](script, number, ranks), script in OFFLINE
    size = "batch_size" if offline else "prompts_per_step"
    for name, value in ((size, step.size), ("" if offline else "minibatches", step.updates)):
        if name and value != int(value):
            notes.append(f"--{name.replace('_', '-')} is {value:g} there: it is rounded up")
        if name:
            found[name] = [f"{max(1, math.ceil(value))}"]
    if system == "TRL":
        notes.append(f"--{size.replace('_', '-')} is that of {ranks} GPU{'s' * (ranks > 1)}: their sizes are per GPU")
        if is_on(given.get("packing")):
            notes.append("with packing, their batch counts blocks of max_length tokens, ours examples")
    data = _data(system, given)
    rows = count_rows(data["data"][0]) if len(data.get("data", ())) == 1 else None
    if steps := step.steps or step.passes * ((rows or 0) // int(found[size][0])):
        found["steps"] = [f"{max(1, round(steps))}"]
    else:
        notes.append(f"add --steps: {step.passes:g} * rows / {found[size][0]}")
    for rule in (_kl, _objective, _files):
        found |= rule(system, script, given, notes)
    found |= _warmup(system, script, number, steps, notes)
    found |= data | _reward(system, given, notes) | _engine(system, given)
    if not offline and script != "distill" and not {"reward", "env", "agent"} & {*found, *given}:
        notes.append(f"add --reward FILE.py:FUNCTION: what {system} takes without a name has none here")
    return found, notes


def _warmup(system: str, script: str, number: Number, steps: float, notes: list[str]) -> dict[str, list[str]]:
    """--warmup-steps of a share of the steps; a number of steps comes before a share, which it is below 1."""
    first = number("warmup_steps", "lr_warmup_steps", default=0)
    usual = {"OpenRLHF": 0.03, "verl": 0.1 * (script == "sft")}.get(system, 0)
    share = number("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio", default=usual)
    share = first if 0 < first < 1 else share
    if first >= 1 or system == "RL2" or not share:  # RL2's scheduler has no use for it
        return {}
    if not steps:
        notes.append(f"add --warmup-steps: {share:g} * steps")
        return {"warmup_steps": []}
    return {"warmup_steps": [f"{(int if system == 'verl' else math.ceil)(share * round(steps))}"]}


def machines(given: Given) -> tuple[int, int]:
    """How many machines accelerate, torchrun or verl starts processes on, and how many on each."""
    count = max(1, round(_number(given, "num_machines", "nnodes", default=1)))
    each = _number(given, "num_processes", default=0) / count
    return count, max(1, round(each or _number(given, "nproc_per_node", "n_gpus_per_node", default=1)))


def is_on(values: list[str] | None) -> bool:
    """Whether an option is given, and not as false, 0, none or the like."""
    return values is not None and " ".join(values).strip().lower() not in OFF - {""}


def texts(values: list[str]) -> list[str]:
    """The texts of a list as a command line writes it: `[a,'b']`, `a,b`, or several words."""
    inner = " ".join(values).strip()
    if len(values) > 1 and not inner.startswith("["):
        return values
    parts = re.split(r",(?![^()]*\))", inner.strip("[]"))  # but for the arguments of a call
    return [part.strip(" '\"") for part in parts if part.strip(" '\"")]


def _number(given: Given, *names: str, default: float) -> float:
    for name in names:
        with suppress(ValueError, IndexError):
            return float(given.get(name, [""])[0])
    return default


Number = Callable[..., float]


def _trl(script: str, number: Number, ranks: int) -> Size:
    accumulation = number("gradient_accumulation_steps", default=1)
    one = number("per_device_train_batch_size", default=8) * ranks
    passes = number("num_train_epochs", default=3)
    updates, prompts = 1.0, one * accumulation
    if script == "grpo":
        turns = number("steps_per_generation", default=accumulation)
        samples = number("generation_batch_size", default=one * turns)
        prompts, updates = samples / number("num_generations", default=8), samples / one / accumulation
    minis = number("num_mini_batches", default=1) if script == "ppo" else updates
    steps = max(0.0, number("max_steps", default=0)) / (updates * number("num_iterations", default=1))
    return Size(prompts, minis, steps or number("total_episodes", default=0) / prompts, passes)


def _verl(script: str, number: Number, _ranks: int) -> Size:
    size = number("train_batch_size", default=256 if script in OFFLINE else 1024)
    updates = size / number("ppo_mini_batch_size", default=min(256, size))
    passes = number("total_epochs", default=4 if script in OFFLINE else 30)
    return Size(size, updates, number("total_training_steps", default=0), passes)


def _openrlhf(script: str, number: Number, _ranks: int) -> Size:
    update = number("train.batch_size", "train_batch_size", default=128)
    if script in OFFLINE:
        return Size(update, passes=number("max_epochs", default=1))
    size = number("rollout.batch_size", "rollout_batch_size", default=1024)
    updates = max(1.0, size * number("n_samples_per_prompt", default=1) / update)
    return Size(size, updates, passes=number("num_episodes", default=1))


def _slime(_script: str, number: Number, _ranks: int) -> Size:
    size = number("rollout_batch_size", default=1)
    samples = size * number("n_samples_per_prompt", default=1)
    updates = number("num_steps_per_rollout", default=0) or samples / number("global_batch_size", default=samples)
    return Size(size, updates, number("num_rollout", default=0), number("num_epoch", default=1))


def _rl2(script: str, number: Number, _ranks: int) -> Size:
    names: tuple[str, ...] = ("prompts_per_rollout", "train_prompts_per_rollout")
    names = ("train_data.batch_size", "train.batch_size", "data.batch_size") if script in OFFLINE else names
    size = number(*names, default=1)
    updates = 1.0 if script in OFFLINE else number("update_per_rollout", default=1)
    return Size(size, updates, number("trainer.total_steps", default=0), number("trainer.n_epochs", default=1))


def _colossalai(_script: str, number: Number, _ranks: int) -> Size:
    size = number("inference_batch_size", default=64) * number("num_inferencer", default=2)
    updates = max(1.0, size / number("train_batch_size", default=32) / number("num_trainers", default=2))
    return Size(size, updates, passes=number("num_episodes", default=1))


_SIZES = {
    "TRL": _trl, "verl": _verl, "OpenRLHF": _openrlhf, "slime": _slime, "RL2": _rl2, "ColossalAI": _colossalai,
}  # fmt: skip


def _kl(system: str, script: str, given: Given, notes: list[str]) -> dict[str, list[str]]:
    """The KL's coefficient, place and estimator."""
    if script in (*OFFLINE, "distill") or system not in ("verl", "OpenRLHF", "slime", "RL2"):
        return {}
    names = {"verl": ("kl_loss_coef",), "OpenRLHF": ("kl.init_coef", "init_kl_coef"), "slime": ("kl_loss_coef",)}
    in_loss = is_on(given.get("use_kl_loss")) or is_on(given.get("kl.use_loss"))
    place = "loss" if in_loss else "reward"
    used: tuple[str, ...] = ("kl.estimator", "kl_estimator", "kl_loss_type")
    default = {"verl": 0.001, "OpenRLHF": 0.01}.get(system, 0.0)
    coef = _number(given, *names.get(system, ("kl.coef",)), default=default)
    estimator = {"verl": "low_var_kl", "OpenRLHF": "k1"}.get(system, "k1")
    adapted: dict[str, list[str]] = {}
    if system == "RL2":
        place = " ".join(given.get("kl.type", ["loss"]))
        used, estimator = (f"kl.{place}_estimator",), "k2" if place == "loss" else "k1"
        coef, adapted = _adaptive_kl(given, coef)
    if system == "verl" and not in_loss:
        coef = _number(given, "kl_ctrl.kl_coef", default=0.001) if is_on(given.get("use_kl_in_reward")) else 0.0
        used, estimator = ("kl_penalty",), "k1"
    if system == "slime" and not in_loss:
        coef = _number(given, "kl_coef", default=0.0)
    if "kl_loss_coef" in given and not in_loss:
        notes.append("kl_loss_coef has no effect there without use_kl_loss")
    if not coef:
        return {"kl_coef": [], "kl_in": [], "kl_estimator": []}
    estimator = next((given[name][0] for name in used if given.get(name)), estimator)
    estimator = VALUES["kl_estimator"].get(estimator, estimator)
    usual = "reward" if script == "ppo" else "loss"
    found = adapted | {"kl_coef": [f"{coef:g}"]} | ({} if place == usual else {"kl_in": [place]})
    if is_on(given.get("use_unbiased_kl")) or is_on(given.get("unbiased_gradient")):
        return found
    if (place, estimator) == ("loss", "k1"):
        notes.append("their KL, k1 in the loss, has gradient 0 on average: ours is the unbiased one")
        return found
    return found | ({"kl_estimator": [estimator]} if (place, estimator) != ("reward", "k1") else {})


def _adaptive_kl(given: Given, coef: float) -> tuple[float, dict[str, list[str]]]:
    """The first coefficient and the controller of `adaptive_kl` in RL2's fork; nothing more where it is off."""
    kind = given.get("adaptive_kl.controller_type", ["exponential"])
    if not is_on(given.get("adaptive_kl.enabled")) or kind == ["fixed"]:
        return coef, {}
    target = {} if kind == ["schedule"] else {"kl_target": [*given.get("adaptive_kl.target_kl", ["0.01"])]}
    return coef or _number(given, "adaptive_kl.initial_coef", default=0.2), {"kl_controller": kind} | target


def _objective(system: str, script: str, given: Given, notes: list[str]) -> dict[str, list[str]]:
    """The baseline, the clip and what else one option says of several flags."""
    found: dict[str, list[str]] = {}
    if script == "grpo":
        centered = {"norm_adv_by_std_in_grpo": False, "disable_grpo_std_normalization": True}
        if any(name in given and is_on(given[name]) is value for name, value in centered.items()):
            found["baseline"] = ["group_centered"]
        if system == "RL2":
            found["baseline"] = ["group_zscore" if is_on(given.get("adv.norm_var")) else "group_centered"]
        if system == "TRL" and "scale_rewards" in given and not is_on(given["scale_rewards"]):
            found["baseline"] = ["group_centered"]
        if system == "TRL" and given.get("importance_sampling_level") == ["sequence"]:
            found["loss"] = ["gspo"]
        found |= _dual_clip(system, {**given, **found}, notes) | _clip(system, {**given, **found}, notes)
        if system == "ColossalAI":
            dapo = _is_dapo(given)
            filters = {"success_range": ["0.01", "0.99"], "drop_truncated": ["True"]}
            found |= filters if dapo else {"aggregate": ["episode"]}
            coef = _number(given, "kl_coeff", default=0.01)
            found["kl_coef"] = [] if dapo or not coef else [f"{coef:g}"]
    if decay := " ".join(given.get("role_baseline_ema_gamma", ())):
        notes.append(f"their average moves with each game, ours with each step: of n games it is {decay} ** n")
    if system == "TRL" and script == "dpo":
        found |= _pair_losses(given, notes)
    if system == "TRL" and is_on(given.get("use_peft")):
        found["lora_rank"] = given.get("lora_r", ["16"])
    if is_on(given.get("sync_ref_model")):
        found["ref_sync_steps"] = given.get("ref_model_sync_steps", ["512"])
    elif "ref_model_sync_steps" in given:
        notes.append("ref_model_sync_steps has no effect there without sync_ref_model")
    return found


def _dual_clip(system: str, given: Given, notes: list[str]) -> dict[str, list[str]]:
    """--loss dual_clip with the bound of the ratio, where the loss of the other system is one that it bounds."""
    name = {"TRL": "delta", "verl": "clip_ratio_c", "OpenRLHF": "dual_clip", "slime": "eps_clip_c"}.get(system, "")
    if not (bound := _number(given, name, default=0)):
        return {}
    other = _loss_of(given)
    if other.lower() in _NOT_DUAL:
        notes.append(f"{name} {bound:g} is not part of --loss {VALUES['loss'].get(other, other)} here")
        return {"clip_c": []}
    high = _number(given, "epsilon_high", "epsilon", default=0.2)
    if system == "TRL" and bound <= 1 + high:
        notes.append(f"delta {bound:g} is at most 1 + epsilon_high, which is another clip there: it has no flag here")
        return {"clip_c": []}
    return {"loss": ["dual_clip"], "clip_c": [f"{bound:g}"]}


def _loss_of(given: Given) -> str:
    """The loss by its name there; "" where none is given."""
    return next((given[x][0] for x in ("loss", "loss_mode", "loss_type", "advantage_estimator") if given.get(x)), "")


def _clip(system: str, given: Given, notes: list[str]) -> dict[str, list[str]]:
    """--clip-low and --clip-high: their defaults, 0.2 for each loss, and the lower one as the upper one's default."""
    loss = VALUES["loss"].get(_loss_of(given), _loss_of(given))
    low, high = {"TRL": ("epsilon", "epsilon_high"), "slime": ("eps_clip", "eps_clip_high")}.get(system, ("", ""))
    if loss in ("cispo", "sapo"):
        theirs = (low, high, "clip_ratio", "clip_ratio_low", "clip_ratio_high")
        notes.extend(f"{name} has no flag with --loss {loss}" for name in theirs if name in given)
        return {"clip_low": [], "clip_high": []}
    found = {"clip_high": given[low]} if low in given and high not in given else {}
    if loss in ("gspo", "gmpo") and not {low, "clip_ratio", "clip_ratio_low", "eps_clip_low_high"} & {*given}:
        found["clip_low"] = ["0.2"]
    return found


def _pair_losses(given: Given, notes: list[str]) -> dict[str, list[str]]:
    """--loss and --sft-coef of TRL's list of losses and their weights."""
    names, weights = texts(given.get("loss_type", [])), texts(given.get("loss_weights", []))
    shares = {name: float(weight) for name, weight in zip(names, weights or ["1"] * len(names))}
    sft = shares.pop("sft", 0.0)
    if not names:
        return {}
    if len(shares) != 1:
        notes.append(f"loss_type {' '.join(names)}: --loss is one of them, and --sft-coef the weight of sft")
        return {"loss": [], "sft_coef": []}
    ((name, share),) = shares.items()
    if share != 1:
        notes.append(f"their loss is {share:g} times ours: {name} has weight 1 here")
    return {"loss": [VALUES["loss"].get(name, name)], "sft_coef": [f"{sft / share:g}"] if sft and share else []}


def _files(system: str, _script: str, given: Given, _notes: list[str]) -> dict[str, list[str]]:
    """When to evaluate and save, and the run folder."""
    found: dict[str, list[str]] = {}
    for strategy, flag in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        if strategy in given and not is_on(given[strategy]):
            found[flag] = ["0"]
    name = next((given[row][0] for row in ("run_name", "experiment_name") if given.get(row)), "")
    if name and not {"output_dir", "default_local_dir", "trainer.save_dir", "save_path", "output"} & {*given}:
        found["output"] = [f"runs/{name}"]
    eval_prompts = given.get("eval_prompt_data", [])
    if len(eval_prompts) > 1:
        found["eval_data"] = [f"{set_}={file}" for set_, file in zip(eval_prompts[::2], eval_prompts[1::2])]
    if system == "ColossalAI":
        with suppress(ValueError, AttributeError):
            named = json.loads(" ".join(given.get("eval_dataset", [])))
            found["eval_data"] = [f"{name}={file}" for name, file in named.items()]
    return found


def _data(system: str, given: Given) -> dict[str, list[str]]:
    """--data with its configuration, split or weights, and --rename for columns under other names."""
    found: dict[str, list[str]] = {}
    rows = ("dataset_name", "train_files", "prompt_data", "prompt_dataset", "dataset", "train_data.path", "data.path",
            "data.train.path", "train_data_path", "data")  # fmt: skip
    name = next((row for row in (*rows, "rollout.train.path") if row in given), "")
    files = texts(given.get(name, []))
    if system == "RL2":
        files = _rl2_files(files)
        tests = ("test_data.path", "rollout.test.path", "test_data_path")
        held_out = next((given[row] for row in tests if row in given), [])
        found |= {"eval_data": _rl2_files(texts(held_out))} if held_out else {}
    config, split = (" ".join(given.get(f"dataset_{part}", [])) for part in ("config", "train_split"))
    if config or split:
        files = [f"{file}:{config}:{split}".rstrip(":") if config else f"{file}::{split}" for file in files]
    weights = texts(given.get("prompt_data_probs") or given.get("dataset_probs") or [])
    if len(weights) == len(files):
        files = [f"{file}={weight}" for file, weight in zip(files, weights)]
    if files:
        found["data"] = files
    renamed = [(given[key][0], ours) for key, ours, usual in (
        ("input_key", "prompt", _PROMPTS), ("prompt_key", "prompt", _PROMPTS), ("label_key", "answer", {*GOLD}),
        ("response_key", "response", _RESPONSES),
    ) if given.get(key) and given[key][0] not in usual]  # fmt: skip
    return found | ({"rename": [word for pair in renamed for word in pair]} if renamed else {})


def _engine(system: str, given: Given) -> dict[str, list[str]]:
    """The engine of a system without an option for it, where options of the engine are given; RL2's tracker."""
    served = ("vllm", "sglang", "gpu_memory_utilization", "rollout.server_args", "rollout_num_gpus_per_engine")
    engine = {"slime": "sglang", "RL2": "sglang"}.get(system, "vllm")
    named = {"rollout.name", "backend", "engine"} & {*given}
    found = {"engine": [engine]} if not named and any(name.startswith(served) for name in given) else {}
    tracked = system == "RL2" and "trainer.project" in given and is_on(given.get("trainer.use_wandb", ["true"]))
    on = {"mlflow": is_on(given.get("enable_mlflow")), "wandb": tracked or is_on(given.get("enable_wandb"))}
    trackers = [name for name in on if on[name]]
    raw = system == "RL2" and "apply_chat_template" in given and not is_on(given["apply_chat_template"])
    return found | ({"track": trackers} if trackers else {}) | ({"no_chat_template": ["True"]} if raw else {})


def _rl2_files(paths: list[str]) -> list[str]:
    """Files and hub ids of RL2's split@path, as rlkit writes them."""
    pairs = [_split(path) for path in paths]
    return [f"{path}{'' if Path(path).exists() else ':'}:{split}" if split else path for split, path in pairs]


def _split(file: str) -> tuple[str, str]:
    """The split and the path of split@path, as RL2 writes it."""
    split, at, path = file.partition("@")
    return (split, path) if at else ("", file)


def _is_dapo(given: Given) -> bool:
    """Whether a command of ColossalAI has the settings of DAPO."""
    return given.get("algo", ["GRPO"])[0].upper() == "DAPO"


def _overlong(system: str, given: Given) -> str:
    """The reward for the length of verl's, OpenRLHF's and ColossalAI's options; "" where they are off.

    min(0, (L - C - n) / C) * factor of n tokens, with a limit L and a buffer of C; ColossalAI: C = cache_length, by
    default min(1024, L / 4).
    """
    number = partial(_number, given)
    names = ("max_resp_len", "max_response_length", "max_new_tokens", "rollout.max_new_tokens", "generate_max_len")
    limit = number(*names, default={"verl": 512, "ColossalAI": 3584}.get(system, 1024))
    buffer = number("overlong_buffer_len", default=0)
    if is_on(given.get("overlong_buffer.enable")) or is_on(given.get("overlong_buffer_cfg.enable")):
        buffer = number("overlong_buffer.len", "overlong_buffer_cfg.len", default=0)
    if is_on(given.get("soft_over_length_punishment", [str(system == "ColossalAI" and _is_dapo(given))])):
        buffer = number("cache_length", default=min(1024, limit // 4))
    factors = ("overlong_penalty_factor", "overlong_buffer.penalty_factor", "overlong_buffer_cfg.penalty_factor")
    reward = f"rlkit.rewards.text:soft_overlong(max_tokens={int(limit)},cache_tokens={int(buffer)})"
    return f"{reward}={number(*factors, default=1):g}" if buffer else ""


def _reward(system: str, given: Given, notes: list[str]) -> dict[str, list[str]]:
    """--reward FILE.py:FUNCTION of the names and paths that other systems take."""
    rows = ("reward_funcs", "custom_reward_function.path", "remote_rm_url", "remote_url", "custom_rm_path", "rm_type")
    name = next((row for row in (*rows, "reward_type") if given.get(row)), "")
    default = {
        "custom_reward_function.path": "compute_score",
        "remote_rm_url": "reward_func",
        "remote_url": "reward_func",
    }
    function = " ".join(given.get("custom_reward_function.name", [default.get(name, "")]))
    found = []
    for text in texts(given.get(name, [])):
        dotted = re.fullmatch(r"([A-Za-z_]\w*(?:\.\w+)*)\.(\w+)", text)
        if text in VALUES["reward"]:
            found.append(VALUES["reward"][text])
        elif text.endswith(".py") and function:
            found.append(f"{text}:{function}")
        elif dotted and not text.startswith("http"):
            file = Path(*dotted[1].split(".")).with_suffix(".py")
            found.append(f"{file}:{dotted[2]}" if file.exists() or "." not in dotted[1] else f"{dotted[1]}:{dotted[2]}")
        elif "://" in text:
            notes.append(f"{text}: call it in --reward FILE.py:FUNCTION, with rlkit.rewards.judge.remote_reward_model")
        else:
            notes.append(f"{text}: write it as --reward FILE.py:FUNCTION")
    weights = texts(given.get("reward_weights", []))
    if over := _overlong(system, given):
        if not found:
            notes.append("add the reward of a right answer before it: --reward FILE.py:FUNCTION=1")
        return {"reward": [*(f"{reward}=1" for reward in found), over]}
    if len(weights) == len(found):
        found = [f"{reward}={weight}" for reward, weight in zip(found, weights)]
    if system == "RL2" and given.get("rollout.env_path"):
        return _rl2_file(given["rollout.env_path"][0], several=_number(given, "rollout.max_turns", default=1) > 1)
    return {"reward": found} if found else {}


def _rl2_file(file: str, *, several: bool) -> dict[str, list[str]]:
    """--env FILE.py:step; of a file in RL2's first interface --reward FILE.py:reward_fn and, of `several` turns, --env
    FILE.py:interact."""
    defined = functions_in(Path(file)) if Path(file).is_file() else []
    if "reward_fn" in defined:
        env = {"env": [f"{file}:interact"]} if several and "interact" in defined else {}
        return env | {"reward": [f"{file}:reward_fn"]}
    return {"env": [f"{file}:{next((name for name in ('step', 'env_step') if name in defined), 'step')}"]}
