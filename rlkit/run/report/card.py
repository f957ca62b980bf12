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
from rlkit._util.text import masked, printable
from rlkit.run.folder import CONFIG, CURVES, read_args, read_lines
from rlkit.run.history import best, compare_answers, peak_memory, read_starts, seen_text
from rlkit.run.report.meanings import meaning_of, set_of

Row = Mapping[str, Any]
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_NAMES = {
    "grpo": "GRPO", "ppo": "PPO", "sft": "supervised fine-tuning", "dpo": "preference optimization on pairs",
    "kto": "preference optimization on labelled responses", "reward_model": "a pairwise reward model",
    "distill": "distillation",
}  # fmt: skip
_FROM_BASE = ("license", "license_name", "license_link", "base_model")  # of a base's own card
_MOST_READ, _MOST_SHOWN, _ANSWERS = 100_000, 400, 2  # characters of a card and of an answer, and prompts
_SETTINGS = (
    "lr", "lr_schedule", "warmup_steps", "prompts_per_step", "group_size", "minibatches", "epochs", "batch_size",
    "temperature", "max_new_tokens", "kl_coef", "entropy_coef", "beta", "adapter", "lora_rank", "max_norm", "dtype",
    "yarn", "seed",
)  # fmt: skip


def write_card(run: Path, model: Path, *, step: int | None = None) -> None:
    """Write the card of the model in the folder `model`, with the run's curves. `step`: the model is of that step."""
    if (run / CURVES).exists():
        shutil.copyfile(run / CURVES, model / "curves.png")
    (model / "README.md").write_text(card(run, step=step, curves=(run / CURVES).exists()), encoding="utf-8")


