"""The command `rlkit`, and the command line of every script: flags are parsed, errors are printed in one line.

    rlkit grpo --model PATH_OR_HUB_ID --data train.jsonl --reward my_rewards.py:score
    rlkit grpo --help                             every flag, with its default
    rlkit copy grpo my_grpo.py                    copy the script to a file of your own
    torchrun --nproc-per-node 8 -m rlkit.scripts.grpo --parallel.tp 2 ...

This module does not import torch, so that `--help` and errors in flags are fast.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import is_dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, NoReturn, TypeVar

from rlkit._util.ranks import is_first, launched
from rlkit._util.text import Explained, masked, printable
from rlkit.compat import flags as foreign
from rlkit.run.console import TRAINING, encode_anything, say, warnings_that_fit, with_command, wrapped
from rlkit.run.cores import SPINS
from rlkit.run.signals import keep_interrupt, resume_command
from rlkit.scripts import config, translate
from rlkit.scripts.flags import (
    CONFIG,
    FLAT,
    Flag,
    assigned,
    flags_of,
    has_config,
    help_text,
    is_flag,
    list_flags,
    script_of,
    wrong_words,
)
from rlkit.settings import collected

X = TypeVar("X")
Flat = Annotated[X, FLAT]  # a field of settings whose flags have no prefix

TRAINERS = {
    "grpo": "reinforcement learning without a critic: GRPO and its variants, synchronous or asynchronous",
    "ppo": "reinforcement learning with a critic: PPO",
    "distill": "distillation from teachers on the student's own samples, with or without a reward",
    "sft": "supervised fine-tuning on conversations",
    "dpo": "preference optimization on pairs: DPO and its variants",
    "kto": "preference optimization on single responses, each labelled good or bad",
    "reward_model": "train a reward model on pairs",
}
TOOLS = {
    "data": "what a data file is: its form, a rendered row, lengths, wrong rows",
    "eval": "measure a model on held-out data, without a run",
    "sweep": "search for the best values of a command's flags (Optuna)",
    "plan": "what fits on how many GPUs, and the flags for it",
    "chat": "talk to the model of a run in the terminal",
    "plot": "draw or compare the curves of run folders",
    "report": "write or serve the report page of a run, or of several",
    "patch": "keep the weights of a server on another machine, by the changes of each step",
    "track": "send a run to Weights & Biases, MLflow, TensorBoard or Trackio",
}
COMMANDS = TRAINERS | TOOLS | {"copy": "copy a script to a file of your own"}


def main(argv: list[str] | None = None) -> None:
    """`rlkit COMMAND ...`."""
    encode_anything()
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["help"] or (argv[1:] and argv[0] in ("-h", "--help")):  # rlkit help grpo lr
        argv = [*argv[1:2], "--help", *argv[2:]]
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
        end = "rlkit COMMAND --help lists its flags, --help WORD those about it; rlkit --version."
        return say("\n".join(["usage: rlkit COMMAND ...", "", *lines, "", end]))
    if argv[0] in ("-V", "--version", "version"):
        return _print(f"rlkit {importlib.import_module('rlkit').__version__}")
    name, rest = argv[0].replace("-", "_"), argv[1:]
    if name not in COMMANDS:
        alias = f" ({foreign.COMMANDS[name]} is that here)" if name in foreign.COMMANDS else ""
        near = "" if alias else "".join(f" (perhaps {x})" for x in get_close_matches(name, COMMANDS, n=1))
        fail(f"no command {argv[0]!r}{alias or near}: choose one of {', '.join(COMMANDS)}")
    if name == "copy":
        return _copy(rest)
    sys.argv = [f"rlkit {argv[0]}", *rest]
    script = importlib.import_module(module_of(name))
    run(script.main, script.Args, script.__doc__)


def module_of(command: str) -> str:
    """The module of a command: a script that trains, or a tool."""
    return f"rlkit.scripts.{'tools.' if command in TOOLS else ''}{command}"


def run(script: Callable[[Any], X], kind: type, description: str | None, *, argv: Sequence[str] | None = None) -> Any:
    """Parse the flags of the dataclass `kind` and call `script(flags)`, as `on_ranks` does: a script's last line."""
    encode_anything()
    argv = translate.after_launcher(sys.argv[1:] if argv is None else argv)
    words = list(argv[: argv.index("--")] if "--" in argv else argv)  # after --: another command's
    if asked := [i for i, word in enumerate(words) if word in ("-h", "--help")]:
        _help(kind, description, takewhile(lambda word: not is_flag(word), words[asked[0] + 1 :]))
    places: dict[str, str] = {}
    try:
        with warnings_that_fit():
            argv, places, prints, notes = with_config(argv, kind)
            _refuse_wrong(argv, kind, complete=not prints)
        if prints:
            return _print(config.printed(argv, kind, notes))
        flags = parsed(argv, kind)
    except ValueError as error:
        fail(str(error) + config.where(str(error), places))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is loaded
    with warnings_that_fit():
        result = on_ranks(script, flags)
    untrained = result == _given([flags]).get("output")  # by 0 steps
    if isinstance(result, Path) and not untrained and is_first():
        if (page := result.parent / "report.html").exists():
            _print(f"report {page}")
        _print(f"exported {result}")
    return result


