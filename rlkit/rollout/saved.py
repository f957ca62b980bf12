"""What the steps of a run trained on, as files: save it, and train on it again without sampling.

    rlkit grpo ... --save-rollouts FOLDER
    rlkit grpo ... --from-rollouts FOLDER

A folder has one file of JSON Lines for each step, `step_000001.jsonl`, with one row for each trajectory:

    step group index       the step, the group's place in it, and the index of its row of the data
    prompt_ids ids mask logp versions     the streams of `rlkit.types.Trajectory`
    reward token_rewards score truncated continues role temperature      its other fields
    row info               the row of the data and `Trajectory.info`, as JSON texts
    experts support        arrays, where the engine gave them, in base64

`datasets.load_dataset("json", data_files="FOLDER/step_*.jsonl")` and `pandas.read_json(file, lines=True)` read them.
`origin.json` names the model, its tokenizer and the sampling, which must be those of a run that trains on them.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlkit._util import untrusted
from rlkit._util.files import explain_full_disk, replace_file
from rlkit._util.ranks import on_rank0
from rlkit.data.load import place_of_prompt
from rlkit.data.prompts import Prompt
from rlkit.rollout.groups import Group, compact
from rlkit.rollout.limits import varies
from rlkit.rollout.shared import Resend, from_first
from rlkit.settings import Rollouts
from rlkit.types import Support, Trajectory

_PLAIN = ("reward", "score", "truncated", "continues", "role", "temperature")
_INTEGERS = ("prompt_ids", "ids", "versions")
_SAMPLING = ("prompts_per_step", "group_size", "temperature", "top_p", "top_k", "min_p")
_FULL = "Free space there and resume: the step is sampled again."


def save_step(folder: Path, step: int, prompts: Sequence[Prompt], groups: Sequence[Sequence[Trajectory]]) -> None:
    """Write the groups of a step, with the prompt of each; an older file of this step is replaced.

    Errors: ValueError for a trajectory with images, which files of JSON do not hold.
    """
    rows = [
        _row(t, prompt) | {"step": step, "group": place}
        for place, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for t in compact(group)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = text.encode(errors="backslashreplace")
    with explain_full_disk("a step's rollouts", folder, needed=len(data), fix=_FULL):
        replace_file(_path(folder, step), data)


def load_step(folder: Path, step: int) -> tuple[list[Prompt], list[Group]]:
    """The prompts and groups of a step, bit for bit as `save_step` got them after `compact`.

    Errors: FileNotFoundError; ValueError for a damaged line.
    """
    path = _path(folder, step)
    prompts: list[Prompt] = []
    groups: list[Group] = []
    with path.open("rb") as file:
        for number, line in enumerate(untrusted.lines(file, path), 1):
            place = f"{path}, line {number}"
            try:
                row = untrusted.parsed(place, line)
                trajectory = _trajectory(row)
                if row["group"] == len(groups):
                    groups.append([])
                    prompts.append(Prompt(list(trajectory.prompt_ids), json.loads(row["row"]), row["index"]))
                if row["group"] != len(groups) - 1:
                    raise ValueError(f"group {row['group']} after {len(groups) - 1}")
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                fix = "it must be a line of --save-rollouts, in its place"
                raise ValueError(f"{place} is no saved sample ({type(error).__name__}: {error}): {fix}") from None
            groups[-1].append(trajectory)
    return prompts, [compact(group) for group in groups]


def _path(folder: Path, step: int) -> Path:
    return Path(folder) / f"step_{step:06d}.jsonl"


def _row(t: Trajectory, prompt: Prompt) -> dict[str, Any]:
    if t.images or t.later_images:
        raise ValueError(f"{place_of_prompt(prompt)}: `save_rollouts` does not hold images: drop it")
    row: dict[str, Any] = {"index": prompt.index, **{name: [*getattr(t, name)] for name in _INTEGERS}}
    row |= {"mask": [*map(bool, t.mask)], "logp": [float(f"{x:.9g}") for x in t.logp]}  # 9 digits hold an fp32
    row |= {name: getattr(t, name) for name in _PLAIN}
    row["token_rewards"] = None if t.token_rewards is None else [*t.token_rewards]
    row |= {name: json.dumps(x, default=str) for name, x in (("row", dict(prompt.row)), ("info", t.info))}
    arrays = {"experts": (t.experts,) if t.experts is not None else None, "support": t.support}
    return row | {name: x and [*map(_written, x)] for name, x in arrays.items()}


def _trajectory(row: dict[str, Any]) -> Trajectory:
    streams = {name: row[name] for name in (*_INTEGERS, *_PLAIN, "mask", "logp", "token_rewards")}
    experts, support = row["experts"], row["support"]
    return Trajectory(
        **streams, info=json.loads(row["info"]), experts=experts and _array(experts[0]),
        support=support and Support(*map(_array, support)),
    )  # fmt: skip


def _written(x: np.ndarray) -> dict[str, Any]:
    return {"dtype": str(x.dtype), "shape": [*x.shape], "data": base64.b64encode(x.tobytes()).decode()}


def _array(x: dict[str, Any]) -> np.ndarray:
    dtype = {name: name for name in ("int16", "int32", "float32")}[x["dtype"]]
    return np.frombuffer(base64.b64decode(x["data"]), dtype).reshape(x["shape"])


def origin(model: Any, tokenizer: Any, rollouts: Rollouts) -> dict[str, Any]:
    """What rollouts depend on: the model's name and sizes, a hash of the vocabulary, and the sampling."""
    config = model.config.get_text_config()
    sizes = f"{config.model_type}, {config.num_hidden_layers} layers of width {config.hidden_size}"
    entries = sorted(getattr(tokenizer, "get_vocab", dict)().items())
    return {
        "name": str(getattr(model.config, "_name_or_path", "") or "unnamed"),
        "model": f"{sizes}, {config.vocab_size} tokens",
        "tokenizer": hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16],
    } | {name: getattr(rollouts, name) for name in _SAMPLING}