def card(run: Path, *, step: int | None = None, curves: bool = False) -> str:
    """The text of the card of a run's model, after its last step or another one."""
    args, rows = read_args(run), [row for row in _lines(run / "metrics.jsonl") if step is None or row["step"] <= step]
    starts = [start for start in read_starts(run) if step is None or start["step"] < step]
    script = str(args.get("script", "")).removesuffix(".py")
    last = max((row["step"] for row in rows), default=0)
    base, data = masked(str(args.get("model", "a model"))), _names(args.get("data"))
    method = _NAMES.get(script, "a loop of its own")
    trained = f"{_code(base)}, trained for {last:,} steps of {method} with [rlkit](https://pypi.org/project/rlkit-lm/)"
    parts = [_front(args, script), f"# {_line(run.resolve().name)}", trained + (f" on {data}." if data else ".")]
    if script == "reward_model":
        loads = "`AutoModelForSequenceClassification` of transformers loads it, of most vision models only rlkit"
        parts.append(f"It gives a response its reward: {loads}.")
    parts += [_scores(rows), *_answers(run, last), "![Curves of the training](curves.png)" if curves else ""]
    parts += ["## Training", *_algorithm(args, script), _settings(args), *_data(args, rows, starts)]
    if starts:
        parts += ["## Command", _block("\n".join(_commands(starts))), *_resumed(starts, curves), _machine(starts[-1])]
        if (run / CONFIG).exists():
            which = "those of its last start" if any(start["changed"] for start in starts) else "all arguments"
            parts.append(f"The run's `{CONFIG}` has {which}: `rlkit {script} --config {CONFIG}` repeats it.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(args: Row, script: str) -> str:
    """The card's metadata, as the hub reads it: ids of the hub only, and the license of the base where it is known."""
    base, data = args.get("model"), args.get("data")
    files = [data] if isinstance(data, str) else data or []
    sets = sorted({name.partition(":")[0] for name in files if _HUB.fullmatch(name.partition(":")[0])})
    here = [name for name in (base, *sets) if isinstance(name, str) and not Path(name).exists()]
    task = "text-classification" if script == "reward_model" else "text-generation"
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": task, "tags": ["rlkit", script or "rl"]}
    front |= {"base_model": base} if base in here and _HUB.fullmatch(base) else {}
    of_base = _of_base(str(base)) if base else {}
    front |= {name: value for name, value in of_base.items() if name not in front}
    front |= {"datasets": datasets} if (datasets := [name for name in sets if name in here]) else {}
    lines = [f"{name}: {json.dumps(value)}" for name, value in front.items()]  # JSON is YAML
    return "\n".join(["---", *lines, "---"])


def _of_base(base: str) -> dict[str, str]:
    """License and `base_model` of a model: of its own card, if it is here, and of its place in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(base)
    if not folder.is_dir():
        cached = try_to_load_from_cache(base, "README.md") if _HUB.fullmatch(base) else None
        folder = Path(cached).parent if isinstance(cached, str) else folder
    path = folder / "README.md"
    text = path.open(encoding="utf-8", errors="replace").read(_MOST_READ) if path.is_file() else ""
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    lines = re.findall(
        rf"^({'|'.join(_FROM_BASE)}):\s+(?:- )?[\"']?([^\n\"']+)", front[1] if front else "", re.MULTILINE
    )
    fields = {name: _line(value)[:200] for name, value in lines}
    if cached_as := re.search(r"models--([\w.-]+)--([\w.-]+)/snapshots/", str(folder.resolve())):
        fields["base_model"] = f"{cached_as[1]}/{cached_as[2]}"
    if not _HUB.fullmatch(fields.get("base_model", "a/b")):
        del fields["base_model"]
    return fields


def _scores(rows: Sequence[Row]) -> str:
    """A table of the held-out numbers of each set, before the training and after the last step."""
    held_out = [row for row in rows if any(name.startswith("eval/") for name in row)]
    if not held_out:
        return ""
    last = held_out[-1]
    columns = [last] if len(held_out) == 1 else [held_out[0], last]
    names = [name for name in last if name.startswith("eval/") and not name.endswith("_se")]
    head = " | ".join(f"step {row['step']}" for row in columns)
    sets = {set_of(name) for name in names} - {""}
    title = "| set | held-out data |" if sets else "| held-out data |"
    lines = [f"{title} {head} |", "|---|" + "---|" * (len(columns) + bool(sets))]
    for name in sorted(names, key=set_of):
        unit = meaning.unit if (meaning := meaning_of(name)) and meaning.unit != "as above" else ""
        cell = f"| {_code(set_of(name)) if set_of(name) else 'all'} " * bool(sets)
        short = name.replace(f"eval/{set_of(name)}/", "eval/", 1) if set_of(name) else name
        numbers = " | ".join(_number(row, name) for row in columns)
        lines.append(f"{cell}| `{short}`{f' ({unit})' if unit else ''} | {numbers} |")
    return "\n".join(lines)


def _answers(run: Path, last: int) -> Iterator[str]:
    """Held-out prompts with their answers before and after, if the last evaluation is of the model's step."""
    tally = compare_answers(run, most=_ANSWERS)
    if tally is None or tally.steps[1] != last:
        return
    way = "greedy" if "greedy" in tally.kind else "sampled"
    yield (
        f"Of the held-out prompts, {tally.better:,} have a higher reward after the training ({way}), {tally.worse:,} a "
        f"lower one, {tally.equal:,} the same."
    )
    for pair in tally.answers:
        both = [("before", pair.before), ("after", pair.after)]
        said = [f"{name}, reward {row.get('reward')}: {_short(row.get('completion'))}" for name, row in both]
        yield _block("\n".join([f"prompt: {_short(pair.prompt)}", *said]))


def _short(text: Any) -> str:
    """The text in one line, of a long one the end: of a prompt the question, of an answer the result."""
    line = _line(str(text))
    return line if len(line) <= _MOST_SHOWN else f"... {line[-_MOST_SHOWN:]}"


def _data(args: Row, rows: Sequence[Row], starts: Sequence[Row]) -> Iterator[str]:
    """How many rows there were, what was seen of them, the best step, and the memory that it took."""
    amounts, top = seen_text(args, rows, starts), best(args, rows)
    size = next((f"{start['rows']:,} rows. " for start in reversed(starts) if start.get("rows")), "")
    parts = [f"{size}Seen: {amounts}." if amounts else size.rstrip()]
    parts += [f"Best `{top[0]}`: {top[1]:.4g}, after step {top[2]}." if top else ""]
    parts += [f"Peak memory: {memory}." if (memory := peak_memory(rows, starts)) else ""]
    if text := " ".join(filter(None, parts)):
        yield text


def _resumed(starts: Sequence[Row], curves: bool) -> Iterator[str]:
    """The steps after which the run went on with other arguments."""
    for start in (start for start in starts if start["changed"]):
        changed = [f"{_code(name)} {_code(old)} -> {_code(new)}" for name, (old, new) in start["changed"].items()]
        yield f"Resumed after step {start['step']:,} with {', '.join(changed)}."
    if curves and any(start["changed"] for start in starts):
        yield "A dashed line in the curves is such a step."


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
    term = {"apo_zero": "kto", "cpo": "dpo"}.get(loss, loss) if script == "dpo" else loss
    named = {
        "grpo": ((advantages, str(args.get("baseline"))), (losses, term)), "ppo": ((advantages, "gae"), (losses, term)),
        "dpo": ((losses, term),), "kto": ((losses, "kto_unpaired"),), "reward_model": ((losses, "bradley_terry"),),
        "distill": ((losses, term),),
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
    settings = [f"`{name}` {args[name]}" for name in _SETTINGS if args.get(name) not in (None, False, 0, "")]
    return ", ".join(settings) + "." if settings else ""


def _commands(starts: Sequence[Row]) -> list[str]:
    commands = [str(start.get("command") or "") for start in starts]
    return [*dict.fromkeys(printable(command) for command in commands if command)] or [
        "(of a notebook, or of several nodes)"
    ]


def _machine(start: Row) -> str:
    machine, versions = start.get("machine") or {}, start.get("versions") or {}
    gpus = machine.get("gpus") or []
    where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine.get('cpu', 'CPU')}, {machine.get('cores', '?')} cores"
    ranks = f", {start['ranks']} ranks" if start.get("ranks", 1) > 1 else ""
    return _line(f"On {where}{ranks}, with " + ", ".join(f"{name} {x}" for name, x in versions.items()) + ".")


def _names(names: Any) -> str:
    return ", ".join(_code(name) for name in ([names] if isinstance(names, str) else names or []))


def _code(text: Any) -> str:
    """The text as a code span: no markup in it is read."""
    return f"`{_line(masked(str(text))).replace('`', chr(39))}`"


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _lines(path: Path) -> Sequence[Row]:
    return read_lines(path) if path.exists() else ()