def with_config(argv: Sequence[str], kind: type) -> config.Expanded:
    """The command line with the flags of its --config among its words, and the data of its environment."""
    in_python = {name for name, _ in flags_of(kind)}
    whole = config.expand(argv, kind, explain=lambda name, names: _unknown(name, names, in_python))
    return whole._replace(words=with_own_data(whole.words, kind))


def with_own_data(argv: Sequence[str], kind: type) -> list[str]:
    """The command line, and where it has `--env` and no `--data`, the rows that the environment brings as its data."""
    flags = [flag for flag in list_flags(kind) if flag.name in ("data", "env", "model")]
    words, *_ = assigned(argv, flags)
    if len(flags) != 3 or "data" in words or len(words.get("env", ())) != 1:
        return list(argv)
    from rlkit.compat.libraries import check_named
    from rlkit.scripts.trial import function_of

    function_of("env", words["env"][0], load=check_named)
    return ["--data", *words["env"], *argv]


def parsed(argv: Sequence[str], kind: type) -> Any:
    """The flags of a command line as the dataclass `kind`; ValueError for the first wrong value or combination."""
    import tyro

    printed = io.StringIO()
    try:
        with collected() as faults, redirect_stderr(printed):
            flags: Any = tyro.cli(kind, args=argv, config=(tyro.conf.SuppressFixed,))
    except SystemExit:
        raise ValueError(_plain(printed.getvalue())) from None
    if faults:
        raise ValueError(spelled(faults[0], kind))
    return flags


def _help(kind: type, description: str | None, words: Iterable[str]) -> NoReturn:
    """Print the flags, of `words` those that have one of them, and exit with 0."""
    program = sys.argv[0] if sys.argv[0].startswith("rlkit ") else Path(sys.argv[0]).name
    width = min(get_terminal_size((80, 24)).columns, 100)
    try:
        _print(help_text(kind, description, program=program, width=width, words=[*words]))
        sys.stdout.flush()
    except ValueError as error:
        fail(str(error))
    except BrokenPipeError:  # rlkit grpo --help | head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    raise SystemExit(0)


def _refuse_wrong(argv: Sequence[str], kind: type, *, complete: bool = True) -> None:
    """Refuse flags that the script does not have, wrong values and other systems' names: all of them at once.

    Missing flags are refused if the command line is to be `complete`.
    """
    words = argv[: argv.index("--")] if "--" in argv else argv  # what follows is another command's
    flags = list(list_flags(kind))
    aliases = {alias for flag in flags for alias in flag.aliases}
    names, in_python = {flag.name for flag in flags}, {name for name, _ in flags_of(kind)}
    _refuse_assignments(words, names)
    names |= {flag.name for flag in CONFIG if has_config(flags)}
    faults, ours_only = {}, True
    translated = translate.translate(asked := translate.options(words), flags, script_of(kind))
    alone = next((flag for flag in flags if flag.positional and flag.name != "command"), None)
    for word, value in zip(words, [*words[1:], ""]):
        typed = word.split("=")[0].lstrip("+")
        name = typed.lstrip("-").replace("-", "_")
        matches = names & {name, name.removeprefix("no_"), name.replace(".no_", ".")}
        short = is_flag(word) and word[1:2] != "-" and len(name) > 1 and typed not in aliases
        no_flag = word.startswith("--") and (not matches or (alone and name == alone.name))
        ours = foreign.VALUES.get(name, {}).get(value, "") if word.startswith("--") else ""
        if short and matches:
            faults[typed] = f"needs two dashes: -{typed}"
        elif short or no_flag or translate.is_assignment(word):
            faults[typed] = _unknown(translate.long_name(name, asked), names, in_python, translated)
            if alone and name in (alone.name, *foreign.OF_RUN):
                example = word.partition("=")[2] or (value if value and not is_flag(value) else "runs/grpo")
                faults[typed] = f"is no flag: give {alone} without one, as in {sys.argv[0]} {shlex.quote(example)}"
            ours_only = ours_only and not foreign.answer(name, names) and bool(_elsewhere(name, names))
        elif ours and not ours.endswith(f":{value}"):  # a name of ours, too: the loader asks "did you mean"
            faults[f"{typed} {value}"], ours_only = f"is {ours} here", False
    unknown = bool(faults)
    faults = faults or wrong_words(argv, kind)
    if not faults or ("missing" in faults and not complete):
        return
    rest = ""
    if "command" in names and "--" not in argv:
        rest = "; the command to run comes after --, as in: rlkit sweep --log-range lr 1e-6 1e-4 -- rlkit grpo ..."
    elif unknown and not ours_only:
        rest = "; --help WORD finds flags by a word" if "model" in names else "; --help lists the flags"
    elif "missing" in faults:
        place = "--resume" in words and _kept_args(words, flags)
        rest = f"; a resumed run takes its flags again: {place}" if place else "; --help lists the flags"
    _fail_for(faults, "not known here" if unknown else "wrong", rest,
              _translated(translated, kind) if translated and unknown and len(faults) > 1 else ())  # fmt: skip


