"""A command line, or a YAML file, of another system as flags of a script: rlkit grpo with TRL's options prints the
command to type. The tables are `rlkit.compat.flags`, the sums `rlkit.compat.commands`. Does not import torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlkit._util.ranks import num_ranks
from rlkit.compat import flags as foreign
from rlkit.compat.commands import OFF, compute, is_on, machines, texts
from rlkit.scripts.flags import MAIN, Flag, assigned, complaint, is_flag

WIDTH = 76  # of the printed command, in any terminal
_LISTS = ("data", "eval_data", "reward", "lora_targets", "track", "stop")
_FILLED = re.compile(r"\w+:[A-Z]")


class Translation(NamedTuple):
    """The other system; its options, and its defaults that differ, as flags of ours; what to know of them; torchrun."""

    system: str
    flags: dict[str, list[str]]
    defaults: dict[str, list[str]]
    notes: list[str]
    launcher: str = ""

    def words(self) -> list[str]:
        """The flags and their values, as a command line has them."""
        return _words({**self.flags, **self.defaults})

    def command(self, program: str) -> list[str]:
        """The lines of the command, the other system's defaults in the last ones."""
        program = program.replace("rlkit ", f"{self.launcher} rlkit.scripts.", 1) if self.launcher else program
        blocks = [_folded([program, *_grouped(self.flags)]), _folded(_grouped(self.defaults))]
        lines = [line for block in blocks for line in block]
        return [
            f"{'    ' * bool(at)}{line}{' ' + chr(92) if at < len(lines) - 1 else ''}" for at, line in enumerate(lines)
        ]


def after_launcher(argv: Sequence[str]) -> Sequence[str]:
    """The words after `ray job submit ... --`, with which other systems start their commands."""
    submits = [*argv[:3]] == ["ray", "job", "submit"] and "--" in argv
    return argv[[*argv].index("--") + 1 :] if submits else argv


def options(argv: Sequence[str]) -> dict[str, list[str]]:
    """The options of a command line that may be another system's: names without dashes, and their values."""
    values_of: dict[str, list[str]] = {}
    last = ""
    for word in argv[: [*argv, "--"].index("--")]:
        if is_flag(word) or is_assignment(word):
            name, equals, value = word.lstrip("+-").partition("=")
            last = name.replace("-", "_")
            values_of[last] = [value] if equals else []
        elif last and not (values_of[last] and word.endswith(".py")):  # the script after a launcher's options
            values_of[last].append(word)
    return values_of


def long_name(name: str, names: Collection[str]) -> str:
    """The name of a short option of ColossalAI, where it stands beside one that no other system has."""
    return foreign.SHORT.get(name, name) if {"ibs", "rt", "tbs"} & {*names} else name


def is_assignment(word: str) -> bool:
    """Whether a word is `data.train_files=...`, as Hydra reads it, and no file with a weight."""
    name, equals, _ = word.lstrip("+").partition("=")
    if equals and name in foreign.BARE:
        return True
    file = Path(name).suffix.lower() in (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".gz", ".arrow", ".py")
    return bool(equals) and name.partition(".")[0] in foreign.PREFIXES and "." in name and ":" not in name and not file


