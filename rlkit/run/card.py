"""The model card: `README.md` in an exported model's folder, from what its run left, so that `hf upload` is all."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit import advantages, losses
from rlkit._text import masked, printable
from rlkit.run.folder import CONFIG, CURVES, read_args, read_lines
from rlkit.run.meanings import meaning_of

Row = Mapping[str, Any]
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_NAMES = {
    "grpo": "GRPO", "ppo": "PPO", "sft": "supervised fine-tuning", "dpo": "preference optimization on pairs",
    "kto": "preference optimization on labelled responses", "reward_model": "a pairwise reward model",
    "distill": "distillation",
}  # fmt: skip
_SETTINGS = (
    "lr", "lr_schedule", "warmup_steps", "prompts_per_step", "group_size", "minibatches", "epochs", "batch_size",
    "temperature", "max_new_tokens", "kl_coef", "entropy_coef", "beta", "adapter", "lora_rank", "max_norm", "dtype",
    "seed",
)  # fmt: skip


def write_card(run: Path, model: Path, *, step: int | None = None) -> None:
    """Write the card of the model in the folder `model`, with the run's curves. `step`: the model is of that step."""
    if (run / CURVES).exists():
        shutil.copyfile(run / CURVES, model / "curves.png")
    (model / "README.md").write_text(card(run, step=step, curves=(run / CURVES).exists()), encoding="utf-8")