def _fail_for(faults: Mapping[str, str], are: str, rest: str, lines: Sequence[str]) -> NoReturn:
    """End with the fault of each flag: one in a line, several in a table, with `lines` below it."""
    if len(faults) == 1:
        fail("{} {}".format(*next(iter(faults.items()))) + rest)
    table = [f"  {flag:{max(map(len, faults))}}  {fault}" for flag, fault in faults.items()]
    fail("\n".join([f"{len(faults)} flags are {are}{rest}", *table, *lines]))


def _translated(translation: translate.Translation, kind: type) -> list[str]:
    """The command to type for one of another system, with what it lacks."""
    notes = [*translation.notes]
    try:
        with redirect_stderr(io.StringIO()):
            absent = wrong_words(translation.words(), kind)
            notes += [f"it {name} {fault}" if name != "missing" else f"add {fault}" for name, fault in absent.items()]
            _ = parsed(translation.words(), kind) if not absent else None
    except ValueError as error:
        notes.append(str(error))
    last = f", in the last {'lines' if len(translation.defaults) > 4 else 'line'} {translation.system}'s defaults"
    return [
        f"  The command of {translation.system} is here{last if translation.defaults else ''}:",
        *(f"    {line}" for line in translation.command(config.program(kind))),
        *(f"  note: {note}" for note in notes),
    ]


def _kept_args(words: Sequence[str], flags: Sequence[Flag]) -> str | None:
    """Where the flags of the run folder on a command line are, if there is one."""
    default = next((flag.default for flag in flags if flag.name == "schedule.output" or flag.name == "output"), None)
    folders = [after if word == "--output" else word.partition("=")[2]
             for word, after in zip(words, [*words[1:], ""]) if word.partition("=")[0] == "--output"]  # fmt: skip
    folder = Path(folders[-1] if folders else str(default))
    if (folder / "config.yaml").is_file():
        return f"add --config {shlex.quote(str(folder / 'config.yaml'))}"
    return f"they are in {folder / 'args.json'}" if (folder / "args.json").is_file() else None


def _refuse_assignments(argv: Sequence[str], names: set[str]) -> None:
    """Refuse `model=m data=d`, flags as Hydra writes them, in one line with what to write."""
    pairs = []
    for before, word in zip(["", *argv], argv):
        name, equals, value = word.lstrip("+").partition("=")
        of_flag = is_flag(before) and "=" not in before  # the value of a flag, which may hold a `=`
        if equals and not of_flag and name.replace("-", "_") in names and not is_flag(word):
            pairs.append((word, f"--{name.replace('_', '-')} {shlex.quote(value)}"))
    if pairs:
        typed, better = (" ".join(words) for words in zip(*pairs))
        fail(f"{typed} {'is' if len(pairs) == 1 else 'are'} no flag{'s' * (len(pairs) > 1)}: write {better}")


def _unknown(name: str, names: set[str], in_python: set[str], of: translate.Translation | None = None) -> str:
    """What is wrong with a flag that is not in `names`, and what to write."""
    system = of.system if of else None
    if name in in_python:
        return "is set in Python only"
    there = _elsewhere(foreign.our_name(name, system), names) or ""  # a critic's option in grpo
    there = there if there.startswith("is for rlkit") else ""
    return foreign.answer(name, names, system) or _elsewhere(name, names) or there or _nearest(name, names)