def translate(asked: Mapping[str, list[str]], flags: Sequence[Flag], script: str) -> Translation | None:
    """The options of another system in `flags`; None where no name of the `asked` ones is another system's."""
    by_name = {flag.name: flag for flag in flags}
    asked = {long_name(name, asked): values for name, values in asked.items()}
    theirs = [name for name in asked if name not in by_name and f"no_{name}" not in by_name]
    system = foreign.system_of(theirs)
    if system is None:
        return None
    rows = {name if name in by_name else foreign.key_of(name, system) or name: values for name, values in asked.items()}
    made: dict[str, list[str]] = {}
    notes: list[str] = []
    for name, values in asked.items():
        for ours, words in _of_row(name, values, by_name, system).items():
            if ours == "eval_sampling" and ours in made:
                made[ours] = [",".join([*made[ours], *words])]
            elif ours != "reward" or name in by_name:  # another system's is computed
                made.setdefault(ours, words)
    computed, more = compute(system, script, rows, count_rows=count_rows, ranks=num_ranks())
    made |= {name: _of_values(name, values, by_name).get(name, values) for name, values in computed.items()}
    defaults, _, _ = assigned(foreign.DEFAULTS.get((system, script), "").split(), [*flags])
    for name, words in [*made.items()]:
        flag = by_name.get(name)
        if flag is None or computed.get(name) == []:
            made.pop(name)
        elif fault := complaint(flag.hint, words):
            made.pop(name)
            notes += [f"{flag} {' '.join(words)}: it {fault}"] * (
                words not in (["None"], ["null"])
            )  # the default there
        elif name == "minibatches" and words == [f"{flag.default}"]:
            made.pop(name)
    if "track_project" in made and "track" not in made:
        made.pop("track_project")
    made = {name: made[name] for name in (*(x for x in MAIN if x in made), *(x for x in made if x not in MAIN))}
    defaults = {name: words for name, words in defaults.items() if name not in {*made, *computed}}
    count, each = machines(rows)
    launcher = f"torchrun {f'--nnodes {count} ' * (count > 1)}--nproc-per-node {each} -m" if count * each > 1 else ""
    return Translation(system, made, defaults, [*notes, *more], launcher)


def _of_row(name: str, values: list[str], by_name: Mapping[str, Flag], system: str) -> dict[str, list[str]]:
    """The flags that one option stands for; none where it needs others, or has none."""
    if name in by_name:
        return _of_values(name, values, by_name)
    if (row := foreign.row_of(name, by_name, system)) is None or row[1].startswith("("):
        return {}
    flag, rule = row
    if rule.startswith("and --"):  # one value, or two, for two flags
        other = rule.removeprefix("and --").replace("-", "_")
        return _of_values(flag, values[:1], by_name) | _of_values(other, values[-1:], by_name)
    if _FILLED.fullmatch(rule):
        return {flag: [rule[:-1] + " ".join(values)]}
    if rule and not rule[0].isupper():
        return {flag: rule.partition(" (")[0].split()} if is_on(values) else {}
    return _of_values(flag, values, by_name)


def _of_values(name: str, values: list[str], by_name: Mapping[str, Flag]) -> dict[str, list[str]]:
    """The flag with its values as rlkit writes them, and the flags that a value stands for beside it."""
    flag = by_name.get(name)
    if flag is None:
        return {}
    if flag.hint is bool:
        with suppress(ValueError, IndexError):  # a size, as of Ulysses
            return {name: []} if float(values[0]) > 1 or values[0] == "1.0" else {}
        return {name: []} if is_on(values) else {}
    ours = [foreign.VALUES.get(name, {}).get(value, value) for value in (texts(values) if name in _LISTS else values)]
    if name == "track":
        ours = [value for value in ours if value.lower() not in (*OFF, "console", "all")]
    if name in ("save_steps", "eval_steps", "top_k") and ours[:1] == ["-1"]:
        ours = ["0"]
    if (
        (name == "lora_targets" and ours == ["all-linear"])
        or not ours
        or (ours[0].lower() in OFF - {"0", "no", "none"})
    ):
        return {}
    value, _, beside = ours[0].partition(" with --")
    if value.startswith(("rlkit ", "the default")):
        return {}
    if len(ours) == 1 and beside:
        other, *words = beside.split()
        return {name: [value.rstrip(",")]} | ({other.replace("-", "_"): words} if words else {})
    return {name: ours}


def count_rows(file: str) -> int | None:
    """The number of rows of a JSONL or Parquet file on this machine; None where it is another file, or none."""
    path = Path(file).expanduser()
    with suppress(OSError, ImportError, ValueError):
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return int(parquet.read_metadata(path).num_rows)
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return sum(bool(line.strip()) for line in lines)
    return None


def _grouped(flags: Mapping[str, list[str]]) -> list[str]:
    """Each flag with its values, quoted for a shell."""
    return [shlex.join(_words({name: values})) for name, values in flags.items()]


def _words(flags: Mapping[str, Iterable[str]]) -> list[str]:
    return [word for name, values in flags.items() for word in (f"--{name.replace('_', '-')}", *values)]


def _folded(parts: Sequence[str]) -> list[str]:
    """Lines of at most `WIDTH` characters where the parts allow it."""
    lines = [parts[0]] if parts else []
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < WIDTH - 6:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return lines