def check_saved(rollouts: Rollouts, model: Any, tokenizer: Any, *, steps: int, resume: bool) -> None:
    """Make the folder of `save_rollouts`; refuse, on every rank, one that holds steps of another run.

    ValueError for a folder of `from_rollouts` of another model, tokenizer or sampling, or of fewer steps.
    """

    def check() -> None:
        if rollouts.save_rollouts is not None:
            _begin(Path(rollouts.save_rollouts), now, resume=resume)
        if rollouts.from_rollouts is not None:
            folder = Path(rollouts.from_rollouts)
            _check_origin(folder, now, flag="from_rollouts")
            if lacking := [step for step in range(1, steps + 1) if not _path(folder, step).is_file()]:
                fix = f"give `steps` {lacking[0] - 1}" if lacking[0] > 1 else "give the folder of --save-rollouts"
                raise ValueError(f"`from_rollouts` {folder} has no {_path(folder, lacking[0]).name}: {fix}")

    if rollouts.save_rollouts is not None or rollouts.from_rollouts is not None:
        now = origin(model, tokenizer, rollouts)
        on_rank0(check)


def _begin(folder: Path, now: dict[str, Any], *, resume: bool) -> None:
    begun = any(folder.glob("step_*.jsonl"))
    if begun and not resume:
        raise ValueError(f"`save_rollouts` {folder} holds the rollouts of a run: give a new folder")
    if begun:
        return _check_origin(folder, now, flag="save_rollouts")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "origin.json", json.dumps(now, indent=2).encode())


def _check_origin(folder: Path, now: dict[str, Any], *, flag: str) -> None:
    """ValueError for a folder whose rollouts are not what this run would have sampled at its start."""
    path = folder / "origin.json"
    if not path.is_file():
        raise ValueError(f"`{flag}` {folder} has no origin.json: give a folder of --save-rollouts")
    then = untrusted.read_json(path)
    then = then if isinstance(then, dict) else {}
    name = then.get("name")
    for key in ("model", "tokenizer", *_SAMPLING):
        if then.get(key) == now[key]:
            continue
        if key == "tokenizer":
            raise ValueError(f"`{flag}` {folder} was sampled with another tokenizer, that of {name}: its ids mislead")
        this = f"this model is {now[key]}" if key == "model" else f"`{key}` is {now[key]} here"
        sampled = f"by {name} ({then.get(key)})" if key == "model" else f"with {then.get(key)}"
        raise ValueError(f"`{flag}` {folder} was sampled {sampled}, and {this}: give the same one")


class SavedStream:
    """The saved steps of `folder` as the loop's stream of samples, in place of `rlkit.rollout.shared.SharedStream`."""

    def __init__(self, folder: Path, *, num_groups: int, on_group: Callable[..., None]) -> None:
        self._folder, self._num, self._version, self._on_group = folder, num_groups, 0, on_group
        self.prompts: list[Prompt] = []
        self.state: dict[str, Any] = {}
        self._equal = 0.0

    async def __aenter__(self) -> SavedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def advance(self, *, version: int) -> None:
        """The next step is that after `version` steps."""
        self._version = version

    async def take(self, resend: Resend | None = None) -> list[Group]:  # noqa: ARG002
        """The groups of the step, on every rank; rank 0 reads them."""
        step = self._version + 1

        async def read() -> tuple[list[Prompt], list[Group]]:
            return load_step(self._folder, step)

        self.prompts, groups = await from_first(read)
        for prompt, group in zip(self.prompts, groups, strict=True):
            self._on_group(prompt, group, step=step, kept=True)
        self.state = {"next": step * self._num, "waiting": [], "oldest": step}
        self._equal = sum(not varies(group) for group in groups) / max(1, len(groups))
        return groups

    def facts(self) -> dict[str, float]:
        """Metrics of the last `take`, as `SharedStream` has them."""
        return {"groups/dropped": 0.0, "groups/equal": self._equal}

    def saved(self, state: dict[str, Any]) -> None:
        """Nothing: the files stay."""
