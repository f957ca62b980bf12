"""The command `rlkit`, and the command line of every script: flags are parsed, errors are printed in one line.

    rlkit grpo --model PATH_OR_HUB_ID --data train.jsonl --reward my_rewards.py:score
    rlkit grpo --help                             every flag, with its default
    rlkit copy grpo my_grpo.py                    copy the script to a file of your own
    torchrun --nproc-per-node 8 -m rlkit.scripts.grpo --parallel.tp 2 ...

This module does not import torch, so that `--help` and errors in flags are fast.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_type_hints

from rlkit.run.console import TRAINING
from rlkit.settings import collected

try:
    from tyro.conf import arg

    FLAT: Any = arg(name="")
except ModuleNotFoundError:  # a machine without a command line can still call `main(Args(...))`
    FLAT = None
X = TypeVar("X")
Flat = Annotated[X, FLAT]  # a field of settings whose flags have no prefix

COMMANDS = {
    "grpo": "reinforcement learning without a critic: GRPO and its variants, synchronous or asynchronous",
    "ppo": "reinforcement learning with a critic: PPO",
    "sft": "supervised fine-tuning on conversations",
    "dpo": "preference optimization on pairs: DPO and its variants",
    "kto": "preference optimization on single responses, each labelled good or bad",
    "reward_model": "train a reward model on pairs",
    "sweep": "search for the best values of a command's flags (Optuna)",
    "chat": "talk to the model of a run in the terminal",
    "plot": "draw or compare the curves of run folders",
    "track": "send a run's metrics to Weights & Biases, MLflow or TensorBoard",
    "copy": "copy a script to a file of your own",
}
FOREIGN = {  # flags of TRL and transformers, and the flag here that does it: the first of several that the script has
    "beta": "kl_coef", "bf16": "dtype bf16", "center_rewards_coefficient": "center_coef",
    "chat_template_kwargs": "template_args", "cliprange": "clip_low and --clip-high", "cliprange_value": "value_clip",
    "dataset_config": "data OWNER/NAME:CONFIG:SPLIT", "dataset_name": "data",
    "dataset_test_split": "eval_data OWNER/NAME:CONFIG:SPLIT", "dataset_train_split": "data OWNER/NAME:CONFIG:SPLIT",
    "epsilon": "clip_low", "epsilon_high": "clip_high", "eval_strategy": "eval_steps",
    "gradient_accumulation_steps": "max_tokens (it bounds a micro-batch)",
    "gradient_checkpointing": "parallel.activation_checkpointing", "lam": "lam_policy", "learning_rate": "lr",
    "logging_steps": "print_steps", "lora_r": "lora_rank", "loss_type": "loss", "lr_scheduler_type": "lr_schedule",
    "max_completion_length": "max_new_tokens", "max_grad_norm": "max_norm",
    "max_length": "max_example_tokens | max_total_tokens", "max_prompt_length": "max_prompt_tokens",
    "max_steps": "steps", "model_name_or_path": "model", "num_generations": "group_size", "num_iterations": "epochs",
    "num_mini_batches": "minibatches", "num_ppo_epochs": "epochs",
    "num_train_epochs": "steps (epochs * rows / rows of a step)", "output_dir": "output",
    "per_device_train_batch_size": "batch_size (of all devices) | prompts_per_step (of all devices)",
    "precompute_ref_log_probs": "precompute_reference", "ref_model_sync_steps": "ref_sync_steps",
    "response_length": "max_new_tokens", "resume_from_checkpoint": "resume", "reward_funcs": "reward",
    "reward_weights": "reward FILE.py:FUNCTION=WEIGHT",
    "reward_model_path": "reward FILE.py:FUNCTION, with rlkit.rewards.judge.remote_reward_model",
    "save_total_limit": "keep", "scale_rewards": "baseline", "sft_model_path": "model",
    "total_episodes": "steps (episodes / prompts of a step)", "use_peft": "lora_rank", "use_vllm": "engine sglang",
}  # fmt: skip
NO_FLAG = {  # flags of TRL that need none here
    "assistant_only_loss": "only assistant turns are trained on, always",
    "completion_only_loss": "only responses are trained on, always",
    "eos_token": "the chat template's end of turn and the tokenizer's eos_token end a response",
    "lora_alpha": "alpha is twice --lora-rank",
    "missing_eos_penalty": "subtract it in your reward, which may take `truncated`",
    "packing": "examples are packed without padding, always, and do not see each other",
    "padding_free": "examples are packed without padding, always",
    "vf_coef": "the critic has its own optimizer: --critic-lr",
}


def main(argv: list[str] | None = None) -> None:
    """`rlkit COMMAND ...`."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
        return _print("\n".join(["usage: rlkit COMMAND ...", "", *lines, "", "rlkit COMMAND --help lists its flags."]))
    name, rest = argv[0].replace("-", "_"), argv[1:]
    if name not in COMMANDS:
        _fail(f"no command {argv[0]!r}: choose one of {', '.join(COMMANDS)}")
    if name == "copy":
        return _copy(rest)
    sys.argv = [f"rlkit {argv[0]}", *rest]
    script = importlib.import_module(f"rlkit.scripts.{name}")
    run(script.main, script.Args, script.__doc__)