def card(run: Path, *, step: int | None = None, curves: bool = False) -> str:
    """The text of the card of a run's model, after its last step or another one."""
    args, rows = read_args(run), [row for row in _lines(run / "metrics.jsonl") if step is None or row["step"] <= step]
    starts = _lines(run / "starts.jsonl")
    script = str(args.get("script", "")).removesuffix(".py")
    last = max((row["step"] for row in rows), default=0)
    base, data = masked(str(args.get("model", "a model"))), _names(args.get("data"))
    what = _NAMES.get(script, "a loop of its own")
    trained = f"{_code(base)}, trained for {last:,} steps of {what} with [rlkit](https://pypi.org/project/rlkit-lm/)"
    parts = [_front(args, script), f"# {_line(run.resolve().name)}", trained + (f" on {data}." if data else ".")]
    if script == "reward_model":
        loads = "`AutoModelForSequenceClassification` of transformers loads it, of most vision models only rlkit"
        parts.append(f"It gives a response its reward: {loads}.")
    parts += [_scores(rows), "![Curves of the training](curves.png)" if curves else ""]
    parts += ["## Training", *_algorithm(args, script), _settings(args)]
    if starts:
        parts += ["## Command", _block("\n".join(_commands(starts))), _machine(starts[-1])]
        if (run / CONFIG).exists():
            parts.append(f"The run's `{CONFIG}` has all arguments: `rlkit {script} --config {CONFIG}` repeats it.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(args: Row, script: str) -> str:
    """The card's metadata, as the hub reads it: ids of the hub only."""
    base, data = args.get("model"), args.get("data")
    files = [data] if isinstance(data, str) else data or []
    sets = sorted({name.partition(":")[0] for name in files if _HUB.fullmatch(name.partition(":")[0])})
    here = [name for name in (base, *sets) if isinstance(name, str) and not Path(name).exists()]
    task = "text-classification" if script == "reward_model" else "text-generation"
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": task, "tags": ["rlkit", script or "rl"]}
    front |= {"base_model": base} if base in here and _HUB.fullmatch(base) else {}
    front |= {"datasets": found} if (found := [name for name in sets if name in here]) else {}
    lines = [f"{name}: {json.dumps(value)}" for name, value in front.items()]  # JSON is YAML
    return "\n".join(["---", *lines, "---"])


def _scores(rows: Sequence[Row]) -> str:
    """A table of the held-out numbers before the training, and after the last step."""
    held_out = [row for row in rows if any(name.startswith("eval/") for name in row)]
    if not held_out:
        return ""
    last = held_out[-1]
    shown = [last] if len(held_out) == 1 else [held_out[0], last]
    names = [name for name in last if name.startswith("eval/") and not name.endswith("_se")]
    head = " | ".join(f"step {row['step']}" for row in shown)
    lines = [f"| held-out data | {head} |", "|---|" + "---|" * len(shown)]
    for name in names:
        unit = found.unit if (found := meaning_of(name)) and found.unit != "as above" else ""
        lines.append(
            f"| `{name}`{f' ({unit})' if unit else ''} | " + " | ".join(_number(row, name) for row in shown) + " |"
        )
    return "\n".join(lines)


def _number(row: Row, name: str) -> str:
    """The value, with its 95% confidence interval where the run has a standard error."""
    value, error = row.get(name), row.get(f"{name}_se")
    if not isinstance(value, int | float):
        return ""
    return f"{value:.4g}" + (f" ± {1.96 * error:.2g}" if isinstance(error, int | float) else "")


def _algorithm(args: Row, script: str) -> Iterator[str]:
    """What was minimized: the equations of the functions, from their docstrings."""
    loss = str(args.get("loss", ""))
    if ":" in loss:
        yield f"The loss is a function of the user, {_code(loss)}."
    own = {"apo_zero": "kto", "cpo": "dpo"}.get(loss, loss) if script == "dpo" else loss
    named = {
        "grpo": ((advantages, str(args.get("baseline"))), (losses, own)), "ppo": ((advantages, "gae"), (losses, own)),
        "dpo": ((losses, own),), "kto": ((losses, "kto_unpaired"),), "reward_model": ((losses, "bradley_terry"),),
        "distill": ((losses, own),),
    }.get(script, ())  # fmt: skip
    for module, name in named:
        text = inspect.getdoc(getattr(module, name, None)) or ""
        if equation := re.search(r"^(    \S.*\n(?:    .*\n)*)", text, re.MULTILINE):
            title = " ".join(text.partition("\n\n")[0].split())
            source = re.search(r"^Reference: (.*(?:\n .*)*)", text, re.MULTILINE)
            reference = f" ({' '.join(source[1].split()).rstrip('.')})" if source else ""
            yield f"`{module.__name__}.{name}`: {title.rstrip('.')}{reference}."
            yield _block(inspect.cleandoc(equation[1]))
    if script == "sft":
        yield _block("loss = -mean over the tokens of the responses of log p(token | what is before it)")
    for name, title in (("advantage", "Advantages per token"), ("teacher", "Teacher"), ("reward", "Reward")):
        if args.get(name):
            yield f"{title}: {_names(args[name])}."


def _settings(args: Row) -> str:
    given = [f"`{name}` {args[name]}" for name in _SETTINGS if args.get(name) not in (None, False, 0, "")]
    return ", ".join(given) + "." if given else ""


def _commands(starts: Sequence[Row]) -> list[str]:
    found = [str(start.get("command") or "") for start in starts]
    return [*dict.fromkeys(printable(command) for command in found if command)] or [
        "(of a notebook, or of several nodes)"
    ]


def _machine(start: Row) -> str:
    machine, versions = start.get("machine") or {}, start.get("versions") or {}
    gpus = machine.get("gpus") or []
    where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine.get('cpu', 'CPU')}, {machine.get('cores', '?')} cores"
    ranks = f", {start['ranks']} ranks" if start.get("ranks", 1) > 1 else ""
    return _line(f"On {where}{ranks}, with " + ", ".join(f"{name} {x}" for name, x in versions.items()) + ".")


def _names(given: Any) -> str:
    return ", ".join(_code(name) for name in ([given] if isinstance(given, str) else given or []))


def _code(text: Any) -> str:
    """The text as a code span: no markup in it is read."""
    return f"`{_line(masked(str(text))).replace('`', chr(39))}`"


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _lines(path: Path) -> Sequence[Row]:
    return read_lines(path) if path.exists() else ()