def _elsewhere(name: str, names: set[str]) -> str | None:
    """The commands that have a flag which this one, with the flags `names`, has not."""
    if "command" in names:
        return None
    args_of = {script: importlib.import_module(module_of(script)).Args for script in TRAINERS}
    scripts = [script for script in TRAINERS if any(flag.name == name for flag in list_flags(args_of[script]))]
    if len(scripts) == len(TRAINERS):
        return "is a flag of the commands that train"
    return f"is for rlkit {' and '.join(filter(None, (', '.join(scripts[:-1]), scripts[-1])))}" if scripts else None


def _nearest(name: str, names: set[str]) -> str:
    near = [f"--{close.replace('_', '-')}" for close in get_close_matches(name, names, n=2, cutoff=0.75)]
    return f"is no flag: perhaps {' or '.join(near)}" if near else "is no flag"


def _plain(box: str) -> str:
    """The words of a message of tyro, in whatever box and colour: of types that `wrong_words` does not read."""
    words = re.sub(r"\x1b\[[0-9;]*m", "", box).split()
    return " ".join(word for word in words if any(map(str.isalnum, word))) + "; --help lists the flags"


def on_ranks(script: Callable[..., X], *args: Any) -> X | None:
    """Call `script(*args)`, as the last line of a script: ranks leave together, or a failed one ends the job.

    ValueError, OSError and ImportError (in flags, data or files) before training starts are printed to stderr as one
    line, `error: ...`, with exit code 2; so is, at any time, an OSError of the run folder. A reward function that fails
    in one process ends the run with its message and exit code 1, and so does an engine that is gone, also on several
    ranks. `--debug` shows the traceback; any other error has one.

    A rank that raises leaves at once; the others may be waiting for it in a collective. torchrun then ends them, and
    reports the first rank that failed, with its traceback, as the cause. After a stop request and the save, a plain
    process ends by SIGINT, so that a shell's loop ends with it, or with 143 after SIGTERM; ranks exit with 0.
    """
    alone, result, sys.excepthook = not launched(), None, _show_traceback
    before = {*threading.enumerate(), *_processes()}
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _show_in_thread
    if not is_first():
        logging.getLogger("rlkit").setLevel(logging.ERROR)  # rank 0 warns for all ranks
    call: Callable[..., X | None] = _with_short_errors
    if not alone:
        from torch.distributed.elastic.multiprocessing.errors import record

        call = record(_with_short_errors)
    try:
        result = call(script, *args)
    except KeyboardInterrupt as stopped:
        number = getattr(stopped, "number", None)  # of rlkit._util.ranks.Stopped, after the save; else nothing is saved
        if number not in (None, signal.SIGINT) and alone:
            sys.exit(128 + number)
        keep_interrupt()
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
    report_left(before)
    return result


def _processes() -> list[Any]:
    multiprocessing = sys.modules.get("multiprocessing")
    return [] if multiprocessing is None else multiprocessing.active_children()


def report_left(before: set[Any]) -> None:
    """Name the threads and processes, since `before`, that a user's code has started and that Python waits for."""
    new = [x for x in (*threading.enumerate(), *_processes()) if x not in before and not x.daemon]
    ours = [x for x in new if x.name.startswith("rlkit-") or type(x).__module__.startswith("rlkit.")]
    names = [x.name for x in new if x not in ours]  # ours end at once
    if names and is_first():
        text = f"waiting for what a reward or environment has started: {', '.join(names)} (Ctrl-C ends it)"
        sys.stderr.write(wrapped(text, sys.stderr) + "\n")


def _show_traceback(_kind: type[BaseException], error: BaseException, _frames: Any) -> None:
    """Python's traceback without control characters: a message may hold what a model wrote."""
    if sys.stderr is not None:
        sys.stderr.write(printable(masked("".join(traceback.format_exception(error)))))


def _show_in_thread(args: threading.ExceptHookArgs) -> None:
    """The same of a thread."""
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        args.exc_value.add_note(f"in thread {args.thread.name if args.thread else 'unknown'}")
        _show_traceback(args.exc_type, args.exc_value, args.exc_traceback)