def run(script: Callable[[Any], X], kind: type, description: str | None, *, argv: Sequence[str] | None = None) -> Any:
    """Parse the flags of the dataclass `kind` and call `script(flags)`, as `on_ranks` does: a script's last line."""
    import tyro

    argv = sys.argv[1:] if argv is None else argv
    names = {name for name, _ in flags_of(kind)}
    own = argv[: argv.index("--")] if "--" in argv else argv  # what follows is another command's
    for given in (word.split("=")[0] for word in own if word.startswith("--")):
        name = given[2:].replace("-", "_")
        if name not in names and "lr" in names and (answer := _equivalent(name, names)):
            _fail(f"{given} {answer}; docs/migrating.md has all options")
    try:
        with collected() as wrong:
            flags: Any = tyro.cli(kind, args=argv, description=description, config=(tyro.conf.SuppressFixed,))
        if wrong:
            _fail(spelled(wrong[0], kind))
    except BrokenPipeError:  # rlkit grpo --help | head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise SystemExit(1) from None
    result = on_ranks(script, flags)
    if isinstance(result, Path) and os.environ.get("RANK", "0") == "0":
        _print(f"exported {result}")
    return result


def _equivalent(foreign: str, names: set[str]) -> str | None:
    """What stands here for another system's flag, in a script with the flags `names`; None for an unknown one."""
    if foreign in NO_FLAG:
        return f"has no flag here: {NO_FLAG[foreign]}"
    for choice in FOREIGN.get(foreign, "").split(" | "):
        flag, *rest = choice.split(" ", 1)
        if flag in names:
            return " ".join([f"is --{flag.replace('_', '-')}", *rest, "here"])
    return None


def on_ranks(script: Callable[..., X], *args: Any) -> X | None:
    """Call `script(*args)`, as the last line of a script: ranks leave together, or a failed one ends the job.

    ValueError, OSError and ImportError (in flags, data or files) before training starts are printed to stderr as one
    line, `error: ...`, with exit code 2; so is, at any time, an OSError of the run folder. `--debug` shows their
    traceback. Any other error has one.

    A rank that raises leaves at once; the others may be waiting for it in a collective. torchrun then ends them, and
    reports the first rank that failed, with its traceback, as the cause. After a stop request and the save, a plain
    process ends by SIGINT, so that a shell's loop ends with it, or with 143 after SIGTERM; ranks exit with 0.
    """
    alone, result = "RANK" not in os.environ, None
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("rlkit").setLevel(logging.ERROR)  # rank 0 warns for all ranks
    call: Callable[..., X | None] = _with_short_errors
    if not alone:
        from torch.distributed.elastic.multiprocessing.errors import record

        call = record(_with_short_errors)
    try:
        result = call(script, *args)
    except KeyboardInterrupt as stopped:
        number = getattr(stopped, "number", None)  # of rlkit.ranks.Stopped, after the save; else nothing is saved
        if number not in (None, signal.SIGINT) and alone:
            sys.exit(128 + number)
        if alone and not (number is None and _given(args).get("debug")):
            sys.excepthook = lambda *_: None if number else sys.stderr.write("KeyboardInterrupt\n")
            raise KeyboardInterrupt from None  # Python ends by SIGINT for this type only, not for a subclass
        if number is None:
            raise
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()  # the store lives in rank 0, and others may still need it
            dist.destroy_process_group()
    return result


def _with_short_errors(script: Callable[..., X], *args: Any) -> X:
    given = _given(args)
    try:
        return script(*args)
    except (ValueError, OSError, ImportError) as error:
        path = error.filename if isinstance(error, OSError) else None
        of_folder = path is not None and _inside(path, given.get("output"))
        started = any(note.startswith(TRAINING) for note in getattr(error, "__notes__", ()))
        if (started and not of_folder) or given.get("debug"):
            raise
        text = (
            str(error) if isinstance(error, ImportError) else " ".join(str(error).split())
        )  # an ImportError may hold a user's traceback
        if isinstance(error, OSError) and error.strerror and path is not None:
            text = f"{path}: {error.strerror}"
        _fail(spelled(text or type(error).__name__, args[0] if args else None))


def _given(args: Sequence[Any]) -> dict[str, Any]:
    """The flags of a script by name, if its first argument has them."""
    return dict(flags_of(args[0])) if args and is_dataclass(args[0]) else {}


def _inside(path: str, folder: Path | None) -> bool:
    """Whether `path` is `folder`, in it, or on the way to it."""
    if folder is None:
        return False
    here, there = Path(path).absolute(), Path(folder).absolute()
    return here.is_relative_to(there) or there.is_relative_to(here)


def flags_of(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of every flag, e.g. ("group_size", 8), ("parallel.tp", 1); of a class, the value is the default."""
    hints = get_type_hints(settings if isinstance(settings, type) else type(settings), include_extras=True)
    for f in fields(settings):
        hint, notes = hints[f.name], getattr(hints[f.name], "__metadata__", ())
        value = getattr(settings, f.name, get_args(hint)[0] if notes else hint)
        if is_dataclass(value):
            flat = any(note is FLAT for note in notes)
            yield from flags_of(value, prefix if flat else f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value


def spelled(message: str, settings: Any) -> str:
    """The message with field names in backquotes spelled as flags: `group_size` becomes --group-size."""
    if not is_dataclass(settings):
        return message
    names = sorted((name for name, _ in flags_of(settings)), key=lambda name: "." not in name)  # without a prefix wins
    flags = {name.rpartition(".")[2]: f"--{name.replace('_', '-')}" for name in names}
    return re.sub(r"`(\w+)`", lambda found: flags.get(found[1], found[0]), message)


def _copy(argv: list[str]) -> None:
    scripts = [name for name in COMMANDS if name != "copy"]
    if len(argv) != 2 or argv[0] not in scripts:
        _fail(f"usage: rlkit copy SCRIPT FILE.py, where SCRIPT is one of {', '.join(scripts)}")
    target = Path(argv[1])
    try:
        with target.open("x") as file:
            file.write(Path(__file__).with_name(f"{argv[0]}.py").read_text())
    except OSError as error:
        _fail(f"{target}: {error.strerror}")
    _print(f"{target}: run it with python {target} --help, or torchrun {target} ...")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _fail(text: str) -> NoReturn:
    sys.stderr.write(f"error: {text}\n")
    raise SystemExit(2) from None