def _with_short_errors(script: Callable[..., X], *args: Any) -> X:
    from rlkit.run.sync import one_loop

    flags = _given(args)
    try:
        with one_loop():
            return script(*args)
    except (ValueError, OSError, ImportError) as error:
        path = error.filename if isinstance(error, OSError) else None
        of_folder = path is not None and _inside(path, flags.get("output"))
        started = any(note.startswith(TRAINING) for note in getattr(error, "__notes__", ()))
        if flags.get("debug"):
            raise
        if _is_of_engine(error):
            on = with_command("go on from the last checkpoint", resume_command("--resume"), sys.stderr)
            more = [on] if started else []
            fail("\n  ".join([str(error), *more]), code=1 if started else 2)
        if started and not of_folder:
            raise
        # an ImportError may hold a user's traceback
        text = str(error) if isinstance(error, ImportError) else " ".join(str(error).split())
        if isinstance(error, OSError) and error.strerror and path is not None:
            text = f"{path}: {error.strerror}"
        fail(spelled(text or type(error).__name__, args[0] if args else None))
    except Explained as error:
        if flags.get("debug") or launched():
            raise
        lines = [spelled(str(error), args[0] if args else None), *getattr(error, "__notes__", ())]
        fail("\n  ".join([*lines, "--debug shows the traceback"]), code=1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError" or flags.get("debug") or launched():
            raise
        lines = [f"{str(error).partition('. ')[0]}: {LESS_MEMORY}", *getattr(error, "__notes__", ())]
        fail("\n  ".join(lines), code=1)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime" or flags.get("debug") or launched():
            raise
        fault = f"a library in Rust failed on a text: {' '.join(str(error).split())[:300]}"
        fail(f"{fault}: copy or download the model's tokenizer.json again", code=1)


LESS_MEMORY = (
    "lower --max-tokens (of a micro-batch) or --max-batch (of the local engine), or give "
    "--parallel.activation-checkpointing, --lora-rank or --optimizer muon; `rlkit plan` counts what fits"
)


def _is_of_engine(error: Exception) -> bool:
    """Whether the engine is gone or its answers are unusable: a traceback would say nothing more than the message."""
    engines = sys.modules.get("rlkit.rollout.engines")
    return engines is not None and isinstance(error, engines.EngineError)


def _given(args: Sequence[Any]) -> dict[str, Any]:
    """The flags of a script by name, if its first argument has them."""
    return dict(flags_of(args[0])) if args and is_dataclass(args[0]) else {}


def _inside(path: str, folder: Path | None) -> bool:
    """Whether `path` is `folder`, in it, or on the way to it."""
    if folder is None:
        return False
    here, there = Path(path).absolute(), Path(folder).absolute()
    return here.is_relative_to(there) or there.is_relative_to(here)


def spelled(message: str, settings: Any) -> str:
    """The message with field names in backquotes spelled as flags: `group_size` becomes --group-size."""
    if not is_dataclass(settings):
        return message
    names = sorted((name for name, _ in flags_of(settings)), key=lambda name: "." not in name)  # without a prefix wins
    flags = {name.rpartition(".")[2]: f"--{name.replace('_', '-')}" for name in names}
    return re.sub(r"`(\w+)`", lambda match: flags.get(match[1], match[0]), message)


def _copy(argv: list[str]) -> None:
    scripts = [name for name in COMMANDS if name != "copy"]
    usage = f"usage: rlkit copy SCRIPT FILE.py, where SCRIPT is one of {', '.join(scripts)}"
    if {"-h", "--help"} & {*argv}:
        return say(usage)
    name = argv[0].replace("-", "_") if argv else ""
    if argv and name not in scripts:
        near = "".join(f" (perhaps {x})" for x in get_close_matches(name, scripts, n=1))
        fail(f"no script {argv[0]!r}{near}: {usage}")
    if len(argv) != 2:
        fail(usage)
    target = Path(argv[1])
    if target.is_dir():
        fail(f"{target} is a folder: give a file, such as {target / f'my_{name}.py'}")
    if target.exists():
        fail(f"{target} is there already, and is not overwritten: give a new file, such as my_{name}.py")
    try:
        with target.open("x") as file:
            file.write((Path(__file__).parent / ("tools" if name in TOOLS else "") / f"{name}.py").read_text())
    except OSError as error:
        fail(f"{target}: {error.strerror}")
    say(f"{target}: run it with python {target} --help, or torchrun {target} ...")


def _print(text: str) -> None:
    sys.stdout.write(printable(text) + "\n")


def fail(text: str, *, code: int = 2) -> NoReturn:
    """Print `error: ...` to stderr, and exit: all errors that are one line end here."""
    if sys.stderr is not None:
        text = printable(masked(text))
        glue = "\x1f"  # no line of its own for "error:" before a long path; `printable` leaves no other one
        sys.stderr.write(wrapped(f"error:{glue}{text}", sys.stderr).replace(glue, " ") + "\n")
    raise SystemExit(code) from None
